"""Conversations of programs: the trees and masks of ``conversations.yaml``, token for token."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import yaml

from actors.gateway.client import PolicyClient
from actors.gateway.function import pair_of
from actors.gateway.server import DIALECTS, RETRY_HEADER
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
DIALECT_FIELDS = ("messages", "system", "input", "instructions", "previous_response_id")
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


def path_of(call: dict[str, Any]) -> str:
    return f"/{call.get('at', 'chat/completions')}"


def body_of(call: dict[str, Any]) -> dict[str, Any]:
    """The body of a request, in its dialect."""
    body: dict[str, Any] = {"model": "m", "stream": call.get("stream", False)}
    tools = tools_of(call)
    if "at" not in call:
        return {
            **body,
            "messages": messages_of(call),
            "tools": tools,
            "n": len(as_list(call.get("says", ""))),
        }
    body |= {name: call[name] for name in DIALECT_FIELDS if name in call}
    named = [each["function"] for each in tools or ()]
    if call["at"] == "responses":
        return {**body, "tools": [{"type": "function", **each} for each in named]}
    schemas = [{"name": each["name"], "input_schema": each["parameters"]} for each in named]
    return {**body, "max_tokens": 9999, "tools": schemas}


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
        self._script = [(text, call) for call in calls for text in as_list(call["says"])]
        self._num_answers = self._version = 0
        self.held = -1
        self.called, self.goes_on = threading.Event(), threading.Event()

    def sample(self, request: SampleRequest) -> Completion:
        text, call = self._script[self._num_answers]
        is_cut = call.get("cut", False)
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
        versions = [self._version] * call.get("publish", len(ids))
        self._version += "publish" in call
        versions += [self._version] * (len(ids) - len(versions))
        return Completion(
            prompt_ids=prompt_ids,
            completion_ids=tuple(ids),
            logprobs=(-0.5,) * len(ids),
            text=renderer_of(self.template).completion_text(prompt_ids, ids),
            finish_reason="length" if is_cut else "stop",
            policy_version=versions[0],
            token_versions=tuple(versions),
        )


def authorization(client: PolicyClient) -> dict[str, str]:
    return {"Authorization": f"Bearer {client.api_key}"}


async def send(client: PolicyClient, call: dict[str, Any]) -> Any:
    import httpx

    body = body_of(call)
    headers = authorization(client) | ({RETRY_HEADER: "1"} if call.get("client") == "retries" else {})
    async with httpx.AsyncClient(base_url=client.base_url, headers=headers, timeout=60) as http:
        response = await http.post(path_of(call), json=body)
        assert response.status_code == 200, response.text
        return None if body["stream"] else response.json()


Send = Callable[[PolicyClient, dict[str, Any]], Coroutine[Any, Any, Any]]


def played(conversation: dict[str, Any], send: Send = send) -> Trajectory:
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
                assert f'"{lost}"' in json.dumps(answers[0])
        return 1.0

    pair = pair_of(None, None, solve, {}, conversation.get("env_args", {}))
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
    given = given_messages(conversation, call)
    shown = []
    for word, message in zip(str(call["sees"]).split(), given, strict=True):
        assert word.isdecimal() or word == message["role"]
        shown.append({"role": "assistant", "content": said[int(word)]} if word.isdecimal() else message)
    tokenizer = tokenizer_of(conversation.get("template", "tiny"))
    return str(
        tokenizer.apply_chat_template(shown, tools=tools_of(call), tokenize=False, add_generation_prompt=True)
    )


def given_messages(conversation: dict[str, Any], call: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a request as templates take them; an own answer that is not sent again is empty."""
    if "at" not in call:
        return [ChatMessage.model_validate(each).for_template for each in messages_of(call)]
    body, before = body_of(call), []
    if earlier := body.pop("previous_response_id", None):
        number = int(earlier.removeprefix("resp_"))
        before = given_messages(conversation, drawn_calls(conversation)[number])
        before.append({"role": "assistant", "content": ""})
    request = DIALECTS[f"/v1{path_of(call)}"](body).chat_request()
    return [*before, *(each.for_template for each in request.messages)]


def trained(sample: TrainingSample) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
    """What a sample trains: for each turn all tokens before its answer, and those of the answer."""
    turns, ids = sample.turns, sample.prompt_ids + sample.response_ids
    assert [turn >= 0 for turn in turns] == [bit == 1 for bit in sample.loss_mask]
    found = {}
    for turn in dict.fromkeys(turn for turn in turns if turn >= 0):
        start = len(sample.prompt_ids) + len(list(takewhile(lambda each, turn=turn: each != turn, turns)))
        found[turn] = ids[:start], ids[start : start + turns.count(turn)]
    return found


def drawn_versions(conversation: dict[str, Any], trajectory: Trajectory) -> list[list[int]]:
    """The versions of the tokens of each answer."""
    found, version = [], 0
    for call, completion in zip(drawn_calls(conversation), trajectory.completions, strict=True):
        num_tokens = completion.num_completion_tokens
        old = [version] * call.get("publish", num_tokens)
        version += "publish" in call
        found.append(old + [version] * (num_tokens - len(old)))
    return found


def check_tree(conversation: dict[str, Any], trajectory: Trajectory) -> None:
    """Check calls, tokens, masks and versions against what was drawn."""
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
    versions = drawn_versions(conversation, trajectory)
    assert [list(each.token_versions) for each in trajectory.completions] == versions
    samples = training_samples(trajectory)
    assert [list(trained(sample)) for sample in samples] == conversation["sequences"]
    for sample in samples:
        assert sample.policy_version == min(min(versions[turn]) for turn in trained(sample))
        for turn, (before, answer) in trained(sample).items():
            completion = steps[turn].completion
            assert completion is not None
            assert (before, answer) == (completion.prompt_ids, completion.completion_ids)


@pytest.mark.slow
@pytest.mark.parametrize("conversation", TABLE, ids=[each["name"] for each in TABLE])
def test_conversation_is_the_tree_that_was_drawn(conversation: dict[str, Any]) -> None:
    check_tree(conversation, played(conversation))


@pytest.mark.slow
def test_two_sessions_mixed_on_one_connection_are_two_trees() -> None:
    """Their calls come in turns over a connection that a proxy keeps open, say."""
    import httpx

    named = {each["name"]: each for each in TABLE}
    mixed = [named["edited answer"], named["history replaced by its summary"]]
    mixed[1] = {**mixed[1], "calls": mixed[1]["calls"][:3], "sequences": [[0, 1], [2]]}
    turns, places = Barrier(2), list[Any]()

    with httpx.Client(limits=httpx.Limits(max_connections=1), timeout=60, trust_env=False) as http:

        async def send(client: PolicyClient, call: dict[str, Any]) -> Any:
            url = f"{client.base_url}{path_of(call)}"
            await asyncio.to_thread(turns.wait, 60)
            sent = partial(http.post, url, json=body_of(call), headers=authorization(client))
            response = await asyncio.to_thread(sent)
            places.append(response.extensions["network_stream"].get_extra_info("client_addr"))
            return response.json()

        with ThreadPoolExecutor() as threads:
            trajectories = list(threads.map(partial(played, send=send), mixed))
    assert len(places) == 6 and len({*places}) == 1
    for conversation, trajectory in zip(mixed, trajectories, strict=True):
        check_tree(conversation, trajectory)


def test_table_has_enough_conversations_and_half_are_recorded() -> None:
    names = {each["name"] for each in TABLE}
    assert len(TABLE) == len(names) >= 25
    assert 2 * sum(":" in name for name in names) >= len(TABLE), "those of clients are named by them"


REASONS = {
    *("another conversation", "another list of tools", "another system prompt", "history compacted"),
    *("answer edited", "history edited", "tool result edited", "thoughts dropped", "asked again"),
    *("history cut short", "thoughts changed by the template", "answer changed by the template"),
}
"""All reasons of ``policies.gateway.session`` and ``FunctionAgent`` for a branch."""


def test_table_has_every_branch_client_and_dialect() -> None:
    calls = [call for each in TABLE for call in each["calls"]]
    branches = {branch for call in calls for branch in as_list(call.get("branch", ""))}
    assert branches == REASONS | {""}
    clients = {call["client"] for call in calls if "client" in call}
    assert clients == {"goes", "comes back", "retries", "does not wait"}
    assert {call.get("at") for call in calls} == {None, "messages", "responses"}
    results = [
        [message["role"] for message in messages_of(call)[-2:]] for call in calls if "messages" in call
    ]
    assert ["tool", "tool"] in results, "several results in one turn"
    assert any(isinstance(call.get("says"), list) for call in calls), "several choices"
    assert any("publish" in call for call in calls), "a publish in the middle of an answer"
