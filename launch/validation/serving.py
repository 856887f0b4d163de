"""Requirements of serving on the machine, and on the engine's and the model's settings."""

from __future__ import annotations

import socket
from importlib.util import find_spec

from environments.errors import ConfigError
from launch.run_folder.model_paths import model_folder
from launch.settings.tree import TrainConfig, algorithm_of
from launch.workload import Workload
from policies.agents.parsers import get_tool_parser
from policies.engines.base import Engine, engine_class
from policies.engines.tool_calls import check_reasoning_name, check_served_parsers
from policies.learning.verl.fields import NUM_EXPERTS
from policies.model_files import config_of
from policies.pictures import reads_pictures
from policies.settings import EngineConfig

DEFAULT_PORT = 8000
OF_TORCHVISION = {
    *("gemma3", "glm4v", "internvl", "llava", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5")
}
"""Models for pictures whose module in vLLM 0.29 imports torchvision, by their type. SmolVLM's does not."""


def check_engine(config: TrainConfig) -> None:
    """The engine exists and can act on all of its settings, as Serve on theirs. Raises ``ConfigError``."""
    server = config.server
    engine_class(server.engine).check_config(server.engine, server.adapters)
    if server.most_replicas < server.num_replicas:
        raise ConfigError(
            f"server.max_replicas={server.max_replicas} is below server.num_replicas={server.num_replicas}, "
            "the fewest that there are: raise it, or leave it out."
        )


def check_colocation(config: TrainConfig) -> None:
    """Engines and learner can take turns on the same devices. Raises ``ConfigError``."""
    server, learner, engine = config.server, config.learner, config.server.engine
    if not server.colocated:
        return
    shared = "server.colocated=true lets the engines sleep while the learner learns: "
    if config.rollout.max_staleness:
        raise ConfigError(
            f"{shared}with rollout.max_staleness={config.rollout.max_staleness} rollouts go on then. Set "
            "rollout.max_staleness=0, or server.colocated=false with devices of their own."
        )
    for name, value in (
        ("evaluation.num_replicas", config.evaluation.num_replicas),
        ("server.max_replicas", server.max_replicas),
    ):
        if value:
            raise ConfigError(f"{shared}{name}={value} adds engines on other devices. Leave it out.")
    own = engine_class(engine)
    if own.sleep is Engine.sleep or own.wake is Engine.wake:
        raise ConfigError(
            f"{shared}server.engine.name={engine.name!r} cannot sleep and wake. Give it both methods of "
            "policies.engines.base.Engine, or set server.colocated=false."
        )
    on_gpu = learner.device == "cuda"
    if on_gpu != bool(engine.num_gpus):
        raise ConfigError(
            f"{shared}learner.device={learner.device} and server.engine.num_gpus={engine.num_gpus:g} "
            "share no device. Set learner.device=cuda server.engine.num_gpus=1, or learner.device=cpu "
            "server.engine.num_gpus=0."
        )
    if on_gpu and (engine.num_gpus != 1 or learner.num_workers != server.num_replicas):
        raise ConfigError(
            f"{shared}an engine shares one GPU with a rank, and learner.num_workers={learner.num_workers}, "
            f"server.num_replicas={server.num_replicas} and server.engine.num_gpus={engine.num_gpus:g}. Set "
            "the first two to the same number, and the last to 1."
        )
    if on_gpu and algorithm_of(config).uses_critic:
        raise ConfigError(
            f"{shared}the critic of algorithm.name={config.algorithm.name} would need GPUs of its own. "
            "Choose an algorithm without one, such as grpo, or set server.colocated=false."
        )


def check_address(host: str, port: int, setting: str = "server.http_port=") -> None:
    """Check that the address can be listened on. Raises ``ConfigError``."""
    with socket.socket() as probe:
        # As servers do: connections that were closed a moment ago do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"Port {port} of {host} cannot be listened on ({error}): choose another one, such as "
                f"{setting}{min(port + 1, 65535)}, or end the program that has it."
            ) from error


def check_base_model(config: TrainConfig) -> None:
    """Adapters are added to a model that is named. Raises ``ConfigError``."""
    if config.server.adapters and config.model.path is None:
        raise ConfigError(
            f"server.adapters={config.server.adapters} needs to know what they are added to: name the model "
            "that they were trained on by model.path."
        )


def check_pictures(folder: str, engine: EngineConfig) -> None:
    """The engine takes the requests of a model that reads pictures. Raises ``ConfigError``."""
    if engine.name == "vllm" and engine.options.get("speculative_config") and reads_pictures(folder):
        raise ConfigError(
            f"server.engine.options.speculative_config={engine.options['speculative_config']} with the model "
            f"in {folder}, which reads pictures: the token that stands for one is kept from being sampled by "
            "a logit_bias, and vLLM refuses those in speculative decoding. Leave the option out."
        )


def check_publishing(config: TrainConfig) -> None:
    """The engines can load this model, and take new weights of it.

    vLLM 0.29 loads new weights layer by layer. On a CPU that leaves experts as they were, and its latent
    attention (DeepSeek's) differs from transformers by 0.3 in log-probabilities.

    Raises:
        ConfigError: they do not.
    """
    path, engine = config.model.path, config.server.engine
    if path is None or engine.name != "vllm" or not config.server.num_replicas:
        return
    check_pictures(model_folder(path), engine)
    if engine.num_gpus:
        return
    shape = config_of(model_folder(path))
    if shape.get("model_type") in OF_TORCHVISION and find_spec("torchvision") is None:
        raise ConfigError(
            f"model.path={path} has model_type={shape['model_type']}: vLLM needs torchvision for it, as it "
            "reads pictures, and it is not installed. Choose a model for text alone, install torchvision's "
            "build for this torch, or set stages=[warm_start] without rollouts."
        )
    shape = shape.get("text_config") or shape
    for name in (*NUM_EXPERTS, "kv_lora_rank"):
        if shape.get(name):
            raise ConfigError(
                f"model.path={path} has {name}={shape[name]}: vLLM's CPU build does not load new weights "
                "into experts and latent attention. Choose a dense model, an engine on a GPU "
                "(server.engine.num_gpus=1, which nobody has run), or stages=[warm_start] without rollouts."
            )


def check_tool_parsers(config: TrainConfig, workload: Workload | None) -> None:
    """The server's parsers of tool calls and thoughts can start, and the one of the agent's tool calls.

    Raises:
        ConfigError: one cannot, or reads no calls.
        AgentError: the agent cannot be made.
    """
    check_server_parser(config.server.tool_parser)
    check_reasoning_name(config.server.reasoning_parser)
    agents = None if workload is None else workload.pair.make_agent().served_parser
    names = [config.server.tool_parser, agents]
    path = config.model.path
    folder = None if path is None else model_folder(path)
    check_served_parsers(names, folder, config.server.reasoning_parser)


def check_server_parser(name: str | None) -> None:
    """``server.tool_parser`` names a parser that reads a text. Raises ``ConfigError``."""
    if name is None:
        return
    parser = get_tool_parser(name, "server.tool_parser")
    if not (parser.reads_text or parser.served_name):
        raise ConfigError(f"server.tool_parser={name!r} reads no text: name your model's, or leave it out.")
