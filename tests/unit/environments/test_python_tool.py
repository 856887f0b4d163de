from __future__ import annotations

import pytest

from environments import ToolEnvironment, math_reward_fn
from environments.sandbox.base import SandboxLimits
from environments.tools.python import PythonTool


def shown(code, **limits):
    return PythonTool(limits=SandboxLimits(**limits))(code=code).to_string()


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("print(2)", "2"),
        ("40 + 2", "42"),
        ("print('out')\n'value'", "out\n'value'"),
        ("import sys\nprint('out')\nprint('err', file=sys.stderr)\n1", "out\n1\nerr"),
        ("x = 1", "(no output)"),
        ("import sys\nsys.exit(3)", "The code exited with 3."),
    ],
)
def test_everything_that_the_code_gave_is_shown(code, text):
    assert shown(code) == text


def test_error_is_shown_together_with_what_was_printed_before():
    lines = shown("print('before')\nprint(undefined)").splitlines()
    assert (lines[0], lines[-1]) == ("before", "NameError: name 'undefined' is not defined")
    assert 'File "main.py", line 2' in "\n".join(lines)


@pytest.mark.slow
def test_time_out_is_told_with_its_limit():
    text = shown("print('before')\nwhile True: pass", timeout_seconds=2)
    assert text == "before\nThe code was stopped: it ran longer than the limit of 2 s."


def test_memory_limit_is_told():
    text = shown("x = bytearray(1 << 40)", memory_bytes=256 << 20)
    assert text.endswith("The code used more than the limit of 256 MiB of memory.")


def test_crash_is_told():
    assert shown("import ctypes\nctypes.string_at(0)") == "The code crashed: Segmentation fault."


def test_long_output_is_cut():
    tool = PythonTool()
    text = tool(code="print('a' * 100_000)").to_string()
    assert len(text) < tool.limits.output_bytes + 100
    assert "bytes cut" in text


def test_nothing_is_kept_between_calls():
    tool = PythonTool()
    tool(code="x = 1")
    assert "NameError" in tool(code="x").to_string()
    assert "fresh interpreter" in tool.description


def test_metadata_say_how_it_ended():
    assert PythonTool()(code="1 / 0").metadata == {"ending": "exited", "exit_code": 1}


def test_code_that_is_no_text_is_error_that_model_can_read():
    assert PythonTool()(code=3).error == "the code has to be text, not 3."


def test_schema_asks_for_code():
    parameters = PythonTool().json["function"]["parameters"]
    assert parameters == {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}


def test_it_works_in_a_tool_environment():
    env = ToolEnvironment(
        {"question": "?", "ground_truth": "1"}, tool_map={"python": PythonTool}, reward_fn=math_reward_fn
    )
    env.reset()
    call = {"id": "call_0", "function": {"name": "python", "arguments": {"code": "sum(range(5))"}}}
    assert env.step([call])[0] == {"tool_outputs": {"call_0": "10"}}
