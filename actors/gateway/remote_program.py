"""A rollout function whose program runs elsewhere, and fetches the tasks from a session server.

This module is imported in every rollout worker. It must stay light.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from actors.gateway.client import PolicyClient
from actors.gateway.entries import Part
from environments.base import Task
from environments.data.trajectory_json import plain_json
from environments.errors import AgentError, EnvironmentFailure
from environments.rewards.base import LATER, RewardOutput

if TYPE_CHECKING:
    from httpx import Response

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

    async def __call__(self, task: Task, client: PolicyClient) -> RewardOutput | list[float]:
        """Wait until the task has been played.

        Raises:
            AgentError: the program says that it has failed.
            EnvironmentFailure: there is none, it is silent, or the session server cannot be reached.
        """
        import httpx

        offer = {
            "id": client.session,
            "task": plain_json(task),
            "environment": client.remote_environment,
            "model": client.model,
            "run": self.run,
            "attempt": self.attempt,
        }
        asked: dict[str, Any] = {
            "url": f"{self.url}/offers",
            "json": offer,
            "headers": self._headers(),
        }
        try:
            async with httpx.AsyncClient(timeout=None, verify=False, trust_env=False) as http:
                offered = http.request("POST", **asked)
                try:
                    response = await self._watched(asyncio.ensure_future(offered), client)
                except BaseException:  # it has ended here; where this process dies, another one goes on
                    with suppress(httpx.HTTPError):
                        await http.request("DELETE", **asked, timeout=WITHDRAW_SECONDS)
                    raise
                result = response.raise_for_status().json()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if "failed" in result:
            raise EnvironmentFailure(result["failed"])
        if "error" in result:
            raise AgentError(result["error"])
        if "later" in result:
            return LATER
        if "rewards" in result:
            return result["rewards"]
        return RewardOutput(result["reward"], is_correct=result.get("is_correct"))

    def entries(self, session: str) -> list[bytes]:
        """Return the signed entries of the attempts before, whose actors answer no program from now on.

        Raises:
            EnvironmentFailure: the session server cannot be reached.
        """
        import httpx

        try:
            response = httpx.get(
                f"{self.url}/offers/{session}",
                params={"attempt": self.attempt},
                headers=self._headers(),
                timeout=FETCH_SECONDS,
                verify=False,
                trust_env=False,
            ).raise_for_status()
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return list(Part.of(response.content, response.headers).entries)

    def _headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def _unreachable(self, error: Exception) -> EnvironmentFailure:
        return EnvironmentFailure(
            f"The session server at {self.url} cannot be reached from this node ({error!r}): it listens "
            "at the node of the driver, in a process of its own."
        )

    async def _watched(self, played: asyncio.Future[Response], client: PolicyClient) -> Response:
        """Wait for the answer to an offer, unless the program is silent for too long."""
        try:
            while not (await asyncio.wait({played}, timeout=SILENCE_CHECK_SECONDS))[0]:
                if client.idle_seconds() > self.silent_seconds:
                    raise EnvironmentFailure(
                        f"The program has made no call for {self.silent_seconds:g} s, and has sent no reward."
                    )
            return played.result()
        finally:
            played.cancel()
