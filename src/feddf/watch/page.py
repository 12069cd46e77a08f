"""The page: one HTML file with the state of the runs inside, or served to this machine alone.

The server knows GET only and a few fixed paths, and writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import sys
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any

from feddf.report.read import ReportError
from feddf.runtime.atomic import write_atomically
from feddf.watch.snapshot import Json, Snapshots

STYLES, SCRIPTS = ("uplot.css", "page.css"), ("uplot.js", "page.js")
DATA = '<script type="application/json" id="data"></script>'
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MOST_CONNECTIONS = 32  # at a time: each takes a thread


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


@cache
def policy() -> str:
    """Return a policy that allows these very scripts and styles, and no connection."""
    hashes = (" ".join(_hash(part(name)) for name in names) for names in (SCRIPTS, STYLES))
    own = "; ".join(f"{kind}-src {allowed}" for kind, allowed in zip(("script", "style"), hashes, strict=True))
    return f"default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; {own}"


def whole_page(data: Json | None = None) -> str:
    """Return a page that needs nothing else; without data, one that asks for them where it came from."""
    replaced = {
        "<!-- policy -->": f'<meta http-equiv="Content-Security-Policy" content="{policy()}">' if data else "",
        "<!-- styles -->": "".join(f"<style>{part(name)}</style>" for name in STYLES),
        DATA: DATA.replace("></", f">{embedded(data)}</") if data else DATA,
        "<!-- scripts -->": "".join(f"<script>{part(name)}</script>" for name in SCRIPTS),
    }
    page = part("page.html")
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
    write_atomically(out, whole_page(data).encode("utf-8", "replace"))  # a folder's name need not be UTF-8


def _hash(content: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


class Watch(ThreadingHTTPServer):
    """A server on 127.0.0.1 and a free port; ``serve_forever`` runs it until ``shutdown``."""

    daemon_threads, request_queue_size = True, MOST_CONNECTIONS

    def __init__(self, paths: Sequence[Path], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._snapshots, self._one_at_a_time = Snapshots(paths), Lock()
        self._room = Semaphore(MOST_CONNECTIONS)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def state(self) -> bytes:
        """Return the runs' state as JSON."""
        with self._one_at_a_time:
            found = self._snapshots.take()
        return json.dumps(found, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Say whether there is room for a connection; one beyond :data:`MOST_CONNECTIONS` is closed at once."""
        return self._room.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then make room for another connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Keep the terminal quiet about a browser that went away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server_version, sys_version = "feddf", ""
    timeout = 30

    def do_GET(self) -> None:
        assert isinstance(self.server, Watch)
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            # a site whose name was made to mean this machine (DNS rebinding) must not read the runs
            self.send_error(HTTPStatus.FORBIDDEN, "this page is for this machine only")
            return
        place = self.path.partition("?")[0]
        if place == "/data.json":
            body = self.server.state()
            tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
            known = self.headers.get("If-None-Match") == tag
            status = HTTPStatus.NOT_MODIFIED if known else HTTPStatus.OK
            self._send(b"" if known else body, "application/json", status, more={"ETag": tag})
        elif place == "/":
            allowed = f"{policy()}; connect-src 'self'; frame-ancestors 'none'"
            self._send(whole_page().encode(), "text/html", more={"Content-Security-Policy": allowed})
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, *, more: Mapping[str, str]) -> None:
        self.send_response(status)
        own = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body))}
        for header, value in {**HEADERS, **own, **more}.items():
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the terminal quiet."""
