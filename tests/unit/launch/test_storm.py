"""``launch.chaos storm`` strikes what a run can bear, and finds what a run has done wrong."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from machine import wait_until

from actors.timing import CUT_PAUSE_SECONDS
from launch import chaos
from launch.fault_injection.fault import CUT, FAULT_KINDS, KILL
from launch.fault_injection.process_tree import ProcessTree
from launch.fault_injection.storm import ENDING, Storm, makes_progress
from launch.health.members import ROLES, Member
from launch.reporting.audit import RunRecords, audit, no_rollout_lost, score_reached

SETTINGS: dict[str, Any] = {
    "stages": ["warm_start", "reinforce"],
    "rollout": {"group_size": 2, "max_staleness": 1, "group_order": "tasks"},
    "run": {"max_recoveries": 2},
    "learner": {"mismatch_alarm": 1e-3},
}
SOUND = RunRecords(
    settings=SETTINGS,
    consumed=[
        {"step": 1, "trained": ["00000000/0000", "00000000/0001"], "dropped": {}},
        {"step": 2, "trained": [], "dropped": {"zero_signal": ["00000001/0001", "00000001/0000"]}},
    ],
    metrics=[
        {"step": 1, "stream/staleness_max": 1.0, "learn/fresh_logprob_diff_mean": 1e-6},
        {"step": 1, "eval/reward_mean": 0.5},
        {"step": 2, "stream/staleness_max": 0.0},
    ],
    versions={"00000000/0000": [3, 3, 4]},
)
EVERYBODY = [Member(role, pid) for pid, role in enumerate(ROLES)]


def faults(storm: Storm, count: int, present: list[Member], seconds: float = 1.0) -> Counter[tuple[str, str]]:
    struck = [storm.next_fault(present, seconds * number, has_checkpoint=True) for number in range(count)]
    return Counter((each.kind, each.member.role) for each in struck if each is not None)


def test_storm_does_everything_to_all_roles_it_may() -> None:
    struck = faults(Storm(SETTINGS, ROLES, [], random.Random(0)), 3000, EVERYBODY)
    forbidden = {(KILL, role) for role in ENDING}
    assert set(struck) == {(kind, role) for kind in FAULT_KINDS for role in ROLES} - forbidden


def test_another_node_is_cut_off_and_this_one_is_not() -> None:
    there = [Member(role, pid, node="ab12") for role, pid in (("raylet", 1), ("actor", 2))]
    struck = faults(Storm(SETTINGS, ROLES, [], random.Random(0)), 300, there)
    assert struck[CUT, "raylet"] == 300 / CUT_PAUSE_SECONDS, "after a while only, else Ray takes it for dead"
    assert (CUT, "actor") not in struck
    struck = faults(Storm(SETTINGS, ROLES, [], random.Random(0)), 300, EVERYBODY)
    assert not [kind for kind, _ in struck if kind == CUT]


def test_role_that_was_named_is_killed_too() -> None:
    struck = faults(Storm(SETTINGS, ROLES, ["queue"], random.Random(0)), 3000, EVERYBODY)
    assert {role for kind, role in struck if kind == KILL} & set(ENDING) == {"queue"}


def test_learner_is_killed_as_often_as_the_run_recovers() -> None:
    learner = [Member("learner", 7)]
    struck = faults(Storm(SETTINGS, ROLES, [], random.Random(0)), 100, learner)
    assert struck[KILL, "learner"] == 2
    assert struck.total() == 100, "else it is stopped or slowed down"
    assert (
        faults(Storm(SETTINGS, ROLES, [], random.Random(0)), 100, learner, seconds=700)[KILL, "learner"] > 10
    )


def test_what_is_stopped_is_left_alone() -> None:
    storm = Storm(SETTINGS, ROLES, [], random.Random(0))
    assert storm.next_fault([Member("actor", 7, stopped=True)], 0.0, has_checkpoint=True) is None


def test_learner_is_not_killed_before_the_first_checkpoint() -> None:
    storm = Storm(SETTINGS, ROLES, [], random.Random(0))
    struck = [storm.next_fault([Member("learner", 7)], 0.0, has_checkpoint=False) for _ in range(50)]
    assert {each.kind for each in struck if each is not None} == {"stop", "slow"}


def test_seed_repeats_a_storm() -> None:
    first, second, other = (
        [Storm(SETTINGS, ROLES, [], random.Random(seed)).next_fault(EVERYBODY, 0.0, True) for _ in range(1)]
        for seed in (1, 1, 2)
    )
    assert first == second != other


def test_sound_run_is_found_sound_in_every_respect() -> None:
    findings = audit(SOUND)
    assert all(finding.is_sound for finding in findings), findings
    assert "4 rollouts were used in 2 updates" in findings[0].text


def test_run_that_plays_nothing_is_sound_without_updates() -> None:
    findings = audit(RunRecords(settings=SETTINGS | {"stages": ["warm_start"]}, consumed=[]))
    assert all(finding.is_sound for finding in findings), findings
    assert "plays nothing in its stages: warm_start" in findings[-1].text


TWICE = [*SOUND.consumed, {"step": 3, "trained": ["00000000/0001"], "dropped": {}}]
GAP = [SOUND.consumed[0], {"step": 2, "trained": ["00000002/0000", "00000002/0001"], "dropped": {}}]
HALF = [{"step": 1, "trained": ["00000000/0001"], "dropped": {}}]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        ({"consumed": []}, "no update was made"),
        ({"consumed": TWICE}, "used twice: 00000000/0001"),
        ({"consumed": GAP}, "missing: 00000001/0000, 00000001/0001"),
        ({"consumed": HALF}, "missing: 00000000/0000"),
        ({"metrics": [{"step": 5, "stream/staleness_max": 2.0}]}, r"too old: update 5 \(2\)"),
        ({"versions": {"00000000/0000": [4, 3]}}, "fell back: 00000000/0000"),
        ({"metrics": [{"step": 5, "learn/fresh_logprob_diff_mean": 0.1}]}, "by other weights .* update 5"),
    ],
)
def test_run_that_broke_its_word_is_found_out(damage: dict[str, Any], told: str) -> None:
    (broken,) = [finding for finding in audit(replace(SOUND, **damage)) if not finding.is_sound]
    assert re.search(told, broken.text)


OVERTAKING: dict[str, Any] = {
    **SETTINGS,
    "rollout": {
        "group_size": 2,
        "max_staleness": 1,
        "groups_per_step": 1,
        "group_order": "completion",
    },
    "stages": ["warm_start", "reinforce"],
    "run": {**SETTINGS["run"], "num_steps": 3},
}


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ([0, 2], "none missing"),
        ([0, 2, 1], "none missing"),
        ([0, 3], "missing: 00000001/0000"),  # more than can be under way
        ([0, 2, 3], "missing: 00000001/0000"),  # the run has ended
    ],
)
def test_completion_order_lets_groups_overtake_until_the_end(groups: list[int], told: str) -> None:
    consumed: Any = [
        {"step": step, "trained": [f"{group:08d}/{member:04d}" for member in range(2)], "dropped": {}}
        for step, group in enumerate(groups, 1)
    ]
    found = no_rollout_lost(replace(SOUND, settings=OVERTAKING, consumed=consumed))
    assert found.is_sound == (told == "none missing")
    assert found.is_sound or told in found.text
    in_task_order = {**OVERTAKING, "rollout": {**OVERTAKING["rollout"], "group_order": "tasks"}}
    strict = no_rollout_lost(replace(SOUND, settings=in_task_order, consumed=consumed))
    assert strict.is_sound == (sorted(groups) == list(range(len(groups))))


def test_overtaken_group_is_told_and_half_a_group_is_lost() -> None:
    consumed: Any = [{"step": 1, "trained": ["00000001/0000", "00000001/0001"], "dropped": {}}]
    found = no_rollout_lost(replace(SOUND, settings=OVERTAKING, consumed=consumed))
    assert found.text == "no rollout of the 2 groups so far is missing: 1 are still under way"
    consumed[0]["trained"].pop()
    found = no_rollout_lost(replace(SOUND, settings=OVERTAKING, consumed=consumed))
    assert found.text == "missing: 00000001/0001"


def test_many_faults_are_counted_and_a_few_named() -> None:
    late = [{"step": 1, "trained": ["00000009/0000", "00000009/0001"], "dropped": {}}]
    texts = [finding.text for finding in audit(replace(SOUND, consumed=late))]
    assert any("00000000/0000" in text and "and 13 more" in text for text in texts)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--run", "."], "has no settings.yaml: name the folder of a run"),
        (["--run", ".", "--below", str(2**22 + 1)], "there is no such process"),
    ],
)
def test_storm_over_nothing_is_an_error(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert chaos.main(["storm", "--below", str(os.getpid()), *arguments]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("number", ["0", "-1", "nan", "soon"])
def test_storm_needs_times_above_zero(number: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        chaos.main(["storm", "--below", "1", "--run", ".", "--every", number])
    assert "--every" in capsys.readouterr().err


def test_only_the_roles_that_were_named_are_struck() -> None:
    storm = Storm(SETTINGS, ["actor", "queue"], [], random.Random(0))
    assert set(faults(storm, 300, EVERYBODY)) == {
        (kind, role) for kind in FAULT_KINDS for role in ("actor", "queue") if (kind, role) != (KILL, "queue")
    }


def test_storm_reports_what_it_does_and_leaves_alone() -> None:
    told = Storm(SETTINGS, ["actor", "learner", "queue", "gcs"], ["gcs"], random.Random(0)).describe()
    assert "Killed, stopped and slowed down: learner, actor, gcs." in told
    assert re.search(r"only, for a run starts anew or ends without them \(.*\): queue\.", told)
    assert re.search("Left alone.*: driver, .*proxy, raylet", told)
    assert "A learner is killed 2 times in 10 min at most" in told


# -- what a storm finds out about a run: here a process with children that writes a journal ----------------

SCRIPT = """
import fcntl, json, subprocess, sys, time
from pathlib import Path
folder, num_updates, end = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
lock = open(folder / ".lock", "w")
children = [subprocess.Popen(["ray::RolloutActor", "600"], executable="sleep") for _ in range(3)]
def wait_for(name):
    end = time.monotonic() + 60
    while not (folder / name).exists() and time.monotonic() < end:
        time.sleep(0.02)
wait_for("watched")
for step in range(1, num_updates + 1):
    if step == 2:
        wait_for("struck")
    time.sleep(0.25)
    with open(folder / "consumed.jsonl", "a") as journal:
        ids = [f"{step - 1:08d}/{member:04d}" for member in range(2)]
        journal.write(json.dumps({"step": step, "trained": ids, "dropped": {}}) + "\\n")
if end == "hangs":
    time.sleep(600)
for child in children[1 if end == "leaves one" else 0 :]:
    child.kill()
    child.wait()
"""
NUM_PLANNED = 8
StartRun = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[StartRun]:
    """``start_run(num_updates, end)``: a process that makes so many updates and then "ends", "hangs" or
    "leaves one" of its children behind. It begins when the file ``watched`` says that its tree is known,
    and goes on after its first update when the file ``struck`` says that a fault is injected.
    """
    settings = {
        **SETTINGS,
        "stages": ["warm_start", "reinforce"],
        "run": {**SETTINGS["run"], "num_steps": NUM_PLANNED},
    }
    (tmp_path / "settings.yaml").write_text(json.dumps(settings), encoding="utf-8")
    started: list[psutil.Process] = []

    def start(num_updates: int, end: str = "ends") -> subprocess.Popen[bytes]:
        run = subprocess.Popen([sys.executable, "-c", SCRIPT, str(tmp_path), str(num_updates), end])
        while len(tree := [psutil.Process(run.pid), *psutil.Process(run.pid).children()]) < 4:
            time.sleep(0.01)
        started.extend(tree)
        return run

    yield start
    for process in started:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def storm_over(run: subprocess.Popen[bytes], folder: Path, *options: str) -> int:
    def say(text: str) -> None:
        (folder / ("struck" if text.startswith("[") else "watched")).touch()
        print(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chaos, "_print", say)
        return chaos.main(["storm", "--below", str(run.pid), "--every", "0.2", "--seed", "1", *options])


SHORT = ("--minutes", "0.02", "--roles", "actor")
"""As many faults as a run of two seconds has time for."""


@pytest.mark.slow
def test_run_that_ends_well_is_found_by_its_process_and_is_sound(
    start_run: StartRun, tmp_path: Path, capsys: Any
) -> None:
    assert storm_over(start_run(NUM_PLANNED), tmp_path, *SHORT, "--wait") == 0
    told = capsys.readouterr().out
    assert "--seed 1" in told, "so that it can be repeated"
    assert re.search(r"actor \d+ (killed|stopped|slowed)", told)
    assert f"the run has ended after {NUM_PLANNED} of {NUM_PLANNED} updates" in told
    assert "of 4 processes none is left" in told


@pytest.mark.slow
def test_run_that_ends_before_its_last_update_is_broken(
    start_run: StartRun, tmp_path: Path, capsys: Any
) -> None:
    assert storm_over(start_run(NUM_PLANNED - 2), tmp_path, *SHORT, "--wait") == 1
    assert "BROKEN  the run has ended after 6 of 8 updates" in capsys.readouterr().out


@pytest.mark.slow
def test_run_that_ends_before_its_first_update_is_told(
    start_run: StartRun, tmp_path: Path, capsys: Any
) -> None:
    assert storm_over(start_run(0), tmp_path, *SHORT) == 2
    assert "has ended before its first update" in capsys.readouterr().err


@pytest.mark.slow
def test_process_that_a_run_leaves_is_found(start_run: StartRun, tmp_path: Path) -> None:
    tree = ProcessTree(start_run(1, "leaves one").pid)
    assert tree.is_alive()
    (tmp_path / "watched").touch()
    tree.wait_for_end()
    left = tree.left_over(seconds=0.3)
    assert not left.is_sound and "(sleep)" in left.text


@pytest.mark.slow
def test_run_that_makes_no_more_updates_is_found_to_hang(start_run: StartRun) -> None:
    run = start_run(1, "hangs")
    updates = iter([5, 5, 5, 5, 5, 5])
    found = makes_progress(ProcessTree(run.pid), lambda: next(updates), NUM_PLANNED, seconds=0.5)
    assert not found.is_sound and "no update within 0.5 s" in found.text


@pytest.mark.slow
def test_update_after_a_recovery_counts(start_run: StartRun) -> None:
    run = start_run(1, "hangs")
    updates = iter([5, 5, 3, 4])  # the journal is cut back to the checkpoint, and goes on
    assert makes_progress(ProcessTree(run.pid), lambda: next(updates), NUM_PLANNED, seconds=60).is_sound


def test_run_at_its_end_needs_no_further_update(start_run: StartRun) -> None:
    assert makes_progress(
        ProcessTree(start_run(1, "hangs").pid), lambda: NUM_PLANNED, NUM_PLANNED, seconds=0
    ).is_sound


def test_process_whose_end_nobody_has_asked_for_has_ended(start_run: StartRun) -> None:
    run = start_run(1, "hangs")
    tree = ProcessTree(run.pid)
    assert tree.is_alive()
    run.kill()
    wait_until(lambda: not tree.is_alive())
    assert psutil.pid_exists(run.pid), "as a zombie"


def test_process_without_run_is_told_to_be_named_with_its_folder(capsys: Any) -> None:
    assert chaos.main(["storm", "--below", str(os.getpid())]) == 2
    assert "name that folder with --run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metrics", "score", "is_sound"),
    [
        ([{"step": 0, "eval/reward_mean": 0.2}, {"step": 9, "eval/reward_mean": 0.8}], 0.8, True),
        ([{"step": 0, "eval/reward_mean": 0.9}, {"step": 9, "eval/reward_mean": 0.7}], 0.8, False),
        ([{"step": 9}], 0.8, False),
    ],
)
def test_score_is_that_of_the_newest_evaluation(
    metrics: list[dict[str, float]], score: float, is_sound: bool
) -> None:
    assert score_reached(replace(SOUND, metrics=metrics), score).is_sound == is_sound
