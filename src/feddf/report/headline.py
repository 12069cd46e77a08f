"""What runs are about, and what came of them, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from feddf.report.read import Run, differing, scores_of
from feddf.report.tables import spread

TITLES = {"fedavg": "FedAvg", "feddf": "FedDF", "fedprox": "FedProx", "fedavgm": "FedAvgM", "fedma": "FedMA"}
WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
BASELINE = "fedavg"


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


def seeds_of(runs: Sequence[Run]) -> str:
    """Return the seeds of runs in words."""
    seeds = sorted({run.seed for run in runs})
    return f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"


def headline(runs: Sequence[Run]) -> str:
    """Return what came of runs of one experiment: the gain over FedAvg, paired by seed, else the accuracies reached.

    All are means over the prototypes, after the last round that the runs have in common.
    """
    by_method: dict[str, dict[int, Run]] = {}
    for run in runs:
        if run.records:
            by_method.setdefault(run.method, {})[run.seed] = run
    base = by_method.get(BASELINE, {})
    pairs = {name: [(mine[seed], base[seed]) for seed in mine if seed in base] for name, mine in by_method.items()}
    pairs = {name: found for name, found in pairs.items() if found and name != BASELINE}
    used = [run for found in pairs.values() for pair in found for run in pair]
    used = used or [run for mine in by_method.values() for run in mine.values()]
    if not used:
        return "No round is finished yet"
    last = min(len(run.records) for run in used)
    said = {name: [mine.curve()[last - 1] - base.curve()[last - 1] for mine, base in pairs[name]] for name in pairs}
    if said:
        gains = ", ".join(f"{title_of(name)} {spread(found, signed=True)}" for name, found in said.items())
        return f"{gains} points over {title_of(BASELINE)} {_where(used, last)}"
    said = {name: [run.curve()[last - 1] for run in mine.values()] for name, mine in by_method.items()}
    reached = ", ".join(f"{title_of(name)} {spread(found)} %" for name, found in said.items())
    score = scores_of(used)
    return f"{reached}{'' if score == 'accuracy' else f' ({score})'} {_where(used, last)}"


def _where(runs: Sequence[Run], last: int) -> str:
    """Return after which round, with which seeds, under which skew and for how many architectures that is."""
    names, planned = runs[0].prototypes, max(int(run.value("rounds")) for run in runs)
    count = f"{WORDS[len(names)] if len(names) < len(WORDS) else len(names)} architectures"
    skew = [part for part in task_of(runs) if part.startswith("α")]
    after = f"after round {last}" + (f" of {planned}" if last < planned else "")
    return ", ".join([after, seeds_of(runs), *skew, count if len(names) > 1 else names[0]])
