"""``launch.chaos`` finds the processes of a run, strikes no others, and what it strikes can be resumed."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from signal import SIGKILL

import pytest

from environments.errors import ConfigError
from launch.chaos import main
from launch.fault_injection.fault import choose_member, send_signal
from launch.fault_injection.process_tree import ProcessTree
from launch.health.members import Member, members, role_of


@pytest.mark.parametrize(
    ("command_line", "role"),
    [
        ("/opt/bin/python3.11 -u -m launch.train recipe=guess", "driver"),
        ("/opt/bin/python3 /opt/bin/troupe train recipe=guess", "driver"),
        ("/opt/bin/python3 /opt/bin/troupe serve", None),
        ("ray::LearnerWorker.update", "learner"),
        ("ray::ServeReplica:policy-1:PolicyServer", "replica"),
        ("ray::RolloutActor", "actor"),
        ("ray::FleetPart.take", "fleet"),
        ("/opt/ray/core/src/ray/raylet/raylet --node_id=1", "raylet"),
        ("/opt/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp/ray", "gcs"),
        ("ray::ProxyActor", "proxy"),
        ("ray::IDLE", None),
        ("ray::RolloutActorOfOthers", None),
        ("ray::ServeReplica:policy-1:Other", None),
        ("sh -c python -m launch.train", None),
        ("vim launch/train.py", None),
    ],
)
def test_process_has_a_role_by_its_command_line(command_line: str, role: str | None) -> None:
    assert role_of(command_line) == role


def test_role_that_nobody_has_is_refused_with_those_there() -> None:
    present = [Member("fleet", 7), Member("queue", 8)]
    with pytest.raises(ConfigError, match=r"no replica .* fleet, queue"):
        choose_member(present, "replica", random.Random(0))


def test_each_of_many_may_be_struck_and_seed_repeats_choice() -> None:
    present = [Member("actor", pid) for pid in range(8)]
    chosen = [choose_member(present, "actor", random.Random(seed)).pid for seed in range(40)]
    assert len(set(chosen)) > 4
    assert chosen == [choose_member(present, "actor", random.Random(seed)).pid for seed in range(40)]


Impostor = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def impostor() -> Iterator[Impostor]:
    """``impostor(title)``: a process with a child that calls itself ``title``."""
    started = []

    def start(title: str) -> subprocess.Popen[bytes]:
        code = f"import subprocess; subprocess.run([{title!r}, '60'], executable='sleep')"
        started.append(subprocess.Popen([sys.executable, "-c", code]))
        while not members(below=started[-1].pid):
            time.sleep(0.01)
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_only_a_process_below_the_one_that_was_named_is_struck(impostor: Impostor) -> None:
    mine, other = impostor("ray::TrajectoryQueue"), impostor("ray::TrajectoryQueue")
    (target,) = members(below=mine.pid)
    assert send_signal("queue", SIGKILL, mine.pid, random.Random(0)) == target
    assert mine.wait(timeout=60) == 0  # its child is gone
    assert other.poll() is None
    assert len(members(below=other.pid)) == 1


def test_process_is_stopped_shown_as_stopped_and_makes_progress(
    impostor: Impostor, capsys: pytest.CaptureFixture[str]
) -> None:
    below = ["--below", str(impostor("ray::RolloutFleet").pid)]
    assert main(["stop", "fleet", *below]) == 0
    deadline = time.monotonic() + 60  # the kernel stops a process a little after the signal
    listed = ""
    while "(stopped)" not in listed and time.monotonic() < deadline:
        assert main(["list", *below]) == 0
        listed = capsys.readouterr().out
    assert "(stopped)" in listed
    assert main(["go-on", "fleet", *below]) == 0
    assert main(["list", *below]) == 0
    listed = capsys.readouterr().out
    assert "fleet" in listed and "(stopped)" not in listed


def test_folder_of_a_run_that_has_ended_is_an_error(impostor: Impostor) -> None:
    run = impostor("ray::TrajectoryQueue")
    tree = ProcessTree(run.pid)
    run.kill()
    run.wait()
    with pytest.raises(ConfigError, match="holds a run's folder"):
        tree.folder()


def test_what_is_not_there_is_refused_with_a_sentence(
    impostor: Impostor, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["kill", "learner", "--below", str(impostor("ray::TrajectoryQueue").pid)]) == 2
    assert main(["list", "--below", str(2**22 + 1)]) == 2
    errors = capsys.readouterr().err
    assert "There is no learner" in errors
    assert "there is no such process" in errors
