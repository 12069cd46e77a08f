"""FedDF over Flower: the same bytes as in-process, whatever nodes do, and over a server that was killed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from feddf.cli import app as command
from feddf.config import ConfigError, Experiment, parse, with_values
from feddf.config.keys import nested
from feddf.flower import FedDF, FlowerSettings, announce, client_app, client_app_of, settings_of, strategy_of
from feddf.flower.wire import packed
from feddf.report.read import read_run
from feddf.rounds import QuorumError, sample
from feddf.runs.build import build
from feddf.runs.run import run_experiment
from feddf.runs.store import RunFolder, StoreError
from feddf.states import digest
from feddf.types import Part, Resources, Sent, Steps, TensorForm, Training
from flower.local_grid import LocalGrid, Node, died

TWO = [{"model": "mlp", "name": "narrow", "width": 8}, {"model": "mlp", "name": "wide", "width": 12}]
ODD = [{"model": "mlp", "name": "odd", "width": 7}, TWO[1]]  # 49 bits of an inner layer are no whole bytes
BASE: dict[str, Any] = {
    "rounds": 3,
    "prototypes": TWO,
    "data": {"name": "toy"},
    "clients": {"total": 5, "fraction": 0.6},
    "local": {"epochs": 2, "lr": 0.05},
    "pool": {"sources": ["plane"]},
    "distill": {"steps": 20, "eval_every": 10},
    "run": {"engine": "in-process"},
}


def experiment(changes: dict[str, Any] | None = None) -> Experiment:
    return parse(nested(BASE, changes or {}))


def settings(clients: int, changes: dict[str, Any] | None = None) -> FlowerSettings:
    return parse(nested({"clients": {"total": clients}}, changes or {}), FlowerSettings)


def grid_of(planned: Experiment, states: Path | None = None) -> LocalGrid:
    app, number = client_app_of(planned, states=states), planned.clients.total
    return LocalGrid({1000 + 7 * place: Node(app, {"partition-id": place}) for place in range(number)})


def strategy(planned: Experiment, folder: Path, changes: dict[str, Any] | None = None) -> FedDF:
    return strategy_of(planned, folder, with_values(settings_of(planned), changes or {}), wait=0.0, poll=0.0)


class Killed(BaseException):
    """What ends a server in the middle of a round."""


def in_process(planned: Experiment, folder: Path) -> tuple[str, list[dict[str, Any]]]:
    run = RunFolder.create(folder, planned)
    records = list(run_experiment(build(planned), run))
    saved, _ = run.latest()
    assert saved is not None
    return digest(saved.models), [without_times(record) for record in records]


def without_times(record: dict[str, Any]) -> dict[str, Any]:
    """Nor the size of what clients keep, which is not the server's to know over Flower."""
    return {key: value for key, value in record.items() if key not in ("seconds", "kept_by_clients")}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"fusion.method": "feddf-plus"},
        {"fusion.method": "fedavg+scaffold", "fusion.aggregation": "class-counts"},
        {"fusion.method": "fedavg", "fusion.momentum": 0.3, "fusion.drop_worst": "paper"},
        {"fusion.method": "fedavg", "local.prox_mu": 0.1, "prototypes": ["mlp"], "local.optimizer": "adam"},
        {"distill.early_stopping": "held-out-loss", "data.validation": 0.0, "clients.fraction": 1.0},
        {"run.log_ensemble": False},
        {"fusion.method": "fedma", "rounds": 5},
        {"fusion.method": "fedma", "fedma.own_start": False, "prototypes": ["mlp"]},
        {"local.binary": "error-feedback", "prototypes": ODD},
        {"local.binary": "straight-through", "fusion.method": "fedavg+class-rows", "prototypes": ODD[:1]},
    ],
    ids=lambda changes: "-".join([*changes, changes.get("fusion.method", "plain")]),
)
def test_same_bytes_and_records_as_in_process(tmp_path: Path, changes: dict[str, Any]) -> None:
    planned = experiment(changes)
    expected = in_process(planned, tmp_path / "here")
    over = strategy(planned, tmp_path / "flower")
    result = over.start(grid_of(planned, tmp_path / "states"))
    records = [without_times(record) for record in RunFolder.open(tmp_path / "flower").records()]
    assert (digest(over.models), records) == expected
    assert digest({"all": result.arrays.to_torch_state_dict()}) == digest(
        {"all": packed(over.models).to_torch_state_dict()}
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"fusion.method": "fedavg+scaffold"}, {"fusion.method": "fedma"}, {"local.binary": "error-feedback"}],
    ids=["plain", "with states", "with layers that grow", "binarized"],
)
def test_a_killed_server_goes_on_at_its_round_and_trains_nobody_twice(tmp_path: Path, changes: dict[str, Any]) -> None:
    planned = experiment({"rounds": 4, **changes})
    expected = in_process(planned, tmp_path / "here")

    def die_in_mid_round(message: Message, reply: Message | None) -> Message | None:
        if message.content["config"]["server-round"] == 2:
            raise Killed
        return reply

    grid = grid_of(planned, tmp_path / "states")
    second = [client.id for client in sample(build(planned).federation, 2)]
    victim = grid.nodes[1000 + 7 * int(second[-1].removeprefix("client-"))]
    victim.behave = die_in_mid_round
    with pytest.raises(Killed):
        strategy(planned, tmp_path / "run").start(grid)
    victim.behave = None
    done = {number: node.asked.count("train") for number, node in grid.nodes.items()}
    again = grid_of(planned, tmp_path / "states")  # a new server, and nodes with ids of their own
    again.nodes = {number + 500: node for number, node in again.nodes.items()}
    over = strategy(planned, tmp_path / "run")
    over.start(again)
    records = [without_times(record) for record in RunFolder.open(tmp_path / "run").records()]
    assert (digest(over.models), records) == expected
    assert sum(done.values()) + sum(node.asked.count("train") for node in again.nodes.values()) <= 4 * 3 + 3


def test_a_finished_update_survives_a_server_killed_in_its_round(tmp_path: Path) -> None:
    planned = experiment({"rounds": 1, "clients.fraction": 1.0})
    grid = grid_of(planned)

    pulled: list[str] = []
    honest = grid.pull_messages

    def pull_then_die(message_ids: Any) -> Any:
        replies = list(honest(message_ids))
        trained = [reply for reply in replies if reply.metadata.message_type == "train"]
        if trained and len(pulled) == 2:
            raise Killed
        pulled.extend(reply.metadata.message_id for reply in trained)
        return replies

    grid.pull_messages = pull_then_die  # type: ignore[method-assign]
    with pytest.raises(Killed):
        strategy(planned, tmp_path / "run").start(grid)
    again = grid_of(planned)
    over = strategy(planned, tmp_path / "run")
    over.start(again)
    assert digest(over.models) == in_process(planned, tmp_path / "here")[0]
    assert sum(node.asked.count("train") for node in again.nodes.values()) == 5 - 2


def test_dead_and_late_nodes_are_recorded_under_their_own_names(tmp_path: Path) -> None:
    planned = experiment({"rounds": 1, "clients.fraction": 1.0})
    grid = grid_of(planned)
    grid.nodes[1000].behave = died
    grid.nodes[1007].behave = lambda message, reply: None
    over = strategy(planned, tmp_path / "run", {"clients.timeout": 0.5})
    over.start(grid)
    (record,) = RunFolder.open(tmp_path / "run").records()
    dropped = {one["client"]: one["reason"] for one in record["dropped"]}
    assert record["clients"] == ["client-2", "client-3", "client-4"]
    assert dropped == {
        "client-0": "Flower's error 5: Error: Node Unavailable",
        "client-1": "no answer within 0.5 s",
    }


def test_a_client_that_is_away_is_missed_and_taken_back(tmp_path: Path) -> None:
    planned = experiment({"rounds": 2, "clients.fraction": 1.0})
    grid = grid_of(planned)
    strategy(planned, tmp_path / "run").start(grid, num_rounds=1)
    grid.nodes[1014].online = False
    over = strategy(planned, tmp_path / "run")
    over.start(grid, num_rounds=2)
    grid.nodes[1014].online = True
    over = strategy(planned, tmp_path / "run")
    over.start(grid, num_rounds=3)
    records = RunFolder.open(tmp_path / "run").records()
    assert [len(record["clients"]) for record in records] == [5, 4, 5]
    assert records[1]["dropped"] == [{"client": "client-2", "reason": "it was not connected for 0 s"}]


def test_too_few_to_begin_with_is_said(tmp_path: Path) -> None:
    planned = experiment()
    grid = grid_of(planned)
    for number in (1000, 1007, 1014):
        grid.nodes[number].online = False
    with pytest.raises(QuorumError, match=r"2 of 5 clients .*; at least 3 are needed"):
        strategy(planned, tmp_path / "run").start(grid)


def test_flowers_own_loop_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    planned = experiment()
    over, grid = strategy(planned, tmp_path / "run"), grid_of(planned)
    nothing, arrays = ConfigRecord(), packed(over.models)
    for piece in (
        lambda: Strategy.start(over, grid, arrays, num_rounds=3),
        lambda: over.configure_train(1, arrays, nothing, grid),
        lambda: over.aggregate_train(1, []),
        lambda: over.configure_evaluate(1, arrays, nothing, grid),
        lambda: over.aggregate_evaluate(1, []),
    ):
        with pytest.raises(NotImplementedError, match=r"call start\(\)"):
            piece()
    assert not any(node.asked for node in grid.nodes.values())


def line(width: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def some(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed))
    return inputs, (inputs.sum(1) > 0).long()


def data(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
    return some(64, int(context.node_config["partition-id"]))


def server_of(
    folder: Path, prototypes: dict[str, Any], changes: dict[str, Any], clients: int = 2, **given: Any
) -> FedDF:
    return FedDF(prototypes, settings(clients, changes), folder=folder / "run", poll=0.0, **given)


def grid_with(app: ClientApp, numbers: Iterable[int]) -> LocalGrid:
    return LocalGrid({number: Node(app, {"partition-id": number}) for number in numbers})


def own_app() -> ClientApp:
    """An app as Flower's tutorials have it: it knows nothing of feddf."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model = line(6)()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        inputs, labels = data(context)
        for _ in range(20):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for weight in model.parameters():
                    weight -= 0.5 * weight.grad
        metrics = MetricRecord({"num-examples": 64, "train_loss": loss.item(), "history": [0.1, 0.2]})
        arrays = ArrayRecord(model.state_dict())
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        metrics = MetricRecord({"num-examples": 10 + number, "score": float(number)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def test_an_app_that_knows_nothing_of_feddf_takes_part(tmp_path: Path) -> None:
    changes = {"distill.early_stopping": "none", "distill.steps": 30, "flower.evaluate_fraction": 1.0}
    server = server_of(tmp_path, {"net": line(6)}, changes, clients=3, pool=some(50, 8)[0], test=some(200, 9))
    seen: list[int] = []

    def evaluate_fn(number: int, arrays: ArrayRecord) -> MetricRecord:
        seen.append(number)
        return MetricRecord({"own": float(len(arrays))})

    grid, told = grid_with(own_app(), range(3)), ConfigRecord({"lr": 0.5})
    result = server.start(grid, num_rounds=2, evaluate_fn=evaluate_fn, train_config=told)
    records = RunFolder.open(tmp_path / "run").records()
    assert records[-1]["clients"] == ["node-0", "node-1", "node-2"]
    assert records[-1]["models"]["net"]["fused"] > 0.8
    assert seen == [0, 1, 2]
    assert 0 < result.train_metrics_clientapp[2]["train_loss"] < result.train_metrics_clientapp[1]["train_loss"]
    assert records[1]["metrics_of_clients"] == dict(result.train_metrics_clientapp[2])
    assert result.evaluate_metrics_serverapp[2] == {"own": 4.0}
    expected = (10 * 0 + 11 * 1 + 12 * 2) / 33
    assert result.evaluate_metrics_clientapp[2]["score"] == pytest.approx(expected)
    assert records[1]["evaluated_by_clients"]["means"]["score"] == pytest.approx(expected)


def test_clients_of_ones_own_and_of_feddf_with_different_architectures_learn_together(tmp_path: Path) -> None:
    ours = client_app({"net": line(6), "big": line(20)}, data, prototype="big", test=data)
    theirs = announce(own_app(), "net", name=lambda context: "hospital")
    grid = LocalGrid({5: Node(ours, {"partition-id": 1}), 6: Node(theirs, {"partition-id": 2})})
    changes = {"distill.steps": 40, "distill.eval_every": 20, "local.epochs": 20}
    known = {"net": line(6), "big": line(20)}
    server_of(tmp_path, known, changes, pool=some(50, 8)[0], validation=some(50, 7)).start(grid, num_rounds=2)
    record = RunFolder.open(tmp_path / "run").records()[-1]
    assert record["clients"] == ["client-1", "hospital"]
    assert record["models"]["net"]["fused"] > 0.8
    assert record["models"]["big"]["fused"] > 0.8
    assert json.loads((tmp_path / "run" / "registry.json").read_text()) == {"client-1": "big", "hospital": "net"}


def test_clients_try_models_whose_layers_have_grown(tmp_path: Path) -> None:
    app = client_app({"net": line(6)}, data, test=data)
    fusion = {"fusion.method": "fedma", "fusion.defense": "none", "fedma.growth": 2.0}
    server = server_of(tmp_path, {"net": line(6)}, {**fusion, "local.epochs": 1, "flower.evaluate_fraction": 1.0})
    server.start(grid_with(app, (1, 2)), num_rounds=2)
    assert len(server.models["net"]["0.weight"]) > 6
    for record in RunFolder.open(tmp_path / "run").records():
        assert (record["dropped"], record["evaluated_by_clients"]["failures"]) == ([], {})
        assert 0 <= record["evaluated_by_clients"]["means"]["accuracy"] <= 1


AVERAGED = {"fusion.method": "fedavg"}


def test_without_labels_on_the_server_accuracies_are_not_known(tmp_path: Path) -> None:
    server_of(tmp_path, {"net": line(6)}, AVERAGED).start(grid_with(own_app(), range(2)), num_rounds=1)
    run = read_run(tmp_path / "run")
    assert run.records[0]["models"]["net"] == {"averaged": None, "fused": None}
    assert all(value != value for value in run.curve())


def test_its_folder_can_be_reported_on_but_not_resumed_by_the_command(tmp_path: Path) -> None:
    planned = experiment({"rounds": 1})
    strategy(planned, tmp_path / "run").start(grid_of(planned))
    assert CliRunner().invoke(command, ["report", str(tmp_path / "run")]).exit_code == 0
    with pytest.raises(StoreError, match="is a run over Flower; start its server app again"):
        RunFolder.open(tmp_path / "run").experiment()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fusion.method": "fedma"}, "fusion.defense = 'robust': FedMA's layers .*; leave it at 'none'"),
        ({"pool": None}, "pool = nothing: .* needs unlabeled inputs"),
        ({"validation": None}, "validation = nothing: .* distill.early_stopping = 'held-out-loss'"),
        ({"clients": {}}, "the key 'clients.total' is missing"),
        ({"flower.evaluate_fraction": 1.1}, "flower.evaluate_fraction = 1.1: "),
        ({"clients": 3}, "clients = 3: it is a section"),
        ({"validation": (some(9, 2)[0], some(8, 2)[1])}, "validation = .* 9 inputs and 8 labels"),
        ({"validation": (some(9, 2)[0], some(9, 2)[1] + 2)}, "validation = .* must have 0 to 1"),
        ({"test": (some(9, 2)[0], some(9, 2)[1].float())}, "test = .* int64 labels"),
        ({"client_names": {"seven": "a"}}, "client_names = .* numbers"),
        ({"clients.fractoin": 0.5}, "unknown key 'clients.fractoin'; did you mean 'clients.fraction'?"),
        ({"clients.quorum": 2.0}, "clients.quorum = 2.0: "),
        ({"prototypes": {}}, "prototypes = \\[\\]: "),
        ({"prototypes": {"a": line(3), "b": lambda: nn.Linear(4, 5)}}, "prototypes = .* same number of logits"),
        ({"prototypes": {"a": lambda: nn.Linear(9, 2)}}, "prototypes = 'a': .* the server's inputs"),
        ({"prototypes": {"a": lambda: nn.Linear(4, 2).to(torch.bfloat16)}}, "prototypes = 'a'"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    changes = {name: value for name, value in given.items() if "." in name or name == "clients"}
    own = {name: value for name, value in given.items() if name not in changes}
    usual: dict[str, Any] = {"prototypes": {"net": line(6)}, "pool": some(9, 1)[0], "validation": some(9, 2)}
    with pytest.raises(ConfigError, match=said) as caught:
        FedDF(settings=settings(3, changes), folder=tmp_path / "run", **{**usual, **own})
    assert "\n" not in str(caught.value)


def test_a_folder_with_other_settings_is_refused(tmp_path: Path) -> None:
    planned = experiment({"rounds": 1})
    strategy(planned, tmp_path / "run").start(grid_of(planned))
    with pytest.raises(ConfigError, match=r"seed: 0 -> 1; use another folder"):
        strategy(experiment({"rounds": 1, "seed": 1}), tmp_path / "run").start(grid_of(planned))


def test_a_folder_with_another_architecture_of_that_name_is_refused(tmp_path: Path) -> None:
    grid = grid_with(own_app(), range(2))
    server_of(tmp_path, {"net": line(6)}, AVERAGED).start(grid, num_rounds=1)
    with pytest.raises(ConfigError, match=r"prototypes = 'net': .* another architecture"):
        server_of(tmp_path, {"net": line(7)}, AVERAGED).start(grid, num_rounds=2)


def test_a_train_config_of_ones_own_belongs_to_the_run(tmp_path: Path) -> None:
    grid, net = grid_with(own_app(), range(2)), {"net": line(6)}
    server_of(tmp_path, net, AVERAGED).start(grid, num_rounds=1, train_config=ConfigRecord({"lr": 0.1}))
    with pytest.raises(ConfigError, match=r"flower\.train_config\.lr: 0\.1 -> 9\.0"):
        server_of(tmp_path, net, AVERAGED).start(grid, num_rounds=2, train_config=ConfigRecord({"lr": 9.0}))


def test_a_shard_without_the_last_class_discloses_all_the_classes(tmp_path: Path) -> None:
    def only_zeros(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        return some(20, 3)[0], torch.zeros(20, dtype=torch.int64)

    grid = LocalGrid({5: Node(client_app({"net": line(6)}, only_zeros), {"partition-id": 1})})
    changes = {"ensemble.weights": "class-counts", "distill.steps": 2, "local.epochs": 1}
    server = server_of(tmp_path, {"net": line(6)}, changes, clients=1, pool=some(9, 1)[0], validation=some(9, 2))
    sent: list[Any] = []

    def seen(message: Message, answer: Message | None) -> Message | None:
        assert answer is not None
        sent.append((message.content["config"]["parts"], answer.content["payload"]["class counts/counts"].numpy()))
        return answer

    grid.nodes[5].behave = seen
    server.start(grid, num_rounds=1)
    (record,) = RunFolder.open(tmp_path / "run").records()
    assert (record["clients"], record["dropped"]) == (["client-1"], [])
    ((named, counts),) = sent
    assert (json.loads(named), counts.tolist()) == ({"class-counts": {}}, [20, 0])


# Parts of a method, at the client


def remember(model: nn.Module, training: Training) -> Steps:
    """Keep the numbers of all rounds that counted, and tell how many there are."""
    before = training.job.kept.get("rounds", {"numbers": torch.zeros(0, dtype=torch.int64)})["numbers"]
    now = torch.cat([before, torch.tensor([training.job.round])])
    return Steps(
        finish=lambda: Sent(payload={"rounds": {"n": torch.tensor(len(now))}}, kept={"rounds": {"numbers": now}})
    )


def remembering(resources: Resources) -> Part:
    form = {"rounds": {"n": TensorForm((), torch.int64, 0, 99)}}
    return Part(half=remember, form=lambda job: form, keeps=True)


def kept_over(
    tmp_path: Path, rounds: int, *, lost: str = "refuse", states: Path | None = None, **options: Any
) -> list[dict[str, Any]]:
    """Rounds of two clients with a part of one's own, which the server finds by its place and clients by its name."""
    name = f"{__name__}:remembering"
    app = client_app(
        {"net": line(6)},
        lambda context: some(20, 3),
        parts=options.get("parts", {name: remembering}),
        states=(lambda context: states / str(context.node_id)) if states else None,
    )
    changes = {**AVERAGED, "fusion.parts": [name], "clients.lost_state": lost}
    server_of(tmp_path, {"net": line(6)}, changes).start(grid_with(app, (1, 2)), num_rounds=rounds)
    return RunFolder.open(tmp_path / "run").records()


def test_a_part_of_ones_own_keeps_a_state_at_the_client(tmp_path: Path) -> None:
    kept_over(tmp_path, 3, states=tmp_path / "states")
    for node in (1, 2):
        files = sorted((tmp_path / "states" / str(node)).rglob("*.safetensors"))
        assert [path.stem for path in files] == ["round-0002", "round-0003"]  # the last that counted, and the newest
        (numbers,) = load_file(files[-1]).values()
        assert numbers.tolist() == [1, 2, 3]


@pytest.mark.parametrize("lost", ["refuse", "anew"])
def test_a_client_whose_state_is_lost_is_refused_or_begins_anew(tmp_path: Path, lost: str) -> None:
    kept_over(tmp_path, 2, lost=lost, states=tmp_path / "states")
    shutil.rmtree(tmp_path / "states" / "2")
    records = kept_over(tmp_path, 3, lost=lost, states=tmp_path / "states")
    if lost == "refuse":
        assert records[-1]["clients"] == ["client-1"]
        (dropped,) = records[-1]["dropped"]
        assert dropped["client"] == "client-2"
        assert "the state that it kept in round 2 is lost" in dropped["reason"]
    else:
        assert (records[-1]["clients"], records[-1]["lost_states"]) == (["client-1", "client-2"], ["client-2"])
        (newest,) = (tmp_path / "states" / "2").rglob("round-0003.safetensors")
        assert next(iter(load_file(newest).values())).tolist() == [3]


def test_a_client_without_a_place_for_its_state_says_so(tmp_path: Path) -> None:
    with pytest.raises(QuorumError, match="give client_app a folder for it, as states"):
        kept_over(tmp_path, 1)


def test_a_client_imports_nothing_that_a_server_names(tmp_path: Path) -> None:
    with pytest.raises(QuorumError, match=r"does not know the part .*remembering'; give it to client_app as parts"):
        kept_over(tmp_path, 1, states=tmp_path / "states", parts=None)


def test_a_client_says_which_architecture_it_has() -> None:
    with pytest.raises(ConfigError, match="say which of a, b this client has"):
        client_app({"a": line(3), "b": line(4)}, lambda context: some(3, 1))
