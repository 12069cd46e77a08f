"""Train classifiers of news on disjoint, badly skewed parts of AG News, each a MiniLM with a head of its own.

    python examples/fuse-texts/train_teachers.py MINILM OUT

MINILM is the folder of a pretrained encoder of transformers; AG News is looked for in the folder that FEDDF_DATA
names. The encoder stays as it is, so that this takes a minute: only heads are trained. OUT gets five folders that
``from_pretrained`` reads, and ``unlabeled.txt`` with other news, one in each line.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from feddf import dirichlet
from feddf.config import PartitionConfig
from feddf.data.text import TEXTS

TEACHERS, EXAMPLES, UNLABELED, TOKENS = 5, 1000, 600, 24


def main(minilm: str, out: Path) -> None:
    source = TEXTS["ag_news"]
    texts = source.read(Path(os.environ["FEDDF_DATA"]) / source.folder / source.train)
    order = torch.randperm(len(texts.sentences), generator=torch.Generator().manual_seed(0))
    used, rest = order[:EXAMPLES], order[EXAMPLES : EXAMPLES + UNLABELED]
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    names = dict(enumerate(source.classes))
    model = AutoModelForSequenceClassification.from_pretrained(
        minilm, num_labels=4, id2label=names, label2id={name: number for number, name in names.items()}
    ).eval()
    features = []
    with torch.no_grad():
        for chunk in used.split(64):
            rows = tokenizer(
                [texts.sentences[int(row)] for row in chunk],
                padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt",
            )  # fmt: skip
            encoded = model.base_model(input_ids=rows["input_ids"], attention_mask=rows["attention_mask"])
            features.append(encoded.pooler_output)
    inputs, labels = torch.cat(features), texts.labels[used]
    shards = dirichlet(labels, TEACHERS, PartitionConfig(alpha=0.3, min_size=60), n_classes=4, seed=2)
    for number, part in enumerate(shards):
        torch.manual_seed(number)
        head = nn.Linear(inputs.shape[1], 4)
        optimizer = torch.optim.Adam(head.parameters(), lr=0.01, weight_decay=1e-4)
        for _ in range(200):
            loss = F.cross_entropy(head(inputs[part]), labels[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.classifier.load_state_dict(head.state_dict())
        folder = out / f"desk-{number}"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        held = torch.bincount(labels[part], minlength=4).tolist()
        print(f"{folder.name}: {len(part)} texts, of each class {held}", flush=True)
    lines = [texts.sentences[int(row)].replace("\n", " ") for row in rest]
    (out / "unlabeled.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
