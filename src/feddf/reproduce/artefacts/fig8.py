"""Figure 8: the toy in detail."""

from __future__ import annotations

from feddf.report.read import Run
from feddf.reproduce.artefact import Artefact, Finding, Measured
from feddf.reproduce.artefacts import fig1


def measure(run: Run) -> float:
    """Return how far the fused model stays behind the ensemble, in points."""
    return 100 * (run.ensemble()[-1] - run.curve()[-1])


def check(measured: Measured) -> list[Finding]:
    """The fused model is within ten points of the ensemble."""
    gap = measured.mean("toy, gain")
    return [
        Finding(
            "the fused model is within ten points of the ensemble", gap, 10.0, measured.spread("toy, gain"), gap < 10
        )
    ]


ARTEFACT = Artefact(
    "fig8",
    "Figure 8: the toy example in detail",
    "FedDF comes close to the ensemble from 60 unlabeled points.",
    fig1.ARTEFACT.cells,
    check,
    measure,
    unit="ensemble minus fused accuracy in points",
    reducible=False,
    reduced=fig1.ARTEFACT.reduced,
    higher_is_better=False,
)
