"""Model files of eight makers: each is made and inspected, and some are fused with nothing said about their inputs.

    pip install -c constraints.txt 'feddf[onnx,text,demo,tables]' skl2onnx
    pip install --no-deps xgboost onnxmltools onnxconverter-common      # without them that file is left out
    python benchmarks/foreign_models.py OUT [--epochs 3]

All learn from parts of the 4,000 training digits of ``mnist-5k`` (the tables from scikit-learn's 8×8 digits) and are
measured in the program that trained them, on the 1,000 test digits; then ``feddf inspect`` measures what it makes of
the file alone. timm needs torchvision: where it cannot be imported, its folder is written by its format, from a
ResNet-18 whose parts have timm's names. Nothing is downloaded. It prints the tables of docs/fuse-evidence.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from feddf import MODELS
from feddf.config import DataConfig
from feddf.data.datasets import mnist_5k
from feddf.report.tables import markdown_table

Encode = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Digits:
    """Bytes and labels of digits to learn from and to measure with."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    def part(self, number: int, of: int = 4) -> tuple[Tensor, Tensor]:
        """Return one of several disjoint parts of the training digits."""
        return self.train[0][number::of], self.train[1][number::of]


def digits() -> Digits:
    data = mnist_5k(DataConfig(name="mnist-5k"))
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    rows = torch.arange(len(data.test))
    train = torch.as_tensor(data.train.inputs.raw[order]), data.train.labels[order]
    return Digits(train, (torch.as_tensor(data.test.inputs.raw[rows]), data.test.labels))


def normalized(mean: float, std: float) -> Encode:
    return lambda raw: (raw / 255 - mean) / std


def trained(
    module: nn.Module, encode: Encode, part: tuple[Tensor, Tensor], epochs: int, rate: float = 1e-3
) -> nn.Module:
    optimizer, (inputs, labels) = torch.optim.Adam(module.parameters(), rate), part
    module.train()
    for epoch in range(epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))
        for chosen in order.split(64):
            optimizer.zero_grad()
            F.cross_entropy(answers(module, encode(inputs[chosen])), labels[chosen]).backward()
            optimizer.step()
    return module.eval()


def answers(module: nn.Module, inputs: Tensor) -> Tensor:
    found = module(inputs)
    return getattr(found, "logits", found)


def accuracy(module: nn.Module, encode: Encode, test: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        found = torch.cat([answers(module, encode(part)).argmax(dim=1) for part in test[0].split(250)])
    return float((found == test[1]).double().mean())


def cnn() -> nn.Module:
    return MODELS["cnn"]((1, 28, 28), 10, width=16)


def legacy_onnx(out: Path, data: Digits, epochs: int, *, softmax: bool = False) -> float:
    encode = normalized(0, 1)
    model = trained(cnn(), encode, data.part(int(softmax)), epochs)
    whole = nn.Sequential(model, nn.Softmax(dim=1)) if softmax else model
    path = out / f"legacy{'-softmax' if softmax else ''}.onnx"
    given = torch.zeros(1, 1, 28, 28)
    torch.onnx.export(
        whole, (given,), path, dynamo=False, input_names=["x"], output_names=["y"],
        dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
    )  # fmt: skip
    return accuracy(whole, encode, data.test)


def dynamo_onnx(out: Path, data: Digits, epochs: int) -> float:
    encode = normalized(0.5, 0.5)
    model = trained(cnn(), encode, data.part(2), epochs)
    batch = torch.export.Dim("n", min=1)
    program = torch.onnx.export(
        model, (torch.zeros(2, 1, 28, 28),), dynamo=True, dynamic_shapes=({0: batch},), verbose=False
    )
    assert program is not None
    program.save(out / "dynamo.onnx")
    return accuracy(model, encode, data.test)


def exported(out: Path, data: Digits, epochs: int) -> float:
    encode = normalized(0.1307, 0.3081)
    model = trained(cnn(), encode, data.part(3), epochs)
    batch = torch.export.Dim("n", min=1)
    program = torch.export.export(model, (torch.zeros(2, 1, 28, 28),), dynamic_shapes=({0: batch},))
    torch.export.save(program, out / "exported.pt2")
    return accuracy(model, encode, data.test)


def weights(out: Path, data: Digits, epochs: int) -> float:
    encode = normalized(0.5, 0.5)
    model = trained(cnn(), encode, data.part(0), epochs)
    save_file(model.state_dict(), out / "weights.safetensors")
    return accuracy(model, encode, data.test)


def of_sklearn(model: Any, path: Path, train: tuple[Any, Any], test: tuple[Any, Any], **options: Any) -> float:
    import skl2onnx

    rows, labels = (np.asarray(one) for one in train)
    model.fit(rows, labels)
    written = skl2onnx.to_onnx(model, rows[:1].astype(np.float32), options={id(model): options} if options else None)
    path.write_bytes(written.SerializeToString())
    return float(model.score(np.asarray(test[0]), np.asarray(test[1])))


def flat(part: tuple[Tensor, Tensor]) -> tuple[Any, Any]:
    return part[0].flatten(1).float().numpy(), part[1].numpy()


def sklearn_zipmap(out: Path, data: Digits, epochs: int) -> float:
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=50 * epochs))
    return of_sklearn(model, out / "sklearn-zipmap.onnx", flat(data.part(0)), flat(data.test))


def sklearn_forest(out: Path, data: Digits, epochs: int) -> float:
    forest = RandomForestClassifier(60, random_state=0)
    return of_sklearn(forest, out / "sklearn-forest.onnx", flat(data.part(1)), flat(data.test), zipmap=False)


def xgboost(out: Path, data: Digits, epochs: int) -> float:
    from onnxmltools import convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType
    from xgboost import XGBClassifier

    model = XGBClassifier(n_estimators=10 * epochs, max_depth=4, n_jobs=2)
    rows, labels = flat(data.part(1))
    model.fit(rows, labels)
    written = convert_xgboost(model, initial_types=[("x", FloatTensorType([None, rows.shape[1]]))], target_opset=15)
    (out / "xgboost.onnx").write_bytes(written.SerializeToString())
    return float(model.score(*flat(data.test)))


def table(out: Path, data: Digits, epochs: int, *, forest: bool = False) -> float:
    """Write a model of rows of 64 numbers, and tables beside it: a pool without labels, and a test with."""
    rows, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(rows))
    rows, labels = rows[order], labels[order]
    for name, part in (("pool", slice(600, 1200)), ("test", slice(1200, None))):
        with (out / f"{name}.csv").open("w", newline="") as file:
            named = ["label"] if name == "test" else []
            header = [*(f"p{number}" for number in range(64)), *named]
            lines = [[*row, *([label] if named else [])] for row, label in zip(rows[part], labels[part], strict=True)]
            csv.writer(file).writerows([header, *lines])
    mine, test = slice(300, 600) if forest else slice(0, 300), slice(1200, None)
    model = (
        RandomForestClassifier(60, random_state=0) if forest else MLPClassifier(max_iter=100 * epochs, random_state=0)
    )
    path = out / f"table-{'forest' if forest else 'mlp'}.onnx"
    return of_sklearn(model, path, (rows[mine], labels[mine]), (rows[test], labels[test]), zipmap=False)


def vit(out: Path, data: Digits, epochs: int) -> float:
    """Write a folder of transformers, and beside it the same as an ONNX file with the folder's JSON files."""
    encode = normalized(0.5, 0.5)
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, image_size=28, patch_size=7,
        num_labels=10, num_channels=1, id2label={number: str(number) for number in range(10)},
    )  # fmt: skip
    model = trained(transformers.ViTForImageClassification(config), encode, data.part(2), 3 * epochs)
    processor = transformers.ViTImageProcessor(
        size={"height": 28, "width": 28}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    model.save_pretrained(out / "vit")
    (out / "vit-onnx").mkdir(exist_ok=True)
    for folder in (out / "vit", out / "vit-onnx"):
        config.save_pretrained(folder)
        processor.save_pretrained(folder)
    torch.onnx.export(
        model, (torch.zeros(1, 1, 28, 28),), out / "vit-onnx" / "model.onnx", dynamo=False, output_names=["logits"],
        input_names=["pixel_values"], dynamic_axes={"pixel_values": {0: "n"}, "logits": {0: "n"}},
    )  # fmt: skip
    return accuracy(model, encode, data.test)


def resnet(out: Path, data: Digits, epochs: int) -> float:
    mean, std = (torch.tensor(one).view(1, 3, 1, 1) for one in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))

    def encode(raw: Tensor) -> Tensor:
        larger = F.interpolate(raw.float(), (32, 32), mode="bilinear", align_corners=False, antialias=True).round()
        return (larger.expand(-1, 3, -1, -1) / 255 - mean) / std

    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=10,
        id2label={number: str(number) for number in range(10)},
    )  # fmt: skip
    model = trained(transformers.ResNetForImageClassification(config), encode, data.part(3), epochs)
    model.save_pretrained(out / "resnet")
    transformers.ViTImageProcessor(
        size={"height": 32, "width": 32}, image_mean=mean.flatten().tolist(), image_std=std.flatten().tolist()
    ).save_pretrained(out / "resnet")
    return accuracy(model, encode, data.test)


def distilbert(out: Path, data: Digits, epochs: int) -> float | None:
    """Write a text model that was not trained: what is asked is how it is read."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = out / "distilbert"
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "bad", "film"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder)
    config = transformers.DistilBertConfig(
        vocab_size=len(words), dim=16, hidden_dim=16, n_layers=1, n_heads=2, max_position_embeddings=32,
        id2label={0: "negative", 1: "positive"}, label2id={"negative": 0, "positive": 1},
    )  # fmt: skip
    transformers.DistilBertForSequenceClassification(config).save_pretrained(folder)
    return None


class Block(nn.Module):
    """A basic block of a ResNet, with the names that timm gives its parts."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside)
        self.conv2, self.bn2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside)
        same = inside == outside and stride == 1
        shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        self.downsample = nn.Identity() if same else shortcut

    def forward(self, x: Tensor) -> Tensor:
        main = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(main + self.downsample(x))


class ResNet18(nn.Module):
    """ResNet-18, with the names that timm gives its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        widths = [64, 64, 128, 256, 512]
        for stage in range(1, 5):
            before, width, stride = widths[stage - 1], widths[stage], 1 if stage == 1 else 2
            self.add_module(f"layer{stage}", nn.Sequential(Block(before, width, stride), Block(width, width, 1)))
        self.fc = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in range(1, 5):
            x = self.get_submodule(f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


def timm(out: Path, data: Digits, epochs: int) -> float:
    encode, folder = normalized(0.1307, 0.3081), out / "timm-resnet18"
    try:
        from timm import create_model

        model = create_model("resnet18", num_classes=10, in_chans=1)
    except Exception as error:  # it imports torchvision
        print(f"timm cannot be imported ({error}); its folder is written by its format", flush=True)
        model = ResNet18()
    model = trained(model, encode, data.part(0), epochs)
    folder.mkdir(exist_ok=True)
    save_file({key: one.contiguous() for key, one in model.state_dict().items()}, folder / "model.safetensors")
    said = {"input_size": [1, 28, 28], "mean": [0.1307], "std": [0.3081], "label_names": [str(n) for n in range(10)]}
    config = {"architecture": "resnet18", "num_classes": 10, "pretrained_cfg": said}
    (folder / "config.json").write_text(json.dumps(config))
    return accuracy(model, encode, data.test)


MAKERS: dict[str, tuple[str, Callable[..., float | None], dict[str, Any]]] = {
    "legacy.onnx": ("CNN, torch's legacy exporter", legacy_onnx, {}),
    "legacy-softmax.onnx": ("CNN with a softmax, torch's legacy exporter", legacy_onnx, {"softmax": True}),
    "dynamo.onnx": ("CNN, torch's dynamo exporter", dynamo_onnx, {}),
    "exported.pt2": ("CNN, torch.export", exported, {}),
    "sklearn-zipmap.onnx": ("logistic regression behind a scaler, skl2onnx, zipmap", sklearn_zipmap, {}),
    "sklearn-forest.onnx": ("random forest, skl2onnx, no zipmap", sklearn_forest, {}),
    "xgboost.onnx": ("XGBoost, onnxmltools", xgboost, {}),
    "vit": ("ViT of one channel, transformers' folder", vit, {}),
    "resnet": ("ResNet in color, transformers' folder", resnet, {}),
    "timm-resnet18": ("ResNet-18, timm's format", timm, {}),
    "weights.safetensors": ("weights of a CNN, safetensors", weights, {}),
    "distilbert": ("DistilBERT, transformers' folder", distilbert, {}),
    "table-mlp.onnx": ("MLP on a table, skl2onnx", table, {}),
    "table-forest.onnx": ("random forest on a table, skl2onnx", table, {"forest": True}),
}


def feddf(*words: str) -> Any:
    """Run a command, and return what it prints as JSON."""
    done = subprocess.run([sys.executable, "-m", "feddf", *words, "--json"], capture_output=True, text=True)
    if not done.stdout.strip():
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def inspected(out: Path, own: dict[str, float | None]) -> Iterable[list[str]]:
    """Yield a row for each file: how it was fed, what it returned, and how good it was in its program and here."""
    if "vit" in own:
        own = {**own, "vit-onnx/model.onnx": own["vit"]}
    for file, accuracy_there in own.items():
        labeled = (
            [] if file == "distilbert" else ["--labeled", str(out / "test.csv") if "table" in file else "mnist-5k"]
        )
        (one,) = feddf("inspect", str(out / file), *labeled, *(["--trust"] if file.endswith(".pt2") else []))
        print(f"inspected {file}: {percent(one.get('accuracy'))}", flush=True)
        title = MAKERS[file][0] if file in MAKERS else "the same as model.onnx beside the folder's JSON files"
        if "error" in one:
            yield [title, one["error"].replace(str(out) + "/", ""), "", percent(accuracy_there), ""]
        else:
            better = re.search(r"with mean .* it would have .* % instead", one["warning"])
            fed = one["fed"] + (f"; {better[0].removesuffix(' instead')}" if better else "")
            yield [
                title,
                fed.replace(str(out) + "/", ""),
                one["outputs"],
                percent(accuracy_there),
                percent(one.get("accuracy")),
            ]


def fused(out: Path, name: str, teachers: list[str], student: str, pool: str, test: str) -> Iterable[list[str]]:
    """Yield a row for each model of a fusion in which nothing is said about how the teachers are fed."""
    words = [word for one in teachers for word in ("--teacher", str(out / one))]
    words += ["--student", student, "--unlabeled", pool, "--test", test, "--out", str(out / name)]
    report = feddf("fuse", *words, "--cache", str(out / "cache"), "distill.steps=1500", "run.threads=1")
    gains = report["contributions"].get("test", {})
    for model, figures in report["sets"]["test"].items():
        yield [model, percent(figures["accuracy"]), f"{100 * gains[model]:+.1f}" if model in gains else ""]


def main(out: Path, epochs: int) -> None:
    warnings.simplefilter("ignore")
    out.mkdir(parents=True, exist_ok=True)
    data, own = digits(), dict[str, float | None]()
    for file, (title, make, options) in MAKERS.items():
        torch.manual_seed(0)
        try:
            own[file] = make(out, data, epochs, **options)
        except ImportError as error:
            print(f"{title} is left out: {error}", flush=True)
            continue
        print(f"made {file}: {percent(own[file])}", flush=True)
    print(
        markdown_table(["file", "how it was fed (source)", "outputs", "own", "inspected"], inspected(out, own)),
        flush=True,
    )
    teachers = [one for one in ("sklearn-zipmap.onnx", "xgboost.onnx", "vit", "timm-resnet18") if one in own]
    header = ["model", "test accuracy %", "contribution"]
    print(markdown_table(header, fused(out, "fused", teachers, "cnn", "mnist-5k", "mnist-5k")), flush=True)
    tables = ["table-mlp.onnx", "table-forest.onnx"]
    found = fused(out, "fused-table", tables, "mlp", str(out / "pool.csv"), str(out / "test.csv"))
    print(markdown_table(header, found))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()
    main(given.out, given.epochs)
