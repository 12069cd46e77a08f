"""When may a student stop? ``python benchmarks/stopping.py cifar10-small seeds=0,1,2 --steps 10000``.

One round of an experiment is trained and its students are distilled for all steps, without stopping. Every 100 steps it
is noted which validation examples the student has right, and its test accuracy. Each rule is then applied to what was
noted, as if it had been in force: how many steps would it have let the student take, how often would it have read the
score, and how good is the snapshot that it would have returned?

* ``every N, patience P``: what feddf does. The score is read every N steps; the student stops after P steps without a
  better one.
* ``paired, patience P``: the same, but "better" means better than the best by a one-sided sign test on the validation
  examples on which the two disagree (McNemar), p < 0.05. What is returned is still the snapshot with the best score.

A rule is worth having if it saves steps at a test accuracy that differs by less than the seeds do.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path

import torch
from torch import Tensor, nn

from feddf import evaluate
from feddf.config import Experiment, load
from feddf.engines.open import open_engines
from feddf.fusion.average import average_by_prototype
from feddf.fusion.distill import distill
from feddf.rounds import collect, jobs_for, sample
from feddf.runs.build import build
from feddf.runs.methods import averaging_rule, ensemble
from feddf.runtime.device import threads
from feddf.seeds import derive
from feddf.types import Examples, Resources

LOOK = 100


@dataclass(frozen=True)
class Look:
    """What a student was worth at some step: its validation examples, right or wrong, and its test accuracy."""

    step: int
    right: Tensor
    test: float

    @property
    def score(self) -> float:
        return float(self.right.double().mean())


class Watched:
    """A score that notes what it sees."""

    def __init__(self, validation: Examples, test: Examples, every: int) -> None:
        self._validation, self._test, self._every = validation, test, every
        self.looks: list[Look] = []

    def __call__(self, model: nn.Module) -> float:
        right = evaluate.logits(model, self._validation.inputs).argmax(dim=1) == self._validation.labels
        self.looks.append(Look(self._every * len(self.looks), right, evaluate.accuracy(model, self._test)))
        return self.looks[-1].score


@dataclass(frozen=True)
class Rule:
    """The score is read every so many steps, and a student stops after ``patience`` steps without a better one."""

    every: int
    patience: int
    paired: bool = False

    @property
    def name(self) -> str:
        return f"{'paired, ' if self.paired else ''}every {self.every}, patience {self.patience}"


@dataclass(frozen=True)
class Stopped:
    """What would have come of a rule."""

    steps: int
    reads: int
    test: float


def p_value(better: Tensor, than: Tensor) -> float:
    """Return the chance of at least so many examples gained, among those on which two models disagree."""
    gained, lost = int((better & ~than).sum()), int((~better & than).sum())
    n = gained + lost
    return sum(comb(n, k) for k in range(gained, n + 1)) / 2**n


def stopped(looks: Sequence[Look], rule: Rule) -> Stopped:
    """Apply a rule to what was noted; the first look is before the first step, and patience does not count from it."""
    read = [look for look in looks if look.step % rule.every == 0]
    best = read[0]
    reference: Look | None = None
    for number, look in enumerate(read[1:], 1):
        if look.score > best.score:
            best = look
        if reference is None or (
            p_value(look.right, reference.right) < 0.05 if rule.paired else look.score > reference.score
        ):
            reference = look
        if look.step - reference.step >= rule.patience:
            return Stopped(look.step, number + 1, best.test)
    return Stopped(read[-1].step, len(read), best.test)


def trajectories(experiment: Experiment, steps: int, every: int) -> dict[str, list[Look]]:
    """Run one round, and return what every student was worth along all its steps."""
    parts = build(experiment)
    task = parts.task
    assert task.pool is not None, "a method that distills has a pool"
    resources = Resources(parts.prototypes, task.pool, task.validation)
    config = experiment.distill.model_copy(update={"steps": steps, "eval_every": every, "patience": steps + 1})
    with open_engines(experiment.run) as engines:
        asked = parts.method.parts
        jobs = jobs_for(parts.server, parts.federation, sample(parts.federation, 1), asked)
        updates, _ = collect(engines.clients, parts.train, jobs, parts=asked)
        seed = derive(experiment.seed, "fuse", 1)
        answers = ensemble(resources, experiment, engines.server)(updates, seed, {}).targets
        starts = average_by_prototype(averaging_rule(resources, experiment), parts.server, updates)
    found: dict[str, list[Look]] = {}
    for name, state in starts.items():
        watched = Watched(task.validation, task.data.test, every)
        with threads(experiment.run.threads or 2):
            student = parts.prototypes[name].load(state)
            distill(student, answers, task.pool, config, score=watched, seed=derive(seed, name))
        found[name] = watched.looks
    return found


RULES = [
    *(Rule(every, 1_000) for every in (100, 200, 500, 1_000)),
    *(Rule(100, patience) for patience in (300, 500)),
    *(Rule(every, patience, paired=True) for every, patience in ((100, 300), (100, 500), (100, 1_000), (500, 1_000))),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("experiment", help="a preset or a TOML file, with validation data and method feddf")
    parser.add_argument("overrides", nargs="*", help="key=value, and seeds=0,1,2")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=LOOK, help="steps between two looks")
    parser.add_argument("--out", type=Path, help="where to write the looks, as JSON")
    given = parser.parse_args()
    words = {word.partition("=")[0]: word.partition("=")[2] for word in given.overrides}
    seeds = [int(seed) for seed in words.pop("seeds", "0,1,2").split(",")]
    runs: list[list[Look]] = []
    for seed in seeds:
        plain = [f"{key}={value}" for key, value in words.items()]
        found = trajectories(load(given.experiment, [*plain, f"seed={seed}"]), given.steps, given.every)
        runs += found.values()
        print(f"seed {seed}: {', '.join(found)}", file=sys.stderr, flush=True)
    if given.out:
        rows = [[{**asdict(look), "right": look.right.tolist()} for look in looks] for looks in runs]
        given.out.write_text(json.dumps(rows), encoding="utf-8")
    plain_test = [stopped(looks, Rule(given.every, 1_000)).test for looks in runs]
    print("| rule | steps | reads | test accuracy, % | against the first, points |")
    print("|---|---:|---:|---:|---:|")
    for rule in RULES:
        if rule.every % given.every:
            continue
        results = [stopped(looks, rule) for looks in runs]
        change = [100 * (one.test - test) for one, test in zip(results, plain_test, strict=True)]
        print(
            f"| {rule.name} | {statistics.mean(one.steps for one in results):.0f} "
            f"| {statistics.mean(one.reads for one in results):.1f} "
            f"| {_spread([100 * one.test for one in results])} | {_spread(change)} |"
        )


def _spread(values: list[float]) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2f} ± {deviation:.2f}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
