"""A thought that a completion does not finish: its text says so, and the server sends it as reasoning."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest
from test_agent_frontend import AgentFrontend, Calculator, episode
from test_openai_protocol import MESSAGES, TOOL_CALL, TOOLS, FakeEngine, ids_of, tokenizer

from environments.thoughts import MARKS, split_thought
from environments.types import Completion, Message
from policies.agent_api.responses import ResponsesFrontend, ResponsesRequest
from policies.chat import ChatRenderer
from policies.model_api.frontend import OpenAIFrontend
from policies.model_api.growing_text import GrowingThought
from policies.model_api.protocol import ChatRequest
from policies.sampler import Turn
from policies.tiny import build_tokenizer

OPENING = "<think>\n"
R1 = (Path(__file__).parents[2] / "templates" / "r1_distill.jinja").read_text()


def renderer(template: str) -> ChatRenderer:
    made = build_tokenizer([[*MESSAGES, {"role": "assistant", "content": "The answer is 46."}]] * 20)
    made.chat_template = template
    return ChatRenderer(made)


def opening_template(opening: str) -> str:
    """A template whose prompt opens a thought."""
    return tokenizer().chat_template + f"{{% if add_generation_prompt %}}{{{{ {opening!r} }}}}{{% endif %}}"


def ask(text: str, opening: str = "", finish_reason: str = "length", **fields: Any) -> dict[str, Any]:
    """The choice that answers ``text``; of a stream, its deltas joined."""
    own = renderer(opening_template(opening)) if opening else ChatRenderer(tokenizer())
    engine = FakeEngine(ids_of(text, ended=finish_reason == "stop"), finish_reason=finish_reason)
    body = ChatRequest.model_validate({"model": "tiny", "messages": MESSAGES, **fields})

    async def parts() -> list[dict[str, Any]]:
        return [part async for part in OpenAIFrontend("tiny", own, engine).chat(body)]

    choices = [part["choices"][0] for part in asyncio.run(parts())]
    said = [choice.get("message") or choice.get("delta") for choice in choices]
    joined = {
        name: "".join(each.get(name) or "" for each in said) for name in ("content", "reasoning_content")
    }
    calls = [call for each in said for call in each.get("tool_calls") or () if "id" in call]
    return {**joined, "calls": calls, "finish_reason": choices[-1]["finish_reason"]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("finish_reason", ["length", "stop"])
@pytest.mark.parametrize("opening", ["", OPENING])
def test_unfinished_thought_is_reasoning_and_calls_nothing(
    opening: str, finish_reason: str, tools: Any, stream: bool
) -> None:
    thought = f"Could it be 46? {TOOL_CALL} Or"
    text = thought if opening else OPENING + thought
    answer = ask(text, opening, finish_reason, tools=tools, stream=stream)
    assert answer["content"] == ""
    assert answer["reasoning_content"].strip() == thought
    assert (answer["calls"], answer["finish_reason"]) == ([], finish_reason)


@pytest.mark.parametrize(("mark", "closing"), MARKS.items())
@pytest.mark.parametrize("stream", [False, True])
def test_every_models_mark_opens_a_thought(mark: str, closing: str, stream: bool) -> None:
    answer = ask(f"{mark}Is it 46?", tools=TOOLS, stream=stream)
    assert (answer["content"], answer["reasoning_content"]) == ("", "Is it 46?")
    answer = ask(f"Is it {TOOL_CALL}{closing}{TOOL_CALL}", mark, "stop", tools=TOOLS, stream=stream)
    assert (len(answer["calls"]), answer["finish_reason"]) == (1, "tool_calls")
    thought = answer["reasoning_content"] + closing if stream else answer["content"]
    assert thought == f"Is it {TOOL_CALL}{closing}"


def test_second_thought_that_is_not_finished_takes_answer_along() -> None:
    answer = ask(f"<think>a</think>{TOOL_CALL}<think>No, I", tools=TOOLS)
    assert (answer["content"], answer["calls"]) == ("", [])
    assert answer["reasoning_content"].endswith("No, I")


def test_finished_thought_stays_in_the_content() -> None:
    text = "<think>Is it 46?</think>It is."
    assert ask(text, finish_reason="stop")["content"] == text
    text = "Is it 46?</think>It is."
    assert ask(text, OPENING, "stop")["content"] == text


def test_call_around_a_finished_thought_is_one() -> None:
    answer = ask(f"Well. <think>Is it?</think>{TOOL_CALL} Yes.", finish_reason="stop", tools=TOOLS)
    assert len(answer["calls"]) == 1
    assert (answer["content"], answer["reasoning_content"]) == ("Well.  Yes.", "Is it?")


@pytest.mark.parametrize(
    ("prompt_end", "text", "thought", "content"),
    [
        ("", "<think>a</think>b", "a", "b"),
        (OPENING, "a</think>b", "a", "b"),
        ("", "b<think>a</think>c[THINK]d", "ad", "bc"),
        ("", "use `<think>` here", "", "use `<think>` here"),
        ("", "```\n<think>\n```\n<think>a", "a", "```\n<think>\n```\n"),
        ("", "a < b <thin> <thi", "", "a < b <thin> <thi"),
        ("", "<think>a</thin", "a</thin", ""),
        ("", "<mm:think>a</think>b</mm:think>c", "a</think>b", "c"),
    ],
)
def test_streamed_thought_does_not_depend_on_its_pieces(
    prompt_end: str, text: str, thought: str, content: str
) -> None:
    draw = random.Random(text)
    for _ in range(30):
        growing = GrowingThought(prompt_end)
        cuts = sorted({0, len(text), *(draw.randrange(len(text)) for _ in range(draw.randrange(9)))})
        pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
        sorted_ = [growing.add(each, is_last=index == len(pieces) - 1) for index, each in enumerate(pieces)]
        assert "".join(each for each, _ in sorted_) == thought
        assert "".join(each for _, each in sorted_) == content


def test_streamed_thought_is_sent_as_it_grows() -> None:
    growing = GrowingThought("")
    assert growing.add("<thi", is_last=False) == ("", "")
    assert growing.add("nk>so ", is_last=False) == ("so ", "")
    assert growing.add("be it</", is_last=False) == ("be it", "")
    assert growing.add("think>46", is_last=False) == ("", "46")


@pytest.mark.parametrize("stream", [False, True])
async def test_unfinished_thought_of_agent_is_reasoning_at_responses(stream: bool) -> None:
    calculator = Calculator(episode("<think>Is it 46, or"))
    agents = AgentFrontend({"agent/calculator": calculator})

    class Store:
        async def keep(self, owner: str, response: dict[str, Any]) -> None:
            return None

    frontend = ResponsesFrontend(agents, {"agent/calculator": Store()})  # type: ignore[dict-item]
    body = ResponsesRequest.model_validate({"model": "agent/calculator", "input": "?", "stream": stream})
    parts = [part async for part in frontend.respond(body)]
    last = parts[-1]
    response = last["response"] if stream else last
    reasoning, message = response["output"]
    assert reasoning["summary"][0]["text"] == "Is it 46, or"
    assert (message["content"][0]["text"], response["status"]) == ("", "incomplete")


# -- in rollouts -----------------------------------------------------------------------------------------


def test_text_begins_with_the_thought_that_its_prompt_opened() -> None:
    r1 = renderer(R1)
    prompt_ids = r1.prompt_ids(MESSAGES)
    text = r1.completion_text(prompt_ids, r1.encode("Is it \\boxed{46}?"))
    assert text == "<think>\nIs it \\boxed{46}?"
    assert split_thought(text) == ("Is it \\boxed{46}?", "")
    finished = "Is it?\n</think>\n\n\\boxed{46}"
    assert r1.completion_text(prompt_ids, r1.encode(finished)) == finished


@pytest.mark.parametrize("ended", [True, False])
def test_unfinished_thought_is_extended_by_its_tokens(ended: bool) -> None:
    """The prompt's opening stands in the agent's history, and no token is sampled for it."""
    r1 = renderer(R1)
    first: list[Message] = [*MESSAGES]
    prompt_ids = r1.prompt_ids(first)
    ids = [*r1.encode("Is it 46? Let me"), *([r1.eos_token_id] if ended else [])]
    completion = Completion(
        prompt_ids=tuple(prompt_ids),
        completion_ids=tuple(ids),
        text=r1.completion_text(prompt_ids, ids),
        finish_reason="stop" if ended else "length",
    )
    then = [*first, {"role": "assistant", "content": completion.text}, {"role": "user", "content": "Go on."}]
    extended = r1.prompt_ids(then, Turn(messages=first, completion=completion))
    assert extended[: len(prompt_ids) + len(ids)] == [*prompt_ids, *ids]
    assert r1.text_of(extended) == r1.text_of(r1.prompt_ids(then))
