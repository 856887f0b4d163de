"""The step that is played before a run starts anything."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest

from actors.gateway.client import PolicyClient
from environments import BaseEnv, CodeEnvironment, Dataset
from environments.errors import AgentError, ConfigError
from environments.sandbox.local import announce_best_effort
from launch.settings.tree import TrainConfig
from launch.training.trainer import AgentTrainer
from launch.validation.trial import check_agent, try_first_task
from launch.workload import Workload
from policies import CodingAgent, GameAgent


class Precise(BaseEnv):
    """Takes exactly the columns of its dataset, as many an environment of the reference does."""

    made = 0

    def __init__(self, question: str) -> None:
        self.question = question
        Precise.made += 1

    def reset(self) -> tuple[str, dict[str, Any]]:
        return self.question, {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        return "", 0.0, True, {}

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> Precise:
        return cls(**info)


def test_environment_is_tried_out_with_what_rollout_gives_it() -> None:
    workload = Workload(agent_class=GameAgent, env_class=Precise, train_dataset=Dataset([{"question": "?"}]))
    check_agent(workload, workload.train_dataset)
    assert Precise.made == 1


class Stuck(Precise):
    """Waits for what only the cluster's nodes have."""

    def reset(self) -> tuple[str, dict[str, Any]]:
        time.sleep(30)
        return super().reset()


class Unclosed(Precise):
    def close(self) -> None:
        raise RuntimeError("no such container")


@pytest.mark.parametrize(
    ("env_class", "seconds", "said"), [(Stuck, 0.2, "within 0.2 s"), (Unclosed, 60.0, "no such container")]
)
def test_environment_that_cannot_be_tried_here_is_left_to_nodes(
    env_class: type[Precise], seconds: float, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    workload = Workload(
        agent_class=GameAgent, env_class=env_class, train_dataset=Dataset([{"question": "?"}])
    )
    with caplog.at_level(logging.WARNING):
        try_first_task(workload, workload.train_dataset, seconds)
    assert said in caplog.text


def test_sandbox_that_may_not_isolate_is_announced_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    announce_best_effort.cache_clear()
    tasks = Dataset([{"question": "Print 1.", "tests": [{"input": "", "output": "1"}]}])
    workload = Workload(
        agent_class=CodingAgent,
        env_class=CodeEnvironment,
        env_args={"sandbox": "best-effort"},
        train_dataset=tasks,
    )
    check_agent(workload, tasks)
    assert "may forge their rewards" in caplog.text


def test_configuration_in_python_is_checked_before_any_play(tmp_path: Path) -> None:
    config = TrainConfig()
    config.run.directory = str(tmp_path / "run")
    config.learner.optimizer.min_lr_ratio = 1.5
    trainer = AgentTrainer(GameAgent, Precise, config, Dataset([{"question": "?"}]))
    played = Precise.made
    with pytest.raises(ConfigError, match=r"learner\.optimizer\.min_lr_ratio=1\.5 has to be .*at most 1"):
        trainer.train()
    assert Precise.made == played and not (tmp_path / "run").exists()


async def solve(task: dict[str, Any], client: PolicyClient) -> float:
    raise LookupError(f"no answer to {task['question']}")


def test_trainer_plays_a_function_before_any_model_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    config = {"model.path": str(tiny_model), "run.directory": str(tmp_path / "run")}
    trainer = AgentTrainer(rollout=solve, config=config, train_dataset=Dataset([{"question": "?"}]))
    with pytest.raises(AgentError, match=r"rollout function solve raised LookupError.'no answer to \?'"):
        trainer.train()


def test_training_without_a_model_is_an_error_at_once() -> None:
    trainer = AgentTrainer(GameAgent, Precise, TrainConfig(), Dataset([{"question": "?"}]))
    played = Precise.made
    with pytest.raises(ConfigError, match=r"model\.path is not set, and the workload has no demonstrations"):
        trainer.train()
    assert Precise.made == played
