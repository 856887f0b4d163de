"""An ``AgentExecutionEngine`` whose server repeats the question, and an environment that misbehaves."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from actors.engine import AgentExecutionEngine
from environments import (
    Trajectory,
)
from environments.base import BaseEnv
from policies import GameAgent

TIMEOUT_SECONDS = 60.0
"""Of episodes that end by themselves: the first of an engine imports the sampler's client, in seconds."""


class Mischief(BaseEnv):
    """Rewards an answer that repeats the question, after doing what the task asks for.

    A step of a task with ``until`` takes until that file is there.
    """

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> Mischief:
        if info.get("stuck") == "from_dict":
            time.sleep(600)
        return cls(info)

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"question": self.info["question"]}, {}

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        if "pid_file" in self.info:
            Path(self.info["pid_file"]).write_text(str(os.getpid()))
        once = Path(self.info.get("once", os.devnull))
        do = None if once.is_file() else self.info.get("do")
        if "once" in self.info:
            once.touch()
        match do:
            case "raise":
                raise RuntimeError("The dice are gone.")
            case "hang":
                signal.setitimer(signal.ITIMER_REAL, 0)  # as libraries do that have alarms of their own
                time.sleep(600)
            case "die":
                os._exit(1)
        time.sleep(self.info.get("seconds", 0))
        while not Path(self.info.get("until", os.devnull)).exists():
            time.sleep(0.02)
        return {}, float(action == self.info["question"]), True, {"index": self.idx}

    def close(self) -> None:
        if self.info.get("stuck") == "close":
            time.sleep(600)


class EchoServer(ThreadingHTTPServer):
    """Answers chat completions with the last message, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), EchoHandler)
        self.model = "echo"
        self.bodies: list[dict[str, Any]] = []
        self.base_url = f"http://127.0.0.1:{self.server_port}/v1"

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[EchoServer]:
        """A server that answers in the block."""
        with cls() as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            yield server
            server.shutdown()


class EchoHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: EchoServer

    def do_GET(self) -> None:
        self.reply({"object": "list", "data": [{"id": self.server.model, "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        asked = body["messages"][-1]["content"]
        message: dict[str, Any] = {"role": "assistant", "content": asked}
        if asked.startswith("call ") and "tools" in body:
            _, tool, expression = asked.split()
            function = {"name": tool, "arguments": json.dumps({"expression": expression})}
            message = {"role": "assistant", "content": None}
            message["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
        usage = {"prompt_tokens": 10 * len(body["messages"]), "completion_tokens": 5}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.reply({"choices": [choice], "usage": usage})

    def reply(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def make_engine(base_url: str = "http://127.0.0.1:1/v1", **changes: Any) -> AgentExecutionEngine:
    arguments = {
        "agent_class": GameAgent,
        "env_class": Mischief,
        "engine_name": "openai",
        "rollout_engine_args": {"base_url": base_url},
        "n_parallel_agents": 3,
        "trajectory_timeout": TIMEOUT_SECONDS,
        "retry_limit": 1,
        "api_retries": 0,
    }
    return AgentExecutionEngine(**(arguments | changes))


def play(engine: AgentExecutionEngine, tasks: Any) -> list[Trajectory]:
    return asyncio.run(engine.execute_tasks(tasks))
