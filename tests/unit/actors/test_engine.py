"""``AgentExecutionEngine`` on real Ray. Its server is a small one of ours, so that no model is needed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, aclosing, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from actors.engine import REFERENCE_ARGUMENTS, AgentExecutionEngine, fill_returns
from environments import (
    ActorNeeds,
    Dataset,
    Step,
    TerminationReason,
    ToolEnvironment,
    Trajectory,
    math_reward_fn,
    read_trajectories,
)
from environments.base import BaseEnv
from environments.data.trajectory_file import TrajectoryFile
from environments.errors import AgentError, ConfigError, DatasetError, SamplerError
from environments.tools.retrieval import LocalRetrievalTool
from policies import GameAgent, ToolAgent

TIMEOUT_SECONDS = 60.0
"""Of episodes that end by themselves: the first of an engine imports the sampler's client, in seconds."""
HANG_SECONDS = 15.0
"""Of an engine in which some episode never ends, and others have to be over before."""


class Mischief(BaseEnv):
    """Rewards an answer that repeats the question, after doing what the task asks for.

    A step of a task with ``until`` takes until that file is there.
    """

    def __init__(self, info: dict[str, Any]) -> None:
        self.info = info

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> Mischief:
        if info.get("stuck") == "from_dict":
            time.sleep(600)
        return cls(info)

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"question": self.info["question"]}, {}

    def step(self, action: str) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        if "pid_file" in self.info:
            Path(self.info["pid_file"]).write_text(str(os.getpid()))
        once = Path(self.info.get("once", os.devnull))
        do = None if once.is_file() else self.info.get("do")
        if "once" in self.info:
            once.touch()
        match do:
            case "raise":
                raise RuntimeError("The dice are gone.")
            case "hang":
                signal.setitimer(signal.ITIMER_REAL, 0)  # as libraries do that have alarms of their own
                time.sleep(600)
            case "die":
                os._exit(1)
        time.sleep(self.info.get("seconds", 0))
        while not Path(self.info.get("until", os.devnull)).exists():
            time.sleep(0.02)
        return {}, float(action == self.info["question"]), True, {"index": self.idx}

    def close(self) -> None:
        if self.info.get("stuck") == "close":
            time.sleep(600)


class EchoServer(ThreadingHTTPServer):
    """Answers chat completions with the last message, and remembers what it was asked."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), EchoHandler)
        self.model = "echo"
        self.bodies: list[dict[str, Any]] = []
        self.base_url = f"http://127.0.0.1:{self.server_port}/v1"

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[EchoServer]:
        """A server that answers in the block."""
        with cls() as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            yield server
            server.shutdown()


class EchoHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: EchoServer

    def do_GET(self) -> None:
        self.reply({"object": "list", "data": [{"id": self.server.model, "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        asked = body["messages"][-1]["content"]
        message: dict[str, Any] = {"role": "assistant", "content": asked}
        if asked.startswith("call ") and "tools" in body:
            _, tool, expression = asked.split()
            function = {"name": tool, "arguments": json.dumps({"expression": expression})}
            message = {"role": "assistant", "content": None}
            message["tool_calls"] = [{"id": "c1", "type": "function", "function": function}]
        usage = {"prompt_tokens": 10 * len(body["messages"]), "completion_tokens": 5}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.reply({"choices": [choice], "usage": usage})

    def reply(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with EchoServer.running() as server:
        yield server


def make_engine(base_url: str = "http://127.0.0.1:1/v1", **changes: Any) -> AgentExecutionEngine:
    arguments = {
        "agent_class": GameAgent,
        "env_class": Mischief,
        "engine_name": "openai",
        "rollout_engine_args": {"base_url": base_url},
        "n_parallel_agents": 3,
        "trajectory_timeout": TIMEOUT_SECONDS,
        "retry_limit": 1,
        "api_retries": 0,
    }
    return AgentExecutionEngine(**(arguments | changes))


@pytest.fixture(scope="module")
def engine(ray_cluster: None, server: EchoServer) -> Iterator[AgentExecutionEngine]:
    sampling = {"temperature": 0.6, "top_p": 0.95, "model": "echo", "max_tokens": 50}
    with make_engine(server.base_url, sampling_params=sampling, trajectory_timeout=HANG_SECONDS) as engine:
        play(engine, [{"question": "first"}])  # the sampler imports its client now, which takes seconds
        yield engine


def play(engine: AgentExecutionEngine, tasks: Any) -> list[Trajectory]:
    return asyncio.run(engine.execute_tasks(tasks))


def ends(pid: int, within_seconds: float = 120) -> bool:
    """Whether the process ends in time."""
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


# -- with Ray ------------------------------------------------------------------------------------------


@pytest.mark.engine
def test_trajectories_come_in_the_order_of_the_tasks_whichever_ends_first(
    engine: AgentExecutionEngine,
) -> None:
    tasks = [{"question": f"q{index}", "seconds": (3 - index) * 0.3} for index in range(4)]
    trajectories = play(engine, tasks)
    assert [each.task for each in trajectories] == tasks
    assert all(mine is given for mine, given in zip((each.task for each in trajectories), tasks, strict=True))
    assert [each.steps[0].model_response for each in trajectories] == ["q0", "q1", "q2", "q3"]
    assert [each.reward for each in trajectories] == [1.0] * 4
    assert [each.steps[0].mc_return for each in trajectories] == [1.0] * 4
    assert [each.steps[0].info["index"] for each in trajectories] == [0, 1, 2, 3]


@pytest.mark.engine
def test_each_task_is_answered_once_whatever_its_environment_does(engine: AgentExecutionEngine) -> None:
    doings = ["fine", "raise", "die", "hang", "fine", "raise", "fine"]
    tasks = [{"question": f"q{index}", "do": do} for index, do in enumerate(doings)]
    trajectories = play(engine, tasks)
    expected = {
        "fine": TerminationReason.ENV_DONE,
        "raise": TerminationReason.ENV_ERROR,
        "die": TerminationReason.CRASHED,
        "hang": TerminationReason.TIMEOUT,
    }
    assert [each.termination_reason for each in trajectories] == [expected[do] for do in doings]
    assert [each.task for each in trajectories] == tasks
    errors = {do: each.error or "" for do, each in zip(doings, trajectories, strict=True)}
    assert errors["fine"] == ""
    assert "Mischief.step" in errors["raise"] and "The dice are gone." in errors["raise"]
    assert "died" in errors["die"]
    assert "Nothing could interrupt it" not in errors["hang"]
    # The actors that were lost have been replaced.
    assert [each.reward for each in play(engine, [{"question": "again"}] * 4)] == [1.0] * 4


@pytest.mark.engine
def test_equal_tasks_of_a_dataset_are_sampled_with_seeds_of_their_own(
    ray_cluster: None, server: EchoServer
) -> None:
    tasks = Dataset([{"question": "a"}, {"question": "b"}]).repeat(n=2)
    with make_engine(server.base_url, sampling_params={"seed": 7}, n_parallel_agents=2) as engine:
        server.bodies.clear()
        trajectories = play(engine, tasks)
    assert [each.task["question"] for each in trajectories] == ["a", "a", "b", "b"]
    assert len({body["seed"] for body in server.bodies}) == 4


@pytest.mark.engine
def test_sampling_params_reach_the_server(engine: AgentExecutionEngine, server: EchoServer) -> None:
    server.bodies.clear()
    play(engine, [{"question": "a"}])
    (body,) = server.bodies
    assert "seed" not in body
    assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"]) == ("echo", 0.6, 0.95, 50)


@pytest.mark.engine
def test_the_event_loop_goes_on_and_a_second_call_at_the_same_time_is_refused(
    engine: AgentExecutionEngine, tmp_path: Path
) -> None:
    has_gone_on = tmp_path / "gone on"

    async def main() -> list[Trajectory]:
        task = {"question": "a", "until": str(has_gone_on)}
        playing = asyncio.create_task(engine.execute_tasks([task]))
        for _ in range(5):
            await asyncio.sleep(0.05)
        has_gone_on.touch()  # a loop that stands still until the call is over does not come to this
        return await playing

    async def twice() -> None:
        playing = asyncio.create_task(engine.execute_tasks([{"question": "a"}]))
        await asyncio.sleep(0)
        with pytest.raises(ConfigError, match="still at an earlier"):
            await engine.execute_tasks([{"question": "b"}])
        assert (await playing)[0].reward == 1.0

    assert asyncio.run(main())[0].reward == 1.0
    asyncio.run(twice())


@pytest.mark.engine
def test_a_server_that_cannot_be_reached_is_in_every_trajectory_s_error(ray_cluster: None) -> None:
    with make_engine(sampling_params={"model": "echo"}, n_parallel_agents=1) as engine:
        trajectories = play(engine, [{"question": "a"}, {"question": "b"}])
    assert [each.termination_reason for each in trajectories] == [TerminationReason.SAMPLER_ERROR] * 2
    for each in trajectories:
        assert (each.error or "").startswith("SamplerError: The server at http://127.0.0.1:1/v1 cannot be")


@pytest.mark.engine
def test_closing_ends_the_processes_and_the_engine_can_be_used_again(
    ray_cluster: None, server: EchoServer, tmp_path: Path
) -> None:
    tasks = [{"question": "a", "pid_file": str(tmp_path / "pid")}]
    # The first episode imports the client, which takes seconds.
    engine = make_engine(server.base_url, trajectory_timeout=60)
    for _ in range(2):
        assert play(engine, tasks)[0].reward == 1.0
        engine.close()
        assert ends(int((tmp_path / "pid").read_text()))


@pytest.mark.engine
def test_a_cancelled_call_returns_at_once_and_leaves_nothing_behind(
    ray_cluster: None, server: EchoServer, tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    engine = make_engine(server.base_url, trajectory_timeout=300)

    async def cancel_in_play() -> None:
        playing = asyncio.create_task(
            engine.execute_tasks([{"question": "a", "do": "hang", "pid_file": str(pid_file)}])
        )
        while not pid_file.exists():
            await asyncio.sleep(0.1)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    start = time.monotonic()
    asyncio.run(cancel_in_play())  # also waits for the engine's thread
    assert time.monotonic() - start < 120
    assert ends(int(pid_file.read_text()))
    assert play(engine, [{"question": "b"}])[0].reward == 1.0
    engine.close()


@pytest.mark.engine
def test_a_policy_server_of_this_cluster_is_sampled_by_its_handle(policy_app: Any) -> None:
    with make_engine(
        engine_name="verl",
        rollout_engine_args={"app_name": policy_app.name},
        tokenizer=SimpleNamespace(name_or_path=str(policy_app.model_path)),
        sampling_params={"max_tokens": 5, "seed": 7},
        trajectory_timeout=60,
        n_parallel_agents=2,
    ) as engine:
        tasks = [{"question": "What is 12+34?"}] * 3
        first, second = play(engine, tasks), play(engine, tasks)
    completions = [each.steps[0].completion for each in first]
    assert all(each is not None and 1 <= len(each.completion_ids) <= 5 for each in completions)
    assert len({each.completion_ids for each in completions if each is not None}) > 1
    assert completions == [each.steps[0].completion for each in second]  # the seed makes calls repeatable


def test_vllms_parser_needs_the_replicas_of_a_policy_server() -> None:
    arguments = {"agent_class": ToolAgent, "agent_args": {"tools": [], "parser_name": "vllm:hermes"}}
    with pytest.raises(ConfigError, match=r"vllm:hermes.*OpenAISampler has none.*engine_name='serve'"):
        make_engine(**arguments)


@pytest.mark.slow  # importing vLLM takes seconds
def test_unknown_parser_of_vllm_is_found_where_the_engine_is_made(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'hermes'"):
        make_engine(
            agent_class=ToolAgent,
            agent_args={"tools": [], "parser_name": "vllm:hermse"},
            engine_name="serve",
            rollout_engine_args={"app_name": "policy", "model_path": str(tiny_model)},
        )


@pytest.mark.engine
def test_calls_that_vllms_parser_reads_in_the_replica_reach_the_agent(policy_app: Any) -> None:
    arguments = {
        "type": "object",
        "properties": {"expression": {"enum": ["12+34"]}},
        "required": ["expression"],
    }
    call = {
        "type": "tag",
        "begin": '<tool_call>{"name": "calculator", "arguments": ',
        "content": {"type": "json_schema", "json_schema": {**arguments, "additionalProperties": False}},
        "end": "}</tool_call>",
    }
    structure = json.dumps({"type": "structural_tag", "format": call})
    with make_engine(
        agent_class=ToolAgent,
        agent_args={"tools": ["calculator"], "parser_name": "vllm:hermes", "system_prompt": ""},
        env_class=ToolEnvironment,
        env_args={"tools": ["calculator"], "reward_fn": math_reward_fn},
        engine_name="serve",
        rollout_engine_args={"app_name": policy_app.name, "model_path": str(policy_app.model_path)},
        sampling_params={"max_tokens": 120, "seed": 7, "structure": structure},
        max_steps=2,
    ) as engine:
        (trajectory,) = play(engine, [{"question": "What is 12+34?", "ground_truth": "46"}])
    first, second = trajectory.steps
    (called,) = first.action
    assert (called["id"], called["function"]["name"]) == ("call_0", "calculator")
    assert json.loads(called["function"]["arguments"]) == {"expression": "12+34"}
    assert second.observation == {"tool_outputs": {"call_0": "46"}}
    # The history holds the sampled text, so that the next prompt goes on from its tokens.
    sampled = first.completion.prompt_ids + first.completion.completion_ids
    assert second.completion.prompt_ids[: len(sampled)] == sampled


@pytest.mark.engine
def test_a_policy_server_that_does_not_exist_is_one_error(ray_cluster: None, tiny_model: Path) -> None:
    from environments.errors import SamplerError

    arguments = {"app_name": "nowhere", "model_path": str(tiny_model)}
    with (
        make_engine(engine_name="serve", rollout_engine_args=arguments) as engine,
        pytest.raises(SamplerError, match="nowhere"),
    ):
        play(engine, [{"question": "a"}])


@pytest.mark.engine
def test_the_stream_yields_what_ends_first(engine: AgentExecutionEngine, tmp_path: Path) -> None:
    async def main() -> list[str]:
        tasks = [
            {"question": "q0", "until": str(tmp_path / "q1")},
            {"question": "q1", "until": str(tmp_path / "q2")},
            {"question": "q2"},
        ]
        yielded = []
        async for each in engine.execute_tasks_stream(tasks):
            yielded.append(each.task["question"])
            (tmp_path / yielded[-1]).touch()  # the one before it may end
        return yielded

    assert asyncio.run(main()) == ["q2", "q1", "q0"]


@pytest.mark.engine
def test_a_stream_that_is_given_up_leaves_nothing_to_the_next_call(engine: AgentExecutionEngine) -> None:
    async def first_only() -> Trajectory:
        stream = engine.execute_tasks_stream([{"question": f"old {index}"} for index in range(6)])
        async with aclosing(stream):
            return await anext(stream)

    assert asyncio.run(first_only()).reward == 1.0
    assert [each.task["question"] for each in play(engine, [{"question": "new"}] * 4)] == ["new"] * 4


@pytest.mark.engine
def test_an_interrupted_evaluation_goes_on_where_it_was(
    engine: AgentExecutionEngine, server: EchoServer, tmp_path: Path
) -> None:
    tasks = [{"question": f"q{index}"} for index in range(6)]
    results = tmp_path / "results.jsonl"

    async def interrupted() -> None:
        stream = engine.execute_tasks_stream(tasks, results)
        async with aclosing(stream):
            await anext(stream)
            await anext(stream)

    asyncio.run(interrupted())
    kept = read_trajectories(results)
    assert 2 <= len(kept) < 6
    server.bodies.clear()
    trajectories = asyncio.run(engine.execute_tasks(tasks, results))
    assert [each.task for each in trajectories] == tasks
    # What was under way when the first call was given up may still have reached the server afterwards.
    asked = {body["messages"][-1]["content"] for body in server.bodies}
    assert asked == {task["question"] for task in tasks} - {each.task["question"] for each in kept}
    assert [each.rollout_id for each in read_trajectories(results)] == [
        each.rollout_id for each in trajectories
    ]


@pytest.mark.engine
def test_results_of_another_agent_are_not_taken_over(
    ray_cluster: None, server: EchoServer, tmp_path: Path
) -> None:
    for prompt, expected in (("A", None), ("B", "agent_args.*'A'.*'B'")):
        with make_engine(
            server.base_url, agent_args={"system_prompt": prompt}, n_parallel_agents=1
        ) as engine:
            call = engine.execute_tasks([{"question": "a"}], tmp_path / "results")
            if expected is None:
                asyncio.run(call)
            else:
                with pytest.raises(ConfigError, match=expected):
                    asyncio.run(call)


@pytest.mark.engine
def test_what_fails_once_is_played_again_on_a_fresh_environment(
    engine: AgentExecutionEngine, tmp_path: Path
) -> None:
    tasks = [{"question": "a", "do": do, "once": str(tmp_path / do)} for do in ("raise", "die")]
    trajectories = play(engine, tasks)
    assert [each.termination_reason for each in trajectories] == [TerminationReason.ENV_DONE] * 2
    assert [(each.reward, each.error) for each in trajectories] == [(1.0, None)] * 2


@pytest.mark.engine
@pytest.mark.parametrize("method", ["from_dict", "close"])
def test_a_stuck_method_ends_at_its_limit_and_the_slot_is_free_again(
    ray_cluster: None, server: EchoServer, method: str
) -> None:
    with make_engine(server.base_url, n_parallel_agents=1, trajectory_timeout=HANG_SECONDS) as engine:
        play(engine, [{"question": "first"}])  # the sampler imports its client now
        stuck, fine = play(engine, [{"question": "a", "stuck": method}, {"question": "b"}])
    assert fine.reward == 1.0
    if method == "close":  # what was played is as good as before
        assert (stuck.termination_reason, stuck.reward) == (TerminationReason.ENV_DONE, 1.0)
        assert "Mischief.close ran longer than" in str(stuck.error)
    else:
        assert stuck.termination_reason is TerminationReason.TIMEOUT


@pytest.mark.engine
def test_a_server_that_does_not_answer_ends_the_rollout_at_its_limit(ray_cluster: None) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        base_url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with make_engine(base_url, n_parallel_agents=1, trajectory_timeout=2.0) as engine:
            (trajectory,) = play(engine, [{"question": "a"}])
    assert trajectory.termination_reason is TerminationReason.TIMEOUT
    assert trajectory.seconds < 60


@pytest.mark.engine
def test_an_environment_that_no_node_has_room_for_is_refused_by_name(
    ray_cluster: None, server: EchoServer
) -> None:
    class Needy(Mischief):
        actor_needs = ActorNeeds(resources={"emulator": 1})

    with (
        make_engine(server.base_url, env_class=Needy) as engine,
        pytest.raises(ConfigError, match=r"emulator.*actor_needs"),
    ):
        play(engine, [{"question": "a"}])


@pytest.mark.engine
def test_what_an_environment_needs_reaches_its_process(ray_cluster: None, server: EchoServer) -> None:
    class Configured(Mischief):
        actor_needs = ActorNeeds(num_cpus=0.5, runtime_env={"env_vars": {"EMULATOR": "on"}})

        def step(self, action: str) -> Any:
            needs = ray.get_runtime_context().get_assigned_resources()
            return {}, needs["CPU"], True, {"emulator": os.environ["EMULATOR"]}

    with make_engine(server.base_url, env_class=Configured, n_parallel_agents=1) as engine:
        (trajectory,) = play(engine, [{"question": "a"}])
    assert (trajectory.reward, trajectory.steps[0].info["emulator"]) == (0.5, "on")


@pytest.mark.engine
def test_structured_tool_calls_reach_the_agent(ray_cluster: None, server: EchoServer) -> None:
    with AgentExecutionEngine(
        agent_class=ToolAgent,
        agent_args={"tools": ["calculator"], "parser_name": "openai", "system_prompt": ""},
        env_class=ToolEnvironment,
        env_args={"tools": ["calculator"], "reward_fn": lambda task_info, action: float(action == "42")},
        rollout_engine_args={"base_url": server.base_url},
        n_parallel_agents=1,
    ) as engine:
        (trajectory,) = play(engine, [{"question": "call calculator 6*7"}])
    assert (trajectory.reward, len(trajectory.steps)) == (1.0, 2)
    roles = [message["role"] for message in trajectory.steps[-1].chat_completions]
    assert roles == ["user", "assistant", "tool", "assistant"]


# -- without ---------------------------------------------------------------------------------------------


def test_no_tasks_are_no_trajectories() -> None:
    assert play(make_engine(), []) == []


def test_a_task_that_is_no_dict_is_refused() -> None:
    with pytest.raises(DatasetError, match="Row 1"):
        play(make_engine(), [{"question": "a"}, "b"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling_params": {"temprature": 1.0}}, "temprature.*Did you mean 'temperature'"),
        ({"sampling_params": {"temperature": -1.0}}, "temperature=-1.0"),
        ({"sampling_params": {"adapter": "mine"}}, "'adapter': 'mine'.*'serve'.*'model'"),
        ({"engine_name": "opnai"}, "opnai.*Did you mean 'openai'"),
        ({"rollout_engine_args": {}}, r"rollout_engine_args=\{'base_url': 'http://localhost:8000/v1'\}"),
        ({"sampling_params": {"min_p": 0.1}}, r"'min_p' is not .*rollout_engine_args=\{'extra_body'"),
        ({"sampling_params": {"stop": 1}}, "stop=1 has to be a list of non-empty strings"),
        ({"max_step": 3}, "no argument 'max_step'.*Did you mean 'max_steps'"),
        ({"rollout_engine_args": {"base_url": "localhost:8000"}}, "localhost:8000"),
        ({"rollout_engine_args": {"base_ulr": "http://h/v1"}}, "base_ulr.*Did you mean 'base_url'"),
        ({"engine_name": "serve", "rollout_engine_args": {"model_path": "m"}}, "app_name"),
        ({"engine_name": "serve", "rollout_engine_args": {"app_name": "policy"}}, "model_path"),
        (
            {
                "engine_name": "serve",
                "rollout_engine_args": {"app_name": "policy", "model_path": "m"},
                "sampling_params": {"model": "policy"},
            },
            "model",
        ),
        ({"n_parallel_agents": 0}, "n_parallel_agents=0"),
        ({"n_parallel_agents": 1.5}, "n_parallel_agents=1.5"),
        ({"trajectory_timeout": -1.0}, "trajectory_timeout=-1.0"),
        ({"trajectory_timeout": float("inf")}, "trajectory_timeout=inf"),
        ({"gamma": float("nan")}, "gamma=nan"),
        ({"max_steps": 0}, "max_steps=0"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_engine(**changes)


@pytest.mark.parametrize("name", REFERENCE_ARGUMENTS)
def test_an_argument_of_the_reference_is_answered_with_what_replaces_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no argument '{name}'. {re.escape(REFERENCE_ARGUMENTS[name])}"):
        make_engine(**{name: None})


@pytest.mark.parametrize("refused", ["no trajectories", "locked"])
def test_a_results_file_that_is_refused_leaves_the_actors_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: str
) -> None:
    engine, results = make_engine(sampling_params={"model": "echo"}), tmp_path / "results.jsonl"
    ended: list[str] = []
    monkeypatch.setattr(engine, "close", lambda: ended.append("the actors"))
    with ExitStack() as stack:
        if refused == "locked":
            stack.enter_context(TrajectoryFile(results, {}, []))
        else:
            results.write_text("a diary")
        for _ in range(2):  # and the engine can be asked again
            with pytest.raises((ConfigError, DatasetError), match="name another"):
                asyncio.run(engine.execute_tasks([{"question": "a"}], results))
    assert ended == []


def judged_search(corpus: str, seconds: float) -> dict[str, Any]:
    return {
        "tool_map": {"search": LocalRetrievalTool.over(corpus)},
        "reward_fn": partial(math_reward_fn, time_limit_seconds=seconds),
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"env_args": judged_search("other", seconds=1)}, "env_args.*LocalRetrievalTool#"),
        ({"env_args": judged_search("one", seconds=99)}, "env_args.*99"),
        ({"sampling_params": {"model": "other"}}, "policy.*'other'"),
        ({"rollout_engine_args": {"base_url": "http://h/v1", "extra_body": {"min_p": 0.1}}}, "policy.*min_p"),
    ],
)
def test_results_of_another_evaluation_are_not_taken_over(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    results = tmp_path / "results.jsonl"
    arguments: dict[str, Any] = {
        "env_class": ToolEnvironment,
        "env_args": judged_search("one", seconds=1),
        "sampling_params": {"model": "echo"},
    }
    same = {"rollout_engine_args": {"base_url": "http://elsewhere/v1", "default_headers": {"X": "secret"}}}
    for engine in (make_engine(**arguments), make_engine(**arguments | same)):
        asyncio.run(engine.execute_tasks([], results))
    assert "secret" not in results.read_text()
    with pytest.raises(ConfigError, match=words):
        asyncio.run(make_engine(**arguments | changes).execute_tasks([], results))


def test_results_of_the_model_that_the_server_had_before_are_not_taken_over(tmp_path: Path) -> None:
    with EchoServer.running() as server:
        for _ in range(2):
            asyncio.run(make_engine(server.base_url).execute_tasks([], tmp_path / "results"))
        server.model = "another"
        with pytest.raises(ConfigError, match=r"policy.*'echo'.*'another'"):
            asyncio.run(make_engine(server.base_url).execute_tasks([], tmp_path / "results"))


def test_what_breaks_while_actors_are_at_work_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    ended: list[str] = []
    monkeypatch.setattr(engine, "close", lambda: ended.append("the actors"))

    def service() -> None:
        raise SamplerError("Nobody is there.")

    monkeypatch.setattr(engine, "_running_service", service)
    with pytest.raises(SamplerError):
        play(engine, [{"question": "a"}])
    assert ended == ["the actors"]


@pytest.mark.parametrize("engine_name", ["serve", "verl"])
def test_calls_that_only_a_server_could_read_are_refused_where_none_does(engine_name: str) -> None:
    arguments: dict[str, Any] = {
        "agent_class": ToolAgent,
        "engine_name": engine_name,
        "rollout_engine_args": {"app_name": "policy", "model_path": "m"},
    }
    make_engine(**arguments, agent_args={"tools": ["calculator"], "parser_name": "qwen"})
    with pytest.raises(ConfigError, match=r"ToolAgent takes tool calls only from a server.*parser_name"):
        make_engine(**arguments, agent_args={"tools": ["calculator"], "parser_name": "openai"})


def test_a_message_about_arguments_holds_no_secret() -> None:
    secrets = {"api_key": "sk-1234", "default_headers": {"X-Gateway": "sk-1234"}}
    with pytest.raises(ConfigError, match="base_url") as error:
        make_engine(rollout_engine_args=secrets)
    assert "sk-1234" not in str(error.value)


@pytest.mark.parametrize(("wanted", "shown"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_what_the_actors_log_is_shown_on_request(
    monkeypatch: pytest.MonkeyPatch, wanted: str | None, shown: bool
) -> None:
    if wanted is None:
        monkeypatch.delenv("TROUPE_WORKER_LOGS", raising=False)
    else:
        monkeypatch.setenv("TROUPE_WORKER_LOGS", wanted)

    def init(**options: Any) -> None:
        raise ConnectionError(f"log_to_driver={options['log_to_driver']}")

    monkeypatch.setattr("actors.ray_tools.connect.RAYLET_ENVIRONMENT", {})
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match=f"log_to_driver={shown}"):
        make_engine().start()


def test_an_agent_that_cannot_be_made_is_an_error_at_once() -> None:
    with pytest.raises(AgentError, match=r"GameAgent\.__init__.*toolz"):
        make_engine(agent_args={"toolz": []})


def test_returns_are_discounted_from_the_end() -> None:
    trajectory = Trajectory(steps=[Step(reward=1.0), Step(reward=0.0), Step(reward=4.0)])
    fill_returns(trajectory, gamma=0.5)
    assert [step.mc_return for step in trajectory.steps] == [2.0, 2.0, 4.0]
