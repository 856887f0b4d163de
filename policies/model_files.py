"""Checks that a model can be had and its files be read, before an engine and a learner load it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.bounds import near_name
from environments.errors import ConfigError
from policies.settings import json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HUGGINGFACE = "huggingface"
"""The subfolder of a checkpoint that any Hugging Face program can load."""
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
EMBEDDING = re.compile(r"(?:embed_tokens|wte|word_embeddings|embed_in)\.weight$")
"""Names that models have for the weights in which each token has a row."""
HUB_SECONDS = 8.0
"""Longest wait for the hub."""


def weights_file(number: int, num_files: int) -> str:
    """The name of a file of weights in Hugging Face's form, counted from 0."""
    return "model.safetensors" if num_files == 1 else f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"


def write_index(folder: Path) -> None:
    """Write which file of ``folder`` holds each tensor, if there are several files."""
    from safetensors import safe_open

    weight_map: dict[str, str] = {}
    for path in sorted(folder.glob("model-*-of-*.safetensors")):
        with safe_open(path, "np") as file:
            weight_map |= dict.fromkeys(file.keys(), path.name)
    if weight_map:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")


def check_loadable(model: str, chat_template_kwargs: Mapping[str, Any]) -> None:
    """Check a model's folder, or ask the hub for a model of that name; then its tokenizer and chat template.

    Raises:
        ConfigError: names what is missing or damaged, and the remedy.
    """
    from jinja2 import TemplateError, TemplateSyntaxError

    from policies.chat import ChatRenderer, load_tokenizer

    _check_model(model, "model.path")
    tokenizer = load_tokenizer(model)
    if Path(model).is_dir():
        _check_tokenizer(Path(model), tokenizer)
    renderer = ChatRenderer(tokenizer, chat_template_kwargs)
    try:
        renderer.prompt_ids([{"role": "user", "content": "Hello"}])
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"The chat template of {model!r} is wrong in line {error.lineno} ({error.message}): repair it."
        ) from error
    except (TemplateError, TypeError, ValueError, LookupError):
        return  # it expects other messages, which the agent may have


def check_teacher(
    teacher: str, student: PreTrainedTokenizerBase, num_tokens: int, student_rows: int | None = None
) -> None:
    """Check that a teacher can be loaded, and reads each token of the student as the student does.

    Its chat template and its merges are of no account: it scores tokens, and reads no text.

    Args:
        teacher: folder or hub name.
        student: tokenizer of the model that learns.
        num_tokens: of the longest rollout.
        student_rows: tokens that the student can sample: a model may have more than its tokenizer knows.

    Raises:
        ConfigError: names what is missing or damaged, or the first token that differs.
    """
    from policies.chat import load_tokenizer

    setting = "algorithm.options.teacher"
    _check_model(teacher, setting)
    tokenizer = load_tokenizer(teacher)
    remedy = "name a teacher of the student's family, such as a larger model or a checkpoint of one"
    ours, theirs = (
        {number: text for text, number in each.get_vocab().items()} for each in (student, tokenizer)
    )
    for number in sorted(ours.keys() | theirs.keys()):
        if ours.get(number) != theirs.get(number):
            raise ConfigError(
                f"{setting}={teacher!r} has token {number} as {theirs.get(number)!r}, and the student has it "
                f"as {ours.get(number)!r}: {remedy}."
            )
    for name in ("bos_token", "eos_token"):  # padding is never scored
        if getattr(student, name) != getattr(tokenizer, name):
            raise ConfigError(
                f"{setting}={teacher!r} has {name}={getattr(tokenizer, name)!r}, and the student has "
                f"{getattr(student, name)!r}: {remedy}."
            )
    shape = json_object(Path(teacher) / CONFIG) if Path(teacher).is_dir() else {}
    most = shape.get("max_position_embeddings")
    if most is not None and not shape.get("rope_scaling") and most < num_tokens:
        raise ConfigError(
            f"{setting}={teacher!r} has max_position_embeddings={most}, and cannot score a rollout of "
            f"{num_tokens} tokens: lower rollout.max_prompt_tokens or rollout.max_response_tokens."
        )
    rows = num_rows(teacher)
    if rows is not None and student_rows is not None and rows < student_rows:
        raise ConfigError(
            f"{setting}={teacher!r} has vocab_size={rows}, and the student can sample {student_rows} tokens: "
            f"{remedy}."
        )


def num_rows(model: str) -> int | None:
    """Tokens that the model in a folder reads and can sample; ``None`` of one that only the hub has."""
    return _vocab_size(json_object(Path(model) / CONFIG)) if Path(model).is_dir() else None


def check_files(folder: Path) -> None:
    """Check that configuration and weights of a folder in Hugging Face format can be read.

    Raises:
        ConfigError: names the file.
    """
    config = json_object(folder / CONFIG)
    _check_type(folder, config)
    if not any(path for pattern in WEIGHTS for path in folder.glob(pattern)):
        raise ConfigError(
            f"The folder {folder} holds no weights, such as model.safetensors: copy them, or write them with "
            "model.save_pretrained(folder)."
        )
    index = json_object(folder / INDEX) if (folder / INDEX).is_file() else {}
    for name in sorted(set(index.get("weight_map", {}).values())):
        if not (folder / name).is_file():
            raise ConfigError(
                f"The folder {folder} lacks {name}, which {INDEX} names: copy the missing files."
            )
    for path in sorted(folder.glob("*.safetensors")):
        _check_safetensors(path, _vocab_size(config))


def _check_type(folder: Path, config: dict[str, Any]) -> None:
    """The installed transformers can build such a model. Raises ``ConfigError``."""
    from transformers import CONFIG_MAPPING

    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise ConfigError(
            f"{folder / CONFIG} has model_type={model_type!r}, unknown to the installed transformers: "
            f"name a model of a known type.{near_name(str(model_type), CONFIG_MAPPING)}"
        )


def _vocab_size(config: dict[str, Any]) -> int | None:
    """The rows that the embedding has to have; a model of text and images says it of its text."""
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def _check_safetensors(path: Path, vocab_size: int | None) -> None:
    """Read the header, which says how long the file has to be, and the size of the embedding."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            names = [name for name in file.keys() if EMBEDDING.search(name)]  # noqa: SIM118  # it is no dict
            rows = {name: file.get_slice(name).get_shape()[0] for name in names}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): copy or write it again.") from error
    for name, number in rows.items():
        if vocab_size is not None and number != vocab_size:
            raise ConfigError(
                f"{path.with_name(CONFIG)} has vocab_size={vocab_size}, and {name} in {path.name} has "
                f"{number} rows: take both files from the same model."
            )


def _check_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Each token has a row of the embedding. Raises ``ConfigError``."""
    size = _vocab_size(json_object(folder / CONFIG))
    largest = max(tokenizer.get_vocab().values())
    if size is not None and largest >= size:
        raise ConfigError(
            f"The tokenizer of {folder} has tokens up to number {largest}, and {CONFIG} has vocab_size="
            f"{size}: take both files from the same model, or enlarge the model by resize_token_embeddings."
        )


def _check_model(model: str, setting: str) -> None:
    """Check the files of a folder, or that the hub or its cache has the model. Raises ``ConfigError``."""
    if Path(model).is_dir():
        check_files(Path(model))
    else:
        config_of(model, setting)


def config_of(model: str, setting: str = "model.path") -> dict[str, Any]:
    """The ``config.json`` of a model's folder, or of a model on the hub, of which nothing else is fetched.

    Args:
        setting: that names the model, for errors.

    Raises:
        ConfigError: it cannot be had.
    """
    if Path(model).is_dir():
        return json_object(Path(model) / CONFIG)
    from httpx import HTTPError
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url, try_to_load_from_cache

    try:
        path = try_to_load_from_cache(model, CONFIG)
        if not isinstance(path, str):
            # The download would try for minutes where the hub does not answer.
            get_hf_file_metadata(hf_hub_url(model, CONFIG), timeout=HUB_SECONDS)
            path = hf_hub_download(model, CONFIG, etag_timeout=HUB_SECONDS)
        return json_object(Path(path))
    except (OSError, ValueError, HTTPError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{setting}={model!r} is no folder here, and its {CONFIG} cannot be had from the hub "
            f"({reason}): name a model's folder, a run, a checkpoint, or a model that the hub has."
        ) from error
