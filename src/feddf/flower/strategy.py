"""FedDF as a Flower strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from feddf.config import ConfigError, Record
from feddf.config.keys import flat
from feddf.engines.open import open_engines
from feddf.flower.conversion import Architectures, Labelled
from feddf.flower.inbox import Inbox
from feddf.flower.roster import Roster, most_clients
from feddf.flower.server import FlowerServer
from feddf.flower.settings import FlowerSettings
from feddf.flower.sites import Sites
from feddf.flower.wire import packed
from feddf.robust.guard import bounded_counts
from feddf.runs.methods import method_of, try_half
from feddf.runs.record import Recorder, mean_metrics
from feddf.runs.run import recorded
from feddf.runs.spool import DiskSpool
from feddf.runs.trackers import tracking
from feddf.types import Failure, Inputs, Job, ServerState, State

EvaluateFunction = Callable[[int, ArrayRecord], MetricRecord | None]
"""A user's own evaluation of the fused weights after a round."""

_log = logging.getLogger("flwr")


ONE_LOOP = "call start(): FedDF runs rounds in a loop of its own, with quorum and resuming"


class FedDF(Strategy):
    """Fuse clients of different architectures by ensemble distillation (Lin et al. 2020), over Flower.

    ``prototypes`` says how each architecture is built; every client introduces itself with one of their names. ``pool``
    (unlabeled) and ``validation`` stay on the server, as does ``test``, on which rounds are evaluated (default: the
    validation data). The run is kept in ``folder`` like any other: started again, it goes on after the last whole
    round; ``feddf report`` reads it. ``members`` gives names to Flower's node ids and lets only those take part.
    A client that is not connected has ``wait`` seconds to come, in the beginning and in every round.

    Clients are strangers, so ``fusion.defence`` is 'robust' unless the settings say otherwise.
    FedAvg, FedProx, FedAvgM and drop-worst are settings: ``fusion.method``, ``local.proximal``, ``fusion.momentum``,
    ``fusion.drop_worst``. ``flower.evaluate_fraction`` of the clients try the fused model on their own data each round.

    >>> import tempfile; from torch import nn, zeros
    >>> from feddf.config import DistillConfig
    >>> from feddf.flower import FlowerClientsConfig, FlowerSettings
    >>> settings = FlowerSettings(clients=FlowerClientsConfig(number=3), distill=DistillConfig(stop="steps"))
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
        validation: Labelled | None = None,
        test: Labelled | None = None,
        members: Mapping[int, str] | None = None,
        wait: float = 60.0,
        poll: float = 0.2,
    ) -> None:
        self._server = FlowerServer(prototypes, settings, pool, validation, test)
        self.folder, self.wait, self.poll = Path(folder), wait, poll
        self._members = _by_number(members)
        self._sites: Sites | None = None
        self._roster: Roster | None = None
        self._sent: list[tuple[Message, Job]] = []

    @property
    def settings(self) -> FlowerSettings:
        """The settings, with what the server was given."""
        return self._server.settings

    @property
    def models(self) -> Mapping[str, State]:
        """The fused weights of each prototype, as they are now."""
        return self._server.state.models

    # The loop

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
        self._server.change({
            "rounds": num_rounds,
            "clients.deadline": None if timeout is None else float(timeout),
            "flower.train_config": None if train_config is None else dict(train_config),
        })  # fmt: skip
        if initial_arrays is not None:
            self._server.adopt(initial_arrays)
        result = Result()
        server, folder = self._server, self._server.open(self.folder)
        with folder.locked(), open_engines(self.settings.run) as engines:
            for complaint in server.restore(folder):
                _log.warning("feddf: %s", complaint)
            self.summary()
            sites = self._sites_of(grid)
            method = method_of(server.resources, self.settings, engines.server)
            try_half(self.settings, method.parts, server.resources.prototypes, server.state.models)
            sites.parts = method.parts
            fuse = bounded_counts(method.fuse)
            recorder = Recorder(
                engines.server, server.resources.prototypes, server.test, server.validation, self.settings.run
            )
            if evaluate_fn is not None and server.state.round == 0:
                _note(result, 0, evaluate_fn(0, packed(self.models)))
            extend = partial(self._evaluated, sites, evaluate_config or ConfigRecord(), evaluate_fn, result)
            planned = islice(
                server.rounds(sites, fuse, method.parts, DiskSpool(folder.spool)),
                max(0, self.settings.rounds - server.state.round),
            )
            keep = self.settings.run.keep_checkpoints
            config, done = flat(self.settings.model_dump(mode="json", exclude_none=True)), server.state.round
            with tracking(self.settings.run.track, folder.path, config, done, _log.warning) as track:
                for record in recorded(planned, server.state, folder, recorder, keep, extend):
                    track(record)
                    _log_round(record, self.settings.rounds)
        result.arrays = packed(self.models)
        return result

    def _sites_of(self, grid: Grid) -> Sites:
        if self._roster is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._roster = Roster(
                self.folder / "roster.json",
                list(self._server.resources.prototypes),
                self._members,
                most=most_clients(self.settings.clients.number),
            )
        if self._sites is None or self._sites.inbox.grid is not grid:
            self._sites = Sites(Inbox(grid), self._roster, self.settings, self.wait, self.poll)
        return self._sites

    def _evaluated(
        self,
        sites: Sites,
        config: ConfigRecord,
        evaluate_fn: EvaluateFunction | None,
        result: Result,
        record: Record,
        state: ServerState,
    ) -> Record:
        """Return the record with what clients and the user's own function find of the fused models."""
        number, score = int(record["round"]), mean_accuracy(record)
        result.train_metrics_clientapp[number] = MetricRecord(dict(record["metrics_of_clients"]))
        _note(result, number, MetricRecord({"accuracy": score}) if score is not None else None)
        if evaluate_fn is not None:
            _note(result, number, evaluate_fn(number, packed(self.models)))
        jobs = self._server.evaluations(number, sites.clients)
        if not jobs:
            return record
        answers = sites.evaluate(jobs, dict(config))
        means = mean_metrics([answer for answer in answers if not isinstance(answer, Failure)])
        result.evaluate_metrics_clientapp[number] = MetricRecord(dict(means))
        silent = {answer.client_id: answer.reason for answer in answers if isinstance(answer, Failure)}
        return {**record, "evaluated_by_clients": {"means": means, "failures": silent}}

    # Flower's own loop knows neither quorum nor resuming; its pieces are here because the abstract class asks for them

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse: :meth:`start` runs the rounds."""
        raise NotImplementedError(ONE_LOOP)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Refuse: :meth:`start` runs the rounds."""
        raise NotImplementedError(ONE_LOOP)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse: :meth:`start` runs the rounds."""
        raise NotImplementedError(ONE_LOOP)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Refuse: :meth:`start` runs the rounds."""
        raise NotImplementedError(ONE_LOOP)

    def summary(self) -> None:
        """Log what this strategy is about to do."""
        settings, clients = self.settings, self.settings.clients
        _log.info("feddf: %s over %s", settings.fusion.method, ", ".join(settings.flower.prototypes))
        _log.info(
            "feddf: %d clients expected, C = %g, quorum %g, deadline %g s, seed %d; pool of %d, validation of %d",
            clients.number,
            clients.fraction,
            clients.quorum,
            clients.deadline,
            settings.seed,
            settings.flower.pool_size,
            settings.flower.validation_size,
        )


def _by_number(members: Mapping[int, str] | None) -> dict[int, str] | None:
    try:
        return None if members is None else {int(node): name for node, name in members.items()}
    except ValueError:
        raise ConfigError.at("members", members, "it gives names to Flower's node ids, which are numbers") from None


def _note(result: Result, number: int, found: MetricRecord | None) -> None:
    if found is not None:
        result.evaluate_metrics_serverapp[number] = found


def mean_accuracy(record: Record) -> float | None:
    """Return the mean test accuracy of the fused models, if all are known."""
    found = [model["fused"] for model in record["models"].values()]
    known = [value for value in found if value is not None]
    return sum(known) / len(known) if known and len(known) == len(found) else None


def _log_round(record: Record, rounds: int) -> None:
    score = mean_accuracy(record)
    shown = "not evaluated" if score is None else f"accuracy {100 * score:.1f} %"
    dropped = "".join(f"; {one['client']}: {one['reason']}" for one in record["dropped"])
    if guard := record.get("guard"):
        _log.warning("feddf: round %d: fused models were worse and not kept as they were: %s", record["round"], guard)
    _log.info("feddf: round %d/%d, %d clients, %s%s", record["round"], rounds, len(record["clients"]), shown, dropped)
