from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import log_softmax, rel_entr, softmax
from torch import Tensor, nn

from conftest import Tiny, update_of
from feddf.config import DistillConfig
from feddf.data.datasets import plain
from feddf.engines import in_process
from feddf.evaluate import Evaluation, teacher_of
from feddf.fusion.distill import LOWEST, MOMENTUM, distill, held_out_score, notes
from feddf.fusion.early_stopping import EarlyStopping
from feddf.fusion.ensemble import CachedTargets, Ensemble, OnlineTargets, avg_logits, refuse_unusable
from feddf.losses import kl_divergence
from feddf.outputs import classes
from feddf.states import digest
from feddf.types import Inputs, Job, WeightedLogits

matrices = arrays(np.float32, (4, 3), elements=st.floats(-20, 20, width=32))
POOL = Inputs(torch.randn(64, 2, generator=torch.Generator().manual_seed(0)), plain)


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(2, 3)


def teacher(chosen: Tensor, inputs: Tensor) -> Tensor:
    return (inputs @ torch.tensor([[3.0, -1, 0], [0, 2, -2]])).softmax(dim=1)


@given(matrices, matrices)
def test_the_loss_is_the_divergence_from_the_teachers_to_the_student(p: np.ndarray, q: np.ndarray) -> None:
    target = softmax(p.astype(np.float64), axis=1)
    expected = rel_entr(target, np.exp(log_softmax(q.astype(np.float64), axis=1))).sum(axis=1).mean()
    actual = kl_divergence(torch.from_numpy(target.astype(np.float32)), torch.from_numpy(q))
    assert float(actual) == pytest.approx(expected, abs=1e-4)


def test_a_student_that_can_agree_with_its_teacher_comes_to_agree() -> None:
    student = linear()
    distill(student, teacher, POOL, DistillConfig(steps=1500, batch_size=64, lr=0.1), score=None, seed=0)
    everything = torch.arange(64)
    with torch.no_grad():
        difference = student(POOL.raw).softmax(dim=1) - teacher(everything, POOL.raw)
    assert float(difference.abs().max()) < 1e-3


def scripted(scores: list[float]) -> Callable[[nn.Module], float]:
    remaining = iter(scores)
    return lambda model: next(remaining)


def test_stops_after_patience_and_returns_the_best_snapshot() -> None:
    config = DistillConfig(steps=1000, batch_size=8, eval_every=10, patience=30)
    snapshots: list[str] = []

    def score(model: nn.Module) -> float:
        snapshots.append(digest({"m": model.state_dict()}))
        return [0.1, 0.2, 0.5, 0.4, 0.5, 0.3, 0.9][len(snapshots) - 1]

    result = distill(linear(), teacher, POOL, config, score=score, seed=0)
    assert (result.steps, result.best_step, result.first_score, result.best_score) == (50, 20, 0.1, 0.5)
    assert len(snapshots) == 6
    assert digest({"m": result.state}) == snapshots[2]


def test_is_never_worse_than_its_start() -> None:
    student = linear()
    before = digest({"m": student.state_dict()})
    config = DistillConfig(steps=40, batch_size=8, eval_every=10, patience=1000)
    result = distill(student, teacher, POOL, config, score=scripted([0.9, 0.1, 0.2, 0.3, 0.9]), seed=0)
    assert (result.best_step, result.steps) == (0, 40)
    assert digest({"m": result.state}) == before


def test_the_last_step_is_scored_too() -> None:
    config = DistillConfig(steps=25, batch_size=8, eval_every=10, patience=1000)
    result = distill(linear(), teacher, POOL, config, score=scripted([0.1, 0.2, 0.3, 0.4]), seed=0)
    assert (result.best_step, result.best_score) == (25, 0.4)


def test_without_a_score_all_steps_are_taken_and_the_last_weights_returned() -> None:
    student = linear()
    result = distill(student, teacher, POOL, DistillConfig(steps=37, batch_size=8), score=None, seed=0)
    assert (result.steps, result.best_step, result.best_score) == (37, 37, None)
    assert digest({"m": result.state}) == digest({"m": student.state_dict()})


def test_is_adam_with_cosine_annealing() -> None:
    """Against a loop written out here: Adam's formula and η_j = η/2 (1 + cos(π j / N))."""
    student, steps, rate = linear(), 12, 0.1
    weights = [p.detach().clone().double().requires_grad_() for p in student.parameters()]
    m, v = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    for j in range(steps):
        logits = POOL.raw.double() @ weights[0].T + weights[1]
        target = teacher(torch.arange(64), POOL.raw).double()
        loss = (target * (target.log() - logits.log_softmax(dim=1))).sum(dim=1).mean()
        eta = rate / 2 * (1 + np.cos(np.pi * j / steps))
        for i, gradient in enumerate(torch.autograd.grad(loss, weights)):
            m[i], v[i] = 0.9 * m[i] + 0.1 * gradient, 0.999 * v[i] + 0.001 * gradient**2
            step = m[i] / (1 - 0.9 ** (j + 1)) / ((v[i] / (1 - 0.999 ** (j + 1))).sqrt() + 1e-8)
            weights[i] = (weights[i] - eta * step).detach().requires_grad_()
    distill(student, teacher, POOL, DistillConfig(steps=steps, batch_size=64, lr=rate), score=None, seed=0)
    for parameter, weight in zip(student.parameters(), weights, strict=True):
        torch.testing.assert_close(parameter.double(), weight, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("scored", [True, False])
def test_a_student_that_diverges_is_never_returned(scored: bool) -> None:
    def mad(chosen: Tensor, inputs: Tensor) -> Tensor:
        return torch.full((len(chosen), 3), torch.nan)

    student = linear()
    before = digest({"m": student.state_dict()})
    score = (lambda model: float(torch.isnan(model.weight).any())) if scored else None  # it likes what is broken
    config = DistillConfig(steps=40, batch_size=8, eval_every=10)
    result = distill(student, mad, POOL, config, score=score, seed=0)
    assert digest({"m": result.state}) == before
    assert (result.steps, result.best_step) == (10, 0)  # where it was seen, and what is returned


def test_the_pool_is_gone_through_evenly() -> None:
    seen: list[int] = []

    def watching(chosen: Tensor, inputs: Tensor) -> Tensor:
        seen.extend(chosen.tolist())
        return teacher(chosen, inputs)

    distill(linear(), watching, POOL, DistillConfig(steps=12, batch_size=16), score=None, seed=0)
    assert np.bincount(seen).tolist() == [3] * 64


def test_a_pool_smaller_than_a_batch_is_used_whole() -> None:
    sizes: list[int] = []

    def watching(chosen: Tensor, inputs: Tensor) -> Tensor:
        sizes.append(len(set(chosen.tolist())))
        return teacher(chosen, inputs)

    distill(linear(), watching, POOL, DistillConfig(steps=3, batch_size=128), score=None, seed=0)
    assert sizes == [64, 64, 64]


def test_teachers_asked_once_and_on_each_batch_give_the_same_gradients(tiny: Tiny) -> None:
    """For every batch of the pool, and so for every step: the largest difference in any gradient is below 1e-6."""
    replies = [tiny.local(Job(c, 1, tiny.server.models[c.prototype], 7)) for c in tiny.federation.clients]
    teachers = tuple(teacher_of(update_of(reply), tiny.prototypes) for reply in replies)
    answers = refuse_unusable(Evaluation(in_process, tiny.pool)(teachers))
    once = CachedTargets(avg_logits(WeightedLogits(answer.logits) for answer in answers))
    again = OnlineTargets(Ensemble(teachers, avg_logits))
    for name in tiny.prototypes:
        student = tiny.prototypes[name].load(tiny.server.models[name]).train()
        for chosen in torch.randperm(48, generator=torch.Generator().manual_seed(0)).split(16):
            inputs = tiny.pool.batch(chosen)
            gradients = []
            for target in (once(chosen, inputs), again(chosen, inputs)):
                student.zero_grad()
                kl_divergence(target, student(inputs)).backward()
                gradients.append([p.grad.clone() for p in student.parameters()])
            assert max(float((a - b).abs().max()) for a, b in zip(*gradients, strict=True)) < 1e-6


@pytest.mark.parametrize("temperature", [1.0, 2.0, 5.0])
def test_a_temperature_softens_the_student_and_keeps_the_gradients_size(temperature: float) -> None:
    """T² KL(p ‖ σ(z / T)) has the gradient T (σ(z / T) − p), whose size hardly changes once p is softened as well."""
    logits = torch.tensor([[1.0, -2.0, 0.5]], requires_grad=True)
    target = torch.tensor([[0.2, 0.3, 0.5]])
    kl_divergence(target, logits, temperature).backward()
    expected = temperature * ((logits.detach() / temperature).softmax(dim=1) - target)
    torch.testing.assert_close(logits.grad, expected)


def test_sgd_has_momentum_and_the_same_annealing() -> None:
    student, steps, rate = linear(), 9, 0.05
    weights = [p.detach().clone().double().requires_grad_() for p in student.parameters()]
    velocity = [torch.zeros_like(w) for w in weights]
    for j in range(steps):
        logits = POOL.raw.double() @ weights[0].T + weights[1]
        target = teacher(torch.arange(64), POOL.raw).double()
        loss = (target * (target.log() - logits.log_softmax(dim=1))).sum(dim=1).mean()
        for i, gradient in enumerate(torch.autograd.grad(loss, weights)):
            velocity[i] = MOMENTUM * velocity[i] + gradient
            eta = rate / 2 * (1 + np.cos(np.pi * j / steps))
            weights[i] = (weights[i] - eta * velocity[i]).detach().requires_grad_()
    config = DistillConfig(steps=steps, batch_size=64, lr=rate, optimizer="sgd")
    distill(student, teacher, POOL, config, score=None, seed=0)
    for parameter, weight in zip(student.parameters(), weights, strict=True):
        torch.testing.assert_close(parameter.double(), weight, atol=1e-5, rtol=1e-5)


def test_swa_returns_the_mean_of_the_weights_at_the_ends_of_its_cycles() -> None:
    """Against a loop written out here: SGD with a rate that falls linearly in each cycle, and snapshots averaged."""
    student, steps, rate, cycle = linear(), 40, 0.05, 5
    weights = [p.detach().clone().double().requires_grad_() for p in student.parameters()]
    velocity = [torch.zeros_like(w) for w in weights]
    ends: list[list[Tensor]] = []
    for j in range(steps):
        logits = POOL.raw.double() @ weights[0].T + weights[1]
        target = teacher(torch.arange(64), POOL.raw).double()
        loss = (target * (target.log() - logits.log_softmax(dim=1))).sum(dim=1).mean()
        t = (j % cycle + 1) / cycle
        for i, gradient in enumerate(torch.autograd.grad(loss, weights)):
            velocity[i] = MOMENTUM * velocity[i] + gradient
            weights[i] = (weights[i] - rate * (1 - t + LOWEST * t) * velocity[i]).detach().requires_grad_()
        if (j + 1) % cycle == 0 and j + 1 > steps // 4:
            ends.append([weight.detach() for weight in weights])
    config = DistillConfig(steps=steps, batch_size=64, lr=rate, optimizer="swa", swa_cycle=cycle)
    result = distill(student, teacher, POOL, config, score=None, seed=0)
    assert len(ends) == 6
    for i, tensor in enumerate(result.state.values()):
        torch.testing.assert_close(tensor.double(), torch.stack([end[i] for end in ends]).mean(0), atol=1e-4, rtol=1e-4)


def test_swa_estimates_batchnorm_statistics_again(tiny: Tiny) -> None:
    """The averaged weights never saw data, so their statistics have to be those of the pool."""
    prototype = tiny.prototypes["cnn"]
    student = prototype.load(tiny.server.models["cnn"])
    config = DistillConfig(steps=60, batch_size=16, lr=0.01, optimizer="swa")
    targets = torch.full((48, 3), 1 / 3)
    result = distill(student, CachedTargets(targets), tiny.pool, config, score=None, seed=0)
    model = prototype.load(result.state)
    with torch.no_grad():
        first = model.features[0](tiny.pool.batch(torch.arange(48)))
    torch.testing.assert_close(result.state["features.1.running_mean"], first.mean(dim=(0, 2, 3)), atol=1e-5, rtol=1e-4)


def test_clipping_bounds_each_step() -> None:
    student = linear()
    before = [p.detach().clone() for p in student.parameters()]
    config = DistillConfig(steps=1, batch_size=64, lr=1.0, optimizer="sgd", clip=1e-3)
    distill(student, teacher, POOL, config, score=None, seed=0)
    moved = torch.cat([(p.detach() - b).flatten() for p, b in zip(student.parameters(), before, strict=True)])
    assert float(moved.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_held_out_inputs_are_scored_by_the_loss_and_never_learned_from() -> None:
    held_out = torch.arange(0, 64, 4)
    seen: set[int] = set()

    def watching(chosen: Tensor, inputs: Tensor) -> Tensor:
        seen.update(chosen.tolist())
        return teacher(chosen, inputs)

    rest = torch.tensor([i for i in range(64) if i % 4])
    student = linear()
    score = held_out_score(POOL, held_out, teacher(held_out, POOL.raw[held_out]), 1.0)
    with torch.no_grad():
        loss = float(kl_divergence(teacher(held_out, POOL.raw[held_out]), student(POOL.raw[held_out])))
    assert score(student) == pytest.approx(-loss)
    result = distill(
        student, watching, POOL, DistillConfig(steps=50, batch_size=16, lr=0.05), score=score, seed=0, chosen_from=rest
    )
    assert seen == set(rest.tolist())
    assert result.best_score is not None
    assert result.best_score > -loss


def test_a_score_that_fails_fails_the_student() -> None:
    scores = iter([0.5])

    def score(model: nn.Module) -> float:
        if (known := next(scores, None)) is None:
            raise ValueError("no score")
        return known

    config = DistillConfig(steps=20, eval_every=10, patience=100, batch_size=16)
    with pytest.raises(ValueError, match="no score"):
        distill(linear(), teacher, POOL, config, score=score, seed=3)


def seen(seed: int, student: nn.Module | None = None, disturb: int = 0, **options: Any) -> tuple[list[Tensor], str]:
    """The batches that a teacher was asked about, and the student's digest; ``disturb`` is the global random state."""
    batches: list[Tensor] = []

    def answers(chosen: Tensor, inputs: Tensor) -> Tensor:
        batches.append(chosen.clone())
        return teacher(chosen, inputs)

    student = student or linear()
    torch.manual_seed(disturb)
    config = DistillConfig(steps=20, batch_size=16)
    distill(student, answers, POOL, config, score=None, seed=seed, **options)
    return batches, digest({"m": student.state_dict()})


def test_the_seed_decides_the_batches_and_nothing_else_does() -> None:
    (one, first), (same, again), (other, _) = seen(1), seen(1, disturb=7), seen(2)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert first == again
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_dropout_follows_from_the_seed() -> None:
    def accumulation_dtype() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(2, 40), nn.Dropout(0.5), nn.Linear(40, 3))

    masks: dict[int, list[Tensor]] = {}
    for seed in (1, 2):
        student = accumulation_dtype()
        masks[seed] = []
        student[1].register_forward_hook(lambda _, __, out, seed=seed: masks[seed].append(out.detach() == 0))
        seen(seed, student)
    assert seen(1, accumulation_dtype())[1] == seen(1, accumulation_dtype(), disturb=7)[1]
    assert not torch.equal(masks[1][0], masks[2][0])


def test_the_student_and_its_teachers_see_augmented_inputs() -> None:
    drawn: dict[int, list[Tensor]] = {1: [], 2: []}
    asked: list[Tensor] = []

    def answers(chosen: Tensor, inputs: Tensor) -> Tensor:
        asked.append(inputs.clone())
        return teacher(chosen, inputs)

    def moved(raw: Tensor, generator: torch.Generator, seed: int) -> Tensor:
        drawn[seed].append(raw + torch.randn(raw.shape, generator=generator))
        return drawn[seed][-1]

    for seed in drawn:
        distill(
            linear(),
            answers,
            POOL,
            DistillConfig(steps=3, batch_size=64),
            score=None,
            seed=seed,
            augment=partial(moved, seed=seed),
        )
    assert all(torch.equal(a, b) for a, b in zip([*drawn[1], *drawn[2]], asked, strict=True))
    assert len({digest({"m": {"x": each.sum(dim=0)}}) for each in [*drawn[1], *drawn[2]]}) == 6


def test_swa_is_the_student_until_its_first_cycle_has_ended() -> None:
    config = DistillConfig(steps=40, batch_size=16, eval_every=10, optimizer="swa", swa_cycle=20, lr=0.01)
    scored: list[str] = []

    def score(model: nn.Module) -> float:
        scored.append(digest({"m": model.state_dict()}))
        return 0.0

    distill(linear(), teacher, POOL, config, score=score, seed=0)
    start, after_10, after_20, after_30, after_40 = scored
    assert after_10 != start  # the student's own weights
    assert after_20 == after_30  # the mean of one
    assert len({start, after_10, after_20, after_40}) == 4


def test_the_distance_is_asked_at_the_temperature_of_the_section() -> None:
    asked: list[float] = []

    def distance(target: Tensor, outputs: Tensor, temperature: float) -> Tensor:
        asked.append(temperature)
        return kl_divergence(target, outputs, temperature)

    pool = Inputs(torch.randn(8, 2), plain)
    targets = CachedTargets(torch.full((8, 2), 0.5))
    config = DistillConfig(steps=2, batch_size=4, temperature=3.0, early_stopping="none")
    distill(nn.Linear(2, 2), targets, pool, config, score=None, seed=0, outputs=replace(classes(2), distance=distance))
    assert asked == [3.0, 3.0]


@pytest.mark.parametrize(("keep_init", "kept", "best_step"), [(True, 0.9, 0), (False, 0.6, 2)])
def test_the_record_says_who_won_and_by_how_much(keep_init: bool, kept: float, best_step: int) -> None:
    scores = iter([0.9, 0.4, 0.6, 0.5])
    student = nn.Linear(2, 2)
    config = DistillConfig(steps=3, eval_every=1, patience=9, keep_init=keep_init)
    stopping = EarlyStopping(student, lambda model: next(scores), config)
    for step in (1, 2, 3):
        assert not stopping.enough(step, student, student)
    note = notes({"one": stopping.best})["one"]
    assert (note["score_before"], note["score_student"], note["score_after"]) == (0.9, 0.6, kept)
    assert note["best_step"] == best_step
