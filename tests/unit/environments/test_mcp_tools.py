from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from machine import cpu_seconds, free_port, is_running, wait_until

from environments import ConfigError
from environments.errors import EnvironmentFailure
from environments.tool_environment import MCPEnvironment
from environments.tools import MCPServer, make_tools
from environments.tools.mcp import connection

ECHO = str(Path(__file__).with_name("echo_mcp_server.py"))
STDIO = MCPServer(command=sys.executable, args=[ECHO], env={"GREETING": "hello"}, timeout_seconds=60)


@pytest.fixture(scope="module")
def stdio() -> Iterator[MCPServer]:
    yield STDIO
    STDIO.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    process, url = start_http_server()
    yield url
    process.kill()
    process.wait()


def start_http_server(port: int = 0) -> tuple[subprocess.Popen[bytes], str]:
    port = port or free_port()
    process = subprocess.Popen([sys.executable, ECHO, str(port)], stderr=subprocess.DEVNULL)
    wait_until(lambda: is_open(port))
    return process, f"http://127.0.0.1:{port}/mcp"


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def pid_of(server: MCPServer) -> int:
    return int(make_tools([server])[server.prefix + "process_id"]().output)


# --- what a server's tools are


@pytest.mark.slow
def test_schema_is_passed_through(stdio):
    function = make_tools([stdio])["echo"].json["function"]
    assert (function["name"], function["description"]) == ("echo", "Say it again.")
    assert function["parameters"]["properties"]["text"]["type"] == "string"
    assert function["parameters"]["required"] == ["text"]


def test_tool_without_a_description_is_described_by_its_name(stdio):
    assert make_tools([stdio])["add"].description == "add"


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("echo", {"text": "größer"}, "größer"),
        ("variable", {"name": "GREETING"}, "hello"),
        ("variable", {"name": "SECRET_OF_THE_PARENT"}, "unset"),
        ("picture", {}, "[image: image/png, 8 characters of base64]"),
    ],
)
def test_what_a_model_reads(stdio, name, arguments, text, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_PARENT", "open")
    assert make_tools([stdio])[name](**arguments).to_string() == text


def test_structured_content_comes_back_as_json(stdio):
    output = make_tools([stdio])["add"](a=2, b=3)
    assert json.loads(output.to_string()) == output.metadata["structured_content"] == {"sum": 5}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [("refuse", {}, "not today"), ("add", {"a": "x"}, "valid integer"), ("echo", {}, "text")],
)
def test_what_a_server_refuses_is_an_error_for_the_model(stdio, name, arguments, message):
    assert message in make_tools([stdio])[name](**arguments).error


@pytest.mark.slow
def test_prefix_tells_servers_apart_and_without_one_they_clash(stdio):
    other = MCPServer(command=sys.executable, args=[ECHO], prefix="other_")
    tools = make_tools([stdio, other, "calculator"])
    assert tools["other_echo"](text="hi").output == "hi"
    assert tools["other_process_id"]().output != tools["process_id"]().output
    other.close()
    with pytest.raises(ConfigError, match=r"'echo'.*prefix"):
        make_tools([stdio, stdio])


# --- one connection per process and server


@pytest.mark.slow
def test_equal_descriptions_share_a_process(stdio):
    equal = pickle.loads(pickle.dumps(stdio))
    assert pid_of(equal) == pid_of(stdio)
    assert cpu_seconds(lambda: make_tools([equal])) < 0.01


@pytest.mark.slow
def test_threads_share_a_connection(stdio):
    tool = make_tools([stdio])["wait"]
    start = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        outputs = list(pool.map(lambda _: tool(seconds=3).output, range(8)))
    assert outputs == ["awake"] * 8
    assert time.perf_counter() - start < 20.0, "one after the other they take 24 s"


@pytest.mark.slow
def test_url_is_one_server_for_all(url):
    alone, authorized = MCPServer(url=url), MCPServer(url=url, headers={"Authorization": "Bearer x"})
    try:
        assert pid_of(alone) == pid_of(authorized)
        assert make_tools([alone])["echo"](text="hi").output == "hi"
        counts = [int(make_tools([server])["count_calls"]().output) for server in (alone, authorized)]
        assert counts[1] == counts[0] + 1
    finally:
        alone.close()
        authorized.close()


@pytest.mark.slow
def test_closed_server_ends_and_is_started_anew_by_next_use(stdio):
    pid = pid_of(stdio)
    stdio.close()
    assert not is_running(pid)
    assert pid_of(stdio) != pid


# --- when something goes wrong


@pytest.mark.slow
def test_call_that_is_too_slow_replaces_its_server_only(monkeypatch):
    server = MCPServer(command=sys.executable, args=[ECHO], timeout_seconds=4)
    tools = make_tools([server])
    pid = pid_of(server)
    with monkeypatch.context() as patch:
        patch.setattr(connection, "_PROBE_SECONDS", 60.0)  # a busy machine makes it slow, and not stuck
        assert "'wait' gave no answer within 4 seconds" in tools["wait"](seconds=60).error
    assert pid_of(server) == pid
    assert "'stall' gave no answer within 4 seconds" in tools["stall"](seconds=60).error
    assert tools["echo"](text="back").output == "back"
    wait_until(lambda: not is_running(pid))
    server.close()


@pytest.mark.slow
def test_server_that_crashes_during_call_is_back_for_next(stdio):
    tools = make_tools([stdio])
    assert "'crash' failed" in tools["crash"]().error
    assert tools["echo"](text="back").output == "back"


@pytest.mark.slow
def test_server_that_died_between_calls_is_back_for_the_next(stdio, caplog):
    pid = pid_of(stdio)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))
    time.sleep(0.3)  # until the end of its output has been read
    assert make_tools([stdio])["echo"](text="back").output == "back"
    assert "was lost; connecting again" in caplog.text


@pytest.mark.slow
def test_server_that_cannot_come_back_ends_the_rollout(tmp_path):
    script = tmp_path / "once.py"
    script.write_text(Path(ECHO).read_text())
    server = MCPServer(command=sys.executable, args=[str(script)])
    tools = make_tools([server])
    script.write_text("raise SystemExit('the licence has expired')")
    assert tools["crash"]().error is not None
    with pytest.raises(EnvironmentFailure, match=r"(?s)once\.py.*the licence has expired"):
        tools["echo"](text="back")
    server.close()


@pytest.mark.slow
def test_http_server_gone_ends_the_rollout_and_serves_when_back():
    process, url = start_http_server()
    server = MCPServer(url=url, timeout_seconds=5)
    echo = make_tools([server])["echo"]
    assert echo(text="hi").output == "hi"
    process.kill()
    process.wait()
    assert "'echo' failed" in echo(text="hi").error
    with pytest.raises(EnvironmentFailure, match=url):
        echo(text="hi")
    process, _ = start_http_server(port=int(url.split(":")[2].split("/")[0]))
    assert echo(text="back").output == "back"
    server.close()
    process.kill()
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "message"),
    [
        (MCPServer(command="no-such-program"), "'no-such-program' is not on the PATH"),
        (
            MCPServer(command=sys.executable, args=["-c", "raise SystemExit('no key given')"]),
            r"(?s)cannot be used.*no key given",
        ),
        (
            MCPServer(command=sys.executable, args=["-c", "import time; time.sleep(99)"], start_seconds=0.7),
            "did not answer within 0.7 s",
        ),
        (MCPServer(url=f"http://127.0.0.1:{free_port()}/mcp"), r"127\.0\.0\.1.*cannot be used"),
    ],
)
def test_server_that_cannot_be_used_says_why(server, message):
    with pytest.raises(EnvironmentFailure, match=message):
        make_tools([server])
    server.close()


def test_message_about_a_server_holds_no_secret():
    server = MCPServer(command="no-such-program", env={"API_KEY": "hunter2"})
    with pytest.raises(EnvironmentFailure) as caught:
        make_tools([server])
    assert "hunter2" not in f"{caught.value} {server!r}"


OWNER = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
from environments.tools import MCPServer, make_tools
tools = make_tools([MCPServer(command=sys.executable, args=[{ECHO!r}], timeout_seconds=60)])
print(tools["process_id"]().output, flush=True)
if sys.argv[1] == "busy":
    tools["stall"](seconds=60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("state", ["busy", "done"])
def test_server_ends_with_its_owner(state):
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, state], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pid = int(owner.stdout.readline())
    if state == "busy":
        assert is_running(pid)
        time.sleep(0.3)  # until it is in its call
        owner.kill()
    _, errors = owner.communicate(timeout=60)
    wait_until(lambda: not is_running(pid))
    assert errors == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "command=None and url=None|command=None.*url=None"),
        ({"command": "x", "url": "http://x"}, "command='x'"),
        ({"command": "x", "headers": {"a": "b"}}, "headers"),
        ({"url": "http://x", "args": ["a"]}, "args and env"),
        ({"url": "localhost:80"}, "http://"),
        ({"command": "x", "args": "a b"}, r"\['a', 'b'\]"),
        ({"command": "x", "timeout_seconds": 0}, "timeout_seconds=0"),
    ],
)
def test_impossible_description_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        MCPServer(**arguments)


# --- the reference's environment


@pytest.mark.slow
def test_references_environment_plays(stdio):
    def reward(task_info, action):
        return float(action == task_info["ground_truth"])

    info = {
        "question": "?",
        "ground_truth": "pong",
        "mcp_server_command": sys.executable,
        "mcp_server_args": [ECHO],
        "reward_fn": reward,
    }
    env = MCPEnvironment.from_dict(info)
    assert env.reset() == ({"question": "?", "ground_truth": "pong"}, {})
    call = {"id": "c0", "function": {"name": "echo", "arguments": {"text": "pong"}}}
    assert env.step([call])[0] == {"tool_outputs": {"c0": "pong"}}
    assert env.step("pong")[1:3] == (1.0, True)
    with pytest.raises(ConfigError, match="mcp_server_command"):
        MCPEnvironment.from_dict({"reward_fn": reward})
    MCPServer(command=sys.executable, args=[ECHO]).close()
