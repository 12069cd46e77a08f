"""How much privacy noise buys: ε of planned releases, the noise for an ε, and a run's plan before anything is trained.

Neighbors differ by add/remove of one: its terms are in the sums, or are not. Every mechanism here is Gaussian noise of
z times the sensitivity: the most by which one record, or one client, moves what is released. Without sampling any
number of them compose to one Gaussian mechanism, whose (ε, δ) has a closed form; with secret Poisson sampling of
records it is computed from privacy loss distributions by ``dp-accounting`` (``pip install 'feddf[privacy]'``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import ceil, erfc, exp, floor, inf, isfinite, isinf, log10, sqrt
from typing import Any

from feddf.config.errors import ConfigError, FeddfError, one_line
from feddf.config.privacy import MECHANISMS, PrivacyConfig
from feddf.config.sections import ClientsConfig

RELATION = "add/remove"
UNITS = {
    "record": "one row of one client, against everyone, the server included",
    "client": "all data of one client, against all who see the models, but not against the server",
}
MOST_NOISE = 1e4  # beyond it nothing of a release is left: no more is planned, and ε is said to be too small
MOST_EPSILON = 700.0  # beyond it e^ε overflows, and nothing is promised


class PrivacyError(FeddfError):
    """A privacy plan that cannot be met, or a run that would break its promise."""

    exit_code = 2


@dataclass(frozen=True)
class Mechanism:
    """Gaussian noise of ``noise`` times the sensitivity, used ``times`` times.

    Each use is of a secret Poisson sample that has every record with probability ``sampling``; 1 is no sampling. A
    cohort that the configuration's seed decides is not secret, so nothing is amplified by it.
    """

    noise: float
    times: int = 1
    sampling: float = 1.0


def gaussian_delta(epsilon: float, noise: float) -> float:
    """Return the δ of one Gaussian mechanism at an ε: Φ(1/2z − εz) − e^ε Φ(−1/2z − εz).

    Exact for sensitivity 1 and standard deviation z (Balle and Wang 2018, theorem 8).
    """
    below, above = ((epsilon * noise - half / noise) / sqrt(2) for half in (0.5, -0.5))
    return max(0.0, 0.5 * erfc(below) - exp(epsilon) * 0.5 * erfc(above))


def epsilon_of(mechanism: Mechanism, delta: float) -> float:
    """Return the ε that a mechanism spends at a δ.

    >>> round(epsilon_of(Mechanism(1.0), 1e-5), 3)
    4.377
    """
    if mechanism.times == 0 or isinf(mechanism.noise):
        return 0.0
    if mechanism.sampling < 1:
        return float(_sampled(mechanism).get_epsilon(delta))
    noise = mechanism.noise / sqrt(mechanism.times)  # the composition of Gaussian mechanisms is one
    if gaussian_delta(MOST_EPSILON, noise) > delta:
        return inf
    return least(lambda epsilon: gaussian_delta(epsilon, noise) <= delta, 0.0, MOST_EPSILON)


def advantage_of(mechanism: Mechanism) -> float:
    """Return the δ at ε = 0: how much more often than by chance, times two, the best guess of who is in is right."""
    if mechanism.sampling < 1:
        return float(_sampled(mechanism).get_delta(0.0))
    return gaussian_delta(0.0, mechanism.noise / sqrt(mechanism.times))


@lru_cache(maxsize=256)
def _sampled(mechanism: Mechanism) -> Any:
    """Return the library's accountant of a mechanism that samples."""
    with one_line(PrivacyError, "sampled batches need dp-accounting: pip install 'feddf[privacy]'", ImportError):
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
        from dp_accounting.pld import PLDAccountant
    event = PoissonSampledDpEvent(mechanism.sampling, GaussianDpEvent(mechanism.noise))
    return PLDAccountant().compose(event, mechanism.times)


def noise_for(epsilon: float, delta: float, times: int = 1, sampling: float = 1.0) -> float:
    """Return the least noise multiplier z with which so many uses stay within (ε, δ), rounded up by at most 0.1 %.

    >>> noise_for(1.0, 1e-5)
    3.732
    """
    found = least(lambda z: epsilon_of(Mechanism(z, times, sampling), delta) <= epsilon, 0.01, MOST_NOISE, 2e-4)
    step = 10.0 ** (floor(log10(found)) - 3)
    return float(f"{ceil(found / step) * step:.4g}")


def least(holds: Callable[[float], bool], low: float, high: float, precision: float = 1e-12) -> float:
    """Return the least value between two for which something holds that holds for all above it."""
    while high - low > precision * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


# The plan of a run


@dataclass(frozen=True)
class Plan:
    """What is released with which noise, how often, and what that spends; ``a_round`` is what one round uses."""

    privacy: PrivacyConfig
    a_round: Mechanism
    rounds: int

    def spent(self, rounds: int) -> float:
        """Return the ε after so many rounds in which one client's, or record's, data were used."""
        return epsilon_of(replace(self.a_round, times=self.a_round.times * rounds), self.privacy.delta)

    @property
    def about(self) -> dict[str, Any]:
        """What is written down of it, and must be so whenever a run goes on."""
        privacy = self.privacy
        names = {"level": privacy.level, "on": privacy.chosen, "relation": RELATION, "delta": privacy.delta}
        return {**asdict(self.a_round), **names}

    def __str__(self) -> str:
        """Return the plan in one line."""
        level, on = self.privacy.level, MECHANISMS[self.privacy.chosen][1]
        promise = f"ε = {self.spent(self.rounds):.3g}, δ = {self.privacy.delta:g} after {self.rounds} rounds"
        added = f"noise of {self.a_round.noise:g} × the clip on {on}"
        return f"privacy at {level} level: {promise}, for {RELATION} of {UNITS[level]}; {added}"


def steps_of_epoch(sampling: float) -> int:
    """Return how many samples make an epoch."""
    return max(1, round(1 / sampling))


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
    privacy, on, noise = plan.privacy, plan.privacy.chosen, plan.a_round.noise
    votes = 2 * sqrt(2 * min(pool, privacy.answered))
    size = {"weights": sqrt(weights * privacy.groups), "answers": sqrt(pool), "votes": votes}.get(on, 0.0)
    if clients.cohort < (needed := ceil(noise * size)):
        other = "or use privacy.level = 'record'" if on == "weights" else "or a smaller pool"
        drowned = f"noise of {noise:g} × the clip drowns the {clients.cohort} clients of a round"
        allowed = f"{drowned}; at ε = {privacy.epsilon:g} a round needs {needed}, {other}"
        raise ConfigError.at("clients.total", clients.total, allowed)
