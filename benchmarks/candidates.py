"""What else could make FedDF need fewer rounds: the candidates of docs/feddf-plus.md, on its two tasks.

    python -m benchmarks.candidates                                            # lists them
    FEDDF_DATA=... python -m benchmarks.candidates running-mean --task CIFAR-10 --seeds 0,1,2 --base feddf-plus

Each changes one part of a method: its start, its clients' loss, its teachers' weights or its fusion. Rows are added to
benchmarks/results/candidates.jsonl: the rounds to the target, the accuracy after each round, and the seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddf.client import combine_halves, log_prior
from feddf.config import Experiment, Settings, load, with_values
from feddf.engines import in_process
from feddf.evaluate import Accuracies, Teacher, accuracy
from feddf.fusion.ensemble import EnsembleTargets, MakeTargets, Memory, avg_logits
from feddf.fusion.feddf import feddf
from feddf.fusion.weights import CLASS_COUNTS, by_class_counts, counts_of, number_of_classes
from feddf.outputs import Outputs, classes
from feddf.rounds import run_rounds
from feddf.runs import methods
from feddf.runs.build import Parts, build
from feddf.runs.spool import ClientStates
from feddf.runtime.device import device_of, threads
from feddf.seeds import derive, seed_torch, torch_generator
from feddf.states import state_of, weighted_mean
from feddf.types import (
    Augment,
    Engine,
    Fused,
    Fusion,
    Inputs,
    Resources,
    Round,
    ServerState,
    State,
    Steps,
    Training,
    Update,
    Weight,
    WeightedLogits,
)
from reproduction.beyond import FEDERATION, TARGETS, TASKS

RESULTS = Path(__file__).parent / "results" / "candidates.jsonl"


# The server's side: what becomes of the fused models


def running_mean(inner: Fusion, decay: float = 0.5) -> Fusion:
    """x_t := γ x_{t−1} + (1 − γ) x̂_t, as in FedEMA-Distill (arXiv 2603.04422): clients are sent a running mean."""
    return _mixed(inner, lambda server, fused: server.models if server.round else fused.server.models, decay)


def half_way(inner: Fusion) -> Fusion:
    """The mean of the averaged and the distilled weights, which lie in one basin because one started from the other."""
    return _mixed(inner, lambda server, fused: fused.start, 0.5)


def _mixed(inner: Fusion, other: Callable[[ServerState, Fused], Mapping[str, State]], share: float) -> Fusion:
    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        fused = inner(server, updates, seed)
        theirs = other(server, fused)
        models = {name: _between(new, theirs[name], share) for name, new in fused.server.models.items()}
        return replace(fused, server=replace(fused.server, models=models))

    return fuse


def _between(ours: State, theirs: State, share: float) -> State:
    return {
        key: torch.lerp(value, theirs[key], share) if value.is_floating_point() else value
        for key, value in ours.items()
    }


# More teachers: averages of the clients' models, which only teach and are not averaged again


def with_averages(ask: MakeTargets) -> MakeTargets:
    """Let each prototype's average teach as much as all of its clients together (FedBE, Chen & Chao 2021, has it)."""
    return _with_teachers(ask, lambda clients, seed: [[1.0] * len(clients)], share=1.0)


def with_mixtures(ask: MakeTargets, samples: int = 10) -> MakeTargets:
    """Let averages with random weights, drawn from Dirichlet(1), teach as well: FedBE's second distribution."""

    def draw(clients: Sequence[Update], seed: int) -> list[list[float]]:
        gamma = torch.empty(samples, len(clients)).exponential_(generator=torch_generator(seed))
        return (gamma / gamma.sum(dim=1, keepdim=True) * len(clients)).tolist()  # type: ignore[no-any-return]

    return _with_teachers(ask, draw, share=1 / samples)


def _with_teachers(
    ask: MakeTargets, draw: Callable[[Sequence[Update], int], Sequence[Sequence[float]]], share: float
) -> MakeTargets:
    def of_more(updates: Sequence[Update], seed: int, memory: Memory) -> EnsembleTargets:
        more: list[Update] = []
        for prototype in sorted({update.prototype for update in updates}):
            clients = [update for update in updates if update.prototype == prototype and update.n_examples > 0]
            if len(clients) < 2:
                continue
            for number, shares in enumerate(draw(clients, derive(seed, "teachers", prototype))):
                more.append(_averaged(f"average {number} of {prototype}", clients, shares, len(clients) * share))
        return ask([*updates, *more], seed, memory)

    return of_more


def _averaged(name: str, clients: Sequence[Update], shares: Sequence[float], trust: float) -> Update:
    """Return an average of clients, which has as many examples of each class as a mean client."""
    weights = [one * update.n_examples for one, update in zip(shares, clients, strict=True)]
    state = weighted_mean([update.state for update in clients], weights)
    n_classes = number_of_classes(clients)
    rows = [one * counts_of(update, n_classes or 1) for one, update in zip(shares, clients, strict=True)]
    counts = (torch.stack(rows).sum(dim=0).round() / len(clients)).long()
    payload = {CLASS_COUNTS: {"counts": counts}} if n_classes else {}
    known = name, clients[0].prototype, clients[0].round, state, int(counts.sum())
    return Update(*known, payload=payload, trust=trust)


def centered_logits(votes: Iterable[WeightedLogits], temperature: float = 1.0, outputs: Outputs = classes()) -> Tensor:
    """Average logits that sum to zero: with weights by class it matters what a teacher adds to all of its logits."""
    centered = (WeightedLogits(vote.logits - vote.logits.mean(dim=-1, keepdim=True), vote.weight) for vote in votes)
    return avg_logits(centered, temperature, outputs)


# The pool: mixed inputs


def mixed(raw: Tensor, generator: torch.Generator) -> Tensor:
    """Return convex combinations of each input with another one (mixup's inputs, Zhang et al. 2018)."""
    n = len(raw)
    share = torch.rand((n, *[1] * (raw.ndim - 1)), generator=generator)
    other = torch.randperm(n, generator=generator)
    return (share * raw + (1 - share) * raw[other]).round().to(raw.dtype)


def moved(raw: Tensor, generator: torch.Generator) -> Tensor:
    """Distort every batch anew, where ``pool.views`` has copies that stay the same and are asked about once."""
    return _view(raw, False, generator)


# FedDF with another ensemble or another pool: methods by name


def feddf_of(
    wrap: Callable[[MakeTargets], MakeTargets], resources: Resources, settings: Settings, engine: Engine
) -> Fusion:
    """FedDF with something around its ensemble."""
    return feddf(
        methods.averaging_rule(resources, settings),
        wrap(methods.ensemble(resources, settings, engine)),
        methods.students(resources, settings, engine),
        methods.CANDIDATES[settings.distill.init],
    )


def feddf_on(augment: Augment, resources: Resources, settings: Settings, engine: Engine) -> Fusion:
    """FedDF on a pool whose batches are changed."""
    return methods.feddf(replace(resources, augment=augment), settings, engine)


feddf_of_averages = partial(feddf_of, with_averages)
feddf_of_mixtures = partial(feddf_of, with_mixtures)
feddf_on_mixed = partial(feddf_on, mixed)
feddf_on_moved = partial(feddf_on, moved)


# The clients' side: FedNTD


def not_true(model: nn.Module, training: Training, *, beta: float, tau: float) -> Steps:
    """FedNTD's half (Lee et al. 2022): β KL(received ‖ own model), both without the true class, is added to the loss.

    Logits are adjusted as in :func:`feddf.client.adjusted`: only one half can change the loss.
    """
    device = device_of(model)
    received = training.prototype.load(training.job.state, device)
    adjustment = (log_prior(training.labels, training.outputs.channels) * tau).to(device)

    def loss(outputs: Tensor, labels: Tensor, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            before = received(inputs)
        others = ~F.one_hot(labels, training.outputs.channels).bool()
        mine, theirs = (z[others].view(len(labels), -1).log_softmax(dim=1) for z in (outputs, before))
        kept = F.kl_div(mine, theirs, reduction="batchmean", log_target=True)
        return F.cross_entropy(outputs + adjustment, labels) + beta * kept

    return Steps(loss=loss)


def fedntd(parts: Parts, beta: float = 1.0) -> Parts:
    """Let clients train with FedNTD's half, beside those of the method."""
    local = parts.experiment.local
    half = partial(not_true, beta=beta, tau=local.logit_adjustment)
    plain = local.model_copy(update={"logit_adjustment": 0.0})
    both = combine_halves([*(part.half for part in parts.method.parts), half])
    return replace(parts, train=partial(parts.train, local=plain, half=both))


# Learned from the pool without labels: a start, and features


def pretrained(model: nn.Module, pool: Inputs, flips: bool, seed: int, steps: int = 400, batch: int = 128) -> nn.Module:
    """Train all but the last layer by contrast of two views of the same input (SimCLR, Chen et al. 2020)."""
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    width = last.in_features
    with seed_torch(derive(seed, "head")):
        head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 32))
    generator = torch_generator(derive(seed, "views"))
    optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-3)
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(pool), (batch,), generator=generator)
        raw = pool.raw[chosen]
        views = torch.cat([pool.encode(_view(raw, flips, generator)) for _ in range(2)])
        z = F.normalize(head(features(model, views)), dim=1)
        similar = (z @ z.T / 0.5).fill_diagonal_(-torch.inf)
        loss = F.cross_entropy(similar, torch.arange(2 * batch).roll(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def features(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return what goes into the last linear layer."""
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    seen: list[Tensor] = []
    handle = last.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    try:
        model(inputs)
    finally:
        handle.remove()
    return seen[0]


def _view(raw: Tensor, flips: bool, generator: torch.Generator) -> Tensor:
    """Shift by up to a quarter, scale brightness and contrast, hide a square; mirror where that keeps the meaning."""
    n, size = len(raw), raw.shape[-1]
    images = raw.float()
    reach = size // 4
    padded = F.pad(images, (reach,) * 4, mode="reflect")
    offsets = torch.randint(0, 2 * reach + 1, (n, 2), generator=generator)
    images = torch.stack([padded[i, :, y : y + size, x : x + size] for i, (y, x) in enumerate(offsets.tolist())])
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    contrast, light = (torch.rand((n, 1, 1, 1), generator=generator) for _ in range(2))
    images = (images - mean) * (0.5 + contrast) + mean * (0.6 + 0.8 * light)
    for i, (y, x) in enumerate(torch.randint(0, size - reach, (n, 2), generator=generator).tolist()):
        images[i, :, y : y + reach, x : x + reach] = mean[i]
    if flips:
        mirrored = torch.rand((n, 1, 1, 1), generator=generator) < 0.5
        images = torch.where(mirrored, images.flip(-1), images)
    return images.clamp(0, 255).to(raw.dtype)


def self_supervised(parts: Parts) -> Parts:
    """Start every prototype from what the pool taught it without labels."""
    pool, seed = parts.task.pool, parts.experiment.seed
    assert pool is not None
    models = {}
    for name, state in parts.server.models.items():
        model = pretrained(parts.prototypes[name].load(state), pool, parts.task.data.flips, seed)
        models[name] = state_of(model, like=state)
    return replace(parts, server=replace(parts.server, models=models))


# The teachers' weights: for each sample by how much a client's data look like it

ODDS = "odds"
"""What s_k(x) / (1 − s_k(x)) of each input of the pool is called in an update's payload."""


def with_odds(odds: Mapping[str, Tensor], inner: Fusion) -> Fusion:
    """Add to each update what is known of its client's odds."""

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        known = [
            replace(update, payload={**update.payload, ODDS: {ODDS: odds[update.client_id]}}) for update in updates
        ]
        return inner(server, known, seed)

    return fuse


def by_density(teachers: Sequence[Teacher], resources: Resources, accuracies: Accuracies) -> Mapping[str, Weight]:
    """w_k(x) = n_k s_k(x) / (1 − s_k(x)): FedAUX's estimate (arXiv 2102.02514) of FedGO's n_k p_k(x) (2502.06349)."""
    return {teacher.id: partial(_times, teacher.n_examples * teacher.payload[ODDS][ODDS]) for teacher in teachers}


def by_density_and_counts(
    teachers: Sequence[Teacher], resources: Resources, accuracies: Accuracies
) -> Mapping[str, Weight]:
    """w_k(x, c) = n_kc s_k(x) / (1 − s_k(x))."""
    counts = by_class_counts(teachers, resources, accuracies)
    odds = {teacher.id: teacher.payload[ODDS][ODDS] for teacher in teachers}
    return {name: partial(_times, odds[name] * torch.as_tensor(row)) for name, row in counts.items()}


def _times(weights: Tensor, logits: Tensor) -> Tensor:
    return weights.to(torch.float64)


def estimate_odds(parts: Parts, least: float = 0.01) -> dict[str, Tensor]:
    """Let every client tell its own inputs from the pool's, by one logistic regression on features that all share.

    Where the pool is of another domain everybody's odds are small, so they are taken relative to the best client's,
    which changes no weighted mean over all clients.
    """
    pool, task, seed = parts.task.pool, parts.task, parts.experiment.seed
    assert pool is not None
    name = max(parts.prototypes, key=lambda name: len(parts.server.models[name]))
    extractor = pretrained(parts.prototypes[name].load(parts.server.models[name]), pool, task.data.flips, seed).eval()
    with torch.no_grad():
        public = _features_of(extractor, pool)
        own = _features_of(extractor, task.train.inputs)
    mean, scale = public.mean(dim=0), public.std(dim=0) + 1e-6
    public, own = (public - mean) / scale, (own - mean) / scale
    scores = {}
    for client in parts.federation.clients:
        assert client.indices is not None
        weights = _logistic(own[client.indices], public)
        scores[client.id] = public @ weights[:-1] + weights[-1]  # log s / (1 − s)
    best = torch.stack(list(scores.values())).amax(dim=0)
    return {name: (score - best).exp().clamp_min(least).unsqueeze(1) for name, score in scores.items()}


def _features_of(model: nn.Module, inputs: Inputs) -> Tensor:
    return torch.cat([features(model, inputs.batch(chunk)) for chunk in torch.arange(len(inputs)).split(256)])


def _logistic(own: Tensor, public: Tensor, decay: float = 0.01) -> Tensor:
    """Return the weights of a balanced, regularized logistic regression, and its bias."""
    x = torch.cat([own, public])
    y = torch.cat([torch.ones(len(own)), torch.zeros(len(public))])
    balance = torch.where(y > 0, len(x) / (2 * len(own)), len(x) / (2 * len(public)))
    weights = torch.zeros(x.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = x @ weights[:-1] + weights[-1]
        loss = F.binary_cross_entropy_with_logits(logits, y, balance) + decay * weights[:-1].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach()


# Candidates by name: values of keys, and what they change of an experiment's parts

Change = Callable[[Parts], Parts]


def unchanged(parts: Parts) -> Parts:
    """Change nothing: the values of keys say it all."""
    return parts


def _around(wrap: Callable[[Fusion], Fusion]) -> Change:
    def change(parts: Parts) -> Parts:
        return replace(parts, method=replace(parts.method, fuse=wrap(parts.method.fuse)))

    return change


def _weighted(parts: Parts) -> Parts:
    return _around(partial(with_odds, estimate_odds(parts)))(parts)


CANDIDATES: dict[str, tuple[Mapping[str, Any], Change]] = {
    "none": ({}, unchanged),
    "server-momentum": ({"fusion.momentum": 0.2}, unchanged),
    "running-mean": ({}, _around(running_mean)),
    "half-way": ({}, _around(half_way)),
    "not-true": ({}, fedntd),
    "self-supervised": ({}, self_supervised),
    "density": ({"ensemble.weights": f"{__name__}:by_density"}, _weighted),
    "density-and-counts": (
        {"ensemble.weights": f"{__name__}:by_density_and_counts", "fusion.parts": ("class-counts",)},
        _weighted,
    ),
    "averages": ({"fusion.method": f"{__name__}:feddf_of_averages"}, unchanged),
    "mixtures": ({"fusion.method": f"{__name__}:feddf_of_mixtures"}, unchanged),
    "centered": ({"ensemble.combine": f"{__name__}:centered_logits"}, unchanged),
    "class-rows": ({"fusion.aggregation": "class-counts"}, unchanged),
    "mixed": ({"ensemble.cache": False, "fusion.method": f"{__name__}:feddf_on_mixed"}, unchanged),
    "moved": ({"ensemble.cache": False, "fusion.method": f"{__name__}:feddf_on_moved"}, unchanged),
    "views": ({"pool.views": 4}, unchanged),
    "no-norm": ({"prototypes": ({"model": "resnet8", "norm": "none"},)}, unchanged),
    "groupnorm": ({"prototypes": ({"model": "resnet8", "norm": "group"},)}, unchanged),
}


def made(candidates: Sequence[str], task: str, base: str, seed: int) -> Parts:
    """Return the parts of one experiment of the task."""
    preset, changes = TASKS[task]
    values: dict[str, Any] = {}
    for name in candidates:
        for key, value in CANDIDATES[name][0].items():
            if values.setdefault(key, value) != value:
                raise ValueError(f"{'+'.join(candidates)}: two of them change {key}")
    spelled_out = with_values(load(preset), {**FEDERATION, **changes, "seed": seed, "fusion.method": base})
    experiment: Experiment = with_values(spelled_out, values)
    parts = build(experiment)
    for name in candidates:
        parts = CANDIDATES[name][1](parts)
    return parts


def rounds_of(parts: Parts) -> Iterator[Round]:
    """Run all rounds of an experiment."""
    parts.engine.become(in_process)
    fuse, added = parts.method.fuse, parts.method.parts
    with TemporaryDirectory() as folder:
        engine = ClientStates(Path(folder)).engine(in_process) if any(one.keeps for one in added) else in_process
        closed = run_rounds(parts.server, parts.federation, engine=engine, train=parts.train, fuse=fuse, parts=added)
        yield from islice(closed, parts.experiment.rounds)


def run(candidates: Sequence[str], task: str, base: str, seed: int) -> dict[str, Any]:
    """Run one experiment of the task and return its row."""
    began = perf_counter()
    with threads(1):
        parts = made(candidates, task, base, seed)
        curve = [_accuracy(parts, closed.server.models) for closed in rounds_of(parts)]
    target = TARGETS[parts.experiment.data.name]
    reached = next((i for i, value in enumerate(curve, 1) if value >= target), len(curve) + 1)
    return {
        "task": task,
        "base": base,
        "candidates": list(candidates),
        "seed": seed,
        "rounds to target": reached,
        "last four rounds": round(100 * sum(curve[-4:]) / 4, 1),
        "curve": [round(value, 4) for value in curve],
        "seconds": round(perf_counter() - began),
    }


def _accuracy(parts: Parts, models: Mapping[str, State]) -> float:
    found = [accuracy(parts.prototypes[name].load(state), parts.task.data.test) for name, state in models.items()]
    return sum(found) / len(found)


def main() -> None:
    """Run what the command line names, or list the candidates."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("candidates", nargs="?", help="names with a plus between them; commas between several")
    parser.add_argument("--task", choices=list(TASKS), default="digits")
    parser.add_argument("--base", default="feddf-plus", help="a method's name, for instance fedavg+adjusted")
    parser.add_argument("--seeds", default="0")
    arguments = parser.parse_args()
    if not arguments.candidates:
        print("\n".join(CANDIDATES))
        return
    for names in arguments.candidates.split(","):
        for seed in map(int, arguments.seeds.split(",")):
            row = run(names.split("+"), arguments.task, arguments.base, seed)
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print({key: value for key, value in row.items() if key != "curve"}, flush=True)


if __name__ == "__main__":
    main()
