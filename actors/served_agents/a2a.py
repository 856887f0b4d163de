"""Trained agents as servers of A2A, by the official ``a2a-sdk``: a message is a task, its answer an artifact.

Clients come by JSON-RPC, or by HTTP and JSON (REST) below the same address.

https://a2a-protocol.org. Imported only where clients ask for it: the package is the extra ``a2a``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping

from a2a.helpers.proto_helpers import new_task_from_user_message
from a2a.server.agent_execution import AgentExecutor
from a2a.server.agent_execution import RequestContext as MessageContext
from a2a.server.agent_execution.active_task import TERMINAL_TASK_STATES as ENDED
from a2a.server.context import ServerCallContext
from a2a.server.events import Event, EventQueue
from a2a.server.request_handlers import DefaultRequestHandlerV2
from a2a.server.routes import (
    DefaultServerCallContextBuilder,
    create_agent_card_routes,
    create_jsonrpc_routes,
    create_rest_routes,
)
from a2a.server.tasks import TaskUpdater
from a2a.types.a2a_pb2 import (
    AgentCapabilities,
    AgentCard,
    AgentInterface,
    AgentSkill,
    CancelTaskRequest,
    HTTPAuthSecurityScheme,
    Message,
    Part,
    Role,
    SecurityRequirement,
    SecurityScheme,
    SendMessageRequest,
    StringList,
    SubscribeToTaskRequest,
    Task,
    TaskState,
)
from a2a.utils.constants import PROTOCOL_VERSION_1_0, TransportProtocol
from a2a.utils.errors import (
    ContentTypeNotSupportedError,
    InvalidParamsError,
    PushNotificationNotSupportedError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
)
from google.protobuf.json_format import MessageToDict
from starlette.authentication import SimpleUser
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from actors.served_agents.a2a_tasks import PoolTaskStore, end_task
from actors.served_agents.client import PoolClient
from actors.served_agents.feedback import FeedbackOnAnswer, keep_feedback
from actors.served_agents.recorder import may_be_recorded
from environments.data.recordings import Recordings
from environments.errors import TroupeError
from policies.agent_api.context import RequestContext
from policies.agent_api.frontend import AgentFrontend
from policies.model_api.dialects.base import read
from policies.model_api.errors import NotFoundError, RequestError, ServerError, request_error

TEXT = "text/plain"
CANCELLED = "The message was cancelled."


class A2AFrontend:
    """A2A for the agents of one replica. Their tasks are kept by the pools, where all replicas find them.

    Args:
        pools: of the agents, by name.
        agents: plays the messages.
        needs_key: whether clients have to send a key, as the cards show.
        version: returns the policy's version, which is the one of the agents.
        recordings: of answers, where they are recorded.
    """

    def __init__(
        self,
        pools: Mapping[str, PoolClient],
        agents: AgentFrontend,
        needs_key: bool,
        version: Callable[[], int],
        recordings: Recordings | None,
    ) -> None:
        self._recordings = recordings
        self._pools, self._agents, self._needs_key, self._version = pools, agents, needs_key, version
        self._routes = {name: self._routes_of(name, pool) for name, pool in pools.items()}

    async def card(self, name: str, url: str, request: Request) -> Response:
        """The agent card of ``name``, which answers at ``url``."""
        description = (await self._pools[name].profile()).description
        (route,) = create_agent_card_routes(self._card(name, url, description))
        return await route.endpoint(request)

    async def answer(self, name: str, path: str, request: Request) -> Response:
        """The answer to a request at ``path`` below the agent's address: a result, an error, or events.

        Raises:
            RequestError: nothing is served there.
        """
        place = {"type": "http", "method": request.method, "path": path}
        for route in self._routes[name]:
            match, found = route.matches(place)
            if match is Match.FULL:
                request.scope["path_params"] = found["path_params"]
                return await route.endpoint(request)
        served = ", ".join(sorted({route.path for route in self._routes[name]}))
        raise NotFoundError(f"{name!r} serves no {request.method} {path}. What it serves: {served}.")

    def _routes_of(self, name: str, pool: PoolClient) -> list[Route]:
        card = self._card(name, url=f"/{name}", description=name)  # the handler reads what it can do
        episodes = _Episodes(name, pool, self._agents)
        handler = _Handler(episodes, PoolTaskStore(pool, episodes.running), card, self._recordings)
        caller = _CallerContext()
        routes: list[BaseRoute] = [
            *create_jsonrpc_routes(handler, "/", caller),
            *create_rest_routes(handler, caller),
        ]
        # The rest is for tenants: here are none.
        return [route for route in routes if isinstance(route, Route)]

    def _card(self, name: str, url: str, description: str) -> AgentCard:
        skill = AgentSkill(id="answer", name="answer", description=description, tags=["agent"])
        card = AgentCard(
            name=name,
            description=description,
            version=str(self._version()),
            supported_interfaces=[
                AgentInterface(url=url, protocol_binding=binding.value, protocol_version=PROTOCOL_VERSION_1_0)
                for binding in (TransportProtocol.JSONRPC, TransportProtocol.HTTP_JSON)
            ],
            capabilities=AgentCapabilities(streaming=True),
            default_input_modes=[TEXT],
            default_output_modes=[TEXT],
            skills=[skill],
        )
        if self._needs_key:
            bearer = SecurityScheme(http_auth_security_scheme=HTTPAuthSecurityScheme(scheme="Bearer"))
            card.security_schemes["key"].CopyFrom(bearer)
            card.security_requirements.append(SecurityRequirement(schemes={"key": StringList()}))
        return card


class _CallerContext(DefaultServerCallContextBuilder):
    """Tells the handlers whose key a request has: a task belongs to its key, and its tokens are counted."""

    def build(self, request: Request) -> ServerCallContext:
        caller = request.state.caller
        request.scope["user"] = SimpleUser(caller.name or "")  # without keys, everybody is the same one
        context = super().build(request)
        context.state["caller"] = caller
        context.state["may_be_recorded"] = may_be_recorded(request)
        return context


class _Handler(DefaultRequestHandlerV2):
    """The SDK's handler, which says of what this server cannot do that it cannot.

    Args:
        episodes: plays the messages.
        tasks: where the tasks are kept.
        card: of the agent.
        recordings: of answers, where they are recorded.
    """

    def __init__(
        self, episodes: _Episodes, tasks: PoolTaskStore, card: AgentCard, recordings: Recordings | None
    ) -> None:
        super().__init__(episodes, tasks, card)
        self._episodes, self._tasks, self._recordings = episodes, tasks, recordings

    async def on_message_send(self, params: SendMessageRequest, context: ServerCallContext) -> Message | Task:
        await self._take(params, context)
        return await super().on_message_send(params, context)

    async def on_message_send_stream(
        self, params: SendMessageRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        await self._take(params, context)
        async for event in super().on_message_send_stream(params, context):
            yield event

    async def _take(self, params: SendMessageRequest, context: ServerCallContext) -> None:
        """Check a message, and keep the feedback on an earlier answer that its metadata may have."""
        _check_message(params)
        try:
            given = MessageToDict(params.message.metadata).get("feedback")
        except ValueError as error:  # NaN, which is no JSON and is read
            raise InvalidParamsError(f"message.metadata: {error}") from error
        if given is None:
            return
        try:
            feedback, _ = read(FeedbackOnAnswer, given)
            await keep_feedback(self._recordings, context.user.user_name, feedback.answer_id, feedback)
        except RequestError as error:
            raise InvalidParamsError(f"message.metadata.feedback: {error.message}") from error

    async def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Event, None]:
        task = await self._tasks.get(params.id, context)
        if task is not None and task.status.state not in ENDED and task.id not in self._episodes.running:
            raise UnsupportedOperationError(
                f"The task {params.id!r} runs on another replica, which alone has its events: send GetTask."
            )
        async for event in super().on_subscribe_to_task(params, context):
            yield event

    async def on_cancel_task(self, params: CancelTaskRequest, context: ServerCallContext) -> Task:
        """Cancel a task: nothing more is sampled for its episode."""
        task = await self._tasks.get(params.id, context)
        if task is None:
            raise TaskNotFoundError(f"There is no task {params.id!r} of this key.")
        if task.status.state in ENDED:
            state = TaskState.Name(task.status.state)
            raise TaskNotCancelableError(f"The task {params.id!r} has ended: its state is {state}.")
        if not await self._episodes.pool.messages.withdraw(context.user.user_name, params.id):
            raise TaskNotCancelableError(f"The task {params.id!r} is ending just now: ask for its answer.")
        end_task(task, TaskState.TASK_STATE_CANCELED, CANCELLED)
        await self._tasks.save(task, context)
        return task


def _check_message(params: SendMessageRequest) -> None:
    """Raise the SDK's error for what an agent cannot answer."""
    message, configuration = params.message, params.configuration
    if message.role != Role.ROLE_USER:
        raise InvalidParamsError(f"message.role is {Role.Name(message.role)}: send ROLE_USER.")
    if message.task_id:
        raise UnsupportedOperationError(
            f"message.taskId is {message.task_id!r}: each message is a task of its own, which takes no "
            "second one. Leave taskId out; contextId goes on with the conversation."
        )
    for number, part in enumerate(message.parts):
        if (kind := part.WhichOneof("content")) != "text":
            raise ContentTypeNotSupportedError(
                f"message.parts[{number}] is of kind {kind!r}: agents read text."
            )
    if not any(part.text for part in message.parts):
        raise InvalidParamsError("message.parts has no text.")
    modes = list(configuration.accepted_output_modes)
    if modes and not {TEXT, "text/*", "*/*", "text"} & set(modes):
        raise ContentTypeNotSupportedError(
            f"configuration.acceptedOutputModes is {modes}: agents answer in {TEXT}."
        )
    if configuration.HasField("task_push_notification_config"):
        raise PushNotificationNotSupportedError(
            "configuration.taskPushNotificationConfig: this server pushes nothing. Stream, or send GetTask."
        )


class _Episodes(AgentExecutor):
    """Plays an episode for each task of an agent. Tasks of one context are one conversation.

    Args:
        name: of the agent.
        pool: the agent's.
        agents: plays the messages.
    """

    def __init__(self, name: str, pool: PoolClient, agents: AgentFrontend) -> None:
        self._name, self.pool, self._agents = name, pool, agents
        self.running: set[str] = set()
        """The tasks of this replica that have not ended."""

    async def execute(self, context: MessageContext, event_queue: EventQueue) -> None:
        message, task_id = context.message, context.task_id
        assert message is not None and task_id is not None and context.context_id is not None
        updater = TaskUpdater(event_queue, task_id, context.context_id)
        self.running.add(task_id)
        try:
            await event_queue.enqueue_event(new_task_from_user_message(message))
            await updater.start_work()
            await self._play(context, updater)
        finally:
            self.running.discard(task_id)

    async def cancel(self, context: MessageContext, event_queue: EventQueue) -> None:
        raise UnsupportedOperationError("Tasks are cancelled by ``_Handler.on_cancel_task``.")

    async def _play(self, context: MessageContext, updater: TaskUpdater) -> None:
        charge = context.call_context.state["caller"].charge_for(self._name)
        owner = context.call_context.user.user_name
        try:
            profile = await self.pool.profile()
            session = context.context_id if profile.takes_follow_ups else None
            place = RequestContext(
                owner=owner,
                session=session,
                withdraw_key=updater.task_id,
                may_be_recorded=context.call_context.state["may_be_recorded"],
            )
            answer = await self._agents.answer(self._name, context.get_user_input(), charge, place)
        except TroupeError as error:
            await _end_by_error(updater, request_error(error))
            return
        (choice,) = answer["choices"]
        await updater.add_artifact([Part(text=choice["message"]["content"])], name="answer", last_chunk=True)
        facts = {name: answer[name] for name in ("policy_version", "num_steps", "usage")}
        if "recorded" in answer:
            facts |= {"answer_id": answer["id"], "recorded": answer["recorded"]}
        await updater.update_status(
            TaskState.TASK_STATE_COMPLETED, metadata={**facts, "finish_reason": choice["finish_reason"]}
        )


async def _end_by_error(updater: TaskUpdater, error: RequestError) -> None:
    state, text = TaskState.TASK_STATE_REJECTED, error.message
    if isinstance(error, ServerError):
        state = TaskState.TASK_STATE_FAILED
    if error.code == "withdrawn":
        state, text = TaskState.TASK_STATE_CANCELED, CANCELLED
    await updater.update_status(state, updater.new_agent_message([Part(text=text)]))
