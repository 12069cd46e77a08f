from __future__ import annotations

import hashlib
import http.client
import json
import math
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feddf.report.read import ReportError
from feddf.runtime.atomic import held
from feddf.watch.page import MOST_CONNECTIONS, SCRIPTS, STYLES, Watch, embedded, part, whole_page, write_page
from feddf.watch.snapshot import LONGEST, Snapshots

NASTY = "</script><script>document.title='taken'</script>"
CONFIG = 'seed = 0\nrounds = 3\nfusion.method = "{method}"\ndata.name = "toy"\nclients.total = 4\n'


def record(number: int, accuracy: float, **more: Any) -> str:
    found = {
        "round": number,
        "clients": ["client-0", NASTY],
        "ensemble": accuracy + 0.1,
        "models": {"mlp": {"averaged": accuracy - 0.1, "fused": accuracy}},
        "dropped": [{"client": "<img src=x onerror=alert(1)>", "reason": NASTY}],
        "attempts": 1,
        "accuracy_of_clients": {"client-0": 0.5, NASTY: None},
        "dropped_worst": {"clients": {"client-0": 0.1}},
        "seconds": {"train": 2.0, "fuse": 1.0, "evaluate": 0.5},
        **more,
    }
    return json.dumps(found) + "\n"


def write(path: Path, method: str, accuracies: list[float]) -> Path:
    path.mkdir(parents=True)
    (path / "config.toml").write_text(CONFIG.format(method=method))
    (path / "metrics.jsonl").write_text("".join(record(i, value) for i, value in enumerate(accuracies, 1)))
    (path / "partition.json").write_text(json.dumps({"classes": [NASTY, "b"], "counts": [[3, 0], [1, 2]]}))
    return path


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write(tmp_path / "runs" / "fedavg", "fedavg", [0.3, 0.4, 0.5])
    write(tmp_path / "runs" / "both" / "feddf", "feddf", [0.4, 0.6])
    (tmp_path / "runs" / "damaged").mkdir()
    (tmp_path / "runs" / "damaged" / "config.toml").write_text("rounds = [")
    write(tmp_path / "runs" / "strange", "feddf", [])
    (tmp_path / "runs" / "strange" / "metrics.jsonl").write_text('{"round": 1}\n[3]\n')
    return tmp_path / "runs"


def test_a_run_in_its_first_round_is_running(tmp_path: Path) -> None:
    path = write(tmp_path / "first", "feddf", [])
    (path / "metrics.jsonl").unlink()
    states = []
    for _ in range(2):
        with held(path / "lock", RuntimeError("held")):
            states += [one["state"] for one in Snapshots([path]).take()["runs"]]
        states += [one["state"] for one in Snapshots([path]).take()["runs"]]
    assert states == ["running", "waiting"] * 2


def test_a_snapshot_has_every_run_and_a_line_about_those_that_cannot_be_read(place: Path) -> None:
    found = Snapshots([place, place / "nowhere"]).take()
    runs = {run["name"]: run for run in found["runs"]}
    assert sorted(runs) == ["fedavg", "feddf", "strange"]
    assert runs["fedavg"]["series"]["fused"]["mlp"] == [0.3, 0.4, 0.5]
    assert (runs["fedavg"]["state"], runs["feddf"]["state"]) == ("finished", "running")
    assert runs["feddf"]["seconds_left"] == pytest.approx(3.5)
    assert runs["feddf"]["happened"][0]["worst"] == ["client-0"]
    assert runs["feddf"]["partition"]["counts"] == [[3, 0], [1, 2]]
    assert {Path(one["path"]).name for one in found["problems"]} == {"damaged", "strange", "nowhere"}
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    "line", ['partition.alpha = "much"', "clients.fraction = []", "seed = 'x'", "extra = 1979-05-27"]
)
def test_a_strange_configuration_is_a_problem_of_its_own_run_at_the_most(place: Path, line: str) -> None:
    config = (
        CONFIG.format(method="feddf").replace("seed = 0", "")
        if line.startswith("seed")
        else CONFIG.format(method="feddf")
    )
    (place / "fedavg" / "config.toml").write_text(f"{line}\n{config}")
    found = Snapshots([place]).take()
    assert "feddf" in [run["name"] for run in found["runs"]]
    assert all(group["headline"] for group in found["groups"])
    assert ("fedavg" in [run["name"] for run in found["runs"]]) == line.startswith("extra")


def test_runs_of_one_experiment_have_one_headline(place: Path) -> None:
    found = Snapshots([place / "fedavg", place / "both"]).take()
    (group,) = found["groups"]
    assert len(group["paths"]) == 2
    assert group["headline"] == "FedDF +20.0 points over FedAvg after round 2 of 3, seed 0, α = 1, mlp"
    (place / "fedavg" / "config.toml").write_text(CONFIG.format(method="fedavg") + "partition.alpha = 0.1\n")
    labels = [group["label"] for group in Snapshots([place / "fedavg", place / "both"]).take()["groups"]]
    assert labels == ["experiment alpha=0.1", "experiment alpha=1"]


def test_how_the_final_models_answer_is_shown_where_it_can_be_read(place: Path) -> None:
    path = place / "fedavg" / "tested.json"
    path.write_text(json.dumps({"classes": [NASTY, "b"], "confusion": {"mlp": [[1, 2], [0, 3]]}}))
    (run,) = Snapshots([place / "fedavg"]).take()["runs"]
    assert run["tested"] == {"classes": [NASTY, "b"], "confusion": {"mlp": [[1, 2], [0, 3]]}}
    for bad in ("[]", "{", '{"classes": 3, "confusion": {}}', '{"classes": [], "confusion": {"a": [["x"]]}}'):
        path.write_text(bad)
        (run,) = Snapshots([place / "fedavg"]).take()["runs"]
        assert run["tested"] is None


def test_a_snapshot_follows_a_run_that_grows_and_reads_no_other_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshots = Snapshots([place / "fedavg", place / "both"])
    snapshots.take()
    read: list[str] = []
    from feddf.watch import snapshot

    original = snapshot.read_run
    monkeypatch.setattr(snapshot, "read_run", lambda path: (read.append(path.name), original(path))[1])
    with (place / "both" / "feddf" / "metrics.jsonl").open("a") as log:
        log.write(record(3, 0.7))
    runs = {run["name"]: run for run in snapshots.take()["runs"]}
    assert read == ["feddf"]
    assert (runs["feddf"]["done"], runs["feddf"]["state"]) == (3, "finished")


def test_numbers_are_finite_and_texts_are_short(tmp_path: Path) -> None:
    path = write(tmp_path / "run", "feddf", [])
    odd = record(1, 0.5, ensemble=float("inf"), dropped=[{"client": "x" * 9999, "reason": "y"}])
    (path / "metrics.jsonl").write_text(odd)
    (run,) = Snapshots([path]).take()["runs"]
    assert run["ensemble"] == [None]
    assert len(run["happened"][0]["dropped"][0]["client"]) == LONGEST


def test_text_cannot_leave_its_script_element(place: Path) -> None:
    data = Snapshots([place]).take()
    assert json.loads(embedded(data)) == data
    assert "<" not in embedded(data)
    page = whole_page(data)
    assert page.count("<script") == page.count("</script>") == 1 + len(SCRIPTS)


def test_one_file_holds_everything_and_its_policy_allows_nothing_else(place: Path, tmp_path: Path) -> None:
    write_page([place / "fedavg"], tmp_path / "new" / "page.html")
    page = (tmp_path / "new" / "page.html").read_text()
    assert not re.search(r'<[^>]+(?:src|href)="(?!data:|#)', page)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "unsafe" not in policy
    assert "connect-src" not in policy  # default-src 'none'
    assert policy.count("sha256-") == len(SCRIPTS) + len(STYLES)
    with pytest.raises(ReportError, match="cannot read"):
        write_page([place / "damaged"], tmp_path / "page.html")


@pytest.mark.parametrize("name", ["uplot.js", "uplot.css"])
def test_the_files_of_others_are_unchanged(name: str) -> None:
    said = dict(re.findall(r"\| `([\w.]+)` \| `(\w{64})` \|", part("VENDORED.md")))
    assert hashlib.sha256(part(name).encode()).hexdigest() == said[name]


def test_no_script_of_ours_makes_markup_of_text() -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", part("page.js"))


@pytest.fixture
def server(place: Path) -> Iterator[Watch]:
    with Watch([place]) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield found
        found.shutdown()
        thread.join(10)


def ask(server: Watch, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    return answer, answer.read()


def test_the_server_gives_the_page_and_the_state_and_nothing_else(server: Watch) -> None:
    answer, body = ask(server, "/")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert "connect-src 'self'" in answer.headers["Content-Security-Policy"]
    assert "http-equiv" not in body.decode()  # which would forbid it to ask for the state
    assert not re.findall(r'(?:src|href)="([\w.]+)"', body.decode())
    answer, body = ask(server, "/data.json")
    assert len(json.loads(body)["runs"]) == 3
    same, empty = ask(server, "/data.json", **{"If-None-Match": answer.headers["ETag"]})
    assert (same.status, empty) == (304, b"")
    for path in ("/../../etc/passwd", "/server.py", "/fedavg/config.toml", "/page.py"):
        assert ask(server, path)[0].status == 404
    for method in ("POST", "PUT", "DELETE"):
        assert ask(server, "/", method)[0].status == 501


def test_another_sites_name_for_this_machine_is_refused(server: Watch) -> None:
    port = server.server_address[1]
    assert ask(server, "/data.json", Host=f"localhost:{port}")[0].status == 200
    for host in (f"evil.example:{port}", "127.0.0.1", f"127.0.0.1.evil.example:{port}"):
        assert ask(server, "/data.json", Host=host)[0].status == 403


def test_only_this_machine_can_reach_it(server: Watch) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with socket.socket() as other:
        other.settimeout(1)
        with pytest.raises(OSError, match=r"refused|unreachable|timed out"):
            other.connect(("127.0.0.2", server.server_address[1]))


def hostile(root: Path) -> None:
    """Folders of every odd kind beside a sound one."""
    write(root / "sound", "feddf", [0.3, 0.4])
    write(Path(os.fsdecode(os.fsencode(root) + b"/not-utf8-\xff")), "feddf", [0.5])
    for name, more in (
        ("surrogate", {"clients": ["\ud800"]}),
        ("nan", {"seconds": {"train": math.nan}}),
        ("overflow", {"seconds": {"train": 1e308, "fuse": 1e308}}),
        ("large", {"attempts": 10**400}),
        ("typed", {"clients": 3, "dropped": [3]}),
    ):
        path = write(root / name, "feddf", [0.5])
        (path / "metrics.jsonl").write_text(record(1, 0.5, **more))
    for name, file in (("pipe", "config.toml"), ("pipe-log", "metrics.jsonl"), ("pipe-shards", "partition.json")):
        path = write(root / name, "feddf", [0.5])
        (path / file).unlink()
        os.mkfifo(path / file)
    for name, file in (("device", "config.toml"), ("device-log", "metrics.jsonl"), ("device-shards", "partition.json")):
        path = write(root / name, "feddf", [0.5])
        (path / file).unlink()
        (path / file).symlink_to("/dev/zero")
    for name, file in (
        ("gigabytes", "config.toml"),
        ("gigabytes-log", "metrics.jsonl"),
        ("gigabytes-shards", "partition.json"),
    ):
        with (write(root / name, "feddf", [0.5]) / file).open("r+b") as sparse:
            sparse.truncate(1 << 42)
    (write(root / "nested", "feddf", [0.5]) / "partition.json").write_text("[" * 100_000)
    (write(root / "rounds", "feddf", [0.5]) / "config.toml").write_text(f"rounds = 0x{'f' * 5000}")
    (root / "loop").symlink_to(root / "loop")


def test_any_folder_is_shown_or_said(tmp_path: Path) -> None:
    """Nothing waits, fills the memory or ends the page."""
    hostile(tmp_path / "runs")
    with Watch([tmp_path / "runs", tmp_path / "runs" / "loop", tmp_path / "runs" / "pipe"]) as server:
        found = json.loads(server.state().decode("utf-8"), parse_constant=pytest.fail)
    shown = {run["name"]: run for run in found["runs"]}
    assert {"sound", "not-utf8-?", "nan", "overflow", "nested", "surrogate", "typed"} <= set(shown)
    assert shown["sound"]["done"] == 2
    assert shown["nan"]["seconds_left"] is shown["overflow"]["seconds_left"] is shown["nested"]["partition"] is None
    reasons = {Path(one["path"]).name: one["reason"] for one in found["problems"]}
    assert "not a regular file" in reasons["pipe"]
    assert "not a regular file" in reasons["device-log"]
    assert "at most 268435456 are read" in reasons["gigabytes-log"]
    assert "damaged in line 1" in reasons["typed"]
    assert "more than 64 bits" in reasons["rounds"]
    write_page([tmp_path / "runs"], tmp_path / "page.html")
    (tmp_path / "page.html").read_text(encoding="utf-8")


def test_connections_are_bounded_and_room_is_made_again(server: Watch) -> None:
    address = ("127.0.0.1", server.server_address[1])
    idle = [socket.create_connection(address, timeout=10) for _ in range(MOST_CONNECTIONS)]
    for _ in range(3):
        with socket.create_connection(address, timeout=10) as extra:
            assert extra.recv(1) == b""  # closed at once
    for one in idle:
        one.close()
    until = time.monotonic() + 20
    while time.monotonic() < until:
        try:
            assert ask(server, "/")[0].status == 200
            break
        except (http.client.HTTPException, OSError):  # the threads have not all seen that their browsers are gone
            continue
    else:
        pytest.fail("no room was made")
