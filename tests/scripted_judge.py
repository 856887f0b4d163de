"""An OpenAI-compatible server whose model is a function, on a thread."""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from typing import Any

from environments.chat_endpoint import ChatEndpoint
from environments.errors import EnvironmentFailure

TOKENS = 7
"""Tokens of each prompt; a reply has 3 more."""

Script = Callable[[dict[str, Any], int], Any]
"""Function of a request's body and its number, from 1. It returns the text of the reply, or a status with a
body."""


class ScriptedJudge(ThreadingHTTPServer):
    """Keeps the requests that it gets."""

    request_queue_size = 64

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = self.num_open = 0
        self.lock = threading.Lock()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def endpoint(self, **settings: Any) -> ChatEndpoint:
        return ChatEndpoint(self.url, "scripted", **{"timeout_seconds": 30.0, "retries": 2, **settings})


class Handler(BaseHTTPRequestHandler):
    server: ScriptedJudge

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.append(self.headers["Authorization"])
            number = len(self.server.bodies)
            self.server.num_open += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.num_open)
        answer = self.server.script(body, number)
        with self.server.lock:
            self.server.num_open -= 1
        status, reply = answer if isinstance(answer, tuple) else (200, completion(answer))
        payload = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.send_header("Retry-After-Ms", "1")  # so that the tests are fast
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: Any) -> None: ...


def completion(text: str, finish_reason: str = "stop", usage: bool = True) -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    counted = {"usage": {"prompt_tokens": TOKENS, "completion_tokens": 3}} if usage else {}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}], **counted}


def verdict(*values: int, reason: str = "So it is.") -> str:
    return json.dumps({"reason": reason, **{str(number): each for number, each in enumerate(values, 1)}})


def judged(body: dict[str, Any]) -> dict[str, Any]:
    """The task and the answer that a request holds."""
    data: dict[str, Any] = json.loads(body["messages"][-1]["content"])
    return data


def slowly(body: dict[str, Any], number: int) -> str:
    time.sleep(0.1)
    return verdict(True, True)


def judge_each(pickled: bytes, task: dict[str, Any], answers: list[str], results: Any) -> None:
    """Put each judge's number of answers without a verdict into a queue, from a process of its own."""
    judges = pickle.loads(pickled)
    failures = [0] * len(judges)
    for index, answer in product(range(len(judges)), answers):
        try:
            judges[index](task, answer)
        except EnvironmentFailure:
            failures[index] += 1
    results.put(failures)


@contextmanager
def serving(script: Script) -> Iterator[ScriptedJudge]:
    server = ScriptedJudge(script)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
