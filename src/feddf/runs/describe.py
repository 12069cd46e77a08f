"""What makes a run's models usable without the experiment: ``config.json`` and a model card in the run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from feddf.config import Record
from feddf.runs.build import Parts
from feddf.runs.loading import with_tokenizer
from feddf.runtime.atomic import write_atomically
from feddf.saved.model import ModelSpec, of_inputs
from feddf.saved.model_folder import CARD, CONFIG


def describe(parts: Parts, folder: Path, records: Sequence[Record]) -> None:
    """Write how the models in ``models/`` are built and fed, and the card."""
    specs = specs_of(parts)
    values = {"feddf": {"prototypes": {name: spec.describe() for name, spec in specs.items()}}}
    write_atomically(folder / CONFIG, json.dumps(values, indent=2, ensure_ascii=False).encode())
    write_atomically(folder / CARD, card(parts, specs, records).encode())


def specs_of(parts: Parts) -> dict[str, ModelSpec]:
    """Return the description of every prototype; classes without names are numbers."""
    data = parts.task.data
    numbers = tuple(str(number) for number in range(data.train.n_classes))
    classes = data.classes if len(data.classes) == len(numbers) else numbers
    preprocess = of_inputs(data.train.inputs, with_tokenizer(parts.experiment).tokenizer)
    return {
        spec.label: ModelSpec(
            spec.model, data.shape, classes, preprocess, spec.options, parts.prototypes[spec.label].fit is not None
        )
        for spec in parts.experiment.prototypes
    }


def card(parts: Parts, specs: dict[str, ModelSpec], records: Sequence[Record]) -> str:
    """Return the model card: what was trained on what, and the last round's test accuracies."""
    experiment, last = parts.experiment, records[-1] if records else None
    classes = next(iter(specs.values())).classes
    lines = [
        "---",
        "library_name: feddf",
        "tags:",
        "- feddf",
        "- federated-learning",
        "---",
        f"# {experiment.name}",
        "",
    ]
    if experiment.description:
        lines += [experiment.description, ""]
    rounds = last["round"] if last else 0
    lines += [
        f"Models of `{experiment.fusion.method}` after {rounds} rounds with {experiment.clients.total} clients on "
        f"`{experiment.data.name}` ({len(classes)} classes); the whole configuration is in `config.toml`.",
        "",
        "| prototype | architecture | test accuracy % |",
        "|---|---|---:|",
    ]
    for name, spec in specs.items():
        fused = last["models"][name]["fused"] if last and name in last["models"] else None
        lines.append(f"| {name} | `{spec.model}` | {'' if fused is None else f'{100 * fused:.1f}'} |")
    chosen = f', prototype="{next(iter(specs))}"' if len(specs) > 1 else ""
    lines += ["", "```python", "import feddf", f'model = feddf.load_model("FOLDER"{chosen})', "```", ""]
    return "\n".join(lines)
