"""Rollout functions: programs that call the policy over HTTP, played as agents are."""

from __future__ import annotations

import asyncio
import gc
import json
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest

from actors.gateway.calls import ProgramCalls, WaitingCall
from actors.gateway.client import Access, PolicyClient, ProgramLimits, ProgramResult
from actors.gateway.function import FunctionAgent, FunctionEnv, RemoteEnv, RolloutFunction, pair_of
from actors.gateway.remote_program import RemoteProgram
from actors.gateway.server import gateway
from actors.gateway.session_server import SessionServer
from actors.rollouts.journal import AnswersJournal, Journal
from actors.rollouts.player import NODE_ADDRESS
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest, run_rollout
from actors.rollouts.time_limit import TimeLimit
from actors.serving.keys import KEYS_VARIABLE
from environments import Dataset
from environments.base import BaseEnv
from environments.errors import (
    AgentError,
    ConfigError,
    EnvironmentFailure,
    PromptTooLongError,
    SamplerError,
)
from environments.rewards.base import LATER, RewardOutput
from environments.sandbox import local
from environments.types import Completion, Message, TerminationReason, Trajectory
from launch.validation.trial import check_agent
from launch.workload import Workload
from policies.agents.game import GameAgent
from policies.gateway.calls import OF_THE_RUN, REFUSED
from policies.gateway.session import PolicyCall
from policies.learning.samples import training_samples
from policies.model_api.protocol import NO_EFFECT, ChatRequest
from policies.sampler import Sampler, SampleRequest, ScriptedSampler

TASK = {"question": "What is 12+34?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
FUNCTION: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": 34}}\n</tool_call>'


def echo(messages: list[Message]) -> str:
    return f"You said {messages[-1]['content']}"


def play(
    rollout: RolloutFunction | Pair,
    replies: Callable[[list[Message]], str] = echo,
    requests: list[SampleRequest] | None = None,
    sampler: Sampler | None = None,
    task: dict[str, Any] = TASK,
    **limits: Any,
) -> Trajectory:
    """Play a rollout function, or an agent, on ``TASK`` as a rollout actor does, with a scripted model."""
    model = sampler or ScriptedSampler(replies)

    def sample(request: SampleRequest) -> Completion:
        if requests is not None:
            requests.append(request)
        return asyncio.run(model.sample(request))

    pair = rollout if isinstance(rollout, Pair) else pair_of(None, None, rollout, {}, {})
    request = RolloutRequest(rollout_id="a/0", group_id="a", task=task)
    env = pair.make_env(request)
    try:
        return run_rollout(pair.make_agent(), env, sample, request, RolloutLimits(**limits), Journal())
    finally:
        env.close()


def client_with(key: str, serve: Callable[[socket.socket], Callable[[], None]] | None = None) -> PolicyClient:
    serve = serve or gateway().serve
    access = Access(
        url="http://127.0.0.1:8000",
        key=key,
        open_to_others=str,
        idle_seconds=float,
        session="a",
        serve=serve,
    )
    return PolicyClient(access, is_async=False)


async def say(client: PolicyClient, *contents: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": each} for each in contents]
    return await client.openai.chat.completions.create(model="gpt-9", messages=messages, **fields)


def test_reward_that_comes_later_is_known_by_a_copy() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> RewardOutput:
        await say(client, "hi")
        return pickle.loads(pickle.dumps(LATER))  # as a function of __main__ brings it

    assert play(solve).termination_reason is TerminationReason.JUDGED_LATER


def test_reward_of_a_function_ends_its_episode() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        response = await say(client, task["question"])
        return 0.5 * (response.choices[0].message.content == f"You said {task['question']}")

    trajectory = play(solve)
    assert trajectory.termination_reason is TerminationReason.ENV_DONE
    assert (trajectory.reward, trajectory.is_correct, len(trajectory.steps)) == (0.5, None, 1)
    assert trajectory.metrics == {
        "policy_calls": 1.0,
        "branches": 0.0,
        "foreign_answers": 0.0,
        "unseen_answers": 0.0,
    }
    assert trajectory.steps[0].observation == [{"role": "user", "content": TASK["question"]}]


def test_plain_function_and_its_verdict_are_taken() -> None:
    def solve(task: dict[str, Any], client: PolicyClient) -> RewardOutput:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        client.openai.chat.completions.create(model="m", messages=messages)
        return RewardOutput(-1.0, is_correct=True)

    trajectory = play(solve)
    assert (trajectory.reward, trajectory.is_correct, trajectory.by_reward_function) == (-1.0, True, True)


def test_object_with_a_coroutine_call_gets_asynchronous_clients() -> None:
    class Solver:
        async def __call__(self, task: dict[str, Any], client: PolicyClient) -> float:
            return float((await say(client, "a")).choices[0].message.content == "You said a")

    assert play(Solver()).reward == 1.0


@pytest.mark.slow
def test_function_that_reaches_its_limit_without_a_call_fails() -> None:
    """Its rollout is played again, and is no example of a low reward."""

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        await asyncio.sleep(60)
        return 0.0

    limit = TimeLimit()
    with pytest.raises(EnvironmentFailure, match="solve has made no call of the policy"), limit.of(0.5):
        play(solve)


def test_tool_loop_is_one_sequence_of_the_models_own_tokens() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        for _ in range(3):
            response = await client.openai.chat.completions.create(
                model=client.model, messages=messages, tools=[TOOL]
            )
            message = response.choices[0].message
            if not message.tool_calls:
                break
            assert response.choices[0].finish_reason == "tool_calls"
            # As some frameworks do: the JSON written anew, without the thought.
            arguments = json.dumps(json.loads(message.tool_calls[0].function.arguments), indent=2)
            call = {"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}
            messages.append({"role": "assistant", "content": "  ", "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": "x", "content": "46"})
        return float(message.content == "It is 46.")

    def replies(messages: list[Message]) -> str:
        return "It is 46." if messages[-1]["role"] == "tool" else f"<think>Add.</think>\n{CALL}"

    requests: list[SampleRequest] = []
    trajectory = play(solve, replies, requests)
    assert trajectory.reward == 1.0
    (sample,) = training_samples(trajectory)
    assert sample.num_sampled_tokens == sum(len(step.model_response) + 1 for step in trajectory.steps)
    assert requests[1].messages[1] == {"role": "assistant", "content": f"<think>Add.</think>\n{CALL}"}
    assert requests[1].tools == [TOOL]
    assert [step.info["follows"] for step in trajectory.steps] == [None, 0]
    assert [step.info["restored_answers"] for step in trajectory.steps] == [0, 1]
    assert trajectory.metrics["foreign_answers"] == 0


def test_program_that_takes_one_tool_call_gets_the_first() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        first = await client.openai.chat.completions.create(
            model="m", messages=messages, tools=[TOOL], parallel_tool_calls=False
        )
        (call,) = first.choices[0].message.tool_calls
        messages += [first.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "46"}]
        await client.openai.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        return float(json.loads(call.function.arguments) == {"a": 12, "b": 34})

    requests: list[SampleRequest] = []
    both = f"{CALL}\n{CALL.replace('12', '5')}"
    trajectory = play(solve, lambda messages: both if len(messages) == 1 else "46", requests)
    assert (trajectory.reward, trajectory.steps[1].info["follows"]) == (1.0, 0)
    assert requests[1].messages[1]["content"] == both, "the policy sees all that it has sampled"


@pytest.mark.parametrize(("thought", "num_foreign"), [("Add.", 0), ("Subtract.", 1)])
def test_thought_that_comes_back_within_the_text_is_matched(thought: str, num_foreign: int) -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        first = await client.openai.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        (call,) = first.choices[0].message.tool_calls
        content = f"<think>\n{thought}\n</think>"
        messages.append({"role": "assistant", "content": content, "tool_calls": [call.model_dump()]})
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "46"})
        await client.openai.chat.completions.create(model="m", messages=messages, tools=[TOOL])
        return 1.0

    trajectory = play(solve, adding)
    assert trajectory.metrics["foreign_answers"] == num_foreign
    assert len(training_samples(trajectory)) == 1 + num_foreign


def test_answer_begins_without_the_space_after_its_thought() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        message = (await say(client, "a")).choices[0].message
        return float((message.reasoning_content, message.content) == ("Add.", "46\n"))

    assert play(solve, lambda messages: "<think>\nAdd.\n</think>\n\n46\n").reward == 1.0


@pytest.mark.slow
def test_journal_of_a_program_holds_what_its_calls_share_once() -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "a" * 50_000}}

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        messages: list[Any] = [{"role": "system", "content": "b" * 50_000}, {"role": "user", "content": "a"}]
        for _ in range(3):
            response = await client.openai.chat.completions.create(model="m", messages=messages, tools=[tool])
            messages += [response.choices[0].message, {"role": "user", "content": "b"}]
        return 1.0

    class Rollout(RemoteProgram):
        __call__ = staticmethod(solve)  # type: ignore[assignment]

    env, model = RemoteEnv(Rollout("", "a key", silent_seconds=9), TASK), ScriptedSampler(echo)
    request = RolloutRequest(rollout_id="a/0", group_id="a", task=TASK)
    try:
        run_rollout(
            FunctionAgent(),
            env,
            lambda request: asyncio.run(model.sample(request)),
            request,
            RolloutLimits(),
            AnswersJournal(),
        )
    finally:
        env.close()
    entries = env._calls.entries
    assert len(entries) == 3 and sum(map(len, entries[1:])) < 10_000 < 100_000 < len(entries[0])


def test_conversations_side_by_side_are_sequences_of_their_own() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        async def agent(name: str) -> str:
            messages: list[Any] = [{"role": "system", "content": name}]
            for number in range(3):
                messages.append({"role": "user", "content": f"{name} {number}"})
                response = await client.openai.chat.completions.create(model="m", messages=messages)
                messages.append(response.choices[0].message)
            return str(messages[-1].content)

        answers = await asyncio.gather(agent("one"), agent("two"), agent("three"))
        return float(answers == [f"You said {name} 2" for name in ("one", "two", "three")])

    trajectory = play(solve, max_steps=20)
    assert trajectory.reward == 1.0
    samples = training_samples(trajectory)
    assert len(samples) == 3
    assert all(len({turn for turn in sample.turns if turn >= 0}) == 3 for sample in samples)
    assert sum(sample.num_sampled_tokens for sample in samples) == trajectory.num_sampled_tokens


def test_messages_that_the_model_never_wrote_are_context_only() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        messages: list[Any] = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "I am somebody else."},
            {"role": "user", "content": "go on"},
        ]
        await client.openai.chat.completions.create(model="m", messages=messages)
        return 1.0

    trajectory = play(solve)
    assert trajectory.metrics["foreign_answers"] == 1
    (sample,) = training_samples(trajectory)
    assert sample.num_sampled_tokens == len("You said go on") + 1


def test_limit_of_a_call_is_its_own_and_the_runs() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        short = await say(client, "a" * 50, max_tokens=5, temperature=0.1, stop=["x"], user="me")
        assert short.choices[0].finish_reason == "length"
        await say(client, "b", max_completion_tokens=10_000)
        return 1.0

    requests: list[SampleRequest] = []
    trajectory = play(solve, requests=requests, max_turn_tokens=30)
    assert [request.params.max_tokens for request in requests] == [5, 30]
    assert [request.params.stop for request in requests] == [("x",), ()]
    assert [request.params.temperature for request in requests] == [1.0, 1.0]
    assert trajectory.steps[0].info["overruled"] == ["temperature"]
    assert trajectory.steps[0].info["dropped"] == ["user"]


def test_record_names_what_each_dialect_has_dropped() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        await say(client, "a", user="me", temperature=0.5)
        await client.openai.responses.create(model="m", input="b", truncation="auto", top_p=0.5)
        user: Any = {"role": "user", "content": "c"}
        await client.anthropic.messages.create(
            model="m", max_tokens=9, messages=[user], metadata={"user_id": "me"}, extra_body={"top_k": 3}
        )
        return 1.0

    found = [step.info for step in play(solve).steps]
    assert [each["dropped"] for each in found] == [["user"], ["truncation"], ["metadata"]]
    assert [each["overruled"] for each in found] == [["temperature"], ["top_p"], ["top_k"]]


def test_answer_ends_before_its_stop_string() -> None:
    """As that of a policy in service; its tokens keep the string, and the next prompt has them."""

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        first = await client.openai.chat.completions.create(model="m", messages=messages, stop=["See:", "x"])
        messages += [first.choices[0].message, {"role": "user", "content": "b"}]
        await client.openai.chat.completions.create(model="m", messages=messages)
        async with client.anthropic.messages.stream(
            model="m", max_tokens=99, messages=messages[:1], stop_sequences=["See:"]
        ) as stream:
            second = await stream.get_final_message()
        assert first.choices[0].message.content == second.content[0].text == "I add. "
        assert (second.stop_reason, second.stop_sequence) == ("stop_sequence", "See:")
        return 1.0

    requests: list[SampleRequest] = []
    trajectory = play(solve, lambda messages: "I add. See:\n", requests)
    assert trajectory.steps[1].info["follows"] == 0
    assert requests[1].messages[1]["content"] == "I add. See:\n"


@pytest.mark.parametrize("field", [{"max_tokens": 0}, {"max_completion_tokens": -1}, {"stop": [""]}])
def test_limit_that_nothing_meets_is_an_error_of_its_call(field: dict[str, Any]) -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        with pytest.raises(openai.BadRequestError, match=r"max_tokens=|stop="):
            await say(client, "a", **field)
        await say(client, "a")
        return 1.0

    assert play(solve).reward == 1.0


def test_message_that_openais_stream_has_collected_comes_back() -> None:
    strict: Any = {**TOOL, "function": {**TOOL["function"], "strict": True}}

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        async with client.openai.chat.completions.stream(
            model="m", messages=messages, tools=[strict]
        ) as stream:
            message = (await stream.get_final_completion()).choices[0].message
        messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "46"}]
        await client.openai.chat.completions.create(model="m", messages=messages, tools=[strict])
        async with client.openai.responses.stream(model="m", input="b", tools=[FUNCTION]) as events:
            items = (await events.get_final_response()).output
        result = {"type": "function_call_output", "call_id": items[-1].call_id, "output": "46"}
        history = [{"role": "user", "content": "b"}, *items, result]
        await client.openai.responses.create(model="m", input=history, tools=[FUNCTION])
        return 1.0

    requests: list[SampleRequest] = []
    trajectory = play(solve, lambda messages: f"<think>Add.</think>\nLet me.\n{CALL}", requests)
    assert [step.info["follows"] for step in trajectory.steps] == [None, 0, None, 2]
    assert trajectory.metrics["foreign_answers"] == 0


def test_several_choices_are_branches_of_one_prompt() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        response = await say(client, "a", n=3)
        assert [choice.index for choice in response.choices] == [0, 1, 2]
        one = len("You said a") + 1
        assert response.usage.completion_tokens == 3 * one
        assert response.usage.total_tokens == 3 * one + len("user\na") + 1 + len("assistant\n")
        return 1.0

    trajectory = play(solve)
    assert [step.info["branch"] for step in trajectory.steps] == ["", "asked again", "asked again"]


def test_stream_has_the_same_answer() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        stream = await say(client, "a", stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.completion_tokens == len("You said a") + 1
        deltas = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
        return float("".join(deltas) == "You said a")

    assert play(solve).reward == 1.0


def test_stream_has_all_choices() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        texts = ["", ""]
        async for chunk in await say(client, "a", stream=True, n=2):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        return float(texts == ["You said a"] * 2)

    assert play(solve).reward == 1.0


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}},
            "response_format",
        ),
        ({"logprobs": True}, "logprobs"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"extra_body": {"policy_version": 0}}, "policy_version"),
    ],
)
def test_field_that_a_rollout_cannot_honour_is_named(fields: dict[str, Any], name: str) -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        with pytest.raises(openai.BadRequestError, match=name) as caught:
            await say(client, "a", **fields)
        assert caught.value.param == name
        await say(client, "a", extra_body={name: values[0] for name, values in NO_EFFECT.items()})
        return 1.0

    assert play(solve).reward == 1.0


def test_fields_of_a_call_are_honoured_refused_or_dropped() -> None:
    honoured = {
        *("messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "stop", "n"),
        *("max_tokens", "max_completion_tokens", "cap_max_tokens", "stream", "stream_options"),
    }
    dropped = {
        *("metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier"),
        *("store", "user"),
    }
    of_one_value = {"model", "add_generation_prompt", "logit_bias", "modalities", "top_logprobs", "verbosity"}
    ignored = {"return_token_ids"}  # the dialect of Anthropic's messages has set it itself
    decided = honoured | dropped | of_one_value | ignored | {*OF_THE_RUN, *REFUSED}
    assert decided == set(ChatRequest.model_fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required", "tools": [TOOL]},
        {"tool_choice": {"type": "function", "function": {"name": "add"}}, "tools": [TOOL]},
        {"response_format": {"type": "json_object"}},
        {"reasoning_effort": "high"},
    ],
    ids=["any tool", "one tool", "json", "effort"],
)
def test_field_that_frameworks_always_send_is_overruled(fields: dict[str, Any]) -> None:
    """The model writes what it will, and the record names the field."""

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        response = await say(client, "a", **fields)
        return float(response.choices[0].message.content == "You said a")

    trajectory = play(solve)
    assert (trajectory.reward, trajectory.steps[0].info["overruled"]) == (1.0, [next(iter(fields))])


def test_step_limit_leaves_the_function_its_reward() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        for number in range(9):
            try:
                await say(client, str(number))
            except openai.BadRequestError as error:
                assert error.code == "rollout_ended"
                return 0.25
        return 1.0

    trajectory = play(solve, max_steps=2)
    assert trajectory.termination_reason is TerminationReason.MAX_STEPS
    assert (trajectory.reward, len(trajectory.steps)) == (0.25, 2)


def test_token_limit_is_one_for_all_conversations_of_a_function() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        for number in range(9):
            try:
                await say(client, f"conversation {number}")
            except openai.BadRequestError:
                return 0.25
        return 1.0

    trajectory = play(solve, max_steps=20, max_response_tokens=60)
    assert trajectory.termination_reason is TerminationReason.RESPONSE_BUDGET_SPENT
    assert (trajectory.reward, len(trajectory.steps)) == (0.25, 3)
    assert trajectory.num_sampled_tokens <= 60


def test_function_ends_whose_rollout_is_interrupted_at_an_answer() -> None:
    """A time limit comes between any two instructions."""

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        for _ in range(2):
            await say(client, "a")
        return 1.0

    env = FunctionEnv(solve, TASK)
    env.reset()
    assert env._waiting is not None and env._program is not None
    answer = env._waiting.answer
    answer.add_done_callback(lambda _: signal.raise_signal(signal.SIGINT))
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    action = {"text": "b", "tool_calls": [], "finish_reason": "stop", "usage": usage, "policy_version": 0}
    with pytest.raises(KeyboardInterrupt):
        env.step({**action, "branch": ""})
    assert answer.done()
    env.close()
    assert not env._program._thread.is_alive()


def test_function_that_minds_no_limit_gets_no_reward() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        for number in range(9):
            await say(client, str(number))
        return 1.0

    trajectory = play(solve, max_steps=2)
    assert (trajectory.termination_reason, trajectory.reward) == (TerminationReason.MAX_STEPS, 0.0)


async def raising(task: dict[str, Any], client: PolicyClient) -> float:
    await say(client, "a")
    raise LookupError("no such file")


async def silent(task: dict[str, Any], client: PolicyClient) -> float:
    return 1.0


async def wordy(task: dict[str, Any], client: PolicyClient) -> Any:
    await say(client, "a")
    return "very good"


async def huge(task: dict[str, Any], client: PolicyClient) -> Any:
    await say(client, "a", n=2)
    return [1e300, -1e300]


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (raising, "raising raised LookupError.'no such file'"),
        (silent, "silent has returned without a call of the policy"),
        (wordy, "wordy returned 'very good': return the reward"),
        (huge, r"huge returned \[1e\+300, -1e\+300\]: return the reward: a finite number"),
    ],
)
def test_faults_of_a_function_are_named(rollout: RolloutFunction, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        play(rollout)


def test_reward_that_is_not_finite_is_named() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        await say(client, "a")
        return float("nan")

    with pytest.raises(EnvironmentFailure, match="finite"):
        play(solve)


def test_key_opens_no_other_rollout() -> None:
    clients: list[PolicyClient] = []

    async def first(task: dict[str, Any], client: PolicyClient) -> float:
        clients.append(client)
        await say(client, "a")
        return 1.0

    async def second(task: dict[str, Any], client: PolicyClient) -> float:
        with pytest.raises(openai.AuthenticationError, match="opens no rollout"):
            await openai.AsyncOpenAI(base_url=client.base_url, api_key=clients[0].api_key).models.list()
        await say(client, "a")
        return 1.0

    play(first)
    assert play(second).reward == 1.0


def test_calls_of_an_ended_rollout_leave_no_garbage() -> None:
    """They hold all messages of a conversation: memory would grow until garbage is sought."""

    def solve(task: dict[str, Any], client: PolicyClient) -> float:
        for _ in range(2):
            client.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
        return 1.0

    gc.collect()
    gc.disable()
    try:
        assert play(solve).reward == 1.0
        deadline = time.monotonic() + 10  # the gateway's thread ends its last answer by itself
        while left := [type(each) for each in gc.get_objects() if type(each) in (WaitingCall, ProgramCalls)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
    finally:
        gc.enable()


def test_gateway_freezes_what_a_rollout_actor_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook plays a step of the first task itself, and its garbage may be large."""
    for is_actor in (False, True):
        gateway.cache_clear()
        gc.unfreeze()
        monkeypatch.delenv(NODE_ADDRESS, raising=False)
        if is_actor:
            monkeypatch.setenv(NODE_ADDRESS, "127.0.0.1")
        gateway()
        assert bool(gc.get_freeze_count()) == is_actor
    gc.unfreeze()


@pytest.mark.slow
def test_call_whose_connection_was_lost_is_played_once() -> None:
    import httpx

    begun, gone = threading.Event(), threading.Event()

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
        headers = {"Authorization": f"Bearer {client.api_key}"}
        async with httpx.AsyncClient(base_url=client.base_url, headers=headers, timeout=60) as http:
            lost = asyncio.create_task(http.post("/chat/completions", json=body))
            await asyncio.to_thread(begun.wait)
            lost.cancel()
            await asyncio.sleep(0.3)
            gone.set()
            again = await http.post("/chat/completions", json=body)
        return float(again.json()["choices"][0]["message"]["content"] == "You said a")

    def slow(messages: list[Message]) -> str:
        begun.set()
        gone.wait(30)
        return echo(messages)

    trajectory = play(solve, slow)
    assert (trajectory.reward, len(trajectory.steps)) == (1.0, 1)


async def message_of_http(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = re.findall(rb"content-length: (\d+)", head, re.IGNORECASE)
    return head + await reader.readexactly(int(length))


@pytest.mark.slow
@pytest.mark.parametrize("num_choices", [1, 2])
def test_retry_of_an_answer_that_broke_off_is_played_once(num_choices: int) -> None:
    """OpenAI's client sends a request again, by itself, when the end of an answer does not come."""
    num_sent: list[int] = []

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        gateway_port = int(client.base_url.removesuffix("/v1").rpartition(":")[2])

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            onward_reader, onward = await asyncio.open_connection("127.0.0.1", gateway_port)
            onward.write(await message_of_http(reader))
            answer = await message_of_http(onward_reader)
            num_sent.append(len(answer))
            writer.write(answer[:-9] if len(num_sent) == 1 else answer)
            for each in (writer, onward):
                each.close()

        async with await asyncio.start_server(forward, "127.0.0.1", 0) as proxy:
            url = f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key=client.api_key, max_retries=2) as retrying:
                asked: Any = [{"role": "user", "content": "a"}]
                answer = await retrying.chat.completions.create(model="m", messages=asked, n=num_choices)
        texts = [each.message.content for each in answer.choices]
        await say(client, "a", n=num_choices)  # no retry: the same is asked again
        return float(texts == [f"{number}" for number in range(num_choices)])

    numbers = count()
    trajectory = play(solve, lambda messages: str(next(numbers)), max_steps=9)
    assert (trajectory.reward, len(num_sent), len(trajectory.steps)) == (1.0, 2, 2 * num_choices)
    assert trajectory.metrics["unseen_answers"] == 0
    assert len(training_samples(trajectory)) == 2 * num_choices


def test_request_with_false_in_the_place_of_0_is_no_retry() -> None:
    def asked(value: object) -> PolicyCall:
        return PolicyCall([{"role": "tool", "content": "", "result": value}])

    calls = ProgramCalls()
    first = calls.begin(asked(0), 1, 0)
    first.calls.append(calls.take(asked(0)))
    calls.abandon(first)
    assert calls.begin(asked(False), 1, 0).calls == []
    assert len(calls.begin(asked(0), 1, 0).calls) == 1


def test_retry_gets_an_answer_that_no_other_request_has_had() -> None:
    calls = ProgramCalls()
    asked = PolicyCall([{"role": "user", "content": "a"}])

    def answered(retries: int = 0, num_choices: int = 1) -> list[WaitingCall]:
        sent = calls.begin(asked, num_choices, retries)
        if not sent.calls:
            sent.calls.extend(calls.take(asked) for _ in range(num_choices))
        calls.remember(sent)
        return sent.calls

    one, other = answered(), answered()
    assert one[0] is not other[0], "no retry: the same is asked again"
    retried = answered(retries=1), answered(retries=1)  # of two equal requests, side by side
    assert retried == (other, one)
    assert answered(retries=2) == one, "a retry is lost too"
    assert answered(retries=2) == other
    assert answered(retries=2) not in (one, other), "both have come back, so this one is new"
    assert answered(retries=1, num_choices=2)[0] not in (*one, *other), "of as many choices only"

    lost = calls.begin(asked, 1, try_number=0)
    lost.calls.append(calls.take(asked))
    calls.abandon(lost)
    again = calls.begin(asked, 1, try_number=1)
    assert again.calls == lost.calls, "the one whose client has gone is it"
    assert calls.unseen() == [] and calls.take(asked) not in (*lost.calls, *one, *other)
    assert calls.begin(asked, 1, try_number=1).calls == [], "the same number is another request"
    assert calls.begin(asked, 1, try_number=2).calls == lost.calls, "before its loss is noticed"
    calls.abandon(again)
    assert calls.unseen() == [], "it has come back already"


def test_close_ends_a_coroutine_that_waits() -> None:
    ended = threading.Event()

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        call = asyncio.create_task(say(client, "a"))
        try:
            await asyncio.sleep(20)
        finally:
            ended.set()
            await asyncio.gather(call, return_exceptions=True)
        return 1.0

    pair = pair_of(None, None, solve, {}, {})
    env = pair.make_env(RolloutRequest(rollout_id="a/0", group_id="a", task=TASK))
    env.reset()
    started = time.monotonic()
    env.close()
    assert ended.is_set()
    assert time.monotonic() - started < 10


PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": open("task.txt").read()}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer)
print(sorted(os.listdir()), os.environ["HOME"] == os.getcwd(), "SECRET" in os.environ)
"""


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "open"])
def test_program_finds_the_policy_and_its_files(monkeypatch: pytest.MonkeyPatch, isolated: bool) -> None:
    monkeypatch.setenv("SECRET", "1")
    results: list[ProgramResult] = []

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        command = [sys.executable, "-c", PROGRAM]
        files = {"task.txt": task["question"]}
        result = await asyncio.to_thread(
            client.run, command, files=files, collect=["answer.txt", "none"], isolated=isolated
        )
        results.append(result)
        return float(result.files["answer.txt"].decode() == f"You said {task['question']}")

    assert play(solve).reward == 1.0
    (result,) = results
    assert (result.exit_code, result.limit) == (0, "")
    assert result.output == "['answer.txt', 'task.txt'] True False\n"
    assert result.files.keys() == {"answer.txt"}


ATTACKS = """
import ctypes, json, os, socket, subprocess, sys, urllib.error, urllib.request
given = json.loads(sys.argv[1])

def attempt(name, attack):
    try:
        found[name] = attack()
    except (OSError, subprocess.SubprocessError) as error:
        found[name] = type(error).__name__

def post(url):
    headers = {"Authorization": "Bearer " + given["run_key"], "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, b'{"reward": 1}', headers), timeout=5).status

def connect(address):
    family = socket.AF_INET if isinstance(address, list) else socket.AF_UNIX
    socket.socket(family).connect(tuple(address) if isinstance(address, list) else address)

def descriptors():
    return [fd for fd in os.listdir("/proc/self/fd") if int(fd) > 2 and os.path.exists(f"/proc/self/fd/{fd}")]

found = {}
attempt("another port", lambda: connect(given["other"]))
attempt("socket in a file", lambda: connect(given["socket"]))
attempt("socket without a file", lambda: connect("\\0" + given["abstract"]))
attempt("reward", lambda: post(given["reward"]))
attempt("reward by the gateway", lambda: post(given["gateway"] + "/sessions/any/reward"))
attempt("secret", lambda: open(given["secret"]).read())
attempt("secret outside the root", lambda: open("/proc/1/root" + given["secret"]).read())
attempt("machine", lambda: socket.socket(socket.AF_VSOCK))
attempt("ring", lambda: ctypes.CDLL(None).syscall(425, 1, ctypes.create_string_buffer(120)))
attempt("system", lambda: open("/usr/bin/own", "w"))
mount = ["mount", "-t", "tmpfs", "x", "/bin"]
attempt("mount", lambda: subprocess.run(mount, check=True, capture_output=True))
attempt("processes", lambda: sorted(filter(str.isdecimal, os.listdir("/proc"))))
attempt("descriptors", descriptors)
attempt("stdin", lambda: os.readlink("/proc/self/fd/0"))
attempt("first process", lambda: os.kill(1, 9))
attempt("network", lambda: sorted(os.listdir("/proc/self/net/dev_snmp6")))
os.symlink(given["secret"], "answer.txt")
os.symlink("/etc", "outside")
os.symlink("circle", "circle")
print(json.dumps(found))
"""


@pytest.mark.slow
def test_isolated_program_reaches_nothing_but_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEYS_VARIABLE, "programs:long-key-of-the-run")
    secret = tmp_path / "secret.txt"
    secret.write_text("of the user")
    abstract = f"troupe-{time.monotonic_ns()}"
    results: list[ProgramResult] = []
    with (
        socket.create_server(("127.0.0.1", 0)) as other,
        socket.socket(socket.AF_UNIX) as file,
        socket.socket(socket.AF_UNIX) as nameless,
    ):
        file.bind(str(tmp_path / "socket"))
        nameless.bind(f"\0{abstract}")
        for each in (file, nameless):
            each.listen()
        rewards = SessionServer(port=0)

        def solve(task: dict[str, Any], client: PolicyClient) -> float:
            client.openai.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
            given = {
                "other": other.getsockname(),
                "socket": str(tmp_path / "socket"),
                "abstract": abstract,
                "reward": f"{rewards.url}/sessions/any/reward",
                "gateway": client.base_url,
                "run_key": "long-key-of-the-run",
                "secret": str(secret),
            }
            command = [sys.executable, "-c", ATTACKS, json.dumps(given)]
            collect = ["answer.txt", "outside/passwd", "../../etc/passwd", "circle"]
            results.append(client.run(command, collect=collect, isolated=True))
            return 1.0

        play(solve)
        rewards.close()
    (result,) = results
    assert json.loads(result.output) == {
        "another port": "ConnectionRefusedError",
        "socket in a file": "FileNotFoundError",
        "socket without a file": "ConnectionRefusedError",
        "reward": "URLError",
        "reward by the gateway": "HTTPError",
        "secret": "FileNotFoundError",
        "secret outside the root": "PermissionError",
        "machine": "PermissionError",
        "ring": -1,
        "system": "OSError",
        "mount": "CalledProcessError",
        "processes": ["1", "2"],
        "descriptors": [],
        "stdin": "/dev/null",
        "first process": None,
        "network": ["lo"],
    }
    assert result.files == {}
    assert secret.read_text() == "of the user"


def test_listener_of_an_isolated_program_goes_to_no_other() -> None:
    listeners: list[socket.socket] = []
    inheritable: list[bool] = []

    def serve(listener: socket.socket) -> Callable[[], None]:
        listeners.append(listener)
        inheritable.append(listener.get_inheritable())
        return gateway().serve(listener)

    client = client_with("key", serve)
    assert client.run(["true"], isolated=True).exit_code == 0
    assert inheritable == [False]
    assert listeners[0].fileno() == -1, "it has ended with its program"


@pytest.mark.slow
def test_isolated_program_ends_with_its_own_exit_code() -> None:
    client = client_with("key")
    assert client.run(["bash", "-c", "exit 7"], isolated=True).exit_code == 7
    for number in (signal.SIGTERM, signal.SIGKILL):
        assert client.run(["bash", "-c", f"kill -{number} $$"], isolated=True).exit_code == -number


@pytest.mark.slow
def test_isolated_program_sees_what_is_named(tmp_path: Path) -> None:
    own = tmp_path / "bin" / "own-agent"
    own.parent.mkdir()
    own.write_text("#!/bin/bash\necho seen; touch $(dirname $0)/new\n")
    own.chmod(0o755)
    client = client_with("key")
    with pytest.raises(AgentError, match=f"does not see {own}: add the folder"):
        client.run([str(own)], isolated=True)
    result = client.run([str(own)], isolated=True, visible=[str(tmp_path)])
    assert result.output.startswith("seen\n") and "Read-only file system" in result.output
    around = tmp_path / "around"
    around.symlink_to(tempfile.gettempdir())
    for wrong in ("bin", "/no/such", tempfile.gettempdir(), "/", str(around)):
        with pytest.raises(AgentError, match=f"'{wrong}': name absolute paths"):
            client.run(["true"], isolated=True, visible=[wrong])
    with pytest.raises(AgentError, match="has no effect"):
        client.run([str(own)], visible=[str(tmp_path)])


def test_machine_that_isolates_no_program_is_named_by_the_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    denying = tmp_path / "child.py"
    text = Path(local.child.__file__).read_text()
    denying.write_text(text.replace("CLONE_NEWUSER |", "1 |"))
    monkeypatch.setattr(local, "_CHILD", denying)

    def solve(task: dict[str, Any], client: PolicyClient) -> float:
        return float(client.run(["true"], isolated=True).exit_code == 0)

    tasks = Dataset([TASK])
    with pytest.raises(ConfigError, match=r"no user namespaces .* Allow them: .* without: isolated=False"):
        check_agent(Workload(rollout=solve, train_dataset=tasks), tasks)


def processes_with(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdecimal() and mark.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


SLEEP = "import time; time.sleep(600)"


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "open"])
@pytest.mark.parametrize(
    ("code", "limits", "limit"),
    [
        (SLEEP, ProgramLimits(seconds=1.0), "1 s"),
        (f"a = bytearray(300 << 20)\n{SLEEP}", ProgramLimits(memory_bytes=200 << 20), "memory"),
        (
            f"for name in 'ab': open(name, 'wb').write(bytes(9 << 20))\n{SLEEP}",
            ProgramLimits(file_bytes=10 << 20),
            "file",
        ),
        (f"import os\nfor _ in range(5): os.fork()\n{SLEEP}", ProgramLimits(num_threads=20), "num_threads"),
    ],
    ids=["time", "memory", "files", "children"],
)
def test_limits_of_a_program_end_it(code: str, limits: ProgramLimits, limit: str, isolated: bool) -> None:
    client = client_with("key")
    result = client.run([sys.executable, "-c", code], limits=limits, isolated=isolated)
    assert result.limit.startswith(limit)
    assert result.exit_code == -9


@pytest.mark.slow
@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "open"])
def test_processes_that_a_program_leaves_end_with_it(isolated: bool) -> None:
    mark = f"mark-{time.monotonic_ns()}"
    code = (
        "import subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', {mark!r}],"
        " start_new_session=True)"
    )
    client = client_with(mark)
    assert client.run([sys.executable, "-c", code], isolated=isolated).exit_code == 0
    assert processes_with(mark) == []


def test_program_that_does_not_exist_is_named() -> None:
    client = client_with("key")
    with pytest.raises(AgentError, match="no-such-agent"):
        client.run(["no-such-agent"])


class Game(BaseEnv):
    """An environment for the checks of arguments."""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((GameAgent, Game, silent), "an env_class, or a rollout function alone"),
        ((GameAgent, None, None), "env_class=None, rollout=None"),
        ((None, None, None), "agent_class=None"),
        ((None, None, "solve"), "rollout='solve' is no function"),
        ((None, None, lambda task: 1.0), "called with a task and a client"),
    ],
)
def test_arguments_that_do_not_fit_are_named(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        pair_of(*arguments, {}, {})


def test_trial_plays_a_function_before_any_model_is_loaded() -> None:
    tasks = Dataset([TASK])
    workload = Workload(rollout=silent, train_dataset=tasks)
    assert isinstance(workload.pair, Pair)
    with pytest.raises(AgentError, match="without a call of the policy"):
        check_agent(workload, tasks)


def test_gateway_says_what_it_has() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        import httpx

        async with httpx.AsyncClient(headers={"x-api-key": client.api_key}) as http:
            models = await http.get(f"{client.base_url}/models")
            assert [each["id"] for each in models.json()["data"]] == ["policy"]
            nothing = await http.post(f"{client.base_url}/embeddings", json={})
            assert nothing.status_code == 404
            assert "/v1/chat/completions" in nothing.json()["error"]["message"]
            broken = await http.post(f"{client.base_url}/chat/completions", content="{")
            assert broken.status_code == 400
        await say(client, "a")
        return 1.0

    assert play(solve).reward == 1.0


def test_calls_have_rewards_of_their_own() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> list[float]:
        for number in range(3):
            await say(client, str(number))
        return [0.25, 0.0, -1.0]

    trajectory = play(solve)
    assert [step.reward for step in trajectory.steps] == [0.25, 0.0, -1.0]
    assert trajectory.reward == -0.75


def test_sub_agent_is_left_out_or_has_a_reward_of_its_own() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> list[float | None]:
        await say(client, "lead")
        await say(client, "helper one")
        await say(client, "helper two")
        return [0.5, None, -1]

    trajectory = play(solve)
    assert trajectory.reward == -0.5
    first, third = training_samples(trajectory)
    assert [set(each.turns) for each in (first, third)] == [{0}, {2}]
    assert (first.rewards[-1], third.rewards[-1]) == (0.5, -1.0)


def test_answer_that_is_left_out_stays_as_context() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> list[float | None]:
        messages: list[Any] = []
        for _ in range(3):
            messages.append({"role": "user", "content": "go on"})
            answer = await client.openai.chat.completions.create(model="m", messages=messages)
            messages.append(answer.choices[0].message)
        return [0, None, 1]

    (sample,) = training_samples(trajectory := play(solve))
    assert set(sample.turns) == {0, -1, 2}
    last = trajectory.completions[2]
    assert sample.prompt_ids + sample.response_ids == last.prompt_ids + last.completion_ids


def test_rewards_that_leave_all_out_are_named() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> list[None]:
        await say(client, "a")
        return [None]

    with pytest.raises(AgentError, match="solve leaves all calls out"):
        play(solve)


def test_rewards_that_are_too_few_are_named() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> list[float]:
        await say(client, "a")
        await say(client, "b")
        return [1.0]

    with pytest.raises(AgentError, match="1 rewards after 2 calls"):
        play(solve)


OWNER = """
import sys, threading
from actors.gateway.calls import ProgramCalls, WaitingCall
from actors.gateway.client import Access, PolicyClient
from actors.gateway.server import gateway
access = Access(
    url="http://127.0.0.1:8000", key="key", open_to_others=str, idle_seconds=float, session="a",
    serve=gateway().serve,
)
client = PolicyClient(access, is_async=False)
sleep = "import time; time.sleep(600)"
nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleep!r}, sys.argv[1]])"
command = [sys.executable, "-c", nested, sys.argv[1]]
kind = {"isolated": sys.argv[2] == "isolated"}
threading.Thread(target=client.run, args=(command,), kwargs=kind, daemon=True).start()
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["isolated", "open"])
def test_programs_die_with_the_process_of_their_rollout(kind: str) -> None:
    mark = f"mark-{time.monotonic_ns()}"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, mark, kind], stdin=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(processes_with(mark)) < 4:  # with owner and supervisor
        assert owner.poll() is None and time.monotonic() < deadline, "the programs have not started"
        time.sleep(0.05)
    owner.kill()
    owner.wait()
    while processes_with(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(mark) == []


RESPONSES_TOOL = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}}
MESSAGES_TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {}}}


def adding(messages: list[Message]) -> str:
    return "It is 46." if messages[-1]["role"] == "tool" else f"<think>Add.</think>\n{CALL}"


async def solve_by_responses(task: dict[str, Any], client: PolicyClient) -> float:
    items: list[Any] = [{"role": "user", "content": task["question"]}]
    first = await client.openai.responses.create(
        model="gpt-9", instructions="Be short.", input=items, tools=[RESPONSES_TOOL], store=False
    )
    (call,) = [each for each in first.output if each.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "46"}
    items += [*(each.model_dump(exclude_none=True) for each in first.output), output]
    second = await client.openai.responses.create(
        model="gpt-9", instructions="Be short.", input=items, tools=[RESPONSES_TOOL]
    )
    return float(second.output_text == "It is 46.")


async def solve_by_stored_responses(task: dict[str, Any], client: PolicyClient) -> float:
    first = await client.openai.responses.create(
        model="gpt-9", input=task["question"], tools=[RESPONSES_TOOL]
    )
    (call,) = [each for each in first.output if each.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "46"}
    stream = await client.openai.responses.create(
        model="gpt-9",
        input=[output],
        previous_response_id=first.id,
        tools=[RESPONSES_TOOL],
        stream=True,
    )
    events = [event async for event in stream]
    assert events[0].type == "response.created"
    return float(events[-1].response.output_text == "It is 46.")


async def solve_by_named_items(task: dict[str, Any], client: PolicyClient) -> float:
    first = await client.openai.responses.create(
        model="gpt-9", input=task["question"], tools=[RESPONSES_TOOL]
    )
    names: Any = [{"type": "item_reference", "id": each.id} for each in first.output]
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "46"}
    question = {"role": "user", "content": task["question"]}
    second = await client.openai.responses.create(
        model="gpt-9", input=[question, *names, output], tools=[RESPONSES_TOOL]
    )
    return float(second.output_text == "It is 46.")


async def solve_by_websocket(task: dict[str, Any], client: PolicyClient) -> float:
    async with client.openai.responses.connect() as connection:

        async def asked(**fields: Any) -> Any:
            frame: Any = {"type": "response.create", "model": "gpt-9", "tools": [RESPONSES_TOOL], **fields}
            await connection.send({**frame, "store": False})
            async for event in connection:
                if event.type in ("response.completed", "error"):
                    return event.response
            return None

        ready = await asked(input=task["question"], generate=False)
        first = await asked(input=[], previous_response_id=ready.id)
        (call,) = [each for each in first.output if each.type == "function_call"]
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "46"}
        second = await asked(input=[output], previous_response_id=first.id)
    return float(second.output_text == "It is 46." and not ready.output)


async def solve_by_messages(task: dict[str, Any], client: PolicyClient) -> float:
    messages: list[Any] = [{"role": "user", "content": task["question"]}]
    first = await client.anthropic.messages.create(
        model="claude", max_tokens=200, system="Be short.", messages=messages, tools=[MESSAGES_TOOL]
    )
    assert first.stop_reason == "tool_use"
    (call,) = [each for each in first.content if each.type == "tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "46"}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    async with client.anthropic.messages.stream(
        model="claude", max_tokens=200, system="Be short.", messages=messages, tools=[MESSAGES_TOOL]
    ) as stream:
        text = await stream.get_final_text()
    return float(text == "It is 46.")


async def solve_by_the_runner_of_anthropic(task: dict[str, Any], client: PolicyClient) -> float:
    """Its client would have the server hold the conversation, and goes on without that."""
    from anthropic import beta_async_tool

    @beta_async_tool
    async def add(a: int, b: int) -> str:
        """Add."""
        return str(a + b)

    question: Any = {"role": "user", "content": task["question"]}
    runner = client.anthropic.beta.messages.tool_runner(
        model="claude", max_tokens=200, tools=[add], messages=[question]
    )
    message = await runner.until_done()
    return float(message.content[-1].text == "It is 46.")


@pytest.mark.parametrize(
    "rollout",
    [
        *(solve_by_responses, solve_by_stored_responses, solve_by_named_items, solve_by_websocket),
        *(solve_by_messages, solve_by_the_runner_of_anthropic),
    ],
    ids=lambda each: each.__name__,
)
def test_tool_loop_in_another_dialect_is_one_sequence(rollout: RolloutFunction) -> None:
    trajectory = play(rollout, adding)
    assert trajectory.reward == 1.0
    (sample,) = training_samples(trajectory)
    assert sample.num_sampled_tokens == sum(len(step.model_response) + 1 for step in trajectory.steps)
    assert trajectory.metrics == {
        "policy_calls": 2.0,
        "branches": 0.0,
        "foreign_answers": 0.0,
        "unseen_answers": 0.0,
    }


def test_compaction_is_a_call_of_its_own() -> None:
    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        create = client.openai.responses.create
        first = await create(model="m", input="a")
        second = await create(model="m", input="b", previous_response_id=first.id)
        shorter = await client.openai.responses.compact(model="m", previous_response_id=second.id)
        given: Any = [*(each.model_dump(exclude_none=True) for each in shorter.output)]
        third = await create(model="m", input=[*given, {"role": "user", "content": "c"}])
        return float(third.output_text == "You said c")

    requests: list[SampleRequest] = []
    trajectory = play(solve, echo, requests)
    assert trajectory.reward == 1.0
    assert [step.info["branch"] for step in trajectory.steps] == ["", "", "", "history compacted"]
    (prompt,) = [str(each) for each in requests[-1:]]
    assert "Summary of the conversation so far:\\nYou said Sum our conversation up" in prompt


def test_stranger_has_no_websocket_of_the_gateway() -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    address = gateway().url.replace("http", "ws", 1)
    for path in ("/v1/responses", "/v1/other"):
        with pytest.raises(InvalidStatus, match=r"401|404"), connect(address + path):
            pass


def test_tokens_are_counted_as_the_next_call_reads_them() -> None:
    """Also behind an answer that the program sends back otherwise: the policy sees its own tokens."""
    import anthropic

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        asked: dict[str, Any] = {"model": "claude", "system": "Be short.", "tools": [MESSAGES_TOOL]}
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        counted, used = [], []
        for _ in range(2):
            counted += [await client.anthropic.messages.count_tokens(messages=messages, **asked)]
            message = await client.anthropic.messages.create(messages=messages, max_tokens=200, **asked)
            used.append(message.usage.input_tokens)
            calls = [each for each in message.content if each.type == "tool_use"]  # without its thought
            results = [{"type": "tool_result", "tool_use_id": each.id, "content": "46"} for each in calls]
            messages += [{"role": "assistant", "content": calls}, {"role": "user", "content": results}]
        with pytest.raises(anthropic.BadRequestError, match="has to be an object"):
            await client.anthropic.post("/v1/messages/count_tokens", body=[], cast_to=object)
        return float([each.input_tokens for each in counted] == used and used[0] < used[1])

    requests: list[SampleRequest] = []
    trajectory = play(solve, adding, requests)
    assert (trajectory.reward, len(trajectory.steps), len(requests)) == (1.0, 2, 4)
    assert [each.params.max_tokens == 1 for each in requests] == [True, False] * 2
    assert len(training_samples(trajectory)) == 1, "what was counted leaves no trace"


def test_prompt_that_is_too_long_to_count_fails_its_request_only() -> None:
    import anthropic

    def short(messages: list[Message]) -> str:
        if len(messages) > 1:
            raise PromptTooLongError("The prompt has 99 tokens.")
        return echo(messages)

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        user: Any = {"role": "user", "content": "a"}
        counted = client.anthropic.messages.count_tokens(model="claude", messages=[user, user])
        with pytest.raises(anthropic.BadRequestError, match="99 tokens"):
            await counted
        await say(client, "a")
        return 1.0

    assert play(solve, short).reward == 1.0


@pytest.mark.parametrize("error", [SamplerError("The engine is gone."), KeyboardInterrupt()], ids=repr)
def test_count_whose_rollout_fails_gets_an_error(error: BaseException) -> None:
    import anthropic

    ended: list[str] = []

    def failing(messages: list[Message]) -> str:
        raise error

    def solve(task: dict[str, Any], client: PolicyClient) -> float:
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.anthropic.messages.count_tokens(
                model="claude", messages=[{"role": "user", "content": "a"}]
            )
        ended.append(str(caught.value))
        return 1.0

    with pytest.raises((SamplerError, EnvironmentFailure)):
        play(solve, failing)
    assert len(ended) == 1 and "The policy answers no more: the rollout has ended" in ended[0]


def test_stored_responses_hold_what_they_share_once() -> None:
    held: list[int] = []

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        items: list[Any] = []
        for number in range(4):
            items.append({"role": "user", "content": f"{number}"})
            await client.openai.responses.create(model="gpt-9", input=items)
            session = gateway()._sessions[client.api_key]
            held.append(len({id(item) for each in session.conversations.values() for item in each}))
        return 1.0

    play(solve)
    assert held == [2, 4, 6, 8], "a question and an answer with each call, though all are sent each time"


def test_response_that_its_session_has_not_stored_is_unknown() -> None:
    """Neither one of another session that is open, nor one's own with ``store=False``; both have one id."""
    ids: list[str] = []

    async def other(task: dict[str, Any], client: PolicyClient) -> float:
        ids.append((await client.openai.responses.create(model="m", input="a", store=False)).id)
        assert ids[0] == ids[1]
        with pytest.raises(openai.BadRequestError, match=f"no response .{ids[0]}"):
            await client.openai.responses.create(model="m", input="b", previous_response_id=ids[0])
        return 1.0

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        ids.append((await client.openai.responses.create(model="m", input="a secret")).id)
        return (await asyncio.to_thread(play, other)).reward

    assert play(solve).reward == 1.0


class Seeing:
    """A policy that reads data: URLs."""

    def __init__(self) -> None:
        self.seen: list[SampleRequest] = []

    async def sample(self, request: SampleRequest) -> Completion:
        self.seen.append(request)
        if any("http:" in json.dumps(message) for message in request.messages):
            raise AgentError("A message of the agent is refused: no address is fetched.")
        return await ScriptedSampler(["red"]).sample(replace(request, messages=[]))


def test_pictures_of_a_program_are_shown_or_refused() -> None:
    def parts(url: str) -> list[dict[str, Any]]:
        return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "Which?"}]

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        with pytest.raises(openai.BadRequestError, match="no address is fetched"):
            await say(client, parts("http://a/b.png"))
        first = await say(client, parts("data:a"))
        await client.openai.chat.completions.create(
            model="m",
            messages=[
                {"role": "user", "content": parts("data:a")},
                first.choices[0].message,
                {"role": "user", "content": "And now?"},
            ],
        )
        return 1.0

    policy = Seeing()
    trajectory = play(solve, sampler=policy)
    assert (trajectory.reward, len(trajectory.steps)) == (1.0, 2), "what is refused is no turn"
    assert trajectory.steps[0].observation == [{"role": "user", "content": parts("data:a")}]
    assert trajectory.steps[1].info["follows"] == 0
    assert [each.params.max_tokens == 1 for each in policy.seen] == [True, True, False, False]


def test_errors_have_the_form_of_their_dialect() -> None:
    import anthropic

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        file = {"type": "document", "source": {"type": "url", "url": "http://a/b.pdf"}}
        with pytest.raises(anthropic.BadRequestError, match="document") as caught:
            await client.anthropic.messages.create(
                model="m", max_tokens=9, messages=[{"role": "user", "content": [file]}]
            )
        assert caught.value.body["type"] == "error"
        await say(client, "a")
        return 1.0

    assert play(solve).reward == 1.0
