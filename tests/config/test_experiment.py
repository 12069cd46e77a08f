from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from feddf.config import ConfigError, Experiment, Settings, differences, load, parse, with_values
from feddf.config.keys import nested
from test_cli import says

FILE = """
prototypes = ["mlp"]

[data]
name = "toy"

[pool]
sources = ["plane"]

[clients]
total = 4
"""
BASE = tomllib.loads(FILE)


def complaint(text: str, overrides: list[str], folder: Path) -> str:
    """Return what is said about a file with overrides: always one line."""
    path = folder / "experiment.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(str(path), overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_defaults_are_the_papers() -> None:
    paper = parse({"data": {"name": "cifar10"}, "pool": {"sources": ["cifar100"]}, "prototypes": ["resnet8"]})
    assert (paper.clients.total, paper.clients.fraction, paper.rounds, paper.local.epochs) == (20, 0.4, 100, 40)
    assert (paper.local.batch_size, paper.local.lr, paper.data.validation) == (64, 0.1, 0.1)
    assert (paper.distill.steps, paper.distill.batch_size, paper.distill.lr) == (10_000, 128, 1e-3)
    stopping = (paper.distill.eval_every, paper.distill.patience, paper.distill.early_stopping)
    assert stopping == (100, 1_000, "validation")
    assert (paper.fusion.method, paper.ensemble.cache, paper.ensemble.combine) == ("feddf", True, "logits")


MISTAKES = {  # the key with its value, and the remedy
    # a value out of bounds or of another kind
    "alpha=0": "partition.alpha = 0: ... greater than 0",
    "alpha=nan": "partition.alpha = nan: ... a finite number",
    "alpha='much'": "partition.alpha = 'much': ... a valid number",
    "alpha=": "partition.alpha = '': ... a valid number",
    "clients.total=0": "clients.total = 0: ... greater than or equal to 1",
    "clients.total=2.5": "clients.total = 2.5: ... a valid integer",
    "clients.total=true": "clients.total = True: ... a valid integer",
    "rounds=ten": "rounds = 'ten': ... a valid integer",
    "fraction=1.5": "clients.fraction = 1.5: ... less than or equal to 1",
    "cache=online": "ensemble.cache = 'online': ... a valid boolean",
    "early_stopping=steps": "distill.early_stopping = 'steps': ... 'validation', 'held-out-loss' or 'none'",
    "temperature=0": "distill.temperature = 0: ... greater than 0",
    "fedma.growth=0.5": "fedma.growth = 0.5: ... greater than or equal to 1",
    "held_out=1": "distill.held_out = 1: ... less than 1",
    "pool.size=1": "pool.size = 1: ... greater than or equal to 2",
    "fusion.options=3": "fusion.options = 3: ... a valid dictionary",
    "prototypes=[]": "prototypes = []: at least one is needed",
    "prototypes=3": "prototypes = 3: must be a list, for instance",
    "prototypes=[{name='x'}]": "the key 'prototypes.0.model' is missing",
    "name=../escape": "name = '../escape': string should match pattern",
    # a key that does not exist
    "alhpa=1": "unknown key 'alhpa'; did you mean 'partition.alpha'?",
    "local.epoch=1": "unknown key 'local.epoch'; did you mean 'local.epochs'?",
    "local.momentum=0.1": "unknown key 'local.momentum'; did you mean 'fusion.momentum'?",
    "distill.size=3": "unknown key 'distill.size'; did you mean 'pool.size'?",
    "prox_my=0.1": "unknown key 'prox_my'; did you mean 'local.prox_mu'?",
    "local=3": "unknown key 'local'; the keys of [local] are: epochs, batch_size,",
    "local.zzz=1": "unknown key 'local.zzz'; the keys of [local] are: epochs, batch_size,",
    "zzz=1": "unknown key 'zzz'; 'feddf config' lists all keys; the sections are: clients, local,",
    "clients.total.x=3": "unknown key 'clients.total.x'; did you mean 'clients.total'?",
    "pool.sources=[{name='noise',sise=3}]": "unknown key 'pool.sources.0.sise'; did you mean 'pool.sources.size'?",
    "no-equals-sign": "'no-equals-sign' is not an override; write key=value",
    "=3": "'=3' is not an override; write key=value",
    # the last part of several keys
    "batch_size=8": "'batch_size' could mean local.batch_size or distill.batch_size; write the full name",
    "augment=none": "'augment' could mean local.augment or pool.augment; write the full name",
    # a name that is not known
    "method=fedvag": "fusion.method = 'fedvag': did you mean 'fedavg'? (your own is written as module:attribute)",
    "method=zz": "fusion.method = 'zz': known are: fedavg, feddf, fedma, fd, fedprox, fedavgm, feddistill, feddf-plus",
    "method=mine:": "fusion.method = 'mine:': known are: fedavg",
    "method=:mine": "fusion.method = ':mine': known are: fedavg",
    "fusion.aggregation=n_k": "fusion.aggregation = 'n_k': known are: examples, uniform",
    "drop_worst=papr": "fusion.drop_worst = 'papr': did you mean 'paper'?",
    "ensemble.combine=losses": "ensemble.combine = 'losses': known are: logits, probabilities",
    "weights=certain": "ensemble.weights = 'certain': did you mean 'certainty'?",
    "binary=error": "local.binary = 'error': known are: straight-through, error-feedback",
    "scheme=odd": "partition.scheme = 'odd': known are: dirichlet, dirichlet-equal, shards, iid",
    "data.name=cifar11": "data.name = 'cifar11': did you mean 'cifar10",
    "data.name=folder:": "data.name = 'folder:': did you mean 'folder:PATH'?",
    "sources=cifar11": "pool.sources = 'cifar11': did you mean 'cifar10",
    "sources=generator:": "pool.sources = 'generator:': did you mean 'generator:PATH'?",
    "prototypes=resnet9": "prototypes.model = 'resnet9': did you mean 'resnet8'?",
    # right alone and wrong together
    "fraction=0.1": "clients.fraction = 0.1: ... above 0.125",
    "validation=0": "data.validation = 0.0: ... validation data ... distill.early_stopping = 'held-out-loss' or 'none'",
    "validation=0 early_stopping=none drop_worst=paper": "fusion.drop_worst = 'paper': ... data.validation above 0",
    "validation=0 early_stopping=none weights=validation": "ensemble.weights = 'validation': ... data.validation",
    "validation=0 early_stopping=none sources=validation": "pool.sources = 'validation': ... data.validation above 0",
    "distill.init=best early_stopping=none": "distill.init = 'best': ... distill.early_stopping = 'validation'",
    "pool.augment=true": "pool.augment = True: ... ensemble.cache = false",
    "swag_samples=5 cache=false": "ensemble.swag_samples = 5: ... ensemble.cache = true",
    "swag_samples=5 weights=validation": "ensemble.weights = 'validation': ... swag_samples = 0",
    "method=fedma momentum=0.1": "fusion.momentum = 0.1: FedMA's layers ... leave it at 0.0",
    "method=fedma drop_worst=paper": "fusion.drop_worst = 'paper': FedMA's layers ... leave it at 'none'",
    "method=fedma batchnorm=local": "fusion.batchnorm = 'local': FedMA's layers ... leave it at 'average'",
    "method=fedma aggregation=uniform": "fusion.aggregation = 'uniform': FedMA's layers ... leave it at 'examples'",
    "method=fedma binary=error-feedback": "local.binary = 'error-feedback': FedMA",
    "sources=": "pool.sources = nothing: ... pool.sources = ['cifar100']",
    "method=fedavg sources=[] batchnorm=recalibrate": "fusion.batchnorm = 'recalibrate': ... name a pool",
    "sources=toy": "pool.sources = 'toy': ... the source 'train'",
    "sources=train,train": "pool.sources = 'train, train': ... a fraction below 1",
    "sources=[{name='train',fraction=0.1},{name='train',fraction=0.1}]": "'train' is named twice; give it one fraction",
    "ray_address=localhost:6379": "run.ray_address = 'localhost:6379': ... set run.engine = 'ray'",
    "engine=in-process timeout=3": "clients.timeout = 3.0: ... run.engine = 'processes' or 'ray'",
    "prototypes=mlp,mlp": "prototypes = ['mlp', 'mlp']: ... give each a name of its own",
    "prototypes=mlp,cnn,resnet8,resnet20,vgg9": "prototypes = ['mlp', 'cnn', ...]: ... than clients (4)",
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_a_mistake_is_one_line_that_names_key_value_and_remedy(tmp_path: Path, overrides: str) -> None:
    said = complaint(FILE, overrides.split(" "), tmp_path)
    assert says(said, MISTAKES[overrides]), said


@pytest.mark.parametrize(
    ("old", "said"),
    [
        ("local.rate", "unknown key 'local.rate'; did you mean 'local.lr'?"),
        ("clients.number", "unknown key 'clients.number'; the keys of [clients] are: total, ..."),
    ],
)
def test_a_key_that_is_none_is_answered_with_what_is_near(old: str, said: str) -> None:
    for changes, words in (({old: "x"}, []), ({}, [f"{old}=x"])):
        with pytest.raises(ConfigError) as error:
            parse(nested(BASE, changes), overrides=words)
        assert says(str(error.value), said), error.value


@pytest.mark.parametrize(
    ("name", "given", "first"),
    [
        ("clients", "3", "total,"),
        ("data", "'toy'", "name,"),
        ("partition", "'iid'", "scheme,"),
        ("pool", "'plane'", "sources,"),
        ("pool", "['plane']", "sources,"),
        ("fusion", "'fedavg'", "method, exchange, aggregation,"),
        ("distill", "false", "init, steps,"),
        ("run", "3", "engine, workers,"),
    ],
)
def test_a_section_given_as_a_plain_value_is_one_line(tmp_path: Path, name: str, given: str, first: str) -> None:
    rest = "".join(f"{part}\n" for part in FILE.split("\n\n") if not part.startswith(f"[{name}]"))
    said = complaint(f"{name} = {given}\n{rest}", [], tmp_path)
    value = tomllib.loads(f"given = {given}")["given"]
    assert says(said, f"{name} = {value!r}: ... [{name}] are: {first}"), said


def test_an_override_inside_of_a_section_that_is_none_is_one_line(tmp_path: Path) -> None:
    said = complaint("clients = 3\n", ["fraction=1.0"], tmp_path)
    assert says(said, "clients.fraction = 1.0: 'clients' is not a section")


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("data", "the key 'data' is missing: .* data.name = 'cifar10'"),
        ("prototypes", r"the key 'prototypes' is missing: .* \['resnet8'\]"),
        ("pool", r"pool\.sources = nothing: .* pool\.sources = \['cifar100'\]"),
    ],
)
def test_what_is_missing_is_named(missing: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse({name: value for name, value in BASE.items() if name != missing})
    with pytest.raises(ConfigError, match=r"the key 'data\.name' is missing"):
        parse({**BASE, "data": {}})


@pytest.mark.parametrize(
    ("content", "said"), [(None, "No such file"), ("alpha = = 1", "Invalid value"), ("\udcff", "can't decode")]
)
def test_an_unreadable_file_is_named(tmp_path: Path, content: str | None, said: str) -> None:
    path = tmp_path / "broken.toml"
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=rf"cannot read the configuration .*broken\.toml.*{said}"):
        load(str(path))


def test_overrides_win_and_the_last_part_of_a_key_is_enough() -> None:
    words = ["prototypes=cnn,mlp", "alpha=2", "seed=7", "name=mine", "method=fedavg", "prox_mu=0.1", "local.epochs=3"]
    experiment = load("demo", [*words, "sources=noise,train", "workers=2"])
    assert [spec.label for spec in experiment.prototypes] == ["cnn", "mlp"]
    assert (experiment.partition.alpha, experiment.seed, experiment.name) == (2.0, 7, "mine")
    assert (experiment.fusion.method, experiment.local.prox_mu, experiment.local.epochs) == ("fedavg", 0.1, 3)
    assert ([source.name for source in experiment.pool.sources], experiment.run.workers) == (["noise", "train"], 2)
    assert experiment.local.lr == load("demo").local.lr  # the others of the section stay


def test_a_value_is_read_as_toml_or_else_taken_as_a_string() -> None:
    words = ["description=two words", "prototypes=[{model='mlp',width=3}]", "sources=[{name='noise',size=9},'train']"]
    experiment = parse(BASE, overrides=words)
    assert experiment.description == "two words"
    assert experiment.prototypes[0].options == {"width": 3}
    assert [(source.name, source.size) for source in experiment.pool.sources] == [("noise", 9), ("train", None)]


def test_the_options_of_a_users_own_method_are_set_one_by_one() -> None:
    words = ["fusion.options.x=3", "fusion.options.y.z=[1,2]", "method=mine:method"]
    assert parse(BASE, overrides=words).fusion.options == {"x": 3, "y": {"z": [1, 2]}}
    both = parse(nested(BASE, {"fusion.options.w": 1}), overrides=["fusion.options.x=3"])
    assert both.fusion.options == {"w": 1, "x": 3}


OPEN = {
    "data.name": "mine:data", "partition.scheme": "mine:scheme", "local.binary": "mine:prepare",
    "fusion.method": "mine:method", "fusion.aggregation": "mine.rules:median", "fusion.drop_worst": "mine:rule",
    "ensemble.combine": "mine:target", "ensemble.weights": "mine:weights", "prototypes": ["mine:Net"],
    "pool.sources": ["mine:pictures", "folder:/some/where", "generator:/some/where", "cifar100"],
}  # fmt: skip


@pytest.mark.parametrize("name", OPEN)
def test_every_name_may_be_a_module_and_an_attribute(name: str) -> None:
    """It is imported when the experiment is built, not when its configuration is read."""
    found: Any = parse(nested(BASE, {name: OPEN[name]}))
    for part in name.split("."):
        found = getattr(found, part)
    expected = OPEN[name]
    assert found == expected or [getattr(each, "model", None) or each.name for each in found] == expected


def test_a_users_own_method_may_do_without_a_pool_and_validation() -> None:
    alone = {"fusion.method": "mine:method", "pool": {}, "data.validation": 0.0}
    assert parse(nested(BASE, alone)).fusion.method == "mine:method"


def test_with_values_changes_a_copy_and_checks_it() -> None:
    old = parse(BASE)
    new = with_values(old, {"local.epochs": 3, "seed": 7})
    assert (old.local.epochs, new.local.epochs, new.seed) == (40, 3, 7)
    assert with_values(new, {"local.epochs": 40, "seed": 0}) == old
    with pytest.raises(ConfigError, match=r"local\.epochs = 0"):
        with_values(old, {"local.epochs": 0})


def test_a_kind_without_data_has_only_its_own_keys() -> None:
    settings = parse({}, Settings, overrides=["local.epochs=2"])
    assert settings.local.epochs == 2
    with pytest.raises(ConfigError, match="unknown key 'alpha'"):
        parse({}, Settings, overrides=["alpha=2"])


def test_differences_name_what_would_change_the_result_and_nothing_else() -> None:
    old = parse(BASE)
    free = {"run.workers": 9, "run.engine": "in-process", "data.folder": "x", "run.keep_checkpoints": 5}
    assert differences(old, with_values(old, free)) == []
    assert differences(old, with_values(old, {"run.log_clients": True, "run.log_ensemble": False})) == []
    changed = with_values(old, {"partition.alpha": 3.0, "seed": 1, "fusion.options.x": 3})
    assert differences(old, changed) == [
        "seed: 0 -> 1",
        "partition.alpha: 1.0 -> 3.0",
        "fusion.options.x: nothing -> 3",
    ]
    assert differences(old, changed, also_free=["seed", "fusion.options.x"]) == ["partition.alpha: 1.0 -> 3.0"]
    assert isinstance(old, Experiment)
