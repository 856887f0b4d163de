"""Worlds of OpenEnv (https://github.com/huggingface/OpenEnv, 0.10), by the WebSocket of their server.

Each episode is a connection, for which the server makes a world. The world ends with the connection, and so
with our process. OpenEnv's own package is not used: it needs an older mcp than Troupe.
"""

from __future__ import annotations

import json
import math
import random
import time
import urllib.parse
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from environments.adapters import foreign
from environments.adapters.openenv_server import address_of, is_started
from environments.base import BaseEnv
from environments.data.datasets import Dataset
from environments.errors import ConfigError, EnvironmentFailure
from environments.rewards.base import RewardFunction, unjudged
from environments.tool_environment import ToolEnvironment
from environments.tools.base import Tool, ToolOutput, encodable

ACT = "act"
"""Name of the one tool by which an action of several fields is taken."""
_MAX_MESSAGE_BYTES = 100 << 20  # as OpenEnv's own client: observations may be pictures
_NO_ROOM, _BAD_ACTION = "CAPACITY_REACHED", "VALIDATION_ERROR"
"""Codes of the server's errors after which an episode goes on."""


@dataclass(kw_only=True)
class Episode:
    """An episode of a world of ``server``: its connection, the reward of a step, and whether it is over.

    ``server`` is an address (``http://host:8000``, also ``ws://``), or a command that starts a server:
    ``uvicorn my_world.app:app --port PORT``. Each process that plays then starts one of its own, at a free
    port in the place of ``PORT``, and ends it at its own end, however that comes. To share a server, start
    it yourself. A server plays one session at a time unless its ``max_concurrent_envs`` is higher: others
    wait for ``capacity_seconds``. Each answer has to come within ``timeout_seconds``. ``start`` is what the
    world's reset gets, such as ``{"seed": 1}`` or ``{"split": "train", "index": 0}``.
    """

    server: str
    start: dict[str, Any] = field(default_factory=dict)
    instructions: str = ""
    timeout_seconds: float = 300.0
    capacity_seconds: float = 120.0
    is_over: bool = False
    _reward: float = 0.0
    _connection: Any = None
    _closing: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> Self:
        """Read the arguments, ``seed``, ``split`` and ``index`` as ``start``; ignore everything else."""
        if "server" not in info:
            raise ConfigError(f"The task has no 'server' (its keys: {', '.join(sorted(info))}): add one.")
        known = ("server", "instructions", "timeout_seconds", "capacity_seconds")
        arguments = {key: info[key] for key in known if key in info}
        return cls(start={key: info[key] for key in ("seed", "split", "index") if key in info}, **arguments)

    def begin(self) -> tuple[dict[str, str], dict[str, Any]]:
        """Reset a new world; return the first observation and its metadata."""
        data = self.open("reset", self.start)
        self.is_over = bool(data.get("done"))
        if self.is_over:
            raise EnvironmentFailure(f"The world of {self.server!r} was over after its reset: {self.start}.")
        parts = (self.instructions, text_of(data["observation"]))
        return {"question": "\n\n".join(filter(None, parts))}, {"metadata": data.get("metadata") or {}}

    def act(self, name: str, action: dict[str, Any]) -> ToolOutput:
        """Take an action; return the world's answer, or the error of an action that it does not accept."""
        if self.is_over:
            return ToolOutput(name, error="the episode is over.")
        data = self._exchange("step", action, _BAD_ACTION)
        if "code" in data:
            return ToolOutput(name, error=_error_text(data))
        reward = float(data.get("reward") or 0.0)
        if not math.isfinite(reward):
            raise EnvironmentFailure(f"The world of {self.server!r} gave the reward {reward} for {action}.")
        self._reward += reward
        self.is_over = bool(data.get("done"))
        if self.is_over:
            self.close()  # the server may have others who wait
        return _output(name, data["observation"])

    def take_reward(self) -> float:
        """Return the reward of the actions since the last call."""
        reward, self._reward = self._reward, 0.0
        return reward

    def close(self) -> None:
        """Close the connection, and so end the world."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # the server is gone
                connection.send('{"type": "close"}')
        self._closing.close()

    def open(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Send the first message in a new connection; wait while the server has no room for one."""
        deadline = time.monotonic() + self.capacity_seconds
        while True:
            self.close()
            self._reward = 0.0
            self._connect()
            answer = self._exchange(kind, data, _NO_ROOM)
            if "code" not in answer:
                return answer
            if time.monotonic() > deadline:
                raise self._failure(
                    f"has had no room for another session in capacity_seconds={self.capacity_seconds:g} "
                    f"({answer['message']}): start it with a higher max_concurrent_envs, or play fewer "
                    "episodes at a time (fleet.num_actors)."
                )
            time.sleep(random.uniform(0.05, 0.5))

    def _connect(self) -> None:
        client = foreign("websockets.sync.client", "websockets")
        address = "ws" + address_of(self.server).removeprefix("http") + "/ws"
        # Without pings: a world that holds up its server for long is not dead.
        options = {"max_size": _MAX_MESSAGE_BYTES, "ping_interval": None, "close_timeout": 2}
        options["proxy"] = None if is_started(self.server) else True
        try:
            self._connection = self._closing.enter_context(client.connect(address, **options))
        except (OSError, foreign("websockets.exceptions", "websockets").WebSocketException) as error:
            raise EnvironmentFailure(f"No OpenEnv server answers at {address}: {error}") from error

    def _exchange(self, kind: str, data: dict[str, Any], expected_error: str) -> dict[str, Any]:
        """Send a message; return the data of its answer, which hold a ``code`` in the expected error."""
        if self._connection is None:
            raise self._failure("has no session: call reset() first.")
        closed = foreign("websockets.exceptions", "websockets").ConnectionClosed
        try:
            with suppress(closed):  # its last words are still to be read
                self._connection.send(encodable(json.dumps({"type": kind, "data": data}, ensure_ascii=False)))
            answer = json.loads(self._connection.recv(self.timeout_seconds))
        except (OSError, closed, ValueError) as error:
            self.close()
            reason = str(error) or f"none within {self.timeout_seconds:g} s"
            raise self._failure(f"gave no answer to {kind!r}: {reason}") from error
        content: dict[str, Any] = answer["data"]
        if answer["type"] == "error" and content["code"] != expected_error:
            self.close()
            raise self._failure(f"answers {kind!r} by {content['code']}: {_error_text(content)}")
        return content

    def _failure(self, fault: str) -> EnvironmentFailure:
        return EnvironmentFailure(f"The OpenEnv server {self.server!r} {fault}")


class OpenEnvEnvironment(BaseEnv):
    """A world whose action is a text, ``text_field`` of OpenEnv's action; for ``GameAgent``.

    Rewards are the world's, and none is 0. A text that the world does not accept is answered by its error,
    at reward 0. A server that is gone, and a world that raises, is an ``EnvironmentFailure``.
    """

    wants_seed = True

    def __init__(self, episode: Episode, text_field: str) -> None:
        self._episode, self._text_field = episode, text_field

    def reset(self) -> tuple[dict[str, str], dict[str, Any]]:
        return self._episode.begin()

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        output = self._episode.act(self._text_field, {self._text_field: str(action)})
        return output.to_string(), self._episode.take_reward(), self._episode.is_over, {}

    def close(self) -> None:
        self._episode.close()

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> Self:
        """Read ``text_field`` and the arguments of ``Episode``, and ignore everything else."""
        return cls(Episode.from_dict(info), info["text_field"])


class OpenEnvToolEnvironment(ToolEnvironment):
    """A world with tools, or with an action of several fields, which is the tool ``ACT``; for ``ToolAgent``.

    ``tools`` are those of ``openenv_world``, which the agent gets too. Rewards are the world's. An answer
    without a call ends the episode: ``reward_fn`` may judge it, and adds nothing unless it is given.
    """

    wants_seed = True

    def __init__(
        self, episode: Episode, tools: list[WorldTool], reward_fn: RewardFunction | None = None
    ) -> None:
        self._episode = episode
        own: list[Any] = [WorldTool(tool.json, tool.is_action, episode) for tool in tools]
        super().__init__(tools=own, reward_fn=reward_fn or unjudged, max_steps=1 << 30)

    def reset(self) -> tuple[dict[str, str], dict[str, Any]]:
        self._count_from_zero()
        return self._episode.begin()

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        observation, reward, done, info = super().step(action)
        return observation, reward + self._episode.take_reward(), done or self._episode.is_over, info

    def compute_metrics(self) -> dict[str, float]:
        return {"called": super().compute_metrics()["called"]}

    def close(self) -> None:
        self._episode.close()

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> Self:
        """Read ``tools``, ``reward_fn`` and the arguments of ``Episode``, and ignore everything else."""
        return cls(Episode.from_dict(info), info["tools"], info.get("reward_fn"))


class WorldTool(Tool):
    """A tool of a world by its schema in OpenAI's shape; it can be called where it has an ``episode``.

    ``is_action`` means that its arguments are the world's action itself, and not those of a tool call.
    """

    def __init__(self, schema: dict[str, Any], is_action: bool, episode: Episode | None = None) -> None:
        function = schema["function"]
        super().__init__(function["name"], function["description"])
        self.is_action = is_action
        self._schema, self._episode = schema, episode

    @property
    def json(self) -> dict[str, Any]:
        return self._schema

    def forward(self, /, **arguments: Any) -> ToolOutput:
        if self._episode is None:
            raise ConfigError(f"The tool {self.name!r} has no world: give it to an OpenEnvToolEnvironment.")
        call = {"type": "call_tool", "tool_name": self.name, "arguments": arguments}
        return self._episode.act(self.name, arguments if self.is_action else call)


@dataclass(frozen=True)
class World:
    """The description of a server's world, and its actions: the field for a text, or else tools."""

    description: str
    text_field: str | None
    tools: list[WorldTool]


def openenv_world(server: str) -> World:
    """Find which actions the world of ``server`` takes.

    Raises:
        EnvironmentFailure: the server cannot be reached or started.
    """
    description = str(_fetch(server, "/metadata").get("description") or "")
    schema = _fetch(server, "/schema").get("action")
    if schema is None:
        raise EnvironmentFailure(f"{server!r} is no OpenEnv server: it has no /schema of its actions.")
    fields = {name: each for name, each in schema.get("properties", {}).items() if name != "metadata"}
    required = schema.get("required", [])
    if not fields or "tool_name" in fields:
        return World(description, None, _tools_of(server))
    if len(required) == 1 and fields[required[0]].get("type") == "string":
        return World(description, required[0], [])
    parameters = {**schema, "properties": fields}
    act = _tool(ACT, schema.get("description") or "Take an action.", parameters, is_action=True)
    return World(description, None, [act])


def openenv_tasks(server: str) -> list[Dataset]:
    """Return the tasks of ``server``, a data set for each split that has any, those for training first.

    A task is its ``split`` and ``index``, by which the world is reset. A server without tasks has no split.

    Raises:
        EnvironmentFailure: the server cannot be reached or started.
    """
    name = urllib.parse.quote((_fetch(server, "/list_environments") or [""])[0])
    splits = _fetch(server, f"/{name}/splits") or []
    datasets = []
    for split in sorted(splits, key=lambda each: each["type"] != "train"):
        count = _fetch(server, f"/{name}/num_tasks", {"split": split["name"]})["num_tasks"]
        rows = [{"split": split["name"], "index": index} for index in range(count)]
        datasets.append(Dataset(rows, name=name, split=split["name"]))
    return [each for each in datasets if len(each)]


def text_of(observation: dict[str, Any]) -> str:
    """Return an observation as a text: its only field, or a line for each, without metadata."""
    shown = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in observation.items()
        if key != "metadata" and value not in (None, "", [], {})
    }
    return "".join(shown.values()) if len(shown) == 1 else "\n".join(f"{k}: {v}" for k, v in shown.items())


def _fetch(server: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON at ``path``; an empty dict where the server has no such thing, as older ones have no tasks."""
    httpx = foreign("httpx", "httpx")
    address, method = address_of(server) + path, "GET" if body is None else "POST"
    options = {"timeout": 60, "follow_redirects": True, "trust_env": not is_started(server)}
    try:
        answer = httpx.request(method, address, json=body, **options)
        return {} if answer.status_code in (404, 405, 501) else answer.raise_for_status().json()
    except httpx.HTTPStatusError as error:
        status = f"{answer.status_code} {answer.reason_phrase}"
        raise EnvironmentFailure(f"The OpenEnv server answers {status} at {address}.") from error
    except (ImportError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:  # httpx[socks] is missing
        raise EnvironmentFailure(f"No OpenEnv server answers at {address}: {error}") from error


def _tools_of(server: str) -> list[WorldTool]:
    episode = Episode(server=server)
    try:
        found = episode.open("step", {"type": "list_tools"})
    finally:
        episode.close()
    tools = found["observation"].get("tools")
    if not tools:
        raise EnvironmentFailure(f"The world of {server!r} takes tool calls, but lists no tools: {found}.")
    return [_tool(tool["name"], tool["description"], tool["input_schema"]) for tool in tools]


def _tool(name: str, description: str, parameters: dict[str, Any], is_action: bool = False) -> WorldTool:
    function = {"name": name, "description": description or name, "parameters": parameters}
    return WorldTool({"type": "function", "function": function}, is_action)


def _error_text(content: dict[str, Any]) -> str:
    details = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in content.get("errors", ())]
    return "; ".join([content["message"], *details])


def _output(name: str, observation: dict[str, Any]) -> ToolOutput:
    """An observation as a tool's output; of a call, the text of its result, or its error."""
    match {key: value for key, value in observation.items() if key != "tool_name" and value is not None}:
        case {"error": {"error_type": "transport_error", "message": message}}:
            raise EnvironmentFailure(f"The world cannot run the tool {name!r}: {message}")
        case {"error": {"message": message}}:
            return ToolOutput(name, error=str(message))
        case {"result": {"content": [*blocks]}}:
            return ToolOutput(name, "\n".join(block.get("text") or f"[{block['type']}]" for block in blocks))
        case {"result": {} as result}:
            return ToolOutput(name, result)
        case shown:
            return ToolOutput(name, text_of(shown))
