from __future__ import annotations

import asyncio
import logging

import cloudpickle
import pytest

from environments.errors import ConfigError
from environments.tools import Tool, ToolOutput, make_tools, tool_by_name
from environments.tools.base import openai_schema
from policies import ToolAgent


class Search(Tool):
    """As users of the reference write tools: the name comes through ``__init__``."""

    def __init__(self, name="search", max_results: int = 3):
        self.max_results = max_results
        super().__init__(name=name, description="Finds documents.")

    def forward(self, query: str, top_k: int | None = None, tags: list[str] = (), **more):
        return [query] * (top_k or self.max_results)


class Fixed(Tool):
    name = "fixed"
    description = "Takes no arguments to make."

    def __init__(self):
        super().__init__()

    def forward(self):
        raise KeyError("inside")


class Stubborn(Fixed):
    @property
    def json(self):
        return {"type": "function", "function": {"name": "stubborn", "parameters": {}}}


class Bare(Tool):
    """Its schema is the function alone."""

    name, description = "bare", "Says nothing."

    @property
    def json(self):
        return {"name": self.name, "description": self.description, "parameters": {"type": "object"}}

    def forward(self):
        return ""


def test_schema_that_is_function_alone_is_put_into_its_place():
    schema = {"type": "function", "function": Bare().json}
    assert openai_schema(Bare().json) == openai_schema(schema) == schema
    assert list(make_tools(tool_map={"mine": Bare})) == ["mine"]
    assert "You can call bare()" in ToolAgent(tools=[Bare], parser_name="hermes-brief").messages[0]["content"]
    assert ToolAgent(tools=[Bare], tools_in="template").tool_schemas == [schema]


@pytest.mark.parametrize("schema", [{}, {"name": 1}, {"function": "bare"}, "bare"])
def test_schema_without_a_name_is_told(schema):
    with pytest.raises(ConfigError, match=r"'function': \{'name': "):
        openai_schema(schema)


def test_schema_comes_from_the_signature():
    assert Search().json == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Finds documents.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "top_k": {"type": "integer"},
                    "tags": {"type": "array"},
                },
                "required": ["query"],
            },
        },
    }


def test_calculators_schema():
    function = tool_by_name("calculator").json["function"]
    assert function["name"] == "calculator"
    assert function["parameters"]["properties"] == {"expression": {"type": "string"}}
    assert function["parameters"]["required"] == ["expression"]


def test_bare_value_becomes_an_output():
    assert Search()("a", top_k=2) == ToolOutput("search", output=["a", "a"])


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (ToolOutput("t", output=42), "42"),
        (ToolOutput("t", output="text"), "text"),
        (ToolOutput("t"), ""),
        (ToolOutput("t", output={"a": [1]}), '{"a": [1]}'),
        (ToolOutput("t", output=1, error="broken"), "Error: broken"),
        (ToolOutput("t", error=""), "Error: "),
    ],
)
def test_what_the_model_reads(output, text):
    assert output.to_string() == str(output) == text


@pytest.mark.parametrize(
    ("output", "text"),
    [
        (ToolOutput("t", output="a\ud83d"), "a\N{REPLACEMENT CHARACTER}"),
        (ToolOutput("t", output=["\ude00b"]), '["\N{REPLACEMENT CHARACTER}b"]'),
        (ToolOutput("t", error="\ud83d!"), "Error: \N{REPLACEMENT CHARACTER}!"),
        (ToolOutput("t", output="\ud83d\ude00"), "\N{GRINNING FACE}"),
        (ToolOutput("t", output="ä\N{GRINNING FACE}\0"), "ä\N{GRINNING FACE}\0"),
    ],
)
def test_half_character_is_replaced_so_that_text_can_be_sent(output, text):
    assert output.to_string() == text


def test_exception_goes_to_model_and_with_its_traceback_to_log(caplog):
    with caplog.at_level(logging.WARNING):
        output = Fixed()()
    assert output.error == "KeyError: 'inside'"
    assert caplog.records[0].exc_info is not None


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)


class Untellable:
    def __str__(self):
        raise ValueError("no words")


@pytest.mark.parametrize("result", [{(1, 2): 3}, ENDLESS, Untellable(), [Untellable()]])
def test_result_that_has_no_text_is_error_that_model_reads(result):
    for value in (result, ToolOutput("fixed", output=result)):
        output = Tool("fixed", "Gives what it has.", lambda value=value: value)()
        assert output.to_string().startswith(("Error: TypeError", "Error: ValueError"))


def test_type_error_inside_tool_is_not_taken_for_wrong_arguments():
    class Broken(Fixed):
        def forward(self):
            return 1 + "1"

    assert "wrong arguments" not in Broken()().error


class AsyncForward(Fixed):
    async def forward(self, query: str):
        return query.upper()


class OnlyAsync(Tool):
    name = "later"
    description = "Has no forward."

    async def async_forward(self, query: str):
        return ToolOutput(self.name, output=query.upper())


def shout(query: str):
    """Says it
    loudly.

    More that the model need not know.
    """
    return query.upper()


async def shout_later(query: str):
    """Says it loudly."""
    return query.upper()


@pytest.mark.parametrize(
    "tool",
    [
        AsyncForward(),
        OnlyAsync(),
        Tool(function=shout),
        Tool(function=shout_later),
        Tool("fixed", "Says it loudly.", function=shout),
    ],
)
def test_tools_as_the_reference_has_them_run(tool):
    assert tool("a") == tool(query="a") == ToolOutput(tool.name, output="A")
    assert tool.json["function"]["parameters"]["required"] == ["query"]
    assert "wrong arguments" in tool(text="a").error
    assert asyncio.run(tool.async_forward("a")) in ("A", ToolOutput(tool.name, output="A"))
    assert cloudpickle.loads(cloudpickle.dumps(tool))("a").output == "A"


def test_function_tool_is_described_as_a_function_by_default():
    assert (Tool(function=shout).name, Tool(function=shout).description) == ("shout", "Says it loudly.")
    named = Tool("loud", "Shouts.", shout).json["function"]
    assert (named["name"], named["description"]) == ("loud", "Shouts.")


def test_tool_that_does_nothing_says_what_is_missing():
    assert "must implement 'forward'" in Tool("bare", "Does nothing.")().error


def test_classes_are_made_with_name_of_map_if_they_take_it():
    tools = make_tools(tool_map={"web": Search, "still": Fixed})
    assert [tool.json["function"]["name"] for tool in tools.values()] == ["web", "still"]


def test_schema_with_another_name_than_the_map_is_refused():
    with pytest.raises(ConfigError, match=r"'other'.*'stubborn'"):
        make_tools(tool_map={"other": Stubborn})


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"'calculater'.*'calculator'"):
        tool_by_name("calculater")


def test_tool_without_a_description_is_refused():
    with pytest.raises(ConfigError, match="description"):
        Tool(name="bare")
