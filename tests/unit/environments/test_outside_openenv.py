"""Worlds behind the real server of OpenEnv, in an environment of its own."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from outside_packages import environment_with

from actors.rollouts.journal import Journal
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, run_rollout
from environments.adapters.openenv import ACT, Episode, OpenEnvEnvironment, openenv_tasks, openenv_world
from environments.adapters.openenv_server import address_of, end_server
from environments.errors import EnvironmentFailure
from environments.types import Completion, Trajectory
from launch.recipes.task_file import workload_of
from launch.settings.compose import compose
from policies.sampler import SampleRequest, ScriptedSampler

pytestmark = pytest.mark.outside

TESTS = Path(__file__).resolve().parents[2]


def command_of(world: str, most: int) -> str:
    python = environment_with(TESTS / "outside_openenv.txt") / "python"
    return f"{shlex.quote(str(python))} {shlex.quote(str(TESTS / 'outside_openenv.py'))} {world} PORT {most}"


@contextmanager
def server_of(world: str, most: int) -> Iterator[str]:
    """The address of a server that is not the clients' own."""
    command = command_of(world, most)
    try:
        yield address_of(command)
    finally:
        end_server(command)


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with server_of("echo", 1) as address:
        yield address


def text_world(server: str, **options: Any) -> OpenEnvEnvironment:
    return OpenEnvEnvironment(Episode(server=server, **options), "message")


def play(server: str, replies: list[str]) -> Trajectory:
    """The first held-out task of the workload that settings name."""
    workload = workload_of(compose(["run.directory=unused", f"workload=openenv:{server}"]))
    assert workload.val_dataset is not None
    scripted = ScriptedSampler(replies)

    def sample(request: SampleRequest) -> Completion:
        return asyncio.run(scripted.sample(request))

    request = RolloutRequest(rollout_id="0", group_id="0", task=workload.val_dataset[0])
    pair = workload.pair
    env = pair.make_env(request)
    try:
        return run_rollout(pair.make_agent(), env, sample, request, RolloutLimits(), Journal())
    finally:
        env.close()


def test_text_world_is_played_by_settings_alone(echo: str) -> None:
    trajectory = play(echo, ["hello", "bye"])
    assert trajectory.error is None
    assert trajectory.steps[0].chat_completions[0]["content"].endswith("Seed 1000. Write.")
    assert [(step.reward, step.done) for step in trajectory.steps] == [(0.5, False), (0.3, True)]
    assert openenv_tasks(echo) == []


def test_bad_action_is_answered_and_game_goes_on(echo: str) -> None:
    env = text_world(echo)
    env.reset()
    text, reward, done, _ = env.step("")
    assert ("at least 1 character" in text, reward, done) == (True, 0.0, False)
    assert env.step("\ud83d")[1] == 0.1, "half a character is none that the server could answer"
    assert env.step("nan")[1] == 0.0, "the server sends null for it"
    assert env.step("bye")[1:3] == (0.3, True)
    with pytest.raises(EnvironmentFailure, match="EXECUTION_ERROR: the world is broken"):
        env.reset()
        env.step("raise")
    env.close()


def test_full_server_is_waited_for_and_named(echo: str) -> None:
    first, second, third = text_world(echo), text_world(echo, capacity_seconds=0.5), text_world(echo)
    first.reset()
    with pytest.raises(EnvironmentFailure, match="higher max_concurrent_envs"):
        second.reset()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(third.reset)
        time.sleep(1)
        assert not waiting.done()
        first.step("bye")
        assert waiting.result(30)[0] == {"question": "Seed None. Write."}
    third.close()


def test_killed_client_leaves_no_session(echo: str) -> None:
    program = f"""
import time
from environments.adapters.openenv import Episode
episode = Episode(server={echo!r})
print(episode.begin(), flush=True)
time.sleep(600)
"""
    client = subprocess.Popen(
        [sys.executable, "-c", program], cwd=TESTS.parent, stdout=subprocess.PIPE, text=True
    )
    assert client.stdout is not None and "Write" in client.stdout.readline()
    with pytest.raises(EnvironmentFailure, match="no room"):
        text_world(echo, capacity_seconds=0).reset()
    client.kill()
    client.wait()
    env = text_world(echo, capacity_seconds=10)
    env.reset()
    env.close()


def test_32_sessions_play_at_once() -> None:
    with server_of("echo", 32) as address:

        def episode(number: int) -> list[str]:
            env = text_world(address, start={"seed": number})
            texts = [env.reset()[0]["question"]]
            others.wait(60)
            texts += [env.step(f"{number} {turn}")[0] for turn in range(20)]
            env.close()
            return texts

        others = threading.Barrier(32)
        with ThreadPoolExecutor(32) as pool:
            for number, texts in enumerate(pool.map(episode, range(32))):
                assert texts == [f"Seed {number}. Write.", *(f"{number} {turn}" for turn in range(20))]


def test_dead_server_is_failure_of_environment() -> None:
    command = command_of("echo", 1)
    env, lost = text_world(command), text_world(address_of(command))
    lost.reset()
    end_server(command)
    with pytest.raises(EnvironmentFailure, match="gave no answer to 'step'"):
        lost.step("hello")
    with pytest.raises(EnvironmentFailure, match="No OpenEnv server answers"):
        lost.reset()
    env.reset()  # which starts the server again
    assert env.step("bye")[1] == 0.3
    end_server(command)


def test_tools_of_world_are_played_with_its_tasks() -> None:
    with server_of("sums", 1) as address:
        call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
        replies = [
            call % ("add", '{"a": "x", "b": 1}'),
            call % ("add", '{"a": 100, "b": 0}'),
            call % ("submit", '{"answer": 100}'),
        ]
        trajectory = play(address, replies)
        assert trajectory.error is None
        texts = [message["content"] for message in trajectory.steps[-1].chat_completions]
        assert texts[1].endswith("What is 0 + 100?")
        assert "valid integer" in texts[3] and texts[5] == "100"
        assert [step.reward for step in trajectory.steps] == [0.0, 0.0, 1.0]
        assert trajectory.metrics == {"called": 1.0}
        assert [(each.split, len(each)) for each in openenv_tasks(address)] == [("train", 30), ("test", 5)]


def test_action_of_several_fields_is_one_tool() -> None:
    with server_of("board", 1) as address:
        (tool,) = openenv_world(address).tools
        assert (tool.name, tool.json["function"]["parameters"]["required"]) == (ACT, ["row", "column"])
        call = '<tool_call>\n{"name": "act", "arguments": %s}\n</tool_call>'
        trajectory = play(address, [call % '{"row": 1}', call % '{"row": 1, "column": 2}'])
        assert [(step.reward, step.done) for step in trajectory.steps] == [(0.0, False), (1.0, True)]


def test_started_server_ends_with_its_killed_process() -> None:
    command = command_of("echo", 1)
    program = f"""
import time
from environments.adapters.openenv_server import address_of
print(address_of({command!r}), flush=True)
time.sleep(600)
"""
    starter = subprocess.Popen(
        [sys.executable, "-c", program], cwd=TESTS.parent, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None and starter.stdout.readline().startswith("http://127.0.0.1:")
    started = psutil.Process(starter.pid).children(recursive=True)
    assert len(started) == 2, "a supervisor and the server"
    os.kill(starter.pid, signal.SIGKILL)
    starter.wait()
    assert psutil.wait_procs(started, 30)[1] == []
