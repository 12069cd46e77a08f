from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.special import softmax
from torch import Tensor

from conftest import Tiny, make_tiny, stripes, update_of
from feddf.config import with_values
from feddf.config.names import TARGETS
from feddf.engines import in_process
from feddf.evaluate import Evaluation, Network, Teacher, answer, logits, teacher_of
from feddf.fusion.ensemble import Memory, PastEnsemble, avg_logits, avg_probabilities, refuse_unusable
from feddf.fusion.weights import CLASS_COUNTS
from feddf.losses import kl_divergence
from feddf.outputs import Outputs, classes
from feddf.rounds import fuse_usable
from feddf.runs.methods import ensemble, feddf
from feddf.states import digest
from feddf.types import Engine, Failure, Job, Refusal, Target, Update, WeightedLogits

teachers = st.integers(1, 5).flatmap(lambda n: arrays(np.float32, (n, 4, 3), elements=st.floats(-50, 50, width=32)))


@given(teachers)
def test_is_the_softmax_of_the_mean_logits(logits: np.ndarray) -> None:
    probabilities = avg_logits(map(WeightedLogits, torch.from_numpy(logits)))
    np.testing.assert_allclose(probabilities, softmax(logits.astype(np.float64).mean(axis=0), axis=1), atol=1e-6)


@pytest.mark.parametrize("name", sorted(set(TARGETS) - {"entropy-reduced"}))  # which makes another of any
def test_one_teacher_alone_is_its_own_ensemble(name: str) -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(TARGETS[name]([WeightedLogits(logits)]), logits.softmax(dim=1))
    torch.testing.assert_close(TARGETS[name]([WeightedLogits(logits)], 4.0), (logits / 4).softmax(dim=1))


def test_the_sum_does_not_lose_small_teachers_next_to_large_ones() -> None:
    large, small = torch.tensor([[1e8, 0.0]]), torch.tensor([[3.0, 0.0]])
    probabilities = avg_logits([WeightedLogits(large), WeightedLogits(small), WeightedLogits(-large)])
    torch.testing.assert_close(probabilities, torch.tensor([[1.0, 0.0]]).softmax(dim=1))


@pytest.mark.parametrize("name", TARGETS)
def test_no_teacher_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match="at least one teacher"):
        TARGETS[name]([])


@pytest.mark.parametrize("name", ["logits", "probabilities"])  # the robust ones need all answers at once
def test_teachers_stream_through_one_at_a_time(name: str) -> None:
    alive: list[weakref.ref[Tensor]] = []

    def stream() -> Iterator[WeightedLogits]:
        for number in range(50):
            assert sum(reference() is not None for reference in alive) <= 1
            tensor = torch.full((4, 3), float(number))
            alive.append(weakref.ref(tensor))
            yield WeightedLogits(tensor)
            del tensor

    TARGETS[name](stream())
    assert len(alive) == 50


def updates_of(tiny: Tiny) -> list[Update]:
    jobs = [Job(c, 1, tiny.server.models[c.prototype], 7) for c in tiny.federation.clients[:4]]
    return [update_of(tiny.local(job)) for job in jobs]


def loudest(votes: Iterable[WeightedLogits], temperature: float = 1.0, outputs: Outputs = classes()) -> Tensor:
    """A user's own target: whatever the teacher with the largest logit says."""
    loud = max((vote.logits for vote in votes), key=lambda logits: float(logits.max()))
    return (loud / temperature).softmax(dim=-1)


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize(
    ("name", "target"),
    [("logits", avg_logits), ("probabilities", avg_probabilities), (f"{__name__}:loudest", loudest)],
)
def test_a_target_is_used_by_its_name_as_it_is_directly(tiny: Tiny, name: str, target: Target, cache: bool) -> None:
    updates = updates_of(tiny)
    votes = [WeightedLogits(logits(tiny.prototypes[one.prototype].load(one.state), tiny.pool)) for one in updates]
    everything = torch.arange(len(tiny.pool))
    settings = with_values(
        tiny.settings, {"ensemble.combine": name, "ensemble.cache": cache, "distill.temperature": 3.0}
    )
    targets = ensemble(tiny.resources, settings, in_process)(updates, 0, {}).targets
    assert TARGETS[name] is target
    torch.testing.assert_close(targets(everything, tiny.pool.batch(everything)), target(votes, 3.0))
    if name in TARGETS:
        assert not torch.allclose(target(votes, 3.0), loudest(votes, 3.0))


def recording(calls: list[list[str]]) -> Engine:
    """An engine that notes the ids of the jobs of each call."""

    def run(function: Callable[[Any], Any], jobs: Sequence[Any], /) -> Iterator[Any]:
        calls.append([job.id for job in jobs])
        return in_process(function, jobs)

    return run


@pytest.mark.parametrize(
    ("cache", "expected"), [(True, [["c0", "c1", "c2", "c3"], ["cnn", "mlp"]]), (False, [["cnn", "mlp"]])]
)
def test_asked_again_on_each_batch_the_teachers_are_not_asked_before(
    tiny: Tiny, cache: bool, expected: list[list[str]]
) -> None:
    """Cached, the first jobs are the teachers' answers for the whole pool; else there are only the students'."""
    calls: list[list[str]] = []
    read: list[int] = []

    def encode(raw: Tensor) -> Tensor:
        read.append(len(raw))
        return tiny.pool.encode(raw)

    updates = updates_of(tiny)
    resources = replace(tiny.resources, pool=replace(tiny.pool, encode=encode))
    settings = with_values(tiny.settings, {"ensemble.cache": cache})
    ensemble(resources, settings, recording(calls))(updates, 1, {})
    assert calls == expected[:-1]
    assert sum(read) == (len(tiny.pool) * len(updates) if cache else 0)
    calls.clear()
    feddf(resources, settings, recording(calls))(tiny.server, updates, 1)
    assert calls == expected


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("stop", ["validation", "held-out-loss", "none"])
def test_a_teacher_with_logits_that_are_not_finite_is_refused_and_the_round_fused_without_it(
    tiny: Tiny, cache: bool, stop: str
) -> None:
    """Asked on each batch, it is a student that meets it: what comes of the round is the same."""
    updates = updates_of(tiny)
    broken = replace(updates[1], state={**updates[1].state, "layers.5.bias": torch.full((3,), torch.inf)})
    rest = [updates[0], *updates[2:]]
    fuse = feddf(
        tiny.resources,
        with_values(tiny.settings, {"ensemble.cache": cache, "distill.early_stopping": stop}),
        in_process,
    )
    fused, left, refused = fuse_usable(fuse, tiny.server, [updates[0], broken, *updates[2:]], 1, 5)
    assert refused == [Failure("c1", "its model's logits are not finite")]
    assert [update.client_id for update in left] == ["c0", "c2", "c3"]
    assert fused is not None
    assert digest(fused.server.models) == digest(fuse(tiny.server, rest, 5).server.models)
    assert digest(fused.start) == digest(fuse(tiny.server, rest, 5).start)
    assert fuse_usable(fuse, tiny.server, [updates[0], broken, *updates[2:]], 4, 5)[0] is None  # below the quorum


def test_answers_come_from_eval_mode_whatever_the_batch(tiny: Tiny) -> None:
    """BatchNorm in train mode would make an answer depend on the others in its batch, and ruin the teacher."""
    update = updates_of(tiny)[0]
    model = tiny.prototypes["cnn"].load(update.state)
    with torch.no_grad():
        alone = torch.cat([model(tiny.pool.batch(torch.tensor([i]))) for i in range(len(tiny.pool))])
    (asked,) = refuse_unusable(Evaluation(in_process, tiny.pool)([teacher_of(update, tiny.prototypes)]))
    torch.testing.assert_close(asked.logits, alone)


def test_teachers_with_logits_that_are_not_finite_are_refused_together(tiny: Tiny) -> None:
    updates = updates_of(tiny)
    for number in (1, 3):  # MLPs
        huge = {**updates[number].state, "layers.5.bias": torch.full((3,), torch.inf)}
        updates[number] = Update(updates[number].client_id, "mlp", 1, huge, 20)
    evaluation = Evaluation(in_process, tiny.pool)
    with pytest.raises(Refusal) as refusal:
        list(refuse_unusable(evaluation([teacher_of(update, tiny.prototypes) for update in updates])))
    assert [failure.client_id for failure in refusal.value.failures] == ["c1", "c3"]
    assert "not finite" in refusal.value.failures[0].reason


def test_a_teacher_that_cannot_be_loaded_is_refused(tiny: Tiny) -> None:
    fit = teacher_of(updates_of(tiny)[1], tiny.prototypes)
    broken = Update("c0", "cnn", 1, {"nothing": torch.ones(1)}, 20)
    evaluation = Evaluation(in_process, tiny.pool)
    with pytest.raises(Refusal, match="c0: its model could not be asked"):
        list(refuse_unusable(evaluation([teacher_of(broken, tiny.prototypes), fit])))


def test_a_model_sampled_by_the_server_is_left_out_when_it_is_unfit_and_nobody_is_refused(tiny: Tiny) -> None:
    updates = updates_of(tiny)[:2]
    models = [teacher_of(update, tiny.prototypes) for update in updates]
    spoiled = {**updates[1].state, "layers.5.bias": torch.full((3,), torch.nan)}
    drawn = Teacher("sample 0", Network(tiny.prototypes["mlp"], spoiled, sampled=True))
    answers = Evaluation(in_process, tiny.pool)([*models, drawn])
    assert [reply.client_id for reply in refuse_unusable(answers, {"sample 0": ()})] == ["c0", "c1"]


def test_a_model_sampled_by_the_server_has_the_pools_batchnorm_statistics(tiny: Tiny) -> None:
    update = updates_of(tiny)[0]
    spoiled = {**update.state, "features.1.running_mean": torch.full((4,), 50.0)}

    def asked(state: Any, sampled: bool) -> Tensor:
        return answer(Teacher("s", Network(tiny.prototypes["cnn"], state, sampled)), inputs=tiny.pool).logits

    torch.testing.assert_close(asked(update.state, True), asked(spoiled, True))
    assert not torch.allclose(asked(spoiled, False), asked(update.state, True))


def test_an_ensemble_without_a_pool_is_refused() -> None:
    tiny = make_tiny()
    with pytest.raises(ValueError, match="an ensemble answers for an unlabeled pool, and there is none"):
        ensemble(replace(tiny.resources, pool=None), tiny.settings, in_process)


def test_weights_by_accuracy_need_validation_data(tiny: Tiny) -> None:
    settings = with_values(tiny.settings, {"ensemble.weights": "validation"})
    ask = ensemble(replace(tiny.resources, validation=None), settings, in_process)
    with pytest.raises(ValueError, match="these weights need validation data"):
        ask(updates_of(tiny), 0, {})


opinions = arrays(np.float64, (3, 4, 5), elements=st.floats(-30, 30))
weights = arrays(np.float64, 3, elements=st.floats(0.1, 5))


@given(opinions, weights, st.floats(0.5, 8))
def test_weights_and_temperature_enter_as_the_formula_says(z: np.ndarray, w: np.ndarray, temperature: float) -> None:
    votes = [WeightedLogits(torch.from_numpy(logits), float(weight)) for logits, weight in zip(z, w, strict=True)]
    mean = np.average(z, axis=0, weights=w) / temperature
    np.testing.assert_allclose(avg_logits(votes, temperature), softmax(mean, axis=1), atol=1e-6)
    expected = np.average(softmax(z / temperature, axis=2), axis=0, weights=w)
    np.testing.assert_allclose(avg_probabilities(votes, temperature), expected, atol=1e-6)


@given(opinions, weights)
def test_averaging_losses_has_the_gradient_of_averaged_probabilities(z: np.ndarray, w: np.ndarray) -> None:
    """Σ w_k KL(p_k ‖ q) / Σ w_k, differentiated by autograd, against the loss to the one target that stands for it."""
    student = torch.linspace(-1, 1, 20).reshape(4, 5).requires_grad_()
    losses = sum(
        float(weight) * kl_divergence(torch.from_numpy(softmax(logits, axis=1)).float(), student)
        for logits, weight in zip(z, w, strict=True)
    )
    (expected,) = torch.autograd.grad(losses / float(w.sum()), student)
    votes = [WeightedLogits(torch.from_numpy(logits), float(weight)) for logits, weight in zip(z, w, strict=True)]
    (actual,) = torch.autograd.grad(kl_divergence(avg_probabilities(votes), student), student)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_in_averaged_probabilities_one_loud_teacher_is_one_voice() -> None:
    quiet = [torch.tensor([[2.0, 0.0]])] * 3
    loud = torch.tensor([[0.0, 2000.0]])
    votes = [WeightedLogits(logits) for logits in (*quiet, loud)]
    assert avg_logits(votes).argmax() == 1
    assert avg_probabilities(votes).argmax() == 0


@given(arrays(np.float64, (3, 2, 4, 5), elements=st.floats(-5, 5)), st.floats(0.1, 0.9), st.sampled_from([1.0, 3.0]))
def test_earlier_rounds_count_less_and_less(z: np.ndarray, decay: float, temperature: float) -> None:
    """Three rounds of two teachers with uniform weights: σ(Σ γ^age z / T Σ γ^age)."""
    past: Memory = {}
    for teachers in z:
        earlier = PastEnsemble(decay, temperature, past)
        answers = avg_logits(
            earlier.among([WeightedLogits(torch.from_numpy(logits)) for logits in teachers]), temperature
        )
        past = earlier.with_answers(answers)
    ages = np.repeat([decay**2, decay, 1.0], 2)
    expected = softmax(np.average(z.reshape(6, 4, 5), axis=0, weights=ages) / temperature, axis=1)
    np.testing.assert_allclose(answers, expected, atol=1e-5)


def test_a_class_that_no_teacher_knows_is_left_to_those_who_knew_it() -> None:
    def ask(probabilities: list[float], counts: list[float], past: Memory) -> tuple[Tensor, Memory]:
        earlier = PastEnsemble(0.5, 1.0, past)
        vote = WeightedLogits(torch.tensor([probabilities]).log(), torch.tensor(counts, dtype=torch.float64))
        answers = avg_probabilities(earlier.among([vote]))
        return answers, earlier.with_answers(answers)

    first, past = ask([0.1, 0.1, 0.8], [0.0, 0.0, 9.0], {})
    torch.testing.assert_close(first, torch.tensor([[0.0, 0.0, 1.0]]))
    second, _ = ask([0.5, 0.5, 0.0], [7.0, 7.0, 0.0], past)
    torch.testing.assert_close(second, torch.tensor([[0.25, 0.25, 0.5]]))


def test_a_fusion_remembers_its_ensemble_for_the_next_round(tiny: Tiny) -> None:
    updates = updates_of(tiny)
    fuse = feddf(
        tiny.resources, with_values(tiny.settings, {"ensemble.ema": 0.5, "distill.early_stopping": "none"}), in_process
    )
    first = fuse(tiny.server, updates[:2], 0).server
    forgetful = fuse(replace(first, memory={}), updates[2:], 1).server
    assert digest(fuse(first, updates[2:], 1).server.models) != digest(forgetful.models)
    assert first.memory.keys() == {"ensemble"}
    assert not feddf(tiny.resources, tiny.settings, in_process)(tiny.server, updates, 0).server.memory


def test_asked_on_each_batch_a_teacher_that_cannot_be_loaded_is_refused_by_its_name(tiny: Tiny) -> None:
    updates = [Update("c0", "cnn", 1, {"nothing": torch.ones(1)}, 20), updates_of(tiny)[1]]
    settings = with_values(tiny.settings, {"ensemble.cache": False})
    targets = ensemble(tiny.resources, settings, in_process)(updates, 0, {}).targets
    chosen = torch.arange(4)
    with pytest.raises(Refusal) as refusal:
        targets(chosen, tiny.pool.batch(chosen))
    assert [failure.client_id for failure in refusal.value.failures] == ["c0"]
    assert "could not be asked" in refusal.value.failures[0].reason


@pytest.mark.parametrize("cache", [True, False])
def test_weights_that_depend_on_the_sample_and_trust_reach_the_target(tiny: Tiny, cache: bool) -> None:
    """w_k(d) = trust_k exp(−H(σ(z_k(d)))), against NumPy."""
    updates = [replace(update, trust=trust) for update, trust in zip(updates_of(tiny)[:2], (1.0, 0.25), strict=True)]
    changes = {"ensemble.cache": cache, "ensemble.weights": "certainty"}
    taught = ensemble(tiny.resources, with_values(tiny.settings, changes), in_process)(updates, 0, {})
    chosen = torch.arange(10)
    inputs = tiny.pool.batch(chosen)
    total, weights = np.zeros((10, 3)), np.zeros((10, 1))
    for update in updates:
        model = tiny.prototypes[update.prototype].load(update.state).eval()
        z = model(inputs).detach().double().numpy()
        p = softmax(z, axis=1)
        weight = update.trust * np.exp((p * np.log(p)).sum(axis=1, keepdims=True))
        total, weights = total + weight * z, weights + weight
    np.testing.assert_allclose(taught.targets(chosen, inputs), softmax(total / weights, axis=1), atol=1e-5)


@pytest.mark.parametrize("cache", [True, False])
def test_weights_by_class_and_trust_reach_the_target(tiny: Tiny, cache: bool) -> None:
    """w_kc = trust_k n_kc, of the counts in the updates' payloads, against NumPy."""
    counts, trust = np.array([[20, 0, 5], [5, 15, 0]]), (1.0, 0.25)
    updates = [
        replace(update, n_examples=int(row.sum()), trust=much, payload={CLASS_COUNTS: {"counts": torch.tensor(row)}})
        for update, row, much in zip(updates_of(tiny)[:2], counts, trust, strict=True)
    ]
    changes = {"ensemble.cache": cache, "ensemble.weights": "class-counts"}
    taught = ensemble(tiny.resources, with_values(tiny.settings, changes), in_process)(updates, 0, {})
    chosen = torch.arange(10)
    inputs = tiny.pool.batch(chosen)
    w = counts * np.array(trust)[:, None]
    z = np.stack([tiny.prototypes[one.prototype].load(one.state)(inputs).detach().numpy() for one in updates])
    expected = softmax((w[:, None] * z).sum(axis=0) / w.sum(axis=0), axis=1)
    np.testing.assert_allclose(taught.targets(chosen, inputs), expected, atol=1e-5)


@pytest.mark.parametrize("cache", [True, False])
def test_the_ensemble_that_taught_can_be_asked_about_other_inputs(tiny: Tiny, cache: bool) -> None:
    """As it taught: with its weights, its trust and its temperature."""
    trust = (1.0, 0.25, 1.0, 0.5)
    updates = [replace(one, trust=much) for one, much in zip(updates_of(tiny), trust, strict=True)]
    changes = {"ensemble.cache": cache, "ensemble.weights": "certainty", "distill.temperature": 3.0}
    taught = ensemble(tiny.resources, with_values(tiny.settings, changes), in_process)(updates, 0, {})
    assert taught.ensemble is not None
    other, everything = stripes(20, 9).inputs, torch.arange(len(tiny.pool))
    found, again = (taught.ensemble(Evaluation(in_process, on)(taught.ensemble.teachers)) for on in (other, tiny.pool))
    torch.testing.assert_close(again, taught.targets(everything, tiny.pool.batch(everything)))
    votes = []
    for update in updates:
        z = logits(tiny.prototypes[update.prototype].load(update.state), other)
        entropy = torch.distributions.Categorical(logits=z.double()).entropy()
        votes.append(WeightedLogits(z, update.trust * (-entropy).exp().unsqueeze(1)))
    torch.testing.assert_close(found, avg_logits(votes, 3.0))


def test_with_a_memory_the_ensemble_is_known_for_the_pool_only(tiny: Tiny) -> None:
    ask = ensemble(tiny.resources, with_values(tiny.settings, {"ensemble.ema": 0.5}), in_process)
    first = ask(updates_of(tiny), 0, {})
    assert first.ensemble is not None, "there is nothing to remember yet"
    second = ask(updates_of(tiny), 1, first.memory)
    assert second.ensemble is None
    assert "for the pool only" in second.why


def test_those_that_do_not_teach_are_not_asked(tiny: Tiny) -> None:
    updates = updates_of(tiny)
    marked = [replace(updates[0], teaches=False), *updates[1:]]
    ask, everything = ensemble(tiny.resources, tiny.settings, in_process), torch.arange(len(tiny.pool))
    inputs = tiny.pool.batch(everything)
    found, expected, other = (ask(given, 0, {}).targets(everything, inputs) for given in (marked, updates[1:], updates))
    assert torch.equal(found, expected)
    assert not torch.allclose(found, other)


def test_an_ensemble_says_what_does_not_go_together(tiny: Tiny) -> None:
    each_batch = with_values(tiny.settings, {"ensemble.cache": False})
    several = each_batch.ensemble.model_copy(update={"swag_samples": 2})  # past the configuration's checks
    sampled = each_batch.model_copy(update={"ensemble": several})
    with pytest.raises(ValueError, match="statistics for the whole pool only, not for each batch"):
        ensemble(tiny.resources, sampled, in_process)
    augmented = replace(tiny.resources, augment=lambda raw, generator: raw)
    with pytest.raises(ValueError, match=r"ensemble\.cache = false"):
        ensemble(augmented, tiny.settings, in_process)
