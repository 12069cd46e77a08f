"""One noisy version of each release, however often a run begins again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from feddf.config.privacy import PrivacyConfig
from feddf.privacy.accountant import Mechanism, Plan, PrivacyError
from feddf.privacy.releases import LEDGER, Releases, read_ledger
from feddf.runs.spool import DiskSpool
from feddf.types import Client, Failure, Job, Reply, State, Update

PLAN = Plan(PrivacyConfig(level="client"), Mechanism(2.0), 5)


def opened(folder: Path, told: int = 0, plan: Plan = PLAN, store: str = "releases") -> Releases:
    releases = Releases()
    releases.open(folder, plan, DiskSpool(folder / store), told)
    return releases


def noisy() -> State:
    return {"w": torch.randn(3)}


def never() -> State:
    raise AssertionError("a second noisy version")


def test_a_release_is_made_once_and_found_again(tmp_path: Path) -> None:
    first = opened(tmp_path)
    made = first.once(1, "weights", noisy)
    assert torch.equal(first.once(1, "weights", never)["w"], made["w"])
    again = opened(tmp_path)
    assert torch.equal(again.once(1, "weights", never)["w"], made["w"])
    assert again.counts() == {"weights": 1}
    again.once(2, "weights", noisy)
    assert opened(tmp_path).counts() == {"weights": 2}


def test_a_release_that_was_stored_and_not_written_down_is_used_and_not_made_again(tmp_path: Path) -> None:
    releases = opened(tmp_path)
    releases.write_down = lambda *given: (_ for _ in ()).throw(KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        releases.once(1, "weights", noisy)
    assert not opened(tmp_path).counts()
    opened(tmp_path).once(1, "weights", never)
    assert opened(tmp_path).counts() == {"weights": 1}


def test_a_release_that_is_written_down_and_lost_is_not_made_again(tmp_path: Path) -> None:
    opened(tmp_path).once(1, "weights", noisy)
    next((tmp_path / "releases").glob("*.safetensors")).unlink()
    with pytest.raises(PrivacyError, match="would spend twice"):
        opened(tmp_path).once(1, "weights", noisy)


def test_another_version_in_the_store_is_refused(tmp_path: Path) -> None:
    opened(tmp_path).once(1, "weights", noisy)
    other = tmp_path / "other"
    other.mkdir()
    opened(other).once(1, "weights", noisy)
    for path in (other / "releases").iterdir():
        path.replace(tmp_path / "releases" / path.name)
    with pytest.raises(PrivacyError, match="not the release that is written down"):
        opened(tmp_path).once(1, "weights", never)


CHANGES: dict[str, Callable[[list[str]], list[str]]] = {
    "a line is taken out": lambda lines: [*lines[:1], *lines[2:]],
    "lines change places": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    "a round is changed": lambda lines: [line.replace('"round": 2', '"round": 7') for line in lines],
    "less noise was planned": lambda lines: [line.replace('"noise": 2.0', '"noise": 3.0') for line in lines],
    "a line is no JSON": lambda lines: [*lines[:2], "{", *lines[2:]],
    "the last lines are cut off": lambda lines: lines[:-1],
    "nothing is left": lambda lines: [],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_ledger_that_was_changed_is_refused(change: str, tmp_path: Path) -> None:
    releases = opened(tmp_path)
    for number in (1, 2, 3):
        releases.once(number, "weights", noisy)
    path = tmp_path / LEDGER
    path.write_text("".join(f"{line}\n" for line in CHANGES[change](path.read_text().splitlines())))
    with pytest.raises(PrivacyError):
        opened(tmp_path, told=3)


def test_a_line_that_a_crash_cut_off_was_never_used(tmp_path: Path) -> None:
    opened(tmp_path).once(1, "weights", noisy)
    with (tmp_path / LEDGER).open("a") as ledger:
        ledger.write('{"round": 2, "wh')
    releases = opened(tmp_path)
    assert releases.counts() == {"weights": 1}
    releases.once(2, "weights", noisy)
    assert [line.get("round") for line in read_ledger(tmp_path)] == [None, 1, 2]


@pytest.mark.parametrize("place", ["releases/round-0001-weights", "spool/round-0001-a", "checkpoints/round-0001"])
def test_a_ledger_that_is_gone_while_releases_are_here_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / place).parent.mkdir()
    (tmp_path / place).touch()
    with pytest.raises(PrivacyError, match="is gone"):
        opened(tmp_path)


@pytest.mark.parametrize("change", [{"times": 7}, {"sampling": 0.01}])
def test_fewer_steps_or_rarer_records_than_were_used_are_another_plan(change: dict[str, Any], tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(PrivacyError, match="another plan"):
        opened(tmp_path, plan=replace(PLAN, a_round=replace(PLAN.a_round, **change)))


def test_another_plan_is_refused_and_the_noise_is_remembered(tmp_path: Path) -> None:
    assert read_ledger(tmp_path) == []
    opened(tmp_path)
    assert read_ledger(tmp_path)[0]["plan"]["noise"] == 2.0
    with pytest.raises(PrivacyError, match="another plan"):
        opened(tmp_path, plan=replace(PLAN, a_round=Mechanism(1.0)))


def job(name: str, number: int = 1) -> Job:
    return Job(Client(name, "mlp"), number, {"w": torch.zeros(3)}, 7)


def test_updates_are_written_down_before_they_are_used_and_nobody_trains_twice(tmp_path: Path) -> None:
    kept = opened(tmp_path, store="spool").keep(job("a"), Update("a", "mlp", 1, {"w": torch.ones(3)}, 1))
    assert isinstance(kept, Update)
    assert json.loads((tmp_path / LEDGER).read_text().splitlines()[-1])["what"] == "a"
    again = opened(tmp_path, store="spool")
    recalled = again.recall(job("a"))
    assert recalled is not None
    assert torch.equal(recalled.state["w"], torch.ones(3))
    trained = list(again.engine(lambda function, jobs: map(function, jobs))(lambda one: one.id, [job("a"), job("b")]))
    assert isinstance(trained[0], Failure)
    assert trained[1:] == ["b"]
    assert list(again.engine(lambda function, jobs: map(function, jobs))(lambda one: one.id, [job("a", 2)])) == ["a"]


def test_a_reply_that_nobody_kept_is_written_down_all_the_same(tmp_path: Path) -> None:
    releases = opened(tmp_path)
    replies = {name: Reply(name, "mlp", 1, noisy(), 1) for name in "ab"}

    def train(function: object, jobs: list[Job]) -> Iterator[Reply | Failure]:
        yield from (replies[one.id] for one in jobs if one.id != "c")
        yield from (Failure(one.id, "it died") for one in jobs if one.id == "c")

    for outcome in releases.engine(train)(lambda one: one, [job("a"), job("b"), job("c")]):  # type: ignore[arg-type]
        if isinstance(outcome, Reply) and outcome.client_id == "a":
            releases.keep(job("a"), Update("a", "mlp", 1, outcome.state, 1))
    assert opened(tmp_path).counts() == {"a": 1, "b": 1}  # the third has released nothing


def test_what_is_spent_is_by_client() -> None:
    releases = Releases()
    for number, names in ((1, "ab"), (2, "bc"), (3, "b")):
        for name in names:
            releases.write_down(Reply(name, "m", number, {}, 1))
    assert releases.counts() == {"a": 1, "b": 3, "c": 1}
