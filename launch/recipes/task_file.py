"""The workloads that need no module of one's own: of files, of an OpenEnv server, and of Harbor's tasks.

``dataset=tasks.jsonl agent=math reward=math``, ``demonstrations=chats.jsonl``,
``workload=openenv:http://host:8000``, or ``workload=harbor:FOLDER``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from actors.gateway.function import RolloutFunction
from actors.gateway.harbor_program import HarborProgram
from environments import CodeEnvironment, SingleTurnEnvironment
from environments.adapters.harbor import HarborEnvironment, ShellTools, harbor_tasks
from environments.adapters.nemo_gym import PARAMS, NemoGymRollout
from environments.adapters.openenv import (
    OpenEnvEnvironment,
    OpenEnvToolEnvironment,
    openenv_tasks,
    openenv_world,
)
from environments.adapters.openenv_server import end_server
from environments.chat_endpoint import is_web_address
from environments.data.conversation_file import read_conversations
from environments.data.dataset_files import READERS
from environments.data.datasets import Dataset, DatasetRegistry
from environments.data.task_columns import named_columns
from environments.errors import ConfigError, DatasetError
from environments.named_module import load_class, load_function
from environments.rewards import RewardFunction, code_reward_fn, math_reward_fn, search_reward_fn
from environments.rewards.base import unjudged
from environments.sandbox.base import Sandbox
from environments.types import Message
from launch.settings.tree import TrainConfig
from launch.workload import Workload, load_workload
from policies.agents.answering import PromptAgent
from policies.agents.base import BaseAgent
from policies.agents.game import GameAgent
from policies.agents.tool import ToolAgent

AGENTS = {
    "math": "policies.agents.answering:MathAgent",
    "code": "policies.agents.answering:CodingAgent",
    "messages": "policies.agents.answering:PromptAgent",
}
OUTSIDE = "outside"
"""Name of the agent whose program runs elsewhere."""
NEMO_GYM = "nemo_gym:"
"""The beginning of an agent whose tools and rewards are those of a NeMo-Gym server."""
OPENENV = "openenv:"
"""The beginning of a workload that is an OpenEnv server."""
HARBOR = "harbor:"
"""The beginning of a workload that is a folder of Harbor's tasks."""
HARBOR_PROMPT = (
    "You work in a directory on Linux. Read the task, look at the files, change them with the tools, and run "
    "what you have changed. When the task is done, call no tool and say in one sentence what you did."
)
NUM_TRAIN_SEEDS, NUM_TEST_SEEDS = 1000, 100
"""Tasks of an OpenEnv server that lists none."""
REWARDS: dict[str, RewardFunction] = {
    "math": math_reward_fn,
    "code": code_reward_fn,
    "search": search_reward_fn,
}


def workload_of(config: TrainConfig) -> Workload:
    """Make the workload that a configuration names: of a file of tasks, of a module, of an OpenEnv server, or
    of a folder of Harbor's tasks, with the demonstrations of another file if it names one.

    Raises:
        ConfigError: it names both, or neither, or one that cannot be made.
        DatasetError: a file cannot be read, or lacks a question or an answer.
    """
    own = {"held_out": config.held_out, "agent": config.agent, "reward": config.reward}
    for name, value in own.items():
        if value is not None and config.dataset is None:
            raise ConfigError(
                f"{name}={value} belongs to a dataset: set dataset=tasks.jsonl, or leave it out."
            )
    if config.demonstrations is None:
        return _tasks_of(config)
    conversations, sentence = read_conversations(Path(config.demonstrations))
    sys.stdout.write(f"{sentence}\n")
    if config.workload is None and config.dataset is None:
        return conversation_workload(conversations)
    return replace(_tasks_of(config), demonstrations=conversations)


def conversation_workload(conversations: list[list[Message]]) -> Workload:
    """The workload of conversations to imitate: what stands before their first answers are its tasks, and
    nobody judges other answers to them.
    """
    return Workload(
        agent_class=PromptAgent,
        env_class=SingleTurnEnvironment,
        env_args={"reward_fn": unjudged},
        train_dataset=Dataset(
            {"messages": list(takewhile(lambda message: message["role"] != "assistant", each))}
            for each in conversations
        ),
        demonstrations=conversations,
    )


def _tasks_of(config: TrainConfig) -> Workload:
    if config.dataset is not None:
        if config.workload is not None:
            raise ConfigError(
                f"workload={config.workload} and dataset={config.dataset} both name the tasks: set one "
                "of them, and no recipe beside a dataset."
            )
        return task_file_workload(
            config.dataset, config.held_out, config.agent, config.reward, seed=config.seed
        )
    if config.workload is not None and config.workload.startswith(OPENENV):
        return openenv_workload(config.workload.removeprefix(OPENENV), config.seed)
    if config.workload is not None and config.workload.startswith(HARBOR):
        return harbor_workload(config.workload.removeprefix(HARBOR), config.seed)
    return load_workload(config.workload, config.seed)


def task_file_workload(
    dataset: str, held_out: str | Mapping[str, str] | None, agent: str | None, reward: str | None, seed: int
) -> Workload:
    """Make the workload of a file, or of a registered data set, and print what of its columns is used.

    Args:
        dataset: a file, or ``name`` or ``name/split`` of the ``DatasetRegistry``.
        held_out: the same, for evaluations, or several by their names.
        agent: one of ``AGENTS``, or "module:Class"; None is ``messages`` where questions are conversations,
            else ``math``. "outside", "outside:PORT" or "outside:HOST:PORT" hands the tasks to programs
            elsewhere; "nemo_gym:http://host:port" plays NeMo-Gym's against its resource server.
        reward: one of ``REWARDS``, or "module:function"; None for programs elsewhere, which send theirs.

    Raises:
        ConfigError: a name is unknown, or the agent does not fit the questions.
        DatasetError: the data cannot be read, or have no question.
    """
    if agent is not None and agent.startswith(NEMO_GYM):
        return nemo_gym_workload(agent.removeprefix(NEMO_GYM), dataset, held_out, reward, seed)
    tasks = _tasks("dataset", dataset)
    are_conversations = "messages" in tasks[0]
    agent = agent or ("messages" if are_conversations else "math")
    held_out_tasks = _held_out(held_out, _tasks)
    if agent.partition(":")[0] == OUTSIDE:
        return Workload(
            rollout=_outside(agent, reward), train_dataset=tasks.shuffle(seed), val_dataset=held_out_tasks
        )
    if (agent == "messages") != are_conversations and agent in AGENTS:
        shape = "a list of messages" if are_conversations else "a text"
        fitting = "messages" if are_conversations else "math or agent=code"
        raise ConfigError(
            f"agent={agent} does not fit {dataset}, whose question is {shape}: set agent={fitting}."
        )
    return Workload(
        agent_class=load_class("agent", agent, AGENTS, BaseAgent),
        env_class=CodeEnvironment if agent == "code" else SingleTurnEnvironment,
        env_args={"reward_fn": _reward(reward)},
        train_dataset=tasks.shuffle(seed),
        val_dataset=held_out_tasks,
    )


def nemo_gym_workload(
    server: str, dataset: str, held_out: str | Mapping[str, str] | None, reward: str | None, seed: int
) -> Workload:
    """Make the workload of a file of NeMo-Gym's tasks, which the resource server at ``server`` plays and
    judges.

    Raises:
        ConfigError: there is a reward function too, or ``server`` is no address.
        DatasetError: a file cannot be read, or a task is none of NeMo-Gym's.
    """
    if reward is not None:
        raise ConfigError(f"reward={reward} has no effect with agent={NEMO_GYM}{server}: the server judges.")
    if not is_web_address(server):
        raise ConfigError(f"agent={NEMO_GYM}{server} has no address: write {NEMO_GYM}http://host:port.")

    def tasks(setting: str, name: object) -> Dataset:
        rows = _rows(setting, name)
        for number, row in enumerate(rows):
            if not isinstance(row.get(PARAMS), dict) or "input" not in row[PARAMS]:
                raise DatasetError(
                    f"{name}, row {number} has no {PARAMS} with an input, as NeMo-Gym's tasks have: "
                    f"it has {', '.join(row)}."
                )
        return rows

    return Workload(
        rollout=NemoGymRollout(server),
        train_dataset=tasks("dataset", dataset).shuffle(seed),
        val_dataset=_held_out(held_out, tasks),
    )


def openenv_workload(server: str, seed: int) -> Workload:
    """Make the workload of ``server``, as ``Episode`` describes it, and print what is played.

    The tasks are the server's: of its first split for training, else of the first, and the next one is
    held out, if there is one. Where it lists none, they are seeds.

    Raises:
        EnvironmentFailure: the server cannot be reached or started.
    """
    try:
        world, tasks = openenv_world(server), openenv_tasks(server)
    finally:
        end_server(server)  # each process that plays has its own
    if not tasks:
        rows = [{"seed": number} for number in range(NUM_TRAIN_SEEDS + NUM_TEST_SEEDS)]
        tasks = [
            Dataset(rows[:NUM_TRAIN_SEEDS], split="train"),
            Dataset(rows[NUM_TRAIN_SEEDS:], split="test"),
        ]
    training, held_out = tasks[0], tasks[min(1, len(tasks) - 1)]
    text = world.text_field
    sys.stdout.write(
        f"{OPENENV}{server}: {len(training)} tasks of the split {training.split!r} to train on, "
        f"{len(held_out)} of {held_out.split!r} for evaluations; the agent "
        + (f"writes {text!r}.\n" if text else f"calls {', '.join(tool.name for tool in world.tools)}.\n")
    )
    own = {"text_field": text} if text else {"tools": world.tools}
    return Workload(
        agent_class=GameAgent if text else ToolAgent,
        agent_args={} if text else {"tools": world.tools},
        env_class=OpenEnvEnvironment if text else OpenEnvToolEnvironment,
        env_args={"server": server, "instructions": world.description, **own},
        train_dataset=training.shuffle(seed),
        val_dataset=held_out,
    )


def harbor_workload(
    folder: str, seed: int, sandbox: Sandbox | None = None, program: HarborProgram | None = None
) -> Workload:
    """Make the workload of the tasks in ``folder``, and print which of them are played.

    Where there are folders ``train`` and ``test`` in it, the tasks of the latter are held out; else
    evaluations play the same tasks as the training. ``sandbox`` is that of ``HarborEnvironment``; a
    ``program`` plays in the place of a ``ToolAgent``, in the local sandbox.

    Raises:
        DatasetError: no task can be played.
    """
    root = Path(folder)
    names = ("train", "test") if (root / "train").is_dir() and (root / "test").is_dir() else ("",)
    found = [harbor_tasks(root / name, is_built=sandbox is not None) for name in names]
    for name, (tasks, rejected) in zip(names, found, strict=True):
        sys.stdout.write(f"{HARBOR}{root / name}: {len(tasks)} tasks; {len(rejected)} cannot be played.\n")
        sys.stdout.writelines(f"  {reason}\n" for reason in rejected.values())
    training, held_out = found[0][0].shuffle(seed), found[-1][0]
    if program is not None:
        return Workload(rollout=program, train_dataset=training, val_dataset=held_out)
    return Workload(
        agent_class=ToolAgent,
        agent_args={"tools": ShellTools().tools, "system_prompt": HARBOR_PROMPT},
        env_class=HarborEnvironment,
        env_args={} if sandbox is None else {"sandbox": sandbox},
        train_dataset=training,
        val_dataset=held_out,
    )


def _outside(agent: str, reward: str | None) -> RolloutFunction:
    """Start the server at which programs elsewhere fetch the tasks, and print where it is."""
    from actors.gateway.session_server import SESSIONS_PORT, SessionServer  # it loads an HTTP server and Ray

    _, _, address = agent.partition(":")
    host, _, port = (address or str(SESSIONS_PORT)).rpartition(":")
    if not port.isdecimal():
        raise ConfigError(f"agent={agent}: {port!r} is no port. Write agent={OUTSIDE}:{SESSIONS_PORT}.")
    if reward is not None:
        raise ConfigError(f"reward={reward} has no effect with agent={agent}: programs send their rewards.")
    server = SessionServer(int(port), host or None)
    sys.stdout.write(f"Programs fetch tasks by POST {server.url}/sessions.\n")
    return server.rollout


def _held_out(
    names: str | Mapping[str, str] | None, tasks: Callable[[str, object], Dataset]
) -> Dataset | dict[str, Dataset] | None:
    if isinstance(names, Mapping):
        return {str(name): tasks("held_out", each) for name, each in names.items()}
    return None if names is None else tasks("held_out", names)


def _rows(setting: str, name: object) -> Dataset:
    if not isinstance(name, str):
        raise ConfigError(
            f"{setting}={name!r} names no tasks: write a file or a registered data set, or several held-out "
            "ones by their names, such as held_out={math: math500, code: code.jsonl}."
        )
    path = Path(name)
    if path.suffix.lower() in READERS:
        return Dataset.load_data(path)
    known, _, split = name.partition("/")
    return DatasetRegistry.load_dataset(known, split or ("train" if setting == "dataset" else "test"))


def _tasks(setting: str, name: object) -> Dataset:
    tasks, sentence = named_columns(_rows(setting, name), str(name))
    sys.stdout.write(f"{sentence}\n")
    return tasks


def _reward(name: str | None) -> RewardFunction:
    choices = f'Choose one of {", ".join(REWARDS)}, or name your own as "module:function".'
    if name is None:
        raise ConfigError(f"A dataset needs a reward function: set reward=math, for example. {choices}")
    if name in REWARDS:
        return REWARDS[name]
    if ":" not in name:
        raise ConfigError(f"reward={name!r} is unknown. {choices}")
    return load_function(f"reward={name!r}", name)
