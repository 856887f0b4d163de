"""Token truth with templates that behave like those of well-known models (``tests/templates``)."""

# ruff: noqa: RUF001  (DeepSeek writes its markers with a fullwidth bar)

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from environments.errors import AgentError, ConfigError, PromptTooLongError
from environments.types import Completion, Message, Step, Trajectory
from policies.chat import ChatRenderer, load_tokenizer
from policies.learning.samples import training_samples
from policies.sampler import SampleRequest, Turn
from policies.tiny import build_tokenizer

TEMPLATES = Path(__file__).parents[2] / "templates"
SYSTEM: Message = {"role": "system", "content": " Be exact. "}
QUESTION: Message = {"role": "user", "content": "What is 12*3, in words?"}
CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {"name": "calculator", "description": "Evaluates <arithmetic>.", "parameters": {}},
}
CALL_TEXT = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*3"}}\n</tool_call>'
TOOL_CALL: dict[str, Any] = {
    "id": "call_0",
    "type": "function",
    "function": {"name": "calculator", "arguments": '{"expression": "12*3"}'},
}
CANONICAL_THOUGHT = "<think>\nThree times twelve.\n</think>\n\nthirty-six"
ANSWERS = [
    "thirty-six",
    " thirty-six ½ ",
    "36\n",
    "",
    CALL_TEXT,
    f"I call it.\n{CALL_TEXT}",
    CANONICAL_THOUGHT,
    "<think>three times\n\ntwelve</think>36",
    "Three times twelve.\n</think>\n\n36",
]


@dataclass(frozen=True)
class Family:
    """A model family: its template, its special tokens, and where its template shows answers as they were."""

    name: str
    template: str
    eos: str
    specials: tuple[str, ...]
    extends: Callable[[Played], bool]
    bos: str = ""
    kwargs: dict[str, Any] = field(default_factory=dict)
    shows_tools: bool = True


@dataclass(frozen=True)
class Played:
    """A turn of a played conversation: what was asked and answered, and the prompt that came after it."""

    before: list[Message]
    completion: Completion
    after: list[Message]
    next_prompt_ids: list[int]

    @property
    def seen(self) -> tuple[int, ...]:
        return self.completion.prompt_ids + self.completion.completion_ids

    @property
    def is_extended(self) -> bool:
        return tuple(self.next_prompt_ids[: len(self.seen)]) == self.seen


def always(turn: Played) -> bool:
    return True


def never(turn: Played) -> bool:
    return False


def unless_trimmed(turn: Played) -> bool:
    return turn.completion.text == turn.completion.text.strip()


def unless_a_thought_goes_or_is_written_anew(turn: Played) -> bool:
    if turn.after[-1]["role"] == "tool":
        text = turn.completion.text
        return "</think>" not in text or text == CANONICAL_THOUGHT
    last_question = max(i for i, message in enumerate(turn.before) if message["role"] == "user")
    since = turn.after[last_question:]
    return not any("</think>" in message["content"] for message in since)


def after_tools_without_a_thought(turn: Played) -> bool:
    return turn.before[-1]["role"] == "tool" and "</think>" not in turn.completion.text


CHATML_SPECIALS = ("<|im_start|>", "<|im_end|>")
LLAMA_SPECIALS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
)
R1_SPECIALS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    *(f"<｜tool▁{kind}▁{edge}｜>" for kind in ("outputs", "output") for edge in ("begin", "end")),
)
CHATML = Family("chatml", "chatml", "<|im_end|>", CHATML_SPECIALS, always, shows_tools=False)
QWEN2_5 = Family("qwen2.5", "qwen2_5", "<|im_end|>", CHATML_SPECIALS, always)
QWEN3 = Family("qwen3", "qwen3", "<|im_end|>", CHATML_SPECIALS, unless_a_thought_goes_or_is_written_anew)
QWEN3_QUIET = Family(  # its history does not show the empty thought that the prompt ends with
    "qwen3-quiet", "qwen3", "<|im_end|>", CHATML_SPECIALS, never, kwargs={"enable_thinking": False}
)
LLAMA3 = Family("llama3", "llama3", "<|eot_id|>", LLAMA_SPECIALS, unless_trimmed, bos="<|begin_of_text|>")
R1 = Family(
    "r1",
    "r1_distill",
    "<｜end▁of▁sentence｜>",
    R1_SPECIALS,
    after_tools_without_a_thought,
    bos="<｜begin▁of▁sentence｜>",
    shows_tools=False,
)
FAMILIES = [CHATML, QWEN2_5, QWEN3, QWEN3_QUIET, LLAMA3, R1]


def for_families(*families: Family) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("family", families, ids=[family.name for family in families])


@cache
def tokenizer_of(template: str) -> Any:
    family = next(family for family in FAMILIES if family.template == template)
    corpus = [[SYSTEM, QUESTION, {"role": "assistant", "content": answer}] for answer in ANSWERS]
    tokenizer = build_tokenizer(corpus * 5)
    tokenizer.add_tokens(list(family.specials), special_tokens=True)
    tokenizer.eos_token = family.eos
    tokenizer.bos_token = family.bos or None
    tokenizer.chat_template = (TEMPLATES / f"{family.template}.jinja").read_text()
    return tokenizer


@cache
def renderer_of(template: str, **kwargs: Any) -> ChatRenderer:
    return ChatRenderer(tokenizer_of(template), kwargs)


def renderer(family: Family) -> ChatRenderer:
    return renderer_of(family.template, **family.kwargs)


def rendered(family: Family, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> str:
    """The template's own text, straight from Jinja."""
    return tokenizer_of(family.template).apply_chat_template(
        list(messages), tools=tools, tokenize=False, add_generation_prompt=True, **family.kwargs
    )


def ragged(family: Family, text: str, seed: int) -> list[int]:
    """Ids of ``text`` as an engine might sample them: cut into tokens where encoding would not cut it."""
    generator = random.Random(seed)
    encode = tokenizer_of(family.template).encode
    ids: list[int] = []
    while text:
        length = generator.randint(1, 6)
        ids += encode(text[:length], add_special_tokens=False)
        text = text[length:]
    return ids


def said(
    family: Family, prompt_ids: Sequence[int], text: str, end: str | None = None, seed: int = 0
) -> Completion:
    """A completion that says ``text`` and ends with the token ``end``, or is cut off."""
    ids = ragged(family, text, seed)
    if end is not None:
        ids.append(tokenizer_of(family.template).convert_tokens_to_ids(end))
    return Completion(
        prompt_ids=tuple(prompt_ids),
        completion_ids=tuple(ids),
        logprobs=tuple(-0.5 for _ in ids),
        text=renderer(family).decode(ids),
        finish_reason="length" if end is None else "stop",
    )


def decoded(family: Family, ids: Sequence[int]) -> str:
    return tokenizer_of(family.template).decode(ids, clean_up_tokenization_spaces=False)


def play(family: Family, seed: int, tools: list[dict[str, Any]] | None) -> Iterator[Played]:
    """A random conversation of an agent that keeps the raw text, and hears tool outputs or new questions."""
    generator = random.Random(seed)
    messages = [*([SYSTEM] if generator.random() < 0.5 else []), QUESTION]
    previous: Turn | None = None
    for turn in range(5):
        prompt_ids = renderer(family).prompt_ids(messages, previous, tools)
        if previous is not None:
            yield Played(previous.messages, previous.completion, messages, prompt_ids)
        end = family.eos if generator.random() < 0.7 else None
        completion = said(family, prompt_ids, generator.choice(ANSWERS), end, seed=turn)
        if not completion.completion_ids:
            completion = said(family, prompt_ids, "so", end, seed=turn)
        previous = Turn(messages=messages, completion=completion, tools=tools)
        messages = [*messages, {"role": "assistant", "content": completion.text}, *news(generator)]


def news(generator: random.Random) -> list[Message]:
    if generator.random() < 0.5:
        return [{"role": "user", "content": generator.choice(["Sure?", " In words? ", "½\n"])}]
    outputs = generator.choice([["36"], ["36\n", "Error: no"]])
    return [{"role": "tool", "content": text, "tool_call_id": f"call_{i}"} for i, text in enumerate(outputs)]


# --- what holds for every template


@for_families(*FAMILIES)
def test_prompt_is_extended_where_the_template_shows_the_turn(
    family: Family,
) -> None:
    for seed in range(25):
        tools = [CALCULATOR] if seed % 2 and family.shows_tools else None
        for turn in play(family, seed, tools):
            text = rendered(family, turn.after, tools)
            assert decoded(family, turn.next_prompt_ids) == text
            assert turn.is_extended == family.extends(turn), turn
            if not turn.is_extended:
                assert turn.next_prompt_ids == renderer(family).encode(text)


@for_families(*FAMILIES)
def test_mask_covers_what_was_sampled_and_nothing_is_lost(family: Family) -> None:
    for seed in range(20):
        turns = list(play(family, seed, tools=None))
        trajectory = Trajectory(steps=[Step(completion=turn.completion) for turn in turns], rollout_id="0/0")
        samples = training_samples(trajectory)
        sampled = [token for turn in turns for token in turn.completion.completion_ids]
        trained = [
            token
            for sample in samples
            for token, bit in zip(sample.response_ids, sample.loss_mask, strict=True)
            if bit
        ]
        assert trained == sampled
        assert len(samples) == 1 + sum(not turn.is_extended for turn in turns[:-1])


@for_families(QWEN2_5, QWEN3, LLAMA3)
def test_other_tools_than_in_the_turn_before_are_shown(family: Family) -> None:
    before = [QUESTION]
    completion = said(family, renderer(family).prompt_ids(before), "thirty-six", family.eos)
    after = [*before, {"role": "assistant", "content": "thirty-six"}, {"role": "user", "content": "Sure?"}]
    prompt_ids = renderer(family).prompt_ids(
        after, Turn(messages=before, completion=completion), [CALCULATOR]
    )
    assert "calculator" in decoded(family, prompt_ids)


@for_families(CHATML, R1)
def test_tools_that_the_template_does_not_show_are_refused(family: Family) -> None:
    with pytest.raises(AgentError, match=r"shows no tools.*tools_in='system'"):
        renderer(family).request_ids(SampleRequest(messages=[QUESTION], tools=[CALCULATOR]))


@for_families(QWEN2_5, QWEN3, LLAMA3, R1)
def test_structured_calls_render_alike_from_text_and_object(family: Family) -> None:
    function = {"name": "calculator", "arguments": {"expression": "12*3"}}
    as_text: Message = {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]}
    as_object = {**as_text, "content": "", "tool_calls": [{**TOOL_CALL, "function": function}]}
    prompt_ids = renderer(family).prompt_ids([QUESTION, as_text])
    assert decoded(family, prompt_ids) == rendered(family, [QUESTION, as_object])
    assert '{"expression": "12*3"}' in decoded(family, prompt_ids)


# --- Qwen


def test_qwen3_thoughts_stay_in_a_tool_loop() -> None:
    text = "<think>\nThree times twelve.\n</think>\n\n" + CALL_TEXT
    before = [QUESTION]
    completion = said(QWEN3, renderer(QWEN3).prompt_ids(before), text, "<|im_end|>")
    history = [*before, {"role": "assistant", "content": text}]
    turn = Turn(messages=before, completion=completion)
    looped = renderer(QWEN3).prompt_ids([*history, {"role": "tool", "content": "36"}], turn)
    asked = renderer(QWEN3).prompt_ids([*history, {"role": "user", "content": "Sure?"}], turn)
    seen = [*completion.prompt_ids, *completion.completion_ids]
    assert looped[: len(seen)] == seen
    assert "Three times" not in decoded(QWEN3, asked)


def test_qwen3_thought_that_renders_differently_is_not_kept() -> None:
    text = "<think>three times twelve</think>" + CALL_TEXT
    before = [QUESTION]
    completion = said(QWEN3, renderer(QWEN3).prompt_ids(before), text, "<|im_end|>")
    after = [*before, {"role": "assistant", "content": text}, {"role": "tool", "content": "36"}]
    prompt_ids = renderer(QWEN3).prompt_ids(after, Turn(messages=before, completion=completion))
    assert prompt_ids == renderer(QWEN3).encode(rendered(QWEN3, after))


def test_qwen3_without_thinking_opens_answer_with_empty_thought() -> None:
    prompt = decoded(QWEN3_QUIET, renderer(QWEN3_QUIET).prompt_ids([QUESTION]))
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_structured_calls_rendered_as_sampled_are_extended() -> None:
    before = [QUESTION]
    completion = said(QWEN3, renderer(QWEN3).prompt_ids(before), f"I call it.\n{CALL_TEXT}", "<|im_end|>")
    after = [
        *before,
        {"role": "assistant", "content": "I call it.", "tool_calls": [TOOL_CALL]},
        {"role": "tool", "content": "36", "tool_call_id": "call_0"},
    ]
    prompt_ids = renderer(QWEN3).prompt_ids(after, Turn(messages=before, completion=completion))
    seen = [*completion.prompt_ids, *completion.completion_ids]
    assert prompt_ids[: len(seen)] == seen
    assert decoded(QWEN3, prompt_ids) == rendered(
        QWEN3, [*before, {"role": "assistant", "content": completion.text}, after[-1]]
    )


@pytest.mark.parametrize("name", ["enable_thinkin", "messages", "tools"])
def test_template_option_that_template_does_not_read_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"chat_template_kwargs has '{name}'"):
        ChatRenderer(tokenizer_of("qwen3"), {name: False})


# --- Llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    """From a folder whose generation configuration lists three end tokens."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = tokenizer_of("llama3")
    tokenizer.save_pretrained(folder)
    names = ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]
    end_ids = tokenizer.convert_tokens_to_ids(names)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_ids}))
    return ChatRenderer(load_tokenizer(folder))


def llama_ids(*names: str) -> list[int]:
    return tokenizer_of("llama3").convert_tokens_to_ids(list(names))


@pytest.mark.parametrize("end", ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"])
def test_every_configured_end_token_is_left_out_of_the_text(llama: ChatRenderer, end: str) -> None:
    assert llama.decode([*llama.encode("36"), *llama_ids(end)]) == "36"
    assert llama.decode([*llama_ids(end), *llama.encode("36")]) == f"{end}36"


def test_tokenizer_without_a_model_has_its_own_end_token() -> None:
    alone = ChatRenderer(tokenizer_of("llama3"))
    assert alone.decode(llama_ids("<|eot_id|>")) == ""
    assert alone.decode(llama_ids("<|eom_id|>")) == "<|eom_id|>"


@pytest.mark.parametrize(("configured", "text"), [(True, "36"), ([], "36<|eom_id|>"), (None, "36<|eom_id|>")])
def test_end_tokens_come_from_the_model_config_too(tmp_path: Path, configured: Any, text: str) -> None:
    tokenizer_of("llama3").save_pretrained(tmp_path)
    end_ids = llama_ids("<|eom_id|>")[0] if configured is True else configured
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": end_ids}))
    alone = ChatRenderer(load_tokenizer(tmp_path))
    assert alone.decode([*alone.encode("36"), *llama_ids("<|eom_id|>")]) == text


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"])
def test_message_is_extended_only_if_the_template_ends_alike(llama: ChatRenderer, end: str) -> None:
    before = [QUESTION]
    ids = (*llama.encode("36"), *llama_ids(end))
    completion = Completion(
        prompt_ids=tuple(llama.prompt_ids(before)), completion_ids=ids, text="36", finish_reason="stop"
    )
    after = [*before, {"role": "assistant", "content": "36"}, {"role": "user", "content": "Sure?"}]
    prompt_ids = llama.prompt_ids(after, Turn(messages=before, completion=completion))
    seen = [*completion.prompt_ids, *ids]
    assert (prompt_ids[: len(seen)] == seen) == (end == "<|eot_id|>")
    assert decoded(LLAMA3, prompt_ids) == rendered(LLAMA3, after)
    assert prompt_ids.count(llama_ids("<|begin_of_text|>")[0]) == 1


def test_refusal_of_the_template_names_the_remedy(llama: ChatRenderer) -> None:
    twice: Message = {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL, TOOL_CALL]}
    with pytest.raises(AgentError, match=r"rejects the agent's messages .*single tool-calls"):
        llama.request_ids(SampleRequest(messages=[QUESTION, twice]))


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": 3},
        {"role": "user"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "0"}]},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
    ],
    ids=["content that is no text", "no content", "call without a function", "arguments that are no JSON"],
)
def test_message_that_cannot_be_rendered_is_the_agents_fault(message: Message) -> None:
    with pytest.raises(AgentError, match="rejects the agent's messages"):
        renderer(QWEN2_5).request_ids(SampleRequest(messages=[QUESTION, message]))


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": None}, "text"]
)
def test_image_in_message_is_refused_by_its_type(part: Any) -> None:
    """Gemma 3's template leaves it out, and Llama 3.1's writes the list as Python does."""
    tokenizer = copy.deepcopy(tokenizer_of("qwen2_5"))
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    content = [{"type": "text", "text": "What is it?"}, part]
    own, shown = ChatRenderer(tokenizer), re.escape(repr(part))
    for _ in range(2):  # before and after its role is known to be shown
        with pytest.raises(
            AgentError,
            match=rf"message 0, .*part of its content is {shown}, .*is no text that this model reads",
        ):
            own.request_ids(SampleRequest(messages=[{"role": "user", "content": content}]))
        own.request_ids(SampleRequest(messages=[{"role": "user", "content": content[:1]}]))


def test_prompt_over_the_limit_of_the_request_is_refused(llama: ChatRenderer) -> None:
    length = len(llama.prompt_ids([QUESTION]))
    assert len(llama.request_ids(SampleRequest(messages=[QUESTION], max_prompt_tokens=length))) == length
    with pytest.raises(PromptTooLongError, match=f"max_prompt_tokens={length - 1}"):
        llama.request_ids(SampleRequest(messages=[QUESTION], max_prompt_tokens=length - 1))


# --- DeepSeek-R1


def test_r1_opens_thought_for_question_and_none_for_tool_outputs() -> None:
    history: list[Message] = [
        QUESTION,
        {"role": "assistant", "content": "Tools.\n</think>\n\nI call it."},
        {"role": "tool", "content": "36"},
    ]
    assert decoded(R1, renderer(R1).prompt_ids(history[:1])).endswith("<｜Assistant｜><think>\n")
    prompt = decoded(R1, renderer(R1).prompt_ids(history))
    assert prompt.endswith("<｜tool▁output▁begin｜>36<｜tool▁output▁end｜><｜tool▁outputs▁end｜>")
    assert "Tools." not in prompt
