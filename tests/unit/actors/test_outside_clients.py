"""Clients that strangers use, and a fuzzer, against the real HTTP application with a scripted engine.

They live in an environment of their own, which the first run of these tests makes: some need other
versions of packages that Troupe has pinned.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from agent_server import agent_server
from outside_packages import environment_with, npm_environment

pytestmark = pytest.mark.outside

TESTS = Path(__file__).resolve().parents[2]
AI_SDK = ("ai@6.0.326", "@ai-sdk/openai@3.0.141", "zod@4.6.7")
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>'


@pytest.fixture(scope="module")
def outside() -> Path:
    return environment_with(TESTS / "outside_clients.txt")


@pytest.fixture(scope="module")
def ai_sdk() -> Path:
    """The program ``outside_clients.mjs`` beside its packages; skips where npm cannot fetch them."""
    return Path(shutil.copy(TESTS / "outside_clients.mjs", npm_environment(*AI_SDK)))


def run(*command: object, **environment: str) -> str:
    """What the program says, if it ends well."""
    done = subprocess.run(
        list(map(str, command)),
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


CLIENTS = ("openai", "litellm", "agents", "a2a", "mcp", "langchain", "llama_index", "inspect")


@pytest.mark.parametrize("client", CLIENTS)
def test_client_is_answered_as_its_users_expect(
    tokenizer_folder: Path,
    outside: Path,
    client: str,
) -> None:
    """The policy calls a tool and says 46, in turns; the agent says 46."""
    with agent_server(
        tokenizer_folder, replies=[CALL, "46"], max_model_tokens=2000, keeps_structure=True
    ) as server:
        run(outside / "python", TESTS / "outside_clients.py", client, server.url)


def test_ai_sdk_talks_with_agent_and_sends_all_that_was_said(
    tokenizer_folder: Path,
    ai_sdk: Path,
) -> None:
    with agent_server(tokenizer_folder) as server:
        run("node", ai_sdk, server.url)


def test_answers_are_those_of_open_responses(tokenizer_folder: Path) -> None:
    """Every field that its specification wants is there, whole and streamed, and it knows all events."""
    python = environment_with(TESTS / "outside_openresponses.txt") / "python"
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"location": "Ulm"}}\n</tool_call>'
    with agent_server(tokenizer_folder, replies=[f"I look.\n{call}"], max_model_tokens=2000) as server:
        kinds = json.loads(run(python, TESTS / "outside_openresponses.py", server.url, "tiny"))
    assert {"message", "function_call", "response.function_call_arguments.done"} <= set(kinds)


def test_fuzzer_finds_no_server_error_and_no_hang(
    tokenizer_folder: Path,
    outside: Path,
    tmp_path: Path,
) -> None:
    with agent_server(tokenizer_folder, replies=[CALL, "46"], max_model_tokens=2000) as server:
        said = run(
            outside / "schemathesis",
            "run",
            f"{server.url}/openapi.json",
            "--checks=not_a_server_error",
            "--request-timeout=60",
            "--seed=1",
            "--no-color",
            "--generation-database=none",
            f"--report-dir={tmp_path}",
            PYTHONPATH=str(TESTS),
            SCHEMATHESIS_HOOKS="fuzz_hooks",
        )
    (counted,) = re.findall(r"(\d+) generated, (\d+) passed", said)
    assert counted[0] == counted[1] and int(counted[0]) >= 2000, said
