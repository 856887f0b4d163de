"""On which nodes a run's actors live."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

EVERYWHERE = {"scheduling_strategy": "SPREAD"}
"""Ray options of actors that nodes may take with them when they go. Without it Ray packs small actors onto
few nodes."""


def beside_driver() -> dict[str, Any]:
    """Ray options of an actor that a run cannot do without: it lives on the node of this process.

    Ray puts actors that reserve nothing on any node; the run would end with that node then.
    """
    node = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}
