"""What clients send: a recorder of their requests, for the table in ``unit/actors/conversations.yaml``.

    python record_conversations.py PYTHON [CLIENT ...] > recorded.yaml

PYTHON is an interpreter of an environment with the clients, without Troupe. Each plays a
conversation against a scripted model, whose answers have the form that the gateway gives them; the messages
of its requests, the names of its tools and what the model has said are written as a part of the table.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

THOUGHT = "<think>\nAdd them.\n</think>\n\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"b": 34, "a": 12.0, "unit": "\u00b5"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "add", "arguments": {"a": 5, "b": 6, "unit": "m"}}\n</tool_call>'
BASH = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo 46"}}\n</tool_call>'
DONE = (
    '<tool_call>\n{"name": "bash", "arguments": {"command": '
    '"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}\n</tool_call>'
)
SCRIPTS: dict[str, list[str]] = {
    "openai_tool_loop": [THOUGHT + CALL, "It is 46."],
    "openai_stream": [f"{THOUGHT} It is 46. ", "Yes."],
    "openai_parse": [THOUGHT + CALL, "It is 46."],
    "openai_choices": ["46", "It is 46.", "Yes."],
    "agents_tool_loop": [f"I add.\n{CALL}", "It is 46."],
    "agents_parallel": [f"{THOUGHT}{CALL}\n{OTHER}", "46 and 11"],
    "agents_handoff": [
        '<tool_call>\n{"name": "transfer_to_adder", "arguments": {}}\n</tool_call>',
        CALL,
        "It is 46.",
    ],
    "agents_nested": [
        '<tool_call>\n{"name": "adder", "arguments": {"input": "12+34"}}\n</tool_call>',
        CALL,
        "46",
        "It is 46.",
    ],
    "langgraph_tool_loop": [THOUGHT + CALL, "It is 46."],
    "langgraph_parallel": [f"{CALL}\n{OTHER}", "46 and 11"],
    "langgraph_trimmed": ["One.", "Two.", "Three."],
    "pydantic_ai_tool_loop": [THOUGHT + CALL, "It is 46."],
    "pydantic_ai_retry": [
        '<tool_call>\n{"name": "add", "arguments": {"a": "many", "b": 34, "unit": "m"}}\n</tool_call>',
        CALL,
        "It is 46.",
    ],
    "litellm_tool_loop": [THOUGHT + CALL, "It is 46."],
    "llama_index_tool_loop": [CALL, "It is 46."],
    "mini_swe_agent": [f"I print it.\n{BASH}", DONE],
    "openai_responses": [THOUGHT + CALL, "It is 46."],
    "openai_responses_stored": ["46", "Yes.", "Fine.", "Forty-six."],
    "openai_responses_stream": [f"{THOUGHT}It is 46.", "Yes."],
    "openai_retry": ["46", "Yes."],
    "anthropic_tool_loop": [f"{THOUGHT}I add.\n{CALL}", "It is 46."],
    "anthropic_parallel": [f"{CALL}\n{OTHER}", "46 and 11"],
    "anthropic_stream": [f"{THOUGHT}It is 46.", "Yes."],
    "anthropic_text_only": [f"{THOUGHT} It is 46. ", "Yes."],
    "anthropic_failed_tool": [CALL, "46"],
    "anthropic_runner": [THOUGHT + CALL, "It is 46."],
    "anthropic_retry": ["46", "Yes."],
    "agents_responses": [THOUGHT + CALL, "It is 46."],
    "agents_responses_nested": [
        '<tool_call>\n{"name": "adder", "arguments": {"input": "12+34"}}\n</tool_call>',
        CALL,
        "46",
        "It is 46.",
    ],
    "agents_responses_session": [f"{THOUGHT}46", "Yes."],
    "langgraph_responses": [THOUGHT + CALL, "It is 46."],
    "langgraph_streamed": [f"{CALL}\n{OTHER}", "46 and 11"],
    "langgraph_summarized": ["One.", "Two.", "Two turns.", "Three.", "Four."],
    "langgraph_summarized_in_part": ["One.", "Two.", "One turn.", "Three."],
    "langgraph_sub_agent": [
        '<tool_call>\n{"name": "adder", "arguments": {"question": "12+34"}}\n</tool_call>',
        CALL,
        "46",
        "It is 46.",
    ],
    "pydantic_ai_messages": [f"{THOUGHT}{CALL}\n{OTHER}", "46 and 11"],
    "pydantic_ai_responses": [f"{THOUGHT}{CALL}\n{OTHER}", "46 and 11"],
    "pydantic_ai_delegation": [
        '<tool_call>\n{"name": "adder", "arguments": {"question": "12+34"}}\n</tool_call>',
        CALL,
        "46",
        "It is 46.",
    ],
    "pydantic_ai_history": [f"{THOUGHT}46", "Yes."],
    "litellm_messages": [THOUGHT + CALL, "It is 46."],
    "mini_swe_blocks": [
        "I print it.\n\n```mswea_bash_command\necho 46\n```",
        "```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```",
    ],
}
LATE = ("openai_retry", "anthropic_retry")
"""Clients whose first call takes longer than they wait."""


# -- clients -----------------------------------------------------------------------------------------------

QUESTION = {"role": "user", "content": "What is 12+34?"}
PROPERTIES = {"a": {"type": "number"}, "b": {"type": "number"}, "unit": {"type": "string"}}
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": PROPERTIES}},
}


def openai_client(url: str) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=url, api_key="none", max_retries=0)


def openai_tool_loop(url: str) -> None:
    create, messages = openai_client(url).chat.completions.create, [QUESTION]
    for _ in range(2):
        message = create(model="m", messages=messages, tools=[TOOL]).choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "46"})


def openai_stream(url: str) -> None:
    create, messages = openai_client(url).chat.completions.create, [QUESTION]
    for _ in range(2):
        chunks = create(model="m", messages=messages, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]


def openai_parse(url: str) -> None:
    from openai import pydantic_function_tool
    from pydantic import BaseModel

    class Add(BaseModel):
        a: float
        b: float
        unit: str

    tool = pydantic_function_tool(Add, name="add")
    parse, messages = openai_client(url).chat.completions.parse, [QUESTION]
    for _ in range(2):
        message = parse(model="m", messages=messages, tools=[tool]).choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "46"})


def openai_choices(url: str) -> None:
    create = openai_client(url).chat.completions.create
    choices = create(model="m", messages=[QUESTION], n=2).choices
    create(model="m", messages=[QUESTION, choices[0].message, {"role": "user", "content": "Sure?"}])


def agents_model(url: str) -> Any:
    from agents import OpenAIChatCompletionsModel, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    return OpenAIChatCompletionsModel("m", AsyncOpenAI(base_url=url, api_key="none", max_retries=0))


def agents_add() -> Any:
    from agents import function_tool

    def add(a: float, b: float, unit: str) -> str:
        return f"{a + b:g}"

    return function_tool(add)


def agents_tool_loop(url: str) -> None:
    from agents import Agent, Runner

    agent = Agent(name="adder", instructions="Add.", model=agents_model(url), tools=[agents_add()])
    Runner.run_sync(agent, QUESTION["content"])


agents_parallel = agents_tool_loop


def agents_handoff(url: str) -> None:
    from agents import Agent, Runner

    model = agents_model(url)
    adder = Agent(name="adder", instructions="Add.", model=model, tools=[agents_add()])
    agent = Agent(name="first", instructions="Hand over.", model=model, handoffs=[adder])
    Runner.run_sync(agent, QUESTION["content"])


def agents_nested(url: str) -> None:
    from agents import Agent, Runner

    model = agents_model(url)
    adder = Agent(name="adder", instructions="Add.", model=model, tools=[agents_add()])
    tool = adder.as_tool("adder", "Adds.")
    agent = Agent(name="first", instructions="Use the adder.", model=model, tools=[tool])
    Runner.run_sync(agent, QUESTION["content"])


def langgraph_agent(url: str, **options: Any) -> Any:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    def add(a: float, b: float, unit: str) -> str:
        """Add."""
        return f"{a + b:g}"

    model = ChatOpenAI(model="m", base_url=url, api_key="none", max_retries=0, **options)
    return create_agent(model, tools=[add], system_prompt="Add.")


def langgraph_tool_loop(url: str) -> None:
    langgraph_agent(url).invoke({"messages": [QUESTION]})


langgraph_parallel = langgraph_tool_loop


def langgraph_trimmed(url: str) -> None:
    from langchain_core.messages import trim_messages
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="m", base_url=url, api_key="none", max_retries=0)
    messages: list[Any] = [("system", "Count.")]
    for number in range(3):
        messages.append(("human", f"Turn {number}"))
        kept = trim_messages(
            messages, max_tokens=4, token_counter=len, include_system=True, strategy="last", start_on="human"
        )
        messages.append(model.invoke(kept))


def pydantic_ai_tool_loop(url: str) -> None:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(
        OpenAIChatModel("m", provider=OpenAIProvider(base_url=url, api_key="none")), instructions="Add."
    )

    @agent.tool_plain
    def add(a: float, b: float, unit: str) -> str:
        return f"{a + b:g}"

    agent.run_sync(QUESTION["content"])


pydantic_ai_retry = pydantic_ai_tool_loop


def litellm_tool_loop(url: str) -> None:
    import litellm

    messages: list[Any] = [QUESTION]
    for _ in range(2):
        at = {"api_base": url, "api_key": "none", "num_retries": 0}
        message = litellm.completion(model="openai/m", messages=messages, tools=[TOOL], **at)
        messages.append(message.choices[0].message)
        for call in messages[-1].tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "46"})


def llama_index_tool_loop(url: str) -> None:
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.llms.openai_like import OpenAILike

    def add(a: float, b: float, unit: str) -> str:
        """Add."""
        return f"{a + b:g}"

    llm = OpenAILike(
        model="m", api_base=url, api_key="none", is_chat_model=True, is_function_calling_model=True
    )

    async def talk() -> None:
        agent = FunctionAgent(llm=llm, tools=[add], system_prompt="Add.", streaming=False)
        await agent.run(QUESTION["content"])

    asyncio.run(talk())


def mini_swe_agent(url: str) -> None:
    from minisweagent.models.litellm_model import LitellmModel

    run_mini_swe(LitellmModel, url)


def run_mini_swe(model_class: type[Any], url: str) -> None:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment

    model = model_class(
        model_name="openai/m",
        model_kwargs={"api_base": url, "api_key": "none"},
        cost_tracking="ignore_errors",
    )
    prompts = {"system_template": "Use the shell.", "instance_template": "{{task}}"}
    DefaultAgent(model, LocalEnvironment(), **prompts).run("Print 46.")


def openai_responses(url: str) -> None:
    """The items of each answer are sent back."""
    create, items = openai_client(url).responses.create, [QUESTION]
    tool = {"type": "function", **TOOL["function"]}
    for _ in range(2):
        answer = create(model="m", instructions="Add.", input=items, tools=[tool], store=False)
        items += answer.output
        calls = [each for each in answer.output if each.type == "function_call"]
        items += [{"type": "function_call_output", "call_id": each.call_id, "output": "46"} for each in calls]


def openai_responses_stored(url: str) -> None:
    """Two questions go on from one answer."""
    create = openai_client(url).responses.create
    first = create(model="m", input="What is 12+34?")
    second = create(model="m", input="Sure?", previous_response_id=first.id)
    create(model="m", input="So?", previous_response_id=second.id)
    create(model="m", input="In words?", previous_response_id=first.id)


def openai_responses_stream(url: str) -> None:
    client, items = openai_client(url), [QUESTION]
    for _ in range(2):
        with client.responses.stream(model="m", input=items) as stream:
            items += stream.get_final_response().output
        items.append({"role": "user", "content": "Sure?"})


def openai_retry(url: str) -> None:
    """Its first call takes longer than it waits."""
    from openai import OpenAI

    client = OpenAI(base_url=url, api_key="none", max_retries=1, timeout=1)
    answer = client.chat.completions.create(model="m", messages=[QUESTION]).choices[0].message
    client.chat.completions.create(
        model="m", messages=[QUESTION, answer, {"role": "user", "content": "Sure?"}]
    )


def anthropic_client(url: str, **options: Any) -> Any:
    from anthropic import Anthropic

    return Anthropic(base_url=url.removesuffix("/v1"), api_key="none", **{"max_retries": 0, **options})


ANTHROPIC_TOOL = {"name": "add", "input_schema": {"type": "object", "properties": PROPERTIES}}


def anthropic_tool_loop(url: str) -> None:
    create, messages = anthropic_client(url).messages.create, [QUESTION]
    for _ in range(2):
        answer = create(model="m", max_tokens=99, system="Add.", messages=messages, tools=[ANTHROPIC_TOOL])
        calls = [each for each in answer.content if each.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": each.id, "content": "46"} for each in calls]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


anthropic_parallel = anthropic_tool_loop


def anthropic_stream(url: str) -> None:
    client, messages = anthropic_client(url), [QUESTION]
    for _ in range(2):
        with client.messages.stream(model="m", max_tokens=99, messages=messages) as stream:
            messages.append({"role": "assistant", "content": stream.get_final_message().content})
        messages.append({"role": "user", "content": "Sure?"})


def anthropic_text_only(url: str) -> None:
    """It sends back the text of an answer alone."""
    create, messages = anthropic_client(url).messages.create, [QUESTION]
    for _ in range(2):
        answer = create(model="m", max_tokens=99, messages=messages)
        text = "".join(each.text for each in answer.content if each.type == "text")
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]


def anthropic_failed_tool(url: str) -> None:
    create, messages = anthropic_client(url).messages.create, [QUESTION]
    answer = create(model="m", max_tokens=99, messages=messages, tools=[ANTHROPIC_TOOL])
    (call,) = [each for each in answer.content if each.type == "tool_use"]
    failed = {"type": "tool_result", "tool_use_id": call.id, "content": "No unit.", "is_error": True}
    asked = {"type": "text", "text": "Leave the unit out."}
    messages += [
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [failed, asked]},
    ]
    create(model="m", max_tokens=99, messages=messages, tools=[ANTHROPIC_TOOL])


def anthropic_runner(url: str) -> None:
    """Its own tool loop, which would have the server hold the conversation."""
    from anthropic import beta_tool

    def add(a: float, b: float, unit: str) -> str:
        """Add."""
        return f"{a + b:g}"

    anthropic_client(url).beta.messages.tool_runner(
        model="m", max_tokens=99, tools=[beta_tool(add)], messages=[QUESTION]
    ).until_done()


def anthropic_retry(url: str) -> None:
    """Its first call takes longer than it waits."""
    create = anthropic_client(url, max_retries=1, timeout=1).messages.create
    answer = create(model="m", max_tokens=99, messages=[QUESTION])
    said = {"role": "assistant", "content": answer.content}
    create(model="m", max_tokens=99, messages=[QUESTION, said, {"role": "user", "content": "Sure?"}])


def agents_responses_model(url: str) -> Any:
    from agents import OpenAIResponsesModel, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    return OpenAIResponsesModel("m", AsyncOpenAI(base_url=url, api_key="none", max_retries=0))


def agents_responses(url: str) -> None:
    from agents import Agent, Runner

    agent = Agent(name="adder", instructions="Add.", model=agents_responses_model(url), tools=[agents_add()])
    Runner.run_sync(agent, QUESTION["content"])


def agents_responses_nested(url: str) -> None:
    from agents import Agent, Runner

    model = agents_responses_model(url)
    adder = Agent(name="adder", instructions="Add.", model=model, tools=[agents_add()])
    tool = adder.as_tool("adder", "Adds.")
    agent = Agent(name="first", instructions="Use the adder.", model=model, tools=[tool])
    Runner.run_sync(agent, QUESTION["content"])


def agents_responses_session(url: str) -> None:
    """Two questions of a session that the SDK keeps."""
    from agents import Agent, Runner, SQLiteSession

    agent = Agent(name="adder", instructions="Add.", model=agents_responses_model(url))
    session = SQLiteSession("a")
    for question in (QUESTION["content"], "Sure?"):
        Runner.run_sync(agent, question, session=session)


def langgraph_responses(url: str) -> None:
    langgraph_agent(url, use_responses_api=True).invoke({"messages": [QUESTION]})


def langgraph_streamed(url: str) -> None:
    langgraph_agent(url, streaming=True).invoke({"messages": [QUESTION]})


def langgraph_summarized(url: str, num_kept: int = 1, num_turns: int = 4) -> None:
    """LangChain's own compaction: the model summarises the history by another call."""
    from langchain.agents import create_agent
    from langchain.agents.middleware import SummarizationMiddleware
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="m", base_url=url, api_key="none", max_retries=0)
    summary = SummarizationMiddleware(
        model, trigger=("messages", 5), keep=("messages", num_kept), summary_prompt="Sum up: {messages}"
    )
    agent = create_agent(model, system_prompt="Count.", middleware=[summary])
    messages: list[Any] = []
    for number in range(num_turns):
        messages.append(("human", f"Turn {number}"))
        messages = agent.invoke({"messages": messages})["messages"]


def langgraph_summarized_in_part(url: str) -> None:
    langgraph_summarized(url, num_kept=3, num_turns=3)


def langgraph_sub_agent(url: str) -> None:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    helper = langgraph_agent(url)

    def adder(question: str) -> str:
        """Add."""
        return str(helper.invoke({"messages": [("human", question)]})["messages"][-1].content)

    model = ChatOpenAI(model="m", base_url=url, api_key="none", max_retries=0)
    agent = create_agent(model, tools=[adder], system_prompt="Use the adder.")
    agent.invoke({"messages": [QUESTION]})


def pydantic_ai_agent(url: str, kind: str, **options: Any) -> Any:
    from pydantic_ai import Agent

    if kind == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        provider = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="none")
        return Agent(AnthropicModel("m", provider=provider), instructions="Add.", **options)
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIResponsesModel if kind == "responses" else OpenAIChatModel
    return Agent(
        model("m", provider=OpenAIProvider(base_url=url, api_key="none")), instructions="Add.", **options
    )


def add(a: float, b: float, unit: str) -> str:
    return f"{a + b:g}"


def pydantic_ai_messages(url: str) -> None:
    pydantic_ai_agent(url, "anthropic", tools=[add]).run_sync(QUESTION["content"])


def pydantic_ai_responses(url: str) -> None:
    pydantic_ai_agent(url, "responses", tools=[add]).run_sync(QUESTION["content"])


def pydantic_ai_delegation(url: str) -> None:
    helper = pydantic_ai_agent(url, "chat", tools=[add])

    async def adder(question: str) -> str:
        return str((await helper.run(question)).output)

    pydantic_ai_agent(url, "chat", tools=[adder]).run_sync(QUESTION["content"])


def pydantic_ai_history(url: str) -> None:
    """The messages of a run are given to the next one."""
    agent, messages = pydantic_ai_agent(url, "chat"), None
    for question in (QUESTION["content"], "Sure?"):
        messages = agent.run_sync(question, message_history=messages).all_messages()


def litellm_messages(url: str) -> None:
    """Chat messages, which litellm writes as Anthropic's."""
    import litellm

    messages: list[Any] = [{"role": "system", "content": "Add."}, QUESTION]
    for _ in range(2):
        at = {"api_base": url.removesuffix("/v1"), "api_key": "none", "num_retries": 0, "max_tokens": 99}
        message = litellm.completion(model="anthropic/m", messages=messages, tools=[TOOL], **at)
        messages.append(message.choices[0].message)
        for call in messages[-1].tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "46"})


def mini_swe_blocks(url: str) -> None:
    """Commands in blocks of text."""
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    run_mini_swe(LitellmTextbasedModel, url)


# -- recording ---------------------------------------------------------------------------------------------

KEPT = ("system", "instructions", "previous_response_id")
"""Fields beside the messages that a part of the table has."""


class Recorder(ThreadingHTTPServer):
    """Answers requests in their dialect with what a script says, and keeps their bodies.

    ``calls`` holds a request with what was said to it. The first answer to a client that is to go comes late.
    """

    def __init__(self, script: list[str], is_late: bool) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.calls, self.num_tool_calls = list(script), list[dict[str, Any]](), 0
        self.is_late, self.late_answer = is_late, list[Any]()
        self._kept: dict[str, Any] = {}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def answer(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The answer, or the events of its stream."""
        from actors.gateway.server import DIALECTS
        from policies.gateway.answers import chunks_of
        from policies.model_api.dialects.responses import Responses

        call = {"at": path.removeprefix("/v1/"), "body": body}
        if self.late_answer:
            self.calls.append({**call, "client": "comes back"})
            return self.late_answer.pop()
        dialect = DIALECTS[path](body)
        if isinstance(dialect, Responses) and (earlier := dialect.body.previous_response_id):
            dialect.follow(self._kept[earlier])
        chat = dialect.chat_request()
        said = [self.script.pop(0) for _ in range(chat.num_choices)]
        completion = self._completion(said, bool(chat.tools))
        tools = [tool["function"]["name"] for tool in chat.tools or ()]
        self.calls.append({**call, "says": said, "tools": tools, "stream": bool(chat.stream)})
        if chat.stream:

            async def events() -> list[Any]:
                chunks = chunks_of(completion, chat.includes_usage)
                return [part async for _, part in dialect.events(chunks)]

            answer = asyncio.run(events())
        else:
            answer = [dialect.answer(completion)]
        if isinstance(dialect, Responses):
            self._kept[dialect.response_id] = dialect.conversation()
        if self.is_late and len(self.calls) == 1:
            self.calls[0]["client"] = "goes"
            self.late_answer.append(answer)
            time.sleep(60)
        return answer

    def _completion(self, said: list[str], has_tools: bool) -> dict[str, Any]:
        from policies.agents.parsers import get_tool_parser
        from policies.gateway.answers import completion_of, message_of

        parser = get_tool_parser("qwen") if has_tools else None
        number = sum(len(call.get("says", ())) for call in self.calls)
        completions = []
        for index, text in enumerate(said):
            message = message_of(text, [], parser, self.num_tool_calls)
            calls = message.get("tool_calls", [])
            self.num_tool_calls += len(calls)
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            reason = "tool_calls" if calls else "stop"
            answer = {"id": str(number + index), "message": message, "finish_reason": reason}
            completions.append(completion_of({**answer, "usage": usage, "policy_version": 0}, "m"))
            completions[-1]["choices"][0]["index"] = index
        return {**completions[0], "choices": [each["choices"][0] for each in completions]}


class _Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        from policies.model_api.dialects.messages import Messages
        from policies.model_api.errors import InvalidRequestError

        path, status = self.path.partition("?")[0], 200
        try:
            parts = self.server.answer(path, body)
        except InvalidRequestError as error:
            status, part = Messages.error(error)
            parts = [part]
        if body.get("stream"):
            named = [f"event: {part['type']}\n" if "type" in part else "" for part in parts]
            sent = [f"{name}data: {json.dumps(part)}\n\n" for name, part in zip(named, parts, strict=True)]
            ending = [] if path == "/v1/messages" else ["data: [DONE]\n\n"]
            answer, kind = "".join(sent + ending), "text/event-stream"
        else:
            answer, kind = json.dumps(parts[0]), "application/json"
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(answer.encode())))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_: Any) -> None:
        """Keep the output for the table."""


def recorded(name: str, python: str) -> str:
    """The part of the table with a client's conversation."""
    server = Recorder(SCRIPTS[name], is_late=name in LATE)
    url = f"http://127.0.0.1:{server.server_port}/v1"
    done = subprocess.run(
        [python, __file__, name, url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90
    )
    lines = [f"- name: {name}"]
    if done.returncode:
        lines.append(f"  # {done.stdout.strip().splitlines()[-1]}")
    return "\n".join([*lines, "  calls:", *(line for call in server.calls for line in lines_of(call))])


def lines_of(call: dict[str, Any]) -> list[str]:
    """A request as lines of the table; a comment has the rest of its body."""
    body, at = call["body"], call["at"]
    field = "input" if at == "responses" else "messages"
    shown = {field, "tools", "model", "stream", *(() if at == "chat/completions" else KEPT)}
    lines = [f"# {json.dumps({key: value for key, value in body.items() if key not in shown})}"]
    if at != "chat/completions":
        lines += [f"at: {at}", *(f"{key}: {json.dumps(body[key])}" for key in KEPT if body.get(key))]
    if isinstance(body[field], str):
        lines.append(f"{field}: {json.dumps(body[field])}")
    else:
        lines += [f"{field}:", *(f"  - {json.dumps(message)}" for message in body[field])]
    if call.get("tools"):
        lines.append(f"tools: [{', '.join(call['tools'])}]")
    lines += ["stream: true"] if call.get("stream") else []
    lines += [f"client: {call['client']}"] if "client" in call else []
    if said := call.get("says"):
        lines.append(f"says: {json.dumps(said[0] if len(said) == 1 else said)}")
    return [f"    {lines[0]}", f"    - {lines[1]}", *(f"      {line}" for line in lines[2:])]


if __name__ == "__main__":
    if sys.argv[2:] and sys.argv[2].startswith("http"):
        globals()[sys.argv[1]](sys.argv[2])
    else:
        for each in sys.argv[2:] or SCRIPTS:
            print(recorded(each, sys.argv[1]), flush=True)
