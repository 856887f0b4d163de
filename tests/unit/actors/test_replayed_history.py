"""Conversations that only their clients have kept go on in a new environment."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from actors.rollouts.journal import Journal
from actors.rollouts.player import LostError, replayed
from actors.rollouts.rollout import FollowUp, RolloutLimits, RolloutRequest, run_rollout
from actors.served_agents.conversations import Conversations
from environments.base import BaseEnv
from environments.types import Completion
from policies import GameAgent
from policies.agent_api.context import RequestContext
from policies.agent_api.history import exchanges_before
from policies.agent_api.question import Question
from policies.model_api.errors import ConflictError
from policies.model_api.protocol import ChatRequest
from policies.sampler import SampleRequest

EXCHANGES = (("I am Ada.", "Hello, Ada!"), ("I am 36.", "So you are 36."))


class NotebookEnv(BaseEnv):
    """Takes each answer down, and is done with it, unless it asks for more."""

    def __init__(self) -> None:
        self.pages: list[str] = []

    def reset(self) -> tuple[Any, dict[str, Any]]:
        return {"question": "I am Ada."}, {}

    def follow_up(self, message: str) -> tuple[Any, dict[str, Any]]:
        return message, {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        self.pages.append(str(action))
        return "", 0.0, not str(action).endswith("?"), {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> NotebookEnv:
        return NotebookEnv()


def request(exchanges: tuple[tuple[str, str], ...]) -> RolloutRequest:
    return RolloutRequest(
        rollout_id="00000001/0000",
        group_id="00000001",
        task={},
        keep_seconds=60,
        follow_up=FollowUp(after=None, message="Who am I?", exchanges=exchanges),
    )


def test_replayed_history_brings_agent_and_environment_back():
    agent, env, limits = GameAgent(), NotebookEnv(), RolloutLimits()
    asked: list[SampleRequest] = []

    def sample(request: SampleRequest) -> Completion:
        asked.append(request)
        return Completion(text="You are Ada.", finish_reason="stop", completion_ids=(1,), prompt_ids=(1,))

    following = replayed(agent, env, request(EXCHANGES), limits)
    trajectory = run_rollout(agent, env, sample, following, limits, Journal())
    (sampled,) = asked
    texts = [message["content"] for message in sampled.messages if message["role"] != "system"]
    assert texts == [*EXCHANGES[0], *EXCHANGES[1], "Who am I?"]
    assert env.pages == ["Hello, Ada!", "So you are 36.", "You are Ada."]
    assert [step.model_response for step in trajectory.steps] == ["You are Ada."]
    assert following.keep_seconds == 60


def test_replayed_answer_that_does_not_end_its_turn_is_an_error():
    with pytest.raises(LostError, match=r"'And your name\?' is not all"):
        replayed(GameAgent(), NotebookEnv(), request((("Hi.", "And your name?"),)), RolloutLimits())


def test_other_requests_are_not_replayed():
    plain = RolloutRequest(rollout_id="1/0", group_id="1", task={})
    assert replayed(GameAgent(), NotebookEnv(), plain, RolloutLimits()) is plain


@pytest.mark.parametrize(
    ("roles", "exchanges"),
    [
        ("ua u", (("0", "1"),)),
        ("s ua u", (("0\n\n1", "2"),)),
        ("ua ua u", (("0", "1"), ("2", "3"))),
        ("u", ()),
        ("s u", ()),
        ("uu a u", ()),
        ("a u", ()),
    ],
)
def test_history_of_turns_is_read_from_messages(roles, exchanges):
    names = {"u": "user", "a": "assistant", "s": "system"}
    given = [
        {"role": names[role], "content": str(place)} for place, role in enumerate(roles.replace(" ", ""))
    ]
    body = ChatRequest.model_validate({"model": "agent/a", "messages": given})
    assert exchanges_before(Question.from_chat(body).turns, with_orders=True) == exchanges


def test_unknown_history_begins_a_conversation_only_if_replayed():
    context = RequestContext(keeps_history=True, earlier="what was said", exchanges=EXCHANGES)
    with pytest.raises(
        ConflictError, match=r"in which this was said\. server\.agents\.unknown_history=replay"
    ):
        Conversations(waits=False).find(context)
    for replays in (False, True):  # two messages without an answer between
        with pytest.raises(ConflictError, match=r"in which this was said\. Start a new conversation"):
            Conversations(waits=False, replays=replays).find(replace(context, exchanges=()))
    place = Conversations(waits=False, replays=True).find(context)
    assert place.rollout_id is None and place.conversation.newest is None
