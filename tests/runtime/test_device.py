from __future__ import annotations

import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.jobs import Number
from feddf.config import ConfigError, RunConfig, parse
from feddf.engines import Processes, RayError, in_process
from feddf.engines import open as opening
from feddf.engines.open import alone_if_full, open_engines
from feddf.engines.ray import gpu_share
from feddf.evaluate import fold_batchnorm
from feddf.models.small import MLP
from feddf.runtime import device, trial
from feddf.runtime.execution import Execution, device_for, forward_of, of_answers, of_clients, of_students
from feddf.types import Failure, OutOfMemory


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    monkeypatch.setattr(device, "count", lambda kind: {"cpu": 1, "cuda": n}.get(kind, 0))


def test_without_accelerators_auto_is_the_cpu_and_starts_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 0)
    monkeypatch.setattr(device, "works", pytest.fail)
    assert device.choose("auto") == device.choose("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("passes", "chosen"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_an_accelerator_that_passes_its_self_test(
    monkeypatch: pytest.MonkeyPatch, passes: bool, chosen: str
) -> None:
    pretend_gpus(monkeypatch, 2)
    monkeypatch.setattr(device, "works", lambda name, precision: passes)
    assert device.choose("auto") == torch.device(chosen)


@pytest.mark.parametrize("name", ["cuda", "cuda:2", "gpu", "xpu"])
def test_a_device_that_is_not_here_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pretend_gpus(monkeypatch, 2 if name == "cuda:2" else 0)
    with pytest.raises(ConfigError, match=rf"run\.device = '{name}': this machine's torch .* has no such device"):
        device.choose(name)


def test_a_run_refuses_it_before_it_begins() -> None:
    values = {"data": {"name": "toy"}, "prototypes": ["mlp"], "fusion": {"method": "fedavg"}}
    with pytest.raises(ConfigError, match=r"run\.device"):
        parse({**values, "run": {"device": "Cuda 1"}})
    run = RunConfig(device="xpu")
    with pytest.raises(ConfigError, match=r"it has: cpu"):
        device_for(run)
    assert device_for(RunConfig(device="cuda", engine="ray", ray_address="elsewhere:6379")) == "cuda"


def test_a_device_is_described_by_its_kind_and_name_where_it_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.described(torch.device("cpu")) == "cpu"
    assert device.described(torch.device("xpu")) == "xpu"
    monkeypatch.setattr(device, "count", lambda kind: 1)
    monkeypatch.setattr(torch, "xpu", SimpleNamespace(get_device_name=lambda where: f"a GPU at {where}"))
    assert device.described(torch.device("xpu")) == "xpu (a GPU at xpu:0)"


def test_workers_are_dealt_round_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)

    def at(worker: int, name: str = "cuda") -> str:
        monkeypatch.setattr(device, "_worker", worker)
        return str(device.placed(torch.device(name)))

    assert [at(worker) for worker in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert [at(worker, "cuda:1") for worker in range(2)] == ["cuda:1", "cuda:1"]
    assert at(3, "cpu") == "cpu"


def number_or_die(job: Number) -> int:
    if job.value == 2:
        os._exit(9)
    return device._worker


@pytest.mark.xdist_group("engines")
def test_each_worker_process_knows_its_number_and_so_does_the_one_that_replaces_it() -> None:
    with Processes(2) as engine:
        first = list(engine(number_or_die, [Number(0), Number(3)]))
        assert sorted(first) == [0, 1]
        outcomes = list(engine(number_or_die, [Number(2), Number(4), Number(5), Number(6)]))
        assert sum(isinstance(outcome, Failure) for outcome in outcomes) == 1
        assert sorted(worker.number for worker in engine._team) == [0, 1]


# Memory


def full(job: Number, tried: list[int], until: int) -> int:
    tried.append(job.value)
    if job.value == 1 and tried.count(1) <= until:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return job.value


def test_work_for_which_there_was_no_room_is_tried_again_after_all_others() -> None:
    tried: list[int] = []
    outcomes = list(alone_if_full(in_process)(partial(full, tried=tried, until=1), [Number(i) for i in range(3)]))
    assert outcomes == [0, 2, 1]
    assert tried == [0, 1, 2, 1]


def test_work_for_which_there_is_no_room_alone_has_failed_and_the_line_says_what_to_lower() -> None:
    tried: list[int] = []
    (outcome,) = alone_if_full(in_process)(partial(full, tried=tried, until=9), [Number(1)])
    assert isinstance(outcome, OutOfMemory)
    assert outcome.client_id == "n1"
    for word in ("run.workers", "local.batch_size", "distill.batch_size", "0 MiB", "CUDA out of memory"):
        assert word in outcome.reason
    assert "\n" not in outcome.reason
    assert len(tried) == 2


def test_on_the_cpu_engines_are_as_they_were() -> None:
    with open_engines(RunConfig(engine="in-process", device="cpu")) as engines:
        assert engines.clients is engines.server is in_process


def test_data_stay_on_a_device_if_a_quarter_of_its_free_memory_holds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SimpleNamespace(mem_get_info=lambda where: (4000, 8000), empty_cache=lambda: released.append(1))
    released: list[int] = []
    monkeypatch.setattr(torch, "xpu", given)
    xpu = torch.device("xpu", 0)
    assert device.fits(1000, xpu)
    assert not device.fits(1001, xpu)
    device.release_if_scarce(xpu)
    assert not released
    given.mem_get_info = lambda where: (1599, 8000)
    device.release_if_scarce(xpu)
    assert released


def test_ray_workers_share_gpus() -> None:
    assert (gpu_share(2, 4), gpu_share(1, 3), gpu_share(8, 4)) == (0.5, 0.3333, 1.0)
    with pytest.raises(RayError, match="the Ray cluster has none"):
        gpu_share(0, 4)


@pytest.mark.parametrize(
    ("name", "gpus", "expected"), [("cpu", 0, 64), ("cuda", 2, 4), ("cuda:1", 2, 2), ("mps", 0, 2)]
)
def test_two_workers_share_an_accelerator_by_default(
    monkeypatch: pytest.MonkeyPatch, name: str, gpus: int, expected: int
) -> None:
    monkeypatch.setattr(opening, "count", lambda kind: gpus or 1)
    monkeypatch.setattr(opening.os, "cpu_count", lambda: 64)
    assert opening.default_workers(name) == expected


# Precision and determinism


def test_the_self_test_passes_on_this_machine_in_float32() -> None:
    assert trial.main("cpu", "float32") == 0


def test_a_self_test_that_crashes_or_disagrees_has_failed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -ILL $$\n")  # as a machine does that advertises what it cannot do
    killed.chmod(0o755)
    device.works.cache_clear()
    monkeypatch.setattr(device.sys, "executable", str(killed))
    assert not device.works("cpu", "bfloat16")
    with pytest.raises(ConfigError, match=r"run\.precision = 'bfloat16': a short training with it on cpu crashed"):
        of_answers(RunConfig(device="cpu", precision="bfloat16"))
    device.works.cache_clear()
    monkeypatch.setattr(trial, "losses", lambda name, precision: [float(precision == "bfloat16")])
    assert trial.main("cpu", "bfloat16") == 1


def test_tf32_needs_a_gpu_that_has_it() -> None:
    with pytest.raises(ConfigError, match="only NVIDIA's GPUs have it"):
        of_clients(RunConfig(device="cpu", precision="tf32"))


def test_logits_come_back_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this CPU bfloat16 itself may be impossible: what is cast is seen with float16's place in autocast."""
    casts: list[Any] = []
    plain = torch.autocast

    def noted(kind: str, dtype: torch.dtype) -> Any:
        casts.append((kind, dtype))
        return plain(kind, dtype, enabled=False)

    monkeypatch.setattr(torch, "autocast", noted)
    model = MLP((4,), 3, width=8)
    forward = forward_of(fold_batchnorm(model), compile=False, precision="bfloat16")
    assert forward(torch.zeros(2, 4)).dtype == torch.float32
    assert casts == [("cpu", torch.bfloat16)]
    assert forward_of(model, compile=False, precision="tf32") is model


def test_torch_computes_as_asked_inside_and_as_before_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    def state() -> tuple[Any, ...]:
        return (
            torch.get_float32_matmul_precision(),
            torch.backends.cudnn.allow_tf32,
            torch.are_deterministic_algorithms_enabled(),
            torch.backends.cudnn.deterministic,
            torch.utils.deterministic.fill_uninitialized_memory,
        )

    before = state()
    with Execution().begun() as here:
        assert (here, state()) == (torch.device("cpu"), before)  # the CPU needs nothing
    pretend_gpus(monkeypatch, 1)
    monkeypatch.setattr("feddf.runtime.execution.release_if_scarce", lambda given: None)
    with suppress(RuntimeError), Execution(device="cuda").begun() as there:
        assert (there, state()) == (torch.device("cuda", 0), ("highest", False, True, True, False))
        raise RuntimeError
    assert state() == before
    with Execution(device="cuda", precision="tf32", deterministic=False).begun():
        assert state() == ("high", True, *before[2:])
    assert state() == before


def test_a_student_on_an_accelerator_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    assert of_students(RunConfig(device="cuda"), 1, pytest.fail) == Execution(device="cuda")
