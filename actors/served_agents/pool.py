"""Pool of an agent: an actor that answers its clients by a rollout service of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.rollouts.fleet_report import NoActorWarning
from actors.rollouts.rollout import FollowUp, Pair, RolloutLimits, RolloutRequest
from actors.rollouts.scaling import PoolSize
from actors.rollouts.service import AsyncRolloutService
from actors.served_agents.conversations import Conversation, Conversations, check_single, lost
from actors.served_agents.idempotency import IdempotentAnswers, Part
from actors.served_agents.messages import Events, Messages
from actors.served_agents.recorder import AnswerRecorder
from actors.served_agents.store import PerKeyLRU
from actors.settings import MANY_CALLS, AgentsConfig, FleetConfig
from environments.data.canary import conversation_name
from environments.errors import EnvironmentFailure, SamplerError
from environments.types import StepEvent, Trajectory
from policies.agent_api.context import (
    AgentProfile,
    RecordingNotice,
    ReplayedAnswer,
    RequestContext,
    TokenUsage,
)
from policies.agent_api.history import with_message
from policies.model_api.errors import UnavailableError
from policies.sampler import Sampler, SamplingParams

SCALING_SECONDS = 1.0
"""Seconds between two autoscaling decisions."""
STARTING_SECONDS = 2
"""Seconds after which a client may try again while the agents start."""


@dataclass(slots=True)
class Responses:
    """Responses of every key, and what ends with them: the pool's side of a ``ResponseStore``.

    Args:
        conversations: of which a response is a place.
        answers: those that are repeated by their idempotency keys.
        messages: whose answers responses are.
        service: has the environments that wait for a message after a rollout.
    """

    conversations: Conversations
    answers: IdempotentAnswers
    messages: Messages
    service: AsyncRolloutService
    _responses: PerKeyLRU[dict[str, Any]] = field(default_factory=PerKeyLRU)

    def keep(self, owner: str, response: dict[str, Any]) -> None:
        """Keep a response, unless its client has deleted it."""
        if not self.answers.is_forgotten(owner, response["id"]):
            self._responses.keep(owner, response["id"], response)

    def kept(self, owner: str, response_id: str) -> dict[str, Any] | None:
        """The response of this id, if it is kept and belongs to ``owner``."""
        return self._responses.kept(owner, response_id)

    def forget(self, owner: str, response_id: str) -> bool:
        """Forget a response, and close the environment that waits for a message after it."""
        self._close_after(self.conversations.end_response(owner, response_id))
        if was_kept := self._responses.forget(owner, response_id):
            self.answers.forget_answer(owner, response_id)
        return was_kept

    def withdraw(self, owner: str, response_id: str) -> bool:
        """End the message that this is to be the response of; return whether it had not ended."""
        return self.messages.withdraw(owner, response_id)

    def end_session(self, owner: str, session: str) -> None:
        """Close the environment of a session, whose name is free then. Raises as ``Conversations`` does."""
        self._close_after(self.conversations.end_session(owner, session))

    def _close_after(self, rollout_id: str | None) -> None:
        if rollout_id is not None:
            self.service.forget(rollout_id)


@ray.remote(num_cpus=0, max_concurrency=MANY_CALLS)
class AgentPool:
    """Plays an episode of a trained agent for each message. The policy server's replicas call it.

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
        recorder: keeps the answers with their tokens, where they are recorded.
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
        recorder: AnswerRecorder | None = None,
    ) -> None:
        self._pair, self._description, self._keep_seconds = pair, description, agents.keep_seconds
        self._task_from_message, self._fleet, self._recorder = task_from_message, fleet, recorder
        own_handle = ray.get_runtime_context().current_actor
        self._service = AsyncRolloutService(pair, make_sampler, limits, fleet, own_handle)
        self._conversations = Conversations(
            waits=agents.second_message == "wait", replays=agents.unknown_history == "replay"
        )
        self._answers = IdempotentAnswers()
        self._messages = Messages(fleet.bounds[1])
        responses = Responses(self._conversations, self._answers, self._messages, self._service)
        tasks: PerKeyLRU[bytes] = PerKeyLRU()  # of A2A, in the SDK's own bytes
        self._parts = {"messages": self._messages, "responses": responses, "tasks": tasks}
        self._fleet_loop: asyncio.Task[None] | None = None  # none until it is open

    async def open(self) -> None:
        """Start the rollout actors, and connect to the policy server. Raises ``SamplerError`` without one."""
        await self._service.start(self._fleet.num_actors)
        self._fleet_loop = asyncio.create_task(self._follow_fleet(PoolSize(*self._fleet.bounds)))

    async def check(self) -> None:
        """Raise ``SamplerError`` if no message can be answered any more, ``UnavailableError`` if not yet."""
        if self._fleet_loop is None:
            raise UnavailableError(
                "The agents are still starting: ask again in some seconds.", retry_after=STARTING_SECONDS
            )
        if self._fleet_loop.done():
            raise SamplerError(f"The agents have failed: {self._fleet_loop.exception()!r}")

    async def profile(self) -> AgentProfile:
        """Return what clients may know of the agent."""
        return AgentProfile(self._description, self._pair.env_class.takes_follow_ups())

    async def call(self, part: str, method: str, *arguments: Any) -> Any:
        """Call a method of ``Messages`` ("messages"), ``Responses`` ("responses") or the "tasks" of A2A."""
        return getattr(self._parts[part], method)(*arguments)

    async def play(
        self,
        message: str,
        params: SamplingParams,
        context: RequestContext = RequestContext(),  # noqa: B008  # it is frozen
    ) -> AsyncGenerator[Part | ReplayedAnswer, None]:
        """Yield the episode of a client's message: its steps as they end, and the whole at last, each behind
        the tokens that it took.

        A fault in it is in the trajectory. An episode that nobody waits for any more is cancelled, unless it
        has an idempotency key: then it is there for the next request with that key.

        Raises:
            RequestError: as many messages wait as may, the message was withdrawn, its conversation cannot go
                on, or its idempotency key came with another body.
            EnvironmentFailure: the workload makes no task of the message.
            SamplerError: the rollout service has failed.
        """
        episode = self._play(message, params, context)
        has_key = context.idempotency is not None
        parts = self._answers.play(context, episode) if has_key else episode
        async with aclosing(parts):
            async for part in parts:
                yield part

    async def _play(
        self, message: str, params: SamplingParams, context: RequestContext
    ) -> AsyncGenerator[Part, None]:
        if not self._pair.env_class.takes_follow_ups():
            check_single(context, self._pair.env_class.__name__)
        place = self._conversations.find(context)
        await self.check()
        with self._messages.begin(context) as (rollout_id, events):
            async with place.conversation.turn(events):
                conversation, after = place.conversation, place.rollout_id or place.conversation.newest
                if after is None and context.has_earlier_turns and not context.exchanges:
                    raise lost("the server has no message of this session.")
                if after is None:
                    first = context.exchanges[0][0] if context.exchanges else message
                    conversation.name = conversation_name([{"role": "user", "content": first}])
                elif after != conversation.newest:  # it has gone on since: another one goes on from there
                    conversation = Conversation(waits=True, name=conversation.name)
                recorder, recorded = self._recorder, None
                if recorder is not None:
                    policy = recorder.policy(context.owner, conversation.name)
                    params = params.replace(policy=policy)
                    recorded = await recorder.begin(context, conversation.name, policy, after)
                    yield RecordingNotice(recorded is not None)
                request = self._request(rollout_id, message, params, context, after)
                async with aclosing(self._episode(request, events)) as parts:
                    async for part in parts:
                        if isinstance(part, Trajectory) and part.has_answer:
                            answer = part.steps[-1].model_response
                            history = with_message(context.history, "assistant", answer)
                            self._conversations.advance(conversation, rollout_id, context, history)
                            if recorder and recorded and not await recorder.write(recorded, part):
                                yield RecordingNotice(False)
                        yield part

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
        exchanges = context.exchanges if after is None else ()
        goes_on = after is not None or bool(exchanges)
        first = exchanges[0][0] if exchanges else message
        return RolloutRequest(
            rollout_id=rollout_id,
            group_id=rollout_id.partition("/")[0],
            task=self._task(first) if after is None else {"message": message},
            params=params.replace(max_tokens=None),
            max_response_tokens=params.max_tokens,
            seed=params.seed,
            follow_up=FollowUp(after=after, message=message, exchanges=exchanges) if goes_on else None,
            keep_seconds=self._keep_seconds if is_kept else None,
        )

    async def _episode(self, request: RolloutRequest, events: Events) -> AsyncGenerator[Part, None]:
        steps: list[StepEvent] = []
        num_used, part = 0, None
        try:
            await self._service.submit(request)
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
                self._service.cancel(request.rollout_id)

    async def put(self, trajectories: Sequence[Trajectory]) -> None:
        """Take episodes that have ended; the fleet calls this."""
        for each in trajectories:
            self._messages.add(each.rollout_id, each)

    async def on_step(self, rollout_id: str, step: StepEvent) -> None:
        """Take a step of a rollout as soon as it has ended; a rollout actor calls this."""
        self._messages.add(rollout_id, step)

    async def on_conversation_lost(self, rollout_id: str, why: str) -> None:
        """End a message that the fleet cannot play, since what it goes on with is gone."""
        self._messages.add(rollout_id, lost(why))

    async def end(self) -> None:
        """Close the environments that wait for a message. Nothing can be played afterwards."""
        await self._service.end_idle()

    def _task(self, message: str) -> dict[str, Any]:
        try:
            task = self._task_from_message(message)
            if not isinstance(task, dict):
                raise TypeError(f"it returned {task!r:.90}, and a task is a dict")
            return task
        except Exception as error:
            raise EnvironmentFailure(
                f"The workload's task_from_message failed: {type(error).__name__}: {error}"
            ) from error

    async def _follow_fleet(self, size: PoolSize) -> None:
        """consumes the fleet's counts · waits for the clock · produces another number of rollout actors

        An error of the fleet's ends all messages.
        """
        no_actor = NoActorWarning()
        try:
            while True:
                status = await self._service.status()
                no_actor.note(status)
                number = size.decide(status, time.monotonic())
                if number != status.num_actors:
                    await self._service.resize(number)
                await asyncio.sleep(SCALING_SECONDS)
        except Exception as error:
            self._messages.fail(SamplerError(f"The agents have failed: {error!r}"))
            raise
