"""The formats of teachers: folders of feddf, weights of its architectures, programs (.pt2), ONNX, and Hugging Face.

Each is a function of an entry of ``[[teachers]]``, and of whether code in its files may run, that returns its models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from feddf.config.errors import first_line
from feddf.config.foreign import validated
from feddf.config.fuse_config import TeacherConfig
from feddf.config.names import MODELS
from feddf.data.unlabeled import in_batches, read_program
from feddf.fusing.beside import About, about, labels_of, of_processor, read_json
from feddf.fusing.feeding import ASSUMED, FILE, Feeding, Sizes, assumed, by_hand, of_sizes, shown_sizes
from feddf.fusing.onnx_files import load_onnx, read_graph
from feddf.fusing.teachers import PredictBatch, TeacherError, TrainedModel, file_hash, predicting
from feddf.models.large import checked_layers
from feddf.runtime.atomic import check_program
from feddf.runtime.device import CPU
from feddf.runtime.packages import transformers
from feddf.saved.model import ModelSpec, Tokens, loaded
from feddf.saved.model_folder import at_home, read_state, specs
from feddf.types import State


def of_feddf(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return the models of a folder that feddf wrote: all prototypes of a run, or the one that is named."""
    path = Path(config.path).expanduser()
    found = specs(path, config.prototype, trust=trust)
    own = config.name or path.resolve().name
    teachers = []
    for name, (spec, weights) in found.items():
        if spec.form:
            allowed = "only models with one class for each input can be fused so far"
            raise TeacherError(f"teacher {own}: its outputs are {spec.outputs.title}; {allowed}")
        if config.prototype in (None, name):
            feeding = by_hand(config).otherwise(Feeding.of(spec.preprocess, FILE))
            teachers.append(_of_weights(weights, spec, feeding, f"{own}-{name}" if len(found) > 1 else own, path))
    return teachers


def of_safetensors(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return weights of an architecture that the configuration names."""
    path = Path(config.path).expanduser()
    if config.model is None:
        known = ", ".join(MODELS)
        raise TeacherError(f"teacher {path}: say which architecture its weights are of, with model = ... ({known})")
    feeding = assumed(by_hand(config))
    preprocess = feeding.preprocess
    if preprocess is None:
        raise TeacherError(f"teacher {path}: say how large its images are, with size = 32 (or name a tokenizer)")
    spec = ModelSpec(config.model, preprocess.shape, config.classes, preprocess, config.options)
    return [_of_weights(path, spec, feeding, config.name or path.stem)]


def _of_weights(path: Path, spec: ModelSpec, feeding: Feeding, id: str, folder: Path | None = None) -> TrainedModel:
    """Return weights of an architecture of feddf's as a teacher; outside a folder they say how many outputs it has."""
    if not path.is_file():
        raise TeacherError(f"teacher {id}: there are no weights {path}")
    here = at_home(replace(spec, preprocess=feeding.preprocess), folder or path.parent)
    if isinstance(here.preprocess, Tokens):  # its tokenizer may lie in the folder
        feeding = Feeding.of(here.preprocess, feeding.who("tokenizer"))
    state = partial(read_state, spec, path)

    def open_weights(device: torch.device) -> AbstractContextManager[PredictBatch]:
        weights = state()
        whole = here if folder else _with_outputs(here, weights)
        return predicting(loaded(whole, weights, f"teacher {id}: {path}", device).network)

    content = file_hash([path], repr((spec.model, sorted(spec.options.items()), spec.shape)))
    more = about(folder) if folder else About()
    return TrainedModel(
        id, open_weights, spec.classes, feeding, "logits", content=content, source=str(path), spec=here, state=state,
        license=more.license, datasets=more.datasets, size=path.stat().st_size,
    )  # fmt: skip


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
    name = config.name or path.stem
    sizes, _ = _load_program(path, name, CPU)  # they decide how large the pool's images are; it is not kept open
    return [_of_file(config, [path], _load_program, About(of_sizes(sizes[1:])), shown_sizes(sizes))]


def of_onnx(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return an ONNX file as a teacher. Its first output of floats (or of a zipmap) are the logits or probabilities.

    It takes one input: images, flat ones too, rows of a table or of tokens; a text model may also take an attention
    mask. It runs in onnxruntime (``pip install 'feddf[onnx]'``) on the CPU, whatever the device.
    """
    path = _file(config)
    files = [path, *sorted(path.parent.glob(f"{path.name}.data"))]  # large weights lie beside the file
    graph = read_graph(path, config.name or path.stem)
    tokenizer = config.tokenizer or about(path).feeding.get("tokenizer")
    return [_of_file(config, files, partial(load_onnx, tokenizer, graph), graph.about, graph.takes, moves=False)]


def of_bundle(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return the model of a MONAI bundle that was exported as ``models/model.onnx`` or ``models/model.pt2``."""
    folder = Path(config.path).expanduser()
    for file, read in (("model.onnx", of_onnx), ("model.pt2", of_program)):
        if (folder / "models" / file).is_file():
            name = config.name or folder.resolve().name
            return read(config.model_copy(update={"path": str(folder / "models" / file), "name": name}), trust)
    files = "--ckpt_file models/model.pt --meta_file configs/metadata.json --config_file configs/inference.json"
    script = f"cd {folder}; python -m monai.bundle onnx_export network_def --filepath models/model.onnx {files}"
    raise TeacherError(
        f"teacher {folder}: its weights are a pickle or TorchScript; where you trust it, export it: {script}"
    )


def _file(config: TeacherConfig) -> Path:
    path = Path(config.path).expanduser()
    if not path.is_file():
        raise TeacherError(f"there is no teacher {path}")
    return path


def _of_file(
    config: TeacherConfig, files: Sequence[Path], load: Load, said: About, takes: str, *, moves: bool = True
) -> TrainedModel:
    """Return a program as a teacher, which is fed as is said by hand, in its file or beside it."""
    path = files[0]
    name, more = config.name or path.stem, about(path)

    @contextmanager
    def open_file(device: torch.device) -> Iterator[PredictBatch]:
        sizes, predict = load(path, name, device)
        with torch.inference_mode():
            yield partial(_in_its_sizes, name, sizes, predict)

    feeding = by_hand(config).otherwise(said.feeding).otherwise(more.feeding)
    return TrainedModel(
        name, open_file, said.classes or more.classes, feeding, content=file_hash(files), source=str(path),
        moves=moves, license=more.license, datasets=more.datasets, size=sum(one.stat().st_size for one in files),
        takes=takes,
    )  # fmt: skip


def _in_its_sizes(name: str, sizes: Sizes, predict: PredictBatch, inputs: Tensor) -> Tensor:
    """Predict for inputs of the sizes that a file takes."""
    batch, *takes = sizes
    shape = inputs.shape[1:]
    if len(takes) != len(shape) or any(size not in (None, given) for size, given in zip(takes, shape, strict=True)):
        wanted, given = shown_sizes(takes), shown_sizes(shape)
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
        values, said = described.to_dict(), by_hand(config)
        seen = of_processor(_processor(place), values)
    except Exception as error:
        raise TeacherError(f"teacher {name}: {path} is no model of transformers: {first_line(error)}") from error
    kinds = [kind for kind in ("Image", "Sequence") for one in found if one.endswith(f"For{kind}Classification")]
    if not kinds:
        known = "not a model for image or text classification"
        raise TeacherError(f"teacher {name}: it is {', '.join(found)}, and {known}")
    side = Feeding.said(ASSUMED, size=(224, 224))  # what most image models take
    if kinds[0] == "Image":
        feeding = assumed(said.otherwise(seen).otherwise(side))
    else:
        longest = values.get("max_position_embeddings") or 64
        length = longest if longest < 64 else None
        feeding = assumed(said.otherwise(Feeding.said(FILE, tokenizer=place, max_tokens=length)))
    preprocess = feeding.preprocess

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

    classes = classes if config.map else labels_of(values)
    more = about(Path(place)) if Path(place).is_dir() else About()
    return [
        TrainedModel(
            name, open_pretrained, classes, feeding, "logits", content=_content(place, described), source=path,
            license=more.license, datasets=more.datasets, size=_bytes(Path(place)),
        )
    ]  # fmt: skip


def _place(path: str, name: str) -> str:
    """Return the folder, or the name on the hub, of a model."""
    local = Path(path).expanduser()
    if not local.is_dir() and (path.count("/") != 1 or path.startswith((".", "/", "~"))):
        known = "folders of feddf or Hugging Face and files that end in .safetensors, .pt2 or .onnx"
        raise TeacherError(f"there is no teacher {path}; known are {known}")
    if local.is_dir() and not (local / "config.json").is_file():
        raise TeacherError(f"teacher {name}: the folder {path} has no config.json, so it is not known what it holds")
    return str(local) if local.is_dir() else path


def _processor(place: str) -> dict[str, Any]:
    """Return what ``preprocessor_config.json`` says, in a folder or on the hub."""
    if Path(place).is_dir():
        return read_json(Path(place) / "preprocessor_config.json")
    try:
        return dict(transformers().AutoImageProcessor.from_pretrained(place, trust_remote_code=False).to_dict())
    except Exception:  # there is none
        return {}


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _content(place: str, described: Any) -> str:
    """Return a hash of a folder's files; of a model on the hub, of its name and revision."""
    weights, more = sorted(Path(place).glob("*.safetensors")), described.to_json_string()
    revision = getattr(described, "_commit_hash", None) or ""
    return file_hash(weights, more) if Path(place).is_dir() else file_hash([], f"{place} {revision} {more}")
