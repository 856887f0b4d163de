"""Failed rollouts: which tasks are set aside, and when a run ends because of them."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from environments.data.datasets import Dataset
from environments.errors import EnvironmentFailure, TroupeError
from environments.types import TerminationReason, Trajectory, TrajectoryGroup
from launch.run_folder.jsonl_log import read_records
from launch.settings.tree import TrainConfig
from launch.training.rollout_requests import task_index
from launch.training.run_state import SET_ASIDE, RunState
from launch.training.task_plan import (
    LEAST_FAILURES,
    WINDOW,
    WORLD_FAILURES,
    FailureBudget,
    fails_everywhere,
    kind_of,
)

BROKEN = "EnvironmentFailure: The environment raised in Shop.step: KeyError: 'price'\nTraceback: line 1"
CONFIG = TrainConfig()
TASKS = Dataset([{"number": number} for number in range(5)])


def ended(reason: TerminationReason, error: str | None = None) -> Trajectory:
    return Trajectory(termination_reason=reason, error=error)


DONE = ended(TerminationReason.ENV_DONE)
FAILED = ended(TerminationReason.ENV_ERROR, BROKEN)


def group(*members: Trajectory) -> TrajectoryGroup:
    return TrajectoryGroup(group_id="0", task={}, trajectories=members)


def test_few_failures_at_the_start_do_not_end_a_run() -> None:
    FailureBudget("Shop", 0.5).record([FAILED] * (LEAST_FAILURES - 1))


def test_past_the_budget_the_run_ends_with_counts_and_tracebacks() -> None:
    crashed = ended(TerminationReason.CRASHED, "The rollout actor died: it was killed")
    budget = FailureBudget("Shop", 0.5)
    with pytest.raises(EnvironmentFailure, match=r"Shop failed in 30 of the last 30 rollouts") as raised:
        budget.record([*[FAILED] * (LEAST_FAILURES - 1), crashed])
    text = str(raised.value)
    assert "29 times KeyError in Shop.step" in text
    assert "1 times The rollout actor died" in text
    assert text.count("Traceback: line 1") == 1
    assert "a run bears a share of 0.5" in text


def test_old_failures_leave_the_window() -> None:
    budget = FailureBudget("Shop", 0.2)
    budget.record([FAILED] * (LEAST_FAILURES - 1))
    budget.record([DONE] * WINDOW)
    budget.record([FAILED] * (LEAST_FAILURES - 1))


@pytest.mark.parametrize(
    "reason", [TerminationReason.SAMPLER_ERROR, TerminationReason.AGENT_ERROR, TerminationReason.TIMEOUT]
)
def test_failures_of_others_do_not_count_against_environment(reason: TerminationReason) -> None:
    FailureBudget("Shop", 0.1).record([ended(reason, "no answer")] * WINDOW)


@given(st.lists(st.booleans(), max_size=400), st.floats(0.05, 1.0))
def test_run_ends_at_the_first_rollout_past_the_budget(failures: list[bool], share: float) -> None:
    budget, ends = FailureBudget("Shop", share), None
    for number, failed in enumerate(failures):
        try:
            budget.record([FAILED if failed else DONE])
        except EnvironmentFailure:
            ends = number
            break
    recent = [failures[max(0, end - WINDOW) : end] for end in range(1, len(failures) + 1)]
    past = [sum(each) >= LEAST_FAILURES and sum(each) > share * len(each) for each in recent]
    assert ends == (past.index(True) if True in past else None)


def test_kind_of_error_is_its_type_and_method_or_first_line() -> None:
    assert kind_of(BROKEN) == "KeyError in Shop.step"
    assert kind_of("The rollout actor died: gone\nmore") == "The rollout actor died: gone"


def test_kind_of_a_traceback_is_its_last_error() -> None:
    try:
        try:
            raise LookupError("no entry")
        except LookupError as cause:
            raise EnvironmentFailure("The judge does not answer:\nnot at all") from cause
    except EnvironmentFailure as error:
        text = "".join(traceback.format_exception(error))
    assert text.count("Traceback") == 2
    assert kind_of(text) == "EnvironmentFailure: The judge does not answer:"


@pytest.mark.parametrize("reason", sorted(WORLD_FAILURES))
def test_task_failing_in_all_rollouts_and_tries_fails_everywhere(reason: TerminationReason) -> None:
    assert fails_everywhere(group(ended(reason)), 3)
    assert fails_everywhere(group(*[ended(reason)] * 3), 1)


def test_success_few_attempts_or_another_cause_keep_a_task() -> None:
    assert not fails_everywhere(group(FAILED, FAILED, DONE), 3)
    assert not fails_everywhere(group(FAILED, FAILED), 1)
    for reason in (TerminationReason.SAMPLER_ERROR, TerminationReason.UNJUDGED):
        assert not fails_everywhere(group(*[ended(reason)] * 8), 3)


def test_judge_that_is_down_ends_a_run() -> None:
    down = ended(TerminationReason.UNJUDGED, "The model 'judge' does not answer")
    with pytest.raises(EnvironmentFailure, match="30 times The model 'judge' does not answer"):
        FailureBudget("Shop").record([down] * LEAST_FAILURES)


def test_task_set_aside_is_not_requested_from_that_group_on() -> None:
    before = [task_index(CONFIG, TASKS, number, {}) for number in range(40)]
    bad = before[2]
    after = [task_index(CONFIG, TASKS, number, {str(bad): 7}) for number in range(40)]
    assert after[:7] == before[:7]
    assert bad not in after[7:]
    kept = [number for number in range(40) if before[number] != bad]
    assert [after[number] for number in kept] == [before[number] for number in kept]


def test_run_whose_tasks_are_all_set_aside_ends() -> None:
    with pytest.raises(TroupeError, match="All of 5 tasks failed everywhere"):
        task_index(CONFIG, TASKS, 0, {str(index): 0 for index in range(5)})


def test_task_set_aside_is_listed_once_also_after_a_resume(tmp_path: Path) -> None:
    for world in [object(), object()]:  # each with an address of its own, as in another process
        state = RunState(CONFIG, tmp_path)
        state.record_set_aside(3, {"number": 3, "world": world}, BROKEN)
    (record,) = read_records(tmp_path / SET_ASIDE)
    assert (record["index"], record["task"]["number"], record["error"]) == (3, 3, BROKEN)
