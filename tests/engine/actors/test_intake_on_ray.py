"""Ray Serve's own proxy takes requests in as ``actors.serving.intake`` says."""

from __future__ import annotations

from contextlib import suppress

import psutil

from actors.serving.intake import PROXY_ENVIRONMENT
from launch.health.members import role_of


def test_serves_own_proxy_takes_requests_in_a_few_at_a_time(serve_port: int) -> None:
    proxies = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            if role_of(" ".join(process.cmdline())) == "proxy":
                proxies.append(process.environ())
    assert len(proxies) == 1
    assert PROXY_ENVIRONMENT.items() <= proxies[0].items()
