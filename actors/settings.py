"""Settings of the fleet and the server: plain dataclasses, importable without Ray."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from environments.bounds import setting
from policies.settings import EngineConfig

RAYLET_ENVIRONMENT = {
    "RAY_process_group_cleanup_enabled": "1",  # child processes of an actor that has died end with it
    # What the dashboard would show, and we start none: recording it took a fifth of the throughput.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    # Statistics of Ray's own event loops, for its log: a sixth of what an idle actor costs, which wakes up
    # a hundred times a second to look for signals.
    "RAY_event_stats": "0",
    # Ray warns, into the program's output, of more than four times as many processes as start at once.
    "RAY_worker_maximum_startup_concurrency": str(max(16, os.cpu_count() or 1)),
}
"""For the environment of a process that is about to start Ray."""


def shows_worker_logs() -> bool:
    """Whether what the actors log is to be shown in the program's own output: ``TROUPE_WORKER_LOGS=1``."""
    return os.environ.get("TROUPE_WORKER_LOGS", "0") not in ("", "0")


MODEL_NAME = "policy"
"""How OpenAI clients call the policy, if nothing else is said."""


@dataclass
class FleetConfig:
    """The rollout actors, each one agent with one environment."""

    num_actors: int = setting(16, at_least=1)
    """Pairs that play at the same time."""
    num_cpus_per_actor: float = setting(0.01, at_least=0)
    """What Ray reserves for a pair; raise it for environments that compute."""
    retries: int = setting(2, at_least=0)
    """How often a rollout is begun anew when it fails: an error of the agent, the environment or the server,
    or an actor that dies. One that runs into its time limit is not."""


@dataclass
class ServerConfig:
    """The policy server."""

    num_replicas: int = setting(1, at_least=1)
    """Engines that serve the policy."""
    num_cpus: float = setting(0.5, at_least=0)
    """What Ray reserves for a replica."""
    http_port: int | None = setting(None, at_least=1, at_most=65535)
    """Port of the OpenAI-compatible endpoint; null serves rollouts only."""
    http_host: str = "127.0.0.1"
    """Address that the endpoint listens on; 0.0.0.0 for every interface."""
    adapters: dict[str, str] = field(default_factory=dict)
    """LoRA adapters that ``launch.serve`` serves beside the model, {name: folder}: a run's, a checkpoint's or
    one in peft's format. Clients ask for them by ``model``, rollouts by ``SamplingParams.adapter``."""
    engine: EngineConfig = field(default_factory=EngineConfig)
