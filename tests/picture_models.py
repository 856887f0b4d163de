"""Tiny models that read pictures, with random weights, and pictures for them."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

from environments.base import BaseEnv
from environments.types import Message
from policies.tiny import build_tokenizer

PLACE, EDGE, WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"
TILES = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As that of Idefics3 writes: a content is a list of parts, and a text alone is not shown."""
SIDE, PATCH = 32, 8
TEXTS: list[list[Message]] = [
    [{"role": "user", "content": "Which colour is it? And this? red blue green"}]
] * 2
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "image_size": SIDE,
    "patch_size": PATCH,
}


def picture(colour: str, size: tuple[int, int] = (48, 40), kind: str = "png") -> str:
    """A picture of a white square on a colour, as an address that holds it."""
    from PIL import Image, ImageDraw

    image, file = Image.new("RGB", size, colour), io.BytesIO()
    ImageDraw.Draw(image).rectangle((4, 4, 12, 12), fill="white")
    image.save(file, kind)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"


def shown(*pictures: str, text: str = "Which colour is it?") -> Message:
    """A user's message with pictures before a text."""
    parts: list[Message] = [{"type": "image_url", "image_url": {"url": each}} for each in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


class ColourEnvironment(BaseEnv):
    """Shows a picture, and wants the name of its colour. After a wrong answer it shows another, once."""

    def __init__(self, colour: str) -> None:
        self._colour, self._is_first = colour, True

    def reset(self) -> tuple[Any, dict[str, Any]]:
        return shown(picture(self._colour))["content"], {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        reward = float(self._colour in action)
        done, self._is_first = bool(reward) or not self._is_first, False
        return shown(picture("green"), text="And this?")["content"], reward, done, {}

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> ColourEnvironment:
        return cls(info["colour"])


class ToldApart(ColourEnvironment):
    """Shows a picture, and wants a token of one half of the vocabulary for red, and of the other for blue."""

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        is_even = bool(action) and ord(action[0]) % 2 == 0
        return "", float(is_even == (self._colour == "red")), True, {}


def build(folder: Path, has_weights: bool = True) -> Path:
    """Save a tiny Idefics3 with its tokenizer and processor to ``folder``."""
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = build_tokenizer(TEXTS)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", PLACE, EDGE, WHOLE, *TILES, "<end_of_utterance>"]}
    )
    tokenizer.chat_template = TEMPLATE
    text = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = transformers.Idefics3Config(
        vision_config=VISION,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids(PLACE),
        pad_token_id=tokenizer.pad_token_id,
        scale_factor=2,
        tie_word_embeddings=False,
    )
    config.save_pretrained(folder)
    # Pictures become 64 pixels wide or high, and are read in tiles of 32 and as a whole.
    processor = transformers.Idefics3Processor(
        Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": SIDE}),
        tokenizer,
        image_seq_len=(SIDE // PATCH // 2) ** 2,
    )
    processor.save_pretrained(folder)
    if has_weights:
        _save_weights(config, folder)
    return folder


def _save_weights(config: Any, folder: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():  # at their usual size they hardly tell one picture from another
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and ("vision" in name or "connector" in name):
                weight.normal_(std=0.2)
    model.generation_config = transformers.GenerationConfig(eos_token_id=config.text_config.eos_token_id)
    model.save_pretrained(folder)
