"""The learners of a run, one for each of its policies, as one: the training loop calls them together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from actors.learning.learner_group import LearnerGroup
from actors.ray_tools.background import in_background
from environments.disk import FileDigest
from environments.errors import LearnerError
from policies.learning.samples import LearnerUpdate, TrainBatch, TrainingSample
from policies.learning.settings import OptimizerConfig

Result = TypeVar("Result")
Item = TypeVar("Item")


class Learners:
    """Hands each policy's samples to the learner of that policy, and to no other.

    Samples that name no policy, such as demonstrations, are for all. All policies have the same version: each
    update publishes all of them. In a checkpoint the files of a policy are in a folder of its name.

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
        self._all(lambda _, group: group.begin_phase(optimizer, num_schedule_steps))

    def fit(self, batches: Sequence[TrainBatch]) -> LearnerUpdate:
        """See ``LearnerGroup.fit``."""
        return self._learn(batches, lambda group, own: group.fit(own))

    def fit_weighted(self, batch: TrainBatch) -> LearnerUpdate:
        """See ``LearnerGroup.fit_weighted``."""
        return self._learn([batch], lambda group, own: group.fit_weighted(own[0]))

    def update(self, batches: Sequence[TrainBatch]) -> LearnerUpdate:
        """See ``LearnerGroup.update``."""
        return self._learn(batches, lambda group, own: group.update(own))

    def score(self, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        """See ``LearnerGroup.score``."""

        def scored(group: LearnerGroup, own: list[TrainBatch]) -> Iterator[TrainingSample]:
            return (sample for batch in group.score(own) for sample in batch.samples)

        samples = self._of_owners(batches, scored)
        pairs = [(batch, tuple(next(samples) for _ in batch.samples)) for batch in batches]
        return [replace(batch, samples=own) for batch, own in pairs]

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        """See ``LearnerGroup.logprobs``."""
        return list(self._of_owners([batch], lambda group, own: iter(group.logprobs(own[0]))))

    # -- weights and checkpoints ---------------------------------------------------------------------

    def publish(self, version: int) -> None:
        """See ``LearnerGroup.publish``."""
        self._all(lambda _, group: group.publish(version))

    def begin_save(self, folder: str) -> Callable[[], dict[str, FileDigest]]:
        """See ``LearnerGroup.begin_save``."""
        waits = [group.begin_save(str(Path(folder, name))) for name, group in self._groups.items()]
        return lambda: {path: digest for wait in waits for path, digest in wait().items()}

    def load(self, folder: str) -> str | None:
        """See ``LearnerGroup.load``."""
        left_out = self._all(lambda name, group: group.load(str(Path(folder, name))))
        return " ".join(dict.fromkeys(filter(None, left_out.values()))) or None

    def rebuild(self, optimizer: OptimizerConfig, num_schedule_steps: int, folder: str) -> int | None:
        """See ``LearnerGroup.rebuild``: for one policy, as of several some may be a version ahead."""
        [(name, group)] = self._groups.items()
        return group.rebuild(optimizer, num_schedule_steps, str(Path(folder, name)))

    def check_ranks(self) -> None:
        """See ``LearnerGroup.check_ranks``."""
        for group in self._groups.values():
            group.check_ranks()

    def close(self) -> None:
        """See ``LearnerGroup.close``."""
        for group in self._groups.values():
            group.close()

    # -- policies ------------------------------------------------------------------------------------

    def _all(self, work: Callable[[str, LearnerGroup], Result]) -> dict[str, Result]:
        """Results of ``work`` with each learner, which all do it at the same time."""
        (first, group), *others = self._groups.items()
        running: dict[str, Future[Result]] = {
            name: in_background(partial(work, name, other), f"learner {name}") for name, other in others
        }
        return {first: work(first, group)} | {name: each.result() for name, each in running.items()}

    def _learn(
        self,
        batches: Sequence[TrainBatch],
        work: Callable[[LearnerGroup, list[TrainBatch]], LearnerUpdate],
    ) -> LearnerUpdate:
        """Result of ``work`` with the samples of each policy, and those that are for all."""

        def learn(name: str, group: LearnerGroup) -> LearnerUpdate | None:
            own = _batches(batches, lambda sample: sample.policy in ("", name))
            return work(group, own) if own else None

        self._check(batches)
        updates = {name: each for name, each in self._all(learn).items() if each is not None}
        return LearnerUpdate(
            metrics=merged_metrics({name: each.metrics for name, each in updates.items()}),
            num_optimizer_steps=sum(each.num_optimizer_steps for each in updates.values()),
        )

    def _of_owners(
        self,
        batches: Sequence[TrainBatch],
        work: Callable[[LearnerGroup, list[TrainBatch]], Iterator[Item]],
    ) -> Iterator[Item]:
        """What ``work`` yields for each sample of ``batches``, in their order, from the sample's own learner.

        A sample that is for all is the first one's.
        """

        def owner(sample: TrainingSample) -> str:
            return sample.policy or self.policies[0]

        def do(name: str, group: LearnerGroup) -> Iterator[Item]:
            own = _batches(batches, lambda sample: owner(sample) == name)
            return work(group, own) if own else iter(())

        self._check(batches)
        results = self._all(do)
        return (next(results[owner(sample)]) for batch in batches for sample in batch.samples)

    def _check(self, batches: Sequence[TrainBatch]) -> None:
        strange = {sample.policy for batch in batches for sample in batch.samples} - {"", *self.policies}
        if strange:
            raise LearnerError(
                f"There are turns of the policy {min(strange)!r}, and the run trains "
                f"{', '.join(map(repr, self.policies))}: the agent's `policies` have to list every one."
            )


def _batches(batches: Sequence[TrainBatch], belongs: Callable[[TrainingSample], bool]) -> list[TrainBatch]:
    """The batches with the samples that belong to a policy, without those that have none."""
    own = [replace(batch, samples=tuple(filter(belongs, batch.samples))) for batch in batches]
    return [batch for batch in own if batch.samples]


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
    merged = {metric: _merge(metric)(of_all) for metric, of_all in values.items()}
    for policy, each in by_policy.items():
        for metric, value in each.items():
            area, _, name = metric.partition("/")
            merged[f"{area}/{policy}/{name}"] = value
    return merged


def _merge(metric: str) -> Callable[[list[float]], float]:
    extremes: dict[str, Callable[[list[float]], float]] = {"max": max, "min": min}
    return extremes.get(metric.rpartition("_")[2], fmean)
