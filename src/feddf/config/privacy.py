"""``[privacy]``: how much of what is protected, and which other settings that rules out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from feddf.config.keys import flat
from feddf.config.sections import Section, method_key

if TYPE_CHECKING:
    from feddf.config.experiment import Experiment, Mistake

MECHANISMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "dp-sgd": ("record", ("clip", "sampling")),
    "heads": ("record", ("clip", "regularization")),
    "weights": ("client", ("clip", "groups", "quantile")),
    "answers": ("client", ()),
    "votes": ("client", ("threshold", "answered")),
}
"""The level that each protects, and the keys that it looks at; a level's first is what 'auto' stands for."""


class PrivacyConfig(Section):
    """``[privacy]``: differential privacy of records or clients (docs/privacy.md)."""

    level: Literal["none", "record", "client"] = method_key("none", "what is protected: a row of a site, or a client")
    epsilon: float | None = method_key(None, "ε that all planned rounds may spend together", gt=0)
    delta: float = method_key(1e-5, "δ, well below one over the number of records (or clients)", gt=0, lt=0.1)
    clip: float = method_key(1.0, "the largest norm of a record's gradient, a head's input, or a client's change", gt=0)
    mechanism: Literal["auto", "dp-sgd", "heads", "weights", "answers", "votes"] = method_key(
        "auto", "record: 'dp-sgd' or 'heads'; client: noise on 'weights', 'answers' or 'votes'; 'auto': the first"
    )
    sampling: float = method_key(0.05, "a record's chance of being in a batch; 1/sampling steps an epoch", gt=0, le=1)
    regularization: float = method_key(10.0, "Λ of the loss Σ ℓ + Λ/2 ‖w‖² of a private head", gt=0)
    groups: int = method_key(1, "noisy averages of so many groups of clients, which teach ('weights')", ge=1)
    quantile: float | None = method_key(None, "the clip goes to this quantile of norms ('weights')", gt=0, lt=1)
    threshold: float = method_key(0.6, "the share of votes from which an input is answered ('votes')", gt=0, le=1)
    answered: int = method_key(500, "the most inputs that are answered in a round ('votes')", ge=1)
    noise: float | None = method_key(None, "the noise multiplier z (default: computed for ε and the rounds)", gt=0)

    @property
    def chosen(self) -> str:
        """The mechanism that 'auto' stands for, or the one that is named."""
        return self.mechanism if self.mechanism != "auto" else _mechanisms(self.level)[0]

    @property
    def given(self) -> dict[str, Any]:
        """The keys that the mechanism looks at, with their values."""
        return {name: getattr(self, name) for name in MECHANISMS[self.chosen][1]}


def _mechanisms(level: str) -> list[str]:
    return [name for name, (protected, _) in MECHANISMS.items() if protected == level]


_ALWAYS = {"fusion.exchange": "weights", "fusion.parts": (), "local.binary": "none", "attack.kind": "none"}
_RECORD = {"local.logit_adjustment": 0.0, "local.lr_schedule": "none"}
_SINGLE = {"fusion.defense": "none", "fusion.trust": "none", "fusion.drop_worst": "none", "fusion.guard": None}
_CLIENT = {**_SINGLE, "run.log_clients": False}
_START = {"fusion.method": "feddf", "distill.init": "previous", "fusion.momentum": 0.0, "fusion.batchnorm": "average"}
_SUM = {
    "ensemble.combine": "probabilities",
    "ensemble.weights": "uniform",
    "ensemble.cache": True,
    "ensemble.groups": 0,
}
_ANSWERS = {**_START, **_SUM, "ensemble.ema": 0.0, "ensemble.swag_samples": 0}
"""What keys must be, and why not otherwise: below."""


def privacy_mistakes(experiment: Experiment) -> Iterator[Mistake]:
    """Yield what privacy rules out: whatever leaves a client, or looks at one, without being accounted for."""
    privacy, values = experiment.privacy, flat(experiment.model_dump())
    if (level := privacy.level) == "none":
        return
    mechanism, allowed = privacy.chosen, _mechanisms(level)
    yield privacy.epsilon is None, "privacy.epsilon", "say how much may be spent, for instance 8"
    yield mechanism not in allowed, "privacy.mechanism", f"at {level} level it must be {' or '.join(allowed)}"
    yield values["fusion.method"] not in ("fedavg", "feddf"), "fusion.method", "with privacy it is fedavg or feddf"
    for name in ("fusion.aggregation", "ensemble.weights"):
        yield values[name] == "class-counts", name, "class counts are withheld; choose another"
    ruled: list[tuple[Mapping[str, object], str]] = [(_ALWAYS, "what it makes of clients is not accounted for")]
    if level == "record":
        ruled += [(_RECORD, "it follows from all of a client's examples, which no clipping bounds")]
        linear = all(prototype.model == "linear" for prototype in experiment.prototypes)
        yield mechanism == "heads" and not linear, "prototypes", "private heads are linear; set prototypes = ['linear']"
        once = "a head is solved once, and further rounds would only spend more; it must be 1"
        yield mechanism == "heads" and experiment.rounds > 1, "rounds", once
    else:
        ruled += [(_CLIENT, "it looks at single clients")]
        total = experiment.clients.total
        yield privacy.delta >= 1 / total, "privacy.delta", f"publishing one client would do; it must be below 1/{total}"
        if mechanism != "weights":
            ruled += [(_ANSWERS, f"students know the noisy {mechanism} alone, or privacy.mechanism is 'weights'")]
    for table, why in ruled:
        for name, wanted in table.items():
            yield values.get(name) != wanted, name, f"{why}; it must be {wanted!r}"
