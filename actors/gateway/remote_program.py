"""A rollout function whose program runs elsewhere, and fetches the tasks from a session server.

This module is imported in every rollout worker. It must stay light.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.gateway.client import PolicyClient
from environments.base import Task
from environments.data.trajectory_json import plain_json
from environments.errors import AgentError
from environments.rewards.base import RewardOutput


@dataclass(frozen=True, slots=True)
class RemoteProgram:
    """Offers a task to programs elsewhere, and returns the reward that the one that takes it hands in.

    Args:
        url: of the session server.
        key: lets rollouts offer tasks there.
    """

    url: str
    key: str = field(repr=False)

    async def __call__(self, task: Task, client: PolicyClient) -> RewardOutput | list[float]:
        """Wait until the task has been played. Raises ``AgentError`` where that has failed."""
        import httpx

        offer = {"task": plain_json(task), "environment": client.remote_environment, "model": client.model}
        authorization = {"authorization": f"Bearer {self.key}"}
        try:
            async with httpx.AsyncClient(timeout=None, verify=False, trust_env=False) as http:
                response = await http.post(f"{self.url}/offers", json=offer, headers=authorization)
        except httpx.HTTPError as error:
            raise AgentError(
                f"The session server at {self.url} cannot be reached from this node ({error!r}): it listens "
                "in the process that has started the training."
            ) from error
        result = response.raise_for_status().json()
        if "error" in result:
            raise AgentError(result["error"])
        if "rewards" in result:
            rewards: list[float] = result["rewards"]
            return rewards
        return RewardOutput(result["reward"], is_correct=result.get("is_correct"))
