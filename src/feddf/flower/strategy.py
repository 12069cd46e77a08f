"""FedDF as a Flower strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from feddf.flower import evaluation
from feddf.flower.exchange import exchange
from feddf.flower.holdings import (
    Architectures,
    Labelled,
    as_examples,
    as_inputs,
    as_prototypes,
    check_labels,
    check_weights,
    classes_of,
    nothing,
)
from feddf.flower.post import Post
from feddf.flower.roster import Roster
from feddf.flower.settings import FlowerSettings, orders
from feddf.flower.wire import job_message, packed, to_arrays, unpacked, update_from
from feddf.rounds import Federation, collect, fuse_usable, jobs_for, play, sample
from feddf.runs.build import open_engine
from feddf.runs.config import check, differences, parse
from feddf.runs.judge import court, mean_metrics
from feddf.runs.methods import fusion_of
from feddf.runs.run import recorded
from feddf.runs.settings import ConfigError
from feddf.runs.spool import remembering
from feddf.runs.store import Record, RunFolder
from feddf.seeds import derive
from feddf.states import initial
from feddf.types import Engine, Failure, Inputs, J, Job, R, Round, ServerState, State, Update

_log = logging.getLogger("flwr")


class FedDF(Strategy):
    """Fuse clients of different architectures by ensemble distillation (Lin et al. 2020), over Flower.

    ``prototypes`` says how each architecture is built; every client introduces itself with one of their names. ``pool``
    (unlabeled) and ``validation`` stay on the server, as does ``test``, by which rounds are judged (default: the
    validation data). The run is kept in ``folder`` as any other: started again, it goes on after the last whole
    round; ``feddf report`` reads it. ``members`` gives names to Flower's node ids and lets only those take part.
    A client that is not connected has ``wait`` seconds to come, in the beginning and in every round.

    All other arguments are feddf's own settings: ``method`` ("feddf", "fedavg"), ``clients`` (how many are expected),
    ``fraction``, ``quorum``, ``deadline``, ``seed``, ``local_epochs``, ``proximal`` (FedProx), ``server_momentum``
    (FedAvgM), ``drop_worst``, ``distill_steps``, ... ``evaluate_fraction`` of the clients try the fused model on their
    own data each round.

    >>> import tempfile; from torch import nn, zeros
    >>> pool, folder = zeros(8, 4), tempfile.mkdtemp()
    >>> strategy = FedDF({"line": lambda: nn.Linear(4, 2)}, pool=pool, folder=folder, clients=3, stop="steps")
    >>> strategy.settings.method
    'feddf'
    """

    def __init__(
        self,
        prototypes: Architectures,
        *,
        folder: str | Path,
        pool: Inputs | Tensor | None = None,
        validation: Labelled | None = None,
        test: Labelled | None = None,
        members: Mapping[int, str] | None = None,
        wait: float = 60.0,
        poll: float = 0.2,
        **settings: Any,
    ) -> None:
        self.prototypes = as_prototypes(prototypes)
        self.pool = as_inputs(pool) if pool is not None else None
        self.validation = as_examples(validation) if validation is not None else nothing()
        self.test = as_examples(test) if test is not None else self.validation
        self.settings = parse({**settings, **self._holdings()}, FlowerSettings)
        self._check()
        self.folder, self.wait, self.poll = Path(folder), wait, poll
        self._members = _by_number(members)
        self._post: Post | None = None
        self._gathered: Post | None = None
        self._server = ServerState(
            0, {name: initial(prototype, self.settings.seed) for name, prototype in self.prototypes.items()}
        )
        self._sent: list[tuple[Message, Job]] = []
        self._roster: Roster | None = None

    def _holdings(self) -> dict[str, Any]:
        sizes = {"pool_size": len(self.pool) if self.pool is not None else 0, "validation_size": len(self.validation)}
        return {"prototypes": tuple(self.prototypes), **sizes}

    def _check(self) -> None:
        labelled, pooled = len(self.validation) > 0, self.pool is not None
        check(self.settings, self.settings.contradictions(labelled=labelled, pooled=pooled))
        for inputs in (self.pool, self.test.inputs if len(self.test) else None):
            if inputs is not None:
                self.validation = replace(self.validation, n_classes=classes_of(self.prototypes, inputs))
        for key, examples in (("validation", self.validation), ("test", self.test)):
            if len(examples):
                check_labels(key, examples, self.validation.n_classes)
        for name, prototype in self.prototypes.items():
            try:
                to_arrays(prototype.build().state_dict())
            except TypeError as error:
                raise ConfigError.at("prototypes", name, f"Flower cannot carry its weights: {error}") from error

    # The loop

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Play the rounds that the folder does not hold yet, and return Flower's result.

        ``timeout`` is a round's deadline in seconds, ``num_rounds`` the rounds in all; both default to the settings.
        ``initial_arrays`` are weights to begin with (default: drawn by the seed); those of several prototypes are named
        ``prototype/key``. Of a run that was killed, the result has only the rounds played now; the folder has all.
        """
        self._adopt(initial_arrays, num_rounds, timeout, train_config)
        result = Result()
        folder = self._open()
        with folder.locked(), open_engine(self.settings) as engines:
            saved, complaints = folder.latest()
            for complaint in complaints:
                _log.warning("feddf: %s", complaint)
            if saved is not None:
                check_weights(folder.path, saved.models, self._server.models)
            self._server = saved or self._server
            folder.forget_after(self._server.round)
            self.summary()
            fuse = fusion_of(self.settings, self.prototypes, self.validation, self.pool, engines.server)
            post = self._post_of(grid)
            clients = remembering(self._clients(post), folder.path / "spool")
            games = self._games(post, engine=clients, fuse=fuse)
            jury = court(
                engines.server, self.prototypes, self.test, self.validation,
                log_clients=self.settings.log_clients, log_ensemble=self.settings.log_ensemble,
            )  # fmt: skip
            if evaluate_fn is not None and self._server.round == 0:
                self._told(result, 0, evaluate_fn(0, packed(self._server.models)))
            ask = partial(self._evaluate, post, evaluate_config or ConfigRecord(), evaluate_fn, result)
            planned = islice(games, max(0, self.settings.rounds - self._server.round))
            known, keep = self._roster_of(folder.path).clients, self.settings.keep_checkpoints
            for record in recorded(planned, self._server, folder, jury, known, keep, ask):
                _tell(record, self.settings.rounds)
        result.arrays = packed(self._server.models)
        return result

    @property
    def models(self) -> Mapping[str, State]:
        """The fused weights of each prototype, as they are now."""
        return self._server.models

    def _adopt(
        self, arrays: ArrayRecord | None, rounds: int | None, deadline: float | None, extra: ConfigRecord | None
    ) -> None:
        given = {
            "rounds": rounds,
            "deadline": None if deadline is None else float(deadline),
            "train_config": None if extra is None else dict(extra),
        }
        changed = {key: value for key, value in given.items() if value is not None}
        self.settings = parse({**self.settings.model_dump(), **changed}, FlowerSettings)
        if arrays is not None:
            self._server = ServerState(0, unpacked(arrays, self._server.models))

    def _open(self) -> RunFolder:
        if not (self.folder / "config.toml").exists():
            return RunFolder.create(self.folder, self.settings)
        folder = RunFolder.open(self.folder)
        changed = differences(folder.settings(FlowerSettings), self.settings, also_free=("rounds", "deadline"))
        if changed:
            raise ConfigError(
                f"{self.folder} holds a run with other settings: {'; '.join(changed)}; use another folder"
            )
        return folder

    def _post_of(self, grid: Grid) -> Post:
        if self._post is None or self._post.grid is not grid:
            self._post = Post(grid)
        return self._post

    def _roster_of(self, folder: Path) -> Roster:
        if self._roster is None:
            folder.mkdir(parents=True, exist_ok=True)
            self._roster = Roster(folder / "roster.json", list(self.prototypes), self._members)
        return self._roster

    def _games(self, post: Post, *, engine: Engine, fuse: Any) -> Iterator[Round]:
        roster, settings = self._roster_of(self.folder), self.settings
        roster.gather(post, expected=settings.clients, quorum=settings.quorum, wait=self.wait, poll=self.poll)
        while True:
            roster.connected(post)  # newcomers join between rounds
            closed = play(self._server, self._federation(), engine=engine, train=_elsewhere, fuse=fuse)
            self._server = closed.server
            yield closed

    def _federation(self) -> Federation:
        settings = self.settings
        clients = list(self._roster_of(self.folder).clients)
        return Federation(clients, settings.fraction, settings.seed, settings.quorum, settings.attempts)

    def _clients(self, post: Post) -> Engine:
        """Return the engine whose workers are Flower's clients; they train by their own code, not by ours."""
        settings = self.settings
        message = partial(job_message, orders=orders(settings), kind=MessageType.TRAIN, ttl=settings.deadline)

        def run(function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
            outcomes = self._exchange(post, cast(Sequence[Job], jobs), message, update_from)
            yield from cast(Iterator[R | Failure], outcomes)

        return run

    def _exchange(
        self,
        post: Post,
        jobs: Sequence[Job],
        message: Callable[[Job, int], Message],
        read: Callable[[Message, Job], Any],
    ) -> Iterator[Any]:
        limits = {"deadline": self.settings.deadline, "wait": self.wait, "poll": self.poll}
        connected = partial(self._roster_of(self.folder).connected, post)
        return exchange(post, jobs, connected, message=message, read=read, **limits)

    def _evaluate(
        self,
        post: Post,
        config: ConfigRecord,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
        result: Result,
        record: Record,
    ) -> Record:
        """Return the record with what clients and the user's own function find of the fused models."""
        number = int(record["round"])
        score = _mean(record)
        result.train_metrics_clientapp[number] = MetricRecord(dict(record["metrics_of_clients"]))
        self._told(result, number, MetricRecord({"accuracy": score}) if score is not None else None)
        if evaluate_fn is not None:
            self._told(result, number, evaluate_fn(number, packed(self._server.models)))
        jobs = self._evaluations(number)
        if not jobs:
            return record
        message = partial(job_message, orders=dict(config), kind=MessageType.EVALUATE, ttl=self.settings.deadline)
        answers = list(self._exchange(post, jobs, message, evaluation.metrics_from))
        means = mean_metrics([answer for answer in answers if not isinstance(answer, Failure)])
        result.evaluate_metrics_clientapp[number] = MetricRecord(dict(means))
        silent = {answer.client_id: answer.reason for answer in answers if isinstance(answer, Failure)}
        return {**record, "evaluated_by_clients": {"means": means, "failures": silent}}

    def _told(self, result: Result, number: int, found: MetricRecord | None) -> None:
        if found is not None:
            result.evaluate_metrics_serverapp[number] = found

    def _evaluations(self, number: int) -> list[Job]:
        if not self.settings.evaluate_fraction:
            return []
        asked = replace(
            self._federation(),
            fraction=self.settings.evaluate_fraction,
            seed=derive(self.settings.seed, "evaluate"),
        )
        return [
            Job(client, number, self._server.sent_to(client), derive(self.settings.seed, "evaluate", client.id))
            for client in sample(asked, number)
        ]

    # The pieces that Flower's own loop uses; it knows neither quorum nor resuming

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages to this round's clients."""
        roster, settings, post = self._roster_of(self.folder), self.settings, self._post_of(grid)
        if self._gathered is not post:
            roster.gather(post, expected=settings.clients, quorum=settings.quorum, wait=self.wait, poll=self.poll)
            self._gathered = post
        nodes = roster.connected(post)
        models = unpacked(arrays, self._server.models)
        self._server = ServerState(server_round - 1, models, self._server.memory)
        federation = self._federation()
        jobs = jobs_for(self._server, federation, sample(federation, server_round))
        order = partial(job_message, orders={**orders(settings), **config}, kind=MessageType.TRAIN)
        self._sent = [(order(job, nodes[job.id], ttl=settings.deadline), job) for job in jobs if job.id in nodes]
        return [message for message, _ in self._sent]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Let the replies through the gate, fuse them, and return the weights and the clients' mean metrics."""
        asked = {message.metadata.message_id: job for message, job in self._sent}
        known = [reply for reply in replies if reply.metadata.reply_to_message_id in asked]

        def answers(function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
            for reply in known:
                yield cast(R | Failure, update_from(reply, asked[reply.metadata.reply_to_message_id]))

        updates, failures = collect(answers, _elsewhere, list(asked.values()))
        with open_engine(self.settings) as engines:
            fuse = fusion_of(self.settings, self.prototypes, self.validation, self.pool, engines.server)
            seed = derive(self.settings.seed, "fuse", server_round)
            fused, updates, refused = fuse_usable(fuse, self._server, updates, 1, seed)
        for failure in (*failures, *refused):
            _log.warning("feddf: %s: %s", failure.client_id, failure.reason)
        if fused is None:
            return None, None
        self._server = fused.server
        means = mean_metrics([(update.n_examples, update.metrics) for update in updates])
        return packed(self._server.models), MetricRecord(dict(means))

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages that ask clients to try the fused models on their own data."""
        nodes = self._roster_of(self.folder).connected(self._post_of(grid))
        order = partial(job_message, orders=dict(config), kind=MessageType.EVALUATE, ttl=self.settings.deadline)
        jobs = self._evaluations(server_round)
        self._sent = [(order(job, nodes[job.id]), job) for job in jobs if job.id in nodes]
        return [message for message, _ in self._sent]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the mean of the clients' metrics, weighted by their examples."""
        asked = {message.metadata.message_id: job for message, job in self._sent}
        answers = [
            evaluation.metrics_from(reply, asked[reply.metadata.reply_to_message_id])
            for reply in replies
            if reply.metadata.reply_to_message_id in asked
        ]
        found = [answer for answer in answers if not isinstance(answer, Failure)]
        return MetricRecord(dict(mean_metrics(found))) if found else None

    def summary(self) -> None:
        """Log what this strategy is about to do."""
        settings = self.settings
        _log.info("feddf: %s over %s", settings.method, ", ".join(self.prototypes))
        _log.info(
            "feddf: %d clients expected, C = %g, quorum %g, deadline %g s, seed %d; pool of %d, validation of %d",
            settings.clients,
            settings.fraction,
            settings.quorum,
            settings.deadline,
            settings.seed,
            settings.pool_size,
            settings.validation_size,
        )


def _by_number(members: Mapping[int, str] | None) -> dict[int, str] | None:
    try:
        return None if members is None else {int(node): name for node, name in members.items()}
    except ValueError:
        raise ConfigError.at("members", members, "it gives names to Flower's node ids, which are numbers") from None


def _elsewhere(job: Job) -> Update:
    raise AssertionError(f"{job.id} trains at its own place")


def _mean(record: Record) -> float | None:
    found = [model["fused"] for model in record["models"].values()]
    return sum(found) / len(found) if found and None not in found else None


def _tell(record: Record, rounds: int) -> None:
    score = _mean(record)
    shown = "not judged" if score is None else f"accuracy {100 * score:.1f} %"
    dropped = "".join(f"; {one['client']}: {one['reason']}" for one in record["dropped"])
    _log.info("feddf: round %d/%d, %d clients, %s%s", record["round"], rounds, len(record["clients"]), shown, dropped)
