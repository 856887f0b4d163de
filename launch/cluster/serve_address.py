"""The HTTP address of a cluster's Serve: there is one, chosen by who came first."""

from __future__ import annotations

import time
import urllib.parse
import urllib.request
from typing import Any

from ray import serve
from ray.serve.config import ProxyLocation
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException

from actors.settings import ServerConfig
from actors.timing import APPLICATION_END_SECONDS
from environments.errors import ConfigError, SamplerError
from launch.validation.serving import check_address

ADDRESS_POLL_SECONDS = 0.5


def claim_address(server: ServerConfig) -> None:
    """Check that Serve has the address of ``server``, or will have it: before a model is loaded.

    A training or an evaluation leaves Serve behind, without an address. One that serves nothing gives way.

    Raises:
        ConfigError: it serves other applications, at another address or at this one; or another program
            listens there.
    """
    if server.http_port is None:
        return
    wanted = f"http://{server.http_host}:{server.http_port}"
    deadline = time.monotonic() + APPLICATION_END_SECONDS
    while (there := _present()) is not None and (conflict := _conflict(wanted, *there)):
        if time.monotonic() > deadline:
            raise ConfigError(f"Clients cannot be served at {wanted}: {conflict}")
        time.sleep(ADDRESS_POLL_SECONDS)
    if there is None or there[0] != wanted:
        if there is not None:
            serve.shutdown()
        check_address(server.http_host, server.http_port)


def client_url(host: str, port: int) -> str:
    """Base URL for clients on this machine of a server that listens on ``host``."""
    return f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}/v1"


def check_answers(url: str) -> None:
    """Raise ``SamplerError`` if no server answers at ``url``, the address for clients."""
    try:
        # It needs no key, and only their digests are known here.
        with urllib.request.urlopen(urllib.parse.urljoin(url, "/health"), timeout=10):
            return
    except OSError as error:  # urllib's, too
        raise SamplerError(
            f"The policy server is up, but nothing answers at {url} ({error}). A Ray cluster has one HTTP "
            "address for all that it serves, chosen by who came first: stop that one with `serve shutdown`."
        ) from error


def _present() -> tuple[str, dict[str, dict[str, Any]]] | None:
    """Address of this cluster's Serve, "" for none, and its applications by name; ``None`` without Serve."""
    try:
        client = _get_global_client()
    except RayServeException:
        return None
    details = client.get_serve_details()
    is_open = details["proxy_location"] != ProxyLocation.Disabled
    options = client.http_config
    return f"http://{options.host}:{options.port}" if is_open else "", details["applications"]


def _conflict(wanted: str, there: str, applications: dict[str, dict[str, Any]]) -> str | None:
    """Reason for which Serve cannot have the address ``wanted``, with the remedy; ``None`` if it can."""
    if there == wanted:
        at_root = {name: each for name, each in applications.items() if each["route_prefix"] == "/"}
        if not at_root:
            return None
        return f"this cluster's Serve serves {_named(at_root)} there. End that, or use another cluster."
    if not applications:
        return None
    has = f"the address {there}" if there else "no HTTP address"
    return (
        f"this cluster's Serve has {has}, chosen by who came first, and serves {_named(applications)}. Wait "
        "for their end, use another cluster, or end them all with `serve shutdown`."
    )


def _named(applications: dict[str, dict[str, Any]]) -> str:
    return "the application" + "s" * (len(applications) > 1) + f" {', '.join(sorted(applications))}"
