"""The page as one file: the same HTML, styles and scripts as the server's, with the state of the runs inside."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

from feddf.report.read import ReportError
from feddf.runtime.atomic import write_atomically
from feddf.watch.snapshot import Json, Snapshots

STYLES, SCRIPTS = ("uplot.css", "page.css"), ("uplot.js", "page.js")
DATA = '<script type="application/json" id="data"></script>'


@cache
def part(name: str) -> str:
    """Return one of the page's own files."""
    return (files("feddf.watch") / name).read_text(encoding="utf-8")


def embedded(data: Json) -> str:
    """Return JSON that can stand inside a script element: no text in it can end the element or open a comment."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def whole_page(data: Json) -> str:
    """Return a page that needs nothing else: its policy allows these very scripts and styles, and no connection."""
    page = part("page.html")
    policy = (
        "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src {' '.join(_hash(part(name)) for name in SCRIPTS)}; "
        f"style-src {' '.join(_hash(part(name)) for name in STYLES)}"
    )
    replaced = {
        "<!-- policy -->": f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        **{f'<link rel="stylesheet" href="{name}">': f"<style>{part(name)}</style>" for name in STYLES},
        **{f'<script src="{name}" defer></script>': "" for name in SCRIPTS},
        DATA: DATA.replace("></", f">{embedded(data)}</"),
        "<!-- scripts -->": "".join(f"<script>{part(name)}</script>" for name in SCRIPTS),
    }
    for old, new in replaced.items():
        assert page.count(old) == 1, old
        page = page.replace(old, new)
    return page


def write_page(paths: Sequence[Path], out: Path) -> None:
    """Write the page about some runs to a file."""
    data = Snapshots(paths).take()
    if not data["runs"]:
        why = data["problems"][0]["reason"] if data["problems"] else "there is no run in it"
        raise ReportError(f"{', '.join(map(str, paths))}: {why}")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, whole_page(data).encode())


def _hash(content: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
