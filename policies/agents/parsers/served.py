"""Calls that a server reads, and no agent."""

from __future__ import annotations

from environments.errors import ConfigError
from environments.tools import ToolCall
from policies.agents.parsers.base import Json, ToolParser

VLLM = "vllm:"
"""Begins the name of a parser of vLLM, such as ``vllm:hermes``."""


class ServedParser(ToolParser):
    """Finds no calls in a text: the request holds the tools, and a server reads.

    Args:
        served_name: name of the parser of vLLM by which the policy server reads; ``None`` for an outside
            server, whose own one takes the calls out of the text.
    """

    separator = ""
    tools_in = "template"
    reads_text = False

    def __init__(self, served_name: str | None = None) -> None:
        self.served_name = served_name

    def parse(self, text: str) -> list[ToolCall]:
        return []

    def get_tool_prompt(self, schemas: list[Json]) -> str:
        raise ConfigError(
            f"parser_name={self.served_name or 'openai'!r} has no text that explains tools: leave tools_in "
            "out, or choose a parser of Troupe's own for your model, such as 'qwen'."
        )
