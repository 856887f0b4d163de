"""An episode of a verifiers environment, with an agent of ours where verifiers has a model.

verifiers calls a model through a chain: a seat has a harness, a program that converses; the
harness calls an endpoint on this machine, the interception, which records, checks limits and asks a
client. Two of them are replaced. The client is ``AgentAsModel``, except in a seat whose configuration names
one. The harness is the chat loop of verifiers' ``null`` harness (prompt, model, tools, model, ...) inside
this process, because verifiers' harnesses are scripts that ``uv`` installs from the network.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from environments.adapters import foreign
from environments.errors import ConfigError
from environments.tool_environment import read_call
from environments.tools import ToolOutput
from environments.types import Message

MODEL = "policy"
"""The model's name in traces of verifiers."""
TOKEN_LIMITS = ("max_input_tokens", "max_output_tokens", "max_total_tokens")


@dataclass(frozen=True)
class ModelCall:
    """A request in OpenAI's shape, and the place for its answer, an assistant message."""

    body: dict[str, Any]
    answer: asyncio.Future[Message]


class AgentAsModel:
    """Stands in for verifiers' model client: it puts each call into the queue ``calls``."""

    def __init__(self) -> None:
        self.calls: asyncio.Queue[ModelCall] = asyncio.Queue()

    async def get_response(self, dialect: Any, body: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        call = ModelCall(body, asyncio.get_running_loop().create_future())
        await self.calls.put(call)
        message = await call.answer
        reason = "tool_calls" if message.get("tool_calls") else "stop"
        reply = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
            "choices": [{"index": 0, "finish_reason": reason, "message": message}],
        }
        response = dialect.parse_response(dialect.validate_response(reply))
        response.raw = reply
        return response


@dataclass(frozen=True)
class AgentInterception:
    """verifiers' interception server, but with our agent behind its endpoint."""

    server: Any
    model: AgentAsModel

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        async with self.server.acquire(session) as slot:
            session.client = self.model
            yield slot


async def play(world: Any, task: Any, model: AgentAsModel) -> Any:
    """Run one episode and return it; verifiers' ``Env.run_episode``, but with agents of ours in the seats.

    Raises:
        ConfigError: our agent would play several seats that are rewarded.
    """
    vf = foreign("verifiers.v1", "verifiers")
    interception = foreign("verifiers.v1.interception", "verifiers")
    record = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
    episode = vf.Episode(env=vf.EnvInfo(id=world.config.env_id), task=record)
    async with world.shared_tools() as tools:
        state_secrets = tuple(tool.state_secret for tool in tools.values() if tool.state_secret)
        async with interception.InterceptionServer(state_service_secrets=state_secrets) as server:
            seat = _seat_maker(AgentInterception(server, model), tools, type(task), episode.traces)
            agents = vf.Agents(world.config, seat)
            try:
                await world.start()
                await world.setup(agents)
                _check_seats(world.config, agents)
                await world.run(task, agents)
            finally:
                await world.stop()
    await world.finalize(task, episode)
    return episode


def check_limits(config: Any) -> None:
    """No seat of our agent has a limit on tokens: verifiers counts those that a client reports, so none.

    Raises:
        ConfigError: a seat that our agent plays has one.
    """
    fields = foreign("verifiers.v1.configs.agent", "verifiers").agent_config_fields(config)
    for name, seat in fields.items():
        for limit in TOKEN_LIMITS if seat.client is None else ():
            if (value := getattr(seat, limit)) is not None:
                raise ConfigError(
                    f"The setting {limit}={value} of the seat {name!r} of the verifiers environment "
                    f"{config.env_id!r} has no effect where our agent plays it: leave it out, and set "
                    "rollout.max_response_tokens instead."
                )


def _check_seats(config: Any, agents: Any) -> None:
    """Our agent plays at most one rewarded seat: in a game for two, the mean of both rewards says nothing."""
    fields = foreign("verifiers.v1.configs.agent", "verifiers").agent_config_fields(config)
    rewarded = [name for name in fields if getattr(agents, name).is_rewarded]
    if len(rewarded) > 1:
        client = {"type": "eval", "base_url": "http://localhost:8000/v1"}
        raise ConfigError(
            f"The agent would play {' and '.join(rewarded)} of the verifiers environment {config.env_id!r}, "
            "but can be rewarded for one seat alone. Give the others a client in the task's config, such as "
            f"the policy itself: {json.dumps({rewarded[-1]: {'client': client}})} and server.http_port=8000."
        )


def _seat_maker(
    interception: AgentInterception, tools: dict[str, Any], task_class: type, traces: list[Any]
) -> Callable[[str, Any], Any]:
    """Make the agent of each seat for ``vf.Agents``; the trace of every seat is added to ``traces``."""
    base: Any = foreign("verifiers.v1", "verifiers").Agent

    class Seat(base):  # a class of verifiers, so it can only be made here
        def __init__(self, name: str, config: Any) -> None:
            self._ours = config.client is None
            config = config if config.model is not None else config.model_copy(update={"model": MODEL})
            super().__init__(config, interception=interception if self._ours else None)
            self.name = name
            if self.config.harness.id == "null":
                self.harness = _chat_loop(self.config.harness)

        @property
        def is_rewarded(self) -> bool:
            """Return whether our agent plays this seat, and the environment wants it trained."""
            return self._ours and bool(self.trainable)

        async def run(self, task: Any, **options: Any) -> Any:
            trace = await super().run(task, **self._completed(task, options))
            traces.append(trace)
            return trace

        @asynccontextmanager
        async def interaction(self, task: Any, **options: Any) -> AsyncIterator[Any]:
            async with super().interaction(task, **self._completed(task, options)) as interaction:
                yield interaction
            traces.append(interaction.trace)

        def _completed(self, task: Any, options: dict[str, Any]) -> dict[str, Any]:
            def stamp(trace: Any) -> None:
                trace.agent.name, trace.agent.trainable = self.name, self.is_rewarded
                if options.get("on_trace"):
                    options["on_trace"](trace)

            shared = tools if isinstance(task, task_class) else {}
            return {"tools": shared, **options, "on_trace": stamp}

    return Seat


def _chat_loop(config: Any) -> Any:
    """A harness that converses inside this process; verifiers' ``null`` harness does so in a script."""
    null = foreign("verifiers.v1.harnesses.null", "verifiers")
    runtimes = foreign("verifiers.v1.runtimes", "verifiers")

    base: Any = null.NullHarness

    class ChatLoop(base):  # as above
        SUPPORTS_TOOL_INTERCEPTION = False

        async def setup(self, runtime: Any) -> None:
            """Nothing to install."""

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            error = await _converse(endpoint, secret, mcp_urls, _opening(*self.resolve_prompt(data)))
            return runtimes.ProgramResult(exit_code=1 if error else 0, stdout="", stderr=error)

    return ChatLoop(config)


async def _converse(endpoint: str, secret: str, mcp_urls: dict[str, str], messages: list[Message]) -> str:
    """Call the model, and the tools that it asks for, until it asks for none; return the error, if any."""
    httpx = foreign("httpx", "httpx")
    mcp = foreign("verifiers.v1.harnesses.utils.mcp", "verifiers")
    async with AsyncExitStack() as stack:
        # No time limit, since this waits for the agent; no proxy, since the endpoint is on this machine.
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=None, trust_env=False))
        servers = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        schemas, dispatch, connections = await mcp.connect_mcp(servers, stack)
        headers = {"Authorization": f"Bearer {secret}"}
        while True:
            body = {"model": MODEL, "messages": messages, **({"tools": schemas} if schemas else {})}
            reply = await http.post(f"{endpoint}/chat/completions", json=body, headers=headers)
            if reply.status_code != httpx.codes.OK:
                return f"the model call was rejected: {reply.text}"
            message = reply.json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return ""
            for call in message["tool_calls"]:
                run = functools.partial(mcp.call_mcp, connections)
                content = await _tool_result(call, run, dispatch)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})


async def _tool_result(call: dict[str, Any], run: Callable[..., Any], dispatch: dict[str, Any]) -> Any:
    """Run a tool call; an error that the model can have caused is returned as text for the model."""
    read = read_call(call)
    if isinstance(read, ToolOutput):
        return read.to_string()
    if read.name not in dispatch:
        return f"Error: unknown tool {read.name!r}, known: {', '.join(dispatch) or 'none'}."
    return await run(dispatch, read.name, read.arguments)


def _opening(system_prompt: str | None, prompt: Any) -> list[Message]:
    """The messages that a conversation begins with."""
    chat = foreign("verifiers.v1.dialects.chat", "verifiers")
    messages: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(chat.message_to_wire(message) for message in prompt or ())]
