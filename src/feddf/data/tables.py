"""Tables of numbers: CSV and Parquet files, whose rows are inputs and one of whose columns may hold the labels.

``PATH#COLUMN`` names the column of labels; without it, a column with a usual name is taken as such.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from feddf.config.errors import one_line
from feddf.config.sections import DataConfig
from feddf.data.adapters import LABELS
from feddf.data.datasets import Dataset, Standardized, held_out, of_parts
from feddf.runtime.packages import pyarrow

SUFFIXES = (".csv", ".parquet")


@dataclass(frozen=True)
class Table:
    """The numbers of a table with the names of their columns, and the text of each row's label, if it has labels."""

    columns: tuple[str, ...]
    rows: Tensor
    labels: tuple[str, ...] = ()

    @property
    def classes(self) -> tuple[str, ...]:
        """The labels that occur, numbers in their order, then texts in theirs."""
        return tuple(sorted(set(self.labels), key=lambda one: (int(one) if one.isdigit() else inf, one)))

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


def read_table(name: str, *, labeled: bool = False) -> Table:
    """Return the table in ``PATH`` or ``PATH#COLUMN``; every column but that of the labels must hold numbers."""
    place, _, wanted = name.partition("#")
    path = Path(place).expanduser()
    if path.suffix.lower() not in SUFFIXES or not path.is_file():
        raise ValueError(f"there is no table {path}; known are files that end in {' or '.join(SUFFIXES)}")
    if path.suffix.lower() == ".parquet":
        library = pyarrow()
        with one_line(ValueError, f"{path} is not a whole Parquet file"):
            columns: dict[str, Sequence[Any]] = library.read_table(str(path)).to_pydict()
    else:
        columns = _csv(path)
    if wanted and wanted not in columns:
        raise ValueError(f"it has no column '{wanted}', but {', '.join(list(columns)[:8])}")
    label = wanted or next((one for one in columns if one.lower() in LABELS), "")
    if labeled and not label:
        raise ValueError(
            f"which column holds the labels? Name it: table:{name}#COLUMN ({', '.join(list(columns)[:8])})"
        )
    kept = tuple(one for one in columns if one != label)
    rows = torch.tensor([list(map(_number, columns[one])) for one in kept]).T.contiguous()
    if not rows.numel():
        raise ValueError(f"{path} has no rows of numbers")
    for row, column in (~rows.isfinite()).nonzero().tolist():
        remedy = "fill it in, leave it out, or name the column as the labels with #COLUMN"
        said = f"its column '{kept[column]}' has no number in row {row + 1}, but {columns[kept[column]][row]!r:.40}"
        raise ValueError(f"{said}; {remedy}")
    labels = (re.sub(r"^(\d+)\.0$", r"\1", str(one).strip()) for one in columns[label]) if label else ()
    return Table(kept, rows, tuple(labels))


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return nan


def _csv(path: Path) -> dict[str, Sequence[Any]]:
    """Return the columns of a CSV file by name; a first row of numbers alone is no header."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = [row for row in csv.reader(file) if row]
    header = rows[0] if rows else []
    if header and not any(map(isnan, map(_number, header))):
        header, rows = [str(number) for number in range(len(header))], [[], *rows]
    for number, row in enumerate(rows[1:], 2):
        if len(row) != len(header):
            raise ValueError(f"{path}: line {number} has {len(row)} values, and there are {len(header)} columns")
    return dict(zip(header, zip(*rows[1:], strict=True), strict=True)) if len(rows) > 1 else {}


def table(path: str, data: DataConfig) -> Dataset:
    """Return a table as a data set, of which a fifth, always the same, is the test set; columns are standardized."""
    found = read_table(path, labeled=True)
    train, test = held_out("table", found.rows, found.numbers)
    encode = Standardized.by(train[0])
    return of_parts(Path(path).stem, train, test, encode, max(2, len(found.classes)), classes=found.classes)
