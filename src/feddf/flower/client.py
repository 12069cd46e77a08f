"""The client's side: a ClientApp around a model and data, or the few lines that an app of one's own needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn

from feddf import evaluate
from feddf.admit import form_of
from feddf.client import combine_halves, local_update
from feddf.config import ConfigError, Experiment
from feddf.data.datasets import flip_crop
from feddf.flower.settings import (
    Architectures,
    Labeled,
    MakePart,
    as_examples,
    as_inputs,
    as_prototypes,
    local_config,
    parts_in,
    settings_of,
)
from feddf.flower.wire import CONFIG, COUNT, METRICS, job_from, reply_content
from feddf.fusion.knowledge import KNOWN_CHANNELS
from feddf.runs.build import Parts, augments, build, client_name
from feddf.runs.methods import fit_prototypes
from feddf.runs.spool import ClientStates
from feddf.runtime.device import threads as on_threads
from feddf.runtime.execution import Execution
from feddf.types import Augment, Engine, Examples, Failure, Inputs, Job, LocalTrain, Part, Prototype, Reply, Resources

Of = Callable[[Context], str]  # something that a node's context tells


def name_by_partition(context: Context) -> str:
    """Return ``client-`` and the node's ``partition-id``; where it has none, ``node-`` and Flower's id."""
    number = context.node_config.get("partition-id")
    return f"node-{context.node_id}" if number is None else f"client-{number}"


def announce(app: ClientApp, prototype: str | Of, name: Of = name_by_partition) -> ClientApp:
    """Let an app say, when the server asks, which client it is and which architecture it has.

    An app of one's own needs no more than this to take part with others of different architectures.
    """

    @app.query()
    def who(message: Message, context: Context) -> Message:
        which = prototype if isinstance(prototype, str) else prototype(context)
        told = ConfigRecord({"client": name(context), "prototype": which})
        return Message(RecordDict({CONFIG: told}), reply_to=message)

    return app


def client_app(
    prototypes: Architectures,
    data: Callable[[Context], Labeled],
    *,
    prototype: str | Of | None = None,
    test: Callable[[Context], Labeled] | None = None,
    pool: Callable[[Context], Inputs | Tensor | None] | None = None,
    name: Of = name_by_partition,
    augment: Augment | None = None,
    threads: int | None = 1,
    device: str | Execution = "auto",
    parts: Mapping[str, MakePart] | None = None,
    states: Callable[[Context], Path] | None = None,
    known: Callable[[Context], Sequence[int]] | None = None,
) -> ClientApp:
    """Return a ClientApp that trains one of the prototypes on data that never leave their place.

    ``data`` and ``test`` return this node's examples; ``prototype`` says which architecture it has (it may be left out
    where there is one). Epochs, batch, rate, optimizer and FedProx's μ are the server's to say. With one torch thread
    the same seeds give the same bytes on any machine of a kind; ``threads=None`` leaves torch as it is, for speed.
    ``device`` is where models are trained and tried: ``auto`` (an accelerator that passes a self-test, else the CPU),
    or a name as torch has it. What is sent comes from the CPU.

    A method may have parts on the client's side. Those that come with feddf are known by name; ``parts`` are one's own,
    by the name that the server gives them: nothing that a server names is imported. A part that keeps a state between
    rounds needs a folder of this client's own, which ``states`` returns. Where clients send answers instead of weights,
    ``pool`` returns the agreed inputs, in the server's order. ``known`` returns the channels that this client's labels
    tell apart, where others have labels of more; its server asks for them (``fusion.parts = ["known-channels"]``).
    """
    architectures = as_prototypes(prototypes)
    if prototype is None and len(architectures) > 1:
        raise ConfigError.at("prototype", None, f"say which of {', '.join(architectures)} this client has")
    chosen = prototype if prototype is not None else next(iter(architectures))
    execution = Execution(device=device) if isinstance(device, str) else device
    limited = partial(on_threads, threads) if threads else nullcontext
    node = _Node(architectures, chosen, data, test, pool, augment, limited, execution, parts or {}, states, known)
    app = announce(ClientApp(), chosen, name)
    app.train()(node.train)
    app.evaluate()(node.evaluate)
    return app


@dataclass(frozen=True)
class _Node:
    """What a client has at its own place, and what it does when the server asks."""

    prototypes: Mapping[str, Prototype]
    chosen: str | Of
    data: Callable[[Context], Labeled]
    test: Callable[[Context], Labeled] | None
    pool: Callable[[Context], Inputs | Tensor | None] | None
    augment: Augment | None
    threads: Callable[[], AbstractContextManager[None]]
    execution: Execution
    parts: Mapping[str, MakePart]
    states: Callable[[Context], Path] | None
    known: Callable[[Context], Sequence[int]] | None

    def train(self, message: Message, context: Context) -> Message:
        """Train as the server says, and send what came of it."""
        with self.threads():
            told, own, parts = self._asked(message, context)
            examples = as_examples(self.data(context), own)
            update = partial(local_update, prototypes={own.name: own}, train=examples, local=local_config(told))
            half = combine_halves([part.half for part in parts])
            update = partial(update, half=half, augment=self.augment, execution=self.execution)
            if any(part.keeps for part in parts):
                update = partial(_update_with_state, update, self.states(context) if self.states else None, told)
            job = job_from(message, own.name, len(examples))
            if self.known is not None:
                mask = _mask(self.known(context), examples.n_classes, KNOWN_CHANNELS in form_of(job, parts))
                job = replace(job, client=replace(job.client, known=mask))
            return Message(reply_content(update(job)), reply_to=message)

    def evaluate(self, message: Message, context: Context) -> Message:
        """Try the server's model on this client's own test data."""
        if self.test is None:
            raise ValueError("this client has no data to evaluate models on")
        with self.threads(), self.execution.begun() as place:
            _, own, _ = self._asked(message, context)
            examples = as_examples(self.test(context), own)
            model = own.load(job_from(message, own.name, 0).state, place)
            metric = examples.outputs.metric
            metrics = MetricRecord({COUNT: len(examples), metric: evaluate.accuracy(model, examples)})
        return Message(RecordDict({METRICS: metrics}), reply_to=message)

    def _asked(self, message: Message, context: Context) -> tuple[Any, Prototype, list[Part]]:
        """Return what the server tells, this client's architecture, fitted to the method, and the method's parts."""
        told = message.content[CONFIG]
        own = self.prototypes[self.chosen if isinstance(self.chosen, str) else self.chosen(context)]
        pool = self.pool(context) if self.pool else None
        resources = Resources({own.name: own}, None if pool is None else as_inputs(pool))
        parts = parts_in(told, resources, self.parts)
        return told, fit_prototypes(resources, parts).prototypes[own.name], parts


def _mask(known: Sequence[int], channels: int, asked: bool) -> Tensor:
    """Return the channels that this client knows as a mask; raise where that would be lost."""
    if wrong := [channel for channel in known if not 0 <= channel < channels]:
        raise ValueError(f"this client's 'known' has the channel {wrong[0]}; there are 0 to {channels - 1}")
    if not asked and len(set(known)) < channels:
        raise ValueError("this client knows only some channels; its server must set fusion.parts = ['known-channels']")
    return torch.zeros(channels, dtype=torch.bool).index_fill(0, torch.tensor(known, dtype=torch.int64), True)


def _update_with_state(update: LocalTrain, folder: Path | None, told: Mapping[str, Any], job: Job) -> Reply:
    """Train with the state that this client kept, and keep what comes of it, before anything is sent."""
    if folder is None:
        raise ValueError("the method keeps a state between rounds: give client_app a folder for it, as states")
    folder.mkdir(parents=True, exist_ok=True)
    kept = ClientStates(folder, "anew" if told.get("lost-state") == "anew" else "refuse")
    (outcome,) = kept.engine(cast(Engine, map))(update, [job])  # what the training raises is Flower's to tell
    if isinstance(outcome, Failure):
        raise ValueError(outcome.reason)
    return outcome


def client_app_of(
    experiment: Experiment,
    *,
    states: str | Path | None = None,
    parts: Mapping[str, MakePart] | None = None,
    trust: bool = False,
) -> ClientApp:
    """Return the app of an experiment's clients: a node's ``partition-id`` says which of them it is.

    The data are loaded where the client is, when its first message comes; so the app itself is small and travels.
    ``states`` is a folder for what clients keep between rounds, where a method has them keep something; ``parts`` are
    one's own, as for :func:`feddf.flower.client_app`.
    """
    labels, run = [spec.label for spec in experiment.prototypes], settings_of(experiment).run
    built = partial(_build_here, experiment.model_dump_json(), trust)

    def model(label: str) -> nn.Module:
        return built().prototypes[label].build()

    def examples(context: Context) -> Examples:
        indices = built().federation.clients[_number(context)].indices
        assert indices is not None, "the clients of an experiment have their examples here"
        return built().task.train.take(indices)

    def known(context: Context) -> list[int]:
        client, channels = built().federation.clients[_number(context)], built().task.train.n_classes
        return list(range(channels)) if client.known is None else client.known.nonzero().flatten().tolist()

    def augment(images: Tensor, generator: torch.Generator) -> Tensor:
        return flip_crop(images, generator) if augments(experiment, built().task.data) else images

    return client_app(
        {label: partial(model, label) for label in labels},
        examples,
        pool=lambda context: built().task.pool,
        prototype=lambda context: labels[_number(context) % len(labels)],
        name=lambda context: client_name(_number(context), experiment.clients.total),
        augment=augment,
        device=Execution(device=run.device, precision=run.precision, deterministic=run.deterministic),
        parts=parts,
        states=None if states is None else lambda context: Path(states),
        known=known,
    )


@lru_cache(maxsize=2)
def _build_here(experiment: str, trust: bool) -> Parts:
    return build(Experiment.model_validate_json(experiment), trust=trust)


def _number(context: Context) -> int:
    number = context.node_config.get("partition-id")
    if number is None:
        raise ValueError("this node has no partition-id; start it with --node-config 'partition-id=0'")
    return int(number)
