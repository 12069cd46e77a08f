"""How long cells will take on this machine: a short measurement of training speed, and a count of the images."""

from __future__ import annotations

import os
from collections.abc import Iterable
from time import perf_counter

import torch
import torch.nn.functional as F

from feddf.config import Experiment
from feddf.runs.build import build_task, prototype_for
from feddf.runtime.device import threads
from feddf.states import init_state

ANSWERS_FOR_A_STEP = 3
"""A forward pass costs about a third of a training step."""


STEPS = 5


def seconds_of(experiments: Iterable[Experiment], parallel: int) -> float:
    """Return an estimate of the time for these runs, ``parallel`` at a time.

    Every architecture is timed for a few steps on one thread; training, asking, distillation and evaluation are counted
    in images. It is right within a factor of two on a quiet machine where students take all their steps; one that stops
    early takes less.
    """
    speeds: dict[str, float] = {}
    total = sum(_images(experiment) / _speed(experiment, speeds) for experiment in experiments)
    return total / max(1, min(parallel or 1, os.cpu_count() or 1))


def _images(experiment: Experiment) -> float:
    """Return the training steps of a run, in images."""
    clients, local, distill = experiment.clients, experiment.local, experiment.distill
    size = experiment.data.train_size or 50_000
    shard = size * (1 - experiment.data.validation) * experiment.data.train_fraction / clients.total
    trained = clients.cohort * local.epochs * shard
    students = len(experiment.prototypes)
    pool = (experiment.pool.size or 50_000) * experiment.pool.views
    test, validation = experiment.data.test_size or 10_000, size * experiment.data.validation
    asked = clients.cohort * (test + (pool if experiment.distills else 0)) + 2 * students * (test + validation)
    learned = students * distill.steps * distill.batch_size if experiment.distills else 0
    checks = students * distill.steps / distill.eval_every * validation if experiment.distills else 0
    return experiment.rounds * (trained + learned + (asked + checks) / ANSWERS_FOR_A_STEP)


def _speed(experiment: Experiment, known: dict[str, float]) -> float:
    """Return images a second in training, of the slowest prototype, on one thread."""
    key = f"{experiment.data.name} {experiment.data.image_size} {experiment.prototypes}"
    if key not in known:
        task = build_task(experiment.model_copy(update={"pool": experiment.pool.model_copy(update={"sources": ()})}))
        shape = task.data.shape
        batch = torch.arange(experiment.local.batch_size) % len(task.train)
        inputs, labels = task.train.inputs.batch(batch), task.train.labels[batch]
        speeds = []
        for spec in experiment.prototypes:
            prototype = prototype_for(spec, shape, task.data.train.outputs)
            model = prototype.load(init_state(prototype, 0)).train()
            with threads(1):
                F.cross_entropy(model(inputs), labels).backward()  # the first step prepares what the others use
                began = perf_counter()
                for _ in range(STEPS):
                    F.cross_entropy(model(inputs), labels).backward()
            speeds.append(STEPS * len(batch) / (perf_counter() - began))
        known[key] = min(speeds)
    return known[key]
