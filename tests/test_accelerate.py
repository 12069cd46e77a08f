from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from feddf.accelerate import can_compile, compiled
from feddf.runs.config import parse
from feddf.threads import threads

from conftest import Tiny
from feddf import accelerate
from feddf.engines import Processes, in_process
from feddf.runs import build
from feddf.states import digest
from feddf.types import Job

pytestmark = pytest.mark.xdist_group("compile")


def test_threads_are_restored_after_an_error() -> None:
    before = torch.get_num_threads()
    with suppress(RuntimeError), threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise RuntimeError
    assert torch.get_num_threads() == before


@pytest.mark.skipif(not can_compile(), reason="needs a C++ compiler")
def test_compiled_training_is_the_same_up_to_rounding_and_the_same_bytes_everywhere(tiny: Tiny) -> None:
    client = tiny.federation.clients[1]  # an MLP, with two full batches and a smaller one
    job = Job(client, 1, tiny.server.models["mlp"], 7)
    fast = partial(tiny.local.func, **{**tiny.local.keywords, "accelerate": compiled})
    with Processes(1) as pool:
        outcomes = [next(engine(fast, [job])) for engine in (in_process, pool)]
    plain = tiny.local(job)
    for key, tensor in plain.state.items():
        torch.testing.assert_close(outcomes[0].state[key], tensor, atol=1e-5, rtol=1e-4)
    assert digest({"m": outcomes[0].state}) == digest({"m": outcomes[1].state})


TRAIN = """
import sys
import torch
from functools import partial
from feddf.accelerate import compiled
from feddf.local import local_update
from feddf.models import MODELS
from feddf.states import digest, initial
from feddf.types import Client, Examples, Inputs, Job, Prototype

torch.set_num_threads(1)
kinds = {"cnn": Prototype("cnn", partial(MODELS["cnn"], (3, 16, 16), 4))}
draw = torch.Generator().manual_seed(0)
train = Examples(Inputs(torch.randn(64, 3, 16, 16, generator=draw), lambda raw: raw), torch.arange(64) % 4, 4)
for size in map(int, sys.argv[1:]):
    job = Job(Client("c", "cnn", torch.arange(size)), 1, initial(kinds["cnn"], 0), 5)
    update = local_update(job, prototypes=kinds, train=train, epochs=2, batch=32, rate=0.1, accelerate=compiled)
    print(size, digest({"m": update.state}))
"""


@pytest.mark.skipif(not can_compile(), reason="needs a C++ compiler")
def test_compiled_bytes_do_not_depend_on_who_was_compiled_for_first(tmp_path: Path) -> None:
    def trained(*sizes: str) -> set[str]:
        fresh = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "-".join(sizes))}
        command = [sys.executable, "-c", TRAIN, *sizes]
        return set(subprocess.run(command, env=fresh, capture_output=True, text=True, check=True).stdout.splitlines())

    assert trained("64", "25", "7") == trained("7", "64", "25")


def test_without_a_compiler_a_run_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nkill -ILL $$\n")  # as a machine does that advertises what it cannot do
    broken.chmod(0o755)
    can_compile.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(accelerate.sys, "executable", str(broken))
        assert not can_compile()
        with pytest.warns(UserWarning, match="cannot compile"):
            parts = build(parse({"data": "toy", "pool": "plane", "prototypes": ["mlp"], "clients": 4, "compile": True}))
    can_compile.cache_clear()
    assert parts.train.keywords["accelerate"] is accelerate.eager


def test_a_student_that_learns_alone_gets_two_threads_whatever_the_machine() -> None:
    base = {"data": "toy", "pool": "plane", "prototypes": ["mlp"], "clients": 4}
    assert parse(base).threads_of_a_student(1) == 2
    assert parse(base).threads_of_a_student(2) == 1
    assert parse({**base, "distill_threads": 3}).threads_of_a_student(2) == 3
