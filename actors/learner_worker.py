"""One rank of the learner as a Ray actor. Importing this module imports verl and torch."""

from __future__ import annotations

import ray

from policies.learning.verl_learner import VerlLearner, on_all_ranks
from policies.weights import pack


class LearnerWorker(VerlLearner):
    """``VerlLearner`` with a way out for its weights."""

    @on_all_ranks
    def export_weights(self) -> list[ray.ObjectRef]:
        """References to the weights' buckets, from rank 0. All ranks take part in gathering them."""
        if self.rank != 0:
            for _ in self.weights():
                pass
            return []
        return [ray.put(bucket) for bucket in pack(self.weights())]
