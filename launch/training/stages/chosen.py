"""The stages of a run, made from the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from environments.errors import ConfigError
from environments.named_module import load_class
from launch.settings.tree import TrainConfig, algorithm_of
from launch.training.stages.base import Stage

if TYPE_CHECKING:  # stages are chosen and checked before anything of a run is imported
    from launch.training.run_state import RunState

SUPERVISED = ("warm_start", "preferences", "expert_iteration")
STAGES = {
    "warm_start": "launch.training.stages.warm_start:WarmStart",
    "preferences": "launch.training.stages.preferences:Preferences",
    "imitation": "launch.training.stages.imitation:Imitation",
    "expert_iteration": "launch.training.stages.expert_iteration:ExpertIteration",
    "reinforce": "launch.training.stages.reinforce:Reinforce",
}


def chosen_stages(config: TrainConfig) -> list[Stage]:
    """The stages that ``config.stages`` lists, in their order, without those of 0 steps.

    Raises:
        ConfigError: a stage is unknown, listed twice, or does not take its settings; or none has a step.
    """
    stages = [_stage(config, name) for name in config.stages]
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"stages={config.stages} has {name!r} twice: name it once.")
    for name in config.stage_settings:
        if name not in names:
            raise ConfigError(
                f"stage_settings has {name!r}, and stages={config.stages} has the names {names}: add that "
                "stage, or leave its settings out."
            )
    _check_idle_sections(config, names)
    busy = [stage for stage in stages if stage.num_steps]
    if not busy:
        raise ConfigError(f"stages={config.stages}: none of them has a step to do. Add reinforce.")
    return busy


def check_earlier_stages(stages: Sequence[Stage], state: RunState) -> None:
    """No stage has steps left that stands before one that has begun: a learner does not go back to it.

    Raises:
        ConfigError: one has.
    """
    begun = [number for number, stage in enumerate(stages) if stage.num_done(state)]
    for stage in stages[: max(begun, default=0)]:
        done, newest = stage.num_done(state), stages[begun[-1]].name
        if done < stage.num_steps:
            raise ConfigError(
                f"The stage {stage.name!r} would go on from {done} to {stage.num_steps} steps, and "
                f"{newest!r} after it has begun: set its number of steps to {done}, or begin a new run with "
                f"model.path={state.directory}."
            )


def _stage(config: TrainConfig, name: str) -> Stage:
    stage_class = load_class("stages", name, STAGES, Stage)
    settings = config.stage_settings.get(stage_class.name, {})
    if settings and name in (*SUPERVISED, "reinforce"):
        raise ConfigError(
            f"stage_settings.{name} is for stages without a section: the settings of {name} are "
            f"{'run.num_steps, learner and algorithm' if name == 'reinforce' else name}."
        )
    try:
        return stage_class(config, **settings)
    except TypeError as error:
        raise ConfigError(f"stage_settings.{stage_class.name}={dict(settings)}: {error}") from error


def _check_idle_sections(config: TrainConfig, names: list[str]) -> None:
    for name in SUPERVISED:
        num_steps = getattr(config, name).num_steps
        if num_steps and name not in names:
            raise ConfigError(
                f"{name}.num_steps={num_steps} has no effect: stages={config.stages} lacks {name}. Add it "
                f"there, or set {name}.num_steps=0."
            )
        if name in names and not num_steps and name != "warm_start":
            raise ConfigError(
                f"stages={config.stages} has {name}, and {name}.num_steps=0: raise it, or leave {name} out."
            )
    # Without a model's folder the tiny model gets its tokenizer from the file.
    if config.demonstrations and config.model.path is not None and not config.warm_start.num_steps:
        raise ConfigError(
            f"demonstrations={config.demonstrations} has no effect with warm_start.num_steps=0: set "
            "warm_start.num_epochs=1, for example, or leave it out."
        )
    if set(names) <= {*SUPERVISED, "imitation"}:
        _check_supervised(config)


def _check_supervised(config: TrainConfig) -> None:
    """Nothing is started for reinforcement where all stages are supervised learning. Raises ``ConfigError``.

    Other settings of ``algorithm`` are allowed: recipes set them, and a user may override ``stages`` alone.
    """
    lacks = f"has no effect: stages={config.stages} lacks reinforce."
    if config.learner.num_epochs > 1:
        raise ConfigError(
            f"learner.num_epochs={config.learner.num_epochs} {lacks} Set learner.num_epochs=1; "
            "expert_iteration.num_epochs is that of expert_iteration."
        )
    algorithm = algorithm_of(config)
    given = f"algorithm.name={algorithm.name}"
    if config.algorithm.advantage is not None:
        given = f"algorithm.advantage={config.algorithm.advantage}"
    for setting, part, is_used in (
        (given, "a critic", algorithm.uses_critic),
        (given, "greedy rollouts", algorithm.uses_greedy_baseline),
        (given, "a teacher", algorithm.estimator.uses_teacher),
        (f"algorithm.kl.place={algorithm.kl_place}", "a reference policy", algorithm.uses_reference),
    ):
        if is_used:
            raise ConfigError(f"{setting} starts {part}, which {lacks} Add that stage, or leave this out.")
