"""How a conversation is found again by what was said in it, by clients that send all of it each time."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from environments.thoughts import split_thought
from policies.openai.messages import ChatMessage

BEGINNING = ""
"""The history of a conversation in which nothing was said."""
INSTRUCTING = ("system", "developer")
"""Roles whose messages are no part of a history: what they say is said to the agent once."""


def with_message(history: str, role: str, text: str) -> str:
    """The digest of a history and the message that comes next. White space and thoughts make no difference:
    clients send answers back without them.
    """
    said = split_thought(text)[1] if role == "assistant" else text
    return hashlib.sha256(
        f"{history} {role} {' '.join(said.split())}".encode("utf-8", "surrogatepass")
    ).hexdigest()


def history_of(messages: Sequence[ChatMessage]) -> str:
    """The digest of these messages."""
    history = BEGINNING
    for message in messages:
        if message.role not in INSTRUCTING:
            history = with_message(history, message.role, str(message.for_template()["content"]))
    return history
