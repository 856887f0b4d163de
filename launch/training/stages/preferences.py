"""The stage ``preferences``: DPO on the workload's pairs of a chosen and a rejected continuation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from environments.data.dataset_files import read_rows, write_rows
from environments.errors import ConfigError
from launch.run_folder.jsonl_log import JsonlLog
from launch.settings.tree import TrainConfig
from launch.training.activity import Clock
from launch.training.components import Components
from launch.training.run_state import RunState
from launch.training.stages.base import SupervisedStage, evaluated_steps, pass_over, passed_over, publish
from launch.training.stages.warm_start import chat_renderer
from launch.workload import Workload
from policies.learning.preferences import (
    Pair,
    PairScore,
    PreferenceObjective,
    batch_of,
    check_preferences,
    make_pairs,
    pair_scores,
)

PREFERENCE_STEPS = "preferences.jsonl"
"""File of a run with a record for each step of the stage."""
REFERENCE_SCORES = "preferences_reference.jsonl"
"""File of a run with the scores of the pairs under the weights with which the stage began."""


class Preferences(SupervisedStage):
    """Learns ``preferences.num_steps`` batches of pairs; the policy is published at the end.

    The reference policy is the one with which the stage begins. It is no second model: the scores of the
    pairs under it, two each, are computed before the first step and stay in the run's folder.
    """

    name = "preferences"
    rolls_out = False

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        own = config.preferences
        self._objective = PreferenceObjective(beta=own.beta, sft_coef=own.sft_coef)
        self._pairs: Sequence[Pair] = ()
        self._held_out: Sequence[Pair] = ()
        self._reference: dict[str, PairScore] = {}
        self._log: JsonlLog | None = None

    def check_workload(self, workload: Workload) -> None:
        num_pairs, held_out = len(workload.preferences), self.config.preferences.held_out_pairs
        if not num_pairs:
            raise ConfigError(
                f"preferences.num_steps={self.num_steps} needs preferences and the workload has none: give "
                "it some, or leave the stage preferences out."
            )
        if held_out >= num_pairs:
            raise ConfigError(
                f"preferences.held_out_pairs={held_out} leaves nothing to learn of the workload's "
                f"{num_pairs} preferences: set it to {num_pairs - 1} at most."
            )
        check_preferences(workload.preferences)

    def step(self, run: Components, state: RunState, clock: Clock) -> None:
        number = self.num_done(state)
        if not self._pairs:
            self._begin(run, state, clock)
        assert self._log is not None
        pairs = [self._pairs[index] for index in self.indices(number, len(self._pairs))]
        with clock.measure("time/score"):
            policy, reference = self._score(run, pairs), self._reference_of(pairs)
        metrics = self._objective.metrics(pairs, policy, reference)
        with run.interrupts.atomic_section():
            with clock.measure("time/learn"):
                weighted = self._objective.weighted(pairs, policy, reference)
                learned = run.learner.fit([weighted], weighted=True)
            number += 1
            if number == self.num_steps:
                publish(run, state)
            self.count_steps(state)
            metrics |= {name: learned.metrics[f"learn/{name}"] for name in ("grad_norm", "lr")}
            if self._held_out and number in evaluated_steps(self.num_steps):
                with clock.measure("time/evaluate"):
                    metrics |= self._held_out_metrics(run)
            self._log.append({"step": number, **metrics})
        run.tracker.offline_step("preferences", number, self.num_steps, _summary(metrics))

    def _begin(self, run: Components, state: RunState, clock: Clock) -> None:
        """Make the pairs, and score them under the reference, which is the present policy, or read that."""
        number = self.num_done(state)
        pairs = make_pairs(chat_renderer(run), run.workload.preferences, run.tracker.announce)
        num_learned = len(pairs) - self.config.preferences.held_out_pairs
        self._held_out = pairs[num_learned:]
        learned = pairs[:num_learned]
        order = pass_over(num_learned, self.config.seed, self.name, 0)
        num_taken = self.num_steps * self.config.preferences.pairs_per_step
        needed = [learned[index] for index in order[:num_taken]] + self._held_out
        path = state.directory / REFERENCE_SCORES
        if number == 0:
            run.tracker.announce(f"Preferences: {len(needed)} pairs are scored under the reference policy.")
            with clock.measure("time/score"):
                write_rows(path, self._reference_rows(run, needed))
        self._reference = read_reference(path, needed)
        self._log = JsonlLog(state.directory / PREFERENCE_STEPS, number)
        self._pairs = learned

    def _reference_rows(self, run: Components, pairs: Sequence[Pair]) -> Iterator[dict[str, Any]]:
        for part in self._parts(pairs):
            run.interrupts.raise_if_interrupted()
            for pair, score in zip(part, self._score(run, part), strict=True):
                yield {"pair": pair.key, "chosen": score.chosen, "rejected": score.rejected}

    def indices(self, step: int, num_pairs: int) -> list[int]:
        """The pairs of a step."""
        size = min(self.config.preferences.pairs_per_step, num_pairs)
        return passed_over(step * size, (step + 1) * size, num_pairs, self.config.seed, self.name)

    def _held_out_metrics(self, run: Components) -> dict[str, float]:
        policy = [score for part in self._parts(self._held_out) for score in self._score(run, part)]
        metrics = self._objective.metrics(self._held_out, policy, self._reference_of(self._held_out))
        return {f"held_out_{name}": value for name, value in metrics.items()}

    def _parts(self, pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
        size = self.config.preferences.pairs_per_step
        return (pairs[first : first + size] for first in range(0, len(pairs), size))

    def _score(self, run: Components, pairs: Sequence[Pair]) -> list[PairScore]:
        return pair_scores(pairs, run.learner.logprobs(batch_of(pairs)))

    def _reference_of(self, pairs: Sequence[Pair]) -> list[PairScore]:
        return [self._reference[pair.key] for pair in pairs]


def read_reference(path: Path, needed: Sequence[Pair]) -> dict[str, PairScore]:
    """The scores of ``needed`` under the reference policy, by the pairs' keys.

    Raises:
        ConfigError: the file is gone, or lacks a pair.
    """
    again = f"or begin a new run with model.path={path.parent}."
    if not path.is_file():
        raise ConfigError(
            f"The stage preferences needs {path}, and there is no such file: put it back, {again}"
        )
    scores = {
        row["pair"]: PairScore(chosen=row["chosen"], rejected=row["rejected"]) for row in read_rows(path)
    }
    if missing := sum(pair.key not in scores for pair in needed):
        raise ConfigError(
            f"{missing} of {len(needed)} pairs have no score in {path}, which was written when the stage "
            "preferences began: go on with the workload, the seed and the settings of preferences that the "
            f"run was begun with, {again}"
        )
    return scores


def _summary(metrics: Mapping[str, float]) -> str:
    text = f"loss {metrics['loss']:.3f}  margin {metrics['margin']:+.2f}  accuracy {metrics['accuracy']:.2f}"
    if "held_out_accuracy" in metrics:
        text += f"  held out {metrics['held_out_accuracy']:.2f}"
    return text
