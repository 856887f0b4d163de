"""Settings of the fleet and the server: plain dataclasses, importable without Ray."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.engine import EngineConfig

RAYLET_ENVIRONMENT = {"RAY_process_group_cleanup_enabled": "1"}
"""For the environment of whoever starts Ray: child processes of an actor that has died end with it."""


@dataclass
class FleetConfig:
    """The rollout actors, each one agent with one environment."""

    num_actors: int = 16
    """Pairs that play at the same time."""
    num_cpus_per_actor: float = 0.01
    """What Ray reserves for a pair; raise it for environments that compute."""
    retries: int = 2
    """How often a rollout is begun anew when its actor dies (lost node, out of memory, crash)."""


@dataclass
class ServerConfig:
    """The policy server."""

    num_replicas: int = 1
    """Engines that serve the policy."""
    num_cpus: float = 0.5
    """What Ray reserves for a replica."""
    http_port: int | None = None
    """Port of the OpenAI-compatible endpoint; null serves rollouts only."""
    http_host: str = "127.0.0.1"
    """Address that the endpoint listens on; 0.0.0.0 for every interface."""
    engine: EngineConfig = field(default_factory=EngineConfig)
