"""CPU milliseconds of a program's call by the gateway, beside those of the sampler called directly.

    python tests/benchmarks/gateway_calls.py [--sessions 64] [--calls 4,16]

The same conversations of OpenAI's client, with a tool and their whole history in each call, at the same pace:

    edge             a server of the same libraries has its answer: HTTP alone
    sampler          the same server calls the sampling actor, with the messages of the agent of a rollout
    gateway          a rollout function's calls, which ``run_rollout`` samples
    recorded         those of a program elsewhere, by the session server, which keeps each answer first
    policy server    the policy server, by Serve's proxy

The engine is scripted. `caller` is the process with the first three of these, as a rollout actor's is. `ours`
is its CPU time beyond that of `edge`, and the sampling actor's: all that a call runs behind HTTP, with Ray's
part of it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import patch

import httpx
import psutil
import ray
from programs import free_port
from ray import serve
from ray.util import get_node_ip_address
from report import Report
from repository import ROOT, start_ray
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

sys.path.insert(0, str(ROOT / "tests"))  # for scripted_engine

from actors.gateway.client import PolicyClient
from actors.gateway.function import RolloutFunction, pair_of
from actors.gateway.remote_program import RemoteProgram
from actors.gateway.server import application, listen
from actors.gateway.session_server import SessionServer
from actors.rollouts.journal import AnswersJournal, Journal
from actors.rollouts.player import NODE_ADDRESS
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, run_rollout
from actors.sampling.sampler_actor import SamplerActor
from actors.sampling.serve_sampler import ServeSampler
from actors.serving.keys import KEYS_VARIABLE
from actors.serving.policy_app import PolicyApp
from actors.settings import ServedModel, ServerConfig
from actors.weights.store import WeightStore
from environments.types import Completion, Message
from policies.agents.parsers import get_tool_parser
from policies.gateway.answers import completion_of, message_of
from policies.sampler import SampleRequest, Turn
from policies.settings import EngineConfig
from policies.tiny import build_tokenizer

IN_FLIGHT = 16
PAUSE_SECONDS = 0.25
"""Pause of a conversation before a call: so all ways have as many calls a second, which the client can do."""
PROCESSES = {
    "caller": "ray::Caller",
    "sampling actor": "ray::SamplerActor",
    "replica": "ray::ServeReplica",
    "Serve's proxy": "ray::ProxyActor",
    "session server": "actors.gateway.sessions",
    "client": "ray::Program",
}
"""Processes that a call may pass, and parts of their titles."""
KEY = "a-key-of-the-programs"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>'
WORDS = " ".join(str(__doc__).split())
REPLY = f"{WORDS[:200]}\n{CALL}"
QUESTION, RESULT, PROMPT = WORDS[:300], WORDS[:200], WORDS[:600]
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]
BEGINNING: list[Message] = [{"role": "system", "content": PROMPT}, {"role": "user", "content": QUESTION}]
ANSWER = {
    "id": "0",
    "message": message_of(REPLY, [], get_tool_parser("qwen"), 0),
    "finish_reason": "tool_calls",
    "stop": None,
    "usage": dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 1),
    "policy_version": 0,
}
COMPLETION = completion_of(ANSWER, "policy")


@ray.remote(num_cpus=0)
class Program:
    """A process of programs, each of which holds a conversation by OpenAI's client."""

    def converse(self, url: str, key: str, num_calls: int, reward_url: str = "") -> None:
        """Call the policy so often, with the results of its tool calls, and hand in a reward."""
        import openai

        messages: list[Any] = list(BEGINNING)
        with openai.OpenAI(base_url=url, api_key=key, max_retries=0) as client:
            create = partial(client.chat.completions.create, model="policy", tools=TOOLS, max_tokens=256)
            for _ in range(num_calls):
                time.sleep(PAUSE_SECONDS)
                message = create(messages=messages).choices[0].message
                messages.append(message)
                for call in message.tool_calls or ():
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
        if reward_url:
            headers = {"authorization": f"Bearer {key}"}
            httpx.post(reward_url, json={"reward": 1}, headers=headers, trust_env=False).raise_for_status()


@ray.remote(num_cpus=0)
class Caller:
    """A process as a rollout actor's, which plays sessions."""

    def __init__(
        self, sampler: ray.actor.ActorHandle, program: ray.actor.ActorHandle, elsewhere: RemoteProgram
    ) -> None:
        os.environ[NODE_ADDRESS] = get_node_ip_address()
        self._sampler, self._program, self._elsewhere = sampler, program, elsewhere
        self._edge, self._direct = served(self._answer_at_once), served(self._answer_directly)
        self._turns: dict[str, Turn] = {}
        """The last turn of each conversation that calls the sampler."""

    def play(self, way: str, num_sessions: int, num_calls: int) -> None:
        """Play sessions in one of the ways."""
        ways = {
            "edge": self._converse(self._edge),
            "sampler": self._converse(self._direct),
            "gateway": self._play_function,
            "recorded": self._play_recorded,
        }
        with ThreadPoolExecutor(IN_FLIGHT) as threads:
            list(threads.map(partial(ways[way], num_calls), range(num_sessions)))

    def _converse(self, url: str) -> Callable[[int, int], None]:
        def converse(num_calls: int, number: int) -> None:
            ray.get(self._program.converse.remote(url, os.urandom(8).hex(), num_calls))

        return converse

    async def _answer_at_once(self, request: Request) -> Response:
        await request.body()
        return JSONResponse(COMPLETION)

    async def _answer_directly(self, request: Request) -> Response:
        body, session = await request.json(), request.headers["authorization"]
        messages, turn = BEGINNING, self._turns.get(session)
        if turn is not None:
            answer = {"role": "assistant", "content": turn.completion.text}
            messages = [*turn.messages, answer, body["messages"][-1]]
        sampled = SampleRequest(messages=messages, previous=turn, tools=TOOLS, session_id=session)
        completion = await self._sampler.sample.remote(sampled)
        self._turns[session] = Turn(messages=messages, completion=completion, tools=TOOLS)
        return JSONResponse(COMPLETION)

    def _play_recorded(self, num_calls: int, number: int) -> None:
        name, url = os.urandom(8).hex(), self._elsewhere.url
        reward_url = f"{url}/sessions/{name}/reward"
        program = self._program.converse.remote(f"{url}/v1", f"{KEY}:{name}", num_calls, reward_url)
        self._play(self._elsewhere, num_calls, AnswersJournal(name=os.urandom(8).hex()))
        ray.get(program)

    def _play_function(self, num_calls: int, number: int) -> None:
        self._play(self._solve, num_calls, Journal())

    def _play(self, rollout: RolloutFunction, num_calls: int, journal: Journal) -> None:
        pair = pair_of(None, None, rollout, {}, {})
        task = {"num_calls": num_calls}
        request = RolloutRequest(rollout_id=os.urandom(8).hex(), group_id="a", task=task)
        limits = RolloutLimits(max_steps=num_calls + 1, max_response_tokens=10**6)
        env = pair.make_env(request)
        trajectory = run_rollout(pair.make_agent(), env, self._sample, request, limits, journal)
        env.close()
        assert len(trajectory.steps) == num_calls and trajectory.steps[-1].done, trajectory

    def _sample(self, request: SampleRequest) -> Completion:
        completion: Completion = ray.get(self._sampler.sample.remote(request))
        return completion

    def _solve(self, task: dict[str, Any], client: PolicyClient) -> float:
        ray.get(self._program.converse.remote(client.base_url, client.api_key, task["num_calls"]))
        return 1.0


def served(answer: Callable[[Request], Awaitable[Response]]) -> str:
    """The address of a server that answers so."""
    app = application([Route("/v1/chat/completions", answer, methods=["POST"])])
    return f"{listen(app, '127.0.0.1').url}/v1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sessions", type=int, default=64, help="of each way and round")
    parser.add_argument("--calls", default="8", help="of each session; several numbers are several tables")
    parser.add_argument("--rounds", type=int, default=3, help="of all ways; the least of each process counts")
    given = parser.parse_args()
    start_ray()
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        build_tokenizer([[*BEGINNING, {"role": "assistant", "content": REPLY}]]).save_pretrained(folder)
        engine = EngineConfig(
            name="scripted_engine:ScriptedEngine",
            max_model_tokens=1 << 16,
            options={"replies": [REPLY]},
        )
        config = ServerConfig(http_port=port, engine=engine)
        app = PolicyApp("sampled", ServedModel(path=folder), config, WeightStore.remote())
        app.start()
        sampler = SamplerActor.remote(partial(ServeSampler, "sampled", folder))
        program = Program.options(max_concurrency=IN_FLIGHT).remote()
        with patch.dict(os.environ, {KEYS_VARIABLE: f"programs:{KEY}"}):
            sessions = SessionServer(port=0, late_rewards=folder)
        caller = Caller.remote(sampler, program, sessions.rollout)
        url = f"http://127.0.0.1:{port}/v1"

        def policy_server(num_sessions: int, num_calls: int) -> None:
            ray.get([program.converse.remote(url, "none", num_calls) for _ in range(num_sessions)])

        def play(way: str, num_sessions: int, num_calls: int) -> None:
            ray.get(caller.play.remote(way, num_sessions, num_calls))

        ways = {way: partial(play, way) for way in ("edge", "sampler", "gateway", "recorded")}
        ways["policy server"] = policy_server
        for calls in map(int, given.calls.split(",")):
            costs = {way: measured(run, given.sessions, calls, given.rounds) for way, run in ways.items()}
            show(calls, costs)
        sessions.close()
        app.stop()
        serve.shutdown()


def measured(run: Callable[[int, int], None], sessions: int, calls: int, rounds: int) -> dict[str, float]:
    """CPU milliseconds of a call in each process: the least of the rounds."""
    run(IN_FLIGHT, calls)  # first calls are slower
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        before = cpu_seconds()
        run(sessions, calls)
        used = {name: seconds - before[name] for name, seconds in cpu_seconds().items()}
        found.append({name: 1000 * seconds / (sessions * calls) for name, seconds in used.items()})
    return {name: min(each[name] for each in found) for name in PROCESSES}


def cpu_seconds() -> dict[str, float]:
    """CPU seconds of each process that a call may pass."""
    seconds = dict.fromkeys(PROCESSES, 0.0)
    for process in psutil.Process().children(recursive=True):
        title = " ".join(process.cmdline())
        for name, mark in PROCESSES.items():
            if mark in title:
                times = process.cpu_times()
                seconds[name] += times.user + times.system
    return seconds


def show(calls: int, costs: dict[str, dict[str, float]]) -> None:
    """Print the table and the ratios."""
    title = f"CPU milliseconds of a call, in sessions of {calls}"
    report = Report(title, ("way", *PROCESSES, "ours", "of the sampler's"))
    edge = costs["edge"]
    ours = {
        way: each["caller"] - edge["caller"] + each["sampling actor"]
        for way, each in costs.items()
        if way in ("sampler", "gateway", "recorded")
    }
    for way, each in costs.items():
        own = [f"{ours[way]:.2f}", f"{ours[way] / ours['sampler']:.2f}"] if way in ours else ["", ""]
        report.add(way, *(f"{each[name]:.2f}" for name in PROCESSES), *own)
    report.print()


if __name__ == "__main__":
    main()
