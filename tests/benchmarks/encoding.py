"""CPU time of a prompt's encoding, by the tokens of its history.

    python tests/benchmarks/encoding.py [--model smollm2-135m-instruct] [--rounds 5]

A conversation is played turn by turn through one renderer, as a sampling actor does it: once with a template
that only appends, and once with one that strips the thoughts of earlier answers. At each size of the history
the request that comes next is measured. `pickling` is that of its messages, `rendering` is done once,
`in all` is the encoding, which renders too, and `beyond` is what it takes more than those two; `new text` of
that is the tokenizer's, for what no earlier prompt has shown. `before` is what the encoding took when nothing
was held: two renderings, and the tokenizer over all that is not carried over as ids. All in milliseconds,
the least of all conversations.
"""

from __future__ import annotations

import argparse
import pickle
import random
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from os.path import commonprefix
from pathlib import Path
from typing import NamedTuple, TypeVar

import models
import repository  # noqa: F401
from report import Report

from environments.types import Completion, Message
from launch.run_folder.model_paths import model_folder
from policies.chat import ChatRenderer, load_tokenizer
from policies.chat_template import ChatTemplate
from policies.guard import Guard
from policies.sampler import SampleRequest, Turn

SIZES = (512, 4096, 16_384, 32_768)
THOUGHT_WORDS, ANSWER_WORDS, NEWS_WORDS = 400, 100, 100
WORDS = str(__doc__).split()
APPENDING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRIPPING = APPENDING.replace("m.content", "m.content.split('</think>')[-1].lstrip('\n')")
TEMPLATES = {"append-only": APPENDING, "thoughts stripped": STRIPPING}

T = TypeVar("T")


class Times(NamedTuple):
    """Milliseconds of CPU time for one request, and the tokens of its prompt."""

    pickling: float
    rendering: float
    in_all: float
    new_text: float
    before: float
    num_tokens: int

    @property
    def beyond(self) -> float:
        """What the encoding takes beside pickling and rendering its messages once."""
        return self.in_all - self.pickling - self.rendering


def least(times: Sequence[Times]) -> Times:
    """The least of each figure: on a machine with other work, all others are too high."""
    return Times(*map(min, zip(*times, strict=True)))


class Player:
    """Plays conversations through one renderer, and measures a request at each size of the history."""

    def __init__(self, model: str, template: str) -> None:
        self._tokenizer = load_tokenizer(model)
        self._tokenizer.chat_template = template
        self._renderer = ChatRenderer(self._tokenizer)
        self._plain = ChatTemplate(self._tokenizer, Guard(self._tokenizer), {})

    def play(self, sizes: tuple[int, ...], seed: int) -> list[Times]:
        """Return the times of a conversation's requests, one for each size."""
        draw, times = random.Random(seed), list[Times]()
        messages: list[Message] = [{"role": "user", "content": _text(draw, NEWS_WORDS)}]
        previous: Turn | None = None
        while len(times) < len(sizes):
            request: SampleRequest = pickle.loads(
                pickle.dumps(SampleRequest(messages=messages, previous=previous))
            )
            prompt_ids, in_all = _timed(partial(self._renderer.request_ids, request))
            if previous is not None and len(prompt_ids) >= sizes[len(times)]:
                times.append(self._compared(request, previous, prompt_ids, in_all))
            text = f"<think>\n{_text(draw, THOUGHT_WORDS)}\n</think>\n\n{_text(draw, ANSWER_WORDS)}"
            completion = self._completion(prompt_ids, text)
            previous = Turn(messages=messages, completion=completion)
            news: Message = {"role": "user", "content": _text(draw, NEWS_WORDS)}
            messages = [*messages, {"role": "assistant", "content": completion.text}, news]
        return times

    def _completion(self, prompt_ids: array[int], text: str) -> Completion:
        ids = (*self._whole(text), self._renderer.eos_token_id)
        text = self._renderer.completion_text(prompt_ids, ids)
        return Completion(prompt_ids=prompt_ids, completion_ids=ids, text=text, finish_reason="stop")

    def _compared(
        self, request: SampleRequest, previous: Turn, prompt_ids: array[int], in_all: float
    ) -> Times:
        pickled, pickling = _timed(partial(pickle.dumps, request.messages))
        arrived = pickle.loads(pickled)  # as in all: no text of it is in the CPU's caches
        text, rendering = _timed(partial(self._plain.render_anew, arrived, None))
        carried = previous.completion.tokens.read()
        is_extended = prompt_ids[: len(carried)] == carried
        rest = text[len(self._renderer.text_of(carried)) :] if is_extended else text
        ids, encoding = _timed(partial(self._whole, rest))
        assert ids == prompt_ids[len(carried) if is_extended else 0 :].tolist()
        earlier = commonprefix([text, self._plain.render_anew(previous.messages, None)])  # noqa: RUF071  # no paths
        _, new = _timed(partial(self._whole, rest if is_extended else text[len(earlier) :]))
        return Times(pickling, rendering, in_all, new, 2 * rendering + encoding, len(prompt_ids))

    def _whole(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    start = time.process_time_ns()
    result = call()
    return result, (time.process_time_ns() - start) / 1e6


def _text(draw: random.Random, num_words: int) -> str:
    return " ".join(draw.choices(WORDS, k=num_words)).capitalize() + "."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="whose tokenizer it is: a folder, or tiny"
    )
    parser.add_argument("--rounds", type=int, default=5, help="conversations with each template")
    arguments = parser.parse_args()
    report = Report(
        f"encoding: CPU ms of a request's prompt, tokenizer of {Path(arguments.model).name}, answers of "
        f"{THOUGHT_WORDS} words of thought and {ANSWER_WORDS} more, the least of {arguments.rounds}",
        ("history", "tokens", "pickling", "rendering", "in all", "beyond", "new text", "before"),
    )
    with tempfile.TemporaryDirectory() as folder:
        model = models.tiny(Path(folder)) if arguments.model == "tiny" else model_folder(arguments.model)
        for name, template in TEMPLATES.items():
            player = Player(model, template)
            rounds = [player.play(SIZES, seed) for seed in range(arguments.rounds)]
            for each in map(least, zip(*rounds, strict=True)):
                figures = (each.pickling, each.rendering, each.in_all, each.beyond, each.new_text)
                cells = (f"{figure:.2f}" for figure in (*figures, each.before))
                report.add(name, str(each.num_tokens), *cells)
    report.print()


if __name__ == "__main__":
    main()
