"""Scores against scikit-learn, over random outputs with labels that are partly unknown."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics

from feddf import scores

seeds = st.integers(0, 10**6)


def known(outputs: torch.Tensor, labels: torch.Tensor, channel: int) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    said, true = outputs[:, channel].flatten().numpy(), labels[:, channel].flatten().numpy()
    return said[~np.isnan(true)], true[~np.isnan(true)]


@given(seeds, st.sampled_from([(), (4,), (3, 2)]))
def test_scores_of_classes(seed: int, positions: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(12, 4, *positions, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (12, *positions), generator=generator)
    y[torch.rand(y.shape, generator=generator) < 0.2] = scores.IGNORED
    y.view(-1)[0] = 1
    there = (y >= 0).flatten().numpy()
    said, true = z.argmax(dim=1).flatten().numpy()[there], y.flatten().numpy()[there]
    assert float(scores.accuracy(z, y)) == pytest.approx(metrics.accuracy_score(true, said))
    assert float(scores.mean_iou(z, y)) == pytest.approx(metrics.jaccard_score(true, said, average="macro"))
    assert float(scores.mean_dice(z, y)) == pytest.approx(metrics.f1_score(true, said, average="macro"))
    p = z.softmax(dim=1).movedim(1, -1).reshape(-1, 4).numpy()[there]
    loss = metrics.log_loss(true, p, labels=range(4))
    assert float(scores.perplexity(z, y)) == pytest.approx(np.exp(loss))
    assert float(scores.inverse_perplexity(z, y)) == pytest.approx(np.exp(-loss))


@given(seeds, st.sampled_from([(), (4,)]))
def test_scores_of_labels(seed: int, positions: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(15, 3, *positions, generator=generator)
    y = (torch.rand(z.shape, generator=generator) < 0.4).float()
    y[torch.rand(y.shape, generator=generator) < 0.2] = torch.nan
    pairs = [known(z, y, channel) for channel in range(3)]
    f1 = [metrics.f1_score(true, said > 0, zero_division=np.nan) for said, true in pairs]
    assert float(scores.macro_f1(z, y)) == pytest.approx(np.nanmean(f1))
    both = [(said, true) for said, true in pairs if 0 < true.mean() < 1]
    precision = np.mean([metrics.average_precision_score(true, said) for said, true in both])
    assert float(scores.average_precision(z, y)) == pytest.approx(precision)
    area = np.mean([metrics.roc_auc_score(true, said) for said, true in both])
    assert float(scores.auroc(z, y)) == pytest.approx(area)


@given(seeds)
def test_scores_of_values(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z, y = (torch.randn(20, 2, generator=generator, dtype=torch.float64) for _ in range(2))
    assert float(scores.r2(z, y)) == pytest.approx(metrics.r2_score(y, z))
    assert float(scores.mean_absolute_error(z, y)) == pytest.approx(metrics.mean_absolute_error(y, z))
    y[3:9, 1] = torch.nan
    pairs = [known(z, y, channel) for channel in range(2)]
    expected = np.mean([metrics.r2_score(true, said) for said, true in pairs])
    assert float(scores.r2(z, y)) == pytest.approx(expected)
    with_variance = torch.cat([z, torch.randn(20, 2, generator=generator, dtype=torch.float64)], dim=1)
    assert float(scores.r2(with_variance, y)) == pytest.approx(expected)


def test_coverage_is_that_of_a_normal_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    deviation = torch.rand(20_000, 1, generator=generator) + 0.5
    y = torch.randn(20_000, 1, generator=generator) * deviation
    outputs = torch.cat([torch.zeros_like(y), 2 * deviation.log()], dim=1)
    assert float(scores.coverage(outputs, y)) == pytest.approx(0.95, abs=0.01)
