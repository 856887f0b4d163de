"""The checks of settings: a message names the setting, its value, and what would be right."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection

from environments.errors import ConfigError


def one_of(setting: str, value: str | None, allowed: Collection[str], more: str = "") -> None:
    """Refuse a name that is not ``allowed``; ``None`` is one that nobody has set."""
    if value is not None and value not in allowed:
        near = difflib.get_close_matches(value, allowed, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{setting}={value!r} is not one of {', '.join(allowed)}.{hint}{more}")


def within(setting: str, value: float | None, low: float, high: float, open_below: bool = False) -> None:
    """Refuse what is not finite or outside of [low, high], or (low, high] where ``open_below``."""
    if value is None:
        return
    if not math.isfinite(value) or not low <= value <= high or (open_below and value == low):
        above = "above" if open_below else "at least"
        below = f" and at most {high:g}" if math.isfinite(high) else ""
        raise ConfigError(f"{setting}={value} has to be a number {above} {low:g}{below}.")
