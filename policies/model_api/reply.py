"""OpenAI's answers: sampled tokens in the form of one endpoint, whole or in chunks.

``token_ids``, ``prompt_token_ids`` and ``stop_reason``, the stop string that has ended an answer, are vLLM's
extensions. Troupe's are ``policy_version``, the oldest one
that has sampled a token of the answer, and, with the token ids, ``token_versions``.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from environments.thoughts import SplitThought, is_unfinished, split_thought, with_opening, without_opening
from environments.tools import ToolCall
from policies.agents.parsers import ToolParser
from policies.model_api.growing_calls import GrowingCalls
from policies.model_api.growing_text import REPLACEMENT_CHARACTER, GrowingThought, WholeThought
from policies.model_api.messages import Json
from policies.model_api.protocol import ChatRequest, CompletionRequest, SamplingRequest
from policies.sampler import TokenOutput, TokenRequest


@dataclass(frozen=True, slots=True)
class Piece:
    """A choice, or the part of it that was sampled since the piece before."""

    index: int
    request: TokenRequest
    text: str
    output: TokenOutput
    is_first: bool
    prompt: str = ""
    """The prompt's text, where the answer begins with it."""
    stop: str | None = None
    """The stop string that has ended the text."""


class Reply:
    """Puts sampled tokens into the form of one endpoint."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(self, body: SamplingRequest, token_text: Callable[[int], str]) -> None:
        self._head = {
            "id": self.id_prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": body.model,
        }
        self._returns_token_ids = bool(body.return_token_ids)
        self._num_likely, _ = body.likely_tokens()
        self._returns_logprobs = self._num_likely is not None
        self._token_text = token_text

    @property
    def answer_id(self) -> str:
        """The id that clients get."""
        return str(self._head["id"])

    def whole(self, pieces: list[Piece], num_prompt_tokens: int) -> Json:
        """The answer to a request without ``stream``."""
        return {
            **self._head,
            "object": self.whole_object,
            "choices": [self._choice(piece, "message") for piece in pieces],
            "policy_version": _oldest_version(pieces),
            "usage": _usage(pieces, num_prompt_tokens),
        }

    def usage_chunk(self, pieces: list[Piece], num_prompt_tokens: int) -> Json:
        """The last chunk, for clients that ask for it."""
        return {**self._chunk(_oldest_version(pieces), []), "usage": _usage(pieces, num_prompt_tokens)}

    def chunks(self, piece: Piece) -> Iterator[Json]:
        """No chunk if the text of the piece is held back and the client has not asked for tokens."""
        returns_tokens = self._returns_token_ids or self._returns_logprobs
        if piece.text or piece.output.finish_reason or returns_tokens:
            yield self._chunk(piece.output.policy_version, [self._choice(piece, "delta")])

    def _chunk(self, policy_version: int, choices: list[Json]) -> Json:
        return {
            **self._head,
            "object": self.chunk_object,
            "choices": choices,
            "policy_version": policy_version,
        }

    def _choice(self, piece: Piece, field: str) -> Json:
        """The choice; a chat has its content in ``field``, "message" or "delta"."""
        raise NotImplementedError

    def _logprobs(self, tokens: list[str], output: TokenOutput) -> Json:
        raise NotImplementedError

    def _common(self, piece: Piece) -> Json:
        """Fields that a choice has in all shapes."""
        output = piece.output
        choice: Json = {"index": piece.index, "finish_reason": output.finish_reason, "logprobs": None}
        if output.finish_reason == "stop" and piece.stop is not None:
            choice["stop_reason"] = piece.stop
        if self._returns_logprobs:
            tokens = [self._token_text(token_id) for token_id in output.token_ids]
            choice["logprobs"] = self._logprobs(tokens, output)
        if self._returns_token_ids:
            choice["token_ids"] = list(output.token_ids)
            choice["token_versions"] = list(output.token_versions)
        return choice


class TextReply(Reply):
    """``POST /v1/completions``."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, body: CompletionRequest, token_text: Callable[[int], str]) -> None:
        super().__init__(body, token_text)
        self._echoes, self._only_prompt = bool(body.echo), body.max_tokens == 0

    def _choice(self, piece: Piece, field: str) -> Json:
        if self._only_prompt:
            nothing = replace(piece.output, token_ids=(), logprobs=(), token_versions=(), top_logprobs=())
            piece = replace(piece, text="", output=replace(nothing, finish_reason="length"))
        choice = {**self._common(piece), "text": piece.text}
        if self._echoes and piece.is_first:
            choice["text"] = piece.prompt + piece.text
            if self._returns_logprobs:
                choice["logprobs"] = self._with_prompt(piece, choice["logprobs"])
        if self._returns_token_ids and piece.is_first:
            choice["prompt_token_ids"] = list(piece.request.prompt_ids)
        return choice

    def _logprobs(self, tokens: list[str], output: TokenOutput) -> Json:
        top = [self._texts(each) for each in output.top_logprobs] or None
        return {"tokens": tokens, "token_logprobs": list(output.logprobs), "top_logprobs": top}

    def _with_prompt(self, piece: Piece, sampled: Json) -> Json:
        """The log-probabilities of the prompt, of which the first token has none, and those after them."""
        ids, found = piece.request.prompt_ids, piece.output.prompt_logprobs
        tokens = [self._token_text(token_id) for token_id in ids] + sampled["tokens"]
        own = [each.get(token_id) for token_id, each in zip(ids, found, strict=True)]
        top = [self._texts(each) if each else None for each in found]
        rest = sampled["top_logprobs"] or [None] * len(sampled["tokens"])
        return {
            "tokens": tokens,
            "token_logprobs": own + sampled["token_logprobs"],
            "top_logprobs": top + rest,
            "text_offset": [0, *itertools.accumulate(map(len, tokens))][:-1],
        }

    def _texts(self, logprobs: Mapping[int, float]) -> dict[str, float]:
        return {self._token_text(token_id): logprob for token_id, logprob in logprobs.items()}


class ChatReply(Reply):
    """``POST /v1/chat/completions``, whose tool calls ``parser`` reads.

    A thought that is not finished is sent as ``reasoning_content``, and nothing in it is a call. A stream
    sends every thought so, since it cannot know. ``prompt_end`` are the last characters of the prompt, which
    may have opened a thought. With ``split``, which separates thoughts from answers, all are sent so.
    """

    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(
        self,
        body: ChatRequest,
        token_text: Callable[[int], str],
        parser: ToolParser | None,
        prompt_end: str = "",
        split: SplitThought | None = None,
    ) -> None:
        super().__init__(body, token_text)
        self._parser = parser
        self._prompt_end = prompt_end
        self._in_pieces = bool(body.stream)
        self._split = split
        self._thoughts: dict[int, GrowingThought | WholeThought] = {}
        self._calls: dict[int, GrowingCalls] = {}

    def whole(self, pieces: list[Piece], num_prompt_tokens: int) -> Json:
        return {**super().whole(pieces, num_prompt_tokens), **self._prompt(pieces[0])}

    def chunks(self, piece: Piece) -> Iterator[Json]:
        if piece.is_first:
            opening = choice_of("delta", {"role": "assistant", "content": ""}, None, piece.index)
            yield {**self._chunk(piece.output.policy_version, [opening]), **self._prompt(piece)}
        yield from super().chunks(piece)

    def _prompt(self, piece: Piece) -> Json:
        return {"prompt_token_ids": list(piece.request.prompt_ids)} if self._returns_token_ids else {}

    def _choice(self, piece: Piece, field: str) -> Json:
        content, changes = self._message(piece)
        role = {"role": "assistant"} if field == "message" else {}
        return {**self._common(piece), **changes, field: role | content}

    def _message(self, piece: Piece) -> tuple[Json, Json]:
        """The message without its role, and what tool calls change in the choice."""
        if self._in_pieces:
            return self._growing(piece)
        text = with_opening(self._prompt_end, piece.text)
        if self._split is None and is_unfinished(text):
            return {"content": "", "reasoning_content": without_opening(text)}, {}
        # As ToolAgent reads it in training: a call in the thoughts is none.
        thought, answer = (self._split or split_thought)(text)
        rest, calls = (answer, []) if self._parser is None else self._parser.split(answer)
        before = ""
        if self._split is None and text.endswith(answer):  # the thought stays where it stood
            before, thought = text[: len(text) - len(answer)], ""
        elif self._split is None and not calls:  # it stood between parts of the answer
            answer, thought = text, ""
        reasoning = {"reasoning_content": thought} if thought else {}
        if not calls:
            return {"content": before + answer, **reasoning}, {}
        # One that was cut off may have lost calls: the client has to know.
        ended = {"finish_reason": "tool_calls"} if piece.output.finish_reason == "stop" else {}
        content = (before + rest).strip() or None
        return {"content": content, "tool_calls": list(map(_openai_call, calls)), **reasoning}, ended

    def _growing(self, piece: Piece) -> tuple[Json, Json]:
        """The next part of a message, and what tool calls change in the choice."""
        reason = piece.output.finish_reason
        if piece.index not in self._thoughts:
            split, end = self._split, self._prompt_end
            self._thoughts[piece.index] = GrowingThought(end) if split is None else WholeThought(end, split)
        growing = self._thoughts[piece.index]
        thought, content = growing.add(piece.text, is_last=reason is not None)
        delta: Json = {"reasoning_content": thought} if thought else {}
        if self._parser is None:
            return {"content": content, **delta}, {}
        calls = self._calls.setdefault(piece.index, GrowingCalls(self._parser))
        delta |= calls.add(content, is_last=reason is not None)
        return delta, {"finish_reason": "tool_calls"} if calls.num_complete and reason == "stop" else {}

    def _logprobs(self, tokens: list[str], output: TokenOutput) -> Json:
        tops: Sequence[Mapping[int, float]] = output.top_logprobs or [{}] * len(tokens)
        entries = [
            {**_entry(token, logprob), "top_logprobs": self._likely(top)}
            for token, logprob, top in zip(tokens, output.logprobs, tops, strict=True)
        ]
        return {"content": entries}

    def _likely(self, logprobs: Mapping[int, float]) -> list[Json]:
        """Likely tokens, as many as the client wants: the sampled one comes on top where it is not likely."""
        ordered = sorted(logprobs.items(), key=lambda pair: -pair[1])[: self._num_likely]
        return [_entry(self._token_text(token_id), logprob) for token_id, logprob in ordered]


def _entry(token: str, logprob: float) -> Json:
    """A token with its bytes, which are unknown where it is a part of a character."""
    utf8 = None if REPLACEMENT_CHARACTER in token else list(token.encode())
    return {"token": token, "logprob": logprob, "bytes": utf8}


def _oldest_version(pieces: list[Piece]) -> int:
    return min(piece.output.policy_version for piece in pieces)


def _usage(pieces: list[Piece], num_prompt_tokens: int) -> Json:
    return usage_of(num_prompt_tokens, sum(len(piece.output.token_ids) for piece in pieces))


def usage_of(num_read: int, num_sampled: int) -> Json:
    """The ``usage`` of a completion."""
    total = num_read + num_sampled
    return {"prompt_tokens": num_read, "completion_tokens": num_sampled, "total_tokens": total}


def choice_of(field: str, content: Json, finish_reason: str | None, index: int = 0) -> Json:
    """A choice of a chat completion, by its ``message``, or of a chunk, by its ``delta``."""
    return {"index": index, field: content, "finish_reason": finish_reason, "logprobs": None}


def _openai_call(call: ToolCall) -> Json:
    return {"id": f"call_{uuid.uuid4().hex}", **call.to_openai()}
