"""What a Flower user hands over, in the forms that the rest of feddf takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from feddf.config import ConfigError
from feddf.config.errors import first_line
from feddf.data.datasets import wrong_labels
from feddf.evaluate import output_shape
from feddf.flower.settings import FlowerSettings
from feddf.flower.wire import to_arrays
from feddf.outputs import classes
from feddf.types import Examples, Inputs, Prototype, Resources, State

Architectures = Mapping[str, Prototype | Callable[[], nn.Module]]
Labeled = Examples | tuple[Tensor, Tensor]


def as_prototypes(given: Architectures) -> dict[str, Prototype]:
    """Return prototypes: each one as it is, or made of a function that builds the module."""
    if not given:
        raise ConfigError.at("prototypes", [], "name at least one architecture")
    return {name: one if isinstance(one, Prototype) else Prototype(name, one) for name, one in given.items()}


def as_inputs(given: Inputs | Tensor) -> Inputs:
    """Return inputs; a tensor holds them as the models expect them."""
    return given if isinstance(given, Inputs) else Inputs(given, _as_it_is)


def as_examples(given: Labeled, n_classes: int | None = None) -> Examples:
    """Return examples; a pair of tensors holds inputs as the models expect them, and int64 labels."""
    if isinstance(given, Examples):
        return given
    inputs, labels = given
    highest = int(labels.max()) if labels.numel() else 0
    return Examples(as_inputs(inputs), labels, classes(n_classes or highest + 1))


def _check_finite(key: str, inputs: Inputs) -> None:
    """Raise where an input of the server's own is not finite: every honest client would be blamed for it."""
    for chunk in torch.arange(len(inputs)).split(256):
        batch = inputs.batch(chunk)
        if batch.is_floating_point() and not bool(batch.isfinite().all()):
            rows = ~batch.flatten(1).isfinite().all(dim=1)
            raise ConfigError.at(key, f"input {int(chunk[rows][0])}", "it has values that are not finite")


def check_weights(folder: Path, saved: Mapping[str, State], prototypes: Mapping[str, Prototype]) -> None:
    """Raise where a folder's checkpoint is not of these architectures."""
    for name, prototype in prototypes.items():
        try:
            prototype.load(saved.get(name, {}))
        except (RuntimeError, KeyError) as error:
            allowed = f"{folder} holds a run with another architecture of that name"
            raise ConfigError.at("prototypes", name, allowed) from error


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


def server_data(
    prototypes: Architectures,
    settings: FlowerSettings,
    pool: Inputs | Tensor | None,
    validation: Labeled | None,
    test: Labeled | None,
    n_clients: Callable[[str], int],
) -> tuple[Resources, Examples, Examples]:
    """Return what the server fuses with, its validation and its test examples; raise where something does not fit."""
    known = as_prototypes(prototypes)
    unlabeled = as_inputs(pool) if pool is not None else None
    nothing = Examples(as_inputs(torch.zeros(0, 1)), torch.zeros(0, dtype=torch.int64), classes(2))
    labeled = as_examples(validation) if validation is not None else nothing
    tested = as_examples(test) if test is not None else labeled
    if settings.distills:
        _check_distillation(settings, unlabeled, labeled)
    settings.refuse(settings.mistakes(labeled=len(labeled) > 0, pooled=unlabeled is not None))
    n_classes = None
    for inputs in (unlabeled, tested.inputs if len(tested) else None):
        if inputs is not None:
            n_classes = classes_of(known, inputs)
            labeled = replace(labeled, outputs=classes(n_classes))
    for key, examples in (("validation", labeled), ("test", tested)):
        if len(examples) and (wrong := wrong_labels(replace(examples, outputs=labeled.outputs))):
            raise ConfigError.at(key, f"{len(examples.labels)} labels", f"has {wrong}")
    for name, prototype in known.items():
        try:
            to_arrays(prototype.build().state_dict())
        except TypeError as error:
            raise ConfigError.at("prototypes", name, f"Flower cannot carry its weights: {error}") from error
    for key, inputs in (("pool", unlabeled), ("validation", labeled.inputs), ("test", tested.inputs)):
        if inputs is not None and len(inputs):
            _check_finite(key, inputs)
    return Resources(known, unlabeled, labeled, None, classes(n_classes), n_clients), labeled, tested


def _check_distillation(settings: FlowerSettings, pool: Inputs | None, validation: Examples) -> None:
    """Raise where a strategy that distills was not given what it needs: here it is no key of a configuration."""
    if pool is None:
        raise ConfigError.at("pool", None, "method 'feddf' needs unlabeled inputs")
    if len(pool) < 2:
        raise ConfigError.at("pool", f"{len(pool)} inputs", "a student learns from batches of at least 2")
    if settings.distill.early_stopping == "validation" and not len(validation):
        allowed = "early stopping needs validation data; or set distill.early_stopping = 'held-out-loss' or 'none'"
        raise ConfigError.at("validation", None, allowed)


def node_numbers(names: Mapping[int, str] | None) -> dict[int, str] | None:
    """Return the clients' names by Flower's node ids, as numbers."""
    try:
        return None if names is None else {int(node): name for node, name in names.items()}
    except ValueError:
        allowed = "it gives names to Flower's node ids, which are numbers"
        raise ConfigError.at("client_names", names, allowed) from None
