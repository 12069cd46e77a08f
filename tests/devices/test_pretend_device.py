"""Everything runs on another device as on the CPU, and nothing waits for it that need not."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conftest import CLASSES, SHAPE, stripes
from feddf import batches, client, losses
from feddf.client import local_update
from feddf.config import DistillConfig, LocalConfig
from feddf.data.datasets import flip_crop
from feddf.evaluate import Network, Teacher, accuracy, logits, unread_accuracy
from feddf.fusion import scaffold, weights
from feddf.fusion.distill import distill
from feddf.fusion.ensemble import CachedTargets, Ensemble, OnlineTargets, avg_logits
from feddf.models.binary import error_feedback, straight_through
from feddf.models.small import CNN
from feddf.runtime.device import choose, described, device_of
from feddf.runtime.execution import Execution
from feddf.states import digest, init_state
from feddf.types import Client, Job, Prototype, Refusal, Reply
from pretend_device import NAME, PretendTensor, counted, pretend_device

THERE = Execution(device=NAME)
BUILD = partial(CNN, SHAPE, CLASSES, width=4)
PROTOTYPE = Prototype("cnn", BUILD)
TRAIN = stripes(48, 1)


def job(n: int = 48) -> Job:
    return Job(Client("c", "cnn", torch.arange(n)), 1, init_state(PROTOTYPE, 0), 5)


def trained(execution: Execution, epochs: int = 2, **changes: Any) -> Any:
    config = LocalConfig(epochs=epochs, batch_size=16, lr=0.05)
    return local_update(
        job(), prototypes={"cnn": PROTOTYPE}, train=TRAIN, **{"local": config, "execution": execution, **changes}
    )


# The device itself


def test_it_refuses_tensors_of_the_cpu_and_counts_what_crosses() -> None:
    with pretend_device() as transfers:
        there, here = torch.arange(4.0).to(NAME), torch.arange(4.0)
        assert isinstance(there, PretendTensor)
        assert (transfers.to_device, transfers.to_host) == (1, 0)
        for mixed in (lambda: there + here, lambda: here + there, lambda: there[torch.tensor([1])]):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
        assert float((there + 1).sum()) == 10
        assert torch.equal(there.to("cpu"), here)
        assert (transfers.to_device, transfers.to_host) == (1, 2)
        with pytest.raises(RuntimeError, match="same device"):
            nn.Linear(4, 2).to(NAME)(here)
    with pytest.raises(RuntimeError, match="outside"):
        there + 1


def test_feddf_finds_it_by_its_name() -> None:
    assert choose(NAME) == torch.device(NAME)
    assert described(torch.device(NAME)) == "pretend (in tests)"


# Local training


ADJUSTED = LocalConfig(epochs=2, batch_size=16, lr=0.05, logit_adjustment=1.0)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "augmented": {"augment": flip_crop},
    "proximal": {"local": LocalConfig(epochs=2, batch_size=16, lr=0.05, prox_mu=0.5)},
    "adjusted loss": {"local": ADJUSTED},
    "Adam": {"local": LocalConfig(epochs=2, batch_size=16, lr=0.001, optimizer="adam", lr_schedule="cosine")},
    "disclosed": {"half": weights.tell},
    "control variates": {"half": scaffold.follow},
    "straight-through": {"half": straight_through},
    "error feedback": {"half": error_feedback},
    "several": {"half": client.combine_halves([straight_through, weights.tell]), "local": ADJUSTED},
}


def told(reply: Reply) -> dict[str, str]:
    return {"payload": digest(reply.payload), "kept": digest(reply.kept)}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("free", [2**30, 1], ids=["data stay there", "batches are sent"])
def test_a_client_trains_there_as_on_the_cpu(case: str, free: int) -> None:
    here = trained(Execution(), **CASES[case])
    with pretend_device(free):
        there = trained(THERE, **CASES[case])
    sent = [there.state, *there.payload.values(), *there.kept.values()]
    assert all(type(tensor) is Tensor and tensor.device.type == "cpu" for state in sent for tensor in state.values())
    assert digest({"m": there.state}) == digest({"m": here.state})
    assert (there.metrics, told(there)) == (here.metrics, told(here))
    if case == "disclosed":
        assert there.payload["class counts"]["counts"].tolist() == [16, 16, 16]


def test_the_steps_of_a_client_wait_for_nothing() -> None:
    """What is read is the trained model and its mean loss; a step sends the indices of its batch, and nothing else."""
    tensors = len(init_state(PROTOTYPE, 0))
    one, three = (counted(partial(trained, THERE, epochs)) for epochs in (1, 3))
    steps = 2 * 48 // 16
    assert one.to_host == three.to_host == tensors + 1
    assert three.to_device - one.to_device == steps
    sent = counted(partial(trained, THERE, 3), free=1).to_device - counted(partial(trained, THERE, 1), free=1).to_device
    assert sent == 2 * steps  # and the images, where those do not stay there
    drawn = [counted(partial(trained, THERE, epochs, augment=flip_crop)) for epochs in (1, 3)]
    assert drawn[1].to_host == drawn[0].to_host
    assert drawn[1].to_device - drawn[0].to_device == 4 * steps  # where each image is cut, and whether it is mirrored


def test_a_planted_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Planted:
        @staticmethod
        def cross_entropy(given: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
            loss = F.cross_entropy(given, labels, ignore_index=ignore_index)
            assert loss.detach().item() >= 0
            return loss

    monkeypatch.setattr(losses, "F", Planted)
    one, three = (counted(partial(trained, THERE, epochs)) for epochs in (1, 3))
    assert three.to_host - one.to_host == 2 * 48 // 16


def test_data_move_once_and_leave_with_their_tensor() -> None:
    batches.forget()
    own = stripes(48, 9)
    with pretend_device():
        for _ in range(3):
            logits(PROTOTYPE.load(init_state(PROTOTYPE, 0), NAME), own.inputs)
            assert batches.resident_bytes() == 48 * 64
        del own
        assert batches.resident_bytes() == 0


# Distillation


VALIDATION, POOL = stripes(30, 4), stripes(48, 3).inputs
TARGETS = torch.softmax(torch.randn(48, CLASSES, generator=torch.Generator().manual_seed(0)), dim=1)
SMALL = DistillConfig(steps=12, batch_size=16, eval_every=4, patience=100)


def distilled(device: str, config: DistillConfig = SMALL, **changes: Any) -> Any:
    student = PROTOTYPE.load(init_state(PROTOTYPE, 0), device)
    score = partial(unread_accuracy, examples=VALIDATION)
    return distill(student, CachedTargets(TARGETS), POOL, config, **{"score": score, "seed": 3, **changes})


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "swa"])
def test_a_student_learns_there_as_on_the_cpu(optimizer: str) -> None:
    config = SMALL.model_copy(update={"optimizer": optimizer, "swa_cycle": 2, "clip": 1.0, "temperature": 2.0})
    here = distilled("cpu", config)
    with pretend_device():
        there = distilled(NAME, config)
    assert digest({"m": there.state}) == digest({"m": here.state})
    assert replace(there, state={}) == replace(here, state={})


def test_a_student_is_read_once_every_check() -> None:
    def reads(steps: int, check: int, **changes: Any) -> int:
        config = SMALL.model_copy(update={"steps": steps, "eval_every": check})
        return counted(partial(distilled, NAME, config, **changes)).to_host

    assert reads(12, 2) - reads(6, 2) == 3
    assert reads(12, 6) - reads(6, 6) == 1
    assert reads(6, 2, score=None) - reads(6, 3, score=None) == 1  # whether its weights are finite
    fixed = reads(6, 6, score=None) - 1
    assert fixed == len(init_state(PROTOTYPE, 0))  # the weights that are returned


def test_each_step_of_a_student_sends_the_indices_of_its_batch() -> None:
    sent = [counted(partial(distilled, NAME, SMALL.model_copy(update={"steps": n}))).to_device for n in (4, 12)]
    assert sent[1] - sent[0] == 8 + 2  # and of the validation data, once a check


def teachers(broken: bool = False) -> OnlineTargets:
    states = [dict(init_state(PROTOTYPE, seed)) for seed in (1, 2)]
    if broken:
        states[1]["classifier.bias"][0] = -torch.inf
    weights = (torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), 2.0)
    asked = (Teacher(f"t{n}", Network(PROTOTYPE, states[n - 1]), weights[n - 1]) for n in (1, 2))
    return OnlineTargets(Ensemble(tuple(asked), avg_logits))


def test_teachers_asked_on_each_batch_answer_there_without_being_waited_for() -> None:
    def ask(device: str, steps: int, answers: OnlineTargets) -> Any:
        student = PROTOTYPE.load(init_state(PROTOTYPE, 0), device)
        config = SMALL.model_copy(update={"steps": steps})
        return distill(student, answers, POOL, config, score=None, seed=3, augment=flip_crop)

    here = ask("cpu", 4, teachers())
    with pretend_device():
        assert digest({"m": ask(NAME, 4, teachers()).state}) == digest({"m": here.state})
    reads = [counted(partial(ask, NAME, steps, teachers())).to_host for steps in (4, 12)]
    assert reads[1] - reads[0] == 2
    for device in ("cpu", NAME):
        with pretend_device(), pytest.raises(Refusal, match="t2: its model's logits are not finite"):
            ask(device, 4, teachers(broken=True))


def test_a_model_is_tried_on_the_device_that_it_is_on() -> None:
    here = PROTOTYPE.load(init_state(PROTOTYPE, 0))
    with pretend_device():
        there = PROTOTYPE.load(init_state(PROTOTYPE, 0), NAME)
        assert device_of(there).type == NAME
        assert accuracy(there, VALIDATION) == accuracy(here, VALIDATION)
        answers = logits(there, VALIDATION.inputs)
        assert answers.device.type == NAME
        assert torch.equal(answers.to("cpu"), logits(here, VALIDATION.inputs))
