"""Tasks on web pages of this machine, in its Chromium, by the DevTools protocol and without a package.

A task names a ``page``, the absolute path of a file, and a ``goal``: a JavaScript expression that is true on
the page in the end, where ``answer`` is the agent's last text. The agent sees the page as its accessibility
tree, in which what it can click or write into has a number, and on request as a picture beside it.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from environments.adapters import foreign
from environments.base import Task
from environments.errors import ConfigError, DatasetError, EnvironmentFailure
from environments.messages import Message
from environments.rewards.base import RewardOutput, unjudged
from environments.sandbox.process_tree import Supervised
from environments.tool_environment import ToolEnvironment
from environments.tools import FunctionTool, Tool, ToolOutput

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
OPTIONS = (
    *(["--no-sandbox"] if os.geteuid() == 0 else []),  # it does not start otherwise
    *("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--remote-debugging-port=0", "about:blank"),
)
OFFLINE = ("--proxy-server=http://127.0.0.1:9", "--proxy-bypass-list=<-loopback>")
"""Options by which no page reaches any network, or this machine: all goes by a proxy that is not there."""
START_SECONDS, LOAD_SECONDS, SETTLE_SECONDS = 60.0, 20.0, 0.1
MAX_TREE_CHARACTERS = 8000
"""Most of a page that the agent sees."""
OPERABLE = {
    *("button", "link", "checkbox", "radio", "switch", "tab", "menuitem"),
    *("textbox", "searchbox", "combobox", "spinbutton"),
}
"""Roles of what has a number."""
UNSEEN = {"none", "generic", "InlineTextBox", "LineBreak", "RootWebArea"}
"""Roles that have no line, but those below them."""
CLICK = "function() { this.scrollIntoView(); this.click() }"
WRITE = """function(text) {
    this.focus();
    if (this.tagName === 'SELECT') {
        const found = [...this.options].find(option => option.text === text);
        if (!found) throw new Error('there is no option ' + text);
        text = found.value;
    }
    this.value = text;
    for (const name of ['input', 'change']) this.dispatchEvent(new Event(name, {bubbles: true}));
}"""


class Page:
    """A page in a Chromium of its own, which ends with this process at the latest."""

    def __init__(self, options: Sequence[str] = OFFLINE) -> None:
        program = next(filter(None, map(shutil.which, NAMES)), None)
        if program is None:
            raise ConfigError(f"There is no {' or '.join(NAMES[:3])} here: install Chromium on each node.")
        self._numbers = itertools.count(1)
        with ExitStack() as ending:
            folder = ending.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
            log = ending.enter_context(open(os.devnull, "wb"))
            command = [program, f"--user-data-dir={folder}", *options, *OPTIONS]
            ending.callback(Supervised(command, folder, os.environ | {"HOME": folder}, log).end)
            connect = foreign("websockets.sync.client", "websockets").connect
            self._socket = ending.enter_context(connect(_address(Path(folder)), max_size=None, proxy=None))
            self.call("Page.enable")
            self.close = ending.pop_all().close

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command of the protocol. Raises ``LookupError`` where the page refuses it."""
        number = next(self._numbers)
        self._send(number, method, params)
        while (message := self._receive()).get("id") != number:
            if message.get("method") == "Page.javascriptDialogOpening":  # else the page waits for a person
                self._send(next(self._numbers), "Page.handleJavaScriptDialog", {"accept": True})
        if "error" in message:
            raise LookupError(message["error"]["message"])
        found: dict[str, Any] = message["result"]
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise LookupError(details.get("exception", details).get("description", details["text"]))
        return found

    def value(self, script: str) -> Any:
        """The value of a JavaScript expression. Raises ``LookupError`` as ``call`` does."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def open(self, address: str) -> None:
        """Load an address."""
        self.call("Page.navigate", url=address)
        self.settle()

    def settle(self) -> None:
        """Wait until what was begun is loaded, or ``LOAD_SECONDS``."""
        deadline = time.monotonic() + LOAD_SECONDS
        is_loaded = False
        while not is_loaded and time.monotonic() < deadline:
            time.sleep(SETTLE_SECONDS)
            with suppress(LookupError):  # the page before is just going
                is_loaded = self.value("document.readyState") == "complete"

    def picture(self) -> Message:
        """Take a picture of the page as its window shows it; return a part of a message."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    def _send(self, number: int, method: str, params: dict[str, Any]) -> None:
        self._exchange(self._socket.send, json.dumps({"id": number, "method": method, "params": params}))

    def _receive(self) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._exchange(self._socket.recv, LOAD_SECONDS))
        return message

    def _exchange(self, call: Callable[..., Any], *arguments: Any) -> Any:
        closed = foreign("websockets.exceptions", "websockets").ConnectionClosed
        try:
            return call(*arguments)
        except (OSError, closed) as error:  # also where it is silent for too long
            raise EnvironmentFailure(f"Chromium has gone, or gives no answer: {error!r}.") from error


def _address(folder: Path) -> str:
    """Address of the page of a Chromium that starts with this folder. Raises ``EnvironmentFailure``."""
    deadline = time.monotonic() + START_SECONDS
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        with suppress(OSError, LookupError, StopIteration):  # it has no page yet
            port = (folder / "DevToolsActivePort").read_text().split()[0]
            with opener.open(f"http://127.0.0.1:{port}/json", timeout=5) as answer:
                return str(
                    next(each for each in json.load(answer) if each["type"] == "page")["webSocketDebuggerUrl"]
                )
        time.sleep(0.1)
    raise EnvironmentFailure(f"Chromium has not started within {START_SECONDS:g} s.")


def tree_text(nodes: list[dict[str, Any]]) -> tuple[str, dict[int, int]]:
    """An accessibility tree as text, and the place in the document of each number in it."""
    by_id, places = {each["nodeId"]: each for each in nodes}, dict[int, int]()

    def lines(node: dict[str, Any], depth: int, above: str) -> Iterator[str]:
        role, name = (str(node.get(key, {}).get("value") or "").strip() for key in ("role", "name"))
        is_repeated = role == "StaticText" and name == above
        is_shown = not (node.get("ignored") or role in UNSEEN or is_repeated) and (name or role in OPERABLE)
        if is_shown:
            states = {each["name"]: each["value"].get("value") for each in node.get("properties", ())}
            shown = [f"{key}={states[key]}" for key in ("checked", "selected", "disabled") if key in states]
            if "value" in node:
                shown.insert(0, f"= {json.dumps(node['value'].get('value'), ensure_ascii=False)}")
            mark = ""
            if role in OPERABLE and "backendDOMNodeId" in node:
                places[len(places) + 1] = node["backendDOMNodeId"]
                mark = f"[{len(places)}] "
            yield "  " * depth + " ".join([f"{mark}{role}", json.dumps(name, ensure_ascii=False), *shown])
        for child in node.get("childIds", ()):
            if child in by_id:
                yield from lines(by_id[child], depth + bool(is_shown), name or above)

    text = "\n".join(lines(nodes[0], 0, ""))
    return text[:MAX_TREE_CHARACTERS], places


class PageTools:
    """The tools ``click`` and ``write`` of a page; without one they only describe themselves."""

    def __init__(self, page: Page | None = None) -> None:
        self._page = page
        self._places: dict[int, int] = {}

    @property
    def tools(self) -> list[Tool]:
        return [FunctionTool(self.click), FunctionTool(self.write)]

    def click(self, number: int) -> ToolOutput:
        """Clicks what has this number on the page, and returns the page as it is then."""
        return self._act("click", number, CLICK)

    def write(self, number: int, text: str) -> ToolOutput:
        """Writes a text into the field with this number in the place of what it holds, or chooses the option
        with this text, and returns the page as it is then.
        """
        return self._act("write", number, WRITE, {"value": text})

    def shown(self) -> str:
        """The page as text."""
        if self._page is None:
            raise ConfigError("A page's tools run in BrowserEnvironment alone: these describe them.")
        text, self._places = tree_text(self._page.call("Accessibility.getFullAXTree")["nodes"])
        return text or "(an empty page)"

    def _act(self, name: str, number: int, function: str, *arguments: dict[str, str]) -> ToolOutput:
        if self._page is None or number not in self._places:
            self.shown()
            return ToolOutput(name, error=f"the page has no number {number}, but 1 to {len(self._places)}.")
        try:
            found = self._page.call("DOM.resolveNode", backendNodeId=self._places[number])["object"][
                "objectId"
            ]
            call = {"functionDeclaration": function, "arguments": list(arguments), "userGesture": True}
            self._page.call("Runtime.callFunctionOn", objectId=found, **call)
        except LookupError as error:
            return ToolOutput(name, error=str(error).splitlines()[0])
        self._page.settle()
        return ToolOutput(name, self.shown())


class BrowserEnvironment(ToolEnvironment):
    """A task on a page, played by a ``ToolAgent`` with ``PageTools().tools``.

    It ends with an answer without a call, or after ``max_steps``; then the task's goal is the reward. No page
    reaches a network. Links to other files of this machine do lead there: use pages that you have written.

    Args:
        screenshots: show a picture of the page beside each text of it, to a model that reads pictures.
    """

    make_page = Page

    def __init__(self, task: Task | None = None, max_steps: int = 20, screenshots: bool = False) -> None:
        super().__init__(task, PageTools().tools, reward_fn=unjudged, max_steps=max_steps)
        missing = [name for name in ("question", "page", "goal") if name not in self.task]
        if missing:
            raise DatasetError(f"The task has no {missing[0]!r} (keys: {', '.join(self.task)}): write one.")
        if not Path(self.task["page"]).is_absolute() or not Path(self.task["page"]).is_file():
            raise DatasetError(
                f"page={self.task['page']!r} is no file: write its absolute path on each node."
            )
        self._screenshots = screenshots
        self._page: Page | None = None

    def reset(self) -> tuple[Any, dict[str, Any]]:
        self.close()
        self._count_from_zero()
        self._page = self.make_page()
        self._page.open(Path(self.task["page"]).as_uri())
        tools = PageTools(self._page)
        self.tools = {tool.name: tool for tool in tools.tools}
        question = f"{self.task['question']}\n\n{tools.shown()}"
        return self._with_picture(question) if self._screenshots else {"question": question}, {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        observation, reward, done, info = super().step(action)
        if not done:
            outputs = observation["tool_outputs"]
            if self._screenshots:
                last = next(reversed(outputs))
                outputs[last] = self._with_picture(outputs[last])
            return observation, reward, done, info
        answer = info["response"] if isinstance(info["response"], str) else ""
        self._reward_output = verdict = self._judged(answer)
        return {}, verdict.reward, True, info | {"metadata": info["metadata"] | verdict.metadata}

    def _with_picture(self, text: str) -> list[Message]:
        assert self._page is not None
        return [{"type": "text", "text": text}, self._page.picture()]

    def _judged(self, answer: str) -> RewardOutput:
        assert self._page is not None
        try:
            reached = self._page.value(f"(answer => Boolean({self.task['goal']}))({json.dumps(answer)})")
        except LookupError as error:
            if "SyntaxError" in str(error):
                raise DatasetError(
                    f"goal={self.task['goal']!r} is no JavaScript expression: {error}"
                ) from error
            reached = False  # what it names is not on this page
        return RewardOutput(float(reached is True), is_correct=reached is True)

    def close(self) -> None:
        if self._page is not None:
            self._page.close()
            self._page = None
