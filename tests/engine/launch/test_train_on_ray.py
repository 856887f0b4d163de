"""The whole program, as a user runs it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from followed_run import foreign_lines
from learner_samples import num_rows

from actors.learning.learners import Learners
from environments.data.curriculum import RewardVariance
from environments.data.datasets import Dataset
from environments.errors import ConfigError
from launch.chaos import COUNTED
from launch.console import main
from launch.health.members import members
from launch.replay import Replay
from launch.reporting.audit import audit, read_run
from launch.reporting.metrics import FRESH_MISMATCH
from launch.reporting.tracker import read_metrics
from launch.run_folder.checkpoint import LATEST, CheckpointFolder
from launch.run_folder.consumed_log import ConsumedLog, read_consumed_log
from launch.run_folder.trajectory_log import TRAIN, KeptTrajectory, kept_steps, read_kept
from launch.settings.compose import compose
from launch.settings.tree import TrainConfig
from launch.training.past_run import PastRun
from launch.training.recomputation import number_differences, started_learner
from launch.training.trainer import run_training
from launch.training.update_change import Change
from launch.workload import Workload, load_workload
from policies.learning.samples import LearnerUpdate, TrainBatch, training_samples

ROOT = Path(__file__).resolve().parents[3]
SMALL = [
    "recipe=calculator",
    "warm_start.num_steps=30",
    "evaluation.num_tasks=8",
    "rollout.groups_per_step=3",
    "rollout.group_size=4",
    "fleet.num_actors=4",
    "fleet.pairs_per_actor=2",  # two processes start, and not four
    "learner.mini_batch_size=6",
    "run.stall_limit_seconds=500",  # a run that hangs says what it waits for, before pytest ends all tests
    "algorithm.entropy_coef=0.01",  # so that there is a gradient even where all rollouts fail
]


def small_run(directory: Path, *overrides: str) -> TrainConfig:
    """Train in this process, on the session's Ray, and return the configuration."""
    config = compose([*SMALL, f"run.directory={directory}", *overrides])
    run_training(config, small_workload(config))
    return config


def small_workload(config: TrainConfig) -> Workload:
    """With as many demonstrations as are looked at: more take seconds to be played and encoded."""
    workload = load_workload(config.workload, config.seed)
    return replace(workload, demonstrations=workload.demonstrations[:1000])


def comparable(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records without what a clock says, or decides: whether a rollout was too slow and came again."""
    return [
        {
            name: value
            for name, value in each.items()
            if "time/" not in name and "seconds" not in name and name not in COUNTED
        }
        for each in records
    ]


def weights(directory: Path, step: int) -> dict[str, Any]:
    from safetensors.torch import load_file

    folder = directory / "checkpoints" / f"step_{step:06d}" / "huggingface"
    parts = [load_file(each) for each in sorted(folder.glob("*.safetensors"))]  # of each rank one
    assert parts
    return {name: tensor for part in parts for name, tensor in part.items()}


@pytest.fixture(scope="module")
def undisturbed(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of 4 updates with its checkpoints of steps 2 and 4, to compare others with. They
    are copied to its folder ``far``. Its engine and its learner take turns, those of the others do not.
    """
    folder = tmp_path_factory.mktemp("undisturbed")
    saved = f"run.checkpoints={{every: 2, kept: 9, to: {folder / 'far'}}}"
    small_run(folder, "run.num_steps=4", "server.colocated=true", saved)
    return folder


def test_resumed_run_equals_one_that_never_stopped(undisturbed: Path, tmp_path: Path) -> None:
    import torch

    # On another machine, as if it had been killed some time after its checkpoint of step 2.
    stopped, far = tmp_path / "stopped", tmp_path / "far"
    shutil.copytree(undisturbed / "far", far, ignore=shutil.ignore_patterns("step_000004-*"))
    resumed_as = ("run.resume=true", "fleet.pairs_per_actor=4")  # where pairs play changes no number
    small_run(stopped, "run.num_steps=4", f"run.checkpoints={{every: 2, to: {far}}}", *resumed_as)
    assert [each.name[:11] for each in sorted(far.iterdir())] == ["step_000002", "step_000004"]

    assert comparable(read_metrics(stopped)) == comparable(read_metrics(undisturbed))
    expected, resumed, before = weights(undisturbed, 4), weights(stopped, 4), weights(undisturbed, 2)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    assert not all(torch.equal(expected[name], before[name]) for name in expected), "nothing was learned"
    assert kept_steps(stopped, TRAIN) == [3, 4]
    for step in (3, 4):
        one, other = (said(read_kept(folder, TRAIN, step)) for folder in (undisturbed, stopped))
        assert len(one) == 12 and one == other
        samples = [sample for each in one for sample in training_samples(each.trajectory)]
        assert num_rows(samples) <= 4, "both have learned from trees"


@pytest.mark.slow
def test_resumed_ranks_learn_the_same_from_forks_of_a_curriculum(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks; four tasks, so that results have chosen most of the groups; half of each group forks."""
    import torch

    num_trained: list[int] = []
    update = Learners.update

    def counted(learners: Learners, batches: Sequence[TrainBatch]) -> LearnerUpdate:
        num_trained.append(sum(sum(sample.loss_mask) for batch in batches for sample in batch.samples))
        return update(learners, batches)

    monkeypatch.setattr(Learners, "update", counted)
    settings = ["run.num_steps=3", "run.checkpoints={every: 2, kept: 9}"]
    settings += ["learner.num_workers=2", "rollout.forks.roots=2"]

    def train(folder: Path, *overrides: str) -> list[dict[str, Any]]:
        config = compose([*SMALL, f"run.directory={folder}", *settings, *overrides])
        workload = small_workload(config)
        calling = [each for each in workload.demonstrations if len(each) > 3]  # else few share a turn
        tasks = Dataset(workload.train_dataset[:4])
        own = replace(workload, train_dataset=tasks, curriculum=RewardVariance(), demonstrations=calling)
        run_training(config, own)
        return comparable(read_metrics(folder))

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    expected = train(whole)
    assert min(each.get("curriculum/weight_mean", 1.0) for each in expected) < 1, "tasks were passed over"
    assert num_trained == [each["stream/tokens_trained"] for each in expected if "learn/loss" in each]
    shutil.copytree(whole, stopped, symlinks=True)
    newest = stopped / "checkpoints" / LATEST
    shutil.rmtree(newest.resolve())
    newest.unlink()
    newest.symlink_to("step_000002")
    assert train(stopped, "run.resume=true") == expected
    assert all(torch.equal(one, weights(stopped, 3)[name]) for name, one in weights(whole, 3).items())
    assert all(finding.is_sound for finding in audit(read_run(stopped))), "ids once, engine and learner agree"
    one, other = (said(read_kept(folder, TRAIN, 3)) for folder in (whole, stopped))
    assert len(one) == 12 and one == other
    played = [each.trajectory for each in one]
    assert any(each.num_shared_turns and each.num_sampled_tokens for each in played), "it goes on alone"
    samples = [sample for each in played for sample in training_samples(each)]
    assert num_rows(samples) < len(samples), "both have learned from trees"


@pytest.mark.slow
def test_run_with_killed_parts_ends_with_undisturbed_weights(
    undisturbed: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same weights, though they also travel as files instead of by the object store, and no turns are
    taken: turns of engine and learner change no bit.
    """
    import torch

    deeds = {1: "learner", 3: "fleet"}
    spared = {role: pids(role) for role in deeds.values()}
    record = ConsumedLog.record

    def record_and_strike(log: ConsumedLog, step: int, *consumed: Any) -> None:
        """Kill the process that is not ``spared``, as soon as the journal has the update of its role."""
        record(log, step, *consumed)
        if (role := deeds.pop(step, None)) is not None:
            (process,) = pids(role) - spared[role]
            os.kill(process, signal.SIGKILL)

    monkeypatch.setattr(ConsumedLog, "record", record_and_strike)
    small_run(
        tmp_path,
        "run.num_steps=4",
        "run.checkpoints.every=2",
        "server.weights.transport=files",
    )

    assert not deeds, "not both were killed"
    told = capfd.readouterr().out
    assert "1 update(s) since the checkpoint of step 0 are lost" in told, "after the warm start"
    assert re.search(
        r"RolloutFleet .* has died.* 1 update\(s\) since the checkpoint of step 2 are lost", told
    )
    expected, found = weights(undisturbed, 4), weights(tmp_path, 4)
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert comparable(read_metrics(tmp_path)) == comparable(read_metrics(undisturbed))
    trained = [rollout_id for record in read_consumed_log(tmp_path) for rollout_id in record["trained"]]
    assert len(trained) == len(set(trained)) == 4 * 3 * 4


def pids(*roles: str) -> set[int]:
    return {member.pid for member in members(below=os.getpid()) if member.role in roles}


def said(kept: list[KeptTrajectory]) -> list[Any]:
    """The trajectories without what a clock says."""
    return [replace(each, trajectory=replace(each.trajectory, seconds=0)) for each in kept]


def test_replay_learns_from_another_run_without_playing(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    small_run(tmp_path / "same", "run.num_steps=4", f"run.replay={undisturbed}")
    assert "Policy server" not in capsys.readouterr().out
    expected, replayed = weights(undisturbed, 4), weights(tmp_path / "same", 4)
    assert expected.keys() == replayed.keys()
    assert all(torch.equal(expected[name], replayed[name]) for name in expected)

    small_run(tmp_path / "other", "run.num_steps=2", f"run.replay={undisturbed}", "algorithm.name=dr_grpo")
    steps = [each for each in read_metrics(tmp_path / "other") if "learn/loss" in each]
    rewards = [each["rollout/reward_mean"] for each in read_metrics(undisturbed) if "learn/loss" in each]
    assert [each["rollout/reward_mean"] for each in steps] == rewards[:2]
    other = weights(tmp_path / "other", 2)
    assert not all(torch.equal(weights(undisturbed, 2)[name], other[name]) for name in other)


def test_update_is_computed_again_bit_for_bit(undisturbed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = ["algorithm.name=dr_grpo", "--without", "10"]
    assert main(["replay", str(undisturbed), "--update", "4", *change]) == 0
    told = capsys.readouterr().out
    assert "2 updates from the checkpoint of step 2 on" in told
    assert told.count("same ") == 3 and "update 4: the weights of its checkpoint, to the last bit" in told
    assert re.search(r"\ngroup 00000010 .*gradient .* reward [\d.]+, not learned from\n", told)
    assert not list(undisturbed.glob(".replay_*"))


def graded_by_length(task_info: dict[str, Any], action: str) -> float:
    return len(action) % 4 / 4


def test_changed_reward_has_the_effect_of_a_run_with_it(undisturbed: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    change = Change(reward="test_train_on_ray:graded_by_length")
    replayed = Replay(PastRun(undisturbed), scratch, started_learner, print).replay(1, change)
    assert replayed.is_same and replayed.changed is not None

    config = compose([*SMALL, f"run.directory={tmp_path / 'other'}", "run.num_steps=1"])
    workload = small_workload(config)
    arguments = {**workload.env_args, "reward_fn": graded_by_length}
    run_training(config, replace(workload, env_args=arguments))

    recorded = PastRun(tmp_path / "other").metrics(1)
    differences = number_differences(recorded, replayed.changed.metrics)
    assert [each.split()[0] for each in differences] in ([], ["learn/lr"]), "whose schedule is a shorter one"
    assert replayed.changed.metrics["learn/loss"] != replayed.as_it_was.metrics["learn/loss"]


@dataclass
class Struck:
    """A learner that was killed, and who played and sampled before that and an update later."""

    before: set[int]
    after: set[int] = field(default_factory=set)


def kill_learner_after(step: int, directory: Path, spared: set[int], struck: list[Struck]) -> None:
    """Wait until the weights of ``step`` are published, which come after those of the warm start, then end
    the learner's process that is not ``spared``. What is lost before that goes on from its checkpoint.
    """
    others = ("fleet", "replica", "actor")
    while not any(directory.glob(f"weights_*/version-{step + 1:06d}-*")):
        time.sleep(0.05)
    time.sleep(0.3)  # the rank has written them: now the store takes them over
    (learner,) = pids("learner") - spared
    struck.append(Struck(pids(*others)))
    os.kill(learner, signal.SIGKILL)
    while len(read_consumed_log(directory)) <= step:
        time.sleep(0.05)
    struck[-1].after = pids(*others)


def test_rollouts_go_on_while_the_learner_learns_and_is_rebuilt(
    ray_cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "launch.training.engine_comparison.MAX_MISSED", 0
    )  # compare engine and learner after each update
    spared, struck = pids("learner"), list[Struck]()
    killer = threading.Thread(target=kill_learner_after, args=(3, tmp_path, spared, struck), daemon=True)
    killer.start()
    small_run(
        tmp_path,
        "run.num_steps=6",
        "run.checkpoints.every=2",
        "run.max_recoveries=1",
        "rollout.max_staleness=2",
        "fleet.num_actors=2",
        "fleet.max_actors=6",
        "fleet.pairs_per_actor=1",
        "server.weights.transport=files",
        "evaluation.every=3",
        "evaluation.num_replicas=1",  # which reads the version that was pinned for it
        "run.best_metric=eval/reward_mean",
    )
    killer.join(60)

    records = read_metrics(tmp_path)
    steps = [each for each in records if "learn/loss" in each]
    assert [each["step"] for each in steps] == [1, 2, 3, 4, 5, 6]
    assert 0 < max(each["stream/staleness_max"] for each in steps) <= 2
    assert all(each[FRESH_MISMATCH] < 1e-3 for each in steps)
    assert all("learn/weight_mean" in each for each in steps), "older tokens are corrected by default"
    assert all(2 <= each["stream/actors"] <= 6 for each in steps[1:])
    evaluated = [each for each in records if "eval/reward_mean" in each]
    assert sorted(each["step"] for each in evaluated) == [0, 3, 6]
    assert CheckpointFolder(tmp_path, 1).best() is not None
    assert not list(tmp_path.glob("weights_*")), "the run has ended: no replica needs them"
    consumed = [rollout for each in read_consumed_log(tmp_path) for rollout in each["trained"]]
    assert consumed == [f"{group:08d}/{member:04d}" for group in range(18) for member in range(4)]

    (learner,) = struck
    # One that was still starting may have come since.
    assert learner.before <= learner.after, "engines and rollout actors are the same processes"
    told = capfd.readouterr().out
    assert "The learner is being rebuilt; engines and rollout actors go on." in told
    assert re.search(
        r"weights of version \d+, .* from step_00000\d, \d update\(s\) earlier. No update is", told
    )


def test_users_function_is_trained_by_a_users_algorithm(ray_cluster: None, tmp_path: Path) -> None:
    """And two replicas sample for it; what is learned from has the tokens that they have sampled."""
    config = small_run(
        tmp_path,
        "workload=own_rollout",
        "run.num_steps=2",
        "server.num_replicas=2",
        "algorithm.name=own",
        "algorithm.module=own_algorithm",
        "algorithm.clip_high=null",  # the recipe sets it, and this loss does not clip
        "algorithm.options.factor=3",
        "algorithm.options.power=0.5",
    )

    steps = [each for each in read_metrics(tmp_path) if "learn/loss" in each]
    assert [each["step"] for each in steps] == [1, 2]
    assert all(each["learn/rollout_logprob_diff_max"] < 1e-3 for each in steps)
    assert all(each["learn/grad_norm"] > 0 for each in steps)
    # Of the user's own estimator and loss:
    assert all(each["learn/advantage_max"] == 3 * each["rollout/reward_max"] for each in steps)
    assert not any("learn/clip_fraction" in each for each in steps)
    # Of the user's own function:
    assert all(each["rollout/foreign_answers"] == each["rollout/branches"] == 0 for each in steps)
    trajectories = [each.trajectory for step in (1, 2) for each in read_kept(tmp_path, TRAIN, step)]
    assert len(trajectories) == 2 * config.rollout.groups_per_step * config.rollout.group_size
    # The whole conversation of a program is one sequence, in which each answer was sampled.
    assert all(len(training_samples(each)) == 1 for each in trajectories)
    assert max(len(each.steps) for each in trajectories) > 1


def start(directory: Path, mark: str, *overrides: str) -> subprocess.Popen[str]:
    """``launch.train`` as a program of its own, with a mark that all its processes inherit."""
    return subprocess.Popen(
        [sys.executable, "-m", "launch.train", *SMALL, f"run.directory={directory}", *overrides],
        cwd=ROOT,
        env={**os.environ, "TROUPE_TEST_MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def marked_processes(mark: str) -> list[str]:
    """Command lines of the living processes that carry ``mark`` in their environment."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            carries = folder.name.isdigit() and f"TROUPE_TEST_MARK={mark}".encode() in (
                folder / "environ"
            ).read_bytes().split(b"\0")
            if carries and (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue  # it ended while we looked
    return found


def test_ctrl_c_while_all_starts_ends_all_processes(tmp_path: Path) -> None:
    """test_status interrupts a training that makes updates."""
    mark = str(os.getpid())
    with start(tmp_path, mark, "run.num_steps=100") as program:
        assert program.stdout is not None
        lines = []
        for line in program.stdout:
            lines.append(line)
            if "Ray: started" in line:
                break
        assert marked_processes(mark), "the mark does not reach the processes: " + "".join(lines)
        os.killpg(program.pid, signal.SIGINT)
        rest = program.stdout.read()
    ended = time.monotonic()
    while marked_processes(mark) and time.monotonic() - ended < 120:
        time.sleep(0.1)

    assert program.returncode == 130, rest
    assert foreign_lines("".join(lines) + rest) == []
    assert marked_processes(mark) == []


def test_setting_that_the_engine_rejects_at_its_start_is_named(ray_cluster: None, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)^vLLM rejects the model .* a setting in server\.engine: .*4096"
    ):
        small_run(tmp_path, "server.engine.max_model_tokens=4096")
