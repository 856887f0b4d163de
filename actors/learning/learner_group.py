"""The learner: verl's worker groups for the policy and its critic. The training loop calls it."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group

from actors.learning.patience import Patience
from actors.ray_tools.get_soon import ANSWER_SECONDS
from actors.weights.store import PublishedWeights
from environments.errors import LearnerLostError, TroupeError
from policies.learning.algorithm import Algorithm
from policies.learning.samples import LearnerUpdate, TrainBatch
from policies.learning.settings import LearnerConfig, OptimizerConfig

if TYPE_CHECKING:
    from verl.single_controller.ray import RayResourcePool

CRITIC = "critic"
"""The critic's folder in a checkpoint."""


class LearnerGroup:
    """The policy in training and its critic, if the algorithm has one: ``learner.num_workers`` ranks each.

    An update has three steps: ``score`` the mini-batches, assign credit in the driver, ``update`` with the
    same mini-batches. Policy and critic work at the same time.

    The models load in the background. If one cannot be loaded, the first call raises the error. Every call
    raises ``LearnerLostError`` if a rank has died or hangs.

    Args:
        model_path: folder in Hugging Face format to start from.
        num_schedule_steps: updates over which a cosine schedule runs.
        store: the ``WeightStore`` that ``publish`` tells of new versions.
        shared_file: path and text of a file in the folder that all ranks write to. Each rank checks that it
            sees this file before it loads a model.
    """

    def __init__(
        self,
        model_path: str,
        learner: LearnerConfig,
        algorithm: Algorithm,
        num_schedule_steps: int,
        seed: int,
        store: ray.actor.ActorHandle,
        shared_file: tuple[str, str] | None = None,
    ) -> None:
        policy_worker, critic_worker = _worker_classes(learner.device)
        arguments = {
            "model_path": model_path,
            "learner": learner,
            "num_schedule_steps": num_schedule_steps,
            "seed": seed,
            "shared_file": shared_file,
        }
        pool = _resource_pool(learner)
        self._policy = _WorkerGroup(
            policy_worker, pool, learner, **arguments, algorithm=algorithm, store=store
        )
        self._critic = None
        if algorithm.uses_critic:
            # A rank takes its CPU only while it starts; a GPU it takes for good.
            pool = pool if learner.device == "cpu" else _resource_pool(learner)
            self._critic = _WorkerGroup(critic_worker, pool, learner, **arguments)
        self._critic_optimizer = learner.critic.optimizer
        self._store = store
        self._schedule: dict[str, Any] = {}
        """Of the learning rate, at the time of the last publish."""

    # -- learning ------------------------------------------------------------------------------------

    def begin_phase(self, optimizer: OptimizerConfig, num_schedule_steps: int) -> None:
        """A fresh optimizer and schedule on the present weights, which become the reference policy."""
        calls = [self._policy.begin("begin_phase", optimizer, num_schedule_steps)]
        if self._critic is not None:
            calls.append(self._critic.begin("begin_phase", self._critic_optimizer, num_schedule_steps))
        for call in calls:
            call.answer()

    def fit(self, batches: Sequence[TrainBatch]) -> LearnerUpdate:
        """Supervised learning: one optimizer step per batch."""
        return self._policy.call("fit", ray.put(list(batches)))

    def score(self, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        """The mini-batches of one update with ``old_logprobs``, and, where the algorithm needs them,
        ``reference_logprobs`` and ``values``. The first takes its old log-probabilities in its own step,
        unless the algorithm needs all of them before.
        """
        reference = ray.put(list(batches))
        scoring = self._policy.begin("score", reference)
        valuing = self._critic.begin("values", reference) if self._critic is not None else None
        scored: list[TrainBatch] = scoring.answer()
        return scored if valuing is None else _with_values(scored, valuing.answer())

    def update(self, batches: Sequence[TrainBatch]) -> LearnerUpdate:
        """One optimizer step per mini-batch, of the policy and of the critic if there is one.

        Args:
            batches: as ``score`` has returned them, with advantages; each as often as it is to be taken.
        """
        reference = ray.put(list(batches))
        updating = self._policy.begin("update", reference)
        valuing = self._critic.begin("update", reference) if self._critic is not None else None
        update: LearnerUpdate = updating.answer()
        return update if valuing is None else replace(update, metrics=update.metrics | valuing.answer())

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        """Log-probabilities of every response token of each sample."""
        return self._policy.call("logprobs", ray.put(batch))

    # -- weights and checkpoints ---------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Make the present weights the newest version in the store, adapters merged."""
        location, self._schedule = self._policy.call("publish_weights", version)
        try:
            ray.get(self._store.publish.remote(version, location))
        except RayTaskError:  # mostly: a rank has died, and the weights with it
            self.check_ranks()
            raise

    def save(self, folder: str) -> None:
        """Write weights (Hugging Face format), optimizer, schedule, generators, reference policy and critic
        to ``folder``.
        """
        self._policy.call("save", folder)
        if self._critic is not None:
            self._critic.call("save", os.path.join(folder, CRITIC))

    def load(self, folder: str) -> str | None:
        """Restore a checkpoint of ``save``. The number of ranks may be another one.

        Returns:
            A sentence that names the parts that could not be restored; ``None`` if there are none.

        Raises:
            ConfigError: the checkpoint lacks a part that this algorithm needs, or is of another model.
        """
        left_out: str | None = self._policy.call("load", folder)
        if self._critic is not None:
            self._critic.call("load", os.path.join(folder, CRITIC))
        return left_out

    def rebuild(self, optimizer: OptimizerConfig, num_schedule_steps: int, folder: str) -> int:
        """Replace all ranks, after ``LearnerLostError``: they go on from the weights and the schedule of the
        last publish, and for the rest (optimizer's moments, reference policy, critic) from a checkpoint.

        Args:
            optimizer, num_schedule_steps: of the phase of training that the checkpoint is of.
            folder: of ``save``.

        Returns:
            The version of the weights.

        Raises:
            As ``load`` does; ``WeightTransportError`` if the weights cannot be read.
        """
        for group in (self._policy, self._critic):
            if group is not None:
                group.start_anew(optimizer, num_schedule_steps)
        self.load(folder)
        published: PublishedWeights = ray.get(self._store.newest.remote())
        self._policy.call("take_over", published, self._schedule)
        return published.version

    def check_ranks(self) -> None:
        """Raise if a rank has died or hangs. For times without another call, which would raise too."""
        for group in (self._policy, self._critic):
            if group is not None:
                group.check_ranks()

    def close(self) -> None:
        """End the workers and give back their resources."""
        for group in (self._policy, self._critic):
            if group is not None:
                group.close()


class _WorkerGroup:
    """verl's worker group: a method called by name on all ranks, answered by rank 0."""

    def __init__(
        self, worker: type, pool: RayResourcePool, settings: LearnerConfig, **arguments: Any
    ) -> None:
        self._worker, self._pool, self._settings, self._arguments = worker, pool, settings, arguments
        self._start()

    def _start(self) -> None:
        from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

        settings = self._settings
        on_gpu = settings.device != "cpu"
        num_threads = str(settings.num_threads or 1)
        self._patience = Patience(settings.max_call_seconds)
        self._group = RayWorkerGroup(
            self._pool,
            RayClassWithInitArgs(ray.remote(self._worker), **self._arguments),
            bin_pack=False,  # ranks may spread over nodes
            device_name=settings.device,
            worker_env={}
            if on_gpu
            else {"OMP_NUM_THREADS": num_threads, "MKL_NUM_THREADS": num_threads, "VERL_PLATFORM": "cpu"},
            use_gpu=on_gpu,
            # verl would choose a port in a process that it starts for that, and open it seconds later in
            # another, when somebody else may have taken it. The first rank listens instead.
            master_addr="",
            master_port="",
        )
        meeting = self._group.execute_rank_zero_async("listen")
        self._opened = self._group.execute_all_async("open", meeting)

    def start_anew(self, optimizer: OptimizerConfig, num_schedule_steps: int) -> None:
        """End the ranks that are left, and start as many where those had their place."""
        self._kill()
        learner = replace(self._arguments["learner"], optimizer=optimizer)
        self._arguments |= {"learner": learner, "num_schedule_steps": num_schedule_steps}
        self._start()

    def begin(self, method: str, *args: Any) -> _Call:
        """Call all ranks. Raises the error of loading the model, if any."""
        self._wait_for(self._opened, None)
        return _Call(self, method, self._group.execute_all_async(method, *args))

    def call(self, method: str, *args: Any) -> Any:
        return self.begin(method, *args).answer()

    def answer_to(self, call: _Call) -> Any:
        """The first rank's answer, when all have answered."""
        answer = self._wait_for(call.references, self._patience.limit(call.method))
        self._patience.record(call.method, time.monotonic() - call.since)
        return answer

    def check_ranks(self) -> None:
        self._wait_for(self._opened, None)  # first: a rank that loads its model for minutes does not hang
        self._wait_for(self._questions(), ANSWER_SECONDS)

    def _questions(self) -> list[ray.ObjectRef]:
        return [worker.__ray_ready__.remote() for worker in self._group.workers]

    def _wait_for(self, references: list[ray.ObjectRef], seconds: float | None) -> Any:
        try:
            return ray.get(references, timeout=seconds)[0]
        except GetTimeoutError as error:
            raise LearnerLostError(
                f"A learner rank did not answer for {seconds:g} s: it hangs or was stopped, or the limit "
                "learner.max_call_seconds is too low."
            ) from error
        except RayActorError as error:
            raise LearnerLostError("A learner rank has died.") from error
        except RayTaskError as error:
            if isinstance(error.cause, TroupeError):  # without Ray's traceback: its text is for the user
                raise error.cause from error
            self._raise_if_dead()  # the ranks that are left report the lost connection first
            raise

    def _raise_if_dead(self) -> None:
        try:
            ray.get(self._questions(), timeout=ANSWER_SECONDS)
        except RayActorError as error:
            raise LearnerLostError("A learner rank has died.") from error

    def _kill(self) -> None:
        for worker in self._group.workers:
            ray.kill(worker)

    def close(self) -> None:
        self._kill()
        for places in self._pool.pgs or []:
            ray.util.remove_placement_group(places)
        self._pool.pgs = None


@dataclass(frozen=True)
class _Call:
    """A call of all ranks that is under way."""

    group: _WorkerGroup
    method: str
    references: list[ray.ObjectRef]
    since: float = field(default_factory=time.monotonic)

    def answer(self) -> Any:
        """The first rank's answer, when all have answered."""
        return self.group.answer_to(self)


def _with_values(
    batches: Sequence[TrainBatch], values: Sequence[Sequence[tuple[float, ...]]]
) -> list[TrainBatch]:
    return [
        replace(
            batch,
            samples=tuple(
                replace(sample, values=row) for sample, row in zip(batch.samples, rows, strict=True)
            ),
        )
        for batch, rows in zip(batches, values, strict=True)
    ]


def _worker_classes(device: str) -> tuple[type, type]:
    """The classes of the policy's ranks and of the critic's.

    Importing verl fixes the device that it uses, also in this process, which computes nothing.
    """
    if device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
    os.environ.setdefault("VERL_LOGGING_LEVEL", "WARNING")  # verl tells which platform it was given
    with warnings.catch_warnings():  # verl warns of engines that are not used here
        warnings.simplefilter("ignore")
        from actors.learning.learner_worker import CriticWorker, LearnerWorker
    return LearnerWorker, CriticWorker


def _resource_pool(settings: LearnerConfig) -> RayResourcePool:
    """Places for the ranks, on nodes that ``learner.nodes`` allows. verl's own pool has no such choice."""
    from verl.single_controller.ray import RayResourcePool

    on_gpu = settings.device != "cpu"
    pool = RayResourcePool([settings.num_workers], use_gpu=on_gpu, max_colocate_count=1)
    place = {"CPU": 1.0, **({"GPU": 1.0} if on_gpu else {}), **settings.nodes.resources}
    places = placement_group(
        [place] * settings.num_workers,
        strategy="PACK",  # ranks may spread over nodes
        bundle_label_selector=[dict(settings.nodes.labels)] * settings.num_workers,
    )
    ray.get(places.ready())
    pool.pgs = [places]
    return pool
