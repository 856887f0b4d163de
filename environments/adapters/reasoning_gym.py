"""The tasks of reasoning-gym: procedurally generated questions, each judged by its own verifier."""

from __future__ import annotations

import base64
import functools
import json
import logging
import math
import os
import pickle
import random
import threading
from typing import Any

from environments.adapters import foreign, unknown
from environments.adapters.reasoning_gym_answers import checked_reward, is_data
from environments.base import WorldEnvironment
from environments.data.datasets import Dataset
from environments.errors import ConfigError, DatasetError, EnvironmentFailure
from environments.rewards.reading import last_boxed
from environments.sandbox.child import die_with_parent
from environments.sandbox.grader import Grader, GradingError
from environments.thoughts import split_thought

logger = logging.getLogger(__name__)

TIME_LIMIT_SECONDS = 10.0
"""Time limit of one verdict; an answer that takes longer, such as 9**9**9**9, is wrong."""
FULL_SCORE = 1 - 1e-9
"""Some verifiers add up the shares of a right answer, which makes a little less than 1."""
_SETUP_SECONDS = 120.0  # for a dataset in the verifier's process; most take none
_drawing = threading.Lock()
_NO_DATA = (
    "The answer has not the form that the question asks for. The verifier, which would run it as a program, "
    "was given an empty answer instead."
)


class ReasoningGymEnvironment(WorldEnvironment):
    r"""Entry ``index`` of the reasoning-gym dataset ``name`` with ``seed``, ``size`` and ``config``.

    One question, one answer. The answer stands in the last ``<answer>`` tags, else in the last
    ``\boxed{...}``, else all of the text; thoughts, up to ``</think>``, do not count. The reward is the
    library's ``score_answer``, mostly from 0 to 1 with small values for answers in a wrong form. An
    answer that the verifier fails on, or needs more than ``TIME_LIMIT_SECONDS`` for, is worth 0; info then
    says so as ``error``.

    Some rewards differ from the library's, so that none is earned without the question
    (``reasoning_gym_answers.checked_reward``): an answer with NaN or an infinite number is worth 0; for
    coin_flip and game_of_life_halting, a wrong answer is worth 0 too; and for the datasets of
    ``NEAR_IS_WRONG``, an answer that is only near is.

    Some verifiers evaluate the answer as Python: those of ``reasoning_gym_answers.EVALUATED``. They are only
    given answers that are data, such as ``3*(7 - 2)``, ``x**2 + C`` or ``[1, 2]``, so nothing that a model
    wrote is run. Any other answer is worth what the verifier gives for an empty one. Every verdict is made in
    a process of its own, where the kernel allows it without network, other processes and files that it can
    write. A dataset that you register yourself, and whose verifier evaluates answers, belongs there too.

    Explain the form of answers in the agent's system prompt. ``question`` is checked if it is given:
    another version of the library may generate another one.
    """

    def __init__(
        self,
        name: str,
        seed: int = 0,
        size: int = 500,
        index: int = 0,
        config: dict[str, Any] | None = None,
        question: str | None = None,
    ) -> None:
        if not 0 <= index < size:
            raise ConfigError(f"index={index} is not in {name!r} of size={size}: use 0 to {size - 1}.")
        self._name = name
        self._dataset = (name, seed, size, json.dumps(config or {}, sort_keys=True))
        self._entry = _entry(self._dataset, index)
        self._reward: float | None = None
        if question is not None and question != self._entry["question"]:
            raise DatasetError(
                f"reasoning-gym generates another question here than the task's for {name!r}, seed={seed}, "
                f"index={index}: install the version that the tasks were made with, or make them again."
            )

    def reset(self) -> tuple[dict[str, str], dict[str, Any]]:
        self._reward = None
        return {"question": self._entry["question"]}, {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        """Judge the answer. Info holds it as ``answer`` and the library's own as ``expected``."""
        answer = answer_in(str(action))
        info = {"answer": answer, "expected": self._entry["answer"]}
        try:
            reward, was_data = self._score(answer)
        except GradingError as error:
            logger.warning("The verifier of %s fails on %r: %s", self._name, answer, error)
            self._reward = 0.0
            return {}, 0.0, True, {**info, "error": str(error)}
        if not was_data:
            info["error"] = _NO_DATA
        if not math.isfinite(reward):
            raise EnvironmentFailure(f"The verifier of {self._name} gave {reward} for {answer!r}.")
        self._reward = reward
        return {}, reward, True, info

    def is_correct(self) -> bool | None:
        """Return whether the answer has the full score of 1: many verifiers pay something for a wrong one."""
        return None if self._reward is None else self._reward >= FULL_SCORE

    def _score(self, answer: str) -> tuple[float, bool]:
        """The reward, and whether the verifier was given the answer: see ``score``."""
        try:  # apart from the verdict, whose time is the model's fault
            _grader.call(self._dataset, time_limit_seconds=_SETUP_SECONDS)
        except GradingError as error:
            raise EnvironmentFailure(f"The verifier of {self._name} cannot be set up: {error}") from error
        # Pickled, since it may hold values that JSON does not know.
        entry = base64.b64encode(pickle.dumps(self._entry)).decode()
        verdict = _grader.call(self._dataset, entry, answer, time_limit_seconds=TIME_LIMIT_SECONDS)
        if "error" in verdict:
            raise GradingError(verdict["error"])
        return verdict["reward"], verdict["was_data"]


def reasoning_gym_tasks(name: str, num_tasks: int, seed: int = 0, **config: Any) -> Dataset:
    """Return ``num_tasks`` tasks of the dataset ``name``; ``config`` is its own, for example max_terms=3.

    A task holds its question, and the arguments by which its environment generates the rest again.

    Raises:
        ConfigError: there is no such dataset, or ``config`` is invalid.
    """
    dataset = (name, seed, num_tasks, json.dumps(config, sort_keys=True))
    values = {"name": name, "seed": seed, "size": num_tasks, "config": config}
    _dataset(*dataset)  # raises, also where no task is wanted
    questions = (_entry(dataset, index)["question"] for index in range(num_tasks))
    rows = [{"question": each, "index": index, **values} for index, each in enumerate(questions)]
    return Dataset(rows, name=name)


def answer_in(text: str) -> str:
    """Return the answer that a model's text gives; see ``ReasoningGymEnvironment``."""
    answer = split_thought(text)[1]
    tagged = foreign("reasoning_gym.utils", "reasoning-gym").extract_answer(answer)
    boxed = last_boxed(answer)
    return str(tagged if tagged is not None else boxed if boxed is not None else answer).strip()


def _entry(dataset: tuple[str, int, int, str], index: int) -> Any:
    """An entry, the same each time: list_functions draws some from Python's global generator."""
    entries = _dataset(*dataset)
    with _drawing:
        state = random.getstate()
        random.seed(f"{dataset[1]} {index}")
        try:
            return entries[index]
        finally:
            random.setstate(state)


@functools.lru_cache(maxsize=16)
def _dataset(name: str, seed: int, size: int, config: str) -> Any:
    """The library's dataset, one per process: some of them take long to set up."""
    factory = foreign("reasoning_gym.factory", "reasoning-gym")
    if name not in factory.DATASETS:
        raise unknown("reasoning-gym dataset", name, factory.DATASETS)
    if size < 1:
        raise ConfigError(f"A reasoning-gym dataset of size={size} has no task: use 1 and above.")
    try:
        return factory.create_dataset(name, seed=seed, size=size, **json.loads(config))
    except (AttributeError, TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"reasoning-gym's {name!r} does not accept the config {config}: {error}") from error


def score(dataset: list[Any], entry: str | None = None, answer: str = "") -> dict[str, Any] | None:
    """The library's verdict on the answer to a pickled entry, made in a fork of the grader's process.

    Whatever a verifier changes ends with the fork: the next verdict finds the dataset as it was set up.
    Without an entry, only set up the dataset.

    Returns:
        ``{"reward": float, "was_data": bool}``, where ``was_data`` says whether the verifier was given the
        answer, or ``{"error": str}``.
    """
    verifier = _dataset(*dataset)
    if entry is None:
        return None
    parent = os.getpid()
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            die_with_parent(parent)
            os.write(writing, json.dumps(_verdict(verifier, dataset[0], entry, answer)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        verdict = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    return json.loads(verdict) if verdict else {"error": f"the process of the verdict ended with {status}."}


def _verdict(verifier: Any, name: str, pickled: str, answer: str) -> dict[str, Any]:
    entry = pickle.loads(base64.b64decode(pickled))
    was_data = is_data(name, answer, entry)
    try:
        reward = float(verifier.score_answer(answer=answer if was_data else "", entry=entry))
    except Exception as error:  # noqa: BLE001  (the other process reports it)
        return {"error": f"the verifier raised {type(error).__name__}: {error}"}
    return {"reward": checked_reward(name, answer, entry, reward), "was_data": was_data}


_grader = Grader(
    f"{__name__}:{score.__name__}", imports=["reasoning_gym.factory"], memory_bytes=2 << 30, confined=True
)
