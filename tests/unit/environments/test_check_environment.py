from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from environments import (
    BaseEnv,
    MultiTurnEnvironment,
    RewardOutput,
    SingleTurnEnvironment,
    ToolEnvironment,
    math_reward_fn,
)
from environments.check import check_environment
from environments.errors import ConfigError, EnvironmentFailure
from environments.text_games import GuessEnvironment

ROOT = Path(__file__).resolve().parents[3]
TASK = {"word": "banana", "letters": ["a", "n"]}
SUM = {"question": "1 + 1?", "ground_truth": "2"}


class Sound(BaseEnv):
    """Without a fault; the faulty ones below change one thing each."""

    wants_seed = True

    def __init__(self, word="banana", seed=0):
        self.word = word
        self.random = random.Random(seed)

    def reset(self):
        self.left = 2
        return f"What is in {self.word}?", {}

    def step(self, action):
        self.left -= 1
        return str(self.random.random()), float(action in self.word), self.left == 0, {"left": self.left}

    @classmethod
    def from_dict(cls, info):
        return cls(info["word"], info.get("seed"))


def answering(result):
    """An environment whose ``step`` returns ``result``."""

    class Answering(Sound):
        def step(self, action):
            return result

    return Answering


def opening(result):
    """An environment whose ``reset`` returns ``result``."""

    class Opening(Sound):
        def reset(self):
            self.left = 2
            return result

    return Opening


class Turns(MultiTurnEnvironment):
    def get_reward_and_next_obs(self, task, action):
        return 0.0, {"question": "Again?"}


@pytest.mark.parametrize(
    ("env_class", "task", "env_args"),
    [
        (Sound, TASK, None),
        (GuessEnvironment, {"low": 1, "high": 3}, {"max_guesses": 2}),
        (SingleTurnEnvironment, SUM, {"reward_fn": math_reward_fn}),
        (SingleTurnEnvironment, {"task": SUM}, {"reward_fn": math_reward_fn}),
        (Turns, SUM, {"max_turns": 2}),
        (ToolEnvironment, SUM, {"tools": ["calculator"], "reward_fn": math_reward_fn}),
    ],
)
def test_sound_environment_is_all_fine(env_class, task, env_args):
    report = check_environment(env_class, task, env_args)
    assert str(report) == f"{env_class.__name__}: all fine."
    assert report.ok
    report.raise_if_faulty()


def test_agents_own_actions_can_be_given():
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "calculator", "arguments": '{"expression": "1"}'},
    }
    env_args = {"tools": ["calculator"], "reward_fn": math_reward_fn}
    assert str(check_environment(ToolEnvironment, SUM, env_args, actions=[[call], "2"])).endswith("all fine.")


def test_numpys_numbers_are_numbers():
    numpy = pytest.importorskip("numpy")
    result = ("text", numpy.float32(1), numpy.bool_(True), {"turn": numpy.int64(1)})
    assert str(check_environment(answering(result), TASK)) == "Answering: all fine."
    assert str(check_environment(answering(("text", True, False, {})), TASK)) == "Answering: all fine."


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        ("text", "reset() returned 'text': write return observation, info"),
        (None, "reset() returned None: write"),
        ({"question": "?"}, "reset() returned a dict with the keys ['question']: write"),
        (("text", {}, 0), "reset() returned 3 values: write"),
        (("text", None), "reset() returned None as info: it has to be a dict"),
    ],
)
def test_what_reset_returns_is_judged(result, sentence):
    assert sentence in one_error(opening(result), TASK)


@pytest.mark.parametrize(
    ("result", "sentence"),
    [
        (None, "step() returned None: write return observation, reward, done, info"),
        (
            ("text", 1.0, True, False, {}),
            "as Gymnasium's do: write return observation, reward, terminated or",
        ),
        (("text", 1.0, True), "step() returned 3 values: write"),
        (["text", 1.0, True, {}], "step() returned an object of type list: write"),
        (("text", None, True, {}), "step() returned None as reward: it has to be a number"),
        (("text", "1", True, {}), "step() returned '1' as reward"),
        (("text", RewardOutput(1.0), True, {}), "an object of type RewardOutput as reward"),
        (("text", float("nan"), True, {}), "step() returned the reward nan: it has to be finite"),
        (
            ("text", 1.0, None, {}),
            "step() returned None as done, its third value: it has to be True or False",
        ),
        (("text", True, 1.0, {}), "step() returned 1.0 as done"),
        (("text", 1.0, True, "info"), "step() returned 'info' as info: it has to be a dict"),
    ],
)
def test_what_step_returns_is_judged(result, sentence):
    assert sentence in one_error(answering(result), TASK)


def test_all_faults_of_one_step_are_told():
    assert len(check_environment(answering(("text", None, None, None)), TASK).errors) == 3


class NoStep(BaseEnv):
    def reset(self):
        return "?", {}

    @staticmethod
    def from_dict(info):
        return NoStep()


class NoFromDict(BaseEnv):
    def reset(self):
        return "?", {}

    def step(self, action):
        return "", 0.0, True, {}


class PlainFromDict(Sound):
    def from_dict(self, info):
        return Sound()


class ForgetsToReturn(Sound):
    @staticmethod
    def from_dict(info):
        Sound()


class Pops(Sound):
    @staticmethod
    def from_dict(info):
        return Pops(info.pop("word"))


class ChangesWithin(Sound):
    @staticmethod
    def from_dict(info):
        info["letters"].append("b")
        return ChangesWithin(info["word"])


class KnowsOnlyItsKeys(Sound):
    def __init__(self, word, letters, seed=0):
        super().__init__(word, seed)

    @classmethod
    def from_dict(cls, info):
        return cls(**info)


class OtherColumn(Sound):
    @staticmethod
    def from_dict(info):
        return OtherColumn(info["wrod"])


class RaisesInReset(Sound):
    def reset(self):
        raise RuntimeError("no ink")


class ReadsNumbers(Sound):
    def step(self, action):
        int(action)
        return super().step(action)


class LivesOnce(Sound):
    def reset(self):
        if hasattr(self, "left"):
            raise RuntimeError("I have been played")
        return super().reset()


class ClosesAfterResetOnly(Sound):
    def close(self):
        self.left  # noqa: B018


class ClosesOnce(Sound):
    closed = False

    def close(self):
        if self.closed:
            raise ValueError("closed already")
        self.closed = True


class JudgesInWords(Sound):
    def compute_final_reward(self):
        return "well done"


class IsNearlyCorrect(Sound):
    def is_correct(self):
        return 0.9


class NamesAText(Sound):
    def compute_metrics(self):
        return {"style": "good"}


class EndsTheProgram(Sound):
    def step(self, action):
        sys.exit(3)


class TellsItsNeedsInADict(Sound):
    actor_needs = {"num_cpus": 2}  # noqa: RUF012


class TellsOfALock(Sound):
    def step(self, action):
        return "text", 0.0, True, {"lock": threading.Lock()}


def asynchronous(name):
    """An environment whose method ``name`` is a coroutine function."""

    async def method(*args):
        return getattr(Sound, name)(*args)

    return type("Async", (Sound,), {name: staticmethod(method) if name == "from_dict" else method})


class SetsAnAlarm(Sound):
    def step(self, action):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return super().step(action)


class HoldsALock(Sound):
    @staticmethod
    def from_dict(info):
        assert info["lock"]
        return HoldsALock()


@pytest.mark.parametrize(
    ("env_class", "sentences"),
    [
        (
            NoStep,
            ["step is missing: write def step(self, action), which returns (observation, reward, done,"],
        ),
        (NoFromDict, ["from_dict is missing: write @staticmethod def from_dict(info)"]),
        (PlainFromDict, ["put @staticmethod above it"]),
        (ForgetsToReturn, ["from_dict returned None: it has to return the environment"]),
        (Pops, ["from_dict changes the dict", "not info.pop(key)"]),
        (ChangesWithin, ["from_dict changes the dict", "before you change them"]),
        (KnowsOnlyItsKeys, ["unexpected keyword argument 'a_column_for_nobody'", "ignore the rest"]),
        (OtherColumn, ["raised KeyError: 'wrod'", "with the keys seed, word, letters"]),
        (RaisesInReset, ["reset() raised RuntimeError: no ink", 'raise RuntimeError("no ink")']),
        (
            ReadsNumbers,
            ["step('') raised ValueError", "int(action)", "pass examples of them as actions=[...]"],
        ),
        (ClosesAfterResetOnly, ["close() raised AttributeError", "before reset"]),
        (JudgesInWords, ["compute_final_reward() returned 'well done' as reward: it has to be a number"]),
        (EndsTheProgram, ["step('') raised SystemExit: 3"]),
        (TellsItsNeedsInADict, ["actor_needs is a dict with the keys ['num_cpus']", "= ActorNeeds(...)"]),
        (
            TellsOfALock,
            ["Pickling the info of step() raised TypeError", "put plain data into it"],
        ),
        (asynchronous("reset"), ["reset() is async", "write def instead of async def"]),
        (asynchronous("step"), ["step() is async"]),
        (asynchronous("close"), ["close() is async"]),
        (asynchronous("compute_final_reward"), ["compute_final_reward() is async"]),
        (asynchronous("compute_metrics"), ["compute_metrics() is async"]),
        (asynchronous("is_correct"), ["is_correct() is async"]),
        (IsNearlyCorrect, ["is_correct() returned 0.9: it has to be True, False or None"]),
        (NamesAText, ["compute_metrics() returned 'good' as 'style': it has to be a finite number"]),
        (asynchronous("from_dict"), ["from_dict() is async"]),
    ],
)
def test_one_fault_is_one_error_that_helps(env_class, sentences):
    error = one_error(env_class, TASK)
    assert [sentence for sentence in sentences if sentence not in error] == []


def test_what_is_no_environment_is_told():
    class Gymnasium:
        pass

    assert "It is no BaseEnv: write class Gymnasium(BaseEnv)" in one_error(Gymnasium, TASK)
    assert "pass the class, not an instance" in one_error(Sound(), TASK)
    assert "The task is 'banana': pass a row of the dataset, a dict" in one_error(Sound, "banana")


def test_what_cannot_travel_is_named():
    error = one_error(HoldsALock, TASK, {"lock": threading.Lock()})
    assert "Pickling env_args['lock'] raised TypeError" in error
    assert "in reset or from_dict" in error


FREE = threading.Event()


def hang(*args):
    FREE.wait(30)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["from_dict", "reset", "step", "close"])
def test_hang_is_told_and_not_waited_for(method):
    FREE.clear()
    env_class = type("Hanging", (Sound,), {method: staticmethod(hang)})
    start = time.monotonic()
    report = check_environment(env_class, TASK, timeout_seconds=0.5, reset_timeout_seconds=0.5)
    FREE.set()
    assert time.monotonic() - start < 5, "one limit and not one for each call"
    assert len(report.errors) == 1, str(report)
    assert f"{method}(" in report.errors[0]
    assert "has not returned within 0.5 s" in report.errors[0]


@pytest.mark.slow
def test_reset_that_starts_something_has_longer_limit_of_its_own():
    class Slow(Sound):
        def reset(self):
            time.sleep(0.3)
            return super().reset()

    assert check_environment(Slow, TASK, timeout_seconds=0.2).ok
    (error,) = check_environment(Slow, TASK, reset_timeout_seconds=0.1).errors
    assert "reset() has not returned within 0.1 s" in error
    assert "raise reset_timeout_seconds" in error


def test_error_that_says_itself_what_to_do_gets_no_hint():
    class Unplayable(Sound):
        @staticmethod
        def from_dict(info):
            raise ConfigError("There is no board: run make boards.")

    class Unsteppable(Sound):
        def step(self, action):
            raise ConfigError("There is no board: run make boards.")

    for env_class in (Unplayable, Unsteppable):
        (error, *_) = check_environment(env_class, TASK).errors
        assert "There is no board: run make boards." in error
        assert "ignore the rest" not in error and "A model may say anything" not in error


HANGING_PROGRAM = """
import threading
from environments import MultiTurnEnvironment
from environments.check import check_environment

class Stuck(MultiTurnEnvironment):
    def get_reward_and_next_obs(self, task, action):
        threading.Event().wait()

print(check_environment(Stuck, {"question": "?"}, timeout_seconds=0.5))
"""


@pytest.mark.slow
def test_hang_does_not_keep_the_program_from_ending():
    run = subprocess.run(
        [sys.executable, "-c", HANGING_PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "step('') has not returned within 0.5 s" in run.stdout, run.stderr


@pytest.mark.parametrize("length", [1, 2, 100])
def test_each_action_is_played_and_a_second_episode_in_any_case(length):
    events = []

    class Recording(Sound):
        def reset(self):
            observation, info = super().reset()
            self.left = length
            events.append("reset")
            return observation, info

        def step(self, action):
            events.append(action)
            return super().step(action)

    assert check_environment(Recording, TASK, actions=["a", "b", "c"]).ok
    played = {
        1: ["reset", "a", "reset", "b", "reset", "c", "reset", "a"],
        2: ["reset", "a", "b", "reset", "c", "reset", "a"],
        100: ["reset", "a", "b", "c", "reset", "a"],
    }[length]
    assert events == 2 * played, "in two environments"


def test_actions_are_all_played_where_an_environment_lives_once():
    played = []

    class Recording(LivesOnce):
        def step(self, action):
            played.append(action)
            return super().step(action)

    assert check_environment(Recording, TASK, actions=["a", "b", "c"]).ok
    assert played == 2 * ["a", "b", "c"]


def test_no_thread_is_left_behind():
    check_environment(Sound, TASK)
    deadline = time.monotonic() + 60
    while any(thread.name == "check_environment" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_environment_is_closed_in_the_thread_that_made_it():
    made, closed = [], []

    class Counting(ReadsNumbers):
        def __init__(self, *args):
            super().__init__(*args)
            self.thread = threading.get_ident()
            made.append(self)

        def close(self):
            assert threading.get_ident() == self.thread
            closed.append(self)

    report = check_environment(Counting, TASK)
    assert len(report.errors) == 1
    assert {id(env) for env in closed} == {id(env) for env in made}
    assert len(made) >= 3


class ShowsItsTurn(Sound):
    turn = 0

    def step(self, action):
        self.turn += 1
        return self.turn, 0.0, False, {}


def test_task_is_left_as_it_is():
    task = {"word": "banana", "letters": ["a"]}
    check_environment(ChangesWithin, task)
    assert task == {"word": "banana", "letters": ["a"]}


@pytest.mark.parametrize(
    ("env_class", "sentences"),
    [
        (ClosesOnce, ["A second close() raised ValueError: closed already"]),
        (
            LivesOnce,
            ["A second reset() raised RuntimeError: I have been played", "reset an environment once"],
        ),
        (SetsAnAlarm, ["step('') raised ValueError", "where rollouts run, but not this check"]),
        (opening(("", {})), ["reset() returned an empty observation"]),
        (
            opening(({"word": "?"}, {})),
            ["a dict with the keys ['word'] as observation", '{"question": text}'],
        ),
        (ShowsItsTurn, ["step() returned a number as observation"]),
        (opening((True, {})), ["reset() returned True as observation"]),
        (opening(({"question": 7}, {})), ["a dict with the keys ['question'] as observation"]),
        (answering(({"tool_outputs": {"1": 2}}, 0, True, {})), ["['tool_outputs'] as observation"]),
        (opening(([{"type": "text"}, "?"], {})), ["list as observation", "parts of a message"]),
        (answering(("?", 0, True, {"env": Sound})), ["step() returned an info that cannot be saved as JSON"]),
    ],
)
def test_what_works_but_may_surprise_is_a_warning(env_class, sentences):
    report = check_environment(env_class, TASK)
    assert report.ok
    assert len(report.warnings) == 1
    assert [sentence for sentence in sentences if sentence not in report.warnings[0]] == []


def test_environment_that_ignores_seed_is_told_where_it_differs():
    class Dice(Sound):
        def __init__(self, word, seed):
            super().__init__(word, random.SystemRandom().random())

    report = check_environment(Dice, TASK)
    assert report.ok
    assert "step('') with [\"0." in report.warnings[0]
    assert 'random.Random(info["seed"])' in report.warnings[0]


def test_report_is_a_list_to_read_and_can_be_raised():
    report = check_environment(answering((7, None, True, {})), TASK)
    lines = str(report).splitlines()
    assert lines[0] == "Answering:"
    assert lines[1].startswith("  error: step() returned None as reward")
    with pytest.raises(EnvironmentFailure, match=r"Answering:\n  error: step\(\) returned None"):
        report.raise_if_faulty()


PROGRAM = """
from environments import BaseEnv
from environments.check import check_environment

class Mine(BaseEnv):
    def reset(self):
        return "?", {}

    def step(self, action):
        return "", 0.0, True, {}

    @staticmethod
    def from_dict(info):
        return Mine()

print(check_environment(Mine, {}))
"""


def test_class_of_the_program_itself_can_travel():
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "Mine: all fine.\n", run.stderr


def one_error(env_class, task, env_args=None):
    report = check_environment(env_class, task, env_args)
    assert not report.ok
    assert len(report.errors) == 1, str(report)
    return report.errors[0]
