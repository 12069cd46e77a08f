"""Drive a real Flower deployment on loopback and check how it takes faults and intruders.

    python deploy.py [--bin VENV/bin] [--rounds 12] [--no-accidents] [--patience 1] [--keep]

One SuperLink (TLS, SuperNode authentication, database) and three SuperNodes with three architectures run as processes
of their own; a SuperNode, the ServerApp and the SuperLink are killed in mid-round, a SuperNode is revoked in mid-round,
SuperNodes with the wrong credentials must stay out, and a SuperLink with an expired certificate must find no SuperNode.
Exit code 0 only if all of it held; no process is left.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deployment import LIMITS, LINK, SITES, STARTED, CheckFailed, Deployment, require, until

APP = Path(__file__).parent / "app"
VICTIM = "west"


@contextmanager
def step(what: str) -> Iterator[None]:
    """Print one line for what was checked, whether it held or not."""
    verdict = "FAILED"
    try:
        yield
        verdict = "ok"
    finally:
        print(f"{verdict:6} {time.monotonic() - STARTED:6.1f}s  {what}", flush=True)


def bring_up(flower: Deployment) -> dict[str, str]:
    """Start all; what `flwr supernode list` shows as long as all is well."""
    with step("SuperLink up, answers over TLS"):
        flower.start_superlink()
    with step("three SuperNode keys registered, and only these"):
        for site in SITES:
            answer = flower.ask("supernode", "register", f"{flower.folder}/{site}.pub", LINK)
            flower.ids[site] = str(answer["node-id"])
        registered = dict.fromkeys(flower.ids.values(), "registered")
        require(flower.nodes() == registered, "three nodes are registered, none is online")
    with step("three SuperNodes online under the registered ids"):
        for site in SITES:
            flower.start_member(site)
        all_online = dict.fromkeys(flower.ids.values(), "online")
        until("three nodes are online", lambda: flower.nodes() == all_online)
    return all_online


def start_intruders(flower: Deployment) -> dict[str, str]:
    """Start SuperNodes that must be refused; the log line of each that tells why."""
    retries = ("--max-retries", "2")  # Without TLS the connection just breaks, which is else retried for ever
    intruders = {
        "wrong-ca": ((*flower.tls("wrong-ca.pem"), *flower.key("north")), "CERTIFICATE_VERIFY_FAILED"),
        "expired-ca": ((*flower.tls("expired-ca.pem"), *flower.key("north")), "certificate has expired"),
        "no-tls": (("--insecure", *retries), "Server disconnected without sending a response"),
        "no-key": (flower.tls("ca.pem"), "[code: 2001] SuperNode authentication is enabled"),
        "unregistered-key": (
            (*flower.tls("ca.pem"), *flower.key("stranger")),
            "[code: 2004] Failed to activate SuperNode",
        ),
    }
    for name, (security, _) in intruders.items():
        flower.start_supernode(name, *security)
    return {name: reason for name, (_, reason) in intruders.items()}


def refuse_expired_server(flower: Deployment) -> None:
    """A SuperLink with the right authority's, but expired, certificate: SuperNodes and `flwr` do not talk to it."""
    reason, name = "certificate has expired", "expired-server"
    with step(f"SuperLink with an expired certificate refused by a SuperNode ({reason})"):
        flower.start_expired_superlink()
        require(flower.health("expired-superlink", flower.expired_port) == reason, "TLS itself refuses it")
        address = f"127.0.0.1:{flower.expired_port}"
        flower.start_supernode(name, *flower.tls("ca.pem"), *flower.key("north"), address=address)
        until(f"{name} ends with an error", flower.processes[name].poll)
        log = (flower.folder / f"{name}.log").read_text()
        require(reason in log, f"{name} ended for this reason")
        require("SuperNode ID:" not in log, f"{name} got no id")
        flower.kill_group("expired-superlink")


def check_intruders(flower: Deployment, reasons: dict[str, str], all_online: dict[str, str]) -> None:
    """They ended by themselves and said why, and neither node list nor metrics know them."""
    for name, reason in reasons.items():
        with step(f"SuperNode refused: {name} ({reason})"):
            process = flower.processes[name]
            until(f"{name} ends with an error", process.poll)
            log = (flower.folder / f"{name}.log").read_text()
            require(reason in log, f"{name} ended for this reason")
            require("SuperNode ID:" not in log and "Receiving:" not in log, f"{name} got no id and no message")
    with step("only the registered SuperNodes are known and took part"):
        require(flower.nodes() == all_online, "the node list shows the three registered")
        require({name for line in flower.lines() for name in line["clients"]} <= set(SITES), "no other took part")


def lose_supernode(flower: Deployment, all_online: dict[str, str]) -> None:
    with step(f"SuperNode {VICTIM} killed in mid-round: the round ends, with it as dropped"):
        flower.wait_mid_round()
        flower.kill_group(VICTIM)
        flower.wait_line("a round drops it", lambda line: VICTIM in {lost["client"] for lost in line["dropped"]})
    with step(f"SuperNode {VICTIM} restarted: takes part again in the same run, under its old id"):
        flower.readmit(VICTIM)
        flower.wait_full_round()
        require(flower.nodes() == all_online, "the same three ids are online")


def lose_serverapp(flower: Deployment, app: Path, rounds: int) -> None:
    with step("ServerApp killed in mid-round, app submitted again: goes on"):
        flower.wait_mid_round()
        serverapp = flower.pids(f"{flower.binaries}/flwr-serverapp")  # With workers, should it have forked some
        require(len(serverapp) >= 1, "the ServerApp runs")
        for pid in serverapp:
            os.kill(pid, signal.SIGKILL)
        until("the ServerApp is gone", lambda: not serverapp & flower.pids())
        flower.submit(app, rounds)
        flower.wait_full_round()


def lose_superlink(flower: Deployment, app: Path, rounds: int, all_online: dict[str, str]) -> None:
    with step("SuperLink killed in mid-round: its SuperExec and ServerApp end by themselves"):
        flower.wait_mid_round()
        require(len(flower.pids("--runtime-api-address", flower.address)) >= 2, "SuperExec and ServerApp run")
        flower.kill_group("superlink")  # Leaves these two, which are in a session of their own
        until("they are gone", lambda: not flower.pids("--runtime-api-address", flower.address))
    with step("SuperLink restarted on its database: SuperNodes reconnect under their old ids"):
        flower.start_superlink()
        require(set(flower.nodes()) == set(all_online), "the registrations are kept")
        until("three nodes are online", lambda: flower.nodes() == all_online)
    with step("app submitted again: goes on"):
        flower.submit(app, rounds)
        flower.wait_full_round()


def revoke_supernode(flower: Deployment) -> None:
    """Take back a registration while the node trains; nothing that it sends is used from the next round on."""
    with step(f"SuperNode {VICTIM} revoked in mid-round: it ends, and no later round has it"):
        flower.wait_mid_round()
        revoked = flower.ids[VICTIM]
        flower.ask("supernode", "unregister", revoked, LINK)
        first = len(flower.lines()) + 2  # The round that is running may have its answer already
        require(flower.nodes().get(revoked) != "online", "it is not online any more")
        until("it ends by itself", lambda: flower.processes[VICTIM].poll() is not None)
        flower.wait_rounds(first)
        later = [line for line in flower.lines() if line["round"] >= first]
        require(all(set(line["clients"]) == set(SITES) - {VICTIM} for line in later), "later rounds have the others")
        require({status for node, status in flower.nodes().items() if node != revoked} == {"online"}, "they are online")
    with step(f"SuperNode {VICTIM} restarted with its revoked key: refused"):
        logged = (flower.folder / f"{VICTIM}.log").stat().st_size
        flower.start_member(VICTIM)
        until("it ends with an error", flower.processes[VICTIM].poll)
        log = (flower.folder / f"{VICTIM}.log").read_bytes()[logged:]
        require(b"[code: 2004] Failed to activate SuperNode" in log, "it ended for this reason")
        require(b"SuperNode ID:" not in log, "it got no id")


def scenario(flower: Deployment, app: Path, rounds: int, accidents: bool) -> None:
    all_online = bring_up(flower)
    refuse_expired_server(flower)
    reasons = start_intruders(flower)
    with step("app submitted over TLS, all three take part"):
        flower.submit(app, rounds)
        flower.wait_full_round()
    if accidents:
        lose_supernode(flower, all_online)
    check_intruders(flower, reasons, all_online)
    if accidents:
        lose_serverapp(flower, app, rounds)
        lose_superlink(flower, app, rounds, all_online)
    revoke_supernode(flower)
    *broken_off, last = flower.runs
    with step("last run completed; over all runs every round once and in order"):
        flower.wait_rounds(rounds)
        until("it is completed", lambda: flower.run_status(last) == "finished:completed")
        require([line["round"] for line in flower.lines()] == list(range(1, rounds + 1)), "all rounds are there")
    with step(f"runs broken off, marked as failed: {len(broken_off)}"):
        until("they are", lambda: {flower.run_status(run) for run in broken_off} <= {"finished:failed"})


def print_logs(flower: Deployment) -> None:
    """The tails of all logs; that of a ServerApp has to be asked from the SuperLink."""
    for run in flower.runs:
        with suppress(CheckFailed, subprocess.TimeoutExpired):
            (flower.folder / f"run-{run}.log").write_text(flower.flwr("log", run, LINK, "--show"))
    for path in (*sorted(flower.folder.glob("*.log")), flower.run_folder / "metrics.jsonl"):
        if path.exists():
            print(f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-25:], sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Check a real Flower deployment on loopback.")
    parser.add_argument("--bin", type=Path, default=Path(sys.executable).parent, help="where flwr is installed")
    parser.add_argument("--rounds", type=int, default=12, help="enough for each accident to find a round")
    parser.add_argument("--no-accidents", action="store_true", help="check only who may take part; 4 rounds are enough")
    parser.add_argument("--patience", type=float, default=1.0, help="times as long as usual for each step")
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs and database")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ends like Ctrl-C, with the teardown
    LIMITS.stretch(arguments.patience)
    flower = Deployment(Path(tempfile.mkdtemp(prefix="flower-deploy-")), arguments.bin)
    good = False
    try:
        scenario(flower, APP, arguments.rounds, not arguments.no_accidents)
        good = True
    except (CheckFailed, subprocess.TimeoutExpired) as failure:
        print(f"FAILED {failure}")
        print_logs(flower)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)  # A second Ctrl-C must not cut the teardown
        with step("all processes ended"):
            flower.kill_all()
        if not arguments.keep:
            shutil.rmtree(flower.folder)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
