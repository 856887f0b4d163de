"""A rollout that forks from another one shares its first turns, and samples the others with its own seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from resumed_episodes import NUM_TURNS, ReplayedEnv, RestartedEnv, RestoredEnv, SeedSampler

from actors.rollouts import player
from actors.rollouts.dispatcher import Dispatcher
from actors.rollouts.forks import ForkPoints
from actors.rollouts.player import RolloutResult
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.slot import Slot, SlotState
from actors.rollouts.stream import TrajectoryStream
from environments import Dataset
from environments.errors import ConfigError
from environments.types import Completion, Step, TerminationReason, Trajectory
from launch.settings.tree import ForksConfig, RolloutConfig, TrainConfig
from launch.training.rollout_requests import group_requests
from policies import GameAgent
from policies.sampler import SampleRequest

LARGEST_ID = 10_007
"""The sampler answers with the seed that it is given, so it is given a smaller one."""
TASKS = Dataset([{"question": "Begin."}], name="tasks", split="train")


def requests_of_group(at: str = "every 2", group_size: int = 6) -> list[RolloutRequest]:
    rollout = RolloutConfig(group_size=group_size, forks=ForksConfig(roots=2, at=at), max_steps=NUM_TURNS)
    return group_requests(TrainConfig(rollout=rollout), TASKS[0], False, 3, 0)


class Player:
    """The code of rollout actors and of the dispatcher, without processes: plays requests one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, env_class: type[ReplayedEnv] = ReplayedEnv) -> None:
        monkeypatch.setattr(player, "limit_memory", lambda num_bytes: None)
        self.sampler = SeedSampler()
        self.slot = Slot(0, SimpleNamespace(), state=SlotState.IDLE)  # type: ignore[arg-type]
        self.dispatcher = Dispatcher({0: self.slot})
        self.attempts: list[tuple[str, int]] = []
        """Rollouts in the order in which they were played, with the finished turns that each was given."""
        link: Any = SimpleNamespace(
            is_followed=False,
            sample=self._sample,
            record_turn=lambda *turn: self.dispatcher.journals.record(*turn),
        )
        pair = Pair(agent_class=GameAgent, env_class=env_class)
        self.actor = player.Player(pair, RolloutLimits(max_steps=NUM_TURNS), link)

    def _sample(self, request: SampleRequest, deadline: float) -> Completion:
        params = replace(request.params, seed=(request.params.seed or 0) % LARGEST_ID)
        return asyncio.run(self.sampler.sample(replace(request, params=params)))

    def play_next(self) -> tuple[Any, RolloutResult]:
        taking = self.dispatcher.take(self.slot)
        with pytest.raises(StopIteration) as taken:
            taking.send(None)
        rollout = taken.value.value
        entries = self.dispatcher.journals.open(rollout.rollout_id, rollout.attempt, rollout.beginning)
        self.attempts.append((rollout.rollout_id, len(entries)))
        return rollout, self.actor.run(player.Attempt(rollout.request, rollout.attempt, entries))

    def play(self, requests: Sequence[RolloutRequest]) -> dict[str, Trajectory]:
        """Play all of ``requests`` to their ends, as the fleet does."""
        for request in requests:
            self.dispatcher.submit(request)
        played = {}
        for _ in requests:
            rollout, result = self.play_next()
            self.dispatcher.remove(rollout, result.beginnings)
            played[rollout.rollout_id.rpartition("/")[2]] = result.trajectory
        return played


class ChosenEnv(ReplayedEnv):
    """Makes environments of another class. Only this one's attributes count: a run knows no other."""

    @classmethod
    def from_dict(cls, info: dict) -> ReplayedEnv:
        return RestartedEnv()


def ids(trajectory: Trajectory) -> list[tuple[int, ...]]:
    return [each.completion_ids for each in trajectory.completions]


def test_forks_are_dealt_out_among_the_roots() -> None:
    requests = requests_of_group()
    assert [request.rollout_id for request in requests] == [f"00000003/{each:04d}" for each in range(6)]
    assert [request.forked_at and request.forked_at.num_forks for request in requests] == [2, 2] + [None] * 4
    forks = [(request.fork.parent[-1], request.fork.number) for request in requests if request.fork]
    assert forks == [("0", 0), ("1", 0), ("0", 1), ("1", 1)]
    assert len({request.seed for request in requests}) == 6


def test_group_without_forks_requests_what_it_did() -> None:
    forked = requests_of_group()
    flat = group_requests(TrainConfig(rollout=RolloutConfig(group_size=6)), TASKS[0], False, 3, 0)
    assert flat == [replace(each, fork=None, forked_at=None) for each in forked]


@pytest.mark.parametrize("env_class", [ReplayedEnv, RestoredEnv, ChosenEnv])
def test_fork_samples_only_the_turns_it_does_not_share(
    env_class: type[ReplayedEnv], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of_group()
    player = Player(monkeypatch, env_class)
    played = player.play(requests)
    shared = {"0000": 0, "0001": 0, "0002": 2, "0003": 2, "0004": 4, "0005": 4}
    assert player.attempts == [(f"00000003/{name}", turns) for name, turns in shared.items()]
    for request, (name, one) in zip(requests, sorted(played.items()), strict=True):
        parent = f"000{int(name) % 2}"
        assert (one.forked_from, one.num_shared_turns) == ((parent if shared[name] else ""), shared[name])
        assert one.termination_reason is TerminationReason.ENV_DONE and one.reward == 0.5 * NUM_TURNS
        assert one.completions[: shared[name]] == played[parent].completions[: shared[name]]
        seeds = [((request.seed or 0) + turn) % LARGEST_ID for turn in range(shared[name], NUM_TURNS)]
        assert [tokens[0] for tokens in ids(one)[shared[name] :]] == seeds
    assert sum(each.num_sampled_tokens for each in played.values()) == 2 * len(player.sampler.seeds)


def test_group_that_is_played_again_forks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = (Player(monkeypatch).play(requests_of_group("entropy")) for _ in range(2))
    assert {name: ids(one) for name, one in first.items()} == {name: ids(one) for name, one in again.items()}
    shared = [[one.num_shared_turns for one in played.values()] for played in (first, again)]
    assert shared[0] == shared[1] and any(shared[0])


def test_environment_that_does_not_resume_keeps_no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    player = Player(monkeypatch, RestartedEnv)
    player.dispatcher.submit(requests_of_group()[0])
    rollout, result = player.play_next()
    assert len(result.trajectory.steps) == NUM_TURNS
    assert player.dispatcher.journals.open(rollout.rollout_id, 2) == []


def test_fork_that_failed_begins_again_with_what_it_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    player = Player(monkeypatch)
    root, _, fork, *_ = requests_of_group()
    player.dispatcher.submit(root)
    player.dispatcher.submit(fork)
    rollout, result = player.play_next()
    player.dispatcher.remove(rollout, result.beginnings)
    for _ in range(2):
        rollout, result = player.play_next()
        player.dispatcher.journals.drop(rollout.rollout_id)
        player.dispatcher.put(rollout)
    assert [turns for _, turns in player.attempts] == [0, 2, 2]
    assert result.trajectory.num_shared_turns == 2


def test_fork_resumes_after_its_own_finished_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    player = Player(monkeypatch)
    root, _, fork, *_ = requests_of_group()
    player.dispatcher.submit(root)
    player.dispatcher.submit(fork)
    rollout, result = player.play_next()
    player.dispatcher.remove(rollout, result.beginnings)
    rollout, result = player.play_next()
    assert player.dispatcher.journals.open(rollout.rollout_id, 2)[:2] == list(rollout.beginning)
    assert len(player.dispatcher.journals.open(rollout.rollout_id, 2)) == NUM_TURNS


def test_fork_of_a_spoilt_parent_begins_with_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    player = Player(monkeypatch)
    root, _, fork, *_ = requests_of_group()
    player.dispatcher.submit(root)
    player.dispatcher.submit(fork)
    assert player.dispatcher.num_waiting == 1, "a fork waits for its parent, and not for an actor"
    rollout, _ = player.play_next()
    player.dispatcher.remove(rollout)
    assert player.dispatcher.num_waiting == 1
    _, result = player.play_next()
    assert (result.trajectory.forked_from, result.trajectory.num_shared_turns) == ("", 0)


def test_parent_that_ends_early_is_shared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resumed_episodes.NUM_TURNS", 3)
    player = Player(monkeypatch)
    played = player.play(requests_of_group())
    assert [len(played[name].steps) for name in ("0000", "0002", "0004")] == [3, 3, 3]
    assert (played["0004"].num_shared_turns, played["0004"].num_sampled_tokens) == (3, 0)
    assert ids(played["0004"]) == ids(played["0000"])


def test_resumed_run_plays_a_root_again_with_all_its_forks() -> None:
    stream, sent = TrajectoryStream.__new__(TrajectoryStream), []
    stream._groups, stream._send = {}, sent.extend  # type: ignore[method-assign]
    requests = requests_of_group()
    finished = [Trajectory(rollout_id=each.rollout_id) for each in requests if each is not requests[4]]
    stream.request(requests, finished)
    assert [request.rollout_id[-1] for request in sent] == ["0", "2", "4"]
    there = [name[-1] for name, one in stream._groups["00000003"].items() if one is not None]
    assert there == ["1", "3", "5"]


# -- choice of turns -------------------------------------------------------------------------------------


def steps(*surprises: float) -> list[Step]:
    answers = [
        Completion(completion_ids=(2, 3), logprobs=(-each, -each), text="", finish_reason="stop")
        for each in surprises
    ]
    return [Step(completion=each) for each in answers]


def test_turns_are_chosen_in_rounds() -> None:
    assert ForkPoints(num_forks=5, at="every 2").turns(steps(1.0), 6) == (2, 4, 2, 4, 2)
    assert ForkPoints(num_forks=3, at="every 1").turns([], 3) == (1, 2, 1)
    played = steps(9.0, 0.5, 2.0, 1.0)
    assert ForkPoints(num_forks=4, at="entropy").turns(played, 6) == (2, 3, 1, 2)
    assert ForkPoints(num_forks=2, at="entropy").turns(played[:1], 6) == (1, 1)


def test_function_of_the_users_chooses_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("def last(steps, num_forks, max_steps):", "    return [len(steps) - 1] * num_forks")
    (tmp_path / "own_forks.py").write_text("\n".join((*lines, "def wrong(*_):", "    return [0.5]", "")))
    monkeypatch.syspath_prepend(tmp_path)
    assert ForkPoints(num_forks=2, at="own_forks:last").turns(steps(1.0, 1.0), 6) == (1, 1)
    with pytest.raises(ConfigError, match=r"rollout.forks.at='own_forks:wrong' has returned \(0.5,\)"):
        ForkPoints(num_forks=1, at="own_forks:wrong").turns(steps(1.0), 6)
    with pytest.raises(ConfigError, match="own_forks has no function 'none'"):
        ForkPoints(num_forks=1, at="own_forks:none").turns(steps(1.0), 6)


@pytest.mark.parametrize("at", ["every 0", "every", "entropies", "2"])
def test_unknown_choice_of_turns_names_those_there_are(at: str) -> None:
    with pytest.raises(ConfigError, match='use "every 2", entropy, or a function'):
        ForkPoints(num_forks=1, at=at).turns([], 4)


def test_error_of_the_users_function_fails_the_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    player = Player(monkeypatch)
    root, *_ = requests_of_group("nowhere:to_be_found")
    player.dispatcher.submit(root)
    _, result = player.play_next()
    assert result.trajectory.termination_reason is TerminationReason.ENV_ERROR and result.beginnings == ()
    assert "rollout.forks.at='nowhere:to_be_found'" in str(result.trajectory.error)
