"""Encoding in pieces: the ids of a text are those of the whole, and what is held is bounded."""

from __future__ import annotations

import copy
import logging
import random
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_chat_templates import ANSWERS, CALCULATOR, FAMILIES, QUESTION, SYSTEM, Family, tokenizer_of
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import PreTrainedTokenizerFast

from environments.types import Completion, Message
from policies.chat import ChatRenderer
from policies.encoding import ENTRY_BYTES, PieceEncoder, SizedCache
from policies.guard import GUARD
from policies.sampler import Turn
from policies.tiny import build_tokenizer

CONTROLS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]")
WORDS = (
    "a",
    "an",
    "ab",
    "ba",
    "b",
    " ",
    "  ",
    "\n",
    "\t",
    "é",
    "e\u0301",
    "日本",
    "\U0001f600",
    "1",
    "<",
    "|",
    GUARD,
)


def pipeline(model: Any, *controls: AddedToken, **steps: Any) -> Any:
    """A tokenizer of the given steps."""
    backend = Tokenizer(model)
    for name, step in steps.items():
        setattr(backend, name, step)
    backend.add_tokens(list(controls))
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def control(name: str, **flags: Any) -> AddedToken:
    return AddedToken(name, **{"special": True, "normalized": False, **flags})


def controls(**flags: Any) -> list[AddedToken]:
    return [control(name, **flags) for name in CONTROLS]


def pairs(*words: str) -> Any:
    """A BPE model that joins the letters of some words, and falls back to bytes."""
    letters = [*"▁abnéĠ", *(f"<0x{byte:02X}>" for byte in range(256)), "<unk>"]
    merges = [("a", "b"), ("▁", "a"), ("▁a", "b"), ("b", "a"), ("▁", "▁"), ("Ġ", "a")]
    vocab = {each: index for index, each in enumerate([*letters, *("".join(pair) for pair in merges)])}
    return models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def unigrams() -> Any:
    words = [
        ("<unk>", 0.0),
        *((each, -1.0 - index) for index, each in enumerate(["▁", "▁a", "a", "b", "ab"])),
    ]
    return models.Unigram(words, unk_id=0, byte_fallback=False)


LEGACY = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
MASK = AddedToken("<mask>", special=True, normalized=False, lstrip=True)
COVERING = [
    AddedToken(name, special=False, normalized=False)
    for name in ("x<s", "<|im_start|>a", "b<", "|><|", "</s><s>", "<", "\n\n")
]
MADE: dict[str, Callable[[], Any]] = {
    "bytes": lambda: build_tokenizer([[QUESTION]]),
    "bytes, space before": lambda: pipeline(
        pairs(), *controls(), pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "pieces, space before the first": lambda: pipeline(
        unigrams(), *controls(), pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="first")
    ),
    "pieces, space before each": lambda: pipeline(
        unigrams(), *controls(), pre_tokenizer=pre_tokenizers.Metaspace(prepend_scheme="always")
    ),
    "no pre-tokenizer": lambda: pipeline(pairs(), *controls(), normalizer=LEGACY),
    "white space behind": lambda: pipeline(pairs(), *controls(rstrip=True), normalizer=LEGACY),
    "white space before": lambda: pipeline(pairs(), *controls(), MASK, normalizer=LEGACY),
    "ends stripped": lambda: pipeline(unigrams(), *controls(), normalizer=normalizers.Strip()),
    "lower case": lambda: pipeline(
        models.WordLevel({"<unk>": 0, "a": 1, "ab": 2}, unk_token="<unk>"),
        *controls(),
        AddedToken("<B>", special=True, normalized=True),
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
        pre_tokenizer=pre_tokenizers.Whitespace(),
    ),
    "overlapping names": lambda: pipeline(pairs(), *controls(), *COVERING, decoder=decoders.ByteFallback()),
}


@cache
def tokenizer(kind: str) -> Any:
    return MADE[kind]()


@cache
def encoder(kind: str) -> PieceEncoder:
    return PieceEncoder(tokenizer(kind))


def whole(of: Any, text: str) -> list[int]:
    """The ids of a text by the tokenizer alone."""
    return [each for part in text.split(GUARD) for each in of.encode(part, add_special_tokens=False)]


def texts(*names: str) -> st.SearchStrategy[str]:
    """Texts with names, parts of names, white space and all that Unicode has."""
    parts = [name[start:end] for name in names for start, end in ((0, -1), (1, None), (0, 3))]
    word = st.sampled_from([*names, *names, *parts, *WORDS]) | st.text(
        st.characters(codec="utf-8"), max_size=3
    )
    return st.lists(word, max_size=12).map("".join)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MADE)
def test_ids_of_any_text_are_those_of_the_whole(kind: str) -> None:
    names = [token.content for token in tokenizer(kind).added_tokens_decoder.values()]

    @settings(max_examples=150)
    @given(texts(*names))
    def check(text: str) -> None:
        assert encoder(kind).is_separable
        assert encoder(kind).encode(text).tolist() == whole(tokenizer(kind), text)

    check()


def conversation(draw: random.Random, num_turns: int, tools: bool) -> list[Message]:
    messages = [SYSTEM, QUESTION]
    for _ in range(num_turns):
        text = draw.choice(ANSWERS) + "<|im_end|>" * (draw.random() < 0.2)
        role = draw.choice(["tool", "user"] if tools else ["user"])
        news = {"role": role, "content": draw.choice(["36", " a\n", "<|im_start|>", "½ 日本 \U0001f600"])}
        messages += [{"role": "assistant", "content": text}, news]
    return messages


@pytest.mark.parametrize("family", FAMILIES, ids=[family.name for family in FAMILIES])
@pytest.mark.parametrize("seed", range(4))
def test_ids_of_rewritten_history_are_those_of_the_whole(family: Family, seed: int) -> None:
    """Messages are dropped, edited and moved, thoughts stripped, and everything is rendered again."""
    draw, own = random.Random(seed), tokenizer_of(family.template)
    renderer = ChatRenderer(own, family.kwargs)
    messages = conversation(draw, 6, tools=True)
    schemas = [CALCULATOR] if family.shows_tools else None
    for _ in range(8):
        text = ChatRenderer(own, family.kwargs).template.render(messages, schemas)
        assert renderer.prompt_ids(messages, tools=schemas) == whole(own, text)
        at = draw.randrange(2, len(messages) - 1)
        rewritten = {**messages[at], "content": draw.choice(["(cut)", messages[at]["content"] + "."])}
        rest = messages[at + 2 - len(messages) % 2 :] if draw.random() < 0.5 else messages[at + 1 :]
        messages = [*messages[:at], rewritten, *rest, *conversation(draw, 1, tools=True)[2:]]


def test_rewritten_history_adds_only_what_is_new() -> None:
    own = tokenizer_of("qwen3")
    renderer, draw = ChatRenderer(own), random.Random(0)
    words = [f"{draw.random()}" for _ in range(8)]
    messages: list[Message] = [{"role": "system", "content": words[0]}, {"role": "user", "content": words[1]}]
    for word in words[2:]:
        answer = f"<think>\n{word * 9}\n</think>\n\n{word}"
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"{word}?"}]
    renderer.prompt_ids(messages)
    before = renderer._encoder.num_bytes
    renderer.prompt_ids([*messages[:-1], {"role": "user", "content": "new"}])
    renderer.prompt_ids([messages[0], *messages[3:-1], {"role": "user", "content": "new"}])
    assert before < renderer._encoder.num_bytes < before + ENTRY_BYTES + 300


def custom() -> Any:
    made = pipeline(pairs(), *controls())
    made.backend_tokenizer.pre_tokenizer = PreTokenizer.custom(object())
    return made


def patched() -> Any:
    made = copy.deepcopy(tokenizer("bytes"))
    made.encode = lambda text, add_special_tokens: [len(text)]  # it depends on the text as a whole
    return made


class OwnEncode(PreTrainedTokenizerFast):
    def encode(self, text: Any, *arguments: Any, **options: Any) -> list[int]:
        return [len(text)]


NOT_SEPARABLE: list[tuple[Callable[[], Any], str]] = [
    (lambda: pipeline(models.BPE({"a": 0}, [], dropout=0.5), *controls()), "at random"),
    (lambda: pipeline(pairs(), control("<s>", single_word=True)), "single words"),
    (lambda: pipeline(pairs()), "no control tokens"),
    (lambda: pipeline(pairs(), *controls(normalized=True)), "no control tokens"),
    (
        lambda: PreTrainedTokenizerFast(
            tokenizer_object=tokenizer("bytes").backend_tokenizer, split_special_tokens=True
        ),
        "split_special_tokens",
    ),
    (lambda: OwnEncode(tokenizer_object=tokenizer("bytes").backend_tokenizer), "an encode method"),
    (custom, "is a program"),
    (patched, "other ids than its pieces"),
]


@pytest.mark.parametrize(("make", "reason"), NOT_SEPARABLE, ids=[reason for _, reason in NOT_SEPARABLE])
def test_tokenizer_that_is_not_separable_encodes_the_whole(
    make: Callable[[], Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = make()
    made.name_or_path = f"models/{id(made)}"
    with caplog.at_level(logging.WARNING, "policies"):
        encoders = [PieceEncoder(made) for _ in range(3)]
    assert not any(each.is_separable for each in encoders)
    (record,) = [each for each in caplog.records if each.name == "policies.encoding"]
    assert reason in record.getMessage()
    assert made.name_or_path in record.getMessage()
    if reason not in ("at random", "is a program"):
        text = f"a <s>b{GUARD} ab</s>"
        assert encoders[0].encode(text).tolist() == whole(made, text)
        assert encoders[0].num_bytes == 0 or reason.startswith("other")


def test_held_pieces_are_bounded_and_stay_exact() -> None:
    small = PieceEncoder(tokenizer("bytes"), max_bytes=20_000)
    draw = random.Random(0)
    for _ in range(200):
        pieces = [f"<|im_start|>{draw.randrange(100)}{'a' * draw.randrange(50)}" for _ in range(20)]
        text = "".join(pieces)
        assert small.encode(text).tolist() == whole(tokenizer("bytes"), text)
        assert small.num_bytes <= 20_000
    assert small.encode("a" * 30_000).tolist() == whole(tokenizer("bytes"), "a" * 30_000), (
        "larger than all that is held"
    )


@pytest.mark.slow
def test_threads_share_an_encoder() -> None:
    shared = PieceEncoder(tokenizer("bytes"), max_bytes=5_000)
    talks = ["".join(f"<|im_start|>{number % size}a" for number in range(40)) for size in range(2, 40)]
    expected = [array("i", whole(tokenizer("bytes"), text)) for text in talks]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(shared.encode, talks * 20)) == expected * 20


def test_cache_drops_what_was_not_used_lately() -> None:
    held: SizedCache[str, int] = SizedCache(8 * (ENTRY_BYTES + 10))
    for number in range(40):
        held.put(str(number), number, 10)
        held.put(str(number), -1, 10)
        assert held.get("0") == 0, "it is used all the time"
        assert held.num_bytes <= 8 * (ENTRY_BYTES + 10)
    assert [held.get(str(number)) for number in (0, 37, 38, 39)] == [0, 37, 38, 39]
    assert not any(held.get(str(number)) for number in range(1, 32))
    held.put("large", 1, 4 * ENTRY_BYTES + 40)
    assert held.get("large") is None, "it has no room"


COUNTING = "{% set _ = count(1) %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + (
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>{% endfor %}<|im_start|>assistant\n"
)


def counting(template: str = COUNTING) -> tuple[ChatRenderer, list[int]]:
    """A renderer whose template counts how often it renders."""
    made = copy.deepcopy(tokenizer("bytes"))
    made.chat_template = template
    counts: list[int] = []
    return ChatRenderer(made, {"count": counts.append}), counts


def test_turn_before_is_not_rendered_again() -> None:
    renderer, counts = counting()
    messages: list[Message] = [QUESTION]
    previous: Turn | None = None
    for _ in range(4):
        prompt_ids = renderer.prompt_ids(messages, previous)
        completion = Completion(
            prompt_ids=tuple(prompt_ids),
            completion_ids=(*renderer.encode("46"), renderer.eos_token_id),
            text="46",
            finish_reason="stop",
        )
        previous = Turn(messages=copy.deepcopy(messages), completion=completion)
        messages = [*copy.deepcopy(messages), {"role": "assistant", "content": "46"}, QUESTION]
    assert len(counts) == 4


def test_equal_values_that_read_otherwise_are_rendered_apart() -> None:
    renderer, _ = counting()
    shown = []
    for value in (1, True, 1.0, "1"):
        call = {"function": {"name": "f", "arguments": {"a": value}}}
        answer: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        shown.append(renderer.text_of(renderer.prompt_ids([QUESTION, answer])))
    assert len(set(shown)) == 4


@pytest.mark.parametrize("clock", ['strftime_now("%f")', "strftime_now(form)", "strftime_now ( '%f' )"])
def test_clock_of_a_template_goes_on(clock: str) -> None:
    renderer, _ = counting(f"{{% set form = '%f' %}}{{% set _ = count(1) %}}{{{{ {clock} }}}}")
    shown = {renderer.text_of(renderer.prompt_ids([QUESTION])) for _ in range(5)}
    assert len(shown) > 1
