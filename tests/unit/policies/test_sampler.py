from __future__ import annotations

import asyncio
import json
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from environments.errors import ConfigError, PromptTooLongError, SamplerError
from environments.thoughts import split_thought
from environments.types import Completion, Message
from policies.openai_sampler import OpenAISampler
from policies.sampler import SampleRequest, SamplingParams, ScriptedSampler, Turn

QUESTION: list[Message] = [{"role": "user", "content": "What is 1+1?"}]
Answer = tuple[int, dict[str, Any]]


def request(messages: list[Message] = QUESTION, **fields: Any) -> SampleRequest:
    return SampleRequest(messages=messages, **fields)


def sample(sampler: OpenAISampler | ScriptedSampler, request: SampleRequest) -> Completion:
    return asyncio.run(sampler.sample(request))


# --- SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", 0),
        ("top_k", -2),
        ("max_tokens", 0),
        ("stop", "</answer>"),
        ("stop", ("",)),
        ("seed", -1),
    ],
)
def test_impossible_sampling_params_name_the_field_and_the_value(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        SamplingParams(**{field: value})
    assert f"{field}={value!r}" in str(error.value)


def test_sampling_params_accept_greedy_and_lists_of_stop_words() -> None:
    params = SamplingParams(temperature=0, top_p=1.0, top_k=1, max_tokens=1, stop=["a"], seed=0)  # type: ignore[arg-type]
    assert params.stop == ("a",)
    assert hash(params) == hash(params.replace())


def test_replacing_a_field_checks_it_again() -> None:
    params = SamplingParams(temperature=0.5)
    assert params.replace(seed=3) == SamplingParams(temperature=0.5, seed=3)
    with pytest.raises(ConfigError, match="max_tokens=0"):
        params.replace(max_tokens=0)


# --- ScriptedSampler


def test_script_plays_from_its_start_in_every_conversation() -> None:
    sampler = ScriptedSampler(["one", "two"])
    later = [*QUESTION, {"role": "assistant", "content": "one"}, {"role": "user", "content": "more"}]
    assert [sample(sampler, request(messages)).text for messages in (QUESTION, later, QUESTION)] == [
        "one",
        "two",
        "one",
    ]


def test_script_that_has_run_out_is_an_error() -> None:
    with pytest.raises(SamplerError, match="0 replies"):
        sample(ScriptedSampler([]), request())


@pytest.mark.parametrize("max_tokens", [None, 4, 2])
def test_scripted_prompts_extend_what_was_seen_and_said(max_tokens: int | None) -> None:
    sampler = ScriptedSampler(lambda messages: "Zwölf")
    params = SamplingParams(max_tokens=max_tokens)
    first = sample(sampler, request(params=params))
    history = [*QUESTION, {"role": "assistant", "content": first.text}, {"role": "user", "content": "Sure?"}]
    second = sample(sampler, request(history, params=params))
    seen = first.prompt_ids + first.completion_ids
    assert second.prompt_ids[: len(seen)] == seen
    assert len(first.logprobs) == len(first.completion_ids)


def test_scripted_reply_is_cut_between_characters() -> None:
    completion = sample(ScriptedSampler(["Zwölf"]), request(params=SamplingParams(max_tokens=3)))
    assert (completion.text, completion.finish_reason) == ("Zw", "length")
    assert completion.completion_ids == tuple(b"Zw")


def test_scripted_reply_that_fits_ends_with_eos() -> None:
    completion = sample(ScriptedSampler(["ab"]), request(params=SamplingParams(max_tokens=3)))
    assert (completion.text, completion.finish_reason) == ("ab", "stop")
    assert completion.completion_ids == (*b"ab", ScriptedSampler.EOS_ID)


def test_scripted_sampler_refuses_a_prompt_over_the_limit() -> None:
    num_tokens = len(sample(ScriptedSampler(["x"]), request()).prompt_ids)
    sample(ScriptedSampler(["x"]), request(max_prompt_tokens=num_tokens))
    with pytest.raises(PromptTooLongError, match=f"max_prompt_tokens={num_tokens - 1}"):
        sample(ScriptedSampler(["x"]), request(max_prompt_tokens=num_tokens - 1))


# --- OpenAISampler, against a server of the standard library


class FakeServer:
    """Answers chat completions with ``answer(body, number of the request)`` and keeps what it was sent."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Answer]) -> None:
        self.answer = answer
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.gateways: list[str | None] = []
        self.base_url = ""

    def reply(self, path: str, body: dict[str, Any] | None) -> Answer:
        if body is None:
            return 200, {"object": "list", "data": [{"id": "served-model", "object": "model"}]}
        assert path == "/v1/chat/completions"
        self.bodies.append(body)
        return self.answer(body, len(self.bodies))


@contextmanager
def serving(answer: Callable[[dict[str, Any], int], Answer]) -> Iterator[FakeServer]:
    fake = FakeServer(answer)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(fake.reply(self.path, None))

        def do_POST(self) -> None:
            fake.keys.append(self.headers["Authorization"])
            fake.gateways.append(self.headers["X-Gateway"])
            self._send(
                fake.reply(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            )

        def _send(self, answer: Answer) -> None:
            status, body = answer
            payload = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            # Retries without a pause, so that the tests are fast.
            self.send_header("Retry-After-Ms", "1")
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    fake.base_url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()


def chat_completion(tokens: bool = False, **extra: Any) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": "2"},
        "finish_reason": "stop",
    }
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    body: dict[str, Any] = {"id": "x", "object": "chat.completion", "usage": usage}
    if tokens:
        choice["token_ids"] = [7, 2]
        choice["logprobs"] = {"content": [{"token": "2", "logprob": -0.5}, {"token": "", "logprob": -0.25}]}
        body["prompt_token_ids"] = [4, 5, 6]
    return {**body, "choices": [choice], **extra}


def error(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}


def test_tokens_logprobs_and_version_are_taken_from_the_server() -> None:
    with serving(lambda body, number: (200, chat_completion(tokens=True, policy_version=9))) as server:
        completion = sample(OpenAISampler(server.base_url), request())
    assert completion == Completion(
        prompt_ids=(4, 5, 6),
        completion_ids=(7, 2),
        logprobs=(-0.5, -0.25),
        text="2",
        finish_reason="stop",
        policy_version=9,
    )
    assert server.bodies[0]["return_token_ids"] is True
    assert server.bodies[0]["logprobs"] is True


WITHOUT_TOKENS = Completion(text="2", finish_reason="stop", retokenized=True, usage=(3, 2))


def test_completion_without_ids_reports_the_servers_counts() -> None:
    with serving(lambda body, number: (200, chat_completion())) as server:
        completion = sample(OpenAISampler(server.base_url), request())
    assert completion == WITHOUT_TOKENS
    assert (completion.num_prompt_tokens, completion.num_completion_tokens) == (3, 2)


def test_with_the_servers_ids_a_completion_counts_them() -> None:
    answer = chat_completion(tokens=True, usage={"prompt_tokens": 30, "completion_tokens": 20})
    with serving(lambda body, number: (200, answer)) as server:
        completion = sample(OpenAISampler(server.base_url), request())
    assert not completion.retokenized
    assert (completion.num_prompt_tokens, completion.num_completion_tokens) == (3, 2)


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": 3}])
def test_server_that_counts_nothing_is_an_error_with_the_remedy(usage: Any) -> None:
    with (
        serving(lambda body, number: (200, chat_completion(usage=usage))) as server,
        pytest.raises(SamplerError, match="tokenizer_path"),
    ):
        sample(OpenAISampler(server.base_url), request())


@pytest.fixture(scope="module")
def tokenizer_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    from policies.tiny import build_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer([QUESTION]).save_pretrained(folder)
    return str(folder)


def test_tokenizer_retokenizes_what_the_server_keeps_to_itself(tokenizer_path: str) -> None:
    from policies.chat import ChatRenderer, load_tokenizer

    renderer = ChatRenderer(load_tokenizer(tokenizer_path))
    prompt_ids = tuple(renderer.prompt_ids(QUESTION))
    completion_ids = (*renderer.encode("2"), renderer.eos_token_id)
    with serving(lambda body, number: (200, chat_completion(usage=None))) as server:
        completion = sample(OpenAISampler(server.base_url, tokenizer_path=tokenizer_path), request())
    assert completion == Completion(
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        text="2",
        finish_reason="stop",
        retokenized=True,
    )
    assert completion.num_prompt_tokens == len(prompt_ids)


def test_with_tokenizer_prompt_over_limit_is_not_even_sent(tokenizer_path: str) -> None:
    with serving(lambda body, number: (200, chat_completion())) as server:
        sampler = OpenAISampler(server.base_url, model="m", tokenizer_path=tokenizer_path)
        with pytest.raises(PromptTooLongError, match="max_prompt_tokens=4"):
            sample(sampler, request(max_prompt_tokens=4))
    assert server.bodies == []


def test_with_a_tokenizer_the_engines_ids_still_win(tokenizer_path: str) -> None:
    with serving(lambda body, number: (200, chat_completion(tokens=True))) as server:
        completion = sample(OpenAISampler(server.base_url, tokenizer_path=tokenizer_path), request())
    assert (completion.prompt_ids, completion.retokenized) == ((4, 5, 6), False)


def test_tokenizer_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        OpenAISampler("http://localhost:8000/v1", tokenizer_path=str(tmp_path))


def test_options_of_the_chat_template_are_sent_along() -> None:
    with serving(lambda body, number: (200, chat_completion())) as server:
        sample(OpenAISampler(server.base_url, chat_template_kwargs={"enable_thinking": False}), request())
        sample(OpenAISampler(server.base_url), request())
    assert server.bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
    assert "chat_template_kwargs" not in server.bodies[1]


def test_server_s_own_fields_and_headers_are_sent_along() -> None:
    with serving(lambda body, number: (200, chat_completion(tokens=True))) as server:
        sampler = OpenAISampler(
            server.base_url, extra_body={"min_p": 0.1, "user": "me"}, default_headers={"X-Gateway": "inner"}
        )
        sample(sampler, request())
    (body,) = server.bodies
    assert (body["min_p"], body["user"], server.gateways) == (0.1, "me", ["inner"])


@pytest.mark.parametrize("name", ["top_k", "chat_template_kwargs", "stream"])
def test_field_that_sampler_sets_itself_is_refused_with_remedy(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}'.*sampling_params.*chat_template_kwargs"):
        OpenAISampler("http://h/v1", extra_body={name: 1})


@pytest.mark.parametrize("missing", ["prompt_token_ids", "logprobs", "token_ids"])
def test_answer_with_only_part_of_tokens_counts_as_one_without(missing: str) -> None:
    answer = chat_completion(tokens=True)
    answer.pop(missing, None)
    answer["choices"][0].pop(missing, None)
    with serving(lambda body, number: (200, answer)) as server:
        completion = sample(OpenAISampler(server.base_url), request())
    assert completion == WITHOUT_TOKENS


def test_request_carries_params_and_leaves_defaults_to_server() -> None:
    params = SamplingParams(temperature=0.6, top_p=0.9, top_k=20, max_tokens=5, stop=("END",), seed=1)
    with serving(lambda body, number: (200, chat_completion())) as server:
        sampler = OpenAISampler(server.base_url, model="mine", api_key="secret")
        sample(sampler, request(params=params))
        sample(sampler, request())
    full, plain = server.bodies
    expected = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 5, "stop": ["END"], "seed": 1}
    assert full.items() >= {**expected, "model": "mine", "messages": QUESTION}.items()
    assert not plain.keys() & {"top_k", "max_tokens", "stop", "seed", "tools"}
    assert server.keys == ["Bearer secret"] * 2


def test_without_a_model_the_first_one_served_is_used() -> None:
    with serving(lambda body, number: (200, chat_completion())) as server:
        sample(OpenAISampler(server.base_url), request())
    assert server.bodies[0]["model"] == "served-model"


def test_model_is_known_before_anything_is_sampled() -> None:
    with serving(lambda body, number: (200, chat_completion())) as server:
        assert asyncio.run(OpenAISampler(server.base_url).served_model()) == "served-model"
        assert asyncio.run(OpenAISampler(server.base_url, model="mine").served_model()) == "mine"
    with pytest.raises(SamplerError, match="cannot be reached"):
        asyncio.run(OpenAISampler("http://127.0.0.1:1/v1", api_retries=0).served_model())


@pytest.mark.parametrize("status", [400, 422])
def test_server_that_refuses_token_ids_is_sent_none_again(status: int) -> None:
    def strict(body: dict[str, Any], number: int) -> Answer:
        if "return_token_ids" in body:
            return status, error("unknown field return_token_ids")
        return 200, chat_completion()

    with serving(strict) as server:
        sampler = OpenAISampler(server.base_url)
        assert [sample(sampler, request()).text for _ in range(2)] == ["2", "2"]
    assert ["return_token_ids" in body for body in server.bodies] == [True, False, False]


def test_tokens_are_still_requested_after_a_bad_request() -> None:
    def refuses_first_task(body: dict[str, Any], number: int) -> Answer:
        return (400, error("no such role")) if number <= 2 else (200, chat_completion(tokens=True))

    with serving(refuses_first_task) as server:
        sampler = OpenAISampler(server.base_url)
        with pytest.raises(SamplerError, match="no such role"):
            sample(sampler, request())
        assert sample(sampler, request()).completion_ids == (7, 2)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_trouble_is_retried(status: int) -> None:
    def recovers(body: dict[str, Any], number: int) -> Answer:
        return (status, error("busy")) if number <= 2 else (200, chat_completion())

    with serving(recovers) as server:
        assert sample(OpenAISampler(server.base_url, api_retries=2), request()).text == "2"
    assert len(server.bodies) == 3


def test_lasting_trouble_is_an_error_and_never_a_response() -> None:
    busy = serving(lambda body, number: (503, error("overloaded")))
    with busy as server, pytest.raises(SamplerError, match=r"503.*overloaded"):
        sample(OpenAISampler(server.base_url, api_retries=2), request())
    assert len(server.bodies) == 3


def test_wrong_key_is_not_retried() -> None:
    key = str(401_401)
    with (
        serving(lambda body, number: (401, error(f"wrong key {key}"))) as server,
        pytest.raises(SamplerError, match=r"401.*api_key") as caught,
    ):
        sample(OpenAISampler(server.base_url, api_key=key), request())
    assert len(server.bodies) == 1
    assert key not in "".join(traceback.format_exception(caught.value))


def test_unreachable_server_is_named_with_what_to_check() -> None:
    with serving(lambda body, number: (200, {})) as server:
        base_url = server.base_url
    with pytest.raises(SamplerError) as error:
        sample(OpenAISampler(base_url, model="m", api_retries=0), request())
    assert base_url in str(error.value)
    assert "running" in str(error.value)


def test_base_url_that_is_no_address_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="localhost:8000"):
        OpenAISampler("localhost:8000/v1")


@pytest.mark.parametrize(
    "body",
    [
        error("too long", code="context_length_exceeded"),
        error("This model's maximum context length is 2048 tokens."),
    ],
)
def test_prompt_that_the_context_cannot_hold_has_its_own_error(body: dict[str, Any]) -> None:
    with serving(lambda _, number: (400, body)) as server, pytest.raises(PromptTooLongError):
        sample(OpenAISampler(server.base_url), request())
    assert len(server.bodies) == 1


def test_prompt_over_the_limit_of_the_request_has_the_same_error() -> None:
    with serving(lambda body, number: (200, chat_completion())) as server:
        sampler = OpenAISampler(server.base_url)
        assert sample(sampler, request(max_prompt_tokens=3)).text == "2"
        with pytest.raises(PromptTooLongError, match="max_prompt_tokens=2"):
            sample(sampler, request(max_prompt_tokens=2))


@pytest.mark.parametrize(
    "body",
    [
        {"hello": "world"},
        {"choices": []},
        {"choices": [{"message": None}]},
        {"choices": [{"message": {"tool_calls": ["clock"]}}]},
        {"choices": [{"message": {"tool_calls": 3}}]},
    ],
)
def test_answer_that_is_no_chat_completion_is_an_error(body: dict[str, Any]) -> None:
    with (
        serving(lambda _, number: (200, body)) as server,
        pytest.raises(SamplerError, match="no chat completion"),
    ):
        sample(OpenAISampler(server.base_url), request())


def thinking_answer(thought: str, content: str | None, finish_reason: str = "stop") -> dict[str, Any]:
    answer = chat_completion(tokens=True)
    answer["choices"][0]["message"] = {"role": "assistant", "reasoning": thought, "content": content}
    answer["choices"][0]["finish_reason"] = finish_reason
    return answer


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thought_that_server_has_read_stands_before_answer_again(name: str) -> None:
    answer = thinking_answer("\n1 and 1.\n", "\n\n2")
    message = answer["choices"][0]["message"]
    message[name] = message.pop("reasoning")
    with serving(lambda body, number: (200, answer)) as server:
        text = sample(OpenAISampler(server.base_url), request()).text
    assert text == "<think>\n1 and 1.\n</think>\n\n2"
    assert split_thought(text) == ("1 and 1.", "\n\n2")


@pytest.mark.parametrize(
    ("finish_reason", "text"), [("length", "<think>Hm, 1 and"), ("stop", "<think>Hm, 1 and</think>")]
)
def test_answer_that_is_only_thought_is_not_taken_for_nothing(finish_reason: str, text: str) -> None:
    answer = thinking_answer("Hm, 1 and", None, finish_reason)
    with serving(lambda body, number: (200, answer)) as server:
        completion = sample(OpenAISampler(server.base_url), request())
    assert (completion.text, completion.completion_ids) == (text, (7, 2))


def test_thought_that_the_prompt_opened_is_told_with_a_tokenizer(tmp_path: Path) -> None:
    from policies.tiny import CHAT_TEMPLATE, build_tokenizer

    tokenizer = build_tokenizer([QUESTION])
    tokenizer.chat_template = CHAT_TEMPLATE.strip() + "{{ '<think>\n' }}"
    tokenizer.save_pretrained(tmp_path)
    texts = {"Is it": "<think>\nIs it", "Is it?</think>2": "Is it?</think>2"}
    for said, text in texts.items():
        answer = chat_completion(choices=[{"message": {"content": said}, "finish_reason": "length"}])
        with serving(lambda body, number, answer=answer: (200, answer)) as server:
            completion = sample(OpenAISampler(server.base_url, tokenizer_path=str(tmp_path)), request())
        assert completion.text == text
        assert tokenizer.decode(completion.completion_ids) == said, "no token is sampled for the opening"


def test_call_that_server_has_read_in_open_thought_is_none() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "clock"}}]
    calls = {}
    for said in ("<think>Shall I?", "<think>Shall I?</think>", ""):
        answer = tool_calling_answer(call)
        answer["choices"][0]["message"]["content"] = said
        with serving(lambda body, number, answer=answer: (200, answer)) as server:
            calls[said] = sample(OpenAISampler(server.base_url), request(tools=tools)).tool_calls
    assert calls == {"<think>Shall I?": (), "<think>Shall I?</think>": (call,), "": (call,)}


def test_thought_before_a_call_has_ended_though_the_call_was_cut() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    answer = tool_calling_answer(call)
    answer["choices"][0] |= {"finish_reason": "length"}
    answer["choices"][0]["message"]["reasoning"] = "Shall I?"
    tools = [{"type": "function", "function": {"name": "clock"}}]
    with serving(lambda body, number: (200, answer)) as server:
        completion = sample(OpenAISampler(server.base_url), request(tools=tools))
    assert (completion.text, completion.tool_calls) == ("<think>Shall I?</think>", (call,))


def tool_calling_answer(call: dict[str, Any]) -> dict[str, Any]:
    answer = chat_completion()
    answer["choices"][0]["message"] = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer["choices"][0]["finish_reason"] = "tool_calls"
    return answer


def test_tool_calls_are_handed_on_where_tools_were_offered() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    tools = [{"type": "function", "function": {"name": "clock"}}]
    with serving(lambda body, number: (200, tool_calling_answer(call))) as server:
        completion = sample(OpenAISampler(server.base_url), request(tools=tools))
    assert (completion.text, completion.finish_reason) == ("", "tool_calls")
    assert completion.tool_calls == (call,)
    assert server.bodies[0]["tools"] == tools


def test_unrequested_tool_calls_are_an_error() -> None:
    with (
        serving(lambda body, number: (200, tool_calling_answer({"id": "1"}))) as server,
        pytest.raises(SamplerError, match="tool-call parser"),
    ):
        sample(OpenAISampler(server.base_url), request())


@pytest.mark.slow
def test_one_sampler_answers_many_requests_at_once() -> None:
    def echo(body: dict[str, Any], number: int) -> Answer:
        answer = chat_completion()
        answer["choices"][0]["message"]["content"] = body["messages"][0]["content"]
        return 200, answer

    async def ask_all(sampler: OpenAISampler) -> list[str]:
        requests = [request([{"role": "user", "content": str(i)}]) for i in range(20)]
        return [completion.text for completion in await asyncio.gather(*map(sampler.sample, requests))]

    with serving(echo) as server:
        assert asyncio.run(ask_all(OpenAISampler(server.base_url))) == [str(i) for i in range(20)]


# --- weight


def test_turn_is_frozen() -> None:
    turn = Turn(messages=QUESTION, completion=Completion(text="2", finish_reason="stop"))
    with pytest.raises(AttributeError):
        turn.messages = []  # type: ignore[misc]


def test_limit_that_context_cannot_hold_is_left_to_server() -> None:
    def answer(body: dict[str, Any], number: int) -> Answer:
        if "max_tokens" in body:
            return 400, error("This model's maximum context length is 10 tokens, you asked for 8192.")
        return 200, chat_completion(tokens=True)

    asked = request(params=SamplingParams(max_tokens=8192))
    with serving(answer) as server:
        assert sample(OpenAISampler(server.base_url), asked).completion_ids == (7, 2)
    assert ["max_tokens" in body for body in server.bodies] == [True, False]


NEWER_NAME = (
    "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens'."
)


def test_limit_is_sent_by_its_newer_name_from_then_on() -> None:
    def newer(body: dict[str, Any], number: int) -> Answer:
        return (400, error(NEWER_NAME)) if "max_tokens" in body else (200, chat_completion(tokens=True))

    asked = request(params=SamplingParams(max_tokens=12))
    with serving(newer) as server:
        sampler = OpenAISampler(server.base_url)
        assert [sample(sampler, asked).completion_ids for _ in range(2)] == [(7, 2)] * 2
    limits = [(body.get("max_tokens"), body.get("max_completion_tokens")) for body in server.bodies]
    assert limits == [(12, None), (None, 12), (None, 12)]


def test_requests_at_same_time_learn_newer_name_each_for_itself() -> None:
    both_there = threading.Barrier(2, timeout=60)

    def newer(body: dict[str, Any], number: int) -> Answer:
        if "max_tokens" not in body:
            return 200, chat_completion(tokens=True)
        both_there.wait()
        return 400, error(NEWER_NAME)

    async def ask_twice(sampler: OpenAISampler) -> None:
        asked = request(params=SamplingParams(max_tokens=12))
        await asyncio.gather(sampler.sample(asked), sampler.sample(asked))

    with serving(newer) as server:
        asyncio.run(ask_twice(OpenAISampler(server.base_url)))
    assert [body.get("max_completion_tokens") for body in server.bodies] == [None, None, 12, 12]


@pytest.mark.parametrize(
    "message",
    [
        "'max_tokens' or 'max_completion_tokens' is too large: 90. The maximum context length is 10.",
        "max_tokens is too large: 90. This model supports at most 10 completion tokens.",
    ],
)
def test_limit_too_large_for_the_server_is_left_out_once(message: str) -> None:
    def small(body: dict[str, Any], number: int) -> Answer:
        return (
            (400, error(message)) if body.get("max_tokens", 0) > 10 else (200, chat_completion(tokens=True))
        )

    with serving(small) as server:
        sampler = OpenAISampler(server.base_url)
        for limit in (90, 8):
            sample(sampler, request(params=SamplingParams(max_tokens=limit)))
    assert [body.get("max_tokens") for body in server.bodies] == [90, None, 8]
    assert not any("max_completion_tokens" in body for body in server.bodies)


def test_prompt_that_is_too_long_even_so_is_said_to_be() -> None:
    refusal = error("This model's maximum context length is 10 tokens, you asked for 30.")
    with serving(lambda body, number: (400, refusal)) as server, pytest.raises(PromptTooLongError):
        sample(OpenAISampler(server.base_url), request(params=SamplingParams(max_tokens=5)))


@pytest.mark.parametrize("content", [[{"token": "2"}], [7], "text"])
def test_answer_with_nonsense_in_it_is_a_sampler_error(content: Any) -> None:
    odd = chat_completion(tokens=True)
    odd["choices"][0]["logprobs"] = {"content": content}
    with (
        serving(lambda body, number: (200, odd)) as server,
        pytest.raises(SamplerError, match="no chat compl"),
    ):
        sample(OpenAISampler(server.base_url), request())
