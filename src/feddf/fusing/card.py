"""The model card: what was fused on what, and how good it is, as ``README.md`` with YAML front matter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from feddf.fusing.report import ENSEMBLE, STUDENT, Report

MOST = 40
"""Teachers up to which a card shows who agrees with whom; beyond that the matrix is in ``report.json`` only."""


def card(name: str, report: Report, configuration: str, description: dict[str, Any], extra: Sequence[str] = ()) -> str:
    """Return the card's text; ``configuration`` is its TOML, ``description`` the model's."""
    parts = [
        _front(name, report, description),
        f"# {name}",
        _summary(report, description),
        _usage(description),
        *(_measured(report, which) for which in report.sets),
        _teachers(report),
        _classes(report),
        _agreement(report),
        _outliers(report),
        *extra,
        "## Configuration\n\nWhat differs from the defaults; all of it is in `fuse.toml`.\n\n"
        f"```toml\n{configuration.strip()}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(name: str, report: Report, description: dict[str, Any]) -> str:
    kind = "text-classification" if (description["preprocessing"] or {}).get("kind") == "tokens" else None
    images = (description["preprocessing"] or {}).get("kind") == "images"
    task = kind or ("image-classification" if images else "tabular-classification")
    lines = ["---", "library_name: feddf", f"pipeline_tag: {task}", "tags:", "- feddf", "- model-fusion"]
    lines += ["- ensemble-distillation", "model-index:", f"- name: {json.dumps(name)}", "  results:"]
    results = [
        f"  - task: {{type: {task}}}\n"
        f"    dataset: {{type: {json.dumps(which)}, name: {json.dumps(which)}}}\n"
        f"    metrics:\n    - {{type: accuracy, value: {figures[STUDENT].accuracy:.4f}}}"
        for which, figures in report.sets.items()
    ]
    if not results:
        lines[-1] = "  results: []"
    return "\n".join([*lines, *results, "---"])


def _summary(report: Report, description: dict[str, Any]) -> str:
    steps = report.notes.get("distillation", {}).get(STUDENT, {})
    learned = f" in {steps['steps']} steps (the best after {steps['best_step']})" if steps else ""
    return (
        f"A `{description['model']}` of {len(report.classes)} classes, fused from {len(report.teachers)} "
        f"{_plural(len(report.teachers), 'model')} that {_plural(len(report.teachers), 'was', 'were')} trained apart: "
        f"distilled{learned} from their answers to {report.pool_size} unlabeled inputs (FedDF's ensemble distillation, "
        "Lin, Kong, Stich, Jaggi, NeurIPS 2020, with one round and no clients)."
    )


def _usage(description: dict[str, Any]) -> str:
    kind = (description["preprocessing"] or {}).get("kind")
    given = {"images": '["picture.png"]', "tokens": '["a text"]'}.get(str(kind), "[[0.1, 0.2]]")
    return f'```python\nimport feddf\nmodel = feddf.load_model("FOLDER")\nprint(model.predict({given}))\n```'


def _measured(report: Report, which: str) -> str:
    figures = report.sets[which]
    teachers = [one for name, one in figures.items() if name not in (ENSEMBLE, STUDENT)]
    rows = [
        [_cell(name), _percent(one.accuracy), _percent(one.own_accuracy), _percent(one.ece)]
        for name, one in figures.items()
    ]
    mean = sum(one.accuracy for one in teachers) / len(teachers)
    rows.insert(len(teachers), ["mean of the teachers", _percent(mean), "", ""])
    seen = ", which early stopping looked at" if which == "validation" else ""
    table = _table(["model", "accuracy %", "of classes that it knows %", "calibration error %"], rows)
    plot = f"\n\n![reliability]({plot_name(which)})"
    return f"## On {report.sizes[which]} {which} examples{seen}\n\n{table}{plot}"


def _teachers(report: Report) -> str:
    rows = [
        [_cell(one["name"]), _cell(one["source"]), _cell(one["model"]), (one["sha256"] or "")[:16]]
        for one in report.teachers
    ]
    return "## Teachers\n\n" + _table(["teacher", "from", "architecture", "SHA-256 begins"], rows)


def _classes(report: Report) -> str:
    if all(all(known) for known in report.knows.values()):
        return "Every teacher knows all classes: " + ", ".join(map(_cell, report.classes)) + "."
    names = [name for name in report.names if name in report.knows]
    rows = [
        [_cell(label), *("•" if report.knows[name][number] else "" for name in names)]
        for number, label in enumerate(report.classes)
    ]
    return "## Who knows which class\n\n" + _table(["class", *map(_cell, names)], rows)


def _agreement(report: Report) -> str:
    if len(report.names) > MOST + 2:
        return ""
    rows = [
        [_cell(name), *(f"{100 * value:.0f}" for value in row)]
        for name, row in zip(report.names, report.agreement, strict=True)
    ]
    title = "## Who agrees with whom\n\nThe share of the unlabeled inputs on which both name the same class, in %.\n\n"
    return title + _table(["", *map(_cell, report.names)], rows)


def _outliers(report: Report) -> str:
    dropped = report.notes.get("dropped_worst", {})
    gone = {**dropped.get("clients", {}), **dropped.get("teachers", {})}
    lines = [f"- {_cell(name)} {why}." for name, why in report.outliers.items()]
    lines += [f"- {_cell(name)} was left out: its accuracy is {100 * value:.1f} %." for name, value in gone.items()]
    return "## Outliers\n\n" + ("\n".join(lines) if lines else "None of the teachers stands apart from the others.")


def plot_name(which: str) -> str:
    """Return the name of the file with the reliability plot."""
    return f"reliability-{which}.png"


def draw_reliability(report: Report, which: str, folder: Path) -> None:
    """Draw accuracy against confidence: every teacher in gray, the ensemble and the student with their ECE."""
    from matplotlib.figure import Figure

    from feddf.report.plots import COLORS, draw_curve, in_one_style, save_figure

    colors = dict(zip((ENSEMBLE, STUDENT), COLORS, strict=False))
    with in_one_style():
        figure = Figure(figsize=(5, 4.5), layout="constrained")
        axes = figure.subplots()
        axes.plot([0, 100], [0, 100], ":", color="gray", linewidth=1, label="calibrated")
        for number, (name, one) in enumerate(report.sets[which].items()):
            filled = [each for each in one.bins if each.count]
            x, y = [100 * each.confidence for each in filled], [[100 * each.accuracy] for each in filled]
            if name in colors:
                draw_curve(axes, x, y, color=colors[name], label=f"{name} (ECE {100 * one.ece:.1f} %)")
            else:
                label = "teachers" if number == 0 else None
                draw_curve(axes, x, y, "-", color="silver", linewidth=1, zorder=1, label=label)
        axes.set(xlabel="confidence in %", ylabel="accuracy in %", xlim=(0, 100), ylim=(0, 100))
        axes.legend(loc="upper left")
        save_figure(figure, folder / plot_name(which))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" + "---:|" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _plural(count: int, one: str, many: str = "") -> str:
    return one if count == 1 else many or f"{one}s"
