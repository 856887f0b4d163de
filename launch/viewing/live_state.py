"""The state of a run that goes on, for the page: ``launch.status`` watches it, in a process of its own.

Ray ends every process whose cluster has gone, and the page outlives the run.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

STATUS_COMMAND = (sys.executable, "-m", "launch.status", "--json", "--every", "2")
MAX_LINE_BYTES = 1 << 24
"""Bytes of one state: some hundred for each process and each rollout in play."""


async def states(run: Path, address: str | None) -> AsyncIterator[dict[str, Any]]:
    """The state of ``run`` every two seconds, as ``{"state": ...}``; at the end why there is none any more.

    Args:
        run: its folder.
        address: of its cluster; ``None`` finds it as ``launch.status`` does.
    """
    where = [] if address is None else ["--address", address]
    process = await asyncio.create_subprocess_exec(
        *STATUS_COMMAND, *where, stdin=PIPE, stdout=PIPE, stderr=PIPE, limit=MAX_LINE_BYTES
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        async for line in process.stdout:
            runs = json.loads(line)["runs"]
            here = [each for each in runs if Path(each["folder"]) == run.resolve()]
            if not here:
                yield {"end": _not_here(run, [each["folder"] for each in runs])}
                return
            yield {"state": here[0]}
        errors = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
        yield {"end": errors[-1] if errors else "The cluster of the run has ended."}
    finally:  # the page is left
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _not_here(run: Path, others: Sequence[str]) -> str:
    those = f"Others are: {', '.join(others)}." if others else "No other training is either."
    return f"{run} is not going on in this cluster. {those}"
