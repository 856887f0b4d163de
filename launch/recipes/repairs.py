"""Small repositories with a bug for SmolLM2-135M, which has a shell and an edit tool and sees one repair.

The tasks are those of ``environments.data.repairs``, made once in the folder ``repairs`` where the program
runs. Four programs are held out.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from environments.data.repairs import INSTRUCTION, write_repairs
from environments.disk import place
from launch.recipes.demonstration import written_call
from launch.recipes.task_file import harbor_workload
from launch.workload import Workload

FOLDER = Path("repairs")
CODE = '''\
def last_digit(number: int) -> int:
    """Return the last digit of a number."""
    return number % 100
'''
EXAMPLE = [
    {"role": "user", "content": INSTRUCTION},
    {"role": "assistant", "content": written_call("shell", command="python3 check.py; ls")},
    {
        "role": "tool",
        "content": "last_digit(123) returned 23, not 3\n1 calls failed.\ncheck.py\nlast_digit.py\nroot.py",
    },
    {"role": "assistant", "content": written_call("shell", command="cat last_digit.py")},
    {"role": "tool", "content": CODE},
    {
        "role": "assistant",
        "content": written_call("edit", path="last_digit.py", old="number % 100", new="number % 10"),
    },
    {"role": "tool", "content": "(no output)"},
    {"role": "assistant", "content": "I repaired last_digit."},
]


def workload(seed: int) -> Workload:
    """The tasks, of which those of four programs are held out for every seed."""
    if not FOLDER.is_dir():
        with TemporaryDirectory(dir=".", prefix=f".{FOLDER}.") as unfinished:
            write_repairs(made := Path(unfinished, "whole"))
            place(made, FOLDER)
    given = harbor_workload(str(FOLDER), seed)
    return replace(given, agent_args={**given.agent_args, "examples": EXAMPLE})
