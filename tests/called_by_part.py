"""Has a part of a small fleet call its rollout actors, as a large fleet does."""

from __future__ import annotations

from typing import Any

import ray

from actors.rollouts import fleet_parts


def call_by_part(fleet: Any) -> None:
    """Have it so for the rollout actors that start from now on."""
    ray.get(fleet.__ray_call__.remote(_have_no_own_pairs))


def _have_no_own_pairs(fleet: Any) -> None:
    fleet_parts.PAIRS_OF_FLEET = 0
