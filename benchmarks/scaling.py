"""What a round costs apart from training: ``python benchmarks/scaling.py [ENGINE ...]``. docs/scaling.md explains it.

Clients send back what they were sent, so all the time measured is transport: packing, sending, unpacking, the gate and
the spool. Each engine runs in a process of its own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn

from feddf import (
    Client,
    ClientsConfig,
    Engine,
    Federation,
    FusionConfig,
    Job,
    Processes,
    Prototype,
    Reply,
    ServerState,
    average,
    fedavg,
    in_process,
    init_state,
)
from feddf.engines import RayWorkers
from feddf.rounds import collect, jobs_for
from feddf.runs.spool import DiskSpool

RESULTS = Path(__file__).parent / "results"
COHORTS = (10, 100, 1000)
SIZES = (78_000, 1_000_000, 10_000_000)
HELD_BACK = (100, 1_000_000)
"""The case that the cost model is not fitted to, and must predict."""

OFFLINE = ("FLWR_TELEMETRY_ENABLED=0", "FLWR_DISABLE_UPDATE_CHECK=1", "RAY_USAGE_STATS_ENABLED=0")


def blank(parameters: int) -> nn.Module:
    """A model of so many parameters, in twenty tensors, as a small ResNet has them."""
    return nn.ParameterList([nn.Parameter(torch.zeros(parameters // 20)) for _ in range(20)])


def echo(job: Job) -> Reply:
    return Reply(job.id, job.client.prototype, job.round, job.state, 10)


def federation(clients: int) -> Federation:
    members = [Client(f"client-{number:05d}", "blank") for number in range(clients)]
    return Federation(members, ClientsConfig(total=clients, fraction=1.0))


@contextmanager
def opened(name: str) -> Iterator[Engine]:
    if name == "in-process":
        yield in_process
    elif name == "processes":
        with Processes(2) as engine:
            yield engine
    else:
        with RayWorkers(2) as engine:
            yield engine


def rounds_of(name: str, clients: int, parameters: int, repeats: int) -> list[float]:
    """Seconds of each round's exchange; the first, which warms the workers, is left out."""
    if name == "flower":
        return flower_rounds(clients, parameters, repeats)
    prototype = Prototype("blank", partial(blank, parameters))
    server = ServerState(0, {"blank": init_state(prototype, 0)})
    members = federation(clients)
    times: list[float] = []
    with opened(name) as engine, tempfile.TemporaryDirectory() as scratch:
        spool = DiskSpool(Path(scratch) / "spool")
        for number in range(repeats + 1):
            jobs = jobs_for(ServerState(number, server.models), members, members.clients)
            began = time.perf_counter()
            updates, failures = collect(engine, echo, jobs, spool)
            times.append(time.perf_counter() - began)
            assert not failures
            assert len(updates) == clients
            spool.clear()
    return times[1:]


def flower_rounds(clients: int, parameters: int, repeats: int) -> list[float]:
    """The same over Flower's simulation, which starts a Ray cluster of its own."""
    from flwr.app import Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.simulation import run_simulation

    from feddf import ClientsConfig, RunFolder
    from feddf.flower import FedDF, FlowerSettings, announce
    from feddf.flower.wire import COUNT, METRICS

    client = announce(ClientApp(), "blank")

    @client.train()
    def send_back(message: Message, context: Context) -> Message:
        content = {"arrays": message.content["arrays"], METRICS: MetricRecord({COUNT: 10})}
        return Message(RecordDict(content), reply_to=message)

    server = ServerApp()
    with tempfile.TemporaryDirectory() as folder:

        @server.main()
        def main(grid: Grid, context: Context) -> None:
            strategy = FedDF(
                {"blank": partial(blank, parameters)},
                FlowerSettings(
                    clients=ClientsConfig(total=clients),
                    fusion=FusionConfig(method="fedavg"),
                ),
                folder=f"{folder}/run",
                wait=600.0,
                poll=0.05,
            )
            strategy.start(grid, num_rounds=repeats + 1)

        backend: dict[str, Any] = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server, client, clients, backend_config=backend)
        records = RunFolder.open(Path(folder) / "run").records()
    return [record["seconds"]["train"] for record in records[1:]]


def fusing(clients: int, parameters: int) -> float:
    """Seconds to average so many updates of that size, read from disk as in a run."""
    prototype = Prototype("blank", partial(blank, parameters))
    server = ServerState(0, {"blank": init_state(prototype, 0)})
    members = federation(clients)
    with tempfile.TemporaryDirectory() as scratch:
        spool = DiskSpool(Path(scratch) / "spool")
        updates, _ = collect(in_process, echo, jobs_for(server, members, members.clients), spool)
        fuse = fedavg(average)
        began = time.perf_counter()
        fuse(server, updates, 0)
        return time.perf_counter() - began


def measured(name: str) -> list[dict[str, Any]]:
    rows = []
    cases = [(clients, SIZES[0]) for clients in COHORTS] + [(10, parameters) for parameters in SIZES[1:]]
    for clients, parameters in [*cases, HELD_BACK]:
        repeats = 3 if clients * parameters <= 10**8 and (name, clients) != ("flower", 1000) else 1
        words = [sys.executable, __file__, "--one", name, str(clients), str(parameters), str(repeats)]
        environment = {**os.environ, **dict(pair.split("=") for pair in OFFLINE), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(done.stderr[-3000:])
        times = json.loads(done.stdout.splitlines()[-1])
        row = {"engine": name, "clients": clients, "parameters": parameters, "seconds": statistics.median(times)}
        row |= {"low": min(times), "high": max(times)}
        rows.append(row)
        print(row, flush=True)
    return rows


def fitted(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Fit seconds = fixed + clients · (each + value · parameters), and predict the case that was held back."""
    known = [row for row in rows if (row["clients"], row["parameters"]) != HELD_BACK]
    factors = np.array([[1.0, row["clients"], row["clients"] * row["parameters"]] for row in known])
    seconds = np.array([row["seconds"] for row in known])
    scale = 1 / seconds  # relative errors count, not those of the largest case
    fixed, each, value = nnls(factors * scale[:, None], seconds * scale)[0]
    clients, parameters = HELD_BACK
    (found,) = [row["seconds"] for row in rows if (row["clients"], row["parameters"]) == HELD_BACK]
    guess = fixed + clients * (each + value * parameters)
    return {"fixed": fixed, "each": each, "value": value, "predicted": guess, "measured": found}


def main(names: list[str]) -> None:
    path = RESULTS / "scaling.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for name in names or ["in-process", "processes", "ray", "flower", "fusing"]:
        if name == "fusing":
            cases = [(100, SIZES[0]), (1000, SIZES[0]), (10, SIZES[1]), (10, SIZES[2])]
            known[name] = [{"clients": n, "parameters": p, "seconds": fusing(n, p)} for n, p in cases]
            print(known[name])
        else:
            rows = measured(name)
            known[name] = {"rows": rows, "model": fitted(rows)}
            print(known[name]["model"])
        path.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        from scaling import rounds_of  # workers find its functions under the module's name, not in __main__

        print(json.dumps(rounds_of(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))))
    else:
        main(sys.argv[1:])
