"""Preferences: read from files, checked, made into token sequences, and what DPO makes of their scores."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from environments.errors import DatasetError
from environments.types import Completion, Message, Step, Trajectory
from policies.chat import ChatRenderer
from policies.learning.preferences import (
    Pair,
    PairScore,
    Preference,
    PreferenceObjective,
    batch_of,
    check_preferences,
    make_pairs,
    pair_scores,
    read_preferences,
)
from policies.tiny import build_tokenizer

QUESTION: list[Message] = [{"role": "user", "content": "What is 12+34?"}]
GOOD: list[Message] = [{"role": "assistant", "content": "It is 46."}]
BAD: list[Message] = [{"role": "assistant", "content": "It is 12."}]
LONG: list[Message] = [
    {"role": "assistant", "content": "I call the calculator."},
    {"role": "user", "content": "Do it."},
    {"role": "assistant", "content": "It is 46."},
]


@cache
def renderer() -> ChatRenderer:
    return ChatRenderer(build_tokenizer([[*QUESTION, *LONG]]))


def pairs(*preferences: Preference) -> list[Pair]:
    return make_pairs(renderer(), preferences, lambda text: None)


def episode(completion_ids: tuple[int, ...], **changes: Any) -> Trajectory:
    completion = Completion(
        prompt_ids=(1, 2, 3),
        completion_ids=completion_ids,
        logprobs=(-1.0,) * len(completion_ids),
        text="said",
        finish_reason="stop",
    )
    return Trajectory(rollout_id="7/0", steps=[Step(completion=completion)], **changes)


# -- files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"messages": QUESTION, "chosen": GOOD, "rejected": BAD, "score": 3},
        {"messages": QUESTION, "chosen": "It is 46.", "rejected": BAD},
        {"prompt": "What is 12+34?", "chosen": "It is 46.", "rejected": "It is 12."},
        {"chosen": QUESTION + GOOD, "rejected": QUESTION + BAD},
        {"prompt": "What is 12+34?", "chosen": QUESTION + GOOD, "rejected": QUESTION + BAD},
        # Some files repeat the chosen conversation as messages.
        {
            "prompt": "What is 12+34?",
            "messages": QUESTION + GOOD,
            "chosen": QUESTION + GOOD,
            "rejected": QUESTION + BAD,
        },
    ],
)
def test_forms_of_a_row_are_one_preference(tmp_path: Path, row: dict[str, Any]) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert read_preferences(path) == [Preference(messages=QUESTION, chosen=GOOD, rejected=BAD)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": QUESTION, "chosen": GOOD}, "No rejected in row 2 of .*messages, chosen"),
        ({"messages": QUESTION, "rejected": GOOD}, "No chosen in row 2 of "),
        ({"chosen": "It is 46.", "rejected": "It is 12."}, r"beginning of row 2 of \S+ is \[\]"),
        ({"messages": QUESTION, "chosen": "46", "rejected": "46"}, "row 2 of .* are the same"),
        ({"messages": QUESTION, "chosen": 46, "rejected": BAD}, "chosen of row 2 of .* without a text"),
        ({"messages": [5], "chosen": GOOD, "rejected": BAD}, "beginning of row 2 of .*message 0 5"),
        ({"messages": QUESTION, "chosen": LONG[1:2], "rejected": BAD}, "no message with role 'assistant'"),
        (
            {"messages": QUESTION + GOOD, "chosen": QUESTION + GOOD, "rejected": QUESTION + BAD},
            "row 2 of .* goes on otherwise",
        ),
    ],
)
def test_row_that_is_no_preference_is_an_error(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    sound = {"messages": QUESTION, "chosen": GOOD, "rejected": BAD}
    path.write_text(json.dumps(sound) + "\n" + json.dumps(row) + "\n", encoding="utf-8")
    with pytest.raises(DatasetError, match=message):
        read_preferences(path)


def test_file_without_a_row_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").touch()
    with pytest.raises(DatasetError, match=r"pairs.jsonl is empty"):
        read_preferences(tmp_path / "pairs.jsonl")


def test_checks_name_the_preference_of_a_workload() -> None:
    sound = Preference(messages=QUESTION, chosen=GOOD, rejected=BAD)
    check_preferences([sound])
    for wrong, message in (
        ({"chosen": "a", "rejected": "b"}, "Preference 1 is a dict"),
        (Preference(messages=QUESTION, chosen=[], rejected=BAD), r"The chosen of preference 1 is \[\]"),
        (
            Preference(chosen=episode((4,)), rejected=episode((5,), masked=True)),
            "rejected of preference 1 is",
        ),
    ):
        with pytest.raises(DatasetError, match=message):
            check_preferences([sound, wrong])


# -- samples -------------------------------------------------------------------------------------------


def test_assistant_of_the_continuation_alone_is_learned() -> None:
    beginning: list[Message] = [*QUESTION, *BAD, {"role": "user", "content": "No. What is 12+34?"}]
    (pair,) = pairs(Preference(messages=beginning, chosen=LONG, rejected=BAD))
    (chosen,), (rejected,) = pair.chosen, pair.rejected
    assert chosen.prompt_ids == rejected.prompt_ids
    assert "It is 12." in renderer().text_of(chosen.prompt_ids)
    learned = [token for token, bit in zip(chosen.response_ids, chosen.loss_mask, strict=True) if bit]
    end = renderer().text_of([renderer().eos_token_id])
    assert renderer().text_of(learned) == f"I call the calculator.{end}It is 46.{end}"
    assert all(rejected.loss_mask)


def test_tokens_of_a_recorded_episode_are_kept() -> None:
    (pair,) = pairs(Preference(messages=QUESTION, chosen=GOOD, rejected=episode((7, 8))))
    (rejected,) = pair.rejected
    assert (rejected.prompt_ids, rejected.response_ids) == ((1, 2, 3), (7, 8))


def test_sides_of_the_same_tokens_are_an_error() -> None:
    sound = Preference(messages=QUESTION, chosen=GOOD, rejected=BAD)
    same = Preference(messages=QUESTION, chosen=GOOD, rejected=[{**GOOD[0], "name": "me"}])
    with pytest.raises(DatasetError, match="preference 1 are the same tokens"):
        pairs(sound, same)


def test_key_is_that_of_the_tokens() -> None:
    good = Preference(messages=QUESTION, chosen=GOOD, rejected=BAD)
    swapped = Preference(messages=QUESTION, chosen=BAD, rejected=GOOD)
    first, second, third = (pair.key for pair in pairs(good, swapped, good))
    assert first == third != second


# -- objective -----------------------------------------------------------------------------------------


def test_objective_is_the_formula() -> None:
    (pair,) = pairs(Preference(messages=QUESTION, chosen=LONG, rejected=BAD))
    both = [pair, pair]
    rows = [[-0.5] * len(sample.response_ids) for sample in batch_of(both).samples]
    policy = pair_scores(both, rows)
    num_chosen, num_rejected = (side[0].num_sampled_tokens for side in (pair.chosen, pair.rejected))
    assert policy[0] == policy[1] == PairScore(chosen=-0.5 * num_chosen, rejected=-0.5 * num_rejected)
    reference = [PairScore(chosen=each.chosen - 3, rejected=each.rejected + 1) for each in policy]
    reference[1] = PairScore(chosen=policy[1].chosen + 2, rejected=policy[1].rejected)

    objective = PreferenceObjective(beta=0.5, sft_coef=0.1)
    metrics = objective.metrics(both, policy, reference)
    assert metrics["margin"] == pytest.approx((4 - 2) / 2)
    assert metrics["accuracy"] == 0.5
    losses = [math.log1p(math.exp(-0.5 * margin)) for margin in (4, -2)]
    assert metrics["loss"] == pytest.approx(sum(losses) / 2 + 0.1 * 0.5)
    batch = objective.weighted(both, policy, reference)
    for index, margin in enumerate((4, -2)):
        chosen, rejected = batch.samples[2 * index : 2 * index + 2]
        push = 0.5 / (1 + math.exp(0.5 * margin)) / 2
        expected = [(push + 0.1 / num_chosen / 2) * bit for bit in chosen.loss_mask]
        assert list(chosen.advantages) == pytest.approx(expected)
        assert list(rejected.advantages) == pytest.approx([-push] * num_rejected)


@pytest.mark.parametrize("margin", [-1e4, 0.0, 1e4])
def test_objective_takes_any_margin(margin: float) -> None:
    (pair,) = pairs(Preference(messages=QUESTION, chosen=GOOD, rejected=BAD))
    policy, reference = [PairScore(chosen=margin, rejected=0.0)], [PairScore(chosen=0.0, rejected=0.0)]
    objective = PreferenceObjective(beta=1.0)
    assert objective.metrics([pair], policy, reference)["loss"] == pytest.approx(
        max(-margin, 0.0) + math.log1p(math.exp(-abs(margin)))
    )
    push = objective.weighted([pair], policy, reference).samples[0].advantages[0]
    assert push == pytest.approx({-1e4: 1.0, 0.0: 0.5, 1e4: 0.0}[margin])
