"""OpenEnv's own checks of our answers and of what the gateway records, in an environment of its own."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_server import agent_server
from outside_packages import environment_with
from test_outside_programs import TemplateSampler, calculating, call_of
from test_rollout_function import TOOL, play

from actors.gateway.client import PolicyClient
from policies.learning.samples import training_samples

pytestmark = pytest.mark.outside

TESTS = Path(__file__).resolve().parents[2]
STRINGS = "[WARN] token_strings"
"""The finding that tokens are named by their texts, as OpenAI has it, and not as vLLM's flag has them."""


def openenv(command: str, about: object) -> Any:
    python = environment_with(TESTS / "outside_openenv.txt") / "python"
    program = [python, TESTS / "outside_openenv_capture.py", command, str(about)]
    done = subprocess.run(list(map(str, program)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def url(tokenizer_folder: Path) -> Iterator[str]:
    replies = [call_of("calculator", expression="12+34"), "46"]
    with agent_server(tokenizer_folder, replies=replies, max_model_tokens=2000) as server:
        yield server.url


def test_proxy_trains_on_two_calls_of_our_server(url: str) -> None:
    """The first that asks, so that the script begins with its call."""
    found = openenv("capture", url)
    assert found["trainable"] and found["num_turns"] == 2
    assert found["findings"] == []
    assert len(found["sequences"]) == 1, "the second call goes on from the tokens of the first"


def test_answers_reach_the_level_of_tokens(url: str) -> None:
    report = openenv("probe", url)
    assert report["capture_level"] == "tokens" and report["ok"]
    assert not report["param_fixes"], "every field that it sends is taken"
    assert [each for each in report["findings"] if not each.startswith((STRINGS, "[WARN] no_tool"))] == []


async def calls_and_then_summarizes(task: dict[str, Any], client: PolicyClient) -> float:
    """A tool loop, which a call with a compacted history follows."""
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    for _ in range(2):
        answer = await client.openai.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        message = answer.choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
    compacted: list[Any] = [{"role": "user", "content": "You had 3. Go on."}]
    await client.openai.chat.completions.create(model="m", messages=compacted, tools=[TOOL])
    return 1.0


def test_recorded_rollout_passes_and_gives_equal_sequences(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Token for token and mask for mask, also where a history was compacted."""
    sampler = TemplateSampler(tokenizer_folder, calculating)
    trajectory = play(calls_and_then_summarizes, sampler=sampler, max_steps=5)
    path = tmp_path / "rollouts.json"
    path.write_text(json.dumps([[call_record(each.completion) for each in trajectory.steps]]))
    (found,) = openenv("check", path)
    assert found["trainable"] and found["num_turns"] == len(trajectory.steps) == 3
    assert not [each for each in found["findings"] if "FATAL" in each]
    ours = [
        [[*each.prompt_ids, *each.response_ids], [0] * each.num_prompt_tokens + list(each.loss_mask)]
        for each in training_samples(trajectory)
    ]
    assert len(ours) == 2 and found["sequences"] == ours


def call_record(completion: Any) -> dict[str, Any]:
    return {
        "prompt_ids": list(completion.prompt_ids),
        "completion_ids": list(completion.completion_ids),
        "logprobs": list(completion.logprobs),
    }
