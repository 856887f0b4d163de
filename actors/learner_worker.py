"""The learner's ranks as Ray actors. Importing this module imports verl and torch."""

from __future__ import annotations

import ray

from policies.learning.verl_critic import VerlCritic
from policies.learning.verl_learner import VerlLearner
from policies.learning.verl_worker import on_all_ranks
from policies.weights import pack


class LearnerWorker(VerlLearner):
    """``VerlLearner`` with a way out for its weights."""

    @on_all_ranks
    def export_weights(self) -> list[ray.ObjectRef]:
        """References to the weights' buckets. All ranks take part in gathering them; rank 0 puts them."""
        if self.rank != 0:
            for _ in self.weights():
                pass
            return []
        return [ray.put(bucket) for bucket in pack(self.weights())]


class CriticWorker(VerlCritic):
    """``VerlCritic`` under the name by which a run's processes are told apart."""
