"""The front door: ``AgentTrainer(...).train()``, and what it shares with the command line."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.gateway.function import RolloutFunction
from actors.gateway.remote_program import RemoteProgram
from environments.base import BaseEnv
from environments.data.conversation_file import read_conversations
from environments.data.curriculum import Curriculum
from environments.data.datasets import Dataset
from environments.errors import PartLostError, TroupeError
from launch.health.interrupt import Interrupts
from launch.health.restart_budget import RestartBudget, lost_updates
from launch.reporting.tracker import Goal
from launch.reporting.trackers.chosen import chosen_trackers
from launch.run_folder.disk import full_disk_explained
from launch.run_folder.lock import RunLock, run_directory
from launch.settings.compose import as_train_config, register
from launch.settings.tree import TrainConfig
from launch.training.stages.base import parts_needed
from launch.training.stages.chosen import chosen_stages
from launch.validation.policies import check_checkpoint, check_policies, for_all_policies
from launch.validation.replay import check_replay
from launch.validation.resources import check_gpus
from launch.validation.serving import check_colocation, check_engine, check_publishing, check_tool_parsers
from launch.validation.settings import check_training_settings
from launch.validation.trial import try_first_task
from launch.validation.workload import (
    check_classes,
    check_curriculum,
    check_datasets,
    check_forks,
    check_group_reward,
    check_model,
    check_shapes,
    check_task_weights,
)
from launch.workload import Workload
from policies.agents.base import BaseAgent

NO_TASKS = Dataset([])

register()  # a user's @hydra.main asks for our configuration by name, before it calls anything of ours


class AgentTrainer:
    """Trains an agent in an environment, as in rLLM v0.1, or any program that calls a model.

    Args:
        agent_class: a subclass of ``BaseAgent``.
        env_class: a subclass of ``BaseEnv``.
        config: the OmegaConf tree that ``@hydra.main`` hands over, a ``TrainConfig``, a dict such as
            ``{"run.num_steps": 3}``, a list such as ``["run.num_steps=3"]``, or ``None`` for the defaults.
        train_dataset: tasks to train on.
        val_dataset: held-out tasks to measure success with, or several sets of them by their names.
        agent_args: keyword arguments of the agent.
        env_args: arguments of the environment: keys over each task for its ``from_dict``.
        curriculum: decides which training task comes next; without one each is played once in every pass.
        rollout: instead of the two classes, a function of a task and a client that calls the policy by that
            and returns the reward: ``async def solve(task, client) -> float``.
    """

    def __init__(
        self,
        agent_class: type[BaseAgent] | None = None,
        env_class: type[BaseEnv] | None = None,
        config: Any = None,
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | Mapping[str, Dataset] | None = None,
        agent_args: dict[str, Any] | None = None,
        env_args: dict[str, Any] | None = None,
        rollout: RolloutFunction | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        self.config = as_train_config(config)
        chats = self.config.demonstrations
        self.workload = Workload(
            agent_class=agent_class,
            env_class=env_class,
            rollout=rollout,
            train_dataset=NO_TASKS if train_dataset is None else train_dataset,
            val_dataset=val_dataset,
            curriculum=curriculum,
            agent_args=agent_args or {},
            env_args=env_args or {},
            demonstrations=() if chats is None else read_conversations(Path(chats))[0],
        )

    def train(self) -> None:
        """Train to the end.

        Raises:
            TroupeError: something is wrong that its message explains.
        """
        run_training(self.config, self.workload)


@Interrupts().installed()  # also while it is checked: a workload may have started processes
def run_training(config: TrainConfig, workload: Workload) -> None:
    """Check everything that can be checked, then start a run, train, and end what was started."""
    from ray.exceptions import OutOfMemoryError, RayActorError

    from launch.health.death import describe_death
    from launch.training.stages.warm_start import with_epochs

    config = with_epochs(config, workload)
    check_training(config, workload)
    budget = RestartBudget(config.run.max_recoveries)
    folder = run_directory(config.run.directory)
    if isinstance(workload.rollout, RemoteProgram):
        workload = replace(workload, rollout=replace(workload.rollout, run=str(folder)))
    with rarely_collected(), RunLock(folder) as lock, full_disk_explained(lock.directory):
        try:
            while not _train(config, workload, lock, budget):
                config = replace(config, run=replace(config.run, resume=True))
        except (PartLostError, RayActorError, OutOfMemoryError) as error:
            raise TroupeError(
                f"{describe_death(error)} Go on with run.directory={config.run.directory} run.resume=true"
            ) from error


@contextmanager
def rarely_collected() -> Iterator[None]:
    """Seek cycles after 10,000 new objects, and not after 700.

    An update's rollouts are a million objects without a cycle, and two thirds of the time in which they came
    went into walks over those that were there already.
    """
    before = gc.get_threshold()
    gc.set_threshold(before[0] and max(before[0], 10_000), *before[1:])  # 0 is: never
    try:
        yield
    finally:
        gc.set_threshold(*before)


def check_training(config: TrainConfig, workload: Workload) -> None:
    """Find what would fail later in a training run.

    Raises:
        ConfigError, DatasetError, AgentError, ContractError: the first mistake, with its remedy.
    """
    check_training_settings(config)
    check_engine(config)
    check_colocation(config)
    chosen_trackers(config.run.trackers)
    stages = chosen_stages(config)
    check_replay(config, sum(stage.num_steps for stage in stages if stage.rolls_out))
    check_classes(workload)
    check_policies(config, workload.policies)
    check_forks(config, workload)
    check_group_reward(config, workload)
    check_datasets(config, workload)
    for stage in stages:
        stage.check_workload(workload)
    check_task_weights(config.rollout.task_weights, workload.train_dataset)
    check_curriculum(workload.curriculum, workload.train_dataset)
    needed = parts_needed(config, stages, workload)
    check_gpus(for_all_policies(needed, workload.policies))
    check_model(config, workload)
    check_publishing(needed)
    check_shapes(config, workload)
    check_tool_parsers(config, workload)
    if config.run.replay is None:  # else nothing is played, and the environment need not run here
        try_first_task(workload, workload.train_dataset)


def _train(config: TrainConfig, workload: Workload, lock: RunLock, budget: RestartBudget) -> bool:
    """Train, and return whether that came to its end: else a part was lost, and the run may go on from its
    newest checkpoint.

    Raises:
        PartLostError, RayActorError: that was more often than ``budget`` allows, or Ray's own processes here
            have died.
    """
    from ray.exceptions import RayActorError

    from launch.health.death import describe_death
    from launch.health.inspection import ray_lives
    from launch.reporting.tracker import Tracker
    from launch.training.run_state import RunState
    from launch.training.stages.chosen import check_earlier_stages
    from launch.training.start import start
    from launch.validation.notices import notices

    stages, state = chosen_stages(config), RunState(config, lock.directory)
    check_earlier_stages(stages, state)
    check_checkpoint(state.checkpoint, workload.policies)
    # Whatever happens, all of them are closed, from the last to the first.
    with ExitStack() as ending:
        num_updates = sum(stage.num_steps for stage in stages if stage.rolls_out)
        goal = Goal(config.run.stop_metric, config.run.stop_at)
        tracker = Tracker(
            lock.directory, num_updates, state.progress.step, chosen_trackers(config.run.trackers), goal
        )
        ending.callback(tracker.close)
        tracker.settings(config)
        loop, interrupts = None, Interrupts()
        with interrupts.installed():
            try:
                for notice in notices(config):
                    tracker.announce(notice)
                if goal.reached:  # before this process began: nothing is left to do
                    tracker.summary()
                    state.copy(wait=True)
                    return True
                needed = parts_needed(config, stages, workload)
                loop = start(needed, workload, stages, lock, state, tracker, interrupts, ending)
                loop.train(stages, budget)
            except (PartLostError, RayActorError) as error:
                if loop is not None and ray_lives():
                    loop.milestones.finish_save_after_loss()
                if interrupts.is_pending or not ray_lives() or not budget.allow(time.monotonic()):
                    if loop is not None:  # this machine may be gone before the run goes on
                        loop.milestones.finish_copy_or_name()
                    raise
                tracker.announce(
                    f"{describe_death(error)} {lost_updates(state.progress.step, state.saved_step)}"
                )
                return False
            except (Exception, KeyboardInterrupt) as raised:
                reason = interrupts.error or raised
                was_interrupted = isinstance(reason, KeyboardInterrupt)
                if was_interrupted:
                    tracker.announce("Interrupted.")
                if loop is not None and ray_lives():
                    loop.milestones.save_interrupted() if was_interrupted else loop.milestones.save_failed()
                if state.checkpoints.latest() is not None:
                    tracker.announce(f"Go on with run.directory={config.run.directory} run.resume=true")
                if reason is not raised:
                    raise reason from None
                raise
    return True
