"""A stage of training: settings, an optimizer and steps of its own. The loop runs the stages in turn."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from launch.run_folder.checkpoint import Progress
from launch.settings.tree import TrainConfig, without_rollouts
from launch.workload import Workload
from policies.learning.settings import OptimizerConfig, phase_optimizer

if TYPE_CHECKING:
    from launch.training.activity import Clock
    from launch.training.components import Components
    from launch.training.run_state import RunState


NUM_EVALUATIONS = 10
"""Times that what a stage without rollouts holds out is measured in its course."""


class HasProgress(Protocol):
    """A run, or the replay of one, as far as its stages count their steps in it."""

    progress: Progress


class Stage(ABC):
    """One part of a training.

    A stage of your own is a class derived from this one, named in ``stages`` as "module:Class". What
    ``stage_settings`` holds under its name are the keyword arguments that it is made with.

    Args:
        config: of the run.
    """

    name: ClassVar[str]
    """Key in ``Progress.stage_steps`` and in ``stage_settings``: no two stages of a run have the same."""
    rolls_out: ClassVar[bool]
    """True if its steps are policy updates from rollouts, with evaluations and checkpoints in between."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Steps of the whole stage; 0 leaves it out."""

    @property
    @abstractmethod
    def optimizer(self) -> OptimizerConfig:
        """The optimizer that the learner begins the stage with."""

    @property
    def num_schedule_steps(self) -> int:
        """Steps of the learning rate's schedule: one per ``update`` of the learner, or batch of ``fit``."""
        return self.num_steps

    def check_workload(self, workload: Workload) -> None:
        """Find what would fail later. Raises ``ConfigError`` or ``DatasetError``."""
        return

    @abstractmethod
    def step(self, run: Components, state: RunState, clock: Clock) -> None:
        """Do the next step, or a few, and count them by ``count_steps`` in one atomic section with what they
        change: the learner's weights, the published version, what was consumed. They are counted after the
        publish: a step in which the learner is lost is done again.
        """

    def num_done(self, state: HasProgress) -> int:
        """Steps of this stage that are done."""
        return state.progress.stage_steps.get(self.name, 0)

    def count_steps(self, state: HasProgress, number: int = 1) -> None:
        """Take note that ``number`` more steps are done."""
        state.progress.stage_steps[self.name] = self.num_done(state) + number


class SupervisedStage(Stage):
    """A stage that has a section of the settings by its name, and in it an optimizer of its own."""

    @property
    def num_steps(self) -> int:
        return int(getattr(self.config, self.name).num_steps)

    @property
    def optimizer(self) -> OptimizerConfig:
        return phase_optimizer(f"{self.name}.optimizer", getattr(self.config, self.name).optimizer)


def publish(run: Components, state: RunState) -> None:
    """Make the learner's weights the next version: rollouts requested from now on wait for it."""
    run.learner.publish(state.progress.version + 1)
    state.progress.version += 1


def parts_needed(config: TrainConfig, stages: Sequence[Stage], workload: Workload) -> TrainConfig:
    """The configuration of what a run starts: without engines and rollout actors where it plays nothing, for
    a stage, an evaluation or the clients of its server.
    """
    plays = config.server.http_port is not None or bool(workload.held_out)
    plays = plays or any(stage.rolls_out for stage in stages)
    return config if plays and config.run.replay is None else without_rollouts(config)


def pass_over(count: int, seed: int, purpose: str, number: int) -> list[int]:
    """The order in which the pass of this ``number`` takes ``count`` things."""
    return random.Random(f"{seed}/{purpose}/{number}").sample(range(count), count)


def passed_over(first: int, end: int, count: int, seed: int, purpose: str) -> list[int]:
    """Places that passes over ``count`` things take from the ``first`` on, before the ``end``.

    Each pass takes all of them once. A function of its arguments alone, so that a resumed run agrees.
    """
    places = [divmod(place, count) for place in range(first, end)]
    orders = {each: pass_over(count, seed, purpose, each) for each in {each for each, _ in places}}
    return [orders[number][place] for number, place in places]


def evaluated_steps(num_steps: int) -> set[int]:
    """Steps of a stage after which what it holds out is measured."""
    return {-(-num_steps * part // NUM_EVALUATIONS) for part in range(1, NUM_EVALUATIONS + 1)}
