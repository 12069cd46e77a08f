"""What names say is shown as it is: neither markup nor escape sequences reach the terminal."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest

from feddf.cli import guarded
from feddf.cli.arguments import PlainConsole, complain, say
from feddf.cli.reporting import summary
from feddf.config import parse
from feddf.config.errors import FeddfError
from feddf.runs.store import RunFolder


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> StringIO:
    text = StringIO()
    for module in ("arguments", "reporting"):
        for name in ("out_console", "err_console"):
            monkeypatch.setattr(f"feddf.cli.{module}.{name}", PlainConsole(file=text, width=120), raising=False)
    return text


def test_a_report_of_a_folder_with_markup_in_its_name(tmp_path: Path, shown: StringIO) -> None:
    experiment = parse({"data": {"name": "toy"}, "pool": {"sources": ["plane"]}, "prototypes": ["mlp"]})
    folder = RunFolder.create(tmp_path / "run [/] [red]x\x1b[2J", experiment)
    model = {"averaged": 0.5, "fused": 0.6}
    record = {"round": 1, "models": {"m\x1b]0;x\x07": model}, "ensemble": None, "seconds": {"train\x1b[1m": 1.0}}
    folder.metrics.write_text(json.dumps(record) + "\n")
    summary([folder.path], folder.path / "curves.png")
    assert "run [/] [red]x?[2J/curves.png" in shown.getvalue()
    assert "\x1b" not in shown.getvalue()


def test_complaints_and_errors_are_plain(shown: StringIO) -> None:
    def fail() -> None:
        raise FeddfError("cannot read [/]\x1b[2J")

    assert guarded(fail) == 1
    complain("[bold]\x1bno")
    assert shown.getvalue() == "error: cannot read [/]?[2J\nwarning: [bold]?no\n"


def test_a_name_between_colons_is_no_emoji(shown: StringIO) -> None:
    say("module:cat:8")
    assert shown.getvalue() == "module:cat:8\n"
