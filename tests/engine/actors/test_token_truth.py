"""What is trained on is what was sampled: through the real fleet, renderer, server and engine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import compress, pairwise
from typing import TYPE_CHECKING, Any

import pytest
import ray
import torch
from transformers_reference import load, token_logprobs

from actors.rollouts.fleet import RolloutFleet
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.stream import TrajectoryStream
from actors.settings import FleetConfig
from environments.text_games import GuessEnvironment
from environments.types import Completion, TerminationReason, Trajectory
from policies import GameAgent, SamplingParams
from policies.learning.samples import training_samples

if TYPE_CHECKING:
    from served_policy import ServedPolicy

NUM_GUESSES = 3
TURN_TOKENS = 14
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def trajectories(ray_cluster: None, sampler: Any) -> Iterator[list[Trajectory]]:
    """Games of three turns. The random model speaks bytes that are no text: the hardest to keep."""
    stream = TrajectoryStream(capacity=100)
    pair = Pair(agent_class=GameAgent, env_class=GuessEnvironment, env_args={"max_guesses": NUM_GUESSES})
    limits = RolloutLimits(max_turn_tokens=TURN_TOKENS)
    fleet = RolloutFleet.remote(pair, sampler, stream.queue, limits, FleetConfig(num_actors=2))
    ray.get(fleet.resize.remote(2))
    orders = [
        RolloutRequest(
            rollout_id=f"0/{index}",
            group_id="0",
            task={},
            params=SamplingParams(temperature=TEMPERATURE),
            seed=1000 * index,
        )
        for index in range(8)
    ]
    stream.connect(fleet)
    (group,) = stream.groups(orders)
    ray.kill(fleet)
    stream.close()
    yield [each for each in group.trajectories if len(each.steps) == NUM_GUESSES]


def completions_of(trajectory: Trajectory) -> list[Completion]:
    assert len(trajectory.completions) == NUM_GUESSES
    return trajectory.completions


def test_games_of_three_turns_are_played(trajectories: list[Trajectory]) -> None:
    assert len(trajectories) >= 4
    assert {each.termination_reason for each in trajectories} == {TerminationReason.ENV_DONE}
    endings = {each.finish_reason for trajectory in trajectories for each in completions_of(trajectory)}
    assert endings  # whole messages and those that were cut off continue differently
    assert len({completions_of(each)[0].completion_ids for each in trajectories}) > 1


def test_engine_saw_every_token_of_the_turns_before(trajectories: list[Trajectory]) -> None:
    for trajectory in trajectories:
        for earlier, later in pairwise(completions_of(trajectory)):
            seen = earlier.prompt_ids + earlier.completion_ids
            assert later.prompt_ids[: len(seen)] == seen
            assert len(later.prompt_ids) > len(seen)


def test_mask_covers_the_sampled_tokens_and_nothing_else(trajectories: list[Trajectory]) -> None:
    for trajectory in trajectories:
        (sample,) = training_samples(trajectory)
        completions = completions_of(trajectory)
        sampled = [token for each in completions for token in each.completion_ids]
        logprobs = [value for each in completions for value in each.logprobs]
        assert list(compress(sample.response_ids, sample.loss_mask)) == sampled
        assert list(compress(sample.rollout_logprobs, sample.loss_mask)) == logprobs
        assert sum(sample.loss_mask) == len(sampled) < len(sample.loss_mask)
        last = completions[-1]
        assert sample.prompt_ids + sample.response_ids == last.prompt_ids + last.completion_ids


def test_sampled_token_has_the_logprob_of_the_model(
    trajectories: list[Trajectory], policy_app: ServedPolicy
) -> None:
    """A token that is off by one place, or a prompt that the engine saw differently, would show here."""
    model = load(policy_app.model_path)
    for trajectory in trajectories:
        (sample,) = training_samples(trajectory)
        with torch.no_grad():
            expected = token_logprobs(model, sample.prompt_ids, sample.response_ids, TEMPERATURE)
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        found = torch.tensor(sample.rollout_logprobs)
        torch.testing.assert_close(found[mask], expected[mask], rtol=0, atol=1e-4)
