"""The nodes that are about to leave the cluster, for those who place work."""

from __future__ import annotations

from ray._private.state import state


def draining_nodes() -> frozenset[str]:
    """Ids of the nodes that Ray was told to drain (``ray drain-node``, SIGTERM to ``ray start --block``).

    Ray starts no actor there any more; those that run go on until the node ends.
    """
    return frozenset(state.get_draining_nodes())
