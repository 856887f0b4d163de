"""A model behind an OpenAI-compatible address: a judge, an opponent in an environment, or a teacher."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from environments.errors import ConfigError, EnvironmentFailure
from environments.types import Message

if TYPE_CHECKING:
    from openai import OpenAI

Result = TypeVar("Result")
MAX_FAULT = 500
"""Characters of a server's own words in an error."""


def is_web_address(text: str) -> bool:
    """Return whether ``text`` begins with http:// or https://, and a host and a port that there can be."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, for example
        return False


class Reply(NamedTuple):
    """The model's text, and what it has cost."""

    text: str
    finish_reason: str
    num_tokens: int | None
    """Tokens of the prompt and of the reply; ``None`` where the server does not count them."""


@dataclass(frozen=True)
class ChatEndpoint:
    """A model of OpenAI, vLLM, or any server like these; of this run's own server with ``server.http_port``.

    It is plain data, without a connection and without a key. Each process of a rollout reads the key from
    its own environment, which on a cluster is that of its node.
    """

    base_url: str
    """Address, mostly with the path ``/v1``."""
    model: str
    key_variable: str | None = None
    """Name of the environment variable that holds the API key; ``None`` for a server that needs none."""
    options: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0, "max_tokens": 1024})
    """Other fields of the request. OpenAI's thinking models take ``max_completion_tokens`` instead."""
    timeout_seconds: float = 60.0
    """Longest silence of the server in one try."""
    retries: int = 3
    """Number of further tries, with growing pauses, after a timeout, a lost connection, or a status of
    408, 409, 429 or 5xx. All tries together should be shorter than ``rollout.timeout_seconds``."""

    def __post_init__(self) -> None:
        if not is_web_address(self.base_url):
            raise ConfigError("base_url is no web address: write it like http://localhost:8000/v1.")
        parts = urlsplit(self.base_url)
        if parts.username or parts.password or parts.query:
            raise ConfigError(
                f"base_url, of the host {parts.hostname}, has a user, a password or a query, which would "
                "stand in logs: put the key into an environment variable, and its name into key_variable."
            )
        if self.key_variable is not None and not self.key_variable.isidentifier():
            raise ConfigError(
                "key_variable is no name of an environment variable, and may be a key, which settings and "
                "logs would show: put the key into a variable, and the variable's name here."
            )

    def reply(self, messages: Sequence[Message], **form: Any) -> Reply:
        """Return the model's answer to ``messages``.

        Args:
            form: further fields of this request, such as ``response_format``.

        Raises as ``post`` does.
        """
        body = {"messages": list(messages), **self.options, **form}
        return self.post("/chat/completions", body, _reply)

    def post(self, path: str, body: Mapping[str, Any], read: Callable[[Any], Result]) -> Result:
        """Return what ``read`` makes of the answer to ``body``, to which the model's name is added.

        Raises:
            ConfigError: the variable of the key is not set, or holds no key.
            EnvironmentFailure: there is no answer. Its message, and what is behind it, are without the key.
        """
        import openai

        key = self.key()
        try:
            client = _client(self.base_url, key, self.timeout_seconds, self.retries, os.getpid())
            return read(client.post(path, cast_to=object, body={"model": self.model, **body}))
        except openai.OpenAIError as error:
            fault = str(error)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            fault = f"it sent no answer of {path} ({error!r})"
        if self.key_variable is not None:
            fault = fault.replace(key, "***")
        # Not as its cause: a server may repeat the key, and a traceback would show it.
        raise EnvironmentFailure(
            f"The model {self.model!r} at {self.base_url} does not answer (timeout_seconds="
            f"{self.timeout_seconds:g}, retries={self.retries}): {fault[:MAX_FAULT]}"
        )

    def key(self) -> str:
        """The server's key, of this process. Raises ``ConfigError`` as ``post`` does."""
        if self.key_variable is None:
            return "none"
        key = os.environ.get(self.key_variable, "").strip()
        if not key:
            raise ConfigError(
                f"key_variable={self.key_variable!r}, of the model {self.model!r} at {self.base_url}, is not "
                "set in the environment of this process: set it on each node, before Ray is started there."
            )
        if not (key.isascii() and key.isprintable()):  # no header; the client's error would show it, escaped
            raise ConfigError(
                f"key_variable={self.key_variable!r} holds a character that no key can have, such as a line "
                "break or an invisible space: copy the key again."
            )
        return key


def _reply(response: Any) -> Reply:
    choice, usage = response["choices"][0], response.get("usage")
    return Reply(
        text=str(choice["message"].get("content") or "").encode("utf-8", "replace").decode(),
        finish_reason=str(choice.get("finish_reason") or "stop"),
        num_tokens=None if usage is None else usage["prompt_tokens"] + usage["completion_tokens"],
    )


@functools.lru_cache(maxsize=16)
def _client(base_url: str, key: str, timeout_seconds: float, retries: int, process_id: int) -> OpenAI:
    """The client of this process: a forked one has connections of its own, and making one takes 20 ms."""
    import openai

    return openai.OpenAI(base_url=base_url, api_key=key, timeout=timeout_seconds, max_retries=retries)
