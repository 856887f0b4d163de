"""Faults that the real server of OpenEnv does not show: ``test_outside_openenv.py`` plays that one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import psutil
import pytest
from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from environments.adapters.openenv import (
    Episode,
    OpenEnvEnvironment,
    OpenEnvToolEnvironment,
    WorldTool,
    openenv_tasks,
    openenv_world,
    text_of,
)
from environments.adapters.openenv_server import address_of, end_server
from environments.errors import ConfigError, EnvironmentFailure
from launch.recipes.task_file import workload_of
from launch.settings.compose import compose

TESTS = Path(__file__).resolve().parents[2]
HANG_UP = "hang up"
SERVER = """
import sys
from websockets.sync.server import serve

def talk(connection):
    for _ in connection:
        connection.send('{"type": "observation", "data": {"observation": {"text": "hi"}, "done": false}}')

def page(connection, request):
    if request.path == "/health":
        answer = connection.respond(307, "")
        answer.headers["Location"] = "/health/"
        return answer
    if request.path != "/ws":
        return connection.respond(200 if request.path == "/health/" else 404, "")

with serve(talk, "127.0.0.1", int(sys.argv[1]), process_request=page) as server:
    server.serve_forever()
"""
CALL = [{"id": "c", "function": {"name": "find", "arguments": "{}"}}]
TOOL = WorldTool(
    {"type": "function", "function": {"name": "find", "description": "Find.", "parameters": {}}},
    is_action=False,
)


def reply(observation: dict[str, Any] | None = None, **fields: Any) -> str:
    data = {"observation": observation or {}, "reward": None, "done": False, **fields}
    return json.dumps({"type": "observation", "data": data})


@contextmanager
def server(*answers: str) -> Iterator[str]:
    """A server that gives ``answers`` in this order, whatever it gets, and then none; it has no pages."""
    script = iter(answers)

    def talk(connection: ServerConnection) -> None:
        for _ in connection:
            answer = next(script, None)
            if answer == HANG_UP:
                return
            if answer is not None:
                connection.send(answer)

    def page(connection: ServerConnection, request: Request) -> Response | None:
        found = request.path == "/ws"
        return (
            None if found else Response(HTTPStatus.NOT_FOUND, "Not Found", Headers({"Content-Length": "0"}))
        )

    with serve(talk, "127.0.0.1", 0, process_request=page) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"ws://127.0.0.1:{serving.socket.getsockname()[1]}"
        serving.shutdown()


def stepped(*answers: str, **options: Any) -> tuple[str, float, bool, dict[str, Any]]:
    """The result of a step after a reset."""
    with server(*answers) as address:
        env = OpenEnvEnvironment(Episode(server=address, **options), "message")
        env.reset()
        try:
            return env.step("hello")
        finally:
            env.close()


def called(answer: str) -> str:
    """The output of a tool, of which the world answers so."""
    with server(reply(), answer) as address:
        env = OpenEnvToolEnvironment(Episode(server=address), [TOOL])
        env.reset()
        try:
            return str(env.step(CALL)[0]["tool_outputs"]["c"])
        finally:
            env.close()


def test_reward_that_is_no_number_fails() -> None:
    for reward in (float("nan"), float("inf")):
        with pytest.raises(EnvironmentFailure, match=f"the reward {reward}"):
            stepped(reply(), reply(reward=reward))
    assert stepped(reply(), reply({"text": "hi"}, reward=None)) == ("hi", 0.0, False, {})


def test_lost_connection_fails_instead_of_a_reward() -> None:
    with pytest.raises(EnvironmentFailure, match="gave no answer to 'step'"):
        stepped(reply(), HANG_UP)
    with pytest.raises(EnvironmentFailure, match=r"no answer to 'step': (timed out|none within 0\.2 s)"):
        stepped(reply(), timeout_seconds=0.2)
    with pytest.raises(EnvironmentFailure, match="over after its reset"):
        stepped(reply(done=True))


def test_step_without_session_fails() -> None:
    env = OpenEnvEnvironment(Episode(server="http://127.0.0.1:9"), "message")
    with pytest.raises(EnvironmentFailure, match=r"call reset\(\) first"):
        env.step("hello")
    with pytest.raises(EnvironmentFailure, match=r"No OpenEnv server answers at ws://127\.0\.0\.1:9/ws"):
        env.reset()


def test_errors_of_tools_are_read_by_the_model() -> None:
    late = {"tool_name": "find", "result": None, "error": {"error_type": "timeout", "message": "too late"}}
    assert called(reply(late)) == "Error: too late"
    with pytest.raises(EnvironmentFailure, match="cannot run the tool 'find': no way"):
        called(reply({**late, "error": {"error_type": "transport_error", "message": "no way"}}))


def test_results_of_tools_are_texts() -> None:
    blocks = [{"type": "text", "text": "one"}, {"type": "image", "data": "..."}]
    assert called(reply({"tool_name": "find", "result": {"content": blocks}})) == "one\n[image]"
    assert called(reply({"tool_name": "find", "result": {"rows": 2}})) == '{"rows": 2}'
    assert called(reply({"tool_name": "find", "result": "one"})) == "one"
    assert text_of({"board": "x.", "moves": [1, 2], "metadata": {"answer": 3}}) == "board: x.\nmoves: [1, 2]"


def test_server_without_pages_has_no_tasks_and_no_world() -> None:
    with server() as address:
        assert openenv_tasks(address) == []
        with pytest.raises(EnvironmentFailure, match="is no OpenEnv server"):
            openenv_world(address)


def test_command_that_serves_nothing_is_named_with_its_output() -> None:
    with pytest.raises(ConfigError, match="nor a command with the word PORT"):
        address_of("host:8000")
    with pytest.raises(EnvironmentFailure, match=rf"(?s)has ended.*{Path.cwd()}.*no module for port \d+"):
        address_of(f"{sys.executable} -c \"raise SystemExit('no module for port PORT')\"")


def test_workload_of_absent_server_names_its_address() -> None:
    with pytest.raises(EnvironmentFailure, match=r"http://127\.0\.0\.1:9/metadata"):
        workload_of(compose(["run.directory=unused", "workload=openenv:http://127.0.0.1:9"]))


def test_server_that_fails_is_told_from_an_absent_one() -> None:
    def fail(connection: ServerConnection, request: Request) -> Response:
        return connection.respond(500, "")

    with serve(print, "127.0.0.1", 0, process_request=fail) as failing:
        threading.Thread(target=failing.serve_forever, daemon=True).start()
        with pytest.raises(EnvironmentFailure, match="server answers 500 Internal Server Error at http"):
            openenv_tasks(f"http://127.0.0.1:{failing.socket.getsockname()[1]}")


def test_proxy_that_httpx_cannot_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "socksio", None)
    with pytest.raises(EnvironmentFailure, match=r"127\.0\.0\.1:9/\w+: .*SOCKS.*pip install"):
        openenv_tasks("http://127.0.0.1:9")


def test_started_server_is_reached_past_a_proxy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr("environments.adapters.openenv_server.START_SECONDS", 20.0)
    (tmp_path / "serve.py").write_text(SERVER)
    command = f"{sys.executable} {tmp_path}/serve.py PORT"
    try:
        assert openenv_tasks(command) == []
        env = OpenEnvEnvironment(Episode(server=command), "message")
        assert env.reset()[0] == {"question": "hi"}
        env.close()
    finally:
        end_server(command)


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [True, False])
def test_container_ends_with_the_process_that_started_it(tmp_path: Path, is_killed: bool) -> None:
    (tmp_path / "serve.py").write_text(SERVER)
    served = f"'{sys.executable} {tmp_path}/serve.py PORT & cat; kill $!'"
    run = f"{sys.executable} {TESTS}/container_stand_in.py run --name=world python sh -c {served}"
    program = f"""
import sys
from environments.adapters.openenv_server import address_of, end_server
print(address_of({run!r}), flush=True)
sys.stdin.read()
end_server({run!r})
"""
    starter = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=TESTS.parent,
        env=os.environ | {"STAND_IN_STATE": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None and starter.stdout.readline().startswith("http://127.0.0.1:")
    container = psutil.Process(int((tmp_path / "world").read_text()))
    inside = [container, *container.children(recursive=True)]
    assert len(inside) == 3, "the shell, the server and what waits for the end of the input"
    if is_killed:
        starter.send_signal(signal.SIGKILL)
    starter.communicate()
    assert psutil.wait_procs(inside, 30)[1] == []
