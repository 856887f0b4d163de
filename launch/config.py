"""The whole configuration: one tree of dataclasses, read by Hydra, checked here before anything starts.

Each component's settings are declared beside it, except where its module is heavy to import; this file
puts them together and checks what crosses from one to the other.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, field, is_dataclass
from typing import Any, get_type_hints

from actors.settings import FleetConfig, ServerConfig
from environments.errors import ConfigError
from environments.types import TerminationReason
from launch.metrics import evaluation_metrics
from policies.learning.algorithms import Algorithm, check_group_size, resolve
from policies.learning.checks import one_of, within
from policies.learning.kl import check_kl_horizon
from policies.learning.settings import (
    AlgorithmConfig,
    CriticConfig,
    LearnerConfig,
    LoRAConfig,
    OptimizerConfig,
)

MASKABLE = [
    str(each) for each in TerminationReason if not each.is_failure and each is not TerminationReason.TIMEOUT
]
"""Endings whose trajectories are trained on unless ``selection.masked_reasons`` names them."""


@dataclass
class RunConfig:
    """One run and its folder."""

    directory: str = "runs/${now:%Y-%m-%d_%H-%M-%S}"
    """Where checkpoints, metrics and the learning curve go."""
    num_steps: int = 100
    """Policy updates."""
    resume: bool = False
    """Go on from the newest checkpoint in the directory."""
    checkpoint_every: int = 50
    """Steps between checkpoints; one is always written at the end and on Ctrl-C."""
    checkpoints_kept: int = 2
    """Older checkpoints are deleted, but for the best one."""
    best_metric: str | None = None
    """Metric of the evaluations, such as eval/reward_mean: every evaluated policy is checkpointed, and the
    best one kept, with a pointer called best."""


@dataclass
class ModelConfig:
    """The model to train."""

    path: str | None = None
    """Folder or hub name in Hugging Face format; null builds the tiny model of the workload."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of its chat template in rollouts and demonstrations, such as {enable_thinking: false}."""


@dataclass
class WarmStartConfig:
    """Supervised learning on the workload's demonstrations, before the first rollout."""

    num_steps: int = 0
    """Optimizer steps; 0 leaves it out."""
    batch_size: int = 32
    """Demonstrations per step."""
    optimizer: OptimizerConfig = field(
        default_factory=lambda: OptimizerConfig(lr=3e-3, schedule="cosine", warmup_steps=20, min_lr_ratio=0.1)
    )


@dataclass
class RolloutConfig:
    """What is rolled out for one update, and where a rollout ends."""

    groups_per_step: int = 8
    """Tasks per update."""
    group_size: int = 8
    """Rollouts of the same task, compared with each other."""
    max_staleness: int = 0
    """Updates by which the policy in training may be ahead of the oldest token that it learns from. 0 rolls
    out and learns in turns; above 0 the fleet goes on while the learner learns."""
    task_weights: str | None = None
    """Key of a task's weight: how often it is played, compared with others. Null plays all equally."""
    temperature: float = 1.0
    """Sampling temperature, in training and evaluation."""
    max_steps: int = 5
    """Turns of a trajectory."""
    max_prompt_tokens: int = 512
    """Longest first prompt."""
    max_response_tokens: int = 512
    """Everything after the first prompt, over the whole trajectory."""
    max_turn_tokens: int | None = None
    """Most tokens of one completion; null leaves it to max_response_tokens."""
    timeout_seconds: float = 600.0
    """A rollout that takes longer is ended together with its actor."""
    overlong_filter: bool = False
    """Do not train on what a limit has ended: steps, tokens or time."""


@dataclass
class SelectionConfig:
    """Which groups are trained on. Another task takes the place of a dropped group; all are counted."""

    min_members: int | None = None
    """Members that infrastructure has not spoilt; a group with fewer is dropped. Null wants all of them."""
    min_reward: float | None = None
    """A group with a lower mean reward is dropped as too hard."""
    max_reward: float | None = None
    """A group with a higher mean reward is dropped as too easy."""
    masked_reasons: list[str] = field(default_factory=list)
    """Trajectories that ended so are compared with, but not trained on: [max_steps, prompt_too_long]. What
    has failed or run out of time never is."""
    max_dropped: int = 64
    """Groups that are replaced for one update; if more are dropped, it makes do with fewer."""


@dataclass
class EvaluationConfig:
    """Sampled success on held-out tasks."""

    every: int = 0
    """Steps between evaluations; 0 evaluates before the first and after the last step only."""
    num_tasks: int = 200
    """The first tasks of the validation set."""
    num_replicas: int = 0
    """Engines of its own, on which an evaluation goes on while the next updates are made. 0 evaluates on
    the policy server, between two updates."""


@dataclass
class TrainConfig:
    """Everything that ``python -m launch.train`` can be told."""

    workload: str | None = None
    """Module with ``workload(seed) -> Workload``: agent, environment, tasks."""
    seed: int = 0
    """Of the model, the tasks' order and every sampled token."""
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    fleet: FleetConfig = field(default_factory=FleetConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


def check(config: TrainConfig) -> None:
    """Refuse what cannot work, before anything is started.

    Raises:
        ConfigError: names the values and the way out.
    """
    algorithm = resolve(config.algorithm, config.rollout.max_response_tokens)
    check_group_size(algorithm, config.rollout.group_size)
    check_kl_horizon(algorithm, config.rollout.groups_per_step * config.rollout.group_size)
    one_of("learner.device", config.learner.device, ("cpu", "cuda"))
    one_of("learner.dtype", config.learner.dtype, ("float32", "bfloat16"))
    for name, optimizer in (
        ("learner.optimizer", config.learner.optimizer),
        ("learner.critic.optimizer", config.learner.critic.optimizer),
        ("warm_start.optimizer", config.warm_start.optimizer),
    ):
        one_of(f"{name}.schedule", optimizer.schedule, ("constant", "cosine"))
        within(f"{name}.lr", optimizer.lr, 0, math.inf)
    for name, (value, smallest) in _counts(config).items():
        if value < smallest:
            raise ConfigError(f"{name}={value} has to be at least {smallest}.")
    within("rollout.temperature", config.rollout.temperature, 0, math.inf, open_below=True)
    within("learner.mismatch_alarm", config.learner.mismatch_alarm, 0, math.inf)
    within("learner.critic.clip_range", config.learner.critic.clip_range, 0, math.inf, open_below=True)
    _check_lengths(config)
    _check_selection(config)
    _check_idle_settings(config, algorithm)


def _check_selection(config: TrainConfig) -> None:
    selection, rollout = config.selection, config.rollout
    for reason in selection.masked_reasons:
        one_of("selection.masked_reasons", reason, MASKABLE)
    low, high = selection.min_reward, selection.max_reward
    if low is not None and high is not None and low > high:
        raise ConfigError(
            f"selection.min_reward={low} is above selection.max_reward={high}: no group can be between them."
        )
    if selection.min_members is not None and not 1 <= selection.min_members <= rollout.group_size:
        raise ConfigError(
            f"selection.min_members={selection.min_members} has to be between 1 and rollout.group_size="
            f"{rollout.group_size}, or null, which is all of them."
        )


def _check_idle_settings(config: TrainConfig, algorithm: Algorithm) -> None:
    """Refuse settings that would change nothing."""
    learner, evaluation = config.learner, config.evaluation
    if learner.critic != CriticConfig() and not algorithm.uses_critic:
        raise ConfigError(
            f"learner.critic was changed, and algorithm.name={algorithm.name!r} has no critic: leave it out, "
            "or set algorithm.name=ppo."
        )
    if not learner.lora.rank and learner.lora != LoRAConfig():
        raise ConfigError(
            "learner.lora was changed, and learner.lora.rank=0 trains without adapters: set "
            "learner.lora.rank=16, for example, or leave it out."
        )
    if config.server.adapters:
        raise ConfigError(
            f"server.adapters={config.server.adapters} is for launch.serve: what is trained or evaluated is "
            "the model of model.path, and a run with adapters is one (model.path=runs/my-run)."
        )
    if config.rollout.overlong_filter and algorithm.overlong_penalty:
        raise ConfigError(
            f"rollout.overlong_filter=true leaves out the very trajectories that algorithm.overlong_penalty="
            f"{algorithm.overlong_penalty} is there for: choose one of the two."
        )
    one_of("run.best_metric", config.run.best_metric, evaluation_metrics(()).keys() | {"eval/pass_at_1"})
    if evaluation.num_replicas and not evaluation.every:
        raise ConfigError(
            f"evaluation.num_replicas={evaluation.num_replicas} is for evaluations during training, and "
            "evaluation.every=0 has none: set evaluation.every=10, for example, or evaluation.num_replicas=0."
        )


def _check_lengths(config: TrainConfig) -> None:
    rollout = config.rollout
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if longest > config.server.engine.max_model_tokens:
        raise ConfigError(
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} and rollout.max_response_tokens="
            f"{rollout.max_response_tokens} need a context of {longest} tokens, but server.engine."
            f"max_model_tokens={config.server.engine.max_model_tokens}. Raise it, or lower the other two."
        )
    if longest > config.learner.micro_batch_tokens:
        raise ConfigError(
            f"learner.micro_batch_tokens={config.learner.micro_batch_tokens} cannot hold one trajectory of "
            f"rollout.max_prompt_tokens + rollout.max_response_tokens = {longest} tokens. Raise it to that."
        )


def _or(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def _counts(config: TrainConfig) -> dict[str, tuple[int, int]]:
    """Numbers of things, and the smallest that makes sense."""
    return {
        "run.num_steps": (config.run.num_steps, 1),
        "run.checkpoint_every": (config.run.checkpoint_every, 1),
        "run.checkpoints_kept": (config.run.checkpoints_kept, 1),
        "rollout.groups_per_step": (config.rollout.groups_per_step, 1),
        "rollout.group_size": (config.rollout.group_size, 1),
        "rollout.max_staleness": (config.rollout.max_staleness, 0),
        "rollout.max_steps": (config.rollout.max_steps, 1),
        "rollout.max_prompt_tokens": (config.rollout.max_prompt_tokens, 1),
        "rollout.max_response_tokens": (config.rollout.max_response_tokens, 1),
        "selection.max_dropped": (config.selection.max_dropped, 1),
        "rollout.max_turn_tokens": (_or(config.rollout.max_turn_tokens, 1), 1),
        "evaluation.every": (config.evaluation.every, 0),
        "evaluation.num_tasks": (config.evaluation.num_tasks, 1),
        "evaluation.num_replicas": (config.evaluation.num_replicas, 0),
        "fleet.num_actors": (config.fleet.num_actors, 1),
        "learner.num_workers": (config.learner.num_workers, 1),
        "learner.mini_batch_size": (config.learner.mini_batch_size, 1),
        "learner.lora.rank": (config.learner.lora.rank, 0),
        "server.num_replicas": (config.server.num_replicas, 1),
        "warm_start.num_steps": (config.warm_start.num_steps, 0),
        "warm_start.batch_size": (config.warm_start.batch_size, 1),
    }


# -- reading it ----------------------------------------------------------------------------------------


def register() -> None:
    """Make the tree known to Hydra as ``train_config``, for ``compose`` and for users' ``@hydra.main``."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import DictConfig, OmegaConf

    tree = OmegaConf.structured(TrainConfig)
    for name in field_names():
        node = OmegaConf.select(tree, name, throw_on_resolution_failure=False)
        if isinstance(node, DictConfig):
            OmegaConf.set_struct(node, False)  # its keys are the user's: nobody has to know Hydra's plus sign
    ConfigStore.instance().store(name="train_config", node=tree)


def compose(overrides: list[str]) -> TrainConfig:
    """The configuration of ``overrides`` such as ``recipe=calculator learner.optimizer.lr=1e-4``.

    Raises:
        ConfigError: an unknown key or recipe, or a value of the wrong type.
    """
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    register()
    try:
        with initialize_config_module("launch.recipes", version_base=None):
            tree = hydra_compose("train", overrides=overrides)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_readable(error)) from error
    return as_train_config(tree)


def as_train_config(tree: Any) -> TrainConfig:
    """A Hydra/OmegaConf tree, or a ``TrainConfig`` already, as the dataclass tree that components take.

    Raises:
        ConfigError: a key that ``TrainConfig`` does not have, or a value of the wrong type.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(tree, TrainConfig):
        return tree
    try:
        merged = OmegaConf.merge(OmegaConf.structured(TrainConfig), tree)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_readable(error)) from error
    assert isinstance(config, TrainConfig)
    return config


def _readable(error: Exception) -> str:
    """Hydra's message as one paragraph, with the nearest name that exists."""
    text = " ".join(str(error).split())
    cause = " ".join(str(error.__cause__).split()) if error.__cause__ else ""
    text = f"{text} {cause}".strip()
    recipe = re.search(r"Could not find 'recipe/([^']*)'", text)
    if recipe:
        return (
            _unknown("recipe", recipe[1], recipe_names())
            + " Or name a module of your own: workload=my_module."
        )
    key = re.search(r"(?:Key|key) '?([\w.]+)'? (?:is )?not in", text) or re.search(
        r"override '?([\w.]+)=", text
    )
    full_key = re.search(r"full_key: ([\w.]+)", text)
    if "not in" in text and key:
        return _unknown("setting", (full_key or key)[1], field_names())
    return text


def _unknown(kind: str, name: str, known: list[str]) -> str:
    same_leaf = [other for other in known if other.rpartition(".")[2] == name.rpartition(".")[2]]
    near = difflib.get_close_matches(name, same_leaf or known, n=1, cutoff=0.0 if same_leaf else 0.3)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
    return f"There is no {kind} {name!r}. {hint}"


def recipe_names() -> list[str]:
    """The recipes that come with Troupe."""
    from importlib.resources import files

    folder = files("launch.recipes") / "recipe"
    return sorted(
        entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")
    )


def field_names(node: Any = TrainConfig, prefix: str = "") -> list[str]:
    """All settings by their dotted names."""
    names = []
    for name, kind in get_type_hints(node).items():
        names += field_names(kind, f"{prefix}{name}.") if is_dataclass(kind) else [prefix + name]
    return names


def help_text(command: str, summary: str) -> str:
    """What ``--help`` prints: usage, recipes, and every setting with its default."""
    lines = [
        summary,
        "",
        f"usage: python -m {command} [recipe=NAME] [setting=value ...]",
        "",
        f"recipes: {', '.join(recipe_names())}",
        "",
        "settings and their defaults:",
    ]
    defaults = TrainConfig()
    for name in field_names():
        value: Any = defaults
        for part in name.split("."):
            value = vars(value)[part]
        lines.append(f"  {name}={'null' if value is None else value}")
    return "\n".join(lines) + "\n"
