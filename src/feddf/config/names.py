"""The names that a configuration may use, and where the code behind each one is.

One dictionary for each kind of thing. To add a model, a method, a data set or another part by name, write it and add
one line here. A user's own needs no line: it is named as ``module:attribute``.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from feddf.config.errors import ConfigError, nearest, one_line


class Names(Mapping[str, Any]):
    """A dictionary from names to objects that are imported when they are looked up.

    A name that ends in a colon takes the rest of what is written as its first argument (``folder:PATH``).

    >>> MODELS["mlp"].__name__
    'MLP'
    >>> MODELS["collections:OrderedDict"].__name__
    'OrderedDict'
    """

    def __init__(self, key: str, places: Mapping[str, str], others: Collection[str] = ()) -> None:
        self.key, self._places, self._others = key, dict(places), others

    def __getitem__(self, name: str) -> Any:
        self.check(name)
        kind, _, rest = name.partition(":")
        if f"{kind}:" in self._places:
            return partial(self._imported(name, self._places[f"{kind}:"]), rest)
        return self._imported(name, self._places.get(name, name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        """Say whether a name is known here, without importing anything."""
        kind, colon, rest = str(name).partition(":")
        return bool(rest) and f"{kind}:" in self._places if colon else name in self._places

    def check(self, name: str, key: str | None = None) -> None:
        """Raise :class:`ConfigError` for a name that is neither known nor a ``module:attribute``."""
        module, _, attribute = name.partition(":")
        if not (module and attribute) and name not in self and name not in self._others:
            known = [f"{one}PATH" if one[-1] == ":" else one for one in dict.fromkeys((*self, *self._others))]
            allowed = f"{nearest(name, known)} (your own is written as module:attribute)"
            raise ConfigError.at(key or self.key, name, allowed if known else "must be none or module:attribute")

    def _imported(self, name: str, place: str) -> Any:
        module, _, attribute = place.partition(":")
        failed = partial(ConfigError.at, self.key, name)
        with one_line(failed, "cannot be imported", (ImportError, AttributeError)):
            return getattr(_module(module), attribute)


def _module(name: str) -> ModuleType:
    """Import a module; one that is not installed is looked for in the working folder.

    That folder comes last, and only once a name asks for it: an ordinary run executes nothing that lies there.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        here = str(Path.cwd())
        if error.name != name.partition(".")[0] or here in sys.path:
            raise
        sys.path.append(here)
        return import_module(name)


METHODS = Names("fusion.method", {
    "fedavg": "feddf.runs.methods:fedavg",
    "feddf": "feddf.runs.methods:feddf",
    "fedma": "feddf.runs.methods:fedma",
    "fd": "feddf.runs.methods:fd",
})  # fmt: skip
"""(resources, settings, engine) -> a fusion, or a method that also asks something of its clients."""

PARTS = Names("fusion.parts", {
    "class-counts": "feddf.fusion.weights:class_counts",
    "known-channels": "feddf.fusion.knowledge:known_channels",
    "scaffold": "feddf.fusion.scaffold:scaffold",
})  # fmt: skip
"""(resources) -> a part: both halves of what is added to a method, and what travels between them."""

METHOD_PARTS = Names("fusion.method", {
    "fedma": "feddf.fusion.fedma:freeze_matched",
    "answers": "feddf.fusion.answers:exchange_answers",
    "fd": "feddf.fusion.answers:label_means",
})  # fmt: skip
"""(resources, what a client is told) -> a part that a method asks of its clients, by the name that they are sent."""

AVERAGES = Names("fusion.aggregation", {
    "examples": "feddf.fusion.average:average",
    "uniform": "feddf.fusion.average:uniform_average",
    "class-counts": "feddf.fusion.weights:class_average",
    "norm-clipped": "feddf.robust.rules:clipped_average",
    "median": "feddf.robust.rules:median",
    "trimmed-mean": "feddf.robust.rules:trimmed",
    "krum": "feddf.robust.rules:by_krum",
})  # fmt: skip
"""(previous weights, updates of one prototype) -> weights to start from."""

DROP_RULES = Names("fusion.drop_worst", {
    "paper": "feddf.fusion.select:random_guessers",
    "released": "feddf.fusion.select:released_rule",
    "lowest": "feddf.robust.rules:lowest",
})  # fmt: skip
"""(accuracy by client, number of classes, number of examples) -> the clients to drop."""

TARGETS = Names("ensemble.combine", {
    "logits": "feddf.fusion.ensemble:avg_logits",
    "probabilities": "feddf.fusion.ensemble:avg_probabilities",
    "geometric-median": "feddf.robust.trust:geometric_median",
    "cronus": "feddf.robust.trust:cronus",
    "entropy-reduced": "feddf.fusion.answers:entropy_reduced",
})  # fmt: skip
"""(votes, temperature, outputs) -> what a student should answer."""

TEACHER_WEIGHTS = Names("ensemble.weights", {
    "uniform": "feddf.fusion.weights:uniform",
    "examples": "feddf.fusion.weights:by_examples",
    "validation": "feddf.fusion.weights:by_accuracy",
    "certainty": "feddf.fusion.weights:by_certainty",
    "class-counts": "feddf.fusion.weights:by_class_counts",
})  # fmt: skip
"""(teachers, resources, accuracies) -> the weight of each teacher, by its id."""

TRUSTS = Names("fusion.trust", {"mixture": "feddf.robust.trust:mixture", "expguard": "feddf.robust.trust:expguard"})
"""(resources, engine, execution) -> (updates, trust before) -> trust now, by client."""

ATTACKS = Names("attack.kind", {})
"""(the parts of an experiment) -> its hostile clients; none come with feddf."""

BINARIZATIONS = Names("local.binary", {
    "straight-through": "feddf.models.binary:straight_through",
    "error-feedback": "feddf.models.binary:error_feedback",
})  # fmt: skip
"""A client half: (model, training) -> its steps."""

TEACHER_FORMATS = Names("teachers.format", {
    "feddf": "feddf.fusing.formats:of_feddf",
    "safetensors": "feddf.fusing.formats:of_safetensors",
    "onnx": "feddf.fusing.formats:of_onnx",
    "pt2": "feddf.fusing.formats:of_program",
    "hugging-face": "feddf.fusing.formats:of_pretrained",
    "timm": "feddf.fusing.timm_files:of_timm",
    "monai": "feddf.fusing.formats:of_bundle",
    "answers": "feddf.fusing.asking:of_answers",
    "table": "feddf.fusing.asking:of_table",
})  # fmt: skip
"""(an entry of [[teachers]], trust) -> the trained models that it stands for."""

MODELS = Names("prototypes.model", {
    "linear": "feddf.models.small:Linear",
    "mlp": "feddf.models.small:MLP",
    "cnn": "feddf.models.small:CNN",
    "resnet8": "feddf.models.resnet:resnet8",
    "resnet20": "feddf.models.resnet:resnet20",
    "resnet32": "feddf.models.resnet:resnet32",
    "shufflenetv2": "feddf.models.large:ShuffleNetV2",
    "transformer": "feddf.models.large:Transformer",
    "vgg9": "feddf.models.large:VGG",
    "vgg9-released": "feddf.models.large:vgg9_released",
    "unet": "feddf.models.positions:UNet",
    "dilated-cnn": "feddf.models.positions:DilatedCNN",
    "gpt": "feddf.models.positions:GPT",
    "gru": "feddf.models.positions:GRU",
})  # fmt: skip
"""(shape of one input, number of channels, **options) -> a module from encoded inputs to raw outputs. Those that answer
at every position are called as (shape, channels, positions, **options)."""

DATASETS = Names("data.name", {
    "mnist-5k": "feddf.data.datasets:mnist_5k",
    "digits": "feddf.data.datasets:digits",
    "toy": "feddf.data.datasets:toy",
    "cifar10": "feddf.data.datasets:cifar10",
    "cifar100": "feddf.data.datasets:cifar100",
    "mnist": "feddf.data.datasets:mnist",
    "fashion-mnist": "feddf.data.datasets:fashion_mnist",
    "stl10": "feddf.data.datasets:stl10",
    "imagenet32": "feddf.data.datasets:imagenet32",
    "tiny-imagenet": "feddf.data.datasets:tiny_imagenet",
    "sst2": "feddf.data.text:sst2",
    "ag_news": "feddf.data.text:ag_news",
    "diabetes": "feddf.data.composed:diabetes",
    "digit-grid": "feddf.data.composed:digit_grid",
    "digit-scenes": "feddf.data.composed:digit_scenes",
    "ag_news-characters": "feddf.data.text:ag_news_characters",
    "sst2-characters": "feddf.data.text:sst2_characters",
    "folder:": "feddf.data.datasets:image_folder",
    "table:": "feddf.data.tables:table",
})  # fmt: skip
"""(the section [data]) -> a data set."""

PARTITIONS = Names("partition.scheme", {
    "dirichlet": "feddf.data.partition:dirichlet",
    "dirichlet-equal": "feddf.data.partition:dirichlet_equal",
    "shards": "feddf.data.partition:by_shards",
    "iid": "feddf.data.partition:iid",
    "groups": "feddf.data.partition:by_groups",
})  # fmt: skip
"""(labels, number of clients, the section [partition], number of classes, seed) -> the indices of each client."""

SOURCES = Names("pool.sources", {
    "train": "feddf.runs.loading:from_held",
    "validation": "feddf.runs.loading:from_held",
    "noise": "feddf.runs.loading:from_noise",
    "plane": "feddf.runs.loading:from_plane",
    "generator:": "feddf.runs.loading:from_generator",
    "images:": "feddf.runs.loading:from_images",
    "table:": "feddf.runs.loading:from_table",
}, others=DATASETS)  # fmt: skip
"""(source, task, seed) -> raw inputs. Every data set is a source as well."""

TRACKERS = Names("run.loggers", {
    "tensorboard": "feddf.runs.loggers:tensorboard",
    "mlflow": "feddf.runs.loggers:mlflow",
    "wandb": "feddf.runs.loggers:wandb",
    "trackio": "feddf.runs.loggers:trackio",
})  # fmt: skip
"""(run folder, configuration, rounds that are done) -> a tracker: (round, numbers by name), and close()."""
