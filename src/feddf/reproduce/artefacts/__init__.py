"""The tables and figures of the paper, by name, in its order; and what goes beyond it."""

from __future__ import annotations

from importlib import import_module

from feddf.config import ConfigError
from feddf.config.errors import nearest
from feddf.reproduce.artefact import Artefact

NAMES = (
    *("fig1", "fig2", "table1", "table1-start", "table2", "table3", "fig3", "table4", "fig4", "fig5", "fig6", "bound"),
    *("fig8", "partitions", "fig12", "fig13", "table5", "table6", "table7", "table8", "fig14", "fig15"),
    "plus",
)


def find(name: str) -> Artefact:
    """Return an artefact by its name."""
    if name not in NAMES:
        raise ConfigError(f"no table or figure is called '{name}'; {nearest(name, NAMES)}")
    found: Artefact = import_module(f"feddf.reproduce.artefacts.{name.replace('-', '_')}").ARTEFACT
    return found
