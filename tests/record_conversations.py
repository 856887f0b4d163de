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
}


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


def langgraph_agent(url: str) -> Any:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    def add(a: float, b: float, unit: str) -> str:
        """Add."""
        return f"{a + b:g}"

    model = ChatOpenAI(model="m", base_url=url, api_key="none", max_retries=0)
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
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    model = LitellmModel(
        model_name="openai/m",
        model_kwargs={"api_base": url, "api_key": "none"},
        cost_tracking="ignore_errors",
    )
    prompts = {"system_template": "Use the shell.", "instance_template": "{{task}}"}
    DefaultAgent(model, LocalEnvironment(), **prompts).run("Print 46.")


# -- recording ---------------------------------------------------------------------------------------------


class Recorder(ThreadingHTTPServer):
    """Answers chat requests with what a script says, and keeps their bodies.

    ``calls`` holds a request with what was said to it.
    """

    def __init__(self, script: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script, self.calls, self.num_tool_calls = list(script), list[dict[str, Any]](), 0
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def completion(self, body: dict[str, Any]) -> dict[str, Any]:
        from policies.agents.parsers import get_tool_parser
        from policies.gateway.answers import completion_of, message_of

        parser = get_tool_parser("qwen") if body.get("tools") else None
        said = [self.script.pop(0) for _ in range(body.get("n") or 1)]
        self.calls.append({**body, "says": said})
        completions = []
        for index, text in enumerate(said):
            message = message_of(text, [], parser, self.num_tool_calls)
            calls = message.get("tool_calls", [])
            self.num_tool_calls += len(calls)
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            reason = "tool_calls" if calls else "stop"
            answer = {"id": str(len(self.calls)), "message": message, "finish_reason": reason}
            completions.append(completion_of({**answer, "usage": usage, "policy_version": 0}, "m"))
            completions[-1]["choices"][0]["index"] = index
        return {**completions[0], "choices": [each["choices"][0] for each in completions]}


class _Handler(BaseHTTPRequestHandler):
    server: Recorder

    def do_POST(self) -> None:
        from policies.gateway.answers import chunks_of

        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        completion = self.server.completion(body)
        if body.get("stream"):

            async def chunks() -> list[Any]:
                return [chunk async for chunk in chunks_of(completion, False)]

            sent = [f"data: {json.dumps(chunk)}\n\n" for chunk in asyncio.run(chunks())]
            answer, kind = "".join([*sent, "data: [DONE]\n\n"]), "text/event-stream"
        else:
            answer, kind = json.dumps(completion), "application/json"
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(answer.encode())))
        self.end_headers()
        self.wfile.write(answer.encode())

    def log_message(self, *_: Any) -> None:
        """Keep the output for the table."""


def recorded(name: str, python: str) -> str:
    """The part of the table with a client's conversation."""
    server = Recorder(SCRIPTS[name])
    url = f"http://127.0.0.1:{server.server_port}/v1"
    done = subprocess.run(
        [python, __file__, name, url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90
    )
    lines = [f"- name: {name}"]
    if done.returncode:
        lines.append(f"  # {done.stdout.strip().splitlines()[-1]}")
    lines.append("  calls:")
    for call in server.calls:
        tools = [tool["function"]["name"] for tool in call.get("tools") or ()]
        rest = {k: v for k, v in call.items() if k not in ("messages", "tools", "says", "model", "stream")}
        lines.append(f"    # {json.dumps(rest)}")
        lines += ["    - messages:"]
        lines += [f"        - {json.dumps(message)}" for message in call["messages"]]
        if tools:
            lines.append(f"      tools: [{', '.join(tools)}]")
        if call.get("stream"):
            lines.append("      stream: true")
        said = call["says"]
        lines.append(f"      says: {json.dumps(said[0] if len(said) == 1 else said)}")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[2:] and sys.argv[2].startswith("http"):
        globals()[sys.argv[1]](sys.argv[2])
    else:
        for each in sys.argv[2:] or SCRIPTS:
            print(recorded(each, sys.argv[1]), flush=True)
