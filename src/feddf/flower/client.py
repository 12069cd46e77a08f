"""The client's side: a ClientApp around a model and data, or the few lines that an app of one's own needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from feddf import evaluate
from feddf.client import combine_halves, local_update
from feddf.config import ConfigError
from feddf.flower.inputs import Architectures, Labeled, as_examples, as_inputs, as_prototypes, classes_of
from feddf.flower.settings import MakePart, local_config, parts_in
from feddf.flower.wire import CONFIG, COUNT, METRICS, job_from, reply_content
from feddf.runs.methods import fit_prototypes
from feddf.runs.spool import ClientStates
from feddf.runtime.device import threads as on_threads
from feddf.runtime.execution import Execution
from feddf.types import Augment, Engine, Examples, Failure, Job, LocalTrain, Part, Prototype, Reply, Resources

Of = Callable[[Context], str]
"""Something that a node's context tells."""


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
    name: Of = name_by_partition,
    augment: Augment | None = None,
    threads: int | None = 1,
    device: str | Execution = "auto",
    parts: Mapping[str, MakePart] | None = None,
    states: Callable[[Context], Path] | None = None,
) -> ClientApp:
    """Return a ClientApp that trains one of the prototypes on data that never leave their place.

    ``data`` and ``test`` return this node's examples; ``prototype`` says which architecture it has (it may be left out
    where there is one). Epochs, batch, rate, optimizer and FedProx's μ are the server's to say. With one torch thread
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
    app = announce(ClientApp(), chosen, name)
    execution = Execution(device=device) if isinstance(device, str) else device

    def asked(message: Message, context: Context) -> tuple[Any, Prototype, list[Part]]:
        """Return what the server tells, this client's architecture, fitted to the method, and the method's parts."""
        told, own = message.content[CONFIG], known[chosen if isinstance(chosen, str) else chosen(context)]
        resources = Resources({own.name: own})
        named = parts_in(told, resources, parts)
        return told, fit_prototypes(resources, named).prototypes[own.name], named

    @app.train()
    def train(message: Message, context: Context) -> Message:
        with on_threads(threads) if threads else nullcontext():
            told, own, named = asked(message, context)
            examples = _labeled(data(context), own)
            update = partial(
                local_update,
                prototypes={own.name: own},
                train=examples,
                local=local_config(told),
                half=combine_halves([part.half for part in named]),
                augment=augment,
                execution=execution,
            )
            job = job_from(message, own.name, len(examples))
            if any(part.keeps for part in named):
                update = partial(_update_with_state, update, states(context) if states else None, told)
            return Message(reply_content(update(job)), reply_to=message)

    @app.evaluate()
    def try_model(message: Message, context: Context) -> Message:
        if test is None:
            raise ValueError("this client has no data to evaluate models on")
        with on_threads(threads) if threads else nullcontext(), execution.begun() as place:
            _, own, _ = asked(message, context)
            examples = _labeled(test(context), own)
            model = own.load(job_from(message, own.name, 0).state, place)
            metrics = MetricRecord({COUNT: len(examples), "accuracy": evaluate.accuracy(model, examples)})
        return Message(RecordDict({METRICS: metrics}), reply_to=message)

    return app


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


def _labeled(given: Labeled, prototype: Prototype) -> Examples:
    """Return examples; a client's own do not tell how many classes there are, so the model does."""
    if isinstance(given, Examples):
        return given
    return as_examples(given, classes_of({prototype.name: prototype}, as_inputs(given[0])))
