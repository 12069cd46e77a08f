"""Play an experiment: iterate over rounds, judge each one, log it, and keep its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from time import perf_counter

import torch
from torch import Tensor

from feddf.evaluate import accuracy_of
from feddf.fusion.ensemble import Answer, Question, answer, avg_logits
from feddf.outcomes import in_order
from feddf.rounds import rounds
from feddf.runs.build import Parts, open_engine
from feddf.runs.profile import Profile
from feddf.runs.spool import forget, remembering
from feddf.runs.store import Record, RunFolder
from feddf.types import Engine, Examples, Failure, J, R, Round

Watch = Callable[[str, int, int], None]
"""(stage, done, total): called as the work within a round goes on."""


def unwatched(stage: str, done: int, total: int) -> None:
    """Watch nothing."""


def play(parts: Parts, folder: RunFolder, watch: Watch = unwatched, profile: Profile | None = None) -> Iterator[Record]:
    """Play the rounds that the folder does not hold yet; yield each round's record once it is safe on disk.

    The log line is written before the checkpoint. A crash between the two leaves a line without a
    checkpoint, which the next start removes: no round is lost, and none counted twice.
    """
    experiment = parts.experiment
    with folder.locked(), open_engine(experiment) as engines:
        saved, _ = folder.latest()
        server = saved or parts.server
        folder.forget_after(server.round)
        spool = folder.path / "spool"

        def timed(stage: str, engine: Engine) -> Engine:
            return profile.engine(engine, stage) if profile else engine

        train = watched(remembering(timed("train", engines.clients), spool), watch, "train")
        fuse = parts.fuse(watched(timed("fuse", engines.server), watch, "fuse"))
        evaluation = watched(timed("evaluate", engines.server), watch, "evaluate")
        examine = partial(answer, prototypes=parts.prototypes, inputs=parts.task.data.test.inputs)
        games = rounds(server, parts.federation, engine=train, train=parts.train, fuse=fuse)
        for closed in islice(games, experiment.rounds - server.round):
            record = judge(closed, evaluation, examine, parts.task.data.test)
            folder.append(record)
            folder.save(closed.server, experiment.keep_checkpoints)
            forget(spool)
            server = closed.server
            yield record
        forget(spool)
        folder.finish(server.models)


def judge(closed: Round, engine: Engine, examine: Callable[[Question], Answer], test: Examples) -> Record:
    """Return the round's record: test accuracies before (line 11) and after fusion (line 15), and of the ensemble."""
    clock = perf_counter()
    before, after = closed.fused.start, closed.server.models
    questions = [Question(f"teacher {u.client_id}", u.prototype, u.state) for u in closed.updates]
    questions += [Question(f"before {name}", name, state) for name, state in before.items()]
    questions += [Question(f"after {name}", name, after[name]) for name in after if after[name] is not before[name]]
    accuracies, ensemble = _mark(engine, examine, questions, test)
    models = {
        name: {
            "averaged": accuracies[f"before {name}"],
            "fused": accuracies.get(f"after {name}", accuracies[f"before {name}"]),
        }
        for name in sorted(after)
    }
    notes = dict(closed.fused.notes)
    seconds = {**closed.seconds, **notes.pop("seconds", {}), "evaluate": perf_counter() - clock}
    return {
        "round": closed.server.round,
        "clients": [update.client_id for update in closed.updates],
        "ensemble": ensemble,
        "models": models,
        "dropped": [{"client": failure.client_id, "reason": failure.reason} for failure in closed.failures],
        "attempts": closed.attempts,
        "seconds": {stage: round(value, 4) for stage, value in seconds.items()},
        **notes,
    }


def _mark(
    engine: Engine, examine: Callable[[Question], Answer], questions: Sequence[Question], test: Examples
) -> tuple[dict[str, float], float | None]:
    """Return each model's accuracy by its question's name, and that of the teachers together."""
    accuracies: dict[str, float] = {}

    def teachers() -> Iterator[Tensor]:
        for outcome in in_order(engine(examine, questions), [question.id for question in questions]):
            if isinstance(outcome, Failure):
                if outcome.client_id.startswith("teacher "):
                    continue  # only its share in the measured ensemble is lost
                raise RuntimeError(f"the evaluation of {outcome.client_id} failed: {outcome.reason}")
            accuracies[outcome.client_id] = accuracy_of(outcome.logits, test.labels)
            if outcome.client_id.startswith("teacher ") and bool(torch.isfinite(outcome.logits).all()):
                yield outcome.logits

    try:
        ensemble = accuracy_of(avg_logits(teachers()), test.labels)
    except ValueError:  # no teacher has finite logits
        return accuracies, None
    return accuracies, ensemble


def watched(engine: Engine, watch: Watch, stage: str) -> Engine:
    """Return the engine, telling ``watch`` of every job that it finishes."""

    def run(function: Callable[[J], R], jobs: Sequence[J], /) -> Iterator[R | Failure]:
        watch(stage, 0, len(jobs))
        for done, outcome in enumerate(engine(function, jobs), 1):
            watch(stage, done, len(jobs))
            yield outcome

    return run
