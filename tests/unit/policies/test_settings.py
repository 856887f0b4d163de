"""Engine settings that make no sense are refused before anything is started."""

from __future__ import annotations

import pytest

from environments.errors import ConfigError
from policies.engines.vllm_settings import check_options


def test_unknown_cache_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache_after_publish='forget'.*recompute, keep"):
        check_options({"cache_after_publish": "forget"})
