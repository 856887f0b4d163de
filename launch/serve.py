"""``python -m launch.serve``: serve a model to OpenAI clients until Ctrl-C."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from actors.serving.keys import KEYS_VARIABLE, access_keys
from actors.settings import MODEL_NAME, ServedModel, ServerConfig, pinned_name
from environments.bounds import check_bounds
from environments.command_name import command_name
from environments.errors import ConfigError
from launch.run_folder.model_paths import (
    RUNS,
    adapter_folder,
    model_folder,
    newest_checkpoint,
    served_model,
    versions_of,
)
from launch.settings.command import Command
from launch.settings.tree import LIMITS, TrainConfig, without_training
from launch.validation.policies import check_one_policy
from launch.validation.resources import check_gpus
from launch.validation.serving import (
    DEFAULT_PORT,
    check_address,
    check_base_model,
    check_engine,
    check_pictures,
    check_tool_parsers,
)
from launch.validation.settings import check_fleet
from launch.validation.trial import try_first_task
from launch.validation.workload import check_classes
from launch.workload import Workload, load_workload
from policies.agent_api.frontend import PREFIX
from policies.model_files import check_loadable
from policies.settings import ADAPTER, adapter_config

SERVE_CHECK_SECONDS = 5.0
"""Seconds between two checks that all parts which answers need are alive."""


def serve(config: TrainConfig) -> None:
    """Serve ``model.path``, or the newest checkpoint, until SIGINT or SIGTERM.

    Raises:
        TroupeError: something is wrong that its message explains, or a part has died that answers need.
    """
    from actors.ray_tools.connect import joins_cluster
    from launch.cluster.serve_address import check_answers, client_url

    port = DEFAULT_PORT if config.server.http_port is None else config.server.http_port
    config = replace(config, server=replace(config.server, http_port=port))
    check_bounds(config)
    if not joins_cluster():  # whose Serve may have the port already, for whoever is served there
        check_address(config.server.http_host, port)
    check_serving(config)
    workload = None if config.workload is None else load_workload(config.workload, config.seed)
    if workload is not None:
        check_served_agent(config, workload)
    server, model, pinned = with_models(config)
    from launch.cluster.served_model import policy_app

    sys.stdout.write(f"Loading {model.path} ({server.num_replicas} replica(s)).\n")
    fleet = config.fleet if workload is not None else replace(config.fleet, num_actors=0)
    config = replace(config, server=server, fleet=fleet)
    with policy_app(config, model, workload, pinned) as (app, start):
        start()
        url = client_url(server.http_host, port)
        check_answers(url)
        sys.stdout.write(greeting(url, [*server.model_names, *app.agents], server))
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):  # the way in which serving is meant to end
            while True:
                app.check()
                time.sleep(SERVE_CHECK_SECONDS)
        sys.stdout.write("\nStopping.\n")


def check_serving(config: TrainConfig) -> None:
    """Find what would fail later in serving, but for a taken port. Raises ``ConfigError``."""
    check_bounds(config)
    check_fleet(config)
    check_engine(config)
    check_gpus(without_training(config))
    access_keys(config.server)
    check_base_model(config)
    check_tool_parsers(config, None)


def check_served_agent(config: TrainConfig, workload: Workload) -> None:
    """Find what would keep the workload's agent from answering clients.

    Raises:
        ConfigError: it does not say which task a message is, or a class is not usable.
        AgentError, ContractError: the agent or the environment broke its contract.
    """
    check_classes(workload)
    check_one_policy(workload)
    if workload.task_from_message is None:
        raise ConfigError(
            "The workload has no task_from_message, so its agent cannot answer clients: add it "
            "(.docs/pages/guide.md shows how), or leave recipe and workload out to serve the policy alone."
        )
    check_tool_parsers(config, workload)
    try_first_task(workload, workload.train_dataset)


def with_models(config: TrainConfig) -> tuple[ServerConfig, ServedModel, list[ServedModel]]:
    """``config.server`` with the folders of its adapters, the policy, and its older versions; all can be
    loaded.

    Raises:
        ConfigError: one of them is missing, or cannot be served.
    """
    model_path = chosen_model(config.model.path)
    options = config.model.chat_template_kwargs
    check_loadable(model_path, options)
    check_pictures(model_path, config.server.engine)
    server = replace(config.server, adapters=served_adapters(config.server.adapters, model_path))
    versions = served_versions(server.versions, model_path)
    pinned = [served_model(folder, options, pinned_name(name)) for name, folder in versions.items()]
    return server, served_model(model_path, options), pinned


def chosen_model(path: str | None) -> str:
    """The folder of ``model.path``, or of the newest checkpoint. Raises ``ConfigError`` without either."""
    if path is not None:
        return model_folder(path)
    checkpoint = newest_checkpoint(RUNS)
    if checkpoint is None:
        raise ConfigError(
            f"model.path is not set and {RUNS}/ holds no checkpoint: run `make train` first, or name a run, "
            "a checkpoint, a Hugging Face folder or name, such as model.path=runs/my-run."
        )
    sys.stdout.write(f"model.path is not set: serving the newest checkpoint, {checkpoint}.\n")
    return model_folder(str(checkpoint))


def served_adapters(adapters: Mapping[str, str], model_path: str) -> dict[str, str]:
    """The folders of ``server.adapters`` by name. Raises ``ConfigError`` for what cannot be served."""
    if MODEL_NAME in adapters:
        raise ConfigError(f"server.adapters has {MODEL_NAME!r}, the model's own name: choose another one.")
    folders = {name: adapter_folder(name, path) for name, path in adapters.items()}
    checkpoint = Path(model_path).resolve().parent
    for name, folder in folders.items():
        # Any checkpoint of one run: each holds the same adapter, merged.
        if (checkpoint / ADAPTER).exists() and Path(folder).resolve().parent.parent == checkpoint.parent:
            raise ConfigError(
                f"server.adapters={{{name}: {adapters[name]}}} would be added twice: into the model "
                f"{model_path} it is merged already. Name the model that it was trained on by model.path."
            )
        base = adapter_config(folder).get("base_model_name_or_path")
        if base and Path(base).resolve() != Path(model_path).resolve():
            sys.stdout.write(f"The adapter {name!r} was trained on {base}, and is served on {model_path}.\n")
    return folders


def served_versions(versions: Sequence[str], model_path: str) -> dict[str, str]:
    """The models that ``server.versions`` names. Raises ``ConfigError`` for what is not there."""
    there = versions_of(model_path) if versions else {}
    for name in versions:
        if name not in there:
            known = ", ".join(f"{each} ({Path(folder).parent.name})" for each, folder in there.items())
            raise ConfigError(
                f"server.versions={versions} names {name!r}, which is not in the run of {model_path}. "
                f"There are: {known or 'none, for this is no checkpoint'}. In training, run.checkpoints.kept "
                "keeps more of them, and run.best_metric the best one."
            )
    return {name: there[name] for name in versions}


def greeting(url: str, models: Sequence[str], server: ServerConfig) -> str:
    """Text on what can be done with the server now."""
    # The agent, if there is one: a policy alone lacks the instructions and tools that it was trained with.
    body = json.dumps({"model": models[-1], "messages": [{"role": "user", "content": "What is 12+34?"}]})
    key = " -H 'Authorization: Bearer KEY'" if access_keys(server) else ""
    return f"""\
Serving {", ".join(models)} at {url}. Try it:

  curl {url}/chat/completions -H 'Content-Type: application/json'{key} -d '{body}'

{agent_addresses(url, models)}In the browser: {command_name("view")} RUN --server {url}
More requests per second: raise server.num_replicas={server.num_replicas}, or let Serve: server.max_replicas.
Longer conversations: raise server.engine.max_model_tokens={server.engine.max_model_tokens}; it costs memory.
Another port: server.http_port={DEFAULT_PORT + 1}. From other machines, with a key:
{KEYS_VARIABLE}=name:key, server.http_host=0.0.0.0 and server.access.hosts=[{socket.gethostname()}].
Ctrl-C ends it.
"""


def agent_addresses(url: str, models: Sequence[str]) -> str:
    """Lines with the addresses of served agents for other agents."""
    names = [model.removeprefix(PREFIX) for model in models if model.startswith(PREFIX)]
    if not names:
        return ""
    root = url.removesuffix("/v1")
    found = importlib.util.find_spec("a2a") is not None
    a2a = ", ".join(f"{root}/a2a/{name}" for name in names) if found else "pip install 'troupe[a2a]' adds it"
    return f"For other agents: A2A: {a2a}. MCP: {root}/mcp.\n\n"


COMMAND = Command(
    name="serve",
    summary=__doc__,
    work=serve,
    settings=(
        "recipe",
        "workload",
        "seed",
        "model",
        *(f"rollout.{each}" for each in LIMITS),
        "fleet",
        "server",
    ),
    left_out={
        "server.colocated": "Engines take turns with a learner in training only.",
        "server.weights": "Weights are published in training only.",
    },
)


main = COMMAND.run
"""Function that runs the command with its arguments, and returns its exit status."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
