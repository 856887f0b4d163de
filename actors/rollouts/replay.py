"""Conversations that only their clients have kept, played again by their texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from actors.rollouts.journal import Journal
from actors.rollouts.rollout import FollowUp, RolloutLimits, RolloutRequest, run_rollout
from environments.base import BaseEnv
from environments.errors import EnvironmentFailure
from environments.types import Completion
from policies.agents.base import BaseAgent
from policies.sampler import SampleRequest


class LostError(EnvironmentFailure):
    """The pair that a message goes on with could not be rebuilt."""


def replayed(
    agent: BaseAgent, env: BaseEnv, request: RolloutRequest, limits: RolloutLimits
) -> RolloutRequest:
    """Bring a new pair to where ``request`` goes on, and return it as the follow-up that it then is.

    Its task is the first message's. Each answer is taken as a whole turn, since its client does not know the
    turns before it. A request without exchanges is returned as it is.

    Raises:
        LostError: the environment does not end with one of the answers.
    """
    follow_up = request.follow_up
    if follow_up is None or not follow_up.exchanges:
        return request
    for number, (message, answer) in enumerate(follow_up.exchanges):
        answers = _answers(message, answer)
        past = FollowUp(after=request.rollout_id, message=message) if number else None

        def sample(_: SampleRequest, answers: Iterator[Completion] = answers) -> Completion:
            return next(answers)

        run_rollout(agent, env, sample, replace(request, follow_up=past), limits, Journal())
    return replace(request, follow_up=FollowUp(after=request.rollout_id, message=follow_up.message))


def _answers(message: str, answer: str) -> Iterator[Completion]:
    yield Completion(text=answer, finish_reason="stop", retokenized=True)
    raise LostError(f"{answer[:100]!r} is not all that the agent has to say to {message[:100]!r}.")
