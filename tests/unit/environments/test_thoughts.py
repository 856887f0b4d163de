"""Thoughts and answers of a response."""

from random import Random

import pytest
from machine import cpu_seconds

from environments import code_reward_fn, math_reward_fn, search_reward_fn
from environments.thoughts import (
    MARKS,
    find_closing,
    find_opening,
    is_unfinished,
    opened_thought,
    split_thought,
    with_opening,
)
from policies.agents.tool import ToolAgent
from policies.model_api.growing_text import GrowingThought


@pytest.mark.parametrize(("opening", "closing"), MARKS.items())
def test_thought_ends_at_its_mark(opening, closing):
    assert split_thought(f"{opening}\nwhy{closing}so") == ("why", "so")
    assert split_thought(f"why{closing}so") == ("why", "so")
    assert split_thought(f"{opening}why") == ("why", "")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("so", ("", "so")),
        ("<think>a</think>b<think>c</think>d", ("a\nc", "bd")),
        ("<think>a</think>b<think>c", ("a\nc", "")),
        ("b <think>c", ("c", "")),
        ("the tag `<think>` is", ("", "the tag `<think>` is")),
        ("```python\nprint('<think>')\n```", ("", "```python\nprint('<think>')\n```")),
        ("<think>```\na</think>b", ("```\na", "b")),
    ],
)
def test_mark_in_code_opens_no_thought(text, parts):
    assert split_thought(text) == parts


def test_end_of_a_message_alone_ends_no_thought():
    assert split_thought("<|channel|>final<|message|>so<|end|>")[1] == "<|channel|>final<|message|>so<|end|>"


@pytest.mark.slow
def test_many_thoughts_are_read_in_no_time():
    text = "<think>a</think>b" * 50_000
    assert split_thought(text)[1] == "b" * 50_000
    assert cpu_seconds(lambda: split_thought(text)) < 2


def test_prompt_opens_a_thought_where_it_ends_with_the_mark():
    assert opened_thought("<|assistant|>\n<think>\n") == "<think>"
    assert opened_thought("<think>\n\n</think>\n\n") == ""
    assert opened_thought("What is <think>? <|assistant|>") == ""


def test_unfinished_thought_earns_nothing():
    box, program = "\\boxed{6}", "```python\ndef f(x):\n    return x\n```"
    assert math_reward_fn({"ground_truth": "6"}, box).reward == 1
    assert math_reward_fn({"ground_truth": "6"}, f"<think>\nIs it {box}? Let me").reward == 0
    assert search_reward_fn({"ground_truth": "6"}, "<think>Is it\n6").reward == 0
    assert code_reward_fn({"tests": ["assert f(2) == 2"]}, program).reward == 1
    assert code_reward_fn({"tests": ["assert f(2) == 2"]}, f"<think>As in\n{program}\nso").reward == 0


def test_call_in_an_unfinished_thought_is_no_call():
    agent = ToolAgent(tools=["calculator"])
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'
    (action,) = agent.update_from_model(f"<think>I could {call}").action
    assert action["function"]["name"] == "finish"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<Think>a</Think>b", ("a", "b")),
        ("<THINK>a</think>b", ("a", "b")),
        ("a</Thinking>b", ("a", "b")),
        ("[think]a[/Think]b", ("a", "b")),
        ("<Think>a", ("a", "")),
        ("<think>it ends at `</think>`, so", ("it ends at `</think>`, so", "")),
        ("it ends at `</think>`.</think>b", ("it ends at `</think>`.", "b")),
        ("Close it by `</think>`.", ("", "Close it by `</think>`.")),
        ("<think>`a</think>b", ("`a", "b")),
        ("<think>`a</think>\n`b`", ("`a", "\n`b`")),
        ("the tag `<think> is</think>", ("is", "the tag `")),
        ("<th\u0131nk>a", ("", "<th\u0131nk>a")),
        ("<\u017feed:think>a", ("", "<\u017feed:think>a")),
    ],
)
def test_mark_is_read_in_any_case_and_quoted_ones_are_none(text, parts):
    assert split_thought(text) == parts


@pytest.mark.parametrize(
    ("text", "is_open"),
    [
        ("so \\boxed{6}", True),
        ("the tag `</think>` ends it, so \\boxed{6}", True),
        ("[/THINK] so \\boxed{6}", True),
        ("why</Think>so", False),
        ("the tag `</think>` ends it.</think>so", False),
    ],
)
def test_thought_that_prompt_opens_ends_at_its_own_unquoted_mark(text, is_open):
    for prompt in ("<|assistant|>\n<think>\n", "<|assistant|><Think>"):
        assert is_unfinished(with_opening(prompt, text)) is is_open


PIECES = ["<think>", "</think>", "<Think>", "</THINK>", "`", "``", "```", "\n", "a", "b`", "[THINK]", "<thi"]


@pytest.mark.parametrize("prompt", ["", "<think>\n"])
def test_streamed_thoughts_are_those_of_the_whole_text(prompt):
    random = Random(prompt)
    for _ in range(800):
        text = "".join(random.choices(PIECES, k=random.randint(1, 12)))
        growing, position, content, thought = GrowingThought(prompt), 0, "", ""
        while position < len(text):
            end = position + random.randint(1, 5)
            parts = growing.add(text[position:end], end >= len(text))
            thought, content, position = thought + parts[0], content + parts[1], end
        assert (thought, content) == GrowingThought(prompt).add(text, True)
        whole = with_opening(prompt, text)
        begins_within = whole == text and find_closing(text).start < find_opening(text).start
        if not is_unfinished(whole) and not begins_within and not text.lower().lstrip().startswith("<think>"):
            assert content == split_thought(whole)[1]
