"""A model's description, and the module that comes of it: ``load_model(folder).predict(["cat.png"])``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from feddf.config.errors import FeddfError, first_line
from feddf.config.names import MODELS
from feddf.evaluate import BATCH, evaluation_mode
from feddf.runtime.atomic import is_mine, names_code, signed
from feddf.runtime.device import CPU, device_of, moved
from feddf.saved.preprocess import Preprocess, described, from_description
from feddf.states import fit_widths
from feddf.types import Prototype, State

FORMAT = 1
"""The version of the description in a ``config.json``."""

ORIGIN = "origin"
"""Under which a description that names code has the mark of whoever wrote it."""


class ModelError(FeddfError):
    """A saved model cannot be used as asked; one line says why and what would be right."""

    exit_code = 2


@dataclass(frozen=True)
class ModelSpec:
    """All that is needed to use weights: the architecture with its options, the classes and the preprocessing.

    With ``fits``, layers take the widths that the weights have: those that FedMA matched may have grown.
    """

    model: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    preprocess: Preprocess | None
    options: Mapping[str, Any] = field(default_factory=dict)
    fits: bool = False

    @property
    def prototype(self) -> Prototype:
        """How the architecture is built."""
        build = partial(MODELS[self.model], self.shape, len(self.classes), **self.options)
        return Prototype(self.model.rpartition(":")[2], build, fit_widths if self.fits else None)

    def describe(self) -> dict[str, Any]:
        """Return the description as JSON; one that names code has a mark that says whose it is."""
        values = {
            "format": FORMAT,
            "model": self.model,
            "options": dict(self.options),
            "fits": self.fits,
            "shape": list(self.shape),
            "classes": list(self.classes),
            "preprocessing": described(self.preprocess) if self.preprocess else None,
        }
        return {**values, ORIGIN: signed(_bytes(values))} if names_code(self.model) else values

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str, *, trust: bool = False) -> ModelSpec:
        """Return the description in JSON; ``where`` is the file that it stands in.

        One that somebody else made and that names code is refused: the code would be called with what the file says.
        """
        if values.get("format") != FORMAT:
            raise ModelError(f"{where} has the format {values.get('format')!r}, and this version reads {FORMAT}")
        rest = {name: value for name, value in values.items() if name != ORIGIN}
        model = str(values.get("model"))
        if names_code(model) and not trust and not is_mine(_bytes(rest), values.get(ORIGIN)):
            remedy = "look at that code, then load it by load_model(..., trust=True), or predict with --trust"
            raise ModelError(f"{where} was made elsewhere and has code run: {model!r:.100}; {remedy}")
        try:
            encode, classes = values["preprocessing"], tuple(str(name) for name in values["classes"])
            preprocess, options = from_description(encode) if encode else None, dict(values["options"])
            return cls(model, tuple(values["shape"]), classes, preprocess, options, bool(values.get("fits", False)))
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{where} does not describe a model: {first_line(error)}") from error


def _bytes(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, sort_keys=True).encode()


class Prediction(NamedTuple):
    """The most likely class of one input, and the probability of every class."""

    label: str
    probabilities: dict[str, float]


class LoadedModel(nn.Module):
    """A network with its class names and its preprocessing. Called, it maps encoded inputs to logits."""

    def __init__(self, network: nn.Module, spec: ModelSpec) -> None:
        super().__init__()
        self.network, self.spec = network, spec
        self.classes, self.preprocess = spec.classes, spec.preprocess

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.network(inputs)
        return logits

    def predict(self, given: Any, batch: int = BATCH) -> list[Prediction]:
        """Classify image files (or arrays of bytes), texts or rows of numbers, on the device that the model is on."""
        if self.preprocess is None:
            raise ModelError("the model's preprocessing is a function of a program; encode inputs and call the model")
        inputs = list(given) if isinstance(given, Sequence | Tensor) and not isinstance(given, str) else [given]
        found: list[Prediction] = []
        for first in range(0, len(inputs), batch):
            raw = self.preprocess.read(inputs[first : first + batch])
            with evaluation_mode(self):
                rows: Tensor = self(self.preprocess(moved(raw, device_of(self)))).softmax(dim=1)
            found += [self._prediction(row) for row in rows.to(CPU).tolist()]
        return found

    def _prediction(self, row: list[float]) -> Prediction:
        return Prediction(self.classes[row.index(max(row))], dict(zip(self.classes, row, strict=True)))


def loaded(spec: ModelSpec, state: State, where: str, device: torch.device = CPU) -> LoadedModel:
    """Return a described architecture with these weights, on a device, in eval mode."""
    try:
        return LoadedModel(spec.prototype.load(state, device), spec).eval()
    except FeddfError:
        raise
    except Exception as error:  # a user's own architecture may do anything
        raise ModelError(f"{where} does not fit the model '{spec.model}': {fitting(error)}") from error


def fitting(error: BaseException) -> str:
    """Return the first line of an error that says something: torch's own first line names the class only."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[1] if len(lines) > 1 and lines[0].endswith(":") else first_line(error)
