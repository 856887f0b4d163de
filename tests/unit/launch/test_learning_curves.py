"""The runs and summaries of ``tests/benchmarks/learning_curves.py``, on values made up here."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from launch.recipes import guess
from launch.settings.compose import compose
from launch.settings.tree import algorithm_of
from launch.training.stages.chosen import chosen_stages
from launch.validation.settings import check_training_settings
from launch.workload import load_workload

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("learning_curve_plots")


@pytest.fixture
def curves(plots: Any) -> Any:
    return importlib.import_module("learning_curves")


def finished_run(folder: Path, seed: int, before: float, after: float) -> None:
    """A run of reinforcement as a training leaves it behind: an update, and evaluations before and after."""
    directory = folder / "reinforce" / f"seed-{seed}"
    directory.mkdir(parents=True)
    records = [
        {"step": 0, "eval/reward_mean": before, "eval/called": before, "eval/seconds_mean": 1.0},
        {"step": 1, "rollout/reward_mean": before, "rollout/called": before, "rollout/pass_at_1": 0.1},
        {"step": 1, "eval/reward_mean": after, "eval/called": 1.0},
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (directory / "finished.json").write_text(json.dumps({"commit": "abc", "seconds": 1}))


RUNS = [
    (recipe, method)
    for recipes, methods in (
        (("calculator", "guess"), ("reinforce", "expert_iteration", "sft")),
        (("smollm2", "word_problems"), ("reinforce", "expert_iteration", "lora")),
    )
    for recipe in recipes
    for method in methods
]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "method"), RUNS)
def test_settings_of_every_run_are_valid(curves: Any, recipe: str, method: str) -> None:
    about = curves.RECIPES[recipe]
    assert method in about.methods
    config = compose(curves.overrides(recipe, about, method, 30))
    check_training_settings(config)
    updates = 0 if method == "sft" else 30
    stages = {"reinforce": config.run.num_steps, "expert_iteration": config.expert_iteration.num_steps}
    assert sum(stages.get(name, 0) for name in config.stages) == updates
    as_it_is = compose([f"recipe={recipe}"])
    recipe_steps = as_it_is.warm_start.num_steps
    assert config.warm_start.num_steps == recipe_steps * (2 if method == "sft" else 1)
    assert config.learner.optimizer.lr == as_it_is.learner.optimizer.lr or method == "lora"


@pytest.mark.slow
def test_baseline_learns_from_successful_demonstrations_alone(curves: Any) -> None:
    config = compose(curves.overrides("guess", curves.RECIPES["guess"], "sft", 30))
    workload = load_workload(config.workload, seed=0)
    demonstrations = guess.demonstrations(0)
    successful = [each.messages for each in demonstrations.with_rewards() if each.reward == 1.0]
    assert 0 < len(successful) < len(demonstrations)
    assert workload.demonstrations == successful
    assert workload.val_dataset is not None
    assert list(workload.val_dataset) == list(guess.workload(1).val_dataset or ())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["reinforce", "imitation"])
@pytest.mark.parametrize("task", ["renamed_search", "possible_guesses"])
def test_evidence_of_learning_has_valid_settings(curves: Any, task: str, method: str) -> None:
    about = importlib.import_module("evidence.learning").RECIPES[task]
    config = compose(curves.overrides(task, about, method, None))
    check_training_settings(config)
    assert config.warm_start.num_steps == about.warm_start_steps * (2 if method == "imitation" else 1)


@pytest.mark.slow
def test_demonstrations_of_guesses_find_four_of_five_numbers(curves: Any) -> None:
    workload = importlib.import_module("evidence.possible_guesses").workload(0)
    rewards = [each.reward for each in workload.demonstrations.with_rewards()]
    assert sum(rewards) / len(rewards) == pytest.approx(0.802, abs=0.02)


@pytest.mark.slow
def test_worlds_of_search_share_no_title(
    curves: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TROUPE_HOME", str(tmp_path))
    search = importlib.import_module("evidence.renamed_search")
    assert len(search.TASKS) == search.WORLDS
    words = [{word for task in tasks for word in re.findall(r"\d{5}", str(task))} for tasks in search.TASKS]
    assert sum(map(len, words)) == len(set.union(*words)) > 0
    assert not re.search("[A-Z][a-z]+", str([task["answer"] for task in search.TASKS[0]]))
    demonstrations = list(search.demonstrations(0)[:100].with_rewards())
    twice = [each.reward == 1.0 for each in demonstrations if len(each.messages) == 7]
    assert all(twice)
    assert 20 < len(twice) < 60


@pytest.mark.slow
def test_runs_of_all_algorithms_have_valid_settings(curves: Any) -> None:
    evidence = importlib.import_module("evidence.algorithms")
    for arm in evidence.arms([each for each in evidence.ALGORITHMS if each != "distillation"]):
        run = evidence.Run(arm, evidence.FIRST_RATE, seed=0)
        config = compose(run.settings)
        check_training_settings(config)
        algorithm = algorithm_of(config)
        assert algorithm.bypass == (arm.correction == "bypass")
        assert algorithm.correction_level == (
            arm.correction if arm.correction in ("token", "sequence") else None
        )


@pytest.mark.slow
def test_rate_is_tuned_until_both_neighbours_are_worse(curves: Any) -> None:
    evidence = importlib.import_module("evidence.algorithms")
    kept: dict[str, dict[str, float]] = {}
    made = []
    while (run := evidence.next_run(kept, ["grpo", "rloo"], [0, 1])) is not None:
        made.append(run)
        kept[run.name] = {"success": 0.9 - 0.02 * abs(run.rate + 5)}
    tuning, others = made[:8], made[8:]
    assert [run.rate for run in tuning] == 2 * [-7, -6, -5, -4]
    assert {run.seed for run in tuning} == {evidence.TUNING_SEED}
    assert {run.rate for run in others} == {-5}
    assert [run.seed for run in others] == 10 * [0] + 10 * [1], "all of a seed first"
    found = evidence.finished(kept, ["grpo", "rloo"], [0, 1])
    assert {len(values) for values in found.values()} == {2}


@pytest.mark.slow
def test_methods_beside_a_verifier_have_equal_rollouts(curves: Any) -> None:
    evidence = importlib.import_module("evidence.verified_answers")
    rollouts = set()
    for method, own in evidence.OWN_SETTINGS.items():
        config = compose([*evidence.SETTINGS, *own])
        check_training_settings(config)
        [stage] = chosen_stages(config)
        rollouts.add(stage.num_steps * config.rollout.groups_per_step * config.rollout.group_size)
        assert stage.optimizer.lr == evidence.LR, method
    assert rollouts == {evidence.UPDATES * evidence.GROUPS * evidence.GROUP_SIZE}
    held_out, training = (
        {evidence.numbers_of(task["question"]) for task in tasks} for tasks in evidence.split_tasks()
    )
    assert len(held_out) == evidence.NUM_HELD_OUT
    assert not held_out & training


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "smollm2-135m-instruct"])
def test_comparison_gives_both_trainers_one_update(curves: Any, model: str) -> None:
    evidence = importlib.import_module("evidence.same_as_trl")
    compared = evidence.COMPARISONS[model]
    config, trl = compose(compared.troupe), evidence.TRL | compared.trl
    check_training_settings(config)
    answers = config.rollout.groups_per_step * config.rollout.group_size
    assert config.rollout.group_size == evidence.GROUP_SIZE
    assert answers == trl["per_device_train_batch_size"] * trl["steps_per_generation"]
    part = trl["per_device_train_batch_size"] * trl.get("gradient_accumulation_steps", 1)
    assert part == config.learner.mini_batch_size, "answers of an optimizer step"
    assert trl["save_steps"] == config.run.checkpoints["every"] * answers // part
    assert trl["adam_beta2"] == config.learner.verl["optimizer"]["betas"][1]


def test_interval_is_that_of_the_mean_of_few_seeds(plots: Any) -> None:
    summary = plots.Summary.of([0.9, 0.95, 1.0])
    assert (summary.mean, summary.low, summary.high) == (pytest.approx(0.95), 0.9, 1.0)
    assert summary.margin == pytest.approx(4.303 * 0.05 / 3**0.5, rel=1e-4)
    assert str(summary) == "0.95 ± 0.12 (0.90 to 1.00)"
    assert str(plots.Summary.of([0.5])) == "0.50", "one seed has no interval"


@pytest.mark.slow
def test_table_shows_what_the_environment_names(curves: Any, plots: Any, tmp_path: Path) -> None:
    finished_run(tmp_path, 0, before=0.4, after=0.9)
    finished_run(tmp_path, 1, before=0.5, after=0.9)
    (tmp_path / "sft" / "seed-0").mkdir(parents=True)  # begun, not finished
    runs, about = curves.read_runs(tmp_path)
    assert set(about) == {"reinforce/seed-0", "reinforce/seed-1"}
    assert plots.table(runs, curves.METHODS).splitlines() == [
        "| held-out tasks | success | `called` |",
        "|---|---|---|",
        "| before the first update | 0.45 ± 0.64 (0.40 to 0.50) | 0.45 ± 0.64 (0.40 to 0.50) |",
        "| reinforcement | 0.90 ± 0.00 (0.90 to 0.90) | 1.00 ± 0.00 (1.00 to 1.00) |",
    ]
    plots.draw(runs, curves.METHODS, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_table_is_written_between_its_markers(curves: Any, tmp_path: Path) -> None:
    write_measured = importlib.import_module("readme_tables").write_measured
    page = tmp_path / "README.md"
    page.write_text("a\n<!-- measured: guess -->\nold\n<!-- end -->\nb\n")
    write_measured(page, "guess", "new")
    assert page.read_text() == "a\n<!-- measured: guess -->\nnew\n<!-- end -->\nb\n"
    with pytest.raises(SystemExit, match="no line '<!-- measured: other -->'"):
        write_measured(page, "other", "new")


def test_finished_run_is_not_run_again(curves: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished_run(tmp_path, 0, before=0.4, after=0.9)
    monkeypatch.setattr(curves, "run", lambda settings: pytest.fail(f"started {settings}"))
    curves.run_once(["recipe=guess"], tmp_path / "reinforce" / "seed-0")
