"""The certificates that a SuperNode refuses, by Flower's own client and the deployment's own credentials."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from runpy import run_path
from threading import Thread
from typing import Any

import httpx
import pytest
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.supernode.fleet_http_client import FleetHttpClient

CREDENTIALS = run_path(str(Path(__file__).parents[2] / "examples" / "flower-deployment" / "credentials.py"))


class Nothing(BaseHTTPRequestHandler):
    """Answers everything with 404."""

    def do_POST(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def serving(certificate: Path, key: Path) -> Iterator[str]:
    """Serve over TLS on loopback; yield the address."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with HTTPServer(("127.0.0.1", 0), Nothing) as server:
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a refused handshake is what is expected
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def ask(address: str, authority: Path) -> None:
    with FleetHttpClient.from_server_address(address, False, str(authority), interceptors=[]) as client:
        client.PullMessages(PullMessagesRequest())


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify as Python 3.13 does by default, on every version of Python."""
    create = ssl.create_default_context

    def create_strict(*arguments: Any, **options: Any) -> ssl.SSLContext:
        context = create(*arguments, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
        return context

    monkeypatch.setattr(ssl, "create_default_context", create_strict)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certificates")
    CREDENTIALS["make_certificates"](made)
    return made


@pytest.mark.parametrize(
    ("server", "authority", "reason"),
    [
        ("expired-server.pem", "ca.pem", "certificate has expired"),
        ("server.pem", "expired-ca.pem", "certificate has expired"),
        ("server.pem", "wrong-ca.pem", "certificate verify failed"),
    ],
)
def test_a_server_without_a_valid_certificate_is_left(folder: Path, server: str, authority: str, reason: str) -> None:
    with (
        serving(folder / server, folder / "server.key") as address,
        pytest.raises(httpx.ConnectError, match=reason),
    ):
        ask(address, folder / authority)


def test_the_same_server_with_a_valid_certificate_is_talked_to(folder: Path) -> None:
    with (
        serving(folder / "server.pem", folder / "server.key") as address,
        pytest.raises(httpx.HTTPStatusError, match="404"),
    ):
        ask(address, folder / "ca.pem")
