"""Server-sent events: in them the policy server streams its answers and their errors, and the page of
``launch.view`` gets its news."""

from __future__ import annotations

import json
from typing import Any

EVENTS = "text/event-stream"
"""The media type of a stream of events."""


def event(part: dict[str, Any]) -> str:
    """Format one event. Responses and Anthropic's messages name their events by their ``type``."""
    named = f"event: {part['type']}\n" if "type" in part else ""
    return f"{named}data: {json.dumps(part)}\n\n"
