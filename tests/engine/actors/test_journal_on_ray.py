"""An episode whose process is killed goes on in another rollout actor."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from called_by_part import call_by_part
from resumed_episodes import NUM_TURNS, ReplayedEnv, RestartedEnv, RestoredEnv, SeedSampler

from actors.rollouts.fleet import RolloutFleet
from actors.rollouts.forks import Fork, ForkPoints
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.stream import TrajectoryStream
from actors.sampling.sampler_actor import SamplerActor
from actors.settings import FleetConfig
from environments.types import TerminationReason
from policies import GameAgent


@pytest.mark.parametrize("env_class", [ReplayedEnv, RestoredEnv, RestartedEnv])
def test_killed_episode_goes_on_in_another_actor(
    ray_cluster: None, tmp_path: Path, env_class: type[ReplayedEnv]
) -> None:
    stream = TrajectoryStream(capacity=4)
    sampler = SamplerActor.remote(SeedSampler)
    pair = Pair(agent_class=GameAgent, env_class=env_class)
    fleet = RolloutFleet.remote(
        pair,
        sampler,
        stream.queue,
        RolloutLimits(max_steps=NUM_TURNS),
        FleetConfig(num_actors=1, retries=1),
    )
    try:
        if env_class is not RestoredEnv:
            call_by_part(fleet)
        ray.get(fleet.resize.remote(1))
        stream.connect(fleet)
        task = {"scratch": str(tmp_path / "killed")}
        request = RolloutRequest(rollout_id="0/0", group_id="0", task=task, seed=100)
        (group,) = stream.groups([request])
        (trajectory,) = group.trajectories
        assert trajectory.termination_reason is TerminationReason.ENV_DONE, trajectory.error
        assert Path(task["scratch"]).exists()
        completions = [step.completion for step in trajectory.steps]
        assert [each and each.completion_ids[0] for each in completions] == [100, 101, 102, 103, 104]
        calls = [round(-10 * each.logprobs[1]) for each in completions if each]  # which call has sampled it
        # The third one was sampled twice: its process was killed before the environment had answered.
        assert calls == ([4, 5, 6, 7, 8] if env_class is RestartedEnv else [1, 2, 4, 5, 6])
    finally:
        for actor in (fleet, sampler, stream.queue):
            ray.kill(actor)


def test_killed_fork_goes_on_with_the_turns_that_it_shares(ray_cluster: None, tmp_path: Path) -> None:
    stream = TrajectoryStream(capacity=4)
    sampler = SamplerActor.remote(SeedSampler)
    pair = Pair(agent_class=GameAgent, env_class=RestoredEnv)
    fleet = RolloutFleet.remote(
        pair,
        sampler,
        stream.queue,
        RolloutLimits(max_steps=NUM_TURNS),
        FleetConfig(num_actors=1, retries=1),
    )
    points = ForkPoints(num_forks=2, at="every 2")
    root = RolloutRequest(rollout_id="0/0000", group_id="0", task={}, seed=100, forked_at=points)
    forks = [
        RolloutRequest(
            rollout_id=f"0/{number + 1:04d}",
            group_id="0",
            task={"scratch": str(tmp_path / f"killed_{number}")},
            seed=200 + 100 * number,
            fork=Fork(parent="0/0000", number=number),
        )
        for number in range(2)
    ]
    try:
        ray.get(fleet.resize.remote(1))
        stream.connect(fleet)
        (group,) = stream.groups([root, *forks])
        for trajectory in group.trajectories:
            assert trajectory.termination_reason is TerminationReason.ENV_DONE, trajectory.error
        sampled = [[each.completion_ids[0] for each in one.completions] for one in group.trajectories]
        assert sampled == [
            [100, 101, 102, 103, 104],
            [100, 101, 202, 203, 204],
            [100, 101, 102, 103, 304],
        ]
        assert [one.num_shared_turns for one in group.trajectories] == [0, 2, 4]
        assert Path(forks[0].task["scratch"]).exists(), "it was killed in the first turn of its own"
        assert ray.get(fleet.status.remote()).num_resumed_turns == 0
    finally:
        for actor in (fleet, sampler, stream.queue):
            ray.kill(actor)
