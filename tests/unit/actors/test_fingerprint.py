"""Fingerprints: what an evaluation was made of, as its results file remembers it."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from actors.fingerprint import fingerprint
from environments import math_reward_fn
from environments.sandbox.base import SandboxLimits
from environments.tools import MCPServer
from environments.tools.python import PythonTool
from environments.tools.retrieval import LocalRetrievalTool


class Judge:
    """Judges with a model, by a client that counts its calls."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.lock = threading.Lock()
        self.client = Client()

    def __call__(self, task_info: dict[str, Any], action: str) -> float:
        return 0.0

    def strictly(self, task_info: dict[str, Any], action: str) -> float:
        return 0.0


class Client:
    def __init__(self) -> None:
        self.num_calls = 0


@dataclass
class Key:
    name: str
    secret: str = field(repr=False)


def threshold_reward(threshold: float) -> Callable[[dict[str, Any], str], float]:
    def reward(task_info: dict[str, Any], action: str) -> float:
        return float(len(action) > threshold)

    return reward


def environment_of(size: int) -> type:
    class Environment(Client):
        def __init__(self) -> None:
            super().__init__()
            self.size = size

        @staticmethod
        def from_dict(info: dict[str, Any]) -> Any:
            return size

    return Environment


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (LocalRetrievalTool.over("a"), LocalRetrievalTool.over("b")),
        (LocalRetrievalTool.over("a"), LocalRetrievalTool),
        (LocalRetrievalTool.over([{"text": "a"}]), LocalRetrievalTool.over([{"text": "b"}])),
        (
            functools.partial(math_reward_fn, time_limit_seconds=1),
            functools.partial(math_reward_fn, time_limit_seconds=99),
        ),
        (MCPServer(command="npx", args=["one"]), MCPServer(command="npx", args=["other"])),
        (PythonTool(), PythonTool(limits=SandboxLimits(timeout_seconds=99))),
        (lambda task_info, action: 0.0, lambda task_info, action: 1.0),
        (lambda task_info, action, size=1: size, lambda task_info, action, size=2: size),
        (threshold_reward(1), threshold_reward(2)),
        (environment_of(1), environment_of(2)),
        (Judge("small"), Judge("large")),
        (Judge("small").strictly, Judge("large").strictly),
        (Judge("small").strictly, Judge("small").__call__),
        (Path("a"), Path("b")),
        ({1, 2}, {1, 3}),
        (math.floor, math.ceil),
        (Key("a", secret="x"), Key("b", secret="x")),
    ],
)
def test_fingerprint_differs_with_what_plays_or_judges(one: Any, other: Any) -> None:
    assert fingerprint(one) != fingerprint(other)
    assert fingerprint({"tools": [one]}) != fingerprint({"tools": [other]})


@pytest.mark.parametrize(
    "make",
    [
        lambda: LocalRetrievalTool.over("a"),
        lambda: PythonTool(),
        lambda: threshold_reward(1),
        lambda: environment_of(1),
        lambda: Judge("small"),
        lambda: object(),
    ],
)
def test_what_is_made_anew_has_the_same_fingerprint(make: Callable[[], Any]) -> None:
    assert fingerprint(make()) == fingerprint(make())


def test_what_an_object_counts_inside_changes_nothing() -> None:
    judge = Judge("small")
    before = fingerprint(judge)
    judge.client.num_calls += 1
    assert fingerprint(judge) == before


def test_secrets_are_neither_shown_nor_compared() -> None:
    server = MCPServer(url="http://host/mcp", headers={"Authorization": "sk-1234"})
    assert "sk-1234" not in json.dumps(fingerprint([server, Key("a", "sk-1234"), Judge("sk-1234")]))
    assert fingerprint(Key("a", "old")) == fingerprint(Key("a", "new"))


def test_what_has_a_name_is_told_by_it() -> None:
    values = [math_reward_fn, LocalRetrievalTool, math.floor, 1, None, "text"]
    names = [
        "environments.rewards.math.math_reward_fn",
        "environments.tools.retrieval.LocalRetrievalTool",
        "math.floor",
    ]
    assert fingerprint(values) == [*names, 1, None, "text"]


def test_what_contains_itself_has_a_fingerprint_too() -> None:
    loop: list[Any] = []
    loop.append(loop)

    def countdown(left: int) -> int:
        return countdown(left - 1) if left else 0

    assert fingerprint(loop) == ["..."]
    assert fingerprint(countdown) == fingerprint(countdown)


@pytest.mark.slow
def test_fingerprints_are_the_same_in_every_process() -> None:
    program = """
import json
from pathlib import Path
from actors.fingerprint import fingerprint
from environments.tools.python import PythonTool
from environments.tools.retrieval import LocalRetrievalTool

class Judge:
    def __init__(self):
        self.words = {"a", "b", "c", "d"}

values = [LocalRetrievalTool.over("a"), PythonTool(), Judge(), Path("a"), object(), {"x", "y", "z"}]
print(json.dumps(fingerprint([*values, lambda action: action in {"no", "yes", "maybe"}])))
"""
    printed = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(printed) == 1
