from __future__ import annotations

import re

import pytest

from actors.ray_tools.job import JOB
from launch.settings.compose import compose
from launch.settings.tree import algorithm_of
from launch.validation.notices import STOP_VARIABLE, notices


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ([], None),
        (
            ["rollout.max_staleness=2"],
            r"up to 2 updates old. By default each token's loss is multiplied .* at most 2",
        ),
        (["rollout.max_staleness=1", "algorithm.correction.level=none"], "level=none corrects nothing"),
        (["rollout.max_staleness=2", "algorithm.correction.level=sequence"], None),
        (
            ["rollout.max_staleness=2", "algorithm.name=own", "algorithm.module=own_algorithm"],
            "the loss ratio_to_a_power takes no importance weights",
        ),
        (["rollout.max_staleness=2", "algorithm.correction.level=bypass"], None),
        (["learner.dtype=bfloat16"], r"=bfloat16 with server.engine.options.dtype=float32: .* at most 2"),
        (["server.engine.options.dtype=half", "algorithm.correction.level=none"], "=none corrects nothing"),
        (["learner.dtype=bfloat16", "algorithm.correction.level=bypass"], None),
        (["learner.dtype=bfloat16", "stages=[warm_start]"], None),
    ],
)
def test_run_on_older_tokens_says_whether_it_corrects_them(settings: list[str], sentence: str | None) -> None:
    found = notices(compose(settings))
    assert len(found) == (sentence is not None)
    if sentence is not None:
        assert re.search(sentence, found[0])


def test_job_says_how_long_ray_gives_it_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB, "{}")
    assert '"RAY_JOB_STOP_WAIT_TIME_S": "600"' in notices(compose([]))[0]
    monkeypatch.setenv(STOP_VARIABLE, "600")
    assert notices(compose([])) == []


def test_replay_reports_its_correction_for_other_weights() -> None:
    replay = ["run.replay=runs/a"]
    assert "which nothing corrects" in notices(compose(replay))[0]
    assert "corrects" not in notices(compose([*replay, "algorithm.correction.level=token"]))[0]


def test_run_corrects_what_it_says_that_it_corrects() -> None:
    assert algorithm_of(compose(["rollout.max_staleness=2"])).correction_level == "token"
    assert algorithm_of(compose([])).correction_level is None


def test_defaults_need_no_notice() -> None:
    assert notices(compose([])) == []
