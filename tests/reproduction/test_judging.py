"""Claims are judged by paired differences and their intervals, and the checks themselves are checked."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from typer.testing import CliRunner

from reproduction import NAMES, find
from reproduction.__main__ import app
from reproduction.artifact import Artifact, final_accuracy, rounds_to
from reproduction.checks import mistakes
from reproduction.judging import (
    CONTRADICTED,
    HOLDS,
    SUPPORTED,
    UNDECIDED,
    UNTESTED,
    Comparison,
    Finding,
    NotReached,
    above,
    fewer,
    interval,
    judge,
    larger_gap,
    not_below,
    verdict,
    within,
)

NUMBERS = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8)


def judged(comparison: Comparison, **cells: list[float]) -> Finding:
    finding = comparison.judge({name: dict(enumerate(values)) for name, values in cells.items()})
    assert finding is not None
    return finding


@given(NUMBERS)
def test_the_interval_is_scipys(differences: list[float]) -> None:
    n = len(differences)
    low, high = interval(differences)
    expected = stats.t.interval(0.95, n - 1, np.mean(differences), np.std(differences, ddof=1) / n**0.5)
    if np.std(differences) > 1e-9:
        assert (low, high) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert low <= np.mean(differences) + 1e-6
    assert high >= np.mean(differences) - 1e-6


def test_differences_are_paired_by_seed() -> None:
    """The seeds differ by tens of points, the methods by two on each of them: only pairs can tell."""
    finding = judged(above("a", "b"), a=[12.0, 52.1, 91.9], b=[10.0, 50.0, 90.0])
    assert finding.outcome == SUPPORTED
    assert finding.difference == pytest.approx(2.0)
    assert (finding.agree, finding.seeds) == (3, 3)
    values = {"a": {0: 12.0, 2: 92.0}, "b": {1: 0.0, 2: 90.0, 0: 10.0}}
    paired = above("a", "b").judge(values)
    assert paired is not None
    assert (paired.seeds, paired.difference) == (2, 2.0), "a seed that one side lacks does not count"


def test_three_seeds_decide_little_and_one_nothing() -> None:
    assert judged(above("a", "b"), a=[3.0, 4.0, 9.0], b=[1.0, 1.0, 1.0]).outcome == UNDECIDED  # 2, 3, 8
    assert judged(above("a", "b"), a=[9.0], b=[1.0]).outcome == UNDECIDED
    assert judged(above("a", "b"), a=[1.0, 1.1, 1.0], b=[3.0, 3.1, 3.1]).outcome == CONTRADICTED


def test_equal_numbers_decide_no_order() -> None:
    assert judged(above("a", "b"), a=[2.0] * 3, b=[2.0] * 3).outcome == UNDECIDED
    assert judged(within("a", "b", 0.0), a=[2.0] * 3, b=[2.0] * 3).outcome == SUPPORTED


def test_equivalence_is_supported_when_the_whole_interval_is_inside() -> None:
    assert judged(within("a", "b", 3.0), a=[1.0, 1.1, 0.9], b=[0.0] * 3).outcome == SUPPORTED
    assert judged(within("a", "b", 3.0), a=[-2.0, 3.0, 0.0], b=[0.0] * 3).outcome == UNDECIDED, (
        "equal means are not enough"
    )
    assert judged(within("a", "b", 3.0), a=[7.0, 7.1, 6.9], b=[0.0] * 3).outcome == CONTRADICTED
    assert judged(within("a", "b", 3.0), a=[-7.0, -7.1, -6.9], b=[0.0] * 3).outcome == CONTRADICTED


def test_a_margin_counts() -> None:
    assert judged(above("a", "b", 3.0), a=[2.0, 2.1, 1.9], b=[0.0] * 3).outcome == CONTRADICTED
    assert judged(not_below("a", "b", 3.0), a=[-2.0, -2.1, -1.9], b=[0.0] * 3).outcome == SUPPORTED
    gap = larger_gap(("a", "b"), ("c", "d"), "")
    assert judged(gap, a=[5.0, 5.1], b=[1.0, 1.0], c=[9.0, 9.0], d=[8.0, 8.0]).outcome == SUPPORTED


@pytest.mark.parametrize(
    ("ours", "other", "outcome"),
    [
        ([8.0, 8.0], [NotReached(12)] * 2, SUPPORTED),  # it takes 13 or more
        ([NotReached(12)] * 2, [8.0, 8.0], CONTRADICTED),
        ([NotReached(12)] * 2, [NotReached(12)] * 2, UNDECIDED),
        ([NotReached(15)] * 2, [NotReached(18)] * 2, UNDECIDED),  # 16 < 19 says nothing
        ([NotReached(150)] * 2, [246.0, 246.0], UNDECIDED),  # it may take 300
        ([8.0, NotReached(12)], [11.0, NotReached(12)], UNDECIDED),
    ],
)
def test_a_target_that_was_not_reached_is_a_bound(ours: list[float], other: list[float], outcome: str) -> None:
    assert judged(fewer("a", "b"), a=ours, b=other).outcome == outcome


def test_half_of_a_bound_is_no_measurement() -> None:
    half = Comparison("", {"a": -1, "b": 0.5}, low=0, or_equal=True)
    assert judged(half, a=[3.0, 3.0], b=[6.0, 6.0]).outcome == SUPPORTED
    assert judged(half, a=[7.0, 7.0], b=[NotReached(12)] * 2).outcome == UNDECIDED, "b may take 14 or more"
    missed = judged(half, a=[11.0, NotReached(12)], b=[8.0, 8.0])
    assert missed.means == {"a": "11, > 12", "b": 8.0}, "bounds have no mean"
    assert judged(half, a=[NotReached(12)] * 2, b=[8.0, 8.0]).outcome == CONTRADICTED


def test_the_verdict_needs_every_comparison() -> None:
    def of(*outcomes: str) -> str:
        return verdict([Finding("", outcome, 0, 0, 0, 0, 3, {}) for outcome in outcomes])

    assert of() == UNTESTED
    assert of(SUPPORTED, SUPPORTED) == HOLDS
    assert of(SUPPORTED, UNDECIDED) == UNDECIDED
    assert of(SUPPORTED, UNDECIDED, CONTRADICTED) == CONTRADICTED
    assert judge([above("a", "b")], {"a": {0: 1.0}}) == [], "what was not run is not judged"
    (missing,) = judge([above("a: x", "b")], {}, planned=["a", "b"])
    assert missing.outcome == UNDECIDED, "what is planned and not run leaves a claim undecided"
    assert missing.as_json()["difference"] is None


def test_an_interval_without_ends_is_json() -> None:
    found = judged(above("a", "b"), a=[9.0], b=[1.0])
    assert (found.low, found.high) == (-inf, inf)
    assert (found.as_json()["low"], found.as_json()["high"]) == (None, None)


class Curve:
    """A run of which only the accuracies and FedMA's notes are known."""

    def __init__(self, *values: float, layers: int = 1) -> None:
        self.values = list(values)
        self.records = [{"fedma": {"matched_layer": i % layers}} if layers > 1 else {} for i in range(len(values))]

    def curve(self) -> list[float]:
        return self.values


def test_rounds_to_a_target() -> None:
    assert rounds_to(0.5)(Curve(0.1, 0.5, 0.4)) == 2  # type: ignore[arg-type]
    missed = rounds_to(0.6)(Curve(0.1, 0.5, 0.4))  # type: ignore[arg-type]
    assert isinstance(missed, NotReached)
    assert repr(missed) == "> 3"


def test_only_whole_models_of_fedma_count() -> None:
    """Two of three of its rounds have models of which a part is not matched yet."""
    assert final_accuracy(Curve(0.1, 0.1, 0.3, 0.1, 0.1, 0.5, layers=3)) == pytest.approx(50)  # type: ignore[arg-type]
    assert final_accuracy(Curve(*[0.1] * 6, 0.5, 0.7)) == pytest.approx(60)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", NAMES)
def test_every_check_judges_numbers_of_which_the_verdict_is_known(name: str) -> None:
    assert list(mistakes(find(name))) == []


def wrong(artifact: Artifact, comparison: Comparison) -> Artifact:
    return replace(artifact, comparisons=[comparison, *artifact.comparisons[1:]])


def test_checks_that_judge_wrongly_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    table = find("table2")
    first = table.comparisons[0]
    backwards = replace(first, factors={cell: -factor for cell, factor in first.factors.items()})
    assert "not 'holds'" in next(mistakes(wrong(table, backwards)))
    assert "cannot fail" in next(mistakes(wrong(table, replace(first, low=-inf))))
    assert "not 'holds'" in next(mistakes(wrong(table, replace(first, low=100.0))))
    assert any("with equal numbers" in line for line in mistakes(wrong(table, replace(first, low=-1.0))))
    monkeypatch.setattr("reproduction.judging.interval", lambda differences: (differences[0], differences[0]))
    assert any("one seed" in line for line in mistakes(table))


def test_one_command_checks_the_checks() -> None:
    result = CliRunner().invoke(app, ["check"])
    assert result.exit_code == 0
    assert f"the checks of {len(NAMES)} artifacts judge as they should" in result.output
