"""Engine settings that make no sense are refused before anything is started."""

from __future__ import annotations

import pytest

from environments.errors import ConfigError
from policies.settings import EngineConfig


def test_unknown_cache_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache_after_publish='forget'.*recompute, keep"):
        EngineConfig(cache_after_publish="forget")
