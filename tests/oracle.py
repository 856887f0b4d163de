"""A second learner to compare ours with: plain transformers, torch's AdamW, and the papers' formulas.

Nothing of ``policies.learning`` or of verl is used here. It works in float64, and every turn goes through the
model as a row of its own: no packing of turns, no micro-batches, no ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from environments.types import Completion, Trajectory, TrajectoryGroup

T = TypeVar("T")
Tokens = list[torch.Tensor]
"""One tensor [number of sampled tokens] per sequence."""
Clip = tuple[float, float]
"""How far a ratio may be below and above 1."""
RESPONSE_TOKENS = 160
"""Most that a response may have."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What is optimized, and how; the values are those of the papers where they have one."""

    advantage: Callable[[list[Rollout]], None]
    loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Clip], torch.Tensor]
    aggregate: Callable[[Tokens], torch.Tensor] = lambda rows: torch.cat(rows).mean()
    """What a mini-batch's loss is, of that of each token, trajectory by trajectory: where a history was
    rewritten, all that the policy has sampled there is one response to the task."""
    clip: tuple[float, float] = (0.2, 0.2)
    kl_place: str = "none"
    kl: Callable[[torch.Tensor], torch.Tensor] = lambda gap: 0 * gap
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    weight: Callable[[torch.Tensor], torch.Tensor] = torch.ones_like
    """Of the loss of a token, by how many nats its old log-probability is above the recorded one."""
    recorded_is_old: bool = False
    """The ratio is taken to the recorded log-probabilities, not to those before the update."""
    critic: bool = False
    num_epochs: int = 1
    """Passes over the mini-batches of an update: the second from the last one to the first, and so on."""
    lr: float = 1e-3
    eps: float = 1e-2
    """AdamW's. The usual one would cancel the loss's scale, so that a wrong one could not be seen, and make
    rounding errors as large as gradients."""
    max_grad_norm: float = 1e6
    warmup_steps: int = 3
    num_steps: int = 10
    min_lr_ratio: float = 0.1
    temperature: float = 0.8


@dataclass
class Rollout:
    """One trajectory, cut into the sequences of which each extends the one before it."""

    trajectory: Trajectory
    group: str
    sequences: list[list[Completion]]
    rewards: torch.Tensor
    """[T] Of each turn, on the last token that it sampled, over all sequences."""
    old: Tokens = field(default_factory=list)
    reference: Tokens = field(default_factory=list)
    values: Tokens = field(default_factory=list)
    advantages: Tokens = field(default_factory=list)
    returns: Tokens = field(default_factory=list)

    @property
    def lengths(self) -> list[int]:
        return [sum(len(turn.completion_ids) for turn in turns) for turns in self.sequences]


class Oracle:
    """The policy, its reference and, where there is one, its critic."""

    def __init__(self, path: Path, start: dict[str, torch.Tensor], rules: Rules) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

        def model(auto: Any, **settings: Any) -> Any:
            return auto.from_pretrained(
                path, dtype=torch.float64, attn_implementation="eager", use_cache=False, **settings
            ).eval()

        self.rules = rules
        self.policy, self.reference = model(AutoModelForCausalLM), model(AutoModelForCausalLM)
        with torch.no_grad():
            for name, parameter in self.policy.named_parameters():
                parameter.copy_(start[name])
        self._optimizer, self._schedule = self._adam(self.policy)
        if rules.critic:
            self.critic = model(AutoModelForTokenClassification, num_labels=1)
            for parameter in self.critic.score.parameters():
                torch.nn.init.zeros_(parameter)
            self._critic_optimizer, self._critic_schedule = self._adam(self.critic)

    def _adam(self, model: torch.nn.Module) -> tuple[Any, Any]:
        rules = self.rules

        def rate(step: int) -> float:  # of update number step + 1
            if step + 1 <= rules.warmup_steps:
                return (step + 1) / rules.warmup_steps
            progress = (step + 1 - rules.warmup_steps) / (rules.num_steps - rules.warmup_steps)
            half_cosine = (1 + math.cos(math.pi * progress)) / 2
            return rules.min_lr_ratio + (1 - rules.min_lr_ratio) * half_cosine

        optimizer = torch.optim.AdamW(
            model.parameters(), lr=rules.lr, betas=(0.9, 0.95), eps=rules.eps, weight_decay=0.0
        )
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    # -- one update ------------------------------------------------------------------------------------

    def update(self, groups: Sequence[TrajectoryGroup], mini_batches: Sequence[Sequence[str]]) -> None:
        """Learn from ``groups``; ``mini_batches`` has the rollout ids of each optimizer step of a pass."""
        rollouts = rollouts_of(groups)
        with torch.no_grad():
            self._score(rollouts)
        self.rules.advantage(rollouts)
        by_id = {each.trajectory.rollout_id: each for each in rollouts}
        order = passes(mini_batches, self.rules.num_epochs)
        steps = [[by_id[rollout_id] for rollout_id in batch] for batch in order]
        if self.rules.critic:
            for batch in steps:
                self._step(self.critic, self._critic_optimizer, self._value_loss(batch))
            self._critic_schedule.step()
        for batch in steps:
            self._step(self.policy, self._optimizer, self._policy_loss(batch))
        self._schedule.step()

    def _score(self, rollouts: list[Rollout]) -> None:
        old, reference = (self.logprobs(model, rollouts) for model in (self.policy, self.reference))
        values = self._values(rollouts) if self.rules.critic else [[]] * len(rollouts)
        for index, each in enumerate(rollouts):
            each.old, each.reference, each.values = old[index], reference[index], values[index]
            if self.rules.recorded_is_old:
                each.old = [recorded(turns) for turns in each.sequences]
            if self.rules.kl_place == "reward":
                gap = torch.cat(each.old) - torch.cat(each.reference)
                each.rewards = each.rewards - self.rules.kl_coef * self.rules.kl(gap)

    def _step(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), self.rules.max_grad_norm)
        optimizer.step()

    def _policy_loss(self, batch: list[Rollout]) -> torch.Tensor:
        rules, losses, penalties, entropies = self.rules, [], [], []
        for each, (new, entropy) in zip(batch, self._distribution(self.policy, batch), strict=True):
            entropies.append(torch.cat(entropy))
            of_loss, of_penalty = [], []
            for turns, now, old, reference, advantage in zip(
                each.sequences, new, each.old, each.reference, each.advantages, strict=True
            ):
                weight = rules.weight(old - recorded(turns))
                of_loss.append(weight * rules.loss(now, old, advantage, rules.clip))
                of_penalty.append(rules.kl(now - reference))
            losses.append(torch.cat(of_loss))
            penalties.append(torch.cat(of_penalty))
        loss = rules.aggregate(losses) - rules.entropy_coef * rules.aggregate(entropies)
        if rules.kl_place == "loss":
            loss = loss + rules.kl_coef * rules.aggregate(penalties)
        return loss

    def _value_loss(self, batch: list[Rollout]) -> torch.Tensor:
        """Clipped to 0.5 around the old values: Engstrom et al. 2020, section 3, halved."""
        losses = []
        for each, values in zip(batch, self._values(batch), strict=True):
            for now, old, aim in zip(values, each.values, each.returns, strict=True):
                clipped = old + (now - old).clamp(-0.5, 0.5)
                losses.append(torch.maximum((now - aim) ** 2, (clipped - aim) ** 2) / 2)
        return torch.cat(losses).mean()

    # -- what the models say ---------------------------------------------------------------------------

    def logprobs(self, model: Any, rollouts: list[Rollout]) -> list[Tokens]:
        return [logprobs for logprobs, _ in self._distribution(model, rollouts)]

    def _distribution(self, model: Any, rollouts: list[Rollout]) -> list[tuple[Tokens, Tokens]]:
        """Log-probability of each sampled token, and the entropy of what it was drawn from."""
        result = []
        for each, logits in zip(rollouts, _outputs(model, rollouts), strict=True):
            rows = [(row / self.rules.temperature).log_softmax(-1) for row in logits]
            sampled = [
                torch.tensor([token for turn in turns for token in turn.completion_ids])
                for turns in each.sequences
            ]
            chosen = [row[torch.arange(len(ids)), ids] for row, ids in zip(rows, sampled, strict=True)]
            result.append((chosen, [-(row.exp() * row).sum(-1) for row in rows]))
        return result

    def _values(self, rollouts: list[Rollout]) -> list[Tokens]:
        """What the state before each sampled token is worth."""
        return [[row[:, 0] for row in rows] for rows in _outputs(self.critic, rollouts)]


def passes(mini_batches: Sequence[T], num_epochs: int) -> list[T]:
    """The mini-batches in the order in which they are taken: every other pass is backwards."""
    return [each for epoch in range(num_epochs) for each in mini_batches[:: (-1) ** epoch]]


def _outputs(model: Any, rollouts: list[Rollout]) -> list[Tokens]:
    """What the model says before each sampled token of each sequence: [number of sampled tokens, width]."""
    turns = [turn for each in rollouts for sequence in each.sequences for turn in sequence]
    ids = [torch.tensor((*turn.prompt_ids, *turn.completion_ids)) for turn in turns]
    # Attention is causal: what fills up a row at its end changes nothing before it.
    everything = model(torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)).logits
    said = iter(
        row[len(turn.prompt_ids) - 1 : len(turn.prompt_ids) + len(turn.completion_ids) - 1]
        for row, turn in zip(everything, turns, strict=True)
    )
    return [[torch.cat([next(said) for _ in sequence]) for sequence in each.sequences] for each in rollouts]


def recorded(turns: Sequence[Completion]) -> torch.Tensor:
    return torch.tensor([value for turn in turns for value in turn.logprobs], dtype=torch.float64)


def rollouts_of(groups: Sequence[TrajectoryGroup]) -> list[Rollout]:
    return [_rollout(each, group.group_id) for group in groups for each in group.trajectories]


def _rollout(trajectory: Trajectory, group: str) -> Rollout:
    sequences: list[list[Completion]] = []
    rewards = []
    for step in trajectory.steps:
        turn = step.completion
        assert turn is not None
        before = (*sequences[-1][-1].prompt_ids, *sequences[-1][-1].completion_ids) if sequences else None
        if before is not None and turn.prompt_ids[: len(before)] == before:
            sequences[-1].append(turn)
        else:
            sequences.append([turn])
        rewards += [0.0] * (len(turn.completion_ids) - 1) + [step.reward]
    return Rollout(trajectory, group, sequences, torch.tensor(rewards, dtype=torch.float64))


# -- the papers' formulas ------------------------------------------------------------------------------


def mean_of_means(rows: Tokens) -> torch.Tensor:
    """Zheng et al. 2025 (GSPO), equation 5: over responses, of the mean over their tokens."""
    return torch.stack([row.mean() for row in rows]).mean()


def mean_of_sums(rows: Tokens) -> torch.Tensor:
    """Ahmadian et al. 2024 (Back to Basics), equation 6: over responses, of log p of the whole response."""
    return torch.stack([row.sum() for row in rows]).mean()


def mean_of_sums_over_the_limit(rows: Tokens) -> torch.Tensor:
    """Liu et al. 2025 (Understanding R1-Zero-Like Training), section 3.2: a constant for the length."""
    return torch.stack([row.sum() / RESPONSE_TOKENS for row in rows]).mean()


def k1(gap: torch.Tensor) -> torch.Tensor:
    """Schulman 2020, Approximating KL divergence, as are the next two; ``gap`` is log p - log p_ref."""
    return gap


def k2(gap: torch.Tensor) -> torch.Tensor:
    """Also the gradient of k1+: only that is compared."""
    return gap**2 / 2


def k3(gap: torch.Tensor) -> torch.Tensor:
    return (-gap).exp() + gap - 1


def group_relative(advantage: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[list[Rollout]], None]:
    """One advantage for all tokens of a rollout: what ``advantage`` makes of the group's rewards [G]."""

    def assign(rollouts: list[Rollout]) -> None:
        for name in dict.fromkeys(each.group for each in rollouts):
            members = [each for each in rollouts if each.group == name]
            rewards = torch.stack([each.rewards.sum() for each in members])
            for each, value in zip(members, advantage(rewards), strict=True):
                each.advantages = [value.expand(length) for length in each.lengths]

    return assign


def _others(rewards: torch.Tensor) -> torch.Tensor:
    return (rewards.sum() - rewards) / (len(rewards) - 1)


grpo_advantage = group_relative(lambda rewards: (rewards - rewards.mean()) / (rewards.std() + 1e-6))
"""Shao et al. 2024 (DeepSeekMath), section 4.1.2."""
dr_grpo_advantage = group_relative(lambda rewards: rewards - rewards.mean())
"""Liu et al. 2025 (Understanding R1-Zero-Like Training), section 3.2."""
rloo_advantage = group_relative(lambda rewards: rewards - _others(rewards))
"""Ahmadian et al. 2024 (Back to Basics), section 3: the mean of the other members is the baseline."""


def gae_advantage(rollouts: list[Rollout], gamma: float = 1.0, lam: float = 0.95) -> None:
    """Schulman et al. 2016, equation 16; then normalized over all tokens of the update."""
    everything = []
    for each in rollouts:
        values, advantages, following = torch.cat(each.values), [], 0.0
        for token in reversed(range(len(values))):
            later = values[token + 1] if token + 1 < len(values) else 0.0
            following = each.rewards[token] + gamma * later - values[token] + gamma * lam * following
            advantages.append(following)
        raw = torch.stack(advantages[::-1])
        each.returns = list((raw + values).split(each.lengths))
        each.advantages = list(raw.split(each.lengths))
        everything.append(raw)
    spread, mean = torch.cat(everything).std(), torch.cat(everything).mean()
    for each in rollouts:
        each.advantages = [(row - mean) / spread for row in each.advantages]


def clipped(ratio: torch.Tensor, clip: Clip) -> torch.Tensor:
    return ratio.clamp(1 - clip[0], 1 + clip[1])


def ppo_loss(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip: Clip) -> torch.Tensor:
    """Schulman et al. 2017, equation 7, with the dual clip at 3 of Ye et al. 2020 (arXiv 1912.09729)."""
    ratio = (new - old).exp()
    surrogate = torch.minimum(ratio * advantage, clipped(ratio, clip) * advantage)
    return -torch.where(advantage < 0, torch.maximum(surrogate, 3 * advantage), surrogate)


def truncated_weight(gap: torch.Tensor) -> torch.Tensor:
    """Yao et al. 2025 (Your efficient RL framework secretly brings you off-policy RL training)."""
    return gap.exp().clamp(max=2)


def truncated_weight_of_the_sequence(gap: torch.Tensor) -> torch.Tensor:
    """Ionides 2008 (Truncated Importance Sampling), of all that a sequence has sampled."""
    return truncated_weight(gap.sum()).expand_as(gap)


def gspo_loss(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip: Clip) -> torch.Tensor:
    """Zheng et al. 2025 (GSPO), equation 5: the ratio of a sequence is the geometric mean of its tokens'."""
    ratio = (new - old).mean().exp()
    return -torch.minimum(ratio * advantage, clipped(ratio, clip) * advantage)


def cispo_loss(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip: Clip) -> torch.Tensor:
    """MiniMax 2025 (MiniMax-M1), equation 4."""
    return -clipped((new - old).exp(), clip).detach() * advantage * new


def reinforce_loss(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, clip: Clip) -> torch.Tensor:
    """Ahmadian et al. 2024 (Back to Basics), equation 6, without a ratio."""
    return -advantage * new
