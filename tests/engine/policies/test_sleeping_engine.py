"""vLLM's engine on the CPU in the learner's turn: its cache is given back, and its answers stay, also where
its weights are dropped as on a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from sleeping_engine import CACHE_BYTES

ROOT = Path(__file__).parents[3]


def test_sleeping_engine_gives_back_what_it_can_load(tiny_model: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sleeping_engine.py")), str(tiny_model)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    awake, asleep, again = found["sizes"]
    assert 0.9 * CACHE_BYTES < awake - asleep < 1.2 * CACHE_BYTES
    assert abs(again - awake) < 0.1 * CACHE_BYTES
    assert not found["answers_asleep"]
    assert found["answers"][0] == found["answers"][1], "the same tokens and log-probabilities"
    dropped = found["dropped"]
    first, rested, published, kept, changed, again = dropped["answers"]
    assert dropped["levels"] == [1, 2, 2], "before a publish the engine's own weights are all that there is"
    assert first == rested and published == kept and changed == again
    assert first != published != changed
