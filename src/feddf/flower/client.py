"""The client's side: a ClientApp around a model and data, or the few lines that an app of one's own needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from feddf import evaluate
from feddf.client import local_update, together
from feddf.config import ConfigError
from feddf.config.names import PARTS
from feddf.flower.conversion import Architectures, Labelled, as_examples, as_inputs, as_prototypes, classes_of
from feddf.flower.settings import PARTS_ORDER, local_from
from feddf.flower.wire import (
    ARRAYS,
    CONFIG,
    COUNT,
    METRICS,
    from_arrays,
    from_payload,
    to_arrays,
    to_payload,
)
from feddf.runs.kept import KeptStates
from feddf.runs.methods import binarisations
from feddf.runtime.device import threads as on_threads
from feddf.runtime.execution import Execution
from feddf.types import (
    Augment,
    Client,
    Examples,
    Failure,
    J,
    Job,
    LocalTrain,
    Part,
    Prototype,
    R,
    Reply,
    Resources,
    State,
)

Of = Callable[[Context], str]
"""Something that a node's context tells."""

MakePart = Callable[[Resources], Part]
"""What a part's name stands for."""


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
    parts: Mapping[str, MakePart] | None = None,
    states: Callable[[Context], Path] | None = None,
) -> ClientApp:
    """Return a ClientApp that trains one of the prototypes on data that never leave their place.

    ``data`` and ``test`` return this node's examples; ``prototype`` says which architecture it has (it may be left out
    where there is one). Epochs, batch, rate, optimizer and FedProx's μ are the server's orders. With one torch thread
    the same seeds give the same bytes on any machine of a kind; ``threads=None`` leaves torch as it is, for speed.
    ``device`` is where models are trained and tried: ``auto`` (an accelerator that passes a self-test, else the CPU),
    or a name as torch has it. What is sent comes from the CPU.

    A method may have parts on the client's side. Those that come with feddf are known by name; ``parts`` are one's own,
    by the name that the server gives them: nothing that a server names is imported. A part that keeps a state between
    rounds needs a folder of this client's own, which ``states`` returns.
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

    return app_at(site, which, name, threads, Execution(device=device), parts, states)


def app_at(
    site: Callable[[Context], Site],
    prototype: Of,
    name: Of,
    threads: int | None,
    execution: Execution = Execution(),
    parts: Mapping[str, MakePart] | None = None,
    states: Callable[[Context], Path] | None = None,
) -> ClientApp:
    """Return the app of a site that is looked up when a message comes."""
    app = introduce(ClientApp(), prototype, name)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with on_threads(threads) if threads else nullcontext():
            here = site(context)
            examples = here.data()
            orders: Any = message.content[CONFIG]
            prototypes = {here.prototype.name: here.prototype}
            named = parts_in(orders, prototypes, parts)
            local = local_from(orders)
            train = partial(
                local_update,
                prototypes=prototypes,
                train=examples,
                local=local,
                half=together([*binarisations(local), *(part.half for part in named)]),
                augment=here.augment,
                execution=execution,
            )
            job = _job(message, here.prototype, len(examples))
            if any(part.keeps for part in named):
                reply = _keeping(train, job, states(context) if states else None, orders)
            else:
                reply = train(job)
        metrics = MetricRecord({COUNT: reply.n_examples, **reply.metrics})
        content = RecordDict({ARRAYS: to_arrays(reply.state), METRICS: metrics, **to_payload(reply.payload)})
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


def parts_in(
    orders: Mapping[str, Any], prototypes: Mapping[str, Prototype], own: Mapping[str, MakePart] | None
) -> list[Part]:
    """Return the parts that a server orders; a name that is neither feddf's nor the client's own is refused."""
    found: list[Part] = []
    for name in filter(None, str(orders.get(PARTS_ORDER, "")).split(",")):
        known: Mapping[str, MakePart] = own if own and name in own else PARTS
        if name not in known:  # a module:attribute is none of the names
            raise ValueError(f"this client does not know the part '{name[:60]}'; give it to client_app as parts")
        found.append(known[name](Resources(prototypes)))
    return found


def _keeping(train: LocalTrain, job: Job, folder: Path | None, orders: Mapping[str, Any]) -> Reply:
    """Train with the state that this client kept, and keep what comes of it, before anything is sent."""
    if folder is None:
        raise ValueError("the method keeps a state between rounds: give client_app a folder for it, as states")
    folder.mkdir(parents=True, exist_ok=True)
    kept = KeptStates(folder, "anew" if orders.get("lost-state") == "anew" else "refuse")
    (outcome,) = kept.engine(_here)(train, [job])
    if isinstance(outcome, Failure):
        raise ValueError(outcome.reason)
    return outcome


def _here(function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
    """Run jobs as they are: what goes wrong is Flower's to tell."""
    return map(function, jobs)


def _labelled(given: Labelled, prototype: Prototype) -> Examples:
    """Return examples; a shard does not tell how many classes there are, so the model does."""
    if isinstance(given, Examples):
        return given
    return as_examples(given, classes_of({prototype.name: prototype}, as_inputs(given[0])))


def _job(message: Message, prototype: Prototype, n_examples: int) -> Job:
    config: Any = message.content[CONFIG]
    client = Client(str(config["client"]), prototype.name, torch.arange(n_examples))
    known = int(config["server-round"]), _state(message, prototype), int(config["seed"])
    return Job(client, *known, from_payload(message.content.array_records), int(config.get("counted", 0)))


def _state(message: Message, prototype: Prototype) -> State:
    with torch.random.fork_rng(devices=[]):  # building draws initial weights that are thrown away
        manifest = prototype.build().state_dict()
    return from_arrays(message.content.array_records[ARRAYS], manifest)
