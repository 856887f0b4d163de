"""OpenAI's protocol, as far as Troupe serves it: the fields of requests, and the form of errors.

Fields follow OpenAI's API reference; ``top_k`` and ``return_token_ids`` are vLLM's extensions. A field that
is not served is an error that names it: an ignored parameter would spoil an experiment unnoticed.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, Field, StrictInt, ValidationInfo, field_validator, model_validator

from policies.model_api.limits import (
    MAX_CHOICES,
    MAX_LIKELY_TOKENS,
    MAX_MESSAGES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
)
from policies.model_api.messages import Body, ChatMessage, Text, Tools, encodable
from policies.sampler import EngineOptions, SamplingParams

MAX_SEED = 2**63 - 1 - MAX_CHOICES  # choice i is sampled with seed + i, and the engine takes 64 bits
TEXT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


# -- requests --------------------------------------------------------------------------------------------


NO_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([],),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "stop_token_ids": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "return_token_ids": (False,),
    "tools": ([],),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True, False),
    "response_format": ({"type": "text"},),
    "verbosity": ("medium",),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
"""Values that change nothing, by their fields: clients send them by default."""


def _only(*served: Any) -> AfterValidator:
    """Takes only these values, which change nothing, or none."""

    def check(value: Any) -> Any:
        if value is not None and value not in served:
            wanted = " or ".join(map(repr, served))
            raise ValueError(f"{value!r} is not supported: use {wanted}, or leave it out")
        return value

    return AfterValidator(check)


TokenId = Annotated[int, Field(ge=0)]
StopText = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS), AfterValidator(encodable)]
Stop = StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None
LikelyTokens = Annotated[StrictInt, Field(ge=0, le=MAX_LIKELY_TOKENS)]


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    """Accepted and ignored: no chunk has padding."""


class JsonSchema(Body):
    """The last three fields change nothing: the schema always holds, and one that cannot is an error."""

    schema_: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=dict)
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class StructuredOutputs(Body):
    """The form of the answer's text, by vLLM's names: one of these."""

    schema_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _check_number(self) -> StructuredOutputs:
        if sum(each is not None for each in (self.schema_, self.regex, self.choice)) != 1:
            raise ValueError("a text has one form: send one of json, regex and choice")
        return self


class SamplingRequest(Body):
    """Fields that chat and text completions have in common. ``null`` always means the default."""

    model: str
    temperature: Annotated[float, Field(le=2)] | None = None
    """OpenAI's highest is 2, and so is ours: an engine may reject what is above."""
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stop: Stop = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    """vLLM's, as all up to ``stop_token_ids``."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS)] | None = None
    return_token_ids: bool | None = None
    policy_version: Annotated[int, Field(ge=0)] | None = None
    """The version that has to answer: status 409 where the policy has moved on, with the present one."""
    cap_max_tokens: bool | None = None
    """Troupe's: whether a ``max_tokens`` beyond the room of the context means that room, and is no error."""
    user: str | None = None
    """Accepted and ignored, as the next three: they are about OpenAI's customer and cache."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    """Accepted and ignored: notes beside a stored answer, and none is stored."""
    store: Annotated[bool | None, _only(False)] = None
    service_tier: Annotated[str | None, _only("auto", "default")] = None
    logit_bias: Annotated[dict[str, float] | None, _only({})] = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> SamplingRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    def likely_tokens(self) -> tuple[int | None, int | None]:
        """Return how many likely tokens come with each sampled one, and with each of the prompt; ``None``
        where there are no log-probabilities.
        """
        raise NotImplementedError

    @property
    def num_choices(self) -> int:
        """Number of choices for each prompt."""
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling_params(self) -> SamplingParams:
        """Raises ``ConfigError`` for values that cannot be sampled with."""
        given = self.model_dump(include={"temperature", "top_p", "top_k", "seed"}, exclude_none=True)
        return SamplingParams(
            **given, max_tokens=self.most_tokens(), stop=self.stops(), options=self._options()
        )

    def most_tokens(self) -> int | None:
        """Return how many tokens may be sampled for a choice, if the request says it."""
        return self.max_tokens

    def _options(self) -> EngineOptions | None:
        names = {field.name for field in fields(EngineOptions)}
        given = self.model_dump(include=names, exclude_none=True)
        top_logprobs, prompt_logprobs = self.likely_tokens()
        given |= {"top_logprobs": top_logprobs or 0, "prompt_logprobs": prompt_logprobs}
        given["stop_token_ids"] = tuple(given.get("stop_token_ids", ()))
        options = EngineOptions(**given)
        return None if options == EngineOptions() else options


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    """The one tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class ResponseFormat(Body):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ValueError("type='json_schema' and json_schema need each other: send both, or neither")
        return self


class ChatRequest(SamplingRequest):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    """OpenAI's newer name of ``max_tokens``."""
    logprobs: bool | None = None
    top_logprobs: LikelyTokens | None = None
    tools: Tools = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    """``required`` and a named tool force one call of a tool."""
    parallel_tool_calls: bool | None = None
    """Limit of an answer to one call at most, with ``False``. A forced call is always the only one."""
    response_format: ResponseFormat | None = None
    modalities: Annotated[list[str] | None, _only(["text"])] = None
    verbosity: Annotated[str | None, _only("medium")] = None
    reasoning_effort: Text | None = None
    """Reaches the chat template under this name; a template that does not read it is an error."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Options of the chat template, by vLLM's name for them: ``{"enable_thinking": false}``."""
    continue_final_message: bool | None = None
    """vLLM's, as the next: whether the answer goes on with the text of the last message."""
    add_generation_prompt: bool | None = None
    """The contrary, which adds nothing."""

    @model_validator(mode="after")
    def _use_max_completion_tokens(self) -> ChatRequest:
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise ValueError("max_tokens and max_completion_tokens contradict each other: send one")
        self.max_tokens = both.pop() if both else None
        return self

    @field_validator("top_logprobs")
    @classmethod
    def _check_top_logprobs(cls, value: int | None, given: ValidationInfo) -> int | None:
        if value and not given.data.get("logprobs"):
            raise ValueError(f"{value} needs logprobs=true")
        return value

    @field_validator("continue_final_message")
    @classmethod
    def _check_final_message(cls, value: bool | None, given: ValidationInfo) -> bool | None:
        if value and (messages := given.data.get("messages")):
            if messages[-1].role != "assistant":
                raise ValueError(
                    f"the last message is of {messages[-1].role!r}: end with an assistant's text"
                )
            if messages[-1].tool_calls:
                raise ValueError("the last message has tool calls: end with an assistant's text alone")
        return value

    @field_validator("add_generation_prompt")
    @classmethod
    def _check_generation_prompt(cls, value: bool | None, given: ValidationInfo) -> bool | None:
        continues = bool(given.data.get("continue_final_message"))
        if value is not None and value == continues:
            raise ValueError(f"{value} contradicts continue_final_message={continues}: just one is true")
        return value

    def likely_tokens(self) -> tuple[int | None, int | None]:
        return (self.top_logprobs or 0) if self.logprobs else None, None

    def template_options(self) -> dict[str, Any]:
        """The variables that the request gives to the chat template."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | (self.chat_template_kwargs or {})


class CompletionRequest(SamplingRequest):
    """The body of ``POST /v1/completions``. A text prompt is encoded as it stands, without a BOS token."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: LikelyTokens | None = None
    """Number of likely tokens beside each one, which has its log-probability too; 0 asks for that alone."""
    echo: bool | None = None
    """True if the answer begins with the prompt; with ``logprobs`` those of its tokens too."""

    @model_validator(mode="after")
    def _check_max_tokens(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 leaves no room for an answer: use 1 and above, or echo=true")
        return self

    def likely_tokens(self) -> tuple[int | None, int | None]:
        return self.logprobs, self.logprobs if self.echo else None

    def prompts(self) -> list[str | list[int]]:
        """OpenAI takes one text or several, one list of token ids or several."""
        is_one = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        return cast("list[str | list[int]]", [self.prompt] if is_one else self.prompt)

    def most_tokens(self) -> int | None:
        # With echo, 0 asks for the prompt alone: a token is sampled all the same, and left out.
        return TEXT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens or 1
