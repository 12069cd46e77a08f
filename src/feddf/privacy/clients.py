"""Privacy at client level: noise on the sum of clients' changes, answers or votes, and nothing else is used of them.

A client more or less (its change, answers or vote being zero) moves a sum by the sensitivity at the most. How many
clients answered is public; sums are divided by that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional as F

from feddf.config.privacy import PrivacyConfig
from feddf.fusion.ensemble import CachedTargets, EnsembleTargets, MakeTargets, Memory, avg_probabilities
from feddf.fusion.groups import deal
from feddf.outputs import Outputs
from feddf.privacy.accountant import PrivacyError
from feddf.privacy.noise import Noise, normal
from feddf.privacy.releases import Releases
from feddf.scores import CHANNELS
from feddf.types import Fused, Fusion, ServerState, State, Update, WeightedLogits

CLIP = "clip"  # what the clip is called in the server's memory, where it adapts
RATE = 0.2  # η of the adaptive clip (Andrew et al. 2021)


# Weights: DP-FedAvg


def noisy_groups(inner: Fusion, releases: Releases, *, noise: Noise, config: PrivacyConfig) -> Fusion:
    """Return DP-FedAvg (McMahan et al. 2018) around any fusion, which gets noisy averages of groups as its updates.

    Clients are dealt to G groups of their architecture, in an order that the seed decides. A group's average is
    x_{t−1} + (Σ_k Δ_k min(1, S/‖Δ_k‖) + N(0, (z S)²)) / K_g. Each client is in one group, so that all groups together
    are one Gaussian mechanism with noise z. Averages, ensembles of the groups and students are post-processing.

    With a ``quantile`` γ the clip follows it: S ← S exp(−η (b − γ)), b being the share of changes within S with noise
    of deviation K/20 on its sum (Andrew et al. 2021). That release is paid for by more noise on the changes,
    (z⁻² − (2σ_b)⁻²)^(−1/2): a client moves the sum of (1[‖Δ_k‖ ≤ S] − 1/2) by 1/2.
    """

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        bound = float(server.memory[CLIP][CLIP][CLIP]) if CLIP in server.memory else config.clip
        dealt, quantile = deal(updates, config.groups, seed), config.quantile
        spread = len(updates) / 20  # of the noise on the number of changes within the clip

        def make() -> State:
            on_changes = noise if quantile is None else replace(noise, multiplier=split_noise(noise.multiplier, spread))
            found: dict[str, Tensor] = {}
            within = 0.0
            for name, members in dealt.items():
                before = server.models[members[0].prototype]
                total, small = clipped_changes(before, members, bound)
                within += small - len(members) / 2
                for key, value in total.items():
                    noisy = value + on_changes(value.shape, bound)
                    found[f"{name} {key}"] = (before[key].double() + noisy / len(members)).to(before[key].dtype)
            if quantile is not None:
                found[CLIP] = (within + spread * normal((), noise.source)) / len(updates) + 0.5
            return found

        released, averages = releases.once(server.round + 1, "weights", make), []
        for name, members in dealt.items():  # what is no floating number stays as it was
            before = server.models[members[0].prototype]
            state = {key: released.get(f"{name} {key}", value) for key, value in before.items()}
            averages.append(Update(name, members[0].prototype, server.round + 1, state, 1))
        fused = inner(server, averages, seed)
        if quantile is None:
            return fused
        after = torch.tensor(bound).double() * (-RATE * (released[CLIP] - quantile)).exp()
        memory = {**fused.server.memory, CLIP: {CLIP: {CLIP: after}}}
        return replace(fused, server=replace(fused.server, memory=memory), notes={**fused.notes, CLIP: round(bound, 5)})

    return fuse


def clipped_changes(before: State, members: Sequence[Update], clip: float) -> tuple[dict[str, Tensor], int]:
    """Return Σ_k Δ_k min(1, S/‖Δ_k‖) over floating tensors, and how many changes were within the clip S."""
    keys = [key for key, value in before.items() if value.is_floating_point()]
    total = {key: torch.zeros(before[key].shape, dtype=torch.float64) for key in keys}
    within = 0
    for member in members:
        change = {key: member.state[key].double() - before[key].double() for key in keys}
        norm = sqrt(sum(float(one.square().sum()) for one in change.values()))
        within += norm <= clip
        for key, one in change.items():
            total[key] += one * min(1.0, clip / max(norm, 1e-300))
    return total, within


def split_noise(noise: float, spread: float) -> float:
    """Return the noise on changes such that it and the noisy count together cost what ``noise`` alone would."""
    if 2 * spread <= noise:
        raise PrivacyError(f"privacy.quantile: with noise {noise:g} it needs above {10 * noise:.0f} clients a round")
    return 1 / sqrt(noise**-2 - (2 * spread) ** -2)


# Answers and votes


def noisy_targets(inner: MakeTargets, releases: Releases, add_noise: Callable[[Tensor, int], Tensor]) -> MakeTargets:
    """Return targets that are the mean of so many teachers' answers, or votes, with noise, as probabilities.

    To project them onto the simplex, and to train students, is post-processing. An input whose votes were not clear has
    a target of zeros, from which nothing is learned.
    """

    def ask(updates: Sequence[Update], seed: int, past: Memory) -> EnsembleTargets:
        def make() -> State:
            mean: Tensor = inner(updates, seed, past).targets.probabilities  # type: ignore[attr-defined]
            return {"answers": add_noise(mean.double(), len(updates))}

        answers = releases.once(updates[0].round, "answers", make)["answers"]
        targets = on_simplex(answers) * answers.any(dim=1, keepdim=True)
        return EnsembleTargets(CachedTargets(targets.float()), None, {}, "single clients are not shown at client level")

    return ask


def noisy_answers(mean: Tensor, clients: int, *, noise: Noise, config: PrivacyConfig) -> Tensor:
    """Return the mean of so many clients' probabilities with noise.

    A client's answer to an input has norm 1 at the most, and those to all n inputs of the pool √n: that is the
    sensitivity of the sum.
    """
    return mean + noise(mean.shape, sqrt(len(mean))) / clients


def noisy_votes(mean: Tensor, clients: int, *, noise: Noise, config: PrivacyConfig) -> Tensor:
    """Return majorities by the confident GNMax of PATE (Papernot et al. 2018), as one-hot rows: noisy, and if clear.

    An input is answered with argmax_c (n_c + N(0, σ₂²)) if max_c n_c + N(0, σ₁²) reaches the threshold's share of K
    votes, until A of n are answered. One vote moves the largest count, and the vector of counts, by 1 at the most: n
    tests with σ₁ = z √(2n) and A answers with σ₂ = z √(2A) cost what one Gaussian mechanism with noise z does. That is
    the bound that holds for any votes; PATE's data-dependent one, which is lower where teachers agree, is not used.
    """
    counts = mean * clients
    most = min(config.answered, len(counts))
    tested = counts.max(dim=1).values + noise((len(counts),), sqrt(2 * len(counts)))
    chosen = (tested >= config.threshold * clients).nonzero().flatten()[:most]
    heard = counts[chosen] + noise(counts[chosen].shape, sqrt(2 * most))
    return torch.zeros_like(counts).index_put((chosen, heard.argmax(dim=1)), torch.ones(()).to(counts))


def votes(answers: Iterable[WeightedLogits], temperature: float, outputs: Outputs) -> Tensor:
    """Return the share of the teachers' votes for each class."""
    chosen = (F.one_hot(one.logits.argmax(dim=CHANNELS), one.logits.shape[CHANNELS]) for one in answers)
    return avg_probabilities((WeightedLogits(1e3 * one) for one in chosen), 1.0, outputs)  # e^−1000 is 0


def on_simplex(rows: Tensor) -> Tensor:
    """Return the nearest probabilities to each row (Duchi et al. 2008)."""
    falling = rows.sort(dim=1, descending=True).values
    excess = (falling.cumsum(dim=1) - 1) / torch.arange(1, rows.shape[1] + 1)
    positive = (falling > excess).sum(dim=1, keepdim=True)
    return (rows - excess.gather(1, positive - 1)).clamp(min=0)
