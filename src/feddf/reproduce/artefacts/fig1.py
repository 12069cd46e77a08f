"""Figure 1: the toy."""

from __future__ import annotations

from feddf.report.read import Run
from feddf.reproduce.artefact import Artefact, Cell, Finding, Measured

TOY = {"data.name": "toy", "data.size": None, "data.test_size": None, "data.image_size": None}


def measure(run: Run) -> float:
    """Return what distillation adds to the average, in points."""
    return 100 * (run.curve(which="fused")[-1] - run.curve(which="averaged")[-1])


def check(measured: Measured) -> list[Finding]:
    """The fused model is above the average."""
    gain = measured.mean("toy, gain")
    return [Finding("the fused model is above the averaged one", gain, 0.0, measured.spread("toy, gain"), gain > 0)]


ARTEFACT = Artefact(
    "fig1",
    "Figure 1: the limitation of FedAvg on a toy example",
    "Averaging blurs the decision boundaries, and FedDF comes close to the ensemble.",
    [Cell("toy", "gain", "toy", {})],
    check,
    measure,
    unit="fused minus averaged accuracy in points",
    reducible=False,
    reduced={
        "smoke": {
            **TOY,
            "clients.number": 2,
            "clients.fraction": 1.0,
            "pool.sources": ("plane",),
            "prototypes": ({"model": "mlp", "width": 4},),
        },
    },
)
