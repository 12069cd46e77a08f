"""The page in a real browser: chromium, driven by playwright (pip install playwright). Skipped where they are not."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_watch import NASTY, record, write

from feddf.watch.page import Watch, write_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
playwright = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as running:
        found = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    complaints: list[str] = []
    found = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="dark")
    found.on("pageerror", lambda error: complaints.append(str(error)))
    found.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    yield found
    found.close()
    assert [text for text in complaints if "ERR_CONNECTION" not in text] == []


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write(tmp_path / "fedavg", "fedavg", [0.3, 0.4, 0.5])
    write(tmp_path / "feddf", "feddf", [0.4])
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "config.toml").write_text("rounds = [")
    return tmp_path


def test_it_follows_a_run_and_shows_text_as_text(page: Any, place: Path) -> None:
    with Watch([place]) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        page.goto(server.address)
        page.wait_for_selector("#charts canvas")
        row = page.locator("#runs tbody tr", has_text="feddf").last
        assert "running" in row.inner_text()
        assert "1/3" in row.inner_text()
        assert "damaged" in page.inner_text("#problems")
        with (place / "feddf" / "metrics.jsonl").open("a") as log:
            log.write(record(2, 0.6) + record(3, 0.7))
        page.locator("#runs", has_text="70.0").wait_for(timeout=10_000)
        assert page.title() == "experiment: toy, 4 clients, C = 0.4, α = 1 · feddf"
        assert page.inner_text(".headline") == "FedDF +20.0 points over FedAvg after round 3, seed 0, α = 1, mlp"
        assert NASTY in page.inner_text("#dropped")
        assert page.locator("#dropped script, #dropped img, #clients script").count() == 0
        server.shutdown()
    page.locator("#status", has_text="has ended").wait_for(timeout=10_000)


def test_each_score_has_its_axis_a_seed_counts_once_and_who_is_alone_has_no_drift(page: Any, place: Path) -> None:
    drifts = {"drift_of_clients": {"client-0": 0.25, NASTY: 0.0}}
    write(place / "again", "feddf", [])
    (place / "again" / "metrics.jsonl").write_text(record(1, 0.4, **drifts) + record(2, 0.6, **drifts))
    write(place / "values", "feddf", [])
    (place / "values" / "config.toml").write_text(
        (place / "values" / "config.toml").read_text().replace("toy", "other")
    )
    (place / "values" / "metrics.jsonl").write_text(record(1, -0.4, score="R²", ensemble=None))
    write_page([place], place / "page.html")
    page.goto((place / "page.html").as_uri())
    page.wait_for_selector("#charts canvas")
    assert page.inner_text("#curves-title") == "Test scores by round"
    legends = page.locator("#charts .legend").all_inner_texts()
    assert any("FedDF, round 2: fused 60.0 %" in text for text in legends)  # no ± of the same seed, run twice
    assert any("FedDF, round 1: fused -40.0 %" in text for text in legends)
    assert page.locator("#runs td[data-label=score]").all_inner_texts().count("R²") == 1
    page.select_option("#which", label="again")
    rows = [row.inner_text().split() for row in page.locator("#drifts tbody tr").all()]
    assert ["client-0", "25", "25"] in rows
    assert any(row[-2:] == ["–", "–"] for row in rows)


def test_the_report_needs_no_server_and_works_by_keyboard_on_a_narrow_screen(page: Any, place: Path) -> None:
    write_page([place], place / "page.html")
    page.goto((place / "page.html").as_uri())
    page.wait_for_selector("#charts canvas")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    box = page.get_by_label("show fedavg", exact=True)
    box.focus()
    page.keyboard.press("Space")
    assert "FedAvg" not in page.inner_text("#charts")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "show fedavg"  # the focus stays
    page.keyboard.press("Space")
    assert "FedAvg" in page.inner_text("#charts")
    swatch = "#runs tr:has-text('{}') .swatch"
    colors = [
        page.locator(swatch.format(name)).first.evaluate("e => e.style.background") for name in ("fedavg", "feddf")
    ]
    assert len(set(colors)) == 2
    write(place / "added", "another", [0.2])  # comes first, and moves no color
    write(place / "feddf2", "feddf", [0.5, 0.6, 0.7])
    write_page([place], place / "more.html")
    page.goto((place / "more.html").as_uri())
    page.emulate_media(color_scheme="light")
    page.wait_for_selector("#charts canvas")
    assert [
        page.locator(swatch.format(name)).first.evaluate("e => e.style.background") for name in ("fedavg", "feddf")
    ] == colors
    page.goto((place / "page.html").as_uri())
    page.wait_for_selector("#charts canvas")
    page.select_option("#which", label="feddf")
    assert page.locator("#partition circle").count() == 3
    assert "fusion.method" in page.inner_text("#keys")
