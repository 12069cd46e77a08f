"""The formats of teachers: folders of feddf, weights of its architectures, programs (.pt2), ONNX, and Hugging Face.

Each is a function of an entry of ``[[teachers]]``, and of whether code in its files may run, that returns its models.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddf.config.errors import first_line
from feddf.config.foreign import parse_json, validated
from feddf.config.fuse_config import TeacherConfig
from feddf.config.names import MODELS
from feddf.data.unlabeled import in_batches, read_program
from feddf.fusing.teachers import PredictBatch, Sizes, TeacherError, TrainedModel, predicting, preprocess_of
from feddf.models.large import checked_layers
from feddf.runtime.atomic import check_program
from feddf.runtime.device import CPU
from feddf.runtime.packages import onnxruntime, transformers
from feddf.saved.model import ModelSpec, Preprocess, Tokens, from_description, loaded
from feddf.saved.model_folder import at_home, read_state, specs
from feddf.types import State


def file_hash(paths: Sequence[Path], more: str = "") -> str:
    """Return the SHA-256 of some files and of what else their meaning depends on."""
    sha = hashlib.sha256(more.encode())
    for path in paths:
        with path.open("rb") as file:
            sha.update(hashlib.file_digest(file, "sha256").digest())
    return sha.hexdigest()


def of_feddf(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return the models of a folder that feddf wrote: all prototypes of a run, or the one that is named."""
    path = Path(config.path).expanduser()
    found = specs(path, config.prototype, trust=trust)
    own = config.name or path.resolve().name
    teachers = []
    for name, (spec, weights) in found.items():
        if config.prototype in (None, name):
            fed = replace(spec, preprocess=preprocess_of(config, spec.preprocess))
            teachers.append(_of_weights(weights, fed, f"{own}-{name}" if len(found) > 1 else own, path))
    return teachers


def of_safetensors(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return weights of an architecture that the configuration names."""
    path = Path(config.path).expanduser()
    if config.model is None:
        known = ", ".join(MODELS)
        raise TeacherError(f"teacher {path}: say which architecture its weights are of, with model = ... ({known})")
    preprocess = preprocess_of(config) if config.size or config.tokenizer else None
    if preprocess is None:
        raise TeacherError(f"teacher {path}: say how large its images are, with size = 32 (or name a tokenizer)")
    spec = ModelSpec(config.model, preprocess.shape, config.classes, preprocess, config.options)
    return [_of_weights(path, spec, config.name or path.stem)]


def _of_weights(path: Path, spec: ModelSpec, id: str, folder: Path | None = None) -> TrainedModel:
    """Return weights of an architecture of feddf's as a teacher; outside a folder they say how many outputs it has."""
    if not path.is_file():
        raise TeacherError(f"teacher {id}: there are no weights {path}")
    here = at_home(spec, folder or path.parent)
    state = partial(read_state, spec, path)

    def open_weights(device: torch.device) -> AbstractContextManager[PredictBatch]:
        weights = state()
        whole = here if folder else _with_outputs(here, weights)
        return predicting(loaded(whole, weights, f"teacher {id}: {path}", device).network)

    content = file_hash([path], repr((spec.model, sorted(spec.options.items()), spec.shape)))
    return TrainedModel(
        id, open_weights, spec.classes, here.preprocess, content=content, source=str(path), spec=here, state=state
    )


def _with_outputs(spec: ModelSpec, state: State) -> ModelSpec:
    """Return a description with as many classes as the weights have outputs; if no number fits, loading will say so."""
    shapes = {key: tensor.shape for key, tensor in state.items()}
    counts = {len(tensor) for tensor in state.values() if tensor.ndim in (1, 2)}
    for count in sorted(counts, key=lambda one: (one != len(spec.classes), one)):  # what the user says is tried first
        tried = replace(spec, classes=tuple(str(number) for number in range(count)))
        try:
            with torch.random.fork_rng(devices=[]), torch.device("meta"):  # sizes are all that is asked for
                found = tried.prototype.build().state_dict()
        except Exception:
            break
        if {key: tensor.shape for key, tensor in found.items()} == shapes:
            return tried
    return spec if spec.classes else replace(spec, classes=("0", "1"))


Load = Callable[[Path, str, torch.device], tuple[Sizes, PredictBatch]]
"""Reads a file (of a teacher's name), and returns the sizes of a batch that it takes, and what predicts with it."""


def of_program(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return an exported program as a teacher: it holds its code and its weights, and needs no class of the user's."""
    path = _file(config)
    check_program(path, trust)
    return [_of_file(config, [path], _load_program)]


def of_onnx(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return an ONNX file as a teacher. Its first output are the logits (or probabilities, if ``outputs`` says so).

    It takes one input, images or rows of tokens; a text model may also take an attention mask. It runs in onnxruntime
    (``pip install 'feddf[onnx]'``) on the CPU, whatever the device.
    """
    path = _file(config)
    files = [path, *sorted(path.parent.glob(f"{path.name}.data"))]  # large weights lie beside the file
    return [_of_file(config, files, partial(_load_onnx, preprocess_of(config)), moves=False)]


def _file(config: TeacherConfig) -> Path:
    path = Path(config.path).expanduser()
    if not path.is_file():
        raise TeacherError(f"there is no teacher {path}")
    return path


def _of_file(config: TeacherConfig, files: Sequence[Path], load: Load, *, moves: bool = True) -> TrainedModel:
    """Return a program as a teacher.

    Where nothing says how it is fed, its sizes must be known before the pool is made: then, and only then, its file is
    read before it predicts. It is not kept open until then, so that one teacher is in memory at a time.
    """
    path, preprocess = files[0], preprocess_of(config)
    name = config.name or path.stem

    @contextmanager
    def open_file(device: torch.device) -> Iterator[PredictBatch]:
        sizes, predict = load(path, name, device)
        with torch.inference_mode():
            yield partial(_in_its_sizes, name, sizes, predict)

    takes = load(path, name, CPU)[0][1:] if preprocess is None else ()
    return TrainedModel(
        name, open_file, (), preprocess, content=file_hash(files), source=str(path), takes=takes, moves=moves
    )


def _in_its_sizes(name: str, sizes: Sizes, predict: PredictBatch, inputs: Tensor) -> Tensor:
    """Predict for inputs of the sizes that a file takes."""
    batch, *takes = sizes
    shape = inputs.shape[1:]
    if len(takes) != len(shape) or any(size not in (None, given) for size, given in zip(takes, shape, strict=True)):
        wanted, given = ("×".join(str(size or "any") for size in sizes) for sizes in (takes, shape))
        key = "size and channels" if inputs.is_floating_point() else "max_tokens"
        said = f"its file takes inputs of {wanted}, and it would be fed {given}"
        raise TeacherError(f"teacher {name}: {said}; say how it is fed with {key}")
    return predict(inputs) if batch is None else in_batches(predict, inputs, batch)


def _load_program(path: Path, name: str, device: torch.device) -> tuple[Sizes, PredictBatch]:
    from torch.export.passes import move_to_device_pass

    try:
        program, shape = read_program(path, "inputs")
    except ValueError as error:
        raise TeacherError(f"teacher {name}: {error}") from error
    module = (program if device == CPU else move_to_device_pass(program, device)).module()

    def predict(batch: Tensor) -> Any:
        outputs = module(batch)
        return outputs[0] if isinstance(outputs, tuple | list) else outputs  # of several, most have the logits first

    return tuple(size if isinstance(size, int) else None for size in shape), predict


LONGEST = 600.0  # seconds for an ONNX file to be loaded, and for a batch: it may hold a loop without end
ONNX_TYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(int32)": np.int32}


def _load_onnx(fed: Preprocess | None, path: Path, name: str, device: torch.device) -> tuple[Sizes, PredictBatch]:
    """A text model's further inputs are the mask of what is no padding, and the (one) kind of each token."""
    session = _session(path, name)
    given = session.get_inputs()
    if not given:
        raise TeacherError(f"teacher {name}: it takes no input, and a classifier takes one")
    main = next((one for one in given if "mask" not in one.name and "type" not in one.name), given[0])
    if main.type not in ONNX_TYPES:
        raise TeacherError(f"teacher {name}: its input '{main.name}' is of {main.type}; floats or integers are needed")

    def predict(inputs: Tensor) -> Tensor:
        feed = {main.name: inputs.numpy().astype(ONNX_TYPES[main.type])}
        for other in (one.name for one in given if one.name != main.name):
            if "mask" in other and isinstance(fed, Tokens):
                feed[other] = fed.mask(inputs).numpy()
            elif "type" in other:
                feed[other] = np.zeros(tuple(inputs.shape), dtype=np.int64)
            else:
                raise TeacherError(f"teacher {name}: it takes a further input '{other}', and a classifier takes one")
        options = onnxruntime().RunOptions()
        with _limited(partial(setattr, options, "terminate", True)):  # checked between operators, also inside a loop
            return torch.from_numpy(np.asarray(session.run(None, feed, options)[0]))

    return tuple(size if isinstance(size, int) and size > 0 else None for size in main.shape), predict


def _limited(stop: Callable[[], object]) -> AbstractContextManager[Any]:
    """Return a block in which ``stop`` is called where it takes longer than :data:`LONGEST`."""
    timer, block = threading.Timer(LONGEST, stop), ExitStack()
    timer.daemon = True
    timer.start()
    block.callback(timer.cancel)
    return block


def _session(path: Path, name: str) -> Any:
    try:
        library = onnxruntime()
        options = library.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 4
        cancel = getattr(options, "set_load_cancellation_flag", bool)  # older versions have none
        with _limited(partial(cancel, True)):
            return library.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except ValueError as error:
        raise TeacherError(f"teacher {name}: {first_line(error)}") from error
    except Exception as error:  # onnxruntime has errors of its own for everything
        raise TeacherError(f"teacher {name}: {path} is not a whole ONNX model: {first_line(error)}") from error


def of_pretrained(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return an image or text classifier of transformers as a teacher, with the class names in its configuration.

    Its weights are safetensors, in a folder or by its name on the hub.
    """
    path, name = config.path, config.name or Path(config.path).name
    place = _place(path, name)
    try:
        library = transformers()
        described = checked_layers(library.AutoConfig.from_pretrained(place, trust_remote_code=False))
        found: list[str] = validated(list[str], described.architectures or ["nothing"])
        classes = tuple(validated(list[str], [str(described.id2label[n]) for n in range(described.num_labels)]))
        images = _images(place) if any(one.endswith("ForImageClassification") for one in found) else None
    except Exception as error:
        raise TeacherError(f"teacher {name}: {path} is no model of transformers: {first_line(error)}") from error
    kinds = [kind for kind in ("Image", "Sequence") for one in found if one.endswith(f"For{kind}Classification")]
    if not kinds:
        known = "not a model for image or text classification"
        raise TeacherError(f"teacher {name}: it is {', '.join(found)}, and {known}")
    tokens = Tokens(config.tokenizer or place, config.max_tokens)
    preprocess = preprocess_of(config, images) if images is not None else tokens

    @contextmanager
    def open_pretrained(device: torch.device) -> Iterator[PredictBatch]:
        automatic = getattr(library, f"AutoModelFor{kinds[0]}Classification")
        try:
            model = automatic.from_pretrained(place, use_safetensors=True, trust_remote_code=False).eval().to(device)
        except Exception as error:
            raise TeacherError(f"teacher {name}: {path} cannot be loaded: {first_line(error)}") from error

        def predict(inputs: Tensor) -> Any:
            if isinstance(preprocess, Tokens):
                return model(input_ids=inputs, attention_mask=preprocess.mask(inputs)).logits
            return model(pixel_values=inputs).logits

        with torch.no_grad():
            yield predict

    if classes == tuple(f"LABEL_{number}" for number in range(len(classes))) and not config.map:
        classes = ()  # these are no names
    return [TrainedModel(name, open_pretrained, classes, preprocess, content=_content(place, described), source=path)]


def _place(path: str, name: str) -> str:
    """Return the folder, or the name on the hub, of a model."""
    local = Path(path).expanduser()
    if not local.is_dir() and (path.count("/") != 1 or path.startswith((".", "/", "~"))):
        known = "folders of feddf or Hugging Face and files that end in .safetensors, .pt2 or .onnx"
        raise TeacherError(f"there is no teacher {path}; known are {known}")
    if local.is_dir() and not (local / "config.json").is_file():
        raise TeacherError(f"teacher {name}: the folder {path} has no config.json, so it is not known what it holds")
    return str(local) if local.is_dir() else path


def _images(place: str) -> Preprocess:
    """Return size, mean and deviation of ``preprocessor_config.json``; without it, those of most image models."""
    try:
        if Path(place).is_dir():
            found = dict(parse_json((Path(place) / "preprocessor_config.json").read_bytes()))
        else:
            found = transformers().AutoImageProcessor.from_pretrained(place, trust_remote_code=False).to_dict()
    except Exception:
        found = {}
    size, crop = found.get("size", 224), found.get("crop_size")
    side = size if isinstance(size, int) else size.get("height") or size.get("shortest_edge") or 224
    if found.get("do_center_crop") and crop is not None:
        side = crop if isinstance(crop, int) else crop.get("height", side)
    plain = not found.get("do_normalize", True)
    mean, std = (
        ((0.0,) * 3, (1.0,) * 3) if plain else (found.get(f"image_{one}", (0.5,) * 3) for one in ("mean", "std"))
    )
    return from_description({"kind": "images", "shape": (3, side, side), "mean": tuple(mean), "std": tuple(std)})


def _content(place: str, described: Any) -> str:
    """Return a hash of a folder's files; of a model on the hub, of its name and revision."""
    weights, more = sorted(Path(place).glob("*.safetensors")), described.to_json_string()
    revision = getattr(described, "_commit_hash", None) or ""
    return file_hash(weights, more) if Path(place).is_dir() else file_hash([], f"{place} {revision} {more}")
