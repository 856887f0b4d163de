"""Which sampler an engine uses, by name, and what each of them has to be told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from actors.sampling.sampler_actor import ServeSampler
from environments.bounds import check_choice
from environments.errors import ConfigError
from policies.agents.base import BaseAgent
from policies.openai_sampler import OpenAISampler
from policies.sampler import Sampler

ENGINE_NAMES = ("openai", "serve", "verl")


def sampler_factory(
    engine_name: str, args: Mapping[str, Any], tokenizer_path: str | None, api_retries: int
) -> Callable[[], Sampler]:
    """What makes the sampler, in whichever process calls it.

    Args:
        engine_name: one of ``ENGINE_NAMES``.
        args: its arguments, without those that follow.
        tokenizer_path: a tokenizer's folder or name, if one is known.
        api_retries: how often a request to an outside server is repeated.

    Raises:
        ConfigError: a name is unknown, or an argument missing or impossible.
    """
    check_choice("engine_name", engine_name, ENGINE_NAMES)
    if engine_name == "openai":
        return _openai_sampler(dict(args), tokenizer_path, api_retries)
    return _serve_sampler(dict(args), tokenizer_path)


def check_calls(agent: BaseAgent) -> None:
    """Refuse an agent that a policy server of ours cannot play: it returns text, and no calls read from it.

    Raises:
        ConfigError: no call of a tool would ever be seen.
    """
    if agent.needs_tool_calls:
        raise ConfigError(
            f"This {type(agent).__name__} takes tool calls only from a server that reads them itself, and a "
            "policy server returns the text that was sampled: have it read the text, with the parser_name of "
            "your model, such as 'qwen', or use engine_name='openai'."
        )


def _openai_sampler(
    args: dict[str, Any], tokenizer_path: str | None, api_retries: int
) -> Callable[[], Sampler]:
    optional = (
        "api_key",
        "timeout_seconds",
        "chat_template_kwargs",
        "extra_body",
        "default_headers",
        "model",
    )
    _check_engine_args("openai", args, required=("base_url",), optional=optional)
    make = partial(OpenAISampler, tokenizer_path=tokenizer_path, api_retries=api_retries, **args)
    make()  # refuses a wrong address here, not in another process
    return make


def _serve_sampler(args: dict[str, Any], tokenizer_path: str | None) -> Callable[[], Sampler]:
    if tokenizer_path is not None:
        args.setdefault("model_path", tokenizer_path)
    required = ("app_name", "model_path")
    _check_engine_args("serve", args, required=required, optional=("chat_template_kwargs",))
    return partial(ServeSampler, **args)


def _check_engine_args(
    engine_name: str, args: dict[str, Any], required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    for name in args:
        check_choice(f"engine_name={engine_name!r}: rollout_engine_args key", name, (*required, *optional))
    for name in required:
        if not args.get(name):
            given = ", ".join(name for name, value in args.items() if value is not None)  # no secrets
            raise ConfigError(
                f"engine_name={engine_name!r} needs rollout_engine_args={{{name!r}: ...}}; given: "
                f"{given or 'none'}."
            )
