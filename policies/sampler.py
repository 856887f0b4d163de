"""Samplers: the clients that turn chat messages into a ``Completion``.

Nothing heavy is imported here, because every rollout actor imports this module.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from environments.errors import ConfigError, PromptTooLongError, SamplerError
from environments.types import Completion, Message

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI

    from policies.chat import ChatRenderer


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to draw tokens. The defaults sample from the model's own distribution.

    ``top_k=-1`` means no limit. ``max_tokens=None`` leaves the limit to the caller's token budget or to
    the server. ``seed=None`` draws a fresh seed for each request.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ConfigError(
                f"temperature={self.temperature} is negative: use 0 for greedy, 1 for sampling."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} is outside (0, 1]: use 1 to keep every token.")
        if self.top_k != -1 and self.top_k < 1:
            raise ConfigError(
                f"top_k={self.top_k} is impossible: use -1 to keep every token, or 1 and above."
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens} leaves no room for an answer: use 1 and above.")
        if isinstance(self.stop, str) or "" in self.stop:
            raise ConfigError(
                f"stop={self.stop!r} has to be a list of non-empty strings, such as ['</answer>']."
            )
        if self.seed is not None and self.seed < 0:
            raise ConfigError(f"seed={self.seed} is negative: use 0 and above, or None.")
        # Configuration files and OpenAI bodies have lists; a frozen value needs something hashable.
        object.__setattr__(self, "stop", tuple(self.stop))

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked like any other."""
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """An earlier call of the same conversation: the messages and tools that the model saw, and what it said.

    ``messages`` has to be a list of its own: one that the agent goes on appending to proves nothing.
    """

    messages: list[Message]
    completion: Completion
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """Everything that is needed to sample one completion.

    The request holds its own past, so samplers and servers keep no state and a request may be retried
    anywhere. ``previous`` lets the server extend the tokens of the turn before instead of rendering them
    again. ``session_id`` is the same for all calls of a conversation: servers use it to find the replica
    that holds the prefix. ``min_version`` is the oldest policy version that may answer. ``tools`` are
    OpenAI schemas for the chat template; agents that write their tools into a message leave it ``None``.
    """

    messages: list[Message]
    params: SamplingParams = SamplingParams()
    session_id: str = ""
    previous: Turn | None = None
    min_version: int = 0
    tools: list[dict[str, Any]] | None = None
    max_prompt_tokens: int | None = None
    """A longer prompt is refused with ``PromptTooLongError``, by our own servers before they sample."""


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One completion to sample: prompt ids [P], and the oldest policy version that may do it."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    min_version: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOutput:
    """Tokens sampled for a request. ``finish_reason`` is set on the last output of a request.

    ``policy_version`` is the version that was served when the engine took the request: no token of it
    was sampled by an older one.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    policy_version: int


class Sampler(Protocol):
    """Anything that can answer a ``SampleRequest``."""

    async def sample(self, request: SampleRequest) -> Completion:
        """One completion. Raises ``SamplerError`` (an error's text is never a completion)."""
        ...


class ScriptedSampler:
    """Plays prepared replies, for tests and demonstrations; needs no model.

    ``replies`` is a function of the messages, or a sequence that every conversation plays from its start:
    the reply is chosen by the number of assistant messages so far. Tokens are UTF-8 bytes, 256 ends a
    message, all log-probabilities are 0. Replies are cut at ``max_tokens``, between characters.
    """

    EOS_ID = 256

    def __init__(self, replies: Sequence[str] | Callable[[list[Message]], str]) -> None:
        self._replies = replies

    async def sample(self, request: SampleRequest) -> Completion:
        prompt_ids = self._prompt_ids(request.messages)
        check_prompt_length(len(prompt_ids), request)
        reply = self._reply(request.messages)
        completion_ids = (*reply.encode(), self.EOS_ID)
        finish_reason = "stop"
        max_tokens = request.params.max_tokens
        if max_tokens is not None and max_tokens < len(completion_ids):
            reply = bytes(completion_ids[:max_tokens]).decode(errors="ignore")
            completion_ids = tuple(reply.encode())
            finish_reason = "length"
        return Completion(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=(0.0,) * len(completion_ids),
            text=reply,
            finish_reason=finish_reason,
        )

    def _reply(self, messages: list[Message]) -> str:
        if callable(self._replies):
            return self._replies(messages)
        turn = sum(message["role"] == "assistant" for message in messages)
        if turn >= len(self._replies):
            raise SamplerError(
                f"The script has {len(self._replies)} replies and was asked for number {turn + 1}."
            )
        return self._replies[turn]

    def _prompt_ids(self, messages: list[Message]) -> tuple[int, ...]:
        """Append-only by construction: the next prompt starts with this prompt and its completion."""
        ids: list[int] = []
        for message in messages:
            ids += [*f"{message['role']}\n{message['content']}".encode(), self.EOS_ID]
        return (*ids, *b"assistant\n")


class OpenAISampler:
    """Samples any OpenAI-compatible server over HTTP (``POST {base_url}/chat/completions``).

    Token ids and log-probabilities are asked for, and taken where the server returns both (vLLM, and
    Troupe's own server, do; log-probabilities are as the server defines them). Otherwise a completion is
    ``retokenized``, and its length is what the server counted. Connection errors, timeouts and the
    statuses 408, 409, 429 and 5xx are retried with exponential backoff. What fails after that is a
    ``SamplerError``; a prompt that the model's context cannot hold is a ``PromptTooLongError``.

    Args:
        base_url: the server's address, mostly with the path ``/v1``.
        model: the model's name; ``None`` takes the first one that the server lists.
        api_retries: how often a request is repeated.
        tokenizer_path: folder of the model's tokenizer, for servers that keep token ids to themselves:
            prompts are then checked against their limit before they are sent, and retokenized.
        chat_template_kwargs: options of the server's chat template, such as
            ``{"enable_thinking": False}``; vLLM takes them.

    Raises:
        ConfigError: ``base_url`` is no address, or there is no tokenizer in ``tokenizer_path``.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        api_key: str = "EMPTY",
        timeout_seconds: float = 600.0,
        api_retries: int = 3,
        tokenizer_path: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"base_url={base_url!r} is no web address: write it like http://localhost:8000/v1."
            )
        self._base_url = base_url
        self._model = model
        self._api_key = api_key
        self._timeout_seconds = timeout_seconds
        self._api_retries = api_retries
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._renderer = _load_renderer(tokenizer_path, chat_template_kwargs) if tokenizer_path else None
        self._asks_for_tokens = True
        self._client: tuple[asyncio.AbstractEventLoop, AsyncOpenAI] | None = None

    async def sample(self, request: SampleRequest) -> Completion:
        import openai

        try:
            return await self._sample(request)
        except openai.APIConnectionError as error:
            raise SamplerError(
                f"The server at {self._base_url} cannot be reached ({error}; {self._api_retries} retries). "
                "Check that it is running, and that base_url has its host, port and path (mostly /v1)."
            ) from error
        except openai.APIStatusError as error:
            if _is_prompt_too_long(error):
                raise PromptTooLongError(f"{self._base_url} answered: {error.message}") from error
            raise SamplerError(
                f"The server at {self._base_url} answered {error.status_code} to a request for the model "
                f"{self._model!r}: {error.message} Check model, api_key and the server's log."
            ) from error

    async def _sample(self, request: SampleRequest) -> Completion:
        import openai

        client = self._open_client()
        if self._model is None:
            self._model = await self._first_model(client)
        own_prompt_ids = self._renderer.request_ids(request) if self._renderer else ()
        body = _request_body(request)
        if self._chat_template_kwargs:
            body["chat_template_kwargs"] = self._chat_template_kwargs
        if self._asks_for_tokens:
            try:
                response = await self._create(client, _asking_for_tokens(body))
                return self._completion(response, request, own_prompt_ids)
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                if _is_prompt_too_long(error):
                    raise
        completion = self._completion(await self._create(client, body), request, own_prompt_ids)
        # Only now is it certain that the request was refused for the tokens that it asked for.
        self._asks_for_tokens = False
        return completion

    async def _create(self, client: AsyncOpenAI, body: dict[str, Any]) -> Any:
        """The server's answer as plain data, since servers add fields to OpenAI's."""
        return await client.post("/chat/completions", cast_to=object, body={"model": self._model, **body})

    async def _first_model(self, client: AsyncOpenAI) -> str:
        models = [model.id async for model in client.models.list()]
        if not models:
            raise SamplerError(f"The server at {self._base_url} lists no model: name one with model=...")
        return models[0]

    def _open_client(self) -> AsyncOpenAI:
        """The client of the running event loop: its connections cannot be used from another loop."""
        from openai import AsyncOpenAI

        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            client = AsyncOpenAI(
                base_url=self._base_url,
                api_key=self._api_key,
                timeout=self._timeout_seconds,
                max_retries=self._api_retries,
            )
            self._client = (loop, client)
        return self._client[1]

    def _completion(
        self, response: Any, request: SampleRequest, own_prompt_ids: tuple[int, ...]
    ) -> Completion:
        try:
            choice = response["choices"][0]
            message = choice["message"]
            completion = Completion(
                text=message.get("content") or "",
                finish_reason=choice.get("finish_reason") or "stop",
                policy_version=int(response.get("policy_version") or 0),
                tool_calls=tuple(dict(call) for call in message.get("tool_calls") or ()),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SamplerError(
                f"The server at {self._base_url} sent no chat completion but {str(response)[:200]!r}."
            ) from error
        if completion.tool_calls and request.tools is None:
            raise SamplerError(
                f"The server at {self._base_url} parsed the tool calls away, but this agent reads the raw "
                "text: start the server without a tool-call parser."
            )
        tokens = _engine_tokens(response, choice)
        if tokens is None:
            completion = self._retokenized(completion, _usage(response), own_prompt_ids)
        else:
            completion = replace(completion, **tokens)
        # An outside server cannot be told the limit, so without a tokenizer it is only known afterwards.
        check_prompt_length(completion.num_prompt_tokens, request)
        return completion

    def _retokenized(
        self, completion: Completion, usage: tuple[int, int] | None, prompt_ids: tuple[int, ...]
    ) -> Completion:
        """The completion of a server that keeps token ids to itself."""
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


def check_prompt_length(num_tokens: int, request: SampleRequest) -> None:
    limit = request.max_prompt_tokens
    if limit is not None and num_tokens > limit:
        raise PromptTooLongError(
            f"The prompt has {num_tokens} tokens and max_prompt_tokens={limit}: raise it or shorten the task."
        )


def _request_body(request: SampleRequest) -> dict[str, Any]:
    """The request in OpenAI's words. What is left at its default is not sent: not every server knows it."""
    params = request.params
    body: dict[str, Any] = {
        "messages": request.messages,
        "temperature": params.temperature,
        "top_p": params.top_p,
    }
    if params.top_k != -1:
        body["top_k"] = params.top_k
    if params.max_tokens is not None:
        body["max_tokens"] = params.max_tokens
    if params.stop:
        body["stop"] = list(params.stop)
    if params.seed is not None:
        body["seed"] = params.seed
    if request.tools is not None:
        body["tools"] = request.tools
    return body


def _asking_for_tokens(body: dict[str, Any]) -> dict[str, Any]:
    return {**body, "logprobs": True, "return_token_ids": True}


def _is_prompt_too_long(error: APIStatusError) -> bool:
    """OpenAI has a code for it, vLLM only a sentence."""
    return error.code == "context_length_exceeded" or "maximum context length" in error.message
