"""Solutions that forge a verdict score what a wrong solution scores, and right solutions score 1.

The attacks run here without namespaces too, so none may touch a file or a process that is not its sandbox's:
they write to their working directory alone, and to processes of their own session.
"""

from __future__ import annotations

import sys

import pytest
from denied_calls import UNSHARE, interpreter_denied

from environments.rewards.code.reward import code_reward_fn
from environments.sandbox.local import BestEffortSandbox

pytestmark = pytest.mark.slow

FORGE = """
import os
for descriptor in range(3, 64):
    try:
        os.pwrite(descriptor, b"passed", 0)
    except OSError:
        pass
os._exit(0)
"""
FIND = "import os, sys, gc, glob, signal, time, ctypes, threading, subprocess, builtins\n"
WRONG = "\ndef add(a, b): return 9\n"


def decoy(module: str, result: str = "9") -> str:
    """Puts a forging module of this name into the working directory."""
    return f"import os\nopen('{module}.py', 'w').write({FORGE!r})\ndef add(a, b): return {result}\n"


def claims(module: str, name: str) -> str:
    """Beside a decoy of ``module``, an object that says that it is of its class ``name``."""
    return (
        f"{decoy(module)}class Claim: pass\nClaim.__module__, Claim.__qualname__ = {module!r}, {name!r}\n"
        "Claim.numerator = Claim.denominator = 3\ndef add(a, b): return Claim()\n"
    )


def liar(methods: str) -> str:
    """An object with these methods, in the place of every result."""
    body = "".join(f"    {line}\n" for line in methods.split("\n"))
    return f"class Liar:\n{body}def add(a, b): return Liar()\n"


def at_start(action: str) -> str:
    """Runs ``action`` as soon as the solution is loaded, and then is wrong; whatever it raises is dropped."""
    body = "".join(f"    {line}\n" for line in action.strip().split("\n"))
    return f"{FIND}try:\n{body}except BaseException: pass\n{WRONG}"


PLAIN = "assert add(1, 2) == 3"
CHECK = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
TOLERANT = "assert not abs(add(1, 2) - 3) > 1e-6"
NUMPY = "import numpy as np\nassert np.allclose(add(1, 2), 3) and np.array_equal(add(1, 2), np.array([3]))"
RAISES = "import pytest\nwith pytest.raises(ValueError):\n    add(1, 'a')\nassert add(1, 2) == 3"
MAPPED = "assert all(map(lambda pair: add(*pair) == sum(pair), [(1, 2), (3, 4)]))"
MEMBER = "assert 3 in add(1, 2)"

PARENTS = """
parent = os.getppid()
for process in (parent, int(open(f'/proc/{parent}/stat').read().split()[3])):
    for name in os.listdir(f'/proc/{process}/fd'):
        with open(f'/proc/{process}/fd/{name}', 'r+b', buffering=0) as file:
            file.write(b'passed')
"""
MEMORY = """
for line in open(f'/proc/{os.getppid()}/maps'):
    begin, end = (int(number, 16) for number in line.split()[0].split('-'))
    if 'rw' in line:
        with open(f'/proc/{os.getppid()}/mem', 'r+b', buffering=0) as file:
            file.seek(begin)
            data = file.read(end - begin)
            if b'== 3' in data:
                file.seek(begin + data.index(b'== 3'))
                file.write(b'== 9')
"""
OUTPUT = """
import json
forged = (json.dumps({"text": "passed", "error": None}) + '\\n').encode()
for name in filter(str.isdecimal, os.listdir('/proc')):
    try:
        if os.getsid(int(name)) == os.getsid(0):
            with open(f'/proc/{name}/fd/1', 'r+b', buffering=0) as file: file.write(forged * 3)
    except OSError: pass
"""
PRINTED = """
forged = b'{"text": "passed", "error": null}' + bytes([10])
for descriptor in range(64):
    try: os.write(descriptor, forged)
    except OSError: pass
"""
LEFT_OVER = """
session = os.getsid(0)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            for name in filter(str.isdecimal, os.listdir('/proc')):
                try:
                    if os.getsid(int(name)) != session: continue
                    for descriptor in os.listdir(f'/proc/{name}/fd'):
                        path = f'/proc/{name}/fd/{descriptor}'
                        os.pwrite(os.open(path, os.O_RDWR | os.O_NONBLOCK), b'passed', 0)
                except OSError: pass
    os._exit(0)
"""
TRACED = """
libc = ctypes.CDLL(None)
assert libc.ptrace(16, os.getppid(), 0, 0) == 0
libc.ptrace(17, os.getppid(), 0, 0)
"""
INTERFACE = (
    "import ctypes\nspace = ctypes.create_string_buffer(bytes(8))\nclass Liar:\n"
    "    __array_interface__ = {'shape': (), 'typestr': '<f8', 'version': 3,\n"
    "        'data': (ctypes.addressof(space), False)}\n"
    "    def __array__(self, *_): raise AttributeError\n"
    "    __float__ = None\ndef add(a, b): return Liar()\n"
)

ATTACKS = {
    "a decoy of decimal and an object that claims to be of it": (claims("decimal", "Decimal"), PLAIN),
    "a decoy of fractions and an object that claims to be of it": (claims("fractions", "Fraction"), PLAIN),
    "a decoy of decimal for check": (claims("decimal", "Decimal"), CHECK),
    "a decoy of collections.abc": (claims("collections", "deque"), PLAIN),
    "a decoy of pytest": (decoy("pytest"), RAISES),
    "a decoy of numpy": (decoy("numpy"), NUMPY),
    "a decoy of datetime": (decoy("datetime"), f"import datetime\n{PLAIN}"),
    "a decoy of unittest": (
        decoy("unittest"),
        "import unittest\nclass TestAdd(unittest.TestCase):\n"
        "    def test_add(self): self.assertEqual(add(1, 2), 3)",
    ),
    "a decoy of dataclasses": (decoy("dataclasses"), f"from dataclasses import dataclass\n{PLAIN}"),
    "a decoy of traceback, which shows errors": (decoy("traceback"), PLAIN),
    "a decoy of _strptime, which datetime imports late": (
        decoy("_strptime"),
        f"import datetime\ndatetime.datetime.strptime('2020', '%Y')\n{PLAIN}",
    ),
    "a decoy of a package": (
        f"import os\nos.mkdir('numpy')\nopen('numpy/__init__.py', 'w').write({FORGE!r})\n{WRONG}",
        NUMPY,
    ),
    "sitecustomize, usercustomize and a .pth file": (
        f"import os, site\nos.makedirs(site.getusersitepackages(), exist_ok=True)\n"
        "for folder in ('.', site.getusersitepackages()):\n"
        "    for name in ('sitecustomize.py', 'usercustomize.py', 'a.pth'):\n"
        f"        open(f'{{folder}}/{{name}}', 'w').write('import os; exec({FORGE!r})')\n{WRONG}",
        "import subprocess, sys\n"
        "assert subprocess.run([sys.executable, '-c', 'print(3)'], capture_output=True, text=True)"
        ".stdout == f'{add(1, 2)}\\n'",
    ),
    "PYTHONPATH and PYTHONSTARTUP": (
        at_start("os.environ.update(PYTHONPATH='.', PYTHONSTARTUP='x.py', PYTHONOPTIMIZE='2')"), PLAIN,
    ),
    "__eq__ that says yes": (liar("def __eq__(self, other): return True\n__hash__ = lambda self: 3"), PLAIN),
    "__eq__ of a subclass of int": (
        "class Liar(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Liar(9)", PLAIN,
    ),
    "__ne__ that says no": (liar("def __ne__(self, other): return False"), "assert not add(1, 2) != 3"),
    "__contains__ that says yes": (liar("def __contains__(self, item): return True"), MEMBER),
    "__contains__ of a subclass of list": (
        "class Liar(list):\n    def __contains__(self, item): return True\ndef add(a, b): return Liar()",
        MEMBER,
    ),
    "startswith that says yes": (
        liar("def startswith(self, text): return True"), "assert add('a', 'b').startswith('ab')",
    ),
    "startswith of a subclass of str": (
        "class Liar(str):\n    def startswith(self, text): return True\ndef add(a, b): return Liar('no')",
        "assert add('a', 'b').startswith('ab')",
    ),
    "issubset that says yes": (
        liar("def issubset(self, other): return True"), "assert add({1}, {2}).issubset({1, 2})",
    ),
    "__bool__ and every operator": (
        liar(
            "def __bool__(self): return False\n"
            "__sub__ = __rsub__ = __abs__ = __gt__ = __lt__ = __xor__ = lambda self, *_: self"
        ),
        TOLERANT,
    ),
    "__len__ and __iter__ of other lengths": (
        liar("def __len__(self): return 1\ndef __iter__(self): return iter(())"),
        "assert [*add([1], [])] == [1] and len(add([1], [])) == 1",
    ),
    "NaN under a tolerance": ("def add(a, b): return float('nan')", TOLERANT),
    "NaN in a list": (
        "def add(a, b): return [3.0, float('nan')]",
        "assert max(abs(x - y) for x, y in zip(add(1, 2), [3.0, 7.0])) < 1e-6",
    ),
    "NaN in an array": (
        "import numpy\ndef add(a, b): return numpy.array([numpy.nan])",
        "import numpy as np\nassert not (np.abs(add(1, 2) - np.array([3.0])) > 1e-6).any()",
    ),
    "NaN as a subclass of float": (
        "class Liar(float): pass\ndef add(a, b): return Liar('nan')", TOLERANT,
    ),
    "StopIteration under all(map())": ("def add(a, b): raise StopIteration", MAPPED),
    "a subclass of StopIteration": (
        "class Stop(StopIteration): pass\ndef add(a, b): raise Stop", MAPPED,
    ),
    "StopIteration of an operator": (
        liar("def __add__(self, other): raise StopIteration\n__getitem__ = __bool__ = __len__ = __add__"),
        "assert all(map(lambda pair: add(*pair)[0] == sum(pair), [(1, 2), (3, 4)]))",
    ),
    "sys.exit": ("import sys\nsys.exit(0)", PLAIN),
    "os._exit": ("import os\ndef add(a, b): os._exit(0)", PLAIN),
    "SystemExit where errors are expected": (
        "def add(a, b):\n    if b == 'a': raise ValueError\n    raise SystemExit(0)", RAISES,
    ),
    "an error whose name is another's": (
        "def error(name): return type(name, (Exception,), {'__module__': 'builtins'})\n"
        "def add(a, b): raise error('SystemExit')('0')", PLAIN,
    ),
    "atexit": (f"import atexit\natexit.register(lambda: exec({FORGE!r})){WRONG}", PLAIN),
    "patched builtins": (
        at_start("builtins.AssertionError = ValueError\nbuiltins.exec = builtins.compile = print"), PLAIN,
    ),
    "builtins of the solution's own": (
        "__builtins__ = {}\nabs = isclose = lambda *_: 0\ndef add(a, b): return 9",
        "assert abs(add(1, 2) - 3) < 1",
    ),
    "an own np for tests that do not import it": (
        "class np:\n    allclose = staticmethod(lambda *_: True)\n    array = list\ndef add(a, b): return 9",
        "assert np.allclose(add(1, 2), 3)",
    ),
    "an own pd, where pandas may not be installed": (
        "class pd:\n    Series = staticmethod(lambda *_: 9)\ndef add(a, b): return 9",
        "assert add(1, 2) == pd.Series([3])",
    ),
    "an own Decimal for tests that do not import it": (
        "def Decimal(text): return 9\ndef add(a, b): return 9", "assert add(1, 2) == Decimal('3')",
    ),
    "patched sys.modules": (
        at_start("for name in list(sys.modules):\n    sys.modules[name] = sys.modules['os']"), PLAIN,
    ),
    "frames": (
        at_start(
            "frame = sys._getframe()\nwhile frame:\n"
            "    os.write(frame.f_locals.get('files', (0, 1, 2))[1], b'passed')\n    frame = frame.f_back"
        ),
        PLAIN,
    ),
    "the garbage collector": (
        at_start(
            "for thing in gc.get_objects():\n    if hasattr(thing, 'fileno'):\n"
            "        try: os.pwrite(thing.fileno(), b'passed', 0)\n        except Exception: pass"
        ),
        PLAIN,
    ),
    "code in the place of a reply": (
        at_start(
            "import marshal, pickle\nclass Run:\n"
            "    def __reduce__(self): return exec, ('import os; os._exit(0)',)\n"
            "for descriptor in range(3, 64):\n"
            "    code = compile('3', '', 'eval')\n"
            "    for text in (pickle.dumps(Run()), marshal.dumps(('returned', code, []))):\n"
            "        try: os.write(descriptor, text + bytes([10]))\n        except OSError: pass"
        ),
        PLAIN,
    ),
    "replies before the requests": (
        at_start(
            "for descriptor in range(3, 64):\n"
            "    try: os.write(descriptor, b'[\"returned\", [\"datetime.sys\", []], []]' + bytes([10]))\n"
            "    except OSError: pass"
        ),
        PLAIN,
    ),
    "an array that says where its memory is": (
        INTERFACE, "import numpy as np\nassert np.asarray(add(1, 2)) == 0",
    ),
    "signals that a program may catch": (
        at_start("for number in (2, 10, 12, 14, 15): os.kill(os.getppid(), number)"),
        f"import pytest\ntry:\n    for _ in range(1000): add(1, 'a')\nexcept: pass\nelse: {PLAIN}",
    ),
    "a killed parent": (at_start("os.kill(os.getppid(), 9)"), PLAIN),
    "a stopped parent": (at_start("os.kill(os.getppid(), 19)"), PLAIN),
    "descriptors of the tests": (at_start(PARENTS), PLAIN),
    "memory of the tests": (at_start(MEMORY), PLAIN),
    "the output of the sandbox": (at_start(OUTPUT), PLAIN),
    "verdicts on every descriptor": (at_start(PRINTED), PLAIN),
    "a process that stays for the next test": (at_start(LEFT_OVER), [PLAIN, PLAIN, PLAIN]),
    "a thread that goes on": (
        at_start(f"threading.Thread(target=lambda: [time.sleep(0.2), exec({FORGE!r})]).start()"), PLAIN,
    ),
    "ptrace": (at_start(TRACED), PLAIN),
    "a limit of the tests": (at_start("import resource\nresource.prlimit(os.getppid(), 0, (0, 0))"), PLAIN),
    "files that stand where tests look": (
        "for name in ('solution.py', 'tests.py', 'conftest.py', 'pytest.ini'):\n"
        f"    open(name, 'w').write('def add(a, b): return a + b'){WRONG}",
        f"from solution import add\n{PLAIN}",
    ),
}  # fmt: skip

HONEST = {
    "a list, as in MBPP": ("def add(a, b): return a + b", [PLAIN, "assert add('a', 'b') == 'ab'"]),
    "check, as in HumanEval": ("def add(a, b): return a + b", CHECK),
    "functions, as in KodCode": (
        "def add(a, b): return a + b",
        "from solution import add\nimport pytest\n\ndef test_add():\n"
        "    assert add(1, 2) == pytest.approx(3)\n@pytest.mark.parametrize('a, b', [(1, 2), (3, 4)])\n"
        "def test_more(a, b):\n    assert add(a, b) == a + b\n"
        "class TestAdd:\n    def test_text(self): assert add('a', 'b') == 'ab'",
    ),
    "unittest": (
        "def add(a, b): return a + b",
        "import unittest\nclass Case(unittest.TestCase):\n    def setUp(self): self.one = 1\n"
        "    def test_add(self): self.assertEqual(add(self.one, 2), 3)\n"
        "if __name__ == '__main__': unittest.main()",
    ),
    "functional": ("def add(a, b): return a + b", {"functional": f"{PLAIN}\n{MAPPED}\n{TOLERANT}"}),
    "raised errors": (
        "def add(a, b):\n    if b == 'a': raise ValueError('no number')\n    return a + b", RAISES,
    ),
    "numpy": (
        "import numpy as np\ndef add(a, b): return np.array([a]) + b\ndef ones(n): return np.ones((n, n))",
        f"{NUMPY}\nassert add(1, 2)[0] == 3 and (ones(2) @ ones(2)).sum() == 8 and ones(2).shape == (2, 2)\n"
        "np.testing.assert_allclose(add(np.array([1.0]), 2)[0], [3.0])",
    ),
    "np without an import": (
        "import numpy as np\ndef add(a, b): return a + b", "assert np.allclose(add(1, 2), 3)",
    ),
    "times": (
        "import datetime\ndef add(a, b): return a + datetime.timedelta(days=b)",
        "from datetime import date, datetime\nassert add(date(2020, 1, 31), 1) == date(2020, 2, 1)\n"
        "assert add(datetime(2020, 1, 1), 1) == datetime.strptime('2020-01-02', '%Y-%m-%d')",
    ),
    "NaN, where the tests name it": (
        "def add(a, b): return float('nan')", "import math\nassert math.isnan(add(1, 2))",
    ),
    "membership": (
        "class Bag:\n    def __init__(self, *items): self.items = items\n"
        "    def __contains__(self, item): return item in self.items\ndef add(a, b): return {a, b, a + b}",
        f"{MEMBER} and 4 not in add(1, 2)\nbag = Bag(1, 2)\nassert 2 in bag and 3 not in bag",
    ),
    "iterators": (
        "def add(a, b):\n    yield a\n    yield b",
        "it = add(1, 2)\nassert next(it) == 1 and [*it] == [2] and next(it, None) is None\n"
        "assert 2 in add(1, 2)\n"
        "try: next(it)\nexcept StopIteration: pass\nelse: assert False",
    ),
    "values of many types": (
        "def add(a, b): return [a, b, 10**5000, 1j, b'x', range(3), inf, {1: {2}}, frozenset()]",
        "assert add('a', None) == ['a', None, 10**5000, 1j, b'x', range(3), inf, {1: {2}}, frozenset()]",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def denied(tmp_path_factory: pytest.TempPathFactory) -> str:
    return interpreter_denied(tmp_path_factory.mktemp("denied"), UNSHARE)


@pytest.fixture(params=["isolated", "without namespaces"])
def score(request, monkeypatch, denied):
    """Scores a solution where the kernel allows namespaces, and where it does not."""
    if request.param == "without namespaces":
        monkeypatch.setattr(sys, "executable", denied)
    assert BEST_EFFORT.run("1").isolated is (request.param == "isolated")

    def score(code: str, tests: object) -> float:
        task = {"tests": tests, **({"entry_point": "add"} if tests == CHECK else {})}
        return code_reward_fn(task, f"```python\n{code}\n```", sandbox=BEST_EFFORT).reward

    return score


BEST_EFFORT = BestEffortSandbox()


@pytest.mark.parametrize("attack", ATTACKS)
def test_forging_solution_scores_what_a_wrong_one_scores(attack, score):
    assert score(*ATTACKS[attack]) == 0.0


@pytest.mark.parametrize("shape", HONEST)
def test_wrong_solution_scores_nothing(shape, score):
    assert score(WRONG, HONEST[shape][1]) == 0.0


@pytest.mark.parametrize("shape", HONEST)
def test_right_solution_scores_one(shape, score):
    code, tests = HONEST[shape]
    assert score(code, tests) == 1.0
