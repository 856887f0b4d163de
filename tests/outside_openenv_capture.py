"""OpenEnv's checks of what a trainer may learn from, in the environment of ``outside_openenv.txt``.

    python outside_openenv_capture.py probe URL       what its capture proxy finds at an endpoint
    python outside_openenv_capture.py capture URL     a rollout of two calls that the proxy captures there
    python outside_openenv_capture.py check FILE      rollouts that Troupe has recorded

Each prints what was found as JSON. A file has a list of rollouts, each a list of calls with ``prompt_ids``,
``completion_ids`` and ``logprobs``.
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

from openai import OpenAI
from openenv.core.harness.capture import CaptureServer, TurnNode, to_training_trace, validate_llm
from openenv.core.harness.capture.export import export_session
from openenv.core.harness.capture.sessions import Session, SessionRegistry
from openenv.core.harness.capture.validate import check_turn

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]


def model_of(url: str) -> str:
    """The first model that is served, which is the policy."""
    return OpenAI(base_url=f"{url}/v1", api_key="none").models.list().data[0].id


def probe(url: str) -> dict[str, Any]:
    """The level that the endpoint reaches: "tokens" can be trained on."""
    return vars(validate_llm(url, model_of(url)))


def capture(url: str) -> dict[str, Any]:
    """A tool loop through OpenEnv's proxy, and what it would train on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    model = model_of(url)
    server = CaptureServer(llm_url=url, model=model, port=port, max_output_tokens=512)
    server.start()
    try:
        session = server.registry.create()
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=session.session_id, max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "What is 12+34?"}]
        while True:
            answer = client.chat.completions.create(model=model, messages=messages, tools=TOOLS)
            message = answer.choices[0].message
            if not message.tool_calls:
                return found(session)
            messages.append(message)
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "46"})
    finally:
        server.stop()


def check(path: str) -> list[dict[str, Any]]:
    """What OpenEnv says of recorded rollouts, as if its proxy had seen their calls."""
    results = []
    for calls in json.loads(Path(path).read_text()):
        session = SessionRegistry().create()
        for number, call in enumerate(calls):
            prompt, sampled, logprobs = call["prompt_ids"], call["completion_ids"], call["logprobs"]
            report = check_turn(prompt, sampled, logprobs, index=number)
            session.findings += [str(each) for each in report.findings]
            node = TurnNode(f"{number}", prompt, sampled, logprobs, n_tools=1)
            session.graph.add_turn(node)
        results.append(found(session))
    return results


def found(session: Session) -> dict[str, Any]:
    """The verdict, and the tokens of the calls that OpenEnv hands a trainer."""
    document = export_session(session, include_messages=True)
    trace = to_training_trace(session.graph, document)
    return {
        "trainable": document["trainable"],
        "findings": [
            *document["validation"],
            *(each for row in document["sequences"] for each in row["validation"]),
        ],
        "sequences": [[row["input_ids"], row["loss_mask"]] for row in document["sequences"]],
        "num_turns": len(trace.turns),
    }


if __name__ == "__main__":
    print(json.dumps({"probe": probe, "capture": capture, "check": check}[sys.argv[1]](sys.argv[2])))
