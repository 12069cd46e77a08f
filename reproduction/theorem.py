"""Theorem 5.1: the terms of the generalization bound for the ensemble, estimated from the data of a run.

    L_D(1/K Σ h_k)  ≤  L_D̂(h_D̂)  +  1/K Σ_k (½ d_HΔH(D_k, D) + λ_k)  +  (4 + √log τ_H(2m)) / (δ/K √(2m))

Only a simulation can do this: it looks at all clients' data at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import sqrt

import torch
from torch import Tensor

from feddf.client import local_update
from feddf.config import LocalConfig
from feddf.engines.open import open_engines
from feddf.evaluate import accuracy, gather
from feddf.outputs import classes
from feddf.runs.build import Parts, prototype_for
from feddf.runtime.execution import Execution, of_answers
from feddf.seeds import derive, numpy_generator
from feddf.states import init_state
from feddf.types import Client, Examples, Job, Prototype

MEANING = {
    "pooled risk": "error of one model trained on all clients' data together, on those data: what fusion gives up is "
    "measured from here",
    "discrepancy": "half the proxy A-distance 2(1 − 2ε)(1 − n_k/N) between a client's inputs and everybody's, averaged "
    "over the clients; ε is the held-out error of a classifier that tells the client's from all others'",
    "lambda": "error of the pooled model on all data plus on the client's own, both held out, averaged over the "
    "clients: an upper estimate of what the best single model could do",
    "complexity": "4K / (δ √(2m)), the least that the last term can be, whatever the hypothesis class",
}
CAVEATS = (
    "The theorem is for two classes and 0-1 loss, and for shards of equal size; here are more, and m is the mean size.",
    "One trained classifier stands in for the supremum over a hypothesis class, so this discrepancy is a low estimate.",
    "The complexity term is vacuous (far above 1) for any real network; without it nothing is guaranteed. The other "
    "terms are of use to compare partitions with one another.",
)


@dataclass(frozen=True)
class Bound:
    """The estimated terms, and the ensemble's risk that they are about."""

    pooled_risk: float
    discrepancies: dict[str, float]
    lambdas: dict[str, float]
    complexity: float
    ensemble_risk: float | None

    def terms(self) -> dict[str, float]:
        """Return the terms of the bound, by the names in :data:`MEANING`."""
        clients = len(self.discrepancies)
        return {
            "pooled risk": self.pooled_risk,
            "discrepancy": sum(self.discrepancies.values()) / clients,
            "lambda": sum(self.lambdas.values()) / clients,
            "complexity": self.complexity,
        }


@dataclass(frozen=True)
class Domain:
    """One client's examples, and as many of everybody's: which is which?"""

    id: str
    own: Tensor
    others: Tensor
    seed: int


def estimate(parts: Parts, *, most: int = 2_000, delta: float = 0.05, ensemble: float | None = None) -> Bound:
    """Return the terms for the first prototype of an experiment; ``ensemble`` is the measured accuracy of its ensemble.

    All models are trained as the experiment's clients are. A fifth of every shard is kept from the pooled model, to
    estimate λ_k on. ``most`` bounds the examples on each side of a domain classifier.
    """
    experiment, train = parts.experiment, parts.task.train
    spec, seed = experiment.prototypes[0], derive(experiment.seed, "bound")
    prototype = parts.prototypes[spec.label]
    shards = {client.id: client.indices for client in parts.federation.clients if client.indices is not None}
    orders = {name: shards[name][_order(len(shards[name]), derive(seed, name))] for name in shards}
    held_out = {name: order[: max(1, len(order) // 5)] for name, order in orders.items()}
    kept = torch.cat([order[len(held_out[name]) :] for name, order in orders.items()])
    everybody = Client("everybody", spec.label, kept)
    pooled = prototype.load(parts.train(Job(everybody, 1, init_state(prototype, seed), seed)).state)
    global_risk = 1 - accuracy(pooled, train.take(torch.cat(list(held_out.values()))))
    work = partial(
        tell_apart,
        prototype=prototype_for(spec, parts.task.data.shape, classes(2)),
        train=train,
        local=_plain(experiment.local),
        execution=of_answers(experiment.run),
    )
    domains = [_domain(name, order, len(train), most, derive(seed, "domain", name)) for name, order in orders.items()]
    with open_engines(experiment.run) as engines:
        errors = dict(gather(engines.server(work, domains), "the domain classifier of"))
    return Bound(
        pooled_risk=1 - accuracy(pooled, train.take(kept)),
        discrepancies={name: max(0.0, 1 - 2 * errors[name]) * (1 - len(shards[name]) / len(train)) for name in orders},
        lambdas={name: global_risk + 1 - accuracy(pooled, train.take(held_out[name])) for name in orders},
        complexity=4 * len(shards) / (delta * sqrt(2 * len(train) / len(shards))),
        ensemble_risk=None if ensemble is None else 1 - ensemble,
    )


def _plain(local: LocalConfig) -> LocalConfig:
    """Return the epochs, batch and rate of local training without anything that a method adds."""
    return LocalConfig(epochs=local.epochs, batch_size=local.batch_size, lr=local.lr)


def tell_apart(
    domain: Domain, *, prototype: Prototype, train: Examples, local: LocalConfig, execution: Execution = Execution()
) -> tuple[str, float]:
    """Return the held-out error of a classifier between a client's examples and others, trained on half of both."""
    if len(domain.own) < 4:
        return domain.id, 0.5  # too few to tell anything
    chosen = torch.cat([domain.own, domain.others])
    labels = torch.cat([torch.zeros(len(domain.own)), torch.ones(len(domain.others))]).to(torch.int64)
    examples = Examples(train.take(chosen).inputs, labels, classes(2))
    order = _order(len(chosen), domain.seed)
    learned, held_out = order[: len(order) // 2], order[len(order) // 2 :]
    job = Job(Client(domain.id, prototype.name, learned), 1, init_state(prototype, domain.seed), domain.seed)
    update = local_update(job, prototypes={prototype.name: prototype}, train=examples, local=local, execution=execution)
    with execution.begun() as device:
        return domain.id, 1 - accuracy(prototype.load(update.state, device), examples.take(held_out))


def _domain(name: str, shard: Tensor, n: int, most: int, seed: int) -> Domain:
    own = shard[:most]
    outside = torch.ones(n, dtype=torch.bool)
    outside[shard] = False  # the whole of it: the factor 1 − n_k/N stands for the client's own share of all data
    others = outside.nonzero().flatten()
    size = min(len(own), len(others))  # as many of both: a classifier that always says one of them errs on half
    return Domain(name, own[:size], others[_order(len(others), seed)][:size], seed)


def _order(n: int, seed: int) -> Tensor:
    return torch.from_numpy(numpy_generator(seed).permutation(n))
