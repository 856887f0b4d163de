"""The last message of a client's conversation, gone on with: ``continue_final_message``, as vLLM has it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from test_openai_protocol import MESSAGES, FakeEngine, collect, ids_of, tokenizer

from policies.chat import ChatRenderer
from policies.model_api.dialects.errors import status_of
from policies.model_api.errors import RequestError, invalid_body
from policies.model_api.frontend import OpenAIFrontend
from policies.model_api.protocol import ChatRequest
from policies.tiny import build_tokenizer

TEMPLATES = Path(__file__).parents[2] / "templates"
FAMILIES = ["thinking", *sorted(path.stem for path in TEMPLATES.glob("*.jinja"))]
TEXTS = [
    "The answer",
    " The answer is ",
    "```python\n",
    "a <|im_end|> b <|eot_id|>",
    "",
    "46\n\n",
    "probe000000 ",
]
ENDS = ("<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>")  # noqa: RUF001  # DeepSeek's


THINKING = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>
{{ message.reasoning_content.strip() }}
</think>

{% endif %}{{ message.content.strip() }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Shows the thoughts of answers."""


def renderer(family: str) -> ChatRenderer:
    made = build_tokenizer([[*MESSAGES, {"role": "assistant", "content": "The answer is 46."}]] * 20)
    made.chat_template = THINKING if family == "thinking" else (TEMPLATES / f"{family}.jinja").read_text()
    return ChatRenderer(made)


def go_on(
    family: str, message: dict[str, Any], reply: str = "46.", before: Any = MESSAGES, **fields: Any
) -> tuple[str, dict[str, str]]:
    """The prompt's text where a message is gone on with, and the texts of the answer."""
    own, engine = renderer(family), FakeEngine(ids_of(reply))
    given = {"messages": [*before, {"role": "assistant", **message}], "continue_final_message": True}
    body = ChatRequest.model_validate({"model": "tiny", **given, **fields})
    parts = asyncio.run(collect(OpenAIFrontend("tiny", own, engine).chat(body)))
    choices = [part["choices"][0] for part in parts]
    said = [choice.get("message") or choice["delta"] for choice in choices]
    names = ("content", "reasoning_content")
    joined = {name: "".join(each.get(name) or "" for each in said) for name in names}
    return own.text_of(engine.requests[0][0]), joined


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("text", TEXTS)
def test_prompt_ends_with_the_text_as_it_stands(family: str, text: str) -> None:
    prompt, answer = go_on(family, {"content": text}, add_generation_prompt=False)
    begun = prompt.removesuffix(text)
    assert prompt == begun + text and begun.count("What is 12+34?") == 1
    other, _ = go_on(family, {"content": "Other words"})
    assert other == begun + "Other words"
    assert not begun.rstrip().endswith(ENDS)
    assert answer == {"content": "46.", "reasoning_content": ""}


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_is_the_one_of_transformers(family: str) -> None:
    conversation = [*MESSAGES, {"role": "assistant", "content": "The answer"}]
    template = renderer(family).template.text
    expected = tokenizer().apply_chat_template(
        conversation, chat_template=template, tokenize=False, continue_final_message=True
    )
    assert go_on(family, {"content": "The answer"})[0] == expected


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["<think>\nIt may be ", "<think>half"])
def test_thought_that_is_open_goes_on_as_a_thought(family: str, text: str, stream: bool) -> None:
    prompt, answer = go_on(family, {"content": text}, "45 or", stream=stream)
    assert prompt.endswith(text) and prompt.count("<think>") == 1 and "</think>" not in prompt
    assert answer == {"content": "", "reasoning_content": "45 or"}


@pytest.mark.parametrize("family", ["thinking", "r1_distill"])
def test_thought_that_the_server_sent_apart_goes_on(family: str) -> None:
    prompt, answer = go_on(
        family, {"content": "", "reasoning_content": "It may be "}, "45</think>46", stream=True
    )
    assert prompt.endswith("<think>\nIt may be ") and "</think>" not in prompt
    assert answer == {"content": "46", "reasoning_content": "45"}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("thought", ["<think>\nSum.\n</think>\n\n", "<think></think>"])
def test_answer_after_a_whole_thought_goes_on_as_an_answer(family: str, thought: str) -> None:
    prompt, answer = go_on(family, {"content": f"{thought}The answer "}, stream=True)
    assert prompt.endswith(f"{thought}The answer ") and prompt.count("<think>") == 1
    assert answer == {"content": "46.", "reasoning_content": ""}


def test_thought_that_no_template_shows_is_an_error() -> None:
    with pytest.raises(RequestError, match="does not show the text") as caught:
        go_on("llama3", {"content": "", "reasoning_content": "It may be "})
    assert (status_of(caught.value), caught.value.param) == (400, "messages")


CALL = {"id": "1", "function": {"name": "calculator", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "fields", "param", "said"),
    [
        ({"role": "user", "content": "Hi"}, {}, "continue_final_message", "the last message is of 'user'"),
        ({"role": "tool", "content": "4"}, {}, "continue_final_message", "the last message is of 'tool'"),
        ({"content": "a", "tool_calls": [CALL]}, {}, "continue_final_message", "has tool calls"),
        ({"content": "a"}, {"add_generation_prompt": True}, "add_generation_prompt", "True contradicts"),
    ],
)
def test_message_that_cannot_be_gone_on_with_is_an_error(
    message: dict[str, Any], fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        go_on("chatml", message, **fields)
    error = invalid_body(caught.value.errors())
    assert (status_of(error), error.param) == (400, param) and said in error.message
