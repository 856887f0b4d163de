"""Pairs in processes that are forked from one: what they play, and that nothing of one reaches another."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine import is_running, wait_until
from scripted_judge import judged, serving, verdict

from actors.gateway.client import PolicyClient
from actors.gateway.function import pair_of
from actors.rollouts.journal import Journal
from actors.rollouts.pair_process import PairProcess, Zygote
from actors.rollouts.player import Attempt
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.time_limit import TimeLimitReached
from environments.base import BaseEnv, SingleTurnEnvironment
from environments.errors import SamplerError
from environments.rewards.judge import Judge
from environments.types import Completion, StepEvent, TerminationReason
from policies import GameAgent
from policies.sampler import SampleRequest

LIMITS = RolloutLimits(max_steps=3, timeout_seconds=20)


class ModeEnv(BaseEnv):
    """Does in its second step what its task says."""

    resumes_by = "replay"

    def __init__(self, mode: str) -> None:
        self.mode, self.turn = mode, 0

    def reset(self) -> tuple[dict, dict]:
        return {"question": "?", "pid": os.getpid()}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict]:
        self.turn += 1
        if self.turn == 2:
            match self.mode:
                case "hang":
                    time.sleep(1000)
                case "exit":
                    os._exit(3)
                case "exit beside a program":
                    with ProcessPoolExecutor(1) as pool:  # its process holds an end of the pipe
                        pool.submit(os.getpid).result()
                        os._exit(3)
                case "leave a program":
                    started = subprocess.Popen(["sleep", "600"])
                    return "", 1.0, True, {"program": started.pid}
                case "allocate":
                    bytearray(1 << 34)
                case "unpicklable":
                    return "", 1.0, True, {"lock": sys._getframe()}
        numbers = {
            "drawn": float(np.random.random()),
            "is_ray_here": "ray" in sys.modules,
            "pid": os.getpid(),
        }
        return "", 1.0, self.turn == 2, numbers

    @staticmethod
    def from_dict(info: dict) -> ModeEnv:
        return ModeEnv(info["mode"])


class EchoLink:
    """Answers with the number of the call, and keeps what it was sent."""

    is_followed = True

    def __init__(self) -> None:
        self.num_calls = 0
        self.turns: list[tuple[str, int, int, bytes]] = []
        self.steps: list[StepEvent] = []
        self.error: Exception | None = None

    def sample(self, request: SampleRequest, deadline: float) -> Completion:
        self.num_calls += 1
        if self.error is not None:
            raise self.error
        return Completion(
            prompt_ids=(1, 2),
            completion_ids=(self.num_calls,),
            logprobs=(-0.5,),
            text="a",
            finish_reason="stop",
        )

    def record_turn(self, *turn: Any) -> None:
        self.turns.append(turn)

    def on_step(self, rollout_id: str, step: StepEvent) -> None:
        self.steps.append(step)


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote(Pair(agent_class=GameAgent, env_class=ModeEnv))
    yield zygote
    zygote.end()


class Place:
    """A pair's process, with the link that it has."""

    def __init__(self, zygote: Zygote, limits: RolloutLimits = LIMITS) -> None:
        self.link = EchoLink()
        self.process = PairProcess(zygote, Pair(agent_class=GameAgent, env_class=ModeEnv), limits, self.link)

    def play(self, mode: str, **fields: Any) -> Any:
        request = RolloutRequest(rollout_id="g/0", group_id="g", task={"mode": mode}, **fields)
        return self.process.run(Attempt(request))


@pytest.fixture
def place(zygote: Zygote) -> Iterator[Place]:
    place = Place(zygote)
    yield place
    place.process.end()


@pytest.mark.slow
def test_rollouts_turns_and_steps_arrive(place: Place) -> None:
    for _ in range(2):
        result = place.play("")
        assert (result.trajectory.termination_reason, result.usable) == (TerminationReason.ENV_DONE, True)
    assert result.trajectory.completions[1].completion_ids == (4,)
    assert [each[2] for each in place.link.turns] == [0, 1, 0, 1]
    assert len(Journal(entries=[each[3] for each in place.link.turns[:2]])._finished) == 2
    assert [step.index for step in place.link.steps] == [0, 1, 0, 1]


def test_pairs_have_processes_and_random_numbers_of_their_own(zygote: Zygote, place: Place) -> None:
    other = Place(zygote)
    infos = [each.play("").trajectory.steps[0].info for each in (place, other)]
    other.process.end()
    assert infos[0]["pid"] != infos[1]["pid"] != os.getpid()
    assert infos[0]["drawn"] != infos[1]["drawn"]
    assert not infos[0]["is_ray_here"], "its threads would not be in a forked process"


def test_pair_waits_for_its_next_message(place: Place) -> None:
    result = place.play("", keep_seconds=60.0)
    assert (result.retained, len(result.turns)) == (True, 2)
    assert place.process.close_pair()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("hang", TerminationReason.TIMEOUT),
        ("exit", TerminationReason.CRASHED),
        ("exit beside a program", TerminationReason.CRASHED),
        ("allocate", TerminationReason.OUT_OF_MEMORY),
    ],
)
def test_lost_process_takes_no_other_along(
    zygote: Zygote, place: Place, mode: str, reason: TerminationReason
) -> None:
    lost = Place(zygote, replace(LIMITS, timeout_seconds=2) if mode == "hang" else LIMITS)
    result = lost.play(mode)
    assert (result.trajectory.termination_reason, result.usable) == (reason, False)
    if mode == "exit":
        with pytest.raises(ChildProcessError):
            lost.process.check()
        assert lost.play("").trajectory.termination_reason is TerminationReason.CRASHED
        assert not lost.process.close_pair()
    lost.process.end()
    place.process.check()
    assert place.play("").trajectory.termination_reason is TerminationReason.ENV_DONE


def test_errors_of_the_sampler_reach_the_rollout(place: Place) -> None:
    place.link.error = SamplerError("no engine")
    trajectory = place.play("").trajectory
    assert trajectory.termination_reason is TerminationReason.SAMPLER_ERROR
    assert "no engine" in trajectory.error


@pytest.mark.slow
def test_sampling_that_outlasts_the_limit_ends_the_rollout(zygote: Zygote) -> None:
    place = Place(zygote, replace(LIMITS, timeout_seconds=1))
    place.link.error = TimeLimitReached()
    assert place.play("").trajectory.termination_reason is TerminationReason.TIMEOUT
    place.process.end()


def test_result_that_cannot_be_sent_is_named(place: Place) -> None:
    with pytest.raises(RuntimeError, match="frame"):
        place.play("unpicklable")
    assert place.play("").trajectory.termination_reason is TerminationReason.ENV_DONE


@pytest.mark.slow
def test_processes_end_with_the_zygote() -> None:
    zygote = Zygote(Pair(agent_class=GameAgent, env_class=ModeEnv))
    steps = Place(zygote).play("leave a program").trajectory.steps
    zygote.end()
    for pid in (steps[0].info["pid"], steps[1].info["program"]):
        wait_until(lambda pid=pid: not is_running(pid), 20)


def test_programs_of_an_environment_end_with_its_pair(zygote: Zygote) -> None:
    lost = Place(zygote)
    program = lost.play("leave a program").trajectory.steps[1].info["program"]
    assert is_running(program)
    lost.process.end()
    wait_until(lambda: not is_running(program), 20)


def test_process_that_cannot_make_its_pair_leaves_nothing(zygote: Zygote) -> None:
    class Unreadable:
        def __reduce__(self) -> Any:
            return os._exit, (1,)

    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        pair = Pair(agent_class=GameAgent, env_class=ModeEnv, env_args={"what": Unreadable()})
        with pytest.raises(RuntimeError, match="ended while it started"):
            PairProcess(zygote, pair, LIMITS, EchoLink())
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_module_that_starts_a_thread_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    (tmp_path / "threaded_world.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    environment = type("ThreadedEnv", (ModeEnv,), {"__module__": "threaded_world"})
    with pytest.raises(RuntimeError, match=r"importing threaded_world has started 1 thread\(s\)"):
        Zygote(Pair(agent_class=GameAgent, env_class=environment))


def solve(task: dict[str, Any], client: PolicyClient) -> float:
    return 1.0


@pytest.mark.slow
def test_pairs_of_a_function_share_the_modules_of_the_gateway() -> None:
    """A session would load them anew, and have 16 MB of its own for them."""
    zygote = Zygote(pair_of(None, None, solve, {}, {}))
    loaded = Path(f"/proc/{zygote._process.pid}/maps").read_text()
    zygote.end()
    assert "/httptools/" in loaded and "/pydantic_core/" in loaded and "/ray/" not in loaded


@pytest.mark.slow
def test_function_of_no_module_is_played_by_forked_processes() -> None:
    made: dict[str, Any] = {}
    exec("def solve(task, client): return 1.0", made)
    zygote = Zygote(pair_of(None, None, made["solve"], {}, {}))
    zygote.end()


@pytest.mark.slow
def test_judge_in_a_forked_pair_gives_a_verdict_or_a_failure() -> None:
    def script(body: dict[str, Any], number: int) -> Any:
        question = judged(body)["task"]["question"]
        return (503, {"error": {"message": "no judge"}}) if question == "odd" else verdict(question == "good")

    with serving(script) as server:
        judge = Judge(server.endpoint(retries=0), {"It is good.": 1.0})
        pair = Pair(agent_class=GameAgent, env_class=SingleTurnEnvironment, env_args={"reward_fn": judge})
        zygote = Zygote(pair)
        process = PairProcess(zygote, pair, replace(LIMITS, timeout_seconds=120), EchoLink())
        tasks = [{"question": question} for question in ("good", "bad", "odd", "good")]
        played = [
            process.run(Attempt(RolloutRequest(rollout_id="g/0", group_id="g", task=task))).trajectory
            for task in tasks
        ]
        process.end()
        zygote.end()
    odd = played.pop(2)
    assert odd.termination_reason is TerminationReason.ENV_ERROR and "no judge" in (odd.error or "")
    assert [(each.reward, each.is_correct) for each in played] == [(1.0, True), (0.0, False), (1.0, True)]
    assert len(server.bodies) == 3, "the same task and answer is judged once in a process"
