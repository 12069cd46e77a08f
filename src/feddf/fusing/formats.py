"""The formats of teachers: folders of feddf, weights of its architectures, programs (.pt2), ONNX, and Hugging Face.

Each is a function of an entry of ``[[teachers]]``, and of whether code in its files may run, that returns its models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from feddf.config.errors import one_line
from feddf.config.foreign import validated
from feddf.config.fuse_config import TEACHER_FILES, TeacherConfig
from feddf.config.names import MODELS
from feddf.data.unlabeled import in_batches, read_program
from feddf.fusing.beside import About, about, labels_of, of_processor
from feddf.fusing.feeding import ASSUMED, FILE, Feeding, Sizes, assumed, by_hand, of_sizes, shown_sizes
from feddf.fusing.onnx_files import load_onnx, read_graph
from feddf.fusing.teachers import PredictBatch, TeacherError, TrainedModel, predicting
from feddf.models.large import checked_layers
from feddf.runtime.atomic import check_program
from feddf.runtime.device import CPU
from feddf.runtime.packages import no_output, transformers
from feddf.saved.model import Images, ModelSpec, Preprocess, Tokens, loaded
from feddf.saved.model_folder import at_home, read_json, read_state, specs
from feddf.types import State


def of_feddf(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return the models of a folder that feddf wrote: all prototypes of a run, or the one that is named."""
    found = specs(config.file, config.prototype, trust=trust)
    teachers = []
    for name, (spec, weights) in found.items():
        if config.prototype in (None, name):
            id = f"{config.id}-{name}" if len(found) > 1 else config.id
            feeding = by_hand(config).otherwise(Feeding.of(spec.preprocess, FILE))
            teachers.append(_of_weights(weights, spec, feeding, id, config.file))
    return teachers


def of_safetensors(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return weights of an architecture that the configuration names."""
    if config.model is None:
        known = f"say which architecture its weights are of, with model = ... ({', '.join(MODELS)})"
        raise TeacherError(f"teacher {config.file}: {known}")
    feeding = assumed(by_hand(config))
    preprocess = feeding.preprocess
    if preprocess is None:
        raise TeacherError(f"teacher {config.file}: say how large its images are, with size = 32 (or name a tokenizer)")
    form = of_architecture(config.model, config.kind or "classes", preprocess)
    spec = ModelSpec(config.model, preprocess.shape, config.classes, preprocess, config.options, form=form)
    return [_of_weights(config.file, spec, feeding, config.id)]


def of_architecture(model: str, kind: str, preprocess: Preprocess) -> dict[str, Any]:
    """Return what the outputs of an architecture mean, but for its channels: some answer at every position."""
    asked = signature(MODELS[model]).parameters.get("positions")
    if kind == "classes" and (asked is None or asked.default is not asked.empty):
        return {}
    places = preprocess.shape[1:] if isinstance(preprocess, Images) else preprocess.shape
    return {"kind": kind, "positions": list(places) if asked is not None and asked.default is asked.empty else []}


def _of_weights(path: Path, spec: ModelSpec, feeding: Feeding, id: str, folder: Path | None = None) -> TrainedModel:
    """Return weights of an architecture of feddf's as a teacher; outside a folder they say how many outputs it has."""
    if not path.is_file():
        raise TeacherError(f"teacher {id}: there are no weights {path}")
    here = at_home(replace(spec, preprocess=feeding.preprocess), folder or path.parent)
    if isinstance(here.preprocess, Tokens):  # its tokenizer may lie in the folder
        feeding = Feeding.of(here.preprocess, feeding.who("tokenizer"))
    state = partial(read_state, spec, path)

    def opened(device: torch.device) -> AbstractContextManager[PredictBatch]:
        weights = state()
        whole = here if folder else _with_outputs(here, weights)
        return predicting(loaded(whole, weights, f"teacher {id}: {path}", device).network, device)

    said = replace(about(folder) if folder else About(), feeding=feeding, classes=spec.classes)
    more = repr((spec.model, sorted(spec.options.items()), spec.shape))
    form = {name: one for name, one in here.outputs.describe().items() if name != "channels"}
    rest = {"outputs": "logits", "source": str(path), "spec": here, "state": state, "form": form}
    return TrainedModel.of_files(id, opened, [path], said, more, **rest)


def _with_outputs(spec: ModelSpec, state: State) -> ModelSpec:
    """Return a description with as many classes as the weights have outputs; if it fits none, loading will say so.

    Which of the weights have a size for each output shows where two and three outputs are compared.
    """
    with suppress(Exception):  # an architecture may refuse its options
        two, three = (spec.with_classes(tuple("012"[:count])).sizes() for count in (2, 3))
        for key, sizes in two.items():
            for axis, (one, other) in enumerate(zip(sizes, three[key], strict=True)):
                if one != other:
                    return spec.with_classes(tuple(map(str, range(state[key].shape[axis]))))
    return spec.with_classes(spec.classes or ("0", "1"))


Load = Callable[[torch.device], tuple[Sizes, PredictBatch]]
"""Reads a file, and returns the sizes of a batch that it takes, and what predicts with it."""


def of_program(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return an exported program as a teacher: it holds its code and its weights, and needs no class of the user's."""
    path = _existing(config)
    check_program(path, trust)
    with one_line(TeacherError, f"teacher {config.id}", ValueError):
        program, shape = read_program(path, "inputs")  # it is not kept open
    sizes = _sizes(shape)  # they decide how large the pool's images are
    returned = {node.name: node.meta.get("val") for node in program.graph.nodes}
    flat = getattr(returned.get(program.graph_signature.user_outputs[0]), "ndim", None) == 2
    rest: dict[str, Any] = {"takes": shown_sizes(sizes), "form": {"positions": []} if flat else {}}
    return [of_file(config, [path], partial(_load_program, path, config.id), About(of_sizes(sizes[1:])), **rest)]


def of_onnx(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return an ONNX file as a teacher. Its first output of floats (or of a zipmap) are the logits or probabilities.

    It takes one input: images, flat ones too, rows of a table or of tokens; a text model may also take an attention
    mask. It runs in onnxruntime (``pip install 'feddf[onnx]'``) on the CPU, whatever the device.
    """
    path = _existing(config)
    files = [path, *sorted(path.parent.glob(f"{path.name}.data"))]  # large weights lie beside the file
    graph = read_graph(path, config.id)
    load = partial(load_onnx, graph, path, config.id, config.tokenizer or about(path).feeding.get("tokenizer"))
    form: dict[str, Any] = {"positions": []} if graph.flat else {}
    return [of_file(config, files, load, graph.about, takes=graph.takes, moves=False, form=form)]


def of_bundle(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return the model of a MONAI bundle that was exported as ``models/model.onnx`` or ``models/model.pt2``."""
    for file, read in (("model.onnx", of_onnx), ("model.pt2", of_program)):
        path = config.file / "models" / file
        if path.is_file():
            return read(config.model_copy(update={"path": str(path), "name": config.id}), trust)
    files = "--ckpt_file models/model.pt --meta_file configs/metadata.json --config_file configs/inference.json"
    script = f"cd {config.file}; python -m monai.bundle onnx_export network_def --filepath models/model.onnx {files}"
    said = "its weights are a pickle or TorchScript; where you trust it, export it"
    raise TeacherError(f"teacher {config.file}: {said}: {script}")


def _existing(config: TeacherConfig) -> Path:
    if not config.file.is_file():
        raise TeacherError(f"there is no teacher {config.file}{_near(config.file)}")
    return config.file


def _near(path: Path) -> str:
    """Return a question where something beside a path that is not there has nearly its name, else nothing."""
    names = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() and not path.exists() else []
    return f"; did you mean '{near[0]}'?" if (near := get_close_matches(path.name, names, n=1)) else ""


def of_file(
    config: TeacherConfig, files: Sequence[Path], load: Load, said: About, meant: str = "", **rest: Any
) -> TrainedModel:
    """Return a program as a teacher, which is fed as is said by hand, in its file or beside it."""

    @contextmanager
    def opened(device: torch.device) -> Iterator[PredictBatch]:
        sizes, predict = load(device)
        with torch.inference_mode():
            yield partial(_in_its_sizes, config.id, sizes, predict)

    more = about(files[0])
    feeding = by_hand(config).otherwise(said.feeding).otherwise(more.feeding)
    more = replace(more, feeding=feeding, classes=said.classes or more.classes)
    return TrainedModel.of_files(config.id, opened, files, more, meant, **{"source": str(files[0]), **rest})


def _in_its_sizes(name: str, sizes: Sizes, predict: PredictBatch, inputs: Tensor) -> Tensor:
    """Predict for inputs of the sizes that a file takes."""
    batch, *takes = sizes
    shape = inputs.shape[1:]
    if len(takes) != len(shape) or any(size not in (None, given) for size, given in zip(takes, shape, strict=True)):
        key = "size and channels" if inputs.is_floating_point() else "max_tokens"
        said = f"its file takes inputs of {shown_sizes(takes)}, and it would be fed {shown_sizes(shape)}"
        raise TeacherError(f"teacher {name}: {said}; say how it is fed with {key}")
    return predict(inputs) if batch is None else in_batches(predict, inputs, batch)


def _load_program(path: Path, name: str, device: torch.device) -> tuple[Sizes, PredictBatch]:
    from torch.export.passes import move_to_device_pass

    with one_line(TeacherError, f"teacher {name}", ValueError):
        program, shape = read_program(path, "inputs")
    module = (program if device == CPU else move_to_device_pass(program, device)).module()

    def predict(batch: Tensor) -> Any:
        outputs = module(batch)
        return outputs[0] if isinstance(outputs, tuple | list) else outputs  # of several, most have the logits first

    return _sizes(shape), predict


def _sizes(shape: Sequence[Any]) -> Sizes:
    return tuple(size if isinstance(size, int) else None for size in shape)


TASKS = {
    "ImageClassification": "ImageClassification", "SemanticSegmentation": "SemanticSegmentation",
    "SequenceClassification": "SequenceClassification", "TokenClassification": "TokenClassification",
    "MaskedLM": "MaskedLM", "CausalLM": "CausalLM", "LMHeadModel": "CausalLM",
}  # fmt: skip
"""What the names of transformers' architectures end in, and the task that it is."""

PROBLEMS = {"multi_label_classification": "labels", "regression": "values"}


def of_pretrained(config: TeacherConfig, trust: bool) -> list[TrainedModel]:
    """Return a model of transformers as a teacher, with the class names in its configuration.

    It classifies images, texts, tokens or pixels, or is a language model, whose classes are its vocabulary; of a whole
    input it may also tell labels or values (``problem_type``). Its weights are safetensors, in a folder or by its name
    on the hub.
    """
    path, name, place = config.path, config.id, _place(config)
    with one_line(TeacherError, f"teacher {name}: {path} is no model of transformers"):
        library = transformers()
        described = checked_layers(library.AutoConfig.from_pretrained(place, trust_remote_code=False))
        found: list[str] = validated(list[str], described.architectures or ["nothing"])
        classes = tuple(validated(list[str], [str(described.id2label[n]) for n in range(described.num_labels)]))
        values = described.to_dict()
        seen = of_processor(_processor(place), values)
    task = next((TASKS[end] for end in TASKS for one in found if one.endswith(end)), None)
    if task is None:
        known = f"not a model for one of {', '.join(sorted({*TASKS.values()}))}"
        raise TeacherError(f"teacher {name}: it is {', '.join(found)}, and {known}")
    if task in ("ImageClassification", "SemanticSegmentation"):
        seen = seen.otherwise(Feeding.said(ASSUMED, size=(224, 224)))  # what most image models take
    else:
        longest = getattr(described, "max_position_embeddings", None) or 64
        seen = Feeding.said(FILE, tokenizer=place, max_tokens=longest if longest < 64 else None)
    feeding = assumed(by_hand(config).otherwise(seen))
    preprocess = feeding.preprocess

    @contextmanager
    def opened(device: torch.device) -> Iterator[PredictBatch]:
        automatic = getattr(library, f"AutoModelFor{task}")
        with one_line(TeacherError, f"teacher {name}: {path} cannot be loaded"):
            model = automatic.from_pretrained(place, use_safetensors=True, trust_remote_code=False).eval().to(device)

        def predict(inputs: Tensor) -> Any:
            if isinstance(preprocess, Tokens):
                mask = preprocess.mask(inputs)
                logits = model(input_ids=inputs, attention_mask=mask).logits
                return logits if logits.ndim == 2 else (logits * mask.unsqueeze(2)).movedim(2, 1)  # nothing of padding
            return model(pixel_values=inputs).logits

        with torch.no_grad():
            yield predict

    local, more = Path(place).is_dir(), described.to_json_string()
    if not local:  # a model on the hub is known by its name and revision
        more = f"{place} {getattr(described, '_commit_hash', None) or ''} {more}"
    said = about(Path(place)) if local else About()
    classes = classes if config.map else labels_of(values)
    said = replace(said, feeding=feeding, classes=_vocabulary(place, values) if task.endswith("LM") else classes)
    files = sorted(Path(place).glob("*.safetensors"))
    form: dict[str, Any] = {}
    if task in ("ImageClassification", "SequenceClassification"):
        usual = "values" if len(described.id2label) == 1 else "classes"
        form = {"kind": PROBLEMS.get(str(values.get("problem_type")), usual), "positions": []}
    elif isinstance(preprocess, Tokens):
        form = {"positions": [preprocess.length]}
    return [TrainedModel.of_files(name, opened, files, said, more, outputs="logits", source=path, form=form)]


def _vocabulary(place: str, values: dict[str, Any]) -> tuple[str, ...]:
    """Return the tokens that a language model tells apart, in order; those that its tokenizer lacks are numbers."""
    with one_line(TeacherError, f"{place} has no tokenizer"), no_output():
        known = transformers().AutoTokenizer.from_pretrained(place, trust_remote_code=False).get_vocab()
    names = {number: token for token, number in known.items()}
    return tuple(names.get(number, f"token {number}") for number in range(int(values["vocab_size"])))


def _place(config: TeacherConfig) -> str:
    """Return the folder, or the name on the hub, of a model."""
    path, folder = config.path, config.file
    near = "" if folder.is_dir() else _near(folder)  # then no hub is asked for what is only misspelled
    if not folder.is_dir() and (near or path.count("/") != 1 or path.startswith((".", "/", "~"))):
        known = "; known are folders of feddf or Hugging Face and files that end in .safetensors, .pt2 or .onnx"
        raise TeacherError(f"there is no teacher {path}{near or known}")
    if folder.is_dir() and not (folder / "config.json").is_file():
        found = [one for one in sorted(folder.rglob("*")) if one.suffix in TEACHER_FILES or one.name == "config.json"]
        inside = dict.fromkeys(str(one.parent if (one.parent / "config.json").is_file() else one) for one in found)
        known = f"; name what is inside: {', '.join(list(inside)[:6])}" if inside else ""
        said = f"the folder {path} has no config.json, so it is not known what it holds"
        raise TeacherError(f"teacher {config.id}: {said}{known}")
    return str(folder) if folder.is_dir() else path


def _processor(place: str) -> dict[str, Any]:
    """Return what ``preprocessor_config.json`` says, in a folder or on the hub."""
    if Path(place).is_dir():
        return read_json(Path(place) / "preprocessor_config.json")
    try:
        return dict(transformers().AutoImageProcessor.from_pretrained(place, trust_remote_code=False).to_dict())
    except Exception:  # there is none
        return {}
