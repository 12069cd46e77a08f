"""Table 3: VGG-9 without BatchNorm, drop-worst, FedMA."""

from __future__ import annotations

from feddf.reproduce.artefact import Artefact, Cell, Changes, all_better, final_accuracy

METHODS: dict[str, tuple[Changes, str]] = {
    "FedAvg without drop-worst": ({"fusion.method": "fedavg", "fusion.drop_worst": "none"}, "7.52 ± 4.29"),
    "FedMA": (
        {"fusion.method": "fedma", "fusion.drop_worst": "none", "local.epochs": 5, "rounds": 900},
        "65.0 ± 0.02",
    ),
    "FedAvg": ({"fusion.method": "fedavg"}, "78.34 ± 1.42"),
    "FedProx": ({"fusion.method": "fedavg", "local.proximal": 0.01}, "78.60 ± 1.91"),
    "FedDF": ({"fusion.method": "feddf"}, "80.36 ± 0.63"),
}

ARTEFACT = Artefact(
    "table3",
    "Table 3: VGG-9 without BatchNorm on CIFAR-10, after 100 rounds",
    "FedDF is above FedAvg, FedProx and FedMA; FedAvg without drop-worst fails.",
    [Cell(method, "accuracy", "cifar10-vgg9", changes, paper) for method, (changes, paper) in METHODS.items()],
    all_better(
        [
            *(("FedDF, accuracy", f"{other}, accuracy") for other in METHODS if other != "FedDF"),
            ("FedAvg, accuracy", "FedAvg without drop-worst, accuracy"),
        ]
    ),
    final_accuracy,
    reduction="a quarter of VGG-9's width; without FedMA, which stays at chance (five epochs of 100 images for each "
    "layer teach it nothing), so that a comparison would say nothing",
    reduced={"cpu": {"prototypes": ({"model": "vgg9", "scale": 0.25},), "local.rate": 0.05}},
    subset={"cpu": lambda cell: cell.row != "FedMA", "smoke": lambda cell: True},
)
