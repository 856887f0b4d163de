"""The learners of a run, one for each of its policies, as one: the training loop calls them together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from actors.learning.learner_group import LearnerGroup
from environments.background import in_background
from environments.disk import FileDigest
from environments.errors import LearnerError
from policies.learning.samples import LearnerUpdate, TrainBatch
from policies.learning.settings import OptimizerConfig

Result = TypeVar("Result")
EXTREMES: Mapping[str, Callable[[list[float]], float]] = {"max": max, "min": min}
"""Functions that make one metric of several policies', by the end of its name; of others it is the mean."""


class Learners:
    """Hands each mini-batch to the learner of its policy, and to no other.

    One that names no policy, such as demonstrations, is for all. All policies have the same version, since
    all are published together. In a checkpoint the files of a policy are in a folder of its name.

    What concerns one policy works as ``LearnerGroup`` says; with one, this adds nothing.

    Args:
        groups: the learners by the names of their policies; one alone may have the empty name.
    """

    def __init__(self, groups: Mapping[str, LearnerGroup]) -> None:
        self._groups = dict(groups)
        self.policies = tuple(self._groups)

    # -- learning ------------------------------------------------------------------------------------

    def begin_phase(self, optimizer: OptimizerConfig, num_schedule_steps: int) -> None:
        """See ``LearnerGroup.begin_phase``."""
        self._each(self.policies, lambda _, group: group.begin_phase(optimizer, num_schedule_steps))

    def fit(self, batches: Sequence[TrainBatch], weighted: bool = False) -> LearnerUpdate:
        """See ``LearnerGroup.fit``."""
        return self._learn(batches, lambda group, own: group.fit(own, weighted))

    def update(self, batches: Sequence[TrainBatch]) -> LearnerUpdate:
        """See ``LearnerGroup.update``."""
        return self._learn(batches, lambda group, own: group.update(own))

    def score(self, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        """See ``LearnerGroup.score``."""
        own = self._own_batches(batches)
        scored = self._each(own, lambda name, group: iter(group.score(own[name])))
        return [next(scored[batch.policy]) for batch in batches]

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        """See ``LearnerGroup.logprobs``. Of a batch for all, by the first."""
        return self._groups[batch.policy or self.policies[0]].logprobs(batch)

    # -- weights and checkpoints ---------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """See ``LearnerGroup.publish``."""
        self._each(self.policies, lambda _, group: group.publish(version))

    def begin_save(self, folder: str) -> Callable[[], dict[str, FileDigest]]:
        """See ``LearnerGroup.begin_save``."""
        waits = [group.begin_save(str(Path(folder, name))) for name, group in self._groups.items()]
        return lambda: {path: digest for wait in waits for path, digest in wait().items()}

    def load(self, folder: str) -> str | None:
        """See ``LearnerGroup.load``."""
        left_out = self._each(self.policies, lambda name, group: group.load(str(Path(folder, name))))
        return " ".join(dict.fromkeys(filter(None, left_out.values()))) or None

    def rebuild(self, optimizer: OptimizerConfig, num_schedule_steps: int, folder: str) -> int | None:
        """See ``LearnerGroup.rebuild``: for one policy, as of several some may be a version ahead."""
        [(name, group)] = self._groups.items()
        return group.rebuild(optimizer, num_schedule_steps, str(Path(folder, name)))

    def check_ranks(self) -> None:
        """See ``LearnerGroup.check_ranks``."""
        for group in self._groups.values():
            group.check_ranks()

    def finish_publish(self) -> None:
        """See ``LearnerGroup.finish_publish``."""
        for group in self._groups.values():
            group.finish_publish()

    def close(self) -> None:
        """See ``LearnerGroup.close``."""
        for group in self._groups.values():
            group.close()

    # -- policies ------------------------------------------------------------------------------------

    def _own_batches(self, batches: Sequence[TrainBatch]) -> dict[str, list[TrainBatch]]:
        """The batches that each policy learns from, for those that have any, in the order of the policies."""
        if strange := {batch.policy for batch in batches} - {"", *self.policies}:
            raise LearnerError(
                f"There are turns of the policy {min(strange)!r}, and the run trains "
                f"{', '.join(map(repr, self.policies))}: the agent's `policies` have to list every one."
            )
        own = {name: [each for each in batches if each.policy in ("", name)] for name in self.policies}
        return {name: each for name, each in own.items() if each}

    def _learn(
        self,
        batches: Sequence[TrainBatch],
        work: Callable[[LearnerGroup, list[TrainBatch]], LearnerUpdate],
    ) -> LearnerUpdate:
        """Result of ``work`` with the batches of each policy."""
        own = self._own_batches(batches)
        updates = self._each(own, lambda name, group: work(group, own[name]))
        return LearnerUpdate(
            metrics=merged_metrics({name: each.metrics for name, each in updates.items()}),
            num_optimizer_steps=sum(each.num_optimizer_steps for each in updates.values()),
        )

    def _each(self, names: Iterable[str], work: Callable[[str, LearnerGroup], Result]) -> dict[str, Result]:
        """Results of ``work`` with the learners of these policies, which all do it at the same time."""
        first, *others = names
        running: dict[str, Future[Result]] = {
            name: in_background(partial(work, name, self._groups[name]), f"learner {name}") for name in others
        }
        return {first: work(first, self._groups[first])} | {
            name: each.result() for name, each in running.items()
        }


def merged_metrics(by_policy: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """The metrics of several policies: each under its policy's name, ``learn/solver/loss``, and for all of
    them ``learn/loss``, the mean, or the extreme of what ends in ``_max`` or ``_min``.

    Those of a policy without a name, which is alone, stay as they are.
    """
    if "" in by_policy:
        return dict(by_policy[""])
    values: dict[str, list[float]] = {}
    for each in by_policy.values():
        for metric, value in each.items():
            values.setdefault(metric, []).append(value)
    merged = {
        metric: EXTREMES.get(metric.rpartition("_")[2], fmean)(of_all) for metric, of_all in values.items()
    }
    for policy, each in by_policy.items():
        for metric, value in each.items():
            area, _, name = metric.partition("/")
            merged[f"{area}/{policy}/{name}"] = value
    return merged
