"""Answers of the policy in the form of the chat endpoint, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

from environments.thoughts import split_thought
from environments.types import Message
from policies.agents.parsers import ToolParser
from policies.agents.parsers.base import call_for_template
from policies.gateway.session import Json


def message_of(text: str, served: list[Json], parser: ToolParser | None, num_calls: int) -> Message:
    """The message that a program is told: the answer, its thought and its tool calls, each by itself.

    Args:
        served: calls that the server has read from the text.
        parser: reads them here; ``None`` where the request has no tools.
        num_calls: number of calls before, from which their ids count up.
    """
    thought, answer = split_thought(text)
    if thought:  # white space between the two belongs to neither, as in the other dialects
        answer = answer.lstrip()
    calls: list[Json] = served
    if parser is not None and not served:
        answer, read = parser.split(answer)
        calls = [call.to_openai() for call in read]
    message: Message = {"role": "assistant", "content": answer.strip() or None if calls else answer}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        numbered = enumerate(calls, num_calls)
        message["tool_calls"] = [{**call, "id": f"call_{number}"} for number, call in numbered]
    return message


def for_template(message: Message) -> Message:
    """The message as chat templates want it: an object for a call's arguments."""
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": list(map(call_for_template, message["tool_calls"]))}


def completion_of(answer: Json, model: str) -> Json:
    """The ``chat.completion`` with an answer: its ``message``, how it ended, ``usage`` and version."""
    choice = {"index": 0, "message": answer["message"], "finish_reason": answer["finish_reason"]}
    if answer["finish_reason"] != "length" and answer["stop"] is not None:
        choice["stop_reason"] = answer["stop"]
    return {
        "id": f"chatcmpl-{answer['id']}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{**choice, "logprobs": None}],
        "usage": answer["usage"],
        "policy_version": answer["policy_version"],
    }


async def chunks_of(completion: Json, includes_usage: bool) -> AsyncIterator[Json]:
    """The chunks of a ``chat.completion``: its text is there as a whole, so they are few."""
    head = {key: value for key, value in completion.items() if key not in ("choices", "usage")}
    head["object"] = "chat.completion.chunk"
    for choice in completion["choices"]:
        message = choice["message"]
        deltas: list[Json] = [{"role": "assistant", "content": ""}]
        deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
        if calls := message.get("tool_calls"):
            deltas.append({"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]})
        ended = [(delta, None) for delta in deltas] + [({}, choice["finish_reason"])]
        for delta, reason in ended:
            part = {"index": choice["index"], "delta": delta, "finish_reason": reason, "logprobs": None}
            if reason is not None and "stop_reason" in choice:
                part["stop_reason"] = choice["stop_reason"]
            yield {**head, "choices": [part]}
    if includes_usage:
        yield {**head, "choices": [], "usage": completion["usage"]}
