"""The text of a token, for what shows a run's trajectories: the page, and the logs for other viewers."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from launch.run_folder.checkpoint import CheckpointFolder
from policies.model_files import HUGGINGFACE


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
