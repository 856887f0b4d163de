"""Workload: agent, environment and tasks, as one value that a recipe or a user's module returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.gateway.function import RolloutFunction, pair_of
from actors.rollouts.rollout import Pair
from environments.base import BaseEnv
from environments.data.curriculum import Curriculum
from environments.data.datasets import Dataset
from environments.errors import ConfigError
from environments.named_module import call_own, load_module
from environments.rewards.base import GroupReward
from environments.types import Message
from policies.agents.base import BaseAgent
from policies.learning.preferences import Preference


@dataclass(frozen=True, kw_only=True)
class Workload:
    """An agent class, an environment class, their arguments, and the tasks.

    ``rollout`` is a function that solves a task by itself, instead of both classes.

    ``val_dataset`` are held-out tasks, or several sets of them by their names: metrics of the set ``code``
    are ``eval/code/...``, those of all sets together ``eval/...``.

    ``curriculum`` decides which training task comes next; without one each is played once in every pass.

    ``demonstrations`` are whole conversations for the warm start, and the texts that the tiny model's
    tokenizer is made from. ``preferences`` are pairs of a better and a worse continuation, for the stage of
    this name; ``policies.read_preferences`` reads a file of them. ``task_from_message`` makes the task that a
    client's first message is, for ``launch.serve``; without it the agent is not served, only its policy.
    ``BaseEnv.follow_up`` takes the next ones. ``description`` tells those clients what the agent does.
    """

    agent_class: type[BaseAgent] | None = None
    env_class: type[BaseEnv] | None = None
    rollout: RolloutFunction | None = None
    train_dataset: Dataset
    val_dataset: Dataset | Mapping[str, Dataset] | None = None
    curriculum: Curriculum | None = None
    agent_args: dict[str, Any] = field(default_factory=dict)
    env_args: dict[str, Any] = field(default_factory=dict)
    demonstrations: Sequence[list[Message]] = ()
    preferences: Sequence[Preference] = ()
    task_from_message: Callable[[str], dict[str, Any]] | None = None
    description: str = "Answers a message with a whole episode."

    @property
    def held_out(self) -> Mapping[str, Dataset]:
        """The sets of held-out tasks by their names; one alone has the empty name."""
        if self.val_dataset is None:
            return {}
        return self.val_dataset if isinstance(self.val_dataset, Mapping) else {"": self.val_dataset}

    @property
    def group_reward(self) -> GroupReward | None:
        """The reward function, if it compares the answers of a group."""
        reward_fn = self.env_args.get("reward_fn")
        return reward_fn if isinstance(reward_fn, GroupReward) else None

    @property
    def policies(self) -> tuple[str, ...]:
        """Names of the policies that play; one alone has the empty name. Raises ``AgentError``."""
        return tuple(self.pair.make_agent().policies)

    @property
    def pair(self) -> Pair:
        """Pair of classes that the rollout actors make."""
        return pair_of(self.agent_class, self.env_class, self.rollout, self.agent_args, self.env_args)


def load_workload(name: str | None, seed: int) -> Workload:
    """Call ``workload(seed)`` of the module.

    Raises:
        ConfigError: no module was named, it does not exist, it has no such function, or its code fails.
    """
    if name is None:
        raise ConfigError(
            "No workload: choose a recipe of Troupe's, such as recipe=calculator, name a file of tasks, such "
            "as dataset=tasks.jsonl reward=math, or name your own module with workload=my_module (it defines "
            "workload(seed) -> launch.workload.Workload)."
        )
    setting = f"workload={name!r}"
    make = vars(load_module(setting, name)).get("workload")
    if not callable(make):
        raise ConfigError(f"{setting}: the module has no workload(seed) -> launch.workload.Workload.")
    workload = call_own(setting, make, seed)
    if not isinstance(workload, Workload):
        raise ConfigError(f"{name}.workload({seed}) returned {type(workload).__name__}, not a Workload.")
    return workload
