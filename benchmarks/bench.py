"""The speed tables: see README.md. ``python benchmarks/bench.py [PART ...]``."""

from __future__ import annotations

import copy
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import floor
import plain
import quiet
import torch
import torch.nn.functional as F

from feddf import (
    MODELS,
    Client,
    DistillConfig,
    Examples,
    Failure,
    Fusion,
    Inputs,
    Job,
    LocalConfig,
    Processes,
    Prototype,
    Reply,
    Resources,
    RunConfig,
    ServerState,
    Settings,
    Update,
    accuracy,
    in_process,
    init_state,
)
from feddf.client import local_update
from feddf.data.datasets import Pixels, flip_crop
from feddf.outputs import classes
from feddf.rounds import collect
from feddf.runs.methods import feddf
from feddf.runs.spool import DiskSpool
from feddf.runtime.execution import Execution, can_compile
from feddf.runtime.packages import keep_freed_memory
from feddf.types import Engine, J, R

sys.path.insert(0, str(Path(__file__).parent / "peer_programs"))
from common import simple_cnn

CORES, SHAPE, CLASSES = 2, (3, 32, 32), 10
FLOP_PER_IMAGE = 2 * 12.5e6 * 3  # multiply and add; forward, and twice as much backward
FLOOR_STEPS = 50
ENCODE = Pixels((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
RESNET = {"resnet8": Prototype("resnet8", partial(MODELS["resnet8"], SHAPE, CLASSES))}
RESULTS = Path(__file__).parent / "results"


def fake(n: int, seed: int = 0) -> Examples:
    """CIFAR-shaped noise with a weak tint for each class, which flips and crops leave as it is."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (n,), generator=generator)
    tint = torch.randint(0, 90, (CLASSES, 3, 1, 1), generator=torch.Generator().manual_seed(99), dtype=torch.uint8)
    noise = torch.randint(0, 165, (n, *SHAPE), generator=generator, dtype=torch.uint8)
    return Examples(Inputs(noise + tint[labels], ENCODE), labels, classes(CLASSES))


def padded(data: Examples) -> torch.Tensor:
    """What the plain loop trains on."""
    return ENCODE(F.pad(data.inputs.raw, (4,) * 4))


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def in_turn(repeats: int, *actions: Callable[[], float]) -> list[list[float]]:
    """Measure the actions one after the other, ``repeats`` times; return the values of each."""
    rounds = [[action() for action in actions] for _ in range(repeats)]
    return [list(column) for column in zip(*rounds, strict=True)]


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def ratio(a: list[float], b: list[float]) -> dict[str, float]:
    return spread([x / y for x, y in zip(a, b, strict=True)])


def gemm(threads: int, size: int = 1536) -> float:
    """The machine's own limit: float32 FLOP/s of a matrix product."""
    torch.set_num_threads(threads)
    a, b = torch.randn(size, size), torch.randn(size, size)
    a @ b
    return 6 * 2 * size**3 / seconds(lambda: [a @ b for _ in range(6)])


def jobs_of(clients: int, samples: int) -> list[Job]:
    state = init_state(RESNET["resnet8"], 0)
    return [
        Job(Client(f"{k:05d}", "resnet8", torch.arange(k * samples, (k + 1) * samples)), 1, state, k)
        for k in range(clients)
    ]


def trainer(data: Examples, epochs: int, compile: bool) -> Callable[[Job], Reply]:
    local, execution = LocalConfig(epochs=epochs, batch_size=64, lr=0.1), Execution(compile=compile)
    return partial(
        local_update, prototypes=RESNET, train=data, local=local, augment=flip_crop, execution=execution
    )  # fmt: skip


def fusing(pool: Inputs, engine: Engine, steps: int) -> Fusion:
    """FedDF, whose student takes all steps on all cores, as fast as this machine can."""
    settings = Settings(
        distill=DistillConfig(steps=steps, eval_every=10**9, early_stopping="none"),
        run=RunConfig(threads=CORES, compile=can_compile()),
    )
    return feddf(Resources(RESNET, pool), settings, engine)


def done(engine: Engine, work: Callable[[J], R], jobs: list[J]) -> list[R]:
    """Run all jobs; one that fails must not count as a quick one."""
    outcomes = list(engine(work, jobs))
    if failures := [outcome for outcome in outcomes if isinstance(outcome, Failure)]:
        raise RuntimeError(f"{len(failures)} jobs failed, for instance {failures[0]}")
    return [outcome for outcome in outcomes if not isinstance(outcome, Failure)]


def updates_of(engine: Engine, train: Callable[[Job], Reply], jobs: list[Job]) -> list[Update]:
    """Train all clients; what they send passes the gate, as in every round."""
    updates, failures = collect(engine, train, jobs)
    if failures:
        raise RuntimeError(f"{len(failures)} clients failed, for instance {failures[0]}")
    return updates


def least(engine: Engine, kind: Literal["training", "answering"], batch: int, *, threads: int = 1) -> float:
    """Seconds that a step takes at least (see floor.py) while all cores are at it, the faster doing more of it."""
    jobs = [floor.Steps(f"{k}", kind, batch, FLOOR_STEPS, threads) for k in range(CORES // threads)]
    return statistics.harmonic_mean(done(engine, floor.timed, jobs))


def local(repeats: int = 5, samples: int = 1280, epochs: int = 2) -> dict[str, object]:
    """Images/s in local training."""
    data = fake(CORES * samples)
    images, model = padded(data), RESNET["resnet8"].build()

    def loop() -> float:
        torch.set_num_threads(CORES)
        part = slice(0, samples)
        return samples * epochs / seconds(lambda: plain.train_client(model, images[part], data.labels[part], epochs))

    with Processes(CORES) as pool:

        def workers(compile: bool) -> Callable[[], float]:
            train, jobs = trainer(data, epochs, compile), jobs_of(CORES, samples)
            done(pool, train, jobs)  # workers start, and compile
            return lambda: CORES * samples * epochs / seconds(lambda: done(pool, train, jobs))

        as_usual, fast = workers(False), workers(can_compile())
        loop()
        one, two, three, best, limit = in_turn(
            repeats, loop, as_usual, fast, lambda: CORES * 64 / least(pool, "training", 64), lambda: gemm(CORES)
        )
    share = [images_per_second * FLOP_PER_IMAGE / flops for images_per_second, flops in zip(three, limit, strict=True)]
    return {
        "plain images/s": spread(one),
        "workers images/s": spread(two),
        "compiled workers images/s": spread(three),
        "workers / plain": ratio(two, one),
        "compiled workers / plain": ratio(three, one),
        "floor images/s": spread(best),
        "floor / plain": ratio(best, one),
        "compiled workers / floor": ratio(three, best),
        "GEMM GFLOP/s": spread([value / 1e9 for value in limit]),
        "share of GEMM": spread(share),
    }


def fusion(
    repeats: int = 3, teachers: int = 8, steps: int = 1000, timed: int = 24, size: int = 12_800
) -> dict[str, object]:
    """One fusion: asking and distilling."""
    pool_data = fake(size, seed=1)
    images = ENCODE(pool_data.inputs.raw)
    modules = [RESNET["resnet8"].build() for _ in range(teachers)]
    updates = [Update(f"{k}", "resnet8", 1, module.state_dict(), 2250) for k, module in enumerate(modules)]
    server = ServerState(0, {"resnet8": init_state(RESNET["resnet8"], 0)})

    def loop() -> float:
        torch.set_num_threads(CORES)
        student = RESNET["resnet8"].build()
        return seconds(lambda: plain.distill(student, modules, images, timed)) / timed * steps

    with Processes(CORES) as pool:
        fusions = [fusing(pool_data.inputs, pool, count) for count in (timed, 5 * timed)]

        def ours() -> tuple[float, float]:
            """Seconds to ask, and to distill: the difference of two lengths knows no start-up."""
            short, long = (fuse(server, updates, 0).notes["seconds"] for fuse in fusions)
            return long["ask"], (long["distill"] - short["distill"]) / (4 * timed) * steps

        loop(), ours()
        one, two, asking, distilling = in_turn(
            repeats, loop, ours,
            lambda: least(pool, "answering", 64) * teachers * size / 64 / CORES,
            lambda: least(pool, "training", 128, threads=CORES) * steps,
        )  # fmt: skip
    return {
        "plain seconds": spread(one),
        "asking seconds": spread([seconds for seconds, _ in two]),
        "distilling seconds": spread([seconds for _, seconds in two]),
        "floor asking seconds": spread(asking),
        "floor distilling seconds": spread(distilling),
        "plain / feddf": ratio(one, list(map(sum, two))),
        "plain / floor": ratio(one, [a + b for a, b in zip(asking, distilling, strict=True)]),
    }


def whole_round(
    repeats: int = 3, clients: int = 8, samples: int = 2250, epochs: int = 10, steps: int = 1000, size: int = 12_800
) -> dict[str, object]:
    """A round from its first step to its last: local training, then a fusion."""
    data, pool_data = fake(clients * samples), fake(size, seed=1)
    images, unlabeled, model = padded(data), ENCODE(pool_data.inputs.raw), RESNET["resnet8"].build()
    shards = torch.arange(clients * samples).split(samples)

    def loop() -> None:
        torch.set_num_threads(CORES)
        trained = [plain.train_client(model, images[shard], data.labels[shard], epochs) for shard in shards]
        plain.distill(plain.average(trained, [samples] * clients), trained, unlabeled, steps)

    with Processes(CORES) as pool:
        train, jobs = trainer(data, epochs, can_compile()), jobs_of(clients, samples)
        fuse = fusing(pool_data.inputs, pool, steps)
        done(pool, train, [replace(job, client=replace(job.client, indices=torch.arange(128))) for job in jobs[:CORES]])

        def ours() -> None:
            fuse(ServerState(0, {"resnet8": jobs[0].state}), updates_of(pool, train, jobs), 0)

        one, two = in_turn(repeats, lambda: seconds(loop), lambda: seconds(ours))
    return {
        "plain seconds": spread(one),
        "feddf seconds": spread(two),
        "plain / feddf": ratio(one, two),
    }


def crowd(
    repeats: int = 3, clients: int = 50, samples: int = 50, steps: int = 1000, timed: int = 4, size: int = 2000
) -> dict[str, object]:
    """One round of FedDF in the setting of pfl-research's benchmark: its network, 50 clients of 50, batches of 10."""
    network = {"simple_cnn": Prototype("simple_cnn", simple_cnn)}
    data, pool_data = fake(clients * samples), fake(size, seed=1)
    images, unlabeled = ENCODE(data.inputs.raw), ENCODE(pool_data.inputs.raw)
    state = init_state(network["simple_cnn"], 0)
    shards = torch.arange(clients * samples).split(samples)
    jobs = [Job(Client(f"{k:02d}", "simple_cnn", shard), 1, state, k) for k, shard in enumerate(shards)]

    def learn(server: torch.nn.Module, shard: torch.Tensor) -> torch.nn.Module:
        """As the plain loop, without augmentation, which this setting has not."""
        model = copy.deepcopy(server).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for chosen in shard[torch.randperm(samples)].split(10):
            loss = F.cross_entropy(model(images[chosen]), data.labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return model

    def loop() -> float:
        torch.set_num_threads(CORES)
        server, began = network["simple_cnn"].load(state), time.perf_counter()
        trained = [learn(server, shard) for shard in shards]
        student, between = plain.average(trained, [samples] * clients), time.perf_counter()
        plain.distill(student, trained, unlabeled, timed)
        return between - began + (time.perf_counter() - between) / timed * steps

    with Processes(CORES) as pool:
        local = LocalConfig(epochs=1, batch_size=10, lr=0.1)
        train = partial(local_update, prototypes=network, train=data, local=local)
        settings = Settings(
            distill=DistillConfig(steps=steps, eval_every=10**9, early_stopping="none"), run=RunConfig(threads=CORES)
        )
        fuse = feddf(Resources(network, pool_data.inputs), settings, pool)
        server = ServerState(0, {"simple_cnn": state})
        updates_of(pool, train, jobs[:CORES])  # workers start
        one, two = in_turn(repeats, loop, lambda: seconds(lambda: fuse(server, updates_of(pool, train, jobs), 0)))
    return {"plain seconds": spread(one), "feddf seconds": spread(two), "plain / feddf": ratio(one, two)}


def small(repeats: int = 3, clients: int = 2000, samples: int = 25) -> dict[str, object]:
    """Many small clients, one epoch each."""
    data = fake(clients * samples)
    images, model = padded(data), RESNET["resnet8"].build()
    jobs = jobs_of(clients, samples)

    def loop() -> None:
        torch.set_num_threads(CORES)
        for k in range(clients):
            part = slice(k * samples, (k + 1) * samples)
            plain.train_client(model, images[part], data.labels[part], 1)

    with Processes(CORES) as pool:

        def workers(compile: bool) -> Callable[[], float]:
            train = trainer(data, 1, compile)
            done(pool, train, jobs[:4])
            return lambda: seconds(lambda: done(pool, train, jobs))

        one, two, three, best = in_turn(
            repeats, lambda: seconds(loop), workers(False), workers(can_compile()),
            lambda: least(pool, "training", samples) * clients / CORES,
        )  # fmt: skip
    return {
        "plain seconds": spread(one),
        "workers seconds": spread(two),
        "compiled workers seconds": spread(three),
        "plain / workers": ratio(one, two),
        "floor seconds": spread(best),
        "plain / compiled workers": ratio(one, three),
        "plain / floor": ratio(one, best),
    }


def fuse_many(teachers: int) -> None:
    """Fuse that many teachers, kept on disk as a run keeps them, and print this process's peak memory in MB."""
    keep_freed_memory()  # as every run does
    pool = fake(200, seed=2).inputs
    state = init_state(RESNET["resnet8"], 0)
    server = ServerState(0, {"resnet8": state})
    with tempfile.TemporaryDirectory() as folder:
        spool = DiskSpool(Path(folder))
        updates = [
            spool.keep(job, Update(job.id, "resnet8", 1, init_state(RESNET["resnet8"], number), 25))
            for number, job in enumerate(jobs_of(teachers, 25))
        ]
        settings = Settings(distill=DistillConfig(steps=4, early_stopping="none"), run=RunConfig(threads=1))
        fuse = feddf(Resources(RESNET, pool), settings, in_process)
        began = time.perf_counter()
        fuse(server, updates, 0)
        took = time.perf_counter() - began
    # not getrusage: a child's maximum starts at its parent's
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"MB": int(peak.split()[1]) / 1024, "seconds": took}))


def memory(counts: tuple[int, ...] = (8, 100, 1000)) -> dict[str, object]:
    """Peak memory and time of a fusion by the number of teachers, each in a process of its own."""
    found = []
    for teachers in counts:
        command = [sys.executable, __file__, "fuse_many", str(teachers)]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
    least, some, most = counts[0], counts[-2], counts[-1]
    return {
        "by teachers": dict(zip(counts, found, strict=True)),
        f"memory, {most:,} / {least:,}": {"median": found[-1]["MB"] / found[0]["MB"]},
        f"seconds a teacher, {most:,} / {some:,}": {
            "median": found[-1]["seconds"] / found[-2]["seconds"] / (most / some)
        },
    }


def agree(repeats: int = 6, rounds: int = 3, steps: int = 60, samples: int = 320) -> dict[str, object]:
    """Accuracy by round of the plain loop and of feddf: the same data, initial weights and hyper-parameters."""
    clients = 4
    train, test, pool = fake(clients * samples, seed=3), fake(500, seed=4), fake(1024, seed=5)
    shards = torch.arange(clients * samples).split(samples)
    images, unlabeled, tests = padded(train), ENCODE(pool.inputs.raw), ENCODE(test.inputs.raw)
    local_train = trainer(train, 2, can_compile())
    fuse = fusing(pool.inputs, in_process, steps)

    def loop(seed: int) -> list[float]:
        torch.manual_seed(seed)
        torch.set_num_threads(CORES)
        model, curve = RESNET["resnet8"].load(init_state(RESNET["resnet8"], seed)), []
        for _ in range(rounds):
            trained = [plain.train_client(model, images[shard], train.labels[shard], 2) for shard in shards]
            model = plain.distill(plain.average(trained, [samples] * clients), trained, unlabeled, steps)
            curve.append(plain.accuracy(model, tests, test.labels))
        return curve

    def ours(seed: int) -> list[float]:
        server, curve = ServerState(0, {"resnet8": init_state(RESNET["resnet8"], seed)}), []
        for number in range(1, rounds + 1):
            jobs = [
                Job(Client(f"{k}", "resnet8", shard), number, server.models["resnet8"], 1000 * seed + 10 * number + k)
                for k, shard in enumerate(shards)
            ]
            server = fuse(server, updates_of(in_process, local_train, jobs), seed).server
            curve.append(accuracy(RESNET["resnet8"].load(server.models["resnet8"]), test))
        return curve

    one, two = (list(zip(*map(side, range(repeats)), strict=True)) for side in (loop, ours))
    figures: dict[str, object] = {}
    for number, (plains, fasts) in enumerate(zip(one, two, strict=True), 1):
        figures |= {
            f"round {number}: plain accuracy": spread(list(plains)),
            f"round {number}: feddf accuracy": spread(list(fasts)),
        }
    return figures


PARTS: dict[str, Callable[[], dict]] = {
    "local": local, "fusion": fusion, "round": whole_round, "crowd": crowd, "small": small, "memory": memory,
    "agree": agree,
}  # fmt: skip


def table(results: dict[str, dict]) -> str:
    lines = ["| part | figure | median | low | high |", "|---|---|---:|---:|---:|"]
    for part, figures in results["parts"].items():
        for name, value in figures.items():
            if isinstance(value, dict) and "median" in value:
                numbers = [f"{value[key]:.2f}" if key in value else "" for key in ("median", "low", "high")]
                lines.append(f"| {part} | {name} | {' | '.join(numbers)} |")
    machine = results["machine"]
    lines += [
        "",
        f"torch {machine['torch']}, {machine['cores']} cores, {machine['cpu']}, compiler: {machine['compiler']}.",
    ]
    return "\n".join(lines) + "\n"


def machine() -> dict[str, object]:
    return {
        "torch": torch.__version__, "python": platform.python_version(), "cores": CORES,
        "cpu": torch.backends.cpu.get_cpu_capability(), "compiler": can_compile(),
    }  # fmt: skip


def main(names: list[str]) -> None:
    path = RESULTS / "results.json"
    RESULTS.mkdir(exist_ok=True)
    results = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    results["machine"] = machine()
    print(found := quiet.look(), flush=True)
    if not found.enough:
        sys.exit(1)
    for name in names or PARTS:
        print(f"{name} ...", flush=True)
        measured = PARTS[name]()
        print(json.dumps(measured, indent=1), flush=True)
        print(found := quiet.look(), flush=True)
        if not found.enough:
            sys.exit(1)
        results["parts"][name] = measured
        path.write_text(json.dumps(results, indent=1) + "\n")
        (RESULTS / "results.md").write_text(table(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["fuse_many"]:
        fuse_many(int(sys.argv[2]))
    else:
        main(sys.argv[1:])
