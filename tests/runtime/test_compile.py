"""Compiled training: the same up to rounding, and the same bytes whoever runs it and in whatever order."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from feddf.client import local_update
from feddf.config import LocalConfig, parse
from feddf.engines import Processes, in_process
from feddf.outputs import classes
from feddf.runs.build import build
from feddf.runtime import device, execution
from feddf.runtime.execution import Execution, can_compile
from feddf.states import digest, init_state
from feddf.types import Client, Examples, Inputs, Job, Prototype
from soak import soak

pytestmark = pytest.mark.xdist_group("compile")


@pytest.fixture(scope="module")
def compiler() -> None:
    if not can_compile():
        pytest.skip("needs a C++ compiler")


def small_net() -> nn.Module:
    """BatchNorm sums over the batch: code that was made for one size adds up in another order."""
    return nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def as_it_is(raw: Tensor) -> Tensor:
    return raw


PROTOTYPES = {"net": Prototype("net", small_net)}
ROWS = torch.randn(64, 12, generator=torch.Generator().manual_seed(0))
TRAIN = Examples(Inputs(ROWS, as_it_is), torch.arange(64) % 3, classes(3))
LOCAL = LocalConfig(epochs=2, batch_size=32, lr=0.1)

plain = partial(local_update, prototypes=PROTOTYPES, train=TRAIN, local=LOCAL)
compiled = partial(plain, execution=Execution(compile=True))


def job(size: int) -> Job:
    return Job(Client(f"of {size}", "net", torch.arange(size)), 1, init_state(PROTOTYPES["net"], 0), 5)


def bytes_after(*sizes: int) -> dict[int, str]:
    """Train clients of these sizes one after the other, with code that is generated anew for the first of them."""
    torch._dynamo.reset()
    execution._compiled_call.cache_clear()
    return {size: digest({"net": compiled(job(size)).state}) for size in sizes}


@pytest.mark.usefixtures("compiler")
def test_compiled_bytes_do_not_depend_on_who_was_compiled_for_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an earlier order only machine code is kept, by the text that it was made from."""
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor, "fx_graph_cache", False)
    monkeypatch.setattr(functorch, "enable_autograd_cache", False)
    assert bytes_after(64, 25, 7) == bytes_after(7, 64, 25)


@pytest.mark.usefixtures("compiler")
def test_compiled_training_is_the_same_up_to_rounding_and_the_same_bytes_everywhere() -> None:
    asked = job(41)  # a full batch and a smaller one
    with Processes(1) as workers:
        here, there = (next(engine(compiled, [asked])) for engine in (in_process, workers))
    expected = plain(asked)
    for key, tensor in expected.state.items():
        torch.testing.assert_close(here.state[key], tensor, atol=1e-5, rtol=1e-4)
    assert digest({"net": here.state}) != digest({"net": expected.state})  # it was compiled indeed
    assert digest({"net": here.state}) == digest({"net": there.state})


CNN = """
import sys
import torch
from functools import partial
from feddf.config import LocalConfig
from feddf.client import local_update
from feddf.models.small import CNN
from feddf.runtime.execution import Execution
from feddf.states import digest, init_state
from feddf.types import Client, Examples, Inputs, Job, Prototype

torch.set_num_threads(1)
kinds = {"cnn": Prototype("cnn", partial(CNN, (3, 16, 16), 4))}
draw = torch.Generator().manual_seed(0)
train = Examples(Inputs(torch.randn(64, 3, 16, 16, generator=draw), lambda raw: raw), torch.arange(64) % 4, classes(4))
local = LocalConfig(epochs=2, batch_size=32, lr=0.1)
for size in map(int, sys.argv[1:]):
    job = Job(Client("c", "cnn", torch.arange(size)), 1, init_state(kinds["cnn"], 0), 5)
    update = local_update(job, prototypes=kinds, train=train, local=local, execution=Execution(compile=True))
    print(size, digest({"m": update.state}))
"""


@soak
@pytest.mark.usefixtures("compiler")
def test_a_cnn_in_processes_without_any_cache_has_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    def trained(*sizes: str) -> set[str]:
        fresh = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "-".join(sizes))}
        command = [sys.executable, "-c", CNN, *sizes]
        return set(subprocess.run(command, env=fresh, capture_output=True, text=True, check=True).stdout.splitlines())

    assert trained("64", "25", "7") == trained("7", "64", "25")


def test_without_a_compiler_a_run_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nkill -ILL $$\n")  # as a machine does that advertises what it cannot do
    broken.chmod(0o755)
    wanted = {
        "data": {"name": "toy"},
        "pool": {"sources": ["plane"]},
        "prototypes": ["mlp"],
        "clients": {"total": 4},
        "run": {"compile": True},
    }
    device.works.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(device.sys, "executable", str(broken))
        assert not can_compile()
        with pytest.warns(UserWarning, match="cannot compile"):
            parts = build(parse(wanted))
    device.works.cache_clear()
    assert parts.train.keywords["execution"] == Execution(compile=False)
