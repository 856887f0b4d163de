"""The number of rollout actors, changed by hand and by the load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from actors.rollouts.scaling import TO_GROW
from environments.errors import ConfigError
from launch import scale
from launch.settings.compose import compose
from launch.training.update_report import UpdateReport
from launch.validation.settings import check_training_settings

SLOW = {
    "time/wait": 9.0,
    "time/step": 10.0,
    "time/fleet_idle": 0.1,
    "time/requests_waiting": 12.0,
    "stream/actors": 4.0,
    "time/actors_ready": 4.0,
}


class Run:
    """The parts of a run that scaling has to do with."""

    def __init__(self, smallest: int, largest: int) -> None:
        self.said: list[str] = []
        self.sizes: list[int] = []
        self.service: Any = SimpleNamespace(resize=self.sizes.append)
        config: Any = SimpleNamespace(fleet=SimpleNamespace(bounds=(smallest, largest)))
        state: Any = None
        tracker: Any = SimpleNamespace(announce=self.said.append)
        self.report = UpdateReport(config, state, tracker, self.service)

    def follow_the_load(self, numbers: dict[str, float]) -> None:
        self.report._scale(self.service, numbers)


@pytest.mark.parametrize(("largest", "sizes"), [(4, []), (5, [5]), (64, [16])])
def test_learner_that_waits_gets_more_actors_and_run_says_why(largest: int, sizes: list[int]) -> None:
    run = Run(4, largest)
    for _ in range(TO_GROW):
        run.follow_the_load(SLOW)
    assert run.sizes == sizes
    assert len(run.said) == len(sizes)
    assert all("waited for 90% of the update, 12.0 requests" in each for each in run.said)


def test_number_set_by_hand_stays_where_load_decides_nothing() -> None:
    run = Run(4, 4)
    for _ in range(9):
        run.follow_the_load(SLOW | {"stream/actors": 64.0})
    assert run.sizes == []


def test_bounds_that_exclude_each_other_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"fleet\.num_actors=16 .* fleet\.max_actors=15"):
        check_training_settings(compose(["recipe=calculator", "fleet.num_actors=16", "fleet.max_actors=15"]))


def test_fleet_that_is_meant_has_to_be_clear() -> None:
    assert scale.chosen("--fleet", ["fleet-a"], None) == "fleet-a"
    assert scale.chosen("--fleet", ["fleet-a", "fleet-b"], "fleet-b") == "fleet-b"
    for present, name in ((["fleet-a", "fleet-b"], None), (["fleet-a"], "fleet-c")):
        with pytest.raises(ConfigError, match="--fleet"):
            scale.chosen("--fleet", present, name)
    with pytest.raises(ConfigError, match="No run is going on in this cluster"):
        scale.chosen("--fleet", [], None)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--actors", "0"],
        ["--fleet", "fleet-a"],
        ["--actors", "many"],
        ["--replicas", "0"],
        ["--server", "policy-a", "--actors", "2"],
    ],
)
def test_half_a_command_changes_nothing(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        scale.main(arguments)
    assert ended.value.code == 2
