"""The one place where models are tried: models × inputs → logits and accuracies, here or through an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.fusion import fuse_conv_bn_eval

from feddf.batches import batches, device_copy
from feddf.outputs import Outputs, classes
from feddf.runtime.device import CPU, device_of
from feddf.runtime.execution import Execution, forward_of
from feddf.states import init_state
from feddf.types import Engine, Examples, Failure, Inputs, Payload, Prototype, R, State, Update, Weight, WeightedLogits

BATCH = 64  # images in a forward pass: enough for full speed, and few enough to stay in a core's cache
BATCH_ON_DEVICE = 512  # on an accelerator, which has more to do at once and no such cache


def accuracy(model: nn.Module, examples: Examples) -> float:
    """Return the score of the model (for classes, its top-1 accuracy), computed on the device that it is on."""
    return float(unread_accuracy(model, examples))


def unread_accuracy(model: nn.Module, examples: Examples) -> Tensor:
    """Return the score as one value on the model's device, which has not been waited for."""
    predictions = logits(model, examples.inputs)
    return examples.outputs.score(predictions, device_copy(examples.labels, predictions.device))


def accuracy_of(predictions: Tensor, labels: Tensor, outputs: Outputs = classes()) -> float:
    """Return the score of ``predictions``, which are raw outputs for some inputs."""
    return float(outputs.score(predictions, labels))


def logits(model: nn.Module, inputs: Inputs, batch: int | None = None, precision: str = "float32") -> Tensor:
    """Return f(x) for every input, in order, on the device that the model is on."""
    device = device_of(model)
    size = batch or (BATCH if device.type == "cpu" else BATCH_ON_DEVICE)
    with evaluation_mode(model):
        fast = forward_of(fold_batchnorm(model), compile=False, precision=precision)
        order = torch.arange(len(inputs)).split(size)
        chunks = [fast(inputs.encode(raw)) for _, raw in batches(inputs.raw, order, device)]
    return torch.cat(chunks).clone()  # a plain tensor, not an inference one


# Many models at once


@dataclass(frozen=True)
class Network:
    """Weights of an architecture, as something that predicts.

    The server drew ``sampled`` ones, whose BatchNorm statistics belong to no data: they are estimated on the inputs.
    """

    prototype: Prototype
    state: State
    sampled: bool = False

    def __call__(self, inputs: Inputs, execution: Execution) -> Tensor:
        """Return the logits for all inputs, in eval mode, on the CPU."""
        with execution.begun() as device:
            module = self.prototype.load(self.state, device)
            if self.sampled:
                recalibrate(module, inputs)
            return logits(module, inputs, precision=execution.precision).to(CPU)


def weigh_logits(logits: Tensor, weight: Weight) -> WeightedLogits:
    """Return logits with how much they count; one weight a class, or an input, is the same at all positions."""
    found = weight(logits) if callable(weight) else weight
    if isinstance(found, Tensor) and 0 < found.ndim < 3 < logits.ndim + 1:
        found = found.view(*found.shape, *[1] * (logits.ndim - 2))
    return WeightedLogits(logits, found)


def weigh_known(logits: Tensor, weight: Weight, *, outputs: Outputs, known: Tensor) -> WeightedLogits:
    """Return the weighted logits of a teacher that knows some channels only; the others are left to those who do."""
    own, counts = outputs.vote(logits, known)
    return WeightedLogits(own, weigh_logits(own, weight).weight * counts)


@dataclass(frozen=True)
class Teacher:
    """Something that predicts, and how much it counts: a client's model, a file, a sampled model, a table of answers.

    Its ``predict`` gives logits for all inputs, one row each; it learned from ``n_examples``, and has told ``payload``.
    ``vote`` makes a weighted answer of logits, where it knows other classes than the student.
    """

    id: str
    predict: Callable[[Any, Execution], Tensor]
    weight: Weight = 1.0
    n_examples: int = 1
    payload: Payload = field(default_factory=dict)
    vote: Callable[[Tensor, Weight], WeightedLogits] = weigh_logits


@dataclass(frozen=True)
class Predictions:
    """The logits of one that predicts, for every input that it was asked about."""

    client_id: str
    logits: Tensor


def teacher_of(update: Update, prototypes: Mapping[str, Prototype], *, sampled: bool = False) -> Teacher:
    """Return the model that a client sent, under the client's id."""
    network = Network(prototypes[update.prototype], update.state, sampled)
    return Teacher(update.client_id, network, n_examples=update.n_examples, payload=update.payload)


def models_of(states: Mapping[str, State], prototypes: Mapping[str, Prototype], kind: str = "") -> list[Teacher]:
    """Return a model for each prototype's weights, under its name, with the kind before it."""
    return [Teacher(f"{kind} {name}".strip(), Network(prototypes[name], state)) for name, state in states.items()]


def answer(teacher: Teacher, *, inputs: Inputs, execution: Execution = Execution()) -> Predictions:
    """Let one that predicts answer for all inputs."""
    return Predictions(teacher.id, teacher.predict(inputs, execution))


def in_order(outcomes: Iterable[Predictions | Failure], ids: Sequence[str]) -> Iterator[Predictions | Failure]:
    """Yield the outcomes in the order of ``ids``, holding back only those that came too early.

    An engine answers in any order, and a floating-point sum depends on its order: what is added up goes through here.
    """
    early: dict[str, Predictions | Failure] = {}
    expected = iter(ids)
    wanted = next(expected, None)
    for outcome in outcomes:
        early[outcome.client_id] = outcome
        while wanted in early:
            yield early.pop(wanted)
            wanted = next(expected, None)


def gather(outcomes: Iterable[R | Failure], what: str) -> list[R]:
    """Return all results, or raise if the server's own work failed anywhere."""
    results: list[R] = []
    for outcome in outcomes:
        if isinstance(outcome, Failure):
            raise RuntimeError(f"{what} {outcome.client_id} failed: {outcome.reason}")
        results.append(outcome)
    return results


class Evaluation:
    """Tries models on the same inputs through an engine. Make it once and keep it: workers keep the inputs."""

    def __init__(self, engine: Engine, inputs: Inputs, execution: Execution = Execution()) -> None:
        self._engine = engine
        self._answer = partial(answer, inputs=inputs, execution=execution)

    def __call__(self, teachers: Sequence[Teacher]) -> Iterator[Predictions | Failure]:
        """Yield each one's answer, or why there is none, in the order given."""
        return in_order(self._engine(self._answer, teachers), [teacher.id for teacher in teachers])

    def accuracies(self, teachers: Sequence[Teacher], examples: Examples) -> dict[str, float | Failure]:
        """Return the accuracy of each by its id, or why there is none; the examples are those of the inputs."""
        labels, outputs = examples.labels, examples.outputs
        return {
            one.client_id: one if isinstance(one, Failure) else accuracy_of(one.logits, labels, outputs)
            for one in self(teachers)
        }


Accuracies = Callable[[Sequence[Teacher]], Mapping[str, float]]
"""Measures teachers on the server's validation data; returns their accuracies by their ids."""


# What makes a forward pass right and fast


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[nn.Module]:
    """Put the model into eval mode inside the block, without gradients, and restore each module's mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            yield model
    finally:
        for module, training in modes:
            module.training = training


def fold_batchnorm(model: nn.Module) -> nn.Module:
    """Return a model in eval mode with each BatchNorm folded into the convolution before it; the model stays as it is.

    w' = w γ / √(σ² + ε), b' = β + (b − μ) γ / √(σ² + ε): the same function up to rounding, at 1.5 times the speed. A
    model that cannot be traced (control flow that depends on its inputs) is returned itself.
    """
    if not any(isinstance(module, nn.BatchNorm2d) for module in model.modules()):
        return model
    try:
        return _fold(fx.symbolic_trace(model))
    except Exception:  # tracing runs the user's own forward, which may do anything
        return model


def _fold(traced: fx.GraphModule) -> fx.GraphModule:
    modules = dict(traced.named_modules())
    calls = Counter(node.target for node in traced.graph.nodes)
    for node in list(traced.graph.nodes):
        norm = modules.get(str(node.target)) if node.op == "call_module" else None
        if not isinstance(norm, nn.BatchNorm2d) or not norm.track_running_stats or not node.args:
            continue
        before = node.args[0]
        convolution = modules.get(str(before.target)) if before.op == "call_module" else None
        if type(convolution) is nn.Conv2d and len(before.users) == calls[before.target] == 1:
            traced.set_submodule(before.target, fuse_conv_bn_eval(convolution, norm))
            node.replace_all_uses_with(before)
            traced.graph.erase_node(node)
    traced.recompile()
    return traced


def recalibrate(model: nn.Module, inputs: Inputs, most: int = 2048) -> None:
    """Replace the running mean and variance of every BatchNorm by those of ``inputs``; labels are not needed.

    Each statistic becomes the plain mean over batches of at most so many inputs, spread evenly over all: a mean over
    2,048 is within a few percent of one over all. Everything but BatchNorm is in eval mode meanwhile, and each module's
    mode is restored. It happens on the device that the model is on.
    """
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    chosen = spread(len(inputs), most)
    with evaluation_mode(model), torch.inference_mode(mode=False), torch.no_grad():
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a cumulative mean
            norm.train()
        n = ceil(len(chosen) / BATCH)
        chunks = (chosen[first::n] for first in range(n))  # each from the whole pool, which may be sorted by class
        usable = (chunk for chunk in chunks if len(chunk) > 1 or len(chosen) == 1)
        for _, raw in batches(inputs.raw, usable, device_of(model)):
            model(inputs.encode(raw))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def spread(n: int, most: int) -> Tensor:
    """Return at most so many of the indices below n, evenly spread.

    >>> spread(10, 4)
    tensor([0, 2, 5, 7])
    """
    count = min(n, most)
    return torch.arange(count) * n // max(1, count)


def output_shape(prototype: Prototype, inputs: Inputs) -> tuple[int, ...]:
    """Return the shape of the outputs for one input, by trying the untrained model on the first input twice."""
    with torch.no_grad():
        model = prototype.load(init_state(prototype, 0))
        outputs: Tensor = model(inputs.batch(torch.zeros(2, dtype=torch.int64)))
    return tuple(outputs.shape[1:])
