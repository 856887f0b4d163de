"""Evaluation and serving, with a model and real engines."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from kept_recordings import kept_recordings
from machine import free_port
from openai import AsyncOpenAI, ConflictError, NotFoundError, OpenAI
from trained_run import make_run
from transformers_reference import load, token_logprobs
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from environments import read_trajectories
from launch import evaluate
from launch.recipes import canary
from launch.run_folder.checkpoint import CheckpointFolder

PROMPT = tuple(range(5, 40))
ROOT = Path(__file__).resolve().parents[3]
KEY = "a-key-of-the-tests-0123"
AUTHORIZED = {"authorization": f"Bearer {KEY}", "x-troupe-record": "no"}
"""Headers of a request that is not recorded."""


def test_evaluate_prints_a_table_and_writes_each_trajectory(
    policy_app: Any, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a rollout function, beside another application, which has to stay."""
    make_run(tmp_path / "run", tiny_model)
    before = running_applications()
    arguments = [
        "recipe=calculator",
        "workload=own_rollout",
        f"model.path={tmp_path / 'run'}",
        f"run.directory={tmp_path / 'evaluation'}",
        "evaluation.num_tasks=3",
        "evaluation.rollouts_per_task=2",
        "fleet.num_actors=2",
    ]
    status = evaluate.main(arguments)
    printed = capsys.readouterr()
    assert status == 0, printed.err
    assert "on 3 tasks, 2 times each" in printed.out and "of 6 rollouts" in printed.out
    assert "problems 3, samples 6" in printed.out
    assert "pass@1 " in printed.out and "pass@2 " in printed.out and "ended: " in printed.out
    trajectories = read_trajectories(tmp_path / "evaluation" / "evaluation.jsonl")
    questions = [each.task["question"] for each in trajectories]
    assert questions[0::2] == questions[1::2] and len(set(questions)) == 3
    completions = [each.steps[0].completion for each in trajectories]
    assert [each.policy_version for each in completions if each is not None] == [31] * 6
    assert policy_app.name in before
    assert running_applications() == before, "only what evaluate started has ended"


def running_applications() -> list[str]:
    from ray import serve as ray_serve

    return list(ray_serve.status().applications)


def test_serve_answers_over_http_until_it_is_told_to_end(
    tmp_path: Path, tiny_model: Path, untied_model: Path
) -> None:
    """With two adapters beside the model, all three in the same batches, and the best version of its run,
    which samples for the agent while it is on trial.
    """
    merged = {"policy": load(tiny_model), "policy@best": load(untied_model)} | {
        name: merged_with_adapter(tiny_model, tmp_path / name, rank)
        for name, rank in (("some", 4), ("other", 9))
    }
    make_run(tmp_path / "runs" / "mine", untied_model, step=10)
    CheckpointFolder(tmp_path / "runs" / "mine", kept=9).mark_best(10, "eval/reward_mean", 0.5)
    checkpoint = make_run(tmp_path / "runs" / "mine", tiny_model)
    port = free_port()
    command = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "launch.serve",
            f"server.http_port={port}",
            "model.path=runs/mine",
            "workload=launch.recipes.calculator",
            "fleet.num_actors=2",
            "rollout.max_response_tokens=64",
            "server.adapters.some=some",
            "server.adapters.other=other",
            "server.versions=[best]",
            "server.recording.folder=recordings",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TROUPE_API_KEYS": f"tester:{KEY}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    watchdog = threading.Timer(900, command.kill)
    watchdog.start()
    try:
        text = greeting_of(command)
        assert str(checkpoint.relative_to(tmp_path)) in text, text
        assert curl_example(text.replace("KEY", KEY))["choices"][0]["message"]["role"] == "assistant"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            curl_example(text.replace("KEY", "wrong"))
        rejections_cost_no_memory_and_are_logged(port, command.pid)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0)
        agent_answers(client)
        answers = asyncio.run(answers_of_all(merged, f"http://127.0.0.1:{port}/v1"))
        assert [answer.model for answer in answers] == list(merged)
        assert [answer.model_extra["policy_version"] for answer in answers] == [31, 11, 31, 31]
        assert {each.id for each in client.models.list()} == {*merged, "agent/calculator"}
        streamed = client.completions.create(
            model="policy@best", prompt=list(PROMPT), temperature=0, max_tokens=9, stream=True
        )
        assert len("".join(chunk.choices[0].text for chunk in streamed)) > 0
        with pytest.raises(NotFoundError, match="'policy@best'"):
            client.completions.create(model="policy@7", prompt="1")
        with pytest.raises(ConflictError, match="the present one is 11"):
            client.completions.create(model="policy@best", prompt="1", extra_body={"policy_version": 31})
        for answer, model in zip(answers, merged.values(), strict=True):
            for choice in answer.choices:
                expected = token_logprobs(model, PROMPT, choice.model_extra["token_ids"], temperature=1.0)
                found = torch.tensor(choice.logprobs.token_logprobs)
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        version_on_trial_samples_for_the_agent(client, tmp_path / "recordings")
        with connect(f"ws://127.0.0.1:{port}/v1/responses", additional_headers=AUTHORIZED) as websocket:
            websocket_goes_through_the_proxy(client, port, websocket)
            command.send_signal(signal.SIGTERM)  # as `docker stop` does; Ctrl-C is the easier of the two
            rest, _ = command.communicate(timeout=300)
            assert (command.returncode, "Traceback" in rest) == (0, False), rest
            with pytest.raises(ConnectionClosed):
                websocket.recv()
    finally:
        watchdog.cancel()
        command.kill()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))  # nobody listens any more


def greeting_of(command: subprocess.Popen[str]) -> str:
    """All lines up to the last one of the greeting."""
    lines: list[str] = []
    assert command.stdout is not None
    for line in command.stdout:
        lines.append(line)
        if line.startswith("Ctrl-C"):
            break
    return "".join(lines)


def agent_answers(client: OpenAI) -> None:
    question = "What is 12+34?"
    agent = client.chat.completions.create(
        model="agent/calculator", messages=[{"role": "user", "content": question}], timeout=200
    )
    assert agent.model == "agent/calculator" and agent.usage.completion_tokens > 0
    response = client.responses.create(model="agent/calculator", input=question, timeout=200)
    assert response.output[0].type == "message" and response.usage.output_tokens > 0
    assert client.responses.retrieve(response.id).output_text == response.output_text


def websocket_goes_through_the_proxy(client: OpenAI, port: int, opened: ClientConnection) -> None:
    """A conversation of store=false over a websocket, and a compaction."""
    address = f"ws://127.0.0.1:{port}/v1"
    for path, key, status in (("/responses", {}, "401"), ("/none", AUTHORIZED, "404")):
        with pytest.raises(InvalidStatus, match=status), connect(address + path, additional_headers=key):
            pass

    def ask(given: str, before: str | None = None) -> dict[str, Any]:
        frame = {"type": "response.create", "model": "policy", "max_output_tokens": 4, "store": False}
        opened.send(json.dumps({**frame, "input": given, "previous_response_id": before}))
        events = [json.loads(opened.recv(60))]
        while events[-1]["type"] not in ("response.completed", "response.incomplete"):
            assert events[-1]["type"] != "error", events[-1]
            events.append(json.loads(opened.recv(60)))
        return dict(events[-1]["response"])

    first = ask("1")
    second = ask("2", first["id"])
    num_read = [each["usage"]["input_tokens"] for each in (first, second)]
    assert num_read[0] < num_read[1]
    assert second["recorded"] is False
    shorter = client.responses.compact(model="policy", input="1", extra_headers=AUTHORIZED)
    assert [each.type for each in shorter.output] == ["message", "compaction"]


def version_on_trial_samples_for_the_agent(client: OpenAI, recordings: Path) -> None:
    assert canary.main(["start", str(recordings), "policy@best", "--share=0.999999"]) == 0
    answer = client.responses.create(model="agent/calculator", input="What is 56+78?", timeout=200)
    assert answer.model_extra["policy_version"] == 11
    recorded = {each.answer.answer_id: each for each in kept_recordings(recordings)}
    assert recorded[answer.id].answer.model == "agent/calculator@best"
    assert {each.policy_version for each in recorded[answer.id].trajectory.completions} == {11}
    assert sorted(each.answer.model for each in recorded.values())[:-1] == ["agent/calculator"] * 3


def merged_with_adapter(base: Path, folder: Path, rank: int) -> Any:
    """Write an adapter that changes all that is said, and return what it makes of ``base``."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load(base), LoraConfig(r=rank, lora_alpha=8, target_modules="all-linear"))
    generator = torch.Generator().manual_seed(rank)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return model.merge_and_unload()


async def answers_of_all(names: Iterable[str], url: str) -> list[Any]:
    """Several answers of each model to one question, all asked for at once."""
    async with AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        create = partial(
            client.completions.create,
            prompt=list(PROMPT),
            max_tokens=100,
            n=3,
            logprobs=0,
            extra_body={"return_token_ids": True},
        )
        return await asyncio.gather(*(create(model=name) for name in names))


def rejections_cost_no_memory_and_are_logged(port: int, server: int) -> None:
    """Of 500 requests without a key, each with 50 kB of path; the key's own requests are in the log too."""
    programs = psutil.Process(server).children(recursive=True)
    (replica,) = [
        each for each in programs if re.match(r"ray::ServeReplica:policy-\w+:PolicyServer", each.name())
    ]
    (log,) = [
        Path(file.path) for file in replica.open_files() if re.search(r"serve/replica_.*\.log$", file.path)
    ]

    async def ask(number: int, path: str, key: str) -> set[int]:
        async with httpx.AsyncClient(timeout=60, headers={"authorization": f"Bearer {key}"}) as client:
            address = f"http://127.0.0.1:{port}{path}"
            return {(await client.get(address)).status_code for _ in range(number)}

    assert asyncio.run(ask(150, f"/{'a' * 50_000}", "wrong")) == {401}  # what is made once
    before = replica.memory_info().rss
    assert asyncio.run(ask(500, f"/{'a' * 50_000}", "wrong")) == {401}
    assert replica.memory_info().rss - before < 10 * 2**20
    assert asyncio.run(ask(20, "/v1/models", KEY)) == {200}
    lines = log.read_text().splitlines()
    assert sum("key tester: GET '/v1/models': 200" in line for line in lines) == 20
    assert sum("rejected: GET '/aaa" in line for line in lines) >= 650
    assert max(map(len, lines)) < 2000


def curl_example(greeting: str) -> dict[str, Any]:
    """Do what the greeting's curl line does."""
    match = re.search(r"curl (\S+)( -H '.*') -d '(.*)'", greeting)
    assert match is not None, greeting
    headers = dict(re.findall(r"-H '([\w-]+): (.*?)'", match[2]))
    request = urllib.request.Request(match[1], match[3].encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer
