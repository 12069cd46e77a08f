"""Folders in timm's format: ``config.json`` and ``model.safetensors``.

timm builds its architectures where it is installed. Its plain ResNets are built without it: they are those of
transformers, under other names.
"""

from __future__ import annotations

import re
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import nn

from feddf.config.errors import one_line
from feddf.config.fuse_config import TeacherConfig
from feddf.fusing.beside import About
from feddf.fusing.feeding import Sizes
from feddf.fusing.formats import of_file
from feddf.fusing.teachers import PredictBatch, TeacherError, TrainedModel
from feddf.runtime.packages import transformers
from feddf.saved.model import ModelSpec
from feddf.saved.model_folder import WEIGHTS, read_json, read_state
from feddf.types import State

RESNET = re.compile(r"resnet(18|34|50|101|152)(\.|$)")
NAMES = (  # what timm calls the parts of a ResNet, and what transformers do
    (r"^(conv|bn)1\.", r"resnet.embedder.embedder.\1."),
    (r"^layer(\d)\.(\d+)\.", lambda found: f"resnet.encoder.stages.{int(found[1]) - 1}.layers.{found[2]}."),
    (r"\.(conv|bn)(\d)\.", lambda found: f".layer.{int(found[2]) - 1}.{found[1]}."),
    (r"\.downsample\.0\.", ".shortcut.conv."),
    (r"\.downsample\.1\.", ".shortcut.bn."),
    (r"\.conv\.", ".convolution."),
    (r"\.bn\.", ".normalization."),
    (r"^fc\.", "classifier.1."),
)


def of_timm(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return the model in a folder of timm's format."""
    folder, name, weights = config.file, config.id, config.file / WEIGHTS
    values = read_json(folder / "config.json")
    architecture = str(values["architecture"])
    if not weights.is_file():
        raise TeacherError(f"teacher {name}: {folder} has no {WEIGHTS}")
    if _timm() is None and not RESNET.match(architecture):
        remedy = "pip install timm, or export it to an .onnx file"
        raise TeacherError(f"teacher {name}: its architecture '{architecture}' is built by timm alone; {remedy}")

    def load(device: torch.device) -> tuple[Sizes, PredictBatch]:
        state = read_state(ModelSpec(architecture, (), (), None), weights)
        with one_line(TeacherError, f"teacher {name}: {weights} is no '{architecture}'"):
            network = _built(architecture, int(values["num_classes"]), state).eval().to(device)
        return (None, None, None, None), lambda inputs: getattr(found := network(inputs), "logits", found)

    return [of_file(config, [weights], load, About(), architecture, outputs="logits", source=str(folder))]


def _timm() -> Any:
    with suppress(Exception):  # without torchvision it cannot be imported
        return import_module("timm")
    return None


def _built(architecture: str, count: int, state: State) -> nn.Module:
    """Return timm's module, or a ResNet of transformers with these weights, which say how deep and how wide it is."""
    if (library := _timm()) is not None:
        first = next(tensor for tensor in state.values() if tensor.ndim == 4)
        network: nn.Module = library.create_model(architecture, num_classes=count, in_chans=first.shape[1])
        network.load_state_dict(state)
        return network
    parts, library = ("layer1", "layer2", "layer3", "layer4"), transformers()
    last_conv = "conv3" if "layer1.0.conv3.weight" in state else "conv2"
    described = library.ResNetConfig(
        num_channels=state["conv1.weight"].shape[1], embedding_size=len(state["conv1.weight"]),
        hidden_sizes=[len(state[f"{part}.0.{last_conv}.weight"]) for part in parts],
        depths=[1 + max(int(key.split(".")[1]) for key in state if key.startswith(part)) for part in parts],
        layer_type="bottleneck" if last_conv == "conv3" else "basic", num_labels=len(state["fc.bias"]),
    )  # fmt: skip
    network = library.ResNetForImageClassification(described)
    for pattern, replacement in NAMES:
        state = {re.sub(pattern, replacement, key): tensor for key, tensor in state.items()}
    network.load_state_dict(state)
    return network
