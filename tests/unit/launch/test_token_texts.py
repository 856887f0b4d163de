"""The text of a token, by the tokenizer that a run has kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from environments.types import Message
from launch.run_folder.model_paths import token_texts
from policies.tiny import build_tokenizer

MESSAGES: list[Message] = [{"role": "user", "content": "12 + 34 ="}]


def test_token_without_a_tokenizer_is_a_number(tmp_path: Path) -> None:
    assert token_texts(tmp_path)(7) == "7"


@pytest.mark.parametrize(("has_links", "policy"), [(True, ""), (False, ""), (True, "first")])
def test_newest_checkpoint_says_the_text_of_a_token(tmp_path: Path, has_links: bool, policy: str) -> None:
    tokenizer = build_tokenizer([MESSAGES])
    checkpoints = tmp_path / "checkpoints"
    tokenizer.save_pretrained(checkpoints / "step_000002" / policy / "huggingface")
    if has_links:
        (checkpoints / "latest").symlink_to("step_000002")
    else:
        (checkpoints / "latest").write_text("step_000002\n")
    (token_id,) = tokenizer.encode("4", add_special_tokens=False)
    assert token_texts(tmp_path)(token_id) == "4"
