"""Tool calls and thoughts that are read where a model is served, also by the parsers of vLLM.

Run as a program, it checks that parsers of vLLM can start: importing them takes seconds and memory that the
program which asks does not have to spend.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from environments.bounds import check_choice
from environments.errors import ConfigError, SamplerError
from environments.thoughts import SplitThought, split_thought
from environments.tools import ToolCall
from environments.tools.base import openai_schema
from policies.agents.parsers import ToolParser, get_tool_parser
from policies.agents.parsers.base import VLLM, Json, checked, invalid, valid
from policies.engines.vllm_settings import CPU_ENVIRONMENT
from policies.sampler import TokenOutput, TokenRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from policies.chat import ChatRenderer

IMPORT_SECONDS = 300.0
"""Limit of a check, which imports vLLM: seven seconds on a free machine."""


class VLLMParser(ToolParser):
    """A tool parser of vLLM. What it takes for no call stays text, also where it is a broken one.

    Args:
        name: as vLLM has it, after ``vllm:``.
        tokenizer: the model's.
        schemas: the tools of the conversation.

    Raises:
        ConfigError: there is no such parser, or it cannot start with this tokenizer.
    """

    tools_in = "template"

    def __init__(self, name: str, tokenizer: Any, schemas: Sequence[Json] = ()) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self.served_name = VLLM + name
        self._name = name
        self._tokenizer = tokenizer
        self._kind = _parser_class(name)
        with _starting("tool parser", name):
            tools = [openai_schema(schema) for schema in schemas] or None
            self._request = ChatCompletionRequest(messages=[], tools=tools)
            self._start().extract_tool_calls("", request=self._request)

    def for_tools(self, schemas: Sequence[Json]) -> VLLMParser:
        return VLLMParser(self._name, self._tokenizer, schemas)

    def get_tool_prompt(self, schemas: list[Json]) -> str:
        return ""

    def around_arguments(self, name: str) -> tuple[str, str]:
        raise ConfigError(
            f"{self.served_name} cannot force a call, as it writes none: let tool_choice be auto or none."
        )

    def parse(self, text: str) -> list[ToolCall]:
        return self._read(text)[1]

    def split(self, text: str) -> tuple[str, list[ToolCall]]:
        content, calls = self._read(text)
        good = valid(calls)
        return (content if len(good) == len(calls) else text), good

    def _start(self) -> Any:
        return self._kind(self._tokenizer, self._request.tools)  # it keeps what it has read

    def _read(self, text: str) -> tuple[str, list[ToolCall]]:
        try:
            found = self._start().extract_tool_calls(text, request=self._request)
        except Exception as error:  # noqa: BLE001  # a parser may stumble over what a model writes
            return text, [invalid(f"The tool call cannot be read ({type(error).__name__}: {error}).")]
        functions = [call.function for call in found.tool_calls]
        return found.content or "", [checked(function.name, function.arguments) for function in functions]


class VLLMReasoning:
    """A reasoning parser of vLLM: the thought and the answer of a text, as ``split_thought`` gives them.

    Args:
        name: as vLLM has it, after ``vllm:``.
        tokenizer: the model's.

    Raises:
        ConfigError: there is no such parser, or it cannot start with this tokenizer.
    """

    def __init__(self, name: str, tokenizer: Any) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        self._name = name
        self._tokenizer = tokenizer
        self._request = ChatCompletionRequest(messages=[])
        self._kind = _reasoning_class(name)
        with _starting("reasoning parser", name):
            self._split("")

    def __call__(self, text: str) -> tuple[str, str]:
        """The thought and the answer of a text.

        Raises:
            SamplerError: the parser stumbles over this text.
        """
        try:
            return self._split(text)
        except Exception as error:
            raise SamplerError(
                f"vLLM's reasoning parser {self._name!r} cannot read an answer: {error!r}"
            ) from error

    def _split(self, text: str) -> tuple[str, str]:
        thought, answer = self._kind(self._tokenizer).extract_reasoning(text, self._request)
        return thought or "", answer or ""


@contextmanager
def _starting(kind: str, name: str) -> Iterator[None]:
    """Raises ``ConfigError`` for whatever a parser misses in a tokenizer."""
    try:
        yield
    except Exception as error:
        raise ConfigError(
            f"vLLM's {kind} {name!r} cannot start with this model's tokenizer "
            f"({type(error).__name__}: {error}): use the parser of your model."
        ) from error


def _parser_class(name: str) -> type[Any]:
    from vllm.tool_parsers import ToolParserManager as Manager

    return _imported("tool parser", name, Manager.list_registered(), Manager.get_tool_parser)


def _reasoning_class(name: str) -> type[Any]:
    from vllm.reasoning import ReasoningParserManager as Manager

    return _imported("reasoning parser", name, Manager.list_registered(), Manager.get_reasoning_parser)


def _imported(kind: str, name: str, known: Collection[str], get: Callable[[str], type[Any]]) -> type[Any]:
    check_choice(f"vLLM's {kind}", name, known)
    try:
        return get(name)
    except Exception as error:  # some need packages of their own
        raise ConfigError(f"vLLM's {kind} {name!r} cannot be imported: {error}") from error


def served_parser(parser: str, tokenizer: PreTrainedTokenizerBase) -> ToolParser:
    """The parser of that name, in a process where a model is served. Raises ``ConfigError``."""
    made = get_tool_parser(parser, "server.tool_parser")
    if made.served_name is None:
        return made
    return VLLMParser(made.served_name.removeprefix(VLLM), _with_kept_vocabulary(tokenizer))


def served_reasoning(name: str | None, tokenizer: PreTrainedTokenizerBase) -> SplitThought | None:
    """The reasoning parser of that name. Raises ``ConfigError``."""
    if name is None:
        return None
    check_reasoning_name(name)
    return VLLMReasoning(name.removeprefix(VLLM), _with_kept_vocabulary(tokenizer))


def check_reasoning_name(name: str | None) -> None:
    """Raise ``ConfigError`` unless the name may be that of a reasoning parser of vLLM."""
    if name is not None and not name.startswith(VLLM):
        raise ConfigError(
            f"server.reasoning_parser={name!r} names no parser of vLLM: write it as vllm:granite, or leave "
            "it out for the marks that Troupe knows itself."
        )


def _with_kept_vocabulary(tokenizer: PreTrainedTokenizerBase) -> Any:
    from vllm.tokenizers.hf import get_cached_tokenizer

    return get_cached_tokenizer(tokenizer)


class CallReader:
    """Reads the tool calls of a replica's answers, by the parsers that their requests name.

    ``split`` tells the thought of a text from its answer; ``None`` is ``split_thought``.
    """

    def __init__(
        self, renderer: ChatRenderer, tokenizer: PreTrainedTokenizerBase, split: SplitThought | None = None
    ) -> None:
        self._renderer = renderer
        self._split = split or split_thought
        self._parser = functools.cache(lambda name: served_parser(name, tokenizer))

    def __call__(self, request: TokenRequest, output: TokenOutput) -> TokenOutput:
        """The output with the calls that stand in its text, those of its thoughts left out.

        Raises:
            ConfigError: the parser that the request names cannot start.
        """
        if request.tool_parser is None:
            return output
        text = self._renderer.completion_text(request.prompt_ids, output.token_ids)
        answer = self._split(text)[1]
        parser = self._parser(request.tool_parser).for_tools(request.tools or ())
        calls = [call.to_openai() for call in parser.parse(answer)]
        return replace(output, tool_calls=tuple(calls))


def check_served_parsers(
    names: Collection[str | None], tokenizer_path: str | None, reasoning: str | None = None
) -> None:
    """Find out, in a process of its own, whether parsers of vLLM can start.

    Args:
        names: of tool calls; other parsers, and ``None``, are passed over.
        reasoning: of thoughts.
        tokenizer_path: folder or name of the model; ``None`` where it is not known yet.

    Raises:
        ConfigError: one cannot start, or vLLM cannot be imported.
    """
    tools = [name for name in names if name is not None and name.startswith(VLLM)]
    own = [*tools, *([] if reasoning is None else [reasoning])]
    if not own:
        return
    program = [sys.executable, "-m", "policies.engines.tool_calls"]
    program += [tokenizer_path or "", reasoning or "", *tools]
    environment = {**CPU_ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            program, env=environment, capture_output=True, text=True, timeout=IMPORT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{' and '.join(own)}: vLLM was not imported in {IMPORT_SECONDS:g} s: try it on a free machine."
        ) from error
    if done.returncode:
        raise ConfigError(f"{' and '.join(own)}: {' '.join(done.stderr.strip().splitlines()[-1:])}")


def _main(tokenizer_path: str, reasoning: str, *names: str) -> None:
    from policies.chat import load_tokenizer

    try:
        tokenizer = load_tokenizer(tokenizer_path) if tokenizer_path else None
        for name in names:
            if tokenizer is None:
                _parser_class(name.removeprefix(VLLM))
            else:
                served_parser(name, tokenizer)
        if tokenizer is None and reasoning:
            _reasoning_class(reasoning.removeprefix(VLLM))
        elif tokenizer is not None:
            served_reasoning(reasoning or None, tokenizer)
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    _main(*sys.argv[1:])
