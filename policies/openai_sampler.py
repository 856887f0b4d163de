"""The sampler of any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

from environments.chat_endpoint import is_web_address
from environments.errors import ConfigError, PromptTooLongError, SamplerError
from environments.thoughts import is_unfinished, with_opening
from environments.types import Completion
from policies.pictures import pictures_of
from policies.sampler import (
    Sampler,
    SamplerDefaults,
    SampleRequest,
    SamplingParams,
    check_arguments,
    check_prompt_length,
)

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI

    from policies.chat import ChatRenderer

NO_KEY = "EMPTY"
NEWER_LIMIT_NAME = "max_completion_tokens"
OWN_FIELDS = {field.name for field in fields(SamplingParams)} | {
    *("model", "messages", "tools", "chat_template_kwargs", "logprobs", "return_token_ids"),
    *("n", "stream", NEWER_LIMIT_NAME),
}
"""Fields of a request that the sampler sets itself, so that ``extra_body`` cannot have them."""


class OpenAISampler(Sampler):
    """Samples any OpenAI-compatible server over HTTP (``POST {base_url}/chat/completions``).

    Token ids and log-probabilities are requested, and used where the server returns both (vLLM, and
    Troupe's own server, do). Otherwise a completion is ``retokenized``, and its length is as the server
    counted it. Log-probabilities are as the server defines them: vLLM's are those before temperature, top_p
    and top_k, not of the distribution that was sampled from, unless it was started with
    ``--logprobs-mode processed_logprobs``. Connection errors, timeouts and the statuses 408, 409, 429 and
    5xx are retried with exponential backoff. A failure after that is a ``SamplerError``; a prompt that the
    model's context cannot hold is a ``PromptTooLongError``.

    Args:
        base_url: the server's address, mostly with the path ``/v1``.
        model: the model's name; ``None`` takes the first one that the server lists.
        api_retries: how often a request is repeated.
        tokenizer_path: folder of the model's tokenizer, for servers that return no token ids:
            prompts are then checked against their limit before they are sent, and retokenized.
        chat_template_kwargs: options of the server's chat template, such as
            ``{"enable_thinking": False}``; vLLM takes them.
        extra_body: fields of the request that only this server knows, such as ``{"min_p": 0.1}``.
        default_headers: HTTP headers of every request, such as a gateway's.

    Raises:
        ConfigError: ``base_url`` is no address, there is no tokenizer in ``tokenizer_path``, or
            ``extra_body`` has a field that is set elsewhere.
    """

    reads_tool_calls = True
    examples: ClassVar[Mapping[str, Any]] = {"base_url": "http://localhost:8000/v1"}
    policy_arguments = ("model", "chat_template_kwargs", "extra_body")

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        api_key: str = NO_KEY,
        timeout_seconds: float = 600.0,
        api_retries: int = 3,
        tokenizer_path: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        extra_body: Mapping[str, Any] | None = None,
        default_headers: Mapping[str, str] | None = None,
    ) -> None:
        if not is_web_address(base_url):
            raise ConfigError(
                f"base_url={base_url!r} is no web address: write it like http://localhost:8000/v1."
            )
        for name in extra_body or {}:
            if name in OWN_FIELDS:
                raise ConfigError(
                    f"extra_body has {name!r}, which the sampler sets itself: leave it out, and use "
                    "sampling_params, or rollout_engine_args={'chat_template_kwargs': ...}."
                )
        self._base_url = base_url
        self._model = model
        self._api_retries = api_retries
        self._connection: dict[str, Any] = {
            "base_url": base_url,
            "api_key": api_key,
            "timeout": timeout_seconds,
            "max_retries": api_retries,
            "default_headers": dict(default_headers or {}),
        }
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._extra_body = dict(extra_body or {})
        self._renderer = _load_renderer(tokenizer_path, chat_template_kwargs) if tokenizer_path else None
        self._requests_tokens = True
        self._limit_name = "max_tokens"
        self._client: tuple[asyncio.AbstractEventLoop, AsyncOpenAI] | None = None

    @classmethod
    def arguments(cls, given: Mapping[str, Any], defaults: SamplerDefaults) -> dict[str, Any]:
        known = {"tokenizer_path": defaults.tokenizer_path, "api_retries": defaults.api_retries}
        arguments = check_arguments(cls, {**known, **given})
        cls(**arguments)  # finds a wrong address or tokenizer here, and not in another process
        return arguments

    @classmethod
    async def default_model(cls, arguments: Mapping[str, Any]) -> str | None:
        return await cls(**arguments).served_model()

    @property
    def source(self) -> str:
        return f"The server at {self._base_url}"

    async def served_model(self) -> str:
        """The name of the model that is sampled. Raises ``SamplerError`` if the server does not name one."""
        with self._explained_errors():
            return await self._known_model(self._open_client())

    async def sample(self, request: SampleRequest) -> Completion:
        with self._explained_errors():
            return await self._sample(request)

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        import openai

        try:
            yield
        except openai.APIConnectionError as error:
            raise SamplerError(
                f"The server at {self._base_url} cannot be reached ({error}; {self._api_retries} retries). "
                "Check that it is running, and that base_url has its host, port and path (mostly /v1)."
            ) from error
        except openai.APIStatusError as error:
            if _is_too_long(error):
                raise PromptTooLongError(f"{self._base_url} answered: {error.message}") from error
            key = self._connection["api_key"]
            fault = error.message if key == NO_KEY else error.message.replace(key, "***")
            # Not from the error: a server may repeat the key, and a traceback would show it.
            raise SamplerError(
                f"The server at {self._base_url} answered {error.status_code} to a request for the model "
                f"{self._model!r}: {fault} Check model, api_key and the server's log."
            ) from None
        except (openai.OpenAIError, ValueError) as error:  # such as an answer that is no JSON
            raise SamplerError(f"The server at {self._base_url} sent no answer: {error!r}.") from error

    async def _sample(self, request: SampleRequest) -> Completion:
        import openai

        client = self._open_client()
        model = await self._known_model(client)
        own_prompt_ids = self._renderer.request_ids(request) if self._renderer else ()
        params = request.params if self._renderer is None else request.params_within(len(own_prompt_ids))
        body = {"model": model, **_request_body(request, params), **self._extra_body}
        if self._chat_template_kwargs:
            body["chat_template_kwargs"] = self._chat_template_kwargs
        if self._requests_tokens:
            try:
                response = await self._create(client, {**body, "logprobs": True, "return_token_ids": True})
                return self._completion(response, request, own_prompt_ids)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                if _is_too_long(error):
                    raise
        completion = self._completion(await self._create(client, body), request, own_prompt_ids)
        # The same request without the tokens succeeded, so the server rejected it because of them.
        self._requests_tokens = False
        return completion

    async def _create(self, client: AsyncOpenAI, body: dict[str, Any]) -> Any:
        """The server's answer as plain data, since servers add fields to OpenAI's.

        OpenAI's thinking models take the limit only by its newer name. vLLM rejects a limit that its context
        cannot hold beside the prompt: the rest of the context is shorter then, so the request goes without.
        """
        import openai

        body = dict(body)
        limit = body.pop("max_tokens", None)
        while True:
            name = self._limit_name
            limited = body if limit is None else {**body, name: limit}
            try:
                return await client.post("/chat/completions", cast_to=object, body=limited)
            except openai.BadRequestError as error:
                if limit is None:
                    raise
                if _is_too_long(error):  # vLLM names both then
                    limit = None
                elif name != NEWER_LIMIT_NAME and NEWER_LIMIT_NAME in error.message:
                    self._limit_name = NEWER_LIMIT_NAME
                elif name in error.message:
                    limit = None
                else:
                    raise

    async def _known_model(self, client: AsyncOpenAI) -> str:
        if self._model is None:
            models = [model.id async for model in client.models.list()]
            if not models:
                raise SamplerError(f"The server at {self._base_url} lists no model: name one with model=...")
            self._model = models[0]
        return self._model

    def _open_client(self) -> AsyncOpenAI:
        """The client of the running event loop: its connections cannot be used from another loop."""
        from openai import AsyncOpenAI

        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            self._client = loop, AsyncOpenAI(**self._connection)
        return self._client[1]

    def _completion(self, response: Any, request: SampleRequest, own_prompt_ids: Sequence[int]) -> Completion:
        try:
            choice = response["choices"][0]
            message = choice["message"]
            finish_reason = choice.get("finish_reason") or "stop"
            completion = Completion(
                text=_text(message, finish_reason),
                finish_reason=finish_reason,
                policy_version=int(response.get("policy_version") or 0),
                token_versions=tuple(choice.get("token_versions") or ()),
                tool_calls=tuple(dict(call) for call in message.get("tool_calls") or ()),
                pictures=() if self._renderer is None else pictures_of(request.messages),
            )
            tokens, usage = _engine_tokens(response, choice), _usage(response)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SamplerError(
                f"The server at {self._base_url} sent no chat completion but {str(response)[:200]!r}."
            ) from error
        if completion.tool_calls and request.tools is None:
            raise SamplerError(
                f"The server at {self._base_url} parsed the tool calls, but this agent reads them from "
                "the raw text: start the server without a tool-call parser."
            )
        if tokens is None:
            completion = self._retokenized(completion, usage, own_prompt_ids)
        else:
            completion = replace(completion, **tokens)
        if self._renderer is not None and not _thought(message):
            prompt_end = self._renderer.end_of_prompt(completion.prompt_ids)
            completion = replace(completion, text=with_opening(prompt_end, completion.text))
        if is_unfinished(completion.text):  # a server without a reasoning parser reads calls in thoughts too
            completion = replace(completion, tool_calls=())
        # An outside server cannot be told the limit, so without a tokenizer it is only known afterwards.
        check_prompt_length(completion.num_prompt_tokens, request)
        return completion

    def _retokenized(
        self, completion: Completion, usage: tuple[int, int] | None, prompt_ids: Sequence[int]
    ) -> Completion:
        """The completion of a server that returns no token ids."""
        completion_ids: tuple[int, ...] = ()
        if self._renderer is not None:
            end_ids = (self._renderer.eos_token_id,) if completion.finish_reason == "stop" else ()
            completion_ids = (*self._renderer.encode(completion.text), *end_ids)
        elif usage is None:
            raise SamplerError(
                f"The server at {self._base_url} returns neither token ids nor their number (usage), so no "
                "token budget can be kept: give tokenizer_path, the folder of the model's tokenizer."
            )
        return replace(
            completion, prompt_ids=prompt_ids, completion_ids=completion_ids, retokenized=True, usage=usage
        )


def _load_renderer(tokenizer_path: str, chat_template_kwargs: Mapping[str, Any] | None) -> ChatRenderer:
    from policies.chat import ChatRenderer, load_tokenizer

    return ChatRenderer(load_tokenizer(tokenizer_path), chat_template_kwargs)


def _text(message: dict[str, Any], finish_reason: str) -> str:
    """The text as the model has written it: where a server has cut the thought out, with the thought again.

    So an agent sees the same with and without the server's reasoning parser, and an answer that was cut off
    in the middle of the thought is no empty one.
    """
    answer = message.get("content") or ""
    thought = _thought(message)
    if not thought:
        return answer
    is_cut = finish_reason == "length" and not answer and not message.get("tool_calls")
    return f"<think>{thought}" + ("" if is_cut else f"</think>{answer}")


def _thought(message: dict[str, Any]) -> str:
    thought = message.get("reasoning_content") or message.get("reasoning")  # vLLM has changed the name
    return thought if isinstance(thought, str) else ""


def _engine_tokens(response: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any] | None:
    """The fields of a ``Completion`` that only the engine knows, if the server returns all of them.

    Training needs all three, aligned. Part of them would be worse than none: it would look trainable.
    """
    completion_ids = tuple(choice.get("token_ids") or ())
    prompt_ids = tuple(response.get("prompt_token_ids") or choice.get("prompt_token_ids") or ())
    logprobs = tuple(entry["logprob"] for entry in (choice.get("logprobs") or {}).get("content") or ())
    if not prompt_ids or not completion_ids or len(logprobs) != len(completion_ids):
        return None
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


def _usage(response: dict[str, Any]) -> tuple[int, int] | None:
    usage = response.get("usage") or {}
    prompt, completion = usage.get("prompt_tokens"), usage.get("completion_tokens")
    return None if prompt is None or completion is None else (int(prompt), int(completion))


def _request_body(request: SampleRequest, params: SamplingParams) -> dict[str, Any]:
    """The request in OpenAI's format. Fields at their default are not sent: not every server knows them."""
    body = {
        "messages": request.messages,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": None if params.top_k == -1 else params.top_k,
        "max_tokens": params.max_tokens,
        "stop": list(params.stop) or None,
        "seed": params.seed,
        "structured_outputs": params.structure and {"structural_tag": params.structure},  # vLLM's name for it
        "tools": request.tools,
    }
    return {name: value for name, value in body.items() if value is not None}


def _is_too_long(error: APIStatusError) -> bool:
    """OpenAI has a code for it, vLLM only a sentence."""
    return error.code == "context_length_exceeded" or "maximum context length" in error.message
