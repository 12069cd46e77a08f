"""Figure 6: classes, size and steps of the distillation."""

from __future__ import annotations

from feddf.reproduce.artefact import Artefact, Cell, Finding, Measured, final_accuracy

TINY = "tiny-imagenet"
CLASSES, SHARES, STEPS = (10, 50, 200), (0.05, 0.2, 1.0), (25, 100, 400)


def check(measured: Measured) -> list[Finding]:
    """The number of classes and the size matter little; few steps are too few, and some hundred are enough."""
    return [
        *(measured.within(f"{n} classes, FedDF", "200 classes, FedDF", 3.0) for n in CLASSES[:-1]),
        *(
            measured.within(f"{100 * share:g} % of the pool, FedDF", "100 % of the pool, FedDF", 3.0)
            for share in SHARES[1:-1]
        ),
        measured.better("100 steps, FedDF", "25 steps, FedDF"),
        measured.within("100 steps, FedDF", "400 steps, FedDF", 3.0),
    ]


ARTEFACT = Artefact(
    "fig6",
    "Figure 6: classes, size and steps of the distillation (CIFAR-100, ResNet-8)",
    "The number of classes matters little, a small share of the pool and a moderate number of steps suffice.",
    [
        *(
            Cell(f"{n} classes", "FedDF", "cifar100-resnet8", {"pool.sources": ({"name": TINY, "classes": n},)})
            for n in CLASSES
        ),
        *(
            Cell(
                f"{100 * share:g} % of the pool",
                "FedDF",
                "cifar100-resnet8",
                {"pool.sources": ({"name": TINY, "fraction": share},)},
            )
            for share in SHARES
        ),
        *(
            Cell(f"{steps} steps", "FedDF", "cifar100-resnet8", {"pool.sources": (TINY,), "distill.steps": steps})
            for steps in STEPS
        ),
    ],
    check,
    final_accuracy,
    small_task="photographs",
    reduction="CIFAR-10 in place of CIFAR-100, of which 4,000 images teach little; Tiny-ImageNet's 200 classes stand "
    "in for downsampled ImageNet's 1,000; the pool is not limited in size",
    reduced={"cpu": {"data.name": "cifar10", "pool.size": None}},  # a share or some classes of it are what differs
)
