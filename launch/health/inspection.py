"""Inspection of a run: all of its parts report their state at the same time, within two seconds.

Used by ``launch.status`` from another process, and by the run's own watchdog.
"""

from __future__ import annotations

import socket
import time
from collections import ChainMap
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import psutil
import ray
from ray.exceptions import RayError

from actors.ray_tools.placement import NAMESPACE, on_node
from actors.rollouts.fleet_report import FleetReport
from actors.rollouts.service import STREAM_CAPACITY
from actors.sampling.node_samplers import combined
from actors.timing import INSPECTION_SECONDS
from environments.errors import ConfigError
from launch.health.heartbeat import RunHeartbeat
from launch.health.members import is_alive, members
from launch.health.run_report import Process, RunReport


def inspect(heartbeat: RunHeartbeat) -> RunReport:
    """The state of the run that ``heartbeat`` is of, as far as its parts answer."""
    hosts = {node["NodeID"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}
    nodes = {
        f"the node {host}": _processes.options(**on_node(node)).remote()
        for node, host in hosts.items()
        if host != socket.gethostname()
    }
    calls = {}
    for name in heartbeat.fleets:
        with suppress(ValueError):  # it has not been started yet
            calls["the fleet"] = ray.get_actor(name, NAMESPACE).report.remote()
            break  # the first one is that of the training
    answers, unanswered, errors = _answers(calls)
    fleet: FleetReport | None = answers.get("the fleet")
    calls = {}

    def place(node: str, number: int) -> str:
        """Words that name a sampling actor other than that beside the driver."""
        is_first = fleet is None or (node, number) == next(iter(fleet.samplers))
        words = f" on {hosts.get(node, 'a lost machine')}, node {node[:8]}"
        return "" if is_first else f"{words}, number {number + 1}" if number else words

    if fleet is not None:
        samplers = {place(*of): sampler for of, sampler in fleet.samplers.items()}
        calls = {f"the sampling actor{name}": each.waiting.remote() for name, each in samplers.items()}
        calls |= {f"the queue of requests{name}": each.status.remote() for name, each in samplers.items()}
        calls["the stream's queue"] = fleet.stream.qsize.remote()
    processes = list(processes_here())
    answers, silent, broken = _answers(calls | nodes)
    stream = None
    if fleet is not None and "the stream's queue" in answers:
        stream = (answers["the stream's queue"] + fleet.num_undelivered, STREAM_CAPACITY)
    return RunReport(
        heartbeat=heartbeat,
        silent_seconds=max(0.0, time.time() - heartbeat.sent_at),
        processes=sorted(chain(processes, *_of("the node", answers))),
        fleet=fleet,
        waiting=dict(ChainMap(*_of("the sampling actor", answers))),
        sampling=combined(queues) if (queues := _of("the queue of requests", answers)) else None,
        stream=stream,
        free=ray.available_resources(),
        unanswered=unanswered + silent,
        errors=errors + broken,
        hosts=hosts,
    )


def _of(part: str, answers: dict[str, Any]) -> list[Any]:
    """The answers of one kind of part, on whichever nodes."""
    return [each for name, each in answers.items() if name.startswith(part) and each is not None]


def _answers(calls: dict[str, ray.ObjectRef]) -> tuple[dict[str, Any], list[str], list[str]]:
    """The answers by name, the names of the parts that did not answer, and the errors of others."""
    if not calls:
        return {}, [], []
    names = {reference: name for name, reference in calls.items()}
    done, late = ray.wait(list(names), num_returns=len(names), timeout=INSPECTION_SECONDS)
    answers, errors = {}, []
    for reference in done:
        try:
            answers[names[reference]] = ray.get(reference)
        except RayError as error:
            errors.append(f"{names[reference]} has failed: {error}")
    return answers, [names[reference] for reference in late], errors


def processes_here() -> Sequence[Process]:
    """The processes of this cluster on this node, drivers too."""
    host = socket.gethostname()
    found = {}
    for raylet in raylets_here():
        with suppress(ConfigError):  # it has just ended
            found.update({each.pid: each for each in members(raylet.pid)})
    drivers = [each for each in members() if each.role == "driver"]
    found.update({each.pid: each for each in drivers})
    return [Process(host, each.role, each.pid, each.stopped) for each in found.values()]


def raylets_here() -> list[psutil.Process]:
    """The raylets of this cluster on this machine: one, unless it only plays several nodes."""
    address = ray.get_runtime_context().gcs_address
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended while we looked, or is somebody else's
            if process.name() == "raylet" and any(address in word for word in process.cmdline()):
                found.append(process)
    return found


def ray_lives() -> bool:
    """Return whether a raylet of this cluster runs on this machine: without one, Ray ends this process."""
    return any(is_alive(raylet) for raylet in raylets_here())


_processes = ray.remote(num_cpus=0, max_retries=0)(processes_here)
