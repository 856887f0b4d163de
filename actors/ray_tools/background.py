"""Work in a thread, whose result or error goes to the caller that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def in_background(work: Callable[[], Result], name: str) -> Future[Result]:
    """Do ``work`` in a daemon thread, so that a program that is interrupted need not wait for it."""
    future = Future[Result]()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001  # the caller that waits raises it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
