"""A conversation of which a chat template drops something is an error that names it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from test_openai_protocol import FakeEngine

from environments.errors import AgentError, DatasetError
from environments.types import Message
from policies.chat import ChatRenderer
from policies.learning.demonstrations import demonstration_samples
from policies.model_api.dialects.errors import status_of
from policies.model_api.errors import RequestError
from policies.model_api.frontend import OpenAIFrontend
from policies.model_api.protocol import ChatRequest
from policies.sampler import SampleRequest
from policies.tiny import build_tokenizer

USER: Message = {"role": "user", "content": "What is 12+34?"}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
ANSWER: Message = {"role": "assistant", "content": "It is 46."}
TOOL: Message = {"role": "tool", "tool_call_id": "call_0", "content": "46"}
FUNCTION = {"name": "calculator", "arguments": '{"expression": "12+34"}'}
CALL = {"id": "call_0", "type": "function", "function": FUNCTION}
CALLING: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
SCHEMA: dict[str, Any] = {"type": "function", "function": {"name": "calculator", "parameters": {}}}

ALL = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls or '' }}{% endfor %}"
NO_TOOL_ROLE = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
NO_SYSTEM = "{% for m in messages %}{{ m.content if m.role != 'system' }}{{ m.tool_calls }}{% endfor %}"
FIRST_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
)
LAST_QUESTION = (
    "{% for m in messages %}{% if loop.last or m.role != 'user' %}{{ m.content }}{% endif %}{% endfor %}"
)
NAMES_ALONE = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}"
    "{% endfor %}"
)
MENTIONS = "{# tools, tool_calls #}{% for m in messages %}{{ m.content }}{% endfor %}"
NOT_BESIDE_TEXT = "{% for m in messages %}{{ m.content or m.tool_calls }}{% endfor %}"
IN_QUESTION = (
    "{% set s = namespace(t='') %}{% for m in messages %}{% if m.role == 'system' %}{% set s.t = m.content %}"
    "{% else %}{{ s.t }}{{ m.content }}{% endif %}{% endfor %}"
)
NO_QUESTION_NO_SYSTEM = "{% for m in messages[1:] %}{{ messages[0].content }}{{ m.content }}{% endfor %}"


def renderer(template: str) -> ChatRenderer:
    made = build_tokenizer([[USER]])
    made.chat_template = template
    return ChatRenderer(made)


@pytest.mark.parametrize(
    ("template", "talk", "tools", "lost"),
    [
        (NO_TOOL_ROLE, [USER, CALLING, TOOL], None, "messages of the role 'tool'"),
        (NO_SYSTEM, [SYSTEM, USER], None, "messages of the role 'system'"),
        (FIRST_SYSTEM, [SYSTEM, USER, ANSWER, SYSTEM, USER], None, "messages of the role 'system'"),
        (FIRST_SYSTEM, [SYSTEM, SYSTEM, USER], None, "messages of the role 'system'"),
        (LAST_QUESTION, [USER, ANSWER, USER], None, "messages of the role 'user'"),
        (NAMES_ALONE, [USER, CALLING, TOOL], None, "tool_calls"),
        (MENTIONS, [USER, CALLING, TOOL], None, "tool_calls"),
        (MENTIONS, [USER], [SCHEMA], "tools"),
        (NOT_BESIDE_TEXT, [USER, {**CALLING, "content": "Hm."}], None, "tool_calls beside a text"),
        (NO_QUESTION_NO_SYSTEM, [SYSTEM], None, "messages of the role 'system'"),
    ],
)
def test_what_a_template_drops_is_named(
    template: str, talk: list[Message], tools: list[Any] | None, lost: str
) -> None:
    with pytest.raises(AgentError, match=rf"chat template of '.*' shows no {lost}: let messages"):
        renderer(template).request_ids(SampleRequest(messages=talk, tools=tools))
    frontend = OpenAIFrontend("tiny", renderer(template), FakeEngine())
    body = ChatRequest.model_validate({"model": "tiny", "messages": talk, "tools": tools})
    with pytest.raises(RequestError, match=f"chat template shows no {lost}: write them") as caught:
        asyncio.run(anext(frontend.chat(body)))
    assert (status_of(caught.value), caught.value.param) == (400, "tools" if tools else "messages")


@pytest.mark.parametrize(
    ("template", "talk"),
    [
        (ALL, [SYSTEM, USER, CALLING, TOOL, ANSWER, USER]),
        (NO_TOOL_ROLE, [SYSTEM, USER, CALLING]),
        (NO_SYSTEM, [USER, CALLING, TOOL]),
        (FIRST_SYSTEM, [SYSTEM, USER, ANSWER]),
        (LAST_QUESTION, [SYSTEM, USER]),
        (NAMES_ALONE, [USER, ANSWER]),
        (NOT_BESIDE_TEXT, [USER, CALLING, TOOL]),
        (IN_QUESTION, [SYSTEM, USER, ANSWER]),
        (NO_QUESTION_NO_SYSTEM, [SYSTEM, USER]),
    ],
)
def test_template_that_shows_a_conversation_takes_it(template: str, talk: list[Message]) -> None:
    shown = renderer(template)
    for times in range(2):  # the second time, its kinds of messages are known
        text = shown.decode(shown.request_ids(SampleRequest(messages=talk)))
        assert all(message["content"] in text for message in talk), times


def test_kind_shown_beside_others_does_not_stand_for_another() -> None:
    first = renderer(FIRST_SYSTEM)
    first.request_ids(SampleRequest(messages=[SYSTEM, USER]))
    with pytest.raises(AgentError, match="role 'system'"):
        first.request_ids(SampleRequest(messages=[USER, ANSWER, SYSTEM, USER]))
    first.request_ids(SampleRequest(messages=[SYSTEM, USER]))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}"
        "{% endfor %}{{ m.content or '' }}{% endfor %}",
        "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name }}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.content is none %}{% for c in m.tool_calls %}{{ c.function.name }}"
        "{{ '' + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    ],
    ids=["arguments as text", "no content", "both, as DeepSeek V3"],
)
def test_calls_are_written_in_the_form_that_the_template_takes(template: str) -> None:
    text = renderer(template).decode(
        renderer(template).request_ids(SampleRequest(messages=[USER, CALLING, TOOL]))
    )
    assert '{"expression": "12+34"}' in text and "calculator" in text and text.endswith("46")


def test_role_that_a_template_rejects_is_named() -> None:
    strict = renderer(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('No tools!') }}{% endif %}"
        "{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    )
    talk = [USER, CALLING, TOOL, ANSWER, USER]
    with pytest.raises(AgentError, match=r"rejects the agent's messages \(message 2, of the role 'tool': No"):
        strict.request_ids(SampleRequest(messages=talk))
    frontend = OpenAIFrontend("tiny", strict, FakeEngine())
    body = ChatRequest.model_validate({"model": "tiny", "messages": talk})
    with pytest.raises(
        RequestError, match=r"message 2, of the role 'tool': TemplateError: No tools"
    ) as caught:
        asyncio.run(anext(frontend.chat(body)))
    assert status_of(caught.value) == 400


def test_parts_of_text_are_one_text_in_rollouts_as_over_http() -> None:
    parts = [{"type": "text", "text": "What"}, {"type": "text", "text": "is it?"}]
    talk: list[Message] = [{"role": "user", "content": parts}]
    assert renderer(ALL).decode(renderer(ALL).prompt_ids(talk)) == "[user]What\nis it?"


def test_demonstration_cut_by_its_template_is_named() -> None:
    with pytest.raises(DatasetError, match="shows no messages of the role 'system', and demonstration 1 has"):
        demonstration_samples(renderer(NO_SYSTEM), [[USER, ANSWER], [SYSTEM, USER, ANSWER]])
