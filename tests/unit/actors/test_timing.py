"""The order of the time limits in ``actors/timing.py`` is as its head says."""

from __future__ import annotations

import re

import pytest

from actors import timing

ORDER = re.findall(r"^    (\S.*?<.*?)(?:   |$)", timing.__doc__ or "", re.MULTILINE)
VALUES = {
    name.removesuffix("_SECONDS"): value for name, value in vars(timing).items() if name.endswith("_SECONDS")
}


@pytest.mark.parametrize("line", ORDER)
def test_shorter_limits_are_shorter(line: str) -> None:
    assert eval(line, {}, VALUES), f"{line}: {VALUES}"


def test_each_limit_has_a_place_in_the_order() -> None:
    assert set(re.findall(r"[A-Z_]{2,}", " ".join(ORDER))) == set(VALUES)
