"""Training on what programs do that know of Troupe only an address and a key."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from machine import free_port
from ray.cloudpickle import register_pickle_by_value
from shown_programs import PLAY, SOLVE

from actors.serving.keys import KEYS_VARIABLE
from launch.recipes.task_file import workload_of
from launch.reporting.tracker import read_metrics
from launch.run_folder.trajectory_log import TRAIN, read_kept
from launch.settings.compose import compose
from launch.training.trainer import run_training
from policies.learning.samples import training_samples

KEY = "a-key-of-the-programs"


def test_programs_elsewhere_are_trained(
    ray_cluster: None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """Two updates of 12 rollouts, by two programs of the page, with pairs that share a rollout actor."""
    monkeypatch.setenv(KEYS_VARIABLE, f"programs:{KEY}")
    tasks = tmp_path / "tasks.jsonl"
    rows = [
        {"question": f"What is {number}+1?", "ground_truth": "ezqxjkvwyfbm"[number]} for number in range(12)
    ]
    tasks.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    config = compose(
        [
            f"dataset={tasks}",
            f"agent=outside:{free_port()}",
            f"model.path={tiny_model}",
            f"run.directory={tmp_path / 'run'}",
            "run.num_steps=2",
            "rollout.groups_per_step=3",
            "rollout.group_size=4",
            "rollout.max_steps=4",
            "fleet.num_actors=1",
            "fleet.pairs_per_actor=4",
            "learner.mini_batch_size=12",
        ]
    )
    workload = workload_of(config)
    url = capfd.readouterr().out.partition("Programs fetch tasks by POST ")[2].partition("/sessions.")[0]
    variables = {**os.environ, "SESSIONS_URL": url, "SESSIONS_KEY": KEY, "NO_PROXY": "*"}
    programs = [subprocess.Popen([sys.executable, "-c", PLAY], env=variables) for _ in range(2)]
    try:
        run_training(config, workload)
        assert [each.poll() for each in programs] == [None, None], "they wait for more tasks"
    finally:
        for each in programs:
            each.kill()
            each.wait()

    steps = [each for each in read_metrics(tmp_path / "run") if "learn/loss" in each]
    assert [each["step"] for each in steps] == [1, 2]
    assert all(each["learn/rollout_logprob_diff_max"] < 1e-3 for each in steps)
    trajectories = [each.trajectory for step in (1, 2) for each in read_kept(tmp_path / "run", TRAIN, step)]
    assert len(trajectories) == 24
    for each in trajectories:
        (sample,) = training_samples(each)  # both calls are one sequence
        assert sample.num_sampled_tokens > 0 and len(each.steps) == 2
        assert each.reward == (each.task["ground_truth"] in each.steps[1].model_response)
    assert {each.reward for each in trajectories} == {0.0, 1.0}


def test_program_of_the_guide_is_trained_by_its_third_step(
    ray_cluster: None, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``workload=my_program``, with the page's own words: one update of the function's conversations."""
    (tmp_path / "my_program.py").write_text(SOLVE)
    monkeypatch.syspath_prepend(tmp_path)
    register_pickle_by_value(importlib.import_module("my_program"))  # this Ray is older than the file
    config = compose(
        [
            "workload=my_program",
            f"model.path={tiny_model}",
            f"run.directory={tmp_path / 'run'}",
            "run.num_steps=1",
            "rollout.groups_per_step=2",
            "rollout.group_size=2",
            "rollout.max_steps=3",
            "rollout.max_response_tokens=32",
            "fleet.num_actors=2",
            "learner.mini_batch_size=4",
        ]
    )
    run_training(config, workload_of(config))

    assert [each["step"] for each in read_metrics(tmp_path / "run") if "learn/loss" in each] == [1]
    trajectories = [each.trajectory for each in read_kept(tmp_path / "run", TRAIN, 1)]
    assert len(trajectories) == 4
    for each in trajectories:
        assert not each.failed and len(training_samples(each)) == 1
        assert str(each.task["question"]).startswith("What do")
