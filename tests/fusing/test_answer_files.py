"""Files of answers: what is stored stands for what was said, within the rounding that is stated; others are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from torch import Tensor

from feddf.fusing import answer_files
from feddf.fusing.answer_files import AnswerFile, Coding, write_answers
from feddf.fusing.teachers import TeacherError
from feddf.outputs import Outputs, classes, labels, values

KINDS = {
    "classes": classes(5),
    "masks": classes(3, (4, 6)),
    "labels": labels(4),
    "values": values(2),
    "variances": values(1, variance=True),
}


def written(path: Path, raw: Tensor, outputs: Outputs, **options: Any) -> float:
    about = {"names": [f"n{k}" for k in range(outputs.channels or 0)], "pool": "p", "model": "m"}
    return write_answers(path, raw.split(3), len(raw), Coding.of(outputs, **options), about)


def said(n: int, outputs: Outputs, seed: int = 0) -> Tensor:
    shape = [int(size or 0) for size in outputs.shape]
    return 4 * torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=20)
@given(st.sampled_from(sorted(KINDS)), st.sampled_from([16, 8]), st.integers(0, 50))
def test_what_is_stored_stands_for_what_was_said(tmp_path_factory: Any, kind: str, bits: Any, seed: int) -> None:
    path, outputs = tmp_path_factory.mktemp("answers") / "a.answers", KINDS[kind]
    raw = said(7, outputs, seed)
    lost = written(path, raw, outputs, bits=bits)
    file = AnswerFile(path)
    file.check()
    order = torch.tensor([6, 0, 3])
    found, wanted = outputs.probabilities(file[order].double()), outputs.probabilities(raw[order].double())
    assert float((found - wanted).abs().max()) <= lost + 1e-9
    assert lost <= (0 if outputs.has_units else 1e-3 if bits == 16 else 0.02)
    assert file.about.lost == lost
    assert (file.coding.outputs.kind, file.coding.outputs.shape, len(file)) == (outputs.kind, outputs.shape, 7)


def test_another_library_reads_them_and_they_are_small(tmp_path: Path) -> None:
    raw, path = said(1000, classes(10)), tmp_path / "a.answers"
    written(path, raw, classes(10), bits=8)
    assert path.stat().st_size < 1000 * 10 + 5000
    assert load_file(path)["answers"].shape == (1000, 10)


def test_of_many_channels_the_largest_are_stored_and_the_rest_share_what_is_left(tmp_path: Path) -> None:
    outputs = classes(3000, (2,))
    raw = said(4, outputs)
    written(tmp_path / "a.answers", raw, outputs)
    p = raw.double().softmax(dim=1)
    found = AnswerFile(tmp_path / "a.answers")[torch.arange(4)].double().softmax(dim=1)
    top, places = p.topk(64, dim=1)
    torch.testing.assert_close(found.gather(1, places), top, atol=1e-3, rtol=2e-2)
    rest = (1 - top.sum(dim=1)) / (3000 - 64)
    torch.testing.assert_close(found.min(dim=1).values, rest, atol=1e-6, rtol=0.05)


def test_a_file_that_was_not_written_to_its_end_is_not_there(tmp_path: Path) -> None:
    def broken() -> Any:
        yield said(3, classes(5))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_answers(tmp_path / "a.answers", broken(), 6, Coding.of(classes(5)), {"names": list("abcde")})
    assert list(tmp_path.iterdir()) == []


def forged(path: Path, **changes: Any) -> None:
    """Write a valid file again with other metadata or tensors."""
    written(path, said(4, classes(3)), classes(3))
    tensors, about = load_file(path), json.loads(_metadata(path)["about"])
    tensors |= {name: one for name, one in changes.items() if isinstance(one, np.ndarray)}
    about |= {name: one for name, one in changes.items() if not isinstance(one, np.ndarray)}
    save_file(tensors, path, {"format": answer_files.FORMAT, "about": json.dumps(about)})


def _metadata(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as file:
        return dict(file.metadata())


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"answers": np.full((4, 3), np.nan, np.float16)}, "input 0 are no classes"),
        ({"answers": np.zeros((4, 3), np.float16)}, "input 0 are no classes"),
        ({"answers": np.zeros((4, 2), np.float16)}, "and says that it has"),
        ({"count": 10**9}, "and says that it has"),
        ({"count": 0}, "and says that it has"),
        ({"count": "four"}, "count"),
        ({"names": ["a", "b"]}, "with 2 names"),
        ({"names": [str(n) for n in range(2**18 + 1)]}, "at most 262144 items"),
        ({"outputs": {"kind": "secrets", "channels": 3}}, "outputs are one of"),
        ({"outputs": {"kind": "classes", "channels": 10**12}}, "and says that it has"),
        ({"bits": 8}, "and says that it has"),
        ({"largest": 2}, "and says that it has"),
    ],
)
def test_a_file_that_does_not_hold_what_it_says_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    forged(tmp_path / "a.answers", **changes)
    with pytest.raises(TeacherError, match=word) as caught:
        AnswerFile(tmp_path / "a.answers").check()
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "a.answers") in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x08\0\0\0\0\0\0\0{}      "])
def test_what_is_no_such_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.answers").write_bytes(content)
    with pytest.raises(TeacherError, match="holds no answers that can be used"):
        AnswerFile(tmp_path / "a.answers").check()
