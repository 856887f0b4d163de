"""Reads the tests of a task, in the shapes that public sets of programming problems have."""

from __future__ import annotations

import ast
import base64
import binascii
import pickletools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from operator import not_
from typing import Any, Literal

from environments.errors import DatasetError
from environments.rewards.base import lacking
from environments.rewards.code.forms import parsed_tests, playable_tests
from environments.rewards.code.large_json import read_json, write_json
from environments.rewards.code.usage import calls_check
from environments.sandbox.base import clip
from environments.syntax_tree import parse_module

_COLUMNS = ("tests", "ground_truth", "input_output")
_SHAPES = (
    '[{"input": ..., "output": ...}], {"input": [...], "output": [...]}, '
    '{"inputs": [...], "outputs": [...]} (with "fn_name" for calls), '
    '{"functional": "assert ..."}, a text of assertions or a list of such'
)
_MAX_TESTS_BYTES = 1 << 30
_CODES_OF_A_TEXT = {"PROTO", "FRAME", "MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT", "STOP"}
_TEXTS = {"UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"}


@dataclass(frozen=True)
class CodeTest:
    """A test.

    ``stdin``: the program prints ``expected`` when it reads ``input``. ``call``: ``function``, called with
    the JSON list ``input`` (or with a JSON object of keywords), returns ``expected``. ``assert``: the source
    ``input`` runs through; ``function`` is known to it as ``candidate``. A test that is not ``public`` is not
    shown to the model. Where several outputs are right, the source ``checker`` says which, see ``checker``.
    """

    kind: Literal["stdin", "call", "assert"]
    input: str
    expected: Any = None
    function: str | None = None
    public: bool = True
    checker: str | None = None


def read_tests(task_info: dict[str, Any]) -> list[CodeTest]:
    """Return the tests of a task, which are in one of its columns.

    ``tests`` or ``ground_truth``: data, or JSON text of it; ``input_output``: the same, as APPS and TACO name
    it; ``public_test_cases`` and ``private_test_cases``: LiveCodeBench's.

    Raises:
        DatasetError: there are none, they have an unknown shape, or a form that cannot be played.
    """
    given = next((task_info[name] for name in _COLUMNS if task_info.get(name)), None)
    function = _function_of(task_info)
    tests = _tests_in(_parsed(given), function) if given else _tests_of_live_code_bench(task_info, function)
    if not tests:
        raise lacking(task_info, "tests in 'tests' or 'ground_truth'", f"add some as {_SHAPES}.")
    return [_completed(test, task_info.get("prompt"), task_info.get("checker")) for test in tests]


def _completed(test: CodeTest, prompt: Any, checker: Any) -> CodeTest:
    """The test with the helpers that the task's prompt has, or with the task's checker.

    Raises:
        DatasetError: it cannot be played, or the checker is no source that defines ``check``.
    """
    if test.kind == "assert":
        test = replace(test, input=playable_tests(test.input, test.function, prompt))
    if not checker:
        return test
    if test.kind == "assert":
        raise DatasetError("A 'checker' judges no tests that are assertions: write inputs and outputs.")
    try:
        defined = [node.name for node in parse_module(checker).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError, TypeError) as error:
        raise DatasetError(f"The checker {clip(repr(checker), 100)} is no Python: {error}.") from error
    if "check" not in defined:
        raise DatasetError("The checker defines no function check(input, output, expected). Add it.")
    return replace(test, checker=checker)


# -- shapes ----------------------------------------------------------------------------------------------


def _parsed(given: Any) -> Any:
    """The data that a JSON text holds; anything else as it is."""
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        try:
            return read_json(given)
        except (ValueError, RecursionError):
            return given
    return given


def _tests_in(given: Any, function: str | None, in_list: bool = False) -> list[CodeTest]:
    if not given:
        return []
    if isinstance(given, str):
        tree = parsed_tests(given)
        if "def check(" in given and function is None and not calls_check(tree):
            raise DatasetError(
                "The tests define check(candidate) and do not call it: name the function in 'entry_point', "
                "or end them with a call such as check(Solution().f)."
            )
        return [CodeTest("assert", given, function=function)]
    if isinstance(given, list | tuple):
        return [test for item in _with_imports(given) for test in _tests_in(item, function, in_list=True)]
    if isinstance(given, dict):
        function = _function_of(given) or function
        if "inputs" in given and "outputs" in given:
            inputs, outputs = given["inputs"], given["outputs"]
            if len(inputs) != len(outputs):
                raise DatasetError(f"The tests have {len(inputs)} inputs but {len(outputs)} outputs.")
            return [_pair(bool(function), *pair, function) for pair in zip(inputs, outputs, strict=True)]
        if "input" in given and "output" in given:
            return _cases(given, function, in_list)
        if "functional" in given:
            return _tests_in(given["functional"], function)
    shown = sorted(given) if isinstance(given, dict) else clip(repr(given), 100)
    raise DatasetError(f"The tests have an unknown shape ({shown}): write them as {_SHAPES}.")


def _with_imports(rows: Sequence[Any]) -> list[Any]:
    """The rows of a list of tests, with those that only import at the head of each other one."""

    def imports(row: Any) -> bool:
        body = parsed_tests(row).body if isinstance(row, str) else [None]
        return all(isinstance(node, ast.Import | ast.ImportFrom) for node in body)

    is_import = list(map(imports, rows))
    head = "".join(f"{row}\n" for row in compress(rows, is_import))
    tests = compress(rows, map(not_, is_import))
    return [head + row if isinstance(row, str) else row for row in tests] or list(rows)


def _cases(given: dict[str, Any], function: str | None, in_list: bool) -> list[CodeTest]:
    """The test, or the two columns of tests, with an input and an output. A named function is called."""
    kind = given.get("testtype")
    if kind == "functional" and function is None:
        raise DatasetError("A functional test names no function: add 'metadata': {'func_name': ...}.")
    called = kind != "stdin" and function is not None
    inputs, outputs = given["input"], given["output"]
    # As CodeContests has them; else a test is a list of lines, or the list of a call's arguments.
    columns = isinstance(inputs, list) and isinstance(outputs, list) and len(inputs) == len(outputs)
    if called:
        columns = columns and not in_list and all(isinstance(each, list | dict) for each in inputs)
    pairs = list(zip(inputs, outputs, strict=True)) if columns else [(inputs, outputs)]
    public = not given.get("private", False)
    return [replace(_pair(called, *each, function), public=public) for each in pairs]


def _function_of(info: dict[str, Any]) -> str | None:
    metadata = _parsed(info.get("metadata"))
    named = metadata.get("func_name") if isinstance(metadata, dict) else None
    return info.get("entry_point") or info.get("fn_name") or named


def _pair(called: bool, question: Any, answer: Any, function: str | None) -> CodeTest:
    if not called:
        return CodeTest("stdin", _joined(question), _joined(answer))
    if isinstance(question, str):  # LiveCodeBench: a JSON value per line, one for each argument
        question, answer = [_json(line) for line in question.splitlines() if line.strip()], _json(answer)
    if not isinstance(question, list | tuple | dict):
        raise DatasetError(f"The input {question!r:.100} of a call is no list of arguments: write one.")
    return CodeTest("call", write_json(question), answer, function)


def _joined(text: Any) -> str:
    if isinstance(text, list):
        return "\n".join(map(_joined, text))
    return write_json(text) if isinstance(text, int) and not isinstance(text, bool) else str(text)


def _json(text: Any) -> Any:
    try:
        return read_json(text) if isinstance(text, str) else text
    except ValueError as error:
        raise DatasetError(f"A functional test has {text!r:.100}, which is no JSON: {error}.") from error


# -- LiveCodeBench ---------------------------------------------------------------------------------------


def _tests_of_live_code_bench(task_info: dict[str, Any], function: str | None) -> list[CodeTest]:
    public = _tests_in(_parsed(task_info.get("public_test_cases")), function)
    private = task_info.get("private_test_cases")
    if isinstance(private, str) and private.lstrip()[:1] not in ("", "["):
        private = pickled_text(private)
    return public + [replace(test, public=False) for test in _tests_in(_parsed(private), function)]


def pickled_text(encoded: str) -> str:
    """The text that was pickled, compressed by zlib and written in base64: LiveCodeBench's private tests.

    No pickle is run: one may call any function. Its codes are read, and have to be those of a text alone.

    Raises:
        DatasetError: it holds something else.
    """
    try:
        unpacked = zlib.decompressobj()
        data = unpacked.decompress(base64.b64decode(encoded, validate=True), _MAX_TESTS_BYTES)
        texts = []
        for code, argument, _ in pickletools.genops(data):
            if code.name in _TEXTS:
                texts.append(argument)
            elif code.name not in _CODES_OF_A_TEXT:
                raise ValueError(f"its code {code.name} makes something else than a text")
        if len(texts) != 1 or unpacked.unconsumed_tail:
            raise ValueError(f"it holds {len(texts)} texts, or one of more than {_MAX_TESTS_BYTES} bytes")
        return str(texts[0])
    except (ValueError, zlib.error, binascii.Error) as error:
        raise DatasetError(
            f"'private_test_cases' is {clip(encoded, 50)!r}, no pickled text as LiveCodeBench has it: "
            f"{error}. Write the tests as JSON."
        ) from error
