"""The page of a run in a real browser: by keyboard, at two widths, while the run goes on."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from browser import Browser, chromium
from fastapi import FastAPI
from fastapi.responses import JSONResponse, StreamingResponse
from machine import free_port
from test_trajectory_log import conversation, group

from launch.reporting.tracker import METRICS
from launch.run_folder.trajectory_log import TrajectoryLog
from launch.viewing import pages
from launch.viewing.pages import application

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(chromium() is None, reason="this machine has no Chromium: apt-get install chromium"),
]
NASTY = "<img src=x onerror='document.title=\"broken\"'>"


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with Browser.running() as browser:
        yield browser


@pytest.fixture
def browser(window: Browser) -> Browser:
    window.addresses.clear()
    window.errors.clear()
    return window


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
            numbers = {"rollout/reward_mean": step / 5, "learn/loss": 1 / step, "stream/actors": 4}
            file.write(json.dumps({"step": step, **numbers}) + "\n")


@contextmanager
def listening(app: FastAPI) -> Iterator[str]:
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{port}/"
    server.should_exit = True
    thread.join(10)


class Server:
    """A policy server with an agent that takes two steps; it plays the part of the real one."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.judged: list[tuple[str, str]] = []
        self.app = FastAPI()
        self.app.get("/v1/models")(lambda: {"data": [{"id": "policy"}, {"id": "agent/calculator"}]})
        self.app.post("/v1/chat/completions")(self.answer)
        self.app.post("/v1/responses/{answer_id}/feedback")(self.judge)

    def answer(self, body: dict[str, Any]) -> StreamingResponse:
        self.asked.append(body)
        step = {"number": 1, "text": "12+34", "observation": f"46 {NASTY}"}
        parts: list[dict[str, Any]] = [{"step": step, "choices": [{"delta": {"reasoning_content": "12+34"}}]}]
        parts += [{"choices": [{"delta": {"content": text}}]} for text in ("It is ", "46.")]
        parts = [{"id": "chatcmpl-1", "recorded": True, **each} for each in parts]
        lines = [f"data: {json.dumps(part)}\n\n" for part in parts]
        return StreamingResponse(iter([*lines, "data: [DONE]\n\n"]), media_type="text/event-stream")

    def judge(self, answer_id: str, body: dict[str, Any]) -> JSONResponse:
        self.judged.append((answer_id, body["thumb"]))
        if body["thumb"] == "up":
            return JSONResponse({"error": {"message": "The disk is full."}}, 503)
        return JSONResponse(body)


@pytest.fixture
def served() -> Iterator[tuple[Server, str]]:
    server = Server()
    with listening(server.app) as url:
        yield server, f"{url}v1"


@pytest.fixture
def address(run: Path, served: tuple[Server, str]) -> Iterator[str]:
    with listening(application([run], server=served[1])) as url:
        yield url


def pressed(page: str) -> str:
    return f"document.getElementById('show-{page}').getAttribute('aria-pressed') === 'true'"


def test_run_is_read_by_keyboard_alone_at_two_widths(browser: Browser, address: str) -> None:
    for width in (1300, 390):
        browser.resize(width, 900)
        browser.open(address)
        browser.wait_for("document.querySelectorAll('.chart').length >= 2")
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
    browser.wait_for("document.getElementById('state').textContent === 'step 4'")


def test_two_members_of_a_group_stand_side_by_side(browser: Browser, address: str) -> None:
    browser.open(f"{address}#trajectory/0/step/3/0")
    browser.wait_for("document.querySelectorAll('.tools .cell').length === 4")
    click = "dispatchEvent(new MouseEvent('click', {shiftKey: true}))"
    browser.value(f"document.querySelectorAll('.tools .cell')[2].{click}")
    browser.wait_for("document.querySelectorAll('article').length === 2")
    for member in (3, 1):  # by keyboard, too: the next one, and from the last to the first
        browser.press("b")
        browser.wait_for(
            f"document.querySelectorAll('article h2')[1]?.textContent === '00000000/000{member}'"
        )
    browser.value("document.querySelector('.same').open = true")
    browser.wait_for("document.querySelectorAll('.same .task').length === 4")  # three updates, one evaluation
    browser.value("document.querySelector('.same .cell').click()")
    browser.wait_for("document.querySelectorAll('article').length === 1")
    assert browser.value("document.getElementById('step').value") == "eval/0"


def test_agent_is_talked_to_and_its_steps_are_seen(
    browser: Browser, address: str, served: tuple[Server, str]
) -> None:
    server, _ = served
    for width in (1300, 390):
        browser.resize(width, 900)
        browser.open(address)
        browser.wait_for("document.querySelectorAll('.chart').length >= 2")
        browser.press("5")
        browser.wait_for("document.getElementById('model')?.value === 'agent/calculator'")
        browser.value("document.getElementById('box').focus()")
        browser.type("What is 12+34?")
        browser.press("Enter")
        browser.wait_for("document.getElementById('said').innerText.includes('It is 46.')")
        said = browser.value("document.getElementById('said').innerText")
        assert "step 1" in said and "12+34" in said and NASTY in said
        browser.type("And now?")
        browser.press("Enter")
        browser.wait_for("document.getElementById('said').innerText.split('It is 46.').length === 3")
        assert browser.value("document.documentElement.scrollWidth") <= width
    assert [[each["content"] for each in body["messages"]] for body in server.asked[-2:]] == [
        ["What is 12+34?"],
        ["And now?"],
    ], "an agent plays an episode for one message"
    change = "dispatchEvent(new Event('change'))"
    browser.value(f"Object.assign(document.getElementById('model'), {{value: 'policy'}}).{change}")
    browser.value("document.getElementById('box').focus()")
    browser.type("Hello.")
    browser.press("Enter")
    browser.wait_for("document.getElementById('said').innerText.split('It is 46.').length === 4")
    assert [each["role"] for each in server.asked[-1]["messages"]] == ["user", "assistant"] * 2 + ["user"]
    assert browser.errors == []
    assert all(each.startswith((address, "data:", "about:")) for each in browser.addresses), browser.addresses


LOOK = {
    "verdict": "The training loop waits for rollouts, for 45 s now: 2 of 4 rollout actors wait.",
    "activity": "waits for rollouts",
    "seconds": 45.0,
    "idle_seconds": 40.0,
    "num_updates": 3,
    "pid": 7,
    "host": "head",
    "processes": [{"host": "head", "role": "learner", "pid": 12, "stopped": True}],
    "fleet": {"env_class": "Coin", "num_ready": 4, "num_actors": 4, "num_waiting": 0, "num_lost": 0},
    "rollouts": [
        {"id": "0/1", "host": "node7", "seconds": 60, "waits_for": "a completion", "waiting_seconds": 41.0}
    ],
    "replicas": {"policy#a": {"version": 3, "num_running": 2, "num_answered": 99, "silent_seconds": 0.2}},
    "stream": [3, 1024],
    "unanswered": ["the node node8"],
    "errors": [],
    "progress": {"a trajectory": 40.0, "an update": 47.0},
    "failures": [
        {
            "actor": 3,
            "node": "node7",
            "rollout_id": "0/0",
            "error": "EnvironmentFailure: Coin.step\nKeyError: 'x'",
            "seconds": 12.0,
        }
    ],
}


def test_actors_of_a_run_are_seen_and_its_end_is_told(
    browser: Browser, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def states(run: Path, address: str | None) -> AsyncIterator[dict[str, Any]]:
        yield {"state": LOOK}
        await asyncio.sleep(3)
        yield {"end": "The cluster of the run has ended."}

    monkeypatch.setattr(pages, "states", states)
    browser.resize(390, 900)
    browser.open(address)
    browser.wait_for("document.querySelectorAll('.chart').length >= 2")
    browser.press("4")
    browser.wait_for("document.body.innerText.includes('2 of 4 rollout actors wait')")
    shown = browser.value("document.body.innerText")
    for part in (
        "12 (stopped)",
        "node7",
        "a completion",
        "41 s",
        "policy#a",
        "3 of 1024",
        "the node node8",
        "an update",
        "47 s ago",
        "Actor 3 on node7, 12 s ago, rollout 0/0",
    ):
        assert part in shown, part
    assert browser.value("document.documentElement.scrollWidth") <= 390
    browser.wait_for("document.body.innerText.includes('The cluster of the run has ended.')")
    assert browser.errors == []


# -- the curves of the quickstart -------------------------------------------------------------------------

QUICKSTART = Path(__file__).parent / "quickstart_metrics.jsonl"
"""What ``make train`` records: every fifth update, and the evaluations before, between and after them."""
BROKEN_WORDS = """(() => {
    const broken = [];
    const labels = "h2, h3, .legend, th, .constants td, td.role, summary, button, .numbers, label";
    for (const label of document.querySelectorAll(labels)) {
        const texts = document.createTreeWalker(label, NodeFilter.SHOW_TEXT);
        while (texts.nextNode()) {
            for (const word of texts.currentNode.data.matchAll(/[^\\s/_-]+/g)) {
                const range = document.createRange();
                range.setStart(texts.currentNode, word.index);
                range.setEnd(texts.currentNode, word.index + word[0].length);
                const lines = new Set([...range.getClientRects()].map((each) => Math.round(each.top)));
                if (lines.size > 1) broken.push(word[0]);
            }
        }
    }
    return broken;
})()"""
VISIBLE_CHARTS = "[...document.querySelectorAll('.chart:not([hidden]) h3')].map((each) => each.textContent)"


@pytest.fixture
def quickstart(run: Path) -> Iterator[str]:
    shutil.copy(QUICKSTART, run / METRICS)
    with listening(application([run])) as url:
        yield url


def opened(browser: Browser, address: str, width: int) -> None:
    browser.resize(width, 900)
    browser.open(address)
    browser.wait_for("document.querySelectorAll('.chart').length >= 2")


def test_curves_of_the_quickstart_fit_on_three_screens(browser: Browser, quickstart: str) -> None:
    opened(browser, quickstart, 1280)
    assert browser.value("document.documentElement.scrollHeight") <= 2500
    records = [json.loads(line) for line in QUICKSTART.read_text().splitlines()]
    names = {name for record in records for name in record} - {"step"}
    shown = browser.value("[...document.querySelectorAll('[data-names]')].map((each) => each.dataset.names)")
    assert names == {name for each in shown for name in each.split() if name in names}, "nothing is left out"


def test_only_what_changes_has_a_chart(browser: Browser, address: str) -> None:
    opened(browser, address, 1280)
    assert browser.value(VISIBLE_CHARTS) == ["rollout/reward_mean", "learn/loss"]
    assert browser.value("document.querySelector('.constants').innerText").split() == ["stream/actors", "4"]


def test_long_run_is_drawn_beside_one_that_lacks_metrics(browser: Browser, run: Path, tmp_path: Path) -> None:
    other = tmp_path / "long"
    other.mkdir()
    with (other / METRICS).open("w") as file:
        for step in range(50_000):
            numbers = {"learn/loss": step % 7, "learn/clip_fraction": step % 3, "learn/clip_fraction_low": 1}
            file.write(json.dumps({"step": step, **numbers}) + "\n")
    with listening(application([run, other])) as url:
        opened(browser, url, 1280)
        assert "learn/clip_fraction" not in browser.value(VISIBLE_CHARTS), "the chosen run has none"
        labels = "[...document.querySelectorAll('.chart text')].map((each) => each.textContent).join(' ')"
        assert "Infinity" not in browser.value(labels) and "49999" in browser.value(labels)
        assert browser.errors == []


def test_what_belongs_together_shares_a_chart(browser: Browser, address: str, run: Path) -> None:
    def numbers(step: int) -> dict[str, float]:
        spread = {"rollout/reward_min": 0.0, "rollout/reward_mean": step / 9, "rollout/reward_max": step / 4}
        endings = {"rollout/ended_env_done": step / 9, "rollout/ended_max_steps": 1 - step / 9}
        return {**spread, **endings, "rollout/ended_timeout": 0.0}

    records = [{"step": step, **numbers(step)} for step in (1, 2, 3)]
    records.insert(2, {"step": 2, "eval/reward_mean": 0.5, "eval/ended_env_done": 1.0})
    (run / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    opened(browser, address, 1280)
    assert browser.value(VISIBLE_CHARTS) == ["rollout/reward", "rollout/ended"]
    reward, ended = browser.value(
        "[...document.querySelectorAll('.legend')].map((each) => each.innerText.split('\\n'))"
    )
    assert reward == ["— mean 0.333 (0 to 0.750)", "● held-out 0.500"]
    assert ended == ["■ env_done 0.333", "■ max_steps 0.667"]
    counts = (
        "['.chart', '.chart + .chart'].map((each) => document.querySelectorAll(`${each} polygon`).length)"
    )
    assert browser.value(counts) == [4, 2], "a band below and above the mean, and an area for each ending"


def test_axis_stands_beside_the_line(browser: Browser, quickstart: str) -> None:
    for width in (1280, 360):
        opened(browser, quickstart, width)
        gaps = browser.value("""[...document.querySelectorAll('.chart')].map((chart) => {
            const labels = [...chart.querySelectorAll('text[text-anchor=end]')].slice(0, -1);
            const line = chart.querySelector('.grid').getBoundingClientRect();
            return [labels.length, ...labels.map((each) => line.left - each.getBoundingClientRect().right)];
        })""")
        for count, *distances in gaps:
            assert 2 <= count <= 6
            assert all(0 <= distance <= 12 for distance in distances), (width, distances)


def test_no_label_breaks_inside_a_word_on_a_phone(
    browser: Browser, quickstart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def states(run: Path, address: str | None) -> AsyncIterator[dict[str, Any]]:
        yield {"state": LOOK}
        await asyncio.sleep(60)

    monkeypatch.setattr(pages, "states", states)
    opened(browser, quickstart, 360)
    for key, arrived in (
        ("1", "document.querySelectorAll('.chart').length >= 2"),
        ("2", "document.querySelectorAll('.cell').length === 6"),
        ("3", "document.querySelectorAll('.turn').length === 2"),
        ("4", "document.body.innerText.includes('2 of 4 rollout actors wait')"),
    ):
        browser.press(key)
        browser.wait_for(arrived)
        assert browser.value(BROKEN_WORDS) == [], key
        assert browser.value("document.documentElement.scrollWidth") <= 360, key


def test_filter_hides_the_charts_that_it_does_not_name(browser: Browser, quickstart: str, run: Path) -> None:
    opened(browser, quickstart, 1280)
    everything = browser.value(VISIBLE_CHARTS)
    browser.value("document.querySelector('input[type=search]').focus()")
    browser.type("rollout reward")
    assert browser.value(VISIBLE_CHARTS) == [name for name in everything if name == "rollout/reward"]
    record(run, 99)
    browser.wait_for("document.getElementById('state').textContent === 'step 99'")
    assert "rollout/reward" in browser.value(VISIBLE_CHARTS), "it stays while the curves move"
    assert len(browser.value(VISIBLE_CHARTS)) < len(everything)
    browser.type("s")
    assert browser.value("document.querySelector('input[type=search]').value") == "rollout rewards"
    assert browser.value(VISIBLE_CHARTS) == []


def test_thumb_on_an_answer_is_given_once(browser: Browser, address: str, served: tuple[Server, str]) -> None:
    browser.open(address)
    browser.wait_for("document.querySelectorAll('.chart').length >= 2")
    browser.press("5")
    browser.wait_for("document.getElementById('box') !== null")
    browser.value("document.getElementById('box').focus()")
    browser.type("What is 12+34?")
    browser.press("Enter")
    browser.wait_for("document.querySelectorAll('.thumbs button').length === 2")
    browser.value("document.querySelector('[aria-label=\"Thumb up\"]').click()")
    browser.wait_for("document.querySelector('.thumbs').innerText.includes('disk is full')")
    browser.value("document.querySelector('[aria-label=\"Thumb down\"]').click()")
    browser.wait_for("document.getElementById('said').innerText.includes('Thumb down, kept.')")
    assert browser.value("document.querySelectorAll('.thumbs button').length") == 0
    assert served[0].judged == [("chatcmpl-1", "up"), ("chatcmpl-1", "down")]
