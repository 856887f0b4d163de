"""What ``launch.config`` says of a name that it does not know: what stands for it here, or the nearest."""

from __future__ import annotations

import difflib

REFERENCE_SETTINGS = {
    "actor_rollout_ref.actor.clip_ratio_high": "algorithm.clip_high",
    "actor_rollout_ref.actor.clip_ratio_low": "algorithm.clip_low",
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.entropy_coef",
    "actor_rollout_ref.actor.kl_loss_coef": "algorithm.kl.coef",
    "actor_rollout_ref.actor.loss_agg_mode": "algorithm.loss_aggregation",
    "actor_rollout_ref.actor.optim.lr": "learner.optimizer.lr",
    "actor_rollout_ref.actor.ppo_epochs": "learner.num_epochs",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "learner.micro_batch_tokens",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "learner.mini_batch_size",
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.rollout.n": "rollout.group_size",
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "agent.max_steps": "rollout.max_steps",
    "agent.overlong_filter": "rollout.overlong_filter",
    "agent.trajectory_timeout": "rollout.timeout_seconds",
    "algorithm.adv_estimator": "algorithm.name",
    "data.max_prompt_length": "rollout.max_prompt_tokens",
    "data.max_response_length": "rollout.max_response_tokens",
    "data.train_batch_size": "rollout.groups_per_step",
    "trainer.default_local_dir": "run.directory",
    "trainer.n_gpus_per_node": "learner.num_workers",
    "trainer.resume_mode": "run.resume",
    "trainer.save_freq": "run.checkpoint_every",
    "trainer.test_freq": "evaluation.every",
    "trainer.total_epochs": "run.num_steps",
}
"""Settings of rLLM v0.1 and what stands for them; values and units may differ (``launch/README.md``)."""


def unknown(kind: str, name: str, known: list[str]) -> str:
    """The sentence about ``name``, which is not among the ``known`` names of its ``kind``."""
    if name in REFERENCE_SETTINGS:
        return f"There is no {kind} {name!r}: rLLM v0.1's is {REFERENCE_SETTINGS[name]!r} here."
    same_leaf = [other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2]]
    near = difflib.get_close_matches(name, same_leaf or known, n=1, cutoff=0.0 if same_leaf else 0.3)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
    return f"There is no {kind} {name!r}. {hint}"
