"""Checks an environment and reports its faults in words: ``print(check_environment(MyEnv, task))``."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from environments.base import ActorNeeds, BaseEnv, judged_success
from environments.contract import (
    async_faults,
    comparable,
    final_reward_faults,
    is_correct_faults,
    json_doubts,
    kind_of,
    metrics_faults,
    observation_doubts,
    opening_doubts,
    reset_faults,
    short,
    step_faults,
)
from environments.limited_call import Caller, Failed, GiveUp, NoSecondReset, Report

ANY_TEXTS = ("", "0", "I think that it is \\boxed{7}.")
"""Actions that need no knowledge of the environment."""

MISSING = {
    "reset": "write def reset(self), which returns (observation, info)",
    "step": "write def step(self, action), which returns (observation, reward, done, info)",
    "from_dict": "write @staticmethod def from_dict(info), which returns an instance",
}
FROM_DICT_HINT = (
    "It gets the task and env_args as one dict, here with the keys {keys}. It has to take those "
    "that it knows and to ignore the rest, which may be any column of a dataset."
)
STEP_HINT = (
    "A model may say anything: answer nonsense with an observation and reward 0. If your agent turns texts "
    "into other actions, pass examples of them as actions=[...]."
)
SECOND_RESET_HINT = "Rollouts reset an environment once, so this matters only to code that resets it again."
INFO_HINT = "It is sent to another process with the trajectory: put plain data into it."
CLOSE_HINT = "It has to work at any time: before reset, during an episode and after it."
PICKLE_HINT = (
    "Rollouts run in other processes. Open objects that cannot be sent there (locks, files, connections, "
    "processes) in reset or from_dict."
)


def check_environment(
    env_class: type[BaseEnv],
    task: dict[str, Any],
    env_args: dict[str, Any] | None = None,
    actions: Sequence[Any] = ANY_TEXTS,
    timeout_seconds: float = 10.0,
    reset_timeout_seconds: float = 60.0,
) -> Report:
    """Use an environment as rollouts do, and report its faults.

    It checks the class and ``from_dict``, the return values of ``reset``, ``step``, ``compute_final_reward``,
    ``is_correct`` and ``compute_metrics``, a second episode, a second environment (the same task and seed
    should give the same), ``close``, and pickling, by which it travels to another process. Exceptions of the
    environment are reported, not raised.

    Args:
        env_class: the class itself.
        task: a row of its dataset.
        env_args: arguments that are added to the task, as for ``AgentTrainer``.
        actions: examples of actions. An environment has to survive any text, unless it has an agent of
            its own that turns texts into other actions.
        timeout_seconds: limit of every other call than ``reset``. A call that takes longer is reported; its
            thread cannot be ended and lasts as long as the call does, or the program.
        reset_timeout_seconds: limit of ``reset``, in which environments start servers and emulators.
    """
    limits = {"timeout_seconds": timeout_seconds, "reset_timeout_seconds": reset_timeout_seconds}
    report = Report(env_class.__name__ if isinstance(env_class, type) else repr(env_class))
    with suppress(Failed, GiveUp):
        _Check(report, env_class, task, env_args or {}, actions, limits).run()
    return report


class _Probe:
    """An environment, called as a rollout calls it; every return value is checked."""

    def __init__(self, caller: Caller, env: BaseEnv) -> None:
        self._call, self._report = caller.call, caller.report
        self._env = env
        self._was_reset = self._was_closed = self.done = False

    def play(self, actions: deque[Any]) -> list[str]:
        """Play one episode, until it is done or no action is left; return its events, a line for each."""
        events = [f"reset() with {comparable(self._reset())}"]
        while actions and not self.done:
            action = actions.popleft()
            events.append(f"step({action!r}) with {comparable(self.step(action))}")
        env = self._env
        self._call("compute_final_reward()", env.compute_final_reward, check=final_reward_faults)
        self._call("is_correct()", lambda: judged_success(env)[0], check=is_correct_faults)
        self._call("compute_metrics()", env.compute_metrics, check=metrics_faults)
        return events

    def snapshot_after(self, action: Any) -> Any:
        """The snapshot after the first step of an episode, as another process gets it."""
        self._reset()
        self.step(action)
        snapshot = self._call("snapshot()", self._env.snapshot)
        return self._call("Pickling the snapshot", partial(_copied, snapshot), PICKLE_HINT)

    def restore(self, snapshot: Any) -> None:
        """Restore it instead of a reset."""
        self._call("restore()", partial(self._env.restore, snapshot), limit="reset_timeout_seconds")

    def step(self, action: Any) -> list[Any]:
        """Observation, reward and done."""
        name = "step()"
        observation, reward, done, info = self._call(
            f"step({action!r})", lambda: self._env.step(action), STEP_HINT, check=step_faults
        )
        self._call("Pickling the info of step()", partial(_pickle, info), INFO_HINT)
        self._report.warn(*observation_doubts(name, observation), *json_doubts(name, observation, info))
        self.done = bool(done)
        return [observation, float(reward), self.done]

    def close(self) -> None:
        """Close it. Rollouts do so once, so if only the second time fails, that is but a warning."""
        again, self._was_closed = self._was_closed, True
        name, hint, note = "close()", CLOSE_HINT, self._report.error
        if again:
            name, hint, note = "A second close()", "", self._report.warn
        self._call(name, self._env.close, hint, note, check=partial(async_faults, "close()"))

    def _reset(self) -> Any:
        again, self._was_reset, self.done = self._was_reset, True, False
        name, hint, note = "reset()", "", self._report.error
        if again:
            name, hint, note = "A second reset()", SECOND_RESET_HINT, self._report.warn
        try:
            observation, info = self._call(
                name, self._env.reset, hint, note, "reset_timeout_seconds", reset_faults
            )
        except Failed:
            raise (NoSecondReset if again else Failed) from None
        self._report.warn(*opening_doubts(observation), *json_doubts("reset()", observation, info))
        return observation


@dataclass(frozen=True)
class _Check:
    """Runs the checks in their order."""

    report: Report
    env_class: type[BaseEnv]
    task: dict[str, Any]
    env_args: dict[str, Any]
    actions: Sequence[Any]
    limits: Mapping[str, float]

    def run(self) -> None:
        self._check_class()
        self._check_pickling()
        self._check_from_dict()
        with suppress(Failed), self._environment() as probe:
            probe.close()  # before any reset; the second time comes at the end of this block
        self._compare(self._play(), self._play())
        if self.env_class.resumes_by == "snapshot":
            with suppress(Failed):
                self._check_snapshot()

    def _check_class(self) -> None:
        env_class, error = self.env_class, self.report.error
        if not isinstance(env_class, type):
            error("This is no class: pass the class, not an instance of it.")
        elif not issubclass(env_class, BaseEnv):
            error(f"It is no BaseEnv: write class {env_class.__name__}(BaseEnv).")
        else:
            for method in sorted(env_class.__abstractmethods__):
                error(f"{method} is missing: {MISSING.get(method, 'its base class asks for it')}.")
            if not isinstance(inspect.getattr_static(env_class, "from_dict"), staticmethod | classmethod):
                error("from_dict is called on the class: put @staticmethod above it.")
            if env_class.resumes_by not in (None, "replay", "snapshot"):
                error(f"resumes_by is {env_class.resumes_by!r}: write 'replay', 'snapshot' or None.")
            if not isinstance(env_class.actor_needs, ActorNeeds):
                error(
                    f"actor_needs is {kind_of(env_class.actor_needs)}: write actor_needs = ActorNeeds(...)."
                )
        if not isinstance(self.task, dict):
            error(f"The task is {kind_of(self.task)}: pass a row of the dataset, a dict.")
        if not self.report.ok:
            raise GiveUp

    def _check_pickling(self) -> None:
        parts = {"the class": self.env_class, "the task": self.task}
        parts |= {f"env_args[{key!r}]": value for key, value in self.env_args.items()}
        for name, part in parts.items():
            with suppress(Failed), Caller(self.report, self.limits) as caller:
                caller.call(f"Pickling {name}", partial(_pickle, part), PICKLE_HINT)

    def _check_from_dict(self) -> None:
        info = self._info()
        before = repr(info)
        with self._environment(info):
            if repr(info) != before:
                self.report.error(
                    "from_dict changes the dict that it is given, and that is used again: read it with "
                    "info[key] or info.get(key), not info.pop(key), and copy values before you change them."
                )
        with suppress(Failed), self._environment({**self._info(), "a_column_for_nobody": ""}):
            pass

    def _play(self) -> list[str]:
        """Play every action once, and a second episode in any case, in as many environments as that takes."""
        waiting = deque(self.actions)
        events = self._play_in_one(waiting)
        while waiting:  # the environment plays one episode only
            events += self._play_in_one(waiting)
        return events

    def _play_in_one(self, waiting: deque[Any]) -> list[str]:
        with self._environment() as probe:
            events = probe.play(waiting)
            with suppress(NoSecondReset):
                while waiting:
                    events += probe.play(waiting)
                events += probe.play(deque(self.actions[:1]))
        return events

    def _compare(self, first: list[str], second: list[str]) -> None:
        one, other = next((pair for pair in zip(first, second, strict=False) if pair[0] != pair[1]), ("", ""))
        if one != other:
            note, rule = self.report.warn, ""
            if self.env_class.resumes_by == "replay":
                note = self.report.error
                rule = 'resumes_by = "replay" needs the same answers to the same actions.\n'
            note(
                f"{rule}Two environments of the same task and seed differ: the first answered\n"
                f"  {short(one)}\nand the second\n  {short(other)}\n"
                'Draw from random.Random(info["seed"]) if runs are to be repeatable.'
            )

    def _check_snapshot(self) -> None:
        """Let one environment go on from the snapshot of another, and compare their answers."""
        with self._environment() as first, self._environment() as second:
            second.restore(first.snapshot_after(self.actions[0]))
            for action in self.actions[1:]:
                if first.done:
                    return
                one, other = comparable(first.step(action)), comparable(second.step(action))
                if one != other:
                    self.report.error(
                        f"After restore(), step({action!r}) answered\n  {short(other)}\nand without it\n"
                        f"  {short(one)}\nPut all that an episode changes into snapshot()."
                    )
                    return

    def _info(self) -> dict[str, Any]:
        """The argument that a rollout gives to ``from_dict``, with a copy of the caller's task."""
        seed = {"seed": 0} if self.env_class.wants_seed else {}
        return {**seed, **copy.deepcopy(self.task), **self.env_args}

    @contextmanager
    def _environment(self, info: dict[str, Any] | None = None) -> Iterator[_Probe]:
        """Make an environment; at the end, close it."""
        info = self._info() if info is None else info
        with Caller(self.report, self.limits) as caller:
            hint = FROM_DICT_HINT.format(keys=", ".join(info))
            make = partial(self.env_class.from_dict, info)
            probe = _Probe(caller, caller.call("from_dict(info)", make, hint, check=_from_dict_faults))
            try:
                yield probe
            finally:
                with suppress(Failed):
                    probe.close()


def _from_dict_faults(env: Any) -> list[str]:
    if isinstance(env, BaseEnv):
        return []
    fault = f"from_dict returned {kind_of(env)}: it has to return the environment."
    return async_faults("from_dict()", env) or [fault]


def _copied(value: Any) -> Any:
    import cloudpickle

    return pickle.loads(cloudpickle.dumps(value))


def _pickle(value: Any) -> None:
    import cloudpickle  # as Ray does; classes of a __main__ travel by value

    cloudpickle.dumps(value)
