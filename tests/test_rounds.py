from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conftest import Tiny, make_tiny
from feddf.config import ClientsConfig
from feddf.config.names import METHODS
from feddf.config.sections import cohort_size
from feddf.engines import in_process
from feddf.rounds import Federation, QuorumError, collect, jobs_for, run_round, run_rounds, sample
from feddf.runs.methods import fedavg, feddf
from feddf.states import digest
from feddf.types import Client, Failure, Fused, Fusion, Job, Part, Refusal, Reply, ServerState, Update


def members(n: int) -> list[Client]:
    return [Client(f"{i:03d}", "p") for i in range(n)]


def plain(tiny: Tiny) -> Fusion:
    return fedavg(tiny.resources, tiny.settings, in_process)


@given(st.integers(1, 60), st.floats(0.02, 1), st.integers(1, 50), st.integers(0, 9))
def test_a_sample_is_a_fraction_of_different_clients(n: int, fraction: float, number: int, seed: int) -> None:
    config = ClientsConfig(total=n, fraction=fraction)
    chosen = sample(Federation(members(n), config, seed), number)
    assert cohort_size(n, fraction) == config.cohort == round(fraction * n)
    assert len(chosen) == len({client.id for client in chosen}) == max(1, round(fraction * n))
    assert chosen == sample(Federation(members(n)[::-1], config, seed), number)


def test_all_clients_get_their_turn() -> None:
    federation = Federation(members(10), ClientsConfig(total=10, fraction=0.4), 0)
    turns = Counter(client.id for number in range(1, 501) for client in sample(federation, number))
    assert len(turns) == 10
    assert all(150 < count < 250 for count in turns.values())


def test_another_attempt_takes_other_clients() -> None:
    federation = Federation(members(10), ClientsConfig(total=10, fraction=0.4), 0)
    first, second = (({client.id for client in sample(federation, 1, attempt)}) for attempt in (0, 1))
    assert not first & second


def backwards(function: Callable, jobs: Sequence) -> Iterator:
    return iter(list(in_process(function, jobs))[::-1])


@pytest.mark.parametrize("method", ["fedavg", "feddf"])
def test_the_order_of_arrival_does_not_matter(tiny: Tiny, method: str) -> None:
    digests = {
        digest(
            run_round(
                tiny.server,
                tiny.federation,
                engine=engine,
                train=tiny.local,
                fuse=METHODS[method](tiny.resources, tiny.settings, engine),
            ).server.models
        )
        for engine in (in_process, backwards)
    }
    assert len(digests) == 1


def unreliable(tiny: Tiny, bad: dict[str, Callable[[Job], Reply]]) -> Callable[[Job], Reply]:
    return lambda job: bad.get(job.id, tiny.local)(job)


def explode(job: Job) -> Reply:
    raise MemoryError("out of memory\nand more")


def test_a_client_that_raises_is_recorded_and_the_round_goes_on(tiny: Tiny) -> None:
    first = sample(tiny.federation, 1)[0].id
    closed = run_round(
        tiny.server, tiny.federation, engine=in_process, train=unreliable(tiny, {first: explode}), fuse=plain(tiny)
    )
    assert closed.failures == [Failure(first, "MemoryError: out of memory")]
    assert len(closed.updates) == 3
    assert closed.attempts == 1


def test_a_refused_update_counts_as_a_failure_and_leaves_no_trace(tiny: Tiny) -> None:
    first = sample(tiny.federation, 1)[0].id

    def poison(job: Job) -> Reply:
        update = tiny.local(job)
        key = next(iter(update.state))
        return replace(update, state={**update.state, key: update.state[key] * torch.nan})

    poisoned = run_round(
        tiny.server, tiny.federation, engine=in_process, train=unreliable(tiny, {first: poison}), fuse=plain(tiny)
    )
    absent = run_round(
        tiny.server, tiny.federation, engine=in_process, train=unreliable(tiny, {first: explode}), fuse=plain(tiny)
    )
    assert "not finite" in poisoned.failures[0].reason
    assert digest(poisoned.server.models) == digest(absent.server.models)


def test_below_the_quorum_the_round_is_tried_again_with_other_clients(tiny: Tiny) -> None:
    federation = replace(tiny.federation, config=ClientsConfig(total=6, fraction=0.5, quorum=0.9))
    first, second = sample(federation, 1, 0), sample(federation, 1, 1)
    train = unreliable(tiny, {first[0].id: explode})
    closed = run_round(tiny.server, federation, engine=in_process, train=train, fuse=plain(tiny))
    assert closed.attempts == 2
    assert [update.client_id for update in closed.updates] == [client.id for client in second]
    assert closed.failures == [Failure(first[0].id, "MemoryError: out of memory")]
    assert closed.server.round == 1


def test_when_nobody_answers_the_run_ends_with_the_reasons(tiny: Tiny) -> None:
    with pytest.raises(QuorumError, match=r"round 1 .* each of 3 attempts .*MemoryError"):
        next(run_rounds(tiny.server, tiny.federation, engine=in_process, train=explode, fuse=plain(tiny)))


def test_replies_count_once_and_only_from_those_who_were_asked(tiny: Tiny) -> None:
    jobs = [Job(c, 1, tiny.server.models[c.prototype], 0) for c in tiny.federation.clients[:3]]
    stranger = tiny.local(replace(jobs[0], client=tiny.federation.clients[4]))

    def noisy(function: Callable, asked: Sequence) -> Iterator:
        first = function(asked[0])
        yield from (first, replace(first, n_examples=10**6), first, stranger, function(asked[1]))
        yield from (Failure(None, "x"), Failure(["c0"], "y"))

    updates, failures = collect(noisy, tiny.local, jobs)
    assert [update.client_id for update in updates] == ["c0", "c1"]
    assert updates[0].n_examples == 20
    assert {failure.client_id: failure.reason for failure in failures} == {
        "c2": "no answer",
        "unknown": "client 'c4' was not sampled this round",
    }


def test_a_fusion_may_refuse_updates_and_gets_the_rest_again(tiny: Tiny) -> None:
    calls: list[list[str]] = []
    fuse = plain(tiny)

    def picky(server, updates, seed) -> Fused:
        calls.append([update.client_id for update in updates])
        if len(calls) == 1:
            raise Refusal([Failure(updates[0].client_id, "its logits are not finite")])
        return fuse(server, updates, seed)

    closed = run_round(tiny.server, tiny.federation, engine=in_process, train=tiny.local, fuse=picky)
    assert calls[1] == calls[0][1:]
    assert closed.failures == [Failure(calls[0][0], "its logits are not finite")]
    assert [update.client_id for update in closed.updates] == calls[1]


def test_rounds_go_on_from_any_server_state() -> None:
    tiny = make_tiny()
    arguments = {"engine": in_process, "train": tiny.local, "fuse": feddf(tiny.resources, tiny.settings, in_process)}
    straight = [closed.server for closed in islice(run_rounds(tiny.server, tiny.federation, **arguments), 3)]
    again = next(run_rounds(straight[1], tiny.federation, **arguments)).server
    assert [server.round for server in straight] == [1, 2, 3]
    assert digest(again.models) == digest(straight[2].models)


def test_spare_clients_are_sampled_and_not_needed(tiny: Tiny) -> None:
    config = ClientsConfig(total=6, fraction=0.5, quorum=1.0, over_selection=2, attempts=1)
    federation = replace(tiny.federation, config=config)
    sampled = [client.id for client in sample(federation, 1)]
    assert len(sampled) == 5

    def train(job: Job) -> Reply:
        if job.id in sampled[:2]:
            raise RuntimeError("gone")
        return tiny.local(job)

    fuse = fedavg(tiny.resources, tiny.settings, in_process)
    closed = run_round(tiny.server, federation, engine=in_process, train=train, fuse=fuse)
    assert [update.client_id for update in closed.updates] == sampled[2:]
    assert len(sample(replace(federation, config=config.model_copy(update={"over_selection": 100})), 1)) == 6


def test_a_cohort_is_held_for_its_rounds_and_every_federation_has_samples_of_its_own() -> None:
    config = ClientsConfig(total=20, fraction=0.3)
    held = Federation(members(20), config, 0, rounds_per_cohort=3)
    samples = [sample(held, number) for number in range(1, 10)]
    assert [samples[i] == samples[i + 1] for i in range(8)] == [True, True, False] * 2 + [True, True]
    assert samples[0] == sample(Federation(members(20), config, 0), 1), "the first cohort is that of the first round"
    assert sample(Federation(members(20), config, 1), 1) != samples[0]


def test_what_clients_are_asked_has_the_next_rounds_number_and_seeds_that_nobody_shares(tiny: Tiny) -> None:
    servers = [tiny.server, replace(tiny.server, round=1)]
    federations = [tiny.federation, replace(tiny.federation, seed=tiny.federation.seed + 1)]
    three = tiny.federation.clients[:3]
    jobs = [job for federation in federations for server in servers for job in jobs_for(server, federation, three)]
    assert [job.round for job in jobs] == [1, 1, 1, 2, 2, 2] * 2
    assert len({job.seed for job in jobs}) == 12
    assert [job.seed for job in jobs[:3]] == [job.seed for job in jobs_for(tiny.server, tiny.federation, three)]


class Kept:
    """A spool in memory that writes down what it is asked."""

    def __init__(self) -> None:
        self.updates: dict[tuple[str, int], Update] = {}

    def recall(self, job: Job) -> Update | None:
        return self.updates.get((job.id, job.round))

    def keep(self, job: Job, update: Update) -> Update | Failure:
        self.updates[job.id, job.round] = update
        return update


def test_an_interrupted_round_trains_only_those_whose_updates_were_not_kept_or_are_damaged(tiny: Tiny) -> None:
    spool, seeds = Kept(), []

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        seeds.append(seed)
        return plain(tiny)(server, updates, seed)

    def train(job: Job) -> Reply:
        trained.append(job.id)
        return tiny.local(job)

    trained: list[str] = []
    first = run_round(tiny.server, tiny.federation, engine=in_process, train=train, fuse=fuse, spool=spool)
    cohort = sorted(trained)
    assert {name for name, _ in spool.updates} == set(cohort)
    lost, damaged = cohort[0], cohort[1]
    del spool.updates[lost, 1]
    spool.updates[damaged, 1] = replace(spool.updates[damaged, 1], n_examples=-1)
    trained.clear()
    again = run_round(tiny.server, tiny.federation, engine=in_process, train=train, fuse=fuse, spool=spool)
    assert sorted(trained) == [lost, damaged]
    assert digest(again.server.models) == digest(first.server.models)
    run_round(first.server, tiny.federation, engine=in_process, train=train, fuse=fuse, spool=spool)
    assert seeds[0] == seeds[1] != seeds[2], "the fusion's seed is the round's"
    assert set(first.seconds) == {"train", "fuse"}
    assert all(value > 0 for value in first.seconds.values())


def test_a_stranger_who_fails_is_recorded_with_the_reason() -> None:
    def engine(function: Callable, jobs: Sequence) -> Iterator:
        return iter([Failure("nobody", "x" * 400)])

    _, failures = collect(engine, lambda job: job, [])
    assert failures[0].client_id == "unknown"
    assert failures[0].reason.startswith("a client that was not asked: xxx")
    assert len(failures[0].reason) == 300


def test_a_part_is_asked_about_what_is_sent_kept_and_counted(tiny: Tiny) -> None:
    """Payloads travel down and up, bytes count them, and who took part is remembered for what clients keep."""

    def news(server: ServerState, client: Client) -> dict[str, dict[str, torch.Tensor]]:
        return {"news": {"round": torch.tensor(float(server.round))}}

    part, fuse = Part(send=news, keeps=True), plain(tiny)
    closed = run_round(tiny.server, tiny.federation, engine=in_process, train=tiny.local, fuse=fuse, parts=[part])
    names = {update.client_id for update in closed.updates}
    assert closed.fused.server.counted == dict.fromkeys(names, 1)
    other = run_round(tiny.server, tiny.federation, engine=in_process, train=tiny.local, fuse=fuse)
    assert {name: closed.bytes_down[name] - other.bytes_down[name] for name in names} == dict.fromkeys(names, 4)
    assert other.fused.server.counted == {}
