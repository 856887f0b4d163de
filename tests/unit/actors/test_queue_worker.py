"""A replica's link, with a real queue and an engine that is a fake."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorUnavailableError
from simulated_cluster import SimulatedLoop

from actors.sampling import queue_worker, request_queue
from actors.sampling.queue_worker import QueueWorker, serve_queue
from actors.sampling.request_queue import Assignment, ReplicaReport, RequestQueue
from environments.errors import LogprobError, PromptTooLongError, SamplerError
from policies.engines.base import Engine
from policies.engines.weights import WeightBucket
from policies.sampler import EngineStats, SamplingParams, TokenOutput, TokenRequest


class EchoEngine(Engine):
    """Says the prompt when it is told to. A prompt of 0 is too long; one of two 7s raises an error that is
    not Troupe's; one of 13 breaks the engine.

    ``logprob`` is that of each token.
    """

    logprob = -0.5
    max_model_tokens = 100

    def __init__(self) -> None:
        self.version = 0
        self.go = asyncio.Event()
        self.go.set()
        self.num_begun = self.num_cancelled = 0
        self._broken = False

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, in_pieces: bool
    ) -> AsyncGenerator[TokenOutput, None]:
        self.num_begun += 1
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if prompt_ids[0] == 0:
            raise PromptTooLongError("It is too long.")
        if prompt_ids[0] == 7 and len(prompt_ids) == 2:
            raise OSError("This request is odd.")
        if prompt_ids[0] == 13:
            self._broken = True
            self.check_alive()
        yield TokenOutput(
            token_ids=tuple(prompt_ids),
            logprobs=(self.logprob,) * len(prompt_ids),
            finish_reason="stop",
            policy_version=self.version,
        )

    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        return EngineStats(num_tokens=42)

    def check_alive(self) -> None:
        if self._broken:
            raise SamplerError("The engine is gone.")


class SerialEngine(EchoEngine):
    """Samples 32 requests a second, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = asyncio.Lock()

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, in_pieces: bool
    ) -> AsyncGenerator[TokenOutput, None]:
        self.num_begun += 1
        async with self._turn:
            await asyncio.sleep(1 / 32)
        yield TokenOutput(token_ids=(1,), logprobs=(-0.5,), finish_reason="stop", policy_version=self.version)


async def nothing_new() -> None:
    pass


def serve(queue: RequestQueue, engine: Engine, name: str = "a") -> asyncio.Task[None]:
    """Let a worker run until the test ends."""
    return asyncio.create_task(QueueWorker(name, engine, queue.poll, nothing_new).run())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.01)


def request(index: int) -> TokenRequest:
    return TokenRequest((index,), SamplingParams())


async def test_requests_of_all_kinds_are_answered() -> None:
    queue = RequestQueue("policy")
    serve(queue, EchoEngine())
    for _ in range(3):
        answers = await asyncio.gather(
            *(queue.sample(request(index)) for index in range(8)), return_exceptions=True
        )
        refusal, *outputs = answers
        assert isinstance(refusal, PromptTooLongError)
        assert [each.token_ids for each in outputs if isinstance(each, TokenOutput)] == [
            (index,) for index in range(1, 8)
        ]
    assert queue.status().replicas["a"].engine.num_tokens == 42


@pytest.mark.parametrize("logprob", [-math.inf, math.nan])
async def test_log_probability_that_is_not_finite_fails_its_request(
    logprob: float,
) -> None:
    queue, engine = RequestQueue("policy"), EchoEngine()
    serve(queue, engine)
    engine.logprob = logprob
    with pytest.raises(LogprobError, match=rf"^EchoEngine \(pid \d.*version 0, .*{logprob} for token 0"):
        await queue.sample(request(1))
    engine.logprob = -0.5
    assert (await queue.sample(request(2))).token_ids == (2,)


async def test_unknown_error_of_an_engine_fails_its_request_alone() -> None:
    queue = RequestQueue("policy")
    serve(queue, EchoEngine())
    with pytest.raises(SamplerError, match=r"^EchoEngine of replica a .* OSError: This request is odd"):
        await queue.sample(TokenRequest((7, 7), SamplingParams()))
    assert (await queue.sample(request(2))).token_ids == (2,)


@pytest.mark.slow
async def test_new_requests_are_fetched_while_others_are_sampled() -> None:
    queue, engine = RequestQueue("policy"), EchoEngine()
    engine.go.clear()
    serve(queue, engine)
    waiting = []
    for index in range(1, 4):
        waiting.append(asyncio.create_task(queue.sample(request(index))))
        await asyncio.sleep(0.1)
        assert queue.status().replicas["a"].num_running == index
    engine.go.set()
    await asyncio.gather(*waiting)


async def test_worker_polls_only_when_there_is_something_to_report() -> None:
    queue, engine, answers = RequestQueue("policy", lease_seconds=60), EchoEngine(), []

    async def poll(report: ReplicaReport) -> Assignment:
        answers.append(len(report.answers))
        return await queue.poll(report)

    link = asyncio.create_task(QueueWorker("a", engine, poll, nothing_new).run())
    await asyncio.gather(*(queue.sample(request(index)) for index in range(1, 9)))
    engine.go.clear()
    waiting = asyncio.create_task(queue.sample(request(9)))
    await asyncio.sleep(0.1)
    assert answers == [0, 8, 0]  # to ask, to answer, and to ask beside what is running
    engine.go.set()
    await waiting
    await asyncio.sleep(0.1)
    assert answers == [0, 8, 0, 1]  # the call that was waiting has ended with this one
    link.cancel()


async def test_new_version_is_reported_at_once() -> None:
    queue, engine = RequestQueue("policy", lease_seconds=60), EchoEngine()
    link = QueueWorker("a", engine, queue.poll, nothing_new)
    running = asyncio.create_task(link.run())
    waiting = asyncio.create_task(queue.sample(TokenRequest((1,), SamplingParams(), min_version=1)))
    await asyncio.sleep(0.05)
    engine.version = 1
    link.wake()
    assert (await asyncio.wait_for(waiting, 8)).policy_version == 1
    running.cancel()


async def test_what_is_revoked_is_not_sampled_any_further() -> None:
    queue, engine = RequestQueue("policy", lease_seconds=0.6), EchoEngine()
    engine.go.clear()
    serve(queue, engine)
    waiting = asyncio.create_task(queue.sample(request(1)))
    await until(lambda: engine.num_begun == 1)
    waiting.cancel()
    await until(lambda: engine.num_cancelled == 1)


@pytest.mark.slow
async def test_worker_with_a_broken_engine_ends_and_another_answers() -> None:
    queue, broken, whole = RequestQueue("policy", lease_seconds=0.3), EchoEngine(), EchoEngine()
    link = serve(queue, broken, "broken")
    broken.go.clear()
    waiting = [asyncio.create_task(queue.sample(request(index))) for index in (13, 13)]
    await until(lambda: broken.num_begun == 2)
    broken.go.set()
    with pytest.raises(SamplerError, match="gone"):
        await link
    whole.go.clear()
    serve(queue, whole, "whole")
    await until(lambda: whole.num_begun == 2)
    assert queue.status().replicas["whole"].num_running == 2
    for each in waiting:
        each.cancel()


async def test_after_a_stop_the_newest_weights_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue is slow to answer, which looks the same from inside."""
    monkeypatch.setattr(queue_worker, "LEASE_SECONDS", 0.1)
    versions: list[int] = []
    engine = EchoEngine()
    orders = [Assignment(), Assignment([("ticket", request(1))])]
    answered = asyncio.Event()

    async def poll(report: ReplicaReport) -> Assignment:
        if report.answers:
            (answer,) = (answer for _, answer in report.answers)
            assert isinstance(answer, TokenOutput)
            versions.append(answer.policy_version)
            answered.set()
        if len(orders) == 1:
            await asyncio.sleep(0.2)
        return orders.pop(0) if orders else Assignment()

    async def catch_up() -> None:
        engine.version = 7

    link = asyncio.create_task(QueueWorker("a", engine, poll, catch_up).run())
    await answered.wait()
    link.cancel()
    assert versions == [7]


class BreakableQueue(RequestQueue):
    """To which a connection may be lost."""

    is_broken = False

    async def poll(self, report: ReplicaReport) -> Assignment:
        if self.is_broken:
            raise ActorUnavailableError("The connection was reset.", None)
        return await super().poll(report)


@pytest.mark.slow
async def test_what_a_lost_connection_was_sampling_is_sampled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_worker, "QUEUE_RETRY_SECONDS", 0.1)
    queue, engine = BreakableQueue("policy", lease_seconds=0.5), EchoEngine()
    workers: list[QueueWorker] = []
    link = asyncio.create_task(serve_queue("a", engine, queue.poll, nothing_new, workers.append))
    engine.go.clear()
    answer = asyncio.create_task(queue.sample(request(1)))
    await asyncio.sleep(0.1)
    queue.is_broken = True
    while len(workers) < 2:
        workers[0].wake()
        await asyncio.sleep(0.05)
    queue.is_broken = False
    engine.go.set()
    assert (await answer).token_ids == (1,)
    assert engine.num_cancelled == 1 and len(workers) > 1
    link.cancel()


@pytest.mark.slow
async def test_worker_that_leaves_delivers_what_it_has_and_ends() -> None:
    queue, engine = RequestQueue("policy", lease_seconds=0.6), EchoEngine()
    worker = QueueWorker("r", engine, queue.poll, nothing_new)
    link = asyncio.create_task(worker.run())
    engine.go.clear()
    answer = asyncio.create_task(queue.sample(TokenRequest((1,), SamplingParams())))
    await until(lambda: engine.num_begun == 1)
    worker.leave()
    late = asyncio.create_task(queue.sample(TokenRequest((2,), SamplingParams())))
    await asyncio.sleep(0.3)
    assert not link.done() and engine.num_begun == 1
    engine.go.set()
    assert (await answer).token_ids == (1,)
    await link
    assert not late.done() and engine.num_cancelled == 0


async def test_worker_that_is_wanted_again_goes_on() -> None:
    queue, engine = RequestQueue("policy", lease_seconds=0.6), EchoEngine()
    worker = QueueWorker("r", engine, queue.poll, nothing_new)
    link = asyncio.create_task(worker.run())
    worker.leave()
    worker.leave(False)
    assert (await queue.sample(TokenRequest((1,), SamplingParams()))).token_ids == (1,)
    link.cancel()


@pytest.mark.slow
async def test_queues_count_what_each_has_at_a_replica() -> None:
    """One queue has filled one of two replicas; the other one evens that out."""
    one, other, engines = RequestQueue("one"), RequestQueue("other"), [EchoEngine(), EchoEngine()]
    for engine in engines:
        engine.go.clear()
    for number, engine in enumerate(engines):
        for queue in [one, other] if number == 0 else [other]:
            serve(queue, engine, f"replica {number}")
    await until(lambda: len(other.status().replicas) == 2 and len(one.status().replicas) == 1)
    requests = [TokenRequest((index + 1, 1, 1), SamplingParams()) for index in range(30)]
    asked = [asyncio.create_task(one.sample(each)) for each in requests[:10]]
    await until(lambda: engines[0].num_begun == 10)
    await asyncio.sleep(1.0)  # a poll of the other queue is due meanwhile
    asked += [asyncio.create_task(other.sample(each)) for each in requests[10:]]
    await until(lambda: sum(engine.num_begun for engine in engines) == 30)
    assert [engine.num_begun for engine in engines] == [15, 15]


@pytest.mark.slow
async def test_worker_that_comes_back_has_another_name_than_a_lost_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it would keep the lease of a request that its lost connection was answering."""
    monkeypatch.setattr(queue_worker, "QUEUE_RETRY_SECONDS", 0.0)
    queue, engine = BreakableQueue("policy", lease_seconds=0.6), EchoEngine()
    workers: list[QueueWorker] = []
    link = asyncio.create_task(serve_queue("a", engine, queue.poll, nothing_new, workers.append))
    engine.go.clear()
    answer = asyncio.create_task(queue.sample(request(1)))
    await until(lambda: engine.num_begun == 1)
    queue.is_broken = True
    workers[0].wake()
    await until(lambda: len(workers) > 1)
    queue.is_broken = False
    engine.go.set()
    while not link.done():
        workers[-1].leave()
        await asyncio.sleep(0.01)
    link = asyncio.create_task(serve_queue("a", engine, queue.poll, nothing_new, workers.append))
    assert (await asyncio.wait_for(answer, 3)).token_ids == (1,)


@pytest.mark.parametrize("num_queues", [1, 2])
@pytest.mark.parametrize("version_lag", [0, 1], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("num_turns", [1, 4])
@pytest.mark.parametrize("num_replicas", [2, 4, 8])
def test_replicas_share_what_waits_after_each_publish(
    num_replicas: int, num_turns: int, version_lag: int, num_queues: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By counts and by a simulated clock. Asynchronous conversations go on over all three publishes."""
    loop = SimulatedLoop()
    for module in (request_queue, queue_worker):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=loop.time))
    queues = [RequestQueue("policy") for _ in range(num_queues)]
    engines = [SerialEngine() for _ in range(num_replicas)]

    async def poll(queue: RequestQueue, report: ReplicaReport) -> Assignment:
        await asyncio.sleep(0.002)  # as a call takes
        return await queue.poll(report)

    workers = [
        [QueueWorker(f"replica {number}", engine, partial(poll, queue), nothing_new) for queue in queues]
        for number, engine in enumerate(engines)
    ]

    def load(number: int, version: int) -> None:
        engines[number].version = version
        for worker in workers[number]:
            worker.wake()

    async def converse(index: int, version: int) -> None:
        name = f"{index} of {0 if version_lag else version}"
        for _ in range(num_turns):
            turn = TokenRequest((1,), SamplingParams(), version - version_lag, name)
            await queues[index % num_queues].sample(turn)

    async def shares() -> list[tuple[float, float]]:
        """Requests of the busiest replica and seconds after each publish, in multiples of the even split."""
        for worker in (worker for each in workers for worker in each):
            asyncio.create_task(worker.run())  # noqa: RUF006  # it is cancelled below
        await until(lambda: all(len(queue.status().replicas) == num_replicas for queue in queues))
        found = []
        for version in range(1, 4):
            start, before = loop.time(), [engine.num_begun for engine in engines]
            for number in range(num_replicas):
                loop.call_later(0.005 * number, load, number, version)
            await asyncio.gather(*(converse(index, version) for index in range(32 * num_replicas)))
            most = max(engine.num_begun - earlier for engine, earlier in zip(engines, before, strict=True))
            found.append((most / (32 * num_turns), (loop.time() - start) / num_turns))
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()
        return found

    found = loop.run_until_complete(shares())
    loop.close()
    assert max(map(max, found)) <= 1.1, found


@pytest.mark.slow
def test_loads_are_reported_seldom_where_queues_are_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, engine = SimulatedLoop(), EchoEngine()
    monkeypatch.setattr(queue_worker, "time", SimpleNamespace(monotonic=loop.time))
    num_polls = 0

    async def poll(queue: RequestQueue, report: ReplicaReport) -> Assignment:
        nonlocal num_polls
        num_polls += 1
        await asyncio.sleep(0.002)
        return await queue.poll(report)

    async def polls_of_a_second() -> int:
        """While requests over HTTP come and go all the time, in bursts of 32."""
        queues = [RequestQueue("policy", lease_seconds=600) for _ in range(20)]
        workers = [
            QueueWorker("replica", engine, partial(poll, queue), nothing_new).run() for queue in queues
        ]
        tasks = [asyncio.create_task(each) for each in workers]
        await asyncio.sleep(0.1)
        before = num_polls
        for _ in range(100):
            with ExitStack() as burst:
                for _ in range(32):
                    burst.enter_context(engine.in_flight((1,), SamplingParams()))
                await asyncio.sleep(0.005)
            await asyncio.sleep(0.005)
        number = num_polls - before
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return number

    assert 100 < loop.run_until_complete(polls_of_a_second()) <= 1.1 * queue_worker.LOAD_POLLS
    loop.close()


def test_load_that_changes_right_after_a_report_is_reported_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may change for a long time after it, and no poll ends."""
    loop, engine = SimulatedLoop(), EchoEngine()
    monkeypatch.setattr(queue_worker, "time", SimpleNamespace(monotonic=loop.time))
    reported: list[int] = []

    async def poll(queue: RequestQueue, report: ReplicaReport) -> Assignment:
        reported.append(report.num_others)
        return await queue.poll(report)

    async def last_reports() -> tuple[int, int]:
        queues = [RequestQueue("policy", lease_seconds=600) for _ in range(20)]
        runs = [QueueWorker("replica", engine, partial(poll, queue), nothing_new).run() for queue in queues]
        for each in runs:
            asyncio.create_task(each)  # noqa: RUF006  # it is cancelled below
        await asyncio.sleep(0.1)
        with ExitStack() as burst:
            for _ in range(64):
                burst.enter_context(engine.in_flight((1,), SamplingParams()))
                await asyncio.sleep(0.0005)
            await asyncio.sleep(0.1)
            busy = min(reported[-20:])
        await asyncio.sleep(0.1)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return busy, max(reported[-20:])

    busy, idle = loop.run_until_complete(last_reports())
    loop.close()
    assert busy >= 60 and idle <= 4
