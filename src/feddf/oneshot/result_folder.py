"""The folder that ``feddf fuse`` writes: the model, its card, the report and the exact configuration.

::

    model.safetensors, config.json    what :func:`feddf.load_model` reads; for transformers what from_pretrained reads
    README.md                         the model card, with reliability-*.png
    fuse.toml, report.json            the complete configuration, and all figures
    model.onnx                        on request
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import tomli_w
import torch

from feddf.config.errors import ConfigError
from feddf.config.fuse_config import FuseConfig, LabelledConfig, load_fuse
from feddf.config.keys import flat, is_free
from feddf.oneshot.cached_answers import Progress, quiet
from feddf.oneshot.card import card, plot_name, reliability
from feddf.oneshot.fuse import FusionResult, fuse
from feddf.oneshot.onnx_export import write_onnx
from feddf.oneshot.student import StudentPlan
from feddf.oneshot.teachers import TrainedModel, fed, preprocess_of, read_teachers
from feddf.oneshot.unlabeled_inputs import Given, Raw, labelled, unlabeled
from feddf.runtime.atomic import write_atomically
from feddf.saved.model import LoadedModel, ModelError
from feddf.saved.model_folder import CARD, new_folder, write_model
from feddf.saved.preprocess import Images, Preprocess, Tokens
from feddf.seeds import derive

ENOUGH = 64
"""Inputs of the pool on which an ONNX file is compared with the student."""


def fuse_to_folder(config: FuseConfig, out: Path, progress: Progress = quiet, *, trust: bool = False) -> FusionResult:
    """Fuse as a configuration says, and write the result to a folder that is there whole or not at all."""
    if out.exists():
        raise ModelError(f"{out} is there already; name a new folder with --out, or remove it")
    teachers = read_teachers(config.teachers, trust=trust)
    plan = planned(config, teachers)
    raw = unlabeled(config, [plan.preprocess, *(fed(teacher, plan.preprocess) for teacher in teachers)], trust=trust)
    result = fuse(
        teachers,
        plan,
        raw,
        validation=_labelled(config.validation, "validation", raw, config.seed),
        test=_labelled(config.test, "test", raw, config.seed),
        ensemble=config.ensemble,
        distill=config.distill,
        run=config.run,
        seed=config.seed,
        cache=Path(config.cache).expanduser() if config.cache else None,
        progress=progress,
    )
    write_result(result, config, raw, out)
    return result


def planned(config: FuseConfig, teachers: Sequence[TrainedModel]) -> StudentPlan:
    """Return the student of a configuration. It is fed as the first teacher that says how, where nobody says more."""
    student = config.student
    start = next((teacher for teacher in teachers if teacher.id == student.start), None)
    known = [start] if start is not None else list(teachers)
    first = next((teacher.preprocess for teacher in known if teacher.preprocess is not None), None)
    preprocess = preprocess_of(student, first, first if isinstance(first, Images) else None)
    if preprocess is None:
        raise ConfigError.at("student.size", None, "nobody says how large images are; set it, or a student.tokenizer")
    options = dict(student.options)
    if isinstance(preprocess, Tokens) and student.model == "transformer":
        options.setdefault("path", preprocess.tokenizer)
    return StudentPlan(student.model, preprocess, options, student.start, student.classes)


def _labelled(config: LabelledConfig | None, key: str, raw: Raw, seed: int) -> Given | None:
    if config is None:
        return None
    return lambda classes: labelled(config, key, classes, raw, derive(seed, key))


def fingerprint(config: FuseConfig) -> str:
    """Return a hash of all that determines the result: the configuration without what only says where it runs."""
    values = flat(config.model_dump(mode="json"))
    decisive = {name: value for name, value in values.items() if value is not None and not is_free(name, FuseConfig)}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def write_result(result: FusionResult, config: FuseConfig, raw: Raw, out: Path) -> None:
    """Write the folder, whole or not at all."""
    model, spec = result.model, result.spec
    assert isinstance(model, LoadedModel), "a configuration names its student"
    assert spec is not None, "a configuration names its student"
    configuration = tomli_w.dumps(config.model_dump(exclude_none=True, mode="json"))
    chosen = tomli_w.dumps(config.model_dump(exclude_none=True, exclude_defaults=True, mode="json"))
    facts = {"configuration_sha256": fingerprint(config), "feddf": version("feddf")}
    with new_folder(out) as folder:
        extra = [_exported(model, spec.preprocess, raw, folder)] if config.onnx else []
        write_model(folder, model.network, spec, facts)
        for which in result.report.sets:
            write_atomically(folder / plot_name(which), reliability(result.report, which))
        text = card(config.name, result.report, chosen, spec.describe(), extra)
        write_atomically(folder / CARD, text.encode())
        write_atomically(folder / "fuse.toml", configuration.encode())
        write_atomically(folder / "report.json", json.dumps(result.report.describe(), indent=1).encode())


def _exported(model: LoadedModel, preprocess: Preprocess | None, raw: Raw, folder: Path) -> str:
    few = Raw(raw.rows[:ENOUGH], raw.encode).inputs(preprocess)
    difference = write_onnx(model.network, few.batch(torch.arange(len(few))), folder / "model.onnx")
    return f"`model.onnx` is the same model: its logits for {len(few)} inputs differ by at most {difference:.1e}."


def is_result_of(out: Path, config: FuseConfig) -> bool:
    """Say whether a folder holds the result of this configuration; refuse one that holds something else."""
    if not out.exists():
        return False
    try:
        written = load_fuse(str(out / "fuse.toml"), {})
    except ConfigError:
        raise ModelError(f"{out} is there already, and holds no fusion; name a new folder with --out") from None
    if fingerprint(written) != fingerprint(config):
        raise ModelError(f"{out} holds a fusion with another configuration; name a new folder with --out")
    return True
