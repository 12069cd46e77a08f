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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tomli_w
import torch
from torch import Tensor, nn

from feddf.config.errors import ConfigError, FeddfError, first_line
from feddf.config.fuse_config import FuseConfig, load_fuse
from feddf.config.keys import flat, is_free
from feddf.evaluate import evaluation_mode
from feddf.fusing.card import card, draw_reliability
from feddf.fusing.feeding import Feeding, assumed, by_hand, fed_as
from feddf.fusing.fuse import FusionResult, StudentSpec, Tell, fuse, warn
from feddf.fusing.inputs import Labeled, RawInputs, load_labeled, load_pool, pool_form
from feddf.fusing.predictions import Progress, quiet
from feddf.fusing.teachers import TrainedModel, read_teachers
from feddf.runtime.atomic import write_atomically
from feddf.runtime.packages import onnxruntime, silence
from feddf.saved.model import LoadedModel, ModelError, Tokens
from feddf.saved.model_folder import CARD, new_folder, write_model
from feddf.seeds import derive


@dataclass(frozen=True)
class Plan:
    """A fusion before its work: teachers and student, each of which knows how it is fed, and all inputs."""

    teachers: Sequence[TrainedModel]
    student: StudentSpec
    pool: RawInputs
    labeled: Mapping[str, Labeled]


def plan(config: FuseConfig, *, trust: bool = False) -> Plan:
    """Read teachers and inputs, and decide how every model is fed."""
    teachers = read_teachers(config.teachers, trust=trust)
    student = _student(config, teachers)
    teachers = [replace(one, feeding=fed_as(one.feeding, student.fed, one.id)) for one in teachers]
    pool = load_pool(config, [student.preprocess, *(one.preprocess for one in teachers)], trust=trust)
    given = {"validation": config.validation, "test": config.test}
    labeled = {key: load_labeled(one, key, pool, derive(config.seed, key)) for key, one in given.items() if one}
    return Plan(teachers, student, pool, labeled)


def fuse_to_folder(
    config: FuseConfig, out: Path, progress: Progress = quiet, tell: Tell = warn, *, trust: bool = False
) -> FusionResult:
    """Fuse as a configuration says, and write the result to a folder that is there whole or not at all."""
    if out.exists():
        raise ModelError(f"{out} is there already; name a new folder with --out, or remove it")
    made = plan(config, trust=trust)
    cache = Path(config.cache).expanduser() if config.cache else None
    result = fuse(
        made.teachers, made.student, made.pool, validation=made.labeled.get("validation"),
        test=made.labeled.get("test"), ensemble=config.ensemble, distill=config.distill, run=config.run,
        seed=config.seed, cache=cache, progress=progress, tell=tell,
    )  # fmt: skip
    _write(result, config, made.pool, out)
    return result


def _student(config: FuseConfig, teachers: Sequence[TrainedModel]) -> StudentSpec:
    """Return the student, fed as its section says, else as teachers are that say how, else as the pool is."""
    student, tabular = config.student, any(source.name.startswith("table:") for source in config.pool.sources)
    feeding = by_hand(student)
    for teacher in [one for one in teachers if one.id == student.init] or teachers:
        said = teacher.feeding.settled(tabular).values.items()
        theirs = {name: (value, f"teacher {teacher.id}") for name, (value, who) in said if name not in OWN}
        feeding = feeding.otherwise(Feeding({} if "features" in theirs else theirs))
    if tabular or not ("tokenizer" in feeding.values or {"size", "channels"} <= feeding.values.keys()):
        feeding = feeding.otherwise(pool_form(config))
    feeding = assumed(feeding)
    try:
        preprocess = feeding.preprocess
    except ValueError as error:
        raise ConfigError(f"the student: {error}") from error
    if preprocess is None:
        raise ConfigError.at("student.size", None, "no model says how large images are; set it, or a student.tokenizer")
    options = dict(student.options)
    if isinstance(preprocess, Tokens) and student.model == "transformer":
        options.setdefault("path", preprocess.tokenizer)
    return StudentSpec(student.model, preprocess, options, student.init, student.classes, feeding=feeding)


OWN = ("layout", "numbers")
"""What a teacher's file says of its input that a student does not take over."""


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
            few = pool.first(64, model.preprocess)
            most = write_onnx(model.network, few.batch(torch.arange(len(few))), folder / "model.onnx")
            note = f"`model.onnx` is the same model: its logits for {len(few)} inputs differ by at most {most:.1e}."
        write_model(folder, model.network, model.spec, facts)
        for which in report.sets:
            draw_reliability(report, which, folder)
        write_atomically(folder / CARD, card(config.name, report, chosen, model.spec.describe(), note).encode())
        write_atomically(folder / "fuse.toml", whole.encode())
        write_atomically(folder / "report.json", json.dumps(asdict(report), indent=1).encode())


def write_onnx(model: nn.Module, inputs: Tensor, path: Path) -> float:
    """Write a model as ONNX, for batches of any size, and return the largest difference of a logit on ``inputs``.

    A file that differs by more than a thousandth of the largest logit is not kept.
    """
    try:
        with evaluation_mode(model), torch.inference_mode(mode=False), torch.no_grad(), silence():
            expected: Tensor = model(inputs)
            batch = torch.export.Dim("batch", min=1)
            program = torch.onnx.export(
                model, (inputs,), dynamo=True, dynamic_shapes=({0: batch},), input_names=["inputs"],
                output_names=["logits"], verbose=False,
            )  # fmt: skip
            assert program is not None, "dynamo=True gives a program"
            program.save(path, external_data=False)
        found = [(_run(path, inputs[:count]), expected[:count]) for count in (len(inputs), 1)]
    except ImportError as error:
        raise FeddfError(f"an ONNX file needs onnx and onnxscript: pip install 'feddf[onnx]' ({error})") from error
    except Exception as error:  # the exporter may fail in any way
        path.unlink(missing_ok=True)
        raise FeddfError(f"the student cannot be written as ONNX: {first_line(error)}") from error
    difference = max(float((one - other).abs().max()) for one, other in found)
    if not difference <= 1e-3 * max(1.0, float(expected.abs().max())):
        path.unlink(missing_ok=True)
        raise FeddfError(f"the ONNX file gives other logits than the student: they differ by up to {difference:g}")
    return difference


def _run(path: Path, inputs: Tensor) -> Tensor:
    session = onnxruntime().InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return torch.from_numpy(np.asarray(session.run(None, {"inputs": inputs.numpy()})[0]))
