"""Finds the program in a model's answer, for the reward."""

from __future__ import annotations

import re


def last_code_block(text: str) -> str | None:
    """Return the inside of the last closed block that three backticks fence and call Python.

    Where there is none, it is the last one of no language: after a program it often shows its output. A
    block in a list is indented as its fence is, so that much is taken from each line.
    """
    last: dict[bool, str] = {}  # by whether a language is named
    indentation = 0
    language: str | None = None  # of the block that is open
    body: list[str] = []
    for line in text.split("\n"):
        fence = re.match(r"(\s*)```\s*(\w*)", line)
        if not fence:
            body.append(line[min(indentation, len(line) - len(line.lstrip())) :])
        elif language is not None and line.strip() == "```":
            if language in ("", "python", "python3", "py"):
                last[language != ""] = "\n".join([*body, ""])
            language = None
        else:
            indentation, language, body = len(fence[1]), fence[2].lower(), []
    return last.get(True, last.get(False))
