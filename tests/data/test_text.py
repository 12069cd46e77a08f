from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from feddf.data.datasets import MissingDataError
from feddf.data.text import read_ag_news, read_sst2, read_texts


def write_sst2(root: Path, n: int = 12) -> None:
    (root / "SST-2").mkdir(parents=True)
    for name in ("train.tsv", "dev.tsv"):
        lines = [f"a {'good' if i % 2 else 'bad'} film {i} \t{i % 2}" for i in range(n)]
        (root / "SST-2" / name).write_text("\n".join(["sentence\tlabel", *lines]) + "\n")


class Counting:
    """A tokenizer that counts how often it is used."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, sentences: Sequence[str]) -> torch.Tensor:
        self.calls += 1
        return torch.tensor([[len(sentence), 1, 0] for sentence in sentences], dtype=torch.int32)


def test_sst2_has_a_header_and_tabs(tmp_path: Path) -> None:
    write_sst2(tmp_path)
    texts = read_sst2(tmp_path / "SST-2" / "train.tsv")
    assert texts.sentences[:2] == ["a bad film 0", "a good film 1"]
    assert texts.labels.tolist()[:4] == [0, 1, 0, 1]


def test_ag_news_joins_title_and_text_and_some_have_no_title(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text('"3","Wall St.","Short ""sellers"" are\\back"\n"1","","Only, a text"\n')
    texts = read_ag_news(path)
    assert texts.sentences == ['Wall St. Short "sellers" are back', "Only, a text"]
    assert texts.labels.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("content", "entry"),
    [
        ("sentence\tlabel\ngood\t1\nbad\t2\n", 2),
        ("sentence\tlabel\ngood 1\n", 1),
        ("sentence\tlabel\n\t1\n", 1),
        ("sentence\tlabel\ngood\tyes\n", 1),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, content: str, entry: int) -> None:
    (tmp_path / "train.tsv").write_text(content)
    with pytest.raises(ValueError, match=f"train.tsv: entry {entry} is not a text and one of 2 classes"):
        read_sst2(tmp_path / "train.tsv")


def test_an_empty_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n")
    with pytest.raises(ValueError, match="holds no texts"):
        read_sst2(tmp_path / "train.tsv")


def test_texts_are_tokenized_once(tmp_path: Path) -> None:
    write_sst2(tmp_path)
    tokenize = Counting()
    first = read_texts("sst2", tmp_path, tokenize, "one")
    again = read_texts("sst2", tmp_path, tokenize, "one")
    assert tokenize.calls == 1  # both parts have the same content, and so one entry
    assert torch.equal(first.train.inputs.batch(torch.arange(5)), again.train.inputs.batch(torch.arange(5)))
    assert first.train.inputs.batch(torch.arange(2)).dtype == torch.int64
    read_texts("sst2", tmp_path, tokenize, "another tokenizer")
    assert tokenize.calls == 2
    write_sst2(tmp_path / "other", n=13)
    read_texts("sst2", tmp_path / "other", tokenize, "one")
    assert tokenize.calls == 3


def test_a_damaged_cache_is_made_anew(tmp_path: Path) -> None:
    write_sst2(tmp_path)
    tokenize = Counting()
    read_texts("sst2", tmp_path, tokenize, "one")
    for path in (tmp_path / ".feddf").iterdir():
        np.save(path, np.zeros((3, 3), np.int32))
    data = read_texts("sst2", tmp_path, tokenize, "one")
    assert tokenize.calls == 2
    assert len(data.train) == 12


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(MissingDataError, match=r"no file SST-2/train.tsv"):
        read_texts("sst2", tmp_path, Counting(), "one")
