"""``launch.status`` names the part that holds up a run, in five runs that hang."""

from __future__ import annotations

import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from browser import Browser, chromium
from followed_run import SCRIPTED, foreign_lines
from machine import free_port

from actors.rollouts import service as rollout_service
from actors.rollouts.fleet_report import ActorFailure
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.service import RolloutService
from actors.settings import FleetConfig
from environments import BaseEnv
from launch.health.heartbeat import HeartbeatSender, RunHeartbeat, run_heartbeats
from launch.health.inspection import inspect
from launch.health.members import members
from launch.health.run_report import verdict
from launch.run_folder.checkpoint import CheckpointFolder
from launch.training.activity import ACTIVITIES
from policies import GameAgent
from policies.sampler import ScriptedSampler

ROOT = Path(__file__).resolve().parents[3]
RUN = [
    "recipe=calculator",
    "run.num_steps=1000",
    "warm_start.num_steps=0",
    "evaluation.num_tasks=2",
    "rollout.groups_per_step=2",
    "rollout.group_size=4",
    "fleet.num_actors=2",
    "learner.mini_batch_size=8",
    "run.stall_limit_seconds=180",  # a report comes after a thirtieth of it
    *SCRIPTED,
]


class Sleepy(BaseEnv):
    """Sleeps in its first step, for as long as its task says, or fails where that is no time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def reset(self) -> tuple[str, dict[str, Any]]:
        return "Say something.", {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        if self.seconds < 0:
            raise KeyError(f"process {os.getpid()}")
        time.sleep(self.seconds)
        return "", 1.0, True, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> Sleepy:
        return Sleepy(info["seconds"])


@contextmanager
def told(service: RolloutService, activity: str) -> Iterator[None]:
    """A run that has this rollout service, as far as the cluster knows."""

    def heartbeat() -> RunHeartbeat:
        return RunHeartbeat(
            folder="runs/test",
            pid=os.getpid(),
            host=socket.gethostname(),
            fleets=(service.fleet_name,),
            activity=activity,
            seconds=9,
            idle_seconds=9,
            num_updates=1,
            progress={},
            sent_at=time.time(),
        )

    sender = HeartbeatSender(heartbeat)
    try:
        assert within(240, lambda: run_heartbeats())
        assert len(run_heartbeats()) == 1
        yield
    finally:
        sender.stop()
    assert within(240, lambda: not run_heartbeats()), "its thread takes it out, at the latest after one more"


def within(seconds: float, holds: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := holds()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def assert_verdict(text: str) -> None:
    """``text`` is in the verdict once all has started; beside other tests that takes a while.

    Each verdict is on a new heartbeat: an old one says that the driver has reported nothing for long.
    """

    def now() -> str:
        return verdict(inspect(run_heartbeats()[0]))

    assert within(240, lambda: text in now()), now()


@contextmanager
def started(**fleet: Any) -> Iterator[RolloutService]:
    """Two rollout actors, whose stream has room for four trajectories."""
    pair = Pair(agent_class=GameAgent, agent_args={}, env_class=Sleepy, env_args={})
    config = FleetConfig(num_actors=2, retries=0, **fleet)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_service, "STREAM_CAPACITY", 4)
        patch.setattr("launch.health.inspection.STREAM_CAPACITY", 4)
        service = RolloutService(pair, lambda: ScriptedSampler(lambda _: "hello"), RolloutLimits(), config)
        try:
            service.start(2)
            yield service
        finally:
            service.stop()


@pytest.fixture(scope="module")
def service(ray_cluster: None) -> Iterator[RolloutService]:
    """For three tests; the last one leaves its actors asleep."""
    with started() as service:
        yield service


NUMBERS = itertools.count()


def submit(service: RolloutService, count: int, seconds: float) -> None:
    service.submit(
        [
            RolloutRequest(rollout_id=f"0/{next(NUMBERS):04d}", group_id="0", task={"seconds": seconds})
            for _ in range(count)
        ]
    )


def test_stream_that_nobody_empties_is_named(service: RolloutService) -> None:
    submit(service, 40, 0.0)
    with told(service, ACTIVITIES["time/learn"][0]):
        assert_verdict("The rollout actors wait for it: the stream is full")
    assert len(list(service.stream.trajectories(40))) == 40


def test_youngest_failure_of_each_rollout_actor_is_told(service: RolloutService) -> None:
    def failures_of_both() -> Sequence[ActorFailure]:
        """Both have failed once both are up."""
        submit(service, 4, -1.0)
        assert len(list(service.stream.trajectories(4))) == 4
        fleet = inspect(run_heartbeats()[0]).fleet
        return fleet.failures if fleet is not None and len(fleet.failures) == 2 else ()

    with told(service, ACTIVITIES["time/wait"][0]):
        failures = within(240, failures_of_both)
        assert {each.actor for each in failures} == {0, 1}
        # The cause is told by the process where it arose, and there it ends.
        processes = [each.error.strip().splitlines()[-1] for each in failures]
        assert len(set(processes)) == 2
        assert all(text.startswith("KeyError: 'process ") for text in processes)
        assert all("Sleepy" in each.error.splitlines()[0] for each in failures)


def test_environment_that_sleeps_is_named(service: RolloutService) -> None:
    submit(service, 2, 600.0)
    with told(service, ACTIVITIES["time/wait"][0]):
        assert_verdict("2 of 2 rollout actors are in Sleepy or its agent")


def test_cluster_without_room_is_named(ray_cluster: None) -> None:
    free = int(ray.available_resources()["CPU"])  # actors of other tests have some

    @ray.remote(num_cpus=free)
    class Neighbour:
        """Takes all CPUs but a part of one."""

        def up(self) -> bool:
            return True

    neighbour = Neighbour.remote()
    ray.get(neighbour.up.remote(), timeout=200)
    try:
        with started(nodes={"CPU": 1}) as service, told(service, ACTIVITIES["time/wait"][0]):
            submit(service, 2, 0.0)
            assert_verdict("none of 2 rollout actors is up. Each needs 1 CPU")
    finally:
        ray.kill(neighbour)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[subprocess.Popen[str]]:
    """A training as a program of its own, with a Ray of its own, that makes updates."""
    folder = tmp_path_factory.mktemp("stalled")
    server = f"server.http_port={free_port()}"
    command = [sys.executable, "-m", "launch.train", *RUN, f"model.path={tiny_model}", server]
    command += [f"run.directory={folder / 'run'}"]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))  # there is the script of the engine
    with (
        (folder / "output").open("w+") as output,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path},
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        ) as program,
    ):
        program.output = folder / "output"  # type: ignore[attr-defined]
        try:
            within(500, lambda: "step    2/" in said(program) or program.poll() is not None)
            assert "step    2/" in said(program), said(program)
            yield program
        finally:
            program.kill()  # else the end of this block would wait for it


def address_of(program: subprocess.Popen[str]) -> str:
    """The address of the Ray that a training has started."""
    (raylet,) = [each.pid for each in members(program.pid) if each.role == "raylet"]
    words = psutil.Process(raylet).cmdline()
    return next(word for word in words if word.startswith("--gcs-address=")).partition("=")[2]


def said(program: Any) -> str:
    return str(program.output.read_text())


@pytest.mark.skipif(chromium() is None, reason="this machine has no Chromium: apt-get install chromium")
def test_training_is_watched_in_browser_and_its_policy_talked_to(training: subprocess.Popen[str]) -> None:
    """The whole page, before a training that goes on: its curves move, all five views show what is there."""
    given = dict(word.split("=") for word in training.args if "=" in word)
    port, url = free_port(), f"http://127.0.0.1:{given['server.http_port']}/v1"
    command = [sys.executable, "-m", "launch.view", given["run.directory"], "--port", str(port)]
    command += ["--address", address_of(training), "--server", url]
    with (
        Browser.running() as browser,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as view,
    ):
        assert view.stdout is not None
        try:
            assert str(port) in view.stdout.readline()
            look_around(browser, f"http://127.0.0.1:{port}/")
        finally:
            view.terminate()


def look_around(browser: Browser, page: str) -> None:
    browser.open(page)
    browser.wait_for("document.querySelectorAll('.chart').length >= 9")
    step = browser.value("document.getElementById('state').textContent")
    browser.wait_for(f"document.getElementById('state').textContent !== {step!r}", seconds=60)
    browser.press("2")
    browser.wait_for("document.querySelectorAll('.cell').length === 8")
    browser.value("document.querySelectorAll('.cell')[1].click()")
    browser.wait_for("document.querySelectorAll('.tokens span').length > 5")
    click = "dispatchEvent(new MouseEvent('click', {shiftKey: true}))"
    browser.value(f"document.querySelectorAll('.tools .cell')[2].{click}")
    browser.wait_for("document.querySelectorAll('article').length === 2")
    browser.press("4")
    browser.wait_for("document.body.innerText.includes('Replicas of the policy server')", seconds=60)
    shown = browser.value("document.body.innerText")
    assert "The training loop" in shown and "learner" in shown and socket.gethostname() in shown
    browser.press("5")
    browser.wait_for("document.getElementById('model')?.value === 'policy'")
    browser.value("document.getElementById('box').focus()")
    browser.type("What is 12+34?")
    browser.press("Enter")
    browser.wait_for("document.getElementById('send').textContent === 'Send' && talk.said.length === 2", 60)
    assert browser.value("talk.said[1].content") and not browser.value("talk.said[1].error")
    assert browser.errors == []
    assert all(each.startswith((page, "data:", "about:")) for each in browser.addresses), browser.addresses


@pytest.mark.parametrize(
    ("role", "name"), [("replica", "replica of the policy server"), ("learner", "learner rank")]
)
def test_stopped_process_is_named_by_status_and_by_the_run(
    training: subprocess.Popen[str], role: str, name: str
) -> None:
    address = address_of(training)
    victim = next(each.pid for each in members(training.pid) if each.role == role)
    before = said(training)
    os.kill(victim, signal.SIGSTOP)
    try:
        time.sleep(1.0)
        status = subprocess.run(
            [sys.executable, "-m", "launch.status", "--address", address],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert status.returncode == 0, status.stderr
        assert f"The {name} (process {victim} on {socket.gethostname()}) was stopped" in status.stdout
        printed = within(180, lambda: re.search(r"Nothing has moved for \d", said(training)[len(before) :]))
        assert printed and f"The {name} (process {victim}" in said(training)[len(before) :]
    finally:
        os.kill(victim, signal.SIGCONT)
    length = len(said(training))
    assert within(180, lambda: "reward" in said(training)[length:]), "the run goes on"


def test_ctrl_c_in_updates_leaves_a_checkpoint(training: subprocess.Popen[str]) -> None:
    """It comes last, since the training ends by it."""
    own = [psutil.Process(each.pid) for each in members(training.pid)]
    os.killpg(training.pid, signal.SIGINT)
    training.wait(200)
    assert training.returncode == 130, said(training)
    assert foreign_lines(said(training)) == []
    assert within(120, lambda: not any(each.is_running() for each in own))
    directory = Path(next(word for word in training.args if "run.directory=" in word).partition("=")[2])
    newest = directory / "checkpoints" / "latest"
    assert CheckpointFolder.progress(newest).step >= 2
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(newest / "huggingface")
    AutoTokenizer.from_pretrained(newest / "huggingface")
