"""Data sets, their partition over clients, and the unlabeled pool."""

from __future__ import annotations

from feddf.data.datasets import DATASETS, Dataset, MissingDataError
from feddf.data.partition import dirichlet, iid, split

__all__ = ["DATASETS", "Dataset", "MissingDataError", "dirichlet", "iid", "split"]
