"""``[privacy]``: how much of what is protected, and which other settings that rules out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from feddf.config.sections import FusionConfig, Section, method_key

if TYPE_CHECKING:
    from feddf.config.experiment import Experiment, Mistake

MECHANISMS = {"record": ("dp-sgd", "heads"), "client": ("weights", "answers", "votes")}
"""How each level is protected; the first is what 'auto' stands for."""


class PrivacyConfig(Section):
    """``[privacy]``: differential privacy of records or clients (docs/privacy.md)."""

    level: Literal["none", "record", "client"] = method_key("none", "what is protected: a row of a site, or a client")
    epsilon: float | None = method_key(None, "ε that all planned rounds may spend together", gt=0)
    delta: float = method_key(1e-5, "δ, well below one over the number of records (or clients)", gt=0, lt=0.1)
    clip: float = method_key(1.0, "the largest norm of a record's gradient, a head's input, or a client's change", gt=0)
    mechanism: Literal["auto", "dp-sgd", "heads", "weights", "answers", "votes"] = method_key(
        "auto", "record: 'dp-sgd' or 'heads'; client: noise on 'weights', 'answers' or 'votes'; 'auto': the first"
    )
    sampling: float = method_key(
        0.05, "the chance that a record is in a batch of DP-SGD; 1/sampling steps an epoch", gt=0, le=1
    )
    regularization: float = method_key(10.0, "Λ of the loss Σ ℓ + Λ/2 ‖w‖² of a private head", gt=0)
    groups: int = method_key(1, "noisy averages of so many groups of clients, which teach ('weights')", ge=1)
    quantile: float | None = method_key(
        None, "adapt the clip to this quantile of the changes' norms ('weights')", gt=0, lt=1
    )
    threshold: float = method_key(0.6, "the share of votes from which an input is answered ('votes')", gt=0, le=1)
    answered: int = method_key(500, "the most inputs that are answered in a round ('votes')", ge=1)
    noise: float | None = method_key(None, "the noise multiplier z (default: computed for ε and the rounds)", gt=0)

    @property
    def chosen(self) -> str:
        """The mechanism that 'auto' stands for, or the one that is named."""
        return self.mechanism if self.mechanism != "auto" else MECHANISMS.get(self.level, ("none",))[0]


def privacy_mistakes(experiment: Experiment) -> Iterator[Mistake]:
    """Yield what privacy rules out: whatever leaves a client, or looks at one, without being accounted for."""
    privacy, fusion, local = experiment.privacy, experiment.fusion, experiment.local
    if privacy.level == "none":
        return
    level, mechanism = privacy.level, privacy.chosen
    yield privacy.epsilon is None, "privacy.epsilon", "say how much may be spent, for instance 8"
    allowed = MECHANISMS[level]
    yield mechanism not in allowed, "privacy.mechanism", f"at {level} level it must be {' or '.join(allowed)}"
    yield fusion.method not in ("fedavg", "feddf"), "fusion.method", "with privacy it must be fedavg or feddf"
    yield bool(fusion.parts), "fusion.parts", "what parts send is not accounted for; leave it empty"
    counts = "class counts are withheld; choose another"
    yield fusion.aggregation == "class-counts", "fusion.aggregation", counts
    yield experiment.ensemble.weights == "class-counts", "ensemble.weights", counts
    yield local.binary != "none", "local.binary", "binarized weights are not accounted for; leave it at 'none'"
    yield experiment.attack.kind != "none", "attack.kind", "attackers look at all updates; leave it at 'none'"
    yield from _record_mistakes(experiment, mechanism) if level == "record" else _client_mistakes(experiment, mechanism)


def _record_mistakes(experiment: Experiment, mechanism: str) -> Iterator[Mistake]:
    prior = "it uses all of a client's labels, which no clipping bounds; leave it at 0"
    yield experiment.local.logit_adjustment > 0, "local.logit_adjustment", prior
    steps = "the number of a client's steps does not depend on its examples; leave it at 'none'"
    yield experiment.local.lr_schedule != "none", "local.lr_schedule", steps
    if mechanism == "heads":
        yield (
            experiment.rounds > 1,
            "rounds",
            "a head is solved once; further rounds would only spend more; set it to 1",
        )
        linear = all(prototype.model == "linear" for prototype in experiment.prototypes)
        yield not linear, "prototypes", "private heads are linear; set prototypes = ['linear']"


def _client_mistakes(experiment: Experiment, mechanism: str) -> Iterator[Mistake]:
    for name in ("defense", "trust", "drop_worst", "guard"):
        given, usual = getattr(experiment.fusion, name), FusionConfig.model_fields[name].default
        yield given != usual, f"fusion.{name}", f"it looks at single clients; leave it at {usual!r}"
    yield experiment.run.log_clients, "run.log_clients", "it would show single clients; leave it at false"
    if mechanism == "weights":
        return
    distill, ensemble = experiment.distill, experiment.ensemble
    yield not experiment.distills, "fusion.method", f"noise on {mechanism} needs students, so it must be feddf"
    start = "averaged weights are not private; set it to 'previous', or use privacy.mechanism = 'weights'"
    yield distill.init != "previous", "distill.init", start
    summed = "answers are summed as probabilities; set it to 'probabilities'"
    yield ensemble.combine != "probabilities", "ensemble.combine", summed
    yield ensemble.weights != "uniform", "ensemble.weights", "all clients count alike; set it to 'uniform'"
    yield not ensemble.cache, "ensemble.cache", "answers are released once for the whole pool; set it to true"
    yield ensemble.ema > 0, "ensemble.ema", "it would remember answers without noise; leave it at 0"
    yield ensemble.swag_samples > 0, "ensemble.swag_samples", "it samples from single clients; leave it at 0"
    yield experiment.fusion.momentum > 0, "fusion.momentum", "there are no averaged weights; leave it at 0"
    yield (
        experiment.fusion.batchnorm != "average",
        "fusion.batchnorm",
        "there are no averaged weights; leave it at 'average'",
    )
