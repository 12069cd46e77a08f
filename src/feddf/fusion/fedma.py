"""FedMA: averaging after the neurons of each layer have been matched (Wang et al. 2020).

Networks that compute the same may have their neurons in another order, and then their plain average computes nothing.
FedMA finds, layer by layer, which neurons correspond, and averages those. One layer is matched per round; the layers
below it are frozen, and the clients continue to train the others, permuted into the matched order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from math import log
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from feddf.fusion.average import average, trained
from feddf.seeds import derive, numpy_generator, seed_torch
from feddf.states import fit_widths
from feddf.types import Fused, Fusion, Method, Part, Prototype, Resources, ServerState, State, Steps, Training, Update

if TYPE_CHECKING:
    from feddf.config.sections import FedMAConfig

PASSIVE = (
    nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.LeakyReLU, nn.ELU, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d,
    nn.Flatten, nn.Dropout, nn.Dropout2d, nn.Identity,
)  # fmt: skip
"""Modules that treat every neuron alike, so that the order of neurons passes through them."""

PASSIVE_FUNCTIONS = {
    "relu", "tanh", "sigmoid", "gelu", "flatten", "dropout", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d",
}  # fmt: skip
"""Functions that treat every neuron alike."""

Neurons = NDArray[np.float64]
"""A client's neurons of one layer: incoming weights and bias of each."""

Places = NDArray[np.int64]
"""For each neuron of a client, the matched neuron that it belongs to."""


@dataclass(frozen=True)
class Layers:
    """The layers of a plain chain, from input to output: their names, and the widths that they were built with."""

    names: tuple[str, ...]
    widths: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.names)


def layers_of(prototype: Prototype) -> Layers:
    """Return the layers of a plain chain of linear layers and convolutions; any other network is a ``ValueError``."""

    def refusal(why: str) -> ValueError:
        return ValueError(f"FedMA cannot match '{prototype.name}': {why}")

    with torch.random.fork_rng(devices=[]):  # building draws initial weights that are thrown away
        model = prototype.build()
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if "Norm" in type(module).__name__:
            raise refusal(f"'{name}' is a {type(module).__name__}")
    try:
        graph = fx.symbolic_trace(model).graph
    except Exception as error:
        raise refusal(f"its forward cannot be traced ({error})") from error
    found: list[str] = []
    for node in graph.nodes:
        if len(node.all_input_nodes) > 1 or (node.op != "output" and len(node.users) > 1):
            raise refusal(f"it has a residual connection or branch ({node})")
        if node.op == "call_module":
            module = modules[node.target]
            if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1):
                found.append(node.target)
            elif not isinstance(module, PASSIVE):
                raise refusal(f"'{node.target}' is a {type(module).__name__}")
        elif node.op.startswith("call") and getattr(node.target, "__name__", node.target) not in PASSIVE_FUNCTIONS:
            raise refusal(f"it is not known what {node} does to neurons")
    if not found or len(set(found)) < len(found):
        raise refusal("it needs layers that are each used once")
    return Layers(tuple(found), tuple(int(modules[name].weight.shape[0]) for name in found))


def keep_matched(
    model: nn.Module, training: Training, *, layers: Mapping[str, Layers], rounds: int, own_start: bool
) -> Steps:
    """Freeze the layers that are matched already: those below the one that this round matches.

    With ``own_start``, a client's first weights are its own, drawn by its seed, and not those that it was sent.
    """
    job = training.job
    if own_start and job.round == 1:
        with seed_torch(derive(job.seed, "own start")):
            model.load_state_dict(training.prototype.build().state_dict())
    chain = layers[job.client.prototype]
    for name in chain.names[: _stage(job.round - 1, rounds, chain)]:
        model.get_submodule(name).requires_grad_(False)
    return Steps()


def freeze_matched(resources: Resources, *, rounds: int, own_start: bool) -> Part:
    """Return what FedMA asks of clients, where a whole model takes so many rounds; a client may know its own only."""
    layers = {name: layers_of(prototype) for name, prototype in resources.prototypes.items()}
    half = partial(keep_matched, layers=layers, rounds=rounds, own_start=own_start)
    return Part(half=half, fit=fit_widths, name="fedma", told={"rounds": rounds, "own_start": own_start})


def rounds_a_model(layers: Mapping[str, Layers]) -> int:
    """Return the number of communication rounds that one whole model takes."""
    return max(map(len, layers.values()))


def fedma(prototypes: Mapping[str, Prototype], config: FedMAConfig) -> Method:
    """Return the method of Wang et al., "Federated Learning with Matched Averaging" (2020).

    Every client begins from an initialization of its own (``fedma.own_start``), so that there is something to match.
    In round t the layer ``stage = (t − 1) mod L`` is matched and stays as it is; each client continues from it with its
    own layers above, their inputs brought into the matched order, which the server keeps for it. The server's model is
    the matched average of *all* layers, as if no client trained on: it can be evaluated in every round, and after the
    last layer it is what every client gets. A layer may grow to ``fedma.growth`` times its first width. Clients keep
    matched layers frozen, and the cohort stays the same until a model is whole.

    Matched neurons are averaged uniformly, as the authors do (``fedma.neuron_weights``).

    Deviations: the output layer is averaged by n_k, not by class counts, which clients do not disclose; the variances
    of the matching cost are the layer's own mean square and γ = 1 (see :func:`match`), where the authors have
    σ = σ₀ = 1 and γ = 7 for all layers.
    """
    if find_spec("scipy") is None:
        raise ValueError("FedMA needs SciPy: pip install 'feddf[fedma]'")
    layers = {name: layers_of(prototype) for name, prototype in prototypes.items()}
    rounds = rounds_a_model(layers)
    part = freeze_matched(Resources(prototypes), rounds=rounds, own_start=config.own_start)
    return Method(match_and_average(layers, config), (part,), rounds_per_cohort=rounds)


def match_and_average(layers: Mapping[str, Layers], config: FedMAConfig) -> Fusion:
    """Return FedMA's fusion for chains of these layers."""

    def fuse(server: ServerState, updates: Sequence[Update], seed: int) -> Fused:
        length = rounds_a_model(layers)
        whole = server.round % length == length - 1
        models: dict[str, State] = {}
        averaged: dict[str, State] = {}
        own: dict[str, State] = {}
        for name, old in sorted(server.models.items()):
            used, chain = trained([update for update in updates if update.prototype == name]), layers[name]
            if not used:
                models[name] = averaged[name] = old
                continue
            stage = _stage(server.round, length, chain)
            models[name], above = matched_average(used, chain, old, stage=stage, config=config, seed=derive(seed, name))
            # a client that joins within a model has the server's grown layers: then there is no plain average
            alike = len({tuple(tensor.shape for tensor in update.state.values()) for update in used}) == 1
            averaged[name] = average(old, used) if alike else models[name]
            if not whole:
                own |= {update.client_id: state for update, state in zip(used, above, strict=True) if state}
        widths = {name: [len(models[name][f"{layer}.weight"]) for layer in layers[name].names] for name in models}
        notes = {"fedma": {"matched_layer": server.round % length, "widths": widths}}
        return Fused(replace(server.next(models), own=own), averaged, notes)

    return fuse


def matched_average(
    updates: Sequence[Update], layers: Layers, previous: State, *, stage: int = 0, config: FedMAConfig, seed: int = 0
) -> tuple[State, list[State]]:
    """Return the matched average, and for each client its layers above ``stage``, fitted to the matched ones below.

    Layers below ``stage`` are frozen: they are those of ``previous``, whatever a client sent.
    """
    counts = [float(update.n_examples) for update in updates]
    hidden_weights = counts if config.neuron_weights == "examples" else [1.0] * len(updates)
    matched: dict[str, Tensor] = {}
    places: list[Places | None] = [None] * len(updates)  # of the neurons below; None where those are the inputs
    width, right_above = 0, [update.state[f"{layers.names[-1]}.weight"] for update in updates]
    for depth, name in enumerate(layers.names):
        weight, bias = f"{name}.weight", f"{name}.bias"
        if depth < stage:
            matched |= {key: previous[key] for key in (weight, bias) if key in previous}
            width = len(previous[weight])
            places = [np.arange(width)] * len(updates)
            continue
        moved = [_with_inputs_at(update.state[weight], at, width) for update, at in zip(updates, places, strict=True)]
        if depth == stage + 1:
            right_above = moved
        biases = [update.state[bias] for update in updates] if bias in previous else []
        if depth == len(layers) - 1:
            found = [np.arange(layers.widths[depth])] * len(updates)  # outputs are classes and keep their order
        else:
            rows = _rows(moved, biases)
            most = max(int(config.growth * layers.widths[depth]), *map(len, rows))
            found = match(rows, most=most, seed=derive(seed, name))
        width = 1 + int(max(at.max() for at in found))
        weights = counts if depth == len(layers) - 1 else hidden_weights
        matched[weight] = _mean(moved, weights, found, width)
        if biases:
            matched[bias] = _mean(biases, weights, found, width)
        places = list(found)
    above = layers.names[stage + 1 :]
    return matched, [_above(update.state, above, lowest) for update, lowest in zip(updates, right_above, strict=True)]


def _above(state: State, names: Sequence[str], lowest: Tensor) -> State:
    """Return a client's own layers; only the lowest has to be rearranged, those above it follow its own order."""
    if not names:
        return {}
    own = {key: state[key].clone() for key in state if key.rpartition(".")[0] in names}
    return {**own, f"{names[0]}.weight": lowest}


def _stage(rounds_done: int, rounds_a_model: int, chain: Layers) -> int:
    """Return the layer to be matched next; a chain shorter than others has its last one matched again."""
    return min(rounds_done % rounds_a_model, len(chain) - 1)


def _with_inputs_at(weight: Tensor, places: Places | None, width: int) -> Tensor:
    """Move the input of each neuron below to its matched place; inputs that a client does not have are zero."""
    if places is None:
        return weight
    split = weight.reshape(len(weight), len(places), -1)  # a flattened image has several inputs a channel
    moved = torch.zeros(len(weight), width, split.shape[2], dtype=weight.dtype)
    moved[:, torch.from_numpy(places)] = split
    return moved.reshape(len(weight), -1) if weight.ndim == 2 else moved.reshape(len(weight), width, *weight.shape[2:])


def _rows(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> list[Neurons]:
    """Return each client's neurons as rows: incoming weights and, where there is one, the bias."""
    flat = [weight.reshape(len(weight), -1) for weight in weights]
    if biases:
        flat = [torch.cat([rows, bias[:, None]], dim=1) for rows, bias in zip(flat, biases, strict=True)]
    return [rows.to(torch.float64).numpy() for rows in flat]


def _mean(tensors: Sequence[Tensor], counts: Sequence[float], places: Sequence[Places], width: int) -> Tensor:
    """Return, for each matched neuron, the weighted mean over the clients that have it."""
    total = torch.zeros(width, *tensors[0].shape[1:], dtype=torch.float64)
    weight = torch.zeros(width, dtype=torch.float64)
    for tensor, count, where in zip(tensors, counts, places, strict=True):
        at = torch.from_numpy(where)
        total[at] += count * tensor.to(torch.float64)
        weight[at] += count
    return (total / weight.reshape(-1, *[1] * (total.ndim - 1))).to(tensors[0].dtype)


def match(clients: Sequence[Neurons], *, most: int, sweeps: int = 3, seed: int = 0, gamma: float = 1.0) -> list[Places]:
    """Return, for each client's neurons (rows of incoming weights and bias), the matched neuron of each.

    Every neuron is a noisy copy of a hidden global one: v ~ N(θ_l, σ²), θ_l ~ N(0, σ²), their number unknown
    (a Beta-Bernoulli process with mass γ; Yurochkin et al. 2019). One client after the other is assigned, given the
    others, by the assignment (Hungarian algorithm) that maximizes the posterior, i.e. the sum over its neurons v of

        ‖S_l + v‖² / (σ²(m_l + 2)) − ‖S_l‖² / (σ²(m_l + 1)) + 2 log(m_l / (J − m_l))    matched with l,
        ‖v‖² / 2σ² − 2 log t + 2 log(γ / J)                                             as the t-th new one,

    S_l being the sum and m_l the number of other clients' neurons in l, J the number of clients. ``most`` bounds the
    number of matched neurons. σ² is the mean square of all the weights at hand, so scaling a layer changes nothing.
    """
    variance = float(np.mean(np.concatenate(clients) ** 2)) or 1.0
    score = partial(_score, variance=variance, n_clients=len(clients), gamma=gamma)
    largest = max(range(len(clients)), key=lambda client: (len(clients[client]), -client))
    places: dict[int, Places] = {largest: np.arange(len(clients[largest]))}
    order = [client for client in range(len(clients)) if client != largest]
    random = numpy_generator(seed)
    for _ in range(sweeps if len(clients) > 1 else 0):
        for client in order:
            others = [(clients[other], at) for other, at in places.items() if other != client]
            places[client] = _assign(clients[client], others, most, score)
        order = random.permutation(len(clients)).tolist()
    used = np.unique(np.concatenate(list(places.values())))  # closes the gaps that neurons without any client left
    return [np.searchsorted(used, places[client]) for client in range(len(clients))]


def _assign(rows: Neurons, others: list[tuple[Neurons, Places]], most: int, score: Callable[..., Neurons]) -> Places:
    """Return the best places for one client's neurons, given all others'."""
    from scipy.optimize import linear_sum_assignment

    size = int(max(at.max() for _, at in others)) + 1
    sums, counts = np.zeros((size, rows.shape[1])), np.zeros(size)
    for other, at in others:
        sums[at] += other  # no client has two neurons in one place
        counts[at] += 1
    used, empty = np.flatnonzero(counts), np.flatnonzero(counts == 0)
    n_new = min(len(rows), most - len(used))
    _, columns = linear_sum_assignment(score(rows, sums[used], counts[used], n_new), maximize=True)
    places: Places = np.concatenate([used, empty, size + np.arange(len(rows))])[columns]
    return places


def _score(
    rows: Neurons, sums: Neurons, counts: NDArray[np.float64], n_new: int, variance: float, n_clients: int, gamma: float
) -> Neurons:
    """Return what each neuron (row) would add to the posterior in each place (column), the new ones last."""
    norms, mine = (sums**2).sum(axis=1), (rows**2).sum(axis=1)
    together = norms[None] + mine[:, None] + 2 * rows @ sums.T
    old = together / (variance * (counts + 2)) - norms / (variance * (counts + 1))
    old = old + 2 * np.log(counts / (n_clients - counts))
    new = mine[:, None] / (2 * variance) - 2 * np.log(np.arange(1, n_new + 1))[None] + 2 * log(gamma / n_clients)
    return np.hstack([old, new])
