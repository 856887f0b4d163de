"""The base classes of environments: an environment asks, receives actions, and judges them."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from numbers import Integral, Real
from typing import Any, ClassVar, Literal, Self

from environments.bounds import no_argument
from environments.errors import ConfigError
from environments.rewards.base import RewardFunction, RewardOutput, judge

Task = dict[str, Any]
"""A row of a dataset: the problem that an environment poses."""


@dataclass(frozen=True, kw_only=True)
class ActorNeeds:
    """Resources that the process of an agent and its environment needs from its node."""

    num_cpus: float | None = None
    """CPUs that Ray reserves; ``None`` leaves it to the fleet's setting."""
    memory_bytes: int | None = None
    """Memory that Ray reserves for the process. It is also the most that the process may use, beyond the
    memory that it has when it starts. ``None`` reserves nothing and allows ``DEFAULT_MEMORY_BYTES``."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom Ray resources, by name, such as ``{"emulator": 1}``."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    """Ray's ``runtime_env`` of the process, such as ``{"pip": ["chess"]}``."""

    def __post_init__(self) -> None:
        cpus, memory, resources = self.num_cpus, self.memory_bytes, self.resources
        is_size = memory is None or (isinstance(memory, Integral) and memory > 0)
        are_amounts = isinstance(resources, Mapping) and all(map(_is_amount, resources.values()))
        checks = (
            ("num_cpus", cpus is None or _is_amount(cpus), "a number from 0, such as 0.5"),
            ("memory_bytes", is_size, "an integer above 0, such as 8 << 30 for 8 GiB"),
            ("resources", are_amounts, 'numbers by name, such as {"emulator": 1}'),
            ("runtime_env", isinstance(self.runtime_env, Mapping), 'a dict, such as {"pip": ["chess"]}'),
        )
        for name, is_right, right in checks:
            if not is_right:
                raise ConfigError(f"ActorNeeds({name}={getattr(self, name)!r}) cannot be met: use {right}.")


def _is_amount(value: Any) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < math.inf


DEFAULT_MEMORY_BYTES = 2 << 30


class BaseEnv(ABC):
    """An episode of one task, played by one agent in one thread.

    Observations follow one convention, which the agents of ``policies.agents`` understand: a dict with
    ``"question"`` opens the conversation, ``{"tool_outputs": {call_id: text}}`` answers tool calls, any
    other text is the next user message, and an empty dict says nothing. Parts may stand for a text: a list of
    ``{"type": "text", "text": ...}``, or for models that read pictures ``{"type": "image_url", "image_url":
    {"url": "data:image/png;base64,..."}}``.
    """

    actor_needs: ClassVar[ActorNeeds] = ActorNeeds()
    """Resources of a process that plays this environment; a subclass sets its own where it needs more."""

    wants_seed: ClassVar[bool] = False
    """True if ``from_dict`` gets a ``"seed"`` where the task has none. It is the same for all trajectories
    of a group, so that they can be compared."""

    resumes_by: ClassVar[Literal["replay", "snapshot", "answers"] | None] = None
    """Way in which an episode whose process has died goes on in a new environment of the same task: by
    ``"replay"`` of its actions, where the same actions always get the same answers, by ``"snapshot"`` and
    ``restore``, or not at all: then it starts again. ``"answers"`` is for rollout functions alone."""

    # On the class, so that subclasses need not call super().__init__():
    idx: int | None = None
    """Position in a batch, for callers that play batches, as rLLM v0.1's engine did. Troupe plays tasks one
    by one; an environment that needs a position reads it from its task."""
    _reward_output: RewardOutput | None = None
    """The reward function's last one of this episode, in environments that have a reward function."""

    @abstractmethod
    def reset(self) -> tuple[Any, dict[str, Any]]:
        """Start a new episode; return the first observation and an info dict."""

    @abstractmethod
    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        """Take the agent's action; return (observation, reward, done, info).

        ``info["state_key"]``, here and of ``reset``, may name the state that the observation shows, for
        algorithms that compare turns of equal states (gigpo).
        """

    def follow_up(self, message: str) -> tuple[Any, dict[str, Any]]:
        """Take a client's next message after an episode, and go on with the same world instead of a reset.

        Return the observation that tells the agent of it, and an info dict. ``step``, and at the end
        ``compute_final_reward``, ``is_correct`` and ``compute_metrics``, follow as after a reset. Served
        agents whose environment does not override this answer one message each; training never calls it.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no second message: write follow_up(message).")

    @classmethod
    def takes_follow_ups(cls) -> bool:
        """Return whether the class says by ``follow_up`` how a conversation goes on."""
        return cls.follow_up is not BaseEnv.follow_up

    def compute_final_reward(self) -> float | None:
        """Judge the whole episode after its last step; ``None`` leaves that step's reward as it is."""
        return None

    def is_correct(self) -> bool | None:
        """Return whether the episode is a success, whatever its reward: a game that was won, a full score.

        ``None``, also of an environment that does not override this, leaves it to the reward: above 0 is a
        success. Called once, after ``compute_final_reward``. Where a reward function has said it of the last
        answer, that counts.
        """
        return None if self._reward_output is None else self._reward_output.is_correct

    def compute_metrics(self) -> Mapping[str, float]:
        """Numbers of this episode besides its reward, by name, such as ``{"called": 1.0}``.

        Called once, when the rollout is over; a rollout that failed has no metrics. They arrive in
        ``Trajectory.metrics``, and a training run reports the mean of each as ``rollout/<name>`` and
        ``eval/<name>``, over the trajectories that have the name. So leave out a number that does not apply:
        the mean of ``success_when_called`` is then the success of those that have called.
        """
        return {}

    def snapshot(self) -> Any:
        """The state after a step, as plain data; called after each one if ``resumes_by = "snapshot"``."""
        raise NotImplementedError(f"{type(self).__name__} has resumes_by = 'snapshot': write snapshot().")

    def restore(self, snapshot: Any) -> None:
        """Go on from ``snapshot``, of another environment of the same task; called instead of ``reset``."""
        raise NotImplementedError(f"{type(self).__name__} has resumes_by = 'snapshot': write restore().")

    def close(self) -> None:  # noqa: B027  (optional on purpose)
        """Free the resources of the environment.

        Called once for every environment that was made, also after an error and at the time limit. It is not
        called when the process dies, or is killed in the middle of a rollout because the fleet ends. The
        environment ends with its process then; its child processes do too, where Ray was started by Troupe
        or with ``RAY_process_group_cleanup_enabled=1``.
        """

    @staticmethod
    @abstractmethod
    def from_dict(info: dict[str, Any]) -> BaseEnv:
        """Make an environment from a task and the environment arguments, merged into one dict.

        Implementations take the keys that they know, ignore the rest, and leave ``info`` unchanged.
        """
        raise NotImplementedError("Subclasses must implement 'from_dict'.")

    @staticmethod
    def is_multithread_safe() -> bool:
        """Return whether several instances may run in threads of one process."""
        return True


class TaskEnvironment(BaseEnv):
    """An environment that is made from a task and from arguments of its own."""

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> Self:
        """Give ``__init__`` the arguments that it names, and as ``task`` the rest.

        Where ``info["task"]`` is a dict, that is the task: a dataset may well have a column of that name,
        such as ``"algebra"``.
        """
        names = argument_names(cls) - {"task"}
        rest = {key: value for key, value in info.items() if key not in names}
        task = rest.get("task")
        make: Callable[..., Self] = cls
        own = {key: value for key, value in info.items() if key in names}
        return make(task=task if isinstance(task, dict) else rest, **own)


class WorldEnvironment(BaseEnv):
    """An environment whose tasks are arguments of ``__init__``. Other columns of theirs are ignored."""

    remedy: ClassVar[str] = "Add it to the task."
    """Sentence for the error of a task that lacks an argument."""

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> Self:
        """Give ``__init__`` the arguments that it names."""
        names = argument_names(cls)
        arguments = {key: value for key, value in info.items() if key in names}
        try:
            inspect.signature(cls).bind(**arguments)
        except TypeError as error:
            keys = ", ".join(sorted(info))
            raise ConfigError(
                f"{cls.__name__} needs more than the keys {keys}: {error}. {cls.remedy}"
            ) from None
        return cls(**arguments)


@cache
def argument_names(env_class: type[BaseEnv]) -> frozenset[str]:
    """Names of the arguments of ``__init__``, and, where it passes ``**others`` on, of those above it."""
    names: set[str] = set()
    for each in env_class.__mro__:
        if "__init__" in vars(each):
            _, *parameters = inspect.signature(vars(each)["__init__"]).parameters.values()
            names.update(
                own.name for own in parameters if own.kind in (own.POSITIONAL_OR_KEYWORD, own.KEYWORD_ONLY)
            )
            if not any(own.kind is own.VAR_KEYWORD for own in parameters):
                break
    return frozenset(names)


def check_env_args(env_class: type[BaseEnv], env_args: Collection[str]) -> None:
    """Find an argument that ``env_class`` does not take, and that would pass as a part of each task.

    An environment with a ``from_dict`` of its own reads what it likes.

    Raises:
        ConfigError: the first one.
    """
    readers = [vars(each)["from_dict"] for each in (TaskEnvironment, WorldEnvironment)]
    if inspect.getattr_static(env_class, "from_dict", None) not in readers:
        return
    known = argument_names(env_class) | {"task"}
    for name in env_args:
        if name not in known:
            fault = no_argument(env_class.__name__, name, sorted(known))
            raise ConfigError(f"env_args: {fault} What all tasks share is a column of their dataset.")


class MultiTurnEnvironment(TaskEnvironment):
    """A conversation of at most ``max_turns`` turns, each judged by ``get_reward_and_next_obs``.

    The task is the first observation and the info of every step, with the ``metadata`` of the reward
    function where one has judged. A subclass ends the episode early by setting ``self.done``.
    """

    def __init__(self, task: Task | None = None, max_turns: int = 3) -> None:
        if max_turns < 1:
            raise ConfigError(f"max_turns={max_turns} leaves no turn to play: use 1 and above.")
        self.task = task
        self.max_turns = max_turns
        self.current_turn = 0
        self.done = False
        self.history: list[Any] = []

    def reset(self, task: Task | None = None) -> tuple[Task, dict[str, Any]]:
        """Start again, with ``task`` in place of the old one if it is given."""
        if task is not None:
            self.task = task
        self.current_turn = 0
        self.done = False
        self.history = []
        self._reward_output = None
        return self._known_task(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        task = self._known_task()
        self.history.append(action)
        reward, observation = self.get_reward_and_next_obs(task, action)
        self.current_turn += 1
        self.done = self.done or self.current_turn >= self.max_turns
        judged = {} if self._reward_output is None else {"metadata": self._reward_output.metadata}
        return observation, reward, self.done, {**task, **judged}

    @abstractmethod
    def get_reward_and_next_obs(self, task: Task, action: Any) -> tuple[float, dict[str, Any]]:
        """Judge one action; return its reward and the next observation."""

    def _known_task(self) -> Task:
        if not isinstance(self.task, dict):
            raise ConfigError(f"{type(self).__name__} has task={self.task!r}: pass {{'question': ...}}.")
        return self.task


class SingleTurnEnvironment(MultiTurnEnvironment):
    """Environment of one question and one answer, which ``reward_fn`` judges."""

    def __init__(self, task: Task | None = None, reward_fn: RewardFunction | None = None) -> None:
        super().__init__(task=task, max_turns=1)
        self.reward_fn = required_reward_fn(reward_fn, self)

    def get_reward_and_next_obs(self, task: Task, action: Any) -> tuple[float, dict[str, Any]]:
        self._reward_output = judge(self.reward_fn, task, action)
        return self._reward_output.reward, {}


def judged_success(env: BaseEnv) -> tuple[Any, bool]:
    """Return the verdict on an episode that is over, and whether it is the reward function's.

    It is checked by ``contract.is_correct_faults``. An attribute ``is_correct`` of an environment that was
    written before the method was there is read as what it says.
    """
    output = env._reward_output
    if output is not None and output.is_correct is not None:
        return output.is_correct, True
    verdict: Any = env.is_correct
    return (verdict() if callable(verdict) else verdict), False


def required_reward_fn(reward_fn: RewardFunction | None, env: BaseEnv) -> RewardFunction:
    """Return ``reward_fn``, or raise a ConfigError: without one, every reward would be a silent 0."""
    if reward_fn is None:
        raise ConfigError(
            f"{type(env).__name__} has no reward_fn: pass env_args={{'reward_fn': math_reward_fn}}."
        )
    return reward_fn
