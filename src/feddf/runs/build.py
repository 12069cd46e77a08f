"""From a checked experiment to its parts: data, models, clients and method."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddf.client import combine_halves, local_update
from feddf.config import ConfigError, DataConfig, Experiment, PrototypeConfig, Record, Settings, with_values
from feddf.config.errors import one_line
from feddf.config.names import ATTACKS, MODELS, PARTITIONS
from feddf.data.datasets import Dataset, flip_crop
from feddf.data.partition import class_counts, split
from feddf.engines.jobs import obstacle
from feddf.engines.open import DeferredEngine
from feddf.evaluate import output_shape
from feddf.models.small import build_network
from feddf.outputs import Outputs
from feddf.privacy.noise import Noise
from feddf.rounds import Federation
from feddf.runs.loading import PoolTask, check_vocabulary, load_dataset, load_named, pool_of, with_tokenizer
from feddf.runs.loggers import check_installed
from feddf.runs.methods import KNOWN, build_method
from feddf.runs.private import Private, make_private
from feddf.runtime.execution import of_clients
from feddf.seeds import derive
from feddf.states import init_state
from feddf.types import Client, Engine, Examples, Inputs, LocalTrain, Method, Prototype, Resources, Rows, ServerState

S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class Task:
    """The data of an experiment, in their places: clients' shards, and the server's validation, test and pool."""

    data: Dataset
    train: Examples
    validation: Examples
    shards: list[Tensor]
    pool: Inputs | None

    def counts(self) -> NDArray[np.int64]:
        """Return how many examples of each class (or group) every client has."""
        groups, n_groups = self.train.partitioned_by
        return class_counts(groups, self.shards, n_groups)


@dataclass(frozen=True)
class Attack:
    """Hostile clients, to measure defenses with: what the function that ``attack.kind`` names makes of the parts.

    ``train`` is local training in which they may use other examples, ``engine`` wraps the clients' engine and may
    replace what they send, and ``note`` is kept in each round's record.
    """

    train: LocalTrain
    engine: Callable[[Engine], Engine]
    note: Callable[[Record, ServerState], Mapping[str, Any]]


@dataclass(frozen=True)
class Parts:
    """An experiment made of objects, ready to run. The ``method`` fuses in the ``engine``, once that is open."""

    experiment: Experiment
    task: Task
    prototypes: Mapping[str, Prototype]
    federation: Federation
    server: ServerState
    train: LocalTrain
    method: Method
    engine: DeferredEngine
    warnings: tuple[str, ...] = ()
    attack: Attack | None = None
    privacy: Private | None = None


def build(experiment: Experiment, *, trust: bool = False, noise: Callable[[float], Noise] = Noise) -> Parts:
    """Return the experiment's parts, or raise :class:`ConfigError` where names and data do not fit together.

    Args:
        experiment: the configuration, as :func:`feddf.load` returns it.
        trust: run programs in files that the experiment names (a generator's ``.pt2``).
        noise: makes the noise of ``[privacy]`` of its planned multiplier; no seed decides it.
    """
    check_installed(experiment.run.loggers)
    task, seed = build_task(experiment, trust=trust), experiment.seed
    prototypes = {spec.label: _prototype(spec, task.data, experiment) for spec in experiment.prototypes}
    models = {name: init_state(prototype, seed) for name, prototype in prototypes.items()}
    names = itertools.cycle(prototypes)  # dealt evenly over the clients, in turn
    known = _known(task, experiment)
    ids = [client_name(k, len(task.shards)) for k in range(len(task.shards))]
    clients = [Client(id, next(names), shard, known.get(id)) for id, shard in zip(ids, task.shards, strict=True)]
    counts = Counter(client.prototype for client in clients)
    augment = flip_crop if experiment.pool.augment else None
    resources = Resources(prototypes, task.pool, task.validation, augment, task.train.outputs, counts.__getitem__)
    engine = DeferredEngine()
    private = make_private(experiment, resources, models, noise)
    method, fitted = build_method(resources, asked_for_channels(experiment, task.data), engine, models)
    method = private.protect(method, experiment, resources, engine) if private else method
    federation = Federation(clients, experiment.clients, seed, method.rounds_per_cohort)
    half = combine_halves([part.half for part in method.parts])
    cropped = flip_crop if augments(experiment, task.data) else None
    local = partial(local_update, prototypes=fitted, train=task.train, local=experiment.local)
    train: LocalTrain = partial(local, half=half, augment=cropped, execution=of_clients(experiment.run))
    train = private.local(train, task.train) if private else train
    server = ServerState(0, models)
    warned = () if private else _warnings(task)  # they tell what clients hold
    parts = Parts(experiment, task, fitted, federation, server, train, method, engine, warned, None, private)
    if experiment.attack.kind == "none":
        return parts
    attack: Attack = ATTACKS[experiment.attack.kind](parts)
    return replace(parts, train=attack.train, attack=attack)


def asked_for_channels(settings: S, data: Dataset) -> S:
    """Return the settings under which clients tell which channels they know, where the data say that they differ."""
    if not data.known or KNOWN in settings.fusion.parts:
        return settings
    with one_line(partial(ConfigError.at, "data.name", data.name), "its sites know different channels", ConfigError):
        return with_values(settings, {"fusion.parts": (*settings.fusion.parts, KNOWN)})


def _known(task: Task, experiment: Experiment) -> dict[str, Tensor]:
    """Return which channels each client's labels tell apart, where the data say so: for each of its groups."""
    groups, channels = task.data.known, task.train.n_classes
    if groups and experiment.partition.scheme != "groups":
        allowed = f"the sites of '{experiment.data.name}' know different channels; it must be 'groups'"
        raise ConfigError.at("partition.scheme", experiment.partition.scheme, allowed)
    masks = [torch.zeros(channels, dtype=torch.bool).index_fill(0, torch.tensor(one), True) for one in groups]
    number = len(task.shards)
    return {client_name(k, number): masks[k % len(masks)] for k in range(number)} if masks else {}


def _warnings(task: Task) -> tuple[str, ...]:
    """Return what a user should know before the first round."""
    if not task.train.outputs.counts_classes:
        return ()
    held = set(torch.unique(task.train.labels[torch.cat(task.shards)]).tolist())
    absent = [str(label) for label in range(task.train.n_classes) if label not in held]
    text = f"no client holds an example of class {', '.join(absent[:10])}: it cannot be learned"
    return (text,) if absent else ()


def build_task(experiment: Experiment, *, trust: bool = False) -> Task:
    """Load the data, hold the validation part out, partition the rest, and prepare the pool."""
    config, seed = with_tokenizer(experiment), experiment.seed
    data = load_dataset("data.name", config.name, config)
    if data.train.n_classes > len(data.train):
        found = f"{data.train.n_classes} classes are more than its {len(data.train)} examples"
        raise ConfigError.at("data.name", config.name, found)
    _check_travel(experiment, "data.name", config.name, data.train.inputs.encode)
    some = _some("data.train_size", config.train_size, data.train, derive(seed, "data_size"))
    test = _some("data.test_size", config.test_size, data.test, derive(0, "test_size"))  # one test for all seeds
    data = replace(data, train=some, test=test)
    rest, held_out = _validation_split(config, len(data.train), seed)
    kept, for_pool = split(len(rest), experiment.pool.share_of_training, derive(seed, "apart"))
    _, dealt = split(len(kept), config.train_fraction, derive(seed, "train fraction"))
    train, validation = data.train.take(rest[kept[dealt]]), data.train.take(held_out)
    held = {"train": data.train.inputs.take(rest[for_pool]).raw, "validation": validation.inputs.raw}
    pool = _pool(experiment, config, data, held, trust)
    data = replace(data, train=train) if len(train) else data  # of the whole, only its form is needed from here on
    return Task(data, train, validation, _partition(experiment, train), pool)


def _pool(
    experiment: Experiment, config: DataConfig, data: Dataset, held: Mapping[str, Rows], trust: bool
) -> Inputs | None:
    """Return the unlabeled inputs in the form of the data's, with their encoding; ``None`` without sources."""
    pool, inputs = experiment.pool, data.train.inputs
    if not pool.sources:
        return None
    load = partial(load_named, "pool.sources", data=config)
    task = PoolTask(tuple(inputs.raw.shape[1:]), inputs.raw.dtype, load, pool.size, held, trust)
    rows, views = pool_of(pool, task, derive(experiment.seed, "pool"), flips=data.flips)
    if pool.augment and rows.ndim != 4:
        raise ConfigError.at("pool.augment", True, f"the inputs of '{config.name}' are not images")
    if experiment.distill.early_stopping == "held-out-loss" and len(rows) < 4:
        allowed = f"a pool of {len(rows)} is too small to hold some out"
        raise ConfigError.at("distill.early_stopping", "held-out-loss", allowed)
    return Inputs(rows, inputs.encode, views)


def _some(key: str, size: int | None, examples: Examples, seed: int) -> Examples:
    """Return so many examples, chosen at random: for experiments at a small budget."""
    if size is None:
        return examples
    if size > len(examples):
        raise ConfigError.at(key, size, f"there are {len(examples)} examples")
    _, chosen = split(len(examples), size / len(examples), seed)
    return examples.take(chosen)


def _validation_split(data: DataConfig, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices to train on, and those that the server holds out."""
    if data.validation_split == "random":
        rest, held_out = split(n, data.validation, derive(seed, "validation"))
    else:  # the released code takes the last ones, unshuffled
        first = n - round(data.validation * n)
        rest, held_out = torch.arange(first), torch.arange(first, n)
    if data.validation > 0 and len(held_out) == 0:
        raise ConfigError.at("data.validation", data.validation, f"leaves no validation example out of {n}")
    return rest, held_out


def _check_travel(experiment: Experiment, key: str, given: object, thing: object) -> None:
    """Refuse, before any training, what the run's workers could not load."""
    engine = experiment.run.engine
    if engine != "in-process" and (why := obstacle(thing, elsewhere=engine == "ray")):
        raise ConfigError.at(key, given, f"cannot be sent to worker processes: {why}, or set run.engine = 'in-process'")


def _partition(experiment: Experiment, train: Examples) -> list[Tensor]:
    partition, number = experiment.partition, experiment.clients.total
    if number * partition.min_size > len(train):
        needed = f"{partition.min_size} examples each they need {number * partition.min_size}"
        raise ConfigError.at("clients.total", number, f"with at least {needed}, and there are {len(train)}")
    deal, seed = PARTITIONS[partition.scheme], derive(experiment.seed, "partition")
    groups, n_groups = train.partitioned_by
    with one_line(partial(ConfigError.at, "partition.scheme", partition.scheme), of=ValueError):
        return list(deal(groups, number, partition, n_classes=n_groups, seed=seed))


def prototype_for(spec: PrototypeConfig, shape: tuple[int, ...], outputs: Outputs) -> Prototype:
    """Return the architecture for inputs of a shape and a kind of outputs."""
    return Prototype(spec.label, partial(build_network, MODELS[spec.model], shape, outputs, spec.options))


def _prototype(spec: PrototypeConfig, data: Dataset, experiment: Experiment) -> Prototype:
    check_vocabulary(spec, with_tokenizer(experiment))
    prototype = prototype_for(spec, data.shape, data.train.outputs)
    failed = partial(ConfigError.at, "prototypes", {"model": spec.model, **spec.options})
    with one_line(failed, f"does not work on inputs of shape {data.shape}"):
        shape = output_shape(prototype, data.train.inputs)
    _check_travel(experiment, "prototypes", spec.model, prototype)
    if shape != data.train.outputs.shape:
        wanted = f"{data.train.n_classes} logits" if data.train.outputs.counts_classes else data.train.outputs.shape
        allowed = f"gives outputs of shape {shape}, not {wanted}"
        raise ConfigError.at("prototypes", spec.model, allowed)
    return prototype


def client_name(number: int, clients: int) -> str:
    """Return a client's name, such that names are in the order of numbers."""
    return f"client-{number:0{len(str(clients - 1))}d}"


def augments(experiment: Experiment, data: Dataset) -> bool:
    """Say whether clients mirror and shift their images."""
    wanted = experiment.local.augment == "flip-crop" or (experiment.local.augment == "auto" and data.flips)
    if wanted and len(data.train.inputs.raw.shape) != 4:
        allowed = f"the inputs of '{experiment.data.name}' are not images"
        raise ConfigError.at("local.augment", experiment.local.augment, allowed)
    return wanted
