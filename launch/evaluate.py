"""``python -m launch.evaluate recipe=calculator model.path=runs/...``: measure a model on held-out tasks."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from environments.data.datasets import Dataset
from environments.errors import ConfigError, TroupeError
from environments.pass_at_k import check_comparable, compute_pass_at_k, judges
from environments.types import Trajectory
from launch.recipes.task_file import workload_of
from launch.reporting.conversation import best_and_worst, conversation
from launch.reporting.metrics import environment_metrics, has_failed
from launch.run_folder.lock import run_directory, writing_to
from launch.run_folder.model_paths import model_folder, served_model
from launch.settings.command import Command
from launch.settings.tree import LIMITS, TrainConfig, without_training
from launch.validation.policies import check_one_policy
from launch.validation.resources import check_gpus
from launch.validation.serving import check_engine, check_pictures, check_tool_parsers
from launch.validation.settings import check_evaluation_settings
from launch.validation.trial import try_first_task
from launch.validation.workload import check_classes, check_held_out_tasks
from launch.workload import Workload
from policies.learning.samples import is_judged
from policies.model_files import check_loadable

TRAJECTORIES = "evaluation.jsonl"


def evaluate(config: TrainConfig) -> None:
    """Play the held-out tasks, ``evaluation.rollouts_per_task`` times each; print and write what came of it.

    Raises:
        TroupeError: something is wrong that its message explains.
    """
    check_evaluation(config)
    assert config.model.path is not None
    workload = workload_of(replace(config, held_out=config.held_out or config.dataset))
    check_evaluated_workload(config, workload)
    model_path = model_folder(config.model.path)
    check_loadable(model_path, config.model.chat_template_kwargs)
    check_pictures(model_path, config.server.engine)
    sets = held_out_sets(config, workload)
    tasks = Dataset(task for each in sets.values() for task in each)
    path = results_file(config)
    if path.exists():
        sys.stdout.write(f"Results in {path} are not played again: delete it to begin anew.\n")
    times = config.evaluation.rollouts_per_task
    sys.stdout.write(
        f"Evaluating {model_path} on {len(tasks) // times} tasks, "
        f"{'once' if times == 1 else f'{times} times'} each.\n"
    )
    trajectories = roll_out(config, workload, tasks, model_path, path)
    report(trajectories)
    report_sets({name: len(each) for name, each in sets.items()}, trajectories)
    for trajectory in best_and_worst(trajectories) if sys.stdout.isatty() else ():
        sys.stdout.write(f"{trajectory.rollout_id}:\n{conversation(trajectory)}\n")
    sys.stdout.write(f"Trajectories: {path}\n")


def check_evaluation(config: TrainConfig) -> None:
    """Find what would fail later in an evaluation, as far as its settings go.

    Raises:
        ConfigError: the first mistake, with its remedy.
    """
    if config.model.path is None:
        raise ConfigError(
            "model.path is not set: name the model to evaluate, a run such as model.path=runs/my-run (its "
            "newest checkpoint), a checkpoint, a Hugging Face folder or name."
        )
    check_evaluation_settings(config)
    check_engine(config)
    check_gpus(without_training(config))


def check_evaluated_workload(config: TrainConfig, workload: Workload) -> None:
    """Find what would fail later in an evaluation's rollouts.

    Raises:
        ConfigError, DatasetError, AgentError, ContractError: the first mistake, with its remedy.
    """
    check_classes(workload)
    check_one_policy(workload)
    check_tool_parsers(config, workload)
    for tasks in check_held_out_tasks(workload).values():
        check_comparable(tasks[: config.evaluation.num_tasks])
        try_first_task(workload, tasks)


def held_out_sets(config: TrainConfig, workload: Workload) -> dict[str, Dataset]:
    """The first ``evaluation.num_tasks`` tasks of each set, each ``evaluation.rollouts_per_task`` times."""
    number, times = config.evaluation.num_tasks, config.evaluation.rollouts_per_task
    return {name: tasks[:number].repeat(times) for name, tasks in check_held_out_tasks(workload).items()}


def results_file(config: TrainConfig) -> Path:
    """The file of the trajectories; its folder is made. Raises ``ConfigError`` if it cannot be."""
    path = run_directory(config.run.directory) / TRAJECTORIES
    with writing_to(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    return path


def roll_out(
    config: TrainConfig, workload: Workload, tasks: Dataset, model_path: str, results_file: Path
) -> list[Trajectory]:
    """The trajectories of ``tasks`` under the model. What is started for them has ended on return."""
    from launch.cluster.served_model import policy_app
    from launch.training.rollout_requests import evaluation_params, execution_engine

    with policy_app(config, served_model(model_path, config.model.chat_template_kwargs)) as (app, start):
        policy = {
            "app_name": app.name,
            "model_path": model_path,
            "chat_template_kwargs": config.model.chat_template_kwargs,
        }
        params = evaluation_params(config).replace(seed=config.seed)
        engine = execution_engine(config, workload, len(tasks), params, "serve", policy)
        with engine:
            engine.start()  # its actors start while the server loads the model
            start()
            return asyncio.run(engine.execute_tasks(tasks, results_file))


def report(trajectories: Sequence[Trajectory]) -> None:
    """Print success, the environment's metrics, the pass@k table and how the rollouts ended.

    Raises:
        TroupeError: every rollout failed, or has no reward yet, so nothing was measured.
    """
    errors = [each.error for each in trajectories if has_failed(each)]
    if not any(is_judged(each) and not has_failed(each) for each in trajectories):
        first = errors[0] if errors else "its reward comes later, and no evaluation waits for it."
        raise TroupeError(f"All {len(trajectories)} rollouts failed. The first: {first}")
    judged_by = judges(Counter(each.judged_by for each in trajectories))
    sys.stdout.write(f"{_result(trajectories, f' by {judged_by}')}\n")
    for name, value in environment_metrics(trajectories).items():
        number = sum(name in each.metrics for each in trajectories)
        sys.stdout.write(f"{name} {value:.3f} (mean of {number} rollouts)\n")
    compute_pass_at_k(trajectories)
    reasons = Counter(str(each.termination_reason) for each in trajectories)
    ended = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
    sys.stdout.write(f"ended: {ended}\n")
    if errors:
        sys.stdout.write(f"{len(errors)} rollouts failed, the first with: {errors[0]}\n")


def report_sets(sizes: Mapping[str, int], trajectories: Sequence[Trajectory]) -> None:
    """Print success and reward of each set that has a name.

    Args:
        sizes: numbers of rollouts of the sets, in the order of ``trajectories``.
    """
    first = 0
    for name, size in sizes.items():
        part = trajectories[first : first + size]
        first += size
        if name and any(map(is_judged, part)):
            sys.stdout.write(f"{name}: {_result(part)}\n")


def _result(trajectories: Sequence[Trajectory], by: str = "") -> str:
    """Success and reward of trajectories, of which one at least is judged."""
    correct, number = sum(each.succeeded for each in trajectories), len(trajectories)
    mean = fmean(each.reward for each in trajectories if is_judged(each))
    return f"success {correct / number:.3f} ({correct} of {number} rollouts){by}, mean reward {mean:.3f}"


COMMAND = Command(
    name="evaluate",
    summary=__doc__,
    work=evaluate,
    settings=(
        "recipe",
        "workload",
        "dataset",
        "held_out",
        "agent",
        "reward",
        "seed",
        "run.directory",
        "model",
        "rollout.temperature",
        *(f"rollout.{each}" for each in LIMITS),
        "fleet",
        "server",
        "evaluation.num_tasks",
        "evaluation.rollouts_per_task",
        "evaluation.temperature",
        "evaluation.top_p",
    ),
    left_out={
        "rollout.group_size": "To play each task several times, set evaluation.rollouts_per_task.",
        "fleet.max_actors": "An evaluation has fleet.num_actors from its beginning to its end.",
        "fleet.nodes": "An evaluation's actors live on any node, and reserve nothing of it.",
        "server.versions": "launch.serve serves older versions.",
        "server.adapters": "launch.serve serves adapters; a run with adapters is evaluated by model.path.",
        "server.agents": "launch.serve serves agents.",
        "server.colocated": "Engines take turns with a learner in training only.",
        "server.weights": "Weights are published in training only.",
    },
)


main = COMMAND.run
"""Function that runs the command with its arguments, and returns its exit status."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
