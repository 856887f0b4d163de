"""One policy in several seats: each seat's history, samples, rewards and advantages are its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from played_trajectories import written

from actors.rollouts.journal import Journal
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, run_rollout
from environments.base import TaskEnvironment
from environments.data.trajectory_json import trajectory_from_json
from environments.errors import AgentError, LearnerError
from environments.types import Completion, Trajectory, TrajectoryGroup
from policies import GameAgent, SeatsAgent
from policies.learning.algorithms import resolve
from policies.learning.credit import assign_credit
from policies.learning.samples import has_signal, samples_by_policy, training_samples
from policies.learning.settings import AlgorithmConfig
from policies.sampler import SampleRequest, SamplingParams

RLOO = AlgorithmConfig(name="rloo")
PER_STEP = AlgorithmConfig(name="rloo", credit="per_step", gamma=0.5)

Plan = Sequence[tuple[str, dict[str, float]]]
"""Moves of a game: the seat that moves, and what its move earns."""


class PlannedGame(TaskEnvironment):
    """Gives the seats their turns and their rewards as the task has planned."""

    resumes_by = "replay"

    def __init__(self, task: dict[str, Any]) -> None:
        self.plan: Plan = task["plan"]
        self.num_moves = 0

    def reset(self) -> tuple[dict[str, str], dict[str, Any]]:
        self.num_moves = 0
        return self._observation(""), {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        _, earned = self.plan[self.num_moves]
        self.num_moves += 1
        done = self.num_moves == len(self.plan)
        return "Over." if done else self._observation(action), 0.0, done, {"seat_rewards": earned}

    def _observation(self, action: str) -> dict[str, str]:
        seat = self.plan[self.num_moves][0]
        return {"seat": seat, "question": f"{seat} after {self.num_moves} moves, {action}."}


def sample(request: SampleRequest) -> Completion:
    """Two tokens that name the turn, behind a prompt of a token for each character."""
    said = str(request.params.seed)
    prompt = "".join(
        f"{each['content']}" if each["role"] == "user" else chr(1000) + str(each["content"])
        for each in request.messages
    )
    return Completion(
        prompt_ids=tuple(map(ord, prompt)),
        completion_ids=(1000, *map(ord, said)),
        logprobs=(-1.0,) * (1 + len(said)),
        text=said,
        finish_reason="stop",
        policy=request.params.policy,
    )


def play(plan: Plan, member: int = 0, agent: SeatsAgent | None = None, **journal: Any) -> Trajectory:
    task = {"plan": plan}
    request = RolloutRequest(rollout_id=f"0/{member}", group_id="0", task=task, seed=0)
    journal_ = Journal(**journal)
    return run_rollout(
        agent or SeatsAgent(), PlannedGame(task), sample, request, RolloutLimits(max_steps=9), journal_
    )


def group(*plans: Plan) -> TrajectoryGroup:
    members = tuple(play(plan, member) for member, plan in enumerate(plans))
    return TrajectoryGroup(group_id="0", task={}, trajectories=members)


def advantages(played: TrajectoryGroup, config: AlgorithmConfig = RLOO) -> dict[str, dict[int, float]]:
    """The advantage of each turn's tokens, by the rollout."""
    samples = {each.rollout_id: training_samples(each) for each in played.trajectories}
    credited, _ = assign_credit([played], samples, resolve(config, 64), 0.0)
    found: dict[str, dict[int, float]] = {}
    for name, rows in credited.items():
        by_turn = found.setdefault(name, {})
        for row in rows:
            for turn, advantage in zip(row.turns, row.advantages, strict=True):
                if turn >= 0:
                    assert by_turn.setdefault(turn, advantage) == advantage, "tokens of a turn have one"
    return found


WON_BY_A: Plan = [("a", {}), ("b", {}), ("a", {}), ("b", {"a": 1.0, "b": -1.0})]
WON_BY_B: Plan = [("a", {}), ("b", {}), ("a", {}), ("b", {"a": -1.0, "b": 1.0})]


def test_each_seat_sees_only_its_own_history() -> None:
    steps = play(WON_BY_A).steps
    assert [step.seat for step in steps] == ["a", "b", "a", "b"]
    assert [message["content"] for message in steps[2].chat_completions] == [
        *("a after 0 moves, .", "0", "a after 2 moves, 1.", "2"),
    ]
    assert [message["content"] for message in steps[3].chat_completions] == [
        *("b after 1 moves, 0.", "1", "b after 3 moves, 2.", "3"),
    ]


def test_each_seat_has_samples_and_rewards_of_its_own() -> None:
    played = play(WON_BY_A)
    assert (played.reward, played.seat_rewards) == (0.0, {"a": 1.0, "b": -1.0})
    assert [step.reward for step in played.steps] == [0.0, 0.0, 1.0, -1.0]
    of_a, of_b = training_samples(played)
    assert [sorted(set(each.turns)) for each in (of_a, of_b)] == [[-1, 0, 2], [-1, 1, 3]]
    assert [each.rewards[-1] for each in (of_a, of_b)] == [1.0, -1.0]
    for each in (of_a, of_b):
        assert [bool(bit) for bit in each.loss_mask] == [turn >= 0 for turn in each.turns]
        assert each.num_sampled_tokens == 4


def test_seats_that_are_numbers_have_their_rewards() -> None:
    numbered: Any = [(0, {}), (1, {"0": 1.0, 1: -1.0})]
    assert play(numbered).seat_rewards == {"0": 1.0, "1": -1.0}


def test_turns_of_two_seats_are_never_one_sample() -> None:
    class Shared(SeatsAgent):
        """Shows both seats the same conversation."""

        @property
        def chat_completions(self) -> list[dict[str, Any]]:
            turns = [step.model_response for step in self.trajectory.steps]
            return [{"role": "user", "content": "Go."}] + [
                {"role": "assistant", "content": turn} for turn in turns
            ]

    played = play(WON_BY_A, agent=Shared())
    assert [sorted(set(each.turns)) for each in training_samples(played)] == [[-1, 0, 2], [-1, 1, 3]]


def test_seat_is_compared_with_the_same_seat_of_others() -> None:
    found = advantages(group(WON_BY_A, WON_BY_B, WON_BY_B))
    assert found["0/0"] == {0: 2.0, 2: 2.0, 1: -2.0, 3: -2.0}
    assert found["0/1"] == found["0/2"] == {0: -1.0, 2: -1.0, 1: 1.0, 3: 1.0}


def test_seat_of_another_policy_counts_nowhere() -> None:
    tied = [[("a", {}), ("b", {"a": reward, "b": 0.0})] for reward in (1.0, -1.0)]
    played = group(*tied)
    own = {each.rollout_id: training_samples(each)[:1] for each in played.trajectories}
    credited, _ = assign_credit([played], own, resolve(AlgorithmConfig(name="gpg"), 64), 0.0)
    # Were the two rewards of b, which are alike, in the size of the batch, these would be twice as large.
    assert [set(rows[0].advantages) - {0.0} for rows in credited.values()] == [{1.0}, {-1.0}]


def test_credit_by_turn_discounts_within_the_seat() -> None:
    found = advantages(group(WON_BY_A, WON_BY_B), PER_STEP)
    assert found["0/0"] == {0: 1.0, 2: 2.0, 1: -1.0, 3: -2.0}


def test_seat_that_moves_elsewhere_only_is_not_compared() -> None:
    short: Plan = [("a", {"a": -1.0, "b": 1.0})]
    played = group(WON_BY_A, short)
    assert played.trajectories[1].seat_rewards == {"a": -1.0}, "what b has won without a move is nobody's"
    found = advantages(played)
    assert found == {"0/0": {0: 2.0, 2: 2.0, 1: 0.0, 3: 0.0}, "0/1": {0: -2.0}}


def test_signal_is_a_difference_within_a_seat() -> None:
    algorithm = resolve(RLOO, 64)
    both_lose: Plan = [("a", {"a": -1.0}), ("b", {"b": -1.0})]
    assert has_signal(group(WON_BY_A, WON_BY_B), algorithm), "though the sum of both is 0 in each"
    assert not has_signal(group(WON_BY_A, WON_BY_A), algorithm)
    assert not has_signal(group(both_lose, both_lose), algorithm)


def test_forks_are_compared_seat_by_seat() -> None:
    played = group(WON_BY_A, WON_BY_B, WON_BY_B)
    fork = played.trajectories[1]
    fork.forked_from, fork.num_shared_turns = "0", 2
    found = advantages(played)
    # Of two roots each stands for 1.5 members, and after the fork each branch for half of that.
    assert found["0/0"] == {0: 1.5, 2: 1.5, 1: -1.5, 3: -1.5}
    assert found["0/1"] == {2: -1.5, 3: 1.5}, "what it shares is trained in the other member"
    assert found["0/2"] == {0: -1.5, 2: -1.5, 1: 1.5, 3: 1.5}


def test_seat_whose_agent_fails_ends_the_rollout() -> None:
    class Failing(GameAgent):
        def update_from_model(self, response: str, **kwargs: Any) -> Any:
            if response == "3":
                raise ValueError("no move")
            return super().update_from_model(response, **kwargs)

    with pytest.raises(AgentError, match=r"SeatsAgent\.update_from_model: ValueError: no move"):
        play(WON_BY_A, agent=SeatsAgent(agent_class=Failing))


def test_turn_names_the_policy_of_its_seat() -> None:
    agent = SeatsAgent(policies={"a": "one", "b": "two"})
    assert (agent.policies, SeatsAgent().policies) == (("one", "two"), ("",))
    played = play(WON_BY_A, agent=agent)
    assert [step.completion and step.completion.policy for step in played.steps] == ["one", "two"] * 2
    for each in (played, trajectory_from_json(written(played))):
        turns = {name: {*rows[0].turns} - {-1} for name, rows in samples_by_policy(each).items()}
        assert turns == {"one": {0, 2}, "two": {1, 3}}
    assert list(samples_by_policy(play(WON_BY_A))) == [""]


def test_seats_without_policies_keep_that_of_the_request() -> None:
    task = {"plan": WON_BY_A}
    params = SamplingParams(policy="@31")  # a version on trial, for a served agent
    request = RolloutRequest(rollout_id="0/0", group_id="0", task=task, params=params)
    limits, journal = RolloutLimits(max_steps=9), Journal()
    played = run_rollout(SeatsAgent(), PlannedGame(task), sample, request, limits, journal)
    assert {each.policy for each in played.completions} == {"@31"}


def test_seat_of_two_policies_is_refused() -> None:
    class Changing(SeatsAgent):
        @property
        def sampling(self) -> dict[str, Any]:
            return {"policy": ["one", "two"][len(self.trajectory.steps) // 2]}

    with pytest.raises(LearnerError, match="has a seat that several of the policies one, two have played"):
        samples_by_policy(play(WON_BY_A, agent=Changing()))


def test_seat_without_a_policy_is_refused() -> None:
    with pytest.raises(AgentError, match=r"seat 'b' has no policy in policies=\{'a': 'one'\}"):
        play(WON_BY_A, agent=SeatsAgent(policies={"a": "one"}))


@pytest.mark.parametrize("name", ["rloo", "grpo", "reinforce_plus_plus", "gigpo"])
def test_credit_of_a_policy_is_that_of_its_seat_alone(name: str) -> None:
    """As if the other seat's rewards were others."""

    def credited(plans: Sequence[Plan]) -> list[tuple[str, tuple[float, ...]]]:
        policies = {"a": "one", "b": "two"}
        members = (play(plan, member, SeatsAgent(policies=policies)) for member, plan in enumerate(plans))
        played = TrajectoryGroup(group_id="0", task={}, trajectories=tuple(members))
        own = {each.rollout_id: samples_by_policy(each)["one"] for each in played.trajectories}
        found, _ = assign_credit([played], own, resolve(AlgorithmConfig(name=name), 64), 0.0)
        return [(row.sample_id, row.advantages) for rows in found.values() for row in rows]

    plans = [WON_BY_A, WON_BY_B, WON_BY_B]
    others: list[Plan] = [
        [*plan[:3], ("b", plan[3][1] | {"b": 7.0 * place})] for place, plan in enumerate(plans)
    ]
    rows = credited(plans)
    assert rows == credited(others)
    assert len(rows) == 3 and all(any(advantages) for _, advantages in rows)


def test_observation_without_a_seat_is_refused() -> None:
    agent = SeatsAgent()
    with pytest.raises(AgentError, match=r"'Begin\.' names none: return \{\"seat\""):
        agent.update_from_env("Begin.", 0.0, False, {})


def test_agent_of_one_seat_refuses_the_turn_of_a_seat() -> None:
    with pytest.raises(AgentError, match="SeatsAgent"):
        GameAgent().update_from_env({"seat": "a", "question": "Begin."}, 0.0, False, {})


def test_rewards_of_seats_may_be_any_mapping() -> None:
    agent = SeatsAgent()
    agent.update_from_env({"seat": "a", "question": "?"}, 0.0, False, {})
    agent.update_from_model("x")
    agent.update_from_env("", 0.0, True, {"seat_rewards": defaultdict(float, a=1.0)})
    assert agent.trajectory.steps[0].reward == 1.0


def test_mover_gets_what_step_returns_unless_it_is_named() -> None:
    agent = SeatsAgent()
    agent.update_from_env({"seat": "a", "question": "?"}, 0.0, False, {})
    agent.update_from_model("x")
    agent.update_from_env({"seat": "b", "question": "?"}, 0.5, False, {"seat_rewards": {"b": 7.0}})
    agent.update_from_model("y")
    agent.update_from_env("", 0.25, True, {"seat_rewards": {"a": 1.0}})
    assert [step.reward for step in agent.trajectory.steps] == [1.5, 0.25]


@pytest.mark.parametrize("given", [[1.0, -1.0], None, {"a": None}, {"a": float("nan")}, {"a": "1"}])
def test_reward_of_a_seat_that_is_no_number_is_named(given: Any) -> None:
    agent = SeatsAgent()
    agent.update_from_env({"seat": "a", "question": "?"}, 0.0, False, {})
    agent.update_from_model("x")
    with pytest.raises(AgentError, match=r"info\['seat_rewards'\]=.* gives no finite number to each seat"):
        agent.update_from_env("", 0.0, True, {"seat_rewards": given})


def test_resumed_game_ends_as_it_would_have() -> None:
    entries: list[bytes] = []
    whole = play(WON_BY_A, record=lambda _, entry: entries.append(entry))
    for num_finished in range(len(entries)):
        assert play(WON_BY_A, entries=entries[:num_finished]) == whole


def test_seats_come_back_from_a_file() -> None:
    played = play(WON_BY_A)
    read = trajectory_from_json(written(played))
    assert read.seat_rewards == played.seat_rewards
    pairs = zip(training_samples(read), training_samples(played), strict=True)
    assert all(one == other and np.array_equal(one.rewards, other.rewards) for one, other in pairs)


def test_seat_that_one_member_has_alone_is_no_signal() -> None:
    played = group([("a", {}), ("b", {}), ("b", {"b": 1.0})], [("a", {})])
    for step in played.trajectories[0].steps[1:]:
        step.observation = "equal"
    gigpo = AlgorithmConfig(name="gigpo")
    assert not any(each for turns in advantages(played, gigpo).values() for each in turns.values())
    assert not has_signal(played, resolve(gigpo, 64))
