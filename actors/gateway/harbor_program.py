"""A program that calls the policy, such as mini-swe-agent, on tasks of Harbor and terminal-bench 2."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actors.gateway.client import PolicyClient, ProgramLimits
from environments.adapters.harbor import HarborEnvironment
from environments.adapters.harbor_files import read_task
from environments.errors import AgentError, DatasetError
from environments.rewards.base import RewardOutput
from environments.sandbox.shell import SHELL_LIMITS

QUESTION = "{question}"
"""The part of an argument in whose place the question of the task comes."""
_FILES = "work.tgz"
_IN_ITS_FILES = f"""
mkdir work && tar -xzf {_FILES} -C work && rm {_FILES} && cd work && timeout -k 5 "$SECONDS_LEFT" "$@"
status=$?
cd "$HOME" && tar -czf {_FILES} -C work . && exit $status
"""
_PACKING_SECONDS = 30.0
_MISSING = (126, 127)
"""Exit codes of a shell whose program is not there."""


@dataclass(frozen=True, kw_only=True)
class HarborProgram:
    """A rollout function by which a program of any make solves tasks of ``harbor_tasks``.

    It begins in a copy of the task's files, isolated as ``PolicyClient.run`` says: tests, solution and reward
    are out of its reach. When it has ended, however that was, the tests run on the files that it has left,
    as those of ``HarborEnvironment`` do, in a fresh sandbox of this machine.

    Args:
        command: the program and its arguments; ``{question}`` in one stands for the task's question.
        files: its own files by their path in its ``HOME``, one folder above those of the task.
        environment: more variables.
        visible: absolute paths that it may read beside the system's, such as that of its installation.
    """

    command: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict, repr=False)
    environment: Mapping[str, str] = field(default_factory=dict)
    visible: Sequence[str] = ()

    def __call__(self, task: dict[str, Any], client: PolicyClient) -> RewardOutput:
        """Play a task.

        Raises:
            AgentError: the program is not there.
            DatasetError: the task has files outside of its WORKDIR, or cannot be read.
            EnvironmentFailure: its tests cannot judge.
        """
        env = HarborEnvironment(task)
        env.reset()
        files = read_task(Path(task["folder"]))
        if files.trees.keys() != {files.cwd}:
            raise DatasetError(
                f"{files.folder} has files in {', '.join(files.trees)}, and a program sees those of WORKDIR "
                f"{files.cwd} alone: copy them there, or let a ToolAgent play it (workload=harbor:FOLDER)."
            )
        question = f"{files.question}\n\nThe current directory stands for {files.cwd}: name files from there."
        variables = {name: text for name, text in files.variables.items() if "$" not in text}
        result = client.run(
            [
                "bash",
                "-c",
                _IN_ITS_FILES,
                "bash",
                *(each.replace(QUESTION, question) for each in self.command),
            ],
            files={**self.files, _FILES: base64.b64decode(files.trees[files.cwd])},
            collect=[_FILES],
            environment={**variables, **self.environment, "SECONDS_LEFT": f"{files.agent_seconds:g}"},
            limits=ProgramLimits(
                seconds=files.agent_seconds + _PACKING_SECONDS,
                memory_bytes=files.memory_bytes,
                file_bytes=SHELL_LIMITS.file_bytes,
            ),
            isolated=True,
            visible=self.visible,
        )
        if result.exit_code in _MISSING:
            raise AgentError(
                f"The program {self.command[0]!r} is not found where it runs: install it in this Python, or "
                f"name the folder of its installation in visible={list(self.visible)}. {result.output[-500:]}"
            )
        shown = {"exit_code": result.exit_code, "limit": result.limit, "output": result.output[-2000:]}
        if _FILES not in result.files:
            return RewardOutput(0.0, shown | {"error": "It has left no files."}, is_correct=False)
        verdict = env.judge(base64.b64encode(result.files[_FILES]).decode("ascii"))
        return replace(verdict, metadata=shown | verdict.metadata)
