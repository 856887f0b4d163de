"""Histories of conversations, by which clients that send all messages each time find theirs again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import takewhile

from environments.thoughts import split_thought

Turn = tuple[str, str]
"""Role and text of a message."""
BEGINNING = ""
"""History of a conversation without a message."""
INSTRUCTING = ("system", "developer")
"""Roles whose messages are no part of a history: the agent gets them once, if at all."""


def with_message(history: str, role: str, text: str) -> str:
    """The digest of a history and the message that comes next. White space and thoughts of an answer make no
    difference: clients send it back without them.
    """
    content = " ".join(split_thought(text)[1].split()) if role == "assistant" else text
    return hashlib.sha256(f"{history} {role} {content}".encode("utf-8", "surrogatepass")).hexdigest()


def history_of(turns: Sequence[Turn], with_orders: bool = False) -> str:
    """The digest of these messages.

    Args:
        with_orders: whether the instructions before the first of them make a difference.
    """
    orders = takewhile(lambda turn: turn[0] in INSTRUCTING, turns)
    beginning = " ".join(text for _, text in orders) if with_orders else BEGINNING
    history = BEGINNING
    for role, text in turns:
        if role not in INSTRUCTING:
            history = with_message(history or beginning, role, text)
    return history


def exchanges_before(turns: Sequence[Turn], with_orders: bool = False) -> tuple[tuple[str, str], ...]:
    """Return the messages before the last with their answers; none where they do not take turns.

    Args:
        with_orders: true puts the instructions before the first of them.
    """
    orders = [text for role, text in turns if role in INSTRUCTING and text.strip()]
    before = [turn for turn in turns[:-1] if turn[0] not in INSTRUCTING]
    pairs = list(zip(before[::2], before[1::2], strict=False))
    if len(before) % 2 or any((one[0], two[0]) != ("user", "assistant") for one, two in pairs):
        return ()
    texts = [(question[1], answer[1]) for question, answer in pairs]
    if texts and with_orders:
        texts[0] = "\n\n".join([*orders, texts[0][0]]), texts[0][1]
    return tuple(texts)
