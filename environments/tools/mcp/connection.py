"""Connections of this process to MCP servers: at most one per server, made at the first use.

The client belongs to the event loop that it was made in. So a connection has a thread with a loop of its
own, and the thread that calls a tool waits for the answer with a limit.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import shutil
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO, TypeVar, cast

from environments.chat_endpoint import is_web_address
from environments.errors import ConfigError, EnvironmentFailure

if TYPE_CHECKING:
    from anyio.streams.memory import MemoryObjectReceiveStream
    from mcp import Client
    from mcp.types import CallToolResult, Tool

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PROBE_SECONDS = 2.0
"""Time in which a server whose call failed has to show that it is still there."""
_CLOSE_SECONDS = 10.0
"""More than the client takes to end a server that ignores end of input and SIGTERM."""
_STDERR_LINES = 20

_LEASH = """
import ctypes, os, sys
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
if os.getppid() == int(parent):
    os.execv(command[0], command)
"""
"""Turns into the server, which the kernel then ends when its parent is killed. Most servers end by
themselves, because their input ends; one that is busy or ignores the end of its input would go on."""


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """The fields of an ``MCPServer``, which describes them.

    Raises:
        ConfigError: there is not exactly one of ``command`` and ``url``, an argument belongs to the other,
            or a time is not above 0.
    """

    command: str | None = None
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)
    prefix: str = ""
    start_seconds: float = 60.0
    timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ConfigError(
                f"An MCPServer has command={self.command!r} and url={self.url!r}: pass the command that "
                "starts it in each process, or the url of one that runs."
            )
        if self.url is None and self.headers:
            raise ConfigError(f"headers do not reach the command {self.command!r}: pass env, or a url.")
        if self.command is None and (self.args or self.env):
            raise ConfigError(f"args and env do not reach the url {self.url!r}: pass headers, or a command.")
        if self.url is not None and not is_web_address(self.url):
            raise ConfigError(
                f"url={self.url!r} is no web address: it has to start with http:// or https://."
            )
        if isinstance(self.args, str):
            raise ConfigError(f"args={self.args!r} is a text: pass a list, {self.args.split()!r}.")
        if not (self.start_seconds > 0 and self.timeout_seconds > 0):
            seconds = f"start_seconds={self.start_seconds} and timeout_seconds={self.timeout_seconds}"
            raise ConfigError(f"{seconds} have to be above 0.")
        object.__setattr__(self, "args", tuple(str(arg) for arg in self.args))  # hashable

    def __str__(self) -> str:
        """The server's name in messages. It holds no secret: neither ``env`` nor ``headers``."""
        return f"MCP server {self.url or ' '.join((str(self.command), *self.args))!r}"


_connections: dict[ServerAddress, Connection] = {}
_connections_lock = threading.Lock()


def connection(server: ServerAddress) -> Connection:
    """Return this process's connection to ``server``: equal descriptions share one."""
    with _connections_lock:
        return _connections.setdefault(server, Connection(server))


class Connection:
    """The connection to one server. A lost session is replaced at the next call, with one try."""

    def __init__(self, server: ServerAddress) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._session: _Session | None = None

    def definitions(self) -> list[Tool]:
        """The tools that the server listed when it was connected, or raise an EnvironmentFailure."""
        with self._lock:
            return (self._session or self._live_session()).definitions

    def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Have the server run a tool. A call that failed is not repeated: it may have had effects.

        Raises:
            TimeoutError: there was no answer in time.
            MCPError, ConnectionError: the server rejected the request, or ended before it answered.
            EnvironmentFailure: the server had ended already, and there is no way to a new one.
        """
        with self._lock:
            session = self._live_session()
        try:
            return session.run(session.client.call_tool(name, arguments), self._server.timeout_seconds)
        except Exception:
            if not session.answers():
                session.close(wait_seconds=0)
            raise

    def close(self) -> None:
        """End the session, and a server that was started for it."""
        with self._lock:
            if self._session is not None:
                self._session.close(_CLOSE_SECONDS)
            self._session = None

    def _live_session(self) -> _Session:
        if self._session is not None and not self._session.alive:
            logger.warning("The %s was lost; connecting again.%s", self._server, self._session.stderr_note)
            self._session.close(wait_seconds=0)
            self._session = None
        if self._session is None:
            self._session = _Session(self._server)
        return self._session


class _Session:
    """The life of a client, in a thread of its own, from the handshake to the server's end or ours."""

    def __init__(self, server: ServerAddress) -> None:
        self._server = server
        self._stderr = _Tail()
        self._incoming: MemoryObjectReceiveStream[Any] | None = None
        self._lock = threading.Lock()
        self._closing = False
        self._task: concurrent.futures.Future[asyncio.Task[Any]] = concurrent.futures.Future()
        self._started: concurrent.futures.Future[tuple[Client, list[Tool]]] = concurrent.futures.Future()
        self._thread = threading.Thread(target=self._run, name=str(server), daemon=True)
        self._thread.start()
        try:
            self.client, self.definitions = self._started.result(server.start_seconds)
        except Exception as error:
            in_time = self._started.done()
            self.close(_CLOSE_SECONDS)
            reason = _reason(error) if in_time else f"it did not answer within {server.start_seconds:g} s"
            raise EnvironmentFailure(
                f"The {server} cannot be used: {reason}. Check that the command or the url is right, and "
                f"that it runs by itself on this machine.{self.stderr_note}"
            ) from error

    @property
    def alive(self) -> bool:
        """False once we closed it, or a server that we started has closed its output."""
        lost = self._incoming is not None and not self._incoming.statistics().open_receive_streams
        return self._thread.is_alive() and not self._closing and not lost

    @property
    def stderr_note(self) -> str:
        """The end of the stderr of a server that we started, as a sentence to append."""
        text = self._stderr.text()
        return f" Its stderr ends with:\n{text}" if text else ""

    def run(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        """Run ``coroutine`` in the client's loop; raise a TimeoutError if that takes longer."""
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._task.result().get_loop())
        except RuntimeError as error:  # the loop has ended by itself
            coroutine.close()
            raise ConnectionError("the connection was closed") from error
        try:
            return future.result(seconds)
        except concurrent.futures.CancelledError as error:
            raise ConnectionError("the connection was closed") from error
        finally:
            future.cancel()

    def answers(self) -> bool:
        """Return whether the server lists its tools within ``_PROBE_SECONDS``; if not, it is treated as
        dead."""
        try:
            self.run(self.client.list_tools(cache_mode="bypass"), _PROBE_SECONDS)
        except Exception:
            logger.info("The %s does not answer any more.", self._server, exc_info=True)
            return False
        return True

    def close(self, wait_seconds: float) -> None:
        """End the client, and by it a server that was started; wait for that at most ``wait_seconds``."""
        with self._lock:
            first, self._closing = not self._closing, True
        if first:  # a second cancellation would break off the first one's work
            task = self._task.result()
            with suppress(RuntimeError):  # the loop has ended by itself
                task.get_loop().call_soon_threadsafe(task.cancel)
        self._thread.join(wait_seconds)

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except asyncio.CancelledError:
            logger.debug("The connection to the %s was closed.", self._server)
        except Exception as error:
            if not self._started.done():
                self._started.set_exception(error)
            logger.info("The connection to the %s broke.", self._server, exc_info=True)

    async def _live(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task.set_result(task)
        from mcp import Client

        transport = self._stdio() if self._server.url is None else self._http(self._server.url)
        async with Client(transport) as client:
            self._started.set_result((client, await _all_tools(client)))
            await asyncio.Event().wait()  # until close() cancels the task

    @asynccontextmanager
    async def _stdio(self) -> AsyncIterator[tuple[Any, Any]]:
        from mcp import StdioServerParameters, stdio_client

        command, env = str(self._server.command), dict(self._server.env)
        program = shutil.which(command, path=env.get("PATH"))
        if program is None:
            raise FileNotFoundError(f"the command {command!r} is not on the PATH")
        args = ["-I", "-S", "-c", _LEASH, str(os.getpid()), program, *self._server.args]
        parameters = StdioServerParameters(command=sys.executable, args=args, env=env)
        async with AsyncExitStack() as stack:
            with self._stderr.writer() as stderr:  # ours is closed as soon as the server has its own
                incoming, outgoing = await stack.enter_async_context(stdio_client(parameters, stderr))
            self._incoming = cast("MemoryObjectReceiveStream[Any]", incoming)
            yield incoming, outgoing

    @asynccontextmanager
    async def _http(self, url: str) -> AsyncIterator[tuple[Any, Any]]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        timeout = httpx2.Timeout(self._server.timeout_seconds, read=None)  # calls have their own limit
        async with (
            httpx2.AsyncClient(
                headers=dict(self._server.headers), timeout=timeout, follow_redirects=True
            ) as http,
            streamable_http_client(url, http_client=http) as streams,
        ):
            yield streams


class _Tail:
    """The last lines of a stream that may be written to for ever. They are also logged, at level DEBUG."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_STDERR_LINES)
        self._ended = threading.Event()
        self._ended.set()

    def writer(self) -> TextIO:
        """The end to write to. The caller closes it."""
        self._ended.clear()
        read_end, write_end = os.pipe()
        threading.Thread(target=self._read, args=(read_end,), name="stderr of MCP", daemon=True).start()
        return os.fdopen(write_end, "w")

    def text(self) -> str:
        """The lines so far; all of them, if the writer has just ended."""
        self._ended.wait(0.5)
        return "".join(self._lines)

    def _read(self, read_end: int) -> None:
        with os.fdopen(read_end, encoding="utf-8", errors="replace") as stream:
            for line in stream:
                self._lines.append(line)
                logger.debug("%s", line.rstrip())
        self._ended.set()


async def _all_tools(client: Client) -> list[Tool]:
    """The definitions of all tools, page by page."""
    page = await client.list_tools()
    tools = list(page.tools)
    while page.next_cursor is not None:
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    return tools


def _reason(error: BaseException) -> str:
    """The root cause of an error that task groups have wrapped."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".rstrip(".: ")
