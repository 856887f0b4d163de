# ruff: noqa: RUF001  (DeepSeek writes its markers with a fullwidth bar)

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from environments import ToolEnvironment, math_reward_fn
from environments.errors import AgentError, ConfigError
from environments.tools import ToolCall
from environments.types import Action, Step, Trajectory
from policies import BaseAgent, GameAgent, MathAgent, ToolAgent
from policies.agents.parsers import ToolParser
from policies.sampler import SampleRequest, ScriptedSampler

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*3"}}\n</tool_call>'


def contents(agent: BaseAgent) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in agent.chat_completions]


def say(agent: BaseAgent, observation: Any, done: bool = False) -> None:
    agent.update_from_env(observation, 0.0, done, {})


def tool_agent(**arguments: Any) -> ToolAgent:
    return ToolAgent(**{"tools": ["calculator"], **arguments})


def openai_agent(**arguments: Any) -> ToolAgent:
    return tool_agent(parser_name="openai", **arguments)


AGENTS = [MathAgent, GameAgent, tool_agent, openai_agent]


# --- what holds for every agent


class MinimalAgent(BaseAgent):
    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        pass

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self.trajectory.steps.append(Step(model_response=response))
        return Action(action=response)

    def reset(self) -> None:
        self._trajectory = Trajectory()


def test_steps_appended_to_the_default_trajectory_are_kept() -> None:
    agent = MinimalAgent()
    agent.reset()
    assert agent.get_current_state() is None
    agent.update_from_model("a")
    agent.update_from_model("b")
    assert [step.model_response for step in agent.trajectory.steps] == ["a", "b"]
    assert agent.get_current_state() is agent.trajectory.steps[1]


def test_agent_without_a_trajectory_is_told_how_to_have_one() -> None:
    with pytest.raises(AgentError, match=r"MinimalAgent has no trajectory.*_trajectory = Trajectory\(\)"):
        MinimalAgent().update_from_model("a")


def test_base_agent_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BaseAgent()  # type: ignore[abstract]


@pytest.mark.parametrize("make_agent", AGENTS)
def test_each_response_appends_one_step_with_its_own_history(make_agent: Any) -> None:
    agent = make_agent()
    agent.reset()
    say(agent, {"question": "What is 12*3?"})
    for turn, response in enumerate(("first", "second"), start=1):
        action = agent.update_from_model(response)
        step = agent.trajectory.steps[-1]
        assert len(agent.trajectory.steps) == turn
        assert isinstance(action, Action)
        assert step.action == action.action
        assert step.model_response == response
        assert step.chat_completions == agent.chat_completions
        assert step.chat_completions[-1] == {"role": "assistant", "content": response}
        say(agent, "Go on.")
    assert agent.trajectory.steps[0].chat_completions[-1]["content"] == "first"


@pytest.mark.parametrize("make_agent", AGENTS)
def test_chat_completions_are_a_snapshot(make_agent: Any) -> None:
    agent = make_agent()
    agent.reset()
    say(agent, {"question": "What is 12*3?"})
    before = agent.chat_completions
    before[-1]["content"] = "changed"
    agent.update_from_model("36")
    assert agent.chat_completions[-2]["content"] != "changed"
    assert len(before) == len(agent.chat_completions) - 1


@pytest.mark.parametrize("make_agent", AGENTS)
def test_reset_forgets_everything(make_agent: Any) -> None:
    agent = make_agent()
    fresh = agent.chat_completions
    say(agent, {"question": "What is 12*3?"})
    agent.update_from_model(CALL)
    trajectory = agent.trajectory
    agent.reset()
    assert agent.chat_completions == fresh
    assert agent.trajectory == Trajectory()
    assert len(trajectory.steps) == 1


@pytest.mark.parametrize("make_agent", AGENTS)
def test_tokens_of_a_rollout_are_one_sequence(make_agent: Any) -> None:
    agent = make_agent()
    agent.reset()
    say(agent, {"question": "What is 12*3?"})
    sampler = ScriptedSampler(["<think>hm</think>" + CALL, "<think>so</think>\\boxed{36}"])
    seen: tuple[int, ...] = ()
    for _ in range(2):
        completion = asyncio.run(sampler.sample(SampleRequest(messages=agent.chat_completions)))
        assert completion.prompt_ids[: len(seen)] == seen
        seen = completion.prompt_ids + completion.completion_ids
        agent.update_from_model(completion.text)
        say(agent, {"tool_outputs": {"call_0": "36"}} if isinstance(agent, ToolAgent) else "36")


@pytest.mark.parametrize("make_agent", AGENTS)
@pytest.mark.parametrize("observation", [{"problem": "1 + 1?", "ground_truth": "2"}, {0: "?"}])
def test_task_without_a_question_is_refused(make_agent: Any, observation: dict[Any, str]) -> None:
    with pytest.raises(AgentError, match=r"no 'question'.*(problem|0).*Name the task's text 'question'"):
        say(make_agent(), observation)


# --- MathAgent


def test_math_agent_asks_the_question_and_then_for_a_review() -> None:
    agent = MathAgent()
    say(agent, {"question": "What is 1+1?"})
    agent.update_from_model("\\boxed{3}")
    say(agent, {})
    assert [role for role, _ in contents(agent)] == ["user", "assistant", "user"]
    assert contents(agent)[0][1].startswith("What is 1+1? Let's think")
    assert "review" in contents(agent)[2][1]


def test_math_agent_asks_nothing_when_it_is_done() -> None:
    agent = MathAgent()
    say(agent, {"question": "What is 1+1?"})
    agent.update_from_model("\\boxed{2}")
    say(agent, {}, done=True)
    assert contents(agent)[-1] == ("assistant", "\\boxed{2}")


def test_math_agent_keeps_or_drops_earlier_thoughts() -> None:
    for accumulate, earlier in ((True, "<think>a</think>3"), (False, "3")):
        agent = MathAgent(accumulate_thinking=accumulate)
        say(agent, {"question": "What is 1+1?"})
        agent.update_from_model("<think>a</think>3")
        say(agent, {})
        agent.update_from_model("<think>b</think>2")
        assert [text for role, text in contents(agent) if role == "assistant"] == [
            earlier,
            "<think>b</think>2",
        ]
        assert [step.thought for step in agent.trajectory.steps] == ["a", "b"]
        assert agent.trajectory.steps[0].action == "<think>a</think>3"


def test_math_agent_says_what_it_misses_in_an_observation() -> None:
    with pytest.raises(AgentError, match=r"'question'.*problem"):
        say(MathAgent(), {"problem": "What is 1+1?"})


# --- GameAgent


def test_game_agent_shows_observations_and_plays_its_response() -> None:
    agent = GameAgent(system_prompt="Play well.")
    say(agent, {"question": "Guess my number."})
    assert agent.update_from_model("<think>middle</think>5").action == "5"
    say(agent, "Higher.")
    say(agent, {}, done=True)
    assert contents(agent) == [
        ("system", "Play well."),
        ("user", "Guess my number."),
        ("assistant", "<think>middle</think>5"),
        ("user", "Higher."),
    ]
    assert agent.trajectory.steps[0].thought == "middle"


# --- ToolAgent


def test_tool_agent_explains_its_tools_after_the_system_prompt() -> None:
    (system,) = tool_agent(system_prompt="Be exact.").chat_completions
    assert system["role"] == "system"
    assert system["content"].startswith("Be exact.\n\n# Tools\n")
    assert '"name": "calculator"' in system["content"]


def test_tool_agent_with_a_brief_parser_has_a_short_message() -> None:
    agent = tool_agent(system_prompt="Give the final answer in \\boxed{}.", parser_name="hermes-brief")
    assert contents(agent) == [
        (
            "system",
            "Give the final answer in \\boxed{}. "
            "You can call calculator(expression) inside <tool_call></tool_call>.",
        )
    ]


@pytest.mark.parametrize(("tools", "text"), [([], "Be exact."), (None, "Be exact.")])
def test_tool_agent_without_tools_has_only_its_system_prompt(tools: list[str] | None, text: str) -> None:
    assert contents(ToolAgent(system_prompt=text, tools=tools)) == [("system", text)]


def test_tool_agent_with_nothing_to_say_has_no_system_message() -> None:
    assert contents(ToolAgent(system_prompt="", tools=[])) == []


def test_call_becomes_an_action_in_openai_shape() -> None:
    agent = tool_agent()
    say(agent, {"question": "What is 12*3?"})
    (call,) = agent.update_from_model(f"<think>tool</think>{CALL}").action
    assert (call["id"], call["type"], call["function"]["name"]) == ("call_0", "function", "calculator")
    assert json.loads(call["function"]["arguments"]) == {"expression": "12*3"}
    assert agent.trajectory.steps[0].thought == "tool"
    assert contents(agent)[-1] == ("assistant", f"<think>tool</think>{CALL}")


def test_call_ids_count_up_within_rollout_and_are_same_in_next() -> None:
    agent = tool_agent()
    for _ in range(2):
        agent.reset()
        ids = [call["id"] for text in (CALL + CALL, CALL) for call in agent.update_from_model(text).action]
        assert ids == ["call_0", "call_1", "call_2"]


def test_response_without_a_call_is_the_answer() -> None:
    (call,) = tool_agent().update_from_model("It is \\boxed{36}.").action
    assert call["function"]["name"] == "finish"
    assert json.loads(call["function"]["arguments"]) == {"response": "It is \\boxed{36}."}


def test_malformed_call_is_not_the_answer() -> None:
    (call,) = tool_agent().update_from_model("<tool_call>{</tool_call> \\boxed{36}").action
    assert call["function"]["name"] == "invalid_tool_call"
    assert "JSON" in json.loads(call["function"]["arguments"])["error"]


def test_call_that_is_only_thought_of_does_not_count() -> None:
    (call,) = tool_agent().update_from_model(f"<think>{CALL}</think>36").action
    assert call["function"]["name"] == "finish"


def test_tool_outputs_become_one_tool_message_each() -> None:
    agent = ToolAgent(system_prompt="", tools=[])
    say(agent, {"tool_outputs": {"call_0": "36", "call_1": "Error: no such tool."}})
    assert agent.chat_completions == [
        {"role": "tool", "content": "36", "tool_call_id": "call_0"},
        {"role": "tool", "content": "Error: no such tool.", "tool_call_id": "call_1"},
    ]


@pytest.mark.parametrize(
    ("observation", "expected"),
    [
        ({"question": "Q?", "ground_truth": "4"}, [("user", "Q?")]),
        ("plain", [("user", "plain")]),
        (7, [("user", "7")]),
        ({}, []),
        ("", []),
        (None, []),
    ],
)
def test_other_observations_become_user_messages(observation: Any, expected: list[tuple[str, str]]) -> None:
    agent = ToolAgent(system_prompt="", tools=[])
    say(agent, observation)
    assert contents(agent) == expected


def test_unknown_parser_and_tool_are_refused_with_the_agent() -> None:
    with pytest.raises(ConfigError, match="qwem"):
        tool_agent(parser_name="qwem")
    with pytest.raises(ConfigError, match="calculater"):
        ToolAgent(tools=["calculater"])


def server_call(call_id: str | None = "call-x7", arguments: Any = '{"expression": "12*3"}') -> dict[str, Any]:
    function = {"name": "calculator", "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


@pytest.mark.parametrize("make_agent", AGENTS[:3])
def test_agents_that_explain_their_tools_offer_none_to_template(make_agent: Any) -> None:
    assert make_agent().tool_schemas is None


@pytest.mark.parametrize(
    "arguments", [{"parser_name": "openai"}, {"parser_name": "qwen", "tools_in": "template"}]
)
def test_tools_in_the_template_are_not_in_the_system_message(arguments: dict[str, str]) -> None:
    agent = tool_agent(system_prompt="Be exact.", **arguments)
    assert contents(agent) == [("system", "Be exact.")]
    assert agent.tool_schemas is not None
    assert [schema["function"]["name"] for schema in agent.tool_schemas] == ["calculator"]


def test_without_tools_the_template_is_offered_none() -> None:
    assert openai_agent(tools=[]).tool_schemas is None


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"tools_in": "prompt"}, "tools_in='prompt' is not one of system, template"),
        ({"tools_in": "system", "parser_name": "openai"}, "parser_name='openai' has no text"),
    ],
)
def test_impossible_place_for_the_tools_is_refused(arguments: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        tool_agent(**arguments)


@pytest.mark.parametrize(
    "arguments", [{"parser_name": "openai"}, {"parser_name": "qwen", "tools_in": "template"}]
)
def test_calls_that_the_server_read_are_action_and_history(arguments: Any) -> None:
    agent = tool_agent(**arguments)
    assert agent.update_from_model("I call it.", tool_calls=[server_call()]).action == [server_call()]
    message = agent.chat_completions[-1]
    assert message == {"role": "assistant", "content": "I call it.", "tool_calls": [server_call()]}


def test_action_can_be_changed_without_changing_the_history() -> None:
    agent = openai_agent()
    agent.update_from_model("", tool_calls=[server_call()]).action[0]["function"]["name"] = "abacus"
    assert agent.chat_completions[-1]["tool_calls"] == [server_call()]


def test_server_call_without_an_id_gets_one() -> None:
    (call,) = openai_agent().update_from_model("", tool_calls=[server_call(call_id=None)]).action
    assert call["id"] == "call_0"


@pytest.mark.parametrize("arguments", ["{", "[]", "NaN", '{"x": 1e999}'])
def test_malformed_server_call_is_invalid_and_renderable(arguments: Any) -> None:
    agent = openai_agent()
    (call,) = agent.update_from_model("", tool_calls=[server_call(arguments=arguments)]).action
    assert (call["id"], call["function"]["name"]) == ("call-x7", "invalid_tool_call")
    assert "'calculator'" in json.loads(call["function"]["arguments"])["error"]
    assert agent.chat_completions[-1]["tool_calls"] == [call]


def test_openai_agent_takes_a_text_without_calls_as_the_answer() -> None:
    (call,) = openai_agent().update_from_model(CALL).action
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "finish",
        {"response": CALL},
    )


def test_openai_agent_plays_from_a_malformed_call_to_an_answer() -> None:
    agent = openai_agent(system_prompt="")
    task = {"question": "What is 12*3?", "ground_truth": "36"}
    env = ToolEnvironment(task, tools=["calculator"], reward_fn=math_reward_fn)
    say(agent, env.reset()[0])
    for calls in ([server_call("a", "{")], [server_call("b")]):
        observation, reward, done, _ = env.step(agent.update_from_model("", tool_calls=calls).action)
        assert (reward, done) == (0.0, False)
        say(agent, observation)
    malformed, result = (message for message in agent.chat_completions if message["role"] == "tool")
    assert malformed["tool_call_id"] == "a"
    assert "no valid JSON" in malformed["content"]
    assert result == {"role": "tool", "content": "36", "tool_call_id": "b"}
    assert env.step(agent.update_from_model("\\boxed{36}").action)[1:3] == (1.0, True)


@pytest.mark.parametrize(
    ("parser_name", "call"),
    [
        (
            "r1",
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n"
            '```json\n{"expression": "12*3"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        ("llama3-json", '{"name": "calculator", "parameters": {"expression": "12*3"}}'),
    ],
)
def test_tool_agent_calls_tools_in_the_words_of_its_models(parser_name: str, call: str) -> None:
    agent = tool_agent(parser_name=parser_name)
    assert "calculator" in contents(agent)[0][1]
    (action,) = agent.update_from_model(f"Tools.</think>\n\n{call}").action
    assert action["function"] == {"name": "calculator", "arguments": '{"expression": "12*3"}'}
    assert contents(agent)[-1] == ("assistant", f"Tools.</think>\n\n{call}")


def test_tool_agent_plays_from_a_malformed_call_to_an_answer() -> None:
    agent = tool_agent()
    task = {"question": "What is 12*3?", "ground_truth": "36"}
    env = ToolEnvironment(task, tools=["calculator"], reward_fn=math_reward_fn)
    observation, info = env.reset()
    agent.update_from_env(observation, 0.0, False, info)
    rewards = []
    for response in ("<tool_call>{</tool_call>", CALL.replace("calculator", "abacus"), CALL, "\\boxed{36}"):
        observation, reward, done, info = env.step(agent.update_from_model(response).action)
        agent.update_from_env(observation, reward, done, info)
        rewards.append((reward, done))
    assert rewards == [(0.0, False)] * 3 + [(1.0, True)]
    outputs = [text for role, text in contents(agent) if role == "tool"]
    assert outputs[0].startswith("Error: The tool call is not valid JSON")
    assert outputs[1].startswith("Error: unknown tool 'abacus'")
    assert outputs[2] == "36"


class ColonParser(ToolParser):
    """Calls as ``!name: argument``: what rLLM v0.1 asks of a parser is enough."""

    def parse(self, text: str) -> list[ToolCall]:
        lines = [line[1:].split(": ", 1) for line in text.splitlines() if line.startswith("!")]
        return [ToolCall(name, {"expression": argument}) for name, argument in lines]

    def get_tool_prompt(self, schemas: list[dict[str, Any]]) -> str:
        return "Write !name: argument."


@pytest.mark.parametrize("parser", [ColonParser, ColonParser(), f"{__name__}:ColonParser"])
def test_tool_agent_takes_a_parser_of_ones_own(parser: Any) -> None:
    agent = tool_agent(parser_name=parser)
    assert contents(agent)[0][1].endswith("\n\nWrite !name: argument.")
    (call,) = agent.update_from_model("!calculator: 12*3").action
    assert call["function"] == {"name": "calculator", "arguments": '{"expression": "12*3"}'}


@pytest.mark.parametrize("parser", ["mine", dict, 3])
def test_parser_that_is_none_is_refused_with_the_remedy(parser: Any) -> None:
    with pytest.raises(ConfigError, match=r"parser_name=.*(module:Class|derive it from that)"):
        ToolAgent(parser_name=parser)


class Polite(ToolAgent):
    """Written against rLLM v0.1's ToolAgent: its hook, and its attributes."""

    def __init__(self) -> None:
        super().__init__(tools=["calculator"])
        self.system_prompt = f"Please use {', '.join(self.tools)}."
        self.reset()

    def _format_observation_as_messages(self, obs: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"Please: {obs}"}]


def test_overrides_of_the_references_tool_agent_are_used() -> None:
    agent = Polite()
    say(agent, "6*7")
    (_, system), asked = contents(agent)
    assert system == f"Please use calculator.\n\n{agent.tools_prompt}"
    assert asked == ("user", "Please: 6*7")
    assert agent.tool_parser.parse(CALL)[0].name == "calculator"
