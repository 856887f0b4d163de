"""Agents that answer clients: a rollout service of their own, behind one actor that is asked."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
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
from policies.openai.responses import MAX_STORED, MemoryStore
from policies.sampler import Sampler, SamplingParams

Part = PlayedStep | Trajectory
MAX_WAITING_PER_ACTOR = 16
"""Messages that may be in play or wait, for each rollout actor: more are sent away."""


class KeptTasks:
    """The newest tasks of A2A clients, in the SDK's own bytes. Each belongs to the key that it came with."""

    def __init__(self, most: int = MAX_STORED) -> None:
        self._most = most
        self._tasks: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def keep(self, owner: str, task_id: str, task: bytes) -> None:
        """Keep a task, new or changed. The one that has not changed for the longest time may have to go."""
        self._tasks[owner, task_id] = task
        self._tasks.move_to_end((owner, task_id))
        while len(self._tasks) > self._most:
            self._tasks.popitem(last=False)

    def kept(self, owner: str, task_id: str) -> bytes | None:
        """The task, if it is kept and belongs to ``owner``."""
        return self._tasks.get((owner, task_id))

    def all_kept(self, owner: str) -> list[bytes]:
        """The tasks of ``owner``."""
        return [task for (of, _), task in self._tasks.items() if of == owner]

    def forget(self, owner: str, task_id: str) -> None:
        """Keep the task no more."""
        self._tasks.pop((owner, task_id), None)


@ray.remote(num_cpus=0, max_concurrency=100_000)
class AgentPool:
    """Plays an episode of a trained agent for each message. The policy server's replicas ask it.

    Args:
        pair: the agent and its environment.
        task_from_message: the task that a message is (``Workload.task_from_message``).
        make_sampler: makes the sampler, in the sampling actor's process.
        limits: of one episode.
        fleet: settings of the rollout actors.
        description: what the agent does, for clients.
    """

    def __init__(
        self,
        pair: Pair,
        task_from_message: Callable[[str], dict[str, Any]],
        make_sampler: Callable[[], Sampler],
        limits: RolloutLimits,
        fleet: FleetConfig,
        description: str = "",
    ) -> None:
        self._description = description
        self._task_from_message, self._num_actors = task_from_message, fleet.num_actors
        own_handle = ray.get_runtime_context().current_actor
        self._service = RolloutService(pair, make_sampler, limits, fleet, listener=own_handle)
        self._numbers = itertools.count()
        self._responses = MemoryStore()
        self._tasks = KeptTasks()
        self._episodes: dict[str, asyncio.Queue[Part | Exception]] = {}
        """What is heard of the episodes that clients wait for."""
        self._rollouts: dict[str, str] = {}
        """The rollout of each message that has a key and is in play or waits."""

    async def open(self) -> None:
        """Start the rollout actors, and connect to the policy server. Raises ``SamplerError`` without one."""
        await asyncio.to_thread(self._service.start, self._num_actors)
        loop = asyncio.get_running_loop()
        self._collecting = in_background(lambda: self._collect(loop), "answers of agents")

    async def description(self) -> str:
        """What the agent does."""
        return self._description

    async def play(
        self, message: str, params: SamplingParams, key: str | None = None
    ) -> AsyncGenerator[Part, None]:
        """The episode that a client's message asks for: its steps as they end, and the whole at last.

        A fault in it is in the trajectory. An episode that nobody waits for any more is cancelled.

        By ``key`` the message can be withdrawn.

        Raises:
            OpenAIError: as many messages wait as may, or the message was withdrawn.
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
        if key is not None:
            self._rollouts[key] = request.rollout_id
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
            if key is not None:
                del self._rollouts[key]
            if not isinstance(part, Trajectory):
                self._service.cancel(request.rollout_id)

    async def withdraw(self, key: str) -> bool:
        """End the episode of a message, or take it back if it waits; return whether it had not ended."""
        if key not in self._rollouts:
            return False
        error = OpenAIError(409, "The message was withdrawn.", code="withdrawn")
        self._tell(self._rollouts[key], error)
        return True

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

    async def keep_task(self, owner: str, task_id: str, task: bytes) -> None:
        """Keep a task of A2A: see ``KeptTasks``, as for the next three."""
        self._tasks.keep(owner, task_id, task)

    async def kept_task(self, owner: str, task_id: str) -> bytes | None:
        return self._tasks.kept(owner, task_id)

    async def kept_tasks(self, owner: str) -> list[bytes]:
        return self._tasks.all_kept(owner)

    async def forget_task(self, owner: str, task_id: str) -> None:
        self._tasks.forget(owner, task_id)

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
