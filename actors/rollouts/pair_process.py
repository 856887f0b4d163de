"""Processes that play rollouts for a rollout actor, each forked from one that has imported what they need.

A pair so costs what differs between pairs, and no Ray worker of its own. Its time and memory limits and its
crashes stay its own::

    RolloutActor ── fork ──▶ zygote.py ── os.fork ──▶ Player in a process of its own
         │                                               │
         └── run, close_pair ────────── pipe ────────────┤
             sample, record_turn, on_step ◀──────────────┘

The pipe holds pickled tuples: a name and its arguments. Between a call and its result the process may ask for
completions, each of which it waits for.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle

from actors.rollouts.player import Attempt, Link, Player, RolloutResult
from actors.rollouts.rollout import Pair, RolloutLimits, failed
from actors.rollouts.time_limit import SIGNAL, TimeLimitReached
from environments.errors import TroupeError
from environments.types import Completion, StepEvent, TerminationReason
from policies.sampler import SampleRequest

PID = struct.Struct("!i")
START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from actors.rollouts.zygote import main; main()"
)


class Zygote:
    """The process from which the processes of pairs are forked. It ends with this one, and they with it.

    Args:
        pair: its modules are imported there, once for all.

    Raises:
        RuntimeError: importing them fails, or starts threads.
    """

    def __init__(self, pair: Pair) -> None:
        self._control, theirs = socket.socketpair()
        arguments = [json.dumps(sys.path), str(theirs.fileno()), *pair.modules]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", START, *arguments],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # it ends what is left of its session, when this process has ended
            )
        self._lock = threading.Lock()
        with self._control.makefile("rb") as control:
            line = control.readline()
        if error := json.loads(line or b'"the one that imports for them was killed."'):
            self.end()
            raise RuntimeError(f"The processes of pairs cannot be forked: {error}")

    @property
    def is_alive(self) -> bool:
        """False when it was killed, and so all that were forked from it."""
        return self._process.poll() is None

    def fork(self, connection: Connection) -> int:
        """Fork a process that plays at the other end of ``connection``; return its id.

        Raises:
            RuntimeError: it cannot be forked.
        """
        with self._lock:
            socket.send_fds(self._control, [b"f"], [connection.fileno()])
            answer = self._control.recv(PID.size, socket.MSG_WAITALL)
        pid = int(PID.unpack(answer)[0]) if len(answer) == PID.size else -errno.ESRCH
        if pid < 0:
            raise RuntimeError(f"A pair's process cannot be forked: {os.strerror(-pid)}.")
        return pid

    def end(self) -> None:
        """End it, and all processes that were forked from it."""
        self._control.close()
        self._process.wait()


class PairProcess:
    """A player in a process of its own, which one thread calls at a time.

    Args:
        link: what the player asks for goes this way.

    Raises:
        RuntimeError: the process cannot make its player.
    """

    def __init__(self, zygote: Zygote, pair: Pair, limits: RolloutLimits, link: Link) -> None:
        self._link = link
        self._here, theirs = Pipe()
        with theirs:
            self._pid = zygote.fork(theirs)
        self._process = os.fdopen(os.pidfd_open(self._pid), "rb", buffering=0)
        try:
            self._here.send_bytes(cloudpickle.dumps((pair, limits, link.is_followed)))
            error = self._result()
        except OSError:
            error = "A pair's process has ended while it started."
        if error:
            self.end()
            raise RuntimeError(error)

    def check(self) -> None:
        """Raise ``ChildProcessError`` if the process has ended, while it plays nothing."""
        if self._here.poll():  # it says nothing unless it is called: that is the end of the pipe
            raise ChildProcessError("The process of the pair has ended.")

    def run(self, attempt: Attempt) -> RolloutResult:
        """Play a request; see ``Player.run``. A process that has ended has crashed."""
        try:
            result: RolloutResult = self._call("run", attempt)
        except OSError as error:
            text = f"The process of the pair has ended: it exited or was killed ({type(error).__name__})."
            return RolloutResult(failed(attempt.request, TerminationReason.CRASHED, text), usable=False)
        return result

    def close_pair(self) -> bool:
        """Close the environment that waits for a follow-up, and return whether it was in time."""
        try:
            return bool(self._call("close_pair"))
        except OSError:
            return False

    def end(self) -> None:
        """Kill the process and what it has started; a thread that waits for it goes on.

        The descriptors are closed with this object: that thread may be using them.
        """
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process.fileno(), signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        with suppress(OSError), socket.socket(fileno=os.dup(self._here.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_RDWR)

    def _call(self, name: str, *arguments: Any) -> Any:
        self._here.send_bytes(cloudpickle.dumps((name, arguments)))
        return self._result()

    def _result(self) -> Any:
        """Serve the process until it has a result."""
        while True:
            # A program of the process may hold the pipe's end, which is open then when the process has ended.
            if self._here not in wait([self._here, self._process.fileno()]):
                raise ConnectionResetError("The process has ended.")
            try:
                message = pickle.loads(self._here.recv_bytes())
            except EOFError as error:
                raise ConnectionResetError("The pipe has ended.") from error
            match message:
                case "sample", (request, deadline):
                    self._sample(request, deadline)
                case "record_turn", turn:
                    self._link.record_turn(*turn)
                case "on_step", (rollout_id, step):
                    self._link.on_step(rollout_id, step)
                case "result", (value,):
                    return value
                case "error", (text,):
                    raise RuntimeError(text)

    def _sample(self, request: SampleRequest, deadline: float) -> None:
        answer: Completion | TroupeError
        try:
            answer = self._link.sample(request, deadline)
        except TimeLimitReached:  # the process ends the rollout by its own clock
            return
        except TroupeError as error:
            answer = error
        if time.monotonic() < deadline:  # else the process does not read it, but sends its result
            self._here.send_bytes(cloudpickle.dumps(answer))


class PipeLink:
    """The way from a player to its rollout actor."""

    def __init__(self, connection: Connection, is_followed: bool) -> None:
        self._connection, self.is_followed = connection, is_followed

    def sample(self, request: SampleRequest, deadline: float) -> Completion:
        """Have the rollout actor sample a completion."""
        self.send("sample", request, deadline)
        answer = pickle.loads(self._connection.recv_bytes())
        if isinstance(answer, TroupeError):
            raise answer
        return answer

    def record_turn(self, rollout_id: str, attempt: int, index: int, entry: bytes) -> None:
        """Send a turn."""
        self.send("record_turn", rollout_id, attempt, index, entry)

    def on_step(self, rollout_id: str, step: StepEvent) -> None:
        """Send a step."""
        self.send("on_step", rollout_id, step)

    def send(self, name: str, *arguments: Any) -> None:
        """Send a message, whole: a time limit interrupts what comes after it."""
        message = cloudpickle.dumps((name, arguments))
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})  # runs the handler of one that has come before
            self._connection.send_bytes(message)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {SIGNAL})


def play(connection: Connection) -> None:
    """Play what the rollout actor sends, until it closes the pipe, or the process is not usable any more."""
    link = PipeLink(connection, is_followed=False)
    try:
        pair, limits, link.is_followed = pickle.loads(connection.recv_bytes())
        player = Player(pair, limits, link)
    except Exception as error:  # noqa: BLE001  # the rollout actor raises it, where it can be named
        link.send("result", f"A pair's process has not started: {type(error).__name__}: {error}")
        return
    link.send("result", "")
    while True:
        try:
            name, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        result = player.run(*arguments) if name == "run" else player.close_pair()
        try:
            link.send("result", result)
        except Exception as error:  # noqa: BLE001  # the user's objects, which may raise anything when pickled
            link.send("error", f"{type(error).__name__}: {error}")
