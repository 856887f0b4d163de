"""The address by which clients reach the server, also behind a proxy that has taken a prefix off."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from starlette.datastructures import URL
from starlette.requests import Request

from environments.errors import ConfigError

_PREFIX = re.compile(r"(/[\w.~-]+)*/?")


def public_address(request: Request, public_url: str | None) -> str:
    """The address of the server's root, without a slash at its end.

    Args:
        public_url: that among ``server.access.hosts``. Without it, the address is the one that the client has
            asked at, with the prefix and the scheme that a proxy says it has taken off.
    """
    if public_url is not None:
        return public_url.rstrip("/")
    base: URL = request.base_url
    scheme = request.headers.get("x-forwarded-proto", base.scheme)
    if scheme in ("http", "https"):
        base = base.replace(scheme=scheme)
    prefix = request.headers.get("x-forwarded-prefix", "")
    return str(base).rstrip("/") + (prefix.rstrip("/") if _PREFIX.fullmatch(prefix) else "")


def check_public_url(public_url: str | None) -> None:
    """Raise ``ConfigError`` where the address is none."""
    if public_url is None:
        return
    try:
        parts = urlsplit(public_url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(
            f"server.access.hosts has {public_url}, which is no address: write it like https://my.example/troupe."
        )
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(
            f"server.access.hosts has {public_url}: leave out /v1, which clients put behind it."
        )


def public_path(public_url: str | None) -> str:
    """The path of that address, which a proxy may leave in the requests that it sends on."""
    return "" if public_url is None else urlsplit(public_url).path.rstrip("/")
