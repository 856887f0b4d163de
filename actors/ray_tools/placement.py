"""Nodes on which a run's actors live."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray._private.state import state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NAMESPACE = "troupe"
"""Ray's namespace of the actors that other programs find by their names."""
EVERYWHERE = {"scheduling_strategy": "SPREAD"}
"""Ray options of actors that nodes may take with them when they go. Without it Ray packs small actors onto
few nodes."""


def on_node(node: str) -> dict[str, Any]:
    """Ray options of an actor or a task on the node of this id, and on no other."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


def beside_driver() -> dict[str, Any]:
    """Ray options of an actor that a run cannot do without: it lives on the node of this process.

    Ray puts actors that reserve nothing on any node; the run would end with that node then.
    """
    return on_node(ray.get_runtime_context().get_node_id())


def start_actor(actor_class: Any, *arguments: object, **options: object) -> ray.actor.ActorHandle:
    """Start an actor of ``actor_class`` with Ray's ``options``, where Ray puts it; this does not wait.

    Args:
        actor_class: what ``ray.remote`` has made of a class. Type checkers take it for the class itself.
    """
    return actor_class.options(**options).remote(*arguments)


def has_labels(node: Mapping[str, Any], wanted: Mapping[str, str]) -> bool:
    """True if a node, one of ``ray.nodes()``, has the labels that ``fleet.nodes`` asks for."""
    return all(_is_wanted(node["Labels"].get(name), value) for name, value in wanted.items())


def _is_wanted(value: str | None, wanted: str) -> bool:
    positive = wanted.removeprefix("!")
    listed = positive[3:-1].split(",") if positive.startswith("in(") else [positive]
    return (value in [each.strip() for each in listed]) == (positive == wanted)


def with_labels(labels: Mapping[str, str]) -> str:
    """Words by which an error names the nodes that have ``labels``, after the word "node" and the like."""
    return f" with the labels {dict(labels)}" if labels else ""


def draining_nodes() -> frozenset[str]:
    """Ids of the nodes that Ray drains (``ray drain-node``, SIGTERM to ``ray start --block``).

    Ray starts no actor there any more; those that run go on until the node ends.
    """
    return frozenset(state.get_draining_nodes())
