"""The README of a folder names files that exist, and its answers to "where is ..." are the only ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
READMES = [
    path
    for layer in ("environments", "policies", "actors", "launch")
    for path in (ROOT / layer).rglob("README.md")
]

STAGES = ("base", "expert_iteration", "policy_update", "preferences", "reinforce", "warm_start")


@pytest.mark.parametrize("readme", READMES, ids=lambda path: str(path.parent.relative_to(ROOT)))
def test_files_that_a_folder_names_exist(readme: Path) -> None:
    named = re.findall(r"`([a-z0-9_/]+\.(?:py|md|yaml))`", readme.read_text(encoding="utf-8"))
    assert named
    for name in named:
        if name.startswith("my_"):  # a file of the reader's own
            continue
        assert (readme.parent / name).is_file() or (ROOT / name).is_file(), f"{readme} names {name}"


@pytest.mark.parametrize(
    ("code", "only"),
    [
        (r"\bDefinition\(\n", ["policies/learning/algorithms.py"]),  # an algorithm is added
        (
            r"\(WeightTransport\)",
            [f"actors/weights/{name}.py" for name in ("deltas", "files", "nccl", "transport")],
        ),
        (r"\(Engine\)", ["policies/engines/vllm.py"]),
        (
            r"class \w+\((PolicyUpdate|Supervised)?Stage\b",
            [f"launch/training/stages/{name}.py" for name in STAGES],
        ),
        (r"start_actor\(\s*RolloutFleet\b", ["actors/rollouts/service.py"]),  # a fleet is started
        (r"\bray\.init\(", ["actors/ray_tools/connect.py"]),
    ],
)
def test_there_is_one_place_for_one_thing(code: str, only: list[str]) -> None:
    layers = ("environments", "policies", "actors", "launch")
    modules = [path for layer in layers for path in (ROOT / layer).rglob("*.py")]
    found = [path for path in modules if re.search(code, path.read_text(encoding="utf-8"))]
    assert sorted(str(path.relative_to(ROOT)) for path in found) == only
