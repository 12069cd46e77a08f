"""Tables of numbers: CSV and Parquet files, whose rows are inputs and one of whose columns may hold the labels.

``PATH#COLUMN`` names the column of labels; without it, a column with a usual name is taken as such.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from sys import intern
from typing import Any

import torch
from torch import Tensor

from feddf.config.errors import one_line
from feddf.config.sections import DataConfig
from feddf.data.adapters import LABELS
from feddf.data.datasets import Dataset, Standardized, held_out, of_parts
from feddf.data.files import csv_rows
from feddf.runtime.packages import pyarrow

SUFFIXES = (".csv", ".parquet")
MOST_NUMBERS, LONGEST_LABEL = 1 << 27, 200  # of a table: a few kB of Parquet can stand for any number of rows
LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Table:
    """The numbers of a table with the names of their columns, and the text of each row's label, if it has labels."""

    columns: tuple[str, ...]
    rows: Tensor
    labels: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """The labels that occur, numbers in their order, then texts in theirs."""
        return tuple(sorted(set(self.labels), key=lambda one: (not one.isdecimal(), one.isdecimal() and int(one), one)))

    @property
    def numbers(self) -> Tensor:
        """The labels as numbers of classes."""
        places = {name: number for number, name in enumerate(self.classes)}
        return torch.tensor([places[one] for one in self.labels], dtype=torch.int64)

    def taking(self, columns: Sequence[str]) -> Table:
        """Return it with these columns, by their names; as many columns without names are in their order."""
        if not columns or tuple(columns) == self.columns:
            return self
        if absent := [name for name in columns if name not in self.columns]:
            raise ValueError(f"it has no column '{absent[0]}', but {', '.join(self.columns[:8])}")
        return Table(tuple(columns), self.rows[:, [self.columns.index(name) for name in columns]], self.labels)


def read_table(name: str, *, labeled: bool = False, needed: bool = True) -> Table:
    """Return the table in ``PATH`` or ``PATH#COLUMN``; every column but that of the labels must hold numbers.

    A column that is not ``needed`` may be absent; then no other is taken for it.
    """
    place, _, wanted = name.partition("#")
    path = Path(place).expanduser()
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        raise ValueError(f"there is no table {path}; known are files that end in {' or '.join(SUFFIXES)}")
    rows = _parquet(path) if path.suffix.lower() == ".parquet" else _csv(path)
    columns = tuple(next(rows, ()))
    if needed and wanted and wanted not in columns:
        raise ValueError(f"it has no column '{wanted}', but {', '.join(columns[:8]):.200}")
    if len(set(columns)) < len(columns) or "" in columns:
        shown = ", ".join(one or "one without a name (an index of pandas?)" for one in columns[:8])
        raise ValueError(f"its columns must have different names, and are {shown:.200}")
    label = wanted or next((one for one in columns if one.lower() in LABELS), "")
    label = label if label in columns else ""
    if labeled and not label:
        known = f"{', '.join(columns[:8]):.200}"
        raise ValueError(f"which column holds the labels? Name it: table:{name}#COLUMN ({known})")
    numbers, labels = array("f"), list[str]()
    for row, values in enumerate(rows, 1):
        if len(values) != len(columns):
            raise ValueError(f"{path}: row {row} has {len(values)} values, and there are {len(columns)} columns")
        found = dict(zip(columns, values, strict=True))
        labels += [_text(row, found.pop(label))] if label else []
        numbers.extend(_number_in(row, name, value) for name, value in found.items())
        if len(numbers) > MOST_NUMBERS:
            raise ValueError(f"{path} has more than {MOST_NUMBERS} numbers")
    if not numbers:
        raise ValueError(f"{path} has no rows of numbers")
    kept = tuple(one for one in columns if one != label)
    return Table(kept, torch.frombuffer(numbers, dtype=torch.float32).view(-1, len(kept)), tuple(labels))


def _text(row: int, value: Any) -> str:
    text = str(value).strip()
    if len(text) > LONGEST_LABEL:
        raise ValueError(f"its label in row {row} has {len(text)} characters, and at most {LONGEST_LABEL} are a name")
    return intern(text.removesuffix(".0") if text.removesuffix(".0").isdecimal() else text)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _number_in(row: int, name: str, value: Any) -> float:
    number = _number(value)
    if number is None or not abs(number) <= LARGEST:
        remedy = "fill it in, leave it out, or name the column as the labels with #COLUMN"
        raise ValueError(f"its column '{name}' has no number in row {row}, but {value!r:.40}; {remedy}")
    return number


def _csv(path: Path) -> Iterator[Sequence[Any]]:
    """Yield the names of the columns of a CSV file, then its rows; a first row of numbers alone is no header."""
    rows = filter(None, csv_rows(path))
    first = next(rows, [])
    if first and None not in map(_number, first):
        yield [str(number) for number in range(len(first))]
    yield first
    yield from rows


def _parquet(path: Path) -> Iterator[Sequence[Any]]:
    library = pyarrow()
    with one_line(ValueError, f"{path} is not a whole Parquet file"):
        file = library.ParquetFile(str(path))
        yield file.schema_arrow.names
        for batch in file.iter_batches():
            yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def table(path: str, data: DataConfig) -> Dataset:
    """Return a table as a data set, of which a fifth, always the same, is the test set; columns are standardized."""
    found = read_table(path, labeled=True)
    train, test = held_out("table", found.rows, found.numbers)
    encode = Standardized.by(train[0])
    return of_parts(Path(path).stem, train, test, encode, max(2, len(found.classes)), classes=found.classes)
