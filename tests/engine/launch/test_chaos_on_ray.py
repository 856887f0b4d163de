"""A run whose learner is killed."""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL

import pytest

from launch.health.members import members
from launch.run_folder.consumed_log import read_consumed_log
from launch.settings.compose import compose
from launch.training.trainer import run_training
from launch.workload import load_workload

NUM_STEPS, NUM_GROUPS, GROUP_SIZE = 8, 2, 2


def train(directory: Path, model: Path) -> None:
    """One run, asynchronous, on the session's Ray."""
    config = compose(
        [
            "recipe=calculator",
            f"run.directory={directory}",
            f"run.num_steps={NUM_STEPS}",
            "run.checkpoint_every=2",
            f"model.path={model}",
            "warm_start.num_steps=0",
            "run.stall_limit_seconds=500",
            "evaluation.num_tasks=1",
            f"rollout.groups_per_step={NUM_GROUPS}",
            f"rollout.group_size={GROUP_SIZE}",
            "rollout.max_staleness=2",
            "fleet.num_actors=4",
            "algorithm.entropy_coef=0.01",
            "run.max_recoveries=1",
        ]
    )
    run_training(config, load_workload(config.workload, config.seed))


@dataclass
class Struck:
    """A learner that was killed, and who played and sampled before that and an update later."""

    before: set[int]
    after: set[int] = field(default_factory=set)


def kill_at_step(step: int, directory: Path, spared: set[int], struck: list[Struck]) -> None:
    """Wait until ``step`` is in the journal, then end the learner's process that is not ``spared``."""
    while len(read_consumed_log(directory)) < step:
        time.sleep(0.05)
    (learner,) = pids("learner") - spared
    struck.append(Struck(pids("fleet", "replica", "actor")))
    os.kill(learner, SIGKILL)
    while len(read_consumed_log(directory)) <= step:
        time.sleep(0.05)
    struck[-1].after = pids("fleet", "replica", "actor")


def pids(*roles: str) -> set[int]:
    return {member.pid for member in members(below=os.getpid()) if member.role in roles}


def test_killed_learner_is_rebuilt_while_all_others_go_on(
    ray_cluster: None, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spared, struck = pids("learner"), list[Struck]()
    killer = threading.Thread(target=kill_at_step, args=(5, tmp_path, spared, struck), daemon=True)
    killer.start()
    train(tmp_path, tiny_model)
    killer.join(60)
    (learner,) = struck
    # One that was still starting may have come since.
    assert learner.before <= learner.after, "engines and rollout actors are the same processes"
    said = capsys.readouterr().out
    assert "The learner is being rebuilt; engines and rollout actors go on." in said
    assert re.search(
        r"weights of version \d+, .* from step_000004, \d update\(s\) earlier. No update is lost", said
    )
    assert said.count("step    6/8") == 1

    trained = [rollout_id for record in read_consumed_log(tmp_path) for rollout_id in record["trained"]]
    assert sorted(trained) == [
        f"{group:08d}/{member:04d}" for group in range(NUM_STEPS * NUM_GROUPS) for member in range(GROUP_SIZE)
    ]
