"""Each request is answered once, by a replica that is alive and current."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from actors.sampling.request_queue import MAX_ATTEMPTS, Assignment, ReplicaReport, RequestQueue
from environments.errors import ConfigError, SamplerError
from policies.sampler import EngineStats, SamplingParams, TokenOutput, TokenRequest

LEASE = 0.12
PATIENCE = 0.4

Answers = Sequence[tuple[str, TokenOutput | Exception]]


def queue() -> RequestQueue:
    return RequestQueue("policy", lease_seconds=LEASE, wait_seconds=PATIENCE)


def request(index: int = 0, min_version: int = 0, session: str = "") -> TokenRequest:
    return TokenRequest((index,), SamplingParams(), min_version, session)


def output(*token_ids: int) -> TokenOutput:
    return TokenOutput(token_ids=token_ids, logprobs=(), finish_reason="stop", policy_version=0)


async def call(
    to: RequestQueue,
    replica: str = "a",
    answers: Answers = (),
    version: int = 0,
    tokens: int = 0,
    num_others: int = 0,
    is_leaving: bool = False,
) -> Assignment:
    stats = EngineStats(num_tokens=tokens)
    return await to.poll(ReplicaReport(replica, version, answers, stats, num_others, is_leaving))


def ask(to: RequestQueue, *requests: TokenRequest) -> list[asyncio.Task[TokenOutput]]:
    return [asyncio.create_task(to.sample(each)) for each in requests]


def ids(orders: Assignment) -> list[int]:
    return [each.prompt_ids[0] for _, each in orders.requests]


async def fetch(to: RequestQueue, count: int, replica: str = "a", version: int = 0) -> Assignment:
    """Call until ``count`` requests were handed out."""
    requests: list[tuple[str, TokenRequest]] = []
    while len(requests) < count:
        requests += (await call(to, replica, version=version)).requests
    return Assignment(requests)


async def test_requests_that_arrive_together_are_fetched_together() -> None:
    there = queue()
    waiting = ask(there, request(1), request(2))
    (first, _), (second, _) = (await fetch(there, 2)).requests
    assert first != second
    later = asyncio.create_task(call(there, answers=[(second, output(22)), (first, output(11))]))
    assert [each.token_ids for each in await asyncio.gather(*waiting)] == [(11,), (22,)]
    assert (await later).requests == ()


@pytest.mark.slow
async def test_call_without_work_is_answered_before_the_lease_ends() -> None:
    lease = 6.0  # so that a busy machine is not taken for a late answer
    start = time.monotonic()
    assert await call(RequestQueue("policy", lease_seconds=lease)) == Assignment((), [])
    assert time.monotonic() - start < lease


async def test_next_call_of_a_replica_ends_the_one_before() -> None:
    there = RequestQueue("policy", lease_seconds=60)
    earlier = asyncio.create_task(call(there))
    await asyncio.sleep(0)
    later = asyncio.create_task(call(there))
    assert (await earlier).requests == ()
    ask(there, request(1))
    assert ids(await later) == [1]


async def test_error_of_one_request_reaches_who_asked() -> None:
    there = queue()
    (waiting,) = ask(there, request())
    ((ticket, _),) = (await fetch(there, 1)).requests
    await call(there, answers=[(ticket, ConfigError("such a request"))])
    with pytest.raises(ConfigError, match="such a request"):
        await waiting


async def test_request_waits_for_a_replica_with_its_version() -> None:
    there = queue()
    ask(there, request(1), request(2, min_version=5))
    assert ids(await fetch(there, 1, version=4)) == [1]
    assert ids(await call(there, version=4)) == []
    assert ids(await call(there, version=5)) == [2]


@pytest.mark.slow
async def test_newer_version_is_preferred_and_not_required() -> None:
    there = RequestQueue("policy")
    await asyncio.gather(call(there, "newer", version=2), call(there, "older", version=1))
    ask(there, request(1))
    older = asyncio.create_task(call(there, "older", version=1))
    await asyncio.sleep(0)
    assert ids(await call(there, "newer", version=2)) == [1], "its next poll was due"
    ask(there, request(2))
    assert ids(await older) == [2], "it has fewer requests"


@pytest.mark.slow
async def test_share_of_replicas_that_still_load_is_left_to_them() -> None:
    there = RequestQueue("policy")
    names = "abcdefgh"
    await asyncio.gather(*(call(there, name) for name in names))
    ask(there, *(request(index, min_version=1) for index in range(1024)))
    await asyncio.sleep(0.02)
    for name in names[:-1]:
        assert len(ids(await call(there, name, version=1))) == 128
    assert ids(await call(there, names[-1], version=0)) == []
    assert len(ids(await call(there, names[-1], version=1))) == 128


@pytest.mark.slow
async def test_first_to_load_goes_on_and_holds_no_more_than_its_share() -> None:
    there = RequestQueue("policy")
    await asyncio.gather(call(there, "a"), call(there, "b"))
    ask(there, *(request(index, min_version=1) for index in range(64)))
    held = list((await fetch(there, 1, "a", version=1)).requests)
    assert len(held) == 32
    answers = [(ticket, output(1)) for ticket, _ in held[:16]]
    assert len(ids(await call(there, "a", answers, version=1))) == 8  # 24 for each of them are left


@pytest.mark.slow
@pytest.mark.parametrize("goes_on_polling", [True, False])
async def test_share_of_a_late_or_dead_replica_goes_to_the_others(goes_on_polling: bool) -> None:
    there = queue()
    await asyncio.gather(call(there, "a"), call(there, "b"))
    ask(there, *(request(index, min_version=1) for index in range(10)))
    number = 0
    while number < 10:
        number += len(ids(await call(there, "a", version=1)))
        assert number == 5 or there.status().num_waiting == 0
        if goes_on_polling:
            await call(there, "b")


@pytest.mark.slow
async def test_replicas_that_load_one_after_the_other_are_not_late() -> None:
    there = RequestQueue("policy", lease_seconds=0.6)
    names = "abcdef"
    polls = {name: asyncio.create_task(call(there, name)) for name in names}
    ask(there, *(request(index, min_version=1) for index in range(60)))
    fetched = dict.fromkeys(names, 0)
    loaded: set[str] = set()
    for name in names:  # four fifths of a lease, in which all go on polling, for each
        loaded.add(name)
        for _ in range(5):
            for each in names:
                polls[each].cancel()
                polls[each] = asyncio.create_task(call(there, each, version=int(each in loaded)))
            await asyncio.sleep(0.1)
            for each in names:
                if polls[each].done():
                    fetched[each] += len(polls[each].result().requests)
    assert set(fetched.values()) == {10}


async def test_conversations_stay_at_a_replica_that_polls_first() -> None:
    there = RequestQueue("policy")
    calls = [asyncio.create_task(call(there, name)) for name in "ab"]
    await asyncio.sleep(0)
    ask(there, *(request(index, session=str(index)) for index in range(40)))
    at_a, at_b = [ids(each) for each in await asyncio.gather(*calls)]
    ask(there, *(request(index, session=str(index)) for index in [*at_b, *at_a]))
    assert sorted(ids(await fetch(there, 1, "a"))) == sorted(at_a)


async def test_work_is_spread_and_a_conversation_stays_where_it_is() -> None:
    there = queue()
    calls = {name: asyncio.create_task(call(there, name)) for name in "ab"}
    await asyncio.sleep(0)
    ask(there, *(request(index, session=str(index)) for index in range(4)))
    first = {name: ids(await each) for name, each in calls.items()}
    assert [len(each) for each in first.values()] == [2, 2]
    ask(there, *(request(index, session=str(index)) for index in range(4)))
    assert {name: ids(await fetch(there, 2, name)) for name in "ab"} == first


@pytest.mark.slow
async def test_work_is_spread_though_only_one_replica_polls_in_time() -> None:
    there = RequestQueue("policy")
    await asyncio.gather(call(there, "a"), call(there, "b"))
    ask(there, *map(request, range(20)))
    assert len(ids(await fetch(there, 1, "a"))) == 10
    assert len(ids(await fetch(there, 1, "b"))) == 10


@pytest.mark.slow
async def test_poll_does_not_look_at_all_that_waits() -> None:
    async def seconds(num_waiting: int) -> float:
        """CPU seconds of a poll that gets nothing: what waits falls to the other replica."""
        there = RequestQueue("policy", lease_seconds=600)

        async def poll(replica: str) -> float:
            task = asyncio.create_task(call(there, replica))
            start = time.process_time()
            await asyncio.sleep(0)
            seconds = time.process_time() - start
            task.cancel()
            return seconds

        await poll("a")
        await poll("b")
        waiting = ask(there, *map(request, range(2 * num_waiting)))
        await fetch(there, 1, "a")
        found = [await poll("a") for _ in range(20)]
        assert there.status().num_waiting == num_waiting
        for each in waiting:
            each.cancel()
        return min(found)

    assert await seconds(20_000) < 10 * await seconds(20)


async def test_conversations_stay_while_the_rest_of_their_burst_comes() -> None:
    there = RequestQueue("policy")
    polls = [asyncio.create_task(call(there, name)) for name in "ab"]
    await asyncio.sleep(0)
    ask(there, *(request(index, session=str(index)) for index in range(40)))
    first, second = (assignment.requests for assignment in await asyncio.gather(*polls))
    answered = {
        "a": [(ticket, output(1)) for ticket, _ in first],
        "b": [(ticket, output(1)) for ticket, _ in second],
    }
    polls = [asyncio.create_task(call(there, *each)) for each in answered.items()]
    await asyncio.sleep(0)
    ask(there, *(request(100, session=each.session_id) for _, each in first))
    assert len(ids(await polls[0])) == 10  # half of what has come until now
    again = asyncio.create_task(call(there, "a"))
    ask(there, *(request(200, session=each.session_id) for _, each in second))
    assert ids(await polls[1]) == [200] * 20 and ids(await again) == [100] * 10


async def test_conversation_leaves_a_replica_that_has_too_much_to_do() -> None:
    there = RequestQueue("policy")
    ask(there, *(request(index, session="the same") for index in range(20)))
    await fetch(there, 20, "a")
    ask(there, request(99, session="the same"))
    calls = [asyncio.create_task(call(there, name)) for name in "ab"]
    assert [ids(each) for each in await asyncio.gather(*calls)] == [[], [99]]


async def test_load_of_a_replica_counts_what_others_have_there() -> None:
    there = RequestQueue("policy")
    polls = [asyncio.create_task(call(there, "a", num_others=6)), asyncio.create_task(call(there, "b"))]
    await asyncio.sleep(0)
    ask(there, *map(request, range(10)))
    assert [len(ids(each)) for each in await asyncio.gather(*polls)] == [2, 8]


async def test_leaving_replica_answers_what_it_has_and_gets_no_more() -> None:
    there = queue()
    first, second = ask(there, request(1, session="s")), ask(there, request(2))
    orders = dict((await fetch(there, 2)).requests)
    ticket = next(each for each, sent in orders.items() if sent.session_id)
    ask(there, request(3, session="s"))
    assert ids(await call(there, answers=[(ticket, output(11))], is_leaving=True)) == []
    assert (await first[0]).token_ids == (11,) and not second[0].done(), "it goes on with the other one"
    assert ids(await call(there, "b")) == [3], "the conversation goes on with another replica"


@pytest.mark.slow
async def test_queue_whose_last_replica_leaves_has_none() -> None:
    """Else its actor would not add itself to the directory again, as long as that one samples."""
    there = queue()
    (first,) = ask(there, request(1))
    ((ticket, _),) = (await fetch(there, 1)).requests
    assert not there.has_no_replica
    (second,) = ask(there, request(2))
    assert ids(await call(there, is_leaving=True)) == [] and there.has_no_replica
    await call(there, answers=[(ticket, output(11))], is_leaving=True)
    assert (await first).token_ids == (11,)
    with pytest.raises(SamplerError, match="No replica"):
        await second


async def test_replica_that_has_left_is_forgotten() -> None:
    there = queue()
    await call(there, "a", is_leaving=True)
    await call(there, "b")
    assert set(there.status().replicas) == {"a", "b"}
    while there.status().replicas["b"].is_live:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    assert set(there.status().replicas) == {"b"}, "the silent one may come back"


async def test_silent_replica_loses_its_requests_and_late_answers() -> None:
    there = queue()
    (waiting,) = ask(there, request(1))
    ((stale, _),) = (await fetch(there, 1, "stopped")).requests
    ((ticket, _),) = (await fetch(there, 1, "alive")).requests
    assert not there.status().replicas["stopped"].is_live
    told = await call(there, "stopped", answers=[(stale, output(1, 2, 3))])
    assert told == Assignment((), [stale])
    assert not waiting.done()
    assert there.status().num_late_tokens == 3
    assert there.status().replicas["stopped"].is_live
    await call(there, "alive", answers=[(ticket, output(7))])
    assert (await waiting).token_ids == (7,)


async def test_replica_that_was_silent_gets_work_once_it_polls() -> None:
    there = queue()
    (waiting,) = ask(there, request(1))
    await fetch(there, 1)
    await asyncio.sleep(2 * LEASE)
    (told,) = [await fetch(there, 1)]
    await call(there, answers=[(told.requests[0][0], output(5))])
    assert (await waiting).token_ids == (5,)


@pytest.mark.slow
async def test_request_that_outlives_too_many_replicas_fails() -> None:
    there = queue()
    (waiting,) = ask(there, request(1))
    for attempt in range(MAX_ATTEMPTS):
        await fetch(there, 1, f"replica-{attempt}")
    with pytest.raises(SamplerError, match=r"replica-0.*replica-3"):
        await waiting


@pytest.mark.slow
async def test_requests_without_a_replica_fail_and_name_the_silent_one() -> None:
    there = queue()
    waiting = ask(there, request(1), request(2))
    await fetch(there, 1, "the only one (pid 7)")
    for each in waiting:
        with pytest.raises(SamplerError, match=r"the only one \(pid 7\), silent for"):
            await each
    assert there.has_no_replica


@pytest.mark.slow
async def test_late_request_waits_as_long_as_the_first() -> None:
    there = queue()
    (first,) = ask(there, request(1))
    await asyncio.sleep(PATIENCE / 2)
    (later,) = ask(there, request(2))
    with pytest.raises(SamplerError):
        await first
    await asyncio.sleep(LEASE / 2)
    assert not later.done(), "a retry of what has failed would fail at once, and the next one too"
    assert ids(await fetch(there, 1)) == [2]


async def test_request_without_a_caller_is_revoked() -> None:
    there = queue()
    (waiting, unfetched) = ask(there, request(1), request(2, min_version=9))
    ((ticket, _),) = (await fetch(there, 1)).requests
    for each in (waiting, unfetched):
        each.cancel()
    await asyncio.sleep(0)
    assert (await call(there)).revoked == [ticket]
    assert there.status().num_waiting == 0


async def test_tickets_of_an_actor_started_anew_are_others() -> None:
    before, after = queue(), queue()
    waiting = ask(before, request(1)) + ask(after, request(2))
    ((old, _),) = (await fetch(before, 1)).requests
    await fetch(after, 1)
    await call(after, answers=[(old, output(1))])
    assert not waiting[1].done()


async def test_status_counts_what_replicas_have_done() -> None:
    there = queue()
    ask(there, request(1), request(2))
    ((ticket, _), _) = (await fetch(there, 2)).requests
    await call(there, answers=[(ticket, output(1))], version=3, tokens=11)
    status = there.status().replicas["a"]
    assert (status.version, status.num_running, status.num_answered) == (3, 1, 1)
    assert status.engine.num_tokens == 11
