"""A run goes on from its newest checkpoint when its learner is lost, but not without end."""

from __future__ import annotations

from actors.learning.patience import LEAST_SECONDS, TIMES_LONGEST, Patience
from launch.health.recoveries import Recoveries, lost_updates


def test_one_recovery_more_than_the_window_allows_ends_the_run() -> None:
    recoveries = Recoveries(most=2, minutes=10)
    assert [recoveries.allow(now) for now in (0.0, 60.0, 120.0)] == [True, True, False]


def test_recoveries_that_lie_further_apart_than_the_window_never_end_the_run() -> None:
    recoveries = Recoveries(most=1, minutes=10)
    assert all(recoveries.allow(600.0 * number) for number in range(20))


def test_no_recovery_is_allowed_where_none_is_wanted() -> None:
    assert not Recoveries(most=0, minutes=10).allow(0.0)


def test_what_is_lost_is_counted_from_the_newest_checkpoint() -> None:
    assert lost_updates(7, 5) == "2 update(s) since the checkpoint of step 5 are lost."
    assert "3 update(s) are lost" in lost_updates(3, -1)


def test_a_first_call_gets_the_whole_limit_and_a_later_one_follows_the_longest() -> None:
    patience = Patience(1800)
    assert patience.limit("update") == 1800
    for seconds in (30.0, 50.0, 10.0):
        patience.record("update", seconds)
    assert patience.limit("update") == TIMES_LONGEST * 50
    assert patience.limit("score") == 1800


def test_a_limit_is_never_below_the_floor_nor_above_the_setting() -> None:
    patience = Patience(1800)
    patience.record("update", 0.1)
    assert patience.limit("update") == LEAST_SECONDS
    patience.record("save", 1000)
    assert patience.limit("save") == 1800
    short = Patience(5)
    short.record("update", 0.1)
    assert short.limit("update") == 5
