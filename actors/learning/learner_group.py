"""The learner: groups of ranks for the policy and its critic. The training loop calls it.

``learner_calls.py`` lists the calls that the ranks take.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayTaskError

from actors.learning.learner_calls import CriticCalls, PolicyCalls
from actors.learning.ranks import CriticWorker, LearnerWorker, RankGroup, create_placement_group
from actors.weights.store import PublishedWeights
from environments.background import in_background
from environments.disk import FileDigest
from environments.errors import LearnerLostError
from policies.learning.algorithm import Algorithm
from policies.learning.division import ADVANTAGES, OLD_LOGPROBS, VALUE_COLUMNS, policy_columns
from policies.learning.samples import LearnerUpdate, TrainBatch
from policies.learning.served_teacher import ServedTeacher
from policies.learning.settings import LearnerConfig, OptimizerConfig, critic_optimizer

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
        store: the ``WeightStore`` to which ``publish`` adds versions.
        engine_dtype: ``half_dtype`` of the engines: weights that are wider are cast before they travel.
        num_gpus: that a rank of the policy reserves, where it is on a GPU.
        before_work: called before the ranks do anything, where they share their devices with engines.
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
        engine_dtype: str | None = None,
        num_gpus: float = 1.0,
        before_work: Callable[[], None] | None = None,
    ) -> None:
        arguments: dict[str, Any] = {
            "model_path": model_path,
            "learner": learner,
            "num_schedule_steps": num_schedule_steps,
            "seed": seed,
            "shared_file": shared_file,
            "before_work": before_work,
            "gives_back": before_work is not None,
        }
        places = create_placement_group(learner, num_gpus)
        self._policy = RankGroup(
            LearnerWorker,
            places,
            learner,
            num_gpus,
            **arguments,
            algorithm=algorithm,
            store=store,
            engine_dtype=engine_dtype,
        )
        self._critic = None
        if algorithm.uses_critic:
            # A rank takes its CPU only while it starts; a GPU it takes for good.
            try:
                places = places if learner.device == "cpu" else create_placement_group(learner)
            except BaseException:
                self._policy.close()
                raise
            self._critic = RankGroup(CriticWorker, places, learner, **arguments)
        self._groups = [each for each in (self._policy, self._critic) if each is not None]
        self._critic_optimizer = critic_optimizer(learner)
        self._store, self._algorithm = store, algorithm
        self._teacher = ServedTeacher.of(algorithm)
        self._schedule: dict[str, Any] = {}
        """State of the learning rate's schedule at this phase's last publish; empty before it."""
        self._publish: Future[None] | None = None
        """The newest version on its way to the store, or there."""

    # -- learning ------------------------------------------------------------------------------------

    def begin_phase(self, optimizer: OptimizerConfig, num_schedule_steps: int) -> None:
        """A fresh optimizer and schedule on the present weights, which become the reference policy."""
        self.finish_publish()
        self._schedule = {}
        begun = [self._policy.begin(PolicyCalls.begin_phase, optimizer, num_schedule_steps)]
        if self._critic is not None:
            optimizer = self._critic_optimizer
            begun.append(self._critic.begin(CriticCalls.begin_phase, optimizer, num_schedule_steps))
        for wait in begun:
            wait()

    def fit(self, batches: Sequence[TrainBatch], weighted: bool = False) -> LearnerUpdate:
        """Supervised learning: one optimizer step per batch, its tokens ``weighted`` by their advantages."""
        if weighted:
            return self._policy.begin_learning(PolicyCalls.fit_weighted, batches, [*ADVANTAGES])()
        return self._policy.begin_learning(PolicyCalls.fit, batches)()

    def score(self, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        """The mini-batches of one update with ``old_logprobs``, and, where the algorithm needs them,
        ``reference_logprobs``, ``teacher_logprobs`` and ``values``. The first takes its old log-probabilities
        in its own step, unless the algorithm needs all of them before.

        Raises:
            EnvironmentFailure: a teacher at an address does not score them.
        """
        if self._algorithm.bypass:
            batches = [batch.with_engine_logprobs() for batch in batches]
        with_scores = self._policy.begin_scoring(PolicyCalls.score, batches, keeps=True)
        if self._teacher is not None:  # beside the ranks
            batches = self._teacher.scored(batches)
        if self._critic is None:
            return with_scores(batches)
        with_values = self._critic.begin_scoring(CriticCalls.values, batches, keeps=True)
        return with_values(with_scores(batches))

    def update(self, batches: Sequence[TrainBatch]) -> LearnerUpdate:
        """One optimizer step per mini-batch, of the policy and of the critic if there is one.

        Args:
            batches: as ``score`` has returned them, with advantages; each as often as it is to be taken.
        """
        columns = [*policy_columns(self._algorithm), *OLD_LOGPROBS]
        of_policy = self._policy.begin_learning(PolicyCalls.update, batches, columns)
        if self._critic is None:
            return of_policy()
        of_critic = self._critic.begin_learning(CriticCalls.update, batches, [*VALUE_COLUMNS])
        update = of_policy()
        return replace(update, metrics=update.metrics | of_critic())

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        """Log-probability of every sampled token, under the batch's temperature, and 0 for the rest of the
        response [R] of each sample."""
        [scored] = self._policy.begin_scoring(PolicyCalls.logprobs, [batch], keeps=False)([batch])
        return [list(sample.old_logprobs) for sample in scored.samples]

    # -- weights and checkpoints ---------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """Copy the present weights, adapters merged, and make them the newest version in the store beside the
        learner's next work. Raises the error of the publish before.
        """
        self.finish_publish()
        schedule = self._policy.call(PolicyCalls.begin_publish)
        self._publish = in_background(partial(self._publish_copy, version, schedule), f"publish {version}")

    def _publish_copy(self, version: int, schedule: dict[str, Any]) -> None:
        pieces = self._policy.stream(PolicyCalls.publish_weights, version)
        try:
            ray.get(self._store.publish.remote(version, pieces))
        except RayTaskError:  # mostly: a node was lost, and the pieces with it
            self._policy.raise_if_dead()  # one at work answers no call
            raise
        self._schedule = schedule  # not before: until then the newest version, and its schedule, is another

    def begin_save(self, folder: str) -> Callable[[], dict[str, FileDigest]]:
        """Copy weights, optimizer, schedule, generators, reference policy and critic, and begin to write them
        to ``folder``, the weights in Hugging Face's form too. The learner may go on meanwhile.

        Returns:
            A function that waits until all is written, and returns the digests of the files, by path. It
            raises OSError for a file that could not be written.
        """
        waits = [self._policy.begin_save(folder)]
        if self._critic is not None:
            waits.append(self._critic.begin_save(os.path.join(folder, CRITIC)))
        return lambda: {path: digest for wait in waits for path, digest in wait().items()}

    def load(self, folder: str) -> str | None:
        """Restore a checkpoint of ``begin_save``. The number of ranks may be another one.

        Returns:
            A sentence that names the parts that could not be restored; ``None`` if there are none.

        Raises:
            ConfigError: the checkpoint lacks a part that this algorithm needs, or is of another model.
        """
        left_out = self._policy.call(PolicyCalls.load, folder)
        if self._critic is not None:
            self._critic.call(CriticCalls.load, os.path.join(folder, CRITIC))
        return left_out

    def rebuild(self, optimizer: OptimizerConfig, num_schedule_steps: int, folder: str) -> int | None:
        """Replace all ranks, after ``LearnerLostError``: they go on from the weights and the schedule of this
        phase's last publish, and for the rest (optimizer's moments, reference policy, critic) from a
        checkpoint.

        Args:
            optimizer, num_schedule_steps: of the phase of training that the checkpoint is of.
            folder: of ``begin_save``.

        Returns:
            The version of the weights; ``None`` if none was published, and they are the checkpoint's.

        Raises:
            As ``load`` does; ``WeightTransportError`` if the weights cannot be read, ``LearnerLostError`` if
            they are published in another form than the learner holds them in, or were lost with it.
        """
        for group in self._groups:
            group.start_anew(optimizer, num_schedule_steps)
        if self._publish is not None and (failure := self._publish.exception()) is not None:
            raise LearnerLostError("The learner was lost before its newest weights were there.") from failure
        self.load(folder)
        published: PublishedWeights | None = ray.get(self._store.newest.remote())
        if published is None:
            return None
        self._policy.call(PolicyCalls.take_over, published, self._schedule)
        return published.version

    def check_ranks(self) -> None:
        """Raise if a rank has died or hangs, or the newest version could not be published. For times without
        another call, which would raise too.
        """
        for group in self._groups:
            group.check_ranks()
        if self._publish is not None and self._publish.done():
            self.finish_publish()

    def finish_publish(self) -> None:
        """Return when the newest version is in the store. Raises the error of its publish."""
        if self._publish is not None:
            self._publish.result()

    def close(self) -> None:
        """End the workers and give back their resources."""
        for group in self._groups:
            group.close()
