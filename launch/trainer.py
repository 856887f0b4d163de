"""The front door: ``AgentTrainer(...).train()``, and what it shares with the command line."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from functools import partial
from typing import Any

from actors.rollouts.rollout import RolloutLimits, RolloutRequest, owned_by, run_rollout
from actors.sampling.backends import check_calls
from environments.base import BaseEnv
from environments.data.datasets import Dataset
from environments.errors import ConfigError, DatasetError, EnvironmentFailure, TroupeError
from launch.config import TrainConfig, as_train_config, register
from launch.process.background import in_background
from launch.run_folder.lock import RunLock, run_directory
from launch.run_folder.model_paths import model_folder
from launch.validation import check
from launch.workload import Workload
from policies.agents.base import BaseAgent
from policies.sampler import SampleRequest, ScriptedSampler

logger = logging.getLogger(__name__)

TRIAL_SECONDS = 60.0
"""What trying out the first task may take."""

register()  # a user's @hydra.main asks for our configuration by name, before it calls anything of ours


class AgentTrainer:
    """Trains an agent in an environment, as in rLLM v0.1.

    Args:
        agent_class, env_class: subclasses of ``BaseAgent`` and ``BaseEnv``.
        config: a ``TrainConfig``, or the OmegaConf tree that ``@hydra.main`` hands over.
        train_dataset, val_dataset: tasks to train on, and held-out ones to measure success with.
        agent_args, env_args: keyword arguments of the agent; keys added to each task for ``from_dict``.
    """

    def __init__(
        self,
        agent_class: type[BaseAgent],
        env_class: type[BaseEnv],
        config: Any,
        train_dataset: Dataset,
        val_dataset: Dataset | None = None,
        agent_args: dict[str, Any] | None = None,
        env_args: dict[str, Any] | None = None,
    ) -> None:
        self.config = as_train_config(config)
        self.workload = Workload(
            agent_class=agent_class,
            env_class=env_class,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            agent_args=agent_args or {},
            env_args=env_args or {},
        )

    def train(self) -> None:
        """Train to the end.

        Raises:
            TroupeError: something is wrong that its message explains.
        """
        run_training(self.config, self.workload)


def run_training(config: TrainConfig, workload: Workload) -> None:
    """Check everything that can be checked, then start a run, train, and end what was started."""
    check(config)
    check_workload(config, workload)
    with RunLock(run_directory(config.run.directory)) as lock:
        _train(config, workload, lock)


def _train(config: TrainConfig, workload: Workload, lock: RunLock) -> None:
    from ray.exceptions import RayActorError

    from launch.training.loop import train
    from launch.training.run import Run

    run = Run(config, workload, lock)
    try:
        with run.interrupts.installed():
            try:
                run.start()
                train(config, run)
            except KeyboardInterrupt:
                run.tracker.announce("Interrupted.")
                run.save_on_interrupt()
                raise
    except RayActorError as error:
        died = dict(re.findall(r"(class_name|pid): (\S+)", str(error)))
        raise TroupeError(
            f"{died.get('class_name', 'An actor')} (process {died.get('pid', 'unknown')}) has died. Go on "
            f"from the last checkpoint with run.directory={config.run.directory} run.resume=true"
        ) from error
    finally:
        run.close()


def check_workload(config: TrainConfig, workload: Workload) -> None:
    """Refuse a workload that cannot be trained on, before a model is loaded.

    Raises:
        ConfigError, DatasetError, AgentError: what is wrong and what to do.
    """
    if not isinstance(workload.train_dataset, Dataset) or not len(workload.train_dataset):
        raise DatasetError("The training dataset is empty: pass a Dataset with at least one task.")
    if config.warm_start.num_steps and not workload.demonstrations:
        raise ConfigError(
            f"warm_start.num_steps={config.warm_start.num_steps} needs demonstrations and the workload has "
            "none: give it some, or set warm_start.num_steps=0."
        )
    evaluation = config.evaluation
    if workload.val_dataset is None and (
        evaluation.every or evaluation.num_replicas or config.run.best_metric
    ):
        raise ConfigError(
            f"evaluation.every={evaluation.every}, evaluation.num_replicas={evaluation.num_replicas} and "
            f"run.best_metric={config.run.best_metric} are about evaluations, and the workload has no "
            "val_dataset: give it one, or leave them out."
        )
    check_task_weights(config.rollout.task_weights, workload.train_dataset)
    check_model(config, workload)
    try:
        in_background(partial(check_agent, workload), "check").result(TRIAL_SECONDS)
    except TimeoutError:
        logger.warning(
            "The first task could not be tried out in this process within %g s: the first real rollouts will "
            "tell.",
            TRIAL_SECONDS,
        )


def check_task_weights(key: str | None, tasks: Dataset) -> None:
    """Refuse weights by which no task can be drawn. Raises ``DatasetError``."""
    if key is None:
        return
    weights = [task.get(key) for task in tasks]
    for index, weight in enumerate(weights):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise DatasetError(
                f"rollout.task_weights={key!r}, and task {index} has {key}={weight!r}: give every task a "
                "number that is not negative."
            )
    if not any(weights):
        raise DatasetError(f"rollout.task_weights={key!r}, and it is 0 for every task: none would be played.")


def check_model(config: TrainConfig, workload: Workload) -> None:
    """Refuse a model folder in which something is missing, and a run that has no model at all."""
    options = config.model.chat_template_kwargs
    if config.model.path is not None:
        folder = model_folder(config.model.path)
        if options:
            from policies.chat import ChatRenderer, load_tokenizer

            ChatRenderer(load_tokenizer(folder), options)  # refuses what its template does not know
    elif options:
        raise ConfigError(
            f"model.chat_template_kwargs={options}, but model.path is not set, and the chat template of the "
            "tiny model has no options: leave them out."
        )
    elif not workload.demonstrations:
        raise ConfigError(
            "model.path is not set, and the workload has no demonstrations to build a tiny model from: "
            "set model.path to a Hugging Face name or folder."
        )


def check_agent(workload: Workload) -> None:
    """Play one step of the first task with a made-up reply: an agent that breaks its contract shows here."""
    sampler = ScriptedSampler(lambda _messages: "0")

    def sample(request: SampleRequest) -> Any:
        return asyncio.run(sampler.sample(request))

    task = workload.train_dataset[0]
    request = RolloutRequest(rollout_id="check/0", group_id="check", task=task)
    agent = workload.pair.make_agent()
    check_calls(agent)
    try:
        env = workload.pair.make_env(request)
        try:
            run_rollout(agent, env, sample, request, RolloutLimits(max_steps=1))
        finally:
            with owned_by(EnvironmentFailure, "environment", env)("close"):
                env.close()
    except EnvironmentFailure as error:
        # It may need what only the cluster's nodes have; the first real rollouts will tell.
        logger.warning("The environment could not be tried out in this process: %s", error)
