"""Texts: the tokenizer that reads a data set, and whether it fits the models."""

from __future__ import annotations

from pathlib import Path

from feddf.data import Dataset
from feddf.data.text import TEXTS, Tokenizer, load, tokenizer
from feddf.models.transformer import transformers
from feddf.runs.config import Experiment, PrototypeSpec
from feddf.runs.settings import ConfigError


def read_texts(name: str, folder: Path | None, experiment: Experiment) -> Dataset:
    """Return a data set of texts, tokenised as the experiment says."""
    found = _tokenizer(experiment)
    return load(name, folder, found.tokenize, found.fingerprint)


def check_vocabulary(spec: PrototypeSpec, experiment: Experiment) -> None:
    """A tokenizer that knows more tokens than the model would fail somewhere inside the first batch that has one."""
    if experiment.data not in TEXTS or "path" not in spec.options:
        return
    found = _tokenizer(experiment)
    model = transformers().AutoConfig.from_pretrained(spec.options["path"])
    if found.n_tokens > model.vocab_size:
        allowed = f"it knows {found.n_tokens} tokens, and the model {spec.options['path']} can read {model.vocab_size}"
        raise ConfigError.at("tokenizer", _tokenizer_of(experiment), allowed)
    if found.padding != (model.pad_token_id or 0):
        allowed = f"it pads with token {found.padding}, and the model {spec.options['path']} with {model.pad_token_id}"
        raise ConfigError.at("tokenizer", _tokenizer_of(experiment), allowed)


def _tokenizer(experiment: Experiment) -> Tokenizer:
    return tokenizer(transformers(), _tokenizer_of(experiment), experiment.max_tokens)


def _tokenizer_of(experiment: Experiment) -> str:
    """Return the tokenizer that is named, or else that of the first transformer."""
    paths = [str(spec.options["path"]) for spec in experiment.prototypes if "path" in spec.options]
    if not experiment.tokenizer and not paths:
        raise ConfigError.at("tokenizer", None, f"'{experiment.data}' are texts; name a tokenizer or a transformer")
    return experiment.tokenizer or paths[0]
