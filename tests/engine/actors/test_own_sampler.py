"""A sampler that is not Troupe's, end to end: no file of the library knows of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from actors.engine import AgentExecutionEngine
from environments import MultiTurnEnvironment, TerminationReason, Trajectory
from environments.errors import ConfigError
from policies import GameAgent, ToolAgent

if TYPE_CHECKING:
    pass


class Listener(MultiTurnEnvironment):
    """Rewards the answer that the task expects."""

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"question": self.task["question"]}, {}

    def get_reward_and_next_obs(self, task: dict[str, Any], action: Any) -> tuple[float, dict[str, Any]]:
        self.done = True
        return float(action == task["expected"]), {}


def make_engine(engine_name: str = "own_sampler:Parrot", **changes: Any) -> AgentExecutionEngine:
    arguments: dict[str, Any] = {
        "agent_class": GameAgent,
        "env_class": Listener,
        "rollout_engine_args": {"times": 2},
        "n_parallel_agents": 2,
        "retry_limit": 0,
    }
    return AgentExecutionEngine(engine_name=engine_name, **(arguments | changes))


def play(engine: AgentExecutionEngine, tasks: list[dict[str, Any]], **options: Any) -> list[Trajectory]:
    return asyncio.run(engine.execute_tasks(tasks, **options))


def test_sampler_of_ones_own_is_played(ray_cluster: None, tmp_path: Path) -> None:
    tasks = [{"question": word, "expected": word * 2} for word in ("to", "bon", "no")]
    with make_engine() as engine:
        played = play(engine, tasks, results_file=tmp_path / "results.jsonl")
    assert [each.reward for each in played] == [1.0] * 3
    with make_engine(rollout_engine_args={"times": 3}) as engine, pytest.raises(ConfigError, match="policy"):
        play(engine, tasks, results_file=tmp_path / "results.jsonl")  # it was another policy


@pytest.mark.parametrize("logprob", ["-inf", "nan"])
def test_logprob_not_finite_fails_the_rollout(ray_cluster: None, logprob: str) -> None:
    with make_engine(rollout_engine_args={"times": 1, "logprob": float(logprob)}) as engine:
        (trajectory,) = play(engine, [{"question": "to", "expected": "to"}])
    assert trajectory.termination_reason is TerminationReason.SAMPLER_ERROR
    assert (
        trajectory.error is not None and f"Parrot returned the log-probability {logprob}" in trajectory.error
    )


def test_arguments_of_an_own_sampler_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"Parrot has no argument 'tims'\. Did you mean 'times'"):
        make_engine(rollout_engine_args={"tims": 2})
    with pytest.raises(ConfigError, match=r"Parrot needs rollout_engine_args=\{'times': ...\}"):
        make_engine(rollout_engine_args={})
    with pytest.raises(ConfigError, match="Parrot has no argument 'model'"):
        make_engine(sampling_params={"model": "grey"})


def test_sampler_declares_tool_calls_and_adapters_itself() -> None:
    make_engine(agent_class=ToolAgent, agent_args={"tools": ["calculator"], "parser_name": "openai"})
    with pytest.raises(ConfigError, match="adapter"):
        make_engine(sampling_params={"adapter": "mine"})
