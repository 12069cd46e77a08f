"""Model folders and run folders, and how a model is loaded from either.

::

    config.json          the model's description under the key "feddf" (a transformer's has all that transformers need)
    model.safetensors    its weights
    README.md            the model card
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
from pydantic import Field
from torch import nn

from feddf.config.errors import FeddfError, one_line
from feddf.config.foreign import parse_json, validated
from feddf.data.files import image_files
from feddf.data.tables import read_table
from feddf.models.large import Transformer
from feddf.runtime.atomic import read_regular, text_lines, write_atomically
from feddf.runtime.device import choose, placed
from feddf.runtime.packages import no_output, transformers
from feddf.saved.model import Features, Images, LoadedModel, ModelError, ModelSpec, Tokens, loaded
from feddf.types import State

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
_Prototypes = Annotated[dict[Annotated[str, Field(pattern=r"^[\w.-]{1,200}$")], dict[str, Any]], Field(min_length=1)]


def load_model(
    folder: str | Path, prototype: str | None = None, device: str = "cpu", *, trust: bool = False
) -> LoadedModel:
    """Return a model that feddf wrote, with its classes and its preprocessing.

    Args:
        folder: a model folder (of ``feddf fuse``) or a run folder (of ``feddf run``).
        prototype: which model, where a run has several.
        device: where the model computes (``auto``: the first accelerator that works); ``predict`` moves its inputs.
        trust: import and build an architecture that a folder made elsewhere names as ``module:attribute``.

    >>> load_model("nowhere")
    Traceback (most recent call last):
    ...
    feddf.saved.model.ModelError: there is no folder nowhere
    """
    path = Path(folder).expanduser()
    found = specs(path, prototype, trust=trust)
    if prototype is None and len(found) > 1:
        raise ModelError(f"{path} holds several models; name one as its prototype: {', '.join(found)}")
    name = prototype or next(iter(found))
    spec, weights = found[name]
    if not weights.is_file():
        raise ModelError(f"{path} holds no weights of '{name}' yet: it has no {weights.relative_to(path)}")
    return loaded(at_home(spec, path), read_state(spec, weights), str(weights), placed(choose(device)))


def specs(path: Path, prototype: str | None = None, *, trust: bool = False) -> dict[str, tuple[ModelSpec, Path]]:
    """Return the models that a folder describes, by name, with the files of their weights; ``prototype`` is one."""
    if not path.is_dir():
        raise ModelError(f"there is no folder {path}")
    described, file = description(path), str(path / CONFIG)
    if described is None:
        raise ModelError(f"{path} is no folder of a model that feddf wrote: it has no {CONFIG} of feddf")
    if "prototypes" in described:
        with one_line(ModelError, f"{file} does not describe models", ValueError):
            listed: dict[str, Any] = validated(_Prototypes, described["prototypes"])
        found = {
            name: (ModelSpec.read(values, file, trust=trust), path / "models" / f"{name}.safetensors")
            for name, values in listed.items()
        }
    else:
        spec = ModelSpec.read(described, file, trust=trust)
        found = {spec.model: (spec, path / WEIGHTS)}
    if prototype is not None and prototype not in found:
        raise ModelError(f"{path} has no prototype '{prototype}'; it has {', '.join(found)}")
    return found


def description(path: Path) -> dict[str, Any] | None:
    """Return what a folder's ``config.json`` says under the key "feddf"; ``None`` if it says nothing."""
    found = read_json(path / CONFIG).get("feddf")
    return found if isinstance(found, dict) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object; an absent file says nothing."""
    with one_line(ModelError, f"cannot read {path}", (OSError, ValueError)):
        values = parse_json(read_regular(path)) if path.exists() else {}
    return values if isinstance(values, dict) else {}


def read_state(spec: ModelSpec, path: Path) -> State:
    """Return the tensors in a safetensors file, as the model names them: a transformer's folder has other names."""
    with one_line(ModelError, f"{path} is not a whole safetensors file"):
        state = safetensors.torch.load(path.read_bytes())
    prefix = "network." if spec.options.get("path") == HERE else ""
    return {prefix + key: tensor for key, tensor in state.items()}


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a folder to write to, which takes its place as ``path`` at the end of the block: whole, or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        temporary.rename(path)
    except OSError as error:
        raise FeddfError(f"cannot write the folder {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_model(folder: Path, module: nn.Module, spec: ModelSpec, facts: Mapping[str, Any]) -> None:
    """Write weights, with ``facts`` as metadata, and description; a transformer's as ``from_pretrained`` reads them."""
    values, state = dict[str, Any](), module.state_dict()
    metadata = {"feddf": json.dumps(dict(facts), sort_keys=True)}
    if isinstance(module, Transformer):
        values, state = _pretrained(folder, module, spec), module.network.state_dict()
        spec, metadata = _at(spec, HERE, pretrained=False), {"format": "pt", **metadata}
    tensors = {key: tensor.detach().contiguous().clone() for key, tensor in state.items()}
    write_atomically(folder / WEIGHTS, _with_sorted_metadata(safetensors.torch.save(tensors, metadata)))
    text = json.dumps({**values, "feddf": spec.describe()}, indent=2, ensure_ascii=False)
    write_atomically(folder / CONFIG, text.encode())


def _with_sorted_metadata(content: bytes) -> bytes:
    """Return a safetensors file with its metadata in order: the library writes several entries in a random one."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
    assert len(text) == size, "the same entries in another order are as long"
    return content[:8] + text + content[8 + size :]


def _pretrained(folder: Path, module: Transformer, spec: ModelSpec) -> dict[str, Any]:
    """Write the tokenizer beside a transformer, and return what its ``config.json`` has to say to transformers."""
    config: Any = module.network.config
    config.id2label = dict(enumerate(spec.classes))
    config.label2id = {name: number for number, name in enumerate(spec.classes)}
    config.architectures = [type(module.network).__name__]
    if isinstance(spec.preprocess, Tokens):
        with no_output():
            found = transformers().AutoTokenizer.from_pretrained(spec.preprocess.tokenizer, trust_remote_code=False)
        found.save_pretrained(folder)
    return dict(json.loads(config.to_json_string(use_diff=False)))


HERE = "."
"""In a transformer's description: the folder that it stands in, which has its configuration and its tokenizer."""


def at_home(spec: ModelSpec, folder: Path) -> ModelSpec:
    """Return a description from a folder, for use."""
    return _at(spec, str(folder)) if spec.options.get("path") == HERE else spec


def _at(spec: ModelSpec, place: str, **options: Any) -> ModelSpec:
    """Return a transformer's description with the place of its configuration and tokenizer."""
    fed = spec.preprocess
    fed = replace(fed, tokenizer=place) if isinstance(fed, Tokens) else fed
    return replace(spec, preprocess=fed, options={**spec.options, "path": place, **options})


def inputs_of(model: LoadedModel, paths: Sequence[str]) -> dict[str, Any]:
    """Return the inputs of ``feddf predict`` by name: images, also below folders, lines of texts, rows of tables."""
    found: dict[str, Any] = {}
    with one_line(ModelError, of=(OSError, ValueError)):
        for text in paths:
            if isinstance(model.preprocess, Images):
                found |= {str(path): path for path in image_files(Path(text))}
            elif isinstance(model.preprocess, Tokens):
                found |= {f"{text}:{number}": line for number, line in enumerate(read_lines(text), 1)}
            elif isinstance(model.preprocess, Features):
                rows = read_table(text).taking(model.preprocess.columns).rows.numpy()
                found |= {f"{text}:{number}": row for number, row in enumerate(rows, 1)}
            else:
                raise ModelError("only models of images, texts and tables take files; use feddf.load_model for others")
    if not found:
        raise ModelError(f"there is nothing to classify in {', '.join(paths)}")
    return found


def read_lines(path: str) -> list[str]:
    """Return the texts in a file, one in each line that is not blank."""
    lines = (part.strip() for line in text_lines(Path(path).expanduser()) for part in line.splitlines())
    return [line for line in lines if line]
