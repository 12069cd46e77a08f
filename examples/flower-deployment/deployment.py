"""The processes of a Flower deployment on loopback: start, kill, watch."""

import json
import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from credentials import make_certificates, make_node_key
from shards import share_digits

Line = dict[str, Any]

SITES = {"north": "mlp", "south": "wide", "west": "cnn"}
"""Every site's architecture."""
LINK = "loopback"  # Name of the connection in Flower's config.toml
STARTED = time.monotonic()


class Limits:
    """Seconds after which a check has failed; a busy machine needs more."""

    overall = 1800.0  # It takes five minutes on an idle machine
    step = 200.0  # More than the 60 s after which Flower calls a silent node offline
    wait = 30.0  # What the app gives sites to come
    deadline = 100.0  # And what it gives them to answer

    def stretch(self, times: float) -> None:
        self.overall, self.step = times * self.overall, times * self.step
        self.wait, self.deadline = times * self.wait, times * self.deadline


LIMITS = Limits()


class CheckFailed(Exception):
    """A check did not hold, or not in time."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise CheckFailed(f"does not hold: {what}")


def until(what: str, probe: Callable[[], object]) -> None:
    """Poll until the probe gives something true."""
    deadline = min(time.monotonic() + LIMITS.step, STARTED + LIMITS.overall)
    while not probe():
        if time.monotonic() > deadline:
            raise CheckFailed(f"not in time: {what}")
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Deployment:
    """The processes of one SuperLink and its SuperNodes, with all their files in one folder."""

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder, self.binaries = folder, binaries
        self.run_folder = folder / "run"
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.expired_port = free_port()
        """Of a second SuperLink, whose certificate has expired."""
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.runs: list[str] = []
        self.ids: dict[str, str] = {}
        """The node id of every site that was registered."""
        self.environment = os.environ | {
            "PATH": f"{binaries}:{os.environ['PATH']}",  # Flower starts its children by bare name
            "FLWR_HOME": f"{folder}/home",
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        }
        make_certificates(folder)
        share_digits(folder, list(SITES))
        for name in (*SITES, "stranger"):
            make_node_key(folder / name)
        (folder / "home").mkdir()
        (folder / "home/config.toml").write_text(
            f'[superlink.{LINK}]\naddress = "{self.address}"\nroot-certificates = "{folder}/ca.pem"\n'
        )

    # --- Processes ---
    def start(self, name: str, *command: str) -> None:
        """Start a Flower process as leader of a process group of its own, logging to a file."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [str(self.binaries / command[0]), *command[1:]],
                env=self.environment, cwd=self.folder, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def start_superlink(self) -> None:
        self._start_link("superlink", self.port, "server.pem", "state.db")
        until("the SuperLink answers over TLS", lambda: self.health("superlink", self.port) == "200")

    def start_expired_superlink(self) -> None:
        self._start_link("expired-superlink", self.expired_port, "expired-server.pem", "expired.db")
        until("it listens", lambda: self.health("expired-superlink", self.expired_port) != "")

    def _start_link(self, name: str, port: int, certificate: str, database: str) -> None:
        self.start(
            name, "flower-superlink", "--host", "127.0.0.1", "--port", str(port),
            "--ssl-ca-certfile", f"{self.folder}/ca.pem", "--ssl-certfile", f"{self.folder}/{certificate}",
            "--ssl-keyfile", f"{self.folder}/server.key", "--enable-supernode-auth",
            "--database", f"{self.folder}/{database}",
        )  # fmt: skip

    def health(self, name: str, port: int) -> str:
        """The status of a SuperLink over TLS, or why its certificate is not accepted; empty while nothing listens."""
        require(self.processes[name].poll() is None, f"{name} runs")
        context = ssl.create_default_context(cafile=str(self.folder / "ca.pem"))
        try:
            with urllib.request.urlopen(f"https://127.0.0.1:{port}/health", timeout=5, context=context) as answer:
                return str(answer.status)
        except urllib.error.URLError as error:
            return error.reason.verify_message if isinstance(error.reason, ssl.SSLCertVerificationError) else ""
        except OSError:
            return ""

    def start_supernode(self, name: str, *security: str, address: str | None = None) -> None:
        """Start one that calls itself ``name``; intruders claim the data of the first site."""
        site = name if name in SITES else next(iter(SITES))
        config = f'site="{name}" architecture="{SITES[site]}" data="{self.folder}/{site}.npz"'
        self.start(
            name, "flower-supernode", "--superlink", address or self.address, "--port", str(free_port()),
            "--node-config", config, *security,
        )  # fmt: skip

    def start_member(self, site: str) -> None:
        self.start_supernode(site, *self.tls("ca.pem"), *self.key(site))

    def readmit(self, site: str) -> None:
        """Start a SuperNode that was killed, again and again: Flower refuses it until it notices the loss (60 s)."""
        logged = (self.folder / f"{site}.log").stat().st_size

        def admitted() -> bool:
            if self.processes.get(site) is None or self.processes[site].poll() is not None:
                self.start_member(site)
            return b"SuperNode ID:" in (self.folder / f"{site}.log").read_bytes()[logged:]

        until(f"{site} is admitted again", admitted)

    def tls(self, authority: str) -> tuple[str, str]:
        return ("--root-certificates", f"{self.folder}/{authority}")

    def key(self, name: str) -> tuple[str, str]:
        return ("--auth-supernode-private-key", f"{self.folder}/{name}")

    def kill_group(self, name: str) -> None:
        """SIGKILL a process and its group; reaped, as Flower's watchdogs take a zombie for alive."""
        process = self.processes.pop(name)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def pids(self, *arguments: str) -> set[int]:
        """Live processes of this deployment with these arguments in a row.

        All inherit its FLWR_HOME, also those that Flower puts into sessions of their own.
        """
        mark = f"FLWR_HOME={self.folder}/home".encode()
        wanted = "\0".join(arguments).encode()
        found = set()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # It may have ended meanwhile, or belong to someone else
                ours = mark in (process / "environ").read_bytes().split(b"\0")
                if ours and wanted in (process / "cmdline").read_bytes():
                    found.add(int(process.name))
        return found

    def kill_all(self) -> None:
        deadline = time.monotonic() + 30
        while (left := self.pids()) and time.monotonic() < deadline:  # Again, as some may just fork
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        for process in self.processes.values():
            process.wait(timeout=10)
        require(not left, f"no process is left behind: {left}")

    # --- What the SuperLink says ---
    def flwr(self, *arguments: str) -> str:
        """The output of one `flwr` command, which talks to the SuperLink over TLS."""
        done = subprocess.run(
            [str(self.binaries / "flwr"), *arguments],
            env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=LIMITS.step,
        )  # fmt: skip
        require(done.returncode == 0, f"`flwr {' '.join(arguments)}` succeeds: {done.stdout}{done.stderr}")
        return done.stdout

    def ask(self, *arguments: str) -> Any:
        return json.loads(self.flwr(*arguments, "--format", "json"))

    def nodes(self) -> dict[str, str]:
        """Every node that the SuperLink knows: its status by its id."""
        return {node["node-id"]: node["status"] for node in self.ask("supernode", "list", LINK)["nodes"]}

    def submit(self, app: Path, rounds: int) -> None:
        config = f'folder="{self.run_folder}" data="{self.folder}/server.npz" rounds={rounds}'
        config += f" wait={LIMITS.wait} deadline={LIMITS.deadline}"
        self.runs.append(self.ask("run", str(app), LINK, "--run-config", config)["run-id"])

    def run_status(self, run_id: str) -> str:
        return str(self.ask("list", LINK, "--run-id", run_id)["runs"][0]["status"])

    # --- What the app shows ---
    def lines(self) -> list[Line]:
        path = self.run_folder / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def wait_line(self, what: str, holds: Callable[[Line], bool]) -> None:
        """Wait for a further round of which something holds."""
        known = len(self.lines())
        until(what, lambda: any(holds(line) for line in self.lines()[known:]))

    def wait_full_round(self) -> None:
        self.wait_line("a round with all clients", lambda line: set(line["clients"]) == set(SITES))

    def wait_rounds(self, rounds: int) -> None:
        """Wait until there are so many rounds, as long as each comes in time."""
        while (known := len(self.lines())) < rounds:
            until(f"round {known + 1} ends", lambda known=known: len(self.lines()) > known)

    def wait_mid_round(self) -> None:
        """Wait until the server has the update of one site in this round, and waits for others."""

        def waiting() -> bool:
            number = len(self.lines()) + 1
            return 0 < len(list(self.run_folder.glob(f"spool/round-{number:04d}-*.safetensors"))) < len(SITES)

        until("one site has answered in a round", waiting)
