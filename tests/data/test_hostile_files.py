"""Files from strangers: pickles that are read and not run."""

from __future__ import annotations

import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from feddf.data import cifar

DATA = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_every_protocol_gives_what_pickle_gives(tmp_path: Path, protocol: int, order: Any) -> None:
    content = {
        b"data": np.array(DATA, order=order),
        b"labels": [3, 200],
        b"filenames": ["a", "ü"],
        b"x": (1, None, True),
    }
    path = tmp_path / "batch"
    path.write_bytes(pickle.dumps(content, protocol))
    images, labels = cifar.read(path, "labels")
    np.testing.assert_array_equal(images.reshape(2, -1).numpy(), DATA)
    assert labels.tolist() == [3, 200]


class Reduced:
    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


CRASH = b"".join([
    b"\x80\x02}U\x04datacnumpy\ndtype\nU\x02O8\x86R(K\x03U\x01|NNN", b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK?tbs.",
])  # fmt: skip


def pointers(kind: str, size: int, fields: dict[str, Any] | None) -> bytes:
    """A batch whose bytes numpy would take for the addresses of objects, or look for outside of the array.

    An unpickler that may call nothing but numpy's own functions ends in a segmentation fault on each.
    """
    names = tuple(fields) if fields else None
    dtype = Reduced(np.dtype, (kind, False, True), (3, "|", None, names, fields, size, -1, 0))
    state = (1, (2, 3072), dtype, False, b"A" * 8 * DATA.size)
    array = Reduced(np.zeros(1).__reduce__()[0], (np.ndarray, (0,), b"b"), state)
    return pickle.dumps({b"data": array, b"labels": [0, 1]}, 2)


BATCH = b"\x80\x02}"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(CRASH, id="a dtype of objects"),
        pytest.param(pointers("O8", -1, None), id="bytes for objects"),
        pytest.param(pointers("V8", 8, {"x": (np.dtype("O"), 0)}), id="a field of objects"),
        pytest.param(pointers("V8", 8, {"x": (np.dtype("u1"), 10**9)}), id="a field outside of its array"),
        pytest.param(BATCH + b")" + b"\x85" * 300_000 + b"K\x01s.", id="a key of 300,000 tuples"),
        pytest.param(BATCH + b")" + b"q\x00h\x00\x86" * 60 + b"K\x01s.", id="a key of 2**60 tuples"),
        pytest.param(b"\x80\x04)" + b"q\x00h\x00\x86" * 60 + b"q\x00h\x00\x93.", id="a name of 2**60 tuples"),
        pytest.param(BATCH + b")" * 20_000 + b"(t" * 20_000 + b".", id="many marks"),
        pytest.param(pickle.dumps({b"data": DATA, b"labels": [0.5, 1.5]}, 2), id="labels that are no whole numbers"),
        pytest.param(pickle.dumps({b"data": DATA, b"classes": [0, 1]}, 2), id="no labels"),
        pytest.param(pickle.dumps({b"data": np.array([object()])}, 2), id="an array of objects"),
        pytest.param(pickle.dumps({b"data": DATA.astype(np.int64), b"labels": [0, 1]}, 2), id="wide numbers"),
        pytest.param(pickle.dumps({b"data": Reduced(print, ("x",)), b"labels": []}, 2), id="a call"),
        pytest.param(pickle.dumps({b"data": DATA, b"labels": [0, 1]}, 2)[:-40], id="cut short"),
        pytest.param(b"\x80\x02]q\x00h\x00a.", id="a list in itself"),
        pytest.param(BATCH + b"r\xff\xff\xff\x7f.", id="a memo of gigabytes"),
        pytest.param(b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".", id="a terabyte that is not there"),
        pytest.param(b"garbage", id="garbage"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_what_is_no_batch_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "batch"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="is not a CIFAR batch file"):
        cifar.read(path, "labels")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_mutations_do_no_harm() -> None:
    random = np.random.default_rng(0)
    whole = np.frombuffer(pickle.dumps({b"data": DATA[:1, :], b"labels": [1]}, 2), np.uint8)
    head = len(whole) - 120  # the array's bytes in the middle are only that
    for _ in range(1000):
        changed = whole.copy()
        places = np.concatenate([random.integers(0, 150, 3), random.integers(head, len(whole), 2)])
        changed[places] = random.integers(0, 256, 5)
        with suppress(ValueError):  # what is said in one line
            cifar.constants(changed.tobytes())


def test_what_lies_in_the_working_folder_is_not_run_by_an_ordinary_command(tmp_path: Path) -> None:
    for name in ("gmpy2", "typer", "rich"):
        (tmp_path / f"{name}.py").write_text("open('canary', 'w').close()")
    (tmp_path / "mine.py").write_text("import helper\nNet = helper.Net\n")
    (tmp_path / "helper.py").write_text("Net = dict\n")
    code = "from feddf.config.names import MODELS; print(MODELS['mine:Net'].__name__)"
    for command in (["-m", "feddf", "presets"], ["-P", "-c", code]):
        done = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "dict"  # what the user names is found, and what it needs beside it
    assert not (tmp_path / "canary").exists()
