"""Crafted data files: idx, STL-10, CSV, TSV and Parquet, each refused in one line, within time and memory."""

from __future__ import annotations

import math
import os
import struct
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from feddf import cli
from feddf.config import ConfigError, DataConfig, DistillConfig
from feddf.data import tables
from feddf.data.datasets import Standardized
from feddf.data.files import read_idx, read_stl10_images, read_stl10_labels
from feddf.data.tables import read_table
from feddf.data.text import read_ag_news, read_sst2
from feddf.fusing.inputs import RawInputs
from feddf.fusion.distill import held_out_inputs, score_of
from feddf.runs.loading import load_dataset
from feddf.runtime import atomic
from feddf.saved.model_folder import read_lines

ROW = "a,b,label\n1,2,x\n"
DIGITS = "9" * 5000
TABLES = {
    "a quote without end": (ROW + '1,"' + "a,b\n" * 50_000, "is not a CSV file: field larger than field limit"),
    "a line without end": (f"{ROW}{'1,' * 2_200_000}", "has a line of 4194304 characters or more"),
    "one name twice": ("a,a,label\n1,2,x\n", "its columns must have different names, and are a, a, label"),
    "beyond float32": (f"{ROW}1e39,2,x\n", "its column 'a' has no number in row 2, but '1e39'"),
    "beyond float64": (f"{ROW}1e400,2,x\n", "its column 'a' has no number in row 2, but '1e400'"),
    "many digits": (f"{ROW}{DIGITS},2,x\n", "its column 'a' has no number in row 2"),
    "a label of many digits": (f"{ROW}1,2,{DIGITS}\n", "its label in row 2 has 5000 characters"),
    "nothing but zero bytes": ("\0" * 1000, "has no rows of numbers"),
    "a ragged row": (f"{ROW}1,2\n", "row 2 has 2 values, and there are 3 columns"),
}


@pytest.mark.parametrize(("text", "said"), TABLES.values(), ids=TABLES)
def test_a_table(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match=said) as found:
        read_table(f"{tmp_path / 'x.csv'}")
    assert len(str(found.value)) < 400


def test_labels_that_look_like_numbers_are_names(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,label\n1,²\n2,10\n3,9\n4,٣\n5,\0\n")
    found = read_table(str(tmp_path / "x.csv"))
    assert found.classes == ("٣", "9", "10", "\0", "²")
    assert found.rows.tolist() == [[1], [2], [3], [4], [5]]


def test_a_table_of_one_column_or_one_row_is_one(tmp_path: Path) -> None:
    column = torch.arange(60.0).view(1, 60).T
    assert RawInputs(column).fingerprint == RawInputs(column.clone(memory_format=torch.preserve_format)).fingerprint
    with warnings.catch_warnings(action="error"):
        assert Standardized.by(torch.ones(1, 2)).std == (1, 1)
    assert Standardized.by(torch.tensor([[1.0], [3.0]])).std == (math.sqrt(2),)


def test_a_parquet_file_of_few_bytes_and_many_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"a": arrow.array(np.zeros(1_000_000))}), tmp_path / "x.parquet")
    assert (tmp_path / "x.parquet").stat().st_size < 10_000
    monkeypatch.setattr(tables, "MOST_NUMBERS", 10_000)
    with pytest.raises(ValueError, match="has more than 10000 numbers"):
        read_table(str(tmp_path / "x.parquet"))


AG, SST = '"1","title","text"\n', "sentence\tlabel\ntext\t1\n"
TEXTS = {
    "a quote without end": (read_ag_news, AG + '"1","' + "a\n" * 100_000, "is not a CSV file"),
    "one line": (read_ag_news, AG + "x" * 5_000_000, "has a line of 4194304 characters or more"),
    "a class of digits": (read_ag_news, f'{AG}"{DIGITS}","a","b"\n', "entry 2 is not a text and one of 4 classes"),
    "a class that is no digit": (read_ag_news, f'{AG}"²","a","b"\n', "entry 2 is not a text and one of 4 classes"),
    "class zero": (read_ag_news, f'{AG}"0","a","b"\n', "entry 2 is not a text and one of 4 classes"),
    "one line of tabs": (read_sst2, SST + "\t" * 5_000_000, "has a line of 4194304 characters or more"),
    "a label that is no digit": (read_sst2, f"{SST}text\t²\n", "entry 2 is not a text and one of 2 classes"),
    "a label of digits": (read_sst2, f"{SST}text\t{DIGITS}\n", "entry 2 is not a text and one of 2 classes"),
    "no texts": (read_sst2, "sentence\tlabel\n\n\n", "holds no texts"),
    "bytes that are not UTF-8": (read_sst2, SST + "\udcff", "cannot read the text in"),
}


@pytest.mark.parametrize(("read", "text", "said"), TEXTS.values(), ids=TEXTS)
def test_texts(read: Callable[[Path], object], text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=said):
        read(tmp_path / "x")


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    for read, text in ((read_ag_news, AG), (read_sst2, SST)):
        (tmp_path / "x").write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert len(read(tmp_path / "x").sentences) == 1
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfone\r\ntwo\xe2\x80\xa8three\n\n")
    assert read_lines(str(tmp_path / "x")) == ["one", "two", "three"]


READERS = (read_ag_news, read_sst2, partial(read_idx, row=()), read_stl10_labels, lambda path: read_lines(str(path)))


@pytest.mark.parametrize("read", READERS, ids=range(len(READERS)))
def test_what_never_ends_is_not_read(read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(atomic.MOST_LINES + 1)
    for name, said in (("pipe", "not a regular file"), ("device", "not a regular file"), ("large", "at most")):
        with pytest.raises(OSError, match=said):
            read(tmp_path / name)


IDX = [(), (0, 2**31, 2**31), (2, 0, 0), (2, 1, 1), (2, 784), (2, 14, 56), (2, 28, 28, 1), (1,) * 200]


@pytest.mark.parametrize("shape", IDX, ids=map(str, IDX))
def test_an_idx_file_of_other_sizes(shape: tuple[int, ...], tmp_path: Path) -> None:
    head = b"\0\0\x08" + bytes([len(shape)]) + b"".join(struct.pack(">I", size) for size in shape)
    (tmp_path / "x").write_bytes(head + bytes(math.prod(shape)))
    with pytest.raises(ValueError, match=r"has the sizes .* and not a number of rows of \(28, 28\)"):
        read_idx(tmp_path / "x", (28, 28))


def test_more_images_than_stl10_has(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.truncate(100_001 * 3 * 96 * 96)
    with pytest.raises(ValueError, match="are not a number of images"):
        read_stl10_images(tmp_path / "x")


def test_parts_of_two_shapes(tmp_path: Path) -> None:
    for part, side in (("train", 8), ("test", 9)):
        for name in ("a", "b"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.fromarray(np.zeros((side, side), np.uint8)).save(tmp_path / part / name / "x.png")
    name = f"folder:{tmp_path}"
    with pytest.raises(ConfigError, match=r"training inputs of shape \(3, 8, 8\) and test inputs of shape \(3, 9, 9\)"):
        load_dataset("data.name", name, DataConfig(name=name))
    assert load_dataset("data.name", name, DataConfig(name=name, image_size=4)).shape == (3, 4, 4)


def test_a_pool_of_two_holds_nothing_out() -> None:
    config = DistillConfig(early_stopping="held-out-loss")
    kept, held_out = held_out_inputs(2, config)
    assert (len(kept), len(held_out)) == (2, 0)
    nothing: list[object] = [None] * 4
    assert score_of(nothing[0], config, nothing[1], held_out, nothing[2], nothing[3]) is None  # type: ignore[arg-type]


SMALL = """
rounds = 1
prototypes = ["mlp"]
fusion = {method = "fedavg"}
clients = {total = 2, fraction = 1.0}
"""


def test_names_in_a_table_reach_the_terminal_without_escape_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text(f'{SMALL}data = {{name = "table:x.csv"}}')
    names = ("\x1b]0;owned\x07", "\x9b31m")
    rows = "".join(f"{i},{i % 7},{names[i % 2]}\n" for i in range(60))
    (tmp_path / "x.csv").write_text(f"a,b,label\n{rows}")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert cli.guarded(lambda: cli.app(["partition", "x.toml", "--out", "x.png"], standalone_mode=False)) == 0
    said = "".join([*capfd.readouterr(), *(str(one.message) for one in warned)])
    assert not {"\x1b", "\x07", "\x9b"} & set(said)


@pytest.mark.parametrize("error", [ConfigError("a\nb"), MemoryError(), OSError("a\nb")], ids=repr)
def test_an_error_is_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise error

    assert cli.guarded(fail) in (1, 2)
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert len(said.splitlines()) == 1
    assert len(said) > len("error: \n")
