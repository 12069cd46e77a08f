from __future__ import annotations

from pathlib import Path

import pytest
from feddf.runs.config import differences, parse

from feddf.runs import ConfigError, Experiment, load, presets

BASE = {"data": "toy", "pool": "plane", "prototypes": ["mlp"], "clients": 4}


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_is_valid_and_says_what_it_is(name: str) -> None:
    experiment = load(name)
    assert experiment.name == name
    assert len(experiment.about) > 20


def test_the_defaults_are_the_papers() -> None:
    paper = parse({"data": "cifar10", "pool": "cifar100", "prototypes": ["resnet8"]})
    assert (paper.clients, paper.fraction, paper.rounds, paper.local_epochs) == (20, 0.4, 100, 40)
    assert (paper.local_batch, paper.local_rate, paper.validation) == (64, 0.1, 0.1)
    assert (paper.distill_steps, paper.distill_batch, paper.distill_rate) == (10_000, 128, 1e-3)
    assert (paper.distill_check, paper.distill_patience, paper.stop) == (100, 1_000, "validation")


MISTAKES = {
    "alpha=0": "alpha = 0: input should be greater than 0",
    "alpha=-1": "alpha = -1: input should be greater than 0",
    "alpha=nan": "alpha = nan: input should be a finite number",
    "alpha='much'": "alpha = 'much': input should be a valid number",
    "alhpa=1": "unknown key 'alhpa'; did you mean 'alpha'?",
    "zzz=1": "unknown key 'zzz'; known are: name,",
    "clients=0": "clients = 0: input should be greater than or equal to 1",
    "clients=2.5": "clients = 2.5: input should be a valid integer",
    "clients=true": "clients = True: input should be a valid integer",
    "rounds=ten": "rounds = 'ten': input should be a valid integer",
    "fraction=0.1": "fraction = 0.1: no client would be sampled from 4; it must be above 0.125",
    "fraction=1.5": "fraction = 1.5: input should be less than or equal to 1",
    "method=fedsgd": "method = 'fedsgd': input should be 'fedavg', 'feddf' or 'fedma'",
    "validation=0": "validation = 0.0: early stopping reads validation data; hold some out (0.1), or set stop =",
    "validation=0 stop=steps drop_worst=paper": "drop_worst = 'paper': it reads validation data",
    "validation=0 stop=steps teacher_weights=validation": "teacher_weights = 'validation': it reads validation data",
    "start=best stop=steps": "start = 'best': the best is found by a score",
    "pool_augment=true": "pool_augment = True: only with mode = 'online'",
    "swag_samples=5 mode=online": "swag_samples = 5: only with mode = 'cached'",
    "method=fedma drop_worst=paper": "method = 'fedma': its layers grow and are matched one by one",
    "method=fedma batchnorm=local": "method = 'fedma': it has averages of its own and no BatchNorm",
    "method=fedma local_binary=error-feedback": "local_binary = 'error-feedback': FedMA matches weights of full",
    "swag_samples=5 teacher_weights=validation": "teacher_weights = 'validation': sampled teachers have no",
    "temperature=0": "temperature = 0: input should be greater than 0",
    "fedma_growth=0.5": "fedma_growth = 0.5: input should be greater than or equal to 1",
    "held_out=1": "held_out = 1: input should be less than 1",
    "pool=toy": "pool = 'toy': the pool must not be the clients' own data",
    "pool_size=1": "pool_size = 1: input should be greater than or equal to 2",
    "prototypes=[]": "prototypes = (): tuple should have at least 1 item",
    "prototypes=mlp,mlp": "prototypes = ['mlp', 'mlp']: two have the same name",
    "prototypes=a,b,c,d,e": "there are more prototypes than clients (4)",
    "name=../escape": "name = '../escape': string should match pattern",
    "no-equals-sign": "'no-equals-sign' is not an override; write key=value",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_one_line_that_names_key_value_and_remedy(tmp_path: Path, override: str) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('data = "toy"\npool = "plane"\nprototypes = ["mlp"]\nclients = 4\n')
    with pytest.raises(ConfigError) as error:
        load(str(path), override.split(" "))
    assert MISTAKES[override] in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("data", "the key 'data' is missing"),
        ("prototypes", "the key 'prototypes' is missing"),
        ("pool", "needs an unlabeled"),
    ],
)
def test_what_is_missing_is_named(missing: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse({key: value for key, value in BASE.items() if key != missing})


def test_a_deadline_needs_an_engine_that_can_keep_it() -> None:
    with pytest.raises(ConfigError, match=r"deadline = 3\.0: only engine = 'processes'"):
        parse({**BASE, "engine": "in-process", "deadline": 3})


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


def test_overrides_win_and_prototypes_can_be_short() -> None:
    experiment = load("demo", ["prototypes=cnn,mlp", "alpha=2", "seed=7", "name=mine"])
    assert [spec.label for spec in experiment.prototypes] == ["cnn", "mlp"]
    assert (experiment.alpha, experiment.seed, experiment.name) == (2.0, 7, "mine")


def test_differences_name_what_would_change_the_result_and_nothing_else() -> None:
    old = parse(BASE)
    assert differences(old, parse({**BASE, "workers": 9, "engine": "in-process", "data_dir": "x"})) == []
    assert differences(old, parse({**BASE, "log_clients": True, "log_ensemble": False})) == []
    assert differences(old, parse({**BASE, "alpha": 3.0, "seed": 1})) == ["seed: 0 -> 1", "alpha: 1.0 -> 3.0"]
    assert isinstance(old, Experiment)
