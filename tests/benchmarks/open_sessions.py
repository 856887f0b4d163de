"""Memory of open sessions of the gateway, 1,000 at once, in the processes that they live in.

    python tests/benchmarks/open_sessions.py [--sessions 100,1000] [--calls 4,16] [--pairs-per-actor 64]

Each session is a rollout function in a pair's process, forked as rollout actors with several pairs do it. It
makes its calls over HTTP, by a gateway of its own, with its whole history and a tool, and stays open. The
policy is scripted. Memory is the proportional set size of all processes of the pairs and of those that they
are forked from, by session, and CPU seconds are theirs, the calls included.
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import repository  # noqa: F401
from report import Report

from actors.gateway.client import PolicyClient
from actors.gateway.function import pair_of
from actors.rollouts.pair_process import PairProcess, Zygote
from actors.rollouts.player import Attempt
from actors.rollouts.rollout import RolloutLimits, RolloutRequest
from environments.types import Completion, StepEvent
from policies.sampler import SampleRequest

TOOLS = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]
REPLY = '{}\n<tool_call>\n{{"name": "add", "arguments": {{"a": 1, "b": 2}}}}\n</tool_call>'
TEXT = " ".join(str(__doc__).split())[:400]
"""Text of each message: about 100 tokens."""
NUM_TOKENS = 100


def solve(task: dict[str, Any], client: PolicyClient) -> float:
    """Make the calls, and stay until the program is ended."""
    address, _, _ = client.base_url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(address)
    headers = {"Authorization": f"Bearer {client.api_key}", "Content-Type": "application/json"}
    messages: list[Any] = [{"role": "user", "content": TEXT}]
    for _ in range(task["calls"]):
        body = json.dumps({"model": "m", "messages": messages, "tools": TOOLS})
        connection.request("POST", "/v1/chat/completions", body, headers)
        message = json.load(connection.getresponse())["choices"][0]["message"]
        messages.append(message)
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": TEXT})
    with open(task["opened"], "a") as file:
        file.write(".")
    threading.Event().wait()
    return 1.0


class Link:
    """A scripted policy. Keeps the journals of turns, as the fleet does."""

    is_followed = False

    def sample(self, request: SampleRequest, deadline: float) -> Completion:
        before = request.previous.completion if request.previous else None
        history = before.prompt_ids + before.completion_ids if before else ()
        return Completion(
            prompt_ids=(*history, *range(NUM_TOKENS)),
            completion_ids=tuple(range(NUM_TOKENS)),
            logprobs=(-1.0,) * NUM_TOKENS,
            text=REPLY.format(TEXT),
            finish_reason="stop",
        )

    def record_turn(self, *turn: object) -> None: ...

    def on_step(self, rollout_id: str, step: StepEvent) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sessions", default="100,1000", help="open at once")
    parser.add_argument("--calls", default="4,16", help="calls of each")
    parser.add_argument("--pairs-per-actor", type=int, default=64, help="pairs forked from one process")
    given = parser.parse_args()
    report = Report(
        "open sessions", ("sessions", "calls", "MB in all", "MB a session", "CPU s a session", "s")
    )
    for num_calls in map(int, given.calls.split(",")):
        for count in map(int, given.sessions.split(",")):
            report.add(str(count), str(num_calls), *measured(count, num_calls, given.pairs_per_actor))
    report.print()


def measured(num_sessions: int, num_calls: int, pairs_per_actor: int) -> tuple[str, ...]:
    """Memory in MB of all sessions and of one, CPU seconds of one, and seconds until all are open."""
    start = time.monotonic()
    pair = pair_of(None, None, solve, {}, {})
    limits = RolloutLimits(max_steps=10**6, max_response_tokens=10**9, timeout_seconds=10**6)
    with tempfile.NamedTemporaryFile() as file:
        opened = Path(file.name)
        task = {"calls": num_calls, "opened": file.name}
        zygotes = [Zygote(pair) for _ in range(0, num_sessions, pairs_per_actor)]
        pairs = [
            PairProcess(zygotes[n // pairs_per_actor], pair, limits, Link()) for n in range(num_sessions)
        ]
        for number, each in enumerate(pairs):
            request = RolloutRequest(rollout_id=f"{number}/0", group_id=f"{number}", task=task)
            threading.Thread(target=each.run, args=(Attempt(request),), daemon=True).start()
        while opened.stat().st_size < num_sessions:
            time.sleep(0.1)
    seconds = time.monotonic() - start
    megabytes = cpu = 0.0
    for process in psutil.Process().children(recursive=True):
        megabytes += process.memory_full_info().pss / 1e6
        times = process.cpu_times()
        cpu += times.user + times.system
    for zygote in zygotes:
        zygote.end()
    figures = megabytes, megabytes / num_sessions, cpu / num_sessions, seconds
    return tuple(f"{figure:.{digits}f}" for figure, digits in zip(figures, (0, 2, 2, 0), strict=True))


if __name__ == "__main__":
    main()
