from __future__ import annotations

from dataclasses import replace

import pytest

from environments import BaseEnv, Dataset, SingleTurnEnvironment
from environments.chat_endpoint import ChatEndpoint
from environments.errors import ConfigError, DatasetError
from environments.rewards.base import unjudged
from environments.rewards.group_judge import GroupJudge
from environments.rewards.judge import Judge
from launch.settings.tree import TrainConfig
from launch.training import start
from launch.validation.workload import check_datasets, check_group_reward
from launch.workload import Workload
from policies import BaseAgent, MathAgent
from policies.agents.seats import SeatsAgent

TASKS = [{"question": "1 + 1?"}]


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ({"train_dataset": TASKS}, "train_dataset is a list: write train_dataset=Dataset"),
        ({"train_dataset": Dataset(TASKS), "val_dataset": TASKS}, "val_dataset is a list"),
        ({"train_dataset": Dataset([])}, "The training dataset is empty"),
        ({"train_dataset": Dataset(TASKS), "val_dataset": Dataset([])}, "The held-out dataset is empty"),
        ({"train_dataset": None}, "train_dataset is a NoneType"),
    ],
)
def test_tasks_that_are_in_no_dataset_are_told_from_none(datasets, message):
    workload = Workload(agent_class=BaseAgent, env_class=BaseEnv, **datasets)
    with pytest.raises(DatasetError, match=message):
        check_datasets(TrainConfig(), workload)


JUDGE = GroupJudge(Judge(ChatEndpoint("http://127.0.0.1:9", "m"), {"It is short.": 1.0}))


def compared(reward_fn: object) -> Workload:
    return Workload(
        agent_class=MathAgent,
        env_class=SingleTurnEnvironment,
        train_dataset=Dataset(TASKS),
        env_args={"reward_fn": reward_fn},
    )


def test_reward_that_compares_is_of_the_groups_and_no_rollouts(monkeypatch) -> None:
    monkeypatch.setattr(start, "RolloutService", lambda *arguments: arguments)
    monkeypatch.setattr(start, "load_tokenizer", str)
    for reward_fn, in_rollouts, of_groups in ((JUDGE, unjudged, JUDGE), (JUDGE.judge, JUDGE.judge, None)):
        pair, *_, group_reward = start.rollout_service(
            TrainConfig(), TrainConfig().server, compared(reward_fn), "model", {}
        )
        assert (pair.env_args["reward_fn"], group_reward) == (in_rollouts, of_groups)


@pytest.mark.parametrize("members", [{}, {"concurrency": 0}])
def test_reward_that_compares_says_how_many_at_once(members) -> None:
    own = type("Own", (), {"__call__": JUDGE.judge, "compare": JUDGE.compare, **members})()
    with pytest.raises(ConfigError, match=r"has compare\(\), and no concurrency above 0"):
        check_group_reward(TrainConfig(), compared(own))


def test_reward_that_compares_needs_a_group() -> None:
    config = TrainConfig()
    config.rollout.group_size = 1
    check_group_reward(config, compared(JUDGE.judge))
    with pytest.raises(ConfigError, match=r"rollout.group_size=1 leaves GroupJudge\(.*set 2 or more"):
        check_group_reward(config, compared(JUDGE))


def test_reward_that_compares_is_for_agents_of_one_seat() -> None:
    game = replace(compared(JUDGE), agent_class=SeatsAgent)
    with pytest.raises(ConfigError, match=r"agent_class=SeatsAgent plays several seats, and GroupJudge\("):
        check_group_reward(TrainConfig(), game)
    check_group_reward(TrainConfig(), replace(game, env_args={}))
