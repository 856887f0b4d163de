"""The verdict on what holds up a run, from states that are written down here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.rollouts.fleet_report import ActorFailure, FleetReport, FleetStatus, RolloutInPlay
from launch.health.heartbeat import START_PHRASES, RunHeartbeat
from launch.health.run_report import Process, RunReport, report_text, verdict
from launch.training.activity import ACTIVITIES, Activity, Clock
from policies.sampler import EngineStats, QueueStatus, ReplicaStatus

WAITS = RunHeartbeat(
    folder="runs/a",
    pid=7,
    host="head",
    fleets=("fleet-1",),
    activity=ACTIVITIES["time/wait"][0],
    seconds=45,
    idle_seconds=40,
    num_updates=3,
    progress={"a trajectory": 40.0, "an update": 47.0},
    sent_at=0,
)
STATUS = FleetStatus(
    num_actors=4,
    num_ready=4,
    num_waiting=0,
    num_running=2,
    num_lost=0,
    busy_seconds=0,
    seconds=90,
    num_replayed_tokens=0,
)
PLAYED = (RolloutInPlay("00000001/0001", "n", 60.0, 42.0), RolloutInPlay("00000001/0002", "n", 50.0, 3.0))


def fleet(status: FleetStatus = STATUS, in_play: tuple[RolloutInPlay, ...] = PLAYED) -> FleetReport:
    nothing: Any = None
    return FleetReport(status, in_play, 0, "SleepyEnv", {"CPU": 2.0, "memory": 0}, (), {}, nothing)


def replicas(**changes: Any) -> QueueStatus:
    replica = ReplicaStatus(3, True, 2, 99, EngineStats(), 0.2)
    return QueueStatus(num_waiting=0, num_late_tokens=0, replicas={"policy#a": replace(replica, **changes)})


HEALTHY = RunReport(heartbeat=WAITS, fleet=fleet(), sampling=replicas(), stream=(0, 1024), free={"CPU": 1.0})
SAMPLED = {"00000001/0001": 41.0, "00000001/0002": 2.0}


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (
            replace(HEALTHY, processes=[Process("gpu1", "replica", 12, True), Process("head", "driver", 7)]),
            "The replica of the policy server (process 12 on gpu1) was stopped (SIGSTOP): `kill -CONT 12`",
        ),
        (
            replace(HEALTHY, processes=[Process("gpu1", "learner", 12, True)]),
            "The learner rank (process 12 on gpu1) was stopped",
        ),
        (replace(HEALTHY, silent_seconds=30), "The driver (process 7 on head) has reported nothing for 30 s"),
        (replace(HEALTHY, unanswered=["the node gpu1"]), "The node gpu1 did not answer"),
        (HEALTHY, "waits for rollouts, for 45 s now: 2 of 4 rollout actors are in SleepyEnv or its agent"),
        (HEALTHY, "the longest for 42 s (rollout 00000001/0001)"),
        (
            replace(HEALTHY, waiting=SAMPLED),
            "2 of 4 rollout actors wait for completions, the longest for 41 s. The policy server has",
        ),
        (
            replace(HEALTHY, waiting=SAMPLED, sampling=replicas(is_live=False, silent_seconds=12.0)),
            "No replica of the policy server is live: policy#a last polled 12 s ago.",
        ),
        (
            replace(HEALTHY, waiting=SAMPLED, sampling=QueueStatus(2, 0, {})),
            "No replica of the policy server has polled its queue yet.",
        ),
        (replace(HEALTHY, waiting=SAMPLED, sampling=None), "An outside server answers them."),
        (
            replace(HEALTHY, fleet=fleet(replace(STATUS, num_ready=0), ())),
            "none of 4 rollout actors is up. Each needs 2 CPU, and 1 CPU is free in the cluster: add a node",
        ),
        (
            replace(HEALTHY, heartbeat=replace(WAITS, activity=ACTIVITIES["time/learn"][0])),
            "The training loop waits for the learner's update, for 45 s now.",
        ),
        (
            replace(HEALTHY, fleet=None, heartbeat=replace(WAITS, activity=START_PHRASES["server"])),
            "waits for the policy server to start, for 45 s now. In the cluster 1 CPUs, 0 GPUs are free",
        ),
        (
            replace(HEALTHY, fleet=None, heartbeat=replace(WAITS, activity="waits for room: 2 Ray CPUs")),
            "The training loop waits for room: 2 Ray CPUs, for 45 s now.",
        ),
        (
            replace(
                HEALTHY, stream=(1024, 1024), heartbeat=replace(WAITS, activity=ACTIVITIES["time/learn"][0])
            ),
            "The rollout actors wait for it: the stream is full.",
        ),
    ],
)
def test_verdict_names_what_holds_up_the_others(state: RunReport, said: str) -> None:
    assert said in verdict(state)
    assert report_text(state).splitlines()[-1] == verdict(state)


def test_text_says_what_every_part_is_doing() -> None:
    processes = [Process("head", "actor", pid) for pid in (1, 2, 3)] + [Process("head", "driver", 7)]
    error = "EnvironmentFailure: step raised\n  File\nKeyError: 'x'"
    failures = tuple(
        ActorFailure(number, "n", f"00000000/{number}", error, 5.0 + number) for number in range(7)
    )
    state = replace(HEALTHY, fleet=replace(fleet(), failures=failures), hosts={"n": "gpu1"})
    text = report_text(replace(state, processes=processes, waiting={"00000001/0002": 2.0}))
    for part in (
        "runs/a: driver 7 on head, 3 updates",
        "4 of 4 rollout actors up, 0 lost so far; 2 rollouts of SleepyEnv in play, 0 wait",
        "rollout 00000001/0001, 60 s old, in SleepyEnv or its agent for 42 s",
        "rollout 00000001/0002, 50 s old, waits for a completion for 2 s",
        "progress  a trajectory 40 s ago, an update 47 s ago",
        "rollout actor 0 on gpu1, 5 s ago, rollout 00000000/0: EnvironmentFailure: step raised ",
        "... KeyError: 'x'",
        "rollout actor 4 on gpu1, 9 s ago",
        "and 2 more rollout actors, longer ago",
        "replica policy#a: version 3, 2 requests, 99 answered, polled 0.2 s ago",
        "0 of 1024 trajectories wait there; the loop has the others",
        "head: 3 actors, driver 7",
    ):
        assert part in text


def test_start_says_which_part_it_waits_for() -> None:
    activity = Activity()
    activity.begin("waits for room: 2 CPUs")
    since = activity.since
    activity.begin("waits for room: 2 CPUs")
    assert activity.since == since, "it has waited for that all the time"
    activity.begin("starts")
    with activity.during("learner"):
        assert activity.name == START_PHRASES["learner"]
    assert activity.name == "starts"


def test_clock_reports_and_returns_to_what_was_done_before() -> None:
    activity = Activity()
    clock = Clock(activity)
    with clock.measure("time/evaluate"):
        with clock.measure("time/checkpoint"):
            assert activity.name == "writes a checkpoint"
        assert activity.name == "waits for an evaluation"
    assert activity.name == "starts"
    assert set(clock.seconds) == {"time/evaluate", "time/checkpoint"}
    assert list(activity.seconds_since_results()) == ["an evaluation", "a checkpoint"]


def test_what_raises_has_no_result() -> None:
    activity = Activity()
    with pytest.raises(KeyError), activity.during("time/learn"):
        raise KeyError
    assert activity.seconds_since_results() == {}
    assert activity.name == "starts"
