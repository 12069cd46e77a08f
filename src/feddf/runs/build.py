"""The only place where names become objects: from a checked experiment to data, models, clients and methods."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from feddf.binary import inner_layers
from feddf.data import DATASETS, Dataset, dirichlet, iid, split
from feddf.data.augment import flip_crop
from feddf.data.datasets import image_folder
from feddf.data.partition import by_shards, dirichlet_equal
from feddf.data.text import TEXTS
from feddf.engines import Processes, RayWorkers, in_process
from feddf.fusion.fedma import Layers, cycle, fit_widths, frozen_layers, layers_of
from feddf.local import Frozen, local_update
from feddf.models import MODELS
from feddf.outcomes import retrying
from feddf.rounds import Federation
from feddf.runs.config import Experiment, PrototypeSpec
from feddf.runs.methods import accelerate_of, fusion_of
from feddf.runs.pool import pool_of
from feddf.runs.settings import ConfigError, Settings
from feddf.runs.texts import check_vocabulary, read_texts
from feddf.seeds import derive
from feddf.states import initial
from feddf.types import (
    Client,
    Engine,
    Examples,
    Fusion,
    Inputs,
    LocalTrain,
    Prototype,
    ServerState,
)


@dataclass(frozen=True)
class Task:
    """The data of an experiment, in their places: clients' shards, and the server's validation, test and pool."""

    data: Dataset
    train: Examples
    validation: Examples
    shards: list[Tensor]
    pool: Inputs | None


@dataclass(frozen=True)
class Parts:
    """An experiment made of objects, ready to be played."""

    experiment: Experiment
    task: Task
    prototypes: Mapping[str, Prototype]
    federation: Federation
    server: ServerState
    train: LocalTrain
    fuse: Callable[[Engine], Fusion]


@dataclass(frozen=True)
class Engines:
    """The same workers: for clients, with their deadline; for the server's own work, which is tried twice."""

    clients: Engine
    server: Engine


def build(experiment: Experiment) -> Parts:
    """Return the experiment's parts, or raise :class:`ConfigError` where names and data do not fit together."""
    task = build_task(experiment)
    for spec in experiment.prototypes:
        check_vocabulary(spec, experiment)
    prototypes = {spec.label: _prototype(spec, task.data) for spec in experiment.prototypes}
    server = ServerState(0, {name: initial(prototype, experiment.seed) for name, prototype in prototypes.items()})
    layers = _layers(experiment, prototypes)
    if layers:
        prototypes = {name: replace(prototype, fit=fit_widths) for name, prototype in prototypes.items()}
    federation = _federation(experiment, task.shards, hold=cycle(layers) if layers else 1)
    train = _train(experiment, task, prototypes, partial(frozen_layers, layers=layers) if layers else None)
    fuse = partial(fusion_of, experiment, prototypes, task.validation, task.pool)
    return Parts(experiment, task, prototypes, federation, server, train, fuse)


def build_task(experiment: Experiment) -> Task:
    """Load the data, hold the validation part out, partition the rest, and prepare the pool."""
    data = _load("data", experiment.data, experiment)
    if data.train.n_classes > len(data.train):
        raise ConfigError.at(
            "data", experiment.data, f"{data.train.n_classes} classes are more than its {len(data.train)} examples"
        )
    train = _some("data_size", experiment.data_size, data.train, experiment.seed)
    data = replace(
        data, train=train, test=_some("test_size", experiment.test_size, data.test, 0)
    )  # one test for all seeds
    rest, held_out = _held_out(experiment, len(data.train))
    if experiment.validation > 0 and len(held_out) == 0:
        raise ConfigError.at(
            "validation", experiment.validation, f"leaves no validation example out of {len(data.train)}"
        )
    kept, apart = split(len(rest), experiment.set_apart, derive(experiment.seed, "apart"))
    train, validation = data.train.take(rest[kept]), data.train.take(held_out)
    pool = pool_of(
        experiment.pool,
        experiment.pool_size,
        data.train.inputs,
        own={"validation": validation.inputs, "train": data.train.inputs.take(rest[apart])},
        find=partial(_found, experiment),
        seed=derive(experiment.seed, "pool"),
    )
    if pool is not None and experiment.pool_augment and len(pool.raw.shape) != 4:
        raise ConfigError.at("pool_augment", True, f"the inputs of '{experiment.data}' are not images")
    if pool is not None and experiment.stop == "held-out-loss" and len(pool) < 4:
        raise ConfigError.at("stop", experiment.stop, f"a pool of {len(pool)} is too small to hold some out")
    return Task(data, train, validation, _partition(experiment, train), pool)


def _some(key: str, size: int | None, examples: Examples, seed: int) -> Examples:
    """Return so many examples, chosen at random: for experiments at a small budget."""
    if size is None:
        return examples
    if size > len(examples):
        raise ConfigError.at(key, size, f"there are {len(examples)} examples")
    _, chosen = split(len(examples), size / len(examples), derive(seed, key))
    return examples.take(chosen)


def _found(experiment: Experiment, name: str) -> object:
    """Return a data set, or what ``module:attribute`` gives: for a pool it may be a generator."""
    if ":" in name and not name.startswith("folder:"):
        made = _named("pool", name, {})
        return made if isinstance(made, torch.nn.Module) else made()
    return _load("pool", name, experiment)


def _held_out(experiment: Experiment, n: int) -> tuple[Tensor, Tensor]:
    if experiment.validation_split == "random":
        return split(n, experiment.validation, derive(experiment.seed, "validation"))
    first = n - round(experiment.validation * n)  # the released code takes the last ones, unshuffled
    return torch.arange(first), torch.arange(first, n)


@contextmanager
def open_engine(experiment: Settings) -> Iterator[Engines]:
    """Start the workers that the experiment asks for, and end them with the block."""
    if experiment.engine == "in-process":
        yield Engines(in_process, in_process)
        return
    workers: Processes | RayWorkers = (
        RayWorkers(experiment.workers, experiment.ray_address)
        if experiment.engine == "ray"
        else Processes(experiment.workers or os.cpu_count() or 1)
    )
    with workers as pool:
        yield Engines(pool.within(experiment.deadline) if experiment.deadline else pool, retrying(pool))


def _load(key: str, name: str, experiment: Experiment) -> Dataset:
    folder = Path(experiment.data_dir).expanduser() if experiment.data_dir else None
    try:
        data = _read(key, name, folder, experiment)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError.at(key, name, str(error)) from error
    if not isinstance(data, Dataset):
        raise ConfigError.at(key, name, f"must give a feddf.Dataset, and gave a {type(data).__name__}")
    if experiment.engine != "in-process" and not _travels(data.train.inputs.encode):
        raise ConfigError.at(key, name, "its encode cannot travel to worker processes; make it a function of a module")
    for examples in (data.train, data.test):
        if not 0 < len(examples.inputs) == len(examples.labels) or examples.labels.dtype != torch.int64:
            found = f"{len(examples.inputs)} inputs and {len(examples.labels)} labels of {examples.labels.dtype}"
            raise ConfigError.at(key, name, f"has {found}; as many int64 labels as inputs are needed")
        low, high = (int(label) for label in examples.labels.aminmax())
        if low < 0 or high >= data.train.n_classes:
            allowed = f"has labels from {low} to {high}, and must have 0 to {data.train.n_classes - 1}"
            raise ConfigError.at(key, name, allowed)
    return data


def _read(key: str, name: str, folder: Path | None, experiment: Experiment) -> Any:
    if name.startswith("folder:"):
        return image_folder(Path(name.removeprefix("folder:")).expanduser(), experiment.image_size)
    if name in TEXTS:
        return read_texts(name, folder, experiment)
    loader = _named(key, name, DATASETS, also=TEXTS)
    return loader(folder) if name in DATASETS else loader()


def _travels(thing: object) -> bool:
    try:
        pickle.dumps(thing)
    except Exception:
        return False
    return True


def _partition(experiment: Experiment, train: Examples) -> list[Tensor]:
    needed = experiment.clients * experiment.min_shard
    if needed > len(train):
        raise ConfigError.at(
            "clients",
            experiment.clients,
            f"with at least {experiment.min_shard} examples each they need {needed}, and there are {len(train)}",
        )
    seed, clients = derive(experiment.seed, "partition"), experiment.clients
    try:
        if experiment.partition == "iid":
            return iid(train.labels, clients, seed=seed)
        if experiment.partition == "shards":
            return by_shards(train.labels, clients, per_client=experiment.classes_per_client, seed=seed)
        mix = (
            dirichlet_equal
            if experiment.partition == "dirichlet-equal"
            else partial(dirichlet, min_size=experiment.min_shard)
        )
        return mix(train.labels, clients, alpha=experiment.alpha, seed=seed, n_classes=train.n_classes)
    except ValueError as error:
        raise ConfigError.at("partition", experiment.partition, str(error)) from None


def prototype_for(spec: PrototypeSpec, shape: tuple[int, ...], n_classes: int) -> Prototype:
    """Return the architecture for inputs of a shape and a number of classes."""
    model = _named("prototypes.model", spec.model, MODELS)
    return Prototype(spec.label, partial(model, shape, n_classes, **spec.options))


def _prototype(spec: PrototypeSpec, data: Dataset) -> Prototype:
    prototype = prototype_for(spec, data.shape, data.train.n_classes)
    try:
        with torch.no_grad():
            trial = prototype.load(initial(prototype, 0))
            shape = tuple(trial(data.train.inputs.batch(torch.zeros(2, dtype=torch.int64))).shape)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        given = {"model": spec.model, **spec.options}
        raise ConfigError.at("prototypes", given, f"does not work on inputs of shape {data.shape}: {reason}") from error
    if shape != (2, data.train.n_classes):
        raise ConfigError.at(
            "prototypes", spec.model, f"gives outputs of shape {shape[1:]}, not {data.train.n_classes} logits"
        )
    return prototype


def _federation(experiment: Experiment, shards: list[Tensor], hold: int) -> Federation:
    """Deal the prototypes evenly over the clients, in turn."""
    labels = [spec.label for spec in experiment.prototypes]
    clients = [
        Client(client_name(number, len(shards)), labels[number % len(labels)], indices)
        for number, indices in enumerate(shards)
    ]
    return Federation(clients, experiment.fraction, experiment.seed, experiment.quorum, experiment.attempts, hold)


def augments(experiment: Experiment, task: Task) -> bool:
    """Say whether clients flip and crop their images."""
    return experiment.augment == "flip-crop" or (experiment.augment == "auto" and task.data.flips)


def client_name(number: int, clients: int) -> str:
    """Return a client's name, such that names are in the order of numbers."""
    return f"client-{number:0{len(str(clients - 1))}d}"


def _train(
    experiment: Experiment, task: Task, prototypes: Mapping[str, Prototype], frozen: Frozen | None
) -> LocalTrain:
    wanted = augments(experiment, task)
    if experiment.local_binary != "none":
        for name, prototype in prototypes.items():
            if not inner_layers(prototype.build()):
                allowed = f"'{name}' has no layer between its first and its last that could be binarised"
                raise ConfigError.at("local_binary", experiment.local_binary, allowed)
    if wanted and len(task.train.inputs.raw.shape) != 4:
        raise ConfigError.at("augment", experiment.augment, f"the inputs of '{experiment.data}' are not images")
    return partial(
        local_update,
        prototypes=prototypes,
        train=task.train,
        epochs=experiment.local_epochs,
        batch=experiment.local_batch,
        rate=experiment.local_rate,
        optimizer=experiment.local_optimizer,
        decay=experiment.local_decay,
        proximal=experiment.proximal,
        augment=flip_crop if wanted else None,
        accelerate=accelerate_of(experiment),
        binary=None if experiment.local_binary == "none" else experiment.local_binary,
        frozen=frozen,
        disclose=experiment.discloses,
    )


def _layers(experiment: Experiment, prototypes: Mapping[str, Prototype]) -> dict[str, Layers]:
    """Return the layers that FedMA matches one by one; for any other method there are none."""
    if experiment.method != "fedma":
        return {}
    if importlib.util.find_spec("scipy") is None:
        raise ConfigError.at("method", "fedma", "it needs SciPy; install it with: pip install 'feddf[fedma]'")
    try:
        return {name: layers_of(prototype) for name, prototype in prototypes.items()}
    except ValueError as error:
        raise ConfigError.at("method", "fedma", str(error)) from None


def _named(key: str, name: str, known: Mapping[str, Any], also: Iterable[str] = ()) -> Callable[..., Any]:
    """Return the entry of that name, or the object that ``module:attribute`` names."""
    if name in known:
        found: Callable[..., Any] = known[name]
        return found
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError.at(key, name, f"known are {', '.join([*known, *also])}, or your own as module:attribute")
    try:
        value: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigError.at(key, name, f"cannot be imported: {error}") from error
    return value
