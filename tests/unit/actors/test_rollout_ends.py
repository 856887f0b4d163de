"""End of a rollout whose last answer was cut, and what its steps hold then."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from actors.rollouts.journal import Journal
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, run_rollout
from environments import SingleTurnEnvironment, ToolEnvironment
from environments.base import BaseEnv
from environments.types import Action, Completion, Step, TerminationReason, Trajectory
from policies import BaseAgent, GameAgent, ToolAgent
from policies.sampler import SampleRequest, ScriptedSampler

REQUEST = RolloutRequest(rollout_id="0/0", group_id="0", task={})


def pays(task_info: dict[str, Any], action: str) -> float:
    return 1.0


def play(agent: BaseAgent, env: BaseEnv, replies: list[str], **limits: Any) -> Trajectory:
    scripted = ScriptedSampler(replies)

    def sample(request: SampleRequest) -> Completion:
        return asyncio.run(scripted.sample(request))

    return run_rollout(agent, env, sample, REQUEST, RolloutLimits(**limits), Journal())


def single_turn() -> BaseEnv:
    return SingleTurnEnvironment(task={"question": "Tell."}, reward_fn=pays)


@pytest.mark.parametrize(
    ("agent", "env"),
    [
        (GameAgent(), single_turn()),
        (ToolAgent(), ToolEnvironment(task={"question": "Tell."}, tools=[], reward_fn=pays)),
    ],
)
def test_answer_cut_by_the_budget_is_masked_and_has_its_reward(agent: BaseAgent, env: BaseEnv) -> None:
    trajectory = play(agent, env, ["x" * 50], max_response_tokens=20, overlong_filter=True)
    assert trajectory.termination_reason is TerminationReason.RESPONSE_BUDGET_SPENT
    assert trajectory.masked
    assert (trajectory.reward, trajectory.steps[-1].done) == (1.0, True)


class JudgesTheWhole(SingleTurnEnvironment):
    def compute_final_reward(self) -> float:
        return 0.25


def test_cut_answer_that_is_masked_has_its_environments_verdict() -> None:
    env = JudgesTheWhole(task={"question": "1+1?"}, reward_fn=pays)
    cut = play(GameAgent(), env, ["x" * 50], max_response_tokens=20, overlong_filter=True)
    assert (cut.masked, cut.reward) == (True, 0.25)


def test_answer_that_fits_or_is_cut_by_its_turn_limit_is_whole() -> None:
    exact = play(GameAgent(), single_turn(), ["x" * 19], max_response_tokens=20, overlong_filter=True)
    limits = {"max_response_tokens": 90, "max_turn_tokens": 20, "overlong_filter": True}
    turn = play(GameAgent(), single_turn(), ["x" * 50], **limits)
    for trajectory in (exact, turn):
        assert trajectory.termination_reason is TerminationReason.ENV_DONE
        assert not trajectory.masked


class Board(BaseEnv):
    """Hands out the one list that it goes on to change, and at last what has no copy."""

    def reset(self) -> tuple[Any, dict[str, Any]]:
        self.cells: list[int] = []
        return self.cells, {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        self.cells.append(len(self.cells))
        return (threading.Lock() if len(self.cells) == 2 else self.cells), 0.0, len(self.cells) == 3, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> Board:
        return Board()


def test_step_holds_the_observation_that_it_answers() -> None:
    steps = play(GameAgent(), Board(), ["a", "b", "c"]).steps
    assert [step.observation for step in steps[:2]] == [[], [0]]
    assert "lock" in steps[2].observation


class NamesItsStates(Board):
    """Names the state of all observations but the last one."""

    def reset(self) -> tuple[Any, dict[str, Any]]:
        observation, _ = super().reset()
        return observation, {"state_key": 0}

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        observation, reward, done, _ = super().step(action)
        number = len(self.cells)
        return observation, reward, done, {"number": number} | ({"state_key": number} if number < 2 else {})


def test_step_holds_the_name_of_the_state_that_it_begins_in() -> None:
    steps = play(GameAgent(), NamesItsStates(), ["a", "b", "c"]).steps
    assert [step.info.get("state_key") for step in steps] == [0, 1, None]
    assert [step.info["number"] for step in steps] == [1, 2, 3]


class OwnRecord(GameAgent):
    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        self.trajectory.steps.append(Step(observation="mine"))
        return Action(action=response)


def test_agents_own_observation_stays() -> None:
    assert play(OwnRecord(), single_turn(), ["a"]).steps[0].observation == "mine"


class TakesTheObservationOnly(GameAgent):
    """As agents of rLLM v0.1 could be written: the rest comes by name."""

    def update_from_env(self, observation: Any, **kwargs: Any) -> None:  # type: ignore[override]
        assert set(kwargs) == {"reward", "done", "info"}
        super().update_from_env(observation, **kwargs)


def test_agent_that_takes_the_rest_by_name_is_played() -> None:
    trajectory = play(TakesTheObservationOnly(), single_turn(), ["a"])
    assert trajectory.termination_reason is TerminationReason.ENV_DONE
