"""A rollout function as a served agent: each message is a task of its own, answered by its last call."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from agent_server import AGENT, AgentServer, agent_server
from kept_recordings import kept_recordings
from test_rollout_function import CALL, TOOL, play

from actors.gateway.client import PolicyClient
from actors.gateway.function import FunctionEnv
from actors.rollouts.rollout import RolloutRequest
from actors.settings import RecordingConfig
from environments.types import Message
from policies.learning.samples import training_samples


async def solve(task: dict[str, Any], client: PolicyClient) -> float:
    """A tool loop, after a plan that its user does not see."""
    plan: list[Any] = [{"role": "system", "content": "Plan."}, {"role": "user", "content": task["question"]}]
    await client.openai.chat.completions.create(model="m", messages=plan)
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    while True:
        answer = await client.openai.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        messages.append(message := answer.choices[0].message)
        if not message.tool_calls:
            return 0.0  # nobody judges it in service
        messages.append({"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "46"})


def replies(messages: list[Message]) -> str:
    if messages[0]["content"] == "Plan.":
        return "I add."
    return "It is 46." if messages[-1]["role"] == "tool" else CALL


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "recordings"


@pytest.fixture
def served(tokenizer_folder: Path, folder: Path) -> Iterator[AgentServer]:
    """The function as an agent, played as a rollout actor plays it."""
    recording = RecordingConfig(folder=str(folder))
    with agent_server(tokenizer_folder, env_class=FunctionEnv, recording=recording) as server:

        def finish(request: RolloutRequest) -> None:
            trajectory = play(solve, replies, task=request.task)
            trajectory.rollout_id = request.rollout_id
            server.service._deliver(trajectory)

        server.service.finish = lambda request: threading.Thread(target=finish, args=(request,)).start()  # type: ignore[method-assign]
        yield server


@pytest.mark.slow
def test_function_answers_a_message_and_is_recorded(served: AgentServer, folder: Path) -> None:
    asked: dict[str, Any] = {"model": AGENT, "input": "What is 12+34?"}
    answer = httpx.post(f"{served.url}/v1/responses", json=asked, timeout=60).json()
    assert answer["output"][-1]["content"][0]["text"] == "It is 46."
    (recording,) = kept_recordings(folder)
    assert recording.answer.answer_id == answer["id"]
    assert [step.model_response for step in recording.trajectory.steps] == ["I add.", CALL, "It is 46."]
    assert len(training_samples(recording.trajectory)) == 2, "the plan, and the tool loop"
    feedback = httpx.post(f"{served.url}/v1/responses/{answer['id']}/feedback", json={"thumb": "up"})
    assert feedback.status_code == 200


@pytest.mark.slow
def test_function_takes_no_second_message(served: AgentServer) -> None:
    said: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "It is 46."}]
    body = {"model": AGENT, "messages": [*said, {"role": "user", "content": "Sure?"}]}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400 and "FunctionEnv" in answer.json()["error"]["message"]
