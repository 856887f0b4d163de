"""Ranks and engines on clusters whose GPUs Ray only counts: a test for each row of the page "On GPUs"."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from gpu_page import ROWS, Row
from pretended_gpus import place_name

from launch.settings.compose import compose
from launch.validation.resources import num_gpus

ROOT = Path(__file__).parents[3]
Device = tuple[str, str]


@pytest.fixture(scope="module")
def found(tiny_model: Path) -> dict[str, Any]:
    # A program of its own: this one has a cluster without GPUs. Not tmp_path: too long for sockets.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        target = Path(folder, "found.json")
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, [ROOT, ROOT / "tests", Path(__file__).parent])),
            "RAY_TMPDIR": folder,
            "TROUPE_HOME": folder,
        }
        program = Path(__file__).with_name("pretended_gpus.py")
        command = [sys.executable, str(program), str(target), str(tiny_model)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
        assert ended.returncode == 0, ended.stdout + ended.stderr[-6000:]
        places: dict[str, Any] = json.loads(target.read_text())
    return places


def devices(parts: list[Any]) -> list[list[Device]]:
    """The GPUs of each part, by their nodes."""
    return [[(node, number) for number in numbers] for node, numbers in parts]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.devices} {row.model} {len(row.settings)}")
def test_row_of_the_page_has_its_places(found: dict[str, Any], row: Row) -> None:
    config = compose(list(row.settings))
    places = found[place_name(row.nodes, config)]
    ranks, engines = devices(places["ranks"]), devices(places["engines"])
    assert [len(each) for each in ranks] == [1] * config.learner.num_workers
    assert [len(each) for each in engines] == [config.server.engine.num_gpus] * config.server.num_replicas
    of_ranks, of_engines = [*chain(*ranks)], [*chain(*engines)]
    assert len(set(of_ranks)) == len(of_ranks) and len(set(of_engines)) == len(of_engines), "each its own"
    if config.server.colocated:
        assert set(of_ranks) == set(of_engines), "each engine shares one with a rank"
    else:
        assert not set(of_ranks) & set(of_engines)
    assert places["free"] == sum(row.nodes) - num_gpus(config)


def test_two_runs_side_by_side_share_no_gpu(found: dict[str, Any]) -> None:
    parts = [part for run in found["side by side"] for part in (*run["ranks"], *run["engines"])]
    assert len(parts) == 8 and len(set(chain(*devices(parts)))) == 8
    assert found["side by side"][1]["free"] == 0


def test_recipe_starts_until_a_gpu_is_used(found: dict[str, Any]) -> None:
    ended = found["math_gpu"]
    text = " ".join(f"{ended['stdout']} {ended['stderr']}".split())
    assert "Ray: joined a running cluster." in text, ended
    assert re.search(r"finds no GPU on .*make install DEVICE=cuda", text), ended
    assert ended["status"] != 0, "2, or 1 where Ray ends a process whose thread calls it at the end"
