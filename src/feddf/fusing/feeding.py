"""How a model is fed, and from where that is known: one value, which terminal, card, report and inspection show.

Size, channels, mean, deviation, order of colors and layout are each said by hand, by the model's files, by the student
or by the pool, or else assumed: what one voice leaves open, the next one fills.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from math import isqrt
from typing import Any

from feddf.config.errors import ConfigError
from feddf.config.fuse_config import InputsConfig
from feddf.saved.model import Features, Images, Preprocess, Tokens, described, from_description

HAND, FILE, STUDENT, POOL, ASSUMED = "by hand", "file", "student", "pool", "assumed"
LIKE_STUDENT = f"{ASSUMED} as for the student"

Sizes = tuple[int | None, ...]
"""The sizes of one input that a file prescribes, ``None`` where any will do."""


@dataclass(frozen=True)
class Feeding:
    """What is known of how a model is fed: every aspect with its value and with its source.

    ``numbers`` is the length of a flat input, which is an image or a row of a table; :meth:`settled` decides.

    >>> Feeding.said("file", channels=1, size=(28, 28)).otherwise(of_range(-1, 1, "assumed")).line
    '1×28×28 (file), mean 0.5, std 0.5, values from -1 to 1 (assumed)'
    """

    values: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    @classmethod
    def said(cls, who: str, **values: Any) -> Feeding:
        """Return what one voice says; ``None`` and an empty list are nothing."""
        lists = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls({name: (value, who) for name, value in lists.items() if value not in (None, ())})

    @classmethod
    def of(cls, preprocess: Preprocess | None, who: str) -> Feeding:
        """Return a whole preprocessing as said by one voice."""
        if isinstance(preprocess, Images):
            channels, *size = preprocess.shape
            rest = {name: getattr(preprocess, name) for name in ("mean", "std", "order", "layout")}
            return cls.said(who, channels=channels, size=tuple(size), **rest)
        if isinstance(preprocess, Tokens):
            return cls.said(who, tokenizer=preprocess.tokenizer, max_tokens=preprocess.length)
        if preprocess is None:
            return cls()
        mean, std, columns = preprocess.mean, preprocess.std, preprocess.columns
        return cls.said(who, features=preprocess.shape, mean=mean, std=std, columns=columns)

    def get(self, name: str) -> Any:
        """Return the value of an aspect, ``None`` if it is not known."""
        return self.values.get(name, (None, ""))[0]

    def who(self, name: str) -> str:
        """Return from where an aspect is known; nothing if it is not."""
        return self.values.get(name, (None, ""))[1]

    def otherwise(self, other: Feeding) -> Feeding:
        """Return this, and where it says nothing, what another says; a mean of other channels than ours is no help."""
        channels, flat = self.get("channels"), {"features", "tokenizer"} & self.values.keys()
        scales = [name for name in ("mean", "std") if other.get(name)]
        unfit = [name for name in scales if flat or (channels and len(other.get(name)) not in (1, channels))]
        return Feeding({**other.without(unfit).values, **self.values})

    def without(self, names: Collection[str]) -> Feeding:
        """Return it without what is said of some aspects."""
        return Feeding({name: value for name, value in self.values.items() if name not in names})

    def settled(self, tabular: bool) -> Feeding:
        """Return it with a flat input as a row of a table, or as a square image: a gray one, or else one in color."""
        count, who = self.values.get("numbers", (None, ""))
        if count is None:
            return self
        rest = self.without(["numbers"])
        if tabular:
            scales = [name for name in ("mean", "std") if rest.who(name) != HAND]
            return Feeding({**rest.without(scales).values, **Feeding.said(who, features=(count,)).values})
        side = next(((one, isqrt(count // one)) for one in (1, 3) if one * isqrt(count // one) ** 2 == count), None)
        if side is None:
            return self
        return rest.otherwise(Feeding.said(who, channels=side[0], size=(side[1], side[1]), layout="flat"))

    @property
    def preprocess(self) -> Preprocess | None:
        """The preprocessing, once all of it is known; :class:`ConfigError` says what does not fit together."""
        said = {name: value for name, (value, _) in self.values.items()}
        if "tokenizer" in said:
            return Tokens(said["tokenizer"], said.get("max_tokens", 64))
        if "features" in said:
            return Features(said["features"], *(tuple(said.get(name, ())) for name in ("mean", "std", "columns")))
        if not {"channels", "size", "mean", "std"} <= said.keys():
            return None
        mean, std = (tuple(said[one]) * (said["channels"] if len(said[one]) == 1 else 1) for one in ("mean", "std"))
        rest = {name: value for name, value in said.items() if name in ("order", "layout")}
        shape = said["channels"], *said["size"]
        try:
            return from_description({"kind": "images", "shape": shape, "mean": mean, "std": std, **rest})
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error).rpartition("value error, ")[2]) from error  # without the values

    @property
    def is_assumed(self) -> bool:
        """Whether it is only assumed how the values of its images are normalized."""
        said = self.who("mean"), self.who("std")
        return any(who.startswith(ASSUMED) for who in said) and isinstance(self.preprocess, Images)

    @property
    def line(self) -> str:
        """All of it in one line, with its sources."""
        return ", ".join(
            f"{', '.join(text for text, _ in group)} ({who})" if who else next(group)[0]
            for who, group in groupby(self._parts(), key=lambda part: part[1])
        )

    def _parts(self) -> list[tuple[str, str]]:
        fed = self.preprocess
        if isinstance(fed, Tokens):
            return [(f"texts as {fed.length} tokens", self.who("max_tokens")), (fed.tokenizer, self.who("tokenizer"))]
        if isinstance(fed, Features):
            how = "standardized by mean and deviation" if fed.mean else "as they are"
            shape = "×".join(map(str, fed.shape))
            return [(f"{shape} numbers", self.who("features")), (how, self.who("mean") or ASSUMED)]
        if fed is None:
            return [("inputs as they are given", "")]
        shown = [("×".join(map(str, fed.shape)), self.who("size"))]
        shown += [(fed.layout, self.who("layout"))] if fed.layout != "NCHW" else []
        shown += [(fed.order, self.who("order"))] if fed.order != "RGB" else []
        shown += [(f"{name} {numbers(getattr(fed, name))}", self.who(name)) for name in ("mean", "std")]
        ends = [[(end - mean) / std for mean, std in zip(fed.mean, fed.std, strict=True)] for end in (0, 1)]
        return [*shown, (f"values from {min(ends[0]):.3g} to {max(ends[1]):.3g}", self.who("std"))]

    def described(self) -> dict[str, Any]:
        """Return it as JSON."""
        fed = self.preprocess
        said_by = {name: who for name, (_, who) in self.values.items()}
        return {"preprocessing": described(fed) if fed else None, "said_by": said_by, "fed": self.line}


def numbers(values: Sequence[float]) -> str:
    """Return a number for each channel, or the one that they share."""
    shown = [f"{value:.4g}" for value in values]
    return shown[0] if len(set(shown)) == 1 else "[" + ", ".join(shown) + "]"


def by_hand(config: InputsConfig) -> Feeding:
    """Return what a configuration says."""
    side = (config.size, config.size) if config.size else None
    rest = {name: getattr(config, name) for name in ("channels", "mean", "std", "order", "tokenizer", "max_tokens")}
    return Feeding.said(HAND, size=side, **rest)


def of_sizes(sizes: Sizes, *, integers: bool = False) -> Feeding:
    """Return what the sizes of one input say: an image, with its channels first or last, a flat input or a text."""
    if len(sizes) == 1:
        return Feeding.said(FILE, **({"max_tokens": sizes[0]} if integers else {"numbers": sizes[0], "layout": "flat"}))
    if len(sizes) != 3:
        return Feeding()
    last = sizes[0] not in (1, 3) and sizes[2] in (1, 3)
    channels, height, width = (sizes[2], *sizes[:2]) if last else sizes
    size = (height, width) if height and width else None
    return Feeding.said(FILE, channels=channels, size=size, layout="NHWC" if last else None)


def shown_sizes(sizes: Sequence[int | None]) -> str:
    """Return sizes as a reader writes them."""
    return "×".join("any" if size is None else str(size) for size in sizes)


def of_range(low: float, high: float, who: str = FILE) -> Feeding:
    """Return the normalization that brings bytes to the values from ``low`` to ``high``.

    >>> of_range(-1, 1).get("mean"), of_range(0, 255).get("std")
    ((0.5,), (0.00392156862745098,))
    """
    return Feeding.said(who, mean=(-low / (high - low),), std=(1 / (high - low),))


def assumed(feeding: Feeding) -> Feeding:
    """Return it with the rest assumed: flat inputs are mostly scikit-learn's, of 0 to 1, and others of −1 to 1."""
    usual = of_range(0 if feeding.get("layout") == "flat" else -1, 1, ASSUMED)
    if {"features", "tokenizer"} & feeding.values.keys():
        return feeding.otherwise(Feeding.said(ASSUMED, max_tokens=64)) if feeding.get("tokenizer") else feeding
    return feeding.otherwise(Feeding.said(ASSUMED, channels=3)).otherwise(usual)


def fed_as(own: Feeding, student: Feeding) -> Feeding:
    """Return how a model is fed, whole: as it says, else as the student is.

    What the student takes from elsewhere about the values of its inputs is no more than an assumption about others.
    """
    if own.preprocess is not None and "numbers" not in own.values:
        return own
    if "tokenizer" in student.values:
        length = own.get("numbers") or own.get("max_tokens")
        own = Feeding.said(own.who("numbers") or own.who("max_tokens"), max_tokens=length)
    own = own.settled("features" in student.values)
    scales = ("mean", "std", "order")
    unfit = ("numbers", "layout", "columns", *(scales if "features" in student.values else ()))
    theirs = {
        one: (value, LIKE_STUDENT if one in scales and who != HAND else STUDENT)
        for one, (value, who) in student.without(unfit).values.items()
    }
    found = own.otherwise(Feeding(theirs))
    found = assumed(found) if found.get("size") else found
    return found if found.preprocess is not None else own
