"""Number of the policy server's replicas, where Serve may choose it.

Serve pickles this module and runs it in its controller, which cannot import Troupe: it imports nothing of it.
"""

from __future__ import annotations

from math import ceil
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy

from actors.timing import LOAD_MEAN_SECONDS, SCALE_DOWN_SECONDS, SCALE_UP_SECONDS

TOKENS_IN_FLIGHT = "tokens_in_flight"
"""Name of the number that replicas report."""


class ReplicasForTokens:
    """Serve's policy: as many replicas as the tokens in flight need.

    Args:
        tokens_per_replica: tokens in flight that one replica is to have.
    """

    def __init__(self, tokens_per_replica: int) -> None:
        self._tokens_per_replica = tokens_per_replica

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """The number of replicas, which Serve keeps within its bounds and delays, and no state."""
        reported = (context.aggregated_metrics or {}).get(TOKENS_IN_FLIGHT, {})
        return max(1, ceil(sum(reported.values()) / self._tokens_per_replica)), {}


def autoscaling(smallest: int, largest: int, tokens_per_replica: int) -> AutoscalingConfig:
    """Serve's settings for ``smallest`` to ``largest`` replicas."""
    return AutoscalingConfig(
        min_replicas=smallest,
        max_replicas=largest,
        upscale_delay_s=SCALE_UP_SECONDS,
        downscale_delay_s=SCALE_DOWN_SECONDS,
        look_back_period_s=LOAD_MEAN_SECONDS,
        policy=AutoscalingPolicy(
            policy_function=f"{__name__}:{ReplicasForTokens.__name__}",
            policy_kwargs={"tokens_per_replica": tokens_per_replica},
        ),
    )
