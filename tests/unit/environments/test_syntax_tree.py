"""Syntax trees, made by several threads at once."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from environments.syntax_tree import parse_module


class Slow:
    """Garbage for the collector, whose end takes a while."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(50):
            pass


@pytest.fixture
def many_turns():
    """Threads that take turns as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.slow
def test_threads_parse_beside_each_other(many_turns):
    source = Path(__file__).read_text() * 10

    def parse(_: int) -> int:
        garbage = [Slow() for _ in range(20)]
        del garbage
        return len(parse_module(source).body)

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(parse, range(400)))) == 1
