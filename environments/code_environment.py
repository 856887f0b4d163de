"""An environment in which the model writes a program, sees the tests that fail, and repairs it."""

from __future__ import annotations

import functools
from typing import Any

from environments.base import MultiTurnEnvironment, Task
from environments.errors import ConfigError
from environments.rewards.base import RewardFunction, RewardOutput, judge, lacking
from environments.rewards.code.reward import code_reward_fn
from environments.sandbox.base import SandboxSource, make_sandbox


class CodeEnvironment(MultiTurnEnvironment):
    """A programming problem, ``task["question"]``, that may be answered ``max_turns`` times.

    A wrong answer is answered by ``{"question": feedback}``, which shows at most ``max_tests`` of the public
    tests that failed. The episode ends with a right answer (or, where the reward function does not say which
    is right, one with a reward of 1 or more) or after the last turn; the reward of each turn is that of its
    answer, so only a repaired program pays more than 0. The info of each step holds the reward function's
    ``metadata``.

    ``sandbox`` is where ``code_reward_fn`` runs the tests, that of this machine by default. A ``reward_fn``
    of your own has its own way to run programs, so only one of the two can be given.
    """

    def __init__(
        self,
        task: Task | None = None,
        max_turns: int = 2,
        reward_fn: RewardFunction | None = None,
        max_tests: int = 2,
        sandbox: SandboxSource | None = None,
    ) -> None:
        super().__init__(task=task, max_turns=max_turns)
        if reward_fn is not None and sandbox is not None:
            raise ConfigError(
                f"reward_fn={reward_fn!r} and sandbox={sandbox!r} exclude each other: give the sandbox to "
                "the reward function, for example functools.partial(code_reward_fn, sandbox=...)."
            )
        self.reward_fn = reward_fn or functools.partial(
            code_reward_fn, sandbox=make_sandbox("local" if sandbox is None else sandbox)
        )
        self.max_tests = max_tests

    def reset(self, task: Task | None = None) -> tuple[Task, dict[str, Any]]:
        known, info = super().reset(task)
        if "question" not in known:
            raise lacking(known, "'question'", "add the problem's text.")
        return {"question": known["question"]}, info

    def get_reward_and_next_obs(self, task: Task, action: Any) -> tuple[float, dict[str, Any]]:
        output = judge(self.reward_fn, task, action)
        self._reward_output = output
        is_right = output.reward >= 1 if output.is_correct is None else output.is_correct
        if is_right:
            self.done = True
            return output.reward, {}
        return output.reward, {"question": feedback(output, self.max_tests)}


def feedback(output: RewardOutput, max_tests: int) -> str:
    """The text for a model about its wrong answer."""
    metadata = output.metadata
    if "failures" not in metadata:
        return f"Your answer is wrong. {metadata.get('error', '')}".rstrip()
    num_tests = metadata["num_tests"]
    failed = f"Your program failed {num_tests - metadata['num_passed']} of {num_tests} tests."
    shown = [failure for failure in metadata["failures"] if failure["public"]][:max_tests]
    return "\n\n".join([failed, *map(_described, shown)])


def _described(failure: dict[str, Any]) -> str:
    titles = {"input": "Input", "expected": "Expected", "got": "Got", "error": "Error"}
    parts = [(title, failure[key]) for key, title in titles.items() if failure[key] is not None]
    return "\n".join(f"{title}:\n{text.rstrip() or '(nothing)'}" for title, text in parts)
