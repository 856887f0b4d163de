"""Tasks of A2A clients whose replica has ended, or is just writing their end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from a2a.server.context import ServerCallContext
from a2a.types.a2a_pb2 import ListTasksRequest, Task, TaskState

from actors.served_agents import a2a_tasks
from actors.served_agents.a2a_tasks import PoolTaskStore, end_task
from actors.served_agents.store import PerKeyLRU

WORKING, FAILED, COMPLETED = (
    TaskState.TASK_STATE_WORKING,
    TaskState.TASK_STATE_FAILED,
    TaskState.TASK_STATE_COMPLETED,
)


class Pool:
    """Keeps tasks as an agent's pool does; the test says which are under way."""

    def __init__(self) -> None:
        self.kept: PerKeyLRU[bytes] = PerKeyLRU()
        self.under_way: set[str] = set()
        self.before_replacing: Callable[[], None] = lambda: None
        self.tasks = Asynchronous(self.kept, replace=self._replace)
        self.messages = Asynchronous(is_under_way=lambda owner, key: key in self.under_way)

    def _replace(self, owner: str, task_id: str, old: bytes, new: bytes) -> bool:
        self.before_replacing()
        return self.kept.replace(owner, task_id, old, new)


class Asynchronous:
    """Calls the methods of ``instance``, or those of these names, as a replica calls a part of the pool."""

    def __init__(self, instance: Any = None, **methods: Callable[..., Any]) -> None:
        self._instance, self._methods = instance, methods

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def call(*arguments: Any) -> Any:
            return (self._methods.get(name) or getattr(self._instance, name))(*arguments)

        return call


def working(task_id: str) -> Task:
    task = Task(id=task_id, context_id="context")
    task.status.state = WORKING
    return task


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Pool:
    monkeypatch.setattr(a2a_tasks, "WRITING_SECONDS", 0.01)
    return Pool()


def listed_states(store: PoolTaskStore) -> dict[str, TaskState]:
    answer = asyncio.run(store.list(ListTasksRequest(), ServerCallContext()))
    return {task.id: task.status.state for task in answer.tasks}


def test_task_whose_replica_has_ended_fails_and_others_go_on(pool: Pool) -> None:
    store = PoolTaskStore(pool, running={"here"})  # type: ignore[arg-type]
    pool.under_way = {"elsewhere"}
    for name in ("here", "elsewhere", "nowhere"):
        asyncio.run(store.save(working(name), ServerCallContext()))
    assert listed_states(store) == {"here": WORKING, "elsewhere": WORKING, "nowhere": FAILED}
    lost = asyncio.run(store.get("nowhere", ServerCallContext()))
    assert lost is not None and "send the message again" in lost.status.message.parts[0].text
    kept = Task.FromString(pool.kept.kept("", "nowhere") or b"")
    assert kept.status.state == FAILED, "the next client finds it so at once"


def test_task_whose_end_is_written_at_last_moment_does_not_fail(pool: Pool) -> None:
    store = PoolTaskStore(pool, running=())  # type: ignore[arg-type]
    asyncio.run(store.save(working("ending"), ServerCallContext()))

    def write_end() -> None:
        task = working("ending")
        end_task(task, COMPLETED, "46")
        pool.kept.keep("", "ending", task.SerializeToString())

    pool.before_replacing = write_end
    found = asyncio.run(store.get("ending", ServerCallContext()))
    assert found is not None and found.status.state == COMPLETED
    assert Task.FromString(pool.kept.kept("", "ending") or b"").status.state == COMPLETED


async def test_task_that_has_not_begun_yet_is_waited_for(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2a_tasks, "WRITING_SECONDS", 0.1)
    store = PoolTaskStore(pool, running=())  # type: ignore[arg-type]
    await store.save(working("early"), ServerCallContext())
    asyncio.get_running_loop().call_later(0.02, pool.under_way.add, "early")
    found = await store.get("early", ServerCallContext())
    assert found is not None and found.status.state == WORKING
