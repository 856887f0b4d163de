"""The README of a folder names files that exist: the answers to "where is ..." stay true when files move."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
READMES = [
    path
    for layer in ("environments", "policies", "actors", "launch")
    for path in (ROOT / layer).rglob("README.md")
]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_the_files_that_a_folder_names_exist(readme: Path) -> None:
    named = re.findall(r"`([a-z0-9_/]+\.(?:py|md|yaml))`", readme.read_text(encoding="utf-8"))
    assert named
    for name in named:
        if name.startswith("my_"):  # a file of the reader's own
            continue
        assert (readme.parent / name).is_file() or (ROOT / name).is_file(), f"{readme} names {name}"
