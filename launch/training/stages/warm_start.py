"""The stage ``warm_start``: supervised learning on the workload's demonstrations."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from environments.errors import ConfigError, DatasetError
from environments.types import Message
from launch.run_folder.jsonl_log import JsonlLog
from launch.settings.tree import TrainConfig
from launch.training.activity import Clock
from launch.training.components import Components
from launch.training.run_state import RunState
from launch.training.stages.base import SupervisedStage, evaluated_steps, passed_over, publish
from launch.workload import Workload
from policies.chat import ChatRenderer, load_tokenizer
from policies.learning.demonstrations import demonstration_samples
from policies.learning.samples import TrainBatch, TrainingSample

CHUNK = 5
"""Optimizer steps between two chances to stop."""
PURPOSE = "warm start"
WARM_START_STEPS = "warm_start.jsonl"
"""File of a run with the losses of the stage, each with the steps that were done."""


class WarmStart(SupervisedStage):
    """Learns ``warm_start.num_steps`` batches of demonstrations; the policy is published at the end."""

    name = "warm_start"
    log_name: ClassVar[str] = WARM_START_STEPS
    rolls_out = False

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._learned: Sequence[TrainingSample] = ()
        self._held_out: Sequence[TrainingSample] = ()
        self._log: JsonlLog | None = None

    def check_workload(self, workload: Workload) -> None:
        if self.num_steps and not workload.demonstrations:
            raise ConfigError(
                f"warm_start.num_steps={self.num_steps} needs demonstrations and the workload has none: give "
                "it some, or set warm_start.num_steps=0."
            )
        learned, _ = divided(self.config, len(workload.demonstrations))
        if not learned:
            raise ConfigError(
                f"warm_start.held_out_share={self.config.warm_start.held_out_share:g} leaves nothing to "
                f"learn of {len(workload.demonstrations)} demonstrations: lower it."
            )

    def step(self, run: Components, state: RunState, clock: Clock) -> None:
        first = self.num_done(state)
        if not self._learned:
            self._begin(run, state, clock)
        assert self._log is not None
        last = min(first + CHUNK, self.num_steps)
        batches = [self._batch(step) for step in range(first, last)]
        with run.interrupts.atomic_section():
            with clock.measure("time/learn"):
                learned = run.learner.fit(batches)
            self.count_steps(state, last - first)
            if last == self.num_steps:
                publish(run, state)
            metrics = {name: learned.metrics[f"learn/{name}"] for name in ("loss", "grad_norm", "lr")}
            if evaluated_steps(self.num_steps) & {*range(first + 1, last + 1)}:
                metrics |= self._held_out_loss(run, clock)
            self._log.append({"step": last, **metrics})
        held_out = f"  held out {metrics['held_out_loss']:.3f}" if "held_out_loss" in metrics else ""
        text = f"loss {metrics['loss']:.3f}{held_out}"
        run.tracker.offline_step("warm start", last, self.num_steps, text)

    def conversations(self, run: Components, state: RunState) -> Sequence[list[Message]]:
        """Return what is learned from."""
        return run.workload.demonstrations

    def _batch(self, step: int) -> TrainBatch:
        """The demonstrations of a step: drawn, or, where passes are counted, its part of all passes. It has
        more than ``batch_size`` where a conversation is several token sequences, and fewer where some are
        left out.
        """
        own, seed = self.config.warm_start, self.config.seed
        if not own.num_epochs:
            return demonstration_batch(self._learned, own.batch_size, seed, step)
        count = len(self._learned)
        first, end = (own.num_epochs * count * each // self.num_steps for each in (step, step + 1))
        places = passed_over(first, max(end, first + 1), count, seed, PURPOSE)
        return TrainBatch(samples=tuple(self._learned[place] for place in places))

    def _begin(self, run: Components, state: RunState, clock: Clock) -> None:
        own, conversations = self.config.warm_start, self.conversations(run, state)
        samples = demonstrations(run, conversations)
        _, places = divided(self.config, len(conversations))
        held_out = {f"demonstration-{place}" for place in places}
        self._held_out = [each for each in samples if each.rollout_id in held_out]
        self._learned = [each for each in samples if each.rollout_id not in held_out]
        if not self._learned:
            raise DatasetError("All demonstrations but those that are held out are too long: shorten them.")
        number = self.num_done(state)
        self._log = JsonlLog(state.directory / self.log_name, number)
        count = len(self._learned)
        passes = own.num_epochs or self.num_steps * min(own.batch_size, count) / count
        run.tracker.announce(
            f"Warm start on {count} demonstrations: {self.num_steps} steps of "
            f"{passes * count / self.num_steps:.3g}, {passes:.3g} passes."
        )
        if number == 0 and self._held_out:
            metrics = self._held_out_loss(run, clock)
            self._log.append({"step": 0, **metrics})
            run.tracker.announce(
                f"Loss on {len(self._held_out)} held-out demonstrations before: "
                f"{metrics['held_out_loss']:.3f}. {self.log_name} has those that follow."
            )

    def _held_out_loss(self, run: Components, clock: Clock) -> dict[str, float]:
        """The mean of -log p over the held-out tokens; empty where nothing is held out."""
        if not self._held_out:
            return {}
        total, count, size = 0.0, 0, self.config.warm_start.batch_size
        with clock.measure("time/evaluate"):
            for first in range(0, len(self._held_out), size):
                part = self._held_out[first : first + size]
                rows = run.learner.logprobs(TrainBatch(samples=tuple(part)))
                for sample, row in zip(part, rows, strict=True):
                    total -= sum(value for bit, value in zip(sample.loss_mask, row, strict=True) if bit)
                    count += sample.num_sampled_tokens
        return {"held_out_loss": total / count}


def with_epochs(config: TrainConfig, workload: Workload) -> TrainConfig:
    """The configuration with ``warm_start.num_epochs`` as a number of steps.

    Raises:
        ConfigError: it has a number of steps too.
    """
    own = config.warm_start
    if not own.num_epochs:
        return config
    learned, _ = divided(config, len(workload.demonstrations))
    steps = max(1, math.ceil(own.num_epochs * len(learned) / own.batch_size))
    if own.num_steps not in (0, steps):
        raise ConfigError(
            f"warm_start.num_epochs={own.num_epochs} and warm_start.num_steps={own.num_steps} both say how "
            "long the warm start is: set one of them to 0."
        )
    return replace(config, warm_start=replace(own, num_steps=steps))


def divided(config: TrainConfig, count: int) -> tuple[list[int], list[int]]:
    """Places of the demonstrations that are learned from, and of those that are held out, by the seed."""
    share = config.warm_start.held_out_share
    num_held_out = max(1, round(share * count)) if share else 0
    held_out = set(random.Random(f"{config.seed}/held out").sample(range(count), min(num_held_out, count)))
    return [each for each in range(count) if each not in held_out], sorted(held_out)


def demonstrations(run: Components, conversations: Sequence[list[Message]]) -> list[TrainingSample]:
    """Demonstrations as token sequences.

    Those that are too long for the model or the learner are left out, which the run announces.

    Raises:
        DatasetError: all of them are.
    """
    announce = run.tracker.announce
    samples = demonstration_samples(chat_renderer(run), conversations, announce)
    learner = run.config.learner
    of_ranks = f" of {learner.ranks_of_row} ranks together" if learner.ranks_of_row > 1 else ""
    limits = {f"learner.micro_batch_tokens{of_ranks}": learner.row_tokens}
    config = Path(run.model_path) / "config.json"
    if config.is_file() and (most := json.loads(config.read_text("utf-8")).get("max_position_embeddings")):
        limits["the model's max_position_embeddings"] = int(most)
    name = min(limits, key=lambda each: limits[each])
    short = [sample for sample in samples if len(sample) <= limits[name]]
    if len(short) < len(samples):
        text = (
            f"{len(samples) - len(short)} of {len(samples)} demonstrations have more than {limits[name]} "
            f"tokens, which is {name}; the longest has {max(map(len, samples))}."
        )
        if not short:
            raise DatasetError(f"{text} Shorten them, or raise it.")
        announce(f"{text} They are left out.")
    return short


def chat_renderer(run: Components) -> ChatRenderer:
    """The tokenizer and the chat template of the run's model."""
    return ChatRenderer(load_tokenizer(run.model_path), run.config.model.chat_template_kwargs)


def demonstration_batch(
    demonstrations: Sequence[TrainingSample], batch_size: int, seed: int, step: int
) -> TrainBatch:
    """The demonstrations of one step: a function of seed and step alone, so that a resumed run agrees."""
    rng = random.Random(f"{seed}/warm start/{step}")
    return TrainBatch(samples=tuple(rng.sample(demonstrations, min(batch_size, len(demonstrations)))))
