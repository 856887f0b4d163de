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


def said_before(messages: Sequence[ChatMessage], with_orders: bool = False) -> tuple[tuple[str, str], ...]:
    """Return the messages before the last with their answers; none where they do not take turns.

    Args:
        with_orders: true puts the instructions before the first of them.
    """
    orders = [_text(each) for each in messages if each.role in INSTRUCTING and _text(each).strip()]
    said = [each for each in messages[:-1] if each.role not in INSTRUCTING]
    pairs = list(zip(said[::2], said[1::2], strict=False))
    if len(said) % 2 or any((one.role, two.role) != ("user", "assistant") for one, two in pairs):
        return ()
    texts = [(_text(question), _text(answer)) for question, answer in pairs]
    if texts and with_orders:
        texts[0] = "\n\n".join([*orders, texts[0][0]]), texts[0][1]
    return tuple(texts)


def _text(message: ChatMessage) -> str:
    return str(message.for_template()["content"])
