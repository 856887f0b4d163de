"""The reference page's programs, as our READMEs show them, run by a stranger in a folder of their own."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import psutil
import pytest
from echo_engine import EchoHandler, EchoServer
from machine import free_port
from shown_programs import COLLECT, TRAIN

from environments import DatasetRegistry, TerminationReason, Trajectory
from environments.data.search_questions import search_passages, search_questions
from environments.types import Message
from launch.run_folder.model_paths import newest_checkpoint

ROOT = Path(__file__).resolve().parents[3]
MODEL, SERVER = '"Qwen/Qwen3-4B"', '"http://localhost:30000/v1"'
"""What a stranger changes in README's program."""
KEEP_RESULTS = """
import pickle
from pathlib import Path
Path("results.pickle").write_bytes(pickle.dumps(results))
"""
NUM_REPEATS = 8
START_SECONDS = 400.0
PROGRAM_SECONDS = 900.0

PROBLEMS = [
    ("What is the remainder when 3^100 is divided by 1000?", "pow(3, 100, 1000)", "1"),
    (
        "How many positive integers below 1000 are divisible by 7 but not by 11?",
        "sum(n % 7 == 0 and n % 11 != 0 for n in range(1, 1000))",
        "130",
    ),
    (
        "How many positive divisors has 7!?",
        "import math\nsum(math.factorial(7) % n == 0 for n in range(1, 5041))",
        "60",
    ),
    ("What is the sum of the digits of 2^100?", "print(sum(map(int, str(2**100))))", "115"),
    (
        "How many subsets of {1, ..., 10} hold no two consecutive numbers?",
        "sum(not s & (s >> 1) for s in range(2**10))",
        "144",
    ),
    ("In how many zeros does 500! end?", "sum(500 // 5**k for k in range(1, 5))", "124"),
    (
        "What is the sum of all primes below 50?",
        "sum(n for n in range(2, 50) if all(n % d for d in range(2, n)))",
        "328",
    ),
    (
        "How many of the numbers from 1 to 1000 have no prime factor in common with 30?",
        "import math\nsum(math.gcd(n, 30) == 1 for n in range(1, 1001))",
        "266",
    ),
]
"""In the manner of the AIME: question, a program that answers it, and the answer."""
NUM_CORRECT = [0, 1, 2, 3, 4, 5, 6, 8]
"""Of the repeats of each problem, when the script plays."""


# -- servers -------------------------------------------------------------------------------------------


@contextmanager
def serve_vllm(model: Path, log: Path) -> Iterator[str]:
    """vLLM's own server in the block; yields its address. It ends with all of its processes."""
    from policies.engines.vllm_settings import CPU_ENVIRONMENT

    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    # A random model hardly ever ends a message, so the server sets the limit that a good one sets itself.
    command += ["--override-generation-config", json.dumps({"max_new_tokens": 64})]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=os.environ | CPU_ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_for_server(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with suppress(ProcessLookupError):  # its engine is a process of the same group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_server(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.2)
    pytest.fail(f"The vLLM server did not start:\n{log.read_text()[-3000:]}")


class ScriptedServer(EchoServer):
    """Says what ``reply`` makes of the messages, one request after the other; returns no token ids."""

    def __init__(self, reply: Callable[[list[Message]], str]) -> None:
        super().__init__()
        self.RequestHandlerClass = ScriptedHandler
        self.lock = threading.Lock()
        self.reply = reply

    @classmethod
    @contextmanager
    def saying(cls, reply: Callable[[list[Message]], str]) -> Iterator[str]:
        """The address of a server that answers in the block."""
        with cls(reply) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            yield server.base_url
            server.shutdown()


class ScriptedHandler(EchoHandler):
    server: ScriptedServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            text = self.server.reply(body["messages"])
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        self.reply({"choices": [choice], "usage": {"prompt_tokens": 100, "completion_tokens": 20}})


def call(tool: str, **arguments: Any) -> str:
    """A call as Qwen writes it."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


# -- a stranger's folder -------------------------------------------------------------------------------


def run_program(program: str, folder: Path, *arguments: str) -> str:
    """Run ``program`` in ``folder``, with a ``TROUPE_HOME`` and a Ray of its own; return what it says.

    Afterwards none of its processes is left.
    """
    (folder / "program.py").write_text(program)
    home = str(folder / "home")
    environment = os.environ | {"TROUPE_HOME": home, "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"}
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "program.py", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROGRAM_SECONDS,
    )
    print(f"{folder.name}: {time.monotonic() - start:.0f} s\n{done.stdout}")
    assert done.returncode == 0, done.stdout + done.stderr
    deadline = time.monotonic() + 240  # Ray's own agents take up to a minute on a busy machine
    while processes_of(home) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert processes_of(home) == []
    return done.stdout


def processes_of(home: str) -> list[str]:
    """The command lines of all processes with this ``TROUPE_HOME``."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TROUPE_HOME") == home:
                found.append(" ".join(process.cmdline()))
    return found


def results_in(folder: Path) -> list[Trajectory]:
    return pickle.loads((folder / "results.pickle").read_bytes())


def register(folder: Path, name: str, rows: Any, split: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TROUPE_HOME", str(folder / "home"))
        DatasetRegistry.register_dataset(name, rows, split)


# -- collecting ----------------------------------------------------------------------------------------


def collect(folder: Path, server: str, model: Path, num_pairs: int, num_problems: int) -> str:
    """Run README's program for collecting on the first ``PROBLEMS``; its results are kept in ``folder``."""
    rows = [{"question": question, "ground_truth": answer} for question, _, answer in PROBLEMS[:num_problems]]
    register(folder, "aime2024", rows, "test")
    program = COLLECT
    for shown, ours in ((MODEL, repr(str(model))), (SERVER, repr(server)), ("=64", f"={num_pairs}")):
        assert program.count(shown) == 1
        program = program.replace(shown, ours)
    return run_program(program + KEEP_RESULTS, folder)


def printed_estimates(output: str) -> dict[int, float]:
    return {int(k): float(estimate) for k, estimate in re.findall(r"pass@(\d+) +([\d.]+)", output)}


@pytest.fixture(scope="module")
def roomy_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny_model`` with room for the page's prompts and responses."""
    folder = tmp_path_factory.mktemp("roomy")
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 20480}))
    return folder


def test_six_pairs_sample_a_vllm_server(roomy_model: Path, tmp_path: Path) -> None:
    with serve_vllm(roomy_model, tmp_path / "vllm.log") as server:
        output = collect(tmp_path, server, roomy_model, num_pairs=6, num_problems=3)
    assert list(printed_estimates(output)) == list(range(1, NUM_REPEATS + 1))

    results = results_in(tmp_path)
    assert [each.task["question"] for each in results] == [
        question for question, _, _ in PROBLEMS[:3] for _ in range(NUM_REPEATS)
    ]
    assert [each.error for each in results] == [None] * 24
    assert not any(completion.retokenized for each in results for completion in each.completions)
    first = [each.steps[0].completion for each in results]
    assert all(each.prompt_ids and 1 <= len(each.completion_ids) <= 64 for each in first)
    assert all(len(each.logprobs) == len(each.completion_ids) for each in first)
    for number in range(3):
        repeats = first[number * NUM_REPEATS : (number + 1) * NUM_REPEATS]
        assert len({each.prompt_ids for each in repeats}) == 1
        assert len({each.completion_ids for each in repeats}) == NUM_REPEATS


def test_python_tool_s_answers_are_counted_without_bias(tiny_model: Path, tmp_path: Path) -> None:
    with ScriptedServer.saying(mathematician()) as server:
        output = collect(tmp_path, server, tiny_model, num_pairs=8, num_problems=len(PROBLEMS))
    results = results_in(tmp_path)
    assert {each.termination_reason for each in results} == {TerminationReason.ENV_DONE}
    rewards = [each.reward for each in results]
    by_problem = [rewards[start : start + NUM_REPEATS] for start in range(0, 64, NUM_REPEATS)]
    assert [sum(each) for each in by_problem] == NUM_CORRECT
    outputs = [each.steps[-1].chat_completions[-2] for each in results]
    assert [each["role"] for each in outputs] == ["tool"] * 64
    assert [each["content"] for each in outputs] == [answer for _, _, answer in PROBLEMS for _ in range(8)]

    estimates = printed_estimates(output)
    assert estimates[1] == pytest.approx(sum(NUM_CORRECT) / 64, abs=1e-4)
    assert estimates[8] == pytest.approx(7 / 8, abs=1e-4)
    for k, estimate in estimates.items():
        shares = [share_with_a_correct_one(each, k) for each in by_problem]
        assert estimate == pytest.approx(sum(shares) / len(shares), abs=1e-4)


def mathematician() -> Callable[[list[Message]], str]:
    """Has each problem computed, and then gives the result as often as ``NUM_CORRECT`` says."""
    programs = {question: program for question, program, _ in PROBLEMS}
    left = {question: number for (question, _, _), number in zip(PROBLEMS, NUM_CORRECT, strict=True)}

    def reply(messages: list[Message]) -> str:
        question, last = messages[1]["content"], messages[-1]
        if last["role"] == "user":
            return call("python", code=programs[question])
        left[question] -= 1
        answer = last["content"] if left[question] >= 0 else "999"
        return f"So it is \\boxed{{{answer}}}."

    return reply


def share_with_a_correct_one(rewards: list[float], k: int) -> float:
    """What pass@k is an estimate of, by counting."""
    draws = list(combinations(rewards, k))
    return sum(any(draw) for draw in draws) / len(draws)


# -- searching -----------------------------------------------------------------------------------------

SEARCH = """
import asyncio
import sys

from actors import AgentExecutionEngine
from environments import DatasetRegistry, ToolEnvironment, search_reward_fn
from environments.tools.retrieval import LocalRetrievalTool
from launch.recipes.search import SEARCH_SYSTEM_PROMPT
from policies import ToolAgent

tool_map = {"local_search": LocalRetrievalTool}
engine = AgentExecutionEngine(
    agent_class=ToolAgent,
    agent_args={"system_prompt": SEARCH_SYSTEM_PROMPT, "tool_map": tool_map, "parser_name": "qwen"},
    env_class=ToolEnvironment,
    env_args={"max_steps": 20, "tool_map": tool_map, "reward_fn": search_reward_fn},
    rollout_engine_args={"base_url": sys.argv[1]},
    max_steps=20,
    n_parallel_agents=8,
)
results = asyncio.run(engine.execute_tasks(DatasetRegistry.load_dataset("hotpotqa_combined", "test")))
"""
QUESTIONS = search_questions()


def register_search(folder: Path) -> None:
    register(folder, "search_corpus", search_passages(), "default")
    for split in ("train", "test"):
        register(folder, "hotpotqa_combined", QUESTIONS, split)


def test_search_tool_finds_passages_and_answers_earn_their_share(tmp_path: Path) -> None:
    register_search(tmp_path)
    with ScriptedServer.saying(searcher) as server:
        run_program(SEARCH + KEEP_RESULTS, tmp_path, server)
    results = results_in(tmp_path)
    assert [each.task for each in results] == list(QUESTIONS)
    assert {each.termination_reason for each in results} == {TerminationReason.ENV_DONE}
    for number, (task, trajectory) in enumerate(zip(QUESTIONS, results, strict=True)):
        _, first, second = trajectory.steps
        for title, step in zip(task["supporting_facts"], (first, second), strict=True):
            said = step.chat_completions[-2]
            assert said["role"] == "tool" and f"] {title}\n" in said["content"]
        assert trajectory.reward == pytest.approx(deserved(number))
        assert second.info["metadata"]["em"] is (number % 3 == 0)
    assert 0 < Counter(each.reward for each in results)[1.0] < len(results)
    (index,) = (tmp_path / "home" / "indexes").iterdir()  # of all actors, and nothing unfinished
    assert index.name.startswith("search_corpus-")


def searcher(messages: list[Message]) -> str:
    """Searches for both passages, and answers in full, with a word too many, or wrongly."""
    number = [task["question"] for task in QUESTIONS].index(messages[1]["content"])
    task, turn = QUESTIONS[number], len(messages) // 2 - 1
    if turn < 2:
        return call("local_search", query=task["supporting_facts"][turn])
    answer = (task["answer"], f"{task['answer']} surely", "nowhere")[number % 3]
    return f"\\boxed{{{answer}}}"


def deserved(number: int) -> float:
    """The F1 of what ``searcher`` answers: one word of n + 1 is wrong. Of yes and no there is no half."""
    answer = QUESTIONS[number]["answer"]
    num_words = len(answer.split())
    partly = 0.0 if answer in ("yes", "no") else 2 * num_words / (2 * num_words + 1)
    return (1.0, partly, 0.0)[number % 3]


def test_search_program_trains(tiny_model: Path, tmp_path: Path) -> None:
    register_search(tmp_path)
    program = TRAIN
    settings = (
        f"model.path={tiny_model}",
        "run.directory=run",
        "run.num_steps=1",
        "rollout.groups_per_step=2",
        "rollout.group_size=2",
        "rollout.max_prompt_tokens=1024",
        "rollout.max_turn_tokens=16",
        "evaluation.num_tasks=2",
        "server.engine.max_model_tokens=1536",
        "fleet.num_actors=2",
    )
    run_program(program, tmp_path, *settings)
    assert (newest_checkpoint(tmp_path) / "huggingface" / "config.json").is_file()
