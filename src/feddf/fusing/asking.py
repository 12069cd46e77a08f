"""Sites that hand out no model: their answers for an agreed pool, as files that teach like models.

All sites must answer for the same inputs in the same order, so a pool has an identity: the SHA-256 of each input in the
form in which the pool itself has it, whatever size a model takes.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from feddf.config.errors import ConfigError, one_line
from feddf.config.foreign import parse_json, validated
from feddf.config.fuse_config import FuseConfig, FuseEnsembleConfig, TeacherConfig
from feddf.data.files import image_files
from feddf.data.tables import read_table
from feddf.fusing.answer_files import SUFFIX, AnswerFile, Coding
from feddf.fusing.beside import About
from feddf.fusing.feeding import assumed
from feddf.fusing.inputs import load_pool, own_rows, pool_form
from feddf.fusing.predictions import PredictionCache, Progress, open_teacher, quiet
from feddf.fusing.teachers import OutputKind, TeacherError, TrainedModel, read_teachers
from feddf.runtime.atomic import read_regular

POOL_FORMAT = "feddf pool 1"
INPUT = "input"  # the column of a table that says which input a row is about: its name or number, or its SHA-256


@dataclass(frozen=True)
class PoolIdentity:
    """Which inputs a pool has, in order: the name (a file's, or its number) and the SHA-256 of each."""

    names: tuple[str, ...]
    hashes: tuple[str, ...]

    @cached_property
    def fingerprint(self) -> str:
        """One hash for all inputs in their order."""
        return hashlib.sha256("\n".join(self.hashes).encode()).hexdigest()

    @property
    def duplicates(self) -> int:
        """How many inputs are there before."""
        return len(self.hashes) - len(set(self.hashes))

    def describe(self) -> str:
        """Return it as the text of a ``pool.json``."""
        inputs = dict(zip(self.names, self.hashes, strict=True))
        values = {"format": POOL_FORMAT, "count": len(inputs), "fingerprint": self.fingerprint, "inputs": inputs}
        return json.dumps(values, indent=1) + "\n"

    def check(self, file: Path) -> None:
        """Raise :class:`ConfigError` where a ``pool.json`` has other inputs, or another order."""
        with one_line(partial(ConfigError.at, "--pool", str(file)), of=(OSError, ValueError)):
            said = validated(dict[str, Any], parse_json(read_regular(file)))
            if said.get("format") != POOL_FORMAT:
                raise ValueError(f"it does not say that it is '{POOL_FORMAT}'")
            theirs: dict[str, str] = validated(dict[str, str], said.get("inputs"))
            if len(theirs) != len(self.hashes):
                raise ValueError(f"it has {len(theirs)} inputs, and this pool {len(self.hashes)}")
            order = "the same in another order" if Counter(theirs.values()) == Counter(self.hashes) else "others"
            for at, (name, own, sha) in enumerate(zip(theirs, self.names, self.hashes, strict=True)):
                if theirs[name] != sha:
                    raise ValueError(f"its inputs are {order}, first at number {at} ('{name}' there, '{own}' here)")


def pool_identity(config: FuseConfig, *, trust: bool = False) -> PoolIdentity:
    """Return the identity of a configuration's pool: of a folder of images its files, else of inputs as the pool is."""
    pool, (kind, _, place) = config.pool, config.pool.sources[0].name.partition(":")
    if pool.views > 1 or any(one.name.partition(":")[0] in ("noise", "plane", "generator") for one in pool.sources):
        allowed = "answers are for inputs that are there already, each as it is"
        raise ConfigError(f"pool.sources = '{pool.names}', pool.views = {pool.views}: {allowed}")
    with one_line(partial(ConfigError.at, "pool.sources", pool.names), of=(OSError, ValueError)):
        if kind == "images" and len(pool.sources) == 1 and not pool.size and not pool.sources[0].size:
            files, folder = image_files(Path(place).expanduser()), Path(place).expanduser()
            names = [bytes(one.relative_to(folder)).decode(errors="backslashreplace") for one in files]
            content = (read_regular(one) for one in files)
        else:
            rows = own_rows(config, trust=trust).rows
            names = [str(number) for number in range(len(rows))]
            content = (one.encode() if isinstance(one, str) else one.contiguous().numpy().tobytes() for one in rows)
        return PoolIdentity(tuple(names), tuple(hashlib.sha256(one).hexdigest() for one in content))


def ask(
    config: FuseConfig,
    out: Path,
    *,
    bits: int = 16,
    largest: int | None = None,
    agreed: Path | None = None,
    progress: Progress = quiet,
    trust: bool = False,
) -> dict[str, Any]:
    """Let the one teacher of a configuration answer for its pool, and write the answers; return what is said of them.

    The pool must be that of a ``pool.json``, where one is ``agreed``; ``largest`` channels are stored, or all.
    """
    if out.suffix != SUFFIX:
        raise ConfigError.at("--out", str(out), f"must end in {SUFFIX}")
    (teacher, *others) = read_teachers(config.teachers, trust=trust)
    if others or teacher.table is not None:
        raise TeacherError(f"teacher {teacher.id}: one model is asked at a time, and no table")
    identity = pool_identity(config, trust=trust)
    if agreed is not None:
        identity.check(agreed)
    teacher = teacher.fed_like(assumed(pool_form(config)))
    pool = load_pool(config, [teacher.preprocess], trust=trust)
    about: dict[str, Any] = {"pool": identity.fingerprint, "model": teacher.content or "", "name": teacher.id}
    about |= {"names": teacher.classes} if teacher.classes else {}
    about["made"] = datetime.now(UTC).isoformat("T", "seconds")
    coding = partial(Coding.of, bits=bits, largest=largest)
    with open_teacher(teacher, teacher.preprocess) as predict:
        lost = PredictionCache(out.parent, out.parent, {"pool": pool}, None, progress).write(
            teacher, predict, pool, out, coding, **about
        )
    found = {"answers": str(out), "inputs": len(pool), "duplicates": identity.duplicates, "bytes": out.stat().st_size}
    return {**found, "classes": list(AnswerFile(out).about.names), "fed": teacher.feeding.line, "lost": lost}


def check_tables(teachers: Sequence[TrainedModel], ensemble: FuseEnsembleConfig, views: int) -> None:
    """Raise :class:`ConfigError`, before any work, where a table would be asked for more than it has."""
    weights = ensemble.weights if ensemble.weights != "validation" else "uniform"
    asked = {"ensemble.weights": (ensemble.weights, weights), "ensemble.drop_worst": (ensemble.drop_worst, "none")}
    for key, (given, usual) in {**asked, "pool.views": (views, 1)}.items():
        for id in [one.id for one in teachers if one.table is not None and given != usual]:
            only = f"teacher {id} is a table, and has answers for the pool's inputs alone, each as it is"
            raise ConfigError.at(key, given, f"{only}; leave it at {usual!r}")


def for_pool(teachers: Sequence[TrainedModel], config: FuseConfig, *, trust: bool) -> list[TrainedModel]:
    """Return the teachers, of which tables are known to be for a configuration's pool, before that is decoded."""
    check_tables(teachers, config.ensemble, config.pool.views)
    identity = pool_identity(config, trust=trust) if any(one.table for one in teachers) else PoolIdentity((), ())
    found = [replace(one, table=one.table and partial(one.table, identity=identity)) for one in teachers]
    for table in [one.table for one in found if one.table is not None]:
        table(len(identity.names))
    return found


def of_answers(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return a file of answers as a teacher."""
    file = AnswerFile(config.file)
    file.check()

    def rows(count: int, identity: PoolIdentity | None = None) -> AnswerFile:
        if identity is not None and file.about.pool != identity.fingerprint:
            raise TeacherError(f"teacher {config.id}: its answers are for another pool, or in another order")
        if len(file) != count:
            raise TeacherError(f"teacher {config.id}: it has answers for {len(file)} inputs, and the pool has {count}")
        return file

    said = file.about
    takes = f"nothing: answers for pool {said.pool[:16]}, by model {said.model[:16]} on {said.made:.25}"
    takes += f", {said.bits} bits, rounded by at most {said.lost:.1e}"
    form = {name: one for name, one in said.outputs.items() if name != "channels"}
    return [_of_table(config, rows, said.names, "logits", takes, form)]


def of_table(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return a CSV or Parquet file as a teacher: a row for each input, a column of probabilities for each class.

    A column ``input`` says which input a row is about; without it rows are in the pool's order.
    """
    with one_line(TeacherError, f"teacher {config.id}", ValueError):
        table = read_table(f"{config.file}#{INPUT}", needed=False)

    def rows(count: int, identity: PoolIdentity | None = None) -> Tensor:
        said = table.labels or [str(number) for number in range(len(table.rows))]
        return table.rows[_places(config.id, said, count, identity)]

    kind: OutputKind = "logits" if config.kind == "values" else "probabilities"
    takes = f"nothing: {len(table.rows)} answers for a pool"
    return [_of_table(config, rows, table.columns, kind, takes, {"positions": []})]


def _places(id: str, said: Sequence[str], count: int, identity: PoolIdentity | None) -> Tensor:
    """Return which row is about each input of the pool."""
    if twice := [name for name, times in Counter(said).items() if times > 1]:
        raise TeacherError(f"teacher {id}: it has two rows for the input '{twice[0]}'")
    rows = {name: row for row, name in enumerate(said)}
    known = [tuple(map(str, range(count))), *([identity.names, identity.hashes] if identity else [])]
    names = max(known, key=lambda one: sum(name in rows for name in one))
    if missing := [name for name in names if name not in rows]:
        raise TeacherError(f"teacher {id}: it has no row for {len(missing)} of {count} inputs, first '{missing[0]}'")
    if len(rows) > count:
        other = next(name for name in rows if name not in set(names))
        raise TeacherError(f"teacher {id}: it has a row for the input '{other}', which is not in the pool")
    return torch.tensor([rows[name] for name in names])


def _of_table(
    config: TeacherConfig, rows: Any, names: tuple[str, ...], kind: OutputKind, takes: str, form: dict[str, Any]
) -> TrainedModel:
    id, path, rest = config.id, config.file, {"outputs": kind, "table": rows, "takes": takes, "form": form}
    return TrainedModel.of_files(id, partial(_refuse, id), [path], About(classes=names), source=str(path), **rest)


def _refuse(id: str, device: torch.device) -> NoReturn:
    raise TeacherError(f"teacher {id}: it is a table of answers for the pool, and cannot be asked about other inputs")
