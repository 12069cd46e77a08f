"""Figure 3: fine-tuning of a transformer on texts."""

from __future__ import annotations

from feddf.reproduce.artefact import Artefact, Cell, Finding, Measured, final_accuracy


def check(measured: Measured) -> list[Finding]:
    """FedDF is above FedAvg on both data sets."""
    return [measured.better(f"{data}, FedDF", f"{data}, FedAvg") for data in ("AG News", "SST-2")]


ARTEFACT = Artefact(
    "fig3",
    "Figure 3: fine-tuning DistilBERT on AG News and SST-2",
    "FedDF converges faster than FedAvg and stays above it.",
    [
        Cell(title, method, preset, {"fusion.method": fusion})
        for title, preset in (("AG News", "ag-news"), ("SST-2", "sst2"))
        for method, fusion in (("FedAvg", "fedavg"), ("FedDF", "feddf"))
    ],
    check,
    final_accuracy,
    reduction="the model in the folder FEDDF_TEXT_MODEL (here MiniLM-L6), 4,000 texts, four rounds of an epoch",
    reduced={
        "cpu": {
            "data.size": 4_000,
            "data.test_size": 500,
            "data.image_size": None,
            "data.validation": 0.05,
            "data.max_tokens": 32,
            "local.epochs": 1,
            "local.batch": 8,
            "local.rate": 1e-4,
            "pool.size": 800,
            "rounds": 4,
            "distill.batch": 32,
            "distill.rate": 1e-4,
            "distill.steps": 75,
            "distill.check": 25,
            "distill.patience": 75,
        }
    },
)
