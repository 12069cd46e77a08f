"""Pickles are refused, because reading one can run any code; this says what a file holds, and how to convert it.

Nothing is unpickled: the names of classes and functions are read off the stream of its instructions.
"""

from __future__ import annotations

import pickletools
import zipfile
from contextlib import suppress
from pathlib import Path

PICKLES = (".pt", ".pth", ".pkl", ".pickle", ".bin", ".ckpt", ".joblib", ".ts", ".jit")
OTHERS = dict.fromkeys((".npz", ".npy"), "save a state dict with safetensors.torch.save_file(state, FILE)")
OTHERS |= dict.fromkeys(
    (".h5", ".keras"), "in Keras 3: keras.saving.load_model(FILE).export('model.onnx', format='onnx')"
)
PLAIN = ("=", "torch.", "torch ", "collections ", "numpy", "_codecs ", "builtins ", "__builtin__ ")
MOST = 1 << 26  # bytes of a pickle that are looked at: its names come before its numbers


def remedy(path: Path) -> str | None:
    """Return how a file becomes one that is safe to read; ``None`` if it is no pickle (nor numbers without a model)."""
    suffix, at = path.suffix.lower(), str(path)
    if suffix not in PICKLES:
        return OTHERS[suffix].replace("FILE", f"'{at}'") if suffix in OTHERS else None
    names, members = _looked_into(path)
    if any("/code/" in name for name in members):
        code = f"m = torch.jit.load('{at}').eval(); torch.onnx.export(m, (x,), '{path.stem}.onnx', dynamo=False)"
        return f"it is TorchScript; where you trust it, export it, with a batch x that it takes: {code}"
    foreign = [name for name in names if not name.startswith(PLAIN)]
    if any(name.startswith(("sklearn", "xgboost", "lightgbm")) for name in foreign):
        code = "skl2onnx.to_onnx(m, X[:1].astype('float32'), options={'zipmap': False}).SerializeToString()"
        loaded = f"m = joblib.load('{at}'); open('{path.stem}.onnx', 'wb').write({code})"
        return f"it is a model of {foreign[0].partition('.')[0]}; where you trust it, export it: {loaded}"
    if foreign or any(name.startswith("torch.nn.modules") for name in names):
        known = f" ({foreign[0].replace(' ', '.')})" if foreign else ""
        code = f"m = torch.load('{at}', weights_only=False).eval(); torch.onnx.export(m, (x,), '{path.stem}.onnx')"
        return f"it is a whole module; where you trust it, export it in the program that has its class{known}: {code}"
    inner = next((f"['{key}']" for key in ("state_dict", "model_state_dict", "model") if f"={key}" in names), "")
    code = f"save_file(torch.load('{at}', weights_only=True){inner}, '{path.with_suffix('.safetensors')}')"
    line = f'python -c "import torch; from safetensors.torch import save_file; {code}"'
    return f"where you trust it, convert it, and name its architecture with model = ...: {line}"


def _looked_into(path: Path) -> tuple[list[str], list[str]]:
    """Return the names of what a pickle refers to (and, after ``=``, its short texts), and its archive's members."""
    found, members, texts = list[str](), list[str](), list[str]()
    with suppress(Exception):  # what is no pickle, or is damaged, has no names
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                members = archive.namelist()
                with archive.open(next(name for name in members if name.endswith("data.pkl"))) as file:
                    content = file.read(MOST)
        else:
            with path.open("rb") as plain:
                content = plain.read(MOST)
        for instruction, argument, _ in pickletools.genops(content):
            if instruction.name == "GLOBAL":
                found.append(str(argument))
            elif instruction.name == "STACK_GLOBAL" and len(texts) > 1:
                found.append(f"{texts[-2]} {texts[-1]}")
            elif isinstance(argument, str) and len(argument) < 200:
                texts.append(argument)
    return [*found, *(f"={text}" for text in texts)], members
