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
    small_task="texts",
    reduction="the model in the folder FEDDF_TEXT_MODEL (here MiniLM-L6)",
)
