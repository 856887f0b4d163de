"""The learner: verl's worker group, one rank per worker, behind five calls."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import ray

from environments.errors import TroupeError
from policies.learning.samples import LearnerUpdate, TrainBatch
from policies.learning.settings import AlgorithmConfig, LearnerConfig, OptimizerConfig


class LearnerGroup:
    """The policy in training, spread over ``learner.num_workers`` ranks.

    Args:
        model_path: folder in Hugging Face format to start from.
        num_schedule_steps: updates over which a cosine schedule runs.
        store: where ``publish`` puts the weights.
    """

    def __init__(
        self,
        model_path: str,
        learner: LearnerConfig,
        algorithm: AlgorithmConfig,
        num_schedule_steps: int,
        seed: int,
        store: ray.actor.ActorHandle,
    ) -> None:
        self._group = _worker_group(
            learner,
            model_path=model_path,
            learner=learner,
            algorithm=algorithm,
            num_schedule_steps=num_schedule_steps,
            seed=seed,
        )
        self._store = store

    def begin_phase(self, optimizer: OptimizerConfig, num_schedule_steps: int) -> None:
        """A fresh optimizer and schedule on the present weights."""
        self._call("begin_phase", optimizer, num_schedule_steps)

    def fit(self, batches: Sequence[TrainBatch]) -> LearnerUpdate:
        """Supervised learning: one optimizer step per batch."""
        return self._call("fit", ray.put(list(batches)))

    def update(self, batches: Sequence[TrainBatch]) -> LearnerUpdate:
        """Policy gradient: one optimizer step per mini-batch."""
        return self._call("update", ray.put(list(batches)))

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        """Log-probabilities of every response token of each sample."""
        return self._call("logprobs", ray.put(batch))

    def publish(self, version: int) -> None:
        """Put the present weights into the store as ``version``."""
        buckets = self._call("export_weights")
        ray.get(self._store.publish.remote(version, *buckets))

    def save(self, folder: str) -> None:
        """Write weights (Hugging Face format), optimizer, schedule and generators to ``folder``."""
        self._call("save", folder)

    def load(self, folder: str) -> None:
        """Restore what ``save`` wrote."""
        self._call("load", folder)

    def close(self) -> None:
        """End the workers and give back their resources."""
        for worker in self._group.workers:
            ray.kill(worker)
        for placement_group in self._group.resource_pool.pgs or []:
            ray.util.remove_placement_group(placement_group)

    def _call(self, method: str, *args: Any) -> Any:
        """Call all ranks and return the first one's answer. A rank that died raises here."""
        references = self._group.execute_all_async(method, *args)
        try:
            return ray.get(references)[0]
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, TroupeError):  # already a sentence for the user
                raise error.cause from error
            raise


def _worker_group(settings: LearnerConfig, **arguments: Any) -> Any:
    on_gpu = settings.device != "cpu"
    if not on_gpu:
        # verl settles on its device when it is imported, in this process too, which computes nothing.
        os.environ["VERL_PLATFORM"] = "cpu"
    with warnings.catch_warnings():  # verl warns of every engine that it has and we do not use
        warnings.simplefilter("ignore")
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

        from actors.learner_worker import LearnerWorker

    environment = (
        {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "VERL_PLATFORM": "cpu"} if not on_gpu else {}
    )
    pool = RayResourcePool([settings.num_workers], use_gpu=on_gpu, max_colocate_count=1)
    worker = RayClassWithInitArgs(ray.remote(LearnerWorker), **arguments)
    return RayWorkerGroup(
        pool,
        worker,
        bin_pack=False,  # ranks may spread over nodes
        device_name=settings.device,
        worker_env=environment,
        use_gpu=on_gpu,
    )
