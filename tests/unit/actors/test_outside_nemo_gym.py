"""Tasks of NeMo-Gym against a resource server that it ships, in an environment of its own (Python 3.12)."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from machine import free_port
from outside_packages import environment_with
from test_nemo_gym import call, kill_in_an_episode
from test_rollout_function import play

from environments.adapters.nemo_gym import NemoGymRollout
from environments.errors import EnvironmentFailure
from environments.types import Trajectory

pytestmark = pytest.mark.outside

TESTS = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
COUNT = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
TOOLS = [
    {"type": "function", "name": name, "parameters": parameters, "strict": True}
    for name, parameters in (
        ("increment_counter", COUNT | {"additionalProperties": False}),
        ("get_counter_value", {"type": "object", "properties": {}}),
    )
]


@contextmanager
def running() -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The address of the server, and its process."""
    python, port = environment_with(TESTS / "outside_nemo_gym.txt") / "python", free_port()
    process = subprocess.Popen([python, TESTS / "outside_nemo_gym.py", str(port)])
    address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
    try:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                httpx.get(f"{address}/docs").raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield address, process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with running() as (address, _):
        yield address


def played(server: str, expected: int, *replies: str) -> Trajectory:
    """An episode whose counter begins at 3."""
    left = iter(replies)
    return play(NemoGymRollout(server), lambda messages: next(left), task=task(expected))


def task(expected: int) -> dict[str, Any]:
    params = {"input": [{"role": "user", "content": "Count."}], "tools": TOOLS}
    return {"responses_create_params": params, "initial_count": 3, "expected_count": expected}


def test_32_sessions_are_judged_apart(server: str) -> None:
    def reward(by: int) -> float:
        half = call("increment_counter", count=by)
        return played(server, 3 + 2 * by, half, half + call("get_counter_value"), "Done.").reward

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(reward, range(32))) == [1.0] * 32


def test_bad_action_is_answered_and_the_episode_goes_on(server: str) -> None:
    bad = call("increment_counter", count="many") + call("verify") + call("increment_counter")
    trajectory = played(server, 5, bad, call("increment_counter", count=2), "Done.")
    assert trajectory.reward == 1.0
    outputs = [each["content"] for each in trajectory.steps[1].chat_completions if each["role"] == "tool"]
    assert [
        "valid integer" in outputs[0],
        "There is no tool" in outputs[1],
        "Field required" in outputs[2],
    ] == [True] * 3
    assert played(server, 5, "I do nothing.").reward == 0.0


def test_kill_in_an_episode_leaves_nothing_of_ours(server: str) -> None:
    kill_in_an_episode(server, task(5), call("increment_counter", count=2))
    assert played(server, 5, call("increment_counter", count=2), "Done.").reward == 1.0


def test_dead_server_fails_the_rollout() -> None:
    with running() as (address, process):
        assert played(address, 3, "Done.").reward == 1.0
        process.kill()
        process.wait()
        with pytest.raises(EnvironmentFailure, match="gives no answer to /seed_session"):
            played(address, 3, "Done.")
