"""The time limit of a rollout, which a thread keeps by a signal to the main thread."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from actors.rollouts import time_limit
from actors.rollouts.time_limit import TimeLimit, TimeLimitReached

HANG_SECONDS = 60.0


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> TimeLimit:
    monkeypatch.setattr(time_limit, "LIMIT_REPEAT_SECONDS", 0.05)
    return TimeLimit()


@pytest.fixture
def alarm() -> Iterator[None]:
    """An environment's own: nothing happens when it goes off."""
    before = signal.signal(signal.SIGALRM, lambda _number, _frame: None)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_block_that_is_too_slow_is_interrupted_once(limit: TimeLimit) -> None:
    interruptions = 0
    start = time.monotonic()
    with pytest.raises(TimeLimitReached), limit.of(0.05):
        try:
            time.sleep(HANG_SECONDS)
        except TimeLimitReached:
            interruptions += 1
            time.sleep(0.2)  # as an environment that tidies up: nothing cuts that off
            raise

    assert interruptions == 1
    assert 0.25 <= time.monotonic() - start < 30


def test_nothing_is_interrupted_after_a_block_that_was_in_time(limit: TimeLimit) -> None:
    with limit.of(0.05):
        pass
    time.sleep(0.2)


def test_late_signal_hits_nothing_that_follows(
    limit: TimeLimit,
) -> None:
    with limit.of(0.05):
        pass
    signal.raise_signal(time_limit.SIGNAL)
    with limit.of(HANG_SECONDS):
        signal.raise_signal(time_limit.SIGNAL)


def test_alarm_of_an_environment_leaves_the_limit_alone(limit: TimeLimit, alarm: None) -> None:
    with pytest.raises(TimeLimitReached), limit.of(0.1):
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        time.sleep(0.05)
        signal.setitimer(signal.ITIMER_REAL, 0)  # as math-verify does when it has parsed in time
        time.sleep(HANG_SECONDS)
        pytest.fail("nobody interrupted the block")


def test_limit_leaves_an_alarm_of_an_environment_alone(limit: TimeLimit, alarm: None) -> None:
    signal.alarm(100)
    with limit.of(0.05):
        pass
    assert signal.alarm(0) > 90


@pytest.mark.slow
def test_signal_that_has_got_lost_is_sent_again(limit: TimeLimit, monkeypatch: pytest.MonkeyPatch) -> None:
    send, sent = signal.pthread_kill, []

    def lossy(thread: int, number: int) -> None:
        sent.append(number)
        if len(sent) == 3:
            send(thread, number)

    monkeypatch.setattr(signal, "pthread_kill", lossy)
    with pytest.raises(TimeLimitReached), limit.of(0.05):
        time.sleep(HANG_SECONDS)
        pytest.fail("nobody interrupted the block")
    time.sleep(0.2)
    assert sent == [time_limit.SIGNAL] * 3  # and none after it got through


def test_block_that_was_interrupted_can_be_followed_by_another(limit: TimeLimit) -> None:
    for _ in range(3):
        with pytest.raises(TimeLimitReached), limit.of(0.02):
            time.sleep(HANG_SECONDS)


def test_all_blocks_are_watched_by_one_thread(limit: TimeLimit) -> None:
    before = threading.active_count()
    for _ in range(100):
        with limit.of(HANG_SECONDS):
            pass
    assert threading.active_count() == before
