"""Trajectories become training samples: token ids, and a mask of exactly the tokens that were sampled."""

from __future__ import annotations

import copy
import json
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from environments.columns import Floats, Ints, TokenIds, floats, stored
from environments.data.trajectory_json import plain_json
from environments.errors import LearnerError
from environments.prefix_tree import Span
from environments.rewards.base import MAX_REWARD, is_reward
from environments.types import STATE_KEY, Completion, TerminationReason, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    import numpy as np

    from policies.learning.algorithm import Algorithm

FLOATS = (
    *("rollout_logprobs", "rewards", "old_logprobs", "reference_logprobs", "teacher_logprobs"),
    *("values", "advantages", "returns"),
)
UNTRAINED: dict[str, float] = dict.fromkeys(FLOATS, 0.0) | {"loss_mask": 0, "turns": -1}
"""Columns of a sample beside its ids, with the value of a token that is not trained."""
ALIKE = 1e-6
"""Rewards closer than this are the same: verl's estimators divide by no smaller spread either."""


@dataclass(frozen=True, kw_only=True)
class TrainingSample:
    """A token sequence to learn from.

    ``prompt_ids`` [P], P >= 1, is everything before the first sampled token. ``response_ids`` [R] runs
    from there to the last sampled token; ``loss_mask`` [R] is 1 on sampled tokens and 0 on what the
    environment said in between. All further columns are [R] too, and 0 where the mask is 0. What is filled
    in later is empty until then: the other log-probabilities and ``values`` by the learner's ``score``,
    ``advantages`` and ``returns`` by ``assign_credit``.

    Columns read as tuples, made by each access from typed arrays. Ids are those of the trajectory's turns,
    which its samples share as far as they repeat each other.
    """

    sample_id: str
    """``<rollout_id>#<index>``: a trajectory whose history was rewritten has several samples."""
    prompt_ids: TokenIds = TokenIds(is_required=True)
    response_ids: TokenIds = TokenIds(is_required=True)
    loss_mask: Ints = Ints(is_required=True, typecode="b")
    rollout_logprobs: Floats = Floats(is_required=True)
    """The engine's, under the distribution that was sampled from."""
    turns: Ints = Ints()
    """Index of the trajectory's step that sampled the token; -1 where the mask is 0."""
    rewards: Floats = Floats()
    """A step's reward, on the last token that it sampled."""
    old_logprobs: Floats = Floats()
    """The learner's own, before the first optimizer step of the update."""
    reference_logprobs: Floats = Floats()
    teacher_logprobs: Floats = Floats()
    values: Floats = Floats()
    advantages: Floats = Floats()
    returns: Floats = Floats()
    policy_version: int = 0
    """The oldest version that sampled any of it."""
    pictures: tuple[str, ...] = ()
    """Pictures that its ids have tokens for, in order."""

    def __len__(self) -> int:
        response: Span = stored(self, "response_ids")
        return self.num_prompt_tokens + response.size

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        prompt: Span = stored(self, "prompt_ids")
        return prompt.size

    @property
    def rollout_id(self) -> str:
        return self.sample_id.rpartition("#")[0]

    @property
    def num_sampled_tokens(self) -> int:
        mask: array[int] = stored(self, "loss_mask")
        return mask.tobytes().count(1)

    def replaced(self, **columns: Any) -> TrainingSample:
        """A copy with other columns; unlike ``dataclasses.replace``, it reads none of those that stay."""
        sample = copy.copy(self)
        for name, column in columns.items():
            object.__setattr__(sample, name, column)
        return sample

    def on_sampled_tokens(self, values: Sequence[float] | np.ndarray) -> array[float]:
        """A column [R]: ``values`` [num_sampled_tokens] on the sampled tokens, in order, and 0 elsewhere."""
        import numpy as np  # actors and commands that import this module have no use for it

        mask = np.asarray(stored(self, "loss_mask")) > 0
        column = np.zeros(len(mask))
        column[mask] = np.reshape(values, self.num_sampled_tokens)
        short = column.astype(np.float32)  # as ``floats`` does it, without an object for each number
        return array("f", short.tobytes()) if (short == column).all() else array("d", column.tobytes())

    def without_tokens(self, left_out: Sequence[bool] | np.ndarray) -> TrainingSample:
        """The same sample, not to be trained on those of its sampled tokens that are ``left_out``."""
        leaves = self.on_sampled_tokens(left_out)
        thinned = {}
        for name, nothing in UNTRAINED.items():
            column = getattr(self, name)
            rows = zip(column, leaves, strict=bool(column))
            thinned[name] = tuple(nothing if leave else value for value, leave in rows)
        return self.replaced(**thinned)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """The samples of one optimizer step."""

    samples: tuple[TrainingSample, ...]
    temperature: float = 1.0
    """The temperature that the samples were drawn with: log-probabilities are taken under it."""
    policy: str = ""
    """Name of the policy that learns from it, where a run trains several; empty for all of them."""

    @property
    def has_sampled_tokens(self) -> bool:
        """Return whether there is a token to learn from."""
        return any(sample.num_sampled_tokens for sample in self.samples)

    def with_column(self, name: str, rows: Sequence[Sequence[float]]) -> TrainBatch:
        """The same batch with a column filled in: a row for each sample."""
        pairs = zip(self.samples, rows, strict=True)
        return replace(self, samples=tuple(sample.replaced(**{name: row}) for sample, row in pairs))

    def with_engine_logprobs(self) -> TrainBatch:
        """The same batch, with the engine's log-probabilities as those of before the update."""
        return self.with_column("old_logprobs", [stored(each, "rollout_logprobs") for each in self.samples])


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerUpdate:
    """Result of one learner call: means over its optimizer steps, and how many of those there were."""

    metrics: dict[str, float]
    num_optimizer_steps: int


def training_samples(trajectory: Trajectory) -> list[TrainingSample]:
    """The token sequences of a trajectory, in order; empty if there is nothing in it to learn from.

    Nothing is learnt from a trajectory that is masked, has failed, was ended by its time limit or has no
    reward yet: what it is worth was never judged. Nor from a step whose answer nobody has seen, since its
    client had gone, or that its program leaves out.

    Steps whose prompt extends an earlier prompt and completion are one sequence with it: mostly that of the
    step before, and that of another conversation where a program has several in one rollout. Steps of two
    seats never are. Where the history was rewritten a new sequence starts: nothing is discarded, and no token
    is trained in a context other than the one it was sampled in.

    Raises:
        LearnerError: the server kept the tokens of a completion to itself, or a reward is not finite.
    """
    timed_out = trajectory.termination_reason is TerminationReason.TIMEOUT
    if trajectory.masked or timed_out or not is_judged(trajectory) or trajectory.failed:
        return []
    runs: list[list[tuple[int, Completion]]] = []
    last: Completion | None = None
    for turn, step in enumerate(trajectory.turns):
        completion = step.completion
        if completion is None or step.is_left_out:
            continue
        if completion.retokenized or not completion.prompt_size:
            raise LearnerError(
                f"Rollout {trajectory.rollout_id!r} has completions without the engine's token ids: sample "
                "the policy server by its handle, or one that answers return_token_ids and logprobs (vLLM)."
            )
        if not completion.answer_size:
            continue
        completion = last = completion.sharing(last)
        extended = (
            run
            for run in reversed(runs)
            if trajectory.turns[run[-1][0]].seat == step.seat and completion.extends(run[-1][1])
        )
        if (run := next(extended, None)) is not None:
            run.append((turn, completion))
        else:
            runs.append([(turn, completion)])
    rewards = turn_rewards(trajectory)
    return [_sample(f"{trajectory.rollout_id}#{index}", run, rewards) for index, run in enumerate(runs)]


def samples_by_policy(trajectory: Trajectory) -> dict[str, list[TrainingSample]]:
    """``training_samples`` by the names of the policies that have sampled them.

    Raises:
        LearnerError: as ``training_samples`` does; or two policies have played one seat, whose rewards are
            those of both.
    """
    turns = {(step.seat, step.completion.policy) for step in trajectory.turns if step.completion is not None}
    if len(turns) > len({seat for seat, _ in turns}):
        raise LearnerError(
            f"Rollout {trajectory.rollout_id!r} has a seat that several of the policies "
            f"{', '.join(sorted({policy for _, policy in turns}))} have played: give each seats of its own "
            "(SeatsAgent does)."
        )
    samples: dict[str, list[TrainingSample]] = {}
    for sample in training_samples(trajectory):
        completion = trajectory.turns[stored(sample, "turns")[0]].completion
        assert completion is not None  # its first token was sampled in this step
        samples.setdefault(completion.policy, []).append(sample)
    return samples


def turn_rewards(trajectory: Trajectory) -> dict[int, float]:
    """Return what each step that sampled tokens has earned, by its index.

    A step that sampled none, such as one that only the agent's own code decided, hands its reward to the
    last step before it that did, or to the first one if there is none before: nothing is lost as long as
    anything was sampled. So does one that is left out. Both are steps of its own seat.

    Raises:
        LearnerError: a reward is not finite.
    """
    rewards: dict[int, float] = {}
    last: dict[str, int] = {}
    early: defaultdict[str, float] = defaultdict(float)
    for turn, step in enumerate(trajectory.turns):
        if not is_reward(step.reward):
            raise LearnerError(
                f"Rollout {trajectory.rollout_id!r} has the reward {step.reward} at step {turn}: its "
                f"environment has to return a finite number up to {MAX_REWARD:g}."
            )
        if step.completion is not None and step.completion.num_completion_tokens and not step.is_left_out:
            rewards[turn] = early.pop(step.seat, 0.0) + step.reward
            last[step.seat] = turn
        elif step.seat in last:
            rewards[last[step.seat]] += step.reward
        else:
            early[step.seat] += step.reward
    return rewards


def returns_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """Each turn's reward and, discounted by ``gamma`` per turn, those of the turns after it."""
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + gamma * (returns[-1] if returns else 0.0))
    return returns[::-1]


def turn_place(trajectory: Trajectory, turn: int, algorithm: Algorithm) -> str:
    """Name of the place where a turn is compared with others of its group: equal ones are compared.

    It is the number of the turn, or where the estimator compares turns by their state the state that the
    turn began in: ``info["state_key"]``, where the environment names it, else the step's observation, which
    is the one that the turn answers. A turn without either is compared with nothing.
    """
    if algorithm.estimator.turns_by != "state":
        return f"turn {turn}"
    step = trajectory.steps[turn]
    named = STATE_KEY in step.info
    state = step.info[STATE_KEY] if named else step.observation
    if state is None:
        return f"turn {turn} of {trajectory.rollout_id} alone"
    return f"{'state' if named else 'observation'} {json.dumps(plain_json(state), sort_keys=True)}"


def has_signal(group: TrajectoryGroup, algorithm: Algorithm) -> bool:
    """Return whether the members of ``group`` were rewarded differently, so that comparing them teaches
    something.

    Where turns are compared, whether the returns from any place on differ among those who reached it; rewards
    and returns are those of one seat, where there are several. These are
    the environment's rewards: where a penalty or bonus of the algorithm teaches by other groups too,
    ``resolve`` does not let them be left out, but for DAPO's refill, which is defined by the environment's
    verdict. A member that infrastructure has spoilt is not compared.

    Raises:
        LearnerError: a reward is not finite.
    """
    compared: dict[tuple[str, str], list[float]] = defaultdict(list)
    judged = [trajectory for trajectory in group.trajectories if is_judged(trajectory)]
    num_members = Counter(seat for trajectory in judged for seat in trajectory.seat_rewards)
    for trajectory in judged:
        rewards = turn_rewards(trajectory)
        for seat, reward in trajectory.seat_rewards.items():
            if num_members[seat] < 2:  # its turns are not compared with each other
                continue
            if algorithm.credit == "broadcast":
                compared[seat, ""].append(reward)
            if algorithm.credit == "per_step" or algorithm.turn_weight:
                own = {turn: each for turn, each in rewards.items() if trajectory.turns[turn].seat == seat}
                returns = returns_to_go(list(own.values()), algorithm.gamma)
                for turn, value in zip(own, returns, strict=True):
                    compared[seat, turn_place(trajectory, turn, algorithm)].append(value)
    return any(max(values) - min(values) > ALIKE for values in compared.values())


def is_judged(trajectory: Trajectory) -> bool:
    """Return whether its reward says anything about the policy: not if infrastructure has spoilt it, its
    time was over before the first turn, or it will come later.
    """
    reason = trajectory.termination_reason
    if reason is TerminationReason.JUDGED_LATER:
        return False
    if reason is TerminationReason.TIMEOUT and not trajectory.turns:
        return False
    return reason is None or not reason.is_infrastructure


def _sample(sample_id: str, run: list[tuple[int, Completion]], rewards: dict[int, float]) -> TrainingSample:
    tokens, prompt_size = run[-1][1].tokens, run[0][1].prompt_size
    given = [stored(completion, "logprobs") for _, completion in run]
    code = "f" if all(each.typecode == "f" for each in given) else "d"
    loss_mask, turns = array("b"), array("i")
    logprobs: array[float] = array(code)
    earned: array[float] = array(floats(rewards[turn] for turn, _ in run).typecode)
    for (turn, completion), own_logprobs in zip(run, given, strict=True):
        between, count = completion.prompt_size - prompt_size - len(turns), completion.answer_size
        loss_mask.extend(array("b", [0]) * between + array("b", [1]) * count)
        turns.extend(array("i", [-1]) * between + array("i", [turn]) * count)
        logprobs.extend(array(code, [0.0]) * between + array(code, own_logprobs))
        earned.extend(array(earned.typecode, [0.0]) * (between + count - 1))
        earned.append(rewards[turn])
    return TrainingSample(
        sample_id=sample_id,
        prompt_ids=tokens.part(0, prompt_size),
        response_ids=tokens.part(prompt_size, tokens.stop),
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        turns=turns,
        rewards=earned,
        policy_version=min(completion.policy_version for _, completion in run),
        pictures=run[-1][1].pictures,
    )


def padding_sample(token_id: int) -> TrainingSample:
    """A row that fills up a batch and trains nothing: its mask is empty, so no mean counts it."""
    return TrainingSample(
        sample_id="padding",
        prompt_ids=(token_id,),
        response_ids=(token_id,),
        loss_mask=(0,),
        rollout_logprobs=(0.0,),
    )
