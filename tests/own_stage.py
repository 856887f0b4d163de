"""A stage of training as somebody outside of the library would write it: a class in a module of their own."""

from __future__ import annotations

from launch.settings.tree import TrainConfig
from launch.training.activity import Clock
from launch.training.components import Components
from launch.training.run_state import RunState
from launch.training.stages.base import Stage, publish
from launch.training.stages.warm_start import demonstration_batch, demonstrations
from policies.learning.settings import OptimizerConfig


class Rehearse(Stage):
    """Learns a few demonstrations again, and publishes after every step."""

    name = "rehearse"
    rolls_out = False

    def __init__(self, config: TrainConfig, num_steps: int, lr: float = 1e-3) -> None:
        super().__init__(config)
        self._num_steps, self._lr = num_steps, lr

    @property
    def num_steps(self) -> int:
        return self._num_steps

    @property
    def optimizer(self) -> OptimizerConfig:
        return OptimizerConfig(lr=self._lr)

    def step(self, run: Components, recovery: RunState, clock: Clock) -> None:
        batch = demonstration_batch(
            demonstrations(run, run.workload.demonstrations), 8, self.config.seed, self.num_done(recovery)
        )
        with run.interrupts.atomic_section():
            learned = run.learner.fit([batch])
            self.count_steps(recovery)
            publish(run, recovery)
        run.tracker.announce(f"Rehearsed: loss {learned.metrics['learn/loss']:.3f}")
