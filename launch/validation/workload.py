"""Requirements of a configuration on the workload and on the model's folder."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from actors.rollouts.forks import EVERY, chooser
from environments.data.curriculum import Curriculum
from environments.data.datasets import Dataset
from environments.errors import ConfigError, DatasetError
from launch.reporting.metrics import named_metric
from launch.run_folder.model_paths import model_folder
from launch.settings.tree import ForksConfig, TrainConfig, algorithm_of
from launch.workload import Workload
from policies.agents.seats import SeatsAgent
from policies.learning.served_teacher import ServedTeacher
from policies.learning.verl.fields import check_base
from policies.model_files import check_loadable, check_teacher, config_of, num_rows

TEACHER = "algorithm.options.teacher"


def check_classes(workload: Workload) -> None:
    """Agent and environment are classes that can be made, or a function. Raises ``ConfigError``."""
    _ = workload.pair


def check_datasets(config: TrainConfig, workload: Workload) -> None:
    """Require tasks to train on, and held-out tasks where there is an evaluation.

    Raises:
        DatasetError: there is no task to train on, or something else than a dataset.
        ConfigError: settings about evaluations, and no held-out tasks.
    """
    _check_dataset("train_dataset", workload.train_dataset)
    if workload.held_out:
        check_held_out_tasks(workload)
    for setting in ("best_metric", "stop_metric"):
        metric = vars(config.run)[setting]
        name, _ = named_metric(metric or "")
        if name and name not in workload.held_out:
            raise ConfigError(
                f"run.{setting}={metric} is of the held-out tasks {name!r}, and the workload has "
                f"{', '.join(filter(None, workload.held_out)) or 'no sets with names'}: name one, or none."
            )
    if not len(workload.train_dataset):
        raise DatasetError("The training dataset is empty: pass a Dataset with at least one task.")
    evaluation = config.evaluation
    if not workload.held_out and (evaluation.every or evaluation.num_replicas or config.run.best_metric):
        raise ConfigError(
            f"evaluation.every={evaluation.every}, evaluation.num_replicas={evaluation.num_replicas} and "
            f"run.best_metric={config.run.best_metric} are about evaluations, and the workload has no "
            "val_dataset: give it one, or leave them out."
        )


def check_forks(config: TrainConfig, workload: Workload) -> None:
    """Members of a group can fork, and be compared where they do. Raises ``ConfigError``."""
    rollout, algorithm, env_class = config.rollout, algorithm_of(config), workload.pair.env_class
    forks = rollout.forks
    if forks.roots is None:
        if forks != ForksConfig():
            raise ConfigError(
                f"rollout.forks.at={forks.at!r} has no effect without rollout.forks.roots: set that too, for "
                "example rollout.forks.roots=2, or leave it out."
            )
        return
    chooser(forks.at)
    distance = EVERY.fullmatch(forks.at)
    for is_wrong, why in (
        (
            forks.roots >= rollout.group_size,
            f"and rollout.group_size={rollout.group_size} leaves no member that forks: set more, such as "
            f"rollout.group_size={4 * forks.roots}.",
        ),
        (
            env_class.resumes_by in (None, "answers"),
            f"and {env_class.__name__}.resumes_by is {env_class.resumes_by!r}, so that no episode "
            "goes on from its middle: set it to 'replay' or 'snapshot' (environments.base.BaseEnv says what "
            "they promise), or leave rollout.forks out.",
        ),
        (
            distance is not None and int(distance[1]) >= rollout.max_steps,
            f"and rollout.forks.at={forks.at!r} with rollout.max_steps={rollout.max_steps} has no turn after "
            "which to fork: choose a smaller number, or allow more steps.",
        ),
        (
            not algorithm.compares_returns,
            f"and algorithm.name={algorithm.name!r} with algorithm.credit={algorithm.credit} does not "
            "compare members by whole returns: set algorithm.name=rloo, and leave algorithm.credit out.",
        ),
        (
            "expert_iteration" in config.stages,
            f"and stages={config.stages} has expert_iteration, which would imitate a shared turn several "
            "times: leave one of the two out.",
        ),
    ):
        if is_wrong:
            raise ConfigError(f"rollout.forks.roots={forks.roots} {why}")


def check_group_reward(config: TrainConfig, workload: Workload) -> None:
    """Groups have members of one seat to compare where the reward compares them, and are judged at all.
    Raises ``ConfigError``.
    """
    reward_fn = workload.env_args.get("reward_fn")
    if hasattr(reward_fn, "compare") and getattr(reward_fn, "concurrency", 0) < 1:
        raise ConfigError(
            f"{reward_fn!r:.90} has compare(), and no concurrency above 0, the most groups that it judges at "
            "once: give it one, such as 4."
        )
    if workload.group_reward is not None and config.rollout.group_size < 2:
        raise ConfigError(
            f"rollout.group_size={config.rollout.group_size} leaves {workload.group_reward!r:.90} nothing to "
            "compare: set 2 or more, or take a reward that judges each answer by itself."
        )
    if workload.group_reward is not None and isinstance(workload.pair.make_agent(), SeatsAgent):
        raise ConfigError(
            f"agent_class={workload.pair.agent_class.__name__} plays several seats, and "
            f"{workload.group_reward!r:.90} compares the answers of one: take a reward_fn that does not, or "
            "let the environment reward its seats."
        )


def check_held_out_tasks(workload: Workload) -> Mapping[str, Dataset]:
    """The sets of an evaluation's tasks, of which each has at least one. Raises ``DatasetError``."""
    if not workload.held_out:
        raise DatasetError("The workload has no held-out tasks: give its Workload a val_dataset.")
    for name, tasks in workload.held_out.items():
        _check_dataset(f"val_dataset[{name!r}]" if name else "val_dataset", tasks)
        if name and not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            raise DatasetError(
                f"val_dataset has the name {name!r}, which is a part of metrics' names: use letters, digits, "
                "'_', '-' and '.'."
            )
        if not len(tasks):
            raise DatasetError(
                f"The held-out dataset {name and f'{name!r} '}is empty: give it a task, or leave it out."
            )
    return workload.held_out


def _check_dataset(name: str, given: Any) -> None:
    if not isinstance(given, Dataset):
        raise DatasetError(f"{name} is a {type(given).__name__}: write {name}=Dataset(list_of_dicts).")


def check_task_weights(key: str | None, tasks: Dataset) -> None:
    """Every task has a weight, and one is above 0. Raises ``DatasetError``."""
    if key is None:
        return
    weights = [task.get(key) for task in tasks]
    for index, weight in enumerate(weights):
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise DatasetError(
                f"rollout.task_weights={key!r}, and task {index} has {key}={weight!r}: give every task a "
                "number that is not negative."
            )
    if not any(weights):
        raise DatasetError(f"rollout.task_weights={key!r}, and it is 0 for every task: none would be played.")


def check_curriculum(curriculum: Curriculum | None, tasks: Dataset) -> None:
    """A curriculum is one, and can place each task. Raises ``ConfigError`` or ``DatasetError``."""
    if curriculum is None:
        return
    if not isinstance(curriculum, Curriculum):
        raise ConfigError(
            f"curriculum={curriculum!r} has to be an object of a class that is derived from Curriculum, as "
            "SuccessBand(low=0.1, high=0.9) is."
        )
    curriculum.check(tasks)


def check_model_is_named(config: TrainConfig, workload: Workload) -> None:
    """Model and teacher are named, or a tiny one can be built. Raises ``ConfigError``."""
    options, algorithm = config.model.chat_template_kwargs, algorithm_of(config)
    if algorithm.teacher == "":
        raise ConfigError(
            f"algorithm.options.teacher is not set, and algorithm.name={algorithm.name!r} learns from a "
            "teacher: name a model's folder, a checkpoint or a run, such as "
            "algorithm.options.teacher=runs/teacher."
        )
    if config.model.path is not None:
        return
    if options:
        raise ConfigError(
            f"model.chat_template_kwargs={options}, but model.path is not set, and the chat template of the "
            "tiny model has no options: leave them out."
        )
    if not workload.demonstrations:
        raise ConfigError(
            "model.path is not set, and the workload has no demonstrations to build a tiny model from: "
            "set model.path to a Hugging Face name or folder."
        )


def check_model(config: TrainConfig, workload: Workload) -> None:
    """The model can be loaded, or a tiny one be built. Raises ``ConfigError``."""
    check_model_is_named(config, workload)
    if config.model.path is not None:
        folder = model_folder(config.model.path)
        check_loadable(folder, config.model.chat_template_kwargs)
        check_base(config.learner, f"model.path={config.model.path!r}", config_of(folder))
    _check_teacher(config, workload)


def _check_teacher(config: TrainConfig, workload: Workload) -> None:
    """The teacher, if the algorithm has one, has the tokens of the model, and if it is at an address, scores
    them. Raises ``ConfigError``.
    """
    from policies.chat import load_tokenizer
    from policies.tiny import NUM_CONVERSATIONS, build_tokenizer

    algorithm, path, longest = algorithm_of(config), config.model.path, config.rollout.longest
    if algorithm.teacher is None:
        return
    if path is None:
        student, rows = build_tokenizer(workload.demonstrations[:NUM_CONVERSATIONS]), None
    else:
        student, rows = load_tokenizer(model_folder(path)), num_rows(model_folder(path))
    served = ServedTeacher.of(algorithm)
    if served is None:
        check_teacher(model_folder(algorithm.teacher, TEACHER), student, longest, rows)
        return
    if config.rollout.temperature != 1:
        raise ConfigError(
            f"{TEACHER}={algorithm.teacher!r} is an address, which gives log-probabilities at temperature 1, "
            f"and rollouts have rollout.temperature={config.rollout.temperature:g}: set it to 1, or name the "
            "teacher's folder."
        )
    served.check(lambda number: student.decode([number]), rows or len(student), longest)


def check_shapes(config: TrainConfig, workload: Workload) -> None:
    """The model's chat template takes what a file has to imitate. Raises ``DatasetError``."""
    from policies.chat import ChatRenderer, load_tokenizer
    from policies.learning.demonstrations import check_demonstrations

    if config.demonstrations is not None and config.model.path is not None:
        tokenizer = load_tokenizer(model_folder(config.model.path))
        check_demonstrations(
            ChatRenderer(tokenizer, config.model.chat_template_kwargs), workload.demonstrations
        )
