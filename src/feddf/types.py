"""The few types that all packages share. Values, not services: they are frozen and hold next to no logic.

A round is a value passing through plain functions::

    ServerState ──sample──> [Job] ──engine(train)──> [Reply | Failure] ──admit──> [Update] ──fuse──> Fused

A method is two plain halves and what travels between them: the server's is a :data:`Fusion`, the client's a
:data:`ClientHalf`, and a :data:`Payload` goes beside the weights in either direction.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from feddf.outputs import Outputs, classes
from feddf.runtime.execution import copier, put_channels_last

State = Mapping[str, Tensor]
"""A ``state_dict``, treated as a value: a function never changes one that it was given."""

Payload = Mapping[str, State]
"""Small named states that travel beside the weights, or that a client keeps between rounds."""

Score = Callable[[nn.Module], float | Tensor]
"""Higher is better; usually the accuracy on the server's validation data. One number: as a tensor, it stays on the
model's device until it is read."""

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""(raw batch, generator) -> raw batch."""


class Rows(Protocol):
    """What raw storage must offer: a tensor does, and so does a file that is too large for memory."""

    @property
    def shape(self) -> Sequence[int]:
        """The number of rows, then the shape of one."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of a value."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Tensor, /) -> Tensor: ...


@dataclass(frozen=True)
class Inputs:
    """Inputs without labels: raw storage, and how a raw batch becomes what the models expect.

    ``raw`` stays as small as it was stored (bytes for images); ``encode`` runs on a batch at a time. With ``views`` = V
    the rows i, i + n, ..., i + (V − 1) n are versions of one input.
    """

    raw: Rows
    encode: Callable[[Tensor], Tensor]
    views: int = 1

    def __len__(self) -> int:
        return len(self.raw)

    def take(self, indices: Tensor) -> Inputs:
        """Return the inputs at ``indices``; those in a file stay there."""
        view = getattr(self.raw, "view_of", None)
        return Inputs(view(indices) if callable(view) else self.raw[indices], self.encode)

    def batch(self, indices: Tensor) -> Tensor:
        """Return the encoded inputs at ``indices``."""
        return self.encode(self.raw[indices])


@dataclass(frozen=True)
class Examples:
    """Inputs with their labels, and what a model's outputs for them mean.

    ``groups`` has a number for each example (a topic, a site), where clients are to differ by that and not by labels.
    """

    inputs: Inputs
    labels: Tensor
    outputs: Outputs
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.outputs, Outputs):
            raise ValueError(f"outputs = {self.outputs!r}: must say what outputs mean, for instance feddf.classes(10)")

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def n_classes(self) -> int:
        """The number of classes that labels tell apart."""
        assert self.outputs.channels is not None, "labeled examples have a number of classes"
        return self.outputs.channels

    @property
    def partitioned_by(self) -> tuple[Tensor, int]:
        """A number for each example, and how many there are: its class or group, or a group of similar labels."""
        if self.groups is None and self.outputs.counts_classes:
            return self.labels, self.n_classes
        groups = self.outputs.groups(self.labels, self.outputs) if self.groups is None else self.groups
        return groups, int(groups.max()) + 1

    def take(self, indices: Tensor) -> Examples:
        """Return the examples at ``indices``, as a data set of their own."""
        groups = None if self.groups is None else self.groups[indices]
        return Examples(self.inputs.take(indices), self.labels[indices], self.outputs, groups)


@dataclass(frozen=True)
class Prototype:
    """One architecture of the federation (an element of 𝒫 in Algorithm 3) and how to build it.

    ``fit`` changes the built module to the shapes of a state, for methods whose layers grow.
    """

    name: str
    build: Callable[[], nn.Module]
    fit: Callable[[nn.Module, State], None] | None = None

    def load(self, state: State, device: torch.device | str = "cpu") -> nn.Module:
        """Build the architecture, put ``state`` into it and return it on a device, in eval mode."""
        copied = _template(self) if self.fit is None and isinstance(self.build, Hashable) else None
        if copied is None:
            model = _built(self)
            if self.fit is not None:
                self.fit(model, state)
        else:
            model = copied()
        model.load_state_dict(dict(state), strict=True)
        put_channels_last(model)
        return model.to(device).eval()


def _built(prototype: Prototype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):  # building draws initial weights that are thrown away
        return prototype.build()


@lru_cache(maxsize=16)
def _template(prototype: Prototype) -> Callable[[], nn.Module] | None:
    return copier(_built(prototype))


@dataclass(frozen=True)
class Client:
    """A member of the federation. ``indices`` are its training examples, ``None`` where only it knows them.

    ``known`` is a mask of the channels that its labels tell apart, ``None`` for all.
    """

    id: str
    prototype: str
    indices: Tensor | None = field(default=None, compare=False)
    known: Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Job:
    """All that a client may know when it trains: the weights (if any) and the payload it was sent, and its seed.

    ``counted`` is the last round in which an update of this client was fused, 0 before there is one: a client that
    keeps a state between rounds continues from its version of that round. ``kept`` is that version if the client is
    simulated; a real client stores it itself.
    """

    client: Client
    round: int
    state: State
    seed: int
    payload: Payload = field(default_factory=dict)
    counted: int = 0
    kept: Payload = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The client's id."""
        return self.client.id


@dataclass(frozen=True)
class Reply:
    """What a client sends back: its weights, n_k, the number of examples that they were trained on, and a payload.

    It is used only after it has passed the gate, which makes an :class:`Update` of it. ``kept`` is what the client
    needs in its next round; it is stored for the client and not sent to the server.
    """

    client_id: str
    prototype: str
    round: int
    state: State
    n_examples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    payload: Payload = field(default_factory=dict)
    kept: Payload = field(default_factory=dict)


@dataclass(frozen=True)
class Update(Reply):
    """A reply that has passed the gate, and the server's marks on it.

    An update that does not teach (``teaches``) is averaged only. A teacher's weight is multiplied by the ``trust`` in
    its client.
    """

    teaches: bool = True
    trust: float = 1.0


@dataclass(frozen=True)
class Failure:
    """A client (or another piece of work) that raised, died, was late or was refused, and why."""

    client_id: str
    reason: str


@dataclass(frozen=True)
class OutOfMemory(Failure):
    """Work that ran out of device memory; alone on the device it may fit."""


@dataclass(frozen=True)
class WorkerDied(Failure):
    """Work whose worker died, perhaps for another reason than this work."""


class Refusal(Exception):
    """Raised by a fusion that finds updates unfit for use: the round continues without them, or is tried again."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        super().__init__("; ".join(f"{failure.client_id}: {failure.reason}" for failure in failures))
        self.failures = tuple(failures)

    def __reduce__(self) -> tuple[Any, ...]:
        return Refusal, (self.failures,)


@dataclass(frozen=True)
class ServerState:
    """All that a checkpoint holds.

    ``models`` are the weights of each prototype, ``own`` the tensors that a single client continues with (by its id),
    and ``memory`` what a fusion remembers between rounds: by the fusion's name for it, then by a key of its choice.
    ``counted`` is the last round in which each client's update was fused, if clients keep a state between rounds.
    """

    round: int
    models: Mapping[str, State]
    own: Mapping[str, State] = field(default_factory=dict)
    memory: Mapping[str, Mapping[str, State]] = field(default_factory=dict)
    counted: Mapping[str, int] = field(default_factory=dict)

    def next(self, models: Mapping[str, State]) -> ServerState:
        """Return the state after one more round, which ends with these models and remembers nothing."""
        return ServerState(self.round + 1, models)

    def sent_to(self, client: Client) -> State:
        """Return the weights that a client starts from: its prototype's, except for what is its own."""
        own = self.own.get(client.id)
        return {**self.models[client.prototype], **own} if own else self.models[client.prototype]


@dataclass(frozen=True)
class Fused:
    """What a fusion returns: the next server state, the weights that it started from (line 11), and notes.

    ``ensemble`` is what taught, so that it can be measured (a :class:`feddf.fusion.ensemble.Ensemble`). If an ensemble
    taught that predicts the pool only, ``no_ensemble`` says why.
    """

    server: ServerState
    start: Mapping[str, State]
    notes: Mapping[str, Any] = field(default_factory=dict)
    ensemble: Any = None
    no_ensemble: str = ""


@dataclass(frozen=True)
class Round:
    """One finished communication round."""

    fused: Fused
    updates: Sequence[Update]
    failures: Sequence[Failure]
    attempts: int
    seconds: Mapping[str, float]
    bytes_down: Mapping[str, int] = field(default_factory=dict)

    @property
    def server(self) -> ServerState:
        """The server's state after the round."""
        return self.fused.server


class Named(Protocol):
    """Work with a name, so that a failure can say whose it was."""

    @property
    def id(self) -> str:
        """The name under which a failure is recorded."""


J = TypeVar("J", bound=Named)
R = TypeVar("R")


class Engine(Protocol):
    """A parallel map that never raises for a job: it yields a result or a failure for each, in any order."""

    def __call__(self, function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
        """Run ``function`` on every job."""


LocalTrain = Callable[[Job], Reply]
"""Trains a client on its own examples."""


# The client's half of a method: Algorithm 2 with four open places


@dataclass(frozen=True)
class Training:
    """One client's training in one round, as a client half sees it: its job, its labels and the steps that it takes.

    ``rates`` is the sum of the learning rates of all ``steps``: η · K where the rate is constant.
    """

    job: Job
    prototype: Prototype
    labels: Tensor
    outputs: Outputs
    optimizer: str
    steps: int
    rates: float


@dataclass(frozen=True)
class Sent:
    """What a client sends after training, weights (``None``: the trained ones) and a payload, and what it keeps."""

    state: State | None = None
    payload: Payload = field(default_factory=dict)
    kept: Payload = field(default_factory=dict)


@dataclass(frozen=True)
class Steps:
    """The open places of a training: the loss, a correction of the gradient after ``backward``, and its end.

    The ``loss`` is a function of a mini-batch's outputs, labels and encoded inputs. ``batches`` makes an epoch's
    mini-batches from a client's indices; without it they are in random order.
    """

    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    correct: Callable[[], None] | None = None
    finish: Callable[[], Sent] | None = None
    batches: Callable[[Tensor], Iterator[Tensor]] | None = None


ClientHalf = Callable[[nn.Module, Training], Steps]
"""Begins a training: it may change the model (freeze or binarize weights), and returns what happens in its steps and
at its end. It is pickled and sent to where clients train, so it is a module's function, or a partial of one."""


@dataclass(frozen=True)
class TensorForm:
    """What a tensor of a payload must be: its shape (``None``: any size), its type and its bounds."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    least: float
    most: float


Form = Mapping[str, Mapping[str, TensorForm]]
"""What a payload must hold: the tensors of each named state."""


@dataclass(frozen=True)
class Part:
    """A part of a method, added to others: both halves, and what travels between them.

    ``half`` is the client's; ``fuse`` goes around the server's fusion. ``send`` gives the payload of a job; ``form``
    says what the reply to a job must hold beside the weights, and ``complaint`` what is wrong with its values, if
    anything. With ``keeps``, the client has a state of its own between rounds. ``fit`` gives modules the shapes of a
    state, for all that is built after the method; a fusion that loads grown models itself fits its own prototypes.

    Weights travel in both directions unless a part says that they do not (``weights_down``, ``weights_up``). A client
    that is sent none begins from ones drawn by its seed, which its half may replace; one that sends none returns an
    empty state. Without ``tells_count`` clients withhold how many examples they have, and report 1. Remote clients find
    their half by its ``name``, and build it from the arguments in ``told``.
    """

    half: ClientHalf | None = None
    fuse: Callable[[Fusion], Fusion] = lambda inner: inner
    send: Callable[[ServerState, Client], Payload] = lambda server, client: {}
    form: Callable[[Job], Form] = lambda job: {}
    complaint: Callable[[Reply], str | None] = lambda reply: None
    keeps: bool = False
    fit: Callable[[nn.Module, State], None] | None = None
    weights_down: bool = True
    weights_up: bool = True
    tells_count: bool = True
    name: str = ""
    told: Mapping[str, bool | int | float | str] = field(default_factory=dict)


Rule = Callable[[State, Sequence[Update]], State]
"""(previous weights, updates of one prototype) -> weights to start from."""

Fusion = Callable[[ServerState, Sequence[Update], int], Fused]
"""(server, updates sorted by client id, seed) -> the next server state, with notes."""

Weight = Tensor | float | Callable[[Tensor], Tensor]
"""How much a teacher counts: one number, one for each class (M), one for each input of the pool (n × 1), or a function
from its logits to n × 1 numbers."""


class WeightedLogits(NamedTuple):
    """One teacher's logits, and how much they count: one number, one a sample (n × 1) or one a class (M)."""

    logits: Tensor
    weight: Tensor | float = 1.0


Target = Callable[[Iterable[WeightedLogits], float, Outputs], Tensor]
"""(the teachers' votes as a stream, temperature, what outputs mean) -> what a student should answer: one row a sample,
for classes their probabilities."""


@dataclass(frozen=True)
class Resources:
    """What the server has to fuse with: architectures, an unlabeled pool, and perhaps labeled validation examples.

    ``augment`` changes raw batches of the pool before students and teachers see them. ``outputs`` is what
    the models' outputs mean, and ``n_clients`` says how many clients have an architecture.
    """

    prototypes: Mapping[str, Prototype]
    pool: Inputs | None = None
    validation: Examples | None = None
    augment: Augment | None = None
    outputs: Outputs = classes()
    n_clients: Callable[[str], int] | None = None

    @property
    def labeled(self) -> Examples:
        """The validation examples, where there must be some."""
        if not self.validation:
            raise ValueError("this needs validation data, and the server has none")
        return self.validation


@dataclass(frozen=True)
class Method:
    """A fusion, and what it asks of the clients beyond Algorithm 2: its ``parts``.

    The same clients are sampled for ``rounds_per_cohort`` rounds.
    """

    fuse: Fusion
    parts: tuple[Part, ...] = ()
    rounds_per_cohort: int = 1
