"""A run whose groups fork: what its settings have to be, and how its trajectories are counted and stored."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from forked_world import Policy, Shape, World
from played_trajectories import written
from resumed_episodes import ReplayedEnv, RestartedEnv

from environments import Dataset
from environments.data.trajectory_json import trajectory_from_json
from environments.errors import ConfigError
from environments.types import TrajectoryGroup
from launch.reporting.metrics import token_metrics
from launch.settings.tree import ForksConfig, RolloutConfig, TrainConfig, algorithm_of
from launch.training.mini_batches import make_batches
from launch.training.rollout_requests import tasks_digest
from launch.training.stages.policy_update import turn_advantages
from launch.training.stages.reinforce import with_credit
from launch.validation.workload import check_forks
from launch.workload import Workload
from policies import GameAgent
from policies.learning.kl import KLController
from policies.learning.samples import has_signal
from policies.learning.settings import AlgorithmConfig

TASKS = Dataset([{"question": "Begin."}], name="tasks", split="train")
FORKED = RolloutConfig(group_size=8, max_steps=5, forks=ForksConfig(roots=2, at="every 2"))
CONFIG = TrainConfig(algorithm=AlgorithmConfig(name="rloo"), rollout=FORKED)
WORLD = World(num_actions=3, max_steps=5, is_over=lambda path: path[-1:] == (2,), reward=sum)


def check(config: TrainConfig, env_class: type[ReplayedEnv] = ReplayedEnv) -> None:
    check_forks(config, Workload(agent_class=GameAgent, env_class=env_class, train_dataset=TASKS))


def with_rollout(**settings: Any) -> TrainConfig:
    return replace(CONFIG, rollout=replace(FORKED, **settings))


def drawn_group(name: str = "00000000", seed: int = 0) -> TrajectoryGroup:
    rng = random.Random(seed)

    def draw(probabilities: np.ndarray) -> int:
        return rng.choices(range(len(probabilities)), probabilities)[0]

    return Shape(8, 2, "every 2").group(Policy(WORLD), draw, name)


def test_settings_of_a_forked_run_are_accepted() -> None:
    check(CONFIG)
    check(replace(CONFIG, algorithm=AlgorithmConfig()))
    check(TrainConfig(), RestartedEnv)


def test_environment_that_cannot_resume_names_the_remedy() -> None:
    with pytest.raises(ConfigError, match=r"RestartedEnv.resumes_by is None.* set it to 'replay'"):
        check(CONFIG, RestartedEnv)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (with_rollout(group_size=2), "rollout.group_size=2 leaves no member that forks"),
        (with_rollout(max_steps=2), "rollout.max_steps=2 has no turn after which to fork"),
        (with_rollout(forks=ForksConfig(at="every 2")), "has no effect without rollout.forks.roots"),
        (with_rollout(forks=ForksConfig(roots=2, at="always")), 'use "every 2", entropy, or a function'),
        (replace(CONFIG, algorithm=AlgorithmConfig(name="ppo")), "does not compare members"),
        (replace(CONFIG, algorithm=AlgorithmConfig(credit="per_step")), "credit=per_step does not compare"),
        (replace(CONFIG, stages=["expert_iteration"]), "would imitate a shared turn several times"),
    ],
)
def test_settings_that_cannot_fork_name_the_remedy(config: TrainConfig, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        check(config)
    assert words in str(error.value)


def test_digest_of_the_tasks_tells_forks_apart() -> None:
    flat = replace(CONFIG, rollout=replace(FORKED, forks=ForksConfig()))
    others = [with_rollout(forks=ForksConfig(roots=3, at="every 2")), with_rollout(group_size=6), flat]
    digests = [tasks_digest(each, TASKS) for each in (CONFIG, *others)]
    assert len(set(digests)) == 4
    assert digests[3] == tasks_digest(replace(flat, rollout=replace(flat.rollout, group_size=6)), TASKS)


def test_stored_trajectory_still_knows_its_fork() -> None:
    for one in drawn_group().trajectories:
        read = trajectory_from_json(written(one))
        assert (read.forked_from, read.num_shared_turns) == (one.forked_from, one.num_shared_turns)
        assert read.num_sampled_tokens == one.num_sampled_tokens


def test_shared_tokens_are_counted_and_trained_once() -> None:
    groups = [drawn_group(f"{number:08d}", number) for number in range(4)]
    sampled = sum(len(each.steps) - each.num_shared_turns for group in groups for each in group.trajectories)
    assert token_metrics(groups, {})["stream/tokens_trained"] == sampled
    batches = make_batches(CONFIG, (each for group in groups for each in group.trajectories), "batches/0")
    algorithm = algorithm_of(CONFIG)
    credited, metrics = with_credit(algorithm, KLController(algorithm), groups, batches)
    assert sum(row.num_sampled_tokens for batch in credited for row in batch.samples) == sampled
    assert metrics["learn/uncompared_fraction"] == 0
    by_turn = turn_advantages(credited)
    for group in groups:
        advantages = [value for one in group.trajectories for value in by_turn.get(one.rollout_id, [])]
        assert has_signal(group, algorithm) == any(advantages)
    for one in (each for group in groups for each in group.trajectories):
        own = by_turn.get(one.rollout_id, [])
        assert len(own) in (len(one.steps), 0) and not any(own[: one.num_shared_turns])
