from __future__ import annotations

import copy
import json

import pytest

from environments import ConfigError, RewardOutput, ToolEnvironment, math_reward_fn
from environments.errors import AgentError, EnvironmentFailure
from environments.thoughts import split_thought
from environments.tools import Tool, ToolCall, ToolOutput

TASK = {"question": "What is 41*31?", "ground_truth": "1271"}


class Shout(Tool):
    name = "shout"
    description = "Says it louder."

    def forward(self, text: str):
        return ToolOutput(self.name, output=text.upper())


class Down(Tool):
    name = "down"
    description = "A service that is gone."

    def forward(self):
        raise EnvironmentFailure("the service is down")


def call(name, arguments, call_id="c0"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def never(task_info, action):
    raise AssertionError("nothing should be judged")


def calculator_env(**kwargs):
    env = ToolEnvironment(TASK, tools=["calculator"], **{"reward_fn": math_reward_fn, **kwargs})
    assert env.reset() == (TASK, {})
    return env


def outputs(env, action):
    observation, reward, done, _ = env.step(action)
    assert (reward, done) == (0.0, False)
    return observation["tool_outputs"]


def test_call_and_then_the_answer():
    env = calculator_env()
    assert outputs(env, [call("calculator", '{"expression": "41*31"}')]) == {"c0": "1271"}
    observation, reward, done, info = env.step([call("finish", {"response": r"\boxed{1271}"})])
    assert (observation, reward, done) == ({}, 1.0, True)
    assert info["response"] == r"\boxed{1271}"
    assert info["metadata"]["answer"] == "1271"


@pytest.mark.parametrize(
    "answer",
    [
        r"\boxed{1271}",
        call("finish", {"response": r"\boxed{1271}"}),
        [call("finish", json.dumps({"response": r"\boxed{1271}"}))],
    ],
)
def test_answer_is_a_text_or_a_finish_call(answer):
    assert calculator_env().step(answer)[1:3] == (1.0, True)


def test_finish_wins_over_other_calls_which_are_not_run():
    env = ToolEnvironment(TASK, tool_map={"down": Down}, reward_fn=math_reward_fn)
    action = [call("down", {}), call("finish", {"response": r"\boxed{1271}"}, "c1")]
    assert env.step(action)[1:3] == (1.0, True)


def test_several_calls_are_answered_in_order():
    env = calculator_env()
    action = [call("calculator", {"expression": f"{n}+1"}, f"c{n}") for n in range(3)]
    assert list(outputs(env, action).items()) == [("c0", "1"), ("c1", "2"), ("c2", "3")]


@pytest.mark.parametrize("arguments", ["", " \n", "null", "{}"])
def test_tool_without_parameters_may_be_called_without_arguments(arguments):
    assert ToolCall.from_openai(call("clock", arguments)) == ToolCall("clock", {})


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (call("calculator", '{"expression": '), "no valid JSON"),
        (call("calculator", "[" * 100_000), "no valid JSON"),
        (call("calculator", "[1]"), "JSON object"),
        (call("calculator", None), "missing a required argument"),
        (call("calculator", {"formula": "1+1"}), "wrong arguments"),
        (call("calculator", {}), "wrong arguments"),
        (call("calculator", {"expression": "1/0"}), "division by zero"),
        (call("abacus", {}), "unknown tool 'abacus', known: calculator"),
        (call("", "junk"), "no valid JSON"),
        (call("finish", '{"response": '), "no valid JSON"),
        (call("finish", {"answer": "4"}), '"response"'),
        (call("invalid_tool_call", {"error": "no closing tag."}), "no closing tag."),
        ({"id": "c0"}, "function"),
        ({"id": "c0", "function": {"name": 3}}, "function"),
    ],
)
def test_call_that_cannot_run_is_answered_by_an_error(bad, message):
    env = calculator_env(reward_fn=never)
    results = outputs(env, [bad, call("calculator", {"expression": "1+1"}, "good")])
    assert results["good"] == "2"
    assert results["c0"].startswith("Error: ")
    assert message in results["c0"]


def test_no_output_is_lost_when_ids_are_missing_or_repeated():
    nameless = {"function": {"name": "calculator", "arguments": {"expression": "1"}}}
    repeated = [call("calculator", {"expression": str(n)}) for n in (2, 3)]
    results = outputs(calculator_env(), [nameless, nameless, *repeated, "no call at all"])
    assert list(results.values())[:4] == ["1", "1", "2", "3"]
    assert len(results) == 5
    assert results["c0"] == "2"


def test_calls_in_the_last_step_are_no_answer():
    env = calculator_env(max_steps=2, reward_fn=never)
    outputs(env, [call("calculator", {"expression": "1"})])
    observation, reward, done, info = env.step([call("calculator", {"expression": r"\boxed{1271}"})])
    assert (observation, reward, done) == ({}, 0.0, True)
    assert "max_steps=2" in info["metadata"]["error"]


def test_answer_in_the_last_step_counts():
    assert calculator_env(max_steps=1).step(r"\boxed{1271}")[1:3] == (1.0, True)


def test_reset_gives_all_steps_back():
    env = calculator_env(max_steps=2)
    for _ in range(2):
        env.reset()
        outputs(env, [call("calculator", {"expression": "1"})])


def test_step_with_calls_has_the_reward_of_its_own_function():
    def last_output(task_info, action):
        assert task_info == TASK and split_thought(action) == ("", action), "all of it is judged"
        steps = json.loads(action)
        return RewardOutput(float(len(steps[-1]["outputs"]["c0"])), {"steps": steps})

    env = ToolEnvironment(TASK, tools=[Shout()], reward_fn=math_reward_fn, step_reward_fn=last_output)
    for _ in range(2):
        env.reset()
        first, second = (
            env.step([call("shout", {"text": text})]) for text in ("<think>[think][/think]", "b")
        )
        assert [first[1], second[1]] == [22.0, 1.0]
        shown = second[3]["metadata"]["steps"]
        assert [each["outputs"]["c0"] for each in shown] == ["<THINK>[THINK][/THINK]", "B"]
        assert env.step(r"\boxed{1271}")[1] == 1.0, "the answer has its own"


def test_calls_that_are_not_run_have_no_reward_of_a_step():
    env = calculator_env(step_reward_fn=never, max_steps=1)
    assert env.step([call("calculator", '{"expression": "1"}')])[1:3] == (0.0, True)


@pytest.mark.parametrize("action", [None, 5, []])
def test_action_that_is_neither_text_nor_calls_is_agents_fault(action):
    with pytest.raises(AgentError, match="got the action"):
        calculator_env().step(action)


def test_tool_can_end_the_rollout():
    env = ToolEnvironment(TASK, tool_map={"down": Down}, reward_fn=never)
    with pytest.raises(EnvironmentFailure, match="service is down"):
        env.step([call("down", {})])


def test_tools_of_ones_own_are_passed_in_a_map():
    env = ToolEnvironment(TASK, tool_map={"shout": Shout}, reward_fn=never)
    assert outputs(env, call("shout", {"text": "hey"})) == {"c0": "HEY"}


def test_without_tools_every_call_is_unknown():
    env = ToolEnvironment(TASK, reward_fn=never)
    assert outputs(env, call("shout", {})) == {"c0": "Error: unknown tool 'shout', known: none."}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": ["calculator"], "tool_map": {"shout": Shout}}, "exclude each other"),
        ({"tools": ["abacus"]}, r"'abacus'.*'calculator'"),
        ({"tools": "calculator"}, "list of names"),
        ({"tool_map": {"shout": Shout()}}, "no subclass of Tool"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"reward_fn": None}, "reward_fn"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        ToolEnvironment(TASK, **{"reward_fn": never, **arguments})


def test_from_dict_takes_rest_as_task_and_leaves_dict_alone():
    def reward(task_info, action):
        return RewardOutput(1.0)

    info = {**TASK, "tools": ["calculator"], "max_steps": 3, "reward_fn": reward}
    before = copy.deepcopy(info)
    env = ToolEnvironment.from_dict(info)
    assert info == before
    assert (env.task, env.max_steps, list(env.tools)) == (TASK, 3, ["calculator"])


def test_success_given_call_is_told_of_episodes_with_call_alone():
    env = calculator_env()
    assert env.compute_metrics() == {"called": 0.0}
    env.step(r"\boxed{1271}")
    assert env.compute_metrics() == {"called": 0.0}, "a guess that hits is no success given a call"

    env.reset()
    outputs(env, [call("calculator", '{"expression": "41*31"}')])
    assert env.compute_metrics() == {"called": 1.0, "success_when_called": 0.0}, (
        "right wherever a limit ends it"
    )
    env.step(r"\boxed{1271}")
    assert env.compute_metrics() == {"called": 1.0, "success_when_called": 1.0}

    env.reset()
    assert env.compute_metrics() == {"called": 0.0}
    outputs(env, [call("unknown", "{}")])
    assert env.compute_metrics() == {"called": 0.0}, "a call that cannot be run is none"


def test_success_given_call_is_what_reward_function_calls_right():
    env = ToolEnvironment(
        {"question": "q"}, ["calculator"], reward_fn=lambda **_: RewardOutput(0.1, is_correct=False)
    )
    env.reset()
    env.step([{"id": "a", "function": {"name": "calculator", "arguments": '{"expression": "1+1"}'}}])
    env.step("2")
    assert env.is_correct() is False
    assert env.compute_metrics() == {"called": 1.0, "success_when_called": 0.0}
    env.follow_up("And now?")
    assert env.is_correct() is None, "an answer to the first message says nothing of the second"
