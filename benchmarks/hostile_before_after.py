"""What hostile clients cost in the tree that this runs in: ``python benchmarks/hostile_before_after.py``.

It prints a Markdown table. With another tree first on the path it prints that tree's, because the attacks are functions
of this file and nothing here is newer than what is attacked; docs/reliability.md compares two::

    PYTHONPATH=OTHER/src python benchmarks/hostile_before_after.py

Twenty clients hold MNIST digits (``reproduction/attacked-digits.toml``); four of them, chosen by the seed, are hostile.
Where an n_k is only claimed, the server knows its clients by name and fuses as Flower's strategy does; elsewhere the
gate refuses an n_k that is not the client's.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from feddf import evaluate
from feddf.config import load
from feddf.engines import Processes, in_process
from feddf.engines.open import with_retries
from feddf.fusion.weights import CLASS_COUNTS
from feddf.robust.defense import bounded_counts
from feddf.rounds import QuorumError, jobs_for, run_round, run_rounds
from feddf.runs.build import Parts, build
from feddf.runs.run import mean_metrics
from feddf.runtime.device import threads
from feddf.seeds import derive, numpy_generator
from feddf.states import is_statistic
from feddf.types import Client, Engine, Failure, Job, Reply

DIGITS = Path(__file__).parents[1] / "reproduction" / "attacked-digits.toml"
HOSTILE = 4
CLAIMED = 10**9  # the largest n_k that the gate lets pass
BATCHNORM = ('prototypes=[{model="cnn"}]', "alpha=1", "local.lr=0.02", "local.epochs=2", "rounds=2")
"""At this rate nearly all of the first round's change are statistics; at the preset's, half to three quarters."""

Forge = Callable[[Reply, Job, int], Reply | Failure]
"""(what an attacker would have sent, its job, its number among the attackers) -> what it sends."""


# Attacks


def absent(own: Reply, job: Job, number: int) -> Failure:
    """Send nothing."""
    return Failure(own.client_id, "absent")


def flipped(own: Reply, job: Job, number: int) -> Reply:
    """Send x − 5 Δ for the parameters, beside the statistics of honest training."""
    keys = [key for key in own.state if not is_statistic(key)]
    return replace(own, state={**own.state, **{key: 6 * job.state[key] - 5 * own.state[key] for key in keys}})


def huge_means(own: Reply, job: Job, number: int) -> Reply:
    """Send running means of 10⁴, the largest value that the gate lets pass."""
    return _with_means(own, lambda mean, deviation: torch.full_like(mean, 1e4))


def shifted_means(own: Reply, job: Job, number: int) -> Reply:
    """Send running means that are five deviations of the features off."""
    return _with_means(own, lambda mean, deviation: mean + 5 * deviation)


def _with_means(own: Reply, change: Callable[[Tensor, Tensor], Tensor]) -> Reply:
    means = {key: own.state[key] for key in own.state if key.endswith("running_mean")}
    deviations = {key: own.state[key.replace("running_mean", "running_var")].sqrt() for key in means}
    return replace(own, state={**own.state, **{key: change(means[key], deviations[key]) for key in means}})


def turned_rows(own: Reply, job: Job, number: int, *, scale: float, n_examples: int | None = None) -> Reply:
    """Turn the last layer's rows of some classes, ``scale`` times as long, and claim that all examples are of these.

    The attackers divide the classes among themselves. Without ``n_examples`` their n_k is true.
    """
    total, honest = n_examples or own.n_examples, own.payload[CLASS_COUNTS]["counts"]
    mine, counts = torch.arange(number, len(honest), HOSTILE), torch.zeros_like(honest)
    counts[mine] = total // len(mine)
    counts[mine[0]] += total - counts.sum()
    state = dict(own.state)
    last = [key.removesuffix("weight") for key in state if key.endswith("weight") and len(state[key]) == len(counts)][
        -1
    ]
    for key in (f"{last}weight", f"{last}bias"):
        state[key] = state[key].index_copy(0, mine, -scale * state[key][mine])
    return replace(own, state=state, n_examples=total, payload={**own.payload, CLASS_COUNTS: {"counts": counts}})


# A run with such clients


@dataclass(frozen=True)
class Case:
    """One row of the table: the accuracy after all rounds."""

    name: str
    words: tuple[str, ...]
    forge: Forge | None = None
    claimed: bool = False
    """The server cannot check an n_k."""


def forging(clients: Sequence[Client], hostile: Sequence[str], forge: Forge) -> Engine:
    """Return the clients' engine with what attackers send replaced; ``clients`` say who holds which examples."""
    known = {client.id: client for client in clients}

    def run(function: Callable[[Any], Any], jobs: Sequence[Any], /) -> Iterator[Any]:
        asked = {job.id: replace(job, client=known[job.id]) for job in jobs}
        for outcome in in_process(function, list(asked.values())):
            if isinstance(outcome, Reply) and outcome.client_id in hostile:
                outcome = forge(outcome, asked[outcome.client_id], hostile.index(outcome.client_id))
            yield outcome

    return run


def attackers(parts: Parts) -> list[str]:
    """Return the hostile clients, chosen by the seed."""
    names = sorted(client.id for client in parts.federation.clients)
    order = numpy_generator(derive(parts.experiment.seed, "attackers")).permutation(len(names))
    return [names[int(number)] for number in order[:HOSTILE]]


def accuracy(case: Case, seed: int) -> float:
    """Return the test accuracy in % after the last round, or after the last one that had a quorum."""
    parts = build(load(str(DIGITS), [*case.words, f"seed={seed}"]))
    parts.engine.become(in_process)
    federation, fuse, models = parts.federation, parts.method.fuse, parts.server.models
    engine = forging(federation.clients, attackers(parts), case.forge) if case.forge else in_process
    if case.claimed:
        federation = replace(federation, clients=[replace(one, indices=None) for one in federation.clients])
        fuse = bounded_counts(fuse)
    rounds = run_rounds(parts.server, federation, engine=engine, train=parts.train, fuse=fuse, parts=parts.method.parts)
    try:
        for closed in islice(rounds, parts.experiment.rounds):
            models = closed.server.models
    except QuorumError:
        pass
    return 100 * fmean(
        evaluate.accuracy(parts.prototypes[name].load(models[name]), parts.task.data.test) for name in models
    )


def cases() -> Iterator[Case]:
    """Yield what is run."""
    five, one = partial(turned_rows, scale=5.0), partial(turned_rows, scale=1.0)
    for method, alpha in (("feddf-plus", 1), ("feddf-plus", 0.1), ("feddf-plus+robust", 1), ("feddf-plus+robust", 0.1)):
        words, name = (f"method={method}", f"alpha={alpha}"), f"{method}, α = {alpha}"
        yield Case(f"{name}: no attack", words)
        yield Case(f"{name}: attackers absent", words, absent)
        yield Case(f"{name}: rows turned (× 5) and claimed", words, five)
        yield Case(f"{name}: the same (× 1), n_k = 10⁹", words, partial(one, n_examples=CLAIMED), claimed=True)
        yield Case(f"{name}: the same (× 5), n_k = 10⁹", words, partial(five, n_examples=CLAIMED), claimed=True)
    fedavg = ("method=fedavg", *BATCHNORM)
    clipped = (*fedavg, "fusion.aggregation=norm-clipped")
    robust = ("method=feddf+robust", *BATCHNORM, "rounds=1")
    for attack, forge in (("no attack", None), ("flipped update", flipped)):
        yield Case(f"FedAvg, BatchNorm: {attack}", fedavg, forge)
        yield Case(f"FedAvg, clipped norms, BatchNorm: {attack}", clipped, forge)
        yield Case(f"FedDF, robust, BatchNorm, first round: {attack}", robust, forge)
    yield Case("FedAvg, BatchNorm: running_mean = 10⁴", fedavg, huge_means)
    yield Case("FedAvg, BatchNorm: running_mean + 5 deviations", fedavg, shifted_means)


# What is not an accuracy


def share_of_statistics(seed: int) -> float:
    """Return how much of ‖Δ‖² of the first round are running statistics, in %: the mean over honest clients."""
    parts = build(load(str(DIGITS), ["method=fedavg", *BATCHNORM, f"seed={seed}"]))
    jobs = jobs_for(parts.server, parts.federation, parts.federation.clients)
    shares = []
    for job, reply in zip(jobs, in_process(parts.train, jobs), strict=True):
        assert isinstance(reply, Reply)
        floating = [key for key, tensor in job.state.items() if tensor.is_floating_point()]
        squares = {key: float((reply.state[key] - job.state[key]).double().square().sum()) for key in floating}
        shares.append(sum(squares[key] for key in squares if is_statistic(key)) / sum(squares.values()))
    return 100 * fmean(shares)


def means_of_metrics() -> tuple[dict[str, float], dict[str, float]]:
    """Return the means of what four honest clients measure, with one that claims much, and one that says nothing."""
    honest = [(100, {"accuracy": 0.6})] * 4
    return mean_metrics([*honest, (CLAIMED, {"accuracy": 1e6})]), mean_metrics([*honest, (100, {})])


def dies_twice(job: Any, *, function: Callable[[Any], Any], folder: str) -> Any:
    """Answer for a client's model in the third worker that is asked; the first two are killed."""
    for number in range(2 if job.id.startswith("client-") else 0):
        mark = Path(folder) / f"{job.id}-{number}"
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return function(job)


def dropped_for_killed_workers() -> tuple[int, int]:
    """Return how many of six honest clients one round drops, while the server asks their models, and of how many."""
    parts = build(load(str(DIGITS), ["method=feddf", "clients.total=6", "distill.steps=20"]))
    with Processes(2) as pool, tempfile.TemporaryDirectory() as folder:

        def killed(function: Callable[[Any], Any], jobs: Sequence[Any], /) -> Iterator[Any]:
            return pool(partial(dies_twice, function=function, folder=folder), jobs)

        parts.engine.become(with_retries(killed))
        closed = run_round(
            parts.server,
            parts.federation,
            engine=in_process,
            train=parts.train,
            fuse=parts.method.fuse,
            parts=parts.method.parts,
        )
    return len({failure.client_id for failure in closed.failures}), len(parts.federation.clients)


def rows(seeds: Sequence[int]) -> Iterator[tuple[str, str]]:
    """Yield the rows of the table, as each is known."""
    for case in cases():
        yield f"{case.name}, accuracy in %", f"{fmean(accuracy(case, seed) for seed in seeds):.1f}"
    yield "statistics in ‖Δ‖² of round 1, BatchNorm, in %", f"{fmean(map(share_of_statistics, seeds)):.1f}"
    greedy, silent = means_of_metrics()
    yield "mean accuracy of four clients with 0.6 and one with n_k = 10⁹ that says 10⁶", f"{greedy['accuracy']:,.1f}"
    yield "the same of four with 0.6 and one that says nothing", f"{silent['accuracy']:.1f}" if silent else "none"
    dropped, of = dropped_for_killed_workers()
    yield "honest clients dropped when each model's worker is killed twice", f"{dropped} of {of}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="2,3", help="accuracies are means over these")
    seeds = [int(seed) for seed in parser.parse_args().seeds.split(",")]
    print(f"| measured (seeds {', '.join(map(str, seeds))}) | |\n|---|---:|", flush=True)
    with threads(1):
        for name, value in rows(seeds):
            print(f"| {name} | {value} |", flush=True)


if __name__ == "__main__":
    main()
