"""The learners of several policies: each is given its own policy's samples, and a checkpoint holds all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from actors.learning.learners import Learners, merged_metrics
from environments.errors import LearnerError
from policies.learning.samples import LearnerUpdate, TrainBatch, TrainingSample


def batch(policy: str, *names: str) -> TrainBatch:
    columns = {"prompt_ids": (1,), "response_ids": (2,), "loss_mask": (1,), "rollout_logprobs": (-1.0,)}
    samples = tuple(TrainingSample(sample_id=f"{name}#0", **columns) for name in names)
    return TrainBatch(samples=samples, temperature=0.7, policy=policy)


class FakeGroup:
    """Takes note of the samples of each call; its number is in all that it returns."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.calls: list[list[list[str]]] = []
        self.published: list[int] = []
        self.loaded: list[str] = []

    def _note(self, batches: Sequence[TrainBatch]) -> None:
        self.calls.append([[each.sample_id.partition("#")[0] for each in batch.samples] for batch in batches])

    def fit(self, batches: Sequence[TrainBatch], weighted: bool = False) -> LearnerUpdate:
        self._note(batches)
        return LearnerUpdate(metrics={"learn/loss": float(self.number)}, num_optimizer_steps=len(batches))

    update = fit

    def score(self, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        self._note(batches)
        number = (float(self.number),)
        return [batch.with_column("old_logprobs", [number] * len(batch.samples)) for batch in batches]

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        return [[float(self.number)] for _ in batch.samples]

    def publish(self, version: int) -> None:
        self.published.append(version)

    def begin_save(self, folder: str) -> Callable[[], dict[str, Any]]:
        return lambda: {f"{folder}/weights": self.number}

    def load(self, folder: str) -> str | None:
        self.loaded.append(folder)
        return "No moments."


@pytest.fixture
def groups() -> dict[str, Any]:
    return {"a": FakeGroup(1), "b": FakeGroup(2)}


BATCHES = [batch("b", "0"), batch("a", "1", "2"), batch("b", "3")]


def test_each_learner_is_given_its_own_samples(groups: dict[str, Any]) -> None:
    update = Learners(groups).update(BATCHES)
    assert (groups["a"].calls, groups["b"].calls) == ([[["1", "2"]]], [[["0"], ["3"]]])
    assert update.num_optimizer_steps == 3
    assert update.metrics == {"learn/loss": 1.5, "learn/a/loss": 1.0, "learn/b/loss": 2.0}


def test_learner_without_a_batch_is_left_out(groups: dict[str, Any]) -> None:
    update = Learners(groups).update(BATCHES[:1])
    assert groups["a"].calls == []
    assert update.metrics == {"learn/loss": 2.0, "learn/b/loss": 2.0}


def test_scores_come_back_in_the_order_of_the_batches(groups: dict[str, Any]) -> None:
    scored = Learners(groups).score(BATCHES)
    rows = [[(each.sample_id, each.old_logprobs) for each in batch.samples] for batch in scored]
    assert rows == [[("0#0", (2.0,))], [("1#0", (1.0,)), ("2#0", (1.0,))], [("3#0", (2.0,))]]
    assert [Learners(groups).logprobs(each) for each in BATCHES[:2]] == [[[2.0]], [[1.0], [1.0]]]


def test_demonstrations_are_for_all_policies(groups: dict[str, Any]) -> None:
    Learners(groups).fit([batch("", "0")])
    assert groups["a"].calls == groups["b"].calls == [[["0"]]]


def test_turns_of_another_policy_are_refused(groups: dict[str, Any]) -> None:
    strange = batch("c", "0")
    for call in (Learners(groups).update, Learners(groups).score):
        with pytest.raises(LearnerError, match=r"policy 'c', and the run trains 'a', 'b'"):
            call([strange])
    assert groups["a"].calls == groups["b"].calls == []


def test_all_policies_have_one_version_and_folders_of_their_own(groups: dict[str, Any]) -> None:
    learners = Learners(groups)
    learners.publish(7)
    assert groups["a"].published == groups["b"].published == [7]
    assert learners.begin_save("/run/step")() == {"/run/step/a/weights": 1, "/run/step/b/weights": 2}
    assert learners.load("/run/step") == "No moments."
    assert groups["b"].loaded == ["/run/step/b"]


def test_failure_of_one_learner_reaches_the_loop(groups: dict[str, Any]) -> None:
    def fail(version: int) -> None:
        raise LearnerError("no memory")

    groups["b"].publish = fail
    with pytest.raises(LearnerError, match="no memory"):
        Learners(groups).publish(1)


def test_one_learner_is_given_what_the_loop_gives() -> None:
    group: Any = FakeGroup(1)
    learners = Learners({"": group})
    given = batch("", "0", "1")
    assert learners.score([given]) == group.score([given])
    assert learners.update([given]) == LearnerUpdate(metrics={"learn/loss": 1.0}, num_optimizer_steps=1)
    assert list(learners.begin_save("/run/step")()) == ["/run/step/weights"]
    learners.load("/run/step")
    assert group.loaded == ["/run/step"]


def test_metrics_of_several_are_means_and_extremes() -> None:
    merged = merged_metrics({"a": {"learn/diff_max": 1.0, "learn/x": 1.0}, "b": {"learn/diff_max": 3.0}})
    assert merged == {
        "learn/diff_max": 3.0,
        "learn/x": 1.0,
        "learn/a/diff_max": 1.0,
        "learn/a/x": 1.0,
        "learn/b/diff_max": 3.0,
    }
