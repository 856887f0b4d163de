"""Pictures in messages: read within bounds, and what a model's own processor makes of them.

    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}    a part of a message's content

A picture is a data: URL of a PNG or JPEG, and no address is ever fetched. In a prompt it is as many tokens as
the processor says, and their ids are all alike whatever it shows: so it travels beside the ids, to the engine
and to the learner, which make the same pixels of it. Importing this is light.
"""

from __future__ import annotations

import binascii
import functools
import io
import struct
from array import array
from base64 import b64decode
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.errors import ConfigError
from environments.messages import Message, picture_of
from policies.encoding import SizedCache
from policies.settings import json_object

if TYPE_CHECKING:
    from PIL.Image import Image

FAMILIES = ("idefics3",)
"""Values of ``model_type`` whose pictures are read, such as that of SmolVLM-256M-Instruct. Each of their
tokens has one position."""
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
KINDS = ("data:image/png;base64", "data:image/jpeg;base64")
PICTURE_BYTES = 4 << 20
SIDES = range(8, 2049)
"""Pixels of a side of a picture."""
UNREADABLE = (OSError, SyntaxError, TypeError, struct.error, binascii.Error)
"""Errors of a decoder; ``TypeError`` and ``struct.error`` are those of fields beside an orientation."""
MAX_RATIO = 16
"""The longer side may be so many times the shorter one."""
PLACE: Message = {"type": "image"}
"""Part of a message in the place of a picture: this object itself, which templates know by its type."""
TOKEN_BIAS = -100.0
"""Added to the logit of the token that stands for pictures, by engine and learner, so that it is not sampled:
as a sampled one it would be taken for a picture."""
BLANK = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAgAAAAICAAAAADhZOFXAAAAEElEQVR42mP8zwABTAwUMQBJQQEPkWFcdwAAAABJ"
    "RU5ErkJggg=="
)
"""The smallest picture, white."""
OPENED_BYTES = 128 * 2**20
"""Bytes of the pictures that are held open: six of the largest, or a hundred of 512 pixels on a side."""
IDS_BYTES = 2**23
"""Bytes of the tokens that are held for the sizes of pictures."""
_OPENED: SizedCache[str, Image] = SizedCache(OPENED_BYTES)
SIZES_BYTES = 32 * 2**20
"""Bytes of the pictures, as they are written, whose sizes are known: several times a request over HTTP."""
_SIZES: SizedCache[str, tuple[int, int]] = SizedCache(SIZES_BYTES)


def reads_pictures(folder: str) -> bool:
    """Return whether the model in a folder reads pictures: it is of ``FAMILIES``, and has its processor."""
    path = Path(folder)
    if not any((path / name).is_file() for name in PROCESSOR_FILES) or not (path / "config.json").is_file():
        return False
    return json_object(path / "config.json").get("model_type") in FAMILIES


def split_pictures(messages: Sequence[Message]) -> tuple[list[Message], tuple[str, ...]]:
    """The messages with ``PLACE`` where a picture was, and the pictures, in their order.

    Raises:
        ValueError: a picture is none that is taken; see ``open_picture``.
    """
    pictures: list[str] = []

    def placed(part: Any) -> Any:
        if (picture := picture_of(part)) is None:
            return part
        size_of(picture)
        pictures.append(picture)
        return PLACE

    placed_messages = [
        {**message, "content": [*map(placed, content)]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]
    return placed_messages, tuple(pictures)


def pictures_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the pictures in messages, in their order. Raises as ``split_pictures`` does."""
    return split_pictures(messages)[1]


def open_picture(picture: str) -> Image:
    """Return the pixels of a picture, in red, green and blue, as its camera was held.

    Raises:
        ValueError: it is no data: URL of a PNG or JPEG, is damaged, or is larger than the bounds.
    """
    image = _OPENED.get(picture) if isinstance(picture, str) else None
    if image is None:
        image = _open(str(picture))
        _OPENED.put(picture, image, len(picture) + 3 * image.width * image.height)
        _SIZES.put(picture, image.size, len(picture))
    return image


def size_of(picture: str) -> tuple[int, int]:
    """Return the width and height of a picture, of which those that are known are not opened again.

    Raises:
        ValueError: as ``open_picture`` does.
    """
    size = _SIZES.get(picture) if isinstance(picture, str) else None
    return open_picture(picture).size if size is None else size


def _open(picture: str) -> Image:
    from PIL import Image, ImageOps

    kind, _, encoded = picture.partition(",")
    if kind not in KINDS:
        raise ValueError(
            f"the picture {picture!r:.90} is none of {', '.join(KINDS)}, and no address is fetched: write "
            "the picture itself into the message"
        )
    if len(encoded) > PICTURE_BYTES * 4 // 3:
        raise ValueError(
            f"a picture has about {len(encoded) * 3 // 4} bytes, and may have {PICTURE_BYTES}: shrink it"
        )
    try:
        image = Image.open(io.BytesIO(b64decode(encoded, validate=True)), formats=("PNG", "JPEG"))
        shorter, longer = sorted(image.size)
        if shorter not in SIDES or longer not in SIDES or longer > MAX_RATIO * shorter:
            raise ValueError(
                f"a picture has {image.width} x {image.height} pixels, and may have {SIDES[0]} to "
                f"{SIDES[-1]} on a side, the longer one at most {MAX_RATIO} times the shorter: scale it"
            )
        if image.mode.startswith("I"):
            raise ValueError(
                f"a picture has colours of mode {image.mode}, which would become white: save it in 8 bits"
            )
        ImageOps.exif_transpose(image, in_place=True)
        return image.convert("RGB")
    except (*UNREADABLE, Image.DecompressionBombError) as error:
        raise ValueError(f"the picture {picture!r:.90} cannot be read ({error}): write it again") from error


class PictureReader:
    """The processor of a model that reads pictures.

    Attributes:
        token, token_id: what stands for a picture in a rendered text.
        processor: of transformers.

    Raises:
        ConfigError: it cannot be loaded.
    """

    def __init__(self, folder: str) -> None:
        from transformers import AutoProcessor, Idefics3Config
        from transformers.models.auto.image_processing_auto import AutoImageProcessor
        from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

        # transformers 5.10 finds the name of torchvision's class in the comments of this module, and takes it
        # for one that needs torchvision.
        own = {"pil": Idefics3ImageProcessorPil}
        AutoImageProcessor.register(Idefics3Config, image_processor_classes=own, exist_ok=True)
        try:
            self.processor: Any = AutoProcessor.from_pretrained(folder)
        except (OSError, ValueError, ImportError, TypeError, KeyError) as error:
            reason = " ".join(str(error).split())
            raise ConfigError(
                f"The processor of pictures in {folder!r} cannot be loaded ({reason:.300}): copy the model's "
                f"{' and '.join(PROCESSOR_FILES)} anew, or take them out to use its text alone."
            ) from error
        self.token = str(self.processor.image_token)
        self.token_id = int(self.processor.image_token_id)
        self._ids: SizedCache[tuple[int, int], array[int]] = SizedCache(IDS_BYTES)

    def ids(self, picture: str) -> array[int]:
        """The tokens that a prompt has for a picture, which are those of its size."""
        size = size_of(picture)
        if (ids := self._ids.get(size)) is None:
            made = self.processor(images=[open_picture(picture)], text=self.token, add_special_tokens=False)
            ids = array("i", made["input_ids"][0])
            self._ids.put(size, ids, ids.itemsize * len(ids))
        return ids

    def pixels(self, pictures: Sequence[str]) -> dict[str, Any]:
        """Arguments of the model beside its tokens, for the pictures of some rows in their order."""
        made = self.processor(
            images=[*map(open_picture, pictures)],
            text=self.token * len(pictures),
            add_special_tokens=False,
            return_tensors="pt",
        )
        return {name: each for name, each in made.items() if name not in ("input_ids", "attention_mask")}

    def collapsed(self, ids: Sequence[int], pictures: Sequence[str]) -> list[int]:
        """``ids`` with one token in the place of those of each picture: vLLM takes them so.

        Raises:
            ValueError: a picture's tokens are not among them.
        """
        whole, short, start = list(ids), list[int](), 0
        for picture in pictures:
            own = self.ids(picture).tolist()
            begin = start
            while begin < len(whole) and (whole[begin] != own[0] or whole[begin : begin + len(own)] != own):
                begin += 1
            if begin == len(whole):
                raise ValueError("the prompt lacks the tokens of a picture that comes with it")
            short += [*whole[start:begin], self.token_id]
            start = begin + len(own)
        return short + whole[start:]


@functools.lru_cache(maxsize=4)
def picture_reader(folder: str) -> PictureReader | None:
    """The reader of the model in a folder, or ``None`` where it reads text alone. Raises ``ConfigError``."""
    return PictureReader(folder) if reads_pictures(folder) else None
