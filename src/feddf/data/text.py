"""Texts: AG News and SST-2 in their authors' files, as rows of token numbers. Tokenized once, then cached on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddf.config.errors import ConfigError, FeddfError, first_line, one_line
from feddf.config.sections import DataConfig
from feddf.data.datasets import Dataset, needed
from feddf.data.files import csv_rows, read_cached
from feddf.outputs import classes
from feddf.runtime.atomic import new_file, real_folder, text_lines
from feddf.runtime.packages import no_output, transformers
from feddf.scores import IGNORED
from feddf.types import Examples, Inputs

Tokenize = Callable[[Sequence[str]], Tensor]
"""Sentences -> N×L token numbers (int32), padded or cut to one length."""


@dataclass(frozen=True)
class Texts:
    """Sentences with one label each."""

    sentences: list[str]
    labels: Tensor


def widened(tokens: Tensor) -> Tensor:
    """Encode: token numbers are stored in four bytes, and models take eight."""
    return tokens.to(torch.int64)


def read_sst2(path: Path) -> Texts:
    """Return GLUE's SST-2: a header, then a sentence and its label (0 or 1), with a tab between them."""
    rows = [line.split("\t") for line in text_lines(path) if line.strip()][1:]
    labels = [row[-1].strip() if len(row) == 2 else "" for row in rows]
    return _texts(path, [row[0].strip() for row in rows], labels, "01")


def read_ag_news(path: Path) -> Texts:
    """Return AG News: class (1 to 4), title and description; a title may be missing."""
    rows = list(csv_rows(path))
    sentences = [" ".join(part for part in row[1:] if part).replace("\\", " ") for row in rows]
    return _texts(path, sentences, [row[0] if len(row) == 3 else "" for row in rows], "1234")


def _texts(path: Path, sentences: list[str], labels: list[str], known: str) -> Texts:
    """Return texts with their labels, each a character of ``known``, as numbers."""
    for number, (sentence, label) in enumerate(zip(sentences, labels, strict=True), 1):
        if len(label) != 1 or label not in known or not sentence:
            raise ValueError(f"{path}: entry {number} is not a text and one of {len(known)} classes: {sentence[:40]!r}")
    if not sentences:
        raise ValueError(f"{path} holds no texts")
    return Texts(sentences, torch.tensor([known.index(label) for label in labels]))


@dataclass(frozen=True)
class TextSource:
    """How the files of a data set of texts (one to train with, one to test with) are read, and its classes."""

    read: Callable[[Path], Texts]
    classes: tuple[str, ...]


TEXTS: dict[str, TextSource] = {
    "sst2": TextSource(read_sst2, ("negative", "positive")),
    "ag_news": TextSource(read_ag_news, ("World", "Sports", "Business", "Sci/Tech")),
}


def _tokenized(name: str, data: DataConfig) -> Dataset:
    """Return a data set of texts with the section's tokenizer: ``SST-2`` or ``ag_news_csv`` in the data folder."""
    if data.tokenizer is None:
        raise ConfigError.at("data.tokenizer", None, f"'{name}' are texts; name a tokenizer or a transformer")
    found = tokenizer(data.tokenizer, data.max_tokens)
    return read_texts(name, data.folder, found.tokenize, found.fingerprint)


sst2 = partial(_tokenized, "sst2")
ag_news = partial(_tokenized, "ag_news")


# A language model's data: characters, and which one comes next

CHARACTERS = "\0\1 abcdefghijklmnopqrstuvwxyz0123456789.,'\"-;:!?()$&/"
"""Padding, any other character, and those that are told apart; texts are read in lower case."""


def characters(sentences: Sequence[str], length: int) -> Tensor:
    """Return texts as rows of character numbers, cut or filled up with 0 to a length."""
    numbers = {character: number for number, character in enumerate(CHARACTERS)}
    rows = np.zeros((len(sentences), length), dtype=np.uint8)
    for row, sentence in zip(rows, sentences, strict=True):
        found = [numbers.get(character, 1) for character in sentence.lower()[:length]]
        row[: len(found)] = found
    return torch.from_numpy(rows)


def _next_characters(name: str, data: DataConfig) -> Dataset:
    """Return texts whose label at each character is the next one; the groups are the texts' own classes."""
    source, length = TEXTS[name], data.max_tokens

    def examples(path: Path) -> Examples:
        texts = source.read(path)
        rows = characters(texts.sentences, length + 1)
        wanted = rows[:, 1:].to(torch.int64)
        outputs = classes(len(CHARACTERS), (length,), score="1/perplexity")
        return Examples(
            Inputs(rows[:, :-1].contiguous(), widened), wanted.where(wanted > 0, IGNORED), outputs, texts.labels
        )

    train, test = (examples(path) for path in needed(name, data.folder))
    return Dataset(f"{name}-characters", train, test, classes=tuple(CHARACTERS))


ag_news_characters = partial(_next_characters, "ag_news")
sst2_characters = partial(_next_characters, "sst2")


def read_texts(name: str, folder: str | Path | None, tokenize: Tokenize, fingerprint: str) -> Dataset:
    """Return a data set of texts as rows of token numbers; ``fingerprint`` names what ``tokenize`` does."""
    source = TEXTS[name]
    train, test = (_examples(path, source, tokenize, fingerprint) for path in needed(name, folder))
    return Dataset(name, train, test, classes=source.classes)


def _examples(path: Path, source: TextSource, tokenize: Tokenize, fingerprint: str) -> Examples:
    """Return the examples in a file; their tokens are kept in the data folder, under a name that says how and what."""
    texts = source.read(path)
    key = hashlib.sha256(f"{fingerprint} {hashlib.sha256(path.read_bytes()).hexdigest()}".encode()).hexdigest()[:20]
    stored = path.parents[1] / ".feddf" / f"tokens-{key}.npy"
    tokens = read_cached(stored, len(texts.sentences), np.int32)
    if tokens is None:
        tokens = tokenize(texts.sentences)
        with suppress(OSError):  # a folder that cannot be written to: it is tokenized again the next time
            real_folder(stored.parent)
            with new_file(stored) as temporary, temporary.open("wb") as file:
                np.save(file, tokens.numpy())
    return Examples(Inputs(tokens, widened), texts.labels, classes(len(source.classes)))


@dataclass(frozen=True)
class Tokenizer:
    """How a tokenizer turns sentences into rows, a name for that, its tokens, that for padding, and their names."""

    tokenize: Tokenize
    fingerprint: str
    n_tokens: int
    padding: int
    names: Callable[[int], str]


def tokenizer(path: str, max_tokens: int) -> Tokenizer:
    """Return the pretrained tokenizer in a folder, or of a name on a hub; ``characters`` is that of single ones."""
    if path == "characters":
        read = partial(characters, length=max_tokens)
        return Tokenizer(read, f"{CHARACTERS} {max_tokens}", len(CHARACTERS), 0, CHARACTERS.__getitem__)
    library = transformers()
    with one_line(ValueError, "there is no tokenizer"), no_output():  # what a file has too much is printed as it is
        found = library.AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if found.pad_token_id is None:
        raise ValueError(f"the tokenizer {path} has no token for padding")
    backend = getattr(found, "backend_tokenizer", None)
    described = backend.to_str() if backend is not None else json.dumps(found.get_vocab(), sort_keys=True)
    fingerprint = f"{hashlib.sha256(described.encode()).hexdigest()} {max_tokens}"
    read = partial(_tokens, found, max_tokens)
    return Tokenizer(read, fingerprint, len(found), int(found.pad_token_id), found.convert_ids_to_tokens)


def _tokens(found: Any, max_tokens: int, sentences: Sequence[str]) -> Tensor:
    try:
        with no_output():
            rows = found(
                list(sentences), padding="max_length", truncation=True, max_length=max_tokens, return_tensors="np"
            )
    except BaseException as error:  # its Rust code panics where a regular expression takes too many steps
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise FeddfError(f"the tokenizer cannot read these texts: {first_line(error)}") from error
    return torch.from_numpy(rows["input_ids"].astype(np.int32))
