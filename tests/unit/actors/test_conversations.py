"""Conversations of programs: the trees and masks of ``conversations.yaml``, token for token."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml

from actors.gateway.client import PolicyClient
from actors.gateway.function import pair_of
from actors.gateway.server import RETRY_HEADER
from actors.rollouts.journal import Journal
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, run_rollout
from environments.types import Completion, Trajectory
from policies.chat import ChatRenderer
from policies.learning.samples import TrainingSample, training_samples
from policies.model_api.messages import ChatMessage
from policies.sampler import SampleRequest
from policies.tiny import build_tokenizer

HERE = Path(__file__).parent
TABLE: list[dict[str, Any]] = yaml.safe_load((HERE / "conversations.yaml").read_text())
TEMPLATES = HERE.parents[1] / "templates"
LLAMA_NAMES = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
NOTICE_SECONDS = 0.3
"""After which the gateway has noticed that a client has gone, or that another call has come."""


@cache
def tokenizer_of(template: str) -> Any:
    tokenizer = build_tokenizer([[{"role": "user", "content": "What is it? Add them. It is."}]])
    if template == "llama3":
        tokenizer.add_tokens(list(LLAMA_NAMES), special_tokens=True)
        tokenizer.bos_token, tokenizer.eos_token = "<|begin_of_text|>", "<|eot_id|>"
    if template != "tiny":
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
    return tokenizer


@cache
def renderer_of(template: str) -> ChatRenderer:
    return ChatRenderer(tokenizer_of(template))


def messages_of(call: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a request, as they are sent."""

    def flat(messages: list[Any]) -> Iterator[dict[str, Any]]:
        for each in messages:
            if isinstance(each, list):
                yield from flat(each)
            elif "role" in each:
                yield each
            else:
                role = next(iter(each))
                yield {"role": role, "content": each[role], **{k: v for k, v in each.items() if k != role}}

    return list(flat(call["messages"]))


def tools_of(call: dict[str, Any]) -> list[dict[str, Any]] | None:
    parameters = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}}
    named = [{"name": name, "parameters": parameters} for name in call.get("tools", ())]
    return [{"type": "function", "function": each} for each in named] or None


def as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


class Policy:
    """Says what a conversation's script has, in tokens that encoding its text would not give.

    Attributes:
        held: number of the answer before which it waits for ``goes_on``; ``called`` is set when it does.
    """

    def __init__(self, conversation: dict[str, Any]) -> None:
        self.template = conversation.get("template", "tiny")
        calls = [call for call in conversation["calls"] if "says" in call]
        self._script = [(text, call.get("cut", False)) for call in calls for text in as_list(call["says"])]
        self._num_answers = 0
        self.held = -1
        self.called, self.goes_on = threading.Event(), threading.Event()

    def sample(self, request: SampleRequest) -> Completion:
        text, is_cut = self._script[self._num_answers]
        if self._num_answers == self.held:
            self.called.set()
            assert self.goes_on.wait(60)
            self.called.clear()
            self.goes_on.clear()
        self._num_answers += 1
        tokenizer = tokenizer_of(self.template)
        pieces = [text[start : start + 3] for start in range(0, len(text), 3)]
        ids = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False)]
        prompt_ids = renderer_of(self.template).request_ids(request)
        ids += [] if is_cut else [tokenizer.eos_token_id]
        return Completion(
            prompt_ids=prompt_ids,
            completion_ids=tuple(ids),
            logprobs=(-0.5,) * len(ids),
            text=renderer_of(self.template).completion_text(prompt_ids, ids),
            finish_reason="length" if is_cut else "stop",
        )


async def send(client: PolicyClient, call: dict[str, Any]) -> Any:
    import httpx

    body = {"model": "m", "messages": messages_of(call), "tools": tools_of(call)}
    body |= {"n": len(as_list(call.get("says", ""))), "stream": call.get("stream", False)}
    headers = {"Authorization": f"Bearer {client.api_key}"}
    headers |= {RETRY_HEADER: "1"} if call.get("client") == "retries" else {}
    async with httpx.AsyncClient(base_url=client.base_url, headers=headers, timeout=60) as http:
        response = await http.post("/chat/completions", json=body)
        assert response.status_code == 200, response.text
        return None if body["stream"] else response.json()


def played(conversation: dict[str, Any]) -> Trajectory:
    """The trajectory of a rollout function that makes the calls of a conversation."""
    policy = Policy(conversation)

    async def solve(task: dict[str, Any], client: PolicyClient) -> float:
        calls = conversation["calls"]
        first: asyncio.Task[Any] | None = None
        lost, num_answers = "", 0
        for call, following in zip(calls, [*calls[1:], {}], strict=True):
            way, says = call.get("client"), as_list(call.get("says", []))
            num_answers += len(says)
            is_held = way == "goes" or following.get("client") == "does not wait"
            if is_held:
                policy.held = num_answers - 1
            sent = asyncio.create_task(send(client, call))
            if is_held:
                await asyncio.to_thread(policy.called.wait, 60)
            lost = says[0] if says else lost
            if way == "goes":
                sent.cancel()
            elif is_held:
                first = sent
                continue
            if way in ("goes", "does not wait"):
                await asyncio.sleep(NOTICE_SECONDS)
                policy.goes_on.set()
            answers = await asyncio.gather(*filter(None, (first, sent)), return_exceptions=way == "goes")
            first = None
            if way in ("comes back", "retries"):
                assert answers[0]["choices"][0]["message"]["content"] == lost
        return 1.0

    pair = pair_of(None, None, solve, {}, {})
    request = RolloutRequest(rollout_id="a/0", group_id="a", task={"question": conversation["name"]})
    env = pair.make_env(request)
    try:
        return run_rollout(pair.make_agent(), env, policy.sample, request, RolloutLimits(), Journal())
    finally:
        env.close()


def drawn_calls(conversation: dict[str, Any]) -> list[dict[str, Any]]:
    """The policy's calls: the request of each, with what was drawn of it."""
    return [
        {**call, "says": text, "branch": branch}
        for call in conversation["calls"]
        if "says" in call
        for text, branch in zip(as_list(call["says"]), as_list(call.get("branch", "")), strict=True)
    ]


def drawn_prompt(conversation: dict[str, Any], call: dict[str, Any]) -> str:
    """The text of a call's prompt, made by the template itself of the conversation that was drawn."""
    said = [each["says"] for each in drawn_calls(conversation)]
    given = [ChatMessage.model_validate(each).for_template for each in messages_of(call)]
    shown = []
    for word, message in zip(str(call["sees"]).split(), given, strict=True):
        assert word.isdecimal() or word == message["role"]
        shown.append({"role": "assistant", "content": said[int(word)]} if word.isdecimal() else message)
    tokenizer = tokenizer_of(conversation.get("template", "tiny"))
    return str(
        tokenizer.apply_chat_template(shown, tools=tools_of(call), tokenize=False, add_generation_prompt=True)
    )


def trained(sample: TrainingSample) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """What a sample trains: for each turn all tokens before its answer, and those of the answer."""
    turns, ids = sample.turns, sample.prompt_ids + sample.response_ids
    assert [turn >= 0 for turn in turns] == [bit == 1 for bit in sample.loss_mask]
    found = {}
    for turn in dict.fromkeys(turn for turn in turns if turn >= 0):
        start = len(sample.prompt_ids) + len(list(takewhile(lambda each, turn=turn: each != turn, turns)))
        found[turn] = ids[:start], ids[start : start + turns.count(turn)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("conversation", TABLE, ids=[each["name"] for each in TABLE])
def test_conversation_is_the_tree_that_was_drawn(conversation: dict[str, Any]) -> None:
    trajectory = played(conversation)
    calls, steps = drawn_calls(conversation), trajectory.steps
    assert [step.info["branch"] for step in steps] == [call["branch"] for call in calls]
    own = [[int(word) for word in str(call["sees"]).split() if word.isdecimal()] for call in calls]
    assert [step.info["follows"] for step in steps] == [each[-1] if each else None for each in own]
    foreign = sum(str(call["sees"]).split().count("assistant") for call in calls)
    branches = sum(bool(call["branch"]) for call in calls)
    assert (trajectory.metrics["foreign_answers"], trajectory.metrics["branches"]) == (foreign, branches)
    tokenizer = tokenizer_of(conversation.get("template", "tiny"))
    for call, step in zip(calls, steps, strict=True):
        assert step.completion is not None
        shown = tokenizer.decode(step.completion.prompt_ids, clean_up_tokenization_spaces=False)
        assert shown == drawn_prompt(conversation, call)
    samples = training_samples(trajectory)
    assert [list(trained(sample)) for sample in samples] == conversation["sequences"]
    for sample in samples:
        for turn, (before, answer) in trained(sample).items():
            completion = steps[turn].completion
            assert completion is not None
            assert (before, answer) == (completion.prompt_ids, completion.completion_ids)


def test_table_has_enough_conversations() -> None:
    assert len(TABLE) == len({each["name"] for each in TABLE}) >= 25
