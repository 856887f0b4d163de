"""The Python programs that README and the pages show, as the tests run them."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS, GUIDE, HTTP, MIGRATION, PROGRAMS = (
    f".docs/pages/{page}.md" for page in ("commands", "guide", "http", "migration", "programs")
)


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def programs(page: str) -> list[str]:
    """The Python programs that a page shows."""
    shown = re.findall(r"^ *```python\n.*?^ *```$", text_of(page), flags=re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(each).removeprefix("```python\n").removesuffix("```") for each in shown]


(OWN,) = programs("README.md")
(CONVERSATION,) = programs(HTTP)
SHOP, CHECK, LENGTHS = programs(GUIDE)
COLLECT, TRAIN = programs(MIGRATION)
SOLVE, SOLVE_BY_PROGRAM, REPAIR, PLAY = programs(PROGRAMS)
