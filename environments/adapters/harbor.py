"""Tasks of Harbor and terminal-bench 2 (https://harborframework.com/docs/tasks), each a folder.

``task.toml`` has the limits, ``instruction.md`` the question, ``environment/`` the files that the agent
finds, and ``tests/test.sh`` writes the reward to /logs/verifier/reward.txt, or to reward.json as
``{"reward": 1}``. No image is built: see ``harbor_files``.

``python -m environments.adapters.harbor FOLDER`` shows which tasks can be played here, with the rewards of
their untouched files and of their solutions.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from environments.adapters.harbor_files import OLDER_TASK, TASK, read_task
from environments.base import Task
from environments.command_name import explained, only_folder
from environments.data.datasets import Dataset
from environments.errors import ConfigError, DatasetError, EnvironmentFailure
from environments.rewards.base import RewardOutput, unjudged
from environments.sandbox.base import Sandbox
from environments.sandbox.local import LocalSandbox
from environments.sandbox.shell import SHELL_LIMITS, Shell
from environments.sandbox.shell_command import pack
from environments.tool_environment import ToolEnvironment
from environments.tools import FunctionTool, Tool, ToolOutput

TESTS, LOGS, SOLUTION = "/tests", "/logs", "/solution"
_READ_REWARDS = f"""
for file in {LOGS}/verifier/reward.json {LOGS}/verifier/reward.txt; do
    test ! -L $file && test -f $file && head -c 4000 $file | tr '\\n' ' '
    echo
done
"""
_READING_SECONDS = 30.0
_EDIT = """\
import sys
path, old, new = sys.argv[1:]
text = open(path, encoding="utf-8").read() if old else ""
if old and text.count(old) != 1:
    sys.exit(f"{path} has this text {text.count(old)} times: give one that it has once. Nothing was changed.")
open(path, "w", encoding="utf-8").write(text.replace(old, new) if old else new)
"""


class ShellTools:
    """The tools ``shell`` and ``edit``, which share a shell; without one they only describe themselves.

    Args:
        seconds: The time of all commands together.
        command_seconds: The time of each.
    """

    def __init__(self, shell: Shell | None = None, seconds: float = 0, command_seconds: float = 0) -> None:
        self._shell = shell
        self.seconds_left = seconds
        self._command_seconds = command_seconds

    @property
    def tools(self) -> list[Tool]:
        return [FunctionTool(self.shell), FunctionTool(self.edit)]

    def shell(self, command: str) -> ToolOutput:
        """Runs a command in bash and returns its output. Files in the working directory and the directory
        itself are kept from one call to the next; variables and running programs are not. Other places
        cannot be written to, but for $TMPDIR, which each call empties. There is no network.
        """
        if self._shell is None:
            raise ConfigError("A Harbor task's tools run in HarborEnvironment alone: these describe them.")
        if self.seconds_left <= 0:
            return ToolOutput("shell", error="the time for this task is over.")
        begin, seconds = time.monotonic(), min(self._command_seconds, self.seconds_left)
        result = self._shell.run(command, seconds)
        self.seconds_left -= time.monotonic() - begin
        note = "" if result.exit_code == 0 else f"[exit code {result.exit_code}]"
        if result.fault is not None:
            note = f"[nothing that the command has changed was kept: {result.fault}]"
        elif result.exit_code is None:
            note = f"[stopped: it ran longer than {seconds:.3g} s]"
        text = "\n".join(filter(None, (result.output.rstrip("\n"), note)))
        return ToolOutput("shell", text or "(no output)")

    def edit(self, path: str, old: str, new: str) -> ToolOutput:
        """Replaces a text that a file has once by another one. Without an old text, it writes the new one as
        the whole file.
        """
        return self.shell(shlex.join(["python3", "-I", "-c", _EDIT, path, old, new]))


class HarborEnvironment(ToolEnvironment):
    """A task of Harbor, played by a ``ToolAgent`` with ``ShellTools().tools``.

    It ends with an answer without a call, after ``max_steps`` or when the commands have used up the agent's
    time; time in which the model is awaited does not count. The tests then run in a fresh sandbox, to which
    nothing comes but the files in the agent's folders: what it has left running has ended, and /tests and
    /logs, where it had none, are laid out new. The tests' programs come from the system, also where a
    variable of the Dockerfile puts a folder of the agent's first. As in Harbor, though, a test that imports
    the agent's code runs it with its own rights.

    Where the tests give no reward, in their time, they run on the files as they were: if they give one
    there, the agent is to blame, and its reward is 0.

    Args:
        sandbox: A ``CommandSandbox`` whose image was built of the task's Dockerfile, and has bash and tests'
            programs; by default that of this machine, and no image. Each command and the tests run in a
            fresh container, to which the files of WORKDIR are brought, and no other ones.
        command_seconds: The time of a single command.
    """

    def __init__(
        self,
        task: Task | None = None,
        sandbox: Sandbox | None = None,
        max_steps: int = 50,
        command_seconds: float = 120.0,
    ) -> None:
        self._sandbox = sandbox
        self._command_seconds = command_seconds
        super().__init__(task, ShellTools().tools, reward_fn=unjudged, max_steps=max_steps)
        if "folder" not in self.task:
            raise ConfigError(f"The task has no 'folder' (keys: {', '.join(self.task)}): use harbor_tasks.")

    def reset(self) -> tuple[dict[str, str], dict[str, Any]]:
        self._count_from_zero()
        self._files = read_task(Path(self.task["folder"]), is_built=self._sandbox is not None)
        if self._sandbox is not None:
            image = replace(self._shell_in({}), cwd="/")
            result = image.run("true", _READING_SECONDS, kept=[self._files.cwd])
            if result.fault is not None:
                raise EnvironmentFailure(
                    f"The image of the task {self._files.folder} has no {self._files.cwd} that can be "
                    f"packed: {result.fault}. Build it of the task's Dockerfile, and name it in the command."
                )
            self._files = replace(self._files, trees=image.trees)
        self._shell = self._shell_in(self._files.trees)
        self._shell_tools = ShellTools(self._shell, self._files.agent_seconds, self._command_seconds)
        self.tools = {tool.name: tool for tool in self._shell_tools.tools}
        return {"question": self._files.question}, {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        observation, reward, done, info = super().step(action)
        if done or self._shell_tools.seconds_left <= 0:
            self._reward_output = verdict = self.judge()
            return {}, verdict.reward, True, info | {"metadata": info["metadata"] | verdict.metadata}
        return observation, reward, done, info

    def solve(self) -> None:
        """Run the task's solution in the place of an agent.

        Raises:
            DatasetError: it has none.
        """
        tree = self._files.folder / "solution"
        if not (tree / "solve.sh").is_file():
            raise DatasetError(f"{self._files.folder} has no solution/solve.sh.")
        shell = self._shell_in(self._shell.trees | {SOLUTION: pack([(str(tree), ".")])})
        shell.run(f"bash {SOLUTION}/solve.sh", self._files.agent_seconds, kept=list(self._shell.trees))
        self._shell.trees = {folder: shell.trees[folder] for folder in self._shell.trees}

    def _shell_in(self, trees: dict[str, str]) -> Shell:
        sandbox = LocalSandbox(folders=tuple(trees)) if self._sandbox is None else self._sandbox
        limits = replace(SHELL_LIMITS, memory_bytes=self._files.memory_bytes)
        return Shell(sandbox, dict(trees), self._files.cwd, dict(self._files.variables), limits)

    def judge(self, tree: str | None = None) -> RewardOutput:
        """The verdict of the tests on the agent's files, or on those of ``tree``, packed, in WORKDIR.

        Raises:
            EnvironmentFailure: they give none on the files as they were, either.
        """
        own = {} if tree is None else {self._files.cwd: tree}
        verdict = self._run_tests(self._shell.trees | own)
        if isinstance(verdict, RewardOutput):
            return verdict
        untouched = self._run_tests(self._files.trees)
        if isinstance(untouched, RewardOutput):
            return RewardOutput(0.0, {"error": verdict}, is_correct=False)
        raise EnvironmentFailure(
            f"The tests of the task {self._files.folder} cannot judge: {verdict} On its files as they were: "
            f"{untouched} Correct tests/test.sh, or leave the task out. There is no network."
        )

    def _run_tests(self, trees: dict[str, str]) -> RewardOutput | str:
        """The verdict of the tests on some files, or the reason why there is none."""
        task = self._files
        tests = pack([(str(task.folder / "tests"), ".")])
        shell = self._shell_in(trees | {TESTS: tests, LOGS: pack([])})
        shell.variables = task.test_variables
        command = f"mkdir -p {LOGS}/agent {LOGS}/verifier && chmod +x {TESTS}/test.sh && {TESTS}/test.sh"
        result = shell.run(command, task.verifier_seconds, kept=[LOGS])
        ended = f"tests/test.sh ended with {result.exit_code}. Its output: {result.output.strip()[-1000:]!r}."
        if result.fault is not None:
            return f"tests/test.sh left nothing: {result.fault}."
        if result.exit_code is None:
            return f"tests/test.sh took longer than [verifier] timeout_sec = {task.verifier_seconds:g}."
        if not 0 <= result.exit_code <= 128:  # the agent's code may have killed it before its verdict
            return f"tests/test.sh was ended by a signal. {ended}"
        # In a sandbox, too: the tests ran the agent's code, which may have written anything.
        logs = replace(self._shell_in({LOGS: shell.trees[LOGS]}), cwd=LOGS)
        for line in logs.run(_READ_REWARDS, _READING_SECONDS).output.splitlines():
            reward = _number_in(line)
            if reward is not None:
                metadata = {"tests_output": result.output[-2000:]}
                return RewardOutput(reward, metadata, is_correct=reward >= 1)
        return f"there is no reward in {LOGS}/verifier/reward.json or reward.txt. {ended}"


def _number_in(text: str) -> float | None:
    """The finite number of a reward file, if it has one."""
    try:
        found = json.loads(text)
        number = float(found["reward"] if isinstance(found, dict) else found)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return number if math.isfinite(number) else None


def harbor_tasks(folder: Path, is_built: bool = False) -> tuple[Dataset, dict[str, str]]:
    """Return the tasks that lie in ``folder``, and by name the reasons why others of them cannot be played.

    Rows have a ``question`` and the absolute path ``folder``, which every node that plays needs. ``is_built``
    is that of ``read_task``.

    Raises:
        DatasetError: there are no tasks, or none that can be played.
    """
    rows, rejected = [], {}
    for each in sorted({path.parent for name in (TASK, OLDER_TASK) for path in folder.glob(f"*/{name}")}):
        try:
            task = read_task(each, is_built)
            LocalSandbox(folders=(*task.trees, TESTS, LOGS))
        except (DatasetError, ConfigError) as error:
            rejected[each.name] = str(error)
        else:
            rows.append({"question": task.question, "folder": str(task.folder), "name": each.name})
    if not rows:
        reasons = "".join(f"\n{reason}" for reason in rejected.values()) or (
            f" It has no */{TASK}: name the folder in which the tasks' folders lie."
            if folder.is_dir()
            else " It is no folder: correct the path."
        )
        raise DatasetError(f"{folder} has no task of Harbor that can be played.{reasons}")
    return Dataset(rows, name=folder.name), rejected


def trial(row: dict[str, Any]) -> str:
    """Rewards of a task's untouched files, and of its solution, in words."""
    rewards = []
    for solve in (False, True):
        env = HarborEnvironment(row)
        env.reset()
        if solve:
            env.solve()
        rewards.append(env.step("")[1])
    return f"{rewards[0]:g} untouched, {rewards[1]:g} by the solution"


def lines_about(folder: Path) -> Iterator[str]:
    """A line about each task in a folder."""
    tasks, rejected = harbor_tasks(folder)
    for row in tasks:
        try:
            yield f"{row['name']}: {trial(row)}"
        except (EnvironmentFailure, DatasetError) as error:
            yield f"{row['name']}: {error}"
    yield from (f"{name}: rejected. {reason}" for name, reason in rejected.items())


@explained()
def main(arguments: list[str]) -> int:
    for line in lines_about(only_folder(arguments, "environments.adapters.harbor", __doc__)):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
