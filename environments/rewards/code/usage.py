"""Facts about the solution from the source of its tests: its names, and what it is expected to return.

Used by ``assertions`` in the sandbox, and by ``forms`` outside of it. Nothing is run here.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypeVar

from environments.rewards.code.rpc_client import Remote
from environments.rewards.code.values import VALUE_NAMES

MODULES = {"np": "numpy", "pd": "pandas", "dt": "datetime", "mock": "unittest.mock"} | {
    name: name for name in ("numpy", "pandas", "pytest", "scipy", "sympy", "torch", "networkx", "hypothesis")
}
STANDARD_NAMES = {
    name: module
    for module, names in {
        "collections": "ChainMap namedtuple",
        "contextlib": "redirect_stdout redirect_stderr suppress nullcontext",
        "copy": "copy deepcopy",
        "dataclasses": "dataclass asdict astuple",
        "datetime": "date datetime time timedelta timezone",
        "decimal": "Decimal",
        "enum": "Enum IntEnum",
        "fractions": "Fraction",
        "io": "StringIO BytesIO",
        "numpy": "allclose array_equal assert_allclose assert_array_equal assert_almost_equal",
        "pathlib": "Path",
        "pytest": "approx raises fixture",
        "unittest": "TestCase",
        "unittest.mock": "MagicMock Mock patch AsyncMock",
    }.items()
    for name in names.split()
}
"""Names of libraries that tests use, and leave it to the solution to import."""
NUMPY_TESTING = {"assert_allclose", "assert_array_equal", "assert_almost_equal"}
_USUAL = (
    "len list set tuple dict str int float range sorted print isinstance type enumerate zip repr frozenset"
)
USUAL = set(_USUAL.split())
"""Builtins that tests use beside the function that they test."""
_STEPS = "next send throw __next__ GeneratorType Generator isgenerator islice Iterator"
STEPS = set(_STEPS.split())
NAMES_OF_NAN = {"nan", "NaN", "NAN", "isnan", "is_nan", "isna", "isnull", "nanmean"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Binding = Function | ast.ClassDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar
N = TypeVar("N", bound=ast.AST)


def calls_check(tree: ast.Module) -> bool:
    """Return whether the tests call their ``check`` themselves, as ``check(Solution().twoSum)``."""
    return any(isinstance(node, ast.Expr) and "check" in called_names(node) for node in tree.body)


def called_names(node: ast.AST) -> Iterator[str]:
    """The names that ``node`` calls, in the order in which Python would: arguments before their function."""
    for child in ast.iter_child_nodes(node):
        yield from called_names(child)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield node.func.id


def root_of(node: ast.AST) -> str:
    """The name with which an expression such as ``a.b(c).d[e]`` begins, or nothing."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def last_name(node: ast.AST) -> str:
    """The name behind the last dot of an expression, such as ``d`` of ``a.b(c).d``."""
    return ast.unparse(node).rpartition(".")[2]


def loads(nodes: Iterable[ast.AST]) -> list[ast.Name]:
    return [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]


def stored_names(nodes: Sequence[ast.AST]) -> set[str]:
    """The names that ``nodes`` store, define, take as arguments or catch."""
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return stored | {node.name for node in nodes if isinstance(node, Binding) and node.name}


def is_test_class(node: ast.ClassDef) -> bool:
    names = [ast.unparse(base) for base in node.bases]
    methods = [each.name for each in node.body if isinstance(each, Function)]
    return (
        node.name.startswith("Test")
        or any(name.endswith(("TestCase", "Tests", "Test")) for name in names)
        or any(name.startswith("test") for name in methods)
    )


class Usage:
    """The ``tree`` of tests of a ``function``, if the task names one; solutions know the ``prelude``."""

    def __init__(self, tree: ast.Module, function: str | None, prelude: Iterable[str]) -> None:
        self.tree = tree
        self.function = function
        self.prelude = set(prelude)
        self.nodes = list(ast.walk(self.tree))
        self.loads = loads(self.nodes)
        self.used = {node.id for node in self.loads}
        self.stored = stored_names(self.nodes) | ({"candidate"} if function else set())
        whole = [each for node in self.every(ast.Import) for each in node.names]
        self.aliases = {each.asname or each.name for each in whole if each.name == "solution"}
        self.imported, parts = set[str](), list[ast.alias]()
        for node in self.every(ast.ImportFrom):
            if node.module == "solution":
                self.imported |= {each.name for each in node.names}
            else:
                parts += node.names
        self.modules = {each.asname or each.name.partition(".")[0] for each in whole + parts} - self.aliases
        own = [node for node in self.every(ast.ClassDef) if not is_test_class(node)]
        self.own_classes = {str(place): node for place, node in enumerate(own)}
        self.calls = self.every(ast.Call)
        self.attributes = self.every(ast.Attribute)
        self.attribute_names = {node.attr for node in self.attributes}

    def every(self, kind: type[N]) -> list[N]:
        """The nodes of a kind, the outer ones first."""
        return [node for node in self.nodes if isinstance(node, kind)]

    # -- names ---------------------------------------------------------------------------------------

    @cached_property
    def unknown(self) -> set[str]:
        """The names that tests use and nobody but the solution defines."""
        known = self.stored | self.modules | self.prelude | vars(builtins).keys() | self.libraries().keys()
        return self.used - known

    @cached_property
    def unknown_constants(self) -> set[str]:
        """Unknown names that tests neither call nor use as a class or as a module."""
        used = [*(node.func for node in self.calls), *(node.value for node in self.attributes)]
        others = {node.id for node in used if isinstance(node, ast.Name)}
        is_class = {name for name in self.unknown if name[:1].isupper() and not name.isupper()}
        return self.unknown - self.meant - others - is_class

    @cached_property
    def meant(self) -> set[str]:
        """The names by which tests mean the solution, also where a builtin or the prelude has the same.

        The one that the task says, and those that the tests import; else, where they use no name that is
        the solution's for certain, the first name that they call, as in ``assert sum(10, 15) == 25``.
        """
        meant = self.imported - {"*"} | ({self.function} if self.function else set())
        owned = [node for node in self.attributes if isinstance(node.value, ast.Name)]
        meant |= {node.attr for node in owned if root_of(node) in self.aliases}
        return meant or self.first_called

    @cached_property
    def first_called(self) -> set[str]:
        if self.unknown or self.function or self.imported or self.aliases:
            return set()
        asserts: list[ast.AST] = [*self.every(ast.Assert)]
        called = [name for node in asserts or [self.tree] for name in called_names(node)]
        called = [name for name in called if name not in self.stored | self.modules]
        return set([*(name for name in called if name not in USUAL), *called][:1])

    @property
    def tested(self) -> set[str]:
        """The names that a solution has to define."""
        return (self.imported | self.first_called) - {"*"}

    def from_solution(self, defined: list[str]) -> list[str]:
        """Return the names of those that a solution has ``defined`` that the tests have from there."""
        own = self.prelude | vars(builtins).keys() | self.libraries().keys()
        everything = "*" in self.imported or "solution" in self.aliases
        used = self.used | self.meant | {self.root_of_function()}
        return [
            name
            for name in defined
            # With an `abs` or an `isclose` of its own, a solution would be its own judge.
            if name in self.meant
            or ((name in used or everything) and name not in own and not name.startswith("__"))
        ]

    def root_of_function(self) -> str:
        if not self.function or self.function.isidentifier():
            return "Solution" if self.function else ""
        root = re.match(r"[^\W\d]\w*(?=[.(\[])", self.function)
        return root[0] if root else ""

    def libraries(self) -> dict[str, tuple[str, str]]:
        """The modules, or their objects, that tests mean by names that they do not import."""
        found: dict[str, tuple[str, str]] = {}
        given = self.imported | ({self.function} if self.function else set()) | self.stored | self.modules
        owners = [node.value for node in self.attributes]
        for name in self.used - given - vars(builtins).keys():
            uses = [node for node in self.every(ast.Name) if node.id == name]
            as_module = all(use in owners for use in uses)  # so neither called nor passed
            is_module = name in MODULES or name in sys.stdlib_module_names
            if as_module and is_module and name not in self.prelude:
                found[name] = (MODULES.get(name, name), "")
            elif name in STANDARD_NAMES and not (name in self.prelude or self._is_alone(name)):
                found[name] = (STANDARD_NAMES[name] + ".testing" * (name in NUMPY_TESTING), name)
        return found

    def _is_alone(self, name: str) -> bool:
        """Return whether the tests call nothing else, so that they are about it, as ``copy`` or ``time``."""
        local = self.stored | self.modules | self.prelude | vars(builtins).keys()
        return name.islower() and set(called_names(self.tree)) - local == {name} and not self.function

    def reads(self, known: dict[str, Any]) -> bool:
        """Return whether tests read a plain value of the solution by its name."""
        names = (self.used | self.meant) & known.keys() - self.libraries().keys()
        values = [known[name] for name in names if type(known[name]) is not Remote]
        return any(isinstance(value, type) or not callable(value) for value in values)

    @property
    def asserted_lines(self) -> set[int]:
        spans = [(node.lineno, node.end_lineno or node.lineno) for node in self.every(ast.Assert)]
        return {line for first, last in spans for line in range(first, last + 1)}

    # -- values and objects --------------------------------------------------------------------------

    @cached_property
    def takes_nan(self) -> bool:
        """Return whether the tests are about NaN, which the name of a text or a word with these letters is
        not."""
        made = [node for node in self.calls if last_name(node.func) in ("float", "Decimal")]
        given = [each.value for node in made for each in node.args if isinstance(each, ast.Constant)]
        unequal = [node for node in self.every(ast.Compare) if isinstance(node.ops[0], ast.NotEq)]
        return (
            bool(NAMES_OF_NAN & ({node.id for node in self.every(ast.Name)} | self.attribute_names))
            or any(node.arg == "equal_nan" for node in self.every(ast.keyword))
            or any(str(text).strip("+- ").lower() == "nan" for text in given)
            or any(ast.dump(node.left) == ast.dump(node.comparators[0]) for node in unequal)
        )

    @cached_property
    def steps(self) -> bool:
        return bool(STEPS & (self.used | self.attribute_names | self.modules))

    @cached_property
    def objects(self) -> set[str]:
        """Return what tests use as objects: the expressions of which they use an attribute that no value
        has."""
        known = {"self", "cls", "capsys", "capfd", "monkeypatch", "request", "tmp_path", "mocker"}
        known |= self.modules | MODULES.keys() | set(sys.stdlib_module_names) | self.aliases
        known |= {node.name for node in self.own_classes.values()}
        foreign = known | self.prelude | self.libraries().keys() | vars(builtins).keys()
        for target, value in self._bindings():
            if root_of(value) in foreign:
                known.add(ast.unparse(target))
        known |= {node.name for node in self.every(ast.ExceptHandler) if node.name}
        foreign = foreign & known - {"self", "cls"}
        own = [node for node in self.attributes if node.attr not in VALUE_NAMES and node.attr[:2] != "__"]
        owners = [node.value for node in own if root_of(node.value) not in foreign]
        return {text for text in map(ast.unparse, owners) if text not in known}

    def _bindings(self) -> Iterator[tuple[ast.AST, ast.AST]]:
        """The names that tests give to values, with what these are."""
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                yield from ((target, node.value) for target in node.targets)
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                yield node.optional_vars, node.context_expr

    @cached_property
    def makers(self) -> set[str]:
        """The names of the solution that tests use as classes: as no name of a function is used."""
        names = {name for name in self.unknown | self.meant if name[:1].isupper()}
        certain = {name for name in (self.root_of_function(), "Solution") if name[:1].isupper()}
        certain |= {root_of(node.context_expr) for node in self.every(ast.withitem)} & names
        if self.objects:
            return certain | {name for name in names if not self._is_only_compared(name)}
        called = {id(node.func) for node in self.calls}
        others = {node.id for node in self.loads if id(node) not in called}
        # They are owners of attributes, bases, or the class in isinstance().
        certain |= {name for name in others & names if not name.isupper()}  # a constant
        return certain | {name for name in names if self._is_operated_on(name) or self._has_methods(name)}

    def _is_only_compared(self, name: str) -> bool:
        """Return whether tests but compare what it returns, as what a function returns.

        Beside an object of the solution it needs no mark: two of these are compared where they are.
        """
        if self._is_operated_on(name) or self._has_methods(name):
            return False
        compared = compared_values(self.nodes)
        bound = {id(value): ast.unparse(target) for target, value in self._bindings()}
        calls = {id(node.func): node for node in self.calls}
        uses = [each for each in self.loads if each.id == name]

        def is_compared(use: ast.Name) -> bool:
            call = calls.get(id(use))
            again = [each for each in self.loads if each.id == bound.get(id(call))]
            return id(call) in compared or (bool(again) and all(id(each) in compared for each in again))

        return bool(uses) and all(map(is_compared, uses))

    def _has_methods(self, name: str) -> bool:
        """Return whether tests call a method of what it makes that gets nothing from them, as
        ``Stack().pop()``."""
        is_one = self._is_made_by(name)
        called = [node.func for node in self.calls if not node.args]
        methods = [each for each in called if isinstance(each, ast.Attribute) and is_one(each.value)]
        others = [each.attr for each in methods if each.attr not in ("any", "all")]
        return not name.isupper() and not all(each.startswith("is") for each in others)

    def _is_made_by(self, name: str) -> Callable[[ast.AST], bool]:
        """Tells whether an expression is an object that ``name`` makes."""
        of_it = {ast.unparse(target) for target, value in self._bindings() if name in _operands(value)}
        return lambda node: name in _operands(node) or ast.unparse(node) in of_it

    def _is_operated_on(self, name: str) -> bool:
        """Return whether two objects of a class meet in an operator, or tests ask one for a yes and for a
        no."""
        is_one = self._is_made_by(name)
        seen: set[type[ast.AST]] = set()
        for node in self.nodes:
            if isinstance(node, ast.BinOp | ast.Compare):
                other = node.right if isinstance(node, ast.BinOp) else node.comparators[0]
                if is_one(node.left) and is_one(other):
                    return True
            if isinstance(node, ast.Compare) and is_one(node.comparators[0]):
                seen.add(type(node.ops[0]))
            if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and is_one(node.operand):
                seen.add(ast.Not)
            asserted = node.values if isinstance(node, ast.BoolOp) else []
            asserted = [node.test] if isinstance(node, ast.Assert) else asserted
            if any(is_one(each) for each in asserted if isinstance(each, ast.Call | ast.Name)):
                seen.add(ast.Assert)
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and is_one(node.value):
                return True
        return {ast.In, ast.NotIn} <= seen or {ast.Not, ast.Assert} <= seen


def compared_values(nodes: Iterable[ast.AST]) -> set[int]:
    """The ids of the nodes that are compared."""
    found: set[int] = set()
    for node in nodes:
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and len(node.args) > 1:
            sides = node.args[:2] if node.func.attr.startswith("assert") else []
        is_given = isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn)
        found |= {id(side) for side in (sides[1:] if is_given else sides)}  # `x in bag` hands x to the bag
    return found


def _operands(node: ast.AST) -> set[str]:
    """The names that an expression calls for its operands, or for what its lists and dicts hold."""
    if isinstance(node, ast.Call):
        return {node.func.id} if isinstance(node.func, ast.Name) else set()
    if isinstance(node, ast.BinOp | ast.UnaryOp | ast.List | ast.Tuple | ast.Set | ast.Dict):
        parts = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.expr)]
        return {name for each in parts for name in _operands(each)}
    return set()
