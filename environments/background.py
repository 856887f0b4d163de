"""Work in a thread, whose result or error goes to the caller that waits for it."""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

START_POLL_SECONDS = 0.01
_threads: set[threading.Thread] = set()


def in_background(work: Callable[[], Result], name: str) -> Future[Result]:
    """Do ``work`` in a daemon thread, so that a program that is interrupted need not wait for it."""
    future = Future[Result]()
    future.set_running_or_notify_cancel()  # so that a caller who waits no more cannot cancel it

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # the caller that waits raises it
            future.set_exception(error)
        finally:
            _threads.discard(thread)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return future


def concurrently(function: Callable[[Item], Result], items: Iterable[Item], most: int) -> list[Result]:
    """The results of ``function`` in the order of ``items``, by at most ``most`` calls at once.

    No call begins after one has failed, and those that have begun are waited for. They run in daemon threads:
    a program that is interrupted need not wait for them.

    Raises:
        BaseException: the error of an item that has one.
    """
    given = [*items]
    pending, results = enumerate(given), dict[int, Result]()

    def work() -> None:
        try:
            for number, item in pending:  # each thread takes others
                results[number] = function(item)
        except BaseException:
            deque(pending, maxlen=0)
            raise

    workers = [in_background(work, "one of several") for _ in given[:most]]
    wait(workers)
    for each in workers:
        each.result()
    return [results[number] for number in range(len(given))]


def run_coroutine(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run it to its end in another thread: that of a notebook's cell has an event loop already."""
    return in_background(partial(asyncio.run, coroutine), "coroutine").result()


def end_background_work(seconds: float = 5.0) -> None:
    """Raise ``SystemExit`` in the threads that are still at work, and wait for their end for ``seconds``.

    To be called before this process leaves Ray: a thread that calls Ray afterwards ends the whole process,
    with the exit status 1.
    """
    deadline = time.monotonic() + seconds
    threads = list(_threads)
    for thread in threads:
        # Ctrl-C may have come while it was started: it begins in a moment, or never.
        while thread in _threads and not thread.is_alive() and time.monotonic() < deadline:
            time.sleep(START_POLL_SECONDS)
        if not thread.is_alive():
            _threads.discard(thread)
        elif thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit)
            )
    for thread in filter(threading.Thread.is_alive, threads):
        thread.join(max(0.0, deadline - time.monotonic()))
