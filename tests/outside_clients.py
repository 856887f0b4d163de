"""What clients say to the endpoint: a program that runs in an environment of its own, without Troupe.

    python outside_clients.py CLIENT URL

Asks the policy ``tiny``, which calls a tool and then says 46, in turns, and ``agent/calculator``, which
says 46. It ends with status 0 if all answers are as a user of the client expects them.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

POLICY, AGENT = "tiny", "agent/calculator"
QUESTION = "What is 12+34?"
ANSWER = "46"
SCHEMA = {
    "type": "object",
    "properties": {"expression": {"type": "string"}},
    "required": ["expression"],
}
TOOL = {
    "type": "function",
    "function": {"name": "calculator", "description": "Calculates.", "parameters": SCHEMA},
}
CALL = ("calculator", {"expression": "12+34"})


def with_openai(url: str) -> None:
    """The package ``openai``: chat, its stream, its tools, and the Responses API."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert {POLICY, AGENT} <= {model.id for model in client.models.list()}
    create = client.chat.completions.create
    tool_loop(create)
    for chunks in (create(model=POLICY, messages=[user()], tools=[TOOL], stream=True),):
        called = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
        assert called[0].function.name == CALL[0]
        assert json.loads("".join(call.function.arguments or "" for call in called)) == CALL[1]
    streamed = create(model=POLICY, messages=[user()], stream=True, stream_options={"include_usage": True})
    *chunks, last = streamed
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert last.usage.completion_tokens > 0
    assert create(model=AGENT, messages=[user()]).choices[0].message.content == ANSWER
    function = {"type": "function", **TOOL["function"]}
    (call,) = client.responses.create(model=POLICY, input=QUESTION, tools=[function]).output
    assert (call.name, json.loads(call.arguments)) == CALL
    output = {"type": "function_call_output", "call_id": call.call_id, "output": ANSWER}
    items = [{"role": "user", "content": QUESTION}, call, output]
    assert client.responses.create(model=POLICY, input=items, tools=[function]).output_text == ANSWER
    first = client.responses.create(model=AGENT, input=QUESTION)
    assert first.output_text == ANSWER
    assert client.responses.retrieve(first.id).output_text == ANSWER
    second = client.responses.create(model=AGENT, input="And now?", previous_response_id=first.id)
    assert second.output_text == ANSWER and second.previous_response_id == first.id
    with client.responses.stream(model=AGENT, input=QUESTION) as events:
        kinds = [event.type for event in events]
        assert events.get_final_response().output_text == ANSWER
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    over_websocket(client, function)


def over_websocket(client: Any, function: dict[str, Any]) -> None:
    """The tool loop over one connection, in which each message has what is new alone."""
    with client.responses.connect() as connection:

        def ask(**fields: Any) -> Any:
            connection.response.create(model=POLICY, tools=[function], store=False, **fields)
            ends = ("response.completed", "error")
            return next(event for event in connection if event.type in ends)

        first = ask(input=QUESTION).response
        (call,) = first.output
        assert (call.name, json.loads(call.arguments)) == CALL
        output = {"type": "function_call_output", "call_id": call.call_id, "output": ANSWER}
        second = ask(input=[output], previous_response_id=first.id).response
        assert (second.output_text, second.previous_response_id) == (ANSWER, first.id)
        lost = ask(input="And now?", previous_response_id=first.id)
        assert lost.error.code == "previous_response_not_found"


def with_litellm(url: str) -> None:
    """The package ``litellm``, for which this is a server like OpenAI's, or like Anthropic's."""
    import litellm

    def create(model: str, **options: Any) -> Any:
        base = {"api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
        return litellm.completion(model=f"openai/{model}", **base, **options)

    tool_loop(create)
    call = create(model=POLICY, messages=[user()], tools=[TOOL], stream=True)
    assert any(chunk.choices[0].delta.tool_calls for chunk in call)
    streamed = create(model=POLICY, messages=[user()], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == ANSWER
    assert create(model=AGENT, messages=[user()]).choices[0].message.content == ANSWER
    response = litellm.responses(
        model=f"openai/{AGENT}", input=QUESTION, api_base=f"{url}/v1", api_key="none"
    )
    assert response.output[-1].content[0].text == ANSWER

    def ask_as_anthropic(model: str, **options: Any) -> Any:
        return litellm.completion(model=f"anthropic/{model}", api_base=url, api_key="none", **options)

    tool_loop(ask_as_anthropic)
    assert any(
        chunk.choices[0].delta.tool_calls
        for chunk in ask_as_anthropic(POLICY, messages=[user()], tools=[TOOL], stream=True)
    )
    streamed = ask_as_anthropic(POLICY, messages=[user()], stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == ANSWER


def with_agents(url: str) -> None:
    """OpenAI's Agents SDK: its default API, Responses; for the policy and its tool chat too."""
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        OpenAIResponsesWSModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = []

    @function_tool
    def calculator(expression: str) -> str:
        """Calculates."""
        asked.append(expression)
        return ANSWER

    async def talk() -> None:
        served = Agent(name="Served", model=OpenAIResponsesModel(AGENT, client))
        assert (await Runner.run(served, QUESTION)).final_output == ANSWER
        streamed = Runner.run_streamed(served, QUESTION)
        kinds = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in kinds and streamed.final_output == ANSWER
        for model_class in (OpenAIChatCompletionsModel, OpenAIResponsesModel, OpenAIResponsesWSModel):
            own = Agent(name="Own", model=model_class(POLICY, client), tools=[calculator])
            assert (await Runner.run(own, QUESTION)).final_output == ANSWER
            streamed = Runner.run_streamed(own, QUESTION)
            async for _ in streamed.stream_events():
                pass
            assert streamed.final_output == ANSWER
        assert asked == [CALL[1]["expression"]] * 6

    asyncio.run(talk())


def with_a2a(url: str) -> None:
    """The official A2A client, whole and streamed."""
    import httpx
    from a2a.client import ClientConfig, ClientFactory
    from a2a.helpers.proto_helpers import new_text_message
    from a2a.types.a2a_pb2 import Role, SendMessageRequest, TaskState

    async def talk(streaming: bool) -> None:
        said, states = [], []
        async with httpx.AsyncClient(timeout=30) as http:
            config = ClientConfig(httpx_client=http, streaming=streaming)
            client = await ClientFactory(config).create_from_url(url)
            message = new_text_message(QUESTION, role=Role.ROLE_USER)
            async for event in client.send_message(SendMessageRequest(message=message)):
                if event.HasField("artifact_update"):
                    said += [part.text for part in event.artifact_update.artifact.parts]
                elif event.HasField("task"):
                    states.append(event.task.status.state)
                    said += [part.text for each in event.task.artifacts for part in each.parts]
                else:
                    states.append(event.status_update.status.state)
        assert "".join(said) == ANSWER and states[-1] == TaskState.TASK_STATE_COMPLETED

    for streaming in (False, True):
        asyncio.run(talk(streaming))


def with_mcp(url: str) -> None:
    """The official MCP client: the agent is a tool."""
    from mcp import Client

    async def talk() -> None:
        async with Client(f"{url}/mcp") as client:
            (tool,) = (await client.list_tools()).tools
            result = await client.call_tool(tool.name, {"message": QUESTION})
            assert result.content[0].text == ANSWER

    asyncio.run(talk())


def with_langchain(url: str) -> None:
    """LangChain: structured output by a function, which forbids parallel calls, and a conversation."""
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Calculator(BaseModel):
        """Calculates."""

        expression: str

    Calculator.__name__ = CALL[0]
    at = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    policy = ChatOpenAI(model=POLICY, **at)
    called = policy.bind_tools([TOOL], parallel_tool_calls=False).invoke(QUESTION)
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [CALL]
    assert policy.invoke(QUESTION).content == ANSWER
    structured = policy.with_structured_output(Calculator, method="function_calling")
    assert structured.invoke(QUESTION) == Calculator(**CALL[1])
    assert policy.invoke(QUESTION).content == ANSWER
    agent = ChatOpenAI(model=AGENT, **at)
    talk = [HumanMessage(QUESTION)]
    for _ in range(3):
        said = agent.invoke(talk)
        assert said.content == ANSWER
        talk += [said, HumanMessage(QUESTION)]


def with_llama_index(url: str) -> None:
    """LlamaIndex: tools, each request of which forbids parallel calls."""
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool
    from llama_index.llms.openai_like import OpenAILike

    def calculator(expression: str) -> str:
        """Calculates."""
        return ANSWER

    options = {"api_base": f"{url}/v1", "api_key": "none", "max_retries": 0, "is_chat_model": True}
    llm = OpenAILike(model=POLICY, is_function_calling_model=True, **options)
    tool = FunctionTool.from_defaults(calculator)
    answer = llm.chat_with_tools([tool], user_msg=QUESTION)
    (call,) = llm.get_tool_calls_from_response(answer)
    assert (call.tool_name, call.tool_kwargs) == CALL
    assert llm.chat([ChatMessage(role="user", content=QUESTION)]).message.content == ANSWER
    agent = OpenAILike(model=AGENT, **options)
    talk = [ChatMessage(role="user", content=QUESTION)]
    for _ in range(2):
        said = agent.chat(talk).message
        assert said.content == ANSWER
        talk += [said, ChatMessage(role="user", content=QUESTION)]


def with_inspect(url: str) -> None:
    """inspect_ai: its provider of OpenAI asks the agent, over two turns."""
    from inspect_ai.model import ChatMessageUser, get_model

    async def talk() -> None:
        for responses in (True, False):
            model = get_model(
                f"openai/{AGENT}", base_url=f"{url}/v1", api_key="none", responses_api=responses
            )
            said: list[Any] = [ChatMessageUser(content=QUESTION)]
            for _ in range(2):
                output = await model.generate(said)
                assert output.completion == ANSWER
                said += [output.message, ChatMessageUser(content=QUESTION)]

    asyncio.run(talk())


def tool_loop(create: Any) -> None:
    """The policy calls a tool, gets its answer, and says the answer."""
    messages: list[Any] = [user()]
    said = create(model=POLICY, messages=messages, tools=[TOOL]).choices[0].message
    (call,) = said.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == CALL
    messages += [said, {"role": "tool", "tool_call_id": call.id, "content": ANSWER}]
    assert create(model=POLICY, messages=messages, tools=[TOOL]).choices[0].message.content == ANSWER


def user() -> dict[str, str]:
    return {"role": "user", "content": QUESTION}


CLIENTS = {
    "openai": with_openai,
    "litellm": with_litellm,
    "agents": with_agents,
    "a2a": with_a2a,
    "mcp": with_mcp,
    "langchain": with_langchain,
    "llama_index": with_llama_index,
    "inspect": with_inspect,
}

if __name__ == "__main__":
    _, client_name, server_url = sys.argv
    CLIENTS[client_name](server_url)
