"""Agents that answer clients: a rollout service of their own, behind one actor that is asked."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from typing import Any

import ray

from actors.ray_tools.background import in_background
from actors.rollouts.rollout import FollowUp, Pair, RolloutLimits, RolloutRequest
from actors.rollouts.scaling import PoolSize
from actors.rollouts.service import RolloutService
from actors.served_agents.conversations import Conversation, Conversations, check_single, lost
from actors.served_agents.idempotency import IdempotentAnswers, repeated
from actors.served_agents.store import PerKeyLRU
from actors.settings import MANY_CALLS, AgentsConfig, FleetConfig
from environments.errors import EnvironmentFailure, SamplerError
from environments.types import StepEvent, Trajectory
from policies.agent_api.context import ReplayedAnswer, RequestContext, TokenUsage
from policies.agent_api.history import with_message
from policies.model_api.errors import ConflictError, RateLimitError, UnavailableError
from policies.sampler import Sampler, SamplingParams

Part = StepEvent | Trajectory | TokenUsage
Event = StepEvent | Trajectory | Exception
"""What happens in an episode, in its order."""
SCALING_SECONDS = 1.0
"""Seconds between two autoscaling decisions."""
STARTING_SECONDS = 2
"""After which a client may ask again whether the agents have started."""
MAX_WAITING_PER_ACTOR = 16
"""Messages that may be in play or wait, for each rollout actor: more are sent away."""


@ray.remote(num_cpus=0, max_concurrency=MANY_CALLS)
class AgentPool:
    """Plays an episode of a trained agent for each message. The policy server's replicas ask it.

    A message that goes on with a conversation is played by the agent and the environment of the message
    before, where ``pair.env_class`` takes follow-ups.

    Args:
        pair: the agent and its environment.
        task_from_message: the task that a first message is (``Workload.task_from_message``).
        make_sampler: makes the sampler, in the sampling actor's process.
        limits: of one episode.
        fleet: settings of the rollout actors.
        description: what the agent does, for clients.
        agents: settings of conversations.
    """

    def __init__(
        self,
        pair: Pair,
        task_from_message: Callable[[str], dict[str, Any]],
        make_sampler: Callable[[], Sampler],
        limits: RolloutLimits,
        fleet: FleetConfig,
        description: str = "",
        agents: AgentsConfig = AgentsConfig(),  # noqa: B008  # nobody changes it
    ) -> None:
        self._description, self._pair, self._keep_seconds = description, pair, agents.keep_seconds
        self._conversations = Conversations(waits=agents.second_message == "wait")
        self._recordings = IdempotentAnswers()
        self._task_from_message, self._num_actors = task_from_message, fleet.num_actors
        self._smallest, self._largest = fleet.bounds
        self._following: asyncio.Task[None] | None = None
        own_handle = ray.get_runtime_context().current_actor
        self._service = RolloutService(pair, make_sampler, limits, fleet, listener=own_handle)
        # Not in the client's own call: Ray cancels with it the calls that it has made. In one thread, so that
        # no cancellation comes before its request.
        self._sending = ThreadPoolExecutor(1, "requests to the fleet")
        self._numbers = itertools.count()
        self._responses: PerKeyLRU[dict[str, Any]] = PerKeyLRU()
        self._tasks: PerKeyLRU[bytes] = PerKeyLRU()
        """Tasks of A2A clients, in the SDK's own bytes."""
        self._episodes: dict[str, asyncio.Queue[Event]] = {}
        """The events of the episodes that clients wait for."""
        self._rollouts: dict[tuple[str, str], str] = {}
        """The rollout of each message that is in play or waits, by its owner and its key to withdraw it."""
        self._collecting: Future[None] | None = None  # until it is open

    async def open(self) -> None:
        """Start the rollout actors, and connect to the policy server. Raises ``SamplerError`` without one."""
        await asyncio.to_thread(self._service.start, self._num_actors)
        loop = asyncio.get_running_loop()
        self._collecting = in_background(lambda: self._collect(loop), "answers of agents")
        if self._smallest < self._largest:
            self._following = asyncio.create_task(self._follow_conversations())

    async def check(self) -> None:
        """Raise ``SamplerError`` if no message can be answered any more, ``UnavailableError`` if not yet."""
        self._check_alive()

    async def description(self) -> str:
        """What the agent does."""
        return self._description

    async def takes_follow_ups(self) -> bool:
        """Whether a message can go on with a conversation."""
        return self._pair.env_class.takes_follow_ups()

    async def play(
        self,
        message: str,
        params: SamplingParams,
        context: RequestContext = RequestContext(),  # noqa: B008  # it is frozen
    ) -> AsyncGenerator[Part | ReplayedAnswer, None]:
        """The episode that a client's message asks for: its steps as they end, and the whole at last, each
        behind the tokens that it took.

        A fault in it is in the trajectory. An episode that nobody waits for any more is cancelled, unless it
        has an idempotency key: then it is there for who asks again.

        Raises:
            RequestError: as many messages wait as may, the message was withdrawn, its conversation cannot go
                on, or its idempotency key came with another body.
            EnvironmentFailure: the workload makes no task of the message.
            SamplerError: the rollout service has failed.
        """
        if context.idempotency_key is None:
            parts = self._play(message, params, context)
        elif (recording := self._recordings.find(context)) is not None:
            yield repeated(recording)
            parts = recording.play()
        else:
            parts = self._recordings.start(context, self._play(message, params, context)).play()
        async with aclosing(parts):
            async for part in parts:
                yield part

    async def _play(
        self, message: str, params: SamplingParams, context: RequestContext
    ) -> AsyncGenerator[Part, None]:
        if not self._pair.env_class.takes_follow_ups():
            check_single(context, self._pair.env_class.__name__)
        place = self._conversations.find(context)
        with self._listening(context) as (rollout_id, events):
            async with place.conversation.turn(events):
                conversation, after = place.conversation, place.rollout_id or place.conversation.newest
                if after is None and context.has_earlier_turns:
                    raise lost("the server has no message of this session.")
                if after != conversation.newest:  # it has gone on since: another one goes on from there
                    conversation = Conversation(waits=True)
                request = self._request(rollout_id, message, params, context, after)
                async with aclosing(self._episode(request, events)) as parts:
                    async for part in parts:
                        if isinstance(part, Trajectory) and part.has_answer:
                            said = part.steps[-1].model_response
                            history = with_message(context.history, "assistant", said)
                            self._conversations.advance(conversation, rollout_id, context, history)
                        yield part

    @contextmanager
    def _listening(self, context: RequestContext) -> Iterator[tuple[str, asyncio.Queue[Event]]]:
        """A new rollout's id, and its events while the block lasts."""
        most = MAX_WAITING_PER_ACTOR * self._largest
        if len(self._episodes) >= most:
            raise RateLimitError(f"{most} messages are in play or wait already: try again later.")
        self._check_alive()
        rollout_id = f"{next(self._numbers):08d}/0000"
        events = self._episodes[rollout_id] = asyncio.Queue()
        if context.withdraw_key is not None:
            self._rollouts[context.owner, context.withdraw_key] = rollout_id
        try:
            yield rollout_id, events
        finally:
            del self._episodes[rollout_id]
            if context.withdraw_key is not None:
                del self._rollouts[context.owner, context.withdraw_key]

    def _request(
        self,
        rollout_id: str,
        message: str,
        params: SamplingParams,
        context: RequestContext,
        after: str | None,
    ) -> RolloutRequest:
        is_kept = self._pair.env_class.takes_follow_ups() and (
            context.can_be_followed or context.keeps_history or context.session is not None
        )
        return RolloutRequest(
            rollout_id=rollout_id,
            group_id=rollout_id.partition("/")[0],
            task=self._task(message) if after is None else {"message": message},
            params=params.replace(max_tokens=None),
            max_response_tokens=params.max_tokens,
            seed=params.seed,
            follow_up=None if after is None else FollowUp(after=after, message=message),
            keep_seconds=self._keep_seconds if is_kept else None,
        )

    async def _episode(
        self, request: RolloutRequest, events: asyncio.Queue[Event]
    ) -> AsyncGenerator[Part, None]:
        steps: list[StepEvent] = []
        num_used, part = 0, None
        try:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._sending, self._service.submit, [request])
            while not isinstance(part, Trajectory):
                part = await events.get()
                if isinstance(part, Exception):
                    raise part
                if isinstance(part, StepEvent):
                    if part.index < len(steps) and steps[part.index].text == part.text:
                        continue  # an episode that was resumed plays its first steps again
                    steps = [*steps[: part.index], part]  # one that was begun anew has others in their place
                    num_new = part.num_tokens
                else:
                    num_new = sum(each.num_tokens for each in part.completions) - num_used
                num_used += num_new
                yield TokenUsage(num_new)
                yield part
        finally:
            if not isinstance(part, Trajectory):
                self._sending.submit(self._service.cancel, request.rollout_id)

    async def withdraw(self, owner: str, key: str) -> bool:
        """End the episode of a message, or take it back if it waits; return whether it had not ended."""
        if not await self.is_under_way(owner, key):
            return False
        error = ConflictError("The message was withdrawn.", code="withdrawn")
        self._add_event(self._rollouts[owner, key], error)
        return True

    async def is_under_way(self, owner: str, key: str) -> bool:
        """Whether the message that can be withdrawn by ``key`` waits or is played."""
        return (owner, key) in self._rollouts

    async def on_step(self, rollout_id: str, step: StepEvent) -> None:
        """Pass a step of an episode on to whoever waits for that."""
        self._add_event(rollout_id, step)

    async def on_conversation_lost(self, rollout_id: str, why: str) -> None:
        """End a message that the fleet cannot play: what it goes on with is gone."""
        self._add_event(rollout_id, lost(why))

    async def end_session(self, owner: str, session: str) -> None:
        """Close the environment of a session, whose name is free then; ``NotFoundError`` without one."""
        if (rollout_id := self._conversations.end_session(owner, session)) is not None:
            self._service.forget(rollout_id)

    async def end(self) -> None:
        """Close the environments that wait for a message. Nothing can be played afterwards."""
        await asyncio.to_thread(self._service.end_idle)

    async def keep(self, owner: str, response: dict[str, Any]) -> None:
        """Keep a response for clients that ask for it again: see ``ResponseStore``, as for the next two."""
        if not self._recordings.is_forgotten(owner, response["id"]):
            self._responses.keep(owner, response["id"], response)

    async def kept(self, owner: str, response_id: str) -> dict[str, Any] | None:
        return self._responses.kept(owner, response_id)

    async def forget(self, owner: str, response_id: str) -> bool:
        """Also closes the environment that waits for a message after this response."""
        if (rollout_id := self._conversations.end_response(owner, response_id)) is not None:
            self._service.forget(rollout_id)
        if was_kept := self._responses.forget(owner, response_id):
            self._recordings.forget_answer(owner, response_id)
        return was_kept

    async def keep_task(self, owner: str, task_id: str, task: bytes) -> None:
        """Keep a task of A2A, new or changed. This and the next four are for ``PoolTaskStore``."""
        self._tasks.keep(owner, task_id, task)

    async def kept_task(self, owner: str, task_id: str) -> bytes | None:
        return self._tasks.kept(owner, task_id)

    async def kept_tasks(self, owner: str) -> list[bytes]:
        return self._tasks.all_kept(owner)

    async def replace_task(self, owner: str, task_id: str, old: bytes, new: bytes) -> bool:
        return self._tasks.replace(owner, task_id, old, new)

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
        if self._collecting is None:
            raise UnavailableError(
                "The agents are still starting: ask again in some seconds.",
                retry_after=STARTING_SECONDS,
            )
        for work in (self._collecting, self._following):
            if work is not None and work.done():
                raise SamplerError(f"The agents have failed: {work.exception()!r}")

    async def _follow_conversations(self) -> None:
        """consumes the fleet's counts · waits for the clock · produces another number of rollout actors"""
        size = PoolSize(self._smallest, self._largest)
        while True:
            status = await asyncio.to_thread(self._service.fleet_status)
            number = size.decide(status, time.monotonic())
            if number != status.num_actors:
                await asyncio.to_thread(self._service.resize, number)
            await asyncio.sleep(SCALING_SECONDS)

    # -- in a thread of its own ----------------------------------------------------------------------

    def _collect(self, loop: asyncio.AbstractEventLoop) -> None:
        """consumes trajectories · waits for the stream · produces the answers that are waited for"""
        try:
            while True:
                for trajectory in self._service.stream.trajectories(1):
                    loop.call_soon_threadsafe(self._add_event, trajectory.rollout_id, trajectory)
        except Exception as error:
            loop.call_soon_threadsafe(self._fail, error)
            raise

    def _add_event(self, rollout_id: str, event: Event) -> None:
        if rollout_id in self._episodes:
            self._episodes[rollout_id].put_nowait(event)

    def _fail(self, error: Exception) -> None:
        for rollout_id in self._episodes:
            self._add_event(rollout_id, SamplerError(f"The agents have failed: {error!r}"))
