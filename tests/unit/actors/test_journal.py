"""An episode whose process dies goes on after its last finished turn, and nobody can tell by its result."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from resumed_episodes import NUM_TURNS, ReplayedEnv, RestoredEnv, SeedSampler

from actors.rollouts.journal import JOURNALS, Journal, JournalStore
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, run_rollout
from environments import check_environment
from environments.base import BaseEnv
from environments.errors import ContractError
from environments.types import Completion, Trajectory
from policies import GameAgent


class ForgetfulEnv(RestoredEnv):
    def restore(self, snapshot: list[Any]) -> None:
        self.actions = []


class MoodyEnv(ReplayedEnv):
    """Says that it can be replayed, but never answers twice the same."""

    def step(self, action: Any) -> tuple[Any, float, bool, dict]:
        _, *rest = super().step(action)
        return os.urandom(4).hex(), *rest


def play(
    env: BaseEnv, sampler: SeedSampler, entries: Sequence[bytes], record: Callable[[int, bytes], None]
) -> Trajectory:
    request = RolloutRequest(rollout_id="0/0", group_id="0", task={}, seed=100)
    limits = RolloutLimits(max_steps=NUM_TURNS)
    journal = JOURNALS[type(env).resumes_by](record, entries)
    return run_rollout(
        GameAgent(), env, lambda asked: asyncio.run(sampler.sample(asked)), request, limits, journal
    )


def played(env: BaseEnv) -> tuple[Trajectory, dict[int, bytes]]:
    entries: dict[int, bytes] = {}
    return play(env, SeedSampler(), (), entries.__setitem__), entries


@pytest.mark.parametrize("env_class", [ReplayedEnv, RestoredEnv])
def test_resumed_episode_ends_as_it_would_have(env_class: type[ReplayedEnv]) -> None:
    whole, entries = played(env_class())
    sampler, env = SeedSampler(), env_class()
    sampler.seeds = [0, 0]  # so that its later log-probabilities are those of the whole episode
    added: dict[int, bytes] = {}
    resumed = play(env, sampler, [entries[0], entries[1]], added.__setitem__)
    assert resumed == whole
    assert sampler.seeds[2:] == [102, 103, 104]
    assert sorted(added) == [2, 3, 4]
    assert len(env.actions) == NUM_TURNS


def test_entry_holds_only_the_tokens_new_in_its_turn() -> None:
    entries: list[bytes] = []
    env, journal = ReplayedEnv(), Journal(lambda _, entry: entries.append(entry))
    journal.open(env, lambda env: env.reset())
    prompt, completions = (5,) * 5_000, []
    for turn in range(3):
        completion = Completion(prompt_ids=prompt, completion_ids=(turn, 7), text="a", finish_reason="stop")
        journal.step(turn, env, completion, "a")
        completions.append(completion)
        prompt = (*prompt, turn, 8)  # the answer was rewritten
    assert len(entries[0]) > 20_000 and max(map(len, entries[1:])) < 2_000
    resumed = Journal(entries=entries)
    assert [resumed.completion(turn) for turn in range(4)] == [*completions, None]


def test_entry_holds_only_the_pictures_new_in_its_turn() -> None:
    entries: dict[int, bytes] = {}
    shown = [("a" * 100,), ("a" * 100, "b" * 100), ("c" * 100,)]
    turns = [Completion(prompt_ids=(1,), text="", finish_reason="stop", pictures=each) for each in shown]
    env, journal = ReplayedEnv(), Journal(entries.__setitem__)
    journal.open(env, lambda env: env.reset())
    for index, completion in enumerate(turns):
        journal.step(index, env, completion, "")
    assert [entry.count(b"a" * 100) for entry in entries.values()] == [1, 0, 0]
    resumed = Journal(None, [*entries.values()])
    assert [resumed.completion(index) for index in range(3)] == turns


def test_replay_with_other_answers_is_an_error() -> None:
    _, entries = played(MoodyEnv())
    with pytest.raises(ContractError, match=r"MoodyEnv cannot be resumed: step\(\) of turn 1 was"):
        play(MoodyEnv(), SeedSampler(), [entries[0]], lambda index, entry: None)


def test_turn_that_cannot_be_pickled_ends_only_the_journal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class LockedEnv(ReplayedEnv):
        def step(self, action: Any) -> tuple[Any, float, bool, dict]:
            import threading

            return *super().step(action)[:3], {"lock": threading.Lock()}

    trajectory, entries = played(LockedEnv())
    assert len(trajectory.steps) == NUM_TURNS
    assert entries == {}
    assert "LockedEnv cannot be resumed" in caplog.text


def test_store_has_the_turns_before_the_first_gap() -> None:
    store = JournalStore()
    assert store.open("a", 1) == []
    store.record("a", 1, 0, b"first")
    store.record("a", 1, 2, b"third")
    assert store.open("a", 2) == [b"first"]
    store.record("a", 1, 1, b"late")
    assert store.open("a", 3) == [b"first"]
    store.record("a", 3, 1, b"second")
    assert store.open("a", 4) == [b"first", b"second"], "the third one followed another second one"
    store.drop("a")
    store.record("a", 4, 0, b"later still")
    assert store.open("a", 1) == []


def test_full_store_drops_the_episode_that_does_not_fit() -> None:
    store = JournalStore(max_bytes=10)
    for name in "ab":
        store.open(name, 1)
    store.record("a", 1, 0, b"12345")
    store.record("b", 1, 0, b"12345678")
    store.record("b", 1, 1, b"1")
    assert store.open("b", 2) == []
    assert store.open("a", 2) == [b"12345"]
    store.drop("a")
    store.record("b", 2, 0, b"12345678")
    assert store.open("b", 3) == [b"12345678"]


def test_check_environment_tests_what_the_class_declares() -> None:
    assert check_environment(ReplayedEnv, {}).ok
    assert check_environment(RestoredEnv, {}).ok
    assert "needs the same answers" in str(check_environment(MoodyEnv, {}))
    assert "Put all that an episode changes into snapshot()" in str(check_environment(ForgetfulEnv, {}))
    assert not check_environment(MoodyEnv, {}).ok
    assert not check_environment(ForgetfulEnv, {}).ok
