"""Train five classifiers of news on disjoint, badly skewed parts of AG News, and write them as people have them.

    python examples/fuse-texts/train_teachers.py MINILM OUT [--examples 3000] [--epochs 3] [--seed 0]

MINILM is the folder of a pretrained BERT of transformers, for instance all-MiniLM-L6-v2; AG News is looked for in the
folder that FEDDF_DATA names. There are three architectures in two file formats: the whole encoder and its first half,
as folders that ``from_pretrained`` reads, and the mean of a text's word vectors with a linear layer, as ONNX files.
OUT also gets ``encoder``, the first half without a head, which the student starts as, and ``unlabeled.txt`` with other
news, one in each line.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from feddf import dirichlet
from feddf.config import PartitionConfig
from feddf.data.text import TEXTS
from feddf.fusing.folder import write_onnx

DESKS = {"desk-a": "whole", "desk-b": "half", "desk-c": "words", "desk-d": "half", "desk-e": "words"}
UNLABELED, TOKENS, CLASSES = 2000, 24, TEXTS["ag_news"].classes


class MeanOfWords(nn.Module):
    """A linear layer on the mean of a text's word vectors; padding, token 0, does not count."""

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.vectors = nn.Embedding.from_pretrained(vectors)  # they stay as they are
        self.head = nn.Linear(vectors.shape[1], len(CLASSES))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of rows of token numbers."""
        counts = (tokens != 0).unsqueeze(2).float()
        mean = (self.vectors(tokens) * counts).sum(dim=1) / counts.sum(dim=1).clamp(min=1)
        logits: Tensor = self.head(mean)
        return logits


def first_half(model: PreTrainedModel) -> PreTrainedModel:
    """Return a BERT without the later half of its layers."""
    layers = model.base_model.encoder.layer
    model.base_model.encoder.layer = layers[: len(layers) // 2]
    model.config.num_hidden_layers = len(layers) // 2
    return model


def classifier(minilm: str, half: bool) -> PreTrainedModel:
    names = dict(enumerate(CLASSES))
    numbers = {name: number for number, name in names.items()}
    model = AutoModelForSequenceClassification.from_pretrained(
        minilm, num_labels=len(CLASSES), id2label=names, label2id=numbers
    )
    return first_half(model) if half else model


def logits_of(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=tokens, attention_mask=(tokens != 0).long()).logits
    return logits


def train(
    model: nn.Module, ask: Callable[[Tensor], Tensor], tokens: Tensor, labels: Tensor, epochs: int, rate: float
) -> None:
    """Adam, in batches of 16."""
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=rate)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(tokens)).split(16):
            loss = F.cross_entropy(ask(tokens[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()


def main(minilm: str, out: Path, examples: int, epochs: int, seed: int) -> None:
    texts = TEXTS["ag_news"].read(Path(os.environ["FEDDF_DATA"]) / "ag_news_csv" / "train.csv")
    order = torch.randperm(len(texts.sentences), generator=torch.Generator().manual_seed(seed)).tolist()
    used, rest = order[:examples], order[examples : examples + UNLABELED]
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    rows = tokenizer(
        [texts.sentences[row] for row in used],
        padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt",
    )  # fmt: skip
    tokens, labels = rows["input_ids"], texts.labels[used]
    partition = PartitionConfig(alpha=0.5, min_size=200)
    shards = dirichlet(labels, len(DESKS), partition, n_classes=len(CLASSES), seed=seed + 2)
    out.mkdir(parents=True, exist_ok=True)
    for number, ((name, kind), part) in enumerate(zip(DESKS.items(), shards, strict=True)):
        torch.manual_seed(100 * seed + number)
        held = torch.bincount(labels[part], minlength=len(CLASSES)).tolist()
        print(f"{name}: {kind}, {len(part)} texts, of each class {held}", flush=True)
        if kind == "words":
            vectors = AutoModel.from_pretrained(minilm).get_input_embeddings().weight.detach().clone()
            words = MeanOfWords(vectors)
            train(words, words, tokens[part], labels[part], 10 * epochs, 1e-2)
            write_onnx(words, tokens[:8], out / f"{name}.onnx")
        else:
            model = classifier(minilm, kind == "half")
            train(model, partial(logits_of, model), tokens[part], labels[part], epochs, 1e-4)
            model.save_pretrained(out / name)
            tokenizer.save_pretrained(out / name)
    first_half(AutoModel.from_pretrained(minilm)).save_pretrained(out / "encoder")
    tokenizer.save_pretrained(out / "encoder")
    lines = [" ".join(texts.sentences[row].split()) for row in rest]
    (out / "unlabeled.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("minilm")
    parser.add_argument("out", type=Path)
    parser.add_argument("--examples", type=int, default=3_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
