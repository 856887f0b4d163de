"""The stages of a training: chosen by a list, run in turn, resumed in the middle."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from actors.gateway.remote_program import RemoteProgram
from environments import Dataset, SingleTurnEnvironment
from environments.errors import ConfigError, DatasetError
from launch.settings.compose import as_train_config, compose
from launch.settings.tree import RunConfig, TrainConfig
from launch.training import trainer
from launch.training.stages.base import pass_over
from launch.training.stages.chosen import chosen_stages
from launch.training.stages.preferences import Preferences, read_reference
from launch.training.trainer import check_training
from launch.workload import Workload
from policies import ToolAgent
from policies.chat import ChatRenderer
from policies.learning.preferences import Pair, PairScore, Preference, make_pairs
from policies.tiny import build_tokenizer


def names(config: TrainConfig) -> list[str]:
    return [stage.name for stage in chosen_stages(config)]


def config(*stages: str, **settings: dict[str, object]) -> TrainConfig:
    config = TrainConfig(stages=list(stages), stage_settings=settings)
    config.warm_start.num_steps = 5 * ("warm_start" in stages)
    config.preferences.num_steps = 3 * ("preferences" in stages)
    config.expert_iteration.num_steps = 2 * ("expert_iteration" in stages)
    return config


def test_stages_run_in_order_of_list_without_those_of_no_step() -> None:
    assert names(TrainConfig()) == ["reinforce"], "the warm start has 0 steps by default"
    assert names(config("expert_iteration", "warm_start")) == ["expert_iteration", "warm_start"]
    own = config("own_stage:Rehearse", "reinforce", rehearse={"num_steps": 3})
    assert [(stage.name, stage.num_steps) for stage in chosen_stages(own)] == [
        ("rehearse", 3),
        ("reinforce", 100),
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (config("reinforse"), "there is no 'reinforse'. Did you mean 'reinforce'"),
        (config("no_module:Stage"), "there is no module 'no_module'"),
        (config("own_stage:TrainConfig"), "derived from"),
        (config("reinforce", "reinforce"), "'reinforce' twice"),
        (config(), "none of them has a step"),
        (config("reinforce", rehearse={"num_steps": 3}), "add that stage"),
        (config("own_stage:Rehearse", rehearse={"num_step": 3}), "stage_settings.rehearse.*num_step"),
        (config("own_stage:Rehearse"), "stage_settings.rehearse.*num_steps"),
        (config("reinforce", reinforce={"num_steps": 3}), "run.num_steps"),
        (TrainConfig(stages=["expert_iteration"]), "expert_iteration.num_steps=0"),
        (TrainConfig(stages=["preferences", "reinforce"]), "preferences.num_steps=0"),
    ],
)
def test_stages_that_cannot_be_are_error_before_anything_starts(wrong: TrainConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_stages(wrong)


def test_steps_of_a_stage_that_is_not_listed_are_an_error() -> None:
    wrong = config("reinforce")
    wrong.warm_start.num_steps = 9
    with pytest.raises(ConfigError, match=r"warm_start.num_steps=9 has no effect.*Add it there"):
        chosen_stages(wrong)


def test_epochs_of_a_stage_that_is_not_listed_are_an_error() -> None:
    wrong = config("warm_start", "expert_iteration")
    wrong.learner.num_epochs = 2
    with pytest.raises(ConfigError, match=r"learner.num_epochs=2 has no effect.*lacks reinforce"):
        chosen_stages(wrong)
    chosen = config("expert_iteration", "reinforce")
    chosen.learner.num_epochs = 2
    assert names(chosen) == ["expert_iteration", "reinforce"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "value", "part"),
    [
        ("algorithm.name", "ppo", "a critic"),
        ("algorithm.name", "remax", "greedy rollouts"),
        ("algorithm.kl.place", "loss", "a reference policy"),
    ],
)
def test_parts_that_supervised_stages_have_no_use_for_are_error(setting: str, value: str, part: str) -> None:
    given = [f"{setting}={value}", "warm_start.num_steps=3", "expert_iteration.num_steps=3"]
    sentence = f"{setting}={value} starts {part}, which has no effect.* lacks reinforce. Add that stage, or"
    with pytest.raises(ConfigError, match=sentence):
        chosen_stages(compose([*given, "stages=[warm_start,expert_iteration]"]))
    assert names(compose([*given, "stages=[warm_start,expert_iteration,reinforce]"]))[-1] == "reinforce"


@pytest.mark.slow
def test_warm_start_without_demonstrations_is_an_error() -> None:
    workload = Workload(
        agent_class=ToolAgent, env_class=SingleTurnEnvironment, train_dataset=Dataset([{"a": 1}])
    )
    with pytest.raises(ConfigError, match=r"warm_start.num_steps=5 needs demonstrations"):
        check_training(as_train_config(config("warm_start", "reinforce")), workload)


ASKED = [{"role": "user", "content": "1+1?"}]
PREFERENCE = Preference(
    messages=ASKED,
    chosen=[{"role": "assistant", "content": "2"}],
    rejected=[{"role": "assistant", "content": "3"}],
)


def with_preferences(*preferences: Preference) -> Workload:
    return Workload(
        agent_class=ToolAgent,
        env_class=SingleTurnEnvironment,
        train_dataset=Dataset([{"a": 1}]),
        preferences=preferences,
    )


def test_preferences_that_are_missing_or_wrong_are_an_error() -> None:
    chosen = config("preferences", "reinforce")
    same = replace(PREFERENCE, rejected=PREFERENCE.chosen)
    for held_out, preferences, error, message in (
        (0, (), ConfigError, "preferences.num_steps=3 needs preferences"),
        (2, (PREFERENCE, PREFERENCE), ConfigError, "held_out_pairs=2 leaves nothing .* set it to 1"),
        (0, (PREFERENCE, same), DatasetError, "rejected of preference 1 are the same"),
    ):
        chosen.preferences.held_out_pairs = held_out
        with pytest.raises(error, match=message):
            check_training(as_train_config(chosen), with_preferences(*preferences))


def test_optimizer_of_the_preferences_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"preferences\.optimizer='lrr' is not one of lr"):
        check_training(compose(["preferences.optimizer.lrr=1"]), with_preferences(PREFERENCE))


def test_each_pass_takes_every_pair_once() -> None:
    wanted = config("preferences")
    wanted.preferences.pairs_per_step = 3
    stage = Preferences(wanted)
    taken = [index for step in range(10) for index in stage.indices(step, num_pairs=5)]
    assert taken == [index for number in range(6) for index in pass_over(5, wanted.seed, stage.name, number)]
    assert sorted(taken[:5]) == sorted(taken[5:10]) == [0, 1, 2, 3, 4]
    assert len(stage.indices(0, num_pairs=2)) == 2, "not more than there are"


def test_reference_of_other_pairs_cannot_be_gone_on_from(tmp_path: Path) -> None:
    (pair,) = pairs_of(PREFERENCE)
    (other,) = pairs_of(replace(PREFERENCE, chosen=[{"role": "assistant", "content": "II"}]))
    path = tmp_path / "reference.jsonl"
    with pytest.raises(ConfigError, match=r"no such file: put it back, or .*model.path="):
        read_reference(path, [pair])
    path.write_text(json.dumps({"pair": pair.key, "chosen": -1.5, "rejected": -2.0}) + "\n")
    assert read_reference(path, [pair]) == {pair.key: PairScore(chosen=-1.5, rejected=-2.0)}
    with pytest.raises(ConfigError, match="1 of 2 pairs have no score"):
        read_reference(path, [pair, other])


def pairs_of(*preferences: Preference) -> list[Pair]:
    renderer = ChatRenderer(build_tokenizer([[*ASKED, {"role": "assistant", "content": "2"}]]))
    return make_pairs(renderer, preferences, lambda text: None)


def test_programs_elsewhere_are_of_the_folder_of_their_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sessions go on where it is resumed, and not in another run at the same port."""
    trained: list[Workload] = []
    monkeypatch.setattr(trainer, "check_training", lambda *_: None)
    monkeypatch.setattr(trainer, "_train", lambda _, workload, *__: trained.append(workload) or True)
    rollout = RemoteProgram("http://127.0.0.1:1", "key", silent_seconds=1)
    config = TrainConfig(run=RunConfig(directory=str(tmp_path / "run")))
    trainer.run_training(config, Workload(rollout=rollout, train_dataset=Dataset([{"question": "1+1?"}])))
    assert trained[0].rollout == replace(rollout, run=str(tmp_path / "run"))
