"""A rollout function whose program runs elsewhere, and fetches the tasks from a session server.

This module is imported in every rollout worker. It must stay light.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from actors.gateway.client import PolicyClient
from actors.gateway.entries import Part
from environments.base import Task
from environments.data.trajectory_json import plain_json
from environments.errors import AgentError, EnvironmentFailure
from environments.rewards.base import LATER, RewardOutput

SILENCE_CHECK_SECONDS = 5.0
FETCH_SECONDS = 60.0
WITHDRAW_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class RemoteProgram:
    """Offers a task to programs elsewhere, and returns the reward that the one that takes it hands in.

    Args:
        url: of the session server.
        key: lets rollouts offer tasks there.
        silent_seconds: a rollout fails whose program makes no call for so long.
        run: folder of the run, whose sessions go on where it is resumed; those of an empty one never do.
        attempt: number of the attempt at its rollout.
    """

    url: str = field(repr=False)  # another one does not make it another function
    key: str = field(repr=False)
    silent_seconds: float
    run: str = field(default="", repr=False)
    attempt: int = field(default=1, repr=False)

    def __call__(self, task: Task, client: PolicyClient) -> RewardOutput | list[float]:
        """Wait until the task has been played.

        Raises:
            AgentError: the program says that it has failed.
            EnvironmentFailure: there is none, it is silent, or the session server cannot be reached.
        """
        offer = json.dumps(
            {
                "id": client.session,
                "task": plain_json(task),
                "environment": client.remote_environment,
                "model": client.model,
                "run": self.run,
                "attempt": self.attempt,
            },
            allow_nan=False,
        )
        try:
            with self._connection(FETCH_SECONDS) as connection:
                connection.request("POST", "/offers", offer, self._headers())
                self._wait(connection.sock, client)
                result = json.loads(_answer(connection)[0])
        except BaseException:  # it has ended here; where this process dies, another one goes on
            with suppress(EnvironmentFailure), self._connection(WITHDRAW_SECONDS) as connection:
                connection.request("DELETE", "/offers", offer, self._headers())
                _answer(connection)
            raise
        if "failed" in result:
            raise EnvironmentFailure(result["failed"])
        if "error" in result:
            raise AgentError(result["error"])
        if "later" in result:
            return LATER
        if "rewards" in result:
            rewards: list[float] = result["rewards"]
            return rewards
        return RewardOutput(result["reward"], is_correct=result.get("is_correct"))

    def entries(self, session: str) -> list[bytes]:
        """Return the signed entries of the attempts before, whose actors answer no program from now on.

        Raises:
            EnvironmentFailure: the session server cannot be reached.
        """
        with self._connection(FETCH_SECONDS) as connection:
            path = f"/offers/{session}?attempt={self.attempt}"
            connection.request("GET", path, headers=self._headers())
            return list(Part.of(*_answer(connection)).entries)

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    @contextmanager
    def _connection(self, seconds: float) -> Iterator[HTTPConnection]:
        """A connection to the session server. Raises ``EnvironmentFailure`` where it breaks.

        It is that of Python's library: httpx in an event loop takes five times the CPU time, once a session.
        """
        connection = HTTPConnection(urlsplit(self.url).netloc, timeout=seconds)
        try:
            yield connection
        except (OSError, HTTPException) as error:
            raise EnvironmentFailure(
                f"The session server at {self.url} cannot be reached from this node ({error!r}): it listens "
                "at the node of the driver, in a process of its own."
            ) from error
        finally:
            connection.close()

    def _wait(self, offered: socket.socket, client: PolicyClient) -> None:
        """Wait for the answer to an offer, unless the program is silent for too long, or the rollout ends."""

        def end() -> None:
            with suppress(OSError):  # the server has ended it
                offered.shutdown(socket.SHUT_RDWR)

        answer = select.poll()
        answer.register(offered, select.POLLIN)
        with client.at_end(end):
            while not answer.poll(1000 * SILENCE_CHECK_SECONDS):
                if client.idle_seconds() > self.silent_seconds:
                    raise EnvironmentFailure(
                        f"The program has made no call for {self.silent_seconds:g} s, and has sent no reward."
                    )


def _answer(connection: HTTPConnection) -> tuple[bytes, dict[str, str]]:
    """The body and the headers of an answer. Raises ``HTTPException`` where it is an error."""
    response = connection.getresponse()
    body = response.read()
    if response.status >= 400:
        raise HTTPException(f"status {response.status}: {body.decode(errors='replace')[:500]}")
    return body, {name.lower(): value for name, value in response.getheaders()}
