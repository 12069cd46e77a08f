"""What a user of Flower hands over, checked: settings (and what clients are told of them), architectures and data."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from pydantic import model_validator
from torch import Tensor, nn

from feddf.config import ConfigError, Experiment, LocalConfig, Settings, parse
from feddf.config.errors import one_line
from feddf.config.names import BINARIZATIONS, METHOD_PARTS, PARTS
from feddf.config.sections import Section, key
from feddf.data.datasets import plain, wrong_labels
from feddf.evaluate import output_shape
from feddf.flower.wire import to_arrays
from feddf.outputs import Outputs, classes
from feddf.runs.methods import named_part
from feddf.types import Examples, Inputs, Part, Prototype, Resources

Architectures = Mapping[str, Prototype | Callable[[], nn.Module]]
Labeled = Examples | tuple[Tensor, Tensor]
MakePart = Callable[..., Part]  # of the client's resources, and of what the half is told

OVER_FLOWER: Mapping[str, Mapping[str, Any]] = {
    "clients": {"fraction": 1.0},  # all take part
    "fusion": {"defense": "robust"},  # clients are not trusted
    "run": {"engine": "in-process"},  # the server's own work
}
"""The keys whose defaults are others over Flower."""


class FlowerConfig(Section):
    """``[flower]``: what only a run over Flower has, and what its server was given."""

    evaluate_fraction: float = key(0.0, "the share of clients (one at least) that try fused models", ge=0, le=1)
    train_config: dict[str, bool | int | float | str] = key({}, "further entries of the clients' train config")
    prototypes: tuple[str, ...] = key((), "the architectures that the server knows")
    pool_size: int = key(0, "the number of the server's unlabeled inputs")
    validation_size: int = key(0, "the number of the server's validation examples")


class FlowerSettings(Settings):
    """The settings of a run over Flower, as its folder keeps them. Clients have an hour to answer, by default.

    >>> from feddf.config import ClientsConfig
    >>> FlowerSettings(clients=ClientsConfig(total=3)).clients.fraction
    1.0
    """

    flower: FlowerConfig = FlowerConfig()

    @model_validator(mode="before")
    @classmethod
    def _as_over_flower(cls, given: Any) -> Any:
        """Fill in what is usual over Flower, wherever nothing else is given."""
        tables = dict(given)
        for name, usual in OVER_FLOWER.items():
            section = tables.get(name, {})
            section = section.model_dump(exclude_unset=True) if isinstance(section, Section) else section
            tables[name] = {**usual, **section} if isinstance(section, Mapping) else section
        if isinstance(tables["clients"], Mapping) and "total" not in tables["clients"]:
            raise ConfigError("the key 'clients.total' is missing: say how many are expected")
        return tables

    @property
    def deadline(self) -> float:
        """Seconds that a client has to answer."""
        return self.clients.timeout or 3600.0


def settings_of(experiment: Experiment) -> FlowerSettings:
    """Return the settings of an experiment for a run over Flower; what ``[privacy]`` says would not be kept there."""
    if (level := experiment.privacy.level) != "none":
        raise ConfigError.at("privacy.level", level, "over Flower it must be 'none': only simulated runs have privacy")
    return parse(experiment.model_dump(include=set(Settings.model_fields)), FlowerSettings)


def parts_config(parts: Sequence[Part]) -> dict[str, str]:
    """Return the entry that names a method's parts, if it has any: as JSON, each with what its half is told."""
    named = {part.name: dict(part.told) for part in parts if part.name}
    return {"parts": json.dumps(named)} if named else {}


def parts_in(told: Mapping[str, Any], resources: Resources, own: Mapping[str, MakePart]) -> list[Part]:
    """Return the parts that a server names; a name that is neither feddf's nor the client's own is refused."""
    found: list[Part] = []
    for name, arguments in json.loads(told.get("parts", "{}")).items():
        if name in own:
            found.append(own[name](resources, **arguments))
        elif any(name in names for names in (PARTS, METHOD_PARTS, BINARIZATIONS)):  # no module:attribute is
            found.append(named_part(name, resources, arguments))
        else:
            raise ValueError(f"this client does not know the part '{name[:60]}'; give it to client_app as parts")
    return found


def train_config(settings: FlowerSettings, parts: Sequence[Part]) -> dict[str, Any]:
    """Return what clients that train are told: ``[local]``, FedProx's μ under Flower's name for it, and the parts.

    Raise for what the method asks of clients that cannot be asked over Flower.
    """
    for part in parts:
        if not part.name and (part.half is not Part.half or part.fit):
            allowed = "its clients' half does not travel by itself: give its Part the name by which clients find it"
            raise ConfigError.at("fusion.method", settings.fusion.method, allowed)
    if (fraction := settings.flower.evaluate_fraction) and not all(part.weights_down for part in parts):
        raise ConfigError.at("flower.evaluate_fraction", fraction, "this method sends clients no weights; set it to 0")
    local = {f"local-{name}": value for name, value in settings.local.model_dump().items()}
    named = parts_config(parts)
    lost = {"lost-state": settings.clients.lost_state} if named else {}
    return {**local, "proximal-mu": settings.local.prox_mu, **named, **lost, **settings.flower.train_config}


def local_config(told: Mapping[str, Any]) -> LocalConfig:
    """Return the section ``[local]`` from what a client was told."""
    return LocalConfig(**{name: told[f"local-{name}"] for name in LocalConfig.model_fields if f"local-{name}" in told})


def as_prototypes(given: Architectures) -> dict[str, Prototype]:
    """Return prototypes: each one as it is, or made of a function that builds the module."""
    if not given:
        raise ConfigError.at("prototypes", [], "name at least one architecture")
    return {name: one if isinstance(one, Prototype) else Prototype(name, one) for name, one in given.items()}


def as_inputs(given: Inputs | Tensor) -> Inputs:
    """Return inputs; a tensor holds them as the models expect them."""
    return given if isinstance(given, Inputs) else Inputs(given, plain)


def as_examples(given: Labeled, prototype: Prototype | None = None) -> Examples:
    """Return examples; a pair of tensors holds inputs as the models expect them, and int64 labels.

    One client's labels do not tell how many classes there are, so its ``prototype`` does.
    """
    if isinstance(given, Examples):
        return given
    inputs, labels = as_inputs(given[0]), given[1]
    if prototype is None:
        return Examples(inputs, labels, classes(int(labels.max()) + 1 if labels.numel() else 1))
    return Examples(inputs, labels, outputs_of({prototype.name: prototype}, [inputs]))


def outputs_of(prototypes: Mapping[str, Prototype], inputs: Sequence[Inputs], said: Outputs | None = None) -> Outputs:
    """Return what outputs mean: as labeled examples say, or else one of as many classes as all models have logits."""
    shapes: dict[str, tuple[int, ...]] = {}
    for given in inputs:
        for name, prototype in prototypes.items():
            with one_line(partial(ConfigError.at, "prototypes", name), "does not work on the server's inputs"):
                shapes[name] = output_shape(prototype, given)
    found = set(shapes.values())
    if said is not None and found - {said.shape}:
        raise ConfigError.at("prototypes", shapes, f"outputs must have the shape {said.shape} of '{said.kind}'")
    if len(found) > 1 or (said is None and any(len(shape) != 1 for shape in found)):
        raise ConfigError.at("prototypes", shapes, "all must have the same number of logits, and no other outputs")
    return said or classes(found.pop()[0] if found else None)


def server_data(
    prototypes: Architectures,
    settings: FlowerSettings,
    pool: Inputs | Tensor | None,
    validation: Labeled | None,
    test: Labeled | None,
) -> tuple[Resources, Examples, Examples]:
    """Return what the server fuses with, its validation and its test examples; raise where something does not fit."""
    known, none = as_prototypes(prototypes), (torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
    unlabeled = as_inputs(pool) if pool is not None else None
    labeled = as_examples(validation if validation is not None else none)
    tested = as_examples(test) if test is not None else labeled
    if settings.distills:
        _check_distillation(settings, unlabeled, labeled)
    settings.refuse(settings.mistakes(labeled=len(labeled) > 0, pooled=unlabeled is not None))
    said = next((one.outputs for one in (labeled, tested) if len(one) and not one.outputs.counts_classes), None)
    given = [unlabeled] if unlabeled is not None else []
    labeled = replace(labeled, outputs=outputs_of(known, [*given, *([tested.inputs] if len(tested) else [])], said))
    for name, examples in (("validation", labeled), ("test", tested)):
        if len(examples) and (wrong := wrong_labels(replace(examples, outputs=labeled.outputs))):
            raise ConfigError.at(name, f"{len(examples.labels)} labels", f"has {wrong}")
    for name, inputs in (("pool", unlabeled), ("validation", labeled.inputs), ("test", tested.inputs)):
        if inputs is not None and len(inputs):
            _check_finite(name, inputs)
    for name, prototype in known.items():
        with one_line(partial(ConfigError.at, "prototypes", name), "Flower cannot carry its weights", TypeError):
            to_arrays(prototype.build().state_dict())
    return Resources(known, unlabeled, labeled, None, labeled.outputs), labeled, tested


def _check_distillation(settings: FlowerSettings, pool: Inputs | None, validation: Examples) -> None:
    """Raise where a strategy that distills was not given what it needs: here it is no key of a configuration."""
    if pool is None:
        raise ConfigError.at("pool", None, "method 'feddf' needs unlabeled inputs")
    if len(pool) < 2:
        raise ConfigError.at("pool", f"{len(pool)} inputs", "a student learns from batches of at least 2")
    if settings.distill.early_stopping == "validation" and not len(validation):
        allowed = "early stopping needs validation data; or set distill.early_stopping = 'held-out-loss' or 'none'"
        raise ConfigError.at("validation", None, allowed)


def _check_finite(name: str, inputs: Inputs) -> None:
    """Raise where an input of the server's own is not finite: every honest client would be blamed for it."""
    for chunk in torch.arange(len(inputs)).split(256):
        batch = inputs.batch(chunk)
        if batch.is_floating_point() and not bool(batch.isfinite().all()):
            rows = ~batch.flatten(1).isfinite().all(dim=1)
            raise ConfigError.at(name, f"input {int(chunk[rows][0])}", "it has values that are not finite")
