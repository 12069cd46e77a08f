"""FedMA where its own paper shows it: networks with starts of their own, matched and plainly averaged after one round.

Wang et al. ("Federated Learning with Matched Averaging", 2020) train LeNet on MNIST from different initializations,
where an average of weights is lost and a matched one is not. Here five clients train an MLP of two hidden layers and a
CNN of two convolutions without BatchNorm on 3,600 MNIST digits, dealt evenly; all layers are matched at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from feddf.config import load, with_values
from feddf.engines.open import open_engines
from feddf.evaluate import accuracy
from feddf.rounds import run_rounds
from feddf.runs.build import build
from reproduction.artifact import Artifact, Axis, Cell, Changes, Scale, grid
from reproduction.judging import Values, above
from reproduction.scales import SMOKE

NETWORKS: Axis = {
    "MLP": {"prototypes": ({"model": "mlp", "width": 64},)},
    "CNN": {"prototypes": ({"model": "cnn", "width": 16, "norm": "none"},)},
}
CELLS = grid("demo", NETWORKS, {"plain average": {}, "matched average": {}})
FEDERATION: Changes = {
    "partition.scheme": "iid",
    "clients.total": 5,
    "clients.fraction": 1.0,
    "local.epochs": 20,
    "local.batch_size": 32,
    "local.lr": 0.1,
    "rounds": 1,
    "fusion.method": "fedma",
}
TENS = 10.0


def averages(cell: Cell, scale: Scale, seed: int) -> tuple[float, float]:
    """Return the test accuracies in % of the plain and of the matched average of one cohort."""
    small: Changes = {**SMOKE, "clients.fraction": 1.0} if scale == "smoke" else {}
    experiment = with_values(load(cell.preset), {**FEDERATION, **small, **cell.changes, "seed": seed})
    parts = build(experiment)
    with open_engines(experiment.run) as engines:
        parts.engine.become(engines.server)
        run = run_rounds(
            *(parts.server, parts.federation),
            engine=engines.clients,
            train=parts.train,
            fuse=parts.method.fuse,
            parts=parts.method.parts,
        )
        fused = next(iter(run)).fused
    ((name, prototype),) = parts.prototypes.items()
    plain, matched = (prototype.load(states[name]) for states in (fused.start, fused.server.models))
    return 100 * accuracy(plain, parts.task.data.test), 100 * accuracy(matched, parts.task.data.test)


def compute(scale: Scale, seeds: Sequence[int]) -> Values:
    """Return both averages of each network, for each seed."""
    found: dict[str, dict[int, float]] = {cell.name: {} for cell in CELLS}
    for plain, matched in zip(CELLS[::2], CELLS[1::2], strict=True):
        for seed in seeds:
            found[plain.name][seed], found[matched.name][seed] = averages(plain, scale, seed)
    return found


MATCHING = Artifact(
    "fedma",
    "FedMA: matched against plain averages of networks with starts of their own",
    "Matching wins by more than ten points (Wang et al. 2020; it is the baseline of Table 3).",
    CELLS,
    [above(f"{network}, matched average", f"{network}, plain average", TENS) for network in NETWORKS],
    unit="test accuracy in % after one round",
    reduction="3,600 MNIST digits, five clients, 20 epochs; an MLP of width 64, a CNN of width 16",
    reducible=False,
    compute=compute,
    as_claimed=lambda name: 90.0 if "matched" in name else 20.0,
)

ARTIFACTS = (MATCHING,)
