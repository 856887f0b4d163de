"""The learner's ranks as Ray actors. Importing this module imports verl and torch."""

from __future__ import annotations

from typing import Any

import ray

from policies.learning.verl_critic import VerlCritic
from policies.learning.verl_learner import VerlLearner
from policies.learning.verl_worker import on_all_ranks
from policies.weights import pack


class LearnerWorker(VerlLearner):
    """``VerlLearner`` that loads its model in a call, and has a way out for its weights.

    Ray hands back an exception as it was raised from a call, but not from a constructor.
    """

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments

    def open(self) -> None:
        """Load the model. Comes before everything else."""
        super().__init__(**self._arguments)

    @on_all_ranks
    def export_weights(self) -> list[ray.ObjectRef]:
        """References to the weights' buckets. All ranks take part in gathering them; rank 0 puts them."""
        if self.rank != 0:
            for _ in self.weights():
                pass
            return []
        return [ray.put(bucket) for bucket in pack(self.weights())]


class CriticWorker(VerlCritic):
    """``VerlCritic`` that loads its model in a call, too."""

    def __init__(self, **arguments: Any) -> None:
        self._arguments = arguments

    def open(self) -> None:
        """Load the model. Comes before everything else."""
        super().__init__(**self._arguments)
