"""A real browser for tests: Chromium without a window, driven by its DevTools protocol."""

from __future__ import annotations

import base64
import shutil
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from environments.adapters.browser import NAMES, Page


def chromium() -> str | None:
    """The program, if this machine has one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser(Page):
    """One page of a browser.

    ``addresses`` are all that it has asked the network for, ``errors`` what the page's script has raised.
    """

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.errors: list[str] = []
        super().__init__(options=())
        for domain in ("Runtime", "Network"):
            self.call(f"{domain}.enable")

    @classmethod
    def running(cls) -> closing[Browser]:
        """A browser with an empty page in the block."""
        return closing(cls())

    def open(self, address: str) -> None:
        """Load an address anew, and return when it is there."""
        for each in ("about:blank", address):  # of the same address only what follows # would be opened
            self.call("Page.navigate", url=each)
            self.wait_for(f"location.href === {each!r} && document.readyState === 'complete'")

    def resize(self, width: int, height: int) -> None:
        """Show as much of the page as a window of this size, in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def press(self, key: str) -> None:
        """Press and release a key, named as in JavaScript's ``KeyboardEvent.key``."""
        text = {"text": key} if len(key) == 1 else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def type(self, text: str) -> None:
        """Type a text into what has the focus."""
        self.call("Input.insertText", text=text)

    def wait_for(self, script: str, seconds: float = 60.0) -> None:
        """Return when the expression is true; fail if it is not in time."""
        deadline = time.monotonic() + seconds
        while not self.value(script):
            assert time.monotonic() < deadline, f"{script}: {self.value('document.body.innerText')}"
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        """Write what is seen as a PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _receive(self) -> dict[str, Any]:
        message = super()._receive()
        if message.get("method") == "Network.requestWillBeSent":
            self.addresses.append(message["params"]["request"]["url"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        return message
