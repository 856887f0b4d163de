"""A run that goes on through a storm."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from learner_samples import num_rows

from launch.reporting.audit import audit, read_run
from launch.run_folder.trajectory_log import TRAIN, read_kept
from policies.learning.samples import training_samples

PATIENT_STORM = """
import sys
from functools import partialmethod
from launch import chaos
from launch.fault_injection.process_tree import ProcessTree
ProcessTree.left_over = partialmethod(ProcessTree.left_over, seconds=90)
sys.exit(chaos.main(["storm", *sys.argv[1:]]))
"""
"""A storm that gives the many processes of a run three times as long to end: the machine may be busy."""


def test_run_goes_on_through_a_storm_and_is_sound(tmp_path: Path, tiny_model: Path) -> None:
    settings = [
        "recipe=calculator",
        f"run.directory={tmp_path}",
        "run.num_steps=40",  # they take as long as a few faults
        "run.checkpoints.every=5",
        f"model.path={tiny_model}",
        "warm_start.num_steps=0",
        "evaluation.num_tasks=1",
        "rollout.groups_per_step=2",
        "rollout.group_size=2",
        "rollout.max_staleness=2",
        "fleet.num_actors=4",
        "fleet.pairs_per_actor=2",
        "algorithm.entropy_coef=0.01",  # so that there is a gradient in every group
        "run.max_recoveries=100",
        "run.stall_limit_seconds=500",  # a run that hangs says what it waits for
    ]
    program = [sys.executable, "-m", "launch.train", *settings]
    # A cluster of its own, not this session's: what is struck there is not replaced.
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    with subprocess.Popen(program, env=environment, stdout=subprocess.PIPE, text=True) as run:
        while not (tmp_path / "settings.yaml").exists():
            assert run.poll() is None
            time.sleep(0.1)
        # Each kind is among the first three faults of this seed.
        options = ["--below", str(run.pid), "--every", "2", "--minutes", "0.17", "--seed", "738", "--wait"]
        with ThreadPoolExecutor(1) as pool:
            output = pool.submit(run.communicate)  # the storm would wait for a process that nobody waits for
            storm = subprocess.run(
                [sys.executable, "-c", PATIENT_STORM, *options], stdout=subprocess.PIPE, text=True
            )
            said, _ = output.result(240)
    assert storm.returncode == 0, storm.stdout
    assert "processes none is left" in storm.stdout
    assert "the run has ended after 40 of 40 updates" in storm.stdout
    struck = re.findall(r"\] \w+ \d+ (killed|stopped|slowed)", storm.stdout)
    assert {"killed", "stopped", "slowed"} == set(struck), storm.stdout
    assert run.returncode == 0, said
    assert "step   40/40" in said
    assert all(finding.is_sound for finding in audit(read_run(tmp_path)))
    kept = read_kept(tmp_path, TRAIN, 40)
    samples = [sample for each in kept for sample in training_samples(each.trajectory)]
    assert num_rows(samples) < len(samples), "what was learned from are trees"
