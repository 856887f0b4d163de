"""Samplers by the names of their engines."""

from __future__ import annotations

from environments.errors import ConfigError
from policies.agents.base import BaseAgent
from policies.sampler import Sampler

SAMPLERS = {
    "openai": "policies.openai_sampler:OpenAISampler",
    "serve": "actors.sampling.serve_sampler:ServeSampler",
    "verl": "actors.sampling.serve_sampler:ServeSampler",
}


def check_calls(agent: BaseAgent, sampler: type[Sampler]) -> None:
    """Raise ``ConfigError`` if the agent waits for tool calls that the sampler leaves in the text, or names
    policies to one that has one model.
    """
    if tuple(agent.policies) != ("",) and not sampler.serves_policies:
        raise ConfigError(
            f"This {type(agent).__name__} is played by the policies {', '.join(agent.policies)}, and "
            f"{sampler.__name__} samples one model: use engine_name='serve' with an app_name for each, or "
            "leave the agent's policies out."
        )
    if agent.served_parser is not None and not sampler.serves_parsers:
        raise ConfigError(
            f"{agent.served_parser} is for the replicas of a policy server, and {sampler.__name__} has none: "
            "use engine_name='serve', or parser_name='openai' and the outside server's own tool parser."
        )
    if agent.needs_tool_calls and not sampler.reads_tool_calls:
        raise ConfigError(
            f"This {type(agent).__name__} takes tool calls only from a server that reads them itself, and "
            f"{sampler.__name__} returns the text that was sampled: have it read the text, with the "
            "parser_name of your model, such as 'qwen', or use engine_name='openai'."
        )
