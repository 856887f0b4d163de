"""Metrics of a replica's requests over HTTP, for Prometheus: ``GET /metrics``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import Scope

from policies.sampler import EngineStats

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
"""Upper bounds of the histograms."""
METRICS_PATH = "/metrics"
NO_KEY = "-"
"""The name of whoever has sent no key."""


class Metrics:
    """Counts and times of the requests of one replica. Labels are routes, models and names of keys only: no
    client can make more of them than there are.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self._registry), partial(Gauge, registry=self._registry)
        histogram = partial(Histogram, buckets=SECONDS, registry=self._registry)
        text = "Requests by route, status and key."
        self._requests = counter("troupe_http_requests", text, ("route", "status", "key"))
        self._seconds = histogram("troupe_http_request_seconds", "Time to the whole answer.", ("route",))
        text = "Time to the first event of a stream, which has its first token."
        self._first_seconds = histogram("troupe_http_first_event_seconds", text, ("route",))
        self._open = gauge("troupe_http_open_requests", "Requests that are being answered.")
        text = "Tokens of prompts and answers, by model and key."
        self._tokens = counter("troupe_http_tokens", text, ("model", "key"))
        text = "Episodes of agents, by how they have ended."
        self._episodes = counter("troupe_agent_episodes", text, ("agent", "end"))

    def begin(self) -> None:
        """Count an open request."""
        self._open.inc()

    def end(
        self, scope: Scope, status: int | None, key: str | None, seconds: float, first_seconds: float | None
    ) -> None:
        """Take in a request that has ended.

        Args:
            status: ``None`` if its client has gone before.
            first_seconds: time of a stream's first event.
        """
        self._open.dec()
        self._requests.labels(_route(scope), str(status or 499), key or NO_KEY).inc()
        self._seconds.labels(_route(scope)).observe(seconds)
        if first_seconds is not None:
            self._first_seconds.labels(_route(scope)).observe(first_seconds)

    def charge(self, model: str, key: str | None, spend: Callable[[int], None]) -> Callable[[int], None]:
        """``spend``, which counts the tokens of a request, and counts them here too.

        Args:
            model: one that is served.
        """
        tokens = self._tokens.labels(model, key or NO_KEY)
        given_back = 0

        def charge(number: int) -> None:
            nonlocal given_back
            spend(number)
            # Of a try that has failed: a counter never falls.
            given_back += number
            tokens.inc(max(0, given_back))
            given_back = min(0, given_back)

        return charge

    def episode(self, agent: str, end: str) -> None:
        """Count an episode of an agent."""
        self._episodes.labels(agent, end).inc()

    def text(self, version: int, engine: EngineStats, num_waiting: int, tokens_in_flight: int) -> str:
        """All of it in Prometheus' text format, with the policy's version and what the engine has done."""
        values = {
            "troupe_policy_version gauge": version,
            "troupe_running_requests gauge": engine.num_running,
            "troupe_waiting_requests gauge": num_waiting,
            "troupe_tokens_in_flight gauge": tokens_in_flight,
            "troupe_prompt_tokens_total counter": engine.num_prompt_tokens,
            "troupe_cached_prompt_tokens_total counter": engine.num_cached_tokens,
            "troupe_sampled_tokens_total counter": engine.num_tokens,
            "troupe_aborted_tokens_total counter": engine.num_aborted_tokens,
            "troupe_engine_seconds_total counter": engine.seconds,
            "troupe_engine_busy_seconds_total counter": engine.busy_seconds,
        }
        lines = (f"# TYPE {name}\n{name.split()[0]} {value}" for name, value in values.items())
        return "\n".join(lines) + "\n" + generate_latest(self._registry).decode()


def _route(scope: Scope) -> str:
    """The route of a request, such as ``/v1/models/{name}``; the same one for all that have none."""
    return str(getattr(scope.get("route"), "path", "none"))
