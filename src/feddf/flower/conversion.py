"""What a Flower user hands over, in the forms that the rest of feddf takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from feddf.admit import different_keys
from feddf.config import ConfigError
from feddf.config.errors import first_line
from feddf.data.datasets import wrong_labels
from feddf.evaluate import output_shape
from feddf.outputs import classes
from feddf.types import Examples, Inputs, Prototype, State

Architectures = Mapping[str, Prototype | Callable[[], nn.Module]]
Labelled = Examples | tuple[Tensor, Tensor]


def as_prototypes(given: Architectures) -> dict[str, Prototype]:
    """Return prototypes: each one as it is, or made of a function that builds the module."""
    if not given:
        raise ConfigError.at("prototypes", [], "name at least one architecture")
    return {name: one if isinstance(one, Prototype) else Prototype(name, one) for name, one in given.items()}


def as_inputs(given: Inputs | Tensor) -> Inputs:
    """Return inputs; a tensor holds them as the models expect them."""
    return given if isinstance(given, Inputs) else Inputs(given, _as_it_is)


def as_examples(given: Labelled, n_classes: int | None = None) -> Examples:
    """Return examples; a pair of tensors holds inputs as the models expect them, and int64 labels."""
    if isinstance(given, Examples):
        return given
    inputs, labels = given
    highest = int(labels.max()) if labels.numel() else 0
    return Examples(as_inputs(inputs), labels, classes(n_classes or highest + 1))


def check_labels(key: str, examples: Examples, n_classes: int) -> None:
    """Raise where labels do not fit their inputs or the models' logits."""
    if wrong := wrong_labels(replace(examples, outputs=classes(n_classes))):
        raise ConfigError.at(key, f"{len(examples.labels)} labels", f"has {wrong}")


def check_finite(key: str, inputs: Inputs) -> None:
    """Raise where an input of the server's own is not finite: every honest client would be blamed for it."""
    for chunk in torch.arange(len(inputs)).split(256):
        batch = inputs.batch(chunk)
        if batch.is_floating_point() and not bool(batch.isfinite().all()):
            rows = ~batch.flatten(1).isfinite().all(dim=1)
            raise ConfigError.at(key, f"input {int(chunk[rows][0])}", "it has values that are not finite")


def check_weights(folder: Path, saved: Mapping[str, State], prototypes: Mapping[str, State]) -> None:
    """Raise where a folder's checkpoint is not of these architectures."""
    for name, manifest in prototypes.items():
        state = saved.get(name, {})
        other = [key for key in manifest if key in state and state[key].shape != manifest[key].shape]
        if other or different_keys(state.keys(), manifest):
            raise ConfigError.at("prototypes", name, f"{folder} holds a run with another architecture of that name")


def no_examples() -> Examples:
    """Return no examples at all."""
    return Examples(as_inputs(torch.zeros(0, 1)), torch.zeros(0, dtype=torch.int64), classes(2))


def classes_of(prototypes: Mapping[str, Prototype], inputs: Inputs) -> int:
    """Return the number of logits that all prototypes give on the inputs; raise where they differ or fail."""
    found: dict[str, int] = {}
    for name, prototype in prototypes.items():
        try:
            shape = output_shape(prototype, inputs)
        except Exception as error:
            allowed = f"does not work on the server's inputs: {first_line(error)}"
            raise ConfigError.at("prototypes", name, allowed) from error
        if len(shape) != 1:
            raise ConfigError.at("prototypes", name, f"gives outputs of shape {shape}, not logits")
        found[name] = shape[0]
    if len(set(found.values())) > 1:
        raise ConfigError.at("prototypes", found, "all must have the same number of logits")
    return next(iter(found.values()))


def _as_it_is(batch: Tensor) -> Tensor:
    return batch
