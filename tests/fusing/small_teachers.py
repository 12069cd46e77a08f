"""Teachers that a test can afford: small networks that learned some classes of made-up images, in files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as token_models
from torch import nn

from conftest import SHAPE, stripes
from feddf.config import DataConfig
from feddf.data.datasets import Dataset
from feddf.models.small import CNN
from feddf.runtime.packages import transformers
from feddf.saved.model import Images, ModelSpec

CLASSES = ("top", "middle", "bottom")
ENCODE = Images((1, 8, 8), (0.4,), (0.3,))


def bands(data: DataConfig) -> Dataset:
    return Dataset("bands", stripes(120, 11), stripes(90, 12), classes=CLASSES)


def trained(known: Sequence[int] = (0, 1, 2), *, seed: int = 0, width: int = 4, steps: int = 40) -> nn.Module:
    """Return a network that learned some classes, in their order."""
    torch.manual_seed(seed)
    examples = stripes(120, 5)
    lookup = {label: number for number, label in enumerate(known)}
    chosen = [row for row, label in enumerate(examples.labels.tolist()) if label in lookup]
    inputs = examples.inputs.batch(torch.tensor(chosen))
    labels = torch.tensor([lookup[int(examples.labels[row])] for row in chosen])
    model = CNN(SHAPE, len(known), width=width)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        loss = F.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def spec_of(width: int = 4, classes: Sequence[str] = CLASSES) -> ModelSpec:
    return ModelSpec("cnn", (1, 8, 8), tuple(classes), ENCODE, {"width": width})


def as_folder(model: nn.Module, spec: ModelSpec, folder: Path) -> Path:
    folder.mkdir(parents=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"feddf": spec.describe()}))
    return folder


@cache
def models() -> dict[str, nn.Module]:
    return {
        "all": trained(seed=1),
        "wide": trained(seed=2, width=6),
        "first": trained((0, 1), seed=3),
        "last": trained((1, 2), seed=4),
    }


def text_classifier(folder: Path, seed: int = 0) -> Path:
    """A tiny text classifier with a tokenizer, as transformers write it."""
    library = transformers()
    words = {"[PAD]": 0, "[UNK]": 1, **{word: number for number, word in enumerate(["good", "bad", "film", "very"], 2)}}
    backend = Tokenizer(token_models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    library.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
        folder
    )
    torch.manual_seed(seed)
    config = library.DistilBertConfig(
        vocab_size=len(words), dim=16, hidden_dim=16, n_layers=1, n_heads=2, max_position_embeddings=32, pad_token_id=0,
        id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1},
    )  # fmt: skip
    library.DistilBertForSequenceClassification(config).save_pretrained(folder)
    return folder
