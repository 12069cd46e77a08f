"""Every key is explained in the terminal; tests/test_docs.py compares the documentation."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import tomli_w
from pydantic_core import PydanticUndefined

from feddf.config import Experiment, PrototypeConfig, SourceConfig, load, parse
from feddf.config.experiment import presets
from feddf.config.keys import all_keys, default_of, flat, keys_of, markdown, nested, short
from feddf.config.sections import Section
from test_cli import feddf, says


def fields(kind: type[Section], prefix: str = "") -> list[str]:
    """Return the full names of all fields, as pydantic knows them."""
    found = []
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            found += fields(inner, f"{prefix}{name}.")
        else:
            found.append(prefix + name)
    return found


NAMES = [*fields(Experiment), *fields(PrototypeConfig, "prototypes."), *fields(SourceConfig, "pool.sources.")]


def rows_of(text: str) -> dict[str, list[str]]:
    """Return the cells of each row in Markdown tables by the full name of the key: section and first cell."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("## "):
            title = re.search(r"`\[*([\w.]+)\]*`", line)
            section = f"{title[1]}." if title else ""
        elif line.startswith("| `"):
            name, *cells = re.split(r" \| ", line.strip("| "))
            key = section + name.strip("`")
            assert key not in found, f"{key} has two rows"
            found[key] = cells
    return found


def test_the_reference_has_a_row_with_a_meaning_for_every_field_of_every_section() -> None:
    rows = rows_of(markdown())
    assert set(rows) == set(NAMES)
    for name, cells in rows.items():
        assert len(cells) == 3, name
        default, allowed, meaning = cells
        assert default.strip("`"), name
        assert allowed, name
        assert len(meaning) > 5, name


def test_the_keys_are_the_fields_with_their_defaults() -> None:
    assert set(all_keys()) == set(NAMES)
    example = flat(parse({"data": {"name": "toy"}, "pool": {"sources": ["plane"]}, "prototypes": ["mlp"]}).model_dump())
    for name in NAMES:
        needed = default_of(name) is PydanticUndefined
        given = name in ("pool.sources", "fusion.options") or name.startswith(("prototypes", "pool.sources."))
        assert needed or given or example[name] == default_of(name), name


def test_a_keys_kind_says_what_a_change_of_it_means() -> None:
    kinds = {kind: {n for n, key in all_keys().items() if key.kind == kind} for kind in ("task", "method", "execution")}
    assert kinds["execution"] == {
        "data.folder", "run.engine", "run.workers", "run.ray_address", "run.keep_checkpoints", "run.log_clients",
        "run.log_ensemble", "run.device", "run.loggers",
    }  # fmt: skip
    assert {name for name in kinds["method"] if not name.startswith("privacy.")} == {
        "fusion.method", "fusion.aggregation", "fusion.batchnorm", "fusion.momentum", "fusion.drop_worst",
        "fusion.options", "fusion.parts", "fusion.defense", "fusion.trust", "fusion.guard",
        "local.optimizer", "local.lr_schedule", "local.prox_mu", "local.binary", "pool.augment", "pool.views",
        "ensemble.cache", "ensemble.combine", "ensemble.ema", "ensemble.groups", "ensemble.weights",
        "ensemble.swag_samples", "ensemble.swag_scale",
        "distill.init", "distill.early_stopping", "distill.held_out", "distill.optimizer", "distill.swa_cycle",
        "distill.clip", "distill.keep_init", "local.logit_adjustment", "fedma.own_start", "fedma.neuron_weights",
        "distill.temperature", "fedma.growth", "fusion.exchange", "answers.digest_epochs", "answers.digest_lr",
        "answers.distance", "answers.gamma",
    }  # fmt: skip
    assert sum(map(len, kinds.values())) == len(all_keys())


def shown(text: str) -> set[str]:
    """Return the keys that a table in the terminal is about."""
    return {line.split()[0] for line in text.splitlines()[1:] if line and not line.startswith(" ")}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), set(NAMES)),
        (("distill",), {name for name in NAMES if name.startswith("distill.")}),
        (("pool",), {name for name in NAMES if name.startswith("pool.")}),
        (("prototypes",), {"prototypes", "prototypes.model", "prototypes.name"}),
        (("local.epochs",), {"local.epochs"}),
        (("alpha",), {"partition.alpha"}),
        (("lr",), {"local.lr", "distill.lr"}),
    ],
)
def test_the_command_explains_all_keys_or_those_that_are_asked_for(
    words: tuple[str, ...], expected: set[str], tmp_path: Path
) -> None:
    done = feddf("config", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert shown(done.stdout) == expected
    said = " ".join(done.stdout.split())
    for name in expected if len(expected) == 1 else ():
        assert " ".join(all_keys()[name].meaning.split()) in said
        assert all_keys()[name].shown_default in said


def test_the_command_prints_the_documentations_tables(tmp_path: Path) -> None:
    assert feddf("config", "--markdown", cwd=tmp_path).stdout == markdown()


def test_a_key_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    for given, meant in (("partition.alhpa", "partition.alpha"), ("local.epoch", "local.epochs")):
        done = feddf("config", given, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert says(done.stderr, f"error: ... '{given}'; ... '{meant}'")


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_says_what_it_is_and_comes_back_from_toml_as_it_was(name: str) -> None:
    experiment = load(name)
    assert experiment.name == name
    assert len(experiment.description) > 20
    text = tomli_w.dumps(experiment.model_dump(exclude_none=True))
    assert parse(tomllib.loads(text)) == experiment


def test_every_key_of_a_preset_can_be_replaced_by_its_full_name() -> None:
    experiment = load("demo")
    for name, value in flat(experiment.model_dump(exclude_none=True)).items():
        if isinstance(value, (int, float, str)) and value != "":
            assert load("demo", [f"{name}={value!r}".replace("True", "true").replace("False", "false")]) == experiment


def test_nested_and_flat_undo_one_another() -> None:
    values = flat(load("demo").model_dump(exclude_none=True))
    assert flat(nested({}, values)) == values
    original = {"a": {"b": 1}}
    assert nested(original, {"a.c": 2, "d.e": 3}) == {"a": {"b": 1, "c": 2}, "d": {"e": 3}}
    assert original == {"a": {"b": 1}}


def test_a_short_name_stands_for_one_key_only() -> None:
    for name in keys_of(Experiment):
        ends = [other for other in all_keys() if other.rpartition(".")[2] == short(name)]
        assert short(name) == name or ends == [name]
    assert (short("partition.alpha"), short("local.lr")) == ("alpha", "local.lr")
