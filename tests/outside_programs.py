"""Agents in the frameworks of others, unchanged: a program that runs in an environment without Troupe.

    python outside_programs.py FRAMEWORK
    python outside_programs.py FRAMEWORK SOCKET

The first reads the question in ``task.txt``, answers it with a tool, and writes the answer into
``answer.txt``. The second loads the framework once, and its processes answer the questions that come to a
socket, one after the other. The framework finds the model by itself, by the variables for OpenAI's or
Anthropic's address and key.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

INSTRUCTIONS = "Give the final answer in \\boxed{}."
MODEL = "policy"


def calculator(expression: str) -> str:
    """Calculates.

    Args:
        expression: such as 12+34.
    """
    found = re.fullmatch(r"(\d{1,9})([+*])(\d{1,9})", str(expression))
    if found is None:
        return "Error: no sum and no product of two numbers."
    left, operator, right = found.groups()
    return str(int(left) + int(right) if operator == "+" else int(left) * int(right))


def with_agents(question: str) -> str:
    """OpenAI's Agents SDK, by its default API, Responses."""
    from agents import Agent, Runner, function_tool

    agent = Agent(name="a", instructions=INSTRUCTIONS, model=MODEL, tools=[function_tool(calculator)])
    return str(Runner.run_sync(agent, question).final_output)


def with_agents_streamed(question: str) -> str:
    """The same, with the events of each answer."""
    from agents import Agent, Runner, function_tool

    agent = Agent(name="a", instructions=INSTRUCTIONS, model=MODEL, tools=[function_tool(calculator)])

    async def talk() -> str:
        streamed = Runner.run_streamed(agent, question)
        kinds = {event.type async for event in streamed.stream_events()}
        assert {"raw_response_event", "run_item_stream_event"} <= kinds
        return str(streamed.final_output)

    return asyncio.run(talk())


def with_agents_handoff(question: str) -> str:
    """The same with two agents, the first of which hands the question over to the second."""
    from agents import Agent, Runner, function_tool

    expert = Agent(name="expert", instructions=INSTRUCTIONS, model=MODEL, tools=[function_tool(calculator)])
    first = Agent(name="first", instructions="Hand it over.", model=MODEL, handoffs=[expert])
    return str(Runner.run_sync(first, question).final_output)


def with_langgraph(question: str) -> str:
    """LangGraph's agent, which is LangChain's ``create_agent`` today, over chat."""
    return _langgraph(question, {})


def with_langgraph_streamed(question: str) -> str:
    return _langgraph(question, {"streaming": True})


def with_langgraph_responses(question: str) -> str:
    return _langgraph(question, {"use_responses_api": True})


def _langgraph(question: str, options: dict[str, bool]) -> str:
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, **options)  # type: ignore[arg-type]
    agent = create_agent(model, tools=[calculator], system_prompt=INSTRUCTIONS)
    state = agent.invoke({"messages": [{"role": "user", "content": question}]})
    return str(state["messages"][-1].text)


def with_pydantic_ai(question: str) -> str:
    """pydantic-ai over chat."""
    return _pydantic_ai(question, f"openai-chat:{MODEL}")


def with_pydantic_ai_responses(question: str) -> str:
    return _pydantic_ai(question, f"openai-responses:{MODEL}")


def with_pydantic_ai_messages(question: str) -> str:
    return _pydantic_ai(question, f"anthropic:{MODEL}")


def _pydantic_ai(question: str, model: str) -> str:
    from pydantic_ai import Agent

    return Agent(model, instructions=INSTRUCTIONS, tools=[calculator]).run_sync(question).output


def with_litellm(question: str) -> str:
    """litellm over chat."""
    return _litellm(question, f"openai/{MODEL}")


def with_litellm_messages(question: str) -> str:
    return _litellm(question, f"anthropic/{MODEL}")


def _litellm(question: str, model: str) -> str:
    import litellm

    properties = {"expression": {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": ["expression"]}
    tools = [{"type": "function", "function": {"name": "calculator", "parameters": parameters}}]
    messages = [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": question}]
    while True:
        message = litellm.completion(model=model, messages=messages, tools=tools).choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message.model_dump())
        for call in message.tool_calls:
            result = calculator(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


MINI = """
agent:
  system_template: Solve it in a shell.
  instance_template: "{{task}}"
  mode: yolo
  confirm_exit: false
  step_limit: 3
environment:
  timeout: 5
model:
  cost_tracking: ignore_errors
  observation_template: "{{output.output}}"
"""


NOBODY = 65534


def with_mini(question: str) -> str:
    """mini-swe-agent's command, with short prompts by its own configuration.

    It runs what a model writes: as root it would do so as nobody, in a folder that is nobody's.
    """
    from minisweagent.run.mini import app

    if os.getuid() == 0:
        os.chown(".", NOBODY, NOBODY)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    Path("mini.yaml").write_text(MINI)
    command = ["-c", "mini.yaml", "-m", f"openai/{MODEL}", "-t", question, "-o", "calls.json"]
    app(command, standalone_mode=False)
    return str(json.loads(Path("calls.json").read_text())["info"]["submission"])


PACKAGES = {
    "agents": ["agents"],
    "langgraph": ["langchain.agents", "langchain_openai"],
    "pydantic_ai": ["pydantic_ai", "pydantic_ai.models.openai", "pydantic_ai.providers.openai"],
    "mini": ["minisweagent.run.mini", "minisweagent.models.litellm_model"],
}
"""Modules that are loaded before the first question at a socket."""
NUM_WORKERS = 16


def answer_questions(path: str, framework: str) -> None:
    """Answer all questions at a socket, in processes that stay: a framework's first call is its slowest.

    One whose program fails notes the error, sends nothing and ends; another takes its place.
    """
    for module in PACKAGES[framework]:
        importlib.import_module(module)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(256)
    num_workers = 0
    while True:
        if num_workers == NUM_WORKERS:
            os.wait()
            num_workers -= 1
        if os.fork() == 0:
            while True:
                answer_one(listener.accept()[0], FRAMEWORKS[framework])
        num_workers += 1


def answer_one(connection: socket.socket, program: Callable[[str], str]) -> None:
    """Answer a question in a folder of its own."""
    with connection, connection.makefile("rw") as stream, tempfile.TemporaryDirectory() as folder:
        request = json.loads(stream.readline())
        os.chdir(folder)
        os.environ |= {**request["environment"], "HOME": folder}
        stream.write(json.dumps(program(request["question"])))
        os.chdir("/")


FRAMEWORKS: dict[str, Callable[[str], str]] = {
    name.removeprefix("with_"): value for name, value in list(globals().items()) if name.startswith("with_")
}

if __name__ == "__main__":
    # Nothing beyond this machine is called: no traces, no list of prices.
    os.environ |= {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    if len(sys.argv) > 2 and sys.argv[2].startswith("/"):
        answer_questions(sys.argv[2], sys.argv[1])
    Path("answer.txt").write_text(FRAMEWORKS[sys.argv[1]](Path("task.txt").read_text()))
