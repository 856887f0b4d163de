"""The end of a turn that the warm start trains: the chat template's own."""

from __future__ import annotations

import itertools
import json
import logging
import re
from pathlib import Path

import pytest

from environments.types import Message
from policies.chat import ChatRenderer, load_tokenizer
from policies.learning.demonstrations import demonstration_samples
from policies.tiny import build_tokenizer

TALK: list[Message] = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "46."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
TURNS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}END{% endfor %}"
    "{{ '[assistant]' if add_generation_prompt }}"
)


def trained(folder: Path, end: str, eos: str, configured: list[str] | None) -> list[str]:
    """What a warm start trains, turn by turn, with a template that ends turns with ``end``."""
    made = build_tokenizer([TALK])
    made.add_tokens(["<|eot|>"])
    made.eos_token = eos
    made.chat_template = TURNS.replace("END", end)
    made.save_pretrained(folder)
    if configured:
        ids = made.convert_tokens_to_ids(configured)
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    said: list[str] = []
    for sample in demonstration_samples(ChatRenderer(load_tokenizer(folder)), [TALK]):
        masked = zip(sample.loss_mask, sample.response_ids, strict=True)
        turns = itertools.groupby(masked, key=lambda each: bool(each[0]))
        said += [made.decode([token_id for _, token_id in turn]) for bit, turn in turns if bit]
    return said


@pytest.mark.parametrize(
    ("end", "eos", "configured", "ends", "notice"),
    [
        ("<|im_end|>", "<|im_end|>", None, "<|im_end|>", None),
        ("<|im_end|>\n", "<|im_end|>", None, "<|im_end|>", None),
        ("\n<|im_end|>\n", "<|im_end|>", None, "\n<|im_end|>", None),
        ("<|eot|><|im_end|>", "<|im_end|>", None, "<|eot|><|im_end|>", None),
        (
            "<|eot|>\n",
            "<|endoftext|>",
            None,
            "<|eot|>",
            r"ends at '<\|endoftext\|>' alone",
        ),
        ("<|eot|>", "<|endoftext|>", ["<|endoftext|>", "<|eot|>"], "<|eot|>", "Sampling ends there too"),
        ("\n\n", "<|endoftext|>", None, "<|endoftext|>", r"with no token, so .* '<\|endoftext\|>', there"),
    ],
)
def test_warm_start_trains_the_end_of_turn(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    end: str,
    eos: str,
    configured: list[str] | None,
    ends: str,
    notice: str | None,
) -> None:
    with caplog.at_level(logging.WARNING, logger="policies.learning.demonstrations"):
        said = trained(tmp_path, end, eos, configured)
    assert said == [f"46.{ends}", f"Yes.{ends}"]
    assert len(caplog.messages) == (notice is not None), "it is said once"
    for message in caplog.messages:
        assert re.search(notice or "", message), message
