"""Tasks on web pages: with a page of ours, and in a real Chromium where the machine has one."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from browser import chromium
from picture_models import picture

from environments import check_environment
from environments.adapters import browser
from environments.adapters.browser import BrowserEnvironment, Page, PageTools, tree_text
from environments.errors import ConfigError, DatasetError, EnvironmentFailure
from launch.recipes.browser import PAGES, TASKS, workload
from launch.validation.workload import check_classes
from policies import ToolAgent
from policies.pictures import open_picture, pictures_of

ROOT = Path(__file__).resolve().parents[3]
in_chromium = pytest.mark.skipif(chromium() is None, reason="no Chromium: apt-get install chromium")


def node(number: int, role: str, name: str, *children: int, **more: Any) -> dict[str, Any]:
    return {
        "nodeId": str(number),
        "role": {"value": role},
        "name": {"value": name},
        "childIds": [str(each) for each in children],
        "backendDOMNodeId": 100 + number,
        **more,
    }


TREE = [
    node(1, "RootWebArea", "Shop", 2, 3, 4),
    node(2, "heading", "Shop", 5),
    node(3, "generic", "", 6, 7),
    node(4, "button", "Shop", ignored=True),
    node(5, "StaticText", "Shop", 8),
    node(6, "checkbox", "It is new", properties=[{"name": "checked", "value": {"value": "true"}}]),
    node(7, "textbox", "", value={"value": 'a "b"'}),
    node(8, "InlineTextBox", "Shop"),
]
PICTURE = picture("red", (40, 30))
SHOWN = 'heading "Shop"\n[1] checkbox "It is new" checked=true\n[2] textbox "" = "a \\"b\\""'


class FakePage(Page):
    """Keeps the calls; ``broken`` is the error of those to an element."""

    made: ClassVar[list[FakePage]] = []
    broken: str | None = None
    reached: Any = True

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.is_closed = False
        self.made.append(self)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.calls.append((method, params))
        if method == "Runtime.callFunctionOn" and self.broken:
            raise LookupError(self.broken)
        return {"nodes": TREE, "object": {"objectId": "7"}, "data": PICTURE.split(",")[1]}

    def value(self, script: str) -> Any:
        self.calls.append((script, {}))
        if isinstance(self.reached, Exception):
            raise self.reached
        return self.reached

    def settle(self) -> None:
        self.calls.append(("settle", {}))

    def close(self) -> None:
        self.is_closed = True


class FakeBrowser(BrowserEnvironment):
    make_page = FakePage


TASK = {"question": "Buy it.", "page": str(PAGES / "shop.html"), "goal": "answer === 'Done.'"}


def calls(*named: tuple[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"id": str(index), "function": {"name": name, "arguments": json.dumps(arguments)}}
        for index, (name, arguments) in enumerate(named)
    ]


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> FakeBrowser:
    monkeypatch.setattr(FakePage, "made", [])
    return FakeBrowser(TASK)


def test_tree_numbers_what_can_be_operated() -> None:
    assert tree_text(TREE) == (SHOWN, {1: 106, 2: 107})


def test_screenshots_reach_the_messages_of_the_model() -> None:
    env, agent = FakeBrowser(TASK, screenshots=True), ToolAgent(tools=PageTools().tools)
    messages = [{"role": "user", "content": env.reset()[0]}]
    agent.update_from_env(messages[0]["content"], 0.0, False, {})
    for call in calls(("click", {"number": 1})), calls(("click", {"number": 1}), ("click", {"number": 2})):
        agent.update_from_env(env.step(call)[0], 0.0, False, {})
    assert agent.messages[1]["content"][0] == {"type": "text", "text": f"Buy it.\n\n{SHOWN}"}
    shown = [isinstance(message["content"], list) for message in agent.messages[1:]]
    assert shown == [True, True, False, True]  # one picture of the page after the calls of a turn
    assert [open_picture(each).size for each in pictures_of(agent.messages)] == [(40, 30)] * 3


def test_actions_reach_their_elements_and_show_the_page(env: FakeBrowser) -> None:
    assert env.reset()[0] == {"question": f"Buy it.\n\n{SHOWN}"}
    observation, reward, done, _ = env.step(
        calls(("click", {"number": 1}), ("write", {"number": 2, "text": "x'"}), ("click", {"number": 3}))
    )
    outputs = observation["tool_outputs"]
    assert (outputs["0"], outputs["1"], reward, done) == (SHOWN, SHOWN, 0.0, False)
    assert outputs["2"] == "Error: the page has no number 3, but 1 to 2."
    (page,) = FakePage.made
    resolved = [params["backendNodeId"] for method, params in page.calls if method == "DOM.resolveNode"]
    given = [params["arguments"] for method, params in page.calls if method == "Runtime.callFunctionOn"]
    assert (resolved, given) == ([106, 107], [[], [{"value": "x'"}]])
    assert page.calls[0] == ("Page.navigate", {"url": f"file://{PAGES}/shop.html"})


@pytest.mark.parametrize(
    ("reached", "reward"), [(True, 1.0), (False, 0.0), (LookupError("TypeError: null"), 0.0)]
)
def test_goal_on_the_last_page_is_the_reward(env: FakeBrowser, reached: Any, reward: float) -> None:
    env.reset()
    FakePage.made[0].reached = reached
    observation, found, done, info = env.step('It is "so".')
    assert (observation, found, done, info["response"]) == ({}, reward, True, 'It is "so".')
    assert FakePage.made[0].calls[-1][0] == """(answer => Boolean(answer === 'Done.'))("It is \\"so\\".")"""
    assert env.compute_metrics() == {"called": 0.0}
    env.reset()
    assert FakePage.made[0].is_closed and not FakePage.made[1].is_closed
    env.close()
    assert FakePage.made[1].is_closed


def test_steps_that_are_used_up_are_judged_too(env: FakeBrowser) -> None:
    env.max_steps = 1
    env.reset()
    assert env.step(calls(("click", {"number": 1})))[1:3] == (1.0, True)


def test_faults_are_named(env: FakeBrowser, monkeypatch: pytest.MonkeyPatch) -> None:
    env.reset()
    FakePage.made[0].broken = "Error: there is no option x\n  at <anonymous>"
    outputs = env.step(calls(("write", {"number": 2, "text": "x"})))[0]["tool_outputs"]
    assert outputs["0"] == "Error: Error: there is no option x"
    FakePage.made[0].reached = LookupError("SyntaxError: Unexpected token")
    with pytest.raises(DatasetError, match=r"goal=.* is no JavaScript expression"):
        env.step("Done.")
    for task, reason in (
        ({"question": "?"}, "no 'page'"),
        ({**TASK, "page": "shop.html"}, "no file: write its absolute path"),
    ):
        with pytest.raises(DatasetError, match=reason):
            BrowserEnvironment(task)
    with pytest.raises(ConfigError, match="these describe them"):
        PageTools().click(1)
    monkeypatch.setattr(browser, "NAMES", ("absent",))
    with pytest.raises(ConfigError, match="There is no absent here: install Chromium"):
        Page()


def test_browser_that_shows_no_page_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'[{"type": "service_worker"}]')

        def log_message(self, *given: object) -> None:
            pass

    monkeypatch.setattr(browser, "START_SECONDS", 0.5)
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        (tmp_path / "DevToolsActivePort").write_text(f"{server.server_port}\n/devtools")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(EnvironmentFailure, match=r"Chromium has not started within 0\.5 s"):
            browser._address(tmp_path)
        server.shutdown()


def test_workload_has_five_tasks_with_pages() -> None:
    made = workload(0)
    check_classes(made)
    assert len(made.train_dataset) == len(TASKS) == 5
    assert all(BrowserEnvironment(row).tools.keys() == {"click", "write"} for row in made.train_dataset)


# -- in Chromium ---------------------------------------------------------------------------------------


def number_of(shown: str, text: str) -> int:
    """Number of the line that holds a text."""
    return next(
        int(line.split("]")[0].strip(" [")) for line in shown.splitlines() if "[" in line and text in line
    )


SOLUTIONS: dict[str, list[tuple[str, ...]]] = {
    "order.html": [
        *(("write", 'textbox "Name"', "Ann"), ("write", "combobox", "green")),
        *(("click", "It is a gift"), ("click", 'button "Order"')),
    ],
    "shop.html": [("click", "Add Pears, Anjou")],
    "museum.html": [("click", "Opening hours")],
    "settings.html": [
        *(("click", 'tab "Messages"'), ("click", "Weekly letter"), ("click", "Replies"), ("click", "Save")),
    ],
    "people.html": [("write", "Department", "gardens")],
}
ANSWERS = {"museum.html": "It closes at 19:00.", "people.html": "There are 4."}


def solved(row: dict[str, Any], steps: list[tuple[str, ...]], answer: str) -> tuple[float, str]:
    env = BrowserEnvironment(row)
    try:
        shown = env.reset()[0]["question"]
        for name, text, *given in steps:
            arguments = {"number": number_of(shown, text), **dict(zip(["text"], given, strict=False))}
            shown = env.step(calls((name, arguments)))[0]["tool_outputs"]["0"]
        return env.step(answer)[1], shown
    finally:
        env.close()


@pytest.mark.slow
@in_chromium
@pytest.mark.parametrize("name", SOLUTIONS)
def test_task_is_solved_in_chromium_and_by_nothing_less(name: str) -> None:
    row = next(row for row in workload(0).train_dataset if row["page"].endswith(f"/{name}"))
    reward, shown = solved(row, SOLUTIONS[name], ANSWERS.get(name, "Done."))
    assert reward == 1.0, shown
    assert solved(row, [], "Done.")[0] == 0.0


def page_of(folder: Path, body: str) -> dict[str, str]:
    (folder / "page.html").write_text(f"<!doctype html><title>t</title>{body}")
    return {"question": "?", "page": str(folder / "page.html"), "goal": "document.title === 'reached'"}


@pytest.mark.slow
@in_chromium
def test_page_reaches_no_network_and_no_dialog_stops_it(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(2)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        script = f"fetch('{address}').catch(() => 0); alert('hello'); document.title = 'reached'"
        page = page_of(
            tmp_path, f"<img src='{address}/a.png'><a href='{address}'>out</a><script>{script}</script>"
        )
        env = BrowserEnvironment(page)
        try:
            shown = env.reset()[0]["question"]
            assert env.step("Done.")[1] == 1.0
            env.step(calls(("click", {"number": number_of(shown, "out")})))
            with pytest.raises(TimeoutError):
                server.accept()
        finally:
            env.close()


@pytest.mark.slow
@in_chromium
def test_browser_ends_with_its_environment_and_with_a_kill(tmp_path: Path) -> None:
    row = page_of(tmp_path, "<button>x</button>")
    program = f"""
import time
from environments.adapters.browser import BrowserEnvironment
env = BrowserEnvironment({row!r})
print(env.reset(), flush=True)
time.sleep(600)
"""
    starter = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None and "[1] button" in starter.stdout.readline()
    started = psutil.Process(starter.pid).children(recursive=True)
    assert len(started) > 3
    starter.kill()
    starter.wait()
    assert psutil.wait_procs(started, 30)[1] == []

    env = BrowserEnvironment(row)
    env.reset()
    started = [
        each for each in psutil.Process().children(recursive=True) if "type=" not in str(each.cmdline())
    ]
    env.close()
    assert psutil.wait_procs(started, 30)[1] == []
    env.reset()
    for each in psutil.Process().children(recursive=True):
        if "remote-debugging-port" in " ".join(each.cmdline()):
            each.kill()
    with pytest.raises(EnvironmentFailure, match="Chromium has gone"):
        env.step(calls(("click", {"number": 1})))
    env.close()


@pytest.mark.slow
@in_chromium
def test_screenshots_show_what_a_click_has_changed(tmp_path: Path) -> None:
    script = "document.body.style.background = 'blue'"
    env = BrowserEnvironment(page_of(tmp_path, f'<button onclick="{script}">x</button>'), screenshots=True)
    try:
        before = env.reset()[0]
        after = env.step(calls(("click", {"number": number_of(before[0]["text"], "x")})))[0]["tool_outputs"]
        shown = [{"role": "user", "content": parts} for parts in (before, after["0"])]
        corners = [open_picture(each).getpixel((5, 200)) for each in pictures_of(shown)]
        assert corners == [(255, 255, 255), (0, 0, 255)]
    finally:
        env.close()


@pytest.mark.slow
@in_chromium
def test_environment_passes_its_check() -> None:
    row = workload(0).train_dataset[0]
    actions = [calls(("click", {"number": 1})), calls(("write", {"number": 9, "text": "a"})), "Done."]
    report = check_environment(BrowserEnvironment, row, actions=actions, timeout_seconds=60)
    assert report.ok, str(report)
