"""A program's session on a cluster: one that is there and is joined, or one that starts and ends with it."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import ray
from ray.autoscaler.sdk import request_resources

from actors.ray_tools.connect import connect as join_or_start
from actors.ray_tools.placement import has_labels, with_labels
from actors.timing import DRIVER_SILENCE_SECONDS
from environments.background import end_background_work
from environments.errors import ConfigError
from launch.cluster.serve_address import claim_address
from launch.cluster.turns import Turn
from launch.health.heartbeat import run_heartbeats
from launch.settings.tree import TrainConfig
from launch.validation.resources import NODES, REMEDIES, bundles_of, needs

LOCAL_CPUS = 64
"""Ray's CPUs only count: on one machine they must not keep small actors from starting."""

NODE_SECONDS = 1.0
"""Seconds between two counts of the nodes that have come."""
RAY_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "PYTHONWARNINGS": "ignore",
}


def connect() -> bool:
    """Connect this process to Ray and return whether we started the cluster, and so may stop it.

    If this process is killed, the cluster that it started ends within seconds, but for two of Ray's own
    agents: for a minute they try to report that to the head that has died too, and then end.

    Raises:
        ConfigError: the cluster does not answer.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return join_or_start(LOCAL_CPUS, RAY_ENVIRONMENT)


def end() -> None:
    """Stop the cluster that ``connect`` has started, to the last process.

    A worker that is still starting has not met its raylet yet, and would outlive it by many seconds.
    """
    end_background_work()
    ours: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended meanwhile, or its parent has not taken note of its end
            if f"{os.sep}ray{os.sep}" in " ".join(child.cmdline()):
                ours += [child, *child.children(recursive=True)]
    ray.shutdown()
    for process in ours:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(ours, timeout=5)


@contextmanager
def connected() -> Iterator[bool]:
    """Connect to Ray for the block, which gets whether we started the cluster: that ends with it then."""
    started_here = connect()
    try:
        yield started_here
    finally:
        if started_here:
            end()


def wait_for_nodes(config: TrainConfig, announce: Callable[[str], None]) -> None:
    """Return when the cluster can hold the run: at once, or within ``run.node_wait_seconds``.

    Meanwhile Ray's autoscaler gets the need again and again: the cluster has one such request, and
    another run may put its own in its place. Later it sees for itself which actors find no room.

    Raises:
        ConfigError: as ``check_resources`` does, when the time is over.
    """
    deadline = time.monotonic() + config.run.node_wait_seconds
    is_announced = False
    try:
        while missing := _missing(config):
            if time.monotonic() >= deadline:
                break
            bundles = bundles_of(config)
            request_resources(
                bundles=[resources for resources, _ in bundles],
                bundle_label_selectors=[labels for _, labels in bundles],
            )
            if not is_announced:
                announce(f"Waiting for nodes, for {config.run.node_wait_seconds:g} s at most. {missing[1]}.")
                is_announced = True
            time.sleep(NODE_SECONDS)
    finally:
        if is_announced:
            request_resources(bundles=[])
    check_resources(config)


def _missing(config: TrainConfig) -> tuple[str, str] | None:
    """Remedy for a resource that the cluster has too little of, and a sentence about it."""
    for _, labels in bundles_of(config):
        if labels and not any(has_labels(node, labels) for node in ray.nodes() if node["Alive"]):
            return f"change {NODES}", f"The run needs a node{with_labels(labels)} and the cluster has none"
    there = ray.cluster_resources()
    for name, needed in needs(config).items():
        if needed > there.get(name, 0):
            has = f"the cluster has {there.get(name, 0):g}"
            remedy = f"lower {REMEDIES.get(name, NODES)}"
            return remedy, f"The run needs {amount(needed, name)} and {has}"
    return None


def amount(number: float, name: str) -> str:
    """So much of a resource of Ray's, or of one that nodes were started with."""
    return f"{number:g} Ray {name}s" if name in ("CPU", "GPU") else f"{number:g} of the resource {name!r}"


def check_resources(config: TrainConfig) -> None:
    """Check that the cluster can hold the run: else its actors would wait for ever.

    Raises:
        ConfigError: names what is needed, what is there, and what to lower.
    """
    if missing := _missing(config):
        remedy, sentence = missing
        raise ConfigError(
            f"{sentence}: add nodes, or {remedy}. Where an autoscaler adds nodes, set run.node_wait_seconds."
        )


def start_turn(
    config: TrainConfig, program: str, report: Callable[[str], None], announce: Callable[[str], None]
) -> Turn:
    """The turn of ``program`` to start on a cluster that it shares, which has room for all that it needs.

    Serve has the address of ``server.http_port`` then, or will have it.

    Raises:
        ConfigError: Serve cannot have that address.
    """
    turn = Turn(program, report, announce)
    try:
        turn.take()
        claim_address(config.server)
        turn.wait_for_room(bundles_of(config), lambda: f"{shortage(config)}; {others()}")
    except BaseException:  # an interrupt, for example: no other part of the program knows of it yet
        turn.end()
        raise
    return turn


def shortage(config: TrainConfig) -> str:
    """Sentence on what the run needs and others have."""
    free = ray.available_resources()
    short = [
        f"{amount(needed, name)}, of which {free.get(name, 0):g} are free"
        for name, needed in needs(config).items()
        if needed > free.get(name, 0)
    ]
    return " and ".join(short) or "its places, each on one node"


def others() -> str:
    """Clause on the programs that have what the run needs, as far as that is known."""
    here, now = (socket.gethostname(), os.getpid()), time.time()
    trainings = [
        each.folder
        for each in run_heartbeats()
        # One that was killed is still noted.
        if (each.host, each.pid) != here and now - each.sent_at < DRIVER_SILENCE_SECONDS
    ]
    return f"others here are {', '.join(trainings)}" if trainings else "`ray status` shows who has them"
