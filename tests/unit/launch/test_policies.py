"""Several policies in a run: settings and commands that are for one of them, and what counts for all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from kuhn_policies import Table, play

from environments.errors import ConfigError, TroupeError
from launch.recipes import kuhn
from launch.settings.compose import compose
from launch.settings.tree import algorithm_of
from launch.training.mini_batches import make_batches
from launch.training.stages.reinforce import with_credit
from launch.validation.policies import (
    check_checkpoint,
    check_one_policy,
    check_policies,
    check_turns,
    for_all_policies,
)
from launch.validation.resources import needs
from policies.learning.kl import KLController

CONFIG = compose(["workload=launch.recipes.kuhn", "algorithm.name=rloo", "learner.mini_batch_size=96"])
ALONE = kuhn.workload(0)
TOGETHER = replace(ALONE, agent_args={"policies": {seat: seat for seat in kuhn.SEATS}})


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


def test_update_of_several_policies_is_not_computed_again() -> None:
    tables = [Table(number, name) for number, name in enumerate(kuhn.SEATS)]
    check_turns(play([Table(0)], 0, group_size=1))
    with pytest.raises(TroupeError, match="has trained the policies first, second"):
        check_turns(play(tables, 0, group_size=1))
