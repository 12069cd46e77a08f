"""The page, served to this machine alone: GET only, a few fixed paths, nothing is ever written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from feddf.watch.page import SCRIPTS, STYLES, part
from feddf.watch.snapshot import Snapshots

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}


class Watch(ThreadingHTTPServer):
    """A server on 127.0.0.1 and a free port; ``serve_forever`` runs it until ``shutdown``."""

    daemon_threads = True

    def __init__(self, paths: Sequence[Path], port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self._snapshots, self._one_at_a_time = Snapshots(paths), Lock()

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def state(self) -> bytes:
        """Return the runs' state as JSON."""
        with self._one_at_a_time:
            return json.dumps(self._snapshots.take(), ensure_ascii=False, allow_nan=False).encode()


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
        name = self.path.partition("?")[0].lstrip("/") or "page.html"
        if name == "data.json":
            self._send_state(self.server.state())
        elif name in ("page.html", *STYLES, *SCRIPTS):
            self._send(part(name).encode(), TYPES[Path(name).suffix])
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _send_state(self, body: bytes) -> None:
        tag = f'"{hashlib.sha256(body).hexdigest()[:20]}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(b"", "application/json", HTTPStatus.NOT_MODIFIED, tag)
        else:
            self._send(body, "application/json", tag=tag)

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, tag: str = "") -> None:
        self.send_response(status)
        for header, value in HEADERS.items():
            self.send_header(header, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the terminal quiet."""
