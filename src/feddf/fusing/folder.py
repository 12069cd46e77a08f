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
import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
import torch
from torch import Tensor, nn

from feddf.config.errors import ConfigError, FeddfError, one_line
from feddf.config.fuse_config import FuseConfig, load_fuse
from feddf.config.keys import flat, is_free
from feddf.config.names import DATASETS
from feddf.evaluate import evaluation_mode
from feddf.fusing.asking import for_pool
from feddf.fusing.card import card, draw_masks, draw_reliability
from feddf.fusing.ensemble import agree_on_outputs, refuse_meaningless
from feddf.fusing.feeding import Feeding, assumed, by_hand
from feddf.fusing.fuse import FusionResult, StudentSpec, complete_student, fuse
from feddf.fusing.inputs import Labeled, RawInputs, load_labeled, load_pool, pool_form
from feddf.fusing.inspecting import inspect_teacher
from feddf.fusing.onnx_files import open_session
from feddf.fusing.predictions import Progress, quiet
from feddf.fusing.report import STUDENT
from feddf.fusing.teachers import TrainedModel, read_teachers
from feddf.fusion.distill import distill
from feddf.outputs import from_description
from feddf.runtime.atomic import new_file, write_atomically
from feddf.runtime.packages import silence
from feddf.saved.model import LoadedModel, ModelError, Tokens
from feddf.saved.model_folder import CARD, new_folder, write_model
from feddf.seeds import derive
from feddf.states import init_state


class Plan(NamedTuple):
    """A fusion before its work: teachers and student, each of which knows how it is fed, and all inputs."""

    teachers: Sequence[TrainedModel]
    student: StudentSpec
    pool: RawInputs
    labeled: Mapping[str, Labeled]


def plan(config: FuseConfig, *, trust: bool = False) -> Plan:
    """Read teachers and inputs, and decide how every model is fed."""
    teachers = for_pool(read_teachers(config.teachers, trust=trust), config, trust=trust)
    student = _student(config, teachers)
    teachers = [one.fed_like(student.fed) for one in teachers]
    pool = load_pool(config, [student.preprocess, *(one.preprocess for one in teachers)], trust=trust)
    given = config.labeled.items()
    labeled = {key: load_labeled(one, key, pool, derive(config.seed, key)) for key, one in given}
    return Plan(teachers, student, pool, labeled)


def fuse_to_folder(
    config: FuseConfig, out: Path, progress: Progress = quiet, *, planned: Plan | None = None, trust: bool = False
) -> FusionResult:
    """Fuse as a configuration says, and write the result to a folder that is there whole or not at all."""
    if out.exists():
        raise ModelError(f"{out} is there already; name a new folder with --out, or remove it")
    teachers, student, pool, labeled = planned or plan(config, trust=trust)
    cache = Path(config.cache).expanduser() if config.cache else None
    said = {name: getattr(config, name) for name in ("ensemble", "distill", "run", "seed")}
    result = fuse(teachers, student, pool, **{**labeled, **said}, cache=cache, progress=progress)
    _write(result, config, pool, out)
    return result


def check(config: FuseConfig, made: Plan) -> dict[str, Any]:
    """Return, as JSON, all that can be known before the work: every teacher tried on a few inputs, and what it costs.

    Time is that of teachers' answers to all inputs, none of which may be cached, and of all steps of the student.
    Memory is what this process has taken so far, with the whole pool, one teacher at a time and the student.
    """
    teachers, student, pool, labeled = made
    judges = labeled.get("validation")
    found = [inspect_teacher(one, judges, pool) for one in teachers]
    meanings = {one["name"]: from_description(one["form"]) for one in found}
    ask = (lambda one: meanings[one.id]), (lambda one: meanings[one.id].channels or 0)
    models, classes, outputs = agree_on_outputs(teachers, student.classes, student.background, *ask)
    refuse_meaningless(config.ensemble, config.distill.temperature, outputs, models)
    student = complete_student(student, models, classes, outputs, pool)
    few = config.distill.model_copy(update={"steps": 5, "eval_every": 5})
    inputs, channels = pool.stored(student.preprocess), outputs.shape[0] or 1
    row = torch.full((1, *outputs.shape), 1 / channels)  # type: ignore[arg-type]
    module = student.prototype.load(init_state(student.prototype, 0))
    for _ in range(2):  # the first steps of a process are many times slower
        begun = time.perf_counter()
        distill(module, lambda some, _: row[some * 0], inputs, few, score=None, seed=0, outputs=outputs)
    steps = config.distill.steps * (time.perf_counter() - begun) / few.steps
    rows = len(pool) + sum(len(one.labels) for one in labeled.values())
    answers = sum(one["seconds_for_1000"] for one in found) * rows / 1000
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    costs = {"seconds_of_answers": answers, "seconds_of_distillation": steps, "bytes_of_memory": memory}
    return {"teachers": found, "student": student.fed.described(), "classes": classes, "pool_size": len(pool), **costs}


def _student(config: FuseConfig, teachers: Sequence[TrainedModel]) -> StudentSpec:
    """Return the student, fed as its section says, else as teachers are that say how, else as the pool is."""
    student, tabular = config.student, any(source.name.startswith("table:") for source in config.pool.sources)
    feeding = by_hand(student)
    for teacher in [one for one in teachers if one.id == student.init] or teachers:
        said = teacher.feeding.settled(tabular)
        own = OWN if said.get("layout") == "flat" else OWN[:2]
        theirs = {name: (value, f"teacher {teacher.id}") for name, (value, _) in said.values.items() if name not in own}
        feeding = feeding.otherwise(Feeding({} if "features" in theirs else theirs))
    if tabular or not ("tokenizer" in feeding.values or {"size", "channels"} <= feeding.values.keys()):
        feeding = feeding.otherwise(pool_form(config))
    feeding = assumed(feeding)
    with one_line(ConfigError, "the student", ConfigError):
        preprocess = feeding.preprocess
    if preprocess is None:
        raise ConfigError.at("student.size", None, "no model says how large images are; set it, or a student.tokenizer")
    options = dict(student.options)
    if isinstance(preprocess, Tokens) and student.model == "transformer":
        options.setdefault("path", preprocess.tokenizer)
    found = StudentSpec(student.model, preprocess, options, student.init, student.classes, feeding=feeding)
    return replace(found, background=student.background)


OWN = ("layout", "numbers", "mean", "std")
"""What a student does not take over from a flat teacher; from others, only the first two."""


def fingerprint(config: FuseConfig) -> str:
    """Return a hash of all that determines the result: the configuration without what only says where it runs."""
    values = flat(config.model_dump(mode="json"))
    decisive = {name: value for name, value in values.items() if value is not None and not is_free(name, FuseConfig)}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


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


def _write(result: FusionResult, config: FuseConfig, pool: RawInputs, out: Path) -> None:
    model, report = result.model, result.report
    assert isinstance(model, LoadedModel), "a configuration names its student"
    whole = tomli_w.dumps(config.model_dump(exclude_none=True, mode="json"))
    chosen = tomli_w.dumps(config.model_dump(exclude_none=True, exclude_defaults=True, mode="json"))
    facts = {"configuration_sha256": fingerprint(config), "feddf": version("feddf")}
    with new_folder(out) as folder:
        note = ""
        if config.onnx:
            few = pool.first(64).inputs(model.preprocess)
            most = write_onnx(model.network, few.batch(torch.arange(len(few))), folder / "model.onnx")
            note = f"`model.onnx` is the same model: its outputs for {len(few)} inputs differ by at most {most:.1e}."
        write_model(folder, model.network, model.spec, facts)
        for which in [one for one, figures in report.sets.items() if figures[STUDENT].ece is not None]:
            draw_reliability(report, which, folder)
        if result.shown:
            draw_masks(result.shown, len(result.classes), folder)
        named = {"pool": config.pool.sources[0]} | config.labeled
        known = {key: one.name for key, one in named.items() if one.name in DATASETS and ":" not in one.name}
        text = card(
            config.name, report, chosen, model.spec, note, known, masks=tuple(result.shown)
        )  # files have no name that others know
        write_atomically(folder / CARD, text.encode())
        write_atomically(folder / "fuse.toml", whole.encode())
        write_atomically(folder / "report.json", json.dumps(asdict(report), indent=1).encode())


def write_onnx(model: nn.Module, inputs: Tensor, path: Path) -> float:
    """Write a model as ONNX, for batches of any size, and return the largest difference of a logit on ``inputs``.

    A file that differs by more than a thousandth of the largest logit is not kept.
    """
    needs, failed = "an ONNX file needs onnx and onnxscript: pip install 'feddf[onnx]'", "the student cannot be written"
    with one_line(FeddfError, f"{failed} as ONNX"), one_line(FeddfError, needs, ImportError), new_file(path) as file:
        with evaluation_mode(model), torch.inference_mode(mode=False), torch.no_grad(), silence():
            expected: Tensor = model(inputs)
            program = torch.onnx.export(
                model, (inputs,), dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
                input_names=["inputs"], output_names=["logits"], verbose=False,
            )  # fmt: skip
            assert program is not None, "dynamo=True gives a program"
            program.save(file, external_data=False)
        session = open_session(file)
        found = [session.run(None, {"inputs": inputs[:count].numpy()})[0] for count in (len(inputs), 1)]
        difference = max(float((torch.from_numpy(one) - expected[: len(one)]).abs().max()) for one in found)
        if not difference <= 1e-3 * max(1.0, float(expected.abs().max())):
            raise FeddfError(f"the ONNX file gives other logits than the student: they differ by up to {difference:g}")
    return difference
