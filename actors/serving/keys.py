"""API keys of the policy server's endpoints, and the names that it is served under.

Of API keys, only the SHA-256 digests are kept.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from actors.settings import ServerConfig
from environments.bounds import Bound, check_choice
from environments.chat_endpoint import is_web_address
from environments.errors import ConfigError
from policies.model_api.errors import RequestError

logger = logging.getLogger("ray.serve")

LIMITED = ("requests", "tokens")
"""Keys of ``server.access.per_minute``."""
KEYS_VARIABLE = "TROUPE_API_KEYS"
MIN_KEY_CHARACTERS = 16
"""A digest of a shorter key could be found by trying."""
WILDCARDS = ("", "0.0.0.0", "::")
"""Hosts that stand for all addresses of a machine."""
PlacedKey = tuple[str, str, bytes]
"""The place where a key stands, for errors; its name, and its digest."""
_NAME = re.compile(r"[\w.@-]{1,64}")


@dataclass(frozen=True)
class ApiKeys:
    """The keys of an endpoint; without any, everybody who reaches it may use it."""

    digests: dict[str, bytes] = field(default_factory=dict)
    """SHA-256 of each key, by the key's name."""
    of_variable: tuple[PlacedKey, ...] = field(default=(), compare=False)
    """Keys that are not from ``server.access.keys_file``."""
    file: str | None = field(default=None, compare=False)
    """Path of that file, absolute: a replica may work in another folder."""

    def __bool__(self) -> bool:
        return bool(self.digests)

    def name_of(self, key: bytes) -> str | None:
        """The name of ``key``, or ``None`` for an unknown one. It takes as long for a wrong key as for a
        right one."""
        digest = hashlib.sha256(key).digest()
        found = None
        for name, known in self.digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found

    def sender(self, headers: Mapping[str, str]) -> str | None:
        """The name of the first known key that a request brings."""
        names = (self.name_of(key.encode("latin-1")) for key in sent_keys(headers))
        return next((name for name in names if name is not None), None)


class KeysFile:
    """``server.access.keys_file``, read anew when it has changed. A replica on a machine that has no such
    file keeps the keys that it was started with.

    Args:
        path: of the file.
        keys: those that hold now.
    """

    def __init__(self, path: str, keys: ApiKeys) -> None:
        self._path, self._of_variable = path, keys.of_variable
        self._stamp: tuple[int, int, int] | None = None

    def changed(self) -> ApiKeys | None:
        """The keys that hold from now on; ``None`` where they are the same as before."""
        try:
            state = Path(self._path).stat()
        except OSError:
            return None
        stamp = (state.st_mtime_ns, state.st_size, state.st_ino)
        if stamp == self._stamp:
            return None
        self._stamp = stamp
        try:
            return _with_file(self._of_variable, self._path)
        except ConfigError as error:
            logger.error("The keys stay as they are: %s", error)
            return None


def unknown_key(remedy: str) -> RequestError:
    """The error for a request whose key, if it has one, opens nothing here."""
    text = f"{remedy}, as `Authorization: Bearer KEY` or `x-api-key: KEY`."
    return RequestError(text, status=401, code="invalid_api_key")


def sent_keys(headers: Mapping[str, str]) -> list[str]:
    """The keys that a request brings: as OpenAI's clients send theirs, or as Anthropic's do."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return [*filter(None, (headers.get("x-api-key"), key.strip() if scheme.lower() == "bearer" else None))]


def access_keys(config: ServerConfig) -> ApiKeys:
    """The keys of the endpoint; none where there is no endpoint.

    Raises:
        ConfigError: a key or a name cannot be used, or the endpoint may not be served without one.
    """
    served_hosts(config)
    if config.http_port is None:
        return ApiKeys()
    host, access = config.http_host, config.access
    keys = read_keys(access.keys_file)
    if not keys and not is_loopback(host):
        raise ConfigError(
            f"server.http_host={host} would let everybody in who reaches this machine: set {KEYS_VARIABLE}="
            "name:key or server.access.keys_file, or leave it at 127.0.0.1."
        )
    if host in WILDCARDS and not access.hosts:
        raise ConfigError(
            f"server.http_host={host} has to know by which names clients reach this machine: add "
            "server.access.hosts=[my-machine.example], for example."
        )
    if not keys and access.per_minute:
        raise ConfigError(
            f"server.access.per_minute={access.per_minute} counts for each key, and there is none: set "
            f"{KEYS_VARIABLE}=name:key."
        )
    for unit, limit in access.per_minute.items():
        check_choice("server.access.per_minute", unit, LIMITED)
        Bound(at_least=1).check_value(f"server.access.per_minute.{unit}", limit)
    return keys


def is_loopback(host: str) -> bool:
    """Return whether only programs of the same machine reach ``host``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def hostname(address: str) -> str:
    """The bare name in ``name`` or ``name:port``, in small letters; empty where it cannot be read."""
    if address.count(":") > 1 and not address.startswith("["):  # IPv6, as people write it
        address = f"[{address}]"
    try:
        parts = urlsplit(f"//{address}")
        return "" if parts.path else (parts.hostname or "").rstrip(".")
    except ValueError:
        return ""


def served_hosts(config: ServerConfig) -> set[str]:
    """The names, beside loopback's, under which clients may reach the endpoint.

    Raises:
        ConfigError: one of ``server.access.hosts`` is no name.
    """
    names = [host for host in config.access.hosts if "://" not in host]
    for given in names:
        if not hostname(given):
            raise ConfigError(
                f"server.access.hosts: {given!r} is no name of a machine: write it like my-machine.example."
            )
    check_public_url(config.access.public_url)
    public = urlsplit(config.access.public_url or "").netloc
    return {hostname(given) for given in (config.http_host, *names, public)} - set(WILDCARDS)


def check_public_url(public_url: str | None) -> None:
    """Raise ``ConfigError`` where the address of a proxy among ``server.access.hosts`` is none."""
    if public_url is None:
        return
    if not is_web_address(public_url) or "?" in public_url or "#" in public_url:
        raise ConfigError(
            f"server.access.hosts has {public_url}, which is no address: write it like https://my.example/troupe."
        )
    if urlsplit(public_url).path.rstrip("/").endswith("/v1"):
        raise ConfigError(
            f"server.access.hosts has {public_url}: leave out /v1, which clients put behind it."
        )


def read_keys(keys_file: str | None) -> ApiKeys:
    """The keys of ``TROUPE_API_KEYS`` and of ``server.access.keys_file``.

    Raises:
        ConfigError: a key cannot be used, or two have the same name. The message holds no key.
    """
    return _with_file(tuple(_from_variable(os.environ.get(KEYS_VARIABLE, ""))), keys_file)


def _with_file(of_variable: tuple[PlacedKey, ...], keys_file: str | None) -> ApiKeys:
    """The keys ``of_variable`` and those of the file."""
    digests: dict[str, bytes] = {}
    for place, name, digest in (*of_variable, *_from_file(keys_file)):
        if _NAME.fullmatch(name) is None:
            raise ConfigError(
                f"{place}: {name!r} cannot be the name of a key: use up to 64 letters, digits and . _ - @."
            )
        if name in digests:
            raise ConfigError(f"{place}: there are two keys with the name {name!r}: rename one.")
        digests[name] = digest
    file = None if keys_file is None else os.path.abspath(keys_file)
    return ApiKeys(digests, of_variable, file)


def _from_variable(text: str) -> Iterator[PlacedKey]:
    for number, item in enumerate(filter(None, map(str.strip, text.split(","))), start=1):
        place = f"{KEYS_VARIABLE}, key {number}"
        name, colon, key = item.partition(":")
        if not colon:
            raise ConfigError(f"{place} has no name: write {KEYS_VARIABLE}=name:key,name:key.")
        if len(key) < MIN_KEY_CHARACTERS:
            raise ConfigError(
                f"{place} ({name}) has {len(key)} characters, and needs at least {MIN_KEY_CHARACTERS}: make "
                "one by `openssl rand -hex 24`."
            )
        yield place, name, hashlib.sha256(key.encode()).digest()


def _from_file(path: str | None) -> Iterator[PlacedKey]:
    if path is None:
        return
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"server.access.keys_file={path} cannot be read ({error}).") from error
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        place = f"server.access.keys_file={path}, line {number}"
        if len(words) != 2 or re.fullmatch(r"[0-9a-fA-F]{64}", words[1]) is None:
            raise ConfigError(
                f"{place} has to be the name of a key and the key's SHA-256 in hexadecimal, as printed by "
                "`printf %s KEY | sha256sum`."
            )
        yield place, words[0], bytes.fromhex(words[1])
