"""Five sites with five kinds of model, fused from tables of answers only, and from the models themselves.

python benchmarks/five_sites.py OUT

python benchmarks/five_sites.py OUT rounding     # afterwards: is what 16 bits change more than rounding?

Each site has other digits of MNIST (Dirichlet, alpha = 0.3): a random forest and a logistic regression of scikit-learn,
an MLP, and two CNNs of feddf. The pool are scikit-learn's digits, the test MNIST's. It needs scikit-learn and skl2onnx.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from skl2onnx import to_onnx
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression

import feddf
from feddf.client import local_update
from feddf.config import DataConfig, LocalConfig
from feddf.config.foreign import parse_toml
from feddf.config.fuse_config import TeacherConfig, load_fuse
from feddf.config.names import MODELS
from feddf.data.datasets import mnist_5k
from feddf.data.partition import dirichlet
from feddf.fusing.folder import plan
from feddf.fusing.fuse import fuse
from feddf.fusing.inputs import load_pool
from feddf.fusing.predictions import PredictionCache
from feddf.fusing.teachers import read_teachers
from feddf.models.small import build_network
from feddf.saved.model import Images, ModelSpec, of_inputs
from feddf.saved.model_folder import new_folder, write_model
from feddf.states import init_state
from feddf.types import Client, Job, Prototype

CLASSES = tuple(map(str, range(10)))
NETWORKS: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {"width": 64}),
    "cnn": ("cnn", {"norm": "none"}),
    "wide": ("cnn", {"width": 32, "norm": "group"}),
}
STUDENT = '{model = "cnn", size = 28, channels = 1, mean = [0.1307], std = [0.3081], options = {norm = "none"}}'
FUSE = ["--student", STUDENT, "--unlabeled", "digits", "--test", "mnist-5k"]
STEPS = ["distill.steps=2000", "ensemble.combine=logits"]


def make_sites(out: Path) -> None:
    """Train all five models, and write them as files."""
    train = mnist_5k(DataConfig(name="mnist-5k")).train
    config = feddf.PartitionConfig(alpha=0.3)
    shards = dirichlet(train.labels, 5, config, n_classes=10, seed=0)
    for shard, (name, (model, options)) in zip(shards, NETWORKS.items(), strict=False):
        build = partial(build_network, MODELS[model], (1, 28, 28), train.outputs, options)
        prototype = Prototype(name, build)
        job = Job(Client(name, name, shard), 1, init_state(prototype, 0), 0)
        local = LocalConfig(epochs=20, batch_size=32, lr=0.05)
        reply = local_update(job, prototypes={name: prototype}, train=train, local=local)
        spec = ModelSpec(model, (1, 28, 28), CLASSES, of_inputs(train.inputs), options)
        with new_folder(out / name) as folder:
            write_model(folder, prototype.load(reply.state), spec, {})
    images = train.inputs.raw[torch.arange(len(train))].flatten(1).numpy().astype(np.float32) / 255
    for shard, name, model in zip(shards[3:], ("forest", "logistic"), (RandomForestClassifier(200, random_state=0),
                                  LogisticRegression(max_iter=500)), strict=True):  # fmt: skip
        model.fit(images[shard], train.labels[shard].numpy())
        onnx = to_onnx(model, images[:1], options={id(model): {"zipmap": False}})
        (out / f"{name}.onnx").write_bytes(onnx.SerializeToString())
        (out / f"{name}.classes.json").write_text(json.dumps([str(one) for one in model.classes_]))
        write_table(out / f"{name}.csv", model)


def write_table(path: Path, model: Any) -> None:
    """Write what a model of scikit-learn says about the pool, as any tool would: a row an input, a column a class."""
    config = load_fuse(None, {"teachers": ["x"], "student": "cnn", "pool": {"sources": ["digits"]}})
    rows = load_pool(config, [Images((1, 28, 28), (0.0,), (1.0,))]).rows
    assert isinstance(rows, torch.Tensor)
    answers = model.predict_proba(rows.flatten(1).numpy().astype(np.float32) / 255)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["input", *model.classes_], *([n, *row] for n, row in enumerate(answers.tolist()))])


def named(path: Path) -> str:
    """Return a teacher as an option: a file of scikit-learn's with the classes of its site, beside which they lie."""
    beside = path.with_suffix(".classes.json")
    if path.suffix != ".onnx":
        return str(path)
    return f'{{path = "{path}", classes = {beside.read_text()}, mean = [0.0], std = [1.0]}}'


def feddf_command(*words: str) -> dict[str, Any]:
    """Run a command of feddf, and return the JSON that it prints."""
    done = subprocess.run([sys.executable, "-m", "feddf", *words, "--json"], stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout))


def main(out: Path) -> None:
    """Make the sites, ask them, fuse both ways and print the table."""
    out.mkdir(parents=True, exist_ok=True)
    make_sites(out)
    models = [out / "mlp", out / "cnn", out / "wide", out / "forest.onnx", out / "logistic.onnx"]
    tables: dict[str, list[Path]] = {"models": models}
    bits = {
        "16 bits": ["--bits", "16"],
        "8 bits": ["--bits", "8"],
        "3 largest, 8 bits": ["--bits", "8", "--largest", "3"],
    }
    feddf_command("pool", "--unlabeled", "digits", "--out", str(out / "pool.json"))
    asked = ["--unlabeled", "digits", "--pool", str(out / "pool.json")]
    for title, words in bits.items():
        files = [out / f"{model.stem}-{title.replace(' ', '-')}.answers" for model in models]
        for model, file in zip(models, files, strict=True):
            feddf_command("ask", named(model), *asked, "--out", str(file), *words)
        tables[title] = files
    tables["16 bits, CSV of scikit-learn"] = [*tables["16 bits"][:3], out / "forest.csv", out / "logistic.csv"]
    print("| what was handed out | kB of five sites | teachers % | ensemble % | student % |\n|---|---:|---|---:|---:|")
    for title, files in tables.items():
        given = [word for file in files for word in ("--teacher", named(file))]
        report = feddf_command("fuse", *given, *FUSE, "--out", str(out / f"fused {title}"), *STEPS)
        figures = {name: 100 * one["accuracy"] for name, one in report["sets"]["test"].items()}
        size = sum(
            path.stat().st_size for file in files for path in ([file] if file.is_file() else file.rglob("*.safe*"))
        )
        teachers = ", ".join(f"{value:.1f}" for name, value in figures.items() if name not in ("ensemble", "student"))
        ensemble = f"{figures['ensemble']:.1f}" if "ensemble" in figures else "–"
        print(
            f"| {title} | {size / 1000:.0f} | {teachers or '–'} | {ensemble} | {figures['student']:.1f} |", flush=True
        )


def rounding(out: Path) -> None:
    """Fuse what the models say to their last bit, as tables; the same off by 0.001 at most; and with other seeds."""
    values = {
        "student": parse_toml(f"v = {STUDENT}")["v"],
        "pool": {"sources": ["digits"]},
        "test": {"name": "mnist-5k"},
    }
    values |= {"ensemble": {"combine": "logits"}, "distill": {"steps": 2000}}
    given = [out / "mlp", out / "cnn", out / "wide", out / "forest.onnx", out / "logistic.onnx"]
    named_so = [str(one) if one.suffix != ".onnx" else parse_toml(f"v = {named(one)}")["v"] for one in given]
    config = load_fuse(None, {"teachers": named_so, **values})
    made = plan(config)
    cache = PredictionCache(out / "cache", out / "cache", {"pool": made.pool}, made.student.preprocess)
    exact = [(one, cache.logits(one)) for one in made.teachers]
    generator = torch.Generator().manual_seed(0)

    def accuracy(teachers: list[Any], seed: int = 0) -> str:
        said = {"ensemble": config.ensemble, "distill": config.distill, "run": config.run, "seed": seed}
        fused = fuse(teachers, made.student, made.pool, test=made.labeled["test"], cache=out / "cache", **said)
        return f"{100 * fused.report.sets['test']['student'].accuracy:.1f}"

    def tables(most: float) -> list[Any]:
        off = [rows + most * (2 * torch.rand(rows.shape, generator=generator) - 1) for _, rows in exact]
        pairs = zip((one for one, _ in exact), off, strict=True)
        return [replace(one, outputs="logits", table=partial(same, rows=rows)) for one, rows in pairs]

    def same(*pool: Any, rows: torch.Tensor, **known: Any) -> torch.Tensor:
        return rows

    files = [str(out / f"{one.stem}-16-bits.answers") for one in given]
    print("models:", accuracy(list(made.teachers)), "; what they say, as tables:", accuracy(tables(0.0)), flush=True)
    print("in 16 bits:", accuracy(read_teachers([TeacherConfig(path=one) for one in files])), flush=True)
    print("off by at most 0.001:", ", ".join(accuracy(tables(1e-3)) for _ in range(5)), flush=True)
    print("models, seeds 1 to 3:", ", ".join(accuracy(list(made.teachers), seed) for seed in (1, 2, 3)))


if __name__ == "__main__":
    rounding(Path(sys.argv[1])) if sys.argv[2:] == ["rounding"] else main(Path(sys.argv[1]))
