"""Reads the folder of a Harbor task: its limits, and the files that its Dockerfile would lay out.

No image is built: FROM is ignored, WORKDIR, COPY and ENV are followed, and a task whose Dockerfile has any
other instruction is rejected. Of a Dockerfile whose image the user has built, only WORKDIR and ENV are read.
"""

from __future__ import annotations

import json
import posixpath
import shlex
import string
import tomllib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from environments.errors import DatasetError
from environments.sandbox import child
from environments.sandbox.shell_command import pack

TASK, OLDER_TASK = "task.toml", "task.yaml"
"""The file by which a folder is a task: Harbor's, and that of terminal-bench 1."""
DEFAULT_SECONDS, DEFAULT_MEMORY_MB = 600.0, 2048
UNPLAYABLE = (
    *("steps", "environment.mcp_servers", "environment.healthcheck", "environment.gpus", "environment.tpus"),
    *("verifier.collect", "verifier.environment", "verifier.environment_mode"),
)
"""Settings of task.toml that would change what is played."""
UNREAD_FILES = ("docker-compose.yaml", ".dockerignore")
"""Files of environment/ that would change it, too."""


@dataclass(frozen=True)
class HarborTask:
    """A task: its question, and the packed files of each folder in which the agent can write.

    There are no files yet where an image has them.
    """

    folder: Path
    question: str
    trees: dict[str, str]
    cwd: str
    variables: dict[str, str]
    test_variables: dict[str, str]
    agent_seconds: float
    verifier_seconds: float
    memory_bytes: int


def read_task(folder: Path, is_built: bool = False) -> HarborTask:
    """Read the task in ``folder``. Not followed are its ``cpus``, ``storage_mb`` and ``allow_internet``.

    Args:
        is_built: True if its files lie in an image that was built of its Dockerfile.

    Raises:
        DatasetError: a file is missing or malformed, or asks for something that cannot be played.
    """
    folder = folder.resolve()
    if (folder / OLDER_TASK).exists() and not (folder / TASK).exists():
        raise DatasetError(
            f"{folder} has {OLDER_TASK}, the form of terminal-bench 1: write it in Harbor's ({TASK}, "
            "instruction.md, environment/, tests/test.sh). https://harborframework.com/docs/task-difference "
            "shows how."
        )
    try:
        settings = tomllib.loads((folder / TASK).read_text(encoding="utf-8"))
        question = (folder / "instruction.md").read_text(encoding="utf-8")
        dockerfile = (folder / "environment" / "Dockerfile").read_text(encoding="utf-8")
        (folder / "tests" / "test.sh").read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DatasetError(f"The Harbor task {folder} cannot be read: {error}.") from error
    if seen := next((path for path in child.seen_paths() if folder.is_relative_to(path)), None):
        raise DatasetError(f"The agent could read {folder}, since programs see {seen}: move the task.")
    for name in UNREAD_FILES:
        if (folder / "environment" / name).exists():
            raise DatasetError(f"{folder}/environment/{name} cannot be followed: remove it, or the task.")
    values = _Settings(folder, settings)
    for name in UNPLAYABLE:
        if values.get(name) not in (None, 0, "", [], {}, "shared"):
            raise DatasetError(
                f"{folder}/task.toml: {name} = {values.get(name)!r} cannot be played: remove it."
            )
    layout = _Layout(folder / "environment", values.variables("environment.env"), is_built)
    layout.follow(dockerfile)
    return HarborTask(
        folder=folder,
        question=question,
        trees=layout.trees(),
        cwd=layout.cwd,
        variables=layout.variables,
        test_variables=layout.test_variables | values.variables("verifier.env"),
        agent_seconds=values.number("agent.timeout_sec", DEFAULT_SECONDS),
        verifier_seconds=values.number("verifier.timeout_sec", DEFAULT_SECONDS),
        memory_bytes=int(values.number("environment.memory_mb", DEFAULT_MEMORY_MB)) << 20,
    )


@dataclass(frozen=True)
class _Settings:
    """The content of a task.toml; names are those of a section and a setting, with a dot between them."""

    folder: Path
    content: dict[str, Any]

    def get(self, name: str) -> Any:
        section, _, setting = name.rpartition(".")
        table = self.content.get(section, {}) if section else self.content
        return table.get(setting) if isinstance(table, dict) else None

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, int | float) or not 0 < value < 1e6:
            raise DatasetError(f"{self.folder}/task.toml: {name} = {value!r}: write a number from 0 to 1e6.")
        return float(value)

    def variables(self, name: str) -> dict[str, str]:
        found = self.get(name) or {}
        if not isinstance(found, dict):
            raise DatasetError(f"{self.folder}/task.toml: {name} = {found!r}: write variables by name.")
        for key, value in found.items():
            if "${" in str(value):
                raise DatasetError(
                    f"{self.folder}/task.toml: {name}.{key} = {value!r} takes a variable of this machine, "
                    "which the agent's programs could read: write the value itself."
                )
        return {key: str(value) for key, value in found.items()}


@dataclass
class _Layout:
    """The files, the working directory and the variables that a Dockerfile makes, line by line."""

    context: Path
    variables: dict[str, str]
    is_built: bool
    cwd: str = "/"
    files: list[tuple[Path, str]] = field(default_factory=list)
    folders: set[str] = field(default_factory=set)

    def follow(self, dockerfile: str) -> None:
        for number, instruction, rest in _instructions(dockerfile):
            place = f"{self.context}/Dockerfile, line {number}: {instruction}"
            try:
                self._follow(instruction, rest)
            except (ValueError, IndexError) as error:
                raise DatasetError(f"{place} {rest} cannot be followed: {error}.") from error
        if self.cwd == "/":
            raise DatasetError(f"{self.context}/Dockerfile has no folder to work in: add WORKDIR /app.")

    def _follow(self, instruction: str, rest: str) -> None:
        match instruction:
            case "FROM":
                pass
            case "WORKDIR":
                self.cwd = posixpath.normpath(posixpath.join(self.cwd, self._filled(rest)))
                self.folders.add(self.cwd)
            case "ENV":
                words = shlex.split(rest)
                pairs = words if "=" in words[0] else [f"{words[0]}={' '.join(words[1:])}"]
                for name, _, value in (pair.partition("=") for pair in pairs):
                    self.variables[name] = self._filled(value)
            case _ if self.is_built:
                pass
            case "COPY":
                self._copy(json.loads(rest) if rest.startswith("[") else shlex.split(rest))
            case _:
                raise ValueError(
                    "no image is built, so only FROM, WORKDIR, COPY and ENV can be. Let COPY bring what it "
                    "makes, or build the image, and play it with harbor_workload(folder, seed, "
                    "sandbox=CommandSandbox(...)) in a module of your own"
                )

    def trees(self) -> dict[str, str]:
        """The packed files of each folder that lies in no other one; none where an image has them."""
        if self.is_built:
            return {}
        trees = {}
        for folder in sorted(self.folders):
            if not _is_within(folder, self.folders - {folder}):
                files = [(file, path) for file, path in self.files if _is_within(path, [folder])]
                trees[folder] = pack([(str(file), posixpath.relpath(path, folder)) for file, path in files])
        return trees

    @property
    def test_variables(self) -> dict[str, str]:
        """The variables in which no folder of the agent's comes before those of the system."""
        entries = self.variables.get("PATH", "$PATH").split(":")
        entries.sort(key=lambda entry: not entry.startswith(("/", "$")) or _is_within(entry, self.folders))
        return self.variables | {"PATH": ":".join(entries)}

    def _copy(self, words: list[str]) -> None:
        if len(words) < 2 or any(word.startswith(("--", "<<")) for word in words):
            raise ValueError("only COPY SOURCE ... TARGET can be, without options")
        *patterns, target = map(self._filled, words)
        sources = [source for pattern in patterns for source in self._found(pattern.lstrip("/"))]
        place = posixpath.normpath(posixpath.join(self.cwd, target))
        into = len(sources) > 1 or target.endswith("/") or place in self.folders
        for source in sources:
            is_folder = source.is_dir()
            name = place if is_folder or not into else posixpath.join(place, source.name)
            self.files.append((source, name))
            self.folders.add(name if is_folder else posixpath.dirname(name))
        if "/" in self.folders:
            raise ValueError("it would write beside the folders of the system: choose a target such as /app/")

    def _found(self, pattern: str) -> list[Path]:
        has_wildcard = any(sign in pattern for sign in "*?[")
        found = sorted(self.context.glob(pattern)) if has_wildcard else [self.context / pattern]
        known = [path for path in found if path.exists() and path.resolve().is_relative_to(self.context)]
        if not known:
            raise ValueError(f"there is no {pattern} in environment/")
        return known

    def _filled(self, text: str) -> str:
        return string.Template(text).safe_substitute(self.variables)


def _is_within(path: str, folders: Collection[str]) -> bool:
    """Return whether a path is one of ``folders`` or lies in one."""
    return any(PurePosixPath(posixpath.normpath(path)).is_relative_to(folder) for folder in folders)


def _instructions(dockerfile: str) -> Iterator[tuple[int, str, str]]:
    """Line number, instruction and arguments, where a line that ends with a backslash goes on."""
    begun, first = "", 0
    for number, line in enumerate(dockerfile.splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        first = first if begun else number
        begun = f"{begun} {text}".strip()
        if begun.endswith("\\"):
            begun = begun[:-1]
            continue
        instruction, _, rest = begun.partition(" ")
        yield first, instruction.upper(), rest.strip()
        begun = ""
