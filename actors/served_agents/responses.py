"""Responses of an agent, for clients that fetch them again: the pool's side of a ``ResponseStore``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from actors.rollouts.service import AsyncRolloutService
from actors.served_agents.conversations import Conversations
from actors.served_agents.idempotency import IdempotentAnswers
from actors.served_agents.messages import Messages
from actors.served_agents.store import PerKeyLRU


@dataclass(slots=True)
class Responses:
    """Responses of every key, and what ends with them.

    Args:
        conversations: of which a response is a place.
        answers: those that are repeated by their idempotency keys.
        messages: whose answers responses are.
        service: has the environments that wait for a message after a rollout.
    """

    conversations: Conversations
    answers: IdempotentAnswers
    messages: Messages
    service: AsyncRolloutService
    _responses: PerKeyLRU[dict[str, Any]] = field(default_factory=PerKeyLRU)

    def keep(self, owner: str, response: dict[str, Any]) -> None:
        """Keep a response, unless its client has deleted it."""
        if not self.answers.is_forgotten(owner, response["id"]):
            self._responses.keep(owner, response["id"], response)

    def kept(self, owner: str, response_id: str) -> dict[str, Any] | None:
        """The response of this id, if it is kept and belongs to ``owner``."""
        return self._responses.kept(owner, response_id)

    def forget(self, owner: str, response_id: str) -> bool:
        """Forget a response, and close the environment that waits for a message after it."""
        self._close_after(self.conversations.end_response(owner, response_id))
        if was_kept := self._responses.forget(owner, response_id):
            self.answers.forget_answer(owner, response_id)
        return was_kept

    def withdraw(self, owner: str, response_id: str) -> bool:
        """End the message that this is to be the response of; return whether it had not ended."""
        return self.messages.withdraw(owner, response_id)

    def end_session(self, owner: str, session: str) -> None:
        """Close the environment of a session, whose name is free then. Raises as ``Conversations`` does."""
        self._close_after(self.conversations.end_session(owner, session))

    def _close_after(self, rollout_id: str | None) -> None:
        if rollout_id is not None:
            self.service.forget(rollout_id)
