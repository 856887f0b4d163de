"""The client of a rollout function: the policy's address, and a way to start programs that call it."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.errors import AgentError
from environments.sandbox.base import clip
from environments.sandbox.child import seen_paths
from environments.sandbox.local import EnclosedProgram
from environments.sandbox.process_tree import Supervised, bytes_within, remove_folder, usage_of

if TYPE_CHECKING:
    from ssl import SSLContext

MODEL = "policy"
"""Name of the model, for clients that want one; any other name means the same."""
WATCH_SECONDS = 0.2
KEPT_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "VIRTUAL_ENV", "SSL_CERT_FILE")
"""Variables of this process that programs need to start; the others stay here."""
MAX_PROGRAM_FILES = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramLimits:
    """Limits of a program and all the processes that it starts, together."""

    seconds: float = 600.0
    memory_bytes: int = 2 << 30
    file_bytes: int = 256 << 20
    """Size of all files in its folder."""
    num_threads: int = 512
    """Threads of all its processes; the kernel lets an isolated program have 300."""
    output_bytes: int = 64 << 10
    """Most of its output that is kept: the beginning and the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramResult:
    """The result of a program: ``exit_code`` is that of its first process, negative for a signal."""

    exit_code: int
    output: str
    """Both stdout and stderr."""
    limit: str = ""
    """The limit at which it was ended, if it was."""
    files: dict[str, bytes] = field(default_factory=dict)
    """The contents of those files of ``collect`` that were there at its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """The way into the gateway for the programs of one rollout."""

    url: str
    """Address for programs of this machine, without ``/v1``."""
    key: str
    open_to_others: Callable[[], str]
    """Function that has the gateway listen for other machines too, and returns its address for them."""
    idle_seconds: Callable[[], float]
    """Function that returns the time since their last call; 0 before the first, and while one waits."""
    session: str
    """Name of the rollout; it opens nothing."""
    serve: Callable[[socket.socket], Callable[[], None]]
    """Function that answers at another listening socket too, until the one that it returns is called."""


class PolicyClient:
    """Address and key of a rollout, clients that speak for it, and programs that are started for it.

    Attributes:
        base_url: address for clients of OpenAI's API; it ends with ``/v1``.
        api_key: opens this rollout only, until it has ended.
        model: a name for the field ``model``; all names mean the policy.
        session: name of the rollout, under which a reward is given later. It opens nothing.

    Args:
        is_async: the function is a coroutine function, and gets asynchronous clients.
    """

    def __init__(self, access: Access, is_async: bool) -> None:
        self.base_url, self.api_key, self.model = f"{access.url}/v1", access.key, MODEL
        self.session = access.session
        self._access, self._is_async = access, is_async
        self._ends: set[Callable[[], object]] = set()
        """Functions that end what goes on now."""
        self._is_closed = False

    @cached_property
    def openai(self) -> Any:
        """An ``openai.AsyncOpenAI`` for a coroutine function, else an ``openai.OpenAI``."""
        import openai

        kind = openai.AsyncOpenAI if self._is_async else openai.OpenAI
        return kind(base_url=self.base_url, api_key=self.api_key, **self._options(openai))

    @cached_property
    def anthropic(self) -> Any:
        """An ``anthropic.AsyncAnthropic`` for a coroutine function, else an ``anthropic.Anthropic``."""
        import anthropic

        kind = anthropic.AsyncAnthropic if self._is_async else anthropic.Anthropic
        return kind(base_url=self._access.url, api_key=self.api_key, **self._options(anthropic))

    def _options(self, package: Any) -> dict[str, Any]:
        """Arguments of a client: the rollout has a time limit of its own, and the address no certificate."""
        kind = package.DefaultAsyncHttpxClient if self._is_async else package.DefaultHttpxClient
        return {"max_retries": 0, "timeout": None, "http_client": kind(verify=unverified())}

    async def aclose(self) -> None:
        """Close the connections of a coroutine function, in its event loop."""
        for name in ("openai", "anthropic"):
            if name in vars(self):
                await vars(self)[name].close()

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which programs of this machine find the policy."""
        return self._variables(self._access.url)

    @property
    def remote_environment(self) -> dict[str, str]:
        """Variables by which programs of other machines find it: at an address of this node."""
        return self._variables(self._access.open_to_others())

    def idle_seconds(self) -> float:
        """Return the seconds since its programs have last called; 0 before that, and while a call waits."""
        return self._access.idle_seconds()

    def _variables(self, url: str) -> dict[str, str]:
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_BASE": f"{url}/v1",
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": self.api_key,
        }

    def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str | bytes] = {},
        collect: Collection[str] = (),
        environment: Mapping[str, str] = {},
        limits: ProgramLimits = ProgramLimits(),  # it is frozen
        isolated: bool = False,
        visible: Sequence[str] = (),
    ) -> ProgramResult:
        """Run a program that calls the policy, in a folder of its own, and wait for its end.

        It finds the policy by ``self.environment``. All that it has started ends with it, and with the
        rollout. A coroutine function awaits it by ``await asyncio.to_thread(client.run, command)``.

        Args:
            command: the program and its arguments.
            files: contents by the path in its folder, which is also its ``HOME``.
            collect: paths in its folder whose contents the result holds.
            environment: more variables.
            isolated: it runs in namespaces of its own: it reaches no address but ``self.base_url``, sees no
                other process (in a container that masks /proc: their command lines), and no files but the
                system's, this Python's packages, its folder and ``visible``. Else it may do what you may.
            visible: absolute paths of files and folders that an isolated program may read.

        Raises:
            AgentError: it cannot be started.
            ConfigError: this machine does not let it be isolated.
        """
        with ExitStack() as ending:
            folder = tempfile.mkdtemp(prefix="rollout-")
            ending.callback(remove_folder, folder)
            for name, content in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.encode() if isinstance(content, str) else content)
            output = ending.enter_context(tempfile.TemporaryFile())
            kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
            variables = {**kept, "HOME": folder, "TMPDIR": folder, **self.environment, **environment}
            _check_command(command, variables.get("PATH"), folder, visible, isolated)
            program: Supervised
            if isolated:
                variables.pop("SSL_CERT_FILE", None)  # it sees no such file, and calls without TLS
                address = self._access.url.removeprefix("http://")  # so it finds the policy where others do
                program = enclosed = EnclosedProgram(
                    command, folder, variables, output, address, visible, limits.file_bytes
                )
                ending.callback(self._access.serve(enclosed.listener))
            else:
                program = Supervised(command, folder, variables, output)
            ending.callback(program.end)
            ending.enter_context(self.at_end(program.end))
            limit = "the end of the rollout" if self._is_closed else _watch(program.process, folder, limits)
            exit_code = program.end()
            output.seek(0)
            text = output.read().decode("utf-8", "replace")
            return ProgramResult(
                exit_code=exit_code,
                output=clip(text, limits.output_bytes),
                limit=limit,
                files=dict(_collected(Path(folder).resolve(), collect)),
            )

    @contextmanager
    def at_end(self, end: Callable[[], object]) -> Iterator[None]:
        """Call ``end``, maybe in another thread, where the rollout ends within, or has ended before."""
        self._ends.add(end)
        try:
            if self._is_closed:
                end()
            yield
        finally:
            self._ends.discard(end)

    def close(self) -> None:
        """End all programs; none can be started any more."""
        self._is_closed = True
        for end in list(self._ends):
            end()


@cache
def unverified() -> SSLContext:
    """The context of all clients of addresses without a certificate: it takes longer than the rest of one."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _check_command(
    command: Sequence[str], path: str | None, folder: str, visible: Sequence[str], isolated: bool
) -> None:
    """The program is there, and can be seen where it runs. Raises ``AgentError``."""
    found = shutil.which(command[0], path=path)
    if found is None:
        raise AgentError(f"The program {command[0]!r} of {list(command)} is not found: install it.")
    if visible and not isolated:
        raise AgentError(f"visible={list(visible)} has no effect on a program that sees all: isolated=True.")
    for each in visible:
        around = Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(each))
        if around or not os.path.isabs(each) or not os.path.exists(each):
            raise AgentError(
                f"visible={list(visible)} has {each!r}: name absolute paths that exist, and not around "
                f"{tempfile.gettempdir()}, where the program's own folder lies."
            )
    place = Path(os.path.abspath(found))
    if isolated and not any(map(place.is_relative_to, seen_paths(visible))):
        raise AgentError(
            f"An isolated program does not see {place}: add the folder of its installation to visible="
            f"{list(visible)}, or install it in this Python."
        )


def _collected(folder: Path, names: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """The files of a program that has ended, without those to which its links lead outside."""
    for name in names:
        path = Path(os.path.realpath(folder / name))  # which takes a circle of links, too
        with suppress(OSError):  # a program may forbid what it leaves: no way to fail its rollout
            if path.is_relative_to(folder) and path.is_file():
                yield name, path.read_bytes()


def _watch(program: subprocess.Popen[bytes], folder: str, limits: ProgramLimits) -> str:
    """Wait for a program's end; return the limit that it has reached before."""
    deadline = time.monotonic() + limits.seconds
    while True:
        with suppress(subprocess.TimeoutExpired):
            program.wait(WATCH_SECONDS)
            return ""
        if time.monotonic() >= deadline:
            return f"{limits.seconds:g} s"
        used = usage_of([program.pid], limits.memory_bytes, limits.num_threads, deadline)
        if used.memory_bytes > limits.memory_bytes:
            return f"memory_bytes={limits.memory_bytes}"
        if used.num_threads > limits.num_threads:
            return f"num_threads={limits.num_threads}"
        size = bytes_within(folder, MAX_PROGRAM_FILES)
        if size is None or size > limits.file_bytes:
            return f"file_bytes={limits.file_bytes}"
