"""The model card: what was fused on what, and how good it is, as ``README.md`` with YAML front matter."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from feddf.fusing.report import ENSEMBLE, STUDENT, Report
from feddf.outputs import MOST_CHANNELS
from feddf.report.tables import markdown_table, percent
from feddf.saved.model import Features, Images, ModelSpec, Tokens

KINDS = {
    Images: ("image", '["picture.png"]'), Tokens: ("text", '["a text"]'),
    Features: ("tabular", "[[0.1, 0.2]]"), type(None): ("tabular", "[[0.1, 0.2]]"),
}  # fmt: skip
"""What models of some kind take, and what the card's example has one predict for."""

MASKS = "masks.png"


def card(
    name: str,
    report: Report,
    configuration: str,
    spec: ModelSpec,
    note: str = "",
    datasets: Mapping[str, str] = {},
    masks: Sequence[str] = (),
) -> str:
    """Return the card's text: of the configuration's TOML, the model's description, and pool and labels by name.

    The columns of a picture of ``masks`` are named.
    """
    takes, given = KINDS[type(spec.preprocess)]
    task = task_of(takes, spec)
    usage = f'import feddf\nmodel = feddf.load_model("FOLDER")\nprint(model.predict({given}))'
    parts = [_front(name, report, task, datasets), f"# {name}", _summary(report, spec.model), kept_start(report)]
    parts += [f"```python\n{usage}\n```", *(_measured(report, which) for which in report.sets)]
    parts += [f"## Some masks\n\nFrom left to right: {', '.join(masks)}.\n\n![masks]({MASKS})"] if masks else []
    parts += [_teachers(report), _classes(report), _agreement(report), note]
    parts += ["## Configuration\n\nWhat differs from the defaults; all of it is in `fuse.toml`."]
    return _joined([*parts, f"```toml\n{configuration.strip()}\n```"]) + "\n"


def task_of(takes: str, spec: ModelSpec) -> str:
    """Return what the hub calls the task of a model that takes images, texts or tables."""
    if spec.outputs.positions:
        return "image-segmentation" if takes == "image" else "token-classification"
    return f"{takes}-{'regression' if spec.outputs.has_units and takes == 'tabular' else 'classification'}"


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
        lines += ["    metrics:", f"    - {{type: {report.metric}, value: {accuracy:.4f}}}"]
    return "\n".join([*lines, "---"])


def kept_start(report: Report) -> str:
    """Return why the student equals what it started as; nothing if it has learned."""
    step = report.notes.get("distillation", {}).get(STUDENT, {}).get("best_step")
    return "The student is what it started as: early stopping found no step of it better." if step == 0 else ""


def _summary(report: Report, model: str) -> str:
    steps, count = report.notes.get("distillation", {}).get(STUDENT, {}), len(report.teachers)
    learned = f" in {steps['steps']} steps (the best after {steps['best_step']})" if steps else ""
    return (
        f"A `{model}` of {len(report.classes)} {report.kind}"
        f"{' at every position' if report.outputs.get('positions') else ''}, fused from {count} "
        f"{'model that was' if count == 1 else 'models that were'} trained apart: "
        f"distilled{learned} from their answers to {report.pool_size} unlabeled inputs (FedDF's ensemble distillation, "
        "Lin, Kong, Stich, Jaggi, NeurIPS 2020, with one round and no clients)."
    )


def _measured(report: Report, which: str) -> str:
    seen = ", which early stopping looked at" if which == "validation" else ""
    plot = f"\n\n![reliability]({plot_name(which)})" if report.sets[which][STUDENT].ece is not None else ""
    return f"## On {report.sizes[which]} {which} examples{seen}\n\n{markdown_table(*all_figures(report, which))}{plot}"


def all_figures(report: Report, which: str) -> tuple[list[str], list[list[str]]]:
    """Return the columns and the rows of a table: what all models reach on some examples, and the teachers' mean."""
    figures = report.sets[which]
    header = ["model", f"{report.metric} %", f"of {report.kind} that it knows %", "calibration error %"]
    header += [f"{name} %" for name in next(iter(figures.values())).measures]
    scores = {name: (one.accuracy, one.own_accuracy, one.ece, *one.measures.values()) for name, one in figures.items()}
    rows = [[name, *("–" if one is None else percent(one) for one in each)] for name, each in scores.items()]
    teachers = [one.accuracy for name, one in figures.items() if name not in (ENSEMBLE, STUDENT)]
    if teachers:  # tables of answers have none for these inputs
        mean = ["mean of the teachers", percent(sum(teachers) / len(teachers))]
        rows.insert(len(teachers), mean + [""] * (len(header) - 2))
    return header, rows


def _teachers(report: Report) -> str:
    """Return whence the teachers are and what each contributes; then how all models are fed, with the sources."""
    gains = {f"contribution ({which})": found for which, found in report.contributions.items() if found}
    header = ["teacher", "from", "architecture", "SHA-256 begins", "license", *gains]
    rows = [
        [one["name"], one["source"], one["model"], (one["sha256"] or "")[:16], one["license"]]
        + [f"{100 * found[one['name']]:+.1f}" if one["name"] in found else "" for found in gains.values()]
        for one in report.teachers
    ]
    told = (
        f"A contribution is what the ensemble's {report.metric} would lose without the teacher, in points; on the "
        "pool, the share of its answers that would be others."
    )
    fed = [[one["name"], one["fed"], one["outputs"]] for one in report.teachers]
    fed += [["student", report.student["fed"], "logits"]] if report.student else []
    said = [f"- {_cell(text)}" for text in [*report.notes.get("warnings", ()), *matched(report)]]
    parts = ["## Teachers", markdown_table(header, rows, range(5)), told if gains else "", "## How they are fed"]
    return _joined([*parts, markdown_table(["model", "fed (source)", "outputs"], fed, range(3)), "\n".join(said)])


def matched(report: Report) -> list[str]:
    """Return which classes of teachers were taken as classes of another spelling."""
    notes = report.notes.get("matched", {}).items()
    return [f"{name}: its class '{own}' is taken as '{to}'." for name, found in notes for own, to in found.items()]


def _classes(report: Report) -> str:
    """Return who knows which class; and the accuracy on each, of the labeled data that are looked at last."""
    most = report.classes[:MOST_CHANNELS]
    known = f"Every teacher knows all {report.kind}: {', '.join(map(_cell, most))}{', ...' * (most != report.classes)}."
    if not all(all(knows) for knows in report.knows.values()):
        columns = [["•" if known else "" for known in knows] for knows in report.knows.values()]
        table = markdown_table(["class", *report.knows], zip(report.classes, *columns, strict=True))
        known = f"## Who knows which class\n\n{table}"
    if not report.sets or most != report.classes:
        return known
    which, figures = list(report.sets.items())[-1]
    shown = figures if len(figures) <= 12 else {name: figures[name] for name in (ENSEMBLE, STUDENT) if name in figures}
    columns = [[percent(value) for value in one.per_class] for one in shown.values()]
    table = markdown_table(["class", *shown], zip(report.classes, *columns, strict=True))
    title = "Accuracy on each class" if report.kind == "classes" else f"{report.metric} of each of the {report.kind}"
    return f"{known}\n\n## {title} ({which}, in %)\n\n{table}"


def _agreement(report: Report) -> str:
    """Return who agrees with whom (for more than 40 teachers that is in ``report.json`` only), and who stands apart."""
    shares = zip(report.names, report.agreement, strict=True)
    rows = [[name, *(f"{100 * value:.0f}" for value in row)] for name, row in shares]
    what = "unlabeled inputs on which both name the same class"
    what = f"answers to {report.compared} unlabeled inputs that are the same" if report.outputs else what
    what = "correlation of both" if report.kind == "values" else f"share of the {what}"
    title = f"## Who agrees with whom\n\nThe {what}, in %."
    who = [title, markdown_table(["model", *report.names], rows)] if len(rows) <= 42 else []
    dropped = report.notes.get("dropped_worst", {})
    gone = {**dropped.get("clients", {}), **dropped.get("teachers", {})}
    lines = [f"- {_cell(name)} {why}." for name, why in report.outliers.items()]
    left = f"was left out: its {report.metric} is"
    lines += [f"- {_cell(name)} {left} {100 * value:.1f} %." for name, value in gone.items()]
    return _joined([*who, "## Outliers", "\n".join(lines) or "None of the teachers stands apart from the others."])


def plot_name(which: str) -> str:
    """Return the name of the file with the reliability plot."""
    return f"reliability-{which}.png"


def draw_masks(shown: Mapping[str, Tensor], count: int, folder: Path) -> None:
    """Draw a few images, a row each, with the masks of all who have some."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    from feddf.report.plots import in_one_style, save_figure

    colors = colormaps["tab20"] if count > 10 else colormaps["tab10"]
    with in_one_style():
        figure = Figure(figsize=(1.4 * len(shown), 1.4 * len(shown["image"]) + 0.3), layout="constrained")
        grid = figure.subplots(len(shown["image"]), len(shown), squeeze=False)
        for column, (name, rows) in enumerate(shown.items()):
            for row, one in enumerate(rows):
                if name == "image":
                    grid[row, column].imshow(one.permute(1, 2, 0).squeeze(-1).numpy(), cmap="gray")
                else:
                    known = one.clamp_min(0).numpy() % colors.N
                    grid[row, column].imshow(known, cmap=colors, vmin=0, vmax=colors.N - 1, interpolation="nearest")
                grid[row, column].set(xticks=[], yticks=[], title=name if row == 0 else "")
        save_figure(figure, folder / MASKS)


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
                draw_curve(axes, x, y, color=colors[name], label=f"{name} (ECE {100 * (one.ece or 0):.1f} %)")
            else:
                label = "teachers" if number == 0 else None
                draw_curve(axes, x, y, "-", color="silver", linewidth=1, zorder=1, label=label)
        axes.set(xlabel="confidence in %", ylabel="accuracy in %", xlim=(0, 100), ylim=(0, 100))
        axes.legend(loc="upper left")
        save_figure(figure, folder / plot_name(which))


def _cell(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part)
