"""Serves OpenAI requests with a token engine: the endpoints of a model and its adapters, without HTTP."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

from environments.errors import ConfigError, PromptTooLongError
from policies.agents.parsers import ToolParser, get_tool_parser, parser_name_of
from policies.model_api.errors import ConflictError, InvalidRequestError, RequestError, unknown_model
from policies.model_api.growing_text import GrowingText
from policies.model_api.limits import MAX_CHOICES, MAX_PICTURES, MAX_TOKENS
from policies.model_api.protocol import ChatRequest, CompletionRequest, SamplingRequest, encodable
from policies.model_api.reply import ChatReply, Json, Piece, Reply, TextReply
from policies.model_api.structure import structure_of
from policies.pictures import pictures_of
from policies.sampler import SamplingParams, TokenRequest

if TYPE_CHECKING:
    from environments.thoughts import SplitThought
    from policies.chat import ChatRenderer
    from policies.engines.base import Engine
    from policies.sampler import TokenOutput


Charge = Callable[[int], None]
"""Counts tokens of a client."""
OnAnswer = Callable[[str, Sequence[Piece]], Awaitable[None]]
"""Takes in an answer's id and all that was sampled for it, before its last part is sent."""


def _free(_: int) -> None:
    """A client's tokens are not counted."""


class OpenAIFrontend:
    """OpenAI's endpoints for a model and its adapters.

    Args:
        model_name: the name under which requests ask for the model.
        adapters: names under which they ask for one of its adapters.
        renderer: the model's chat template and tokenizer.
        engine: samples tokens.
        tool_parser: reads tool calls; ``None`` means the one of the model's chat template.
        max_sampled: answers that the engine samples at the same time; the others wait, in their order.
        pinned_versions: versions of the policy that other engines answer, by the names that clients use.
        split: separates thoughts from answers, which clients then get apart.
    """

    def __init__(
        self,
        model_name: str,
        renderer: ChatRenderer,
        engine: Engine,
        adapters: Iterable[str] = (),
        tool_parser: str | ToolParser | None = None,
        max_sampled: int = 64,
        pinned_versions: Mapping[str, int] | None = None,
        split: SplitThought | None = None,
    ) -> None:
        self._adapters: dict[str, str | None] = {model_name: None} | {name: name for name in adapters}
        self._pinned_versions = dict(pinned_versions or {})
        self._split = split
        self._renderer = renderer
        self._engine = engine
        self._places = asyncio.Semaphore(max_sampled)
        self.num_waiting = 0
        """Answers that wait for a place in the engine."""
        self.beside: Sequence[str] = ()
        """Names of what is served beside them, such as agents, for the error of an unknown one."""
        self._tool_parser = get_tool_parser(tool_parser or parser_name_of(renderer.template.text))
        # A reply's log-probabilities name each token; a vocabulary is small, decoding one token is not free.
        self._token_text = functools.cache(lambda token_id: renderer.decode((token_id,)))

    @property
    def names(self) -> list[str]:
        """All names by which clients ask for a model."""
        return [*self._adapters, *self._pinned_versions]

    def models(self) -> Json:
        """The body of ``GET /v1/models``."""
        return {"object": "list", "data": [self.model(name) for name in self.names]}

    def model(self, name: str) -> Json:
        """The body of ``GET /v1/models/{name}``. Raises ``RequestError`` if it is not served."""
        if name not in self._pinned_versions:
            self._check_model(name)
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "troupe",
            "max_model_len": self._engine.max_model_tokens,
            "policy_version": self._pinned_versions.get(name, self._engine.version),
        }

    def chat(
        self, body: ChatRequest, charge: Charge = _free, on_answer: OnAnswer | None = None
    ) -> AsyncGenerator[Json, None]:
        """Yield one ``chat.completion``, or with ``stream`` its chunks. Close it to stop sampling.

        ``charge`` gets the numbers of tokens of the prompt and of the answer, as they are used. ``on_answer``
        takes in the only answer of a request.

        Raises:
            RequestError: the request cannot be served.
            PromptTooLongError: the messages leave no room for a token.
            ConfigError: the sampling parameters are impossible.
            SamplerError: the engine has failed.
        """
        self._check(body)
        tools = _callable_tools(body)
        parser = self._tool_parser.for_tools(body.tools or ())
        structure = structure_of(body, parser)
        pictures = self._shown(body)
        prompt, prompt_end = self._render(body, tools)
        requests = self._requests(body, [prompt], structure, pictures)
        # An answer that is gone on with is past its thoughts, unless it ends within one.
        split = None if body.continue_final_message and not prompt_end else self._split
        reply = ChatReply(body, self._token_text, parser if tools else None, prompt_end, split)
        pieces = self._sample(requests, in_pieces=bool(body.stream))
        parts = _answer(body, requests, reply, pieces, charge, on_answer)
        return _first_calls(parts) if body.parallel_tool_calls is False else parts

    def num_prompt_tokens(self, body: ChatRequest) -> int:
        """Number of tokens that the prompt of a request has. Raises as ``chat`` does."""
        if body.model not in self._pinned_versions:
            self._check_model(body.model)
        self._shown(body)
        return len(self._render(body, _callable_tools(body))[0])

    def complete(self, body: CompletionRequest, charge: Charge = _free) -> AsyncGenerator[Json, None]:
        """Yield one ``text_completion``, or with ``stream`` several. Closes and raises as ``chat`` does."""
        self._check(body)
        requests = self._requests(body, self._encode(body), structure_of(body, self._tool_parser))
        reply = TextReply(body, self._token_text)
        echoes = bool(body.echo)
        pieces = self._sample(requests, in_pieces=bool(body.stream) and not echoes, echoes=echoes)
        return _answer(body, requests, reply, pieces, charge)

    def _check(self, body: SamplingRequest) -> None:
        self._check_model(body.model)
        if body.policy_version is not None and body.policy_version != self._engine.version:
            raise version_conflict(body.policy_version, self._engine.version)

    def _check_model(self, name: str) -> None:
        if name not in self._adapters:
            served = ", ".join(map(repr, (*self.names, *self.beside)))
            raise unknown_model(f"The model {name!r} does not exist: this server serves {served}.")

    def _shown(self, body: ChatRequest) -> tuple[str, ...]:
        """The pictures in its messages."""
        if not (num_pictures := sum(message.num_pictures for message in body.messages)):
            return ()
        if num_pictures > MAX_PICTURES:
            raise InvalidRequestError(
                f"{num_pictures} pictures are more than {MAX_PICTURES}: leave the earlier ones out.",
                param="messages",
            )
        if self._renderer.pictures is None:
            raise InvalidRequestError(
                "This model reads text only, and a message shows a picture: leave it out, or send its text.",
                param="messages",
            )
        if body.continue_final_message:
            raise InvalidRequestError(
                "An answer about pictures is not gone on with: leave continue_final_message out.",
                param="continue_final_message",
            )
        try:
            return pictures_of([message.for_template for message in body.messages])
        except ValueError as error:
            raise InvalidRequestError(f"A message is refused: {error}.", param="messages") from error

    def _render(self, body: ChatRequest, tools: list[Json] | None) -> tuple[list[int], str]:
        """The prompt, and what at its end may open a thought."""
        from jinja2 import TemplateError

        messages = [message.for_template for message in body.messages]
        renderer = self._with_options(body)
        try:
            if unseen := renderer.template.unseen(messages, tools):
                raise InvalidRequestError(
                    f"The model's chat template shows no {unseen}: write them into the texts of the "
                    "messages that it shows.",
                    param="tools" if unseen == "tools" else "messages",
                )
            most = self._engine.max_model_tokens
            if body.continue_final_message:
                return renderer.continuation_ids(messages, tools, most)
            prompt = renderer.prompt_ids(messages, tools=tools, max_tokens=most)
            return prompt, renderer.end_of_prompt(prompt)
        except (TemplateError, TypeError, ValueError, LookupError, RecursionError) as error:
            raise InvalidRequestError(
                f"The model's chat template rejects the messages "
                f"({renderer.template.rejected(messages, tools)}: {type(error).__name__}: {error}).",
                param="messages",
            ) from error

    def _with_options(self, body: ChatRequest) -> ChatRenderer:
        try:
            return self._renderer.for_client(body.template_options())
        except ConfigError as error:  # it names the model's folder, which is nothing for a client
            param = "chat_template_kwargs" if body.reasoning_effort is None else "reasoning_effort"
            options = " and ".join(map(repr, body.template_options()))
            raise InvalidRequestError(
                f"The model's chat template does not read {options}: leave {param} out.", param=param
            ) from error

    def _encode(self, body: CompletionRequest) -> list[list[int]]:
        """The prompts of a request, of which none is encoded unless all may be."""
        prompts = body.prompts()
        if len(prompts) * body.num_choices > MAX_CHOICES:
            raise InvalidRequestError(
                f"{len(prompts)} prompts with n={body.num_choices} are more than {MAX_CHOICES} answers: send "
                "several requests.",
                param="n",
            )
        for prompt in prompts:
            if isinstance(prompt, str):
                self._renderer.check_length(prompt, self._engine.max_model_tokens)
        try:
            return [
                self._renderer.encode(encodable(prompt)) if isinstance(prompt, str) else prompt
                for prompt in prompts
            ]
        except ValueError as error:
            raise InvalidRequestError(f"The prompt cannot be encoded: {error}.", param="prompt") from error

    def _requests(
        self,
        body: SamplingRequest,
        prompts: list[list[int]],
        structure: str | None = None,
        pictures: tuple[str, ...] = (),
    ) -> list[TokenRequest]:
        """Requests, one for each choice: first all of the first prompt. All show the same pictures."""
        if not prompts or not all(prompts):
            raise InvalidRequestError("The prompt is empty: send at least one token.", param="prompt")
        context = self._engine.max_model_tokens
        rooms = [context - len(prompt_ids) for prompt_ids in prompts]
        least = min(rooms)
        if least < 1:  # the engine would say so too, but only when the first chunk is due
            raise PromptTooLongError(
                f"The prompt has {context - least} tokens and the model's context holds {context}, the "
                "answer included: shorten the prompt."
            )
        if body.max_tokens is not None and body.max_tokens > least and not body.cap_max_tokens:
            raise InvalidRequestError(
                f"max_tokens={body.max_tokens} is more than the {least} tokens that the context of {context} "
                "has left: lower it, or leave it out.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        params = body.sampling_params().replace(adapter=self._adapters[body.model], structure=structure)
        self._check_total(prompts, params, body.num_choices)
        most = [params.max_tokens and min(params.max_tokens, room) for room in rooms]
        seeds = [None if params.seed is None else params.seed + index for index in range(body.num_choices)]
        return [
            TokenRequest(
                tuple(prompt_ids), params.replace(seed=seed, max_tokens=max_tokens), pictures=pictures
            )
            for prompt_ids, max_tokens in zip(prompts, most, strict=True)
            for seed in seeds
        ]

    def _check_total(self, prompts: list[list[int]], params: SamplingParams, num_choices: int) -> None:
        context = self._engine.max_model_tokens
        most = sum(min(context, len(prompt) + (params.max_tokens or context)) for prompt in prompts)
        total = most * num_choices
        if total > max(MAX_TOKENS, context):
            raise InvalidRequestError(
                f"{len(prompts)} prompts with n={num_choices} may come to {total} tokens with their "
                f"answers, which is more than {MAX_TOKENS}: lower n or max_tokens, or send several requests.",
                param="n",
            )

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        self.num_waiting += 1
        try:
            await self._places.acquire()
        finally:
            self.num_waiting -= 1
        try:
            yield
        finally:
            self._places.release()

    async def _stream(self, request: TokenRequest, in_pieces: bool) -> AsyncGenerator[TokenOutput, None]:
        outputs = self._engine.stream(request.prompt_ids, request.params, in_pieces, request.pictures)
        with self._engine.in_flight(request.prompt_ids, request.params):
            async with self._place(), aclosing(outputs):
                async for output in outputs:
                    yield output

    async def _sample(
        self, requests: list[TokenRequest], in_pieces: bool, echoes: bool = False
    ) -> AsyncGenerator[Piece, None]:
        """The answers, as they come: each whole, or ``in_pieces``. If one fails, the others are aborted."""
        texts = [GrowingText(self._renderer.decode, request.params.stop) for request in requests]
        started: set[int] = set()
        streams = [self._stream(request, in_pieces) for request in requests]
        async with aclosing(_merge(streams)) as outputs:
            async for index, output in outputs:
                growing, request = texts[index], requests[index]
                text = growing.add(output.token_ids, is_last=output.finish_reason is not None)
                prompt = self._renderer.text_of(request.prompt_ids) if echoes else ""
                is_first = index not in started
                yield Piece(index, request, text, output, is_first, prompt=prompt, stop=growing.stop)
                started.add(index)


def _callable_tools(body: ChatRequest) -> list[Json] | None:
    return None if body.tool_choice == "none" else body.tools or None


async def _answer(
    body: SamplingRequest,
    requests: list[TokenRequest],
    reply: Reply,
    source: AsyncGenerator[Piece, None],
    charge: Charge,
    on_answer: OnAnswer | None = None,
) -> AsyncGenerator[Json, None]:
    """Yield the whole reply, or its chunks."""
    # Every prompt counts once, however many choices it has.
    num_prompt_tokens = sum(len(request.prompt_ids) for request in requests) // body.num_choices
    charge(num_prompt_tokens)
    pieces = []
    async with aclosing(source):
        async for piece in source:
            charge(len(piece.output.token_ids))
            _check_version(body, piece)
            pieces.append(piece)
            if on_answer is not None and piece.output.finish_reason is not None:
                await on_answer(reply.answer_id, pieces)
            if body.stream:
                for chunk in reply.chunks(piece):
                    yield chunk
    if not body.stream:
        yield reply.whole(sorted(pieces, key=lambda piece: piece.index), num_prompt_tokens)
    elif body.includes_usage:
        yield reply.usage_chunk(pieces, num_prompt_tokens)


async def _first_calls(parts: AsyncGenerator[Json, None]) -> AsyncGenerator[Json, None]:
    """The parts of a reply without the calls that follow the first one of their choice."""
    async with aclosing(parts):
        async for part in parts:
            for choice in part["choices"]:
                message = choice.get("message") or choice["delta"]
                if calls := message.get("tool_calls"):
                    message["tool_calls"] = [
                        call for number, call in enumerate(calls) if call.get("index", number) == 0
                    ]
            yield part


def _check_version(body: SamplingRequest, piece: Piece) -> None:
    """Weights may have come while the answer was sampled."""
    if body.policy_version is None:
        return
    for version in piece.output.token_versions:
        if version != body.policy_version:
            raise version_conflict(body.policy_version, version)


def version_conflict(wanted: int, present: int) -> RequestError:
    """The error of a request for a policy version that is not served any more, or not yet."""
    return ConflictError(
        f"policy_version={wanted} is not served: the present one is {present}.",
        param="policy_version",
        code="policy_version_changed",
    )


async def _merge(
    streams: Sequence[AsyncIterator[TokenOutput]],
) -> AsyncGenerator[tuple[int, TokenOutput], None]:
    """The outputs of all streams as they come, each with its stream's index."""
    arrived: asyncio.Queue[tuple[int, TokenOutput | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncIterator[TokenOutput]) -> None:
        # A cancelled pump always waits inside the stream, which is cancelled too and ends its request.
        try:
            async for output in stream:
                arrived.put_nowait((index, output))
        finally:
            arrived.put_nowait((index, None))

    pumps = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(pumps)
    try:
        while num_open:
            index, output = await arrived.get()
            if output is None:
                await pumps[index]  # raises what the stream raised
                num_open -= 1
            else:
                yield index, output
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
