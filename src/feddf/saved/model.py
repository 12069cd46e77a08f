"""A model that is used without its experiment: how it is fed, its description, and the module that comes of it.

``load_model(folder).predict(["cat.png"])`` goes from what people have (image files, texts, bytes) to class names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from feddf import outputs
from feddf.config.errors import FeddfError, first_line, one_line, shown
from feddf.config.foreign import validated
from feddf.config.names import MODELS
from feddf.data.datasets import Pixels, Standardized, plain
from feddf.data.files import read_image
from feddf.data.text import Tokenizer, tokenizer, widened
from feddf.data.unlabeled import resize
from feddf.evaluate import BATCH, evaluation_mode
from feddf.models.small import build_network
from feddf.outputs import Outputs
from feddf.outputs import from_description as from_form
from feddf.runtime.atomic import is_mine, names_code, signed
from feddf.runtime.device import CPU, device_of, moved
from feddf.states import fit_widths
from feddf.types import Inputs, Prototype, State

FORMAT = 2
"""The version of the description in a ``config.json``: 1 where each input has one class, 2 with other outputs."""

MOST_VALUES = 1 << 24  # in one input of a model from elsewhere: room is made for the sizes that its file asks for
ORIGIN = "origin"
"""Under which a description that names code has the mark of its writer."""


class ModelError(FeddfError):
    """A saved model cannot be used as asked; one line says why and what would be right."""

    exit_code = 2


@dataclass(frozen=True)
class Images:
    """Bytes, resized to ``shape`` (channels, height, width), in an order of colors: (x / 255 − mean) / std.

    ``layout`` says where the channels are in what a model takes, or that it takes one row of numbers.

    >>> Images((1, 2, 2), (0.5,), (0.5,))(torch.zeros((1, 1, 2, 2), dtype=torch.uint8)).flatten()
    tensor([-1., -1., -1., -1.])
    """

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    order: Literal["RGB", "BGR"] = "RGB"
    layout: Literal["NCHW", "NHWC", "flat"] = "NCHW"

    def __post_init__(self) -> None:
        if not len(self.mean) == len(self.std) == self.shape[0]:
            given = f"{len(self.mean)} means and {len(self.std)} deviations"
            raise ValueError(f"{given} do not fit {self.shape[0]} channels")
        if min(self.std) <= 0:
            raise ValueError(f"deviations must be above 0, and are {self.std}")

    def __call__(self, raw: Tensor) -> Tensor:
        """Encode an N×C×H×W batch of bytes of any size."""
        pixels = resize(raw, self.shape)
        found = Pixels(self.mean, self.std)(pixels.flip(1) if self.order == "BGR" else pixels)
        if self.layout == "NCHW":
            return found
        return found.flatten(1) if self.layout == "flat" else found.permute(0, 2, 3, 1)

    def read(self, given: Sequence[Any]) -> Tensor:
        """Return image files (or arrays of H×W or H×W×C bytes) as one batch of bytes at the model's own size."""
        _, height, width = self.shape
        side = height if height == width else None
        return torch.cat([resize(_pixels(one, side), self.shape) for one in given])


@dataclass(frozen=True)
class Tokens:
    """Texts, as rows of ``length`` token numbers."""

    tokenizer: str
    length: int

    @cached_property
    def _found(self) -> Tokenizer:
        return tokenizer(self.tokenizer, self.length)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one encoded text."""
        return (self.length,)

    def words(self, rows: Tensor) -> list[list[str]]:
        """Return the tokens of each row as texts, those that fill it up as nothing."""
        return [["" if one == self._found.padding else self._found.names(one) for one in row] for row in rows.tolist()]

    def mask(self, rows: Tensor) -> Tensor:
        """Return one for every token of a row, and zero where the row is filled up."""
        return (rows != self._found.padding).to(torch.int64)

    def __call__(self, raw: Tensor) -> Tensor:
        """Encode rows of token numbers."""
        return widened(raw)

    def read(self, given: Sequence[Any]) -> Tensor:
        """Return texts as rows of token numbers."""
        return self._found.tokenize([str(one) for one in given])


@dataclass(frozen=True)
class Features:
    """Numbers that a model takes as they are, or as (x − mean) / std; ``columns`` are their names in a table."""

    shape: tuple[int, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    columns: tuple[str, ...] = ()

    def __call__(self, raw: Tensor) -> Tensor:
        """Encode rows of numbers."""
        return Standardized(self.mean, self.std)(raw) if self.mean else raw

    def read(self, given: Sequence[Any]) -> Tensor:
        """Return rows of numbers as one batch."""
        rows = torch.tensor(np.asarray(given, dtype=np.float32))
        if tuple(rows.shape[1:]) != self.shape:
            raise ModelError(f"the model takes inputs of shape {self.shape}, and was given {tuple(rows.shape[1:])}")
        return rows


Preprocess = Images | Tokens | Features
KINDS: dict[str, type[Preprocess]] = {"images": Images, "tokens": Tokens, "features": Features}


def described(preprocess: Preprocess) -> dict[str, Any]:
    """Return a preprocessing as JSON."""
    kind = next(name for name, found in KINDS.items() if isinstance(preprocess, found))
    added = {"layout": "NCHW", "columns": ()} | ({"mean": (), "std": ()} if kind == "features" else {})
    return {"kind": kind, **{name: one for name, one in asdict(preprocess).items() if added.get(name, 0) != one}}


def from_description(values: Mapping[str, Any]) -> Preprocess:
    """Return a preprocessing from its JSON; :class:`ValueError` says what is wrong with it."""
    kind = KINDS.get(str(values.get("kind")))
    if kind is None:
        raise ValueError(f"a preprocessing is one of {', '.join(KINDS)}, not {shown(values.get('kind'))}")
    found: Preprocess = validated(kind, {one.name: values[one.name] for one in fields(kind) if one.name in values})
    if min(found.shape, default=0) < 1 or prod(found.shape) > MOST_VALUES:
        raise ValueError(f"an input of the shape {shown(found.shape)} has no values, or more than {MOST_VALUES}")
    return found


def of_inputs(inputs: Inputs, tokenizer: str | None = None) -> Preprocess | None:
    """Return how a data set's inputs are encoded, or ``None`` for a user's own function, which no file can hold."""
    shape = tuple(inputs.raw.shape[1:])
    if isinstance(inputs.encode, Pixels) and len(shape) == 3:
        return Images((shape[0], shape[1], shape[2]), inputs.encode.mean, inputs.encode.std)
    if inputs.encode is widened and tokenizer is not None:
        return Tokens(tokenizer, shape[0])
    if isinstance(inputs.encode, Standardized):
        return Features(shape, inputs.encode.mean, inputs.encode.std)
    return Features(shape) if inputs.encode is plain else None


def _pixels(given: Any, side: int | None) -> Tensor:
    """Return one image as a batch; a file is cut to a square and resized as those of a folder of images are."""
    if isinstance(given, str | Path):
        with one_line(ModelError, of=ValueError):
            given = read_image(Path(given), side)
    if isinstance(given, Tensor):
        return given[None] if given.ndim == 3 else given
    array = np.array(given)  # a copy: what Pillow gives is not writable
    if array.dtype != np.uint8 or array.ndim not in (2, 3):
        raise ModelError(f"an image is H×W or H×W×C bytes, and this is {array.shape} of {array.dtype}")
    return torch.from_numpy(array if array.ndim == 3 else array[:, :, None]).permute(2, 0, 1)[None]


@dataclass(frozen=True)
class ModelSpec:
    """All that is needed to use weights: the architecture with its options, the classes and the preprocessing.

    With ``fits``, layers take the widths that the weights have: those that FedMA matched may have grown. ``form``
    describes the outputs (:meth:`feddf.Outputs.describe`) where they are not one of the classes for each input;
    ``classes`` are then the names of their channels.
    """

    model: str
    shape: tuple[int, ...]
    classes: tuple[str, ...]
    preprocess: Preprocess | None
    options: Mapping[str, Any] = field(default_factory=dict)
    fits: bool = False
    form: Mapping[str, Any] = field(default_factory=dict)

    @property
    def outputs(self) -> Outputs:
        """What the outputs mean."""
        return from_form(self.form) if self.form else outputs.classes(len(self.classes))

    def with_classes(self, classes: tuple[str, ...]) -> ModelSpec:
        """Return it with names for its channels."""
        return replace(self, classes=classes, form={**self.form, "channels": len(classes)} if self.form else {})

    @property
    def prototype(self) -> Prototype:
        """How the architecture is built."""
        build = partial(build_network, MODELS[self.model], self.shape, self.outputs, self.options)
        return Prototype(self.model.rpartition(":")[2], build, fit_widths if self.fits else None)

    def sizes(self) -> dict[str, torch.Size]:
        """Return the sizes of the architecture's weights, for which no room is made."""
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return {key: tensor.shape for key, tensor in self.prototype.build().state_dict().items()}

    def describe(self) -> dict[str, Any]:
        """Return the description as JSON; one that names code has a mark that says whose it is."""
        fed = described(self.preprocess) if self.preprocess else None
        version = FORMAT if self.form else 1  # what older versions can read, they may
        values = {"format": version, "model": self.model, "options": dict(self.options), "fits": self.fits}
        values |= {"shape": list(self.shape), "classes": list(self.classes), "preprocessing": fed}
        values |= {"outputs": dict(self.form)} if self.form else {}
        mark = {ORIGIN: signed(json.dumps(values, sort_keys=True).encode())} if names_code(self.model) else {}
        return {**values, **mark}

    @classmethod
    def read(cls, values: Mapping[str, Any], where: str, *, trust: bool = False) -> ModelSpec:
        """Return the description in JSON; ``where`` is the file that it stands in.

        One that was made elsewhere and names code is refused: the code would be called with what the file says.
        """
        if values.get("format") not in (1, FORMAT):
            said = f"{where} has the format {shown(values.get('format'))}"
            raise ModelError(f"{said}, and this version reads 1 to {FORMAT}")
        rest, model = {name: value for name, value in values.items() if name != ORIGIN}, str(values.get("model"))
        marked = json.dumps(rest, sort_keys=True).encode()
        if names_code(model) and not trust and not is_mine(marked, values.get(ORIGIN)):
            remedy = "look at that code, then load it by load_model(..., trust=True), or predict with --trust"
            raise ModelError(f"{where} was made elsewhere and has code run: {model!r:.100}; {remedy}")
        with one_line(ModelError, f"{where} does not describe a model", (TypeError, ValueError)):
            found: ModelSpec = validated(cls, {**rest, "preprocess": None, "form": rest.get("outputs") or {}})
            encode = validated(dict[str, Any] | None, rest.get("preprocessing"))
            preprocess = from_description(encode) if encode else None
            if not found.classes or tuple(preprocess.shape if preprocess else found.shape) != found.shape:
                raise ValueError(f"it has no classes, or not the shape {shown(found.shape)} of its preprocessing")
            if found.outputs.channels != len(found.classes):
                raise ValueError(f"it has {found.outputs.channels} channels, and {len(found.classes)} names for them")
            return replace(found, preprocess=preprocess)


class Prediction(NamedTuple):
    """The most likely class of one input, and the probability of every class.

    Or all labels that are more likely than not, with commas between them; or the values, here and as ``probabilities``.
    Where there is an answer at every position, ``mask`` has them (class numbers; labels and values with a channel in
    front), ``label`` names all that occur, and ``probabilities`` are means over positions.
    """

    label: str
    probabilities: dict[str, float]
    mask: Tensor | None = None


class LoadedModel(nn.Module):
    """A network with its class names and its preprocessing. Called, it maps encoded inputs to logits."""

    def __init__(self, network: nn.Module, spec: ModelSpec) -> None:
        super().__init__()
        self.network, self.spec = network, spec
        self.classes, self.preprocess = spec.classes, spec.preprocess

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits."""
        return cast(Tensor, self.network(inputs))

    def predict(self, given: Any, batch: int = BATCH) -> list[Prediction]:
        """Classify image files (or arrays of bytes), texts or rows of numbers, on the device that the model is on."""
        if self.preprocess is None:
            raise ModelError("the model's preprocessing is a function of a program; encode inputs and call the model")
        inputs = list(given) if isinstance(given, Sequence | Tensor) and not isinstance(given, str) else [given]
        found: list[Prediction] = []
        for first in range(0, len(inputs), batch):
            raw = self.preprocess.read(inputs[first : first + batch])
            with evaluation_mode(self):
                rows = self.spec.outputs.probabilities(self(self.preprocess(moved(raw, device_of(self))))).to(CPU)
            found += self._predictions(rows)
        return found

    def _predictions(self, rows: Tensor) -> list[Prediction]:
        outputs = self.spec.outputs
        means = rows.flatten(2).mean(dim=2) if outputs.positions else rows
        labels, masks = outputs.names(means, self.classes), outputs.decide(rows) if outputs.positions else None
        if masks is not None and not outputs.has_units:
            there = (
                masks if outputs.one_is_right else masks.flatten(2).any(dim=2) * torch.arange(1, masks.shape[1] + 1) - 1
            )
            found = (one.unique().tolist() for one in there.long())
            labels = [", ".join(self.classes[number] for number in one if number >= 0) for one in found]
        shares = [dict(zip(self.classes, row, strict=False)) for row in means.tolist()]
        return [
            Prediction(*one)
            for one in zip(labels, shares, masks if masks is not None else [None] * len(rows), strict=True)
        ]


def loaded(spec: ModelSpec, state: State, where: str, device: torch.device = CPU) -> LoadedModel:
    """Return a described architecture with these weights, on a device, in eval mode."""
    try:
        _check_size(spec, state)
        return LoadedModel(spec.prototype.load(state, device), spec).eval()
    except FeddfError:
        raise
    except Exception as error:  # a user's own architecture may do anything
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        named = len(lines) > 1 and lines[0].endswith(":")  # torch's own first line names the class only
        said = lines[1] if named else first_line(error)
        raise ModelError(f"{where} does not fit the model '{spec.model}': {said}") from error


def _check_size(spec: ModelSpec, state: State) -> None:
    """Raise ``ValueError`` for a network of ours that is much larger than its weights, before it is built."""
    depth, values = spec.options.get("depth", 0), sum(tensor.numel() for tensor in state.values())
    if not isinstance(depth, int) or depth > len(state):
        raise ValueError(f"depth = {shown(depth)}, and there are {len(state)} tensors")
    if not names_code(spec.model):
        asked = sum(size.numel() for size in spec.sizes().values())
        if asked > 2 * values + 1000:  # a small difference is said better when the weights are put into it
            raise ValueError(f"its network would have {asked} values, and there are {values}")
