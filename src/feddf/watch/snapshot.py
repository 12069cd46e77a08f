"""What the page shows of run folders, as plain JSON values. A folder that cannot be read becomes a line of it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

from feddf.config.errors import FeddfError, reason
from feddf.config.foreign import parse_json, validated
from feddf.config.records import is_record
from feddf.report.headline import colors_of, headline, task_of, title_of
from feddf.report.read import TESTED, Run, alike, differing, read_run, run_folders, scores_of, setting, short_names
from feddf.report.tables import WHICH
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
        found: dict[Path, tuple[Run, Json]] = {}
        problems = {path: "there is no such folder" for path in self._paths if not os.access(path, os.F_OK)}
        for path in dict.fromkeys(folder for given in self._paths for folder in run_folders(given)):
            try:
                found[path] = self._read(path)
                if lines := read_json_lines(path / "metrics.jsonl", is_record)[1]:
                    problems[path] = f"its log is damaged in line {', '.join(map(str, lines[:5]))}"
            except FeddfError as error:
                problems[path] = str(error)
            except Exception as error:  # a damaged file can fail in any way
                problems[path] = f"its files are damaged: {reason(error)}"
        groups = alike([run for run, _ in found.values()])
        titles = {run.path: title_of(run.method) for group in groups for run in group}
        own = zip(short_names(list(found)), found.items(), strict=True)
        return {
            "runs": [{"name": name, **values, "method": _bounded(titles[path])} for name, (path, (_, values)) in own],
            "groups": [_group(group, groups) for group in groups],
            "colors": {_bounded(title): pair for title, pair in colors_of(titles.values()).items()},
            "problems": [{"path": str(path), "reason": _bounded(text)} for path, text in problems.items()],
        }

    def _read(self, path: Path) -> tuple[Run, Json]:
        stamps = [_stamp(path / name) for name in ("config.toml", "metrics.jsonl", "partition.json", TESTED)]
        if path not in self._known or self._known[path][0] != stamps:
            run = read_run(path)
            self._known[path] = stamps, run, described(run)
        _, run, values = self._known[path]
        return run, {**values, **_progress(run, stamps[1])}


def _group(group: Sequence[Run], groups: Sequence[Sequence[Run]]) -> Json:
    """Return what one experiment is called and about, its score, what came of it, and the folders of its runs."""
    label = str(group[0].value("name"))
    namesakes = [one[0] for one in groups if str(one[0].value("name")) == label]
    if len(namesakes) > 1:
        label += f" {setting(group[0], differing(namesakes, ['task']))}"
    said = {"label": label, "about": ", ".join(task_of(group)), "headline": headline(group), "score": scores_of(group)}
    return {**_bounded(said), "paths": [str(run.path) for run in group]}


def described(run: Run) -> Json:
    """Return what a run's files say, every number finite or ``None`` and every text of a bounded length."""
    _group([run], [[run]])  # a configuration of which no sentence can be made is a problem of this run alone
    partition = {"counts": list[list[int]], "classes": list[str]}
    tested = {"confusion": dict[str, list[list[int]]], "classes": list[str]}
    curves = {which: {name: run.curve(name, which) for name in run.prototypes} for which in WHICH}
    said = {
        "method": title_of(run.method),
        "seed": run.seed,
        "rounds": int(run.value("rounds")),
        "done": len(run.records),
        "config": {key: one if isinstance(one, str) else _json(one) for key, one in run.config.items()},
        "prototypes": run.prototypes,
        "series": curves,
        "ensemble": run.ensemble(),
        "happened": [_happened(record) for record in run.records],
        "seconds": run.seconds(),
        "partition": _file(run.path / "partition.json", partition),
        "tested": _file(run.path / TESTED, tested),
    }
    return {"path": str(run.path), **_bounded(said)}


def _happened(record: Mapping[str, Any]) -> Json:
    """Return who took part in a round, who was dropped (by the gate, or as the worst), and how well each did."""
    return {
        "clients": record.get("clients", []),
        "dropped": [{"client": one["client"], "reason": one["reason"]} for one in record.get("dropped", [])],
        "worst": list(record.get("dropped_worst", {}).get("clients", ())),
        "accuracies": record.get("accuracy_of_clients") or {},
        "drifts": record.get("drift_of_clients") or {},
    }


def _progress(run: Run, stamp: tuple[int, int] | None) -> Json:
    """Return how far a run is, and how many seconds are left if the coming rounds take as long as those done."""
    done, planned, a_round = len(run.records), int(run.value("rounds")), run.seconds_a_round
    updated = stamp[0] / 1e9 if stamp else None
    state = "finished" if done >= planned else "running" if is_held(run.path / "lock") else "waiting"
    if state == "waiting" and updated is not None:
        late = max(120.0, 5 * a_round)  # which is not a number before the first
        state = "running" if time.time() - updated < late else "stopped"
    return {"state": state, "updated": updated, "seconds_left": _bounded((planned - done) * a_round)}


def _file(path: Path, form: Mapping[str, Any]) -> Json | None:
    """Return the values of a form in a run's file, if the run wrote it and the first of them is not empty."""
    try:
        found = validated(dict[str, Any], parse_json(read_regular(path)))
        values = {name: validated(kind, found.get(name, [])) for name, kind in form.items()}
    except (OSError, ValueError):
        return None
    return values if next(iter(values.values())) else None


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


_json = partial(json.dumps, ensure_ascii=False, default=str)


def _bounded(value: Any) -> Any:
    """Return values with every text of a bounded length, and every number finite, else ``None``."""
    if isinstance(value, Mapping):
        return {_bounded(str(key)): _bounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_bounded(one) for one in value]
    if isinstance(value, float):
        return round(value, 5) if isfinite(value) else None
    return value if not isinstance(value, str) or len(value) <= LONGEST else value[: LONGEST - 1] + "…"
