"""A run goes on from its newest checkpoint when its learner is lost, but not without end."""

from __future__ import annotations

from launch.health.restart_budget import RestartBudget, lost_updates


def test_one_recovery_more_than_the_window_allows_ends_the_run() -> None:
    recoveries = RestartBudget(most=2, minutes=10)
    assert [recoveries.allow(now) for now in (0.0, 60.0, 120.0)] == [True, True, False]


def test_recoveries_further_apart_than_the_window_end_no_run() -> None:
    recoveries = RestartBudget(most=1, minutes=10)
    assert all(recoveries.allow(600.0 * number) for number in range(20))


def test_recovery_that_another_one_replaces_is_not_counted() -> None:
    recoveries = RestartBudget(1, 10)
    assert recoveries.allow(0)
    recoveries.take_back()
    assert recoveries.allow(1)
    assert not recoveries.allow(2)


def test_no_recovery_is_allowed_where_none_is_wanted() -> None:
    assert not RestartBudget(most=0, minutes=10).allow(0.0)


def test_what_is_lost_is_counted_from_the_newest_checkpoint() -> None:
    assert lost_updates(7, 5) == "2 update(s) since the checkpoint of step 5 are lost."
    assert "3 update(s) are lost" in lost_updates(3, -1)
