from __future__ import annotations

import copy
import re

import numpy as np
import pytest

from environments import BaseEnv, ConfigError, MultiTurnEnvironment, RewardOutput, SingleTurnEnvironment
from environments.base import ActorNeeds, WorldEnvironment, check_env_args
from environments.errors import EnvironmentFailure
from environments.rewards.base import judge


class Countdown(MultiTurnEnvironment):
    def get_reward_and_next_obs(self, task, action):
        if action == "stop":
            self.done = True
        return float(len(action)), {"question": f"{task['question']} again"}


def exact(task_info, action):
    return RewardOutput(float(action == task_info["answer"]), {"seen": action})


def test_subclass_as_in_the_core_concepts_runs():
    class Once(BaseEnv):
        def reset(self):
            return {"question": "?"}, {}

        def step(self, action):
            return {}, 1.0, True, {}

        @staticmethod
        def from_dict(info):
            return Once()

    env = Once.from_dict({})
    assert env.idx is None
    env.idx = 3
    assert env.idx == 3
    assert env.reset() == ({"question": "?"}, {})
    assert env.step("x") == ({}, 1.0, True, {})
    assert env.close() is None
    assert Once.is_multithread_safe()
    assert Once().idx is None


def test_subclass_without_step_cannot_be_made():
    class Half(BaseEnv):
        def reset(self):
            return {}, {}

    with pytest.raises(TypeError, match="step"):
        Half()


def test_multi_turn_episode_ends_at_max_turns():
    env = Countdown({"question": "q"}, max_turns=2)
    for _ in range(2):
        assert env.reset() == ({"question": "q"}, {})
        assert env.step("a") == ({"question": "q again"}, 1.0, False, {"question": "q"})
        assert env.step("bb")[1:3] == (2.0, True)
        assert env.history == ["a", "bb"]


def test_subclass_may_end_the_episode_early():
    env = Countdown({"question": "q"}, max_turns=5)
    env.reset()
    assert env.step("stop")[2]


def test_reset_takes_a_new_task():
    env = Countdown({"question": "old"})
    assert env.reset({"question": "new"}) == ({"question": "new"}, {})


@pytest.mark.parametrize("task", [None, "just text"])
def test_task_that_is_no_dict_is_named(task):
    with pytest.raises(ConfigError, match=f"task={task!r}"):
        Countdown(task).reset()


def test_max_turns_below_one_is_refused():
    with pytest.raises(ConfigError, match="max_turns=0"):
        Countdown({}, max_turns=0)


def test_single_turn_is_judged_and_ends():
    env = SingleTurnEnvironment({"question": "q", "answer": "4"}, exact)
    env.reset()
    observation, reward, done, info = env.step("4")
    assert (observation, reward, done) == ({}, 1.0, True)
    assert info == {"question": "q", "answer": "4", "metadata": {"seen": "4"}}


def test_reward_may_be_a_plain_number():
    env = SingleTurnEnvironment({}, lambda task_info, action: 1)
    env.reset()
    assert env.step("x")[1] == 1.0


OVERFLOWING = [np.float16("inf"), np.int64(-(2**63))]
"""Numbers in whose types 1e15 is infinite, or their absolute value negative."""
NO_REWARDS = [None, "1.0", float("nan"), float("inf"), 1e16, 10**400, np.array([1.0]), *OVERFLOWING]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("verdict", NO_REWARDS)
@pytest.mark.parametrize("wrap", [lambda verdict: verdict, RewardOutput], ids=["alone", "wrapped"])
def test_reward_that_is_no_finite_number_is_an_error(verdict, wrap):
    env = SingleTurnEnvironment({}, lambda task_info, action: wrap(verdict))
    env.reset()
    with pytest.raises(EnvironmentFailure, match=re.escape(f"returned {verdict!r}")):
        env.step("x")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("verdict", [True, np.True_, np.float32(1), np.float16(1), RewardOutput(np.int64(1))])
def test_number_of_numpy_is_a_reward(verdict):
    env = SingleTurnEnvironment({}, lambda task_info, action: verdict)
    env.reset()
    assert type(judge(env.reward_fn, {}, "x").reward) is float
    assert env.step("x")[1] == 1.0


def test_missing_reward_function_is_an_error():
    with pytest.raises(ConfigError, match="reward_fn"):
        SingleTurnEnvironment({"question": "q"})


def test_from_dict_takes_rest_as_task_and_leaves_dict_alone():
    info = {"question": "q", "answer": "4", "reward_fn": exact}
    before = copy.copy(info)
    env = SingleTurnEnvironment.from_dict(info)
    assert info == before
    assert env.task == {"question": "q", "answer": "4"}
    assert env.reward_fn is exact


def test_from_dict_prefers_the_task_key():
    env = SingleTurnEnvironment.from_dict({"task": {"question": "q"}, "uid": 1, "reward_fn": exact})
    assert env.task == {"question": "q"}


def test_column_called_task_does_not_replace_the_task():
    row = {"task": "algebra", "question": "q"}
    assert SingleTurnEnvironment.from_dict({**row, "reward_fn": exact}).task == row


def test_from_dict_makes_the_class_that_it_is_called_on():
    env = Countdown.from_dict({"question": "q", "max_turns": 7})
    assert type(env) is Countdown
    assert (env.max_turns, env.task) == (7, {"question": "q"})


@pytest.mark.parametrize(
    ("needs", "message"),
    [
        ({"num_cpus": "two"}, r"num_cpus='two'.*such as 0\.5"),
        ({"num_cpus": -1}, "num_cpus=-1"),
        ({"memory_bytes": "8GB"}, "memory_bytes='8GB'.*8 << 30"),
        ({"memory_bytes": 0}, "memory_bytes=0"),
        ({"memory_bytes": 2.5}, r"memory_bytes=2\.5"),
        ({"resources": ["emulator"]}, "resources=.*by name"),
        ({"resources": {"emulator": "one"}}, "resources="),
        ({"resources": {"emulator": float("inf")}}, "resources="),
        ({"runtime_env": "pip"}, "runtime_env='pip'"),
    ],
)
def test_needs_that_no_node_can_meet_are_refused(needs, message):
    with pytest.raises(ConfigError, match=message):
        ActorNeeds(**needs)


def test_needs_may_be_left_open_and_of_any_kind_of_number():
    assert ActorNeeds() == ActorNeeds(num_cpus=None, memory_bytes=None, resources={}, runtime_env={})
    assert ActorNeeds(num_cpus=0.5, memory_bytes=8 << 30, resources={"emulator": 1}).num_cpus == 0.5


SHAPED = RewardOutput(0.1, is_correct=False)


@pytest.mark.parametrize(
    ("verdict", "is_correct"),
    [
        (SHAPED, False),
        (RewardOutput(0.0, is_correct=True), True),
        (RewardOutput(1.0, is_correct=np.bool_(False)), False),
        (RewardOutput(1.0), None),
        (0.5, None),
    ],
)
def test_environment_with_reward_function_says_what_that_says(verdict, is_correct):
    env = SingleTurnEnvironment({"question": "q"}, reward_fn=lambda task_info, action: verdict)
    env.reset()
    assert env.is_correct() is None, "nothing is answered yet"
    env.step("a")
    assert env.is_correct() is is_correct
    env.reset()
    assert env.is_correct() is None


@pytest.mark.parametrize("said", ["yes", 1, 0.0, [True]])
def test_reward_function_says_true_false_or_nothing(said):
    def grade(task_info, action):
        return RewardOutput(1.0, is_correct=said)

    env = SingleTurnEnvironment({"question": "q"}, reward_fn=grade)
    env.reset()
    with pytest.raises(EnvironmentFailure, match=r"grade.* returned is_correct=.*True, False or None"):
        env.step("a")


def test_reward_function_is_not_written_out_for_a_verdict():
    class Large:
        def __repr__(self):
            raise AssertionError("a table of a million rows would be written out for every answer")

        def __call__(self, task_info, action):
            return 1.0

    assert judge(Large(), {}, "a").reward == 1.0


class Counted(Countdown):
    """Names an argument of its own and passes the others on."""

    def __init__(self, task, start, **others):
        super().__init__(task, **others)
        self.start = start


def test_arguments_that_are_passed_on_reach_the_class_above():
    env = Counted.from_dict({"question": "q", "start": 4, "max_turns": 2, "self": "a column"})
    assert (env.start, env.max_turns) == (4, 2)
    assert env.task == {"question": "q", "self": "a column"}


def test_world_that_lacks_an_argument_names_it():
    class Maze(WorldEnvironment):
        def __init__(self, size, seed=0):
            self.size, self.seed = size, seed

        def reset(self):
            return "?", {}

        def step(self, action):
            return "", 0.0, True, {}

    maze = Maze.from_dict({"size": 3, "difficulty": "hard"})
    assert (maze.size, maze.seed) == (3, 0)
    with pytest.raises(
        ConfigError, match="Maze needs more than the keys seed: missing a required argument: 'size'"
    ):
        Maze.from_dict({"seed": 1})


def test_argument_that_an_environment_lacks_is_named():
    check_env_args(Counted, {"start": 4, "max_turns": 2, "task": {}})
    with pytest.raises(
        ConfigError,
        match=r"env_args: Counted has no argument 'max_turn'\. Did you mean 'max_turns'.*column",
    ):
        check_env_args(Counted, {"start": 4, "max_turn": 2})

    class Own(Counted):
        @classmethod
        def from_dict(cls, info):
            return cls(info, start=info["rounds"])

    check_env_args(Own, {"rounds": 3})  # it reads what it likes
