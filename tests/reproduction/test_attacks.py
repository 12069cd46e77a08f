from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import Tiny
from feddf.admit import admit
from feddf.config import ConfigError, load, parse, with_values
from feddf.config.names import ATTACKS
from feddf.config.sections import AttackConfig
from feddf.data.datasets import plain
from feddf.fusion.answers import ANSWERS, MEANS, as_answers
from feddf.outputs import classes
from feddf.report.read import read_run
from feddf.runs.build import Attack, build
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder
from feddf.states import digest
from feddf.types import Client, Inputs, Job, Reply, State, Update
from reproduction import attack_matrix, exchange
from reproduction.__main__ import ATTACKED, app
from reproduction.attack_matrix import COLUMNS, NAMES, NONE, Cell, Matrix, kept_table, kind_of, run_matrix
from reproduction.attacks import changes, with_trigger
from reproduction.hostile import attackers
from test_cli import feddf

ROOT = Path(__file__).parents[2]
SMALL = {
    "data": {"name": "toy"},
    "prototypes": ["mlp"],
    "rounds": 2,
    "clients": {"total": 5, "fraction": 1.0},
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


def attack_of(tiny: Tiny, name: str, members: set[str], **values: object) -> Attack:
    """Return an attack in which these clients are hostile."""
    config = AttackConfig(kind=kind_of(name), **{"share": len(members) / 6, **values})
    clients = tiny.federation.clients
    seed = next(seed for seed in range(1000) if attackers(clients, config, seed) == members)
    task = SimpleNamespace(train=tiny.train, pool=tiny.pool)
    experiment = SimpleNamespace(attack=config, seed=seed)
    parts = SimpleNamespace(
        experiment=experiment,
        task=task,
        prototypes=tiny.prototypes,
        federation=tiny.federation,
        train=tiny.local,
        method=SimpleNamespace(parts=tiny.parts),
    )
    return ATTACKS[config.kind](parts)


def forged(attack: Attack, jobs: dict[str, Job], updates: list[Update]) -> dict[str, Update]:
    """Return what the clients send, by name, in a round in which they have trained these updates."""
    outcomes = attack.engine(lambda function, jobs: iter(updates))(attack.train, list(jobs.values()))
    return {one.client_id: one for one in outcomes}


def backwards(state: State) -> State:
    """The tensors in another order, as after a checkpoint."""
    return dict(reversed(dict(state).items()))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "absent"])
def test_every_attack_passes_the_gate_and_is_the_same_each_time(tiny: Tiny, name: str) -> None:
    jobs, updates = round_of(tiny)
    reordered = [replace(update, state=backwards(update.state)) for update in updates]
    attack = attack_of(tiny, name, {"c0", "c1"})  # one with BatchNorm, one without
    sent = [forged(attack, jobs, updates), forged(attack, jobs, updates)]
    sent.append(forged(attack, {key: replace(job, state=backwards(job.state)) for key, job in jobs.items()}, reordered))
    for update in updates:
        assert len({digest({"": one[update.client_id].state}) for one in sent}) == 1
        same = digest({"": sent[0][update.client_id].state}) == digest({"": update.state})
        if update.client_id in ("c0", "c1"):
            assert isinstance(admit(sent[0][update.client_id], jobs), Update)
            if name in ("shifted-means", "huge-means"):
                assert same == (not any(key.endswith("running_mean") for key in update.state))
            else:  # label-flip trains on other labels and sends what comes of it; informed where nothing worse passes
                assert not same or name in ("label-flip", "informed")
        else:
            assert same


def test_attacks_do_what_their_formulas_say(tiny: Tiny) -> None:
    jobs, updates = round_of(tiny)
    mine, *others = [update for update in updates if update.prototype == "mlp"]
    sent = jobs[mine.client_id].state
    honest, own = changes(sent, others), changes(sent, [mine])[0]

    def change(name: str, scale: float | None = None) -> torch.Tensor:
        attack = attack_of(tiny, name, {mine.client_id}, scale=scale)
        return changes(sent, [forged(attack, jobs, updates)[mine.client_id]])[0]

    close = {"rtol": 1e-3, "atol": 1e-5}
    torch.testing.assert_close(change("sign-flip", 3.0), -3 * own, **close)
    torch.testing.assert_close(change("ipm", 2.0), -2 * honest.mean(0), **close)
    torch.testing.assert_close(change("alie", 1.0), honest.mean(0) - honest.std(0, correction=0), **close)
    torch.testing.assert_close(change("mimic"), honest[0], **close)
    farthest = (honest - change("min-max")).norm(dim=1).max()
    assert farthest == pytest.approx(float(torch.cdist(honest, honest).max()), rel=1e-3)


def said_by_attacker(name: str, part: str, payloads: dict[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return what the attacker "c" sends in place of its own where all others send these payloads."""
    clients = [Client(id, "mlp", None) for id in ("a", "b", "c")]
    config = AttackConfig(kind=kind_of(name), share=1 / 3)
    seed = next(seed for seed in range(100) if attackers(clients, config, seed) == {"c"})
    parts = SimpleNamespace(
        experiment=SimpleNamespace(attack=config, seed=seed),
        task=SimpleNamespace(
            train=SimpleNamespace(n_classes=3, outputs=classes(3)), pool=Inputs(torch.zeros(3, 1), plain)
        ),
        federation=SimpleNamespace(clients=clients),
        train=None,
        method=SimpleNamespace(parts=[SimpleNamespace(name=part, weights_up=False, weights_down=False)]),
    )
    kind = {"fd": MEANS, "answers": ANSWERS}[part]
    jobs = {client.id: Job(client, 1, {}, 0) for client in clients}
    replies = [Reply(id, "mlp", 1, {}, 5, payload={kind: payloads[id]}) for id in ("a", "b", "c")]
    sent = forged(ATTACKS[config.kind](parts), jobs, replies)
    assert [sent[id].payload[kind] for id in ("a", "b")] == [payloads["a"], payloads["b"]]
    return dict(sent["c"].payload[kind])


MEANS_OF = {
    "a": [[0.8, 0.1, 0.1], [0.0, 0.0, 0.0], [0.2, 0.3, 0.5]],  # a client without the label 1
    "b": [[0.6, 0.4, 0.0], [0.1, 0.7, 0.2], [0.0, 0.0, 0.0]],
    "c": [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]],
}
BY_HAND = np.array([[0.7, 0.25, 0.05], [0.1, 0.7, 0.2], [0.2, 0.3, 0.5]])  # for each label, of those who have it


def least_alike(mean: np.ndarray) -> list[int]:
    """Class by class: for the most likely one, that whose likelihood goes most against it from row to row."""
    return [int(np.cov(mean.T)[int(row.argmax())].argmin()) for row in mean]


def test_label_means_are_forged_as_the_attacks_on_predictions_say() -> None:
    def said(name: str) -> list[list[float]]:
        payloads = {id: {"means": torch.tensor(rows)} for id, rows in MEANS_OF.items()}
        sent = said_by_attacker(name, "fd", payloads)["means"]
        assert (sent.dtype, bool((sent.sum(dim=1) - 1).abs().max() < 1e-5)) == (torch.float32, True)
        return [[round(value, 4) for value in row] for row in sent.tolist()]

    assert said("lma") == np.eye(3)[[2, 0, 0]].tolist()
    assert said("cpa") == np.eye(3)[least_alike(BY_HAND)].tolist()
    assert said("hips") == [MEANS_OF["b"][0], MEANS_OF["b"][1], MEANS_OF["a"][2]]


def test_answers_for_a_pool_are_forged_as_the_attacks_say() -> None:
    logits = {id: torch.tensor(rows).clamp_min(1e-3).log() for id, rows in MEANS_OF.items()}
    honest = np.stack([logits[id].softmax(dim=1).numpy() for id in ("a", "b")])
    mean, inputs = honest.mean(axis=0), np.arange(3)
    doubting = honest[honest[:, inputs, mean.argmax(axis=1)].argmin(axis=0), inputs]
    wanted = {"lma": np.eye(3)[mean.argmin(axis=1)], "cpa": np.eye(3)[least_alike(mean)], "hips": doubting}
    for name, target in wanted.items():
        payloads = {id: {"outputs": as_answers(one, classes(3))} for id, one in logits.items()}
        sent = said_by_attacker(name, "answers", payloads)["outputs"]
        assert sent.dtype == torch.float16
        np.testing.assert_allclose(sent.float().softmax(dim=1).numpy(), target, atol=2e-3)


@pytest.mark.parametrize("name", ["absent", "lma"])
def test_a_run_of_fd_is_attacked(tmp_path: Path, name: str) -> None:
    values = {key: value for key, value in SMALL.items() if key not in ("pool", "distill")}
    experiment = parse({**values, "fusion": {"method": "fd"}, "attack": {"kind": kind_of(name), "share": 0.4}})
    parts, folder = build(experiment), RunFolder.create(tmp_path / "run", experiment)
    assert len(list(run_experiment(parts, folder))) == 2
    hostile = attackers(parts.federation.clients, experiment.attack, experiment.seed)
    saved, _ = folder.latest()
    assert saved is not None
    kept = saved.memory[MEANS]
    certain = {id for id, said in kept.items() if bool((said["means"].max(dim=1).values == 1).all())}
    assert certain == (hostile if name == "lma" else set())
    assert len(kept) == (5 if name == "lma" else 3)


def test_labels_and_triggers_are_poisoned(tiny: Tiny) -> None:
    flipped, poisoned = (
        attack_of(tiny, name, {"c0"}, target=2).train.hostilely.keywords["train"] for name in ("label-flip", "backdoor")
    )
    assert flipped.labels.tolist() == [(label + 1) % 3 for label in tiny.train.labels.tolist()]
    assert poisoned.labels[::2].tolist() == [2] * 60
    assert torch.equal(poisoned.labels[1::2], tiny.train.labels[1::2])
    assert torch.equal(poisoned.inputs.raw[::2], with_trigger(tiny.train.inputs).raw[::2])  # type: ignore[index]
    assert torch.equal(poisoned.inputs.raw[1::2], tiny.train.inputs.raw[1::2])  # type: ignore[index]


def test_only_attackers_forge_and_only_in_attacked_rounds(tiny: Tiny) -> None:
    members = {"c1", "c4"}
    attack = attack_of(tiny, "sign-flip", members, since=2, until=3)
    jobs, updates = round_of(tiny)
    for number in (1, 2, 3, 4):
        plain = [replace(update, round=number) for update in updates]
        found = forged(attack, jobs, plain)
        changed = {
            one.client_id for one in plain if digest({"": one.state}) != digest({"": found[one.client_id].state})
        }
        assert changed == (members if number in (2, 3) else set())


def test_a_class_that_is_not_there_and_a_name_that_is_not_known_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"attack\.target = 3: there are 3 classes"):
        build(with_values(parse(SMALL), {"attack.kind": kind_of("constant-class"), "attack.target": 3}))
    with pytest.raises(ConfigError, match=r"attack\.kind = 'sign-flip': .*module:attribute"):
        with_values(parse(SMALL), {"attack.kind": "sign-flip"})
    with pytest.raises(ConfigError, match=r"--attacks = 'sing-flip': did you mean 'sign-flip'"):
        kind_of("sing-flip")


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
    base = with_values(
        parse(SMALL), {"attack.kind": kind_of(kind), "attack.scale": scale, "attack.share": 0.4, "rounds": 3}
    )
    one = with_values(base, {"attack.since": 2, "attack.until": 2, "local.epochs": 4, "fusion.method": method})
    reached: dict[str, list[float]] = {}
    for defense in ("none", "robust"):
        experiment = with_values(one, {"fusion.defense": defense})
        folder = RunFolder.create(tmp_path / defense, experiment)
        records = list(run_experiment(build(experiment), folder))
        assert [len(record["attack"]["hostile"]) for record in records] == [2, 2, 2]
        reached[defense] = read_run(folder.path).curve()
    assert min(reached["none"][1:]) < reached["none"][0] - 0.1
    assert min(reached["robust"][1:]) > reached["robust"][0] - 0.1


def test_the_matrix_is_run_written_and_gone_on_with(tmp_path: Path) -> None:
    base = with_values(parse(SMALL), {"rounds": 1})
    wanted = attack_matrix.cells(["sign-flip", "backdoor"], ["fedavg", "feddf+robust"], [0.4], [1.0], [0, 1])
    assert len(wanted) == 12
    some = [cell for cell in wanted if cell.attack != "backdoor"]  # which needs images
    said: list[str] = []
    run_matrix(base, some[:4], tmp_path, 1, said.append)
    assert said == ["4 runs, 0 of them done", *(f"{cell.name}: done" for cell in some[:4])]
    said.clear()
    run_matrix(base, some, tmp_path, 1, said.append)
    assert said == ["8 runs, 4 of them done", *(f"{cell.name}: done" for cell in some[4:])]  # the other half
    assert (tmp_path / "matrix.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "matrix.csv").read_text().splitlines()) == 1 + 4
    found = Matrix(wanted, tmp_path)
    table = found.comparison()
    assert [row[0] for row in table.rows] == ["none", "sign-flip", "backdoor", "largest loss, in points"]
    assert table.rows[2][1:] == ["–", "–"]
    assert found.columns[0] == (0.4, 1.0, "fedavg")
    assert found.worst()[0] == pytest.approx(found.values[0][0] - found.values[1][0])
    assert "†" not in table.title
    (tmp_path / wanted[0].name / "failed.txt").write_text("too few clients")
    marked = Matrix(wanted, tmp_path).comparison()
    assert marked.rows[0][1:] == [f"{table.rows[0][1]} †", table.rows[0][2]]
    assert "ended early" in marked.title


def test_the_command_runs_attacks_in_this_process_and_in_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ATTACKED.parents[1]))
    small = ("rounds=1", "local.epochs=1", "--attacks", "sign-flip", "--methods", "fedavg", "--alphas", "1")
    tables = []
    for parallel in ("1", "2"):
        words = ("attacks", str(ATTACKED), *small, "--parallel", parallel, "--out", f"out{parallel}")
        done = feddf(*words, cwd=tmp_path, app=app)
        assert done.returncode == 0, done.stderr
        assert "largest loss" in done.stdout
        tables.append((tmp_path / f"out{parallel}" / "matrix.md").read_text())
    assert tables[0] == tables[1]


def test_the_configuration_is_what_the_page_says() -> None:
    experiment = load(str(ATTACKED))
    assert (experiment.clients.total, experiment.clients.fraction, experiment.attack.share) == (20, 1.0, 0.2)


def test_the_table_in_the_documents_is_that_of_the_kept_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert f"--show-kept -->\n{kept_table()}<!-- end of attacks -->" in text


def test_the_table_of_weights_and_answers_is_that_of_the_kept_runs() -> None:
    page = (ROOT / "docs" / "how-to" / "answers.md").read_text(encoding="utf-8")
    kept = json.loads((ROOT / exchange.KEPT).read_text(encoding="utf-8"))
    assert exchange.table(kept) in page
    assert f"All {len(kept)} runs" in page


def test_a_column_of_kept_runs_is_the_mean_over_its_whole_seeds(tmp_path: Path) -> None:
    folder, column = COLUMNS["robust"]
    for seed, accuracy in ((2, 0.8), (3, 0.6), (4, 0.1)):  # of seed 4 an attack is missing
        for attack in (NONE, *NAMES)[: None if seed < 4 else -1]:
            place = tmp_path / folder / Cell(attack, column, seed).name
            place.mkdir(parents=True)
            lost = 0.3 if attack == "mimic" else 0.1 if attack == "absent" else 0.0
            model = {"averaged": 0.1, "fused": accuracy - lost}
            record = {"round": 1, "models": {"mlp": model}, "clients": [], "ensemble": None}
            (place / "metrics.jsonl").write_text(json.dumps(record) + "\n")
            (place / "config.toml").write_text('rounds = 1\n[[prototypes]]\nmodel = "mlp"\n')
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in kept_table(tmp_path).splitlines()}
    assert rows["attack"] == "robust (2)"
    assert (rows["none"], rows["mimic"], rows["absent"]) == ("70.0", "40.0", "60.0")
    assert (rows["largest loss against none"], rows["largest loss against absent"]) == ("30.0", "20.0")
