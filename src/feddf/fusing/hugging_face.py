"""Teachers of Hugging Face: an image or text classifier with safetensors, in a folder or by its name on the hub."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from feddf.config.errors import first_line
from feddf.config.fuse_config import TeacherConfig
from feddf.fusing.teachers import PredictBatch, TeacherError, TrainedModel, file_hash, preprocess_of
from feddf.runtime.packages import transformers
from feddf.saved.preprocess import Images, Preprocess, Tokens


def of_pretrained(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return an image or text classifier of transformers as a teacher, with the class names in its configuration."""
    path, name = config.path, config.name or Path(config.path).name
    place = _place(path, name)
    try:
        library = transformers()
        described = library.AutoConfig.from_pretrained(place, trust_remote_code=False)
    except Exception as error:
        raise TeacherError(f"teacher {name}: {path} is no model of transformers: {first_line(error)}") from error
    kind = _kind(described, name)
    tokens = Tokens(config.tokenizer or place, config.max_tokens)
    preprocess = preprocess_of(config, _images(place)) if kind == "Image" else tokens

    @contextmanager
    def open_pretrained(device: torch.device) -> Iterator[PredictBatch]:
        automatic = getattr(library, f"AutoModelFor{kind}Classification")
        try:
            model = automatic.from_pretrained(place, use_safetensors=True, trust_remote_code=False).eval().to(device)
        except Exception as error:
            raise TeacherError(f"teacher {name}: {path} cannot be loaded: {first_line(error)}") from error
        with torch.no_grad():
            yield lambda inputs: _predict(model, preprocess, inputs)

    classes = tuple(str(described.id2label[number]) for number in range(described.num_labels))
    if classes == tuple(f"LABEL_{number}" for number in range(len(classes))) and not config.map:
        classes = ()  # these are no names
    return [TrainedModel(name, open_pretrained, classes, preprocess, content=_content(place, described), source=path)]


def _place(path: str, name: str) -> str:
    """Return the folder, or the name on the hub, of a model."""
    local = Path(path).expanduser()
    if not local.is_dir() and (path.count("/") != 1 or path.startswith((".", "/", "~"))):
        known = "folders of feddf or Hugging Face and files that end in .safetensors, .pt2 or .onnx"
        raise TeacherError(f"there is no teacher {path}; known are {known}")
    if local.is_dir() and not (local / "config.json").is_file():
        raise TeacherError(f"teacher {name}: the folder {path} has no config.json, so it is not known what it holds")
    return str(local) if local.is_dir() else path


def _kind(described: Any, name: str) -> str:
    for architecture in described.architectures or []:
        for kind in ("Image", "Sequence"):
            if architecture.endswith(f"For{kind}Classification"):
                return kind
    found = ", ".join(described.architectures or ["nothing"])
    raise TeacherError(f"teacher {name}: it is {found}, and not a model for image or text classification")


def _predict(model: Any, preprocess: Preprocess | None, inputs: Tensor) -> Tensor:
    if isinstance(preprocess, Tokens):
        outputs = model(input_ids=inputs, attention_mask=(inputs != preprocess.padding).long())
    else:
        outputs = model(pixel_values=inputs)
    logits: Tensor = outputs.logits
    return logits


def _images(place: str) -> Images:
    """Return the preprocessing in ``preprocessor_config.json``: size, mean and deviation."""
    found = _processor(place)
    size = found.get("size", 224)
    side = size if isinstance(size, int) else size.get("height") or size.get("shortest_edge") or 224
    crop = found.get("crop_size")
    if found.get("do_center_crop") and crop is not None:
        side = crop if isinstance(crop, int) else crop.get("height", side)
    plain = not found.get("do_normalize", True)
    mean = (0.0,) * 3 if plain else tuple(found.get("image_mean", (0.5,) * 3))
    std = (1.0,) * 3 if plain else tuple(found.get("image_std", (0.5,) * 3))
    return Images((3, int(side), int(side)), mean, std)


def _processor(place: str) -> dict[str, Any]:
    try:
        if Path(place).is_dir():
            values = json.loads((Path(place) / "preprocessor_config.json").read_text(encoding="utf-8"))
        else:
            values = transformers().AutoImageProcessor.from_pretrained(place, trust_remote_code=False).to_dict()
    except Exception:  # without one, the values that most image models were trained with are taken
        return {}
    return values if isinstance(values, dict) else {}


def _content(place: str, described: Any) -> str:
    """Return a hash of a folder's files; of a model on the hub, of its name and revision."""
    if Path(place).is_dir():
        return file_hash(sorted(Path(place).glob("*.safetensors")), described.to_json_string())
    revision = getattr(described, "_commit_hash", None) or ""
    return hashlib.sha256(f"{place} {revision} {described.to_json_string()}".encode()).hexdigest()
