"""Figure 6: classes, size and steps of the distillation."""

from __future__ import annotations

from feddf.reproduce.artefact import Artefact, Cell, Changes, Finding, Measured, mean_accuracy

PAPER, SMALL = "tiny-imagenet", "digits"
CLASSES = {PAPER: (10, 50, 200), SMALL: (2, 5, 10)}
SHARES, STEPS = (0.05, 0.2, 1.0), (25, 100, 400)


def cells(source: str) -> list[Cell]:
    """Return the three panels with this source as the pool, one number changed at a time."""
    all_classes = CLASSES[source][-1]
    whole: Changes = {"pool.sources": (source,)}
    columns: dict[str, Changes] = {
        **{f"{n} classes": {"pool.sources": ({"name": source, "classes": n},)} for n in CLASSES[source]},
        **{f"{share:.0%} of the pool": {"pool.sources": ({"name": source, "fraction": share},)} for share in SHARES},
        f"{all_classes} classes": whole,  # one run in two panels
        "100% of the pool": whole,
        **{f"{steps} steps": {**whole, "distill.steps": steps} for steps in STEPS},
    }
    return [Cell(source, column, "cifar100-resnet8", changes) for column, changes in columns.items()]


def check(measured: Measured) -> list[Finding]:
    """The number of classes and the size matter little; few steps are too few, and some hundred are enough."""
    source = SMALL if any(cell.startswith(SMALL) for cell in measured.values) else PAPER
    *fewer, all_classes = CLASSES[source]
    return [
        *(measured.within(f"{source}, {n} classes", f"{source}, {all_classes} classes", 3.0) for n in fewer),
        *(
            measured.within(f"{source}, {share:.0%} of the pool", f"{source}, 100% of the pool", 3.0)
            for share in SHARES[:-1]
        ),
        measured.better(f"{source}, 100 steps", f"{source}, 25 steps"),
        measured.within(f"{source}, 100 steps", f"{source}, 400 steps", 3.0),
    ]


ARTEFACT = Artefact(
    "fig6",
    "Figure 6: classes, size and steps of the distillation (CIFAR-100, ResNet-8)",
    "The number of classes matters little, a small share of the pool and a moderate number of steps suffice.",
    [*cells(PAPER), *cells(SMALL)],
    check,
    mean_accuracy,  # what a pool is worth shows while there is something to learn
    unit="test accuracy in %, mean over all rounds",
    reduction="2, 5 and all 10 classes of the pool's digits; all of the pool is 1,438 digits",
    subset={
        "paper": lambda cell: cell.row == PAPER,
        "cpu": lambda cell: cell.row == SMALL,
    },
)
