"""The model card: what was fused on what, and how good it is, as ``README.md`` with YAML front matter."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from feddf.fusing.report import ENSEMBLE, STUDENT, Report

KINDS = {"images": ("image-classification", '["picture.png"]'), "tokens": ("text-classification", '["a text"]')}
"""The task of models of some kind, and what the card's example has one predict for."""


def card(
    name: str,
    report: Report,
    configuration: str,
    description: dict[str, Any],
    note: str = "",
    datasets: Mapping[str, str] = {},
) -> str:
    """Return the card's text: of the configuration's TOML, the model's description, and pool and labels by name."""
    kind = (description["preprocessing"] or {}).get("kind", "")
    task, given = KINDS.get(kind, ("tabular-classification", "[[0.1, 0.2]]"))
    usage = f'import feddf\nmodel = feddf.load_model("FOLDER")\nprint(model.predict({given}))'
    parts = [_front(name, report, task, datasets), f"# {name}", _summary(report, description["model"])]
    parts += [f"```python\n{usage}\n```", *(_measured(report, which) for which in report.sets)]
    parts += [_teachers(report), _fed(report), _classes(report), _per_class(report), _agreement(report)]
    parts += [_outliers(report), note]
    parts += ["## Configuration\n\nWhat differs from the defaults; all of it is in `fuse.toml`."]
    parts += [f"```toml\n{configuration.strip()}\n```"]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front(name: str, report: Report, task: str, datasets: Mapping[str, str]) -> str:
    lines = ["---", "library_name: feddf", f"pipeline_tag: {task}"]
    licenses = sorted({one["license"] for one in report.teachers if one.get("license")})
    if len(licenses) == 1 and all(one.get("license") for one in report.teachers):
        lines += [f"license: {json.dumps(licenses[0])}"]
    named = [one["name"] if Path(one["source"]).exists() else one["source"] for one in report.teachers]
    lines += ["base_model_relation: merge", "base_model:", *(f"- {json.dumps(one)}" for one in named)]
    known = dict.fromkeys([*datasets.values(), *(one for each in report.teachers for one in each.get("datasets", ()))])
    lines += ["datasets:", *(f"- {json.dumps(one)}" for one in known)] if known else []
    lines += ["tags:", "- feddf", "- model-fusion"]
    lines += ["- ensemble-distillation", "model-index:", f"- name: {json.dumps(name)}"]
    lines += ["  results:" if report.sets else "  results: []"]
    for which, figures in report.sets.items():
        quoted, accuracy = json.dumps(datasets.get(which, which)), figures[STUDENT].accuracy
        lines += [f"  - task: {{type: {task}}}", f"    dataset: {{type: {quoted}, name: {quoted}}}"]
        lines += ["    metrics:", f"    - {{type: accuracy, value: {accuracy:.4f}}}"]
    return "\n".join([*lines, "---"])


def _summary(report: Report, model: str) -> str:
    steps, count = report.notes.get("distillation", {}).get(STUDENT, {}), len(report.teachers)
    learned = f" in {steps['steps']} steps (the best after {steps['best_step']})" if steps else ""
    return (
        f"A `{model}` of {len(report.classes)} classes, fused from {count} "
        f"{'model that was' if count == 1 else 'models that were'} trained apart: "
        f"distilled{learned} from their answers to {report.pool_size} unlabeled inputs (FedDF's ensemble distillation, "
        "Lin, Kong, Stich, Jaggi, NeurIPS 2020, with one round and no clients)."
    )


def _measured(report: Report, which: str) -> str:
    figures = report.sets[which]
    teachers = [one.accuracy for name, one in figures.items() if name not in (ENSEMBLE, STUDENT)]
    rows = [[name, *map(_percent, (one.accuracy, one.own_accuracy, one.ece))] for name, one in figures.items()]
    rows.insert(len(teachers), ["mean of the teachers", _percent(sum(teachers) / len(teachers)), "", ""])
    seen = ", which early stopping looked at" if which == "validation" else ""
    table = _table(["model", "accuracy %", "of classes that it knows %", "calibration error %"], rows)
    return f"## On {report.sizes[which]} {which} examples{seen}\n\n{table}\n\n![reliability]({plot_name(which)})"


def _teachers(report: Report) -> str:
    gains = [(which, found) for which, found in report.contributions.items() if found]
    rows = [
        [one["name"], one["source"], one["model"], (one["sha256"] or "")[:16], one.get("license", "")]
        + [f"{100 * found[one['name']]:+.1f}" if one["name"] in found else "" for _, found in gains]
        for one in report.teachers
    ]
    header = ["teacher", "from", "architecture", "SHA-256 begins", "license"]
    told = (
        "\n\nA contribution is what the ensemble's accuracy would lose without the teacher, in points." if gains else ""
    )
    return "## Teachers\n\n" + _table([*header, *(f"contribution ({which})" for which, _ in gains)], rows) + told


def _fed(report: Report) -> str:
    """Return how every model is fed, what teachers return, and whose word that is."""
    rows = [[one["name"], one["fed"], one["outputs"]] for one in report.teachers if "fed" in one]
    rows += [["student", report.student["fed"], "logits"]] if report.student else []
    warned = [f"- {_cell(text)}" for text in report.notes.get("warnings", ())]
    warned += [
        f"- {_cell(name)}: its class '{_cell(own)}' is taken as '{_cell(called)}'."
        for name, found in report.notes.get("matched", {}).items()
        for own, called in found.items()
    ]
    table = _table(["model", "fed (who said so)", "outputs"], rows)
    return "## How they are fed\n\n" + "\n".join([table, "", *warned]).rstrip() if rows else ""


def _per_class(report: Report) -> str:
    """Return the accuracy on each class, of the labeled data that are looked at last."""
    if not report.sets:
        return ""
    which, figures = list(report.sets.items())[-1]
    shown = figures if len(figures) <= 12 else {name: figures[name] for name in (ENSEMBLE, STUDENT)}
    columns = [[_percent(value) for value in one.per_class] for one in shown.values()]
    rows = list(zip(report.classes, *columns, strict=True))
    return f"## Accuracy on each class ({which}, in %)\n\n" + _table(["class", *shown], rows)


def _classes(report: Report) -> str:
    if all(all(known) for known in report.knows.values()):
        return "Every teacher knows all classes: " + ", ".join(map(_cell, report.classes)) + "."
    names = [name for name in report.names if name in report.knows]
    columns = [["•" if known else "" for known in report.knows[name]] for name in names]
    return "## Who knows which class\n\n" + _table(["class", *names], list(zip(report.classes, *columns, strict=True)))


def _agreement(report: Report) -> str:
    """Return who agrees with whom; for more than 40 teachers that is in ``report.json`` only."""
    if len(report.names) > 42:
        return ""
    shares = zip(report.names, report.agreement, strict=True)
    rows = [[name, *(f"{100 * value:.0f}" for value in row)] for name, row in shares]
    title = "## Who agrees with whom\n\nThe share of the unlabeled inputs on which both name the same class, in %.\n\n"
    return title + _table(["", *report.names], rows)


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
    first, *others = ["| " + " | ".join(map(_cell, row)) + " |" for row in (header, *rows)]
    return "\n".join([first, "|---|" + "---:|" * (len(header) - 1), *others])


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
