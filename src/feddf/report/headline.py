"""What runs are about, and what came of them, in a sentence; and what methods are called and which color they have."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from feddf.report.read import Run, by_seed, differing, grouped, scores_of, seeds_of
from feddf.report.tables import spread

TITLES = {"fedavg": "FedAvg", "feddf": "FedDF", "fedprox": "FedProx", "fedavgm": "FedAvgM", "fedma": "FedMA"}
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
BASELINE = TITLES["fedavg"]

_OWN = ("FedDF", "FedAvg", "FedProx", "FedAvgM", "FedMA", "feddf-plus")
PALETTE = (
    *(("#0072b2", "#56b4e9"), ("#d55e00", "#ff9a4d"), ("#00785a", "#3ddbaa"), ("#a8528c", "#e79bc8")),
    *(("#8a6100", "#f0c04a"), ("#3d8fc4", "#9fd4f5"), ("#222222", "#f0f0f0"), ("#6b6b6b", "#b0b0b0")),
    *(("#882255", "#e0759f"), ("#2a8577", "#7fd6c8"), ("#74741f", "#cfcf6a"), ("#332288", "#a79df0")),
)
"""Colors on light and on dark paper that the color-blind tell apart (after Okabe and Ito): the first are those of
methods with one of their own, and each other method has one of the rest, which follows from its name."""


def colors_of(titles: Iterable[str]) -> dict[str, list[str]]:
    """Return each method's color, such that runs that come or go move none; of two that share one the later moves."""
    chosen = {name: number for number, name in enumerate(_OWN)}
    others = len(PALETTE) - len(_OWN)
    for title in titles:
        first = zlib.crc32(title.encode("utf-8", "replace"))
        places = [len(_OWN) + (first + step) % others for step in range(others)]
        free = [place for place in places if place not in chosen.values()]
        chosen.setdefault(title, (free or places)[0])
    return {title: list(PALETTE[number]) for title, number in chosen.items()}


def title_of(method: str) -> str:
    """Return a method as its authors write it: FedDF+swag for feddf+swag."""
    base, *parts = method.split("+")
    return "+".join([TITLES.get(base, base), *parts])


def task_of(runs: Sequence[Run]) -> list[str]:
    """Return on what runs were made, leaving out in what they differ: data, clients, their share, skew."""
    run, other = runs[0], set(differing(runs))
    if run.over_flower:
        return [str(run.value("name")), "over Flower"]
    scheme = str(run.value("partition.scheme"))
    skew = f"α = {run.value('partition.alpha'):g}" if scheme == "dirichlet" else scheme
    parts = {
        "data.name": str(run.value("data.name")),
        "clients.total": f"{run.value('clients.total')} clients",
        "clients.fraction": f"C = {run.value('clients.fraction'):g}",
        "partition.scheme": "" if "partition.alpha" in other else skew,
    }
    return [text for key, text in parts.items() if text and key not in other]


def headline(runs: Sequence[Run]) -> str:
    """Return what came of runs of one experiment: the gain over FedAvg, paired by seed, else the accuracies reached.

    All are means over the prototypes, after the last round that the runs have in common.
    """
    methods = grouped((run for run in runs if run.records), lambda run: run.method)
    seeds = {title_of(name): by_seed(mine) for name, mine in methods.items()}
    base = seeds.get(BASELINE, {})
    pairs = {name: [(mine[seed], base[seed]) for seed in mine if seed in base] for name, mine in seeds.items()}
    pairs = {name: found for name, found in pairs.items() if found and name != BASELINE}
    used = [run for found in pairs.values() for pair in found for run in pair]
    used = used or [run for mine in seeds.values() for run in mine.values()]
    if not used:
        return "No round is finished yet"
    last, score = min(len(run.records) for run in used), scores_of(used)
    where = f"{'' if score == 'accuracy' else f'({score}) '}{_where(used, last)}"
    if pairs:
        gains = {name: [a.curve()[last - 1] - b.curve()[last - 1] for a, b in found] for name, found in pairs.items()}
        said = ", ".join(f"{name} {spread(found, signed=True)}" for name, found in gains.items())
        return f"{said} points over {BASELINE} {where}"
    ends = {name: [run.curve()[last - 1] for run in mine.values()] for name, mine in seeds.items()}
    said = ", ".join(f"{name} {spread(found)} %" for name, found in ends.items())
    return f"{said} {where}"


def _where(runs: Sequence[Run], last: int) -> str:
    """Return after which round, with which seeds, under which skew and for how many architectures that is."""
    names, planned = runs[0].prototypes, max(int(run.value("rounds")) for run in runs)
    count = f"{WORDS[len(names)] if len(names) < len(WORDS) else len(names)} architectures"
    skew = [part for part in task_of(runs) if part.startswith("α")]
    after = f"after round {last}" + (f" of {planned}" if last < planned else "")
    return ", ".join([after, seeds_of(runs), *skew, count if len(names) > 1 else names[0]])
