"""What clients may send, what they get, and how they are refused; checked with OpenAI's own types."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError
from test_answer_structure import allows

from environments.errors import ConfigError, PromptTooLongError, SamplerError
from policies.chat import ChatRenderer
from policies.engines.base import Engine
from policies.engines.weights import WeightBucket
from policies.model_api import errors
from policies.model_api.dialects.errors import openai_error, status_of
from policies.model_api.errors import ConflictError, RequestError, request_error
from policies.model_api.frontend import OpenAIFrontend
from policies.model_api.messages import ChatMessage
from policies.model_api.protocol import NO_EFFECT, ChatRequest, CompletionRequest
from policies.sampler import EngineOptions, EngineStats, SamplingParams, TokenOutput
from policies.tiny import build_tokenizer

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

MODEL = "tiny"
MESSAGES = [{"role": "user", "content": "What is 12+34?"}]
TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"type": "object"}}}]
TOOL_CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12+34"}}</tool_call>'


@cache
def tokenizer() -> Any:
    return build_tokenizer([[*MESSAGES, {"role": "assistant", "content": "The answer is 46."}]] * 20)


def renderer() -> ChatRenderer:
    return ChatRenderer(tokenizer())


def ids_of(text: str, ended: bool = True) -> list[int]:
    ids = tokenizer().encode(text, add_special_tokens=False)
    return [*ids, tokenizer().eos_token_id] if ended else ids


class FakeEngine(Engine):
    """Replays replies, given as token ids, in the order of the requests; ``-id / 8`` is a token's logprob."""

    version = 7
    max_model_tokens = 500

    def __init__(
        self, *replies: list[int], versions: Sequence[int] = (), finish_reason: str = "stop"
    ) -> None:
        self._replies = replies
        self._versions = versions or [self.version] * len(replies)
        self._finish_reason = finish_reason
        self.requests: list[tuple[tuple[int, ...], SamplingParams]] = []
        self.num_sampling = 0

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, in_pieces: bool
    ) -> AsyncGenerator[TokenOutput, None]:
        index = len(self.requests)
        self.requests.append((tuple(prompt_ids), params))
        reply = self._replies[index]
        if not in_pieces:
            yield self._output(index, reply, self._finish_reason)
            return
        self.num_sampling += 1
        try:
            for position, token_id in enumerate(reply):
                await asyncio.sleep(0)
                is_last = position == len(reply) - 1
                yield self._output(index, [token_id], self._finish_reason if is_last else None)
        finally:
            self.num_sampling -= 1

    def _output(self, index: int, token_ids: list[int], finish_reason: str | None) -> TokenOutput:
        return TokenOutput(
            token_ids=tuple(token_ids),
            logprobs=tuple(-token_id / 8 for token_id in token_ids),
            finish_reason=finish_reason,
            policy_version=self._versions[index],
            token_versions=(self._versions[index],) * len(token_ids),
        )

    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError

    def check_alive(self) -> None:
        raise NotImplementedError


class BrokenEngine(FakeEngine):
    """Answers with one token, then with an error; ``generate`` answers with the error at once."""

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, in_pieces: bool
    ) -> AsyncGenerator[TokenOutput, None]:
        if in_pieces:
            yield self._output(0, [self._replies[0][0]], None)
        raise SamplerError("The engine is gone.")


def chat(engine: FakeEngine, **fields: Any) -> list[dict[str, Any]]:
    body = ChatRequest.model_validate({"model": MODEL, "messages": MESSAGES, **fields})
    return asyncio.run(collect(OpenAIFrontend(MODEL, renderer(), engine).chat(body)))


def complete(engine: FakeEngine, **fields: Any) -> list[dict[str, Any]]:
    body = CompletionRequest.model_validate({"model": MODEL, "prompt": "What", **fields})
    return asyncio.run(collect(OpenAIFrontend(MODEL, renderer(), engine).complete(body)))


async def collect(parts: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(part, allow_nan=False)) async for part in parts]


def the_chat_completion(parts: list[dict[str, Any]]) -> ChatCompletion:
    from openai.types.chat import ChatCompletion

    assert len(parts) == 1
    return ChatCompletion.model_validate(parts[0])


def streamed_text(parts: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


# -- chat, whole -----------------------------------------------------------------------------------------


def test_chat_completion_has_openais_shape_and_policy_version() -> None:
    reply = ids_of("The answer is 46.")
    engine = FakeEngine(reply)
    answer = the_chat_completion(chat(engine))
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "The answer is 46."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    prompt_ids, _ = engine.requests[0]
    assert list(prompt_ids) == renderer().prompt_ids(MESSAGES)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt_ids)
    assert answer.usage.completion_tokens == len(reply)
    assert answer.usage.total_tokens == len(prompt_ids) + len(reply)
    assert answer.model_extra == {"policy_version": 7}


def test_sampling_parameters_reach_the_engine() -> None:
    engine = FakeEngine(ids_of("46"))
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "max_tokens": 3, "seed": 11, "stop": "</answer>"}
    chat(engine, **fields)
    assert engine.requests[0][1] == SamplingParams(**{**fields, "stop": ("</answer>",)})


def test_null_means_the_default() -> None:
    engine = FakeEngine(ids_of("46"))
    names = ["temperature", "top_p", "top_k", "max_tokens", "n", "stop", "seed", "stream", "stream_options"]
    names += ["logprobs", "top_logprobs", "tools", "tool_choice", "user", "frequency_penalty"]
    chat(engine, **dict.fromkeys(names))
    assert engine.requests[0][1] == SamplingParams()


def test_max_completion_tokens_is_max_tokens() -> None:
    engine = FakeEngine(ids_of("46"))
    chat(engine, max_completion_tokens=5)
    assert engine.requests[0][1].max_tokens == 5


def test_cut_answer_says_length() -> None:
    answer = the_chat_completion(chat(FakeEngine(ids_of("The ans", ended=False), finish_reason="length")))
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == "The ans"


def test_token_ids_are_returned_as_they_were_sampled() -> None:
    reply = ids_of("The answer is 46.")
    answer = chat(FakeEngine(reply), return_token_ids=True)[0]
    assert answer["prompt_token_ids"] == renderer().prompt_ids(MESSAGES)
    assert answer["choices"][0]["token_ids"] == reply


def test_version_of_each_token_is_returned_with_its_id() -> None:
    reply = ids_of("The answer is 46.")
    answer = chat(FakeEngine(reply, versions=[7]), return_token_ids=True)[0]
    assert answer["choices"][0]["token_versions"] == [7] * len(reply)
    assert "token_versions" not in chat(FakeEngine(reply))[0]["choices"][0]


def test_logprobs_are_those_of_the_sampled_tokens() -> None:
    reply = ids_of("4é")
    answer = the_chat_completion(chat(FakeEngine(reply), logprobs=True, top_logprobs=0))
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content
    assert entries is not None
    assert [entry.logprob for entry in entries] == [-token_id / 8 for token_id in reply]
    assert [entry.token for entry in entries] == ["4", "\ufffd", "\ufffd", ""]
    assert [entry.bytes for entry in entries] == [[ord("4")], None, None, []]
    assert all(entry.top_logprobs == [] for entry in entries)


def test_each_choice_has_its_own_seed_and_oldest_version_counts() -> None:
    engine = FakeEngine(ids_of("1"), ids_of("22"), ids_of("333"), versions=[7, 5, 6])
    answer = the_chat_completion(chat(engine, n=3, seed=40))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == ["1", "22", "333"]
    assert [params.seed for _, params in engine.requests] == [40, 41, 42]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(renderer().prompt_ids(MESSAGES))
    assert answer.usage.completion_tokens == 2 + 3 + 4
    assert answer.model_extra == {"policy_version": 5}


def test_answer_ends_before_the_stop_string() -> None:
    reply = ids_of("<a>46</a>", ended=False)
    answer = chat(FakeEngine(reply), stop=["</a>", "zzz"], return_token_ids=True)[0]
    assert answer["choices"][0]["message"]["content"] == "<a>46"
    assert answer["choices"][0]["token_ids"] == reply


def test_text_parts_are_joined_and_answers_can_be_sent_back() -> None:
    engine = FakeEngine(ids_of("46"))
    sent_back = the_chat_completion(chat(FakeEngine(ids_of("Hm.")))).choices[0].message.model_dump()
    parts = [{"type": "text", "text": "Really?"}, {"type": "text", "text": "Look again."}]
    chat(engine, messages=[*MESSAGES, sent_back, {"role": "user", "content": parts}])
    expected = [
        *MESSAGES,
        {"role": "assistant", "content": "Hm."},
        {"role": "user", "content": "Really?\nLook again."},
    ]
    assert list(engine.requests[0][0]) == renderer().prompt_ids(expected)


# -- tools -----------------------------------------------------------------------------------------------


def joined(parts: list[dict[str, Any]]) -> Any:
    """The message of a stream, as the official client puts it together."""
    from openai.lib.streaming.chat import ChatCompletionStreamState
    from openai.types.chat import ChatCompletionChunk

    state: ChatCompletionStreamState[Any] = ChatCompletionStreamState()
    for part in parts:
        state.handle_chunk(ChatCompletionChunk.model_validate(part))
    return state.current_completion_snapshot.choices[0].message


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_parsed_for_requests_with_tools(stream: bool) -> None:
    from openai.types.chat import ChatCompletionChunk

    parts = chat(FakeEngine(ids_of(f"I calculate.\n{TOOL_CALL}")), tools=TOOLS, stream=stream)
    if stream:
        chunks = [ChatCompletionChunk.model_validate(part) for part in parts]
        assert chunks[0].choices[0].delta.role == "assistant"
        message: Any = joined(parts)
        finish_reason: str | None = chunks[-1].choices[0].finish_reason
    else:
        message = the_chat_completion(parts).choices[0].message
        finish_reason = parts[0]["choices"][0]["finish_reason"]
    assert finish_reason == "tool_calls"
    assert message.content == "I calculate."
    assert message.tool_calls[0].type == "function"
    assert message.tool_calls[0].function.name == "calculator"
    assert json.loads(message.tool_calls[0].function.arguments) == {"expression": "12+34"}


def test_call_with_half_a_character_can_be_sent() -> None:
    text = '<tool_call>{"name": "calculator", "arguments": {"expression": "\\ud83d"}}</tool_call>'
    (answer,) = chat(FakeEngine(ids_of(text)), tools=TOOLS)
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    call["function"]["arguments"].encode()
    assert json.loads(call["function"]["arguments"]) == {"expression": "\ud83d"}


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_the_text_stays_as_it_is(fields: dict[str, Any]) -> None:
    answer = the_chat_completion(chat(FakeEngine(ids_of(TOOL_CALL)), **fields))
    assert answer.choices[0].message.content == TOOL_CALL
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


def test_call_in_the_thoughts_is_none() -> None:
    thought = f"<think>Shall I? {TOOL_CALL}</think>"
    (whole,) = chat(FakeEngine(ids_of(f"{thought}Yes. {TOOL_CALL}")), tools=TOOLS)
    message = whole["choices"][0]["message"]
    assert len(message["tool_calls"]) == 1
    assert message["content"] == f"{thought}Yes."
    (whole,) = chat(FakeEngine(ids_of(f"{thought}No.")), tools=TOOLS)
    assert whole["choices"][0]["message"]["content"] == f"{thought}No."
    assert whole["choices"][0]["finish_reason"] == "stop"


def test_malformed_tool_call_stays_text() -> None:
    text = "<tool_call>nonsense</tool_call>"
    answer = the_chat_completion(chat(FakeEngine(ids_of(text)), tools=TOOLS))
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "stop"


def test_form_of_answer_reaches_engine_if_it_keeps_one() -> None:
    class FormalEngine(FakeEngine):
        keeps_structure = True

    form = {"type": "json_object"}
    chat(engine := FormalEngine(ids_of("46")), response_format=form)
    (_, params), *_ = engine.requests
    assert json.loads(params.structure or "")["format"]["json_schema"] == {"type": "object"}
    for stream in (False, True):
        with pytest.raises(ConfigError, match="FakeEngine cannot give an answer a form"):
            chat(FakeEngine(ids_of("46")), response_format=form, stream=stream)


def test_tools_and_the_history_of_calls_reach_the_chat_template() -> None:
    seen: list[Any] = []

    class RecordingRenderer(ChatRenderer):
        def prompt_ids(
            self, messages: Any, previous: Any = None, tools: Any = None, max_tokens: int | None = None
        ) -> list[int]:
            seen.append((messages, tools))
            return [1]

    function = {"name": "calculator", "arguments": '{"expression": "12+34"}'}
    call = {"id": "call_1", "type": "function", "function": function}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "46", "tool_call_id": "call_1"},
    ]
    body = ChatRequest.model_validate({"model": MODEL, "messages": history, "tools": TOOLS})
    frontend = OpenAIFrontend(MODEL, RecordingRenderer(tokenizer()), FakeEngine(ids_of("46")))
    asyncio.run(collect(frontend.chat(body)))
    (messages, tools) = seen[0]
    assert tools == TOOLS
    # Templates write arguments as JSON themselves: a text would be quoted twice.
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {"expression": "12+34"}
    assert messages[1]["content"] == ""
    assert messages[2] == {"role": "tool", "content": "46", "tool_call_id": "call_1"}


def test_tools_and_calls_that_chat_template_leaves_out_are_error() -> None:
    blind = build_tokenizer([MESSAGES])
    blind.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    frontend = OpenAIFrontend(MODEL, ChatRenderer(blind), FakeEngine())
    call = {"id": "call_1", "function": {"name": "calculator", "arguments": "{}"}}
    for fields, name in (
        ({"messages": MESSAGES, "tools": TOOLS}, "tools"),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [call]}]}, "tool_calls"),
    ):
        body = ChatRequest.model_validate({"model": MODEL, **fields})
        with pytest.raises(RequestError, match=f"chat template shows no {name}: write them into") as caught:
            asyncio.run(collect(frontend.chat(body)))
        assert status_of(caught.value) == 400


def test_template_options_of_a_request_reach_the_chat_template() -> None:
    thinking = build_tokenizer([MESSAGES])
    thinking.chat_template = "{{ messages[0].content }}{% if not enable_thinking %}(quick){% endif %}"
    frontend = OpenAIFrontend(MODEL, ChatRenderer(thinking), engine := FakeEngine(ids_of("46")))
    body = {"model": MODEL, "messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}
    asyncio.run(collect(frontend.chat(ChatRequest.model_validate(body))))
    (prompt_ids, _) = engine.requests[0]
    assert ChatRenderer(thinking).decode(prompt_ids).endswith("(quick)")
    body["chat_template_kwargs"] = {"enable_thought": False}
    with pytest.raises(RequestError, match="enable_thought"):
        asyncio.run(collect(frontend.chat(ChatRequest.model_validate(body))))


# -- chat, streamed --------------------------------------------------------------------------------------


def test_stream_opens_with_role_and_ends_with_finish_reason() -> None:
    from openai.types.chat import ChatCompletionChunk

    parts = chat(FakeEngine(ids_of("The answer is 46.")), stream=True)
    chunks = [ChatCompletionChunk.model_validate(part) for part in parts]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len(chunks) > 3
    assert streamed_text(parts) == "The answer is 46."
    assert all(part["policy_version"] == 7 and "usage" not in part for part in parts)


def test_usage_comes_last_if_asked_for() -> None:
    from openai.types.chat import ChatCompletionChunk

    reply = ids_of("46")
    parts = chat(
        FakeEngine(reply), stream=True, stream_options={"include_usage": True, "include_obfuscation": False}
    )
    last = ChatCompletionChunk.model_validate(parts[-1])
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(reply)


def test_several_choices_stream_side_by_side() -> None:
    engine = FakeEngine(ids_of("The first."), ids_of("Another one."))
    parts = chat(engine, stream=True, n=2, seed=1)
    assert [streamed_text(parts, index) for index in (0, 1)] == ["The first.", "Another one."]
    indices = [part["choices"][0]["index"] for part in parts]
    assert indices != sorted(indices)
    roles = [
        part["choices"][0]["index"]
        for part in parts
        if part["choices"][0]["delta"].get("role") == "assistant"
    ]
    assert sorted(roles) == [0, 1]


def test_streamed_characters_are_never_broken() -> None:
    parts = chat(FakeEngine(ids_of("aé€😀ß")), stream=True)
    pieces = [part["choices"][0]["delta"].get("content", "") for part in parts]
    assert [piece for piece in pieces if piece] == ["a", "é", "€", "😀", "ß"]


def test_stop_string_is_held_back_until_it_is_certain() -> None:
    parts = chat(FakeEngine(ids_of("1</b>2</a>", ended=False)), stream=True, stop=["</a>"])
    assert streamed_text(parts) == "1</b>2"
    parts = chat(FakeEngine(ids_of("1</", ended=False), finish_reason="length"), stream=True, stop=["</a>"])
    assert streamed_text(parts) == "1</"


def test_streamed_and_whole_texts_agree_for_any_tokens() -> None:
    draw = random.Random(0)
    for _ in range(60):
        reply = [draw.randrange(3, len(tokenizer())) for _ in range(draw.randrange(1, 30))]
        stop = ["a", "ab", "\ufffd4"][: draw.randrange(4)]
        whole = the_chat_completion(chat(FakeEngine(reply), stop=stop)).choices[0].message.content
        assert streamed_text(chat(FakeEngine(reply), stop=stop, stream=True)) == whole


def test_streamed_logprobs_are_complete_though_text_is_held_back() -> None:
    reply = ids_of("😀1")
    parts = chat(FakeEngine(reply), stream=True, return_token_ids=True, logprobs=True)
    assert parts[0]["prompt_token_ids"] == renderer().prompt_ids(MESSAGES)
    choices = [part["choices"][0] for part in parts[1:]]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == reply
    logprobs = [entry["logprob"] for choice in choices for entry in choice["logprobs"]["content"]]
    assert logprobs == [-token_id / 8 for token_id in reply]


async def test_closing_a_stream_ends_all_of_its_requests() -> None:
    engine = FakeEngine(ids_of("The answer is 46."), ids_of("The answer is 46."))
    body = ChatRequest.model_validate({"model": MODEL, "messages": MESSAGES, "stream": True, "n": 2})
    parts = OpenAIFrontend(MODEL, renderer(), engine).chat(body)
    for _ in range(4):
        await anext(parts)
    before = engine.num_sampling
    await parts.aclose()
    assert (before, engine.num_sampling) == (2, 0)


async def test_whole_answer_without_a_client_is_cancelled() -> None:
    class WaitingEngine(FakeEngine):
        async def sample(
            self, prompt_ids: Sequence[int], params: SamplingParams, in_pieces: bool
        ) -> AsyncGenerator[TokenOutput, None]:
            self.num_sampling += 1
            try:
                await asyncio.sleep(60)
            finally:
                self.num_sampling -= 1
            yield self._output(0, [], "nobody waits so long")

    engine = WaitingEngine()
    body = ChatRequest.model_validate({"model": MODEL, "messages": MESSAGES, "n": 3})
    answer = asyncio.ensure_future(anext(OpenAIFrontend(MODEL, renderer(), engine).chat(body)))
    await asyncio.sleep(0.01)
    before = engine.num_sampling
    answer.cancel()
    await asyncio.wait([answer])
    assert (before, engine.num_sampling) == (3, 0)


# -- text completions ------------------------------------------------------------------------------------


def test_text_completion_has_openais_shape() -> None:
    from openai.types import Completion

    engine = FakeEngine(ids_of(" is 46."))
    parts = complete(engine, prompt="What", logprobs=0, return_token_ids=True)
    answer = Completion.model_validate(parts[0])
    assert answer.object == "text_completion"
    assert answer.choices[0].text == " is 46."
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [-token_id / 8 for token_id in ids_of(" is 46.")]
    assert "".join(answer.choices[0].logprobs.tokens or []) == " is 46."
    assert list(engine.requests[0][0]) == ids_of("What", ended=False)
    assert parts[0]["choices"][0]["prompt_token_ids"] == ids_of("What", ended=False)
    assert parts[0]["policy_version"] == 7


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("What", ["What"]),
        ([5, 6], [[5, 6]]),
        (["What", "is"], ["What", "is"]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
def test_prompts_are_texts_or_token_ids_one_or_several(prompt: Any, expected: list[Any]) -> None:
    from openai.types import Completion

    expected = [ids_of(each, ended=False) if isinstance(each, str) else each for each in expected]
    engine = FakeEngine(*[ids_of("46")] * 4)
    answer = Completion.model_validate(complete(engine, prompt=prompt, n=2)[0])
    asked = [list(prompt_ids) for prompt_ids, _ in engine.requests]
    assert asked == [prompt_ids for prompt_ids in expected for _ in range(2)]
    assert [choice.index for choice in answer.choices] == list(range(2 * len(expected)))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, expected))


def test_streamed_text_completion_joins_to_its_text() -> None:
    parts = complete(FakeEngine(ids_of("é is 46.")), stream=True, stream_options={"include_usage": True})
    assert "".join(choice["text"] for part in parts for choice in part["choices"]) == "é is 46."
    assert parts[-2]["choices"][0]["finish_reason"] == "stop"
    assert parts[-1]["usage"]["completion_tokens"] == len(ids_of("é is 46."))


def test_text_completions_end_after_16_tokens_by_default() -> None:
    engine = FakeEngine(ids_of("46"), ids_of("46"))
    complete(engine)
    complete(engine, max_tokens=40)
    assert [params.max_tokens for _, params in engine.requests] == [16, 40]


# -- refusals --------------------------------------------------------------------------------------------


def test_model_that_is_served_is_listed_and_named() -> None:
    engine = FakeEngine()
    frontend = OpenAIFrontend(MODEL, renderer(), engine)
    models = frontend.models()
    assert [model["id"] for model in models["data"]] == [MODEL]
    for ask in (chat, complete):
        with pytest.raises(Exception, match=r"'gpt-4o'.*'tiny'") as caught:
            ask(engine, model="gpt-4o")
        error = request_error(caught.value)
        assert status_of(error) == 404
        assert error.param == "model"
        assert error.code == "model_not_found"
    frontend.beside = ("agent/calculator",)
    with pytest.raises(RequestError, match="this server serves 'tiny', 'agent/calculator'"):
        frontend.model("calculator")


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_that_fills_context_is_refused_before_first_chunk(stream: bool) -> None:
    engine = FakeEngine()
    engine.max_model_tokens = len(renderer().prompt_ids(MESSAGES))
    with pytest.raises(PromptTooLongError, match=str(engine.max_model_tokens)) as caught:
        chat(engine, stream=stream)
    error = request_error(caught.value)
    assert (status_of(error), error.code) == (400, "context_length_exceeded")
    assert engine.requests == []


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"logit_bias": {"5": 1.0}}, "logit_bias: {'5': 1.0} is not supported: use {}, or leave it out."),
        ({"store": True}, "store: True is not supported: use False, or leave it out."),
        (
            {"service_tier": "flex"},
            "service_tier: 'flex' is not supported: use 'auto' or 'default', or leave it out.",
        ),
        ({"modalities": ["audio"]}, "modalities: ['audio'] is not supported: use ['text'], or leave it out."),
    ],
)
def test_value_without_effect_that_is_wanted_is_named(fields: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"model": MODEL, "messages": MESSAGES, **fields})
    assert str(request_error(caught.value)) == remedy


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"store": True}, "store"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"metadata": {"note": 1}}, "metadata.note"),
        ({"temperature": 2.1}, "temperature"),
        ({"stop": "x" * 257}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "\ud800"}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stop_token_ids": [5] * 17}, "stop_token_ids"),
        ({"n": 0}, "n"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"temperature": float("inf")}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "critic", "content": "No."}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "Hi", "colour": "red"}]}, "messages.0.colour"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"max_tokens": 3, "max_completion_tokens": 4}, None),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str | None) -> None:
    with pytest.raises(ValidationError) as caught:
        chat(FakeEngine(ids_of("46")), **fields)
    error = request_error(caught.value)
    assert status_of(error) == 400
    assert error.param == param
    assert openai_error(error)[1]["error"]["type"] == "invalid_request_error"
    assert (param or next(iter(fields))) in error.message


@pytest.mark.parametrize(
    "fields", [{"best_of": 1}, {"suffix": "x"}, {"logprobs": 21}, {"logprobs": False}, {"max_tokens": 0}]
)
def test_text_completions_refuse_what_they_cannot_do(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(fields))):
        complete(FakeEngine(ids_of("46")), **fields)


class WithOptions(FakeEngine):
    """Says with each token that it and the token 9 are likely, with ``-id / 8`` each."""

    takes_options = True

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, in_pieces: bool
    ) -> AsyncGenerator[TokenOutput, None]:
        async for output in super().sample(prompt_ids, params, in_pieces):
            options = params.options or EngineOptions()
            of_prompt = prompt_ids if options.prompt_logprobs is not None else ()
            yield replace(
                output,
                top_logprobs=tuple(map(self._likely, output.token_ids)) if options.top_logprobs else (),
                prompt_logprobs=tuple(self._likely(each) if n else {} for n, each in enumerate(of_prompt)),
            )

    def _likely(self, token_id: int) -> dict[int, float]:
        return {each: -each / 8 for each in (token_id, 9)}


def test_options_of_sampling_reach_the_engine() -> None:
    given = {"min_p": 0.1, "repetition_penalty": 1.1, "frequency_penalty": -2, "presence_penalty": 2}
    given |= {"min_tokens": 3, "ignore_eos": True, "stop_token_ids": [5]}
    engine = WithOptions(*[ids_of("46")] * 2)
    chat(engine, **given)
    complete(engine, prompt="1", **given)
    for _, params in engine.requests:
        assert params.options == EngineOptions(**{**given, "stop_token_ids": (5,)})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"no penalties, no log-prob.*leave them out"):
        chat(FakeEngine(ids_of("46")), min_p=0.1)


@pytest.mark.parametrize("stream", [False, True])
def test_likely_tokens_come_with_each_one(stream: bool) -> None:
    reply = ids_of("46")
    parts = chat(WithOptions(reply), logprobs=True, top_logprobs=1, stream=stream)
    entries = [
        entry for part in parts for entry in (part["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["logprob"] for entry in entries] == [-token_id / 8 for token_id in reply]
    for token_id, entry in zip(reply, entries, strict=True):
        (likely,) = entry["top_logprobs"]
        assert likely["logprob"] == max(-token_id / 8, -9 / 8)
        assert likely["token"] == renderer().decode((min(token_id, 9),))


def test_answer_that_echoes_its_prompt_has_logprobs_of_both() -> None:
    prompt, reply = ids_of("What is", ended=False), ids_of("46")
    for given, size in ((9, len(reply)), (0, 0)):
        (answer,) = complete(WithOptions(reply), prompt=prompt, echo=True, logprobs=1, max_tokens=given)
        (choice,) = answer["choices"]
        found = choice["logprobs"]
        ids = [*prompt, *reply[:size]]
        assert choice["text"] == "What is" + ("46" if size else "")
        assert found["tokens"] == [renderer().decode((each,)) for each in ids]
        assert found["token_logprobs"] == [None, *(-each / 8 for each in ids[1:])]
        assert found["top_logprobs"][0] is None and all(found["top_logprobs"][1:])
        assert [len("".join(found["tokens"][:n])) for n in range(len(ids))] == found["text_offset"]


@pytest.mark.parametrize(
    ("form", "said", "not_said"),
    [
        ({"regex": r"[0-9]{2}"}, "46", "4"),
        ({"choice": ["yes", "no"]}, "no", "nope"),
        ({"json": {"type": "integer"}}, "46", "four"),
    ],
)
def test_form_may_be_an_expression_a_choice_or_a_schema(form: Any, said: str, not_said: str) -> None:
    for make in (chat, complete):
        engine = WithForm(ids_of("46"))
        make(engine, structured_outputs=form, **({"prompt": "1"} if make is complete else {}))
        ((_, params),) = engine.requests
        assert allows(params.structure, said) and not allows(params.structure, not_said)


@pytest.mark.parametrize("form", [{"regex": "("}, {"choice": []}, {"regex": "a", "choice": ["a"]}, {}])
def test_form_that_cannot_be_is_an_error_by_its_name(form: Any) -> None:
    with pytest.raises((ValidationError, RequestError)) as caught:
        complete(WithForm(ids_of("46")), prompt="1", structured_outputs=form)
    error = request_error(caught.value)
    assert status_of(error) == 400 and str(error.param).startswith("structured_outputs")


class WithForm(FakeEngine):
    """Takes any form, and does not keep it."""

    keeps_structure = True


def test_answer_may_echo_its_prompt_alone() -> None:
    (answer,) = complete(FakeEngine(ids_of("46")), prompt="What is", echo=True)
    assert (answer["choices"][0]["text"], answer["choices"][0]["logprobs"]) == ("What is46", None)
    parts = complete(FakeEngine(ids_of("46")), prompt="What is", echo=True, stream=True)
    assert "".join(part["choices"][0]["text"] for part in parts) == "What is46"


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [[5], []], [-1]])
def test_empty_or_impossible_prompt_is_refused(prompt: Any) -> None:
    engine = FakeEngine(*[ids_of("46")] * 2)
    with pytest.raises(Exception, match="prompt") as caught:
        complete(engine, prompt=prompt)
    assert status_of(caught.value) == 400
    assert engine.requests == []


@pytest.mark.parametrize(
    "fields", [{"temperature": -1}, {"top_p": 0}, {"top_k": 0}, {"max_tokens": 0}, {"stop": ""}]
)
def test_impossible_sampling_parameters_are_the_clients_fault(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))) as caught:
        chat(FakeEngine(), **fields)
    assert status_of(caught.value) == 400


def test_what_clients_send_by_default_changes_nothing() -> None:
    engine = FakeEngine(*[ids_of("46")] * 2)
    defaults = {name: values[0] for name, values in NO_EFFECT.items()}
    defaults |= {"store": False, "service_tier": "auto", "logit_bias": {}, "modalities": ["text"]}
    ignored = {"metadata": {"run": "12"}, "safety_identifier": "somebody", "prompt_cache_key": "tasks"}
    ignored |= {"prompt_cache_retention": "24h"}
    plain, (answer,) = chat(engine)[0], chat(engine, **defaults, **ignored)
    assert engine.requests[0] == engine.requests[1]
    assert answer["choices"] == plain["choices"]


def test_developer_is_system_and_thoughts_reach_template() -> None:
    speaks = build_tokenizer([MESSAGES])
    speaks.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {{ m.reasoning_content or '' }}{% endfor %}"
    )
    frontend = OpenAIFrontend(MODEL, ChatRenderer(speaks), engine := FakeEngine(ids_of("46")))
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "assistant", "content": "46", "reasoning_content": "12+34"},
    ]
    body = ChatRequest.model_validate({"model": MODEL, "messages": messages})
    asyncio.run(collect(frontend.chat(body)))
    assert ChatRenderer(speaks).decode(engine.requests[0][0]) == "system Be brief. assistant 46 12+34"


def test_reasoning_effort_is_for_templates_that_read_it() -> None:
    with pytest.raises(RequestError, match="does not read 'reasoning_effort'") as caught:
        chat(FakeEngine(ids_of("46")), reasoning_effort="low")
    assert caught.value.param == "reasoning_effort" and "/" not in caught.value.message


def test_pinned_version_answers_or_the_present_one_is_named() -> None:
    (answer,) = chat(FakeEngine(ids_of("46")), policy_version=7)
    assert answer["policy_version"] == 7
    for engine, present in (
        (FakeEngine(ids_of("46")), 7),
        (FakeEngine(ids_of("46"), versions=[9]), 9),  # the weights came while it was sampled
    ):
        engine.version = min(present, 8)
        with pytest.raises(RequestError, match=f"policy_version=8 is not served: .* {present}") as caught:
            chat(engine, policy_version=8)
        assert status_of(caught.value) == 409


def test_answer_that_context_cannot_hold_is_error_and_not_cut() -> None:
    engine = FakeEngine(ids_of("46"))
    room = engine.max_model_tokens - len(renderer().prompt_ids(MESSAGES))
    assert chat(engine, max_tokens=room)
    with pytest.raises(RequestError, match=f"max_tokens={room + 1} is more than the {room} tokens"):
        chat(engine, max_tokens=room + 1)


LONG = "What is 12+34? " * 10_000
LONG_CALL = {
    "id": "call_1",
    "function": {"name": "calculator", "arguments": json.dumps({"expression": LONG})},
}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": LONG}]},
        {"tools": [{"type": "function", "function": {"name": LONG}}]},
        {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [LONG_CALL]}]},
    ],
)
def test_what_is_far_too_long_is_found_before_its_tokens(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatRenderer, "encode", lambda *_: pytest.fail("The text was encoded."))
    with pytest.raises(PromptTooLongError, match=r"15\d{4} characters") as caught:
        chat(FakeEngine(), **fields)
    error = request_error(caught.value)
    assert (status_of(error), error.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("prompt", "words"),
    [(LONG, "150000 characters"), (["What", LONG], "150000 characters"), (["What"] * 129, "129 prompts")],
)
def test_no_prompt_is_encoded_unless_all_may_be(
    prompt: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatRenderer, "encode", lambda *_: pytest.fail("The text was encoded."))
    with pytest.raises(Exception, match=words) as caught:
        complete(FakeEngine(), prompt=prompt)
    assert status_of(caught.value) == 400


def test_prompts_and_choices_are_few() -> None:
    engine = FakeEngine(*[ids_of("46")] * 128)
    complete(engine, prompt=["What"] * 64, n=2)
    with pytest.raises(RequestError, match="65 prompts with n=2 are more than 128 answers"):
        complete(engine, prompt=["What"] * 65, n=2)
    with pytest.raises(ValidationError, match="at most 2000"):
        chat(engine, messages=MESSAGES * 2001)


def test_text_completion_counts_with_tokens_that_it_may_get() -> None:
    engine = FakeEngine(*[ids_of("46")] * 33)
    engine.max_model_tokens = 32_768
    assert complete(engine, prompt=["What"] * 33), "16 tokens each"


def test_request_may_not_ask_for_tokens_without_end() -> None:
    engine = FakeEngine(*[ids_of("46")] * 13)
    engine.max_model_tokens = 100_000
    with pytest.raises(
        RequestError, match=r"n=12 may come to 1200000 tokens .* more than 1048576: lower n or max"
    ):
        chat(engine, messages=MESSAGES, n=12)
    assert chat(engine, messages=MESSAGES, n=12, max_tokens=10)
    engine.max_model_tokens = 2_000_000
    assert chat(engine, messages=MESSAGES), "one answer may fill the context"


@pytest.mark.parametrize("text", ["\ud800", "12 \udfff 34"])
def test_text_that_is_no_unicode_is_the_clients_fault(text: str) -> None:
    for content in (text, [{"type": "text", "text": text}]):
        with pytest.raises(ValidationError) as caught:
            chat(FakeEngine(), messages=[{"role": "user", "content": content}])
        error = request_error(caught.value)
        assert status_of(error) == 400 and "the text is no Unicode at position" in error.message
        assert error.param.startswith("messages.0.content")
    with pytest.raises(RequestError, match="prompt cannot be encoded"):
        complete(FakeEngine(), prompt=text)


@pytest.mark.parametrize(
    "function", [{"arguments": ""}, {"arguments": " \n"}, {"arguments": "null"}, {"arguments": None}, {}]
)
def test_old_call_may_have_no_arguments(function: dict[str, Any]) -> None:
    engine = FakeEngine(*[ids_of("46")] * 2)
    for given in (function, {"arguments": "{}"}):
        call = {"id": "call_1", "function": {"name": "calculator", **given}}
        answer = {"role": "assistant", "content": "", "tool_calls": [call], "annotations": []}
        chat(engine, messages=[*MESSAGES, answer])
    assert engine.requests[0] == engine.requests[1]


@pytest.mark.parametrize(
    ("fields", "sentences"),
    [
        ({"tool_choice": "any"}, "tool_choice: Input should be 'auto', 'none' or 'required'."),
        (
            {"tool_choice": {"type": "function", "name": "f"}},
            "tool_choice.function: Field required. tool_choice.name: this",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages.0.content.0.type: Input should",
        ),
        ({"stop": 5}, "stop: Input should be a valid string. stop: Input should be a valid list."),
    ],
)
def test_error_about_one_of_several_forms_is_about_nearest(fields: dict[str, Any], sentences: str) -> None:
    with pytest.raises(ValidationError) as caught:
        chat(FakeEngine(), **fields)
    error = request_error(caught.value)
    assert error.message.startswith(sentences)
    assert error.param == sentences.partition(":")[0]


@pytest.mark.parametrize("arguments", ["12+", "[1]", '"12"', "NaN", '{"a": 1e999}', "[" * 100_000])
def test_arguments_of_an_old_call_have_to_be_json(arguments: str) -> None:
    call = {"id": "call_1", "function": {"name": "calculator", "arguments": arguments}}
    with pytest.raises(Exception, match="'call_1'") as caught:
        chat(FakeEngine(), messages=[*MESSAGES, {"role": "assistant", "tool_calls": [call]}])
    assert status_of(caught.value) == 400


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        ([{"type": "web_search"}], "tool 0 has the type 'web_search'"),
        ([{"type": "function", "function": {"name": ""}}], "tool 0 has no function with a name"),
        ([*TOOLS, {"type": "function"}], "tool 1 has no function with a name"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": []}, "x": 1}, {}],
            "tool 1 has the type None",
        ),
        ([{"type": "function", "function": {"name": "f", "parameters": [1]}}], "parameters of the tool 'f'"),
    ],
)
def test_tool_that_is_no_function_is_an_error_by_its_number(tools: Any, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        chat(FakeEngine(), tools=tools)
    error = request_error(caught.value)
    assert (status_of(error), error.param) == (400, "tools") and words in error.message


@pytest.mark.parametrize("stream", [False, True])
def test_answer_without_parallel_calls_has_its_first_call_only(stream: bool) -> None:
    engine = FakeEngine(*[ids_of(TOOL_CALL + TOOL_CALL.replace("12+34", "5+6"))] * 2)
    for wanted, number in ((False, 1), (True, 2)):
        parts = chat(engine, tools=TOOLS, parallel_tool_calls=wanted, stream=stream)
        message = joined(parts) if stream else the_chat_completion(parts).choices[0].message
        assert [json.loads(call.function.arguments)["expression"] for call in message.tool_calls] == [
            "12+34",
            "5+6",
        ][:number]


def test_parallel_calls_may_be_forbidden_where_no_call_can_be() -> None:
    (answer,) = chat(FakeEngine(ids_of("46")), parallel_tool_calls=False)
    assert answer["choices"][0]["message"]["content"] == "46"


def test_thoughts_that_are_sent_back_are_those_of_either_name() -> None:
    sent = [
        {"role": "assistant", "content": "46", name: "12+34"} for name in ("reasoning", "reasoning_content")
    ]
    first, second = (ChatMessage.model_validate(each).for_template for each in sent)
    assert first == second == {"role": "assistant", "content": "46", "reasoning_content": "12+34"}


def test_messages_that_chat_template_refuses_are_clients_fault() -> None:
    strict = build_tokenizer([MESSAGES])
    strict.chat_template = "{{ raise_exception('System first!') }}"
    body = ChatRequest.model_validate({"model": MODEL, "messages": MESSAGES})
    with pytest.raises(Exception, match="System first!") as caught:
        asyncio.run(collect(OpenAIFrontend(MODEL, ChatRenderer(strict), FakeEngine()).chat(body)))
    assert status_of(caught.value) == 400


@pytest.mark.parametrize("stream", [False, True])
def test_failing_engine_is_the_servers_fault(stream: bool) -> None:
    with pytest.raises(SamplerError, match="gone") as caught:
        chat(BrokenEngine(ids_of("46")), stream=stream, n=2)
    error = request_error(caught.value)
    assert (status_of(error), openai_error(error)[1]["error"]["type"]) == (503, "server_error")


@pytest.mark.parametrize(
    "error",
    [
        ConflictError("Too many.", param="n", code="rate", retry_after=3),
        RequestError("Too many.", status=429, unit="requests", code="rate", retry_after=3),
    ],
)
def test_error_is_the_same_in_another_process(error: RequestError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_every_kind_of_error_has_a_status_of_its_own() -> None:
    kinds = {
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RequestError)
    }
    statuses = {kind.__name__: status_of(kind("")) for kind in kinds - {RequestError}}
    assert len(set(statuses.values())) == len(statuses) == 5
    assert statuses["NotFoundError"] == 404 and status_of(RuntimeError("broken")) == 500


def test_call_of_a_history_has_three_fields_for_the_template() -> None:
    function = {"name": "add", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}}
    call = {"id": "c", "type": "function", "index": 0, "function": function}
    message = ChatMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [call]})
    shown = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert message.for_template["tool_calls"] == [shown]
