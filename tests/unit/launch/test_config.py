from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from actors.settings import ACTORS_PER_CORE
from environments.errors import ConfigError
from launch.settings.compose import as_train_config, compose, field_names, recipe_names
from launch.settings.tree import ROUNDED_MISMATCH, TrainConfig, algorithm_of
from launch.settings.unknown import ABSENT, SYNONYMS, unknown
from launch.training.start import with_turns
from launch.validation.resources import bundles_of, num_gpus
from launch.validation.serving import check_colocation, check_engine
from launch.validation.settings import check_training_settings
from policies.learning.settings import LearnerConfig


@pytest.mark.slow
def test_defaults_and_all_recipes_pass_the_check() -> None:
    assert recipe_names()
    for config in (compose([]), *(compose([f"recipe={name}"]) for name in recipe_names())):
        check_training_settings(config)
        check_engine(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.group_size=1", r"group_size=1 .*'grpo'.*at least 2.*group_size=8"),
        ("algorithm.name=grppo", r"algorithm\.name='grppo' is not one of .*Did you mean 'grpo'"),
        ("algorithm.advantage=gae", r"algorithm\.advantage='gae' has no effect in algorithm\.name='grpo'"),
        (
            "rollout.group_order=completion",
            r"group_order=completion .*max_staleness=0.*max_staleness=1.* or rollout\.group_order=tasks",
        ),
        ("selection.min_members=9", r"selection\.min_members=9 .*at most rollout\.group_size=8"),
        (
            "run.best_metric=eval/reward",
            r"best_metric='eval/reward' is not .*Did you mean 'eval/reward_",
        ),
        ("run.best_metric=eval/pass_at_8", r"run\.best_metric='eval/pass_at_8' is not one of"),
        ("run.stop_at=0.9", r"stop_metric=None and run\.stop_at=0\.9 belong together: set both"),
        ("run.stop_metric=eval/reward_mean", r"stop_metric=eval/reward_mean and run\.stop_at=None belong"),
        (
            "selection.masked_reasons=[timeout]",
            r"masked_reasons\[0\]='timeout' is not one of env_done, max_steps",
        ),
        ("rollout.temperature=0", r"rollout\.temperature=0 .*temperature above 0.*temperature=1"),
        ("algorithm.name=gpro", r"'gpro' is not one of .*Did you mean 'grpo'\?"),
        ("evaluation.num_replicas=1", r"evaluation\.num_replicas=1 .*evaluation\.every=0 .*every=10"),
        ("learner.critic.clip_range=0.1", r"learner\.critic .*'grpo' has no critic.*algorithm\.name=ppo"),
        (
            "learner.verl={model: {lora_alpha: 32}}",
            r"verl\.model\.lora_alpha=32 would have no effect without learner\.lora\.rank",
        ),
        ("warm_start.optimizer.lrr=1", r"warm_start\.optimizer='lrr' is not one of lr.*Did you mean 'lr'"),
        ("warm_start.optimizer.lr=fast", r"warm_start\.optimizer\.lr='fast' has to be of type float"),
        ("learner.critic.lr=-1", r"learner\.critic\.lr=-1 has to be at least 0"),
        ("fleet.nodes={CPU: -1}", r"fleet\.nodes={CPU: -1} reserves nothing"),
        ("fleet.nodes={labels: {market: spot}}", r"fleet\.nodes\.labels has {'market': 'spot'}: set what"),
        ("fleet.nodes={market: true}", r"fleet\.nodes={market: True} has to be a label, .* or an amount"),
        ("server.http_host=0.0.0.0", r"http_host=0\.0\.0\.0 .*server\.http_port=8000"),
        ("server.access.per_minute={requests: 5}", r"server\.access\.per_minute=.* server\.http_port=8000"),
        ("rollout.max_prompt_tokens=600", r"=600 and .*=512 need .*1112 .*=1024\. Raise it, or lower"),
        ("learner.micro_batch_tokens=1000", r"=1000 cannot hold .*= 1024 tokens\. Raise it"),
        ("learner.verl={actor: {ppo_epochs: 2}}", r"learner\.verl\.actor\.ppo_epochs=2 cannot be set"),
        ("learner.verl={engine: {ulysses_sequence_parallel_size: 0}}", r"=0 is no divisor of learner\.num_w"),
        ("learner.verl={engine: null}", r"learner\.verl\.engine=None has no fields, of .*leave it out"),
    ],
)
def test_what_cannot_work_is_refused_with_value_and_remedy(override: str, message: str) -> None:
    config = compose([override])
    with pytest.raises(ConfigError, match=message):
        check_training_settings(config)


def test_ranks_of_a_row_hold_a_trajectory_together() -> None:
    ranks = ["learner.num_workers=2", "learner.verl={engine: {ulysses_sequence_parallel_size: 2}}"]
    check_training_settings(compose([*ranks, "learner.micro_batch_tokens=512"]))
    with pytest.raises(ConfigError, match=r"=511 cannot hold .*= 1024 tokens\. Raise it to 512\."):
        check_training_settings(compose([*ranks, "learner.micro_batch_tokens=511"]))


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        ("eval/reward_mean", r"stop_metric=eval/reward_mean has no effect with evaluation\.every=0"),
        ("eval/pass_at_8", r"stop_metric='eval/pass_at_8' is not one of"),
        ("reward_mean", r"stop_metric='reward_mean' is no metric: its name begins with .*eval/, .*rollout/"),
    ],
)
def test_goal_that_no_run_can_reach_is_refused(metric: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_training_settings(compose([f"run.stop_metric={metric}", "run.stop_at=0.9"]))


@pytest.mark.slow
def test_goal_may_be_any_number_of_updates_or_evaluations() -> None:
    for metric in ("eval/reward_mean", "eval/called", "rollout/called", "learn/entropy"):
        overrides = [f"run.stop_metric={metric}", "run.stop_at=-1", "evaluation.every=1"]
        check_training_settings(compose(overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["selection.reward_range=[0.9,0.1]"],
            r"reward_range=\[0\.9, 0\.1\]: 0\.9 is above 0\.1",
        ),
        (
            ["selection.masked_reasons=[overlong]", "algorithm.name=dapo"],
            r"masked_reasons=\[overlong\] .*overlong\.penalty=1\.0.*one of the two",
        ),
        (
            ["algorithm.credit=per_step", "rollout.max_steps=1"],
            r"credit=per_step compares turns.*max_steps=1",
        ),
        (["algorithm.name=gigpo", "rollout.max_steps=1"], r"name=gigpo compares turns.*max_steps=1"),
        (["algorithm.name=gpg", "algorithm.correction.level=bypass"], r"level=bypass has no effect.*'gpg'"),
        (
            ["algorithm.name=rloo", "learner.num_epochs=2"],
            r"num_epochs=2 .*'rloo'.* reinforce has no ratio.*num_epochs=1, or .*name=grpo",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(overrides: list[str], message: str) -> None:
    config = compose(overrides)
    with pytest.raises(ConfigError, match=message):
        check_training_settings(config)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["learner.optimizer.lrr=1"], r"no setting 'learner\.optimizer\.lrr'.*'learner\.optimizer\.lr'"),
        (["lr=1"], r"no setting 'lr'.*optimizer\.lr'"),
        (["recipe=calculater"], r"no recipe 'calculater'.*'calculator'.*workload=my_module"),
        (["run.num_steps=many"], r"^run\.num_steps=many has to be a whole number\.$"),
        (["rollout.temperature=hot"], r"^rollout\.temperature=hot has to be a number"),
        (["server.colocated=maybe"], r"^server\.colocated=maybe has to be true or false"),
        (["stages=reinforce"], r"^stages=reinforce has to be a list"),
        (["fleet.nodes=4"], r"^fleet\.nodes=4 has to be a map"),
        (["rollout.max_steps=null"], r"^rollout\.max_steps=null has to be something else than null"),
        (["run.resume=3"], r"^run\.resume=3 has to be true, false or a text"),
        (["server.engine.dtype=bfloat16"], r"no setting 'server\.engine\.dtype'.*'server\.engine\.options'"),
        (["server.num_cpus=5"], r"no setting 'server\.num_cpus'.*'server\.nodes'"),
        (["run.checkpoint_every=5"], r"no setting 'run\.checkpoint_every'.*'run\.checkpoints'"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_paragraph(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        compose(overrides)
    assert "\n" not in str(raised.value)


def test_overrides_win_over_the_recipe() -> None:
    config = compose(["recipe=calculator", "run.num_steps=3", "learner.optimizer.lr=0.5"])
    assert (config.run.num_steps, config.learner.optimizer.lr) == (3, 0.5)
    assert config.workload == "launch.recipes.calculator"


@pytest.mark.parametrize(
    "override",
    ["server.engine.options={seed: 7}", "server.engine.options.seed=7", "+server.engine.options.seed=7"],
)
def test_keys_of_the_users_own_need_no_plus_sign(override: str) -> None:
    assert compose([override]).server.engine.options == {"seed": 7}


def test_tree_of_hydras_becomes_the_dataclasses() -> None:
    tree = OmegaConf.create({"seed": 3, "rollout": {"group_size": 4}})
    config = as_train_config(tree)
    assert isinstance(config, TrainConfig)
    assert (config.seed, config.rollout.group_size) == (3, 4)
    assert as_train_config(config) == config


def test_configuration_of_dataclasses_is_completed_and_checked() -> None:
    assert "${" not in as_train_config(TrainConfig()).run.directory, "a run's folder has a name"
    config = TrainConfig()
    config.rollout.group_size = "four"  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="four"):
        as_train_config(config)


@pytest.mark.parametrize(
    "overrides, expected",
    [
        (["rollout.groups_per_step=2", "rollout.group_size=3"], 6),
        (["rollout.groups_per_step=1000"], ACTORS_PER_CORE * (os.cpu_count() or 1)),
        (["rollout.group_size=1000", "fleet.max_actors=5"], 5),
        (["fleet.num_actors=9", "fleet.max_actors=5"], 9),
    ],
)
def test_rollout_actors_fit_rollouts_cores_and_bounds(overrides: list[str], expected: int) -> None:
    assert compose(overrides).fleet.num_actors == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides, expected",
    [
        ([], 1e-3),
        (["server.engine.options.dtype=float"], 1e-3),
        (["learner.dtype=bfloat16"], ROUNDED_MISMATCH),
        (["server.engine.options.dtype=auto"], ROUNDED_MISMATCH),
        (["server.engine.options.dtype=bfloat16", "learner.mismatch_alarm=0.2"], 0.2),
    ],
)
def test_mismatch_alarm_is_that_of_the_dtypes(overrides: list[str], expected: float) -> None:
    config = compose(overrides)
    assert config.learner.mismatch_alarm == expected
    is_corrected = algorithm_of(config).correction_level == "token"
    assert is_corrected == (expected > LearnerConfig().mismatch_alarm)


def test_tree_with_an_unknown_key_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no setting 'rollout\.group_sise'.*'rollout\.group_size'"):
        as_train_config(OmegaConf.create({"rollout": {"group_sise": 4}}))


@pytest.mark.parametrize(
    "given",
    [
        {"rollout.groups_per_step": 9, "server.engine.options": {"seed": 7}},
        {"rollout": {"groups_per_step": 9}, "server": {"engine.options": {"seed": 7}}},
        ["rollout.groups_per_step=9", "server.engine.options.seed=7"],
    ],
)
def test_dicts_with_dotted_keys_and_lists_are_configurations_too(given: Any) -> None:
    config = as_train_config(given)
    assert (config.rollout.groups_per_step, config.server.engine.options) == (9, {"seed": 7})


def test_configuration_none_is_the_defaults() -> None:
    assert as_train_config(None).rollout == TrainConfig().rollout
    with pytest.raises(ConfigError, match=r"config='fast' has no settings: use a TrainConfig, a dict"):
        as_train_config("fast")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+rollout.max_stepz=3", r"no setting 'rollout\.max_stepz'.*'rollout\.max_steps'"),
        ("+agent.max_steps=2", r"no setting 'agent\.max_steps'.*'rollout\.max_steps'"),
        ("agent.max_steps=2", r"no setting 'agent\.max_steps'.*'rollout\.max_steps'"),
        ("++mine=2", r"no setting 'mine'"),
        ("rollout={group_sise: 4}", r"no setting 'rollout\.group_sise'.*group_size"),
    ],
)
def test_unknown_setting_is_refused_with_a_plus_sign_too(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose([override])


@pytest.mark.parametrize("override", ["=3", "@run=3", "~run", "~run.num_steps"])
def test_override_of_nothing_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"(names no setting|deletes a setting): write "):
        as_train_config(["recipe=calculator", override])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trainer.logger", "Metrics always go to run.directory"),
        ("data.train_files", "workload=my_workload"),
        ("train_files", "workload=my_workload"),
        ("dataset.path", "workload=my_workload"),
        ("rollout.top_p", "rollout.temperature alone"),
        ("learner.tensor_parallel", "learner.num_workers"),
        ("engine.gpu_memory_utilization", "server.engine.options"),
        ("grpo.beta", "Did you mean 'algorithm.kl.coef'?"),
        ("rolout.group_size", "Did you mean 'rollout.group_size'?"),
        ("learner.optimzer.lr", "Did you mean 'learner.optimizer.lr'?"),
        ("selection.colour", "Known: selection.masked_reasons, "),
        ("colour", "Known: agent, algorithm, "),
        ("run.checkpoints_kept", "Did you mean 'run.checkpoints'?"),
        ("learner.lora.alpha", "Did you mean 'learner.verl'?"),
        ("selection.min_reward", "Did you mean 'selection.reward_range'?"),
        ("server.access.public_url", "Did you mean 'server.access.hosts'?"),
    ],
)
def test_unknown_setting_is_answered_with_what_there_is_for_it(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as raised:
        compose([f"+{name}=1"])
    assert "Did you mean" not in str(raised.value) or "Did you mean" in words


def test_other_programs_names_stand_for_settings_that_there_are() -> None:
    assert set(SYNONYMS) <= {*field_names(), "run.checkpoints.every"}
    others = [name for names in (*SYNONYMS.values(), *ABSENT.values()) for name in names.split()]
    assert len(others) == len(set(others))


def test_readme_and_errors_agree_on_the_references_settings() -> None:
    text = (Path(__file__).parents[3] / ".docs/pages/migration.md").read_text()
    table = text.split("## Settings of rLLM v0.1")[1]
    rows = dict(re.findall(r"^\| `([\w.]+)` \| `([\w.]+)` \|", table, re.MULTILINE))
    assert set(rows.values()) <= {*field_names(), "run.checkpoints.every"}
    for name, ours in rows.items():
        assert repr(ours.removesuffix(".every") if "checkpoints" in ours else ours) in unknown(
            "setting", name, sorted(field_names())
        )


ON_GPU = ["learner.device=cuda", "server.engine.num_gpus=1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["rollout.max_staleness=1"],
            r"max_staleness=1 rollouts go on then\. Set .*=0, or server\.colocated",
        ),
        (["evaluation.num_replicas=1"], r"evaluation\.num_replicas=1 adds engines .*Leave it out"),
        (["server.max_replicas=2"], r"server\.max_replicas=2 adds engines"),
        (["server.engine.name=scripted_engine:ScriptedEngine"], "cannot sleep and wake. Give it both"),
        (ON_GPU[:1], r"device=cuda and server\.engine\.num_gpus=0 share no device\. Set .*num_gpus=1"),
        (ON_GPU[1:], r"device=cpu and server\.engine\.num_gpus=1 share no device"),
        ([*ON_GPU, "learner.num_workers=2"], r"num_workers=2, server\.num_replicas=1 .* the same number"),
        ([*ON_GPU[:1], "server.engine.num_gpus=2"], r"server\.engine\.num_gpus=2\. .*and the last to 1"),
        ([*ON_GPU, "algorithm.name=ppo"], r"critic of algorithm\.name=ppo .*Choose an algorithm without one"),
    ],
)
def test_devices_that_cannot_be_shared_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_colocation(compose(["server.colocated=true", *overrides]))
    check_colocation(compose(overrides))


def test_engine_that_sleeps_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = compose(["server.colocated=true", "server.engine.name=scripted_engine:ScriptedEngine"])
    monkeypatch.setattr("scripted_engine.ScriptedEngine.sleep", lambda engine: None)
    with pytest.raises(ConfigError, match="cannot sleep and wake"):
        check_colocation(config)


@pytest.mark.parametrize("number", [1, 2, 8, 32])
def test_shared_gpu_is_reserved_once(number: int) -> None:
    config = compose([*ON_GPU, f"learner.num_workers={number}", f"server.num_replicas={number}"])
    assert num_gpus(config) == 2 * number
    shared = replace(config, server=replace(config.server, colocated=True))
    check_colocation(shared)
    assert num_gpus(shared) == number
    shares = [resources["GPU"] for resources, _ in bundles_of(shared) if resources.get("GPU")]
    assert shares == [0.75] * number + [0.25] * number, "two ranks never fit on one GPU"


def test_learner_and_engine_on_gpus_are_made_to_share_them() -> None:
    shared = with_turns(compose(["server.colocated=true", *ON_GPU]))
    assert shared.learner.verl["engine"] == {"param_offload": True, "optimizer_offload": True}
    assert shared.server.engine.options["enable_sleep_mode"] is True
    on_cpu = compose(["server.colocated=true"])
    assert with_turns(on_cpu) == on_cpu
