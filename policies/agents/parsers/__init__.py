"""Tool parsers: how tools are explained to a model, and how its calls are read from its text."""

# ruff: noqa: RUF001  (DeepSeek writes its marks with a fullwidth bar)

from __future__ import annotations

import re

from environments.bounds import check_choice
from environments.errors import ConfigError
from environments.named_module import load_class
from policies.agents.parsers.base import VLLM, ServedParser, ToolParser
from policies.agents.parsers.deepseek import DeepSeekParser
from policies.agents.parsers.hermes import HermesBriefParser, HermesParser, Qwen3CoderParser
from policies.agents.parsers.plain_json import Llama3JsonParser, MistralParser

__all__ = ["PARSERS", "TEXT_PARSERS", "ToolParser", "get_tool_parser", "parser_name_of"]

PARSERS: dict[str, type[ToolParser]] = {
    "deepseek-v3": DeepSeekParser,
    "hermes": HermesParser,
    "hermes-brief": HermesBriefParser,
    "llama3-json": Llama3JsonParser,
    "mistral": MistralParser,
    "openai": ServedParser,
    "qwen": HermesParser,
    "qwen3-coder": Qwen3CoderParser,
    "r1": DeepSeekParser,
}
TEXT_PARSERS = tuple(name for name, parser in PARSERS.items() if parser.reads_text)
"""Parsers that find calls in a text."""


def get_tool_parser(parser: str | ToolParser | type[ToolParser], setting: str = "parser_name") -> ToolParser:
    """The parser of that name, one of vLLM's ("vllm:NAME"), which a policy server knows, or one of your own:
    "module:Class", its class, or one that is made already.

    Args:
        setting: what has the value, for the message.

    Raises:
        ConfigError: there is none of that name, or it is not derived from ``ToolParser``.
    """
    if isinstance(parser, str):
        if parser.startswith(VLLM):
            return ServedParser(parser)
        if parser in PARSERS:
            return PARSERS[parser]()
        if ":" not in parser:
            own = ' Other parsers: vLLM\'s as "vllm:NAME", your own as "module:Class".'
            check_choice(setting, parser, PARSERS, own)
        return load_class(setting, parser, {}, ToolParser)()
    made = parser() if isinstance(parser, type) else parser
    if not isinstance(made, ToolParser):
        raise ConfigError(
            f"{setting}={parser!r} is no ToolParser of policies.agents.parsers: derive it from that."
        )
    return made


def parser_name_of(chat_template: str) -> str:
    """The parser of a model, by how its chat template writes the calls of its history."""
    if "<｜tool▁call▁begin｜>" in chat_template:
        return "r1"
    if "[TOOL_CALLS]" in chat_template:
        return "mistral"
    if "<function=" in chat_template:
        return "qwen3-coder"
    if "<tool_call>" not in chat_template and re.search(r"""["']parameters["']\s*:""", chat_template):
        return "llama3-json"
    return "hermes"
