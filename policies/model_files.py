"""Whether a model can be had and its files be read, before an engine and a learner load it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from environments.errors import ConfigError

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
HUB_SECONDS = 8.0
"""Longest wait for the hub."""


def check_loadable(model: str, chat_template_kwargs: Mapping[str, Any]) -> None:
    """Check a model's folder, or ask the hub for a model of that name; then its tokenizer and chat template.

    Raises:
        ConfigError: names what is missing or damaged, and the remedy.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    from policies.chat import ChatRenderer, load_tokenizer

    if Path(model).is_dir():
        check_files(Path(model))
    else:
        _check_hub(model)
    renderer = ChatRenderer(load_tokenizer(model), chat_template_kwargs)
    try:
        renderer.prompt_ids([{"role": "user", "content": "Hello"}])
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"The chat template of {model!r} is wrong in line {error.lineno} ({error.message}): repair it."
        ) from error
    except (TemplateError, TypeError, ValueError, LookupError):
        return  # it expects other messages, which the agent may have


def check_files(folder: Path) -> None:
    """Check that configuration and weights of a folder in Hugging Face format can be read.

    Raises:
        ConfigError: names the file.
    """
    _read_json(folder / CONFIG)
    if not any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        raise ConfigError(
            f"The folder {folder} holds no weights, such as model.safetensors: write them with "
            "model.save_pretrained(folder), or copy the missing files."
        )
    index = _read_json(folder / INDEX) if (folder / INDEX).is_file() else {}
    for name in sorted(set(index.get("weight_map", {}).values())):
        if not (folder / name).is_file():
            raise ConfigError(
                f"The folder {folder} lacks {name}, which {INDEX} names: copy the missing files."
            )
    for path in sorted(folder.glob("*.safetensors")):
        _check_safetensors(path)


def _check_safetensors(path: Path) -> None:
    """Read the header, which says how long the file has to be."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np"):
            return
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): copy or write it again.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): copy or write it again.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, and has to hold a JSON object.")
    return content


def _check_hub(name: str) -> None:
    """There is a model of that name in the hub's cache, or on the hub. Raises ``ConfigError``."""
    from httpx import HTTPError
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        if not isinstance(try_to_load_from_cache(name, CONFIG), str):
            HfApi().model_info(name, timeout=HUB_SECONDS)
    except (OSError, ValueError, HTTPError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model.path={name!r} is no folder here, and no model of that name can be had from the hub "
            f"({reason}): name a model's folder, a run, a checkpoint, or a model that the hub has."
        ) from error
