from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conftest import Tiny
from feddf.admit import admit
from feddf.attacks.hostile import Forgery, Scene, active, attackers, forging
from feddf.attacks.on_weights import changes, with_trigger
from feddf.config import load, parse, with_values
from feddf.config.names import ATTACKS
from feddf.config.sections import AttackConfig
from feddf.engines import in_process
from feddf.experiments import matrix
from feddf.report.read import read_run
from feddf.runs.build import build
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder
from feddf.states import digest
from feddf.types import Failure, Job, State, Update

SMALL = {
    "data": {"name": "toy"},
    "prototypes": ["mlp"],
    "rounds": 2,
    "clients": {"number": 5, "fraction": 1.0},
    "local": {"epochs": 1},
    "pool": {"sources": ["plane"], "size": 60},
    "distill": {"steps": 10},
    "run": {"engine": "in-process"},
}


def round_of(tiny: Tiny) -> tuple[dict[str, Job], list[Update]]:
    jobs = {
        client.id: Job(client, 1, tiny.server.models[client.prototype], 7 + k)
        for k, client in enumerate(tiny.federation.clients)
    }
    return jobs, [tiny.local(job) for job in jobs.values()]


def reordered(forgery: Forgery) -> Forgery:
    """The tensors of every state in another order, as after a checkpoint."""

    def backwards(state: State) -> State:
        return dict(reversed(dict(state).items()))

    own = replace(forgery.own, state=backwards(forgery.own.state))
    honest = [replace(update, state=backwards(update.state)) for update in forgery.honest]
    return replace(forgery, own=own, honest=honest, job=replace(forgery.job, state=backwards(forgery.job.state)))


@pytest.mark.parametrize("kind", ATTACKS)
def test_every_attack_passes_the_gate_and_is_the_same_each_time(tiny: Tiny, kind: str) -> None:
    jobs, updates = round_of(tiny)
    attack = ATTACKS[kind](AttackConfig(kind=kind), Scene(tiny.prototypes, tiny.train, tiny.pool))
    for name in ("c0", "c1"):  # one with BatchNorm, one without
        forgery = Forgery(next(u for u in updates if u.client_id == name), jobs[name], updates[2:], 2)
        forged = [attack.forge(forgery), attack.forge(forgery), attack.forge(reordered(forgery))]
        assert len({digest({"": state}) for state in forged}) == 1
        assert isinstance(admit(replace(forgery.own, state=forged[0]), jobs), Update)
        if kind != "label-flip":  # which trains on other labels, and sends what comes of it
            assert digest({"": forged[0]}) != digest({"": forgery.own.state})


def test_attacks_do_what_their_formulas_say(tiny: Tiny) -> None:
    jobs, updates = round_of(tiny)
    mlps = [update for update in updates if update.prototype == "mlp"]
    forgery = Forgery(mlps[0], jobs[mlps[0].client_id], mlps[1:], 1)
    sent = forgery.job.state
    honest, own = changes(sent, mlps[1:]), changes(sent, [mlps[0]])[0]

    def forged(kind: str, scale: float | None = None) -> torch.Tensor:
        attack = ATTACKS[kind](AttackConfig(kind=kind, scale=scale), Scene(tiny.prototypes, tiny.train, tiny.pool))
        return changes(sent, [replace(mlps[0], state=attack.forge(forgery))])[0]

    close = {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(forged("sign-flip", 3.0), -3 * own, **close)
    torch.testing.assert_close(forged("ipm", 2.0), -2 * honest.mean(0), **close)
    torch.testing.assert_close(forged("alie", 1.0), honest.mean(0) - honest.std(0, correction=0), **close)
    torch.testing.assert_close(forged("mimic"), honest[0], **close)
    farthest = (honest - forged("min-max")).norm(dim=1).max()
    assert farthest == pytest.approx(float(torch.cdist(honest, honest).max()), rel=1e-3)


def test_labels_and_triggers_are_poisoned(tiny: Tiny) -> None:
    scene = Scene(tiny.prototypes, tiny.train, tiny.pool)
    flipped = ATTACKS["label-flip"](AttackConfig(kind="label-flip"), scene).poison(tiny.train)
    assert flipped.labels.tolist() == [(label + 1) % 3 for label in tiny.train.labels.tolist()]
    poisoned = ATTACKS["backdoor"](AttackConfig(kind="backdoor", target=2), scene).poison(tiny.train)
    assert poisoned.labels[::2].tolist() == [2] * 60
    assert torch.equal(poisoned.labels[1::2], tiny.train.labels[1::2])
    assert torch.equal(poisoned.inputs.raw[::2], with_trigger(tiny.train.inputs).raw[::2])  # type: ignore[index]
    assert torch.equal(poisoned.inputs.raw[1::2], tiny.train.inputs.raw[1::2])  # type: ignore[index]


def test_only_attackers_forge_and_only_in_attacked_rounds(tiny: Tiny) -> None:
    config = AttackConfig(kind="sign-flip", share=0.34, since=2, until=3)
    members = attackers(tiny.federation.clients, config, 0)
    assert len(members) == 2
    assert [active(config, number) for number in (1, 2, 3, 4)] == [False, True, True, False]
    attack = ATTACKS["sign-flip"](config, Scene(tiny.prototypes, tiny.train, tiny.pool))
    engine = forging(in_process, attack.forge, members, config)
    for number in (1, 2):
        jobs = [replace(job, round=number) for job in round_of(tiny)[0].values()]
        plain = {one.client_id: one for one in in_process(tiny.local, jobs) if not isinstance(one, Failure)}
        found = {one.client_id: one for one in engine(tiny.local, jobs) if not isinstance(one, Failure)}
        changed = {name for name in plain if digest({"": plain[name].state}) != digest({"": found[name].state})}
        assert changed == (members if number == 2 else set())


@pytest.mark.parametrize(
    ("kind", "scale", "method"),
    [
        ("scaled-layer", 1000.0, "fedavg"),
        ("scaled-layer", 1000.0, "feddf"),
        ("label-flip", 100.0, "feddf"),
        ("constant-class", None, "feddf"),
        ("noise", None, "feddf"),
    ],
)
def test_a_run_recovers_in_the_round_after_an_attack(
    tmp_path: Path, kind: str, scale: float | None, method: str
) -> None:
    """Two of five are hostile once: undefended it breaks that round or the next, defended it costs little."""
    base = with_values(parse(SMALL), {"attack.kind": kind, "attack.scale": scale, "attack.share": 0.4, "rounds": 3})
    one = with_values(base, {"attack.since": 2, "attack.until": 2, "local.epochs": 4, "fusion.method": method})
    reached: dict[str, list[float]] = {}
    for defence in ("none", "robust"):
        experiment = with_values(one, {"fusion.defence": defence})
        folder = RunFolder.create(tmp_path / defence, experiment)
        records = list(run_experiment(build(experiment), folder))
        assert [len(record["attack"]["hostile"]) for record in records] == [2, 2, 2]
        reached[defence] = read_run(folder.path).curve()
    assert min(reached["none"][1:]) < reached["none"][0] - 0.1
    assert min(reached["robust"][1:]) > reached["robust"][0] - 0.1


def test_the_matrix_is_run_written_and_gone_on_with(tmp_path: Path) -> None:
    base = with_values(parse(SMALL), {"rounds": 1})
    wanted = matrix.cells(["sign-flip", "backdoor"], ["fedavg", "feddf+robust"], [0.4], [1.0], [0, 1])
    assert len(wanted) == 12
    every = matrix.experiments(base, [cell for cell in wanted if cell.attack != "backdoor"])
    half = dict(list(every.items())[:4])
    assert [failure for _, failure in matrix.run_cells(half, tmp_path, 1, print)] == [""] * 4
    assert len(list(matrix.run_cells(every, tmp_path, 1, print))) == 4  # the other half
    found = matrix.Matrix.read(wanted, tmp_path)
    table = found.comparison()
    assert [row[0] for row in table.rows] == ["none", "sign-flip", "backdoor", "largest loss, in points"]
    assert table.rows[2][1:] == ["–", "–"]
    none, flipped = (found.mean(attack, "fedavg", 0.4, 1.0) for attack in ("none", "sign-flip"))
    assert found.worst()[0] == pytest.approx(none - flipped)
    assert "†" not in table.title
    (tmp_path / wanted[0].name / "failed.txt").write_text("too few clients")
    marked = matrix.Matrix.read(wanted, tmp_path).comparison()
    assert marked.rows[0][1:] == [f"{table.rows[0][1]} †", table.rows[0][2]]
    assert "ended early" in marked.title


def test_the_preset_is_what_the_page_says() -> None:
    experiment = load("attacked-digits")
    assert (experiment.clients.number, experiment.clients.fraction, experiment.attack.share) == (20, 1.0, 0.2)
