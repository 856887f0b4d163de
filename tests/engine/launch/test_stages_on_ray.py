"""A training of several stages, stopped between two of them and resumed."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machine import wait_until
from scripted_judge import serving
from test_train_on_ray import comparable, small_run, weights

from environments.data.trajectory_file import read_trajectories
from launch.health.inspection import processes_here
from launch.recipes.task_file import workload_of
from launch.reporting.tracker import read_metrics
from launch.run_folder.checkpoint import CheckpointFolder
from launch.run_folder.jsonl_log import read_records
from launch.run_folder.lock import LOCK
from launch.run_folder.model_paths import model_folder
from launch.settings.compose import compose
from launch.training.stages.imitation import PLAYED, Imitation
from launch.training.stages.preferences import PREFERENCE_STEPS
from launch.training.stages.warm_start import WARM_START_STEPS
from launch.training.trainer import run_training

EXPERT = ["expert_iteration.min_reward=-1", "expert_iteration.optimizer.lr=1e-3"]
"""So that every rollout of the hardly trained policy is kept, whatever it is worth."""


def weight_stores() -> set[int]:
    """Processes of the weight stores in this process's Ray."""
    return {each.pid for each in processes_here() if each.role == "store"}


def test_stages_train_in_turn_and_resume_between_two(ray_cluster: None, tmp_path: Path) -> None:
    import torch

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    settings = [
        "stages=[warm_start,own_stage:Rehearse,expert_iteration,reinforce]",
        "stage_settings.rehearse.num_steps=2",
        "expert_iteration.num_steps=2",
        "run.num_steps=1",
        "run.checkpoints.every=1",
        "run.checkpoints.kept=9",
        *EXPERT,
    ]
    before = weight_stores()
    small_run(whole, *settings)
    wait_until(lambda: weight_stores() <= before)  # the last weights would stay in memory

    updates = [each for each in read_metrics(whole) if "rollout/reward_mean" in each]
    assert [each["step"] for each in updates] == [1, 2, 3]
    assert ["learn/num_imitated_trajectories" in each for each in updates] == [True, True, False]
    assert all(each["learn/fresh_logprob_diff_mean"] < 1e-3 for each in updates), "engine and learner agree"
    progress = CheckpointFolder.progress(whole / "checkpoints" / "step_000003")
    assert progress.stage_steps == {"warm_start": 30, "rehearse": 2, "expert_iteration": 2, "reinforce": 1}
    assert progress.version == 6, "one of the warm start, two of the rehearsal, three updates"

    # The checkpoint of step 2 is the last of its stage.
    subprocess.run(["cp", "-r", str(whole), str(stopped)], check=True)
    subprocess.run(["rm", "-r", str(stopped / "checkpoints" / "step_000003")], check=True)
    subprocess.run(["ln", "-sfn", "step_000002", str(stopped / "checkpoints" / "latest")], check=True)
    small_run(stopped, *settings, "run.resume=true")

    assert comparable(read_metrics(stopped)) == comparable(read_metrics(whole))
    expected, resumed = weights(whole, 3), weights(stopped, 3)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_preferences_are_learned_and_go_on_from_a_checkpoint(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    settings = [
        "workload=own_preferences",
        "stages=[warm_start,preferences]",
        "preferences.num_steps=12",
        "preferences.pairs_per_step=8",  # so six steps take all pairs that are learned once
        "preferences.held_out_pairs=16",
        "preferences.optimizer={lr: 1e-3}",
        "run.checkpoints.every=6",
    ]
    begin_save = CheckpointFolder.begin_save

    def save_and_copy(checkpoints: CheckpointFolder, *arguments: Any) -> Callable[[], Path]:
        path = begin_save(checkpoints, *arguments)()
        if CheckpointFolder.progress(path).stage_steps.get("preferences") == 6:
            shutil.copytree(whole, stopped, symlinks=True, ignore=shutil.ignore_patterns(LOCK))
        return lambda: path

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "begin_save", save_and_copy)
        small_run(whole, *settings)
    records = read_records(whole / PREFERENCE_STEPS)
    assert [each["step"] for each in records] == list(range(1, 13))
    assert abs(records[0]["loss"] - math.log(2)) < 1e-4, "the policy is its own reference"
    assert records[-1]["loss"] < 0.5 < records[-1]["margin"]
    assert records[-1]["held_out_accuracy"] > 0.9
    progress = CheckpointFolder.progress(whole / "checkpoints" / "step_000000")
    assert progress.stage_steps == {"warm_start": 30, "preferences": 12}
    assert progress.version == 2

    assert len(read_records(stopped / PREFERENCE_STEPS)) == 6
    small_run(stopped, *settings, "run.resume=true")
    assert read_records(stopped / PREFERENCE_STEPS) == records
    expected, resumed = weights(whole, 0), weights(stopped, 0)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)


def test_file_of_messages_is_learned_without_an_engine(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    def no_service(*arguments: Any) -> Any:
        raise AssertionError("a run that plays nothing has started an engine")

    monkeypatch.setattr("launch.training.start.rollout_service", no_service)
    rows = [
        [{"role": "user", "content": f"{n}+1?"}, {"role": "assistant", "content": f"{n + 1}"}]
        for n in range(200)
    ]
    path, run = tmp_path / "chats.jsonl", tmp_path / "run"
    path.write_text("".join(f"{json.dumps({'messages': each})}\n" for each in rows))
    config = compose(
        [
            f"demonstrations={path}",
            f"run.directory={run}",
            "warm_start={num_epochs: 4, batch_size: 16, held_out_share: 0.1}",
            "warm_start.optimizer={lr: 3e-3, warmup_steps: 5}",
        ]
    )
    run_training(config, workload_of(config))
    records = read_records(run / WARM_START_STEPS)
    assert records[0]["step"] == 0 and records[-1]["step"] == 45, "4 passes of 180 by 16"
    assert records[-1]["held_out_loss"] < 0.5 * records[0]["held_out_loss"]
    AutoModelForCausalLM.from_pretrained(model_folder(str(run)))
    again = compose(
        [
            f"demonstrations={path}",
            f"model.path={run}",
            f"run.directory={tmp_path / 'again'}",
            "warm_start.num_epochs=1",
        ]
    )
    run_training(again, workload_of(again))
    first = read_records(tmp_path / "again" / WARM_START_STEPS)[0]
    assert abs(first["held_out_loss"] - records[-1]["held_out_loss"]) < 0.2, "it goes on from that run"


def test_successes_of_a_teacher_are_imitated(ray_cluster: None, tmp_path: Path) -> None:
    """The teacher adds, and does not multiply. No engine plays, as nothing is held out."""

    def teach(body: dict[str, Any], _: int) -> str:
        question = next(each["content"] for each in body["messages"] if each["role"] == "user")
        found = re.search(r"(\d+)\+(\d+)", question)
        return rf"\boxed{{{int(found[1]) + int(found[2])}}}" if found else r"\boxed{0}"

    with serving(teach) as teacher:
        own = f'{{teacher: "{teacher.url}", teacher_model: adds, num_tasks: 24, num_steps: 10}}'
        config = compose(
            [
                "recipe=calculator",
                "stages=[imitation]",
                f"stage_settings.imitation={own}",
                "warm_start={num_steps: 0, batch_size: 8}",
                "fleet.num_actors=2",
                f"run.directory={tmp_path}",
            ]
        )
        run_training(config, replace(workload_of(config), val_dataset=None))
        num_requests = len(teacher.bodies)
    played = read_trajectories(tmp_path / PLAYED)
    assert len(played) == 24 == num_requests - 1, "and one request before the start"
    added = [each for each in played if "+" in each.task["question"]]
    assert [each.succeeded for each in played] == [each in added for each in played]
    assert 0 < len(added) < 24
    first, last = read_records(tmp_path / Imitation.log_name)
    assert last["loss"] < first["loss"]
    progress = CheckpointFolder.progress(tmp_path / "checkpoints" / "latest")
    assert (progress.stage_steps, progress.version) == ({"imitation": 10}, 1)
