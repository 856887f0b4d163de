"""Tasks of NeMo-Gym against a resource server of ours that speaks as its real one does."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_rollout_function import play

from environments.adapters.nemo_gym import NemoGymRollout
from environments.errors import AgentError, ConfigError, DatasetError, EnvironmentFailure
from launch.recipes.task_file import task_file_workload

TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, "strict": True}
    for name in ("increment", "broken")
]
TASK = {
    "responses_create_params": {"input": [{"role": "user", "content": "Add 2."}], "tools": TOOLS},
    "initial": 3,
    "expected": 5,
}


class CounterServer(BaseHTTPRequestHandler):
    """A counter for each session, which is a cookie; the reward is 1 if it ends at ``expected``."""

    numbers: Iterator[int]
    counters: dict[str, int]
    verified: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        session = self.headers.get("cookie", "").removeprefix("session=")
        match self.path:
            case "/seed_session" if "initial" in body:
                session = str(next(self.numbers))
                self.counters[session] = body["initial"]
                self.answer(200, {}, f"session={session}; path=/")
            case "/increment":
                self.counters[session] += body["by"]
                self.answer(200, {"success": True})
            case "/verify" if "verdict" in body:
                self.answer(200, body["verdict"])
            case "/verify" if "expected" in body:
                self.verified.append(body)
                reward = float(self.counters[session] == body["expected"])
                self.answer(200, {**body, "reward": reward, "count": self.counters[session]})
            case _:
                self.answer(500, {"detail": "It is broken."})

    def answer(self, status: int, body: Any, cookie: str | None = None) -> None:
        self.send_response(status)
        if cookie is not None:
            self.send_header("set-cookie", cookie)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass


class PatientServer(ThreadingHTTPServer):
    request_queue_size = 64  # else it resets some of 32 connections that come at once


@pytest.fixture
def server() -> Iterator[str]:
    CounterServer.numbers, CounterServer.counters, CounterServer.verified = itertools.count(), {}, []
    with PatientServer(("127.0.0.1", 0), CounterServer) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replies", "reward", "outputs"),
    [
        ([call("increment", by=2), "Done."], 1.0, ['{"success": true}']),
        ([call("increment", by=1) + call("increment", by=1), "Done."], 1.0, ['{"success": true}'] * 2),
        ([call("increment", by=9), "Done."], 0.0, ['{"success": true}']),
        (["I do nothing."], 0.0, []),
        ([call("broken"), call("increment", by=2), ""], 1.0, ['{"detail": "It is broken."}', "success"]),
        ([call("seed_session", initial=5), "Done."], 0.0, ["There is no tool"]),
        ([call("broken", of="\ud83d"), "Done."], 0.0, ['{"detail": "It is broken."}']),
    ],
)
def test_episode_is_that_of_the_simple_agent(
    server: str, replies: list[str], reward: float, outputs: list[str]
) -> None:
    left = iter(replies)
    trajectory = play(NemoGymRollout(server), lambda messages: next(left), task=TASK)
    assert trajectory.reward == reward and len(trajectory.steps) == len(replies)
    (verified,) = CounterServer.verified
    items = verified["response"]["output"]
    given = [each["output"] for each in items if each["type"] == "function_call_output"]
    assert all(word in output for word, output in zip(outputs, given, strict=True))
    assert verified["expected"] == 5, "the judge gets the whole task"


@pytest.mark.slow
def test_limit_of_turns_ends_in_a_verdict(server: str) -> None:
    trajectory = play(
        NemoGymRollout(server), lambda messages: call("increment", by=1), task=TASK, max_steps=2
    )
    assert len(trajectory.steps) == 2 and trajectory.reward == 1.0


@pytest.mark.slow
def test_call_that_the_policy_refuses_is_no_limit(server: str) -> None:
    created = []

    def refusing(client: Any) -> Any:
        create = client.openai.responses.create

        def second_is_refused(**fields: Any) -> Any:
            created.append(fields)
            return create(**(fields | {"temperature": -1.0} if len(created) > 1 else fields))

        client.openai.responses.create = second_is_refused
        return client

    def solve(task: dict[str, Any], client: Any) -> Any:
        return NemoGymRollout(server)(task, refusing(client))

    with pytest.raises(AgentError, match="temperature"):
        play(solve, lambda messages: call("increment", by=1), task=TASK)
    assert not CounterServer.verified


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "word"),
    [
        ({"initial": 1}, "/verify by status 500"),
        ({}, "/seed_session by status 500"),
        ({"initial": 1, "verdict": []}, r"/verify by \[\]"),
        ({"initial": 1, "verdict": {"score": 1}}, "/verify by {'score': 1}"),
        ({"initial": 1, "verdict": {"reward": math.nan}}, "/verify by {'reward': nan}"),
    ],
)
def test_server_that_cannot_judge_is_a_failure(server: str, task: dict[str, Any], word: str) -> None:
    params = {"responses_create_params": TASK["responses_create_params"]}
    with pytest.raises(EnvironmentFailure, match=word):
        play(NemoGymRollout(server), lambda messages: "Done.", task={**params, **task})


@pytest.mark.slow
def test_32_sessions_are_judged_apart(server: str) -> None:
    def reward(by: int) -> float:
        left = iter([call("increment", by=by), "Done."])
        task = {**TASK, "expected": 3 + by}
        return play(NemoGymRollout(server), lambda messages: next(left), task=task).reward

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(reward, range(32))) == [1.0] * 32
    assert sorted(CounterServer.counters.values()) == [3 + by for by in range(32)]


def kill_in_an_episode(server: str, task: dict[str, Any], action: str) -> None:
    """Kill a rollout after its first action: no process of it is left, and no connection."""
    program = f"""
import time
from test_nemo_gym import NemoGymRollout, play

def policy(messages):
    if len(messages) == 1:
        return {action!r}
    print("called", flush=True)
    time.sleep(600)

play(NemoGymRollout({server!r}), policy, task={task!r})
"""
    command, paths = [sys.executable, "-c", program], ":".join(map(str, (Path.cwd(), *sys.path)))
    started = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, stdout=subprocess.PIPE)
    assert started.stdout is not None and started.stdout.readline() == b"called\n"
    processes = [psutil.Process(started.pid), *psutil.Process(started.pid).children(recursive=True)]
    started.kill()
    started.communicate()
    assert psutil.wait_procs(processes, 30)[1] == []
    port, deadline = int(server.rpartition(":")[2]), time.monotonic() + 30
    while (left := open_connections(port)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def open_connections(port: int) -> list[Any]:
    """Connections of a server on this machine."""
    found = psutil.net_connections("tcp")
    return [each for each in found if each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED]


@pytest.mark.slow
def test_kill_in_an_episode_leaves_nothing_of_ours(server: str) -> None:
    kill_in_an_episode(server, TASK, call("increment", by=2))
    assert CounterServer.counters == {"0": 5} and not CounterServer.verified
    left = iter([call("increment", by=2), "Done."])
    assert play(NemoGymRollout(server), lambda messages: next(left), task=TASK).reward == 1.0


def test_server_that_is_gone_is_a_failure() -> None:
    with pytest.raises(EnvironmentFailure, match="Start it, or correct its address"):
        play(NemoGymRollout("http://127.0.0.1:9"), lambda messages: "Done.", task=TASK)


def test_workload_is_made_of_its_files(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps(TASK) + "\n")
    workload = task_file_workload(str(tasks), str(tasks), "nemo_gym:http://a:1", None, seed=0)
    assert workload.rollout == NemoGymRollout("http://a:1") and workload.train_dataset[0] == TASK
    assert workload.held_out[""][0] == TASK
    with pytest.raises(ConfigError, match="the server judges"):
        task_file_workload(str(tasks), None, "nemo_gym:http://a:1", "math", seed=0)
    for server in ("a:1", "http://a:b", "http://"):
        with pytest.raises(ConfigError, match="write nemo_gym:http://host:port"):
            task_file_workload(str(tasks), None, f"nemo_gym:{server}", None, seed=0)
    tasks.write_text('{"question": "1+1"}\n')
    with pytest.raises(DatasetError, match="row 0 has no responses_create_params"):
        task_file_workload(str(tasks), None, "nemo_gym:http://a:1", None, seed=0)
