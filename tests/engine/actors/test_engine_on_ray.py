"""``AgentExecutionEngine`` on real Ray. Its server is a small one of ours, so that no model is needed."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from echo_engine import EchoServer, Mischief, make_engine, play

from actors.engine import AgentExecutionEngine
from actors.gateway.client import PolicyClient
from environments import (
    ActorNeeds,
    Dataset,
    TerminationReason,
    ToolEnvironment,
    Trajectory,
    math_reward_fn,
    read_trajectories,
)
from environments.errors import ConfigError, SamplerError
from policies import ToolAgent

HANG_SECONDS = 15.0
"""Of an engine in which some episode never ends, and others have to be over before."""


@pytest.fixture(scope="module")
def server() -> Iterator[EchoServer]:
    with EchoServer.running() as server:
        yield server


@pytest.fixture(scope="module")
def engine(ray_cluster: None, server: EchoServer) -> Iterator[AgentExecutionEngine]:
    sampling = {"temperature": 0.6, "top_p": 0.95, "model": "echo", "max_tokens": 50}
    with make_engine(server.base_url, sampling_params=sampling, trajectory_timeout=HANG_SECONDS) as engine:
        play(engine, [{"question": "first"}])  # the sampler imports its client now, which takes seconds
        yield engine


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


def test_trajectories_come_in_the_order_of_their_tasks(
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


async def solve(task: dict[str, Any], client: PolicyClient) -> float:
    messages: Any = [{"role": "user", "content": task["question"]}]
    answer = await client.openai.chat.completions.create(model=client.model, messages=messages)
    return float(answer.choices[0].message.content == task["question"])


def test_rollout_function_is_played_as_an_agent_is(ray_cluster: None, server: EchoServer) -> None:
    tasks = [{"question": f"q{index}"} for index in range(4)]
    with make_engine(server.base_url, agent_class=None, env_class=None, rollout=solve) as engine:
        trajectories = play(engine, tasks)
    assert [each.task for each in trajectories] == tasks
    assert [(each.reward, len(each.steps)) for each in trajectories] == [(1.0, 1)] * 4


def test_task_is_answered_once_whatever_its_environment_does(engine: AgentExecutionEngine) -> None:
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


def test_equal_tasks_of_a_dataset_have_seeds_of_their_own(ray_cluster: None, server: EchoServer) -> None:
    tasks = Dataset([{"question": "a"}, {"question": "b"}]).repeat(n=2)
    with make_engine(server.base_url, sampling_params={"seed": 7}, n_parallel_agents=2) as engine:
        server.bodies.clear()
        trajectories = play(engine, tasks)
    assert [each.task["question"] for each in trajectories] == ["a", "a", "b", "b"]
    assert len({body["seed"] for body in server.bodies}) == 4


def test_sampling_params_reach_the_server(engine: AgentExecutionEngine, server: EchoServer) -> None:
    server.bodies.clear()
    play(engine, [{"question": "a"}])
    (body,) = server.bodies
    assert "seed" not in body
    assert (body["model"], body["temperature"], body["top_p"], body["max_tokens"]) == ("echo", 0.6, 0.95, 50)


def test_event_loop_goes_on_and_refuses_a_second_call(engine: AgentExecutionEngine, tmp_path: Path) -> None:
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


def test_server_out_of_reach_is_in_each_trajectorys_error(ray_cluster: None) -> None:
    with make_engine(sampling_params={"model": "echo"}, n_parallel_agents=1) as engine:
        trajectories = play(engine, [{"question": "a"}, {"question": "b"}])
    assert [each.termination_reason for each in trajectories] == [TerminationReason.SAMPLER_ERROR] * 2
    for each in trajectories:
        assert (each.error or "").startswith("SamplerError: The server at http://127.0.0.1:1/v1 cannot be")


def test_closing_ends_processes_and_engine_can_be_used_again(
    ray_cluster: None, server: EchoServer, tmp_path: Path
) -> None:
    tasks = [{"question": "a", "pid_file": str(tmp_path / "pid")}]
    # The first episode imports the client, which takes seconds.
    engine = make_engine(server.base_url, trajectory_timeout=60)
    for _ in range(2):
        assert play(engine, tasks)[0].reward == 1.0
        engine.close()
        assert ends(int((tmp_path / "pid").read_text()))


def test_cancelled_call_returns_at_once_and_leaves_nothing(
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


def test_policy_server_of_this_cluster_is_sampled_by_its_handle(policy_app: Any) -> None:
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


def test_calls_that_vllms_parser_reads_in_replica_reach_agent(policy_app: Any) -> None:
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


def test_policy_server_that_does_not_exist_is_one_error(ray_cluster: None, tiny_model: Path) -> None:

    arguments = {"app_name": "nowhere", "model_path": str(tiny_model)}
    with (
        make_engine(engine_name="serve", rollout_engine_args=arguments) as engine,
        pytest.raises(SamplerError, match="nowhere"),
    ):
        play(engine, [{"question": "a"}])


def test_stream_yields_what_ends_first(engine: AgentExecutionEngine, tmp_path: Path) -> None:
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


def test_stream_that_is_given_up_leaves_nothing_to_next_call(engine: AgentExecutionEngine) -> None:
    async def first_only() -> Trajectory:
        stream = engine.execute_tasks_stream([{"question": f"old {index}"} for index in range(6)])
        async with aclosing(stream):
            return await anext(stream)

    assert asyncio.run(first_only()).reward == 1.0
    assert [each.task["question"] for each in play(engine, [{"question": "new"}] * 4)] == ["new"] * 4


def test_interrupted_evaluation_goes_on_where_it_was(
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


def test_what_fails_once_is_played_again_on_a_fresh_environment(
    engine: AgentExecutionEngine, tmp_path: Path
) -> None:
    tasks = [{"question": "a", "do": do, "once": str(tmp_path / do)} for do in ("raise", "die")]
    trajectories = play(engine, tasks)
    assert [each.termination_reason for each in trajectories] == [TerminationReason.ENV_DONE] * 2
    assert [(each.reward, each.error) for each in trajectories] == [(1.0, None)] * 2


@pytest.mark.parametrize("method", ["from_dict", "close"])
def test_stuck_method_ends_at_its_limit_and_slot_is_free_again(
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


def test_server_that_does_not_answer_ends_rollout_at_its_limit(ray_cluster: None) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        base_url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        with make_engine(base_url, n_parallel_agents=1, trajectory_timeout=2.0) as engine:
            (trajectory,) = play(engine, [{"question": "a"}])
    assert trajectory.termination_reason is TerminationReason.TIMEOUT
    assert trajectory.seconds < 60


def test_environment_without_room_on_any_node_is_refused(ray_cluster: None, server: EchoServer) -> None:
    class Needy(Mischief):
        actor_needs = ActorNeeds(resources={"emulator": 1})

    with (
        make_engine(server.base_url, env_class=Needy) as engine,
        pytest.raises(ConfigError, match=r"emulator.*actor_needs"),
    ):
        play(engine, [{"question": "a"}])


def test_what_an_environment_needs_reaches_its_process(ray_cluster: None, server: EchoServer) -> None:
    class Configured(Mischief):
        actor_needs = ActorNeeds(num_cpus=0.5, runtime_env={"env_vars": {"EMULATOR": "on"}})

        def step(self, action: str) -> Any:
            needs = ray.get_runtime_context().get_assigned_resources()
            return {}, needs["CPU"], True, {"emulator": os.environ["EMULATOR"]}

    with make_engine(server.base_url, env_class=Configured, n_parallel_agents=1) as engine:
        (trajectory,) = play(engine, [{"question": "a"}])
    assert (trajectory.reward, trajectory.steps[0].info["emulator"]) == (0.5, "on")


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
