"""Engine settings that make no sense are refused before anything is started."""

from __future__ import annotations

import pytest

from environments.errors import ConfigError
from policies.engines.vllm_settings import check_options
from policies.settings import EngineConfig


def test_unknown_cache_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache_after_publish='forget'.*recompute, keep"):
        check_options({"cache_after_publish": "forget"})


@pytest.mark.parametrize(
    ("name", "torch_name"),
    [("half", "float16"), ("bfloat16", "bfloat16"), ("float", None), ("auto", None), (None, None)],
)
def test_dtype_of_engines_is_one_of_vllms(name: str | None, torch_name: str | None) -> None:
    options = {} if name is None else {"dtype": name}
    check_options(options)
    assert EngineConfig(options=options).half_dtype == torch_name


@pytest.mark.parametrize("name", ["bf16", "load", "int8"])
def test_unknown_dtype_is_refused_before_anything_starts(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"server.engine.options.dtype='{name}'.*bfloat16, half"):
        check_options({"dtype": name})
    assert EngineConfig(name="own:Engine", options={"dtype": name}).half_dtype is None, "another engine's"
