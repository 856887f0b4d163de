"""``AgentExecutionEngine`` without Ray: what it refuses, and what it makes of trajectories."""

from __future__ import annotations

import asyncio
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from echo_engine import EchoServer, make_engine, play

from actors.engine import REFERENCE_ARGUMENTS, fill_returns
from environments import (
    Step,
    ToolEnvironment,
    Trajectory,
    math_reward_fn,
)
from environments.data.trajectory_file import TrajectoryFile
from environments.errors import ConfigError, DatasetError, SamplerError
from environments.tools.retrieval import LocalRetrievalTool
from policies import ToolAgent


def test_vllms_parser_needs_the_replicas_of_a_policy_server() -> None:
    arguments = {"agent_class": ToolAgent, "agent_args": {"tools": [], "parser_name": "vllm:hermes"}}
    with pytest.raises(ConfigError, match=r"vllm:hermes.*OpenAISampler has none.*engine_name='serve'"):
        make_engine(**arguments)


@pytest.mark.slow  # importing vLLM takes seconds
def test_unknown_parser_of_vllm_is_found_where_engine_is_made(tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'hermes'"):
        make_engine(
            agent_class=ToolAgent,
            agent_args={"tools": [], "parser_name": "vllm:hermse"},
            engine_name="serve",
            rollout_engine_args={"app_name": "policy", "model_path": str(tiny_model)},
        )


def test_no_tasks_are_no_trajectories() -> None:
    assert play(make_engine(), []) == []


def test_task_that_is_no_dict_is_refused() -> None:
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
        ({"trajectory_timeout": float("inf")}, "trajectory_timeout=inf .*None for two hours"),
        ({"gamma": float("nan")}, "gamma=nan .*between 0 and 1"),
        ({"max_steps": 0}, "max_steps=0"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_engine(**changes)


@pytest.mark.parametrize("gamma", [None, "0.9"])
def test_discount_that_is_no_number_is_refused(gamma: Any) -> None:
    with pytest.raises(TypeError, match="real number"):
        make_engine(gamma=gamma)


@pytest.mark.parametrize("name", REFERENCE_ARGUMENTS)
def test_argument_of_reference_is_answered_with_what_replaces_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"no argument '{name}'. {re.escape(REFERENCE_ARGUMENTS[name])}"):
        make_engine(**{name: None})


@pytest.mark.parametrize("refused", ["no trajectories", "locked"])
def test_results_file_that_is_refused_leaves_the_actors_alone(
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


def test_results_of_the_servers_earlier_model_are_not_reused(tmp_path: Path) -> None:
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
def test_calls_that_only_a_server_reads_are_refused_elsewhere(engine_name: str) -> None:
    arguments: dict[str, Any] = {
        "agent_class": ToolAgent,
        "engine_name": engine_name,
        "rollout_engine_args": {"app_name": "policy", "model_path": "m"},
    }
    make_engine(**arguments, agent_args={"tools": ["calculator"], "parser_name": "qwen"})
    with pytest.raises(ConfigError, match=r"ToolAgent takes tool calls only from a server.*parser_name"):
        make_engine(**arguments, agent_args={"tools": ["calculator"], "parser_name": "openai"})


def test_message_about_arguments_holds_no_secret() -> None:
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


def test_agent_that_cannot_be_made_is_an_error_at_once() -> None:
    with pytest.raises(ConfigError, match=r"agent_args=\['toolz'\].*GameAgent\.__init__"):
        make_engine(agent_args={"toolz": []})


def test_returns_are_discounted_from_the_end() -> None:
    trajectory = Trajectory(steps=[Step(reward=1.0), Step(reward=0.0), Step(reward=4.0)])
    fill_returns(trajectory, gamma=0.5)
    assert [step.mc_return for step in trajectory.steps] == [2.0, 2.0, 4.0]
