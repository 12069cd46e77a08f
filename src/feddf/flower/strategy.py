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

from feddf.config import ConfigError, Experiment, Record, differences, with_values
from feddf.config.errors import one_line
from feddf.engines.open import open_engines
from feddf.flower.settings import Architectures, FlowerSettings, Labeled, parts_config, server_data, settings_of
from feddf.flower.settings import train_config as told_in_training
from feddf.flower.transport import ClientRegistry, MessageQueue, exchange
from feddf.flower.wire import job_message, packed, reply_from, unpacked
from feddf.robust.defense import bounded_counts
from feddf.rounds import Federation, collect, run_round, sample
from feddf.runs.build import asked_for_channels, build
from feddf.runs.methods import build_method
from feddf.runs.run import Recorder, mean_metrics, record_rounds
from feddf.runs.spool import DiskSpool
from feddf.runs.store import RunFolder
from feddf.seeds import derive
from feddf.states import init_state
from feddf.types import Engine, Failure, Inputs, Job, Method, Part, Prototype, Reply, Round, ServerState, State

_log = logging.getLogger("flwr")


class FedDF(Strategy):
    """Fuse clients of different architectures by ensemble distillation (Lin et al. 2020), over Flower.

    ``prototypes`` says how each architecture is built; every client announces one of their names. ``pool`` (unlabeled)
    and ``validation`` stay on the server, as does ``test``, on which rounds are evaluated (default: the validation
    data). The run is kept in ``folder`` like any other: started again, it goes on after the last whole round;
    ``feddf report`` reads it. ``client_names`` gives names to Flower's node ids and lets only those take part. A client
    that is not connected has ``wait`` seconds to connect, in the beginning and in every round. Where clients know
    different channels, ``fusion.parts = ["known-channels"]`` asks them which.

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
        try:
            self._names = None if client_names is None else {int(node): name for node, name in client_names.items()}
        except ValueError:
            allowed = "it gives names to Flower's node ids, which are numbers"
            raise ConfigError.at("client_names", client_names, allowed) from None
        self._resources, self._validation, self._test = server_data(prototypes, settings, pool, validation, test)
        known, pooled = self._resources.prototypes, self._resources.pool
        self.settings = with_values(settings, {
            "flower.prototypes": tuple(known),
            "flower.pool_size": len(pooled) if pooled is not None else 0,
            "flower.validation_size": len(self._validation),
        })  # fmt: skip
        self._initial = {name: init_state(prototype, settings.seed) for name, prototype in known.items()}
        self._state = ServerState(0, self._initial)
        self._registry: ClientRegistry
        self._jobs: MessageQueue

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
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run the rounds that the folder does not hold yet, and return Flower's result.

        ``timeout`` is a round's deadline in seconds, ``num_rounds`` the rounds in all; both default to the settings.
        ``initial_arrays`` are weights to begin with (default: drawn by the seed); those of several prototypes are named
        ``prototype/key``. Of a run that was killed, the result has only the rounds run now; the folder has all.
        """
        changes = {"rounds": num_rounds, "clients.timeout": timeout, "flower.train_config": train_config}
        self.settings = with_values(self.settings, {key: one for key, one in changes.items() if one is not None})
        if initial_arrays is not None:
            self._state = ServerState(0, unpacked(initial_arrays, self._initial))
        result, folder, run = Result(), self._open_folder(), self.settings.run
        with folder.locked(), open_engines(run) as engines:
            resources = replace(self._resources, n_clients=self._n_clients)
            method, prototypes = build_method(resources, self.settings, engines.server, self._initial)
            spool = DiskSpool(folder.spool)
            rounds = self._rounds(grid, method, told_in_training(self.settings, method.parts), spool)
            self._restore(folder, prototypes)
            self.summary()
            if self._state.round == 0:
                self._evaluate(evaluate_fn, 0, result)
            recorder = Recorder(engines.server, prototypes, self._test, self._validation, run)
            extend = partial(self._evaluated_by_clients, {**(evaluate_config or {}), **parts_config(method.parts)})
            told = self.settings, recorder, extend, _log.warning
            for record in record_rounds(rounds, self._state, folder, spool, *told):
                _tell(result, record, self.settings.rounds)
                self._evaluate(evaluate_fn, record["round"], result)
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
        before, free = folder.settings(FlowerSettings), ("rounds", "clients.timeout")
        if found := "; ".join(differences(before, self.settings, also_free=free)):
            raise ConfigError(f"{self.folder} holds a run with other settings: {found}; use another folder")
        return folder

    def _restore(self, folder: RunFolder, prototypes: Mapping[str, Prototype]) -> None:
        """Go on from the folder's newest whole checkpoint; warn of what is wrong with newer ones."""
        saved, complaints = folder.latest()
        if saved is not None:
            for name, prototype in prototypes.items():
                said = f"{folder.path} holds a run with another architecture of that name"
                with one_line(partial(ConfigError.at, "prototypes", name), said, (RuntimeError, KeyError)):
                    prototype.load(saved.models.get(name, {}))
            self._state = saved
        for complaint in [*complaints, *folder.forget_after(self._state.round)]:
            _log.warning("feddf: %s", complaint)

    def _rounds(self, grid: Grid, method: Method, told: Mapping[str, Any], spool: DiskSpool) -> Iterator[Round]:
        """Run rounds over the clients behind a grid; new ones join between them."""
        clients, seed, known = self.settings.clients, self.settings.seed, list(self._resources.prototypes)
        path, most = self.folder / "registry.json", 2 * clients.total + 8
        self._jobs = MessageQueue(grid)
        self._registry = ClientRegistry(MessageQueue(grid), path, known, self._names, most)
        self._registry.gather(clients, self.wait, self.poll)
        engine, fuse = self._engine(MessageType.TRAIN, told, method.parts), bounded_counts(method.fuse)
        run = partial(run_round, engine=engine, train=_train_remotely, fuse=fuse, parts=method.parts, spool=spool)
        while True:
            self._registry.begin_round()
            closed = run(self._state, Federation(self._registry.clients, clients, seed, method.rounds_per_cohort))
            self._state = closed.server
            yield closed

    def _n_clients(self, prototype: str) -> int:
        """Return how many of the clients that are known now have an architecture."""
        return sum(client.prototype == prototype for client in self._registry.clients)

    def _engine(self, kind: str, told: Mapping[str, Any], parts: Sequence[Part]) -> Engine:
        """Return the clients as an engine: they answer by their own code, and not by the function that it is given."""

        def read(message: Message | Exception, job: Job) -> Reply | Failure:
            return reply_from(message, replace(job, state=self._state.sent_to(job.client)), parts)

        def run(function: Callable[[Any], Any], jobs: Sequence[Any], /) -> Iterator[Any]:
            deadline, connected = self.settings.deadline, self._registry.connected
            send = partial(job_message, config=told, kind=kind, ttl=deadline)
            return exchange(self._jobs, jobs, connected, send, read, deadline, self.wait, self.poll)

        return run

    def _evaluate(self, function: Callable[..., MetricRecord | None] | None, number: int, result: Result) -> None:
        """Put what the user's own function finds of the fused models into Flower's result."""
        found = function(number, packed(self.models)) if function is not None else None
        if found is not None:
            result.evaluate_metrics_serverapp[number] = found

    def _evaluated_by_clients(self, told: Mapping[str, Any], record: Record, server: ServerState) -> Record:
        """Return the record with what a share of the clients find of the fused models."""
        number, fraction, seed = record["round"], self.settings.flower.evaluate_fraction, self.settings.seed
        if not fraction:
            return record
        config = self.settings.clients.model_copy(update={"fraction": fraction})
        asked = sample(Federation(self._registry.clients, config, derive(seed, "evaluate")), number)
        jobs = [Job(one, number, server.sent_to(one), derive(seed, "evaluate", one.id)) for one in asked]
        parts = (Part(weights_up=False),)  # only metrics come back
        engine = self._engine(MessageType.EVALUATE, told, parts)
        found, failures = collect(engine, _train_remotely, jobs, parts=parts)
        means = mean_metrics([(update.n_examples, update.metrics) for update in found])
        silent = {failure.client_id: failure.reason for failure in failures}
        return {**record, "evaluated_by_clients": {"means": means, "failures": silent}}

    def _refuse(self, *given: Any, **named: Any) -> NoReturn:
        """Refuse Flower's own loop, which knows neither quorum nor resuming: :meth:`start` runs the rounds."""
        raise NotImplementedError("call start(): FedDF runs rounds in a loop of its own, with quorum and resuming")

    configure_train = aggregate_train = configure_evaluate = aggregate_evaluate = _refuse


def strategy_of(
    experiment: Experiment,
    folder: str | Path,
    settings: FlowerSettings | None = None,
    *,
    trust: bool = False,
    **options: Any,
) -> FedDF:
    """Return the strategy that runs an experiment, with its data on the server's side.

    ``settings`` are those of :func:`settings_of` unless given, ``options`` further ones of :class:`FedDF`. With
    ``trust``, the pool may be of a ``.pt2`` file.
    """
    usual, parts = settings_of(experiment), build(experiment, trust=trust)
    asked = asked_for_channels(settings or usual, parts.task.data)
    pool, validation, test = parts.task.pool, parts.task.validation, parts.task.data.test
    given = {"pool": pool, "validation": validation if len(validation) else None, "test": test, **options}
    return FedDF(parts.prototypes, asked, folder=folder, **given)


def _train_remotely(job: Job) -> Reply:
    """Stand in for a client's training, which happens at its own place."""
    raise AssertionError(f"{job.id} trains at its own place")


def _tell(result: Result, record: Record, rounds: int) -> None:
    """Put a round into Flower's result, and log it."""
    number, dropped = record["round"], "".join(f"; {one['client']}: {one['reason']}" for one in record["dropped"])
    found = [score for model in record["models"].values() if (score := model["fused"]) is not None]
    shown = "not evaluated"
    result.train_metrics_clientapp[number] = MetricRecord(dict(record["metrics_of_clients"]))
    if len(found) == len(record["models"]):
        score = sum(found) / len(found)
        metric = record.get("score", "accuracy")
        result.evaluate_metrics_serverapp[number] = MetricRecord({metric: score})
        shown = f"{metric} {100 * score:.1f} %"
    if "evaluated_by_clients" in record:
        result.evaluate_metrics_clientapp[number] = MetricRecord(dict(record["evaluated_by_clients"]["means"]))
    if guard := record.get("guard"):
        _log.warning("feddf: round %d: fused models were worse and not kept as they were: %s", number, guard)
    _log.info("feddf: round %d/%d, %d clients, %s%s", number, rounds, len(record["clients"]), shown, dropped)
