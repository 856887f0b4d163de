"""Two tables: forged programs earn what an honest wrong one earns, and right ones 1, in each form of test."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from forged_programs import FORGED, WRONG
from honest_programs import HONEST

from environments.rewards.code.reward import code_reward_fn

pytestmark = pytest.mark.slow


def rewards(answers: Iterable[tuple[dict[str, Any], str]]) -> list[float]:
    """The rewards of programs; each spends most of its time waiting for its sandbox."""
    with ThreadPoolExecutor(4) as pool:
        return list(
            pool.map(lambda answer: code_reward_fn(answer[0], f"```python\n{answer[1]}\n```").reward, answers)
        )


@pytest.mark.parametrize("family", FORGED)
def test_forged_program_earns_what_a_wrong_one_earns(family):
    forged = FORGED[family]
    earned = rewards((task, program) for _, task, program in forged)
    assert [name for (name, *_), reward in zip(forged, earned, strict=True) if reward != 0.0] == []


@pytest.mark.parametrize("family", FORGED)
def test_wrong_program_earns_nothing(family):
    tasks = [task for _, task, _ in FORGED[family][:3]]
    assert rewards((task, WRONG.replace("f(", "unlike(")) for task in tasks) == [0.0] * len(tasks)


@pytest.mark.parametrize("set_name", sorted({name.partition(":")[0] for name in HONEST}))
def test_right_program_earns_one_whatever_the_form_of_its_test(set_name):
    names = [name for name in HONEST if name.startswith(f"{set_name}:")]
    earned = rewards(HONEST[name] for name in names)
    assert [name for name, reward in zip(names, earned, strict=True) if reward != 1.0] == []


def test_tables_are_large_enough():
    assert len(FORGED) == 8 and min(map(len, FORGED.values())) >= 6
    assert sum(map(len, FORGED.values())) >= 60 and len(HONEST) >= 60
