"""Texts from their files to a fused transformer: a tiny DistilBERT with weights drawn at random, and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from feddf.config import ConfigError, Experiment, parse
from feddf.config.keys import nested
from feddf.config.names import MODELS
from feddf.runs.build import build
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder
from feddf.states import digest

WORDS = ["[PAD]", "[UNK]", "a", "good", "bad", "film", *map(str, range(40))]


def save(folder: Path, vocabulary: int = len(WORDS), positions: int = 16) -> str:
    size = {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
    config = transformers.DistilBertConfig(
        vocab_size=vocabulary, max_position_embeddings=positions, pad_token_id=0, initializer_range=0.2, **size
    )
    torch.manual_seed(0)
    transformers.DistilBertForSequenceClassification(config).save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        folder
    )
    return str(folder)


def opinion(number: int) -> str:
    return f"a {('bad', 'good')[number % 2]} film {number % 40}"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("texts")
    save(root / "model")
    for folder in ("SST-2", "ag_news_csv"):
        (root / folder).mkdir()
    films = ["sentence\tlabel", *(f"{opinion(i)}\t{i % 2}" for i in range(160))]
    news = [f'"{i % 4 + 1}","","{opinion(i)}"' for i in range(160)]
    for name in ("SST-2/train.tsv", "SST-2/dev.tsv", "ag_news_csv/train.csv", "ag_news_csv/test.csv"):
        (root / name).write_text("\n".join(films if name.endswith("tsv") else news) + "\n")
    return root


def experiment(place: Path, changes: dict[str, Any] | None = None) -> Experiment:
    values = {
        "data": {"name": "sst2", "folder": str(place), "validation": 0.05, "max_tokens": 8},
        "pool": {"sources": ["train"]},
        "clients": {"total": 3, "fraction": 1.0},
        "prototypes": [{"model": "transformer", "name": "distilbert", "path": str(place / "model")}],
        "rounds": 2,
        "local": {"epochs": 10, "batch_size": 8, "lr": 5e-3, "optimizer": "adam"},
        "distill": {"steps": 10, "batch_size": 8, "eval_every": 5},
        "run": {"engine": "in-process", "threads": 1},
    }
    return parse(nested(values, changes or {}))


def test_a_transformer_is_fine_tuned_and_fused(place: Path, tmp_path: Path) -> None:
    """Half of the sentences are the unlabeled pool, as in the paper; the word "good" or "bad" decides."""
    parts = build(experiment(place))
    assert parts.task.data.shape == (8,)
    assert (len(parts.task.train), len(parts.task.pool)) == (76, 76)
    records = list(run_experiment(parts, RunFolder.create(tmp_path / "run", parts.experiment)))
    assert records[-1]["models"]["distilbert"]["fused"] > 0.9
    config = json.dumps(parts.experiment.model_dump())
    assert "distilbert" in config


def test_ag_news_has_four_classes(place: Path) -> None:
    parts = build(experiment(place, {"data.name": "ag_news"}))
    assert parts.task.train.n_classes == 4
    assert parts.task.data.classes[1] == "Sports"


def test_the_pretrained_weights_are_what_everyone_starts_from(place: Path) -> None:
    state = build(experiment(place)).server.models["distilbert"]
    source = transformers.DistilBertForSequenceClassification.from_pretrained(
        place / "model", num_labels=2
    ).state_dict()
    for name, tensor in state.items():
        if "embeddings" in name or "layer" in name:
            assert torch.equal(tensor, source[name.removeprefix("network.")]), name


def test_padding_does_not_change_an_answer(place: Path) -> None:
    model = MODELS["transformer"]((12,), 2, path=str(place / "model")).eval()
    tokens = torch.tensor([[2, 3, 5, 0, 0, 0]])
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), model(tokens[:, :3]))


def test_without_pretraining_all_weights_are_drawn(place: Path) -> None:
    torch.manual_seed(1)
    one = MODELS["transformer"]((8,), 2, path=str(place / "model"), pretrained=False).state_dict()
    torch.manual_seed(2)
    two = MODELS["transformer"]((8,), 2, path=str(place / "model"), pretrained=False).state_dict()
    assert digest({"m": one}) != digest({"m": two})


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "too many tokens": ({"data.max_tokens": 20}, "20 tokens are more than the 16 that it can read"),
    "no tokenizer": ({"prototypes": ["mlp"]}, "'sst2' are texts; name a tokenizer or a transformer"),
    "no such model": ({"prototypes": [{"model": "transformer", "path": "/nowhere/at/all"}]}, "there is no tokenizer"),
    "an image model": ({"prototypes": ["resnet8"], "data.tokenizer": "model"}, "does not work on inputs of shape (8,)"),
    "noise": ({"pool.sources": ["noise"]}, "there is no noise for inputs of type torch.int32"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(place: Path, mistake: str) -> None:
    changes, said = MISTAKES[mistake]
    if "data.tokenizer" in changes:
        changes = {**changes, "data.tokenizer": str(place / "model")}
    with pytest.raises(ConfigError) as error:
        build(experiment(place, changes))
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_does_not_fit_its_model_is_said_before_training(place: Path, tmp_path: Path) -> None:
    small = save(tmp_path / "small", vocabulary=10)
    prototypes = [{"model": "transformer", "path": small}]
    with pytest.raises(ConfigError, match=rf"it knows {len(WORDS)} tokens, and the model .*small can read 10"):
        build(experiment(place, {"prototypes": prototypes, "data.tokenizer": str(place / "model")}))


def test_a_transformer_answers_for_each_token(place: Path) -> None:
    model = MODELS["transformer"]((12,), 5, (12,), path=str(place / "model"), pretrained=False).eval()
    tokens = torch.tensor([[2, 3, 5, 9, 0, 0, 0, 0, 0, 0, 0, 0]])
    longer = torch.tensor([[2, 3, 5, 9, 7, 7, 7, 7, 7, 7, 7, 7]])
    with torch.no_grad():
        found, other = model(tokens), model(longer)
    assert found.shape == (1, 5, 12)
    assert not found[:, :, 4:].any()  # nothing is said of padding
    assert found[:, :, :4].any()
    assert not torch.equal(found[:, :, :4], other[:, :, :4])  # padding is not looked at, tokens are
    with pytest.raises(ValueError, match="12 tokens"):
        MODELS["transformer"]((12,), 5, (4,), path=str(place / "model"), pretrained=False)


def test_language_models_learn_which_character_comes_next(place: Path, tmp_path: Path) -> None:
    changes = {
        "data.name": "ag_news-characters",
        "data.max_tokens": 16,
        "pool.sources": ["sst2-characters"],
        "partition.alpha": 0.1,
        "prototypes": ({"model": "gpt", "width": 16, "depth": 1}, {"model": "gru", "width": 16}),
        "local.lr": 0.02,
        "rounds": 1,
    }
    parts = build(experiment(place, changes))
    first, *_ = run_experiment(parts, RunFolder.create(tmp_path / "run", parts.experiment))
    assert first["score"] == "1/perplexity"
    assert all(measures["perplexity"] < 20 for measures in first["measures"].values())  # of 53 characters
    topics = [set(parts.task.train.groups[shard].tolist()) for shard in parts.task.shards]  # type: ignore[index]
    assert min(map(len, topics)) < 4
