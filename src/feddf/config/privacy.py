"""``[privacy]``: how much of what is protected, and which other settings that rules out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from feddf.config.sections import Section, method_key

if TYPE_CHECKING:
    from feddf.config.experiment import Experiment, Mistake

MECHANISMS = {
    "dp-sgd": ("record", "each step's sum of clipped gradients"),
    "heads": ("record", "each client's head"),
    "weights": ("client", "the sum of clipped changes of weights"),
    "answers": ("client", "the sum of answers on the pool"),
    "votes": ("client", "votes on the pool, and the test of their majority"),
}
"""The level that each protects, and what has noise on it; a level's first is what 'auto' stands for."""


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
    regularization: float = method_key(10.0, "Λ of the loss Σ ℓ + Λ/2 ‖w‖² of a private head", ge=0.01)
    groups: int = method_key(1, "noisy averages of so many groups of clients, which teach ('weights')", ge=1)
    quantile: float | None = method_key(None, "the clip goes to this quantile of norms ('weights')", gt=0, lt=1)
    threshold: float = method_key(0.6, "the share of votes from which an input is answered ('votes')", gt=0, le=1)
    answered: int = method_key(500, "the most inputs that are answered in a round ('votes')", ge=1)
    noise: float | None = method_key(None, "the noise multiplier z (default: computed for ε and the rounds)", gt=0)

    @property
    def chosen(self) -> str:
        """The mechanism that 'auto' stands for, or the one that is named."""
        first = next(name for name, (level, _) in MECHANISMS.items() if level == self.level)
        return first if self.mechanism == "auto" else self.mechanism


def privacy_mistakes(experiment: Experiment) -> Iterator[Mistake]:
    """Yield what privacy rules out: whatever leaves a client, or looks at one, without being accounted for."""
    privacy, changed, total = experiment.privacy, experiment.changed, experiment.clients.total
    if (level := privacy.level) == "none":
        yield from changed(["privacy.epsilon", "privacy.mechanism"], "nothing is protected by privacy.level = 'none'")
        return
    mechanism, fusion = privacy.chosen, experiment.fusion
    allowed = [name for name, (protected, _) in MECHANISMS.items() if protected == level]
    yield privacy.epsilon is None, "privacy.epsilon", "say how much may be spent, for instance 8"
    yield mechanism not in allowed, "privacy.mechanism", f"at {level} level it must be {' or '.join(allowed)}"
    yield privacy.delta >= 1 / total, "privacy.delta", f"publishing one client would do; it must be below 1/{total}"
    yield fusion.method not in ("fedavg", "feddf"), "fusion.method", "with privacy it is fedavg or feddf"
    for name, value in (("fusion.aggregation", fusion.aggregation), ("ensemble.weights", experiment.ensemble.weights)):
        yield value == "class-counts", name, "class counts are withheld; choose another"
    unknown = "what it makes of clients is not accounted for"
    yield from changed(["fusion.exchange", "fusion.parts", "local.binary", "attack.kind"], unknown)
    if level == "record":
        whole = "it follows from all of a client's examples, which no clipping bounds"
        yield from changed(["local.logit_adjustment", "local.lr_schedule"], whole)
    else:
        judges = ["fusion.defense", "fusion.trust", "fusion.drop_worst", "fusion.guard", "run.log_clients"]
        yield from changed(judges, "it looks at single clients")
    if mechanism == "heads":
        linear = all(prototype.model == "linear" for prototype in experiment.prototypes)
        yield not linear, "prototypes", "private heads are linear; set prototypes = ['linear']"
        yield experiment.rounds > 1, "rounds", "a head is solved once: more rounds would only spend; it must be 1"
    if mechanism in ("answers", "votes"):
        why = f"students know the noisy {mechanism} alone, or privacy.mechanism is 'weights'"
        yield fusion.method != "feddf", "fusion.method", f"{why}; it must be 'feddf'"
        yield experiment.distill.init != "previous", "distill.init", f"{why}; it must be 'previous'"
        yield experiment.ensemble.combine != "probabilities", "ensemble.combine", f"{why}; it must be 'probabilities'"
        alone = ["ensemble.weights", "ensemble.cache", "ensemble.groups", "ensemble.ema", "ensemble.swag_samples"]
        yield from changed(["fusion.momentum", "fusion.batchnorm", *alone], why)
