"""The names and signatures that users' programs are written against. A change here is a breaking change."""

from __future__ import annotations

import importlib
import inspect

import pytest

PUBLIC_NAMES = {
    "environments": (
        "BaseEnv",
        "SingleTurnEnvironment",
        "MultiTurnEnvironment",
        "ToolEnvironment",
        "Action",
        "Step",
        "Trajectory",
        "TrajectoryGroup",
        "TerminationReason",
        "Dataset",
        "DatasetRegistry",
        "RewardOutput",
        "math_reward_fn",
        "search_reward_fn",
        "code_reward_fn",
        "compute_pass_at_k",
        "check_environment",
    ),
    "policies": ("BaseAgent", "MathAgent", "ToolAgent", "SamplingParams"),
    "actors": ("AgentExecutionEngine",),
    "launch": ("AgentTrainer", "TrainConfig"),
}

REQUIRED = inspect.Parameter.empty

TRAINER_PARAMETERS = {
    "agent_class": None,
    "env_class": None,
    "config": None,
    "train_dataset": None,
    "val_dataset": None,
    "agent_args": None,
    "env_args": None,
    "rollout": None,
    "curriculum": None,
}

ENGINE_PARAMETERS = {
    "agent_class": None,
    "env_class": None,
    "agent_args": None,
    "env_args": None,
    "rollout": None,
    "engine_name": "openai",
    "rollout_engine_args": None,
    "tokenizer": None,
    "sampling_params": None,
    "max_response_length": 8192,
    "max_prompt_length": 1024,
    "enforce_max_prompt_length": False,
    "n_parallel_agents": 64,
    "max_steps": 5,
    "trajectory_timeout": None,
    "overlong_filter": False,
    "retry_limit": 3,
    "api_retries": 3,
    "gamma": 1.0,
    "disable_thinking": False,
}


def defaults(function: object) -> dict[str, object]:
    parameters = inspect.signature(function).parameters
    return {name: each.default for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}


@pytest.mark.parametrize(("package", "names"), PUBLIC_NAMES.items())
def test_public_names_are_there(package: str, names: tuple[str, ...]) -> None:
    module = importlib.import_module(package)
    assert set(names) <= set(module.__all__)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []


def test_trainer_takes_what_it_took_in_the_reference() -> None:
    from launch import AgentTrainer

    assert defaults(AgentTrainer) == TRAINER_PARAMETERS
    assert defaults(AgentTrainer.train) == {"self": REQUIRED}


def test_engine_takes_arguments_of_the_references_names() -> None:
    """Most defaults are rLLM v0.1's, too. There, gamma was 0.2 and n_parallel_agents 1."""
    from actors import AgentExecutionEngine

    assert defaults(AgentExecutionEngine) == ENGINE_PARAMETERS
    assert list(defaults(AgentExecutionEngine.execute_tasks)) == ["self", "tasks", "results_file"]
    assert list(defaults(AgentExecutionEngine.execute_tasks_stream)) == ["self", "tasks", "results_file"]
    assert inspect.iscoroutinefunction(AgentExecutionEngine.execute_tasks)
    assert list(defaults(AgentExecutionEngine.close)) == ["self"]


@pytest.mark.parametrize("package", ["actors", "launch"])
def test_unknown_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match="AgentTrianer"):
        importlib.import_module(package).AgentTrianer  # noqa: B018
