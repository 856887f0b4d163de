from __future__ import annotations

import json

import pytest

from environments.errors import AgentError, ConfigError
from environments.tool_environment import INVALID_TOOL_CALL
from policies.agents.messages import MessagesAgent

USER = {"role": "user", "content": "Buy tea."}
SYSTEM = {"role": "system", "content": "Be brief."}
BUY = {
    "type": "function",
    "function": {"name": "buy", "description": "", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<think>tea it is</think><tool_call>{"name": "buy", "arguments": {"item": "tea"}}</tool_call>'


def asked(messages, tools=(), **arguments):
    agent = MessagesAgent(**arguments)
    agent.update_from_env({"messages": messages, "tools": list(tools)}, 0.0, False, {})
    return agent


def test_model_sees_exactly_the_messages():
    agent = asked([SYSTEM, USER])
    assert agent.chat_completions == [SYSTEM, USER]
    agent.update_from_env({}, 1.0, True, {})
    assert agent.chat_completions == [SYSTEM, USER]


def test_action_is_an_assistant_message_without_the_thought():
    agent = asked([USER])
    action = agent.update_from_model("<think>why not</think>\nDone.").action
    assert action == {"role": "assistant", "content": "Done.", "reasoning_content": "why not"}
    step = agent.trajectory.steps[-1]
    assert (step.thought, step.model_response) == ("why not", "<think>why not</think>\nDone.")
    assert step.chat_completions[-1] == {"role": "assistant", "content": "<think>why not</think>\nDone."}


@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER]])
def test_tools_are_explained_in_the_system_message(messages):
    shown = asked(messages, [BUY]).chat_completions
    assert [message["role"] for message in shown] == ["system", "user"]
    assert json.dumps(BUY) in shown[0]["content"]
    assert shown[0]["content"].startswith("Be brief.\n\n#" if len(messages) == 2 else "#")


def test_calls_are_read_and_numbered():
    agent = asked([USER], [BUY])
    first, second = agent.update_from_model(CALL).action, agent.update_from_model(CALL).action
    assert first["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": "buy", "arguments": '{"item": "tea"}'}}
    ]
    assert second["tool_calls"][0]["id"] == "call_1"
    malformed = agent.update_from_model("<tool_call>{</tool_call>").action
    assert malformed["tool_calls"][0]["function"]["name"] == INVALID_TOOL_CALL


def test_without_tools_nothing_is_a_call():
    assert "tool_calls" not in asked([USER]).update_from_model(CALL).action


def test_next_prompt_goes_on_from_what_was_said():
    agent = asked([USER], [BUY])
    before = agent.chat_completions
    action = agent.update_from_model(CALL).action
    result = {"role": "tool", "tool_call_id": "call_0", "content": "1 in the basket"}
    agent.update_from_env({"messages": [USER, action, result], "tools": [BUY]}, 0.0, False, {})
    assert agent.chat_completions == [*before, {"role": "assistant", "content": CALL}, result]


def talked(agent, replies, shown):
    """The replies that the model sees after them, where the environment makes ``shown`` of its messages."""
    talk = [USER]
    agent.update_from_env({"messages": talk}, 0.0, False, {})
    for reply in replies:
        talk = [*talk, agent.update_from_model(reply).action, USER]
        agent.update_from_env({"messages": shown(talk)}, 0.0, False, {})
    return [message["content"] for message in agent.chat_completions if message["role"] == "assistant"]


def stripped(messages):
    return [{**message, "content": message["content"].strip()} for message in messages]


SPACED = [
    ["yes\n", " yes"],
    ["yes", "yes\n", "yes"],
    ["<think>a</think>yes", "<think>a</think>\n\nyes", "<think> a</think>yes "],
]


@pytest.mark.parametrize("replies", SPACED)
@pytest.mark.parametrize("shown", [list, stripped, json.dumps])
def test_replies_that_differ_by_white_space_are_told_apart(replies, shown):
    copied = (lambda talk: json.loads(json.dumps(talk))) if shown is json.dumps else shown
    assert talked(MessagesAgent(), replies, copied) == replies


def test_replies_left_out_do_not_take_the_place_of_others():
    assert talked(MessagesAgent(), ["yes\n", " yes", "yes"], lambda talk: talk[-2:]) == ["yes"]
    assert talked(MessagesAgent(), ["yes\n", " yes"], lambda talk: talk[:3]) == ["yes\n"]
    assert talked(MessagesAgent(), ["yes\n", " yes"], lambda talk: stripped(talk[-2:])) == [" yes"]


def test_vllms_parser_leaves_calls_in_history_as_sampled():
    agent = asked([USER], [BUY], parser_name="vllm:hermes")
    assert agent.served_parser == "vllm:hermes"
    assert agent.tool_schemas == [BUY]
    assert agent.chat_completions == [USER]  # the template explains the tools
    call = {"id": "call_0", "type": "function", "function": {"name": "buy", "arguments": "{}"}}
    action = agent.update_from_model(CALL, tool_calls=[call]).action
    assert action["tool_calls"] == [call]
    agent.update_from_env({"messages": [USER, action], "tools": [BUY]}, 0.0, False, {})
    assert agent.chat_completions == [USER, {"role": "assistant", "content": CALL}]


def test_what_the_model_did_not_say_stays_as_it_is():
    example = {"role": "assistant", "content": "An example."}
    agent = asked([USER, example, USER])
    assert agent.chat_completions == [USER, example, USER]


def test_reset_forgets():
    agent = asked([USER], [BUY])
    action = agent.update_from_model(CALL).action
    agent.reset()
    assert (agent.chat_completions, agent.trajectory.steps) == ([], [])
    agent.update_from_env({"messages": [USER, action], "tools": [BUY]}, 0.0, False, {})
    assert agent.chat_completions[-1] == action


def test_observations_of_other_shapes_and_parsers_are_refused():
    with pytest.raises(AgentError, match="GameAgent"):
        MessagesAgent().update_from_env("Hello", 0.0, False, {})
    with pytest.raises(ConfigError, match="parser_name"):
        MessagesAgent(parser_name="none")


def test_contents_may_be_lists_of_parts():
    def parts(text):
        return [{"type": "text", "text": text}]

    system, user = ({"role": role, "content": parts("a")} for role in ("system", "user"))
    agent = asked([system, user], [BUY])
    assert agent.messages[0]["content"][0] == parts("a")[0]
    assert "buy" in agent.messages[0]["content"][1]["text"]
    answer = agent.update_from_model("<think>why</think>\nyes").action
    shown = {**answer, "content": parts(answer["content"])}
    agent.update_from_env({"messages": [user, shown, user]}, 0.0, False, {})
    assert agent.chat_completions[1]["content"] == "<think>why</think>\nyes"
