from __future__ import annotations

import threading
import time

import pytest

from environments.background import end_background_work, in_background


def test_result_or_the_error_of_a_thread_goes_to_its_caller() -> None:
    assert in_background(lambda: 7, "seven").result(60) == 7
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 / 0, "nonsense").result(60)


def test_work_that_polls_ends_when_the_program_does() -> None:
    polls: list[float] = []

    def poll() -> None:
        while True:
            polls.append(time.monotonic())
            time.sleep(0.01)

    future = in_background(poll, "poll")
    while not polls:
        time.sleep(0.01)
    end_background_work(seconds=0.5)  # a thread of another test may be at work too
    assert isinstance(future.exception(60), SystemExit)
    number = len(polls)
    time.sleep(0.05)
    assert len(polls) == number


def test_work_that_cannot_be_ended_is_awaited_with_a_limit() -> None:
    free = threading.Event()
    future = in_background(lambda: free.wait(60), "wait")
    end_background_work(seconds=0.1)
    assert not future.done()
    free.set()


@pytest.mark.slow
@pytest.mark.parametrize("begins", [True, False])
def test_work_ends_that_ctrl_c_interrupts_at_its_start(begins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python waits for a new thread in its start, so Ctrl-C may come before or after the thread begins."""
    ended, start = threading.Event(), threading.Thread.start

    def poll() -> None:
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    def interrupted(thread: threading.Thread) -> None:
        if begins:
            start(threading.Timer(0.1, start, (thread,)))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        in_background(poll, "poll")
    end_background_work(seconds=1.0)
    assert ended.wait(5 if begins else 0.2) is begins
