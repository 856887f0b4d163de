"""Tasks of A2A clients: kept in the pool of their agent, where every replica finds them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from a2a.helpers.proto_helpers import new_text_message
from a2a.server.agent_execution.active_task import TERMINAL_TASK_STATES as ENDED
from a2a.server.context import ServerCallContext
from a2a.server.tasks import InMemoryTaskStore, TaskStore
from a2a.types.a2a_pb2 import ListTasksRequest, ListTasksResponse, Task, TaskState

from actors.served_agents.client import PoolClient

LOST = "The replica of the server that had this task has ended: send the message again."
WRITING_SECONDS = 3.0
"""Seconds in which a replica may be writing the end of a task whose episode is over."""


def end_task(task: Task, state: TaskState, text: str) -> None:
    """Give ``task`` its last state, and say why."""
    task.status.state = state
    task.status.timestamp.GetCurrentTime()
    task.status.message.CopyFrom(new_text_message(text, context_id=task.context_id, task_id=task.id))


class PoolTaskStore(TaskStore):
    """Keeps the tasks of an agent in its pool, each for the key that it belongs to.

    The replica that has a task writes its end. Where that replica has ended before, the task fails when it is
    fetched, instead of seeming to run for ever.

    Args:
        pool: of the agent.
        running: the tasks of this replica that have not ended.
    """

    def __init__(self, pool: PoolClient, running: Collection[str]) -> None:
        self._pool, self._running = pool, running

    async def save(self, task: Task, context: ServerCallContext) -> None:
        await self._pool.tasks.keep(context.user.user_name, task.id, task.SerializeToString())

    async def get(self, task_id: str, context: ServerCallContext) -> Task | None:
        kept = await self._pool.tasks.kept(context.user.user_name, task_id)
        return None if kept is None else await self._checked(Task.FromString(kept), context)

    async def list(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        kept = map(Task.FromString, await self._pool.tasks.all_kept(context.user.user_name))
        found = InMemoryTaskStore()  # it knows how to filter, to sort and to page
        for task in await asyncio.gather(*(self._checked(task, context) for task in kept)):
            await found.save(task, context)
        return await found.list(params, context)

    async def delete(self, task_id: str, context: ServerCallContext) -> None:
        await self._pool.tasks.forget(context.user.user_name, task_id)

    async def _checked(self, task: Task, context: ServerCallContext) -> Task:
        """The task, as failed if no replica has it any more."""
        owner, before = context.user.user_name, task.SerializeToString()
        if not await self._is_lost(task, owner):
            return task
        await asyncio.sleep(WRITING_SECONDS)
        if not await self._is_lost(task, owner):
            return task
        end_task(task, TaskState.TASK_STATE_FAILED, LOST)
        if await self._pool.tasks.replace(owner, task.id, before, task.SerializeToString()):
            return task
        newest = await self._pool.tasks.kept(owner, task.id)  # its replica has written meanwhile
        return task if newest is None else Task.FromString(newest)

    async def _is_lost(self, task: Task, owner: str) -> bool:
        if task.status.state in ENDED or task.id in self._running:
            return False
        return not await self._pool.messages.is_under_way(owner, task.id)
