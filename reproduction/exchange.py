"""Weights or answers: FedDF, and methods whose clients keep their models, on one skewed task of three architectures.

python -m reproduction.exchange --seeds 0,1,2 --attacks none,absent,lma,cpa,hips

Every run is kept in a folder and goes on where it was; the table is of what ``results/exchange.json`` has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Annotated, Any

import typer

from feddf.config import load
from feddf.evaluate import accuracy
from feddf.runs.build import Parts, build
from feddf.runs.run import run_experiment
from feddf.runs.spool import ClientStates
from feddf.runs.store import RunFolder
from feddf.runtime.device import threads
from feddf.types import Job

METHODS = ("feddf", "feddf+answers", "fedmd", "ds-fl", "cronus", "fd")
KEPT = Path("results/exchange.json")


def measure(method: str, attack: str, seed: int, out: Path) -> dict[str, float]:
    """Run one cell, or finish it, and return the last round's accuracies and bytes, over prototypes and clients."""
    kind = [] if attack == "none" else [f"attack.kind=reproduction.attacks:{attack}"]
    experiment = load(str(Path(__file__).with_suffix(".toml")), [f"method={method}", f"seed={seed}", *kind])
    parts, path = build(experiment), out / f"{method}-{attack}-seed{seed}"
    folder = RunFolder.open(path) if path.exists() else RunFolder.create(path, experiment)
    with threads(1):
        for _ in run_experiment(parts, folder):
            pass
        last, hostile = folder.records()[-1], set(folder.records()[-1].get("attack", {}).get("hostile", ()))
        own = own_accuracies(parts, path) or last.get("accuracy_of_clients", {})
    honest = [value for name, value in own.items() if name not in hostile and value is not None]
    server = {name: one["fused"] or 0.0 for name, one in last["models"].items()}
    found = {"server": mean(server.values()), "clients": mean(honest)} | {
        f"server {name}": server[name] for name in server
    }
    return found | {"up": mean(last["bytes_up"].values()), "down": mean(last["bytes_down"].values())}


def own_accuracies(parts: Parts, folder: Path) -> dict[str, float]:
    """Return the test accuracy of the model that each client keeps to itself; nothing where clients keep none."""
    states, found = ClientStates(folder / "clients"), dict[str, float]()
    for client in parts.federation.clients:
        for number in range(parts.experiment.rounds, 0, -1):
            kept = states.read(Job(client, number, {}, 0, counted=number))
            if kept and "own model" in kept:
                model = parts.prototypes[client.prototype].load(kept["own model"])
                found[client.id] = accuracy(model, parts.task.data.test)
                break
    return found


def table(kept: Mapping[str, Mapping[str, Any]]) -> str:
    """Return all cells as Markdown: percent, the mean over seeds with its deviation; kilobytes a client and round."""
    lines = [
        "| method | attack | server's students | clients' own models | kB up | kB down |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for method in METHODS:
        for attack in dict.fromkeys(one["attack"] for one in kept.values()):
            runs = [one for one in kept.values() if (one["method"], one["attack"]) == (method, attack)]
            if not runs:
                continue
            cells = [_percent([one[key] for one in runs]) for key in ("server", "clients")]
            cells[0] = "–" if method == "fd" else cells[0]  # its server has no model that learns
            size = [f"{mean(one[key] for one in runs) / 1000:.1f}" for key in ("up", "down")]
            lines.append(f"| {method} | {attack} | {' | '.join(cells + size)} |")
    return "\n".join(lines)


def _percent(values: list[float]) -> str:
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * mean(values):.1f}{spread}"


def main(
    seeds: Annotated[str, typer.Option(help="Numbers with commas between them.")] = "0,1,2",
    attacks: Annotated[str, typer.Option(help="Names with commas between them.")] = "none,absent,lma,cpa,hips",
    methods: Annotated[str, typer.Option(help="Names with commas between them.")] = ",".join(METHODS),
    out: Annotated[Path, typer.Option(help="Where the runs are.")] = Path("runs/exchange"),
) -> None:
    """Run all cells that are not kept, and print the table."""
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    for seed in map(int, seeds.split(",")):
        for attack in attacks.split(","):
            for method in methods.split(","):
                name = f"{method}, {attack}, seed {seed}"
                if name in kept:
                    continue
                about = {"method": method, "attack": attack, "seed": seed}
                kept[name] = about | {key: round(one, 4) for key, one in measure(method, attack, seed, out).items()}
                KEPT.parent.mkdir(exist_ok=True)
                KEPT.write_text(json.dumps(kept, indent=1) + "\n")
                print(name, kept[name], flush=True)
    print(table(kept))


if __name__ == "__main__":
    typer.run(main)
