"""SCAFFOLD: a closed form, an independent implementation, resuming after a crash at any write, hostile payloads."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from feddf import RunFolder, build, load, run_experiment
from feddf.admit import admit
from feddf.client import combine_halves, local_update
from feddf.config import ClientsConfig, ConfigError, LocalConfig
from feddf.data.datasets import plain
from feddf.engines import in_process
from feddf.fusion.average import average, fedavg
from feddf.fusion.scaffold import CONTROL, scaffold
from feddf.outputs import classes
from feddf.rounds import Federation, run_rounds
from feddf.runs.spool import LOST, ClientStates
from feddf.runtime import atomic
from feddf.states import digest
from feddf.types import (
    Client,
    Examples,
    Failure,
    Inputs,
    Job,
    Part,
    Prototype,
    Reply,
    Resources,
    ServerState,
    Steps,
    Training,
)

# Client k has the loss a_k/2 (w − b_k)²; the optimum of all is Σ a_k b_k / Σ a_k.
CURVATURE, CENTER = np.array([1.0, 4.0, 2.0, 0.5]), np.array([0.0, 1.0, -2.0, 5.0])
RATE, STEPS = 0.1, 5


def quadratic(model: nn.Module, training: Training) -> Steps:
    """A client's quadratic loss, whose number is the label of its examples."""

    def loss(outputs: Tensor, labels: Tensor, inputs: Tensor) -> Tensor:
        a, b = torch.tensor(CURVATURE)[labels], torch.tensor(CENTER)[labels]
        return (a / 2 * (outputs[:, 0].double() - b) ** 2).mean().float()

    return Steps(loss=loss)


def weights_after(rounds: int, part: Part | None, folder: Path, clients: int, fraction: float) -> list[float]:
    """Return w after each round of FedAvg on the first so many of the quadratic clients, with a part added."""
    prototype = Prototype("w", partial(nn.Linear, 1, 1, bias=False))
    train = Examples(Inputs(torch.ones(clients, 1), plain), torch.arange(clients), classes(clients))
    members = [Client(f"c{k}", "w", torch.tensor([k])) for k in range(clients)]
    parts = (part,) if part else ()
    half = combine_halves([quadratic, *(one.half for one in parts)])
    local = LocalConfig(epochs=STEPS, batch_size=2, lr=RATE)
    fuse = fedavg(average)
    for one in parts:
        fuse = one.fuse(fuse)
    rounds_of = run_rounds(
        ServerState(0, {"w": {"weight": torch.tensor([[3.0]])}}),
        Federation(members, ClientsConfig(total=clients, fraction=fraction)),
        engine=ClientStates(folder).engine(in_process),
        train=partial(local_update, prototypes={"w": prototype}, train=train, local=local, half=half),
        fuse=fuse,
        parts=parts,
    )
    return [float(one.server.models["w"]["weight"]) for one in islice(rounds_of, rounds)]


def with_clients(count: int) -> Part:
    return scaffold(Resources({}, n_clients=lambda name: count))


def test_it_finds_the_optimum_where_fedavg_does_not(tmp_path: Path) -> None:
    optimum = float((CURVATURE[:2] * CENTER[:2]).sum() / CURVATURE[:2].sum())
    shrink = (1 - RATE * CURVATURE[:2]) ** STEPS  # what is left of w − b_k after a client's steps
    drifted = float(((1 - shrink) * CENTER[:2]).sum() / (1 - shrink).sum())
    plain_average = weights_after(60, None, tmp_path / "a", 2, 1.0)[-1]
    corrected = weights_after(60, with_clients(2), tmp_path / "b", 2, 1.0)[-1]
    assert plain_average == pytest.approx(drifted, abs=1e-5)
    assert corrected == pytest.approx(optimum, abs=1e-5)
    assert abs(drifted - optimum) > 0.05


def test_it_is_the_papers_algorithm(tmp_path: Path) -> None:
    """Against NumPy, five rounds with two of four clients in each (Karimireddy et al. 2020, Algorithm 1, option II)."""
    cohorts: list[list[int]] = []
    part = with_clients(4)

    def noting(inner: Any) -> Any:
        def fuse(server: ServerState, updates: Sequence[Any], seed: int) -> Any:
            cohorts.append([int(update.client_id[1:]) for update in updates])
            return inner(server, updates, seed)

        return part.fuse(fuse)

    found = weights_after(5, replace(part, fuse=noting), tmp_path, 4, 0.5)
    assert len({tuple(cohort) for cohort in cohorts}) > 1, "not always the same clients"
    x, c, own, expected = 3.0, 0.0, np.zeros(4), []
    for cohort in cohorts:
        moved, changed = [], []
        for k in cohort:
            y = x
            for _ in range(STEPS):
                y -= RATE * (CURVATURE[k] * (y - CENTER[k]) - own[k] + c)
            new = own[k] - c + (x - y) / (STEPS * RATE)
            moved.append(y - x)
            changed.append(new - own[k])
            own[k] = new
        x += float(np.mean(moved))
        c += len(cohort) / 4 * float(np.mean(changed))
        expected.append(x)
    np.testing.assert_allclose(found, expected, atol=2e-5)


# Resuming

EXPERIMENT = load(
    "toy",
    [
        *("rounds=3", "clients.total=4", "clients.fraction=0.5", "local.epochs=1", "distill.steps=2"),
        *("run.engine=in-process", "fusion.method=feddf+scaffold", "partition.min_size=2"),
    ],
)


class Killed(BaseException):
    """Stands for SIGKILL: nothing in feddf catches it."""


def picture(folder: Path) -> dict[str, str]:
    """Return a digest of the server's state, with control variates, and of what the clients keep of it."""
    server, _ = RunFolder.open(folder).latest()
    assert server is not None
    states = {f"{whose} {name}": one for whose, found in server.memory.items() for name, one in found.items()}
    kept = {
        client: ClientStates(folder / "clients").read(Job(Client(client, ""), 0, {}, 0, counted=number))
        for client, number in server.counted.items()
    }
    assert all(kept.values()), "every client has the version that counts"
    return {
        "server": digest({**server.models, **states}),
        "counted": repr(sorted(server.counted.items())),
        **{client: digest(dict(found or {})) for client, found in kept.items()},
    }


def run_on(folder: Path) -> None:
    if not (folder / "config.toml").exists():
        shutil.rmtree(folder, ignore_errors=True)
        RunFolder.create(folder, EXPERIMENT)
    list(run_experiment(build(EXPERIMENT), RunFolder.open(folder)))


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], list[str]]:
    """Return a function that has the n-th write from now on end the process, before or after it took effect."""
    new_file, append = atomic.new_file, atomic.append_line
    counted: list[str] = []
    last: list[int | None] = [None]

    def counting(path: Path) -> None:
        if path.name == "key":  # the user's own, made once
            return
        counted.append(path.name)
        if len(counted) == last[0]:
            raise Killed

    class Counting:
        def __init__(self, path: Path, durable: bool = False) -> None:
            self._path, self._inner = path, new_file(path, durable)

        def __enter__(self) -> Path:
            counting(self._path)
            return self._inner.__enter__()

        def __exit__(self, *error: Any) -> bool | None:
            done = self._inner.__exit__(*error)
            if error[0] is None:
                counting(self._path)
            return done

    def appending(path: Path, line: str) -> None:
        counting(path)
        append(path, line)
        counting(path)

    monkeypatch.setattr("feddf.runtime.atomic.new_file", Counting)
    monkeypatch.setattr("feddf.runtime.atomic.append_line", appending)

    def kill_at(number: int | None) -> list[str]:
        counted.clear()
        last[0] = number
        return counted

    return kill_at


def test_a_kill_at_any_write_and_a_resume_give_the_same_bytes(
    tmp_path: Path, writes: Callable[[int | None], list[str]]
) -> None:
    names = writes(None)
    run_on(tmp_path / "whole")
    expected, total = picture(tmp_path / "whole"), len(names)
    assert sum("round-" in name for name in names) > 20, "clients' states, updates and checkpoints are among them"
    for number in range(1, total + 1, 3):  # every third: the two sides of one write are tried in turn
        folder = tmp_path / f"killed-{number}"
        writes(number)
        with pytest.raises(Killed):
            run_on(folder)
        writes(None)
        run_on(folder)
        assert picture(folder) == expected, number
        shutil.rmtree(folder)


def test_a_lost_state_is_refused_or_said(tmp_path: Path) -> None:
    run_on(tmp_path / "run")
    server, _ = RunFolder.open(tmp_path / "run").latest()
    assert server is not None
    loser = sorted(server.counted)[0]
    (mine,) = (tmp_path / "run" / "clients").glob(f"{loser}-*")
    shutil.rmtree(mine)
    for lost, outcome in (("refuse", "is lost"), ("anew", LOST)):
        folder = shutil.copytree(tmp_path / "run", tmp_path / lost)
        changes = [f"clients.lost_state={lost}", "rounds=5", "clients.fraction=1.0"]
        experiment = load(str(folder / "config.toml"), changes)
        (folder / "config.toml").unlink()
        records = list(run_experiment(build(experiment), RunFolder.create(folder, experiment)))
        first = records[0]
        if lost == "refuse":
            assert [one["client"] for one in first["dropped"] if outcome in one["reason"]] == [loser]
        else:
            assert first["lost_states"] == [loser]
            assert "lost_states" not in records[1]


def test_only_two_versions_are_kept_of_a_client(tmp_path: Path) -> None:
    run_on(tmp_path / "run")
    found = {path.name: len(list(path.glob("*.safetensors"))) for path in (tmp_path / "run" / "clients").iterdir()}
    assert found
    assert set(found.values()) <= {1, 2}
    last = RunFolder.open(tmp_path / "run").records()[-1]
    assert last["kept_by_clients"] == sum(path.stat().st_size for path in (tmp_path / "run" / "clients").rglob("*.*"))


# Hostile clients

JOB = Job(Client("a", "w"), 1, {"weight": torch.zeros(2, 3), "running_mean": torch.zeros(3)}, 0)
PART = with_clients(2)


def wrong() -> Iterator[tuple[str, Any]]:
    yield "huge", torch.full((2, 3), 1e6)
    yield "nan", torch.full((2, 3), math.nan)
    yield "shape", torch.zeros(3, 2)
    yield "type", torch.zeros(2, 3, dtype=torch.float64)


@pytest.mark.parametrize(("name", "tensor"), list(wrong()), ids=[name for name, _ in wrong()])
def test_a_wrong_control_variate_is_refused(name: str, tensor: Tensor) -> None:
    good = Reply("a", "w", 1, JOB.state, 5, payload={CONTROL: {"weight": torch.ones(2, 3)}})
    assert not isinstance(admit(good, {"a": JOB}, [PART]), Failure)
    assert isinstance(admit(replace(good, payload={CONTROL: {"weight": tensor}}), {"a": JOB}, [PART]), Failure)
    assert isinstance(admit(replace(good, payload={}), {"a": JOB}, [PART]), Failure)


def test_adam_is_refused_before_any_training() -> None:
    with pytest.raises(ConfigError, match=r"steps of SGD.*adam"):
        build(load("toy", ["fusion.method=fedavg+scaffold", "local.optimizer=adam"]))
