"""Folders in timm's format: ``config.json`` and ``model.safetensors``.

timm builds its architectures where it is installed. Its plain ResNets are built without it: they are those of
transformers, under other names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from feddf.config.errors import first_line
from feddf.config.fuse_config import TeacherConfig
from feddf.fusing.beside import about, read_json
from feddf.fusing.feeding import assumed, by_hand
from feddf.fusing.teachers import PredictBatch, TeacherError, TrainedModel, file_hash, predicting
from feddf.runtime.packages import transformers
from feddf.saved.model import ModelSpec
from feddf.saved.model_folder import WEIGHTS, read_state
from feddf.types import State

RESNET = re.compile(r"resnet(18|34|50|101|152)(\.|$)")
NAMES = (
    (r"^(conv|bn)1\.", r"resnet.embedder.embedder.\1."),
    (r"^layer(\d)\.(\d+)\.", lambda found: f"resnet.encoder.stages.{int(found[1]) - 1}.layers.{found[2]}."),
    (r"\.(conv|bn)(\d)\.", lambda found: f".layer.{int(found[2]) - 1}.{found[1]}."),
    (r"\.downsample\.0\.", ".shortcut.conv."),
    (r"\.downsample\.1\.", ".shortcut.bn."),
    (r"\.conv\.", ".convolution."),
    (r"\.bn\.", ".normalization."),
    (r"^fc\.", "classifier.1."),
)
"""What timm calls the parts of a ResNet, and what transformers do."""


def of_timm(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return the model in a folder of timm's format."""
    folder = Path(config.path).expanduser()
    said, values, name = about(folder), read_json(folder / "config.json"), config.name or folder.resolve().name
    architecture, weights = str(values["architecture"]), folder / WEIGHTS
    if not weights.is_file():
        raise TeacherError(f"teacher {name}: {folder} has no {WEIGHTS}")
    if _timm() is None and not RESNET.match(architecture):
        remedy = "pip install timm, or export it to an .onnx file"
        raise TeacherError(f"teacher {name}: its architecture '{architecture}' is built by timm alone; {remedy}")
    feeding = assumed(by_hand(config).otherwise(said.feeding))

    @contextmanager
    def open_weights(device: torch.device) -> Iterator[PredictBatch]:
        state = read_state(ModelSpec(architecture, (), (), None), weights)
        try:
            module = _built(architecture, values, state)
        except Exception as error:  # another library's model
            raise TeacherError(f"teacher {name}: {weights} is no '{architecture}': {first_line(error)}") from error
        with predicting(module.to(device)) as predict:
            yield predict

    return [
        TrainedModel(
            name, open_weights, said.classes, feeding, "logits", content=file_hash([weights], architecture),
            source=str(folder), license=said.license, datasets=said.datasets, size=weights.stat().st_size,
        )
    ]  # fmt: skip


def _timm() -> Any:
    with suppress(Exception):  # without torchvision it cannot be imported
        return import_module("timm")
    return None


def _built(architecture: str, values: dict[str, Any], state: State) -> nn.Module:
    if (library := _timm()) is not None:
        first = next(tensor for tensor in state.values() if tensor.ndim == 4)
        module = library.create_model(architecture, num_classes=values["num_classes"], in_chans=first.shape[1])
        module.load_state_dict(state)
        return module.eval()  # type: ignore[no-any-return]
    return _resnet(state)


class _Resnet(nn.Module):
    """A ResNet of transformers from images to logits."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Any:
        return self.network(pixel_values=inputs).logits


def _resnet(state: State) -> nn.Module:
    """Return a ResNet with these weights; they say how deep and how wide it is."""
    blocks = [max(int(key.split(".")[1]) for key in state if key.startswith(f"layer{part}.")) for part in (1, 2, 3, 4)]
    bottleneck = "layer1.0.conv3.weight" in state
    last = f"conv{3 if bottleneck else 2}.weight"
    library = transformers()
    described = library.ResNetConfig(
        num_channels=state["conv1.weight"].shape[1], embedding_size=len(state["conv1.weight"]),
        hidden_sizes=[len(state[f"layer{part}.0.{last}"]) for part in (1, 2, 3, 4)], depths=[one + 1 for one in blocks],
        layer_type="bottleneck" if bottleneck else "basic", num_labels=len(state["fc.bias"]),
    )  # fmt: skip
    network = library.ResNetForImageClassification(described)
    network.load_state_dict({_renamed(key): tensor for key, tensor in state.items()})
    return _Resnet(network.eval())


def _renamed(key: str) -> str:
    for pattern, replacement in NAMES:
        key = re.sub(pattern, replacement, key)
    return key
