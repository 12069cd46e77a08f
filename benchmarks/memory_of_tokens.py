"""Peak memory of fusing tokens: ``python benchmarks/memory_of_tokens.py N [VOCABULARY]``, rows of 64, two teachers.

The answers of a teacher are 30,000 numbers at every position: 7.7 MB a row in float32. On disk are the 64 largest with
what they leave of one (24.6 kB a row and teacher); a few rows at a time are whole.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from memory_of_masks import peak
from torch import nn

import feddf
from feddf.config import DistillConfig
from feddf.fusing.inputs import RawInputs
from feddf.fusing.teachers import of_module
from feddf.outputs import classes

LENGTH = 64


class Bigram(nn.Module):
    """The least that says something of the next token."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return N × vocabulary × L logits of N × L tokens."""
        return self.head(self.embed(tokens)).transpose(1, 2)  # type: ignore[no-any-return]


def main(n: int, vocabulary: int = 30_000) -> None:
    pool = RawInputs(torch.randint(1, vocabulary, (n, LENGTH)))
    names, form = tuple(map(str, range(vocabulary))), classes(vocabulary, (LENGTH,)).describe()
    form = {name: value for name, value in form.items() if name != "channels"}
    known = [of_module(Bigram(vocabulary), f"t{k}", classes=names, form=form) for k in range(2)]
    before = peak()
    distill = DistillConfig(steps=5, eval_every=5, batch_size=4, early_stopping="held-out-loss")
    with TemporaryDirectory() as folder:
        feddf.fuse(known, Bigram(vocabulary), pool, distill=distill, cache=Path(folder))
    found = {"rows": n, "vocabulary": vocabulary, "MB before": round(before), "peak MB": round(peak())}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
