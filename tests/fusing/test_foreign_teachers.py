"""Files of other makers, made by their formats: flat ONNX files with labels and maps, timm, MONAI, one channel."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from safetensors.torch import save_file
from small_teachers import CLASSES, models
from torch import Tensor, nn

from conftest import stripes
from feddf.config.fuse_config import TeacherConfig
from feddf.data.tables import read_table
from feddf.fusing.inputs import RawInputs
from feddf.fusing.inspecting import answers, inspect_teacher
from feddf.fusing.pickles import remedy
from feddf.fusing.teachers import TeacherError, TrainedModel, read_teacher
from feddf.runtime.packages import transformers
from feddf.saved.model import Features, Images

RAW = torch.as_tensor(stripes(12, 3).inputs.raw[torch.arange(12)])


def read(path: Path, **said: object) -> TrainedModel:
    (teacher,) = read_teacher(TeacherConfig(path=str(path), **said))  # type: ignore[arg-type]
    return teacher


def linear_classifier(
    path: Path, *, zipmap: bool, names: bool, offset: float | None = None, n: int = 64
) -> np.ndarray[Any, Any]:
    """Write what skl2onnx writes for a logistic regression (behind a scaler), and return its coefficients."""
    weights = np.random.default_rng(0).normal(size=(3, n)).astype(np.float32) / 255
    labels = {"classlabels_strings": ["cat", "dog", "frog"]} if names else {"classlabels_ints": [0, 1, 2]}
    into = "scaled" if offset is not None else "x"
    nodes = [
        helper.make_node(
            "LinearClassifier", [into], ["label", "raw"], domain="ai.onnx.ml", coefficients=weights.flatten().tolist(),
            intercepts=[0.0] * 3, multi_class=0, post_transform="SOFTMAX", **labels,
        )
    ]  # fmt: skip
    if offset is not None:
        nodes.insert(
            0, helper.make_node("Scaler", ["x"], ["scaled"], domain="ai.onnx.ml", offset=[offset] * n, scale=[1.0] * n)
        )
    key = "classlabels_strings" if names else "classlabels_int64s"
    kind = TensorProto.STRING if names else TensorProto.INT64
    if zipmap:
        nodes.append(
            helper.make_node(
                "ZipMap", ["raw"], ["probabilities"], domain="ai.onnx.ml", **{key: next(iter(labels.values()))}
            )
        )
        mapped = helper.make_map_type_proto(kind, helper.make_tensor_type_proto(TensorProto.FLOAT, None))
        last = helper.make_value_info("probabilities", helper.make_sequence_type_proto(mapped))
    else:
        nodes.append(helper.make_node("Identity", ["raw"], ["probabilities"]))
        last = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, [None, 3])
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, n])
    graph = helper.make_graph(nodes, "g", [given], [helper.make_tensor_value_info("label", kind, [None]), last])
    imports = [helper.make_opsetid("", 15), helper.make_opsetid("ai.onnx.ml", 1)]
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return weights


@pytest.mark.parametrize("zipmap", [True, False])
@pytest.mark.parametrize("names", [True, False])
def test_a_classifier_of_scikit_learn_teaches(zipmap: bool, names: bool, tmp_path: Path) -> None:
    """Its labels come first, its probabilities as a tensor or as maps; flat inputs are images, or rows of a table."""
    weights = linear_classifier(tmp_path / "m.onnx", zipmap=zipmap, names=names, offset=100.0)
    teacher = read(tmp_path / "m.onnx")
    assert teacher.classes == (("cat", "dog", "frog") if names else ())
    found = inspect_teacher(teacher, raw=RawInputs(RAW))
    assert found["outputs"] == "probabilities"
    assert found["fed"] == "1×8×8, flat, mean 0, std 0.003922, values from 0 to 255 (file)"
    fed = Images((1, 8, 8), (0.0,), (1 / 255,), layout="flat")
    from dataclasses import replace

    from feddf.fusing.feeding import FILE, Feeding

    rows = RAW.flatten(1).numpy().astype(np.float32)
    scores = (rows - 100.0) @ weights.T
    expected = torch.from_numpy(scores).softmax(1)
    assert torch.allclose(answers(replace(teacher, feeding=Feeding.of(fed, FILE)), RawInputs(RAW)), expected, atol=1e-4)
    table = replace(teacher, feeding=teacher.feeding.settled(tabular=True))
    assert table.preprocess == Features((64,))  # numbers of a table are taken as they are
    assert torch.allclose(answers(table, RawInputs(torch.from_numpy(rows))), expected, atol=1e-4)


def test_without_a_scale_in_the_file_it_is_assumed(tmp_path: Path) -> None:
    linear_classifier(tmp_path / "m.onnx", zipmap=False, names=False)
    found = inspect_teacher(read(tmp_path / "m.onnx"), raw=RawInputs(RAW))
    assert found["fed"] == "1×8×8, flat (file), mean 0, std 1, values from 0 to 1 (assumed)"
    assert "nothing says how its inputs are normalized" in found["warning"]


def resnet18(channels: int, classes: int) -> dict[str, Tensor]:
    """The tensors of timm's ``resnet18``, narrow ones, under its names."""
    widths, state = [4, 4, 6, 8, 10], dict[str, Tensor]()

    def layer(name: str, module: nn.Module) -> None:
        state.update({f"{name}.{key}": torch.rand_like(one.float()) + 0.1 for key, one in module.state_dict().items()})

    layer("conv1", nn.Conv2d(channels, widths[0], 7, bias=False))
    layer("bn1", nn.BatchNorm2d(widths[0]))
    for stage in range(1, 5):
        for block in range(2):
            before = widths[stage - 1] if block == 0 else widths[stage]
            for number, inside in ((1, before), (2, widths[stage])):
                layer(f"layer{stage}.{block}.conv{number}", nn.Conv2d(inside, widths[stage], 3, bias=False))
                layer(f"layer{stage}.{block}.bn{number}", nn.BatchNorm2d(widths[stage]))
        if stage > 1:
            layer(f"layer{stage}.0.downsample.0", nn.Conv2d(widths[stage - 1], widths[stage], 1, bias=False))
            layer(f"layer{stage}.0.downsample.1", nn.BatchNorm2d(widths[stage]))
    layer("fc", nn.Linear(widths[4], classes))
    return {key: one / 3 if "conv" in key else one for key, one in state.items()}


def resnet18_forward(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """An independent ResNet-18, in torch's functions."""
    f = torch.nn.functional

    def norm(x: Tensor, name: str) -> Tensor:
        parts = (state[f"{name}.{one}"] for one in ("running_mean", "running_var", "weight", "bias"))
        return f.batch_norm(x, *parts)

    x = f.max_pool2d(norm(f.conv2d(x, state["conv1.weight"], None, 2, 3), "bn1").relu(), 3, 2, 1)
    for stage in range(1, 5):
        for block in range(2):
            at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            y = norm(f.conv2d(x, state[f"{at}.conv1.weight"], None, stride, 1), f"{at}.bn1").relu()
            y = norm(f.conv2d(y, state[f"{at}.conv2.weight"], None, 1, 1), f"{at}.bn2")
            if f"{at}.downsample.0.weight" in state:
                x = norm(f.conv2d(x, state[f"{at}.downsample.0.weight"], None, stride), f"{at}.downsample.1")
            x = (x + y).relu()
    return f.linear(x.mean((2, 3)), state["fc.weight"], state["fc.bias"])


def test_a_folder_of_timm_answers_as_timm_would(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = resnet18(1, 3)
    save_file(state, tmp_path / "model.safetensors")
    own = {"input_size": [1, 16, 16], "mean": [0.2], "std": [0.4], "label_names": list(CLASSES), "license": "mit"}
    (tmp_path / "config.json").write_text(
        json.dumps({"architecture": "resnet18", "num_classes": 3, "pretrained_cfg": own})
    )
    teacher = read(tmp_path)
    assert teacher.preprocess == Images((1, 16, 16), (0.2,), (0.4,))
    assert (teacher.classes, teacher.license) == (CLASSES, "mit")
    raw = torch.randint(0, 256, (5, 1, 16, 16), dtype=torch.uint8)
    expected = resnet18_forward(state, (raw / 255 - 0.2) / 0.4)
    assert torch.allclose(answers(teacher, RawInputs(raw)), expected, rtol=1e-3, atol=1e-3)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224", **own}))
    with pytest.raises(
        TeacherError, match=r"its architecture 'vit_tiny_patch16_224' is built by timm alone; pip install"
    ):
        read(tmp_path)


def bundle(folder: Path) -> Path:
    (folder / "configs").mkdir(parents=True)
    (folder / "models").mkdir()
    form = {
        "inputs": {"image": {"num_channels": 1, "spatial_shape": [8, 8], "value_range": [-1, 1]}},
        "outputs": {"pred": {"channel_def": {"1": "middle", "0": "top", "2": "bottom"}}},
    }
    (folder / "configs" / "metadata.json").write_text(
        json.dumps({"network_data_format": form, "license": "apache-2.0"})
    )
    return folder


def test_a_bundle_of_monai_says_how_its_network_is_fed(tmp_path: Path) -> None:
    linear_classifier(bundle(tmp_path / "b") / "models" / "model.onnx", zipmap=False, names=False)
    teacher = read(tmp_path / "b")
    assert (teacher.id, teacher.classes, teacher.license) == ("b", CLASSES, "apache-2.0")
    assert teacher.feeding.line.endswith("mean 0.5, std 0.5, values from -1 to 1 (file)")
    with pytest.raises(TeacherError, match=r"its weights are a pickle or TorchScript; where you trust it, export it"):
        read(bundle(tmp_path / "c"))


def test_an_image_classifier_of_one_channel_of_hugging_face(tmp_path: Path) -> None:
    library = transformers()
    config = library.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4,
        num_labels=3, num_channels=1,
    )  # fmt: skip
    model = library.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.25] * 3}))
    (tmp_path / "README.md").write_text("---\nlicense: mit\ndatasets:\n- mnist\n- own/scans-2\n---\n# A card\n")
    teacher = read(tmp_path)
    assert teacher.preprocess == Images((1, 8, 8), (0.5,), (0.25,))
    assert (teacher.license, teacher.datasets, teacher.classes) == ("mit", ("mnist", "own/scans-2"), ())
    with torch.no_grad():
        expected = model(pixel_values=(RAW / 255 - 0.5) / 0.25).logits
    assert torch.allclose(answers(teacher, RawInputs(RAW)), expected, atol=1e-4)


class Odd:
    """A class that a pickle names."""


def test_the_way_out_of_a_pickle_keeps_the_path_and_fits_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "m.pt"
    path.parent.mkdir()
    torch.save(models()["all"].state_dict(), path)
    line = str(remedy(path)).split('python -c "')[1].rstrip('"')
    exec(line)  # what is said works
    assert path.with_suffix(".safetensors").is_file()
    torch.save({"epoch": 3, "state_dict": models()["all"].state_dict()}, path)
    assert f"torch.load('{path}', weights_only=True)['state_dict']" in str(remedy(path))
    torch.save(models()["all"], path)
    assert "it is a whole module" in str(remedy(path))
    assert "feddf.models.small.CNN" in str(remedy(path))
    torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2)).save(str(path))
    assert "it is TorchScript" in str(remedy(path))
    from sklearn.linear_model import LogisticRegression

    path.with_suffix(".pkl").write_bytes(pickle.dumps(LogisticRegression()))
    assert "it is a model of sklearn" in str(remedy(path.with_suffix(".pkl")))
    path.with_suffix(".pkl").write_bytes(pickle.dumps(Odd()))
    assert "it is a whole module" in str(remedy(path.with_suffix(".pkl")))
    assert remedy(tmp_path / "m.onnx") is None


# Tables


def test_a_table_has_columns_by_name_and_labels(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,species\n1,2,x\n3,4.5,y\n5,6,x\n")
    found = read_table(f"{path}#species")
    assert (found.columns, found.classes, found.numbers.tolist()) == (("a", "b"), ("x", "y"), [0, 1, 0])
    assert found.taking(["b", "a"]).rows.tolist() == [[2, 1], [4.5, 3], [6, 5]]
    path.write_text("1,2\n3,4\n")
    assert read_table(str(path)).columns == ("0", "1")
    path.write_text("label,p\n10,1\n9,2\n")
    assert read_table(str(path)).classes == ("9", "10")


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("a,b\n1,x\n", "", "its column 'b' has no number in row 1, but 'x'"),
        ("a,b\n1,\n", "", "its column 'b' has no number in row 1, but ''"),
        ("a,b\n1,nan\n", "", "its column 'b' has no number in row 1, but 'nan'"),
        ("a,b\n1\n", "", "row 1 has 1 values, and there are 2 columns"),
        ("a,b\n1,2\n", "#c", "it has no column 'c', but a, b"),
        ("a,b\n", "", "has no rows of numbers"),
    ],
)
def test_a_table_that_cannot_be_used_is_one_line(text: str, name: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=expected):
        read_table(f"{tmp_path / 't.csv'}{name}")


def test_a_parquet_file_is_the_same_table(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"a": [1, 2], "b": [0.5, 1.5], "label": ["x", "y"]}), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("a,b,label\n1,0.5,x\n2,1.5,y\n")
    one, other = (read_table(str(tmp_path / f"t.{kind}")) for kind in ("parquet", "csv"))
    assert (one.columns, one.labels, one.rows.tolist()) == (other.columns, other.labels, other.rows.tolist())
