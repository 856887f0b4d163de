"""The page of a run in a real browser: by keyboard, at two widths, while the run goes on."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from browser import Browser, chromium
from test_trajectory_log import conversation, group

from launch.reporting.tracker import METRICS
from launch.run_folder.trajectory_log import TrajectoryLog
from launch.viewing.pages import application

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="this machine has no Chromium: apt-get install chromium"),
]
NASTY = "<img src=x onerror='document.title=\"broken\"'>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser.running(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three updates, in which a model has said something nasty."""
    folder = tmp_path / "run"
    folder.mkdir()
    record(folder, 1, 2, 3)
    log = TrajectoryLog(folder, 9)
    nasty = conversation("00000001/0001", 3)
    nasty.steps[0].chat_completions = [{"role": "assistant", "content": NASTY}]
    nasty.reward = -1.0
    for step in (1, 2, 3):
        groups = [
            group(number, *(conversation(f"{number:08d}/{index:04d}", 2) for index in range(4)))
            for number in (0,)
        ]
        unused = {"zero_signal": [group(1, conversation("00000001/0000", 1), nasty)]}
        log.record_update(step, groups, unused, {"00000000/0000": [0.5, -0.5]})
    log.record_evaluation(0, groups)
    return folder


def record(folder: Path, *steps: int) -> None:
    with (folder / METRICS).open("a") as file:
        for step in steps:
            numbers = {"rollout/reward_mean": step / 5, "learn/loss": 1 / step, "time/step": 2.5}
            file.write(json.dumps({"step": step, **numbers}) + "\n")


@pytest.fixture
def address(run: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(
            application([run]), host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1
        )
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(10)


def pressed(page: str) -> str:
    return f"document.getElementById('show-{page}').getAttribute('aria-pressed') === 'true'"


def test_a_run_is_read_by_keyboard_alone_at_two_widths(browser: Browser, address: str) -> None:
    for width in (1300, 390):
        browser.resize(width, 900)
        browser.open(address)
        browser.wait_for("document.querySelectorAll('.chart').length >= 3")
        assert browser.value("document.documentElement.scrollWidth") <= width, "nothing sticks out"
        browser.press("2")
        browser.wait_for(pressed("groups") + " && document.querySelectorAll('.cell').length === 6")
        assert "zero_signal" in browser.value("document.body.innerText")
        assert browser.value("document.documentElement.scrollWidth") <= width
        browser.press("3")
        browser.wait_for(pressed("trajectory") + " && document.querySelectorAll('.turn').length === 2")
        assert "advantage 0.500" in browser.value("document.body.innerText")
        for _ in range(5):
            before = browser.value("document.querySelector('article h2').textContent")
            browser.press("j")
            browser.wait_for(f"document.querySelector('article h2').textContent !== {before!r}")
        browser.wait_for("document.body.innerText.includes('onerror')")
        assert browser.value("document.title") == "Troupe", "a model's text is text"
        assert browser.value("document.querySelectorAll('img').length") == 0
        browser.press("ArrowLeft")
        browser.wait_for("document.getElementById('step').value === 'step/2'")
        assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.errors == []
    assert all(each.startswith((address, "data:", "about:")) for each in browser.addresses), browser.addresses


def test_curves_move_while_the_run_goes_on(browser: Browser, address: str, run: Path) -> None:
    browser.open(address)
    browser.wait_for("document.getElementById('state').textContent === 'step 3'")
    record(run, 4)
    browser.wait_for("document.getElementById('state').textContent === 'step 4'", seconds=10)


def test_two_members_of_a_group_stand_side_by_side(browser: Browser, address: str) -> None:
    browser.open(f"{address}#trajectory/0/step/3/0")
    browser.wait_for("document.querySelectorAll('.tools .cell').length === 4")
    click = "dispatchEvent(new MouseEvent('click', {shiftKey: true}))"
    browser.value(f"document.querySelectorAll('.tools .cell')[2].{click}")
    browser.wait_for("document.querySelectorAll('article').length === 2")
