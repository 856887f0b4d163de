"""The programs that READMEs and pages show run as they stand, and their links lead somewhere."""

from __future__ import annotations

import asyncio
import importlib
import operator
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from shown_programs import (
    CHECK,
    COLLECT,
    COMMANDS,
    GUIDE,
    HTTP,
    MIGRATION,
    OWN,
    ROOT,
    SHOP,
    SOLVE,
    SOLVE_BY_PROGRAM,
    TRAIN,
    text_of,
)
from test_folder_readmes import READMES

from actors.gateway.function import pair_of
from actors.rollouts.journal import Journal
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, run_rollout
from environments import TerminationReason
from launch.settings.compose import compose
from launch.settings.tree import TrainConfig
from launch.training.stages.chosen import STAGES, chosen_stages
from launch.validation.trial import check_agent
from launch.workload import load_workload
from policies.sampler import ScriptedSampler

PAGES = [
    ROOT / "README.md",
    *READMES,
    ROOT / "tests" / "benchmarks" / "README.md",
    *sorted((ROOT / ".docs" / "pages").glob("*.md")),
    *sorted((ROOT / ".github").glob("*.md")),
]


def test_reference_shows_all_public_names() -> None:
    shown = re.findall(r"^::: (.*)$", text_of(".docs/pages/reference.md"), re.MULTILINE)
    packages = [importlib.import_module(name) for name in ("environments", "policies", "actors", "launch")]
    assert {f"{package.__name__}.{name}" for package in packages for name in package.__all__} <= set(shown)


def test_first_page_has_at_most_130_lines() -> None:
    assert len(text_of("README.md").splitlines()) <= 130


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    for path, heading in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        target = page.parent / path if path else page
        target = target / "README.md" if target.is_dir() else target
        assert target.is_file(), f"{page} links to {path}"
        headings = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE) if heading else []
        anchors = [re.sub(r"[^a-z0-9 _-]", "", each.lower()).replace(" ", "-") for each in headings]
        assert not heading or heading in anchors, f"{page} links to the heading {heading} of {path}"


def test_own_agent_and_environment_take_thirty_lines_and_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len([line for line in OWN.splitlines() if line.strip()]) < 30
    (tmp_path / "my_workload.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = load_workload("my_workload", seed=0)
    check_agent(own, own.train_dataset)


@pytest.mark.slow
def test_shop_is_checked_and_played_as_its_guide_says(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "check.py").write_text(CHECK)
    call = '<tool_call>\n{"name": "cost", "arguments": {"item": "apples", "number": 21}}\n</tool_call>\n\n'
    for command, typed, said in (
        (["check.py"], "", "ToolEnvironment: all fine."),
        (["-m", "launch.play", "workload=shop"], f"{call}\\boxed{{63}}\n\n", "--- tool\n63"),
    ):
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            input=typed,
            capture_output=True,
            text=True,
        )
        assert (done.returncode, said in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_that_a_page_names_exist(page: Path) -> None:
    if page == ROOT / MIGRATION:  # names those of rLLM too; another test compares its table with the errors
        return
    areas = "|".join(TrainConfig.__dataclass_fields__)
    named = re.findall(rf"`((?:{areas})\.(?!py`)[a-z_.]+)[=`]", page.read_text("utf-8"))
    assert page != ROOT / GUIDE or len(named) >= 10
    for name in named:
        value: Any = TrainConfig()
        for part in name.split("."):
            value = value if isinstance(value, dict) else getattr(value, part)


def test_own_environment_passes_check_that_page_names(tmp_path: Path) -> None:
    (check,) = re.findall(r"`environments\.(check_environment\(CountEnv, .*?\))`", text_of("README.md"))
    program = "from environments import check_environment\nfrom my_workload import CountEnv\n"
    (tmp_path / "my_workload.py").write_text(OWN)
    (tmp_path / "program.py").write_text(f"{program}print({check})\n")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "CountEnv: all fine."


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "least"),
    [
        ("README.md", 5),
        (COMMANDS, 20),
        (GUIDE, 2),
        (HTTP, 2),
        (MIGRATION, 4),
        ("actors/README.md", 1),
        ("launch/README.md", 4),
    ],
)
def test_every_setting_and_recipe_that_a_page_names_exists(page: str, least: int) -> None:
    text = text_of(page).replace(OWN, "")
    overrides = set(re.findall(r"\b((?:recipe|[a-z_]+\.[a-z_.]+)=[^\s`*…']+)", text))
    assert len(overrides) >= least
    assert isinstance(compose(sorted(overrides)), TrainConfig)


def test_stage_that_the_page_adds_can_be_added() -> None:
    (line,) = re.findall(r"^ +(stages=\S+ \S+)$", text_of("launch/README.md"), re.MULTILINE)
    config = compose(["warm_start.num_steps=5", *line.replace("my_stages:", "own_stage:").split()])
    assert [stage.name for stage in chosen_stages(config)] == ["warm_start", "rehearse", "reinforce"]


@pytest.mark.slow
@pytest.mark.parametrize("program", [COLLECT, TRAIN], ids=["collect", "train"])
def test_reference_programs_import_what_exists(program: str) -> None:
    imports = "\n".join(line for line in program.splitlines() if line.startswith(("import ", "from ")))
    subprocess.run([sys.executable, "-c", imports], cwd=ROOT, check=True)


def test_names_that_the_page_gives_for_the_references_exist() -> None:
    table = text_of(MIGRATION).split("## Names of rLLM v0.1")[1].split("## ")[0]
    here = " ".join(row.split(" | ", 1)[1] for row in table.splitlines() if row.startswith("| "))
    names = re.findall(r"`(actors|environments|launch|policies)\.([\w.]+)`", here)
    assert len(names) > 10
    for package, name in names:
        assert operator.attrgetter(name)(importlib.import_module(package)) is not None
    reasons = set(re.findall(r"`TerminationReason\.(\w+)`", here))
    assert {"PROMPT_TOO_LONG", "RESPONSE_BUDGET_SPENT"} == reasons <= set(TerminationReason.__members__)
    assert {"warm_start", "expert_iteration"} <= set(STAGES)


CALLING = """#!{python}
import json, os, sys, urllib.request
messages = [{{"role": "user", "content": open(sys.argv[2]).read()}}]
body = json.dumps({{"model": "any", "messages": messages}}).encode()
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
message = json.load(urllib.request.urlopen(request))["choices"][0]["message"]
open("answer.txt", "w").write(message["content"])
"""


@pytest.mark.slow
def test_programs_of_the_page_are_played_and_paid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "my-agent"
    program.write_text(CALLING.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_program.py").write_text(SOLVE)
    names: dict[str, Any] = {}
    exec(SOLVE_BY_PROGRAM, names)
    call = '<tool_call>\n{"name": "price", "arguments": {"item": "pears"}}\n</tool_call>'
    with_tool = load_workload("my_program", seed=0).rollout
    for rollout, replies in ((with_tool, [call, "\\boxed{21}"]), (names["solve_by_program"], ["21"])):
        task = {"question": "What do 3 pears cost? Answer in \\boxed{}.", "ground_truth": "21"}
        request = RolloutRequest(rollout_id="a/0", group_id="a", task=task)
        pair, script = pair_of(None, None, rollout, {}, {}), ScriptedSampler(replies)
        env = pair.make_env(request)
        trajectory = run_rollout(
            pair.make_agent(),
            env,
            lambda request, script=script: asyncio.run(script.sample(request)),
            request,
            RolloutLimits(),
            Journal(),
        )
        env.close()
        assert (trajectory.reward, len(trajectory.steps)) == (1.0, len(replies))
