"""One round, many distillations: Figures 5 and 6 and Table 7 where they can be seen, in a single fusion.

The clients' models of rounds 1, 3 and 8 of a real run (FedAvg on the middle task, so that no distillation has shaped
them) are fused with each source of unlabeled images, size, number of classes, number of steps and optimizer in turn;
the start is not kept. A point is the student's test accuracy minus that of the average it started from. Points of one
run are not independent of one another, so intervals over rounds and seeds are a little too narrow.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from feddf.config import Experiment, load, with_values
from feddf.engines.open import open_engines
from feddf.evaluate import accuracy
from feddf.rounds import run_rounds
from feddf.runs.build import Parts, build
from feddf.runtime.atomic import read_json_lines
from feddf.types import Fused, ServerState, Update
from reproduction.artifact import Artifact, Axis, Changes, Scale, grid
from reproduction.judging import Values, above, within
from reproduction.middle import MIDDLE, PRESET, RUN_ON
from reproduction.scales import SMOKE

ROUNDS = (1, 3, 8)
KEPT = Path(__file__).parents[1] / "results" / "one-round.jsonl"
"""The points that were measured."""

STUDENT: Changes = {"fusion.method": "feddf", "distill.keep_init": False}


def of_classes(number: int) -> Changes:
    """Return 1,000 images of some classes of CIFAR-100 as the pool: as many as two classes have."""
    return {"pool.sources": ({"name": "cifar100", "classes": number},), "pool.size": 1_000}


SOURCES: Axis = {
    "CIFAR-100": {},
    "Tiny-ImageNet": {"pool.sources": ("tiny-imagenet",)},
    "CIFAR-10's validation images": {"pool.sources": ("validation",)},
    "noise": {"pool.sources": ("noise",)},
}
SIZES: Axis = {f"{size:,} images": {"pool.size": size} for size in (300, 1_000, 3_000)}
CLASSES: Axis = {f"{number} classes": of_classes(number) for number in (2, 10, 50)}
STEPS: Axis = {
    f"{steps:,} steps": {"distill.steps": steps, "distill.patience": steps} for steps in (30, 100, 300, 3_000)
}
OPTIMIZERS: Axis = {
    "SGD, 0.01": {"distill.optimizer": "sgd", "distill.lr": 0.01},
    "SGD, 0.1": {"distill.optimizer": "sgd", "distill.lr": 0.1},
    "SWAG": {"ensemble.swag_samples": 10, "distill.optimizer": "swa", "distill.lr": 0.1},
}
VARIANTS: Axis = {**SOURCES, **SIZES, **CLASSES, **STEPS, **OPTIMIZERS}
USUAL = "CIFAR-100"
"""What all others differ from in one thing: 10,000 of its images, of all classes, at most 1,000 steps of Adam."""


def base_experiment(seed: int) -> Experiment:
    """Return the run whose clients are fused."""
    changes = {**MIDDLE, "partition.alpha": 1.0, "rounds": ROUNDS[-1], "fusion.method": "fedavg", "seed": seed}
    return with_values(load(PRESET), changes)


Moment = tuple[ServerState, Sequence[Update], int]
"""What a fusion is given."""


def capture(parts: Parts, rounds: Sequence[int]) -> Iterator[tuple[int, Moment]]:
    """Run an experiment, and yield what its fusion was given in some rounds."""
    moments: dict[int, Moment] = {}

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        moments[server.round + 1] = server, list(updates), seed
        return parts.method.fuse(server, updates, seed)

    with open_engines(parts.experiment.run) as engines:
        parts.engine.become(engines.server)
        run = run_rounds(parts.server, parts.federation, engine=engines.clients, train=parts.train, fuse=fuse)
        for number, _ in zip(range(1, max(rounds) + 1), run, strict=False):
            if number in rounds:
                yield number, moments.pop(number)


def fuse_once(experiment: Experiment, moment: Moment) -> dict[str, Any]:
    """Return the test accuracies of the average and of the student that one fusion makes of a cohort, and its notes."""
    parts = build(experiment)
    with open_engines(experiment.run) as engines:
        parts.engine.become(engines.server)
        fused = parts.method.fuse(*moment)
    (name,) = parts.prototypes
    prototype, test = parts.prototypes[name], parts.task.data.test
    averaged, student = (accuracy(prototype.load(one[name]), test) for one in (fused.start, fused.server.models))
    return {"averaged": averaged, "fused": student, **fused.notes["distillation"][name]}


def measure_points(
    file: Path, seeds: Sequence[int], changes: Changes, variants: Axis = VARIANTS, rounds: Sequence[int] = ROUNDS
) -> Iterator[dict[str, Any]]:
    """Measure the points that a file does not hold yet, write each of them there, and yield it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    done = {(one["seed"], one["round"], one["variant"]) for one in points_of(file)}
    for seed in seeds:
        missing = {number: [v for v in variants if (seed, number, v) not in done] for number in rounds}
        needed = [number for number in rounds if missing[number]]
        base = with_values(base_experiment(seed), changes)
        for number, moment in capture(build(base), needed) if needed else ():
            for variant in missing[number]:
                experiment = with_values(base, {**STUDENT, **variants[variant]})
                point = {"seed": seed, "round": number, "variant": variant, **fuse_once(experiment, moment)}
                with file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(point) + "\n")
                yield point


def points_of(file: Path) -> list[dict[str, Any]]:
    """Return the points in a file; none where there is no file."""
    return read_json_lines(file)[0]


def gains(points: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Return each variant's gains in points over the average; a cohort of a seed is its seed · 100 + its round."""
    found: dict[str, dict[int, float]] = {}
    for one in points:
        gain = 100 * (one["fused"] - one["averaged"])
        found.setdefault(gain_of(one["variant"]), {})[100 * one["seed"] + one["round"]] = gain
    return found


def compute(scale: Scale, seeds: Sequence[int]) -> Values:
    """Return the gains of the kept points; at the scale ``smoke`` those of a few that are measured now."""
    if scale != "smoke":
        return gains([one for one in points_of(KEPT) if one["seed"] in seeds])
    small = {**SMOKE, "run.compile": False, "prototypes": ({"model": "cnn", "width": 2},)}
    variants: Axis = {USUAL: {}, "noise": SOURCES["noise"]}
    with TemporaryDirectory() as folder:
        return gains(list(measure_points(Path(folder) / KEPT.name, seeds, small, variants, ROUNDS[:1])))


def gain_of(variant: str) -> str:
    """Return the name of a variant's cell."""
    return f"{variant}, gain"


NATURAL = [name for name in SOURCES if name not in (USUAL, "noise")]
CLOSE = 2.0
"""What counts as little, in points; the paper has no number."""

ONE_ROUND = Artifact(
    "one-round",
    "Figures 5 and 6 and Table 7 in single rounds: sources, size, classes, steps and optimizer of one fusion",
    "Natural images of any source do alike and noise is far worse; classes and size of the pool matter little; few "
    "steps are too few, and a moderate number suffices; Adam is better than SGD, and SWAG makes little difference.",
    grid(PRESET, VARIANTS, {"gain": {**MIDDLE, **STUDENT}}),
    [
        *(within(gain_of(name), gain_of(USUAL), CLOSE) for name in NATURAL),
        *(above(gain_of(name), gain_of("noise"), CLOSE) for name in (USUAL, *NATURAL)),
        *(within(gain_of(name), gain_of(USUAL), CLOSE) for name in ("1,000 images", "3,000 images")),
        *(within(gain_of(name), gain_of("1,000 images"), CLOSE) for name in CLASSES),
        above(gain_of(USUAL), gain_of("30 steps")),
        within(gain_of("300 steps"), gain_of("3,000 steps"), CLOSE),
        *(above(gain_of(USUAL), gain_of(name)) for name in ("SGD, 0.01", "SGD, 0.1")),
        within(gain_of("SWAG"), gain_of(USUAL), CLOSE),
    ],
    unit="test accuracy of the student minus that of the average it started from, in points; rounds 1, 3 and 8",
    reduction=f"{RUN_ON}; clients of a FedAvg run at α = 1; keys of the values are seed · 100 + round",
    subset={"smoke": lambda cell: cell.row in (USUAL, "noise")},
    reducible=False,
    compute=compute,
    as_claimed=lambda name: {"noise": -9.0, "30 st": 1.0, "SGD, ": 2.0}.get(name[:5], 4.0),
)

ARTIFACTS = (ONE_ROUND,)
