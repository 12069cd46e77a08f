"""How much privacy noise buys: ε of planned releases, and the noise for an ε. Neighbors differ by add/remove of one.

Every mechanism here is Gaussian noise of z times the sensitivity: the most by which adding or removing one record, or
one client, moves what is released. Without sampling any number of them compose to one Gaussian mechanism, whose (ε, δ)
has a closed form; with secret Poisson sampling of records it is computed from privacy loss distributions by
``dp-accounting`` (``pip install 'feddf[privacy]'``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil, erfc, exp, floor, inf, isinf, log10, sqrt
from typing import Any

from feddf.config.errors import FeddfError

MOST_NOISE = 1e4  # beyond it nothing of a release is left
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

    def repeated(self, times: int) -> Mechanism:
        """Return the mechanism used so many times as often."""
        return replace(self, times=self.times * times)


def gaussian_delta(epsilon: float, noise: float) -> float:
    """Return the δ of one Gaussian mechanism at an ε: Φ(1/2z − εz) − e^ε Φ(−1/2z − εz).

    Exact for sensitivity 1 and standard deviation z (Balle and Wang 2018, theorem 8).
    """
    if noise <= 0:
        return 1.0
    return max(0.0, _cdf(0.5 / noise - epsilon * noise) - exp(epsilon) * _cdf(-0.5 / noise - epsilon * noise))


def _cdf(x: float) -> float:
    return 0.5 * erfc(-x / sqrt(2))


def epsilon_of(mechanism: Mechanism, delta: float) -> float:
    """Return the ε that a mechanism spends at a δ.

    >>> round(epsilon_of(Mechanism(1.0), 1e-5), 3)
    4.377
    """
    if mechanism.noise <= 0:
        return inf
    if mechanism.times == 0 or isinf(mechanism.noise):
        return 0.0
    if mechanism.sampling < 1:
        return float(_sampled(mechanism).get_epsilon(delta))
    noise = mechanism.noise / sqrt(mechanism.times)  # the composition of Gaussian mechanisms is one
    if gaussian_delta(0.0, noise) <= delta:
        return 0.0
    if gaussian_delta(MOST_EPSILON, noise) > delta:
        return inf
    return least(lambda epsilon: gaussian_delta(epsilon, noise) <= delta, 0.0, MOST_EPSILON)


@lru_cache(maxsize=256)
def _sampled(mechanism: Mechanism) -> Any:
    """Return the library's accountant of a mechanism that samples."""
    try:
        from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
        from dp_accounting.pld import PLDAccountant
    except ImportError as error:
        raise PrivacyError("sampled batches need dp-accounting: pip install 'feddf[privacy]'") from error
    event = PoissonSampledDpEvent(mechanism.sampling, GaussianDpEvent(mechanism.noise))
    return PLDAccountant().compose(event, mechanism.times)


def advantage_of(mechanism: Mechanism) -> float:
    """Return the δ at ε = 0: how much more often than by chance, times two, the best guess of who is in is right."""
    if mechanism.sampling < 1:
        return float(_sampled(mechanism).get_delta(0.0))
    return gaussian_delta(0.0, mechanism.noise / sqrt(mechanism.times))


def noise_for(epsilon: float, delta: float, times: int = 1, sampling: float = 1.0) -> float:
    """Return the least noise multiplier z with which so many uses stay within (ε, δ), rounded up by at most 0.1 %.

    >>> noise_for(1.0, 1e-5)
    3.732
    """
    if isinf(epsilon):
        return 0.0

    def spent(noise: float) -> float:
        return epsilon_of(Mechanism(noise, times, sampling), delta)

    if spent(MOST_NOISE) > epsilon:
        raise PrivacyError(
            f"privacy.epsilon = {epsilon:g}: {times} releases at δ = {delta:g} cannot meet it with useful noise; "
            "plan fewer rounds or epochs, or a larger ε"
        )
    found = least(lambda noise: spent(noise) <= epsilon, 0.01, MOST_NOISE, 2e-4)
    step = 10.0 ** (floor(log10(found)) - 3)
    return float(f"{ceil(found / step) * step:.4g}")


def least(holds: Callable[[float], bool], low: float, high: float, precision: float = 1e-12) -> float:
    """Return the least value between two for which something holds that holds for all above it."""
    while high - low > precision * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
