"""The rule of a canary, and its share of conversations."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from environments.data.canary import (
    KEY,
    PROMOTED,
    ROLLED_BACK,
    TRIAL,
    Canary,
    CanaryFile,
    Difference,
    conversation_name,
    decide,
    difference,
    paired_difference,
    read_canary,
)
from environments.errors import ConfigError

CANARY = Canary(version="policy@31", share=0.2, started=1)
BETTER, WORSE = Difference(0.3, 0.1, 200, 200), Difference(-0.3, 0.1, 200, 200)
EQUAL, UNKNOWN = Difference(0.0, 0.05, 200, 200), Difference(0.0, math.inf, 3, 200)


def unit(canary: Canary, owner: str, messages: list[dict[str, str]]) -> str:
    return canary.unit(owner, conversation_name(messages))


def chat(text: str, *later: str) -> list[dict[str, str]]:
    roles = ("assistant", "user")
    return [
        {"role": "user", "content": text},
        *({"role": roles[index % 2], "content": each} for index, each in enumerate(later)),
    ]


@pytest.mark.parametrize(
    ("feedback", "held_out", "state", "word"),
    [
        (BETTER, BETTER, PROMOTED, "Neither"),
        (EQUAL, EQUAL, PROMOTED, "Neither"),
        (BETTER, WORSE, ROLLED_BACK, "ALARM"),
        (EQUAL, WORSE, ROLLED_BACK, "Held-out success has fallen"),
        (UNKNOWN, WORSE, ROLLED_BACK, "Held-out success has fallen"),
        (WORSE, BETTER, ROLLED_BACK, "Feedback has fallen"),
        (WORSE, None, ROLLED_BACK, "Feedback has fallen"),
        (UNKNOWN, BETTER, TRIAL, "each needs 20"),
        (BETTER, None, TRIAL, "--held-out"),
        (Difference(0.0, 0.2, 200, 200), BETTER, TRIAL, "Feedback may still"),
        (BETTER, Difference(0.0, 0.2, 50, 50), TRIAL, "more tasks"),
    ],
)
def test_rule_decides_as_it_is_written(
    feedback: Difference, held_out: Difference | None, state: str, word: str
) -> None:
    decided, reason = decide(feedback, held_out, margin=0.1)
    assert decided == state and word in reason


def test_share_holds_and_conversations_stay_with_their_version() -> None:
    units = [unit(CANARY, "alice", chat(f"Question {number}")) for number in range(5000)]
    taken = [CANARY.answers(unit) for unit in units]
    assert sum(taken) == pytest.approx(1000, abs=120)  # four standard deviations
    later = [unit(CANARY, "alice", chat(f"Question {number}", "Yes.", "And?")) for number in range(5000)]
    assert later == units
    assert units[0] != unit(CANARY, "bob", chat("Question 0"))


def test_greeting_is_no_conversation() -> None:
    greeting = [
        {"role": "system", "content": "Be kind."},
        {"role": "assistant", "content": "How can I help?"},
    ]
    units = {unit(CANARY, "alice", [*greeting, *chat(f"Question {number}")]) for number in range(9)}
    assert len(units) == 9


def test_orders_of_the_system_change_no_conversation() -> None:
    """Those of Responses come with one request, and others name the time of day."""
    orders = [[], *([{"role": role, "content": text}] for role in ("system", "developer") for text in "AB")]
    assert len({unit(CANARY, "alice", [*each, *chat("Hi", "Ho", "And?")]) for each in orders}) == 1
    assert len({unit(CANARY, "alice", each) for each in orders}) == 3, "no user has begun them"


def test_key_keeps_its_version_in_all_conversations() -> None:
    by_key = replace(CANARY, by=KEY, share=0.5)
    answers = {
        name: {by_key.answers(unit(by_key, name, chat(f"Question {number}"))) for number in range(20)}
        for name in map(str, range(40))
    }
    assert all(len(each) == 1 for each in answers.values())
    assert {True} in answers.values() and {False} in answers.values()


def test_ended_trial_takes_all_or_nothing() -> None:
    units = [unit(CANARY, "alice", chat(f"Question {number}")) for number in range(50)]
    assert all(replace(CANARY, state=PROMOTED).answers(unit) for unit in units)
    assert not any(replace(CANARY, state=ROLLED_BACK).answers(unit) for unit in units)


def test_replica_follows_the_file(tmp_path: Path) -> None:
    file = CanaryFile(tmp_path)
    assert file.current() is None
    CANARY.write(tmp_path)
    assert file.current() == CANARY
    replace(CANARY, state=PROMOTED).write(tmp_path)
    assert file.current() == replace(CANARY, state=PROMOTED)
    (tmp_path / "canary.json").write_text("{}")
    assert file.current() == replace(CANARY, state=PROMOTED)
    with pytest.raises(ConfigError, match="is no canary"):
        read_canary(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"share": "0.5"}, {"share": math.nan}, {"version": 31}, {"started": "today"}),
        *({"state": "promote"}, {"by": "user"}),
    ],
)
def test_replica_answers_where_a_hand_has_edited_the_file(tmp_path: Path, wrong: dict[str, object]) -> None:
    file = CanaryFile(tmp_path)
    CANARY.write(tmp_path)
    assert file.current() == CANARY
    (tmp_path / "canary.json").write_text(json.dumps(asdict(CANARY) | wrong))
    assert file.current() == CANARY
    file.drawn("alice", "a conversation", ["policy@31"])
    with pytest.raises(ConfigError, match="is no canary"):
        read_canary(tmp_path)


def test_replica_answers_where_the_file_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    file = CanaryFile(tmp_path)
    CANARY.write(tmp_path)
    assert file.current() == CANARY
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", fail)
        assert file.current() == CANARY
    (tmp_path / "canary.json").unlink()
    assert file.current() is None
    (tmp_path / "canary.json").mkdir()  # cannot be read
    assert file.current() is None, "what was deleted does not come back"


def test_canary_that_is_not_served_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    CANARY.write(tmp_path)
    assert CanaryFile(tmp_path).current(["policy@31"]) == CANARY and not caplog.text
    file = CanaryFile(tmp_path)
    assert file.current(["policy@30"]) == file.current(["policy@30"]) == CANARY
    assert caplog.text.count("The canary policy@31 answers nothing: served are policy@30.") == 1


def test_differences_are_those_of_the_textbook() -> None:
    ours = difference([1, 1, 0, 0], [0, 0, 0, 1])
    assert ours.mean == 0.25
    assert ours.half_width == pytest.approx(2.576 * math.sqrt((2 / 3) / 6 + (17 / 30) / 6))
    assert difference([1.0], [0, 1]).half_width == math.inf
    paired = paired_difference([1, 1, 0, 1], [0, 1, 0, 0])
    assert (paired.mean, paired.half_width) == (0.5, pytest.approx(2.576 * math.sqrt((2 / 3) / 6)))


def test_few_results_that_are_alike_decide_nothing() -> None:
    liked, solved = difference([1.0] * 20, [1.0] * 20), paired_difference([1.0] * 200, [1.0] * 200)
    assert decide(liked, solved, 0.1)[0] == TRIAL, (
        "a canary that one in ten dislikes has this one time in eight"
    )
    assert decide(liked, paired_difference([0.0] * 2, [1.0] * 2), 0.1)[0] == TRIAL
    assert (
        decide(difference([1.0] * 200, [1.0] * 200), paired_difference([1.0] * 5, [1.0] * 5), 0.1)[0] == TRIAL
    )
    assert decide(difference([1.0] * 200, [1.0] * 200), solved, 0.1)[0] == PROMOTED


def test_rule_seldom_ends_a_trial_of_equals() -> None:
    import random

    wrong = 0
    for seed in range(300):
        draw = random.Random(seed)
        samples = [[float(draw.random() < 0.7) for _ in range(100)] for _ in range(2)]
        wrong += decide(difference(*samples), None, 0.1)[0] != TRIAL
    assert wrong <= 10  # 1.5 are expected: half of the 1 % outside of the interval
