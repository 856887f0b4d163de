"""The journals of sessions whose programs live on when a rollout actor dies: the session server keeps them.

An entry is the pickle of a finished turn, signed with the key that rollouts share with their server: it comes
by HTTP, maybe from whoever has taken the port of a node that is lost, and no program has that key::

    session server                                    gateway of the rollout actor
    a program's call, and the number of entries   ->
    kept before the program has its answer        <-  the answer, and behind it the entries from there on
    GET /offers/{id} of the next attempt          ->  all entries; the earlier attempt answers no more

This module is imported in every rollout worker. It must stay light.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from hmac import compare_digest
from typing import NamedTuple

from actors.rollouts.journal import MAX_STORE_BYTES
from environments.errors import EnvironmentFailure

ENTRIES_HEADER = "x-troupe-entries"
"""Number of entries that are kept; in an answer, the size of its body too."""
SIGNATURE_BYTES, SIZE_BYTES = 32, 4


def signed(key: str, session: str, index: int, entry: bytes) -> bytes:
    """Return an entry behind its signature."""
    code = blake2b(f"{session} {index} ".encode(), key=key.encode(), digest_size=SIGNATURE_BYTES)
    code.update(entry)
    return code.digest() + entry


def checked(key: str, session: str, entries: Sequence[bytes]) -> list[bytes]:
    """Return the signed entries of a session without their signatures. Raises ``EnvironmentFailure``."""
    plain = [each[SIGNATURE_BYTES:] for each in entries]
    for index, (entry, each) in enumerate(zip(plain, entries, strict=True)):
        if not compare_digest(signed(key, session, index, entry), each):
            raise EnvironmentFailure(
                f"Turn {index + 1} of session {session} was not recorded by a rollout of this training: "
                "another program has answered at the port of a node that is lost."
            )
    return plain


class Part(NamedTuple):
    """A body, with entries of a session behind it."""

    body: bytes
    first: int | None
    """Number of the first entry; ``None`` where an answer comes without any."""
    entries: Sequence[bytes] = ()

    @classmethod
    def of(cls, content: bytes, headers: Mapping[str, str]) -> Part:
        """The part that has come as ``content``, with these headers."""
        if ENTRIES_HEADER not in headers:
            return cls(content, None)
        first, size = map(int, headers[ENTRIES_HEADER].split())
        entries, start = [], size + SIZE_BYTES
        while start <= len(content):
            end = start + int.from_bytes(content[start - SIZE_BYTES : start], "big")
            entries.append(content[start:end])
            start = end + SIZE_BYTES
        return cls(content[:size], first, entries)

    @property
    def content(self) -> bytes:
        """The body and the entries, each behind its size: for a header they may be too many."""
        sized = (part for each in self.entries for part in (len(each).to_bytes(SIZE_BYTES, "big"), each))
        return b"".join((self.body, *sized))

    @property
    def headers(self) -> dict[str, str]:
        """The header that tells them apart."""
        return {ENTRIES_HEADER: f"{self.first} {len(self.body)}"}


class SessionJournals:
    """The entries of sessions, at most ``max_bytes`` of them: those go first that have not grown for longest.

    A session whose entries are gone has them anew with its next answer, from the actor that plays it.
    """

    def __init__(self, max_bytes: int = MAX_STORE_BYTES) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._entries: dict[str, list[bytes]] = {}
        self._attempts: dict[str, int] = {}
        """The newest attempts at sessions."""

    def open(self, session: str, attempt: int) -> bool:
        """Let no earlier attempt add entries from now on; return whether there is no later one."""
        self._attempts[session] = max(attempt, self._attempts.get(session, attempt))
        return self.is_open(session, attempt)

    def is_open(self, session: str, attempt: int) -> bool:
        """Return whether this is the newest attempt."""
        return self._attempts.get(session) == attempt

    def of(self, session: str) -> Sequence[bytes]:
        """Return the entries of a session, in their order."""
        return self._entries.get(session, ())

    def add(self, session: str, attempt: int, part: Part) -> bool:
        """Add the entries of a part that are new; return whether none is missing."""
        known = self._entries.get(session, [])
        first = len(known) if part.first is None else part.first
        if not self.is_open(session, attempt) or first > len(known):
            return False
        if new := part.entries[len(known) - first :]:
            self._entries.pop(session, None)
            self._entries[session] = known  # the last one to go
            known += new
            self._num_bytes += sum(map(len, new))
            while self._num_bytes > self._max_bytes:
                self._drop_entries(next(iter(self._entries)))
        return True

    def drop(self, session: str) -> None:
        """Forget a session."""
        self._attempts.pop(session, None)
        self._drop_entries(session)

    def _drop_entries(self, session: str) -> None:
        self._num_bytes -= sum(map(len, self._entries.pop(session, ())))
