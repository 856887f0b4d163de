"""Environments of the benchmarks, in a module that the rollout actors can import."""

from __future__ import annotations

import os
import time
from typing import Any

from environments.base import BaseEnv


class TalkEnvironment(BaseEnv):
    """A conversation of ``num_turns`` turns about nothing, whose answers take ``seconds`` each.

    The info of a step says when it was entered and left, and in which process.
    """

    def __init__(self, info: dict[str, Any]) -> None:
        self._info = info
        self._turn = 0

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> TalkEnvironment:
        return cls(info)

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"question": self._info["question"]}, {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        entered = time.monotonic()
        self._turn += 1
        time.sleep(self._info.get("seconds", 0.0))
        info = {"process": os.getpid(), "entered": entered, "left": time.monotonic()}
        return "Go on.", 1.0, self._turn == self._info["num_turns"], info
