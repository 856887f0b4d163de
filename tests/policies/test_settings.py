"""Engine settings that make no sense are refused before anything is started."""

from __future__ import annotations

import pytest

from environments.errors import ConfigError
from policies.settings import EngineConfig


def test_an_unknown_cache_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache_after_publish='forget'.*recompute, keep"):
        EngineConfig(cache_after_publish="forget")


def test_scheduling_that_would_blur_the_versions_of_tokens_is_refused() -> None:
    with pytest.raises(ConfigError, match="async_scheduling"):
        EngineConfig(vllm={"async_scheduling": True})
    EngineConfig(vllm={"async_scheduling": False})


@pytest.mark.parametrize("name", ["max_loras", "logprobs_mode"])
def test_what_the_engine_decides_is_no_setting(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"vllm\.{name} cannot be set"):
        EngineConfig(vllm={name: 1})
