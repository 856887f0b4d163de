"""The trained calculator agent behind every way to ask it, against what ``launch.evaluate`` finds.

    python tests/benchmarks/served_agent.py [--model runs/a] [--problems 100]

Held-out problems, greedy: as ``agent/calculator`` over OpenAI's Responses and chat APIs and over A2A, and
as the bare policy, driven by a tool loop of the ``openai`` client, which runs the calculator itself.
Without ``--model`` the recipe is trained first, which takes about five minutes; the rest takes two.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import repository  # noqa: F401
from a2a.client import ClientConfig, ClientFactory
from a2a.helpers.proto_helpers import new_text_message
from a2a.types.a2a_pb2 import Role, SendMessageRequest
from openai import OpenAI
from programs import Program, free_port, run
from report import Report

from environments import math_reward_fn
from environments.tools.calculator import CalculatorTool
from launch.recipes.calculator import AGENT_ARGS, split_problems

NUM_CLIENTS = 4
"""Questions that are asked at the same time."""
MAX_CALLS = 4
"""Calls of the calculator that the client's own loop allows."""
START_SECONDS = 300.0

Answer = Callable[[str], str]


def over_chat(client: OpenAI) -> Answer:
    """The agent, by chat completions."""

    def answer(question: str) -> str:
        message = {"role": "user", "content": question}
        reply = client.chat.completions.create(model="agent/calculator", messages=[message])  # type: ignore[list-item]
        return reply.choices[0].message.content or ""

    return answer


def over_responses(client: OpenAI) -> Answer:
    """The agent, by the Responses API."""
    return lambda question: client.responses.create(model="agent/calculator", input=question).output_text


def over_a2a(url: str) -> Answer:
    """The agent, by its card."""

    async def talk(question: str) -> str:
        parts = []
        async with httpx.AsyncClient(timeout=60) as http:
            client = await ClientFactory(ClientConfig(httpx_client=http)).create_from_url(url)
            request = SendMessageRequest(message=new_text_message(question, role=Role.ROLE_USER))
            async for event in client.send_message(request):
                if event.HasField("artifact_update"):
                    parts += [part.text for part in event.artifact_update.artifact.parts]
        return "".join(parts)

    return lambda question: asyncio.run(talk(question))


def by_own_loop(client: OpenAI) -> Answer:
    """The bare policy: the client has the tool, and sends its answers as messages."""
    calculator = CalculatorTool()

    def answer(question: str) -> str:
        messages: list[Any] = [
            {"role": "system", "content": AGENT_ARGS["system_prompt"]},
            {"role": "user", "content": question},
        ]
        for _ in range(MAX_CALLS):
            reply = client.chat.completions.create(
                model="policy",
                messages=messages,
                tools=[calculator.json],  # type: ignore[list-item]
                temperature=0,
                max_tokens=64,
            )
            said = reply.choices[0].message
            if not said.tool_calls:
                return said.content or ""
            messages.append(said)
            for call in said.tool_calls:
                arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
                output = calculator(**arguments).to_string()
                messages.append({"role": "tool", "tool_call_id": call.id, "content": output})
        return ""

    return answer


def num_right(problems: list[dict[str, str]], answer: Answer) -> int:
    """How many problems are solved."""
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        answers = list(clients.map(answer, [each["question"] for each in problems]))
    rewards = [math_reward_fn(task, said).reward for task, said in zip(problems, answers, strict=True)]
    return sum(reward > 0 for reward in rewards)


def evaluated(model: str, number: int, folder: Path) -> int:
    """What ``launch.evaluate`` finds."""
    settings = ["recipe=calculator", f"model.path={model}", "rollout.temperature=0", "fleet.num_actors=4"]
    program = run(
        [*settings, f"evaluation.num_tasks={number}", f"run.directory={folder}"], command="launch.evaluate"
    )
    line = next(line for line in program.lines if line.startswith("success "))
    return round(float(line.split()[1]) * number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", help="a run of the recipe calculator, or its checkpoint")
    parser.add_argument("--problems", type=int, default=100, help="held-out problems, at most 200")
    arguments = parser.parse_args()
    problems = split_problems()[0][: arguments.problems]
    report = Report(f"{len(problems)} held-out problems, greedy", ("asked", "right", "seconds"))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = arguments.model or str(folder / "trained")
        if arguments.model is None:
            run(["recipe=calculator", f"run.directory={model}"])
        start = time.monotonic()
        right = evaluated(model, len(problems), folder / "evaluation")
        report.add("launch.evaluate, with its start", str(right), f"{time.monotonic() - start:.0f}")
        url = f"http://127.0.0.1:{free_port()}"
        settings = [
            "recipe=calculator",
            f"model.path={model}",
            "server.agents.temperature=0",
            "fleet.num_actors=4",
        ]
        server = Program([*settings, f"server.http_port={url.rsplit(':', 1)[1]}"], command="launch.serve")
        try:
            wait_until_up(server)
            client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
            ways: dict[str, Answer] = {
                "agent, Responses": over_responses(client),
                "agent, chat completions": over_chat(client),
                "agent, A2A": over_a2a(url),
                "policy, the client's own tool loop": by_own_loop(client),
            }
            for name, answer in ways.items():
                start = time.monotonic()
                right = num_right(problems, answer)
                report.add(name, str(right), f"{time.monotonic() - start:.0f}")
        finally:
            server.end()
    report.print()


def wait_until_up(server: Program) -> None:
    """Return when the server says so. Raises SystemExit if it ends or says nothing."""
    deadline = time.monotonic() + START_SECONDS
    while not any("Ctrl-C ends it." in line for line in server.lines):
        if not server.is_alive or time.monotonic() > deadline:
            raise SystemExit("\n".join([*server.lines, "The server did not start."]))
        time.sleep(0.5)


if __name__ == "__main__":
    main()
