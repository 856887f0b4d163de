"""Agents that answer clients: a rollout service of their own, behind one actor that is asked."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Any

import ray

from actors.ray_tools.background import in_background
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.service import RolloutService
from actors.settings import FleetConfig
from environments.errors import EnvironmentFailure, SamplerError
from environments.types import PlayedStep, Trajectory
from policies.openai.protocol import OpenAIError
from policies.openai.responses import MemoryStore
from policies.sampler import Sampler, SamplingParams

Part = PlayedStep | Trajectory
MAX_WAITING_PER_ACTOR = 16
"""Messages that may be in play or wait, for each rollout actor: more are sent away."""


@ray.remote(num_cpus=0, max_concurrency=100_000)
class AgentPool:
    """Plays an episode of a trained agent for each message. The policy server's replicas ask it.

    Args:
        pair: the agent and its environment.
        task_from_message: the task that a message is (``Workload.task_from_message``).
        make_sampler: makes the sampler, in the sampling actor's process.
        limits: of one episode.
        fleet: settings of the rollout actors.
    """

    def __init__(
        self,
        pair: Pair,
        task_from_message: Callable[[str], dict[str, Any]],
        make_sampler: Callable[[], Sampler],
        limits: RolloutLimits,
        fleet: FleetConfig,
    ) -> None:
        self._task_from_message, self._num_actors = task_from_message, fleet.num_actors
        own_handle = ray.get_runtime_context().current_actor
        self._service = RolloutService(pair, make_sampler, limits, fleet, listener=own_handle)
        self._numbers = itertools.count()
        self._responses = MemoryStore()
        self._episodes: dict[str, asyncio.Queue[Part | Exception]] = {}
        """What is heard of the episodes that clients wait for."""

    async def open(self) -> None:
        """Start the rollout actors, and connect to the policy server. Raises ``SamplerError`` without one."""
        await asyncio.to_thread(self._service.start, self._num_actors)
        loop = asyncio.get_running_loop()
        self._collecting = in_background(lambda: self._collect(loop), "answers of agents")

    async def play(self, message: str, params: SamplingParams) -> AsyncGenerator[Part, None]:
        """The episode that a client's message asks for: its steps as they end, and the whole at last.

        A fault in it is in the trajectory. An episode that nobody waits for any more is cancelled.

        Raises:
            OpenAIError: as many messages wait as may.
            EnvironmentFailure: the workload makes no task of the message.
            SamplerError: the rollout service has failed.
        """
        most = MAX_WAITING_PER_ACTOR * self._num_actors
        if len(self._episodes) >= most:
            raise OpenAIError(
                429, f"{most} messages are in play or wait already: try again later.", type="rate_limit_error"
            )
        self._check_alive()
        number = f"{next(self._numbers):08d}"
        request = RolloutRequest(
            rollout_id=f"{number}/0000",
            group_id=number,
            task=self._task(message),
            params=params,
            seed=params.seed,
        )
        heard = self._episodes[request.rollout_id] = asyncio.Queue()
        num_steps, part = 0, None
        try:
            await asyncio.to_thread(self._service.submit, [request])
            while not isinstance(part, Trajectory):
                part = await heard.get()
                if isinstance(part, Exception):
                    raise part
                if isinstance(part, PlayedStep) and part.index < num_steps:
                    continue  # an episode that was resumed plays its first steps again
                num_steps += 1
                yield part
        finally:
            del self._episodes[request.rollout_id]
            if not isinstance(part, Trajectory):
                self._service.cancel(request.rollout_id)

    async def hear(self, rollout_id: str, step: PlayedStep) -> None:
        """Take a step that a rollout actor tells of."""
        self._tell(rollout_id, step)

    async def keep(self, response: dict[str, Any]) -> None:
        """Keep a response for clients that ask for it again: see ``ResponseStore``, as for the next two."""
        await self._responses.keep(response)

    async def kept(self, response_id: str) -> dict[str, Any] | None:
        return await self._responses.kept(response_id)

    async def forget(self, response_id: str) -> bool:
        return await self._responses.forget(response_id)

    def _task(self, message: str) -> dict[str, Any]:
        try:
            return self._task_from_message(message)
        except Exception as error:
            raise EnvironmentFailure(
                f"The workload's task_from_message failed: {type(error).__name__}: {error}"
            ) from error

    def _check_alive(self) -> None:
        if self._collecting.done():
            raise SamplerError(f"The agents have failed: {self._collecting.exception()!r}")

    # -- in a thread of its own ----------------------------------------------------------------------

    def _collect(self, loop: asyncio.AbstractEventLoop) -> None:
        """consumes trajectories · waits for the stream · produces the answers that are waited for"""
        try:
            while True:
                for trajectory in self._service.stream.trajectories(1):
                    loop.call_soon_threadsafe(self._tell, trajectory.rollout_id, trajectory)
        except Exception as error:
            loop.call_soon_threadsafe(self._fail, error)
            raise

    def _tell(self, rollout_id: str, part: Part | Exception) -> None:
        if rollout_id in self._episodes:
            self._episodes[rollout_id].put_nowait(part)

    def _fail(self, error: Exception) -> None:
        for rollout_id in self._episodes:
            self._tell(rollout_id, SamplerError(f"The agents have failed: {error!r}"))
