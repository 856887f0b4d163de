"""Calls that a server reads, and no agent."""

from __future__ import annotations

from environments.errors import ConfigError
from environments.tools import ToolCall
from policies.agents.parsers.base import Json, ToolParser

VLLM = "vllm:"
"""Begins the name of a parser of vLLM, such as ``vllm:hermes``."""


class ServedParser(ToolParser):
    """Base of parsers that find no calls in a text: the request holds the tools, and a server reads."""

    separator = ""
    tools_in = "template"
    reads_text = False

    def parse(self, text: str) -> list[ToolCall]:
        return []

    def get_tool_prompt(self, schemas: list[Json]) -> str:
        raise ConfigError(
            f"parser_name={self._name!r} has no text that explains tools: leave tools_in out, or choose "
            "a parser of Troupe's own for your model, such as 'qwen'."
        )

    @property
    def _name(self) -> str:
        return self.served_name or "openai"


class OpenAIParser(ServedParser):
    """Parser for outside servers, whose own one takes the calls out of the text."""


class VLLMNamedParser(ServedParser):
    """Parser for the policy server, whose replicas read the calls by a parser of vLLM."""

    def __init__(self, name: str) -> None:
        self.served_name = name
