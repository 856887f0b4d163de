"""A real browser for tests: Chromium without a window, driven by its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_SECONDS = 60.0


def chromium() -> str | None:
    """The program, if this machine has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser.

    ``addresses`` are all that it has asked the network for, ``errors`` what the page's script has raised.
    """

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self.addresses: list[str] = []
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Network"):
            self._call(f"{domain}.enable")

    @classmethod
    @contextmanager
    def running(cls, folder: Path) -> Iterator[Self]:
        """A browser with an empty page in the block; it writes to ``folder`` only."""
        program = chromium()
        assert program is not None
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
        ]
        options += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
        command = [program, *options, f"--user-data-dir={folder}", "--remote-debugging-port=0", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with connect(_page_address(folder / "DevToolsActivePort"), max_size=None) as socket:
                yield cls(socket)
        finally:
            process.kill()
            process.wait()

    def open(self, address: str) -> None:
        """Load an address anew, and return when it is there."""
        for each in ("about:blank", address):  # of the same address only what follows # would be opened
            self._call("Page.navigate", url=each)
            self.wait_for(f"location.href === {each!r} && document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        """Show as much of the page as a window of this size, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def press(self, key: str) -> None:
        """Press and release a key, named as in JavaScript's ``KeyboardEvent.key``."""
        text = {"text": key} if len(key) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def type(self, text: str) -> None:
        """Type a text into what has the focus."""
        self._call("Input.insertText", text=text)

    def value(self, script: str) -> Any:
        """What a JavaScript expression gives in the page."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, f"{script}: {answer['exceptionDetails']}"
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 60.0) -> None:
        """Return when the expression is true; fail if it is not in time."""
        deadline = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < deadline, f"{script}: {self.value('document.body.innerText')}"
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        """Write what is seen as a PNG."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        if event["method"] == "Network.requestWillBeSent":
            self.addresses.append(event["params"]["request"]["url"])
        if event["method"] == "Runtime.exceptionThrown":
            self.errors.append(str(event["params"]["exceptionDetails"]))


def _page_address(port_file: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with suppress(OSError, IndexError, LookupError):
            port = port_file.read_text().split()[0]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=5) as answer:
                pages = [each for each in json.load(answer) if each["type"] == "page"]
            return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(0.1)
    raise TimeoutError(f"The browser has not started within {START_SECONDS} s.")
