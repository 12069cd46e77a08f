from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from feddf.config import ConfigError, Experiment, Settings, differences, load, parse, with_values
from feddf.config.keys import nested, resolve
from feddf.config.presets import presets

FILE = """
prototypes = ["mlp"]

[data]
name = "toy"

[pool]
sources = ["plane"]

[clients]
number = 4
"""
BASE = tomllib.loads(FILE)

FORMERLY = {
    "clients": "clients.total", "fraction": "clients.fraction", "quorum": "clients.quorum",
    "attempts": "clients.attempts", "deadline": "clients.timeout", "local_epochs": "local.epochs",
    "local_batch": "local.batch_size", "local_rate": "local.lr", "local_optimizer": "local.optimizer",
    "local_decay": "local.lr_schedule", "proximal": "local.prox_mu", "local_binary": "local.binary",
    "augment": "local.augment", "method": "fusion.method", "average_weights": "fusion.aggregation",
    "batchnorm": "fusion.batchnorm", "server_momentum": "fusion.momentum", "drop_worst": "fusion.drop_worst",
    "fedma_growth": "fedma.growth", "pool": "pool.sources", "pool_size": "pool.size", "pool_augment": "pool.augment",
    "mode": "ensemble.cache", "teacher_average": "ensemble.combine", "teacher_weights": "ensemble.weights",
    "swag_samples": "ensemble.swag_samples", "swag_scale": "ensemble.swag_scale", "temperature": "distill.temperature",
    "start": "distill.init", "stop": "distill.early_stopping", "held_out": "distill.held_out",
    "distill_optimizer": "distill.optimizer", "distill_clip": "distill.clip", "distill_steps": "distill.steps",
    "distill_batch": "distill.batch_size", "distill_rate": "distill.lr", "distill_check": "distill.eval_every",
    "distill_patience": "distill.patience", "distill_threads": "run.threads", "log_clients": "run.log_clients",
    "log_ensemble": "run.log_ensemble", "compile": "run.compile", "engine": "run.engine",
    "ray_address": "run.ray_address", "workers": "run.workers", "keep_checkpoints": "run.keep_checkpoints",
    "data": "data.name", "data_dir": "data.folder", "data_size": "data.train_size", "test_size": "data.test_size",
    "image_size": "data.image_size", "tokenizer": "data.tokenizer", "max_tokens": "data.max_tokens",
    "validation": "data.validation", "validation_split": "data.validation_split", "partition": "partition.scheme",
    "alpha": "partition.alpha", "classes_per_client": "partition.classes_per_client",
    "min_shard": "partition.min_size",
}  # fmt: skip
"""The keys of configurations without sections, and those that replaced them."""


def complaint(text: str, overrides: list[str], folder: Path) -> str:
    """Return what is said about a file with overrides: always one line."""
    path = folder / "experiment.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load(str(path), overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_is_valid_and_says_what_it_is(name: str) -> None:
    experiment = load(name)
    assert experiment.name == name
    assert len(experiment.about) > 20


def test_the_defaults_are_the_papers() -> None:
    paper = parse({"data": {"name": "cifar10"}, "pool": {"sources": ["cifar100"]}, "prototypes": ["resnet8"]})
    assert (paper.clients.total, paper.clients.fraction, paper.rounds, paper.local.epochs) == (20, 0.4, 100, 40)
    assert (paper.local.batch_size, paper.local.lr, paper.data.validation) == (64, 0.1, 0.1)
    assert (paper.distill.steps, paper.distill.batch_size, paper.distill.lr) == (10_000, 128, 1e-3)
    assert (paper.distill.eval_every, paper.distill.patience, paper.distill.early_stopping) == (
        100,
        1_000,
        "validation",
    )
    assert (paper.fusion.method, paper.ensemble.cache, paper.ensemble.combine) == ("feddf", "once", "logits")


MISTAKES = {
    # a value out of bounds or of another kind
    "alpha=0": "partition.alpha = 0: input should be greater than 0",
    "alpha=-1": "partition.alpha = -1: input should be greater than 0",
    "alpha=nan": "partition.alpha = nan: input should be a finite number",
    "alpha='much'": "partition.alpha = 'much': input should be a valid number",
    "alpha=": "partition.alpha = '': input should be a valid number",
    "clients.total=0": "clients.total = 0: input should be greater than or equal to 1",
    "clients.total=2.5": "clients.total = 2.5: input should be a valid integer",
    "clients.total=true": "clients.total = True: input should be a valid integer",
    "rounds=ten": "rounds = 'ten': input should be a valid integer",
    "fraction=1.5": "clients.fraction = 1.5: input should be less than or equal to 1",
    "ask=online": "ensemble.cache = 'online': input should be 'once' or 'each-batch'",
    "temperature=0": "distill.temperature = 0: input should be greater than 0",
    "fedma.growth=0.5": "fedma.growth = 0.5: input should be greater than or equal to 1",
    "held_out=1": "distill.held_out = 1: input should be less than 1",
    "pool.size=1": "pool.size = 1: input should be greater than or equal to 2",
    "fusion.options=3": "fusion.options = 3: input should be a valid dictionary",
    "prototypes=[]": "prototypes = []: at least one is needed",
    "prototypes=3": "prototypes = 3: must be a list, for instance",
    "prototypes=[{name='x'}]": "the key 'prototypes.0.model' is missing",
    "name=../escape": "name = '../escape': string should match pattern",
    # a key that does not exist
    "alhpa=1": "unknown key 'alhpa'; did you mean 'partition.alpha'?",
    "local.epoch=1": "unknown key 'local.epoch'; did you mean 'local.epochs'?",
    "local.momentum=0.1": "unknown key 'local.momentum'; did you mean 'fusion.momentum'?",
    "distill.size=3": "unknown key 'distill.size'; did you mean 'data.train_size' or 'pool.size'?",
    "lr=1": "unknown key 'lr'; did you mean 'local.lr'?",
    "mu=0.1": "unknown key 'mu'; did you mean 'local.prox_mu'?",
    "local=3": "unknown key 'local'; the keys of [local] are: epochs, batch,",
    "local.zzz=1": "unknown key 'local.zzz'; the keys of [local] are: epochs, batch,",
    "zzz=1": "unknown key 'zzz'; 'feddf config' lists all keys; the sections are: clients, local,",
    "clients.total.x=3": "unknown key 'clients.total.x'; did you mean 'clients.total'?",
    "pool.sources=[{name='noise',sise=3}]": "unknown key 'pool.sources.0.sise'; did you mean 'pool.sources.size'?",
    "no-equals-sign": "'no-equals-sign' is not an override; write key=value",
    "=3": "'=3' is not an override; write key=value",
    # the last part of several keys
    "batch=8": "'batch' could mean local.batch_size or distill.batch_size; write the full name",
    "rate=1": "'rate' could mean local.lr or distill.lr; write the full name",
    "optimizer=sgd": "'optimizer' could mean local.optimizer or distill.optimizer; write the full name",
    "average=uniform": "'average' could mean fusion.aggregation or ensemble.combine; write the full name",
    "size=9": "'size' could mean data.train_size or pool.size; write the full name",
    "augment=none": "'augment' could mean local.augment or pool.augment; write the full name",
    # a name that is not known
    "method=fedvag": "fusion.method = 'fedvag': did you mean 'fedavg'? (your own is written as module:attribute)",
    "method=zz": "fusion.method = 'zz': known are: fedavg, feddf, fedma, fedprox, fedavgm, feddistill, feddf-plus",
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
    "fraction=0.1": "clients.fraction = 0.1: no client would be sampled from 4; it must be above 0.125",
    "validation=0": "data.validation = 0.0: early stopping needs validation data; hold some out, or set distill.early_stopping =",
    "validation=0 early_stopping=none drop_worst=paper": "fusion.drop_worst = 'paper': it needs validation data",
    "validation=0 early_stopping=none weights=validation": "ensemble.weights = 'validation': it needs validation data",
    "validation=0 early_stopping=none sources=validation": "pool.sources = 'validation': there are no validation inputs",
    "start=best early_stopping=none": "distill.init = 'best': the best is found by a score",
    "pool.augment=true": "pool.augment = True: only with ensemble.cache = false",
    "swag_samples=5 cache=false": "ensemble.swag_samples = 5: only with ensemble.cache = true",
    "swag_samples=5 weights=validation": "ensemble.weights = 'validation': sampled teachers have no",
    "method=fedma momentum=0.1": "fusion.method = 'fedma': its layers grow and are matched one by one",
    "method=fedma drop_worst=paper": "fusion.method = 'fedma': its layers grow and are matched one by one",
    "method=fedma batchnorm=local": "fusion.method = 'fedma': it has averages of its own and no BatchNorm",
    "method=fedma fusion.aggregation=uniform": "fusion.method = 'fedma': it has averages of its own and no BatchNorm",
    "method=fedma binary=error-feedback": "local.binary = 'error-feedback': FedMA matches weights of full",
    "sources=": "pool.sources = nothing: method 'feddf' needs unlabeled inputs",
    "method=fedavg sources=[] batchnorm=recalibrate": "fusion.batchnorm = 'recalibrate': statistics are estimated",
    "sources=toy": "pool.sources = 'toy': the pool must not be the clients' own data",
    "sources=train,train": "pool.sources = 'train, train': nothing would be left to train on",
    "sources=[{name='train',fraction=0.1},{name='train',fraction=0.1}]": "'train' is named twice; give it one fraction",
    "ray_address=localhost:6379": "run.ray_address = 'localhost:6379': it is the address of a Ray cluster; set run.eng",
    "engine=in-process timeout=3": "clients.timeout = 3.0: only run.engine = 'processes' or 'ray' can end a late",
    "prototypes=mlp,mlp": "prototypes = ['mlp', 'mlp']: two have the same name",
    "prototypes=mlp,cnn,resnet8,resnet20,vgg9": "there are more prototypes than clients (4)",
}


@pytest.mark.parametrize("overrides", MISTAKES)
def test_a_mistake_is_one_line_that_names_key_value_and_remedy(tmp_path: Path, overrides: str) -> None:
    assert MISTAKES[overrides] in complaint(FILE, overrides.split(" "), tmp_path)


@pytest.mark.parametrize("old", FORMERLY)
def test_a_key_without_its_section_gets_the_key_to_write_instead(old: str) -> None:
    replaced = FORMERLY[old]
    rest = {name: value for name, value in BASE.items() if name != old}
    with pytest.raises(ConfigError) as error:  # in a file, the whole name is needed
        parse({**rest, old: "x"})
    assert f"'{replaced}'" in str(error.value)
    assert "\n" not in str(error.value)
    assert replaced in understood(old)


def understood(word: str) -> str:
    """Return the key that an override's word means, or why it means none."""
    try:
        return resolve(word, Experiment)
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("clients = 3", "clients = 3: it is a section; did you mean 'clients.total'?"),
        ('data = "toy"', "data = 'toy': it is a section; did you mean 'data.name'?"),
        ('partition = "iid"', "partition = 'iid': it is a section; did you mean 'partition.scheme'?"),
        ('pool = "plane"', "pool = 'plane': it is a section; did you mean 'pool.sources'?"),
        ('pool = ["plane"]', "pool = ('plane',): it is a section; did you mean 'pool.sources'?"),
        ('fusion = "fedavg"', "fusion = 'fedavg': it is a section; the keys of [fusion] are: method, average,"),
        ("distill = false", "distill = False: it is a section; the keys of [distill] are: start, steps,"),
        ("run = 3", "run = 3: it is a section; the keys of [run] are: engine, workers,"),
    ],
)
def test_a_section_given_as_a_plain_value_is_one_line(tmp_path: Path, line: str, said: str) -> None:
    name = line.partition(" ")[0]
    rest = "".join(f"{part}\n" for part in FILE.split("\n\n") if not part.startswith(f"[{name}]"))
    assert said in complaint(f"{line}\n{rest}", [], tmp_path)


def test_an_override_inside_of_a_section_that_is_none_is_one_line(tmp_path: Path) -> None:
    said = complaint("clients = 3\n", ["fraction=1.0"], tmp_path)
    assert said == "clients.fraction = 1.0: 'clients' is not a section of this configuration"


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("data", "the key 'data' is missing: name a data set, for instance data.name = 'cifar10'"),
        ("prototypes", r"the key 'prototypes' is missing: name at least one architecture, .* \['resnet8'\]"),
        ("pool", "method 'feddf' needs unlabeled inputs"),
    ],
)
def test_what_is_missing_is_named(missing: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse({name: value for name, value in BASE.items() if name != missing})
    with pytest.raises(ConfigError, match=r"the key 'data\.name' is missing: name a data set"):
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


def test_an_unknown_preset_suggests_one() -> None:
    with pytest.raises(ConfigError, match="no preset or file is called 'dmeo'; did you mean 'demo'"):
        load("dmeo")


def test_overrides_win_and_the_last_part_of_a_key_is_enough() -> None:
    words = ["prototypes=cnn,mlp", "alpha=2", "seed=7", "name=mine", "method=fedavg", "prox_mu=0.1", "local.epochs=3"]
    experiment = load("demo", [*words, "sources=noise,train", "workers=2"])
    assert [spec.label for spec in experiment.prototypes] == ["cnn", "mlp"]
    assert (experiment.partition.alpha, experiment.seed, experiment.name) == (2.0, 7, "mine")
    assert (experiment.fusion.method, experiment.local.prox_mu, experiment.local.epochs) == ("fedavg", 0.1, 3)
    assert ([source.name for source in experiment.pool.sources], experiment.run.workers) == (["noise", "train"], 2)
    assert experiment.local.lr == load("demo").local.lr  # the others of the section stay


def test_a_value_is_read_as_toml_or_else_taken_as_a_string() -> None:
    words = ["about=two words", "prototypes=[{model='mlp',width=3}]", "sources=[{name='noise',size=9},'train']"]
    experiment = parse(BASE, overrides=words)
    assert experiment.about == "two words"
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
