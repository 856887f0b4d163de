"""Credit where members of a group share turns: on trees drawn by hand, and over all outcomes of a world."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from forked_world import (
    Path,
    Policy,
    Shape,
    World,
    combined,
    distance,
    exact_gradient,
    gradients,
    length,
    num_sampled,
    outcomes,
    trajectory,
)

from environments.errors import LearnerError
from environments.types import TerminationReason, TrajectoryGroup
from policies.learning.algorithms import resolve
from policies.learning.credit import assign_credit
from policies.learning.samples import TrainingSample, training_samples
from policies.learning.settings import AlgorithmConfig

RLOO = resolve(AlgorithmConfig(name="rloo"), 12)
ANY_LENGTH = World(num_actions=9, max_steps=9, is_over=lambda path: False, reward=lambda path: 0.0)
Member = tuple[Path, float, str, int]
"""Actions, reward, the member that it forks from, and the turns that it shares with that one."""


def group(*members: Member) -> TrajectoryGroup:
    made = []
    for index, (path, reward, parent, shared) in enumerate(members):
        one = trajectory(Policy(ANY_LENGTH), path, f"g/{index:04d}")
        one.steps[-1].reward = one.reward = reward
        one.forked_from, one.num_shared_turns = parent, shared
        made.append(one)
    return TrajectoryGroup(group_id="g", task={}, trajectories=tuple(made))


def credited(
    group: TrajectoryGroup, left_out: Sequence[int] = (), name: str = "rloo"
) -> dict[str, TrainingSample]:
    """The sample of each member that is trained on."""
    samples = {
        each.rollout_id: training_samples(each)
        for index, each in enumerate(group.trajectories)
        if index not in left_out
    }
    result, _ = assign_credit([group], samples, resolve(AlgorithmConfig(name=name), 12), 0.0)
    return {rollout_id[2:]: sample for rollout_id, (sample,) in result.items()}


DRAWN = [
    ((1, 2, 3, 4, 5), 1.0, "", 0),
    ((6, 7), 0.0, "", 0),
    ((1, 2, 8), 0.5, "0000", 2),
    ((1, 2, 3, 4, 0), 3.0, "0000", 4),
]


def test_shared_turns_are_worth_the_mean_of_what_follows() -> None:
    rows = credited(group(*DRAWN))
    # Turns 2 and 3 of 0000 are worth the mean of 1 and 3; with the 0.5 of 0002, turns 0 and 1 are worth 1.25.
    first, middle = 2 * (1.25 - 0.0), 1 * (2.0 - 0.5)
    np.testing.assert_allclose(rows["0000"].advantages, [first] * 2 + [middle] * 2 + [0.5 * (1.0 - 3.0)])
    np.testing.assert_allclose(rows["0001"].advantages, [-first] * 2)
    np.testing.assert_allclose(rows["0002"].advantages, [0.0, 0.0, -middle])
    np.testing.assert_allclose(rows["0003"].advantages, [0.0] * 4 + [0.5 * (3.0 - 1.0)])


def test_shared_token_is_trained_in_one_member() -> None:
    masks = {name: row.loss_mask for name, row in credited(group(*DRAWN)).items()}
    assert masks == {"0000": (1,) * 5, "0001": (1, 1), "0002": (0, 0, 1), "0003": (0, 0, 0, 0, 1)}
    assert sum(map(sum, masks.values())) == num_sampled([group(*DRAWN)]) == 9


def test_next_member_trains_what_one_that_is_left_out_shares() -> None:
    rows = credited(group(*DRAWN), left_out=[0])
    assert rows["0002"].loss_mask == (1, 1, 1) and rows["0003"].loss_mask == (0, 0, 1, 1, 1)
    np.testing.assert_allclose(rows["0002"].advantages, [2.5, 2.5, -1.5])
    np.testing.assert_allclose(rows["0003"].advantages, [0.0, 0.0, 1.5, 1.5, 1.0])


def test_fork_of_a_fork_is_compared_where_it_forks() -> None:
    members = [
        ((1, 1, 1), 1.0, "", 0),
        ((2, 2, 2), 0.0, "", 0),
        ((1, 3, 3), 2.0, "0000", 1),
        ((1, 3, 4), 6.0, "0002", 2),
    ]
    rows = credited(group(*members))
    np.testing.assert_allclose(rows["0000"].advantages, [2 * 2.5, 1.0 - 4.0, 1.0 - 4.0])
    np.testing.assert_allclose(rows["0002"].advantages, [0.0, 4.0 - 1.0, 0.5 * (2.0 - 6.0)])
    np.testing.assert_allclose(rows["0003"].advantages, [0.0, 0.0, 0.5 * (6.0 - 2.0)])


def test_fork_after_the_end_trains_nothing_and_moves_nothing() -> None:
    roots = [((1, 2), 1.0, "", 0), ((3, 4), 0.0, "", 0)]
    rows = credited(group(*roots, ((1, 2), 1.0, "0000", 2), ((3, 5), 0.0, "0001", 1)))
    assert not any(rows["0002"].loss_mask)
    np.testing.assert_allclose(rows["0000"].advantages, [2.0, 2.0])


def test_equal_tokens_of_two_roots_are_not_shared() -> None:
    rows = credited(group(((1, 2), 1.0, "", 0), ((1, 2), 0.0, "", 0), ((1, 3), 0.0, "0000", 1)))
    assert rows["0001"].loss_mask == (1, 1)
    np.testing.assert_allclose(rows["0001"].advantages, [1.5 * -0.5] * 2)


def test_spoilt_parent_leaves_its_forks_comparable() -> None:
    forked = group(*DRAWN[:3], ((1, 2, 0), 1.5, "0000", 2))
    forked.trajectories[0].termination_reason = TerminationReason.CRASHED
    rows = credited(forked)
    assert rows.keys() == {"0001", "0002", "0003"}
    np.testing.assert_allclose(rows["0002"].advantages, [1.5, 1.5, 0.75 * -1.0])
    np.testing.assert_allclose(rows["0003"].advantages, [0.0, 0.0, 0.75 * 1.0])


@pytest.mark.parametrize(
    "settings", [{"name": "reinforce_plus_plus"}, {"name": "rloo", "credit": "per_step"}]
)
def test_algorithm_that_does_not_compare_returns_rejects_forks(settings: dict[str, str]) -> None:
    forked = group(*DRAWN)
    samples = {each.rollout_id: training_samples(each) for each in forked.trajectories}
    with pytest.raises(LearnerError, match="has forks, and algorithm"):
        assign_credit([forked], samples, resolve(AlgorithmConfig(**settings), 12), 0.0)


# -- all outcomes of a small world -----------------------------------------------------------------------

WORLD = World(
    num_actions=2,
    max_steps=3,
    is_over=lambda path: path == (1,) or path == (0, 1),
    reward=lambda path: {(1,): 0.7, (0, 1): -0.4, (0, 0, 0): 2.0, (0, 0, 1): 0.3}[path],
)
POLICY = Policy(WORLD, {(): np.array([0.4, -0.3]), (0,): np.array([-0.2, 0.5]), (0, 0): np.array([0.9, 0.0])})


def mean_gradient(shape: Shape, name: str = "rloo", **settings: object):
    """The mean of a group's gradient over all outcomes, each with its probability."""
    algorithm = resolve(AlgorithmConfig(name=name, **settings), 12)
    every = list(outcomes(partial(shape.group, POLICY)))
    np.testing.assert_allclose(sum(probability for probability, _ in every), 1.0)
    groups = [
        TrajectoryGroup(
            group_id=str(index),
            task={},
            trajectories=tuple(
                trajectory_as(each, f"{index}/{each.rollout_id[2:]}") for each in group.trajectories
            ),
        )
        for index, (_, group) in enumerate(every)
    ]
    found = gradients(POLICY, groups, algorithm)
    return combined([(probability, found[str(index)]) for index, (probability, _) in enumerate(every)])


def trajectory_as(one, name: str):
    one.rollout_id = name
    return one


SHAPES = [
    *(Shape(2, 2), Shape(4, 2), Shape(4, 2, "every 2"), Shape(6, 2), Shape(5, 2), Shape(4, 3)),
    Shape(4, 2, "forked_world:after_zero"),
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_mean_of_the_forked_gradient_is_the_exact_one(shape: Shape) -> None:
    exact = exact_gradient(POLICY)
    assert distance(mean_gradient(shape), exact) < 1e-6 * length(exact)


def test_mean_with_the_unit_itself_is_exact_only_for_equal_forks() -> None:
    exact = exact_gradient(POLICY)
    mean = mean_gradient(Shape(4, 2), "dr_grpo")
    assert distance(mean, combined([(0.5, exact)])) < 1e-6
    mean = mean_gradient(Shape(6, 2, "every 2"), "dr_grpo")
    scale = sum(float(mean[each] @ exact[each]) for each in exact) / length(exact) ** 2
    assert distance(mean, combined([(scale, exact)])) > 1e-3 * length(exact)


def test_turn_that_is_chosen_by_what_follows_biases_the_gradient() -> None:
    exact = exact_gradient(POLICY)
    assert distance(mean_gradient(Shape(4, 2, "entropy")), exact) > 1e-2 * length(exact)
