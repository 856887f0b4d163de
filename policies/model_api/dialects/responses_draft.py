"""Responses of OpenAI's Responses API in the making, with the events that show them grow.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator
from typing import Any

from policies.model_api.dialects.base import CALL, TEXT, THOUGHT, Draft, Json

ENDS = ("response.completed", "response.incomplete")
"""The last event of a stream."""
REPEATED: Json = {
    "background": False,
    "frequency_penalty": 0.0,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "presence_penalty": 0.0,
    "previous_response_id": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
}
"""Fields of a request that its response repeats, with their values where the request has none.

Strict clients want each of them in a response: https://www.openresponses.org/reference
"""
PREFIXES = {THOUGHT: "rs", TEXT: "msg", CALL: "fc"}


class ResponseDraft(Draft):
    """A response that is being made. ``policy_version`` is Troupe's.

    Args:
        model: the name by which the client calls it.
        fields: of the response, that repeat the request.
    """

    def __init__(self, model: str, fields: Json) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._item: Json = {}
        """The open item, but for what is still growing."""
        self.output: list[Json] = []
        self.response: Json = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "in_progress",
            "model": model,
            "output": self.output,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **REPEATED,
            **fields,
        }

    def event(self, kind: str, **fields: Any) -> Json:
        """The next event, with its number."""
        own = {"sequence_number": next(self._numbers), "policy_version": self.version}
        return {"type": f"response.{kind}", **fields, **own}

    def begin(self, part: Json) -> Iterator[Json]:
        begun = {**self.response, "output": []}
        yield self.event("created", response=begun)
        yield self.event("in_progress", response=begun)

    def begin_block(self, kind: str, call: Json) -> Iterator[Json]:
        # The id has the response's, so that an item that is sent back shows where it is from.
        name = f"{PREFIXES[kind]}_{self.response['id'].removeprefix('resp_')}{len(self.output):03d}"
        if kind == THOUGHT:
            self._item = {"id": name, "type": "reasoning", "summary": []}
            yield self.event("output_item.added", **self._index, item=self._item)
            part = {"type": "summary_text", "text": ""}
            yield self.event("reasoning_summary_part.added", **self._place, summary_index=0, part=part)
        elif kind == TEXT:
            message = {"id": name, "type": "message", "role": "assistant"}
            self._item = {**message, "status": "in_progress", "content": []}
            yield self.event("output_item.added", **self._index, item=self._item)
            yield self.event("content_part.added", **self._place, content_index=0, part=_output_text(""))
        else:
            function = {"call_id": call["id"], "name": call["function"]["name"], "arguments": ""}
            self._item = {"id": name, "type": "function_call", "status": "in_progress", **function}
            yield self.event("output_item.added", **self._index, item=self._item)

    def grow_block(self, kind: str, text: str) -> Iterator[Json]:
        if kind == THOUGHT:
            yield self.event("reasoning_summary_text.delta", **self._place, summary_index=0, delta=text)
        elif kind == TEXT:
            yield self.event("output_text.delta", **self._place, content_index=0, delta=text, logprobs=[])
        elif text:
            yield self.event("function_call_arguments.delta", **self._place, delta=text)

    def end_block(self, kind: str, is_whole: bool) -> Iterator[Json]:
        status = {"status": "completed" if is_whole else "incomplete"}
        place, text = self._place, self.text
        if kind == THOUGHT:
            summary = {"type": "summary_text", "text": text}
            item = {**self._item, "summary": [summary]}
            yield self.event("reasoning_summary_text.done", **place, summary_index=0, text=text)
            yield self.event("reasoning_summary_part.done", **place, summary_index=0, part=summary)
        elif kind == TEXT:
            part = _output_text(text)
            item = {**self._item, **status, "content": [part]}
            yield self.event("output_text.done", **place, content_index=0, text=text, logprobs=[])
            yield self.event("content_part.done", **place, content_index=0, part=part)
        else:
            item = {**self._item, **status, "arguments": text}
            name = item["name"]
            yield self.event("function_call_arguments.done", **place, name=name, arguments=text)
        yield self.event("output_item.done", **self._index, item=item)
        self.output.append(item)

    def end(self) -> Iterator[Json]:
        is_whole = self.finish_reason != "length"
        if not self.output and self._open is None:
            yield from self.grow(TEXT, "")
        yield from self.close(is_whole)
        usage = usage_of(self.usage["prompt_tokens"], self.usage["completion_tokens"])
        yield self.finish(is_whole, usage=usage, policy_version=self.version)

    def finish(self, is_whole: bool, **fields: Any) -> Json:
        """The last event, after which the response is complete."""
        status = "completed" if is_whole else "incomplete"
        details = None if is_whole else {"reason": "max_output_tokens"}
        ended = {"completed_at": int(time.time()) if is_whole else None, **self.recorded}
        self.response |= {"status": status, "incomplete_details": details, **ended, **fields}
        return self.event(status, response=self.response)

    @property
    def _index(self) -> Json:
        return {"output_index": len(self.output)}

    @property
    def _place(self) -> Json:
        return {"item_id": self._item["id"], **self._index}


def _output_text(text: str) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_of(num_read: int, num_sampled: int) -> Json:
    """The ``usage`` of a response."""
    return {
        "input_tokens": num_read,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_read + num_sampled,
    }
