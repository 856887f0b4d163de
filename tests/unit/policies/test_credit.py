"""Credit against the formulas that the tests cite, in plain numpy, on ragged multi-turn batches.

Where an algorithm is by default different from its paper, ``policies/learning/README.md`` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from environments.errors import LearnerError
from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from policies.learning.algorithm import Algorithm
from policies.learning.algorithms import resolve
from policies.learning.credit import assign_credit
from policies.learning.registry import ESTIMATORS, reverse_kl
from policies.learning.samples import TrainingSample, training_samples
from policies.learning.settings import AlgorithmConfig, KLConfig

EPSILON = 1e-6  # verl's, beside a standard deviation
MAX_RESPONSE_TOKENS = 12
COMPARING = [name for name, estimator in ESTIMATORS.items() if estimator.compares]

Turn = tuple[int, float]
"""How many tokens it sampled, and what they earned."""


def trajectory(rollout_id: str, turns: Sequence[Turn], rewrites: bool = False) -> Trajectory:
    """One that extends its history by a token of the environment, or forgets it, from turn to turn."""
    steps, history = [], (7, 8)
    for count, reward in turns:
        said = tuple(range(10, 10 + count))
        completion = Completion(
            prompt_ids=history, completion_ids=said, logprobs=(-1.0,) * count, text="", finish_reason="stop"
        )
        steps.append(Step(completion=completion, reward=reward))
        history = (7, 9) if rewrites else (*history, *said, 5)
    return Trajectory(rollout_id=rollout_id, steps=steps, reward=sum(reward for _, reward in turns))


def group(name: str, *members: Sequence[Turn], baseline: float | None = None) -> TrajectoryGroup:
    """Every second member rewrites its history, so that it has a sample for every turn."""
    return TrajectoryGroup(
        group_id=name,
        task={},
        trajectories=tuple(
            trajectory(f"{name}/{index}", turns, rewrites=index % 2 == 1)
            for index, turns in enumerate(members)
        ),
        baseline=None if baseline is None else trajectory(f"{name}/greedy", [(2, baseline)]),
    )


A = [[(3, 0.0), (2, 1.0)], [(1, 0.25), (4, 0.0), (1, 0.5)], [(2, 0.0)]]
B = [[(5, 1.0)], [(1, 0.0), (1, 0.25)]]
C = [[(1, 0.0)], [(2, 0.5), (3, 0.0)], [(4, 1.0), (1, -0.5)], [(1, 1.0)], [(2, 0.0), (2, 0.0), (2, 0.1)]]
ALIKE = [[(2, 0.5), (1, 0.5)], [(3, 1.0)], [(1, 1.0)]]
GROUPS = [
    group("a", *A, baseline=0.3),
    group("b", *B, baseline=1.0),
    group("c", *C, baseline=0.0),
    group("d", *ALIKE, baseline=1.0),
]


@dataclass
class Played:
    """A member as the formulas see it: one row of all that it sampled."""

    group: str
    turns: Sequence[Turn]
    old: np.ndarray
    reference: np.ndarray
    values: np.ndarray
    teacher: np.ndarray

    @property
    def reward(self) -> float:
        return sum(reward for _, reward in self.turns)

    @property
    def rewards(self) -> np.ndarray:
        return np.concatenate([[0.0] * (count - 1) + [reward] for count, reward in self.turns])


def played(groups: Sequence[TrajectoryGroup] = GROUPS) -> dict[str, Played]:
    """All members, with log-probabilities and values that depend on the member alone."""
    members = {}
    for each in groups:
        for member in each.trajectories:
            turns = [
                (len(step.completion.completion_ids), step.reward) for step in member.steps if step.completion
            ]
            rng = np.random.default_rng([ord(letter) for letter in member.rollout_id])
            columns = rng.normal(-1.0, 0.4, (4, sum(count for count, _ in turns)))
            members[member.rollout_id] = Played(each.group_id, turns, *columns)
    return members


def scored(groups: Sequence[TrajectoryGroup] = GROUPS) -> dict[str, list[TrainingSample]]:
    """The samples as the learner's ``score`` hands them back."""
    result = {}
    for each in groups:
        for member in each.trajectories:
            samples, start = [], 0
            scores = played([each])[member.rollout_id]
            for sample in training_samples(member):
                part = slice(start, start + sample.num_sampled_tokens)
                start = part.stop
                samples.append(
                    replace(
                        sample,
                        old_logprobs=sample.on_sampled_tokens(scores.old[part]),
                        reference_logprobs=sample.on_sampled_tokens(scores.reference[part]),
                        values=sample.on_sampled_tokens(scores.values[part]),
                        teacher_logprobs=sample.on_sampled_tokens(scores.teacher[part]),
                    )
                )
            if samples:
                result[member.rollout_id] = samples
    return result


def algorithm(name: str, **settings: object) -> Algorithm:
    return resolve(AlgorithmConfig(name=name, **settings), MAX_RESPONSE_TOKENS)


def rows(samples: dict[str, list[TrainingSample]], column: str = "advantages") -> dict[str, np.ndarray]:
    """A column on the sampled tokens of each trajectory; elsewhere it has to be 0."""
    result = {}
    for rollout_id, each in samples.items():
        values = np.concatenate([getattr(sample, column) for sample in each])
        mask = np.concatenate([sample.loss_mask for sample in each]) == 1
        assert not values[~mask].any()
        result[rollout_id] = values[mask]
    return result


def credit(algorithm: Algorithm, groups: Sequence[TrajectoryGroup] = GROUPS) -> dict[str, np.ndarray]:
    return rows(assign_credit(groups, scored(groups), algorithm, algorithm.kl_coef)[0])


def assert_equal(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-5, err_msg=name)


def by_group(score: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> dict[str, np.ndarray]:
    """Each member's one advantage on all of its tokens: ``score`` of the group's rewards and lengths."""
    members, result = played(), {}
    for name in dict.fromkeys(member.group for member in members.values()):
        ids = [key for key, member in members.items() if member.group == name]
        rewards = np.array([members[key].reward for key in ids])
        lengths = np.array([len(members[key].rewards) for key in ids])
        for key, value, length in zip(ids, score(rewards, lengths), lengths, strict=True):
            result[key] = np.full(length, value)
    return result


def whitened(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Normalized over all tokens of the batch, as REINFORCE++ (Hu et al. 2025) and PPO do."""
    everything = np.concatenate(list(found.values()))
    scale = 1 / np.sqrt(everything.var(ddof=1) + 1e-8)
    return {key: (values - everything.mean()) * scale for key, values in found.items()}


# -- one advantage per trajectory ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_grpo_is_the_distance_from_the_mean_in_deviations(name: str) -> None:
    """Shao et al. 2024 (DeepSeekMath), section 4.1.2; GSPO and CISPO differ from it in the loss."""
    expected = by_group(lambda rewards, _: (rewards - rewards.mean()) / (rewards.std(ddof=1) + EPSILON))
    assert_equal(credit(algorithm(name)), expected)


def test_dr_grpo_is_the_distance_from_the_mean() -> None:
    """Liu et al. 2025, section 3.2."""
    expected = by_group(lambda rewards, _: rewards - rewards.mean())
    assert_equal(credit(algorithm("dr_grpo")), expected)
    assert_equal(credit(algorithm("grpo", options={"normalize_by_std": False})), expected)


@pytest.mark.parametrize("estimator", ["rloo", "rloo_vectorized"])
def test_rloo_is_the_distance_from_the_mean_of_the_others(estimator: str) -> None:
    """Ahmadian et al. 2024, the leave-one-out estimator."""

    def score(rewards: np.ndarray, _: np.ndarray) -> np.ndarray:
        others = [np.mean(np.delete(rewards, index)) for index in range(len(rewards))]
        return rewards - np.array(others)

    assert_equal(credit(algorithm("custom", advantage=estimator, loss="vanilla")), by_group(score))
    assert_equal(credit(algorithm("rloo")), by_group(score))


def test_opo_weighs_the_baseline_with_the_lengths() -> None:
    """Hao et al. 2025 (OPO), the optimal baseline under the assumption that longer is noisier."""
    expected = by_group(lambda rewards, lengths: rewards - (lengths * rewards).sum() / lengths.sum())
    assert_equal(credit(algorithm("opo")), expected)


def test_gpg_makes_up_for_the_groups_without_a_signal() -> None:
    """Chu et al. 2025 (GPG), accurate gradient estimation: alpha = N / (N - M), M of them rewarded alike."""
    alpha = (len(A) + len(B) + len(C) + len(ALIKE)) / (len(A) + len(B) + len(C))
    expected = by_group(lambda rewards, _: alpha * (rewards - rewards.mean()))
    assert_equal(credit(algorithm("gpg")), expected)


def test_gpg_makes_up_for_nothing_where_groups_are_dropped() -> None:
    kept = {key: samples for key, samples in scored().items() if not key.startswith("d/")}
    found, _ = assign_credit(GROUPS, kept, algorithm("gpg"), 0.0)
    assert_equal(rows(found), credit(algorithm("dr_grpo"), GROUPS[:3]))


def test_passk_gives_the_best_its_lead() -> None:
    """Tang et al. 2025 (arXiv 2503.19595): the best of a group is compared with the second best."""

    def score(rewards: np.ndarray, _: np.ndarray) -> np.ndarray:
        lead = np.zeros(len(rewards))
        second, best = np.sort(rewards)[-2:]
        lead[rewards.argmax()] = (best - second) / (rewards.std(ddof=1) + EPSILON)
        return lead

    groups = by_group(score)
    found = credit(algorithm("custom", advantage="grpo_passk", loss="vanilla"))
    assert_equal(found, groups)


def test_reinforce_plus_plus_baseline_is_whitened_over_tokens() -> None:
    """Hu et al. 2025 (REINFORCE++ with baseline): the group's mean, then the batch's normalization."""
    expected = whitened(by_group(lambda rewards, _: rewards - rewards.mean()))
    assert_equal(credit(algorithm("reinforce_plus_plus_baseline")), expected)


def test_remax_is_the_distance_from_the_greedy_rollouts_reward() -> None:
    """Li et al. 2023 (ReMax)."""
    greedy = {"a": 0.3, "b": 1.0, "c": 0.0, "d": 1.0}
    expected = {
        key: np.full(len(member.rewards), member.reward - greedy[member.group])
        for key, member in played().items()
    }
    assert_equal(credit(algorithm("remax")), expected)


# -- rewards where they were earned --------------------------------------------------------------------


def test_reinforce_plus_plus_discounts_by_token_and_takes_kl_off() -> None:
    """Hu et al. 2025 (REINFORCE++): the return less the KL from each token on, normalized."""
    settings = algorithm("reinforce_plus_plus", gamma=0.9, kl=KLConfig(place="reward", coef=0.3))
    expected = {}
    for key, member in played().items():
        rewards = member.rewards - 0.3 * (member.old - member.reference)
        expected[key] = np.array(
            [sum(0.9**k * later for k, later in enumerate(rewards[t:])) for t in range(len(rewards))]
        )
    assert_equal(credit(settings), whitened(expected))


def test_ppo_has_generalized_advantages_over_the_trajectory() -> None:
    """Schulman et al. 2016 (GAE), eq. 16: a sum over temporal differences, across turns and samples."""
    gamma, lam = 0.95, 0.8
    raw, returns = {}, {}
    for key, member in played().items():
        following = np.append(member.values[1:], 0.0)
        errors = member.rewards + gamma * following - member.values
        raw[key] = np.array(
            [
                sum((gamma * lam) ** k * error for k, error in enumerate(errors[t:]))
                for t in range(len(errors))
            ]
        )
        returns[key] = raw[key] + member.values
    found, metrics = assign_credit(GROUPS, scored(), algorithm("ppo", gamma=gamma, options={"lam": lam}), 0.0)
    assert_equal(rows(found), whitened(raw))
    assert_equal(rows(found, "returns"), returns)
    unexplained, of_all = (np.concatenate(list(each.values())) for each in (raw, returns))
    assert metrics["learn/return_mean"] == pytest.approx(of_all.mean(), abs=1e-5)
    explained = 1 - unexplained.var() / of_all.var()
    assert metrics["learn/explained_variance"] == pytest.approx(explained, abs=1e-5)


def test_only_a_critic_gets_returns() -> None:
    found, _ = assign_credit(GROUPS, scored(), algorithm("grpo"), 0.0)
    assert {sample.returns for samples in found.values() for sample in samples} == {()}


def test_single_token_has_no_variance_to_be_divided_by() -> None:
    groups = [group("a", [(1, 1.0)])]
    found, metrics = assign_credit(groups, scored(groups), algorithm("ppo"), 0.0)
    assert "learn/explained_variance" not in metrics, "all returns are the same"
    assert rows(found)["a/0"].tolist() == [0.0]
    assert rows(found, "returns")["a/0"].tolist() == [1.0]


# -- one advantage per turn ----------------------------------------------------------------------------


def test_per_step_credit_compares_the_same_turn_of_others() -> None:
    """rLLM v0.1's stepwise advantage, with the estimator of GRPO."""
    gamma = 0.5
    expected: dict[str, list[float]] = {key: [] for key in played()}
    for name in "abcd":
        members = {key: member for key, member in played().items() if member.group == name}
        for turn in range(3):
            returns = {
                key: sum(gamma**k * reward for k, (_, reward) in enumerate(member.turns[turn:]))
                for key, member in members.items()
                if turn < len(member.turns)
            }
            values = np.array(list(returns.values()))
            for key, value in returns.items():
                spread = values.std(ddof=1) + EPSILON if len(values) > 1 else 1.0
                advantage = (value - values.mean()) / spread if len(values) > 1 else 0.0
                expected[key] += [advantage] * members[key].turns[turn][0]
    found, metrics = assign_credit(GROUPS, scored(), algorithm("grpo", credit="per_step", gamma=gamma), 0.0)
    assert_equal(rows(found), {key: np.array(values) for key, values in expected.items()})
    # The third turns of a/1 and c/4 and the second ones of b/1 and d/0: nobody else got so far.
    num_turns = sum(len(member.turns) for member in played().values())
    assert metrics["learn/uncompared_fraction"] == pytest.approx(4 / num_turns)


def conversations(rollout_id: str, rewards: Sequence[float]) -> Trajectory:
    """Two conversations that take turns; each is one sample."""
    steps, histories = [], {0: (7,), 1: (8,)}
    for turn, reward in enumerate(rewards):
        history = histories[turn % 2]
        completion = Completion(
            prompt_ids=history,
            completion_ids=(10 + turn,),
            logprobs=(-1.0,),
            text="",
            finish_reason="stop",
        )
        steps.append(Step(completion=completion, reward=reward))
        histories[turn % 2] = (*history, 10 + turn, 5)
    return Trajectory(rollout_id=rollout_id, steps=steps, reward=sum(rewards))


def by_turn(rows: Sequence[TrainingSample], column: str) -> list[float]:
    pairs = [pair for row in rows for pair in zip(row.turns, getattr(row, column), strict=True)]
    return [value for turn, value in sorted(pairs) if turn >= 0]


def test_credit_by_turn_knows_conversations_that_take_turns() -> None:
    members = (conversations("g/0", [0, 0, 1, 0]), conversations("g/1", [0, 0, 0, 0]))
    both = [TrajectoryGroup(group_id="g", task={}, trajectories=members)]
    samples = {each.rollout_id: training_samples(each) for each in members}
    assert [len(each) for each in samples.values()] == [2, 2]
    found, _ = assign_credit(both, samples, algorithm("rloo", credit="per_step", gamma=0.5), 0.0)
    assert by_turn(found["g/0"], "advantages") == pytest.approx([0.25, 0.5, 1.0, 0.0])


def test_values_stay_with_turns_where_conversations_alternate() -> None:
    member = conversations("g/0", [0, 0, 1, 0])
    samples = [
        replace(each, old_logprobs=each.rollout_logprobs, values=tuple(map(float, each.turns)))
        for each in training_samples(member)
    ]
    one = [TrajectoryGroup(group_id="g", task={}, trajectories=(member,))]
    ppo = algorithm("ppo", gamma=0.5, options={"lam": 0.0})
    found, _ = assign_credit(one, {"g/0": samples}, ppo, 0.0)
    # With lambda 0 a return is the reward and the discounted value of the next turn.
    assert by_turn(found["g/0"], "returns") == pytest.approx([0.5, 1.0, 1.0 + 1.5, 0.0])


def test_turn_that_sampled_nothing_has_no_advantage() -> None:
    silent = trajectory("g/0", [(2, 0.0), (1, 1.0)])
    silent.steps.insert(1, Step(reward=0.5))
    silent.reward = 1.5
    groups = [TrajectoryGroup(group_id="g", task={}, trajectories=(silent, trajectory("g/1", [(1, 0.0)])))]
    found = credit(algorithm("grpo", credit="per_step", options={"normalize_by_std": False}), groups)
    assert found["g/0"].tolist() == [0.75, 0.75, 0.0], "step 2 is compared with nobody's step 2"
    assert found["g/1"].tolist() == [-0.75]


# -- several conversations in one rollout --------------------------------------------------------------


def alternating(name: str, rewards: Sequence[float]) -> Trajectory:
    """A program that samples a token in one conversation, then one in another, and so on."""
    steps: list[Step] = []
    for turn, reward in enumerate(rewards):
        history = tuple(token for earlier in range(turn % 2, turn, 2) for token in (10 + earlier, 5))
        completion = Completion(
            prompt_ids=(turn % 2, *history),
            completion_ids=(10 + turn,),
            logprobs=(-1.0,),
            text="",
            finish_reason="stop",
        )
        steps.append(Step(completion=completion, reward=reward))
    return Trajectory(rollout_id=name, steps=steps, reward=sum(rewards))


@pytest.mark.parametrize("name", ["grpo", "gigpo", "reinforce_plus_plus", "ppo"])
def test_turn_has_its_own_advantage_in_any_conversation(name: str) -> None:
    """Turn by turn the same as in one conversation, though the samples hold turns 0, 2, 4 and 1, 3."""
    played = [[0.0, 1.0, 0.0, 5.0, 0.0], [0.5, 0.0, 0.0, 0.0, 2.0]]
    settings = {"credit": "per_step"} if name == "grpo" else {}
    kl = KLConfig(place="reward", coef=0.3)
    found = []
    for make in (alternating, lambda name, rewards: trajectory(name, [(1, reward) for reward in rewards])):
        members = tuple(make(f"g/{number}", rewards) for number, rewards in enumerate(played))
        for step, state in zip((s for each in members for s in each.steps), "ABABCABBCC", strict=True):
            step.observation = state
        samples = {
            each.rollout_id: [
                replace(
                    sample,
                    old_logprobs=[-0.1 * (turn + 1) * bit for turn, bit in columns(sample)],
                    reference_logprobs=[-0.3 * (turn + 2) * bit for turn, bit in columns(sample)],
                    values=[0.2 * (turn + 1) ** 2 * bit for turn, bit in columns(sample)],
                )
                for sample in training_samples(each)
            ]
            for each in members
        }
        groups = [TrajectoryGroup(group_id="g", task={}, trajectories=members)]
        credited, _ = assign_credit(groups, samples, algorithm(name, kl=kl, gamma=0.9, **settings), 0.3)
        found.append(
            {
                rollout_id: {
                    turn: advantage
                    for sample in each
                    for (turn, bit), advantage in zip(columns(sample), sample.advantages, strict=True)
                    if bit
                }
                for rollout_id, each in credited.items()
            }
        )
    for rollout_id, expected in found[1].items():
        assert found[0][rollout_id] == pytest.approx(expected)


def columns(sample: TrainingSample) -> list[tuple[int, int]]:
    return list(zip(sample.turns, sample.loss_mask, strict=True))


# -- a teacher -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("coef", [0.0, 0.7])
def test_distillation_is_distance_to_teacher_per_token(coef: float) -> None:
    """Lu et al. 2025 (On-Policy Distillation): minus the reverse KL of each token, with a discount of 0."""
    members, rewards = played(), by_group(lambda rewards, _: rewards - rewards.mean())
    expected = {key: each.teacher - each.old + coef * rewards[key] for key, each in members.items()}
    settings = algorithm("distillation", options={"reward_coef": coef})
    found, metrics = assign_credit(GROUPS, scored(), settings, 0.0)
    assert_equal(rows(found), expected)
    gaps = np.concatenate([each.old - each.teacher for each in members.values()])
    assert metrics["learn/teacher_kl"] == pytest.approx(gaps.mean(), abs=1e-6)


def test_distillation_needs_scores_of_teacher() -> None:
    unscored = {
        name: [replace(sample, teacher_logprobs=()) for sample in samples]
        for name, samples in scored().items()
    }
    with pytest.raises(LearnerError, match="has 0 teacher_logprobs for"):
        assign_credit(GROUPS, unscored, algorithm("distillation"), 0.0)


def test_gradient_of_distillation_is_that_of_the_reverse_kl() -> None:
    """Gu et al. 2024 (MiniLLM), eq. 1: over all tokens of a vocabulary, each as often as it is sampled."""
    logits = torch.tensor([0.3, -1.2, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    policy, teacher = logits.log_softmax(-1), torch.tensor([1.0, 0.5, -0.2, -3.0]).double().log_softmax(-1)
    (expected,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    row = {"token_level_rewards": torch.zeros(4, 1), "response_mask": torch.ones(4, 1)}
    columns = {"old_log_prob": policy.detach()[:, None], "teacher_log_prob": teacher[:, None]}
    index = np.array(["a"] * 4, dtype=object)
    advantages, _ = reverse_kl(**row, **columns, index=index, reward_coef=0.0)
    loss = -(policy.detach().exp() * advantages[:, 0] * policy).sum()
    (found,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(found, expected)


# -- penalties -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_kl_in_the_reward_is_subtracted_at_every_token(estimator: str) -> None:
    """Schulman 2020 (joschu.net/blog/kl-approx.html)."""
    estimates = {
        "k1": lambda gap: gap,
        "abs": lambda gap: abs(gap),
        "k2": lambda gap: gap**2 / 2,
        "k3": lambda gap: np.exp(-gap) - 1 + gap,
    }
    members = played()
    kl = {key: estimates[estimator](member.old - member.reference) for key, member in members.items()}
    shaped = {key: member.reward - 0.2 * kl[key].sum() for key, member in members.items()}
    expected = {
        key: np.full(
            len(member.rewards),
            shaped[key] - np.mean([shaped[k] for k, other in members.items() if other.group == member.group]),
        )
        for key, member in members.items()
    }
    settings = algorithm("dr_grpo", kl=KLConfig(place="reward", coef=0.5, estimator=estimator))
    found, metrics = assign_credit(GROUPS, scored(), settings, kl_coef=0.2)
    assert_equal(rows(found), expected)
    assert metrics["learn/reward_kl"] == pytest.approx(np.concatenate(list(kl.values())).mean(), abs=1e-5)


def test_what_is_not_trained_on_pays_the_kl_of_its_groups_tokens() -> None:
    """Two successes far from the reference stay ahead of a failure of as many tokens that is left out."""
    members = group("g", [(50, 1.0)], [(50, 1.0)], [(50, 0.0)])
    trained = {
        each.rollout_id: [
            replace(sample, old_logprobs=(-1.0,) * 50, reference_logprobs=(-2.0,) * 50)
            for sample in training_samples(each)
        ]
        for each in members.trajectories[:2]
    }
    settings = algorithm("dr_grpo", kl=KLConfig(place="reward", coef=0.1, estimator="k1"))
    found, _ = assign_credit([members], trained, settings, kl_coef=0.1)
    for samples in found.values():
        assert samples[0].advantages == pytest.approx((1 / 3,) * 50), "5 are taken from every reward"


def test_dapo_penalizes_what_comes_near_the_limit() -> None:
    """Yu et al. 2025 (DAPO), eq. 13: limit 12, buffer 4, so that 8 tokens are free and 12 cost all."""
    groups = [
        TrajectoryGroup(
            group_id="g",
            task={},
            trajectories=tuple(
                trajectory(f"g/{index}", [(count, 1.0)]) for index, count in enumerate((3, 8, 9, 11, 12))
            ),
        )
    ]
    settings = algorithm(
        "dapo", overlong={"penalty": 2.0, "buffer_tokens": 4}, options={"normalize_by_std": False}
    )
    shaped = np.array([1.0, 1.0, 1.0 - 2 * 0.25, 1.0 - 2 * 0.75, 1.0 - 2])
    found, metrics = assign_credit(groups, scored(groups), settings, 0.0)
    np.testing.assert_allclose(
        [values[0] for values in rows(found).values()], shaped - shaped.mean(), atol=1e-5
    )
    assert metrics["learn/overlong_fraction"] == pytest.approx(3 / 5)
    assert metrics["learn/overlong_penalty_mean"] == pytest.approx(0.8)


def test_length_is_what_the_rollouts_limit_counts() -> None:
    """What the environment said between the turns is in it: 4 + 1 + 4 tokens after the first prompt."""
    groups = [
        TrajectoryGroup(
            group_id="g",
            task={},
            trajectories=(trajectory("g/0", [(4, 0.0), (4, 0.0)]), trajectory("g/1", [(4, 0.0)])),
        )
    ]
    settings = algorithm("dapo", overlong={"buffer_tokens": 4}, options={"normalize_by_std": False})
    _, metrics = assign_credit(groups, scored(groups), settings, 0.0)
    assert metrics["learn/overlong_penalty_mean"] == pytest.approx(0.25 / 2)


def test_rewritten_history_gives_no_tokens_back() -> None:
    """The budget of 12 is spent by 4 + 4 + 4 sampled tokens, though the last sequence has only 4 of them."""
    member = trajectory("g/0", [(4, 0.0)] * 3, rewrites=True)
    groups = [TrajectoryGroup(group_id="g", task={}, trajectories=(member, trajectory("g/1", [(4, 0.0)])))]
    settings = algorithm("dapo", overlong={"buffer_tokens": 4}, options={"normalize_by_std": False})
    _, metrics = assign_credit(groups, scored(groups), settings, 0.0)
    assert metrics["learn/overlong_penalty_mean"] == pytest.approx(1 / 2)


def test_greedy_rollout_is_penalized_like_the_others() -> None:
    groups = [
        TrajectoryGroup(
            group_id="g",
            task={},
            trajectories=(trajectory("g/0", [(11, 1.0)]),),
            baseline=trajectory("g/greedy", [(12, 1.0)]),
        )
    ]
    settings = algorithm("remax", overlong={"penalty": 1.0, "buffer_tokens": 4})
    assert_equal(credit(settings, groups), {"g/0": np.full(11, (1 - 0.75) - (1 - 1))})


# -- who is compared with whom -------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", COMPARING)
def test_rollout_alone_in_its_group_has_advantage_zero(estimator: str) -> None:
    settings = algorithm("custom", advantage=estimator, loss="vanilla")
    pair = group("pair", *B)
    found, metrics = assign_credit(
        [group("alone", [(2, 5.0)]), pair], scored([group("alone", [(2, 5.0)]), pair]), settings, 0.0
    )
    assert rows(found)["alone/0"].tolist() == [0.0, 0.0]
    # The pair has three turns besides: none has an observation, and two are first ones.
    uncompared = {"gigpo": 4 / 6, "mt_grpo": 2 / 6}.get(estimator, 1 / 3)
    assert metrics["learn/uncompared_fraction"] == pytest.approx(uncompared)
    without = credit(settings, [pair])
    assert_equal({key: values for key, values in rows(found).items() if key in without}, without)


@pytest.mark.parametrize("reward", [1.1, -10.1, 100.1])
@pytest.mark.parametrize("estimator", COMPARING)
def test_groups_rewarded_alike_have_advantage_zero(estimator: str, reward: float) -> None:
    """Where the float32 mean of a group is not quite the reward, all members would be pushed one way."""
    settings = algorithm("custom", advantage=estimator, loss="vanilla")
    groups = [group(f"of {size}", *[[(2, 0.0), (1, reward)]] * size) for size in (2, 8, 10, 16)]
    assert not any(values.any() for values in credit(settings, groups).values())


@pytest.mark.parametrize("estimator", COMPARING)
def test_reward_common_to_all_members_changes_no_advantage(estimator: str) -> None:
    settings = algorithm("custom", advantage=estimator, loss="vanilla")
    groups = [GROUPS[0], group("c", *[[*turns[:-1], (turns[-1][0], turns[-1][1] + 100.0)] for turns in C])]
    assert_equal(credit(settings, groups), credit(settings, [GROUPS[0], GROUPS[2]]))


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "ppo"])
@pytest.mark.parametrize("reward", [1.1, -10.1, 1000.1])
def test_rollouts_rewarded_alike_have_advantage_zero(name: str, reward: float) -> None:
    """The float32 mean over all tokens is not quite the reward, and its square no variance."""
    options = {"lam": 1.0} if name == "ppo" else {}
    groups = [group(f"of {size}", *[[(size + 3, reward)]] * size) for size in (2, 8, 10, 16)]
    samples = {
        key: [replace(sample, values=(0.0,) * len(sample.response_ids)) for sample in each]
        for key, each in scored(groups).items()
    }
    found, _ = assign_credit(groups, samples, algorithm(name, options=options), 0.0)
    assert not any(values.any() for values in rows(found).values())


def test_normalization_is_over_the_tokens_that_are_trained() -> None:
    """Two long members that are left out count in the baseline; each token counted in the scale too."""
    members = group("g", [(10, 1.0)], [(10, 0.0)], [(1000, 0.0)], [(1000, 0.0)])
    other = group("h", [(3, 0.0)], [(5, 1.0)])
    for groups in ([members], [members, other]):
        samples = {key: each for key, each in scored(groups).items() if key not in ("g/2", "g/3")}
        found, metrics = assign_credit(groups, samples, algorithm("reinforce_plus_plus_baseline"), 0.0)
        distances = {"g/0": (10, 0.75), "g/1": (10, -0.25), "h/0": (3, -0.5), "h/1": (5, 0.5)}
        raw = {key: np.full(*distances[key]) for key in samples}
        assert_equal(rows(found), whitened(raw))
        assert metrics["learn/advantage_mean"] == pytest.approx(0, abs=1e-6)


def test_single_trained_token_is_not_divided_by_its_variance() -> None:
    groups = [group("g", [(1, 1.0)], [(4, 0.0)])]
    samples = {"g/0": scored(groups)["g/0"]}
    found, _ = assign_credit(groups, samples, algorithm("reinforce_plus_plus_baseline"), 0.0)
    assert rows(found)["g/0"].tolist() == [0.0]


def test_all_alone_is_no_reason_to_fail() -> None:
    assert credit(algorithm("grpo"), [group("alone", [(2, 5.0)])])["alone/0"].tolist() == [0.0, 0.0]


def test_samples_of_a_rewritten_history_share_their_advantage() -> None:
    pair = group("g", [(1, 0.0)], [(3, 0.0), (2, 1.0)])
    found, _ = assign_credit([pair], scored([pair]), algorithm("dr_grpo"), 0.0)
    assert [len(sample.advantages) for sample in found["g/1"]] == [3, 2]
    # Two samples are still one rollout: the mean is 1/2, not 2/3.
    assert {value for sample in found["g/1"] for value in sample.advantages} == {0.5}
    assert found["g/0"][0].advantages == (-0.5,)


def test_rollout_without_training_counts_in_the_baseline() -> None:
    silent, masked = Trajectory(rollout_id="g/1"), trajectory("g/2", [(4, 0.0)])
    masked.masked = True
    members = (trajectory("g/0", [(1, 1.0)]), silent, masked)
    groups = [TrajectoryGroup(group_id="g", task={}, trajectories=members)]
    assert_equal(credit(algorithm("dr_grpo"), groups), {"g/0": np.array([2 / 3])})
    # A length-weighted baseline counts what was sampled: 1, 1 (for nothing) and 4 tokens.
    assert_equal(credit(algorithm("opo"), groups), {"g/0": np.array([1 - 1 / 6])})


def test_rollout_spoilt_by_infrastructure_does_not_train() -> None:
    whole = group("c", *C)
    spoilt = trajectory("c/9", [(2, 0.0)])
    spoilt.termination_reason = TerminationReason.CRASHED
    with_it = replace(whole, trajectories=(spoilt, *whole.trajectories))
    assert_equal(credit(algorithm("grpo"), [with_it]), credit(algorithm("grpo"), [whole]))


def test_remax_learns_nothing_where_greedy_rollout_was_spoilt() -> None:
    crashed = group("a", *A, baseline=0.3)
    crashed.baseline.termination_reason = TerminationReason.CRASHED
    found, metrics = assign_credit([crashed], scored([crashed]), algorithm("remax"), 0.0)
    assert not any(values.any() for values in rows(found).values())
    assert metrics["learn/uncompared_fraction"] == 1.0


def test_no_samples_need_no_credit() -> None:
    assert assign_credit(GROUPS, {}, algorithm("grpo"), 0.0) == ({}, {})
    assert assign_credit(GROUPS, {"a/0": []}, algorithm("grpo"), 0.0) == ({}, {})


def test_metrics_describe_advantages_of_tokens_that_are_trained() -> None:
    found, metrics = assign_credit(GROUPS, scored(), algorithm("grpo"), 0.0)
    advantages = np.concatenate(list(rows(found).values()))
    assert metrics["learn/advantage_mean"] == pytest.approx(advantages.mean())
    assert metrics["learn/advantage_std"] == pytest.approx(advantages.std())
    assert metrics["learn/advantage_min"] == advantages.min()
    assert metrics["learn/advantage_max"] == advantages.max()
    assert metrics["learn/advantage_zero_fraction"] == pytest.approx((advantages == 0).mean())
    assert metrics["learn/uncompared_fraction"] == 0.0


# -- what is refused -----------------------------------------------------------------------------------


def test_samples_of_no_group_are_an_error() -> None:
    with pytest.raises(LearnerError, match="Rollout 'a/0' has samples, but none of the groups"):
        assign_credit(GROUPS[1:], scored(), algorithm("grpo"), 0.0)


def test_half_a_trajectory_is_refused() -> None:
    samples = scored()
    samples["a/1"] = samples["a/1"][:1]
    with pytest.raises(LearnerError, match="'a/1' have other tokens than its steps"):
        assign_credit(GROUPS, samples, algorithm("grpo"), 0.0)


@pytest.mark.parametrize(
    ("settings", "missing"),
    [
        (algorithm("grpo", kl=KLConfig(place="reward")), "old_logprobs"),
        (algorithm("grpo", kl=KLConfig(place="reward")), "reference_logprobs"),
        (algorithm("ppo"), "values"),
    ],
)
def test_samples_without_their_scores_are_refused(settings: Algorithm, missing: str) -> None:
    samples = {key: [replace(each, **{missing: ()}) for each in rows] for key, rows in scored().items()}
    with pytest.raises(LearnerError, match=f"has 0 {missing} for .* score comes before assign_credit"):
        assign_credit(GROUPS, samples, settings, 0.0)


def test_remax_without_a_greedy_rollout_is_refused() -> None:
    pair = group("b", *B)
    with pytest.raises(LearnerError, match="Group 'b' has no greedy rollout, which remax needs"):
        assign_credit([pair], scored([pair]), algorithm("remax"), 0.0)


def test_reward_that_is_not_finite_is_refused_with_its_rollout() -> None:
    groups = [group("b", *B)]
    samples = scored(groups)
    groups[0].trajectories[0].steps[0].reward = float("nan")
    with pytest.raises(LearnerError, match=r"'b/0' has the reward nan at step 0"):
        assign_credit(groups, samples, algorithm("grpo"), 0.0)
