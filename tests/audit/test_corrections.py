"""What a comparison with the paper and the cited methods' own code found, each as a test."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conftest import CLASSES, SHAPE, Tiny, stripes
from feddf.client import local_update
from feddf.config import DataConfig, DistillConfig, FedMAConfig, load, with_values
from feddf.data import cifar
from feddf.data.datasets import cifar10
from feddf.data.unlabeled import of_classes
from feddf.engines import in_process
from feddf.fusion.distill import distill
from feddf.fusion.early_stopping import EarlyStopping
from feddf.fusion.ensemble import CachedTargets
from feddf.fusion.fedma import layers_of, matched_average
from feddf.fusion.select import Dropped, drop_worst, released_rule
from feddf.models.large import VGG, vgg9_released
from feddf.models.small import MLP
from feddf.outputs import classes
from feddf.report.read import Run
from feddf.report.tables import compared
from feddf.runs.build import build, build_task
from feddf.runs.many import variant
from feddf.runs.methods import fedma
from feddf.states import init_state
from feddf.types import Client, Fused, Job, Method, Prototype, Resources, ServerState, Training, Update
from reproduction import tables, theorem


def test_the_released_rule_leaves_the_best_out_of_mean_and_deviation() -> None:
    accuracies = {"a": 0.30, "b": 0.50, "c": 0.50, "d": 0.50, "e": 0.99}
    rest = torch.tensor([0.30, 0.50, 0.50, 0.50], dtype=torch.float64)
    floor = float(rest.mean() - 1.5 * rest.std(correction=0))
    assert floor > 0.30  # with the best among them, the floor would be below 0.30
    assert released_rule(accuracies, 10, 1000) == Dropped(frozenset(), frozenset({"a"}))
    assert released_rule({**accuracies, "a": 0.11}, 10, 1000) == Dropped(frozenset({"a"}))


def test_a_client_below_the_released_floor_is_averaged_but_does_not_teach(tiny: Tiny) -> None:
    seen: list[list[tuple[str, bool]]] = []

    def inner(server: ServerState, updates: Any, seed: int) -> Fused:
        seen.append([(update.client_id, update.teaches) for update in updates])
        return Fused(server, server.models)

    updates = [Update(f"c{k}", "mlp", 1, tiny.server.models["mlp"], 20) for k in range(3)]
    rule = lambda accuracies, n_classes, n_examples: Dropped(frozenset({"c0"}), frozenset({"c1"}))  # noqa: E731
    measure = lambda given: {update.client_id: 0.1 * number for number, update in enumerate(given, 1)}  # noqa: E731
    fused = drop_worst(rule, measure, tiny.resources.labeled, inner)(tiny.server, updates, 0)
    assert seen == [[("c1", False), ("c2", True)]]
    assert fused.notes["dropped_worst"]["teachers"] == {"c1": 0.2}
    assert fused.notes["dropped_worst"]["clients"] == {"c0": 0.1}


def test_classes_without_names_are_chosen_and_avoided_by_number() -> None:
    labels = torch.arange(20) % 5
    chosen = of_classes(labels, 5, (), None, (0, 3), 0)
    assert set(labels[chosen].tolist()) == {1, 2, 4}
    assert set(labels[of_classes(labels, 5, (), (2, 4), (), 0)].tolist()) == {2, 4}
    assert len(set(labels[of_classes(labels, 5, (), 2, (0,), 0)].tolist()) - {0}) == 2
    with pytest.raises(ValueError, match="by number"):
        of_classes(labels, 5, (), None, ("cat",), 0)
    with pytest.raises(ValueError, match="has no class 7"):
        of_classes(labels, 5, (), (7,), (), 0)


def test_table_1_has_the_papers_targets_and_enough_rounds() -> None:
    assert {alpha: targets[0] for alpha, targets in tables.TARGETS["cifar10"].items()} == {1.0: 0.80, 0.1: 0.75}
    (longest,) = {cell.changes["rounds"] for cell in tables.TABLE1.cells}  # the same for every method
    assert longest > 546


def rising(scores: list[float]) -> Any:
    """Return a score that gives these values one after the other."""
    values = iter(scores)
    return lambda model: next(values)


def test_a_student_that_rises_from_below_a_good_start_is_not_stopped() -> None:
    config = DistillConfig(steps=100, eval_every=1, patience=2)
    student = nn.Linear(2, 2)
    snapshots = EarlyStopping(student, rising([0.9, 0.1, 0.2, 0.3, 0.4, 0.95]), config)
    assert [snapshots.enough(step, student, student) for step in range(1, 6)] == [False] * 5
    assert snapshots.best.best_step == 5
    falling = EarlyStopping(student, rising([0.9, 0.5, 0.4, 0.3]), config)
    assert [falling.enough(step, student, student) for step in range(1, 4)] == [False, False, True]
    assert falling.best.best_step == 0  # the start is still what is returned


def test_the_start_need_not_be_a_candidate() -> None:
    config = DistillConfig(steps=100, eval_every=1, patience=2, keep_init=False)
    snapshots = EarlyStopping(nn.Linear(2, 2), rising([0.9, 0.5, 0.4]), config)
    other = nn.Linear(2, 2)
    assert not snapshots.enough(1, other, other)
    assert (snapshots.best.best_step, snapshots.best.first_score, snapshots.best.best_score) == (1, 0.9, 0.5)


def test_a_student_that_diverges_at_once_returns_its_start_all_the_same() -> None:
    config = DistillConfig(steps=4, batch_size=2, eval_every=1, lr=1e30, keep_init=False, optimizer="sgd")
    student = nn.Linear(2, 2)
    before = {key: value.clone() for key, value in student.state_dict().items()}
    targets = CachedTargets(torch.full((4, 2), 0.5))
    pool = stripes(4, 0).inputs
    flat = type(pool)(torch.randn(4, 2), lambda raw: raw * 1e20)
    done = distill(student, targets, flat, config, score=lambda model: 0.5, seed=0)
    assert all(bool(value.isfinite().all()) for value in done.state.values())
    assert done.best_step > 0 or all(torch.equal(done.state[key], before[key]) for key in before)


def test_feddistill_is_swag_teachers_and_swa() -> None:
    found = variant(load("demo"), "feddistill")
    assert found.ensemble.swag_samples == 10
    assert found.distill.optimizer == "swa"


def mlp_prototypes() -> dict[str, Prototype]:
    return {"mlp": Prototype("mlp", partial(MLP, SHAPE, CLASSES, width=6))}


def begin(method: Method, model: nn.Module, job: Job, prototype: Prototype) -> None:
    """Let the clients' half of a method begin."""
    (part,) = method.parts
    part.half(model, Training(job, prototype, torch.zeros(2, dtype=torch.int64), classes(CLASSES), "sgd", 1, 0.1))


def test_fedma_clients_begin_from_weights_of_their_own() -> None:
    prototypes = mlp_prototypes()
    settings = load("demo", ["method=fedma", "prototypes=mlp", "local.epochs=1"])
    sent = init_state(prototypes["mlp"], 0)
    own = settings, with_values(settings, {"fedma.own_start": False})
    after = []
    for chosen in own:
        method = fedma(Resources(prototypes), chosen, in_process)
        model = prototypes["mlp"].load(sent)
        begin(method, model, Job(Client("a", "mlp"), 1, sent, 7), prototypes["mlp"])
        after.append({key: value.clone() for key, value in model.state_dict().items()})
    assert all(torch.equal(after[1][key], sent[key]) for key in sent)
    assert not any(torch.equal(after[0][key], sent[key]) for key in sent)
    second = prototypes["mlp"].load(sent)
    method = fedma(Resources(prototypes), own[0], in_process)
    begin(method, second, Job(Client("b", "mlp"), 2, sent, 8), prototypes["mlp"])
    assert all(torch.equal(second.state_dict()[key], sent[key]) for key in sent)


def test_fedma_averages_matched_neurons_uniformly_unless_told_otherwise() -> None:
    prototypes = mlp_prototypes()
    layers, first = layers_of(prototypes["mlp"]), init_state(prototypes["mlp"], 0)
    nudged = {key: value + 0.001 for key, value in first.items()}
    updates = [Update("a", "mlp", 1, first, 10), Update("b", "mlp", 1, nudged, 30)]
    key = f"{layers.names[0]}.weight"
    for average, share in (("uniform", 0.5), ("examples", 0.75)):
        matched, _ = matched_average(updates, layers, first, config=FedMAConfig(neuron_weights=average, growth=1.0))
        assert torch.allclose(matched[key].sum(), (first[key] + share * 0.001).sum(), atol=1e-4)


def test_the_discrepancy_is_that_to_all_data_and_not_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {
        "data.train_size": 60,
        "data.test_size": 20,
        "clients.total": 3,
        "partition.min_size": 4,
        "local.epochs": 1,
        "rounds": 1,
        "prototypes": ({"model": "mlp", "width": 4},),
        "fusion.method": "fedavg",
        "run.engine": "in-process",
    }
    parts = build(with_values(load("demo"), changes))
    monkeypatch.setattr(theorem, "tell_apart", lambda domain, **rest: (domain.id, 0.0))  # they can be told apart
    found = theorem.estimate(parts)
    for client in parts.federation.clients:
        assert client.indices is not None
        share = len(client.indices) / len(parts.task.train)
        assert found.discrepancies[client.id] == pytest.approx(1 - share)


def test_vgg9_has_fedmas_dropout_and_the_released_one_has_none() -> None:
    def dropped(model: nn.Module) -> list[tuple[type, float]]:
        kinds = (nn.Dropout, nn.Dropout2d)
        return [(type(module), module.p) for module in model.modules() if isinstance(module, kinds)]

    assert dropped(VGG((3, 32, 32), 10)) == [(nn.Dropout2d, 0.05), (nn.Dropout, 0.1), (nn.Dropout, 0.1)]
    assert dropped(vgg9_released((3, 32, 32), 10)) == []


def test_cifar_10_is_normalized_by_the_released_deviations_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
        (folder / name).touch()
    empty = torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    monkeypatch.setattr(cifar, "read", lambda path, key: empty)
    for normalization, stds in (("measured", (0.2470, 0.2435, 0.2616)), ("released", (0.2023, 0.1994, 0.2010))):
        data = cifar10(DataConfig(name="cifar10", folder=str(tmp_path), normalization=normalization))
        assert data.train.inputs.encode.std == stds  # type: ignore[attr-defined]
    released = load("cifar10-released")
    assert released.data.normalization == "released"
    assert not released.distill.keep_init


def test_the_share_of_local_data_is_taken_after_the_validation_split() -> None:
    whole = load("demo", ["engine=in-process"])
    all_of_it, half = (build_task(with_values(whole, {"data.train_fraction": share})) for share in (1.0, 0.5))
    assert len(half.validation) == len(all_of_it.validation)
    assert torch.equal(half.validation.labels, all_of_it.validation.labels)
    assert len(half.train) == round(0.5 * len(all_of_it.train))
    assert sum(map(len, half.shards)) == len(half.train)


def run_of(method: str, seed: int, curve: list[float]) -> Run:
    records: Any = [
        {"round": i, "models": {"m": {"fused": value, "averaged": value}}, "ensemble": value, "seconds": {}}
        for i, value in enumerate(curve, 1)
    ]
    return Run(Path(f"{method}-{seed}"), {"fusion.method": method, "seed": seed}, records)


def test_seeds_that_miss_the_target_show_in_the_table() -> None:
    runs = {"feddf": [run_of("feddf", 0, [0.2, 0.9, 0.9]), run_of("feddf", 1, [0.2, 0.3, 0.4])]}
    runs["feddf"].append(run_of("feddf", 2, [0.2, 0.3, 0.9]))
    table = compared(runs, target=0.8)
    row = next(row for row in table.rows if row[0] == "rounds to 80.0 %: m")
    assert row[1] == "2, > 3, 3"
    assert "mean ± sample standard deviation (n − 1)" in table.title


def test_the_adjusted_loss_is_the_cross_entropy_of_logits_plus_the_log_prior(tiny: Tiny) -> None:
    """One step of SGD against the same step in closed form, with the prior counted by hand."""
    prototype, indices = tiny.prototypes["mlp"], torch.tensor([0, 3, 6, 1])  # three of class 0, one of class 1
    sent, rate, tau = tiny.server.models["mlp"], 0.1, 1.5
    local = load("demo").local.model_copy(update={"epochs": 1, "batch_size": 4, "lr": rate, "logit_adjustment": tau})
    job = Job(Client("c", "mlp", indices), 1, sent, 5)
    reply = local_update(job, prototypes=tiny.prototypes, train=tiny.train, local=local)
    model = prototype.load(sent).train()
    prior = torch.tensor([3 + 0.004 / 3, 1 + 0.004 / 3, 0.004 / 3]) / 4
    logits: Tensor = model(tiny.train.inputs.batch(indices)) + tau * prior.log()
    nn.functional.cross_entropy(logits, tiny.train.labels[indices]).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        assert torch.allclose(reply.state[name], weight.detach() - rate * weight.grad, atol=1e-6)
