"""The ledger of a judge: verdicts that it has given, and what its calls have cost."""

from __future__ import annotations

import sqlite3
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from environments.errors import ConfigError, EnvironmentFailure

LOCK_SECONDS = 30.0
"""Longest wait for another process that writes to the same file."""
TABLES = """
CREATE TABLE IF NOT EXISTS verdicts (number INTEGER PRIMARY KEY, content TEXT UNIQUE, verdict TEXT);
CREATE TABLE IF NOT EXISTS spent (id INTEGER PRIMARY KEY CHECK (id = 0), calls INTEGER, tokens INTEGER);
INSERT OR IGNORE INTO spent VALUES (0, 0, 0);
"""


class Spent(NamedTuple):
    """The cost of a judge so far."""

    calls: int
    tokens: int


class JudgeLedger:
    """Keeps verdicts by the content that was judged, and a judge's calls within a budget.

    Without ``path`` each process has a ledger of its own: a budget is then that of one rollout actor, and a
    run of 32 actors may spend 32 of them. With ``path`` all processes of a machine share one file, and so
    one budget and one cache, also over restarts; several nodes have a file each. SQLite does the locking,
    which needs a disk of the machine and not a network's.

    Args:
        path: file of the ledger; it is made where there is none.
        max_verdicts: number of verdicts that are kept, the newest ones.
        max_calls: most calls, ``None`` for any number. A call counts once, however often it is tried again.
        max_tokens: most tokens of prompts and replies, ``None`` for any number. Those of a call are known
            when it is over, so calls that run at the same time may go beyond.

    Raises:
        ConfigError: a limit is below 1.
        EnvironmentFailure: ``path`` is no ledger and cannot become one; later, it cannot be used any more.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        max_verdicts: int = 100_000,
        max_calls: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        limits = {"max_verdicts": max_verdicts, "max_calls": max_calls, "max_tokens": max_tokens}
        for name, value in limits.items():
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} has to be at least 1.")
        self.path, self.max_verdicts = path, max_verdicts
        self.max_calls, self.max_tokens = max_calls, max_tokens
        self._lock = threading.Lock()
        # A file is opened for each use: a connection must not be carried into a forked process.
        self._memory = None if path else sqlite3.connect(":memory:", check_same_thread=False)
        with self._database() as database:
            database.executescript(TABLES)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.max_verdicts, self.max_calls, self.max_tokens)

    @property
    def spent(self) -> Spent:
        """The cost so far, of all processes that share the ledger."""
        with self._database() as database:
            return Spent(*database.execute("SELECT calls, tokens FROM spent").fetchone())

    def begin_call(self) -> None:
        """Count a call that is about to be made.

        Raises:
            EnvironmentFailure: the budget is spent.
        """
        limits = (self.max_calls or sys.maxsize, self.max_tokens or sys.maxsize)
        with self._database() as database:
            count = "UPDATE spent SET calls = calls + 1 WHERE calls < ? AND tokens < ?"
            done = database.execute(count, limits)
        if not done.rowcount:
            calls, tokens = self.spent
            raise EnvironmentFailure(
                f"The judge's budget is spent: {calls} calls of max_calls={self.max_calls}, {tokens} tokens "
                f"of max_tokens={self.max_tokens}. Raise it, or name another path than {str(self.path)!r}."
            )

    def end_call(self, num_tokens: int | None) -> None:
        """Count the tokens of a call.

        Raises:
            EnvironmentFailure: they are unknown, and there is a budget of tokens.
        """
        if num_tokens is None and self.max_tokens is not None:
            raise EnvironmentFailure(
                f"The server counts no tokens, so max_tokens={self.max_tokens} cannot be kept: set max_calls."
            )
        with self._database() as database:
            database.execute("UPDATE spent SET tokens = tokens + ?", (num_tokens or 0,))

    def verdict(self, content: str) -> str | None:
        """The verdict on ``content``, as it was stored."""
        with self._database() as database:
            found = database.execute("SELECT verdict FROM verdicts WHERE content = ?", (content,)).fetchone()
        return None if found is None else str(found[0])

    def store(self, content: str, verdict: str) -> None:
        """Keep a verdict, and forget the oldest one that is too many."""
        with self._database() as database:
            replace = "INSERT OR REPLACE INTO verdicts VALUES (NULL, ?, ?)"
            added = database.execute(replace, (content, verdict))
            oldest = (added.lastrowid or 0) - self.max_verdicts
            database.execute("DELETE FROM verdicts WHERE number <= ?", (oldest,))

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """The database, for one transaction."""
        with self._lock, ExitStack() as ending:
            try:
                database = self._memory or ending.enter_context(
                    closing(sqlite3.connect(str(self.path), timeout=LOCK_SECONDS))
                )
                with database:
                    yield database
            except sqlite3.Error as error:
                raise EnvironmentFailure(
                    f"The judge's ledger {str(self.path)!r} cannot be used: {error}. Name a file of its "
                    "own, on a disk of this machine that has room."
                ) from error
