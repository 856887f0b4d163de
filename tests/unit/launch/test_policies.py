"""Several policies in a run: settings and commands that are for one of them, and what counts for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kuhn_policies import Table, play

from actors.learning.learners import Learners
from environments.errors import ConfigError, TroupeError
from launch.recipes import kuhn
from launch.settings.compose import compose
from launch.settings.tree import algorithm_of
from launch.training.activity import Activity, Clock
from launch.training.components import UpdateParts
from launch.training.engine_comparison import EngineComparison
from launch.training.mini_batches import make_batches
from launch.training.selection import Selection
from launch.training.stages.reinforce import Reinforce, with_credit
from launch.validation.policies import (
    check_checkpoint,
    check_one_policy,
    check_policies,
    check_turns,
    for_all_policies,
)
from launch.validation.resources import needs
from policies.learning.kl import KLController
from policies.learning.samples import LearnerUpdate, TrainBatch

CONFIG = compose(["workload=launch.recipes.kuhn", "algorithm.name=rloo", "learner.mini_batch_size=96"])
ALONE = kuhn.workload(0)
TOGETHER = replace(ALONE, agent_args={"policies": {seat: seat for seat in kuhn.SEATS}})


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    ["server.colocated=true", "server.http_port=8000", "run.replay=runs/a", "preferences.num_steps=3"],
)
def test_settings_for_one_policy_are_refused_by_name(override: str) -> None:
    config = compose([override])
    setting, _, value = override.partition("=")
    with pytest.raises(ConfigError, match=f"(?i){setting}={value} is for a run of one policy.*first, second"):
        check_policies(config, TOGETHER.policies)
    check_policies(config, ALONE.policies)


@pytest.mark.parametrize("names", [("a", ""), ("a/b", "c"), ("a", "a"), ("a",), ()])
def test_several_policies_have_names_of_folders(names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="name folders of checkpoints"):
        check_policies(CONFIG, names)


def test_commands_with_one_model_refuse_several_policies() -> None:
    check_one_policy(ALONE)
    with pytest.raises(ConfigError, match="first, second, and this command has one model"):
        check_one_policy(TOGETHER)


def test_checkpoint_of_other_policies_is_refused(tmp_path: Path) -> None:
    (tmp_path / "first" / "huggingface").mkdir(parents=True)
    check_checkpoint(None, TOGETHER.policies)
    check_checkpoint(tmp_path, ("first",))
    for policies in (TOGETHER.policies, ALONE.policies):
        with pytest.raises(ConfigError, match="is not there: the run was begun with others"):
            check_checkpoint(tmp_path, policies)


@pytest.mark.slow
def test_ranks_and_engines_of_all_policies_are_counted() -> None:
    config = compose(["learner.device=cuda", "server.engine.num_gpus=1"])
    assert for_all_policies(config, ALONE.policies) == config
    assert needs(for_all_policies(config, TOGETHER.policies))["GPU"] == 2 * needs(config)["GPU"]


def test_credit_of_two_policies_is_that_of_each() -> None:
    tables = [Table(number, name) for number, name in enumerate(kuhn.SEATS)]
    groups, algorithm = play(tables, 0, group_size=8), algorithm_of(CONFIG)
    batches = make_batches(CONFIG, (each for group in groups for each in group.trajectories), "batches/0")
    credited, metrics = with_credit(algorithm, KLController(algorithm), groups, batches)
    assert {(batch.policy, len(batch.samples)) for batch in batches} == {("first", 48), ("second", 48)}
    for policy in kuhn.SEATS:
        own = [batch for batch in batches if batch.policy == policy]
        alone, numbers = with_credit(algorithm, KLController(algorithm), groups, own)
        assert alone == [batch for batch in credited if batch.policy == policy]
        assert metrics[f"learn/{policy}/advantage_std"] == numbers["learn/advantage_std"]


class FakeGroup:
    """Scores as the engine did, and keeps what it is to learn."""

    def __init__(self) -> None:
        self.learned: list[TrainBatch] = []

    def score(self, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        return [
            batch.with_column("old_logprobs", [each.rollout_logprobs for each in batch.samples])
            for batch in batches
        ]

    def update(self, batches: Sequence[TrainBatch]) -> LearnerUpdate:
        self.learned += batches
        return LearnerUpdate(metrics={"learn/loss": 0.0}, num_optimizer_steps=len(batches))


def test_learner_sees_all_turns_of_its_seat_and_no_others() -> None:
    groups = play([Table(number, name) for number, name in enumerate(kuhn.SEATS)], 0, group_size=8)
    fakes: dict[str, Any] = {seat: FakeGroup() for seat in kuhn.SEATS}
    config = replace(CONFIG, learner=replace(CONFIG.learner, mini_batch_size=16))
    learners, algorithm = Learners(fakes), algorithm_of(config)
    parts = UpdateParts(
        algorithm=algorithm,
        learner=learners,
        kl=KLController(algorithm),
        comparison=EngineComparison(config, algorithm, learners, None, print),
    )
    stage, clock = Reinforce(config), Clock(Activity())
    prepared = stage.prepare(parts, Selection(groups=groups), 0, 0, clock)
    learned = stage.learn(learners, prepared.batches, 0)
    assert learned.num_optimizer_steps == len(prepared.batches) == 6
    for seat, fake in fakes.items():
        seen = sorted(
            (sample.rollout_id, turn)
            for batch in fake.learned
            for sample in batch.samples
            for turn in {*sample.turns} - {-1}
        )
        assert seen == sorted(
            (each.rollout_id, turn)
            for group in groups
            for each in group.trajectories
            for turn, step in enumerate(each.steps)
            if step.seat == seat
        )
        assert any(any(sample.advantages) for batch in fake.learned for sample in batch.samples)


def test_update_of_several_policies_is_not_computed_again() -> None:
    tables = [Table(number, name) for number, name in enumerate(kuhn.SEATS)]
    check_turns(play([Table(0)], 0, group_size=1))
    with pytest.raises(TroupeError, match="has trained the policies first, second"):
        check_turns(play(tables, 0, group_size=1))
