"""What the page shows of run folders, as plain JSON values. A folder that cannot be read becomes a line of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any

from feddf.config.errors import FeddfError, reason
from feddf.config.foreign import parse_json, validated
from feddf.config.records import is_record
from feddf.report.headline import headline, task_of, title_of
from feddf.report.read import TESTED, Run, alike, differing, read_run, run_folders, setting, short_names
from feddf.runtime.atomic import is_held, read_json_lines, read_regular

Json = dict[str, Any]
LONGEST = 300
"""Characters of a text that are shown: a client may have sent it."""


class Snapshots:
    """Reads run folders again and again; one that has not changed since the last time is not read again."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._known: dict[Path, tuple[object, Run, Json]] = {}

    def take(self) -> Json:
        """Return the state of all runs now."""
        found: list[tuple[Run, Json]] = []
        problems: list[Json] = []
        for path in dict.fromkeys(folder for given in self._paths for folder in run_folders(given)):
            try:
                found.append(self._read(path))
                if lines := read_json_lines(path / "metrics.jsonl", is_record)[1]:
                    where = ", ".join(map(str, lines[:5]))
                    problems.append({"path": str(path), "reason": f"its log is damaged in line {where}"})
            except FeddfError as error:
                problems.append({"path": str(path), "reason": _text(str(error))})
            except Exception as error:  # a damaged file can fail in any way
                problems.append({"path": str(path), "reason": _text(f"its files are damaged: {reason(error)}")})
        for given in self._paths:
            if not os.access(given, os.F_OK):
                problems.append({"path": str(given), "reason": "there is no such folder"})
        runs = [run for run, _ in found]
        names, groups = short_names([run.path for run in runs]), alike(runs)
        return {
            "runs": [{"name": name, **values} for name, (_, values) in zip(names, found, strict=True)],
            "groups": [_group(group, groups) for group in groups],
            "differs": differing(runs) if len(runs) > 1 else [],
            "problems": problems,
        }

    def _read(self, path: Path) -> tuple[Run, Json]:
        stamps = [_stamp(path / name) for name in ("config.toml", "metrics.jsonl", "partition.json", TESTED)]
        if path not in self._known or self._known[path][0] != stamps:
            run = read_run(path)
            self._known[path] = stamps, run, described(run)
        _, run, values = self._known[path]
        return run, {**values, **_progress(run, stamps[1])}


def _group(group: Sequence[Run], groups: Sequence[Sequence[Run]]) -> Json:
    """Return what one experiment is called and about, what came of it, and the folders of its runs."""
    names = [str(one[0].value("name")) for one in groups]
    label = str(group[0].value("name"))
    if names.count(label) > 1:
        label += f" {setting(group[0], differing([one[0] for one in groups], ['task']))}"
    said = {"label": label, "about": ", ".join(task_of(group)), "headline": headline(group)}
    return {**{key: _text(text) for key, text in said.items()}, "paths": [str(run.path) for run in group]}


def described(run: Run) -> Json:
    """Return what a run's files say, every number finite or ``None`` and every text of a bounded length."""
    names = run.prototypes
    return {
        "path": str(run.path),
        "headline": _group([run], [[run]])["headline"],
        "method": _text(title_of(run.method)),
        "seed": run.seed,
        "score": _text(run.score),
        "rounds": int(run.value("rounds")),
        "done": len(run.records),
        "config": {_text(key): _text(value) for key, value in run.config.items()},
        "prototypes": [_text(name) for name in names],
        "series": {
            which: {_text(name): [_number(value) for value in run.curve(name, which)] for name in names}
            for which in ("averaged", "fused")
        },
        "ensemble": [_number(value) for value in run.ensemble()],
        "happened": [_happened(record) for record in run.records],
        "seconds": {_text(stage): _number(value) for stage, value in run.seconds().items()},
        "partition": _partition(run.path / "partition.json"),
        "tested": _tested(run.path / TESTED),
    }


def _happened(record: Mapping[str, Any]) -> Json:
    """Return who took part in a round, who was dropped and why, and how well each did."""
    accuracies, dropped = record.get("accuracy_of_clients") or {}, record.get("dropped", [])
    return {
        "clients": [_text(name) for name in record.get("clients", [])],
        "dropped": [{"client": _text(one["client"]), "reason": _text(one["reason"])} for one in dropped],
        "worst": [_text(name) for name in _worst(record)],
        "attempts": int(record.get("attempts", 1)),
        "accuracies": {_text(name): _number(value) for name, value in accuracies.items()},
        "drifts": {_text(name): _number(value) for name, value in (record.get("drift_of_clients") or {}).items()},
        "seconds": {_text(stage): _number(value) for stage, value in record.get("seconds", {}).items()},
    }


def _worst(record: Mapping[str, Any]) -> Sequence[object]:
    """Return the clients that drop-worst left out of the fusion."""
    found = record.get("dropped_worst")
    names = found.get("clients", found) if isinstance(found, Mapping) else found
    return list(names) if isinstance(names, Mapping | list) else []


def _progress(run: Run, stamp: tuple[int, int] | None) -> Json:
    """Return how far a run is, and how many seconds are left if the coming rounds take as long as those done."""
    done, planned = len(run.records), int(run.value("rounds"))
    a_round = run.seconds_a_round if done else None
    updated = stamp[0] / 1e9 if stamp else None
    state = "finished" if done >= planned else "running" if is_held(run.path / "lock") else "waiting"
    if state == "waiting" and updated is not None:
        late = max(120.0, 5 * (a_round or 0.0))
        state = "running" if time.time() - updated < late else "stopped"
    left = (planned - done) * a_round if a_round else None
    return {"state": state, "updated": updated, "seconds_left": _number(left)}


def _partition(path: Path) -> Json | None:
    """Return how many examples of each class every client has, where the run wrote it down."""
    try:
        found = validated(dict[str, Any], parse_json(read_regular(path)))
        classes = [_text(name) for name in validated(list[str], found.get("classes", []))]
        return {"counts": validated(list[list[int]], found.get("counts")), "classes": classes}
    except (OSError, ValueError):
        return None


def _tested(path: Path) -> Json | None:
    """Return how the final models answer the test inputs of each class, where the run wrote it down."""
    try:
        found = json.loads(read_regular(path))
        matrices = {name: [[int(count) for count in row] for row in rows] for name, rows in found["confusion"].items()}
        return {"classes": [_text(name) for name in found["classes"]], "confusion": matrices} if matrices else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _text(value: object) -> str:
    """Return a value as a text of a bounded length."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        return None
    return round(value, 5)
