"""The client's side: a ClientApp around a model and data, or the few lines that an app of one's own needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from feddf import evaluate
from feddf.config import ConfigError
from feddf.flower.conversion import Architectures, Labelled, as_examples, as_inputs, as_prototypes, classes_of
from feddf.flower.settings import DISCLOSE, local_from
from feddf.flower.wire import ARRAYS, CLASS_COUNTS, CONFIG, COUNT, METRICS, from_arrays, to_arrays
from feddf.local import local_update
from feddf.runtime.execution import Execution
from feddf.runtime.threads import threads as on_threads
from feddf.types import Augment, Client, Examples, Job, Prototype, State

Of = Callable[[Context], str]
"""Something that a node's context tells."""


@dataclass(frozen=True)
class Site:
    """What a client has: its architecture, its training data, and perhaps data to evaluate models on."""

    prototype: Prototype
    data: Callable[[], Examples]
    test: Callable[[], Examples] | None = None
    augment: Augment | None = None


def name_by_partition(context: Context) -> str:
    """Return ``client-`` and the node's ``partition-id``; where it has none, ``node-`` and Flower's id."""
    number = context.node_config.get("partition-id")
    return f"node-{context.node_id}" if number is None else f"client-{number}"


def introduce(app: ClientApp, prototype: str | Of, name: Of = name_by_partition) -> ClientApp:
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
    data: Callable[[Context], Labelled],
    *,
    prototype: str | Of | None = None,
    test: Callable[[Context], Labelled] | None = None,
    name: Of = name_by_partition,
    augment: Augment | None = None,
    threads: int | None = 1,
    device: str = "auto",
) -> ClientApp:
    """Return a ClientApp that trains one of the prototypes on data that never leave their place.

    ``data`` and ``test`` return this node's examples; ``prototype`` says which architecture it has (it may be left out
    where there is one). Epochs, batch, rate, optimizer and FedProx's μ are the server's orders. With one torch thread
    the same seeds give the same bytes on any machine of a kind; ``threads=None`` leaves torch as it is, for speed.
    ``device`` is where models are trained and tried: ``auto`` (an accelerator that passes a self-test, else the CPU),
    or a name as torch has it. What is sent comes from the CPU.
    """
    known = as_prototypes(prototypes)
    if prototype is None and len(known) > 1:
        raise ConfigError.at("prototype", None, f"say which of {', '.join(known)} this client has")
    chosen = prototype if prototype is not None else next(iter(known))

    def which(context: Context) -> str:
        return chosen if isinstance(chosen, str) else chosen(context)

    def site(context: Context) -> Site:
        own = known[which(context)]
        return Site(
            own,
            lambda: _labelled(data(context), own),
            (lambda: _labelled(test(context), own)) if test is not None else None,
            augment,
        )

    return app_at(site, which, name, threads, Execution(device=device))


def app_at(
    site: Callable[[Context], Site], prototype: Of, name: Of, threads: int | None, execution: Execution = Execution()
) -> ClientApp:
    """Return the app of a site that is looked up when a message comes."""
    app = introduce(ClientApp(), prototype, name)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with on_threads(threads) if threads else nullcontext():
            here = site(context)
            examples = here.data()
            orders: Any = message.content[CONFIG]
            update = local_update(
                _job(message, here.prototype, len(examples)),
                prototypes={here.prototype.name: here.prototype},
                train=examples,
                local=local_from(orders),
                augment=here.augment,
                disclose=bool(orders.get(DISCLOSE, False)),
                execution=execution,
            )
        metrics: dict[str, Any] = {COUNT: update.n_examples, **update.metrics}
        if update.class_counts is not None:
            metrics[CLASS_COUNTS] = list(update.class_counts)
        content = RecordDict({ARRAYS: to_arrays(update.state), METRICS: MetricRecord(metrics)})
        return Message(content, reply_to=message)

    @app.evaluate()
    def try_model(message: Message, context: Context) -> Message:
        here = site(context)
        if here.test is None:
            raise ValueError("this client has no data to evaluate models on")
        with on_threads(threads) if threads else nullcontext(), execution.begun() as place:
            examples = here.test()
            model = here.prototype.load(_state(message, here.prototype), place)
            metrics = MetricRecord({COUNT: len(examples), "accuracy": evaluate.accuracy(model, examples)})
        return Message(RecordDict({METRICS: metrics}), reply_to=message)

    return app


def _labelled(given: Labelled, prototype: Prototype) -> Examples:
    """Return examples; a shard does not tell how many classes there are, so the model does."""
    if isinstance(given, Examples):
        return given
    return as_examples(given, classes_of({prototype.name: prototype}, as_inputs(given[0])))


def _job(message: Message, prototype: Prototype, n_examples: int) -> Job:
    config: Any = message.content[CONFIG]
    client = Client(str(config["client"]), prototype.name, torch.arange(n_examples))
    return Job(client, int(config["server-round"]), _state(message, prototype), int(config["seed"]))


def _state(message: Message, prototype: Prototype) -> State:
    with torch.random.fork_rng(devices=[]):  # building draws initial weights that are thrown away
        manifest = prototype.build().state_dict()
    return from_arrays(message.content.array_records[ARRAYS], manifest)
