"""What lies beside a model's weights and says how it is fed: files of transformers, timm and MONAI, and model cards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from feddf.config.errors import first_line
from feddf.config.foreign import parse_json
from feddf.fusing.feeding import FILE, Feeding, of_range
from feddf.runtime.atomic import read_regular
from feddf.saved.model import ModelError, ModelSpec

BUNDLE = "configs/metadata.json"
"""Where a MONAI bundle says what its network takes and gives."""


@dataclass(frozen=True)
class About:
    """What files say about a model: how it is fed, the names of its outputs, and its card's license and data sets."""

    feeding: Feeding = Feeding()
    classes: tuple[str, ...] = ()
    license: str = ""
    datasets: tuple[str, ...] = ()


def about(path: Path) -> About:
    """Return what lies beside a model: in its folder, or in that of a file called ``model`` (``.onnx``, ``.pt2``)."""
    folder = path if path.is_dir() else path.parent
    if not path.is_dir() and not path.stem.startswith("model"):
        return About()
    bundle = next((one / BUNDLE for one in (folder, folder.parent) if (one / BUNDLE).is_file()), None)
    try:
        config, card = read_json(folder / "config.json"), _card(folder)
        if bundle is not None:
            found = of_bundle(read_json(bundle))
        elif "feddf" in config and "preprocessing" in config["feddf"]:
            spec = ModelSpec.read(
                config["feddf"], str(folder / "config.json"), trust=True
            )  # it is described, not built
            found = About(Feeding.of(spec.preprocess, FILE), spec.classes)
        elif "architecture" in config:
            found = of_timm(config)
        else:
            tokenizer = str(folder) if (folder / "tokenizer_config.json").is_file() else None
            fed = of_processor(read_json(folder / "preprocessor_config.json"), config)
            found = About(Feeding.said(FILE, tokenizer=tokenizer) if tokenizer else fed, labels_of(config))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"what lies beside {path} cannot be used: {first_line(error)}") from error
    license = found.license or "".join(re.findall(r"^license: *([\w.-]+)", card, re.MULTILINE)[:1])
    listed = re.search(r"^datasets:\n((?:- *[\w./-]+\n)+)", card, re.MULTILINE)
    return About(
        found.feeding, found.classes, license, tuple(re.findall(r"[\w./]+[\w./-]*", listed[1])) if listed else ()
    )


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; an absent file says nothing."""
    try:
        values = parse_json(read_regular(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {first_line(error)}") from error
    return values if isinstance(values, dict) else {}


def _card(folder: Path) -> str:
    """Return the front matter of a folder's card."""
    try:
        text = read_regular(folder / "README.md").decode("utf-8", "replace")
    except OSError:
        return ""
    return text.split("---\n")[1] if text.startswith("---\n") else ""


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the class names in a configuration of transformers; ``LABEL_0`` and the like are none."""
    names = {int(number): str(name) for number, name in (config.get("id2label") or {}).items()}
    found = tuple(names[number] for number in sorted(names))
    return () if found == tuple(f"LABEL_{number}" for number in range(len(found))) else found


def of_processor(found: Mapping[str, Any], config: Mapping[str, Any]) -> Feeding:
    """Return what ``preprocessor_config.json`` says, and the channels and the side in the model's configuration.

    Bytes times f (of ``rescale_factor``) are normalized: x / 255 has 255 f times smaller mean and deviation. For models
    of one channel the processor's three means are averaged.
    """
    size, crop, own = found.get("size"), found.get("crop_size"), config.get("image_size")
    side = size.get("height") or size.get("shortest_edge") if isinstance(size, dict) else size or own
    if found.get("do_center_crop") and crop is not None:
        side = crop if isinstance(crop, int) else crop.get("height", side)
    channels = config.get("num_channels")
    square = None if side is None else (int(side[0]), int(side[1])) if isinstance(side, list) else (int(side),) * 2
    sizes = Feeding.said(FILE, size=square, channels=channels)
    if not found:
        return sizes
    factor = 255 * (found.get("rescale_factor", 1 / 255) if found.get("do_rescale", True) else 1.0)
    plain = not found.get("do_normalize", True)
    mean = [0.0] if plain else found.get("image_mean", [0.5])
    std = [1.0] if plain else found.get("image_std", [0.5])
    if channels == 1:
        mean, std = ([sum(values) / len(values)] for values in (mean, std))
    said = [tuple(float(value) / factor for value in values) for values in (mean, std)]
    return sizes.otherwise(Feeding.said(FILE, channels=3, mean=said[0], std=said[1]))


def of_timm(config: Mapping[str, Any]) -> About:
    """Return what timm's ``config.json`` says; in older ones ``pretrained_cfg`` is not nested."""
    own = {**config, **(config.get("pretrained_cfg") or {})}
    channels, *size = own.get("input_size") or (None, None)
    feeding = Feeding.said(FILE, channels=channels, size=tuple(size) if len(size) == 2 else None)
    feeding = feeding.otherwise(Feeding.said(FILE, mean=_tuple(own.get("mean")), std=_tuple(own.get("std"))))
    names = own.get("label_names") or ()
    listed = [names[one] for one in sorted(names, key=int)] if isinstance(names, dict) else names
    return About(feeding, tuple(map(str, listed)), str(own.get("license") or ""))


def _tuple(values: Any) -> tuple[float, ...] | None:
    return tuple(map(float, values)) if values else None


def of_bundle(values: Mapping[str, Any]) -> About:
    """Return what a MONAI bundle says about the first input and the first output of its network."""
    form = values["network_data_format"]
    given, returned = (next(iter(form[one].values())) for one in ("inputs", "outputs"))
    shape, ends = given.get("spatial_shape") or (), given.get("value_range") or ()
    size = tuple(shape) if len(shape) == 2 and all(isinstance(side, int) for side in shape) else None
    feeding = Feeding.said(FILE, channels=given.get("num_channels"), size=size)
    names = returned.get("channel_def") or {}
    listed = tuple(str(names[one]) for one in sorted(names, key=int))
    return About(
        feeding.otherwise(of_range(*ends) if len(ends) == 2 else Feeding()), listed, str(values.get("license", ""))
    )
