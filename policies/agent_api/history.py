"""Histories of conversations, by which clients that send all messages each time find theirs again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import takewhile

from environments.thoughts import split_thought
from policies.model_api.messages import ChatMessage

BEGINNING = ""
"""The history of a conversation in which nothing was said."""
INSTRUCTING = ("system", "developer")
"""Roles whose messages are no part of a history: what they say is said to the agent once, if at all."""


def with_message(history: str, role: str, text: str) -> str:
    """The digest of a history and the message that comes next. White space and thoughts make no difference:
    clients send answers back without them.
    """
    said = split_thought(text)[1] if role == "assistant" else text
    return hashlib.sha256(
        f"{history} {role} {' '.join(said.split())}".encode("utf-8", "surrogatepass")
    ).hexdigest()


def history_of(messages: Sequence[ChatMessage], with_orders: bool = False) -> str:
    """The digest of these messages.

    Args:
        with_orders: whether the instructions before the first of them make a difference.
    """
    orders = takewhile(lambda message: message.role in INSTRUCTING, messages)
    beginning = " ".join(map(_text, orders)) if with_orders else BEGINNING
    history = BEGINNING
    for message in messages:
        if message.role not in INSTRUCTING:
            history = with_message(history or beginning, message.role, _text(message))
    return history


def _text(message: ChatMessage) -> str:
    return str(message.for_template()["content"])
