"""A web server in this process that can do what servers in the world do wrong."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Seen:
    """A request: what was asked for, and how many bytes of a file were sent."""

    path: str
    status: int
    sent: int


@dataclass
class Server:
    """The files that are served, how (``mode``), and what was asked for."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    mode: str = "whole"
    seen: list[Seen] = field(default_factory=list)


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = server.files.get(self.path)
            if body is None:
                self.answer(404, b"", {"Content-Length": "0"})
                return
            if server.mode == "corrupted":
                body = body[:-1] + bytes([body[-1] ^ 1])
            headers = {} if server.mode == "says no length" else {"Content-Length": str(len(body))}
            self.answer(200, body[: len(body) // 2] if server.mode in ("truncated", "cut") else body, headers)

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            server.seen.append(Seen(self.path, status, len(body)))
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(body)
            if server.mode == "cut":  # the other side gets a reset, not an orderly end
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()

        def log_message(self, *words: Any) -> None:
            """Say nothing."""

    return Handler


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *words: Any) -> None:
        """A connection that was cut on purpose is no news."""


@contextmanager
def serving() -> Iterator[Server]:
    """Serve on a free port of this machine until the block ends."""
    server = Server("")
    with _Quiet(("127.0.0.1", 0), _handler(server)) as listening:
        server.url = f"http://127.0.0.1:{listening.server_port}"
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()
