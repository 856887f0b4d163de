"""The answer to a name that no setting has: what stands for it here, or the nearest."""

from __future__ import annotations

import difflib

SYNONYMS = {
    "algorithm.clip_high": "clip_ratio clip_ratio_high cliprange clip_range clip_eps epsilon eps_clip",
    "algorithm.clip_low": "clip_ratio_low",
    "algorithm.correction.mask_outside": "mask_below mask_above",
    "algorithm.entropy_coef": "entropy_coeff entropy entropy_bonus ent_coef",
    "algorithm.kl.coef": "beta kl_coef kl_beta kl_loss_coef kl_penalty init_kl_coef kl_coeff",
    "algorithm.loss_aggregation": "loss_agg_mode loss_type",
    "algorithm.name": "adv_estimator algo method",
    "algorithm.overlong": "overlong_penalty overlong_buffer_tokens overlong_buffer",
    "evaluation.every": "eval_steps eval_every test_freq eval_interval",
    "fleet.nodes": "num_cpus_per_actor",
    "fleet.num_actors": "min_actors",
    "learner.dtype": "bf16 fp16 precision mixed_precision torch_dtype",
    "learner.lora.rank": "lora_rank lora_r",
    "learner.micro_batch_tokens": "micro_batch_size gradient_accumulation_steps "
    "per_device_train_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu",
    "learner.mini_batch_size": "ppo_mini_batch_size minibatch_size",
    "learner.num_epochs": "ppo_epochs epochs num_train_epochs num_iterations",
    "learner.num_workers": "trainer.n_gpus_per_node",
    "learner.optimizer.lr": "lr learning_rate actor_lr",
    "learner.optimizer.min_lr_ratio": "schedule lr_schedule lr_scheduler lr_scheduler_type",
    "learner.verl": "lora_alpha alpha target_modules betas",
    "model.path": "model model_name model_name_or_path base_model pretrained checkpoint_path",
    "rollout.group_size": "n num_generations num_rollouts n_samples samples_per_prompt rollout_n",
    "rollout.groups_per_step": "batch_size train_batch_size rollout_batch_size",
    "rollout.max_prompt_tokens": "max_prompt_length",
    "rollout.max_response_tokens": "max_response_length max_completion_length max_new_tokens max_tokens",
    "rollout.max_steps": "max_turns max_episode_steps agent.max_steps",
    "rollout.timeout_seconds": "trajectory_timeout",
    "run.checkpoints": "save_steps save_freq save_every save_interval save_total_limit checkpoint_to "
    "checkpoint_every checkpoints_kept",
    "run.directory": "output_dir out_dir default_local_dir checkpoint_dir save_dir",
    "run.num_steps": "total_training_steps total_steps total_epochs train_steps num_updates",
    "run.resume": "resume_mode resume_from resume_from_checkpoint auto_resume",
    "selection.masked_reasons": "overlong_filter",
    "selection.reward_range": "min_reward max_reward",
    "server.access.hosts": "public_url",
    "server.access.per_minute": "requests_per_minute tokens_per_minute",
    "server.engine.options": "cache_after_publish server.engine.dtype server.engine.num_threads",
    "server.engine.max_model_tokens": "max_model_len max_seq_len max_seq_length context_length",
    "server.http_port": "port",
    "server.nodes": "server.num_cpus",
}
"""Names, or their last parts, that other programs, or earlier states of this one, have for a setting. Those
of rLLM v0.1 are in ``.docs/pages/migration.md`` too."""
ABSENT = {
    "Tasks, agent and rewards come from a file (dataset=tasks.jsonl held_out=test.jsonl agent=math "
    "reward=math), from a recipe (recipe=calculator) or from a module of your own "
    "(workload=my_workload).": "datasets data train_data train_file train_files val_files train_dataset "
    "val_dataset eval_dataset dataset dataset_name env environment agent reward reward_fn reward_function "
    "reward_model",
    "Metrics always go to run.directory, as metrics.jsonl, and to the programs of "
    "run.trackers=[tensorboard,wandb,mlflow,trackio].": "logger loggers logging wandb mlflow swanlab "
    "report_to project project_name experiment_name run_name log_dir logging_dir tensorboard trackio",
    "A run ends early by run.stop_metric=eval/reward_mean run.stop_at=0.95.": "early_stopping patience "
    "early_stopping_patience early_stopping_threshold callbacks callback",
    "Training samples the policy's whole distribution, which rollout.temperature alone changes; evaluations "
    "have evaluation.temperature and evaluation.top_p.": "top_p top_k min_p repetition_penalty",
    "The learner divides its model over learner.num_workers processes; the engine divides its own by "
    "server.engine.options={tensor_parallel_size: 2}.": "tensor_parallel tensor_parallel_size fsdp fsdp_size "
    "tensor_model_parallel_size tp tp_size pipeline_parallel_size num_nodes nnodes n_gpus_per_node num_gpus "
    "gpus",
    "So many of the learner's ranks compute a row together: "
    "learner.verl.engine.ulysses_sequence_parallel_size.": "sequence_parallel_size context_parallel_size "
    "ulysses_sequence_parallel_size",
    "The engine's own options are in server.engine.options={gpu_memory_utilization: 0.8}.": "enforce_eager "
    "gpu_memory_utilization enable_chunked_prefill max_num_seqs max_num_batched_tokens "
    "enable_prefix_caching quantization",
}
"""What there is here instead of what other programs have under these names."""


def unknown(kind: str, name: str, known: list[str]) -> str:
    """The sentence about ``name``, which is not among the ``known`` names of its ``kind``."""
    return f"There is no {kind} {name!r}. {_hint(name, known)}"


def _hint(name: str, known: list[str]) -> str:
    if near := difflib.get_close_matches(name, known, n=1, cutoff=0.85):
        return f"Did you mean {near[0]!r}?"
    section, last = name.partition(".")[0], name.rpartition(".")[2]
    for setting, others in SYNONYMS.items():
        if {name, last} & set(others.split()) and setting in known:
            return f"Did you mean {setting!r}?"
    for sentence, others in ABSENT.items():
        if {section, last} & set(others.split()):
            return sentence
    if same := [other for other in known if other.rpartition(".")[2] == last]:
        return f"Did you mean {' or '.join(map(repr, same))}?"
    inside = [other for other in known if other.startswith(f"{section}.")]
    return f"Known: {', '.join(inside or sorted({other.partition('.')[0] for other in known}))}."
