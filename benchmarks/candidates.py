"""What else could make FedDF need fewer rounds: the candidates of docs/feddf-plus.md, on its two tasks.

    python benchmarks/candidates.py                                            # lists them
    FEDDF_DATA=... python benchmarks/candidates.py running-mean --task CIFAR-10 --seeds 0,1,2 --base feddf-plus

Each changes one part of a method: its start, its clients' loss, its teachers' weights or its fusion. Rows are added to
benchmarks/results/candidates.jsonl: the rounds to the target, the accuracy after each round, and the seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from feddf.config import Experiment, load, with_values
from feddf.data.augment import flip_crop
from feddf.engines import in_process
from feddf.evaluate import accuracy
from feddf.fusion.compose import method_of
from feddf.fusion.ensemble import avg_logits
from feddf.fusion.weights import by_class_counts
from feddf.local import log_prior, mini_batches
from feddf.reproduce.artefacts.plus import FEDERATION, TARGETS, TASKS
from feddf.rounds import run_rounds
from feddf.runs.build import Parts, augments, build
from feddf.runtime.threads import threads
from feddf.seeds import derive, seeded, torch_generator
from feddf.states import read_off, weighted_mean
from feddf.types import Augment, Fused, Fusion, Inputs, Job, Method, ServerState, State, Update, Vote, Weight

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


# More teachers: averages of the clients' models, which the average does not count again (n_k = 0)


def with_averages(inner: Fusion) -> Fusion:
    """Let each prototype's average teach as much as all of its clients together (FedBE, Chen & Chao 2021, has it)."""
    return _with_teachers(inner, lambda clients, seed: [[1.0] * len(clients)], share=1.0)


def with_mixtures(inner: Fusion, samples: int = 10) -> Fusion:
    """Let averages with random weights, drawn from Dirichlet(1), teach as well: FedBE's second distribution."""

    def draw(clients: Sequence[Update], seed: int) -> list[list[float]]:
        gamma = torch.empty(samples, len(clients)).exponential_(generator=torch_generator(seed))
        return (gamma / gamma.sum(dim=1, keepdim=True) * len(clients)).tolist()  # type: ignore[no-any-return]

    return _with_teachers(inner, draw, share=1 / samples)


def _with_teachers(
    inner: Fusion, draw: Callable[[Sequence[Update], int], Sequence[Sequence[float]]], share: float
) -> Fusion:
    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        more: list[Update] = []
        for prototype in sorted({update.prototype for update in updates}):
            clients = [update for update in updates if update.prototype == prototype and update.n_examples > 0]
            if len(clients) < 2:
                continue
            for number, shares in enumerate(draw(clients, derive(seed, "teachers", prototype))):
                weights = [one * update.n_examples for one, update in zip(shares, clients, strict=True)]
                state = weighted_mean([update.state for update in clients], weights)
                rows = [torch.tensor(update.class_counts) * one for one, update in zip(shares, clients, strict=True)]
                counts = tuple(int(count) for count in torch.stack(rows).sum(dim=0).round() / len(clients))
                name, trust = f"average {number} of {prototype}", len(clients) * share
                more.append(Update(name, prototype, updates[0].round, state, 0, {}, counts, trust=trust))
        return inner(server, [*updates, *more], seed)

    return fuse


def centred_logits(votes: Iterable[Vote], temperature: float = 1.0) -> Tensor:
    """Average logits that sum to zero: with weights by class it matters what a teacher adds to all of its logits."""
    centred = (Vote(vote.logits - vote.logits.mean(dim=-1, keepdim=True), vote.weight) for vote in votes)
    return avg_logits(centred, temperature)


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


# The clients' side: FedNTD


def not_true(job: Job, *, parts: Parts, beta: float = 1.0) -> Update:
    """Algorithm 2 with FedNTD's term (Lee et al. 2022): β KL(received ‖ own model), both without the true class."""
    experiment, train = parts.experiment, parts.task.train
    local, indices = experiment.local, job.client.indices
    assert indices is not None
    model = parts.prototypes[job.client.prototype].load(job.state).train()
    received = parts.prototypes[job.client.prototype].load(job.state)
    optimizer = torch.optim.SGD(model.parameters(), lr=local.rate)
    shuffle, distort = (torch_generator(derive(job.seed, name)) for name in ("shuffle", "augment"))
    adjustment = log_prior(train.labels[indices], train.n_classes) * local.logit_adjustment
    augment = flip_crop if augments(experiment, parts.task.data) else None
    for _ in range(local.epochs):
        for chosen in mini_batches(indices, local.batch, shuffle):
            raw, labels = train.inputs.raw[chosen], train.labels[chosen]
            inputs = train.inputs.encode(augment(raw, distort) if augment else raw)
            logits = model(inputs)
            with torch.no_grad():
                before = received(inputs)
            others = ~F.one_hot(labels, train.n_classes).bool()
            mine, theirs = (z[others].view(len(labels), -1).log_softmax(dim=1) for z in (logits, before))
            kept = F.kl_div(mine, theirs, reduction="batchmean", log_target=True)
            loss = F.cross_entropy(logits + adjustment, labels) + beta * kept
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    counts = torch.bincount(train.labels[indices], minlength=train.n_classes).tolist()
    state = read_off(model, like=job.state)
    return Update(job.client.id, job.client.prototype, job.round, state, len(indices), {}, tuple(counts))


# Learned from the pool without labels: a start, and features


def pretrained(model: nn.Module, pool: Inputs, flips: bool, seed: int, steps: int = 400, batch: int = 128) -> nn.Module:
    """Train all but the last layer by contrast of two views of the same input (SimCLR, Chen et al. 2020)."""
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    width = last.in_features
    with seeded(derive(seed, "head")):
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
        models[name] = read_off(model, like=state)
    return replace(parts, server=replace(parts.server, models=models))


# The teachers' weights: for each sample by how much a client's data look like it

ODDS: dict[str, Tensor] = {}
"""Of the experiment that is running: for each client, one number for each input of the pool."""


def by_density(teachers: Sequence[Update], resources: Any, accuracies: Any) -> Mapping[str, Weight]:
    """w_k(x) = n_k s_k(x) / (1 − s_k(x)): FedAUX's estimate (arXiv 2102.02514) of FedGO's n_k p_k(x) (2502.06349)."""
    return {teacher.client_id: partial(_times, teacher.n_examples * ODDS[teacher.client_id]) for teacher in teachers}


def by_density_and_counts(teachers: Sequence[Update], resources: Any, accuracies: Any) -> Mapping[str, Weight]:
    """w_k(x, c) = n_kc s_k(x) / (1 − s_k(x))."""
    counts = by_class_counts(teachers, resources, accuracies)
    return {name: partial(_times, ODDS[name] * torch.as_tensor(row)) for name, row in counts.items()}


def _times(weights: Tensor, logits: Tensor) -> Tensor:
    return weights.to(torch.float64)


def estimate_odds(parts: Parts, least: float = 0.01) -> None:
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
    ODDS.clear()
    ODDS.update({name: (score - best).exp().clamp_min(least).unsqueeze(1) for name, score in scores.items()})


def _features_of(model: nn.Module, inputs: Inputs) -> Tensor:
    return torch.cat([features(model, inputs.batch(chunk)) for chunk in torch.arange(len(inputs)).split(256)])


def _logistic(own: Tensor, public: Tensor, decay: float = 0.01) -> Tensor:
    """Return the weights of a balanced, regularised logistic regression, and its bias."""
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


def _around(wrap: Callable[[Fusion], Fusion]) -> Change:
    def change(parts: Parts) -> Parts:
        def method(engine: Any) -> Method:
            made = parts.method(engine)
            return replace(made, fuse=wrap(made.fuse))

        return replace(parts, method=method)

    return change


def _augmented(augment: Augment) -> Change:
    def change(parts: Parts) -> Parts:
        assert isinstance(parts.method, partial)
        resources, experiment = parts.method.args
        return replace(parts, method=partial(method_of, replace(resources, augment=augment), experiment))

    return change


def _weighted(parts: Parts) -> Parts:
    estimate_odds(parts)
    return parts


CANDIDATES: dict[str, tuple[Mapping[str, Any], Change]] = {
    "none": ({}, lambda parts: parts),
    "server-momentum": ({"fusion.momentum": 0.2}, lambda parts: parts),
    "running-mean": ({}, _around(running_mean)),
    "half-way": ({}, _around(half_way)),
    "not-true": ({}, lambda parts: replace(parts, train=partial(not_true, parts=parts))),
    "self-supervised": ({}, self_supervised),
    "density": ({"teachers.weights": f"{__name__}:by_density"}, _weighted),
    "density-and-counts": ({"teachers.weights": f"{__name__}:by_density_and_counts"}, _weighted),
    "averages": ({}, _around(with_averages)),
    "mixtures": ({}, _around(with_mixtures)),
    "centred": ({"teachers.average": f"{__name__}:centred_logits"}, lambda parts: parts),
    "class-rows": ({"fusion.average": "class-counts"}, lambda parts: parts),
    "mixed": ({"teachers.ask": "each-batch"}, _augmented(mixed)),
    "moved": ({"teachers.ask": "each-batch"}, _augmented(moved)),
    "views": ({"pool.views": 4}, lambda parts: parts),
    "no-norm": ({"prototypes": ({"model": "resnet8", "norm": "none"},)}, lambda parts: parts),
    "groupnorm": ({"prototypes": ({"model": "resnet8", "norm": "group"},)}, lambda parts: parts),
}


def run(candidates: Sequence[str], task: str, base: str, seed: int) -> dict[str, Any]:
    """Run one experiment of the task and return its row."""
    preset, changes = TASKS[task]
    values: dict[str, Any] = {**FEDERATION, **changes, "seed": seed, "fusion.method": base}
    for name in candidates:
        values |= CANDIDATES[name][0]
    experiment: Experiment = with_values(load(preset), values)
    began = perf_counter()
    with threads(1):
        parts = build(experiment)
        for name in candidates:
            parts = CANDIDATES[name][1](parts)
        curve = [_accuracy(parts, models) for models in _models(parts, experiment.rounds)]
    target = TARGETS[experiment.data.name]
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


def _models(parts: Parts, rounds: int) -> Any:
    fuse = parts.method(in_process).fuse
    closed = run_rounds(parts.server, parts.federation, engine=in_process, train=parts.train, fuse=fuse)
    return (one.server.models for one in islice(closed, rounds))


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
