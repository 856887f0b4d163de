"""The house rules that a reader may rely on, checked by reading the source with ``ast``.

Each check takes the root of a source tree and returns its breaches as sentences, so that the checks are
themselves tested on small trees with a breach in them.
"""

from __future__ import annotations

import ast
import fnmatch
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

import house_figures
import pytest
from source_tree import LAYERS, Module, import_graph, modules_in

ROOT = Path(__file__).resolve().parents[1]

HEAVY = ("torch", "transformers", "vllm", "verl")
FORBIDDEN_ANYWHERE = {"environments": ("ray", *HEAVY), "policies": ("ray",)}
FORBIDDEN_AT_START = {
    "environments.tools": ("pydantic", "mcp", "httpx2"),
    "policies": ("ray", "openai", "numpy", *HEAVY),
    "policies.sampler": ("ray", "openai", "numpy", *HEAVY),
    "policies.agents.*": ("ray", "openai", "numpy", *HEAVY),
    "policies.model_api.dialects.*": ("ray", "starlette", *HEAVY),
    "actors": ("ray", *HEAVY),
    "actors.rollouts.rollout": ("ray.serve", *HEAVY),
    "actors.gateway.function": ("ray", "pydantic", *HEAVY),
    "launch": ("ray", *HEAVY),
    "launch.workload": ("uvicorn", "starlette", "openai"),
    "launch.train": HEAVY,
    "launch.recipes.task_file": ("pydantic", *HEAVY),
}
"""What importing a module (a pattern names several) must not load, neither itself nor by its imports."""

VLLM_HOMES = ("policies.engines.vllm", "policies.engines.tool_calls", "actors.weights.nccl")
VERL_HOMES = ("policies.learning", "actors.learning.publishing_learner")

TOP_LEVEL = {*LAYERS, "tests", "pyproject.toml", "README.md", "Makefile", "LICENSE", "CHANGELOG.md"}
COMMANDS = (
    "train",
    "evaluate",
    "serve",
    "view",
    "export",
    "play",
    "status",
    "scale",
    "replay",
    "verify",
    "chaos",
)
COMMAND_USERS = ("launch.cluster.application",)
"""Serve builds this application as the command ``serve`` does, with the same settings."""
MAX_LAUNCH_ENTRIES = 24
EMPTY_NAMES = {"utils", "util", "helpers", "common", "misc", "legacy", "experimental"}
BANNED_WORDS = {
    *("tell", "tells", "told", "hear", "hears", "heard", "say", "says", "said", "ask", "asks", "asked"),
    *(
        "look",
        "looks",
        "looked",
        "strike",
        "strikes",
        "struck",
        "deed",
        "deeds",
        "blow",
        "blows",
        "rage",
        "fate",
    ),
    *("rivals", "patience", "meeting", "envelope", "elsewhere"),
}
"""What people do, and what means nothing in a program: in no name."""
PRESENT_NAMES = {"_ELSEWHERE", "asked", "says_all"}
"""Names with one of these words that are there today: they may only become fewer."""
BANNED_OPENINGS = {
    *("of", "by", "what", "who", "whom", "whose", "whether", "how", "why", "where", "when", "which", "there"),
    *("it", "its", "they", "their", "this", "that", "these", "those", "he", "she", "we", "you", "i"),
    *("from", "in", "on", "at", "for", "with", "to", "as", "below", "above", "beside"),
}
"""A docstring begins with a noun or a verb."""
PRESENT_OPENINGS = {
    "launch.settings.tree": 2,
    "launch.settings.unknown": 1,
}
"""The number of docstrings of a module that begin otherwise today: it may only become smaller."""
MAX_TEST_NAME = 60
MAX_FUNCTION_LINES = 80
MAX_ATTRIBUTES, MAX_PUBLIC_METHODS = 14, 12
"""Of a class, but for those below: their present size, from which they may only shrink."""
LARGE_CLASSES = {
    "policies.learning.algorithm.Algorithm": (25, 0),  # all settings of an algorithm, decided
    "policies.engines.vllm.VLLMEngine": (21, 9),
    "environments.rewards.code.rpc_client.RpcClient": (16, 5),
    "policies.learning.samples.TrainingSample": (15, 8),  # the columns of a sequence
    "policies.openai_sampler.OpenAISampler": (15, 3),
    "policies.learning.verl.cpu_platform.CPUPlatform": (0, 23),  # verl's interface
    "actors.rollouts.service.RolloutService": (9, 13),
    "policies.chat.ChatRenderer": (9, 13),
    "environments.rewards.code.usage.Usage": (8, 15),
    "environments.base.BaseEnv": (6, 13),  # rLLM's interface, and ours
}
"""Attributes and public methods."""
MIN_LINES_OF_ITS_OWN = 60
"""A module with fewer lines, which one beside it reads alone, is a part of that one."""
SPLINTERS = {"policies.engines.versions"}
MAX_PER_1000_LINES = {
    "`Any`": {"environments": 58, "policies": 21, "actors": 18, "launch": 7},
    "`isinstance`": {"environments": 29, "policies": 10, "actors": 4.5, "launch": 4.5},
}
"""The aims are 30 (environments/) and 12 for `Any`, and 6 for `isinstance`: lower these with the source."""
MAX_TYPE_IGNORES = 3
"""Where Serve or Ray declare something else than they do."""


def is_within(name: str, *parents: str) -> bool:
    """True when the dotted ``name`` is one of ``parents`` or lies inside one."""
    return any(name == parent or name.startswith(f"{parent}.") for parent in parents)


def imports_to_the_left(root: Path) -> list[str]:
    breaches = []
    for module in modules_in(root).values():
        above = LAYERS[LAYERS.index(module.layer) + 1 :]
        forbidden = (*above, *FORBIDDEN_ANYWHERE.get(module.layer, ()))
        breaches += [
            f"{module.name}:{each.line} imports {each.name}: {module.layer}/ must not"
            for each in module.imports
            if is_within(each.name, *forbidden)
        ]
    return breaches


def foreign_imports_of_environments(root: Path) -> list[str]:
    own = {"environments", *sys.stdlib_module_names}
    return [
        f"{module.name}:{each.line} imports {each.name} at module level: do it inside the function"
        for module in modules_in(root).values()
        for each in module.imports
        if module.layer == "environments" and each.at_start and each.name.partition(".")[0] not in own
    ]


def imports_outside_their_home(root: Path, library: str, homes: tuple[str, ...]) -> list[str]:
    return [
        f"{module.name}:{each.line} imports {each.name}: only {' and '.join(homes)} may"
        for module in modules_in(root).values()
        for each in module.imports
        if is_within(each.name, library) and not is_within(module.name, *homes)
    ]


def eager_imports_of_vllm(root: Path) -> list[str]:
    return [
        f"{module.name}:{each.line} imports {each.name} at module level: do it inside the function"
        for module in modules_in(root).values()
        for each in module.imports
        if each.at_start and is_within(each.name, "vllm")
    ]


def heavy_imports_at_start(root: Path, start: str, forbidden: tuple[str, ...]) -> list[str]:
    """Follows what importing ``start`` imports, module by module, to the first forbidden libraries."""
    modules = modules_in(root)
    waiting = [[name] for name in modules if fnmatch.fnmatch(name, start)]
    if not waiting:
        return [f"there is no module {start}: correct FORBIDDEN_AT_START in {Path(__file__).name}"]
    seen: set[str] = set()
    breaches = []
    while waiting:
        chain = waiting.pop()
        if chain[-1] in seen:
            continue
        seen.add(chain[-1])
        for each in modules[chain[-1]].imports:
            if each.at_start and is_within(each.name, *forbidden):
                breaches.append(f"{' -> '.join(chain)}:{each.line} imports {each.name}")
            elif each.at_start:
                waiting += [[*chain, name] for name in run_by_import(each.name) if name in modules]
        waiting += [[*chain, name] for name in run_by_import(chain[-1])[:-1] if name in modules]
    return breaches


def run_by_import(name: str) -> list[str]:
    """``a.b.c`` -> ``[a, a.b, a.b.c]``: Python runs the packages before the module."""
    parts = name.split(".")
    return [".".join(parts[: count + 1]) for count in range(len(parts))]


def import_circles(root: Path) -> list[str]:
    """Modules that import each other: at the start, in a function, or under ``TYPE_CHECKING``."""
    return circles(import_graph(modules_in(root)))


def folder_circles(root: Path) -> list[str]:
    """Folders side by side that import each other. A folder and those inside it may."""
    modules = modules_in(root)
    graph: dict[str, set[str]] = {}
    for name, imported in import_graph(modules).items():
        for other in imported:
            pair = folders_side_by_side(modules[name], modules[other])
            if pair is not None:
                graph.setdefault(pair[0], set()).add(pair[1])
    return circles(graph)


def folders_side_by_side(one: Module, other: Module) -> tuple[str, str] | None:
    """The folders of two modules below the innermost folder of both; ``None`` if one is not in any."""
    folders = [each.name.split(".")[: None if each.is_package else -1] for each in (one, other)]
    for depth, (here, there) in enumerate(zip(*folders, strict=False), start=1):
        if here != there:
            return ".".join(folders[0][:depth]), ".".join(folders[1][:depth])
    return None


def circles(graph: dict[str, set[str]]) -> list[str]:
    """One shortest circle for each node that is on one, unless it is on one that is listed already."""
    found: list[list[str]] = []
    for start in sorted(graph):
        if not any(start in circle for circle in found):
            waiting, seen = deque([[start]]), set()
            while waiting:
                chain = waiting.popleft()
                if start in graph.get(chain[-1], ()):
                    found.append([*chain, start])
                    break
                following = sorted(graph.get(chain[-1], set()) - seen)
                seen.update(following)
                waiting += [[*chain, name] for name in following]
    return [f"{' -> '.join(circle)}: a circle" for circle in found]


def strangers_at_the_top(root: Path) -> list[str]:
    ignored = [line.rstrip("/") for line in (root / ".gitignore").read_text(encoding="utf-8").splitlines()]
    return [
        f"{entry.name} does not belong at the top level: one of {', '.join(sorted(TOP_LEVEL))} should hold it"
        for entry in sorted(root.iterdir())
        if entry.name not in TOP_LEVEL
        and not entry.name.startswith(".")
        and not any(fnmatch.fnmatch(entry.name, pattern) for pattern in ignored)
    ]


def imports_of_commands(root: Path) -> list[str]:
    """Modules in a room of ``launch`` that import a command, which stands above all rooms."""
    return [
        f"{module.name}:{each.line} imports {each.name}: move what both need into a room"
        for module in modules_in(root).values()
        for each in module.imports
        if module.name.count(".") > 1
        and module.name not in COMMAND_USERS
        and is_within(each.name, *(f"launch.{command}" for command in COMMANDS))
    ]


def crowd_in_launch(root: Path) -> list[str]:
    beside = {"README.md", "__init__.py", "py.typed", "__pycache__"}
    names = sorted({entry.name for entry in (root / "launch").iterdir()} - beside)
    too_many = f"launch/ has {len(names)} entries, more than {MAX_LAUNCH_ENTRIES}: {', '.join(names)}"
    return [too_many] if len(names) > MAX_LAUNCH_ENTRIES else []


def names_that_say_nothing(root: Path) -> list[str]:
    return [
        f"{module.name}: name the noun that it holds instead"
        for module in modules_in(root).values()
        if EMPTY_NAMES & set(module.name.split("."))
    ]


def oversized(root: Path) -> list[str]:
    breaches = []
    for module in modules_in(root).values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    breaches.append(
                        f"{module.name}.{node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"
                    )
    return breaches


def classes_of_many_parts(root: Path) -> list[str]:
    breaches = []
    for module in modules_in(root).values():
        for node in house_figures.classes(module):
            name = f"{module.name}.{node.name}"
            found = len(house_figures.attributes(module, node)), len(house_figures.public_methods(node))
            allowed = LARGE_CLASSES.get(name, (0, 0))
            limits = max(MAX_ATTRIBUTES, allowed[0]), max(MAX_PUBLIC_METHODS, allowed[1])
            breaches += [
                f"{name} has {number} {parts}, more than {most}: which of them are an object of their own?"
                for number, most, parts in zip(found, limits, ("attributes", "public methods"), strict=True)
                if number > most
            ]
    return breaches


def splinters(root: Path) -> list[str]:
    return [
        f"{name} is small and read by one module beside it: merge them"
        for name in house_figures.splinters(modules_in(root), MIN_LINES_OF_ITS_OWN)
        if name not in SPLINTERS
    ]


def numbers_of_two_values(root: Path) -> list[str]:
    """Constants of one name that are different numbers in two modules."""
    values: dict[str, dict[str, str]] = {}
    for module in modules_in(root).values():
        for node in module.tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and is_number(node.value):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (each.id for each in targets if isinstance(each, ast.Name) and each.id.isupper()):
                    values.setdefault(name, {}).setdefault(ast.unparse(node.value), module.name)
    return [f"{name} has several values: {found}" for name, found in values.items() if len(found) > 1]


def is_number(node: ast.expr | None) -> bool:
    """Whether an expression is a number, or is calculated from numbers."""
    return node is not None and all(
        isinstance(each, ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop)
        or (isinstance(each, ast.Constant) and isinstance(each.value, int | float))
        for each in ast.walk(node)
    )


def loose_types(root: Path) -> list[str]:
    breaches = []
    for layer in LAYERS:
        modules = [each for each in modules_in(root).values() if each.layer == layer]
        lines = sum(house_figures.FIGURES["lines"](each) for each in modules)
        for figure, limits in MAX_PER_1000_LINES.items():
            number = sum(map(house_figures.FIGURES[figure], modules))
            if number > limits[layer] * max(1.0, lines / 1000):
                breaches.append(
                    f"{layer}/ has {number} times {figure}, more than {limits[layer]} per 1,000 lines"
                )
    ignores = sum(map(house_figures.FIGURES["`type: ignore`"], modules_in(root).values()))
    if ignores > MAX_TYPE_IGNORES:
        breaches.append(f"there are {ignores} times `type: ignore`, more than {MAX_TYPE_IGNORES}")
    return breaches


def banned_names(root: Path) -> list[str]:
    """Names with a banned word that a module defines."""
    return [
        f"{module.name}:{line} names {name!r} with a word of BANNED_WORDS: say what it is"
        for module in modules_in(root).values()
        for name, line in defined_names(module.tree)
        if BANNED_WORDS & words_of(name) and name not in PRESENT_NAMES
    ]


def defined_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node.lineno
            case ast.arg():
                yield node.arg, node.lineno
            case ast.Name(ctx=ast.Store()):
                yield node.id, node.lineno
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr, node.lineno


def words_of(name: str) -> set[str]:
    """``_is_told`` -> ``{is, told}``, ``KeptPairs`` -> ``{kept, pairs}``"""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def banned_openings(root: Path) -> list[str]:
    breaches = []
    for module in modules_in(root).values():
        found = [
            f"{module.name}:{each.lineno} begins a docstring with {opening!r}: begin with a noun or a verb"
            for each in house_figures.docstrings(module.tree)
            if (opening := first_word(each.value)) in BANNED_OPENINGS
        ]
        breaches += found if len(found) > PRESENT_OPENINGS.get(module.name, 0) else []
    return breaches


def first_word(text: object) -> str:
    word = re.match(r"\s*(\w+)", str(text))
    return word[1].lower() if word else ""


def long_test_names(root: Path) -> list[str]:
    return [
        f"{path.name}: {name} has {len(name)} characters, over {MAX_TEST_NAME}, or begins with an article"
        for path in sorted((root / "tests").rglob("test_*.py"))
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if len(name) > MAX_TEST_NAME or name.startswith(("test_a_", "test_an_", "test_the_"))
    ]


@pytest.mark.slow
def test_no_layer_imports_one_above_it() -> None:
    assert imports_to_the_left(ROOT) == []


@pytest.mark.slow
def test_importing_environments_needs_only_the_standard_library() -> None:
    assert foreign_imports_of_environments(ROOT) == []


def test_vllm_is_imported_in_one_module_and_lazily() -> None:
    assert imports_outside_their_home(ROOT, "vllm", VLLM_HOMES) == []
    assert eager_imports_of_vllm(ROOT) == []


def test_verl_is_imported_only_where_the_policy_learns() -> None:
    assert imports_outside_their_home(ROOT, "verl", VERL_HOMES) == []


@pytest.mark.parametrize(("start", "forbidden"), FORBIDDEN_AT_START.items())
def test_light_modules_import_nothing_heavy(start: str, forbidden: tuple[str, ...]) -> None:
    assert heavy_imports_at_start(ROOT, start, forbidden) == []


@pytest.mark.slow
@pytest.mark.parametrize("start", [start for start in FORBIDDEN_AT_START if "*" not in start])
def test_light_modules_load_nothing_heavy_when_run(start: str) -> None:
    """Sees what ``ast`` cannot: a library that imports a heavy one behind our back."""
    code = (
        f"import sys, {start}; print([name for name in {FORBIDDEN_AT_START[start]} if name in sys.modules])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert (loaded.stdout.strip(), loaded.returncode) == ("[]", 0), loaded.stderr


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert import_circles(ROOT) == []


def test_no_folder_imports_itself_by_way_of_those_beside_it() -> None:
    assert folder_circles(ROOT) == []


def test_top_level_holds_only_what_a_reader_expects() -> None:
    assert strangers_at_the_top(ROOT) == []


def test_rooms_of_launch_import_no_command() -> None:
    assert imports_of_commands(ROOT) == []


def test_launch_has_few_entries() -> None:
    assert crowd_in_launch(ROOT) == []


def test_every_module_is_named_after_what_it_holds() -> None:
    assert names_that_say_nothing(ROOT) == []


@pytest.mark.slow
def test_functions_stay_small() -> None:
    assert oversized(ROOT) == []


@pytest.mark.slow
def test_classes_hold_few_parts() -> None:
    assert classes_of_many_parts(ROOT) == []


def test_small_modules_have_several_readers() -> None:
    assert splinters(ROOT) == []


def test_constants_of_one_name_have_one_value() -> None:
    assert numbers_of_two_values(ROOT) == []


@pytest.mark.slow
def test_types_are_named() -> None:
    assert loose_types(ROOT) == []


@pytest.mark.slow
def test_names_hold_no_banned_word() -> None:
    assert banned_names(ROOT) == []


@pytest.mark.slow
def test_docstrings_begin_with_noun_or_verb() -> None:
    assert banned_openings(ROOT) == []


def test_names_of_tests_are_short_and_begin_with_noun() -> None:
    assert long_test_names(ROOT) == []


def of_vllm(root: Path) -> list[str]:
    return imports_outside_their_home(root, "vllm", VLLM_HOMES)


def from_rollout(root: Path) -> list[str]:
    return heavy_imports_at_start(
        root, "actors.rollouts.rollout", FORBIDDEN_AT_START["actors.rollouts.rollout"]
    )


def class_of(*lines: str) -> str:
    return "\n".join(["class A:", *lines])


CHECKS_AND_BREACHES: list[tuple[Callable[[Path], list[str]], dict[str, str]]] = [
    (imports_to_the_left, {"environments/base.py": "from policies import chat"}),
    (imports_to_the_left, {"environments/base.py": "def f():\n    import ray"}),
    (imports_to_the_left, {"policies/chat.py": "if TYPE_CHECKING:\n    import actors.rollouts.fleet"}),
    (imports_to_the_left, {"policies/chat.py": "from ray import serve"}),
    (imports_to_the_left, {"actors/rollouts/fleet.py": "async def f():\n    from launch import train"}),
    (foreign_imports_of_environments, {"environments/rewards/math.py": "import numpy"}),
    (foreign_imports_of_environments, {"environments/base.py": "try:\n    import gymnasium\nfinally: pass"}),
    (of_vllm, {"actors/serving/policy_server.py": "def f():\n    import vllm"}),
    (eager_imports_of_vllm, {"policies/engines/vllm.py": "class A:\n    from vllm import LLM"}),
    (from_rollout, {"actors/rollouts/rollout.py": "import torch.nn"}),
    (from_rollout, {"actors/rollouts/rollout.py": "from ray import serve"}),
    (
        from_rollout,
        {"actors/rollouts/rollout.py": "from policies import a", "policies/a.py": "import transformers"},
    ),
    (
        from_rollout,
        {"actors/rollouts/rollout.py": "import policies.a", "policies/__init__.py": "import torch"},
    ),
    (
        from_rollout,
        {
            "actors/rollouts/rollout.py": "from . import a",
            "actors/rollouts/a.py": "from .b import c",
            "actors/rollouts/b.py": "import verl",
        },
    ),
    (from_rollout, {"actors/rollouts/rollout.py": "", "actors/__init__.py": "import vllm"}),
    (from_rollout, {"actors/rollouts/fleet.py": ""}),
    (import_circles, {"actors/a.py": "import actors.b", "actors/b.py": "def f():\n    from . import a"}),
    (
        import_circles,
        {
            "policies/chat.py": "from policies.agents.tool import ToolAgent",
            "policies/agents/tool.py": "from policies.agents import parsers",
            "policies/agents/parsers.py": "if TYPE_CHECKING:\n    from policies.chat import Chat",
        },
    ),
    (import_circles, {"launch/__init__.py": "import launch.config", "launch/config.py": "import launch"}),
    (
        folder_circles,
        {
            "launch/training/loop.py": "import launch.reporting.metrics",
            "launch/reporting/metrics.py": "",
            "launch/reporting/tracker.py": "from launch.training import selection",
            "launch/training/selection.py": "",
            "launch/training/__init__.py": "",
        },
    ),
    (strangers_at_the_top, {".gitignore": "outputs/", "scripts/run.py": ""}),
    (imports_of_commands, {"launch/training/start.py": "from launch.serve import greeting"}),
    (crowd_in_launch, {f"launch/part_{number}.py": "" for number in range(MAX_LAUNCH_ENTRIES + 1)}),
    (names_that_say_nothing, {"policies/utils.py": ""}),
    (oversized, {"launch/training/loop.py": "def f():\n" + "    pass\n" * MAX_FUNCTION_LINES}),
    (classes_of_many_parts, {"actors/a.py": class_of(*(f"    a{i} = 1" for i in range(MAX_ATTRIBUTES + 1)))}),
    (
        classes_of_many_parts,
        {"actors/a.py": class_of("    def __init__(self):", *(f"        self.a{i} = 1" for i in range(15)))},
    ),
    (
        classes_of_many_parts,
        {"actors/a.py": class_of(*(f"    def f{i}(self): ..." for i in range(MAX_PUBLIC_METHODS + 1)))},
    ),
    (splinters, {"actors/rollouts/a.py": "A = 1", "actors/rollouts/b.py": "from actors.rollouts import a"}),
    (numbers_of_two_values, {"actors/a.py": "A_SECONDS = 2.0", "launch/b.py": "A_SECONDS: float = 60 * 5"}),
    (loose_types, {"launch/a.py": "\n".join(f"a{i}: Any = 1" for i in range(9))}),
    (loose_types, {"launch/a.py": "\n".join("isinstance(a, b)" for _ in range(7))}),
    (banned_names, {"actors/a.py": "def hear(event): ..."}),
    (banned_names, {"actors/a.py": "class TestSaid: ..."}),
    (banned_names, {"actors/a.py": "def f(self): self.was_told = True"}),
    (banned_openings, {"actors/a.py": 'SECONDS = 1\n"""Of the wait."""'}),
    (banned_openings, {"actors/a.py": 'def f():\n    """\n    What is left."""'}),
    (long_test_names, {"tests/unit/test_a.py": f"def test_{'a' * MAX_TEST_NAME}(): ..."}),
    (long_test_names, {"tests/unit/test_a.py": "async def test_the_end(): ..."}),
    (loose_types, {"launch/a.py": "a = 1  # type: ignore\n" * (MAX_TYPE_IGNORES + 1)}),
]


@pytest.mark.parametrize(("check", "files"), CHECKS_AND_BREACHES)
def test_each_check_finds_its_breach(
    tmp_path: Path, check: Callable[[Path], list[str]], files: dict[str, str]
) -> None:
    write_tree(tmp_path, files)
    assert check(tmp_path)


def test_checks_allow_what_the_design_allows(tmp_path: Path) -> None:
    write_tree(
        tmp_path,
        {
            ".gitignore": "outputs/\n*.egg-info/",
            "outputs/run.txt": "",
            "troupe.egg-info/x": "",
            "README.md": "",
            "environments/base.py": "import json, environments.types\ndef f():\n    import numpy",
            "environments/types.py": "",
            "policies/engines/vllm.py": "import environments\ndef f():\n    import vllm",
            "policies/learning/verl/learner.py": "import torch, verl.utils",
            "actors/__init__.py": "",
            "actors/rollouts/rollout.py": "import ray\nimport policies\ndef f():\n    import torch",
            "actors/engine.py": "from actors.rollouts import fleet",
            "actors/rollouts/fleet.py": "from actors.rollouts import rollout\nfrom actors import settings",
            "actors/settings.py": "",
            "launch/train.py": "from actors import rollout",
        },
    )
    assert imports_to_the_left(tmp_path) == []
    assert foreign_imports_of_environments(tmp_path) == []
    assert of_vllm(tmp_path) == []
    assert eager_imports_of_vllm(tmp_path) == []
    assert imports_outside_their_home(tmp_path, "verl", VERL_HOMES) == []
    assert from_rollout(tmp_path) == []
    assert import_circles(tmp_path) == []
    assert folder_circles(tmp_path) == []
    assert strangers_at_the_top(tmp_path) == []
    assert imports_of_commands(tmp_path) == []
    assert crowd_in_launch(tmp_path) == []
    assert names_that_say_nothing(tmp_path) == []
    assert oversized(tmp_path) == []
    assert classes_of_many_parts(tmp_path) == []
    assert numbers_of_two_values(tmp_path) == []
    assert loose_types(tmp_path) == []
    assert banned_names(tmp_path) == []
    assert banned_openings(tmp_path) == []
    assert long_test_names(tmp_path) == []


def test_small_modules_are_allowed_two_readers_or_one_elsewhere(tmp_path: Path) -> None:
    reader = "from actors.rollouts import a"
    write_tree(tmp_path / "two", {f"actors/rollouts/{name}.py": reader for name in "abc"})
    write_tree(tmp_path / "elsewhere", {"actors/rollouts/a.py": "", "actors/b.py": reader})
    assert splinters(tmp_path / "two") == splinters(tmp_path / "elsewhere") == []


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
