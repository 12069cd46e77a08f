"""The card of a run: what was trained on what, and how good it is, as ``README.md`` with YAML front matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddf.data.partition import skew
from feddf.report.headline import headline, task_of, title_of
from feddf.report.read import Run
from feddf.report.tables import markdown_table, percent

FRONT = "---\nlibrary_name: feddf\ntags:\n- feddf\n- federated-learning\n---"
CURVES = "curves.png"
MOST_ROWS = 20
"""Clients or classes up to which a table has all of them."""


def card(
    run: Run, models: Mapping[str, str], classes: Sequence[str], counts: NDArray[Any], confusion: Mapping[str, Any],
    privacy: str = "", unit: str = "class",
) -> str:  # fmt: skip
    """Return the card's text.

    ``models`` are the architectures of the prototypes, ``counts`` the examples of each class (or other ``unit`` in
    which clients differ) that every client has, and ``confusion`` the final models' answers (columns) to the test
    inputs of each class (rows). Where there is something to say of ``privacy``, the counts are withheld.
    """
    chosen = f', prototype="{next(iter(models))}"' if len(models) > 1 else ""
    parts = [FRONT, f"# {run.value('name')}: {title_of(run.method)} on {run.value('data.name')}"]
    parts += [f"**{headline([run])}.**", str(run.value("description") or "")]
    parts += [f"{', '.join(task_of([run]))}; `config.toml` has every setting, `metrics.jsonl` every round."]
    parts += [f'```python\nimport feddf\nmodel = feddf.load_model("FOLDER"{chosen})\n```']
    if run.records:
        parts += [f"## Test {run.score} in %", _compared(run, models), f"![learning curves]({CURVES})"]
    if confusion:
        parts += ["## Test accuracy by class, in %", _classes(classes, confusion)]
    versions = [(name.partition(".")[2], value) for name, value in run.config.items() if name.startswith("versions.")]
    parts += ["## Privacy", privacy] if privacy else ["## Who holds what", _partition(counts, classes, unit)]
    parts += ["## Versions", markdown_table(["package", "version"], versions, (0, 1))]
    return "\n\n".join(filter(None, parts)) + "\n"


def _compared(run: Run, models: Mapping[str, str]) -> str:
    """Return each prototype before and after the fusion, and what it competes with: the ensemble, and clients alone."""
    ends = {name: (run.curve(name, "averaged")[-1], run.curve(name)[-1]) for name in run.prototypes}
    rows = [[name, f"`{models.get(name)}`", *map(percent, found)] for name, found in ends.items()]
    alone = [one for one in run.records[-1].get("accuracy_of_clients", {}).values() if one is not None]
    notes = f"\n\nThe last round's ensemble has {percent(run.ensemble()[-1])}"
    notes += f", its clients alone have {percent(min(alone))} to {percent(max(alone))}" if alone else ""
    return f"{markdown_table(['prototype', 'architecture', 'averaged', 'fused'], rows, (0, 1))}{notes}."


def _classes(classes: Sequence[str], confusion: Mapping[str, Any]) -> str:
    """Return the accuracy on each class; of many classes, on those with the lowest ones."""
    shares = [np.diagonal(rows) / np.maximum(1, np.sum(rows, axis=1)) for rows in confusion.values()]
    lowest = np.argsort(np.mean(shares, axis=0), kind="stable")[:MOST_ROWS].tolist()
    chosen = range(len(classes)) if len(classes) <= MOST_ROWS else lowest
    rows = [[classes[label], *(percent(found[label]) for found in shares)] for label in chosen]
    note = "" if len(classes) <= MOST_ROWS else f"The {MOST_ROWS} lowest of {len(classes)}.\n\n"
    return note + markdown_table(["class", *confusion], rows)


def _partition(counts: NDArray[np.int64], classes: Sequence[str], unit: str) -> str:
    """Return how skewed the clients' data are, and, if they are few, what each has: a table that fits a narrow page."""
    found, rows = skew(counts), []
    for number, row in enumerate(counts):
        held = [f"{classes[label]}: {row[label]}" for label in np.argsort(-row, kind="stable") if row[label]]
        rows.append([number, row.sum(), ", ".join(held)])
    told = (
        f"{len(counts)} clients with {found.smallest} to {found.largest} examples; a client's largest {unit} is "
        f"{percent(found.top_class_share)} % of its data in the mean (`partition.json` has all counts)."
    )
    table = markdown_table(["client", "examples", f"of each {unit}"], rows, (0, 2))
    return f"{told}\n\n{table}" if len(rows) <= MOST_ROWS else told
