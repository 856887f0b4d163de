"""The stage ``warm_start``: supervised learning on the workload's demonstrations."""

from __future__ import annotations

import random
from collections.abc import Sequence

from environments.errors import ConfigError
from launch.training.clock import Clock
from launch.training.components import Components
from launch.training.run_state import RunState
from launch.training.stages.base import Stage, publish
from launch.workload import Workload
from policies.chat import ChatRenderer, load_tokenizer
from policies.learning.demonstrations import demonstration_samples
from policies.learning.samples import TrainBatch, TrainingSample
from policies.learning.settings import OptimizerConfig, phase_optimizer

CHUNK = 5
"""Optimizer steps between two chances to stop."""


class WarmStart(Stage):
    """Learns ``warm_start.num_steps`` batches of demonstrations; the policy is published at the end."""

    name = "warm_start"
    rolls_out = False
    _demonstrations: Sequence[TrainingSample] = ()

    @property
    def num_steps(self) -> int:
        return self.config.warm_start.num_steps

    @property
    def optimizer(self) -> OptimizerConfig:
        return phase_optimizer("warm_start.optimizer", self.config.warm_start.optimizer)

    def check_workload(self, workload: Workload) -> None:
        if self.num_steps and not workload.demonstrations:
            raise ConfigError(
                f"warm_start.num_steps={self.num_steps} needs demonstrations and the workload has none: give "
                "it some, or set warm_start.num_steps=0."
            )

    def step(self, run: Components, state: RunState, clock: Clock) -> None:
        if not self._demonstrations:
            self._demonstrations = demonstrations(run)
            run.tracker.announce(f"Warm start on {len(self._demonstrations)} demonstrations.")
        first = self.num_done(state)
        last = min(first + CHUNK, self.num_steps)
        batches = [
            demonstration_batch(
                self._demonstrations, self.config.warm_start.batch_size, self.config.seed, step
            )
            for step in range(first, last)
        ]
        with run.interrupts.atomic_section():
            with clock.measure("time/learn"):
                learned = run.learner.fit(batches)
            self.count_steps(state, last - first)
            if last == self.num_steps:
                publish(run, state)
        loss = f"loss {learned.metrics['learn/loss']:.3f}"
        run.tracker.offline_step("warm start", last, self.num_steps, loss)


def demonstrations(run: Components) -> list[TrainingSample]:
    """The workload's demonstrations as token sequences."""
    return demonstration_samples(chat_renderer(run), run.workload.demonstrations, run.tracker.announce)


def chat_renderer(run: Components) -> ChatRenderer:
    """The tokenizer and the chat template of the run's model."""
    return ChatRenderer(load_tokenizer(run.model_path), run.config.model.chat_template_kwargs)


def demonstration_batch(
    demonstrations: Sequence[TrainingSample], batch_size: int, seed: int, step: int
) -> TrainBatch:
    """The demonstrations of one step: a function of seed and step alone, so that a resumed run agrees."""
    rng = random.Random(f"{seed}/warm start/{step}")
    return TrainBatch(samples=tuple(rng.sample(demonstrations, min(batch_size, len(demonstrations)))))
