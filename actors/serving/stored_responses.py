"""Responses of the policy that clients fetch again or go on from; all replicas of a program share them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayError

from actors.served_agents.store import PerKeyLRU
from policies.model_api.errors import UnavailableError

Json = dict[str, Any]

MAX_STORED_BYTES = 2**26
"""Bytes of the responses that are kept for an API key, with the conversations before them."""


class StoredResponses:
    """Responses of every key by their ids, each with the conversation that ends with it."""

    def __init__(self) -> None:
        # A conversation that goes on is kept whole with each of its answers, so that any of them may go.
        self._kept: PerKeyLRU[bytes] = PerKeyLRU(size=len, most_size=MAX_STORED_BYTES)

    def keep(self, owner: str, response: Json, conversation: Sequence[Json]) -> None:
        """Keep ``response`` by its id, and the items of the conversation up to its end."""
        self._kept.keep(owner, response["id"], json.dumps([response, conversation]).encode())

    def kept(self, owner: str, response_id: str) -> tuple[Json, list[Json]] | None:
        """The response of this id with its conversation, if it is kept and belongs to ``owner``."""
        found = self._kept.kept(owner, response_id)
        return None if found is None else tuple(json.loads(found))

    def forget(self, owner: str, response_id: str) -> bool:
        """Forget a response; return whether it was kept. Those that have gone on from it stay."""
        return self._kept.forget(owner, response_id)


# One call at a time: Ray would start a thread for each more of them, as the methods are not asynchronous.
ResponsesActor = ray.remote(num_cpus=0, max_restarts=-1)(StoredResponses)


class SharedResponses:
    """A replica's way to the responses.

    Args:
        directory: the ``SamplerDirectory``, which has the actor with them; without one they are this
            replica's own.
    """

    def __init__(self, directory: ray.actor.ActorHandle | None) -> None:
        self._directory: Any = directory
        self._actor: Any = None  # most servers never need it
        self._own = StoredResponses()

    async def keep(self, owner: str, response: Json, conversation: Sequence[Json]) -> None:
        """``StoredResponses.keep``. Raises ``UnavailableError``, as the others do."""
        await self._call("keep", owner, response, conversation)

    async def kept(self, owner: str, response_id: str) -> tuple[Json, list[Json]] | None:
        """``StoredResponses.kept``."""
        return await self._call("kept", owner, response_id)

    async def forget(self, owner: str, response_id: str) -> bool:
        """``StoredResponses.forget``."""
        return bool(await self._call("forget", owner, response_id))

    async def _call(self, method: str, *arguments: object) -> Any:
        if self._directory is None:
            return getattr(self._own, method)(*arguments)
        try:
            if self._actor is None:
                self._actor = await self._directory.shared.remote("responses", ResponsesActor)
            return await getattr(self._actor, method).remote(*arguments)
        except RayError as error:
            raise UnavailableError(
                f"The responses that are kept cannot be reached ({type(error).__name__}): try again, or send "
                "store=false.",
                retry_after=1,
            ) from error
