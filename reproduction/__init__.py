"""The paper's tables and figures: what is run, what the paper reports, and its claims as checks on measured numbers.

A verdict is computed from the numbers, never written by hand. Run from the root of the repository:
``python -m reproduction --list``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from feddf.config.errors import ConfigError, nearest

if TYPE_CHECKING:
    from reproduction.artifact import Artifact

NAMES = (
    *("fig1", "fig2", "table1", "table1-start", "table2", "table3", "fig3", "table4", "fig4", "fig5", "fig6", "bound"),
    *("fig8", "partitions", "fig12", "fig13", "table5", "table6", "table7", "table8", "fig14", "fig15"),
    *("plus", "why", "middle", "one-round", "fedma"),
)
"""The tables and figures in the paper's order, and what goes beyond it."""


def find(name: str) -> Artifact:
    """Return a table or figure by its name."""
    from reproduction import beyond, figures, matching, middle, one_round, tables

    if name not in NAMES:
        raise ConfigError(f"no table or figure is called '{name}'; {nearest(name, NAMES)}")
    artifacts = (
        *(*tables.ARTIFACTS, *figures.ARTIFACTS, *beyond.ARTIFACTS),
        *(*middle.ARTIFACTS, *one_round.ARTIFACTS, *matching.ARTIFACTS),
    )
    return next(one for one in artifacts if one.name == name)
