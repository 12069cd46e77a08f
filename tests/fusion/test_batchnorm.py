from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from conftest import Tiny, update_of
from feddf.config import with_values
from feddf.engines import in_process
from feddf.fusion.average import average, uniform_average
from feddf.fusion.batchnorm import last_statistics, local_statistics, recalibrated, with_statistics
from feddf.rounds import run_round
from feddf.runs.methods import fedavg, make_method
from feddf.states import digest, is_statistic
from feddf.types import Client, Fused, Job, Reply, ServerState, State, Update

MEAN = "features.1.running_mean"


def cnns(tiny: Tiny) -> list[Update]:
    clients = [client for client in tiny.federation.clients if client.prototype == "cnn"]
    return [update_of(tiny.local(Job(client, 1, tiny.server.models["cnn"], 7))) for client in clients]


def test_the_last_clients_statistics_are_kept_and_weights_averaged(tiny: Tiny) -> None:
    updates = cnns(tiny)
    plain, last = (rule(tiny.server.models["cnn"], updates) for rule in (average, last_statistics(average)))
    for key in plain:
        assert torch.equal(last[key], updates[-1].state[key] if is_statistic(key) else plain[key])
    assert not torch.equal(plain[MEAN], last[MEAN])


def test_recalibrated_statistics_are_those_of_the_pool(tiny: Tiny) -> None:
    updates = cnns(tiny)
    state = recalibrated(average, tiny.resources)(tiny.server.models["cnn"], updates)
    plain = average(tiny.server.models["cnn"], updates)
    assert all(torch.equal(state[key], plain[key]) for key in plain if not is_statistic(key))
    model = tiny.prototypes["cnn"].load(state)
    with torch.no_grad():
        hidden = model.features[0](tiny.pool.batch(torch.arange(len(tiny.pool))))
    torch.testing.assert_close(state[MEAN], hidden.mean(dim=(0, 2, 3)), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(
        state["features.1.running_var"], hidden.var(dim=(0, 2, 3), correction=1), atol=1e-5, rtol=1e-4
    )


def test_a_prototype_without_clients_is_not_recalibrated(tiny: Tiny) -> None:
    previous = tiny.server.models["cnn"]
    assert recalibrated(average, tiny.resources)(previous, []) is previous


def test_local_statistics_go_back_to_their_client_with_the_new_weights(tiny: Tiny) -> None:
    sent: dict[str, Job] = {}

    def train(job: Job) -> Reply:
        sent[job.id] = job
        return tiny.local(job)

    fuse = local_statistics(fedavg(tiny.resources, tiny.settings, in_process))
    first = run_round(tiny.server, tiny.federation, engine=in_process, train=train, fuse=fuse)
    second = run_round(first.server, tiny.federation, engine=in_process, train=train, fuse=fuse)
    mine = {update.client_id: update for update in first.updates if update.prototype == "cnn"}
    again = [update.client_id for update in second.updates if update.client_id in mine]
    assert again, "the samples of both rounds have no convolutional client in common"
    for name in again:
        assert torch.equal(sent[name].state[MEAN], mine[name].state[MEAN])
        weight = "features.0.weight"
        assert torch.equal(sent[name].state[weight], first.server.models["cnn"][weight])
    newcomer = first.server.sent_to(Client("nobody", "cnn"))
    assert digest({"m": newcomer}) == digest({"m": first.server.models["cnn"]})


def test_statistics_of_clients_that_sit_a_round_out_are_not_forgotten(tiny: Tiny) -> None:
    fuse = local_statistics(fedavg(tiny.resources, tiny.settings, in_process))
    updates = cnns(tiny)
    first = fuse(tiny.server, updates[:1], 1).server
    second = fuse(first, updates[1:], 2).server
    assert torch.equal(second.sent_to(Client("c0", "cnn"))[MEAN], updates[0].state[MEAN])


def test_a_uniform_average_does_not_weigh(tiny: Tiny) -> None:
    updates = cnns(tiny)
    lopsided = [Update(u.client_id, u.prototype, 1, u.state, n) for u, n in zip(updates, (1, 500, 3), strict=True)]
    mean = uniform_average(tiny.server.models["cnn"], lopsided)["features.0.weight"]
    expected = torch.stack([update.state["features.0.weight"] for update in updates]).double().mean(0)
    torch.testing.assert_close(mean.double(), expected, atol=1e-7, rtol=1e-6)


def test_a_policy_is_its_rule(tiny: Tiny) -> None:
    """And the rule inside gets the previous state and these updates."""
    previous, updates, seen = tiny.server.models["cnn"], cnns(tiny), []

    def spied(state: State, given: Sequence[Update]) -> State:
        seen.append(state is previous and list(given) == updates)
        return average(state, given)

    expected = {
        "average": average(previous, updates),
        "local": average(previous, updates),
        "last": last_statistics(average)(previous, updates),
        "recalibrate": recalibrated(average, tiny.resources)(previous, updates),
    }
    digests = {name: digest({"m": state}) for name, state in expected.items()}
    assert len(set(digests.values())) == 3
    for policy, right in digests.items():
        found = with_statistics(policy, spied, tiny.resources)(previous, updates)
        assert digest({"m": found}) == right, policy
    assert seen == [True] * 4


def test_the_last_client_that_trained_counts(tiny: Tiny) -> None:
    previous, (one, *rest) = tiny.server.models["cnn"], cnns(tiny)
    single, idle = replace(one, n_examples=1), replace(rest[-1], n_examples=0)
    found = last_statistics(average)(previous, [single, idle])
    assert torch.equal(found[MEAN], one.state[MEAN])
    nobody = last_statistics(average)(previous, [idle])
    assert torch.equal(nobody[MEAN], average(previous, [idle])[MEAN])


def test_there_is_nothing_to_recalibrate_without_a_pool_or_statistics(tiny: Tiny) -> None:
    updates = cnns(tiny)
    plain = average(tiny.server.models["cnn"], updates)
    without = recalibrated(average, replace(tiny.resources, pool=None))(tiny.server.models["cnn"], updates)
    assert digest({"m": without}) == digest({"m": plain})


def test_one_client_is_enough_to_recalibrate(tiny: Tiny) -> None:
    state = recalibrated(average, tiny.resources)(tiny.server.models["cnn"], cnns(tiny)[:1])
    assert not torch.equal(state[MEAN], cnns(tiny)[0].state[MEAN])


def test_local_statistics_pass_the_rounds_seed_on(tiny: Tiny) -> None:
    seeds: list[int] = []

    def inner(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        seeds.append(seed)
        return Fused(server, dict(server.models))

    local_statistics(inner)(tiny.server, [], 17)
    assert seeds == [17]


def test_a_student_that_always_moves_forgets_which_statistics_it_started_from(tiny: Tiny) -> None:
    """In train mode BatchNorm uses its batch: the weights are the same, and the statistics forget by 0.9 a step.

    So whether FedAvg's statistics are averaged or the last client's makes no difference to FedDF (docs/why.md).
    """
    updates = [update_of(tiny.local(Job(c, 1, tiny.server.models[c.prototype], 7))) for c in tiny.federation.clients]
    changes = {"distill.keep_init": False, "distill.early_stopping": "none", "distill.steps": 60}
    averaged, last = (
        make_method(
            tiny.resources, with_values(tiny.settings, {**changes, "fusion.batchnorm": policy}), in_process
        ).fuse(tiny.server, updates, 3)
        for policy in ("average", "last")
    )
    start, other = averaged.start["cnn"], last.start["cnn"]
    one, two = averaged.server.models["cnn"], last.server.models["cnn"]
    assert not torch.equal(start[MEAN], other[MEAN])
    assert all(torch.equal(one[key], two[key]) for key in one if not is_statistic(key))
    forgotten = 0.9**60 * (start[MEAN] - other[MEAN]).abs().max()
    assert (one[MEAN] - two[MEAN]).abs().max() <= 2 * forgotten
