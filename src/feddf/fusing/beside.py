"""What lies beside a model's weights and says how it is fed: files of transformers, timm and MONAI, and model cards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from feddf.config.errors import one_line
from feddf.fusing.feeding import FILE, Feeding, of_range
from feddf.runtime.atomic import read_regular
from feddf.saved.model import ModelError, ModelSpec
from feddf.saved.model_folder import read_json

BUNDLE = "configs/metadata.json"  # where a MONAI bundle says what its network takes and gives


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
    if folder != path and not path.stem.startswith("model"):
        return About()
    with one_line(ModelError, f"what lies beside {path} cannot be used"):
        found = _described(folder)
    try:
        card = read_regular(folder / "README.md").decode("utf-8", "replace")
    except OSError:
        return found
    front = card.split("---\n")[1] if card.startswith("---\n") else ""
    license = found.license or "".join(re.findall(r"^license: *([\w.-]+)", front, re.MULTILINE)[:1])
    listed = re.search(r"^datasets:\n((?:- *[\w./-]+\n)+)", front, re.MULTILINE)
    return replace(found, license=license, datasets=tuple(re.findall(r"[\w./][\w./-]*", listed[1])) if listed else ())


def _described(folder: Path) -> About:
    config, file = read_json(folder / "config.json"), str(folder / "config.json")
    for bundle in (folder / BUNDLE, folder.parent / BUNDLE):
        if bundle.is_file():
            return _of_bundle(read_json(bundle))
    if "preprocessing" in config.get("feddf", {}):
        spec = ModelSpec.read(config["feddf"], file, trust=True)  # it is described, not built
        return About(Feeding.of(spec.preprocess, FILE), spec.classes)
    if "architecture" in config:
        own = {**config, **(config.get("pretrained_cfg") or {})}  # it is not nested in older files of timm
        channels, *size = own.get("input_size") or (None,)
        feeding = Feeding.said(FILE, channels=channels, size=size, mean=own.get("mean"), std=own.get("std"))
        return About(feeding, listed(own.get("label_names")), str(own.get("license") or ""))
    if (folder / "tokenizer_config.json").is_file():
        return About(Feeding.said(FILE, tokenizer=str(folder)), labels_of(config))
    return About(of_processor(read_json(folder / "preprocessor_config.json"), config), labels_of(config))


def listed(names: Any) -> tuple[str, ...]:
    """Return names of classes, which are a list, a table by number, or nothing."""
    ordered = [names[one] for one in sorted(names, key=int)] if isinstance(names, dict) else names
    return tuple(map(str, ordered or ()))


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the class names in a configuration of transformers; ``LABEL_0`` and the like are none."""
    found = listed(config.get("id2label"))
    return () if found == tuple(f"LABEL_{number}" for number in range(len(found))) else found


def of_processor(found: Mapping[str, Any], config: Mapping[str, Any]) -> Feeding:
    """Return what ``preprocessor_config.json`` says, and the channels and the side in the model's configuration.

    Bytes times f (of ``rescale_factor``) are normalized: x / 255 has 255 f times smaller mean and deviation. For models
    of one channel the processor's three means are averaged.
    """
    crops = found.get("do_center_crop") and found.get("crop_size") is not None
    given, channels = found.get("crop_size" if crops else "size") or {}, config.get("num_channels")
    side = (given.get("height") or given.get("shortest_edge")) if isinstance(given, dict) else given
    side = side or config.get("image_size")
    square = (int(side), int(side)) if isinstance(side, int | float) else side
    sizes = Feeding.said(FILE, size=square, channels=channels)
    if not found:
        return sizes
    factor = 255 * (found.get("rescale_factor", 1 / 255) if found.get("do_rescale", True) else 1.0)
    said = found.get("image_mean", [0.5]), found.get("image_std", [0.5])
    mean, std = said if found.get("do_normalize", True) else ([0.0], [1.0])
    if channels == 1:
        mean, std = ([sum(values) / len(values)] for values in (mean, std))
    mean, std = ([value / factor for value in values] for values in (mean, std))
    return sizes.otherwise(Feeding.said(FILE, channels=3, mean=mean, std=std))


def _of_bundle(values: Mapping[str, Any]) -> About:
    """Return what a MONAI bundle says about the first input and the first output of its network."""
    given, returned = (next(iter(values["network_data_format"][one].values())) for one in ("inputs", "outputs"))
    shape, ends = given.get("spatial_shape") or (), given.get("value_range") or ()
    size = shape if len(shape) == 2 and all(isinstance(side, int) for side in shape) else None
    scaled = of_range(*ends) if len(ends) == 2 else Feeding()
    feeding = Feeding.said(FILE, channels=given.get("num_channels"), size=size).otherwise(scaled)
    return About(feeding, listed(returned.get("channel_def")), str(values.get("license", "")))
