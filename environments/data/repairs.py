"""Makes small repositories with a bug, as tasks of Harbor: ``python -m environments.data.repairs FOLDER``.

Each is a program of ``repair_programs`` with one bug, between two without, and a failing ``check.py``.
Programs of ``FOLDER/test`` are in none of ``FOLDER/train``. ``workload=harbor:FOLDER`` plays them.
"""

from __future__ import annotations

import ast
import inspect
import json
import pickle
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from environments.command_name import explained, only_folder
from environments.data import repair_programs
from environments.data.repair_programs import CALLS, HELD_OUT
from environments.errors import ConfigError
from environments.sandbox.base import SandboxLimits
from environments.sandbox.local import LocalSandbox

BUGS_OF_A_KIND = 2
"""The most that a program gets."""
_PAIRS: tuple[tuple[type[ast.AST], type[ast.AST]], ...] = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn)),
    *((ast.Add, ast.Sub), (ast.And, ast.Or)),
)
_OPPOSITES: dict[type[ast.AST], type[ast.AST]] = {
    **{one: other for pair in _PAIRS for one, other in (pair, pair[::-1])},
    ast.Mod: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
}
"""The operators that take the places of others."""
_LIMITS = SandboxLimits(timeout_seconds=20, cpu_seconds=1, memory_bytes=256 << 20, output_bytes=256 << 10)
"""A bug that makes a program endless costs a second, and a busy machine makes none endless."""
_TASK = """\
version = "1.0"

[metadata]
category = "software-engineering"
bug = "{kind}"

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0
"""
INSTRUCTION = """\
A module in /app has a bug, so that `python3 check.py` fails there. Find the bug and repair the module, so
that every function does what its docstring says. Other calls than those of check.py are tested, too.
"""
_DOCKERFILE = "FROM python:3.12-slim\nWORKDIR /app\nCOPY . .\n"
_CHECK = """\
from {names[0]} import {names[0]}
from {names[1]} import {names[1]}
from {names[2]} import {names[2]}

faults = 0
for call, expected in {cases}:
    found = repr(eval(call))
    if found != expected:
        faults += 1
        print(f"{{call}} returned {{found}}, not {{expected}}")
raise SystemExit(f"{{faults}} calls failed." if faults else 0)
"""
_TEST = """\
#!/bin/bash
python3 -I /tests/judge.py && reward=1 || reward=0
chmod -R u+rwx /logs; rm -rf /logs/verifier; mkdir /logs/verifier
echo $reward > /logs/verifier/reward.txt
"""
_JUDGE = """\
# Runs the agent's code in processes that cannot write files, nor read the results that are expected:
# these are gone before, and this process cannot be looked into. All of them end before the verdict.
import ctypes, json, os, resource, subprocess, sys

ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
with open("/tests/cases.json") as file:
    cases = json.load(file)
os.unlink("/tests/cases.json")

def run(call):
    name = call.partition("(")[0]
    code = f"import sys; sys.path.insert(0, '/app'); from {name} import {name}; print(repr({call}))"
    shut_in = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    command = [sys.executable, "-I", "-B", "-c", code]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=shut_in)
    try:
        return program.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired:
        return ""
    finally:
        while left := open(f"/proc/self/task/{os.getpid()}/children").read().split():
            os.kill(int(left[0]), 9)
            os.waitpid(int(left[0]), 0)

sys.exit(any(run(call) != expected + "\\n" for call, expected in cases))
"""


def write_repairs(folder: Path, seed: int = 0) -> dict[str, int]:
    """Write all tasks; return their number by split. The same seed makes the same tasks.

    Raises:
        EnvironmentFailure: this machine has no sandbox, in which the bugs are tried.
    """
    numbers = {"train": 0, "test": 0}
    for name in CALLS:
        split = "test" if name in HELD_OUT else "train"
        numbers[split] += write_repairs_of(name, folder / split, seed)
    return numbers


def write_repairs_of(name: str, folder: Path, seed: int = 0) -> int:
    """Write the tasks with a bug in the program ``name``; return their number."""
    rng = random.Random(f"{name} {seed}")
    tree = ast.parse(inspect.getsource(repair_programs))
    programs = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    beside = [each for each in programs if each != name and (each in HELD_OUT) == (name in HELD_OUT)]
    cases = _results(programs[name], name)
    found: Counter[str] = Counter()
    bugs = list(bugs_in(programs[name]))
    for kind, faulty in rng.sample(bugs, len(bugs)):
        if found[kind] == BUGS_OF_A_KIND:
            continue
        failing = [case for case, now in zip(cases, _results(faulty, name), strict=True) if case != now]
        if failing:
            found[kind] += 1
            modules = {each: programs[each] for each in rng.sample(beside, 2)} | {name: faulty}
            shown = list(dict.fromkeys([*cases[::2], failing[0]]))
            files = {f"environment/{module}.py": _source(program) for module, program in modules.items()} | {
                "task.toml": _TASK.format(kind=kind),
                "instruction.md": INSTRUCTION,
                "environment/Dockerfile": _DOCKERFILE,
                "environment/check.py": _CHECK.format(names=sorted(modules), cases=shown),
                "solution/solve.sh": f"cat > /app/{name}.py <<'END'\n{_source(programs[name])}END\n",
                "tests/test.sh": _TEST,
                "tests/judge.py": _JUDGE,
                "tests/cases.json": json.dumps(cases),
            }
            for path, text in files.items():
                place = folder / f"{name}-{kind}-{found[kind]}" / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text, encoding="utf-8")
    return found.total()


def bugs_in(program: ast.FunctionDef) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Each copy of a program with one bug, and the kind of it."""
    whole = pickle.dumps(program)  # a deep copy takes three times as long
    for number, node in enumerate(ast.walk(program)):
        for kind in ("comparison", "operator", "number", "condition", "order", "omission"):
            faulty = pickle.loads(whole)
            place = next(each for at, each in enumerate(ast.walk(faulty)) if at == number)
            if type(place) is type(node) and _spoil(place, kind):
                yield kind, faulty


def _spoil(node: ast.AST, kind: str) -> bool:
    """Put a bug of a kind into a node, where it can have one; return whether it has."""
    match kind, node:
        case "comparison", ast.Compare(ops=[op]) if type(op) in _OPPOSITES:
            vars(node)["ops"] = [_OPPOSITES[type(op)]()]
        case "operator", ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op) if (
            type(op) in _OPPOSITES
        ):
            vars(node)["op"] = _OPPOSITES[type(op)]()
        case "number", ast.Constant(value=int(value)) if not isinstance(value, bool):
            node.value = value + 1
        case "condition", ast.If() | ast.While() | ast.IfExp():
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case "order", ast.Call(args=[_, _] as parts) | ast.Tuple(elts=[_, _] as parts, ctx=ast.Load()):
            parts.reverse()
        case "omission", ast.For() | ast.While() | ast.If() if len(node.body) > 1:
            del node.body[-1]
        case _:
            return False
    return True


def _results(program: ast.FunctionDef, name: str) -> list[tuple[str, str]]:
    """The calls of a program, and what they return; an empty text where that raises or does not end."""
    calls = [f"{name}({arguments})" for arguments in CALLS[name]]
    # Written at once, so that those before an endless one are known.
    shown = "".join(f"\ntry: print(repr({call}))\nexcept Exception: print()" for call in calls)
    lines = LocalSandbox().run(_source(program) + shown, limits=_LIMITS).stdout.splitlines()[: len(calls)]
    return list(zip(calls, lines + [""] * (len(calls) - len(lines)), strict=True))


def _source(program: ast.FunctionDef) -> str:
    return f"{ast.unparse(program)}\n"


@explained()
def main(arguments: list[str]) -> int:
    folder = only_folder(arguments, "environments.data.repairs", __doc__)
    try:
        counts = write_repairs(folder)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error}): name another folder.") from error
    sys.stdout.write(
        f"{folder}: {counts['train']} tasks to train on, {counts['test']} held out. Play them by "
        f"python -m launch.train workload=harbor:{folder} model.path=...\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
