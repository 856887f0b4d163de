"""vLLM's tool parsers by name, where a model is served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_openai_protocol import TOOLS, renderer, tokenizer

from environments.errors import ConfigError
from environments.tools import ToolCall
from policies.agents.parsers import get_tool_parser
from policies.engines.tool_calls import CallReader, check_served_parsers, served_parser, served_reasoning
from policies.engines.tool_calls import _main as find_out
from policies.sampler import SamplingParams, TokenOutput, TokenRequest

CODER = (
    "<tool_call>\n<function=calculator>\n<parameter=expression>\n1+1\n</parameter>\n</function>\n</tool_call>"
)
HERMES = '<tool_call>{"name": "calculator", "arguments": {"expression": "1+1"}}</tool_call>'
PYTHONIC = "[calculator(expression='1+1')]"
WANTED = [ToolCall("calculator", {"expression": "1+1"})]
pytestmark = pytest.mark.slow  # importing vLLM takes seconds


@pytest.mark.parametrize(
    ("name", "text"), [("qwen3_coder", CODER), ("hermes", HERMES), ("pythonic", PYTHONIC)]
)
def test_vllms_parser_reads_the_calls_of_a_text(name: str, text: str) -> None:
    parser = served_parser(f"vllm:{name}", tokenizer()).for_tools(TOOLS)
    assert parser.parse(text) == WANTED
    assert parser.parse(text) == WANTED  # nothing of the first answer is left
    assert parser.split("No call.") == ("No call.", [])


def test_call_that_vllm_takes_and_json_has_not_is_invalid() -> None:
    parser = served_parser("vllm:hermes", tokenizer()).for_tools(TOOLS)
    text = '<tool_call>{"name": "calculator", "arguments": {"expression": NaN}}</tool_call>'
    assert [call.name for call in parser.parse(text)] == ["invalid_tool_call"]
    assert parser.split(text) == (text, [])


def answered(text: str, parser: str | None) -> tuple[dict[str, Any], ...]:
    ids = tuple(tokenizer().encode(text, add_special_tokens=False))
    request = TokenRequest((1,), SamplingParams(), tool_parser=parser, tools=TOOLS)
    output = TokenOutput(token_ids=ids, logprobs=(0.0,) * len(ids), finish_reason="stop", policy_version=0)
    return CallReader(renderer(), tokenizer())(request, output).tool_calls


def test_replica_sends_the_calls_with_the_answer() -> None:
    (call,) = answered(f"<think>{HERMES}</think>I calculate. {CODER}", "vllm:qwen3_coder")
    assert call["function"]["name"] == "calculator"
    assert json.loads(call["function"]["arguments"]) == {"expression": "1+1"}


@pytest.mark.parametrize("text", [f"<think>{HERMES}", f"<think>{HERMES}</think>2", "2"])
def test_calls_in_a_thought_are_none(text: str) -> None:
    assert answered(text, "vllm:hermes") == ()


def test_answers_without_a_named_parser_are_not_read() -> None:
    assert answered(HERMES, None) == ()


def test_parser_that_cannot_start_is_found_before_loading(tmp_path: Path) -> None:
    """Here by what the program does that is to find out. It is started, and so imports vLLM anew, for a
    reasoning parser below, and by test_engine for a parser that vLLM does not have.
    """
    tokenizer().save_pretrained(tmp_path)
    check_served_parsers(["hermes", None], str(tmp_path))
    with pytest.raises(SystemExit, match=r"'mistral' cannot start.*tokenizer.*tool call token"):
        find_out(str(tmp_path), "", "vllm:hermes", "vllm:mistral")


GRANITE = f"Here is my thought process: {HERMES} Here is my response: I calculate. {HERMES}"


def test_vllms_reasoning_parser_tells_thoughts_from_answers() -> None:
    split = served_reasoning("vllm:granite", tokenizer())
    assert split is not None
    thought, answer = split(GRANITE)
    assert (thought.strip(), answer.strip()) == (HERMES, f"I calculate. {HERMES}")
    assert split("46") == ("", "46")
    ids = tuple(tokenizer().encode(GRANITE, add_special_tokens=False))
    request = TokenRequest((1,), SamplingParams(), tool_parser="vllm:hermes", tools=TOOLS)
    output = TokenOutput(token_ids=ids, logprobs=(0.0,) * len(ids), finish_reason="stop", policy_version=0)
    assert len(CallReader(renderer(), tokenizer(), split)(request, output).tool_calls) == 1


def test_reasoning_parser_that_cannot_start_is_found_early(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    check_served_parsers([], None, None)
    with pytest.raises(ConfigError, match=r"vllm:hermes and vllm:step3.*tokenizer.*think end token"):
        check_served_parsers(["vllm:hermes"], str(tmp_path), "vllm:step3")
    with pytest.raises(ConfigError, match=r"server\.reasoning_parser='granite'.*vllm:granite"):
        served_reasoning("granite", tokenizer())


def test_naming_vllms_parser_imports_no_vllm() -> None:
    program = (
        "import sys; from policies.agents.tool import ToolAgent; ToolAgent(parser_name='vllm:hermes', "
        "tools=['calculator']); sys.exit('vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_vllms_name_stands_for_parser_without_text_of_its_own() -> None:
    parser = get_tool_parser("vllm:hermes")
    assert parser.tools_in == "template"
    with pytest.raises(ConfigError, match=r"vllm:hermes.*tools_in"):
        parser.get_tool_prompt(TOOLS)
