"""The address of an MCP server, which its tools and its connection share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from environments.errors import ConfigError


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
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"url={self.url!r} has to start with http:// or https://.")
        if isinstance(self.args, str):
            raise ConfigError(f"args={self.args!r} is a text: pass a list, {self.args.split()!r}.")
        if not (self.start_seconds > 0 and self.timeout_seconds > 0):
            raise ConfigError(
                f"start_seconds={self.start_seconds} and timeout_seconds={self.timeout_seconds} have to be "
                "above 0."
            )
        object.__setattr__(self, "args", tuple(str(arg) for arg in self.args))  # hashable

    def __str__(self) -> str:
        """The server's name in messages. It holds no secret: neither ``env`` nor ``headers``."""
        return f"MCP server {self.url or ' '.join((str(self.command), *self.args))!r}"
