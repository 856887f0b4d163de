"""The time limit of a rollout, which a signal in the main thread keeps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from actors import rollout_actor
from actors.rollout_actor import TimeLimitReached, time_limit


@pytest.fixture
def blocked_alarm() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_a_block_that_is_too_slow_is_interrupted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_actor, "REPEAT_SECONDS", 0.05)
    interruptions = 0
    start = time.monotonic()
    with pytest.raises(TimeLimitReached), time_limit(0.05):
        try:
            time.sleep(5)
        except TimeLimitReached:
            interruptions += 1
            time.sleep(0.2)  # as an environment that tidies up: nothing cuts that off
            raise

    assert interruptions == 1
    assert 0.25 <= time.monotonic() - start < 2


def test_a_block_that_is_in_time_is_left_alone() -> None:
    with time_limit(0.05):
        pass
    time.sleep(0.1)

    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_signal_that_another_thread_has_taken_is_sent_again(
    blocked_alarm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_actor, "REPEAT_SECONDS", 0.2)
    thief = threading.Thread(target=signal.sigwait, args=({signal.SIGALRM},))
    thief.start()

    with pytest.raises(TimeLimitReached), time_limit(0.05):
        thief.join(timeout=5)
        assert not thief.is_alive()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
        time.sleep(5)
        pytest.fail("nobody interrupted the block")
