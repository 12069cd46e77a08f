"""What labels of each kind of output are: what is wrong with some, which examples are alike, and labels as texts."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from feddf.scores import CHANNELS, IGNORED

if TYPE_CHECKING:
    from feddf.outputs import Outputs

DECILES = 10  # groups by the size of a value


def no_complaint(labels: Tensor, outputs: Outputs) -> str | None:
    """Find nothing wrong with any labels."""
    return None


def _wrong_form(labels: Tensor, shape: tuple[int | None, ...], of_type: bool, dtype: str) -> str | None:
    found = tuple(labels.shape[1:])
    if found == shape and of_type:
        return None
    return f"labels of shape {found} and {labels.dtype}; for each input {shape or 'one'} of {dtype} are needed"


def wrong_classes(labels: Tensor, outputs: Outputs) -> str | None:
    """Return what is wrong with class numbers; at positions, some may be ignored."""
    if wrong := _wrong_form(labels, outputs.positions, labels.dtype == torch.int64, "int64"):
        return wrong
    known = labels[labels != IGNORED] if outputs.positions else labels
    low, high = (int(label) for label in known.aminmax()) if known.numel() else (0, 0)
    if low < 0 or (outputs.channels is not None and high >= outputs.channels):
        return f"labels from {low} to {high}, and must have 0 to {(outputs.channels or 0) - 1}"
    return None


def wrong_labels(labels: Tensor, outputs: Outputs) -> str | None:
    """Return what is wrong with labels: each is between 0 and 1, or NaN."""
    if wrong := _wrong_form(labels, (outputs.channels, *outputs.positions), labels.is_floating_point(), "float"):
        return wrong
    known = labels[~labels.isnan()]
    low, high = (float(one) for one in known.aminmax()) if known.numel() else (0, 1)
    return None if 0 <= low <= high <= 1 else f"labels from {low:g} to {high:g}, and must have 0 to 1, or NaN"


def wrong_values(labels: Tensor, outputs: Outputs) -> str | None:
    """Return what is wrong with values: each is a number, or NaN."""
    if wrong := _wrong_form(labels, (outputs.channels, *outputs.positions), labels.is_floating_point(), "float"):
        return wrong
    return "infinite values; give NaN for one that is not known" if bool(labels.isinf().any()) else None


def all_alike(labels: Tensor, outputs: Outputs) -> Tensor:
    """Return one group for all examples."""
    return torch.zeros(len(labels), dtype=torch.int64)


def main_class(labels: Tensor, outputs: Outputs) -> Tensor:
    """Return the class of each example; with positions the most frequent one that is not the background."""
    if not outputs.positions:
        return labels
    number, background = outputs.channels or 0, outputs.options.get("background", -1)
    counts = [(labels == one).flatten(1).sum(dim=1) - (one == background) * 10**9 for one in range(number)]
    return torch.stack(counts, dim=1).argmax(dim=1)


def rarest_label(labels: Tensor, outputs: Outputs) -> Tensor:
    """Return the label of each example that fewest others have; those without any are a group of their own."""
    has = (labels > 0.5).flatten(2).any(dim=2) if labels.ndim > 2 else labels > 0.5
    frequency = has.sum(dim=0).where(has, len(labels) + 1)
    return frequency.argmin(dim=1).where(has.any(dim=1), labels.shape[CHANNELS])


def decile(labels: Tensor, outputs: Outputs) -> Tensor:
    """Return to which tenth of all examples each belongs by its (first, mean) value; NaN counts as the smallest."""
    first = labels[:, 0].flatten(1).nanmean(dim=1) if labels.ndim > 2 else labels[:, 0]
    ranks = first.nan_to_num(-inf).argsort(stable=True).argsort()
    return ranks * DECILES // max(1, len(labels))


def as_numbers(target: Tensor, names: Sequence[str]) -> list[str]:
    """Return the values as texts."""
    return [", ".join(f"{value:g}" for value in row[: len(names)]) for row in target.tolist()]


def largest(target: Tensor, names: Sequence[str]) -> list[str]:
    """Return the name of the largest channel of each input."""
    return [names[number] for number in target.argmax(dim=CHANNELS).tolist()]


def all_positive(target: Tensor, names: Sequence[str]) -> list[str]:
    """Return the names of all channels that are more likely than not, with commas between them."""
    return [", ".join(name for name, p in zip(names, row, strict=True) if p > 0.5) for row in target.tolist()]
