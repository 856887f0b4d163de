from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress

import pytest

from launch.health.interrupt import Interrupts
from launch.settings.command import Command
from launch.settings.tree import TrainConfig
from launch.training.trainer import AgentTrainer


def interrupt(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # Python handles a signal between two instructions of the main thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_interrupts_at_once_outside_of_whole_work(number: int) -> None:
    with Interrupts().installed(), pytest.raises(KeyboardInterrupt):
        interrupt(number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whole_work_is_finished_before_the_interrupt(number: int) -> None:
    interrupts, done = Interrupts(), []
    with interrupts.installed(), pytest.raises(KeyboardInterrupt):
        with interrupts.atomic_section():
            interrupt(number)
            done.append("work")
        done.append("after")
    assert done == ["work"]


def test_nested_whole_work_is_finished_to_its_outer_end() -> None:
    interrupts, done = Interrupts(), []
    with interrupts.installed(), pytest.raises(KeyboardInterrupt), interrupts.atomic_section():
        with interrupts.atomic_section():
            interrupt()
            done.append("inner")
        done.append("outer")
    assert done == ["inner", "outer"]
    assert not interrupts.was_cut


def test_second_signal_is_not_put_off() -> None:
    interrupts, done = Interrupts(), []
    with interrupts.installed(), pytest.raises(KeyboardInterrupt), interrupts.atomic_section():
        interrupt()
        done.append("first")
        interrupt()
        done.append("second")
    assert done == ["first"]
    assert interrupts.was_cut, "what was cut off is no state to save"


def test_interrupt_is_raised_once() -> None:
    interrupts = Interrupts()
    with interrupts.installed():
        with pytest.raises(KeyboardInterrupt), interrupts.atomic_section():
            interrupt()
        with interrupts.atomic_section():  # such as the checkpoint that is written because of it
            pass


def test_swallowed_interrupt_is_raised_at_the_next_check() -> None:
    interrupts = Interrupts()
    with interrupts.installed():
        interrupts.raise_if_interrupted()
        with suppress(BaseException):  # as libraries do around their imports
            interrupt()
        with pytest.raises(KeyboardInterrupt):
            interrupts.raise_if_interrupted()


def test_handler_that_a_library_has_replaced_is_put_back() -> None:
    interrupts = Interrupts()
    with interrupts.installed():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        interrupts.install()
        with pytest.raises(KeyboardInterrupt):
            interrupt(signal.SIGTERM)


def test_error_in_whole_work_is_not_replaced_by_the_interrupt() -> None:
    interrupts = Interrupts()
    with interrupts.installed(), pytest.raises(ValueError, match="of the work"), interrupts.atomic_section():
        interrupt()
        raise ValueError("of the work")


def test_interrupt_that_an_error_has_overtaken_is_still_known() -> None:
    interrupts = Interrupts()
    with interrupts.installed():
        assert not interrupts.is_pending
        with pytest.raises(ValueError), interrupts.atomic_section():
            os.kill(os.getpid(), signal.SIGINT)
            raise ValueError
        assert interrupts.is_pending


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with Interrupts().installed():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_other_threads_may_train_too() -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            interrupts = Interrupts()
            with interrupts.installed(), interrupts.atomic_section():
                pass
        except ValueError as error:  # what signal.signal raises there
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not errors


def test_command_is_interruptible_before_its_run_begins() -> None:
    """Its workload may have started a process of its own, which Python's end closes, and a signal's not."""

    def load_workload(_: TrainConfig) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        interrupt(signal.SIGTERM)

    assert Command(name="train", summary="", work=load_workload, settings=()).run([]) == 130


@pytest.mark.slow  # it imports Ray
def test_training_is_interruptible_while_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*_: object) -> None:
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        interrupt(signal.SIGTERM)

    monkeypatch.setattr("launch.training.trainer.check_training", check)
    with pytest.raises(KeyboardInterrupt):
        AgentTrainer().train()
