"""Data sets by name, checked before anything is trained on them."""

from __future__ import annotations

import traceback
from dataclasses import replace

from torch import nn

from feddf.config import ConfigError, DataConfig, Experiment, PrototypeConfig
from feddf.config.errors import FeddfError, reason
from feddf.config.names import DATASETS
from feddf.data.datasets import Dataset, wrong_labels
from feddf.data.text import TEXTS, tokenizer
from feddf.data.unlabeled import all_rows, resize
from feddf.runtime.packages import transformers
from feddf.types import Examples, Inputs


def load_dataset(key: str, name: str, data: DataConfig) -> Dataset:
    """Return a data set; ``key`` is where the configuration names it."""
    found = load_named(key, name, data)
    if not isinstance(found, Dataset):
        raise ConfigError.at(key, name, f"must give a feddf.Dataset, and gave a {type(found).__name__}")
    for examples in (found.train, found.test):
        if wrong := wrong_labels(examples):
            raise ConfigError.at(key, name, f"has {wrong}")
    return _resized(found, data.image_size) if data.image_size is not None else found


def load_named(key: str, name: str, data: DataConfig) -> object:
    """Return what a name stands for: a data set, or whatever a function (or module) of the user's own gives."""
    try:
        loader = DATASETS[name]
        return loader if isinstance(loader, nn.Module) else loader(data)
    except (ValueError, FileNotFoundError) as error:
        raise ConfigError.at(key, name, str(error)) from error
    except FeddfError:
        raise
    except Exception as error:  # a function of the user's own may fail in any way
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if place.filename == __file__ else f" ({place.filename}, line {place.lineno})"
        allowed = f"must be a function of [data] that returns a feddf.Dataset; it raised {reason(error)}{where}"
        raise ConfigError.at(key, name, allowed) from error


def _resized(data: Dataset, side: int) -> Dataset:
    """Return a data set of images with all of them at one size; one that has it already is returned itself."""
    raw = data.train.inputs.raw
    if len(raw.shape) != 4 or tuple(raw.shape[2:]) == (side, side):
        return data

    def small(examples: Examples) -> Examples:
        rows = resize(all_rows(examples.inputs.raw), (raw.shape[1], side, side), raw.dtype)
        return replace(examples, inputs=Inputs(rows, data.train.inputs.encode))

    return replace(data, train=small(data.train), test=small(data.test))


def with_tokenizer(experiment: Experiment) -> DataConfig:
    """Return the section [data] with the tokenizer of the first transformer, where none is named."""
    paths = [str(prototype.options["path"]) for prototype in experiment.prototypes if "path" in prototype.options]
    if experiment.data.tokenizer or not paths:
        return experiment.data
    return experiment.data.model_copy(update={"tokenizer": paths[0]})


def check_vocabulary(prototype: PrototypeConfig, data: DataConfig) -> None:
    """A tokenizer that knows more tokens than the model would fail somewhere inside the first batch that has one."""
    if data.name not in TEXTS or "path" not in prototype.options or data.tokenizer is None:
        return
    path, found = prototype.options["path"], tokenizer(data.tokenizer, data.max_tokens)
    model = transformers().AutoConfig.from_pretrained(path, trust_remote_code=False)
    if found.n_tokens > model.vocab_size:
        allowed = f"it knows {found.n_tokens} tokens, and the model {path} can read {model.vocab_size}"
        raise ConfigError.at("data.tokenizer", data.tokenizer, allowed)
    if found.padding != (model.pad_token_id or 0):
        allowed = f"it pads with token {found.padding}, and the model {path} with {model.pad_token_id}"
        raise ConfigError.at("data.tokenizer", data.tokenizer, allowed)
