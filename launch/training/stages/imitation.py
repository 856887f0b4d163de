"""The stage ``imitation``: supervised learning on what a teacher behind an address has played successfully.

    stages=[imitation, reinforce]
    stage_settings.imitation={teacher: "http://localhost:8000/v1", teacher_model: large, num_steps: 100}

Texts are imitated, so the teacher may have any tokenizer, and need give no log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from environments.background import run_coroutine
from environments.bounds import Bound, check_bounds
from environments.chat_endpoint import ChatEndpoint
from environments.data.conversation_file import read_conversations
from environments.errors import ConfigError, SamplerError
from environments.types import Message
from launch.settings.tree import TrainConfig
from launch.training.components import Components
from launch.training.rollout_requests import evaluation_params, execution_engine
from launch.training.run_state import RunState
from launch.training.stages.warm_start import WarmStart
from launch.workload import Workload
from policies.learning.settings import OptimizerConfig, phase_optimizer
from policies.openai_sampler import OpenAISampler
from policies.sampler import SampleRequest

PLAYED = "imitation_rollouts.jsonl"
"""File of a run with the teacher's rollouts."""


class Imitation(WarmStart):
    """Has a teacher play the first training tasks once, as evaluations are sampled, and learns its successes.

    Args:
        config: of the run.
        teacher: address of an OpenAI-compatible server.
        teacher_model: its name there.
        teacher_key: environment variable with the server's key; empty for one that needs none.
        num_tasks: that it plays; 0 means all.
        settings: those of ``warm_start`` but for ``num_epochs``, with its values where they are left out.

    Raises:
        ConfigError: the address is none, or a setting is out of its bounds.
    """

    name = "imitation"
    log_name = "imitation.jsonl"

    def __init__(
        self,
        config: TrainConfig,
        teacher: str,
        teacher_model: str,
        teacher_key: str = "",
        num_tasks: int = 0,
        **settings: Any,
    ) -> None:
        own = replace(config.warm_start, num_epochs=0, **settings)
        check_bounds(own, "stage_settings.imitation.")
        Bound(at_least=0).check_value("stage_settings.imitation.num_tasks", num_tasks)
        super().__init__(replace(config, warm_start=own))
        try:
            self._teacher = ChatEndpoint(teacher, teacher_model, teacher_key or None)
        except ConfigError as error:
            raise ConfigError(f"stage_settings.imitation.teacher: {error}") from error
        self._num_tasks = num_tasks or None

    @property
    def num_steps(self) -> int:
        return self.config.warm_start.num_steps

    @property
    def optimizer(self) -> OptimizerConfig:
        return phase_optimizer("stage_settings.imitation.optimizer", self.config.warm_start.optimizer)

    def check_workload(self, workload: Workload) -> None:
        params = evaluation_params(self.config).replace(max_tokens=1)
        hello = SampleRequest(messages=[{"role": "user", "content": "Hello"}], params=params)
        try:
            run_coroutine(OpenAISampler(**self._sampler()).sample(hello))
        except SamplerError as error:
            raise ConfigError(f"stage_settings.imitation.teacher: {error}") from error

    def conversations(self, run: Components, state: RunState) -> Sequence[list[Message]]:
        tasks, file = run.workload.train_dataset[: self._num_tasks], state.directory / PLAYED
        run.tracker.announce(f"{self._teacher.model} plays {len(tasks)} tasks, for {file}.")
        params, sampler = evaluation_params(self.config), self._sampler()
        with execution_engine(self.config, run.workload, len(tasks), params, "openai", sampler) as engine:
            run_coroutine(engine.execute_tasks(tasks, file))
        found, sentence = read_conversations(file)
        run.tracker.announce(sentence)
        return found

    def _sampler(self) -> dict[str, Any]:
        """Arguments of the teacher's sampler."""
        teacher = self._teacher
        key = {"api_key": teacher.key()} if teacher.key_variable else {}
        return {"base_url": teacher.base_url, "model": teacher.model, **key}
