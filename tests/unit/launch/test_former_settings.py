"""Settings of earlier versions, as they stand in run folders, programs, recipes and command lines."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from environments.errors import ConfigError
from launch.settings import former
from launch.settings.compose import as_train_config, compose, field_names, with_overrides
from launch.settings.tree import TrainConfig
from launch.validation.settings import check_training_settings
from policies.learning.settings import OptimizerConfig, critic_optimizer, phase_optimizer

FILE = Path(__file__).with_name("former_settings.yaml")
"""The ``settings.yaml`` that recipe=guess wrote at 156 settings, with labels of nodes and a correction."""


def value(config: TrainConfig, name: str) -> Any:
    found: Any = config
    for part in name.split("."):
        found = found[part] if isinstance(found, dict) else getattr(found, part)
    return found


def test_former_names_are_no_settings() -> None:
    assert not set(former.NAMES) & set(field_names())


def test_run_folder_of_before_loads_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    config = as_train_config(yaml.safe_load(FILE.read_text(encoding="utf-8")))
    now = compose(
        [
            *(
                "recipe=guess",
                "run.directory=runs/former",
                "fleet.num_actors=8",
                "fleet.nodes={market: spot}",
            ),
            *("algorithm.correction.level=token", "algorithm.correction.mask_outside=[null,4]"),
        ]
    )
    for stage in ("warm_start", "expert_iteration"):
        given, expected = (value(each, f"{stage}.optimizer") for each in (config, now))
        assert phase_optimizer(stage, given) == phase_optimizer(stage, expected)
        value(config, stage).optimizer = expected
    assert critic_optimizer(config.learner) == critic_optimizer(now.learner) == OptimizerConfig(lr=1e-5)
    assert replace(config, learner=replace(config.learner, critic=now.learner.critic)) == now
    check_training_settings(config)
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "name", "expected"),
    [
        ("learner.optimizer.schedule=cosine", "learner.optimizer.min_lr_ratio", 0.0),
        ("learner.optimizer.schedule=constant", "learner.optimizer.min_lr_ratio", 1.0),
        ("learner.optimizer.betas=[0.8,0.9]", "learner.verl.optimizer.betas", [0.8, 0.9]),
        ("warm_start.optimizer.schedule=constant", "warm_start.optimizer.min_lr_ratio", 1.0),
        ("expert_iteration.optimizer={schedule: cosine}", "expert_iteration.optimizer.min_lr_ratio", 0.0),
        ("learner.critic.optimizer.lr=0.5", "learner.critic", {"lr": 0.5}),
        ("learner.critic.clip_range=0.2", "learner.critic.clip_range", 0.2),
        ("learner.lora.alpha=32", "learner.verl.model.lora_alpha", 32),
        ("learner.lora.target_modules=q_proj", "learner.verl.model.target_modules", "q_proj"),
        ("fleet.num_cpus_per_actor=1", "fleet.nodes", {"CPU": 1}),
        ("fleet.nodes.labels={market: spot}", "fleet.nodes", {"CPU": 0.01, "market": "spot"}),
        ("fleet.nodes.labels.market=spot", "fleet.nodes", {"CPU": 0.01, "market": "spot"}),
        ("server.nodes={resources: {big: 1}}", "server.nodes", {"CPU": 0.5, "big": 1}),
        ("server.num_cpus=2", "server.nodes", {"CPU": 2}),
        ("server.engine.dtype=bfloat16", "server.engine.dtype", "bfloat16"),
        ("server.engine.num_threads=3", "server.engine.num_threads", 3),
        ("server.engine.cache_after_publish=keep", "server.engine.options", {"cache_after_publish": "keep"}),
        ("server.weights.options={shared_folder: /a}", "server.weights.shared_folder", "/a"),
        ("server.access.public_url=https://a.b/c", "server.access.hosts", ["https://a.b/c"]),
        ("server.access.tokens_per_minute=9", "server.access.per_minute", {"tokens": 9}),
        ("server.access.requests_per_minute=9", "server.access.per_minute", {"requests": 9}),
        ("algorithm.correction.mode=bypass", "algorithm.correction.level", "bypass"),
        ("algorithm.correction.mode=decoupled", "algorithm.correction.level", None),
        ("algorithm.correction.mask_below=0.5", "algorithm.correction.mask_outside", [0.5, None]),
        ("algorithm.correction.mask_above=5", "algorithm.correction.mask_outside", [None, 5.0]),
        ("selection.min_reward=0.1", "selection.reward_range", [0.1, None]),
        ("selection.max_reward=0.9", "selection.reward_range", [None, 0.9]),
        ("algorithm.overlong_penalty=0.5", "algorithm.overlong", {"penalty": 0.5}),
        ("algorithm.overlong_buffer_tokens=9", "algorithm.overlong", {"buffer_tokens": 9}),
        ("rollout.overlong_filter=true", "selection.masked_reasons", ["overlong"]),
        ("rollout.overlong_filter=false", "selection.masked_reasons", []),
    ],
)
def test_moved_settings_are_found_in_their_place(
    override: str, name: str, expected: Any, caplog: pytest.LogCaptureFixture
) -> None:
    key, _, text = override.partition("=")
    in_a_file = OmegaConf.from_dotlist([override])
    for config in (
        compose([override]),
        as_train_config(in_a_file),
        as_train_config({key: yaml.safe_load(text)}),
    ):
        assert value(config, name) == expected
    assert not caplog.records


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name, (_, rule) in former.GONE.items()])
def test_values_that_count_no_more_are_named_with_the_rule(
    name: str, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    usual = former.GONE[name][0]
    assert compose([f"{name}={str(usual).lower()}"]) and not caplog.records
    caplog.set_level(logging.WARNING)
    compose([f"{name}=7"])
    assert caplog.messages == [f"{name}=7 counts no more: {rule}."]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["fleet.min_actors=2", "fleet.max_actors=6"], (2, 6)),
        (["fleet.min_actors=2", "fleet.num_actors=4"], (2, 4)),
        (["fleet.min_actors=2", "fleet.num_actors=4", "fleet.max_actors=9"], (2, 9)),
    ],
)
def test_fewest_actors_keep_their_number(overrides: list[str], expected: tuple[int, int]) -> None:
    assert compose(overrides).fleet.bounds == expected


def test_former_setting_wins_over_the_recipe() -> None:
    config = compose(["recipe=guess", "learner.optimizer.schedule=constant", "warm_start.optimizer.lr=0.1"])
    assert config.learner.optimizer == OptimizerConfig(lr=5e-4, warmup_steps=3)
    assert config.warm_start.optimizer == {"lr": 0.1, "warmup_steps": 20, "min_lr_ratio": 0.1}


@pytest.mark.parametrize(
    "override", ["run.checkpoints.every=10", "run.checkpoint_every=10", "run.checkpoints={every: 10}"]
)
def test_override_by_either_name_holds_over_a_file(override: str) -> None:
    for settings in ({"run": {"checkpoint_every": 20}}, {"run": {"checkpoints": {"every": 20}}}):
        assert with_overrides(settings, [override]).run.saving.every == 10


def test_override_of_a_pair_holds_over_the_bounds_of_before() -> None:
    config = with_overrides({"selection": {"min_reward": 0.1}}, ["selection.reward_range=[null,2]"])
    assert config.selection.reward_range == [None, 2.0]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("run.checkpoint_every", {"run": {"checkpoints": {"every": 20}}}),
        ("fleet.num_cpus_per_actor", {"fleet.nodes": {"CPU": 2}}),
        ("selection.min_reward", {"selection": {"reward_range": [0.1, None]}}),
    ],
)
def test_setting_by_two_names_is_refused_by_both(before: str, now: dict[str, Any]) -> None:
    given = {before: 1, **now}
    readers: list[Callable[[], TrainConfig]] = [
        lambda: with_overrides(given, []),
        lambda: as_train_config(given),
        lambda: compose([f"{name}={json.dumps(each)}".replace('"', "") for name, each in given.items()]),
    ]
    for read in readers:
        with pytest.raises(ConfigError, match=rf"have {before} and [\w.]+, its name of today"):
            read()


def test_former_value_that_could_not_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"correction\.mode='bypas' .*Did you mean 'bypass'"):
        compose(["algorithm.correction.mode=bypas"])
