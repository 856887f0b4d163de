from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

import cloudpickle
import pytest
from typing_extensions import TypedDict

from environments import ConfigError, ToolEnvironment
from environments.errors import EnvironmentFailure
from environments.tools import TOOLS, FunctionTool, Tool, ToolOutput, make_tools, tool_by_name


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


@dataclass
class Point:
    x: float
    y: float = 0.0


class Filter(TypedDict):
    field: str


def travel(
    start: Point,
    stops: list[int],
    unit: Unit = Unit.METRE,
    mode: Literal["fast", "exact"] = "fast",
    limit: Annotated[int | None, "Most stops to visit."] = None,
    where: Filter | None = None,
):
    """Measure the way
    through all stops.

    Not for the model.

    Args:
        start (Point): Where to begin.
        stops: The stops,
            in order.
        limit: What Annotated says comes first.

    Returns:
        unit: no parameter.
    """
    return start, stops, unit, mode, limit, where


def double(number: int) -> int:
    """Twice the number."""
    return 2 * number


def test_schema_comes_from_hints_defaults_and_docstring():
    function = FunctionTool(travel).json["function"]
    assert (function["name"], function["description"]) == ("travel", "Measure the way through all stops.")
    parameters = function["parameters"]
    assert parameters["required"] == ["start", "stops"]
    assert parameters["additionalProperties"] is False
    definitions = parameters["$defs"]
    assert parameters["properties"] == {
        "start": {"$ref": "#/$defs/Point", "description": "Where to begin."},
        "stops": {"type": "array", "items": {"type": "integer"}, "description": "The stops, in order."},
        "unit": {"$ref": "#/$defs/Unit", "default": "m"},
        "mode": {"enum": ["fast", "exact"], "type": "string", "default": "fast"},
        "limit": {
            "anyOf": [{"type": "integer"}, {"type": "null"}],
            "default": None,
            "description": "Most stops to visit.",
        },
        "where": {"anyOf": [{"$ref": "#/$defs/Filter"}, {"type": "null"}], "default": None},
    }
    assert definitions["Unit"]["enum"] == ["m", "ft"]
    assert definitions["Point"]["required"] == ["x"]


def test_small_schema_holds_nothing_superfluous():
    assert FunctionTool(double).json["function"]["parameters"] == {
        "type": "object",
        "properties": {"number": {"type": "integer"}},
        "required": ["number"],
        "additionalProperties": False,
    }


def test_arguments_reach_the_function_as_its_hints_say():
    output = FunctionTool(travel)(start={"x": 1}, stops=["1", 2], unit="ft", where={"field": "name"})
    assert output.output == (Point(1.0), [1, 2], Unit.FOOT, "fast", None, {"field": "name"})


@pytest.mark.parametrize("number", [5, "5", 5.0])
def test_number_is_converted_where_nothing_is_lost(number):
    assert FunctionTool(double)(number=number) == ToolOutput("double", output=10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"number": "many"}, "number: Input should be a valid integer"),
        ({"number": 1.5}, "number: Input should be a valid integer"),
        ({}, "number: Missing required argument"),
        ({"number": 1, "digits": 2}, "digits: Unexpected keyword argument"),
        ({"number": 1, "__args__": [2]}, "__args__: Unexpected keyword argument"),
        ({"number": 1, "self": 2}, "self: Unexpected keyword argument"),
    ],
)
def test_arguments_that_do_not_fit_are_told_to_the_model(arguments, message):
    error = FunctionTool(double)(**arguments).error
    assert error.startswith("wrong arguments for 'double': ")
    assert message in error


def test_argument_called_self_is_wrong_argument_like_any_other():
    assert "wrong arguments for 'calculator'" in tool_by_name("calculator")(self=1, expression="1").error


def test_unknown_field_of_a_dataclass_is_wrong():
    output = FunctionTool(travel)(start={"x": 1, "z": 2}, stops=[], where={"field": "a", "op": "b"})
    assert "start.z: " in output.error and "where.op: " in output.error


def test_any_value_in_a_dict_can_be_read_by_the_model():
    output = ToolOutput("t", output={"größe": Path("x")})
    assert output.to_string() == '{"größe": "x"}'


def test_parameters_may_have_any_name():
    def odd(model_config: int, schema: int, copy: int, _hidden: int) -> int:
        """Names that libraries like to take."""
        return model_config + schema + copy + _hidden

    assert FunctionTool(odd)(model_config=1, schema=2, copy=3, _hidden=4).output == 10


def test_async_function_is_run_to_its_end():
    async def later(text: str) -> str:
        """Says it later."""
        return text.upper()

    async def cell() -> str:  # of a notebook, which has an event loop of its own
        return FunctionTool(later)(text="now").output

    assert FunctionTool(later)(text="now").output == "NOW"
    assert asyncio.run(cell()) == "NOW"


@pytest.mark.slow
def test_interrupt_of_a_cell_waits_for_no_async_tool():
    ended = threading.Event()

    async def lasting() -> None:
        """Does not end."""
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        await asyncio.to_thread(ended.wait, 5)

    async def cell() -> None:
        FunctionTool(lasting)()

    start, loop = time.monotonic(), asyncio.new_event_loop()
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(cell())
    assert time.monotonic() - start < 4
    ended.set()
    loop.close()


def test_error_of_a_function_goes_to_the_model_unless_it_ends():
    def fails(fatal: bool) -> None:
        """Fails."""
        raise EnvironmentFailure("down") if fatal else KeyError("gone")

    assert FunctionTool(fails)(fatal=False).error == "KeyError: 'gone'"
    with pytest.raises(EnvironmentFailure, match="down"):
        FunctionTool(fails)(fatal=True)


def no_docstring(a: int):
    return a


def no_hint(a: int, b=1):
    """Adds."""


def many(*numbers: int):
    """Adds."""


def unknown_name(a: Missing):  # noqa: F821
    """Adds."""


def no_schema(a: type(sys)):
    """Adds."""


def not_json(a: Callable[[int], int]):
    """Adds."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (no_docstring, "'no_docstring' has no docstring"),
        (no_hint, "'b=1'.*'no_hint' has no type hint"),
        (many, r"'\*numbers: .*'many' has no name of its own"),
        (unknown_name, "'unknown_name'.*'Missing'"),
        (no_schema, "'no_schema' has no schema"),
        (not_json, "'not_json' has no schema"),
        (len, "is no tool"),
        (3, "is no tool"),
    ],
)
def test_function_that_a_model_could_not_call_is_refused(function, message):
    with pytest.raises(ConfigError, match=message):
        make_tools([function])


def test_names_functions_classes_and_tools_go_together():
    class Shout(Tool):
        name = "shout"
        description = "Says it louder."

        def forward(self, text: str):
            return text.upper()

    tools = make_tools(["calculator", double, Shout, FunctionTool(double, name="twice")])
    assert list(tools) == ["calculator", "double", "shout", "twice"]
    assert all(tool.json["function"]["name"] == name for name, tool in tools.items())


def test_map_gives_a_function_another_name():
    tools = make_tools(tool_map={"twice": double})
    assert tools["twice"].json["function"]["name"] == tools["twice"](number=2).name == "twice"


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(ConfigError, match=r"'double'.*rename"):
        make_tools([double, FunctionTool(double)])


def test_environment_calls_a_function():
    def never(task_info, action):
        raise AssertionError

    env = ToolEnvironment({"question": "?"}, tools=[double], reward_fn=never)
    env.reset()
    call = {"id": "c0", "function": {"name": "double", "arguments": '{"number": 21}'}}
    assert env.step([call])[0] == {"tool_outputs": {"c0": "42"}}


MAIN = """
from __future__ import annotations
import sys
import threading
import time
from typing import Annotated, Literal
import cloudpickle

def shift(text: str, way: Literal["up", "down"], times: Annotated[int, "How often."] = 1) -> str:
    "Changes the case."
    return (text.upper() if way == "up" else text.lower()) * times

sys.stdout.buffer.write(cloudpickle.dumps(shift))
"""


def test_function_of_the_main_program_works_in_another_process():
    pickled = subprocess.run([sys.executable, "-c", MAIN], capture_output=True, check=True).stdout
    (tool,) = make_tools([cloudpickle.loads(pickled)]).values()
    assert tool(text="a", way="up", times="2").output == "AA"
    assert "way: " in tool(text="a", way="left").error


def test_tool_made_of_a_function_travels_too():
    twice = cloudpickle.loads(cloudpickle.dumps(FunctionTool(lambda_like(), name="twice")))
    assert twice(number=4) == ToolOutput("twice", output=8)


def lambda_like():
    def local(number: int) -> int:
        """Twice the number."""
        return 2 * number

    return local


@pytest.mark.parametrize("name", TOOLS)
def test_tool_that_comes_with_troupe_answers_to_its_name(name):
    assert tool_by_name(name).json["function"]["name"] == name
