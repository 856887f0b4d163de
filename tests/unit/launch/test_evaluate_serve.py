"""The commands that use a model without training it."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from machine import free_port
from trained_run import make_run, save_model

from environments.errors import ConfigError
from environments.types import TerminationReason, Trajectory
from launch import evaluate, serve
from launch.run_folder.checkpoint import CheckpointFolder, Progress, StreamState
from launch.run_folder.model_paths import adapter_folder, model_folder, newest_checkpoint, served_model
from launch.settings.compose import compose
from launch.settings.tree import TrainConfig, without_rollouts
from launch.validation.serving import check_publishing
from launch.validation.settings import check_settings, check_training_settings
from launch.workload import load_workload
from policies.model_files import check_loadable

ROOT = Path(__file__).resolve().parents[3]


# -- which model ---------------------------------------------------------------------------------------


def test_run_a_checkpoint_and_a_model_folder_are_all_found(tmp_path: Path, tiny_model: Path) -> None:
    checkpoint = make_run(tmp_path / "run", tiny_model)
    folder = str(checkpoint / "huggingface")
    assert model_folder(str(tmp_path / "run")) == folder
    assert model_folder(str(checkpoint)) == folder
    assert model_folder(folder) == folder


def test_policy_of_several_is_named(tmp_path: Path, tiny_model: Path) -> None:
    checkpoint = make_run(tmp_path / "run", tiny_model)
    for name in ("solver", "proposer"):
        shutil.copytree(checkpoint / "huggingface", checkpoint / name / "huggingface")
    shutil.rmtree(checkpoint / "huggingface")
    for path in (tmp_path / "run", checkpoint):
        with pytest.raises(ConfigError, match=r"holds the policies proposer, solver: name one.*/proposer"):
            model_folder(str(path))
    solver = model_folder(str(checkpoint / "solver"))
    assert (solver, served_model(solver, {}).version) == (str(checkpoint / "solver" / "huggingface"), 31)


def test_workers_with_another_directory_find_a_relative_path(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run", tiny_model)
    monkeypatch.chdir(tmp_path)
    assert model_folder("run") == str(tmp_path / "run" / "checkpoints" / "step_000030" / "huggingface")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2"])
def test_hub_name_stays_as_it_is(name: str) -> None:
    assert model_folder(name) == name


def test_folder_without_a_model_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path / "huggingface"))):
        model_folder(str(tmp_path))


def test_model_without_tokenizer_is_refused_before_it_is_loaded(tmp_path: Path, tiny_model: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_model / name, tmp_path)
    with pytest.raises(ConfigError, match="no tokenizer"):
        check_loadable(str(tmp_path), {})


def test_model_that_lacks_a_shard_is_refused_by_its_name(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    shards = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ConfigError, match=r"lacks model-00002-of-00002\.safetensors"):
        check_loadable(str(folder), {})


def test_newest_checkpoint_is_the_one_that_was_written_last(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    for name, age in (("b-run", 100), ("a-run", 10), ("c-run", 200)):
        pointer = tmp_path / name / "checkpoints" / "latest"
        pointer.parent.mkdir(parents=True)
        pointer.write_text("step_000007\n")
        written = time.time() - age
        os.utime(pointer, (written, written))
    assert newest_checkpoint(tmp_path) == tmp_path / "a-run" / "checkpoints" / "step_000007"


def test_adapter_is_found_in_run_checkpoint_and_its_own_folder(tmp_path: Path) -> None:
    checkpoint = tmp_path / "run" / "checkpoints" / "step_000030"
    folder = checkpoint / "adapter"
    folder.mkdir(parents=True)
    (checkpoint.parent / "latest").write_text("step_000030\n")
    with pytest.raises(
        ConfigError, match=r"server.adapters={mine: .*run} names no adapter.*learner.lora.rank"
    ):
        adapter_folder("mine", str(tmp_path / "run"))
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(ConfigError, match=r"no LoRA adapter"):
        adapter_folder("mine", str(folder))
    (folder / "adapter_config.json").write_text('{"r": 4}')
    for path in (tmp_path / "run", checkpoint, folder):
        assert adapter_folder("mine", str(path)) == str(folder)


# -- what is refused -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting", ["rollout.group_size=1", "rollout.temperature=0", "learner.micro_batch_tokens=8"]
)
def test_evaluation_does_not_mind_settings_of_training(setting: str) -> None:
    config = compose(["recipe=calculator", "model.path=gpt2", setting])
    evaluate.check_evaluation(config)
    with pytest.raises(ConfigError, match=setting):
        check_training_settings(config)


def test_evaluation_plays_its_tasks_once_by_default() -> None:
    config = compose(["recipe=guess", "evaluation.num_tasks=3"])
    workload = load_workload(config.workload, seed=0)
    assert workload.val_dataset is not None and config.rollout.group_size > 1
    assert list(evaluate.held_out_sets(config, workload)[""]) == list(workload.val_dataset[:3])
    config.evaluation.rollouts_per_task = 2
    assert len(evaluate.held_out_sets(config, workload)[""]) == 6


def test_serve_without_any_checkpoint_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert serve.main([f"server.http_port={free_port()}"]) == 2
    assert "make train" in capsys.readouterr().err


def test_adapter_is_not_added_to_model_that_it_was_merged_into(tmp_path: Path, tiny_model: Path) -> None:
    for step in (20, 30):
        checkpoint = make_run(tmp_path / "run", tiny_model, step)
        (checkpoint / "adapter").mkdir()
        (checkpoint / "adapter" / "adapter_config.json").write_text('{"r": 4}')
    older = tmp_path / "run" / "checkpoints" / "step_000020"
    for path in (tmp_path / "run", older):
        with pytest.raises(ConfigError, match=r"added twice.*model\.path"):
            serve.served_adapters({"mine": str(path)}, str(checkpoint / "huggingface"))


def test_adapter_of_another_model_is_pointed_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "base_model_name_or_path": "mine"}')
    serve.served_adapters({"one": str(tmp_path)}, "mine")
    assert capsys.readouterr().out == ""
    serve.served_adapters({"one": str(tmp_path)}, "yours")
    assert capsys.readouterr().out == "The adapter 'one' was trained on mine, and is served on yours.\n"


def test_report_counts_what_could_not_be_closed_as_played(capsys: pytest.CaptureFixture[str]) -> None:
    done, failed = TerminationReason.ENV_DONE, TerminationReason.ENV_ERROR
    unclosed = Trajectory(task={}, termination_reason=done, reward=1.0, error="Shop.close: no browser")
    evaluate.report([unclosed])
    said = capsys.readouterr().out
    assert "success 1.000 (1 of 1 rollouts)" in said and "failed, the first" not in said
    evaluate.report([unclosed, Trajectory(task={}, termination_reason=failed, error="Shop.step: no shop")])
    assert "1 rollouts failed, the first with: Shop.step: no shop" in capsys.readouterr().out


def test_report_says_who_has_judged_and_believes_the_judge(capsys: pytest.CaptureFixture[str]) -> None:
    done = TerminationReason.ENV_DONE
    shaped = Trajectory(
        task={}, termination_reason=done, reward=0.1, is_correct=False, by_reward_function=True
    )
    evaluate.report([shaped])
    printed = capsys.readouterr().out
    assert "success 0.000 (0 of 1 rollouts) by reward function, mean reward 0.100\n" in printed
    assert "pass@1    0.0000" in printed


def test_report_shows_the_environments_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    done = TerminationReason.ENV_DONE
    metrics = [{"called": 1.0, "success_when_called": 1.0}, {"called": 0.0}]
    evaluate.report([Trajectory(task={}, termination_reason=done, metrics=each) for each in metrics])
    printed = capsys.readouterr().out
    assert "called 0.500 (mean of 2 rollouts)\nsuccess_when_called 1.000 (mean of 1 rollouts)\n" in printed


def test_versions_of_a_run_are_found_by_number_and_as_best(tmp_path: Path, tiny_model: Path) -> None:
    directory = tmp_path / "run"
    older, newer = (make_run(directory, tiny_model, step) for step in (20, 30))
    CheckpointFolder(directory, kept=9).mark_best(20, "eval/reward_mean", 0.5)
    chosen = [f"model.path={newer}", "server.versions=[best,31]"]
    _, model, pinned = serve.with_models(serve.COMMAND.configuration(chosen))
    assert (model.name, model.path, model.version) == ("policy", str(newer / "huggingface"), 31)
    assert [(each.name, each.path, each.version) for each in pinned] == [
        ("policy@best", str(older / "huggingface"), 21),
        ("policy@31", str(newer / "huggingface"), 31),
    ]
    there = r"21 \(step_000020\), 31 \(step_000030\), best \(step_000020\)"
    with pytest.raises(ConfigError, match=rf"names '7'.*There are: {there}.*checkpoints\.kept"):
        serve.served_versions(["best", "7"], str(newer / "huggingface"))
    with pytest.raises(ConfigError, match=r"server\.versions=\['best'\].*this is no checkpoint"):
        serve.served_versions(["best"], str(tiny_model))


def test_versions_of_a_policy_are_its_own_among_several(tmp_path: Path, tiny_model: Path) -> None:
    def save_both(folder: str) -> None:
        for name in ("first", "second"):
            save_model(tiny_model, f"{folder}/{name}")

    folder = CheckpointFolder(tmp_path / "run", kept=9)
    older, newer = (
        folder.begin_save(Progress(step=n, version=n), StreamState(), save_both)() for n in (20, 30)
    )
    folder.mark_best(20, "eval/reward_mean", 0.5)
    chosen = [f"model.path={newer}/second", "server.versions=[best,20]"]
    _, model, pinned = serve.with_models(serve.COMMAND.configuration(chosen))
    of_second = str(older / "second" / "huggingface")
    assert (model.path, model.version) == (str(newer / "second" / "huggingface"), 30)
    assert [(each.path, each.version) for each in pinned] == [(of_second, 20), (of_second, 20)]


def test_older_versions_are_an_error_in_training_and_evaluation() -> None:
    with pytest.raises(ConfigError, match=r"server\.versions=\['best'\] is for launch\.serve"):
        check_settings(compose(["recipe=calculator", "server.versions=[best]"]))


def test_checkpoint_is_served_as_the_version_of_its_run(tmp_path: Path, tiny_model: Path) -> None:
    checkpoint = make_run(tmp_path / "run", tiny_model)
    assert served_model(str(checkpoint / "huggingface"), {}).version == 31
    assert served_model(str(tiny_model), {}).version == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "override",
    [
        "server.engine.name=vlm",
        "server.engine.options.async_scheduling=true",
        "server.engine={name: 'scripted_engine:ScriptedEngine', dtype: bfloat16}",
    ],
)
@pytest.mark.parametrize("check", [evaluate.check_evaluation, serve.check_serving])
def test_setting_without_effect_on_the_engine_is_an_early_error(
    check: Callable[[TrainConfig], None], override: str
) -> None:
    settings = ["model.path=some/model", f"server.http_port={free_port()}"]
    check(compose(settings))
    with pytest.raises(ConfigError, match=r"server\.engine\."):
        check(compose([*settings, override]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "word"),
    [
        ({"num_experts": 128}, "num_experts=128"),
        ({"n_routed_experts": 64, "kv_lora_rank": 512}, "n_routed_experts=64"),
        ({"text_config": {"kv_lora_rank": 512}}, "kv_lora_rank=512"),
        ({"model_type": "qwen2_5_vl", "text_config": {}}, "=qwen2_5_vl: vLLM needs torchvision"),
    ],
)
def test_model_whose_engine_keeps_old_weights_is_refused(
    tmp_path: Path, shape: dict[str, object], word: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    config = compose([f"model.path={tmp_path}"])
    with pytest.raises(ConfigError, match=word):
        check_publishing(config)
    check_publishing(without_rollouts(config))
    check_publishing(compose([f"model.path={tmp_path}", "server.engine.num_gpus=1"]))
    for loadable in ({"num_experts": 0}, {"model_type": "smolvlm", "vision_config": {}}):
        (tmp_path / "config.json").write_text(json.dumps(loadable))
        check_publishing(config)


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_picture_model_with_drafted_tokens_is_refused(tmp_path: Path, num_gpus: int) -> None:
    drafts = "server.engine.options.speculative_config={method: ngram, num_speculative_tokens: 2}"
    settings = [f"model.path={tmp_path}", f"server.engine.num_gpus={num_gpus}"]
    for name, content in (("config", {"model_type": "idefics3"}), ("processor_config", {})):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    check_publishing(compose(settings))
    with pytest.raises(ConfigError, match=r"reads pictures: .*logit_bias.*Leave the option out"):
        check_publishing(compose([*settings, drafts]))
    (tmp_path / "processor_config.json").unlink()
    check_publishing(compose([*settings, drafts]))
