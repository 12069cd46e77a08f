"""The plan of a run's privacy, made before anything is trained: the noise, what it will spend, and whether it pays."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, isfinite, sqrt

from feddf.config.errors import ConfigError
from feddf.config.privacy import PrivacyConfig
from feddf.config.sections import ClientsConfig
from feddf.privacy.accountant import Mechanism, epsilon_of, noise_for
from feddf.privacy.dpsgd import steps_of_epoch

RELATION = "add/remove"
UNITS = {
    "record": "one row of one client, against everyone, the server included",
    "client": "all data of one client, against all who see the models, but not against the server",
}
ON = {
    "dp-sgd": "each step's sum of clipped gradients",
    "heads": "each client's head",
    "weights": "the sum of clipped changes of weights",
    "answers": "the sum of answers on the pool",
    "votes": "votes on the pool, and the test of their majority",
}


@dataclass(frozen=True)
class Plan:
    """What is released with which noise, how often, and what that spends; ``a_round`` is what one round uses."""

    privacy: PrivacyConfig
    a_round: Mechanism
    rounds: int

    @property
    def on(self) -> str:
        """What has noise on it: the mechanism's name."""
        return self.privacy.chosen

    def spent(self, rounds: int) -> float:
        """Return the ε after so many rounds in which one client's, or record's, data were used."""
        return epsilon_of(self.a_round.repeated(rounds), self.privacy.delta)

    def __str__(self) -> str:
        """Return the plan in one line."""
        level = self.privacy.level
        promise = f"ε = {self.spent(self.rounds):.3g}, δ = {self.privacy.delta:g} after {self.rounds} rounds"
        added = f"noise of {self.a_round.noise:g} × the clip on {ON[self.on]}"
        return f"privacy at {level} level: {promise}, for {RELATION} of {UNITS[level]}; {added}"


def make_plan(privacy: PrivacyConfig, rounds: int, epochs: int) -> Plan:
    """Return the plan for a number of rounds, or raise :class:`ConfigError` where it exceeds what may be spent.

    DP-SGD takes 1/q steps an epoch on secret samples of rate q. A client counts as if it took part in every round: the
    cohort follows from the seed, so there is no amplification by it.
    """
    sampled = privacy.chosen == "dp-sgd"
    times, sampling = (epochs * steps_of_epoch(privacy.sampling), privacy.sampling) if sampled else (1, 1.0)
    assert privacy.epsilon is not None, "a configuration with a level has an ε"
    noise = privacy.noise or noise_for(privacy.epsilon, privacy.delta, times * rounds, sampling)
    plan = Plan(privacy, Mechanism(noise, times, sampling), rounds)
    if (cost := plan.spent(rounds)) > privacy.epsilon:
        accept = f"; {ceil(cost * 100) / 100:g} would accept that" if isfinite(cost) else ""
        costs = f"{rounds} rounds with noise {noise:g} cost ε = {cost:.4g}{accept}"
        raise ConfigError.at("privacy.epsilon", privacy.epsilon, costs)
    return plan


def refuse_absurd(plan: Plan, clients: ClientsConfig, weights: int, pool: int) -> None:
    """Raise :class:`ConfigError` where noise drowns all that a cohort could say, with the number that would do.

    The noise in the mean of K clients' changes has the norm z S √d √G / K for d weights and G groups, and no change is
    larger than S. In the mean of K answers to n inputs it has the deviation z √n / K a class, and no probability is
    above 1. Of A answers by vote it has the deviation z √(2A), and a majority of K leads by K at the most.
    """
    privacy, noise = plan.privacy, plan.a_round.noise
    if privacy.level != "client":
        return
    votes = 2 * sqrt(2 * min(pool, privacy.answered))
    size = {"weights": sqrt(weights * privacy.groups), "answers": sqrt(pool), "votes": votes}[plan.on]
    needed = ceil(noise * size)
    if clients.cohort < needed:
        said = f"noise of {noise:g} × the clip on {ON[plan.on]} drowns the {clients.cohort} clients of a round"
        other = "or use privacy.level = 'record'" if plan.on == "weights" else "or a smaller pool"
        allowed = f"{said}; at ε = {privacy.epsilon:g} a round needs {needed}, {other}"
        raise ConfigError.at("clients.total", clients.total, allowed)
