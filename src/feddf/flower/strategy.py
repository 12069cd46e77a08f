"""FedDF as a Flower strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from feddf.config import ConfigError, Record, differences, with_values
from feddf.engines.open import open_engines
from feddf.flower.inputs import Architectures, Labeled, check_weights, node_numbers, server_data
from feddf.flower.registry import ClientRegistry, most_clients
from feddf.flower.settings import FlowerSettings, check_travel, parts_config, train_config
from feddf.flower.transport import MessageQueue, exchange
from feddf.flower.wire import job_message, packed, reply_from, unpacked
from feddf.robust.defense import bounded_counts
from feddf.rounds import Federation, collect, run_round, sample
from feddf.runs.methods import build_method
from feddf.runs.record import Recorder, mean_metrics
from feddf.runs.run import record_rounds
from feddf.runs.spool import DiskSpool
from feddf.runs.store import RunFolder
from feddf.seeds import derive
from feddf.states import init_state
from feddf.types import Engine, Failure, Inputs, Job, Method, Part, Prototype, Reply, Round, ServerState, State

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]
"""A user's own evaluation of the fused weights after a round."""

METRICS_ONLY = (Part(weights_up=False),)
"""What is asked of clients that try a model."""

_log = logging.getLogger("flwr")


class FedDF(Strategy):
    """Fuse clients of different architectures by ensemble distillation (Lin et al. 2020), over Flower.

    ``prototypes`` says how each architecture is built; every client announces one of their names. ``pool`` (unlabeled)
    and ``validation`` stay on the server, as does ``test``, on which rounds are evaluated (default: the validation
    data). The run is kept in ``folder`` like any other: started again, it goes on after the last whole round;
    ``feddf report`` reads it. ``client_names`` gives names to Flower's node ids and lets only those take part. A client
    that is not connected has ``wait`` seconds to connect, in the beginning and in every round.

    Clients are not trusted, so ``fusion.defense`` is 'robust' unless the settings say otherwise.
    FedAvg, FedProx, FedAvgM and drop-worst are settings: ``fusion.method``, ``local.prox_mu``, ``fusion.momentum``,
    ``fusion.drop_worst``. ``flower.evaluate_fraction`` of the clients try the fused model on their own data each round.

    >>> import tempfile; from torch import nn, zeros
    >>> from feddf.config import ClientsConfig, DistillConfig
    >>> from feddf.flower import FlowerSettings
    >>> settings = FlowerSettings(clients=ClientsConfig(total=3), distill=DistillConfig(early_stopping="none"))
    >>> strategy = FedDF({"line": lambda: nn.Linear(4, 2)}, settings, pool=zeros(8, 4), folder=tempfile.mkdtemp())
    >>> strategy.settings.fusion.method
    'feddf'
    """

    def __init__(
        self,
        prototypes: Architectures,
        settings: FlowerSettings,
        *,
        folder: str | Path,
        pool: Inputs | Tensor | None = None,
        validation: Labeled | None = None,
        test: Labeled | None = None,
        client_names: Mapping[int, str] | None = None,
        wait: float = 60.0,
        poll: float = 0.2,
    ) -> None:
        self.folder, self.wait, self.poll = Path(folder), wait, poll
        self._names = node_numbers(client_names)
        given = server_data(prototypes, settings, pool, validation, test, self._n_clients)
        self._resources, self._validation, self._test = given
        known, pooled = self._resources.prototypes, self._resources.pool
        self.settings = with_values(settings, {
            "flower.prototypes": tuple(known),
            "flower.pool_size": len(pooled) if pooled is not None else 0,
            "flower.validation_size": len(self._validation),
        })  # fmt: skip
        self._initial = {name: init_state(prototype, settings.seed) for name, prototype in known.items()}
        self._state = ServerState(0, self._initial)
        self._registry: ClientRegistry | None = None

    @property
    def models(self) -> Mapping[str, State]:
        """The fused weights of each prototype, as they are now."""
        return self._state.models

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFunction | None = None,
    ) -> Result:
        """Run the rounds that the folder does not hold yet, and return Flower's result.

        ``timeout`` is a round's deadline in seconds, ``num_rounds`` the rounds in all; both default to the settings.
        ``initial_arrays`` are weights to begin with (default: drawn by the seed); those of several prototypes are named
        ``prototype/key``. Of a run that was killed, the result has only the rounds run now; the folder has all.
        """
        changes = {"rounds": num_rounds, "clients.timeout": timeout, "flower.train_config": train_config}
        given = {key: value for key, value in changes.items() if value is not None}
        self.settings = with_values(self.settings, given)
        if initial_arrays is not None:
            self._state = ServerState(0, unpacked(initial_arrays, self._initial))
        result, folder, run = Result(), self._open_folder(), self.settings.run
        with folder.locked(), open_engines(run) as engines:
            method, prototypes = build_method(self._resources, self.settings, engines.server, self._initial)
            check_travel(self.settings, method.parts)
            self._restore(folder, prototypes)
            self.summary()
            recorder = Recorder(engines.server, prototypes, self._test, self._validation, run)
            if evaluate_fn is not None and self._state.round == 0:
                _note(result, 0, evaluate_fn(0, packed(self.models)))
            extend = partial(self._evaluate, method, dict(evaluate_config or {}), evaluate_fn, result)
            rounds = self._rounds(grid, method, DiskSpool(folder.spool))
            for record in record_rounds(rounds, self._state, folder, self.settings, recorder, extend, _log.warning):
                _log_round(record, self.settings.rounds)
        result.arrays = packed(self.models)
        return result

    def summary(self) -> None:
        """Log what this strategy is about to do."""
        settings, clients, own = self.settings, self.settings.clients, self.settings.flower
        _log.info("feddf: %s over %s; seed %d", settings.fusion.method, ", ".join(own.prototypes), settings.seed)
        expected = clients.total, clients.fraction, clients.quorum, settings.deadline
        _log.info("feddf: %d clients expected, C = %g, quorum %g, deadline %g s", *expected)
        _log.info("feddf: pool of %d, validation of %d", own.pool_size, own.validation_size)

    def _open_folder(self) -> RunFolder:
        """Return the run's folder: a new one, or one that holds this very run."""
        if not (self.folder / "config.toml").exists():
            return RunFolder.create(self.folder, self.settings)
        folder = RunFolder.open(self.folder)
        before = folder.settings(FlowerSettings)
        if changed := differences(before, self.settings, also_free=("rounds", "clients.timeout")):
            found = "; ".join(changed)
            raise ConfigError(f"{self.folder} holds a run with other settings: {found}; use another folder")
        return folder

    def _restore(self, folder: RunFolder, prototypes: Mapping[str, Prototype]) -> None:
        """Go on from the folder's newest whole checkpoint; warn of what is wrong with newer ones."""
        saved, complaints = folder.latest()
        if saved is not None:
            check_weights(folder.path, saved.models, prototypes)
            self._state = saved
        for complaint in [*complaints, *folder.forget_after(self._state.round)]:
            _log.warning("feddf: %s", complaint)

    def _rounds(self, grid: Grid, method: Method, spool: DiskSpool) -> Iterator[Round]:
        """Run rounds over the clients behind a grid; new ones join between them."""
        if self._registry is None or self._registry.queue.grid is not grid:
            path, clients = self.folder / "registry.json", self.settings.clients
            known, most = list(self._resources.prototypes), most_clients(clients.total)
            registry = ClientRegistry(MessageQueue(grid), path, known, self._names, most)
            registry.gather(clients, self.wait, self.poll)
            self._registry = registry
        engine = self._engine(MessageType.TRAIN, train_config(self.settings, method.parts), method.parts)
        fuse = bounded_counts(method.fuse)
        run = partial(run_round, engine=engine, train=_train_remotely, fuse=fuse, parts=method.parts, spool=spool)
        while True:
            self._registry.begin_round()
            closed = run(self._state, replace(self._federation(), rounds_per_cohort=method.rounds_per_cohort))
            self._state = closed.server
            yield closed

    def _n_clients(self, prototype: str) -> int:
        """Return how many of the clients that are known now have an architecture."""
        return sum(client.prototype == prototype for client in self._registry.clients) if self._registry else 0

    def _federation(self) -> Federation:
        """Return the federation of the clients that are known now."""
        assert self._registry is not None
        return Federation(list(self._registry.clients), self.settings.clients, self.settings.seed)

    def _engine(self, kind: str, told: Mapping[str, Any], parts: Sequence[Part]) -> Engine:
        """Return the clients as an engine: they answer by their own code, and not by the function that it is given."""

        def read(message: Message, job: Job) -> Reply | Failure:
            return reply_from(message, replace(job, state=self._state.sent_to(job.client)), parts)

        def run(function: Callable[[Any], Any], jobs: Sequence[Any], /) -> Iterator[Any]:
            assert self._registry is not None
            deadline, clients = self.settings.deadline, self._registry
            send = partial(job_message, config=told, kind=kind, ttl=deadline)
            return exchange(clients.queue, jobs, clients.connected, send, read, deadline, self.wait, self.poll)

        return run

    def _evaluate(
        self,
        method: Method,
        told: Mapping[str, Any],
        evaluate_fn: EvaluateFunction | None,
        result: Result,
        record: Record,
        server: ServerState,
    ) -> Record:
        """Return the record with what clients and the user's own function find of the fused models."""
        number, score = int(record["round"]), _mean_accuracy(record)
        result.train_metrics_clientapp[number] = MetricRecord(dict(record["metrics_of_clients"]))
        _note(result, number, MetricRecord({"accuracy": score}) if score is not None else None)
        if evaluate_fn is not None:
            _note(result, number, evaluate_fn(number, packed(server.models)))
        fraction, seed = self.settings.flower.evaluate_fraction, self.settings.seed
        if not fraction:
            return record
        config = self.settings.clients.model_copy(update={"fraction": fraction})
        asked = sample(replace(self._federation(), config=config, seed=derive(seed, "evaluate")), number)
        jobs = [Job(one, number, server.sent_to(one), derive(seed, "evaluate", one.id)) for one in asked]
        engine = self._engine(MessageType.EVALUATE, {**told, **parts_config(method.parts)}, METRICS_ONLY)
        found, failures = collect(engine, _train_remotely, jobs, parts=METRICS_ONLY)
        means = mean_metrics([(update.n_examples, update.metrics) for update in found])
        result.evaluate_metrics_clientapp[number] = MetricRecord(dict(means))
        silent = {failure.client_id: failure.reason for failure in failures}
        return {**record, "evaluated_by_clients": {"means": means, "failures": silent}}

    def _refuse(self, *given: Any, **named: Any) -> NoReturn:
        """Refuse Flower's own loop, which knows neither quorum nor resuming: :meth:`start` runs the rounds."""
        raise NotImplementedError("call start(): FedDF runs rounds in a loop of its own, with quorum and resuming")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _refuse


def _train_remotely(job: Job) -> Reply:
    """Stand in for a client's training, which happens at its own place."""
    raise AssertionError(f"{job.id} trains at its own place")


def _note(result: Result, number: int, found: MetricRecord | None) -> None:
    if found is not None:
        result.evaluate_metrics_serverapp[number] = found


def _mean_accuracy(record: Record) -> float | None:
    """Return the mean test accuracy of the fused models, if all are known."""
    found = [model["fused"] for model in record["models"].values()]
    known = [value for value in found if value is not None]
    return sum(known) / len(known) if known and len(known) == len(found) else None


def _log_round(record: Record, rounds: int) -> None:
    score = _mean_accuracy(record)
    shown = "not evaluated" if score is None else f"accuracy {100 * score:.1f} %"
    dropped = "".join(f"; {one['client']}: {one['reason']}" for one in record["dropped"])
    if guard := record.get("guard"):
        _log.warning("feddf: round %d: fused models were worse and not kept as they were: %s", record["round"], guard)
    _log.info("feddf: round %d/%d, %d clients, %s%s", record["round"], rounds, len(record["clients"]), shown, dropped)
