"""Conversations that only their clients have kept, played again by their texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from actors.rollouts.journal import Journal
from actors.rollouts.rollout import FollowUp, RolloutLimits, RolloutRequest, run_rollout
from environments.base import BaseEnv
from environments.errors import EnvironmentFailure
from environments.types import Completion
from policies.agents.base import BaseAgent
from policies.sampler import SampleRequest

Exchanges = tuple[tuple[str, str], ...]
"""Messages of a client, each with the agent's answer to it."""


class LostError(EnvironmentFailure):
    """The pair that a message goes on with could not be rebuilt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRequest(RolloutRequest):
    """The next message of a conversation that is new to this server. Its task is the first message's."""

    exchanges: Exchanges
    message: str


def replay_request(request: RolloutRequest, exchanges: Exchanges, message: str) -> ReplayRequest:
    """Return ``request`` as one that replays the ``exchanges`` before ``message``."""
    return ReplayRequest(**_values(request), exchanges=exchanges, message=message)


def replayed(
    agent: BaseAgent, env: BaseEnv, request: RolloutRequest, limits: RolloutLimits
) -> RolloutRequest:
    """Bring a new pair to where ``request`` goes on, and return it as the follow-up that it then is.

    Each answer is taken as a whole turn, since its client does not know the turns before it. Any request
    but a ``ReplayRequest`` is returned as it is.

    Raises:
        LostError: the environment does not end with one of the answers.
    """
    if not isinstance(request, ReplayRequest):
        return request
    for number, (message, answer) in enumerate(request.exchanges):
        answers = _answers(message, answer)
        past = _plain(request, FollowUp(after=request.rollout_id, message=message) if number else None)

        def sample(_: SampleRequest, answers: Iterator[Completion] = answers) -> Completion:
            return next(answers)

        run_rollout(agent, env, sample, past, limits, Journal())
    return _plain(request, FollowUp(after=request.rollout_id, message=request.message))


def _answers(message: str, answer: str) -> Iterator[Completion]:
    yield Completion(text=answer, finish_reason="stop", retokenized=True)
    raise LostError(f"{answer[:100]!r} is not all that the agent has to say to {message[:100]!r}.")


def _plain(request: RolloutRequest, follow_up: FollowUp | None) -> RolloutRequest:
    return RolloutRequest(**_values(request) | {"follow_up": follow_up})


def _values(request: RolloutRequest) -> dict[str, Any]:
    return {each.name: getattr(request, each.name) for each in fields(RolloutRequest)}
