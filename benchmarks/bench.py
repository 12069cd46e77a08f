"""The speed tables: see README.md. ``python benchmarks/bench.py [PART ...]``."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import plain
import torch

from feddf import (
    Client,
    Examples,
    Inputs,
    Job,
    Processes,
    Prototype,
    Schedule,
    ServerState,
    Update,
    in_process,
    initial,
)
from feddf.accelerate import can_compile, compiled, eager
from feddf.data.augment import flip_crop
from feddf.data.encode import Pixels
from feddf.evaluate import accuracy
from feddf.fusion.ensemble import answer, ask, avg_logits
from feddf.fusion.feddf import Lesson, _study, feddf
from feddf.local import local_update
from feddf.models import MODELS
from feddf.runs.spool import keep

CORES, SHAPE, CLASSES = 2, (3, 32, 32), 10
FLOP_PER_IMAGE = 2 * 12.5e6 * 3  # multiply and add; forward, and twice as much backward
ENCODE = Pixels((0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
RESNET = {"resnet8": Prototype("resnet8", partial(MODELS["resnet8"], SHAPE, CLASSES))}
RESULTS = Path(__file__).parent / "results"


def fake(n: int, seed: int = 0) -> Examples:
    """CIFAR-shaped noise with a weak tint for each class, which flips and crops leave as it is."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (n,), generator=generator)
    tint = torch.randint(0, 90, (CLASSES, 3, 1, 1), generator=torch.Generator().manual_seed(99), dtype=torch.uint8)
    noise = torch.randint(0, 165, (n, *SHAPE), generator=generator, dtype=torch.uint8)
    return Examples(Inputs(noise + tint[labels], ENCODE), labels, CLASSES)


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
    state = initial(RESNET["resnet8"], 0)
    return [
        Job(Client(f"{k:05d}", "resnet8", torch.arange(k * samples, (k + 1) * samples)), 1, state, k)
        for k in range(clients)
    ]


def local(repeats: int = 5) -> dict[str, object]:
    """Images/s in local training."""
    samples, epochs = 1280, 2
    data = fake(CORES * samples)
    images, model = ENCODE(data.inputs.raw), RESNET["resnet8"].build()

    def loop() -> float:
        torch.set_num_threads(CORES)
        part = slice(0, samples)
        return samples * epochs / seconds(lambda: plain.train_client(model, images[part], data.labels[part], epochs))

    with Processes(CORES) as pool:

        def workers(accelerate: Callable[..., object]) -> Callable[[], float]:
            train = partial(
                local_update, prototypes=RESNET, train=data, epochs=epochs, batch=64, rate=0.1,
                augment=flip_crop, accelerate=accelerate,
            )  # fmt: skip
            jobs = jobs_of(CORES, samples)
            list(pool(train, jobs))  # workers start, and compile
            return lambda: CORES * samples * epochs / seconds(lambda: list(pool(train, jobs)))

        fast = workers(compiled) if can_compile() else workers(eager)
        loop()
        one, two, three, limit = in_turn(repeats, loop, workers(eager), fast, lambda: gemm(CORES))
    share = [images_per_second * FLOP_PER_IMAGE / flops for images_per_second, flops in zip(three, limit, strict=True)]
    return {
        "plain images/s": spread(one),
        "workers images/s": spread(two),
        "compiled workers images/s": spread(three),
        "workers / plain": ratio(two, one),
        "compiled workers / plain": ratio(three, one),
        "GEMM GFLOP/s": spread([value / 1e9 for value in limit]),
        "share of GEMM": spread(share),
    }


def fusion(repeats: int = 3, teachers: int = 8, steps: int = 1000, timed: int = 24) -> dict[str, object]:
    """One fusion: asking and distilling."""
    pool_data = fake(12_800, seed=1)
    images = ENCODE(pool_data.inputs.raw)
    states = [initial(RESNET["resnet8"], seed) for seed in range(teachers)]
    modules = [RESNET["resnet8"].build().eval() for _ in range(teachers)]
    for module, state in zip(modules, states, strict=True):
        module.load_state_dict(state)
    updates = [Update(f"{k}", "resnet8", 1, state, 2250) for k, state in enumerate(states)]
    accelerate = compiled if can_compile() else eager
    known = torch.rand(len(pool_data), CLASSES).softmax(dim=1)

    def loop() -> float:
        torch.set_num_threads(CORES)
        student = RESNET["resnet8"].build()
        return seconds(lambda: plain.distill(student, modules, images, timed)) / timed * steps

    def study(pool: Processes, count: int) -> float:
        schedule = Schedule(steps=count, check_every=10**9, threads=CORES, accelerate=accelerate)
        work = studies.setdefault(
            count,
            partial(_study, prototypes=RESNET, pool=pool_data.inputs, schedule=schedule, score=None, target=avg_logits),
        )
        return seconds(lambda: list(pool(work, [Lesson("resnet8", states[0], 0, known)])))

    studies: dict[int, Callable[..., object]] = {}
    with Processes(CORES) as pool:
        question = partial(answer, prototypes=RESNET, inputs=pool_data.inputs)

        def asking() -> float:
            return seconds(lambda: avg_logits(ask(pool, question, updates)))

        def learning() -> float:
            return (study(pool, 5 * timed) - study(pool, timed)) / (4 * timed) * steps

        loop(), asking(), study(pool, timed), study(pool, 5 * timed)
        one, two, three = in_turn(repeats, loop, asking, learning)
    ours = [a + b for a, b in zip(two, three, strict=True)]
    return {
        "plain seconds": spread(one),
        "asking seconds": spread(two),
        "distilling seconds": spread(three),
        "plain / feddf": ratio(one, ours),
    }


def whole_round(parts: dict[str, dict]) -> dict[str, object]:
    """8 clients of 2,250 samples, E = 10, and that fusion, from the parts."""
    images = 8 * 2250 * 10
    plain_seconds = images / parts["local"]["plain images/s"]["median"] + parts["fusion"]["plain seconds"]["median"]
    ours = images / parts["local"]["compiled workers images/s"]["median"]
    ours += parts["fusion"]["asking seconds"]["median"] + parts["fusion"]["distilling seconds"]["median"]
    return {"plain seconds": plain_seconds, "feddf seconds": ours, "plain / feddf": {"median": plain_seconds / ours}}


def small(repeats: int = 2, clients: int = 2000, samples: int = 25) -> dict[str, object]:
    """Many small clients, one epoch each."""
    data = fake(clients * samples)
    images, model = ENCODE(data.inputs.raw), RESNET["resnet8"].build()
    jobs = jobs_of(clients, samples)
    train = partial(local_update, prototypes=RESNET, train=data, epochs=1, batch=64, rate=0.1, augment=flip_crop)

    def loop() -> None:
        torch.set_num_threads(CORES)
        for k in range(clients):
            part = slice(k * samples, (k + 1) * samples)
            plain.train_client(model, images[part], data.labels[part], 1)

    with Processes(CORES) as pool:
        list(pool(train, jobs[:4]))
        one, two = in_turn(
            repeats,
            lambda: seconds(loop),
            lambda: seconds(lambda: [None for _ in pool(train, jobs)]),
        )
    return {"plain seconds": spread(one), "feddf seconds": spread(two), "plain / feddf": ratio(one, two)}


def fuse_many(teachers: int) -> None:
    """Fuse that many teachers, kept on disk as a run keeps them, and print this process's peak memory in MB."""
    pool = fake(200, seed=2).inputs
    state = initial(RESNET["resnet8"], 0)
    server = ServerState(0, {"resnet8": state})
    with tempfile.TemporaryDirectory() as folder:
        updates = [
            keep(Path(folder), job, Update(job.id, "resnet8", 1, initial(RESNET["resnet8"], number), 25))
            for number, job in enumerate(jobs_of(teachers, 25))
        ]
        fuse = feddf(RESNET, pool, engine=in_process, score=None, schedule=Schedule(steps=20))
        began = time.perf_counter()
        fuse(server, updates, 0)
        took = time.perf_counter() - began
    # not getrusage: a child's maximum starts at its parent's
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    print(json.dumps({"MB": int(peak.split()[1]) / 1024, "seconds": took}))


def memory(repeats: int = 1) -> dict[str, object]:
    """Peak memory and time of a fusion by the number of teachers, each in a process of its own."""
    found = {}
    for teachers in (8, 100, 1000):
        command = [sys.executable, __file__, "fuse_many", str(teachers)]
        found[teachers] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {
        "by teachers": found,
        "memory, 1,000 / 8": {"median": found[1000]["MB"] / found[8]["MB"]},
        "seconds a teacher, 1,000 / 100": {"median": found[1000]["seconds"] / found[100]["seconds"] / 10},
    }


def agree(repeats: int = 3, rounds: int = 3) -> dict[str, object]:
    """Accuracy by round of the plain loop and of feddf on the same data and hyper-parameters, three seeds each."""
    train, test, pool = fake(1280, seed=3), fake(500, seed=4), fake(1024, seed=5)
    shards = list(torch.arange(1280).split(320))
    images, unlabeled, tests = (ENCODE(part.inputs.raw) for part in (train, pool, test))
    schedule = Schedule(steps=60, threads=CORES, accelerate=compiled if can_compile() else eager)
    curves: dict[str, list[list[float]]] = {"plain": [], "feddf": []}
    for seed in range(repeats):
        torch.manual_seed(seed)
        torch.set_num_threads(CORES)
        model, curve = RESNET["resnet8"].build(), []
        for _ in range(rounds):
            clients = [plain.train_client(model, images[s], train.labels[s], 2) for s in shards]
            model = plain.distill(plain.average(clients, [320] * 4), clients, unlabeled, 60)
            curve.append(plain.accuracy(model, tests, test.labels))
        curves["plain"].append(curve)
        state, curve = initial(RESNET["resnet8"], seed), []
        local_train = partial(
            local_update, prototypes=RESNET, train=train, epochs=2, batch=64, rate=0.1, augment=flip_crop,
            accelerate=schedule.accelerate,
        )  # fmt: skip
        fuse = feddf(RESNET, pool.inputs, engine=in_process, score=None, schedule=schedule)
        for number in range(rounds):
            jobs = [
                Job(Client(f"{k}", "resnet8", s), number, state, 1000 * seed + 10 * number + k)
                for k, s in enumerate(shards)
            ]
            updates = [update for update in in_process(local_train, jobs) if isinstance(update, Update)]
            state = fuse(ServerState(number, {"resnet8": state}), updates, seed).server.models["resnet8"]
            curve.append(accuracy(RESNET["resnet8"].load(state), test))
        curves["feddf"].append(curve)
    return {"accuracy by seed and round": curves}


PARTS: dict[str, Callable[[], dict]] = {
    "local": local, "fusion": fusion, "small": small, "memory": memory, "agree": agree
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


def main(names: list[str]) -> None:
    path = RESULTS / "results.json"
    RESULTS.mkdir(exist_ok=True)
    results = json.loads(path.read_text()) if path.exists() else {"parts": {}}
    results["machine"] = {
        "torch": torch.__version__, "python": platform.python_version(), "cores": CORES,
        "cpu": torch.backends.cpu.get_cpu_capability(), "compiler": can_compile(),
    }  # fmt: skip
    for name in names or PARTS:
        print(f"{name} ...", flush=True)
        results["parts"][name] = PARTS[name]()
        print(json.dumps(results["parts"][name], indent=1), flush=True)
        if {"local", "fusion"} <= results["parts"].keys():
            results["parts"]["round"] = whole_round(results["parts"])
        path.write_text(json.dumps(results, indent=1) + "\n")
        (RESULTS / "results.md").write_text(table(results))


if __name__ == "__main__":
    if sys.argv[1:2] == ["fuse_many"]:
        fuse_many(int(sys.argv[2]))
    else:
        main(sys.argv[1:])
