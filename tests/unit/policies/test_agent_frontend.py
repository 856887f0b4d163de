"""Trained agents behind OpenAI's chat endpoint: a question in, the last answer of an episode out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from environments.types import Completion, Step, StepEvent, TerminationReason, Trajectory
from policies.agent_api.context import RequestContext, TokenUsage
from policies.agent_api.frontend import AgentFrontend
from policies.model_api.dialects.errors import status_of
from policies.model_api.errors import RequestError
from policies.model_api.protocol import NO_EFFECT, ChatRequest
from policies.sampler import SamplingParams

QUESTION = {"role": "user", "content": "What is 12+34?"}


def completion(text: str, version: int) -> Completion:
    return Completion(
        prompt_ids=(1, 2, 3),
        completion_ids=(4, 5),
        logprobs=(0.0, 0.0),
        text=text,
        finish_reason="stop",
        policy_version=version,
    )


def episode(*texts: str, reason: TerminationReason = TerminationReason.ENV_DONE, **facts: Any) -> Trajectory:
    steps = [
        Step(model_response=text, completion=completion(text, 7 + index)) for index, text in enumerate(texts)
    ]
    return Trajectory(steps=steps, termination_reason=reason, **facts)


class Calculator:
    """Plays one episode, whatever it is asked."""

    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory
        self.asked: list[tuple[str, SamplingParams]] = []

    async def __call__(
        self, message: str, params: SamplingParams, context: RequestContext
    ) -> AsyncGenerator[StepEvent | Trajectory | TokenUsage, None]:
        self.asked.append((message, params))
        last = len(self.trajectory.steps) - 1
        for index, step in enumerate(self.trajectory.steps):
            text, done = step.model_response, index == last
            yield TokenUsage(5)
            yield StepEvent(index=index, text=text, observation=f"to {text}", done=done, policy_version=7)
        yield self.trajectory


def ask(trajectory: Trajectory, **fields: Any) -> tuple[list[dict[str, Any]], Calculator]:
    calculator = Calculator(trajectory)
    frontend = AgentFrontend({"agent/calculator": calculator})
    body = ChatRequest(**{"model": "agent/calculator", "messages": [QUESTION], **fields})

    async def parts() -> list[dict[str, Any]]:
        return [part async for part in frontend.chat(body)]

    return asyncio.run(parts()), calculator


def test_answer_is_last_one_and_counts_tokens_of_all_turns() -> None:
    (answer,), calculator = ask(episode("<tool_call>", "46"), temperature=0, seed=3)
    steps = "<tool_call>\nto <tool_call>\n"
    message = {"role": "assistant", "content": "46", "reasoning_content": steps}
    assert answer["choices"][0]["message"] == message
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 4, "total_tokens": 10}
    assert (answer["policy_version"], answer["num_steps"]) == (7, 2)
    (message, params), *_ = calculator.asked
    assert (message, params.temperature, params.seed) == ("What is 12+34?", 0, 3)


@pytest.mark.parametrize(("given", "temperature"), [({}, 0.3), ({"temperature": 0}, 0)])
async def test_message_without_a_temperature_has_the_servers(
    given: dict[str, float], temperature: float
) -> None:
    calculator = Calculator(episode("46"))
    frontend = AgentFrontend({"agent/calculator": calculator}, temperature=0.3)
    body = ChatRequest(model="agent/calculator", messages=[QUESTION], **given)
    assert [part async for part in frontend.chat(body)]
    ((_, params),) = calculator.asked
    assert params.temperature == temperature


def test_stream_has_each_step_before_the_answer() -> None:
    chunks, _ = ask(episode("<tool_call>", "46"), stream=True)
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["step"] == {"number": 1, "text": "<tool_call>", "observation": "to <tool_call>"}
    assert chunks[0]["choices"][0]["delta"]["reasoning_content"] == "<tool_call>\nto <tool_call>\n"
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == [None, "46", None]


@pytest.mark.parametrize("stream", [False, True])
def test_thought_that_the_answer_does_not_finish_is_reasoning(stream: bool) -> None:
    parts, _ = ask(episode("<think>Is it 46, or"), stream=stream)
    choices = [part["choices"][0] for part in parts]
    said = [choice["delta" if stream else "message"] for choice in choices]
    assert "".join(each.get("content") or "" for each in said) == ""
    assert "".join(each.get("reasoning_content", "") for each in said) == "Is it 46, or"


def test_answer_that_its_own_limit_has_cut_says_so() -> None:
    trajectory = episode("It is 4")
    (step,) = trajectory.steps
    step.completion = replace(step.completion, finish_reason="length")
    (answer,), _ = ask(trajectory)
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_episode_whose_client_goes_away_is_closed() -> None:
    closed = []

    async def endless(
        message: str, params: SamplingParams, context: RequestContext
    ) -> AsyncGenerator[StepEvent | Trajectory, None]:
        try:
            for index in range(9):
                yield StepEvent(index=index, text="<tool_call>", observation="")
        finally:
            closed.append(message)

    body = ChatRequest(model="agent/calculator", messages=[QUESTION], stream=True)
    async with aclosing(AgentFrontend({"agent/calculator": endless}).chat(body)) as chunks:
        await anext(chunks)
    assert closed == ["What is 12+34?"]


def test_stream_has_the_same_answer_and_its_usage() -> None:
    chunks, _ = ask(episode("46"), stream=True, stream_options={"include_usage": True})
    assert [chunk["object"] for chunk in chunks] == ["chat.completion.chunk"] * 3
    assert chunks[0]["choices"][0]["delta"]["content"] == "46"
    assert chunks[1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[2]["usage"]["total_tokens"] == 5


@pytest.mark.parametrize("reason", [TerminationReason.ENV_DONE, TerminationReason.TIMEOUT])
def test_key_is_charged_for_the_tokens_of_all_turns(reason: TerminationReason) -> None:
    charged: list[int] = []
    frontend = AgentFrontend({"agent/calculator": Calculator(episode("<tool_call>", "46", reason=reason))})
    body = ChatRequest(model="agent/calculator", messages=[QUESTION])
    with suppress(RequestError):
        asyncio.run(anext(frontend.chat(body, charged.append)))  # type: ignore[arg-type]
    assert charged == [5, 5]


def test_episode_that_a_limit_has_ended_says_length() -> None:
    (answer,), _ = ask(episode("and so", reason=TerminationReason.MAX_STEPS))
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("trajectory", "status", "words"),
    [
        (
            episode("x", reason=TerminationReason.ENV_ERROR, error="EnvironmentFailure: no dice\n  File"),
            500,
            "no dice$",
        ),
        (episode("x", reason=TerminationReason.TIMEOUT), 504, "time limit"),
        (episode(reason=TerminationReason.PROMPT_TOO_LONG, error="900 tokens"), 400, "900 tokens"),
        (episode(reason=TerminationReason.MAX_STEPS), 500, "no step"),
    ],
)
def test_episode_that_has_failed_is_error_without_traceback(
    trajectory: Trajectory, status: int, words: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        ask(trajectory)
    assert status_of(caught.value) == status


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "add"}}]}, "tools"),
        ({"tool_choice": "none"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": "x"}, "stop"),
        ({"n": 2}, "n"),
        ({"messages": [{"role": "system", "content": "Be brief."}, QUESTION]}, "messages"),
        ({"messages": [QUESTION, {"role": "assistant", "content": "46"}, QUESTION]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "46"}]}, "messages"),
    ],
)
def test_what_the_agent_decides_for_itself_is_rejected_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        ask(episode("46"), **fields)
    assert (status_of(caught.value), caught.value.param) == (400, param)


def test_what_clients_send_by_default_changes_nothing() -> None:
    defaults = {name: values[0] for name, values in NO_EFFECT.items()}
    defaults |= {"store": False, "service_tier": "auto", "logit_bias": {}, "modalities": ["text"]}
    ((answer,), calculator), (plain, other) = ask(episode("46"), **defaults), ask(episode("46"))
    assert answer["choices"] == plain[0]["choices"] and calculator.asked == other.asked


def test_another_agent_is_answered_with_those_that_are_served() -> None:
    with pytest.raises(RequestError, match="'agent/calculator'") as caught:
        ask(episode("46"), model="agent/oracle")
    assert status_of(caught.value) == 404


def test_half_a_character_is_the_clients_fault_or_ignored() -> None:
    with pytest.raises(ValidationError, match="no Unicode at position 1"):
        ask(episode("46"), messages=[{"role": "user", "content": "a\ud83d"}])
    ((answer,), _) = ask(episode("46"), user="a\ud83d")
    assert answer["choices"][0]["message"]["content"] == "46"
