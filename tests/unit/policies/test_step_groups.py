"""GiGPO's step groups against the paper's formulas (Feng et al. 2025, arXiv 2505.10978, section 4)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_trajectories import written

from environments.data.trajectory_json import trajectory_from_json
from environments.errors import ConfigError
from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from policies.learning.algorithm import Algorithm
from policies.learning.algorithms import resolve
from policies.learning.credit import assign_credit
from policies.learning.registry import ESTIMATORS, Estimator
from policies.learning.samples import has_signal, training_samples
from policies.learning.settings import AlgorithmConfig

EPSILON = 1e-6  # verl's, beside a standard deviation
HISTORY = 5


@dataclass(frozen=True)
class Turn:
    """The state that it began in, the tokens that it sampled, and its reward."""

    state: object
    reward: float = 0.0
    count: int = 1


def gigpo(name: str = "gigpo", *, omega: float = 1.0, std: bool = True, gamma: float = 0.5) -> Algorithm:
    options = {"omega": omega, "normalize_by_std": std}
    return resolve(AlgorithmConfig(name=name, gamma=gamma, options=options), 99)


def member(name: str, turns: Sequence[Turn], rewrites: bool = False) -> Trajectory:
    steps, history = [], (HISTORY,)
    for number, turn in enumerate(turns):
        ids = tuple(range(10, 10 + turn.count))
        completion = Completion(
            prompt_ids=history, completion_ids=ids, logprobs=(-1.0,) * turn.count, text="", finish_reason=""
        )
        steps.append(Step(completion=completion, reward=turn.reward, observation=turn.state))
        history = (HISTORY, 6 + number) if rewrites else (*history, *ids)
    return Trajectory(rollout_id=name, steps=steps, reward=sum(turn.reward for turn in turns))


def group(*members: Sequence[Turn], name: str = "g") -> TrajectoryGroup:
    """Every second member rewrites its history, so that it has a sample for every turn."""
    made = [member(f"{name}/{n:04d}", turns, rewrites=n % 2 == 1) for n, turns in enumerate(members)]
    return TrajectoryGroup(group_id=name, task={}, trajectories=tuple(made))


def credit(algorithm: Algorithm, *groups: TrajectoryGroup) -> dict[str, list[float]]:
    """The advantage of each turn that is trained, by its trajectory."""
    samples = {each.rollout_id: training_samples(each) for one in groups for each in one.trajectories}
    found: dict[str, list[float]] = {}
    for rollout_id, credited in assign_credit(groups, samples, algorithm, 0.0)[0].items():
        by_turn: dict[int, set[float]] = {}
        for sample in credited:
            for turn, bit, advantage in zip(sample.turns, sample.loss_mask, sample.advantages, strict=True):
                if bit:
                    by_turn.setdefault(turn, set()).add(advantage)
        assert all(len(values) == 1 for values in by_turn.values()), "tokens of a turn share its advantage"
        found[rollout_id] = [values.pop() for _, values in sorted(by_turn.items())]
    return found


def assert_equal(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-4, err_msg=name)


# -- the formulas --------------------------------------------------------------------------------------


def relative(value: float, others: Sequence[float], std: bool) -> float:
    """Eq. 3 and eq. 7: the distance from the mean, by the deviation or as it is."""
    if len(others) < 2:
        return 0.0
    return (value - np.mean(others)) / (np.std(others, ddof=1) + EPSILON if std else 1.0)


def formula(group: TrajectoryGroup, omega: float, gamma: float, std: bool) -> dict[str, list[float]]:
    """Eq. 8, by the letter: A(a_t) = A^E(trajectory) + omega * A^S(a_t), with the returns of eq. 5."""
    visits = [
        (each.rollout_id, step.observation, sum(gamma**k * s.reward for k, s in enumerate(each.steps[t:])))
        for each in group.trajectories
        for t, step in enumerate(each.steps)
    ]
    totals = [each.reward for each in group.trajectories]
    result: dict[str, list[float]] = {each.rollout_id: [] for each in group.trajectories}
    for rollout_id, state, value in visits:
        own = next(each.reward for each in group.trajectories if each.rollout_id == rollout_id)
        others = [other for _, reached, other in visits if reached == state]
        step_part = relative(value, others, std) if len(totals) > 1 else 0.0
        result[rollout_id].append(relative(own, totals, std) + omega * step_part)
    return result


def test_drawn_example_has_the_papers_advantages() -> None:
    """From A over B to the reward, and over C; the second member comes to B too, a turn later."""
    pair = group([Turn("A"), Turn("B", 1.0, count=3)], [Turn("A"), Turn("C", count=2), Turn("B")])
    # Totals 1 and 0. Returns with gamma 0.5: A 0.5 and 0, B 1 and 0, C 0 alone.
    expected = {"g/0000": [0.5 + 2 * 0.25, 0.5 + 2 * 0.5], "g/0001": [-0.5 - 2 * 0.25, -0.5, -0.5 - 2 * 0.5]}
    assert_equal(credit(gigpo(omega=2.0, std=False), pair), expected)
    root = np.sqrt(
        0.5
    )  # of any two values, each is half their distance away, and the deviation distance / sqrt(2)
    both = {"g/0000": [3 * root, 3 * root], "g/0001": [-3 * root, -root, -3 * root]}
    assert_equal(credit(gigpo(omega=2.0), pair), both)


turns = st.builds(
    Turn,
    state=st.sampled_from(["A", "B", 3, {"row": 1, "column": 2}, ["B"]]),
    reward=st.sampled_from([0.0, 0.25, 1.0, -0.5]),
    count=st.integers(1, 3),
)
members = st.lists(turns, min_size=1, max_size=5)


@pytest.mark.slow
@given(
    st.lists(members, min_size=1, max_size=5),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.booleans(),
)
def test_any_group_has_the_papers_advantages(
    played: list[list[Turn]], omega: float, gamma: float, std: bool
) -> None:
    one = group(*played)
    assert_equal(credit(gigpo(omega=omega, gamma=gamma, std=std), one), formula(one, omega, gamma, std))


@pytest.mark.slow
@given(st.lists(members, min_size=2, max_size=4), st.randoms())
def test_order_of_the_members_changes_no_advantage(played: list[list[Turn]], random: object) -> None:
    one = group(*played)
    shuffled = list(one.trajectories)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    other = replace(one, trajectories=tuple(shuffled))
    assert_equal(credit(gigpo(), other), credit(gigpo(), one))


@pytest.mark.slow
@given(st.lists(members, min_size=1, max_size=4))
def test_states_that_all_differ_leave_grpo(played: list[list[Turn]]) -> None:
    apart = group(
        *[[replace(turn, state=(n, t)) for t, turn in enumerate(ts)] for n, ts in enumerate(played)]
    )
    grpo = resolve(AlgorithmConfig(name="grpo"), 99)
    assert_equal(credit(gigpo(), apart), credit(grpo, apart))
    assert_equal(credit(gigpo(omega=0.0), group(*played)), credit(grpo, group(*played)))


def test_group_of_one_has_no_advantage() -> None:
    """Also where it comes back to a state: there is no other member to compare with."""
    alone = group([Turn("A"), Turn("A"), Turn("B", 1.0)])
    assert credit(gigpo(), alone)["g/0000"] == [0.0, 0.0, 0.0]
    assert not has_signal(alone, gigpo())


def test_equal_states_of_two_groups_are_not_compared() -> None:
    one = group([Turn("A", 1.0)], [Turn("B")], name="1")
    other = group([Turn("A", 5.0)], [Turn("C")], name="2")
    grpo = resolve(AlgorithmConfig(name="grpo"), 99)
    assert_equal(credit(gigpo(), one, other), credit(grpo, one, other))


def test_turns_of_failed_members_count_and_of_spoilt_ones_do_not() -> None:
    whole = group([Turn("A", 1.0)], [Turn("A"), Turn("B")], [Turn("A"), Turn("B", 2.0)])
    failed = whole.trajectories[1]
    expected = formula(whole, 1.0, 0.5, std=True)
    failed.termination_reason = TerminationReason.AGENT_ERROR
    assert_equal(credit(gigpo(), whole), {name: expected[name] for name in ("g/0000", "g/0002")})
    failed.termination_reason = TerminationReason.CRASHED
    rest = replace(whole, trajectories=(whole.trajectories[0], whole.trajectories[2]))
    assert_equal(credit(gigpo(), whole), formula(rest, 1.0, 0.5, std=True))


# -- the state -----------------------------------------------------------------------------------------


def test_name_of_the_state_goes_before_the_observation() -> None:
    pair = group([Turn("walls", 1.0)], [Turn("walls")])
    grpo = credit(resolve(AlgorithmConfig(name="grpo"), 99), pair)
    assert credit(gigpo(), pair) != grpo
    for number, each in enumerate(pair.trajectories):
        each.steps[0].info["state_key"] = number
    assert_equal(credit(gigpo(), pair), grpo)


def test_turns_without_an_observation_are_not_compared() -> None:
    pair = group([Turn(None, 1.0), Turn(None)], [Turn(None)])
    assert_equal(credit(gigpo(), pair), credit(resolve(AlgorithmConfig(name="grpo"), 99), pair))


def test_trajectories_that_were_stored_are_compared_as_before() -> None:
    pair = group(
        [Turn((0, 1), 1.0), Turn({"b": 1, "a": object})], [Turn((0, 1)), Turn({"b": 1, "a": object})]
    )
    lines = [json.dumps(written(each)) for each in pair.trajectories]
    read = replace(pair, trajectories=tuple(trajectory_from_json(json.loads(line)) for line in lines))
    assert_equal(credit(gigpo(), read), credit(gigpo(), pair))


def test_returns_from_an_equal_state_are_a_signal() -> None:
    late, early = [Turn("A"), Turn("B", 1.0)], [Turn("A", 1.0)]
    assert has_signal(group(late, early), gigpo()), "one is earlier by a turn, and gamma is below 1"
    assert not has_signal(group(late, early), gigpo(gamma=1.0))
    assert not has_signal(group(late, early), resolve(AlgorithmConfig(), 99))
    assert not has_signal(group(late, late), gigpo())


# -- forks ---------------------------------------------------------------------------------------------


def test_turn_that_members_share_is_one_visit_of_its_state() -> None:
    """0000 and 0002 share the turn A, which is worth the mean of what follows; 0001 begins with it too."""
    forked = group(
        [Turn("A"), Turn("B", 1.0)], [Turn("A"), Turn("B")], [Turn("A"), Turn("B", 3.0), Turn("C")]
    )
    forked.trajectories[2].forked_from, forked.trajectories[2].num_shared_turns = "0000", 1
    found = credit(gigpo(std=False), forked)
    # Returns: A 0.5 * (1 + 3) / 2 = 1 and 0; B 1, 0 and 3. A shared turn stands for 1.5 members, a fork's for
    # 0.75.
    mean = 4 / 3
    shared = 1.5 * (2.0 - 1.0) + 1.5 * (1.0 - 0.5)
    assert_equal(
        found,
        {
            "g/0000": [shared, 0.75 * (1 - 2) + 0.75 * (1 - mean)],
            "g/0001": [1.5 * (0 - 1) + 1.5 * (0 - 0.5), 1.5 * (0 - 1) + 1.5 * (0 - mean)],
            "g/0002": [0.75 * (3 - 2) + 0.75 * (3 - mean), 0.75 * (3 - 2)],
        },
    )


@pytest.mark.slow
@given(st.lists(members, min_size=3, max_size=3), st.booleans())
def test_fork_that_shares_no_turn_is_another_root(played: list[list[Turn]], std: bool) -> None:
    """A tree without a common stem: the path through the tree gives what the flat one does."""
    flat, forked = group(*played), group(*played)
    forked.trajectories[2].forked_from, forked.trajectories[2].num_shared_turns = "0009", 1
    assert_equal(credit(gigpo(std=std), forked), credit(gigpo(std=std), flat))


# -- what makes no sense -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "gigpo", "credit": "per_step"},
            r"credit='per_step' has no effect .* trajectories and turns as it is",
        ),
        ({"name": "gigpo", "options": {"omega": -1.0}}, r"omega=-1\.0 has to be at least 0"),
        ({"name": "grpo", "options": {"omega": 1.0}}, r"omega.*is not one of normalize_by_std"),
        ({"name": "custom", "advantage": "gigpo", "loss": "geo_mean"}, r"advantage=gigpo with .*geo_mean"),
    ],
)
def test_setting_that_makes_no_sense_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(AlgorithmConfig(**settings), 99)


# -- MT-GRPO -------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(st.lists(st.tuples(*[st.sampled_from([0.0, 0.25, 1.0])] * 2), min_size=2, max_size=5))
def test_first_turn_has_its_own_reward_beside_the_outcome(rewards: list[tuple[float, float]]) -> None:
    """Zeng et al. 2025 (arXiv 2505.11821): the outcome's advantage, and the turn's own where it is earned.

    All outcomes come in a turn of their own here, and the sum of both is what the trajectory's part compares.
    """
    one = group(*[[Turn("A", early), Turn("B", late)] for early, late in rewards])
    columns = [[sum(each) for each in rewards], *zip(*rewards, strict=True)]
    total, early, late = ([relative(value, column, True) for value in column] for column in columns)
    expected = {
        f"g/{number:04d}": [total[number] + 0.5 * early[number], total[number] + 0.5 * late[number]]
        for number in range(len(rewards))
    }
    assert_equal(credit(gigpo("mt_grpo", omega=0.5, gamma=0.0), one), expected)


def test_turn_that_no_other_member_reached_has_no_own_part() -> None:
    one = group([Turn("A"), Turn("A", 1.0)], [Turn("A")])
    found = credit(gigpo("mt_grpo", gamma=0.0, std=False), one)
    assert_equal(found, {"g/0000": [0.5, 0.5], "g/0001": [-0.5]})


def test_own_estimator_compares_turns_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's function gets the rows of trajectories and of turns, and each is added with its weight."""

    def ranks(token_level_rewards, response_mask, index):  # type: ignore[no-untyped-def]
        totals = token_level_rewards.sum(-1)
        best = [
            all(totals[n] >= totals[m] for m in range(len(index)) if index[m] == each)
            for n, each in enumerate(index)
        ]
        advantages = response_mask * response_mask.new_tensor(best).unsqueeze(-1)
        return advantages, advantages

    own = Estimator(compares=True, turns_by="state", discounts=True, function=ranks)
    monkeypatch.setitem(ESTIMATORS, "ranks", own)
    algorithm = resolve(AlgorithmConfig(name="custom", advantage="ranks", loss="vanilla"), 99)
    found = credit(algorithm, group([Turn("A"), Turn("B", 1.0)], [Turn("A"), Turn("C")]))
    assert_equal(found, {"g/0000": [2.0, 1.0], "g/0001": [0.0, 0.0]})
    with pytest.raises(ConfigError, match="turns_by of an estimator='states' is not one of state, turn"):
        Estimator(turns_by="states")


def test_own_estimator_may_return_arrays_of_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    def rewards(token_level_rewards, response_mask):  # type: ignore[no-untyped-def]
        return 3 * token_level_rewards.numpy(), response_mask.numpy()

    monkeypatch.setitem(ESTIMATORS, "rewards", Estimator(compares=False, function=rewards))
    algorithm = resolve(AlgorithmConfig(name="custom", advantage="rewards", loss="vanilla"), 99)
    assert_equal(credit(algorithm, group([Turn("A"), Turn("B", 1.0)])), {"g/0000": [0.0, 3.0]})


def test_papers_values_are_the_usual_ones() -> None:
    usual = resolve(AlgorithmConfig(name="gigpo"), 99)
    assert (usual.gamma, usual.options) == (0.95, {"omega": 1.0, "normalize_by_std": True})
    assert resolve(AlgorithmConfig(name="mt_grpo"), 99).gamma == 0.0
    assert resolve(AlgorithmConfig(name="grpo"), 99).gamma == 1.0
