"""Right programs, one for each form of test that public sets of programming problems have.

``HONEST`` has by name: the task without its question, and the program. Its names begin with the set.
"""

# ruff: noqa: E501 - a table: a case has two lines
from __future__ import annotations

import base64
import json
import pickle
import zlib
from typing import Any

ADD = "def add(a, b):\n    return a + b\n"
NODE = (
    "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val = val\n        self.next = next\n"
    "def linked(values):\n    head = None\n    for value in reversed(values):\n        head = ListNode(value, head)\n"
    "    return head\n"
    "def values(head):\n    found = []\n    while head:\n        found.append(head.val)\n        head = head.next\n"
    "    return found\n"
)
TREE = (
    "class TreeNode:\n    def __init__(self, val=0, left=None, right=None):\n"
    "        self.val, self.left, self.right = val, left, right\n"
)
STACK = (
    "class Stack:\n    def __init__(self): self.items = []\n    def push(self, item): self.items.append(item)\n"
    "    def pop(self):\n        if not self.items: raise IndexError('empty')\n        return self.items.pop()\n"
    "    def __len__(self): return len(self.items)\n    def __contains__(self, item): return item in self.items\n"
)
SHAPES = (
    "from abc import ABC, abstractmethod\nclass Shape(ABC):\n    def __init__(self, name='shape'): self.name = name\n"
    "    @abstractmethod\n    def area(self): ...\n"
    "    def describe(self): return f'{self.name} of {self.area()}'\n"
)


def pickled(tests: list[dict[str, Any]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def columns(**task: Any) -> dict[str, Any]:
    return {"input_output": json.dumps(task)}


HONEST: dict[str, tuple[dict[str, Any], str]] = {
    # -- LiveCodeBench: programs that read and print, functions, tests that are hidden as a pickled text
    "LiveCodeBench: standard input": (
        {"tests": [{"input": "2\n1 2\n3 4\n", "output": "3\n7\n", "testtype": "stdin"}]},
        "for _ in range(int(input())):\n    print(sum(map(int, input().split())))",
    ),
    "LiveCodeBench: functional": (
        {
            "tests": [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}],
            "metadata": '{"func_name": "shift"}',
        },
        "class Solution:\n    def shift(self, xs: List[int], by: int) -> List[int]: return [x + by for x in xs]",
    ),
    "LiveCodeBench: public and private tests": (
        {
            "public_test_cases": json.dumps([{"input": "1", "output": "1", "testtype": "stdin"}]),
            "private_test_cases": pickled([{"input": "12", "output": "144", "testtype": "stdin"}] * 3),
            "metadata": "{}",
        },
        "print(int(input()) ** 2)",
    ),
    "LiveCodeBench: private functional tests": (
        {
            "public_test_cases": "[]",
            "private_test_cases": pickled([{"input": '"ab"', "output": '"ba"', "testtype": "functional"}]),
            "metadata": '{"func_name": "turned"}',
        },
        "class Solution:\n    def turned(self, s: str) -> str: return s[::-1]",
    ),
    "LiveCodeBench: numbers with a tolerance": (
        {"tests": [{"input": "3", "output": "0.333333333", "testtype": "stdin"}]}, "print(1 / int(input()))",
    ),
    "LiveCodeBench: a long number is printed": (
        {"tests": [{"input": "5000", "output": "1" + "0" * 5000}]}, "print(10 ** int(input()))",
    ),
    "LiveCodeBench: a long number is read": (
        {"tests": [{"input": "7" * 5000, "output": "7" * 4999 + "8"}]}, "print(int(input()) + 1)",
    ),
    # -- APPS and TACO: the column input_output
    "APPS: input_output": (
        columns(inputs=["1 2\n", "3 4\n"], outputs=["3\n", "7\n"]), "print(sum(map(int, input().split())))",
    ),
    "APPS: lists of lines": (
        columns(inputs=[["1", "2"]], outputs=[["3", "2"]]), "a, b = int(input()), int(input())\nprint(a + b)\nprint(a * b)",
    ),
    "APPS: fn_name": (columns(inputs=[[1, 2], [3, 4]], outputs=[3, 7], fn_name="add"), ADD),
    "APPS: a result as a list of one": (columns(inputs=[["a", "b"]], outputs=[["ab"]], fn_name="add"), ADD),
    "APPS: fn_name beside a list of cases": (
        {"tests": [{"input": [2, 3], "output": 5}, {"input": [[1], [2]], "output": [1, 2]}], "fn_name": "add"}, ADD,
    ),
    "APPS: keywords": ({"tests": [{"input": {"a": 2, "b": 3}, "output": 5}], "fn_name": "add"}, ADD),
    "APPS: a result that is a long number": (
        columns(inputs=[[5000]], outputs=["x"], fn_name="f").copy()
        | {"input_output": '{"inputs": [[5000]], "outputs": [1' + "0" * 5000 + '], "fn_name": "f"}'},
        "def f(n): return 10 ** n",
    ),
    "APPS: an argument that is a long number": (
        {"tests": [{"input": [10**5000], "output": 10**5000 + 1}], "fn_name": "f"}, "def f(n): return n + 1",
    ),
    "APPS: several right answers": (
        {
            "tests": [{"input": "10", "output": "3 7"}, {"input": "9", "output": "2 7"}],
            "checker": "def check(input, output, expected):\n    a, b = map(int, output.split())\n"
            "    return a + b == int(input) and all(n > 1 and all(n % d for d in range(2, n)) for n in (a, b))",
        },
        "n = int(input())\nprint(*((5, 5) if n == 10 else (7, 2)))",
    ),
    "APPS: several right results": (
        {
            "tests": [{"input": [[3, 1, 2]], "output": [2, 1]}],
            "fn_name": "peak",
            "checker": "def check(input, output, expected):\n    (xs,) = input\n    return xs[output[0]] == max(xs)",
        },
        "def peak(xs): return [xs.index(max(xs))]",
    ),
    # -- HumanEval+: check(candidate)
    "HumanEval+: check": (
        {"tests": "METADATA = {}\ndef check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"}, ADD,
    ),
    "HumanEval+: inputs and results with a tolerance": (
        {
            "tests": "import numpy as np\ndef is_floats(x) -> bool:\n    if isinstance(x, float): return True\n"
            "    if isinstance(x, (list, tuple)): return all(isinstance(i, float) for i in x)\n"
            "    if isinstance(x, np.ndarray): return x.dtype == np.float64 or x.dtype == np.float32\n    return False\n"
            "def assertion(out, exp, atol):\n    exact_match = out == exp\n    if atol == 0 and is_floats(exp): atol = 1e-6\n"
            "    if not exact_match and atol != 0:\n        np.testing.assert_allclose(out, exp, rtol=1e-07, atol=atol)\n"
            "    else:\n        assert exact_match\n"
            "def check(candidate):\n    inputs = [[[1.0, 2.0]], [[3.0]]]\n    results = [1.5, 3.0]\n"
            "    for i, (inp, exp) in enumerate(zip(inputs, results)):\n        assertion(candidate(*inp), exp, 0)\n",
            "entry_point": "mean",
        },
        "def mean(xs): return sum(xs) / len(xs)",
    ),
    "HumanEval+: a helper of the prompt": (
        {
            "prompt": "def encode(s: str):\n    return ''.join(chr(ord(c) + 1) for c in s)\n"
            "def decode(s: str):\n    ''' takes as input string encoded with encode '''\n",
            "tests": "def check(candidate):\n    for s in ('abc', 'xyz'):\n        assert candidate(encode(s)) == s\n",
            "entry_point": "decode",
        },
        "def encode(s): return ''.join(chr(ord(c) + 1) for c in s)\ndef decode(s): return ''.join(chr(ord(c) - 1) for c in s)",
    ),
    "HumanEval+: a helper that judges": (
        {
            "prompt": "import math\ndef poly(xs: list, x: float):\n"
            "    return sum([coeff * math.pow(x, i) for i, coeff in enumerate(xs)])\n"
            "def find_zero(xs: list):\n    ''' find x such that poly(x) = 0 '''\n",
            "tests": "def check(candidate):\n    import math\n    coeffs = [-6.0, 2.0]\n    solution = candidate(list(coeffs))\n"
            "    assert math.fabs(poly(coeffs, solution)) < 1e-4\n",
            "entry_point": "find_zero",
        },
        "def poly(xs, x): return sum(c * x ** i for i, c in enumerate(xs))\ndef find_zero(xs): return -xs[0] / xs[1]",
    ),
    "HumanEval+: an error": (
        {
            "tests": "def check(candidate):\n    try:\n        candidate(-1)\n        assert False\n    except ValueError: pass\n"
            "    assert candidate(4) == 2\n",
            "entry_point": "root",
        },
        "def root(x):\n    if x < 0: raise ValueError('negative')\n    return int(x ** 0.5)",
    ),
    "HumanEval+: NaN": (
        {
            "tests": "import math\ndef check(candidate):\n    assert math.isnan(candidate([]))\n    assert candidate([1, 3]) == 2\n",
            "entry_point": "mean",
        },
        "def mean(xs): return sum(xs) / len(xs) if xs else float('nan')",
    ),
    # -- MBPP+: lists of assertions
    "MBPP+: a list of assertions": ({"tests": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]}, ADD),
    "MBPP+: sets": (
        {"tests": ["assert set(common((3, 4, 5), (5, 4, 9))) == set((4, 5))"]}, "def common(a, b): return tuple(set(a) & set(b))",
    ),
    "MBPP+: isclose": (
        {"tests": ["assert math.isclose(area(2), 12.566370614359172, rel_tol=0.001)"]}, "def area(r): return math.pi * r * r",
    ),
    "MBPP+: a class of the program's": (
        {"tests": ["assert longest([Pair(5, 24), Pair(15, 25), Pair(27, 40)]) == 2"]},
        "class Pair:\n    def __init__(self, a, b): self.a, self.b = a, b\n"
        "def longest(pairs):\n    n, end = 0, float('-inf')\n    for pair in sorted(pairs, key=lambda each: each.b):\n"
        "        if pair.a > end: n, end = n + 1, pair.b\n    return n",
    ),
    "MBPP+: a function named as one of the prelude": (
        {"tests": ["assert gcd(12, 18) == 6", "assert gcd(7, 3) == 1"]}, "def gcd(a, b):\n    while b: a, b = b, a % b\n    return a",
    ),
    "MBPP+: a function that the program imports": (
        {"tests": ["assert comb(5, 2) == 10"]}, "from math import comb",
    ),
    "MBPP+: a function named as a builtin": ({"tests": ["assert sum(10, 15) == 25"]}, "def sum(a, b): return a + b"),
    "MBPP+: a function named as a module": ({"tests": ["assert copy([1, 2]) == [1, 2]"]}, "def copy(xs): return list(xs)"),
    "MBPP+: complex numbers": ({"tests": ["assert angle(0, 1j) == (1+0j)"]}, "def angle(a, b): return a - b * b"),
    # -- LeetCode: objects of the tests, methods of Solution, results in place
    "LeetCode: a linked list comes and goes": (
        {
            "tests": f"{NODE}def check(candidate):\n    assert values(candidate(linked([1, 2, 3]))) == [3, 2, 1]\n"
            "    assert candidate(None) is None\n",
            "entry_point": "Solution().reverse",
        },
        "class Solution:\n    def reverse(self, head: Optional[ListNode]) -> Optional[ListNode]:\n        last = None\n"
        "        while head: head.next, last, head = last, head, head.next\n        return last",
    ),
    "LeetCode: a linked list that the program makes": (
        {
            "tests": f"{NODE}def check(candidate):\n    assert values(candidate(linked([1, 9]), linked([1]))) == [2, 9]\n",
            "entry_point": "Solution().total",
        },
        "class Solution:\n    def total(self, a: ListNode, b: ListNode) -> ListNode:\n        first = last = ListNode()\n"
        "        carry = 0\n        while a or b or carry:\n            carry += (a.val if a else 0) + (b.val if b else 0)\n"
        "            last.next = last = ListNode(carry % 10)\n            carry //= 10\n"
        "            a, b = a and a.next, b and b.next\n        return first.next",
    ),
    "LeetCode: the program has a ListNode of its own": (
        {
            "tests": f"{NODE}def check(candidate):\n    assert values(candidate([1, 2])) == [1, 2]\n"
            "    assert isinstance(candidate([1]), ListNode)\n",
            "entry_point": "build",
        },
        "class ListNode:\n    def __init__(self, val=0, next=None):\n        self.val = val\n        self.next = next\n"
        "def build(xs):\n    head = None\n    for x in reversed(xs): head = ListNode(x, head)\n    return head",
    ),
    "LeetCode: a tree": (
        {
            "tests": f"{TREE}def check(candidate):\n    assert candidate(TreeNode(1, TreeNode(2), TreeNode(3, TreeNode(4)))) == 3\n",
            "entry_point": "Solution().depth",
        },
        "class Solution:\n    def depth(self, root: Optional[TreeNode]) -> int:\n"
        "        return 1 + max(self.depth(root.left), self.depth(root.right)) if root else 0",
    ),
    "LeetCode: a node of the tree is the answer": (
        {
            "tests": f"{TREE}def check(candidate):\n    p, q = TreeNode(5), TreeNode(1)\n    root = TreeNode(3, p, q)\n"
            "    assert candidate(root, p, q) is root\n    assert candidate(root, p, p) == p\n",
            "entry_point": "Solution().ancestor",
        },
        "class Solution:\n    def ancestor(self, root, p, q):\n        if root in (None, p, q): return root\n"
        "        left, right = self.ancestor(root.left, p, q), self.ancestor(root.right, p, q)\n"
        "        return root if left and right else left or right",
    ),
    "LeetCode: a tree that is changed in place": (
        {
            "tests": f"{TREE}root = TreeNode(1, TreeNode(2), TreeNode(3))\nSolution().flip(root)\n"
            "assert (root.left.val, root.right.val) == (3, 2)\n",
        },
        "class Solution:\n    def flip(self, root: TreeNode) -> None: root.left, root.right = root.right, root.left",
    ),
    "LeetCode: a linked list with a circle": (
        {
            "tests": f"{NODE}head = linked([1, 2, 3])\nhead.next.next.next = head.next\n"
            "assert Solution().circle(head)\nassert not Solution().circle(linked([1, 2]))\n"
        },
        "class Solution:\n    def circle(self, head):\n        seen = set()\n        while head:\n"
        "            if head in seen: return True\n            seen.add(head)\n            head = head.next\n        return False",
    ),
    "LeetCode: a list in place": (
        {"tests": "def check(candidate):\n    xs = [0, 1, 0, 3]\n    candidate(nums=xs)\n    assert xs == [1, 3, 0, 0]\n",
         "entry_point": "Solution().zeroes"},
        "class Solution:\n    def zeroes(self, nums: List[int]) -> None: nums.sort(key=lambda n: n == 0)",
    ),
    "LeetCode: a matrix in place": (
        {"tests": "matrix = [[1, 2], [3, 4]]\nrow = matrix[0]\nSolution().rotate(matrix)\nassert matrix == [[3, 1], [4, 2]]\n"
         "assert row == [3, 1]"},
        "class Solution:\n    def rotate(self, m):\n        for i, row in enumerate(list(zip(*m[::-1]))): m[i][:] = row",
    ),
    "LeetCode: a class that is designed": (
        {"tests": "cache = LRUCache(2)\ncache.put(1, 1)\ncache.put(2, 2)\nassert cache.get(1) == 1\ncache.put(3, 3)\n"
         "assert cache.get(2) == -1 and cache.get(3) == 3"},
        "class LRUCache:\n    def __init__(self, capacity): self.capacity, self.d = capacity, OrderedDict()\n"
        "    def get(self, key):\n        if key not in self.d: return -1\n        self.d.move_to_end(key)\n        return self.d[key]\n"
        "    def put(self, key, value):\n        self.d[key] = value\n        self.d.move_to_end(key)\n"
        "        if len(self.d) > self.capacity: self.d.popitem(last=False)",
    ),
    "LeetCode: a function that the tests pass": (
        {"tests": "def check(candidate):\n    assert candidate(10, lambda n: n >= 4) == 4\n", "entry_point": "Solution().first_bad"},
        "class Solution:\n    def first_bad(self, n, is_bad): return next(k for k in range(1, n + 1) if is_bad(k))",
    ),
    "LeetCode: tests that call their check": (
        {"tests": "def check(candidate):\n    assert candidate(nums=[2, 7], target=9) == [0, 1]\ncheck(Solution().twoSum)"},
        "class Solution:\n    def twoSum(self, nums, target):\n"
        "        return next([i, j] for j in range(len(nums)) for i in range(j) if nums[i] + nums[j] == target)",
    ),
    # -- KodCode: pytest and unittest
    "KodCode: parametrize and approx": (
        {"tests": "import pytest\nfrom solution import add\n@pytest.mark.parametrize('a, b', [(1, 2), (0.1, 0.2)])\n"
         "def test_add(a, b): assert add(a, b) == pytest.approx(a + b)"},
        ADD,
    ),
    "KodCode: fixtures": (
        {"tests": "import pytest\nfrom solution import Stack\n@pytest.fixture\ndef stack():\n    made = Stack()\n"
         "    made.push(1)\n    yield made\n    made.pop()\n@pytest.fixture(params=[2, 3])\ndef item(request): return request.param\n"
         "def test_push(stack, item):\n    stack.push(item)\n    assert len(stack) == 2 and stack.pop() == item\n"
         "@pytest.fixture(autouse=True)\ndef always(): yield"},
        STACK,
    ),
    "KodCode: parameters of a fixture in an array": (
        {"tests": "import numpy as np\nimport pytest\nfrom solution import add\n"
         "@pytest.fixture(params=np.arange(2))\ndef number(request): return int(request.param)\n"
         "def test_add(number): assert add(number, 1) == number + 1"},
        ADD,
    ),
    "KodCode: a fixture of the module, which ends after the last test": (
        {"tests": "import pytest\nfrom solution import Stack\n@pytest.fixture(scope='module')\ndef stack():\n"
         "    made = Stack()\n    made.push(1)\n    try:\n        yield made\n    finally:\n        made.pop()\n"
         "def test_push(stack):\n    stack.push(2)\n    assert stack.pop() == 2\ndef test_stays(stack): assert len(stack) == 1"},
        STACK,
    ),
    "KodCode: an error and what it says": (
        {"tests": "import pytest\nfrom solution import Stack\ndef test_empty():\n"
         "    with pytest.raises(IndexError, match='empty') as info: Stack().pop()\n    assert str(info.value) == 'empty'"},
        STACK,
    ),
    "KodCode: an error of the program's own": (
        {"tests": "import pytest\nfrom solution import withdraw, Funds\ndef test_it():\n    with pytest.raises(Funds) as info:\n"
         "        withdraw(5, 9)\n    assert info.value.missing == 4 and info.value.args == (4,)\n"
         "    assert str(Funds(3)) == 'short of 3' and isinstance(Funds(3), ValueError)"},
        "class Funds(ValueError):\n    def __init__(self, missing):\n        super().__init__(missing)\n        self.missing = missing\n"
        "    def __str__(self): return f'short of {self.missing}'\n"
        "def withdraw(has, wants):\n    if wants > has: raise Funds(wants - has)\n    return has - wants",
    ),
    "KodCode: an error of a library": (
        {"tests": "import json, pytest\nfrom solution import parse\ndef test_it():\n"
         "    with pytest.raises(json.JSONDecodeError): parse('{')\n    assert parse('[1]') == [1]"},
        "import json\ndef parse(text): return json.loads(text)",
    ),
    "KodCode: unittest": (
        {"tests": "import unittest\nfrom solution import Stack\nclass TestStack(unittest.TestCase):\n"
         "    def setUp(self): self.stack = Stack()\n    def test_it(self):\n        self.stack.push(3)\n"
         "        self.assertEqual(self.stack.pop(), 3)\n        with self.assertRaises(IndexError): self.stack.pop()\n"
         "        with self.subTest('in'): self.assertNotIn(3, self.stack)\nif __name__ == '__main__':\n    unittest.main()"},
        STACK,
    ),
    "KodCode: classes that inherit and that are nested": (
        {"tests": "from solution import add\nclass Base:\n    def test_one(self): assert add(self.a, 1) == self.a + 1\n"
         "class TestInts(Base):\n    a = 1\n    def setup_method(self): self.b = 2\n"
         "    class TestMore:\n        def test_two(self): assert add('a', 'b') == 'ab'\n"
         "    def test_three(self): assert add(self.a, self.b) == 3"},
        ADD,
    ),
    "KodCode: a script": (
        {"tests": "from solution import add\nif __name__ == '__main__':\n    assert add(1, 2) == 3\n    print('passed')"}, ADD,
    ),
    "KodCode: async functions": (
        {"tests": "import asyncio, pytest\nfrom solution import fetch, count\n@pytest.mark.asyncio\nasync def test_it():\n"
         "    assert await fetch(2) == 4\n    assert await asyncio.gather(fetch(1), fetch(3)) == [1, 9]\n"
         "    assert [n async for n in count(3)] == [0, 1, 2]\ndef test_run(): assert asyncio.run(fetch(5)) == 25"},
        "import asyncio\nasync def fetch(n):\n    await asyncio.sleep(0)\n    return n * n\n"
        "async def count(n):\n    for i in range(n): yield i",
    ),
    "KodCode: coroutines that the tests pass": (
        {"tests": "import asyncio\nfrom solution import together\nasync def double(n):\n    await asyncio.sleep(0)\n    return 2 * n\n"
         "def test_it():\n    assert asyncio.run(together([double(1), double(2)])) == [2, 4]\n"
         "    assert asyncio.run(together([double(3)])) == [6]"},
        "import asyncio\nasync def together(jobs): return list(await asyncio.gather(*jobs))",
    ),
    "KodCode: IsolatedAsyncioTestCase": (
        {"tests": "import unittest\nfrom solution import fetch\nclass T(unittest.IsolatedAsyncioTestCase):\n"
         "    async def test_it(self): self.assertEqual(await fetch(3), 9)"},
        "async def fetch(n): return n * n",
    ),
    "KodCode: what the program prints": (
        {"tests": "import io\nfrom contextlib import redirect_stdout\nfrom solution import greet\n"
         "def test_capsys(capsys):\n    greet('Ann')\n    assert capsys.readouterr().out == 'Hello, Ann\\n'\n"
         "def test_redirected():\n    out = io.StringIO()\n    with redirect_stdout(out): greet('Bob')\n"
         "    assert out.getvalue().strip() == 'Hello, Bob'"},
        "def greet(name): print(f'Hello, {name}')",
    ),
    "KodCode: patched standard streams": (
        {"tests": "import io, sys\nfrom unittest.mock import patch\nfrom solution import ask\n"
         "@patch('sys.stdout', new_callable=io.StringIO)\n@patch('builtins.input', side_effect=['4', '5'])\n"
         "def test_ask(mock_input, mock_stdout):\n    ask()\n    assert mock_stdout.getvalue() == '9\\n'\n"
         "def test_monkeypatch(monkeypatch):\n    monkeypatch.setattr('builtins.input', lambda _='': '2')\n    assert ask() == 4"},
        "def ask():\n    total = int(input('a')) + int(input('b'))\n    print(total)\n    return total",
    ),
    "KodCode: functions and mocks that the tests pass": (
        {"tests": "from unittest.mock import Mock\nfrom solution import apply, each\ndef test_it():\n    seen = []\n"
         "    assert apply(lambda x, y=1: x + y, 2) == 3 and apply(len, 'abc') == 3 and apply(str.upper, 'a') == 'A'\n"
         "    each([1, 2], seen.append)\n    assert seen == [1, 2]\n    mock = Mock(return_value=7)\n"
         "    assert apply(mock, 5) == 7\n    mock.assert_called_once_with(5)"},
        "def apply(f, x): return f(x)\ndef each(xs, f):\n    for x in xs: f(x)",
    ),
    "KodCode: a decorator": (
        {"tests": "from solution import memoize\ndef test_it():\n    calls = []\n    @memoize\n    def square(n):\n"
         "        calls.append(n)\n        return n * n\n    assert square(3) == 9 == square(3)\n"
         "    assert calls == [3] and square.__name__ == 'square'"},
        "import functools\ndef memoize(f):\n    known = {}\n    @functools.wraps(f)\n    def inner(n):\n"
        "        if n not in known: known[n] = f(n)\n        return known[n]\n    return inner",
    ),
    "KodCode: a class that the tests derive": (
        {"tests": "import pytest\nfrom solution import Shape\nclass Square(Shape):\n    def __init__(self, side):\n"
         "        super().__init__('square')\n        self.side = side\n    def area(self): return self.side ** 2\n"
         "def test_it():\n    assert Square(3).area() == 9 and Square(2).describe() == 'square of 4'\n"
         "    assert isinstance(Square(1), Shape) and issubclass(Square, Shape)\n"
         "    with pytest.raises(TypeError): Shape()\n"
         "def test_local():\n    factor = 2\n    class Double(Shape):\n        def area(self): return factor * 5\n"
         "    assert Double().describe() == 'shape of 10'"},
        SHAPES,
    ),
    "KodCode: objects of the tests' dataclasses": (
        {"tests": "from dataclasses import dataclass\nfrom enum import Enum\nfrom solution import oldest, moved\n@dataclass\n"
         "class Person:\n    name: str\n    age: int\nclass Side(Enum):\n    LEFT = 1\n    RIGHT = 2\n"
         "def test_it():\n    people = [Person('a', 3), Person('b', 5)]\n    assert oldest(people) is people[1]\n"
         "    assert oldest(people) == Person('b', 5)\n    assert moved({'side': Side.LEFT, 'n': 1}) == (Side.LEFT, 2)"},
        "def oldest(people): return max(people, key=lambda person: person.age)\ndef moved(d): return d['side'], d['n'] + 1",
    ),
    "KodCode: operators of a class": (
        {"tests": "from solution import Vector\ndef test_it():\n    v, w = Vector(1, 2), Vector(3, 4)\n"
         "    assert v + w == Vector(4, 6) and v != w and v * 2 == Vector(2, 4) and (v + w) * 2 == Vector(8, 12)\n"
         "    assert abs(w) == 5 and abs(v + v) == abs(v) * 2 and repr(v) == 'Vector(1, 2)' and f'{v}' == 'Vector(1, 2)'\n"
         "    assert v.x == 1 and v < w and sorted([w, v]) == [v, w] and len({v, Vector(1, 2)}) == 1\n"
         "    v.x = 7\n    assert v == Vector(7, 2) and bool(Vector(0, 0)) is False"},
        "import functools\n@functools.total_ordering\nclass Vector:\n    def __init__(self, x, y): self.x, self.y = x, y\n"
        "    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)\n"
        "    def __mul__(self, n): return Vector(self.x * n, self.y * n)\n"
        "    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5\n"
        "    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)\n"
        "    def __lt__(self, o): return abs(self) < abs(o)\n    def __hash__(self): return hash((self.x, self.y))\n"
        "    def __bool__(self): return abs(self) > 0\n    def __repr__(self): return f'Vector({self.x}, {self.y})'",
    ),
    "KodCode: generators": (
        {"tests": "import types\nfrom itertools import islice\nfrom solution import primes\ndef test_it():\n    it = primes()\n"
         "    assert next(it) == 2 and next(it) == 3 and list(islice(it, 3)) == [5, 7, 11]\n"
         "    assert isinstance(it, types.GeneratorType)"},
        "def primes():\n    n = 2\n    while True:\n        if all(n % d for d in range(2, n)): yield n\n        n += 1",
    ),
    "KodCode: iterators that the tests pass": (
        {"tests": "import itertools\nfrom solution import take\ndef test_it():\n    assert take(iter([1, 2, 3]), 2) == [1, 2]\n"
         "    assert take(itertools.count(5), 3) == [5, 6, 7]\n    assert take((n * n for n in range(9)), 3) == [0, 1, 4]"},
        "def take(it, n): return [next(it) for _ in range(n)]",
    ),
    "KodCode: with": (
        {"tests": "import pytest\nfrom solution import opened, Guard\ndef test_it():\n    with opened('a') as log:\n        log.append('b')\n"
         "    with Guard() as guard: guard.used = True\n    assert guard.closed and guard.used\n"
         "    with pytest.raises(KeyError):\n        with Guard() as guard: raise KeyError('x')\n    assert guard.error == 'KeyError'"},
        "from contextlib import contextmanager\n@contextmanager\ndef opened(name): yield [name]\nclass Guard:\n    closed = False\n"
        "    def __enter__(self): return self\n    def __exit__(self, kind, error, trace):\n        self.closed = True\n"
        "        self.error = kind.__name__ if kind else None\n        return False",
    ),
    "KodCode: a file": (
        {"tests": "import os, tempfile\nfrom pathlib import Path\nfrom solution import lines\ndef test_it(tmp_path):\n"
         "    file = tmp_path / 'a.txt'\n    file.write_text('a\\nb\\n')\n    assert lines(file) == 2 and lines(str(file)) == 2"},
        "def lines(path):\n    with open(path) as file: return len(file.readlines())",
    ),
    "KodCode: types and attributes": (
        {"tests": "from solution import Point, Color, make\ndef test_it():\n    p = make(1, 2)\n"
         "    assert type(p) is Point and isinstance(p, Point) and p._asdict() == {'x': 1, 'y': 2}\n"
         "    assert Color.RED.value == 1 and Color(2) is Color.BLUE and Color['RED'] == Color.RED\n"
         "    assert [color.name for color in Color] == ['RED', 'BLUE'] and hasattr(p, 'x') and not hasattr(p, 'z')"},
        "from enum import Enum\nclass Point(namedtuple('Point', 'x y')): pass\nclass Color(Enum):\n    RED = 1\n    BLUE = 2\n"
        "def make(x, y): return Point(x, y)",
    ),
    "KodCode: skipped tests": (
        {"tests": "import pytest\nfrom solution import add\n@pytest.mark.skip(reason='slow')\ndef test_skipped(): assert False\n"
         "def test_it():\n    assert add(1, 2) == 3\n    pytest.skip('rest')"},
        ADD,
    ),
    "KodCode: a dict and a set in place": (
        {"tests": "from solution import grow\ndef test_it():\n    known, seen = {'a': [1]}, {1}\n    grow(known, seen=seen)\n"
         "    assert known == {'a': [1, 2], 'b': 3} and seen == {1, 2}"},
        "def grow(known, seen):\n    known['a'].append(2)\n    known['b'] = 3\n    seen.add(2)",
    ),
    'KodCode: standard input of the tests': (
        {"tests": "import sys, io\nfrom solution import g\ndef test_a(monkeypatch):\n    monkeypatch.setattr('sys.stdin', io.StringIO('5\\n6\\n'))\n    assert g() == 11\ndef test_b():\n    sys.stdin = io.StringIO('1\\n2\\n')\n    old = sys.stdout\n    sys.stdout = io.StringIO()\n    g()\n    out = sys.stdout.getvalue()\n    sys.stdout = old\n    assert out == '3\\n'"},
        'import sys\ndef g():\n    s = int(input()) + int(sys.stdin.readline())\n    print(s)\n    return s',
    ),
    'KodCode: threads': (
        {"tests": 'import threading\nfrom solution import C\ndef test_a():\n    c = C()\n    ts = [threading.Thread(target=c.inc) for _ in range(20)]\n    for t in ts: t.start()\n    for t in ts: t.join()\n    assert c.n == 20'},
        'class C:\n    n = 0\n    def inc(self): self.n += 1',
    ),
    'KodCode: a pool of threads': (
        {"tests": 'from concurrent.futures import ThreadPoolExecutor\nfrom solution import sq\ndef test_a():\n    with ThreadPoolExecutor(4) as p: assert list(p.map(sq, range(9))) == [n*n for n in range(9)]'},
        'def sq(n): return n*n',
    ),
    'KodCode: what Python says of objects': (
        {"tests": "from dataclasses import asdict, replace, is_dataclass\nimport copy, inspect\nfrom solution import P, make, f\ndef test_a():\n    p = make(1)\n    assert asdict(p) == {'x': 1} and replace(p, x=3).x == 3 and is_dataclass(p)\n    assert p == P(1) and copy.deepcopy(p) == p and copy.copy(p) is not p and vars(p) == {'x': 1}\n    assert list(inspect.signature(f).parameters) == ['a', 'b'] and inspect.iscoroutinefunction(f) is False\n    assert p.__class__.__name__ == 'P' and callable(f) and not callable(p) and type(p).__name__ == 'P'"},
        'from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\ndef make(x): return P(x)\ndef f(a, b=1): return 1',
    ),
    'KodCode: a seed': (
        {"tests": 'import random\nfrom solution import roll\ndef test_a():\n    random.seed(1)\n    a = [roll() for _ in range(5)]\n    random.seed(1)\n    assert a == [roll() for _ in range(5)]'},
        'import random\ndef roll(): return random.randint(1, 6)',
    ),
    'KodCode: slices': (
        {"tests": 'from solution import L\ndef test_a():\n    l = L([1,2,3])\n    l.push(4)\n    assert l[1:3] == [2, 3] and l[-1] == 4 and list(reversed(l)) == [4,3,2,1] and [*l] == [1,2,3,4] and 2 in l\n    del l[0]\n    assert len(l) == 3'},
        'class L:\n    def __init__(self, xs): self.xs = xs\n    def push(self, x): self.xs.append(x)\n    def __getitem__(self, k): return self.xs[k]\n    def __delitem__(self, k): del self.xs[k]\n    def __len__(self): return len(self.xs)',
    ),
    'KodCode: times with a zone': (
        {"tests": 'from datetime import datetime, timezone, timedelta\nfrom solution import g\ndef test_a(): assert g(datetime(2020,1,1,tzinfo=timezone.utc)) == datetime(2020,1,2,tzinfo=timezone.utc)'},
        'from datetime import timedelta\ndef g(d): return d + timedelta(days=1)',
    ),
    'KodCode: a container that is an attribute': (
        {"tests": "from solution import Cart\ndef test_a():\n    c = Cart()\n    c.items.append(3)\n    c.prices['a'] = 2\n    assert c.total() == 5"},
        'class Cart:\n    def __init__(self): self.items, self.prices = [], {}\n    def total(self): return sum(self.items) + sum(self.prices.values())',
    ),
    'KodCode: all names': (
        {"tests": 'from solution import *\ndef test_a():\n    s = Stack()\n    s.push(1)\n    assert s.pop() == 1'},
        STACK,
    ),
    'KodCode: the module': (
        {"tests": 'import solution\ndef test_a(): assert solution.add(1, 2) == 3'},
        ADD,
    ),
    'KodCode: async methods of unittest': (
        {"tests": 'import unittest\nfrom solution import g\nclass T(unittest.TestCase):\n    async def test_a(self): assert await g(2) == 4'},
        'async def g(x): return x*x',
    ),
    'KodCode: a patched object': (
        {"tests": "from unittest.mock import patch\nfrom solution import A\ndef test_a():\n    a = A()\n    with patch.object(a, 'fetch', return_value=3) as m:\n        assert a.double() == 6\n        m.assert_called_once()\n    assert a.double() == 2\n    with patch.object(A, 'fetch', lambda self: 5): assert A().double() == 10"},
        'class A:\n    def fetch(self): return 1\n    def double(self): return 2 * self.fetch()',
    ),
    'KodCode: a cache': (
        {"tests": 'from solution import fib\ndef test_a():\n    fib.cache_clear()\n    assert fib(10) == 55 and fib.cache_info().hits == 8'},
        '@functools.lru_cache(None)\ndef fib(n): return n if n < 2 else fib(n-1) + fib(n-2)',
    ),
    'KodCode: async with': (
        {"tests": 'import asyncio\nfrom solution import Pool\ndef test_a():\n    async def main():\n        async with Pool() as p:\n            assert await p.get(2) == 4\n            return [x async for x in p]\n    assert asyncio.run(main()) == [0, 1]'},
        'class Pool:\n    async def __aenter__(self):\n        self.n = 0\n        return self\n    async def __aexit__(self, *a): return False\n    async def get(self, x): return x*x\n    def __aiter__(self): return self\n    async def __anext__(self):\n        if self.n == 2: raise StopAsyncIteration\n        self.n += 1\n        return self.n - 1',
    ),
    'KodCode: an async function that fails first': (
        {"tests": "import asyncio\nfrom solution import retry\ndef test_a():\n    calls = []\n    async def flaky(x):\n        calls.append(x)\n        if len(calls) < 3: raise ValueError('no')\n        return x\n    assert asyncio.run(retry(flaky, 7)) == 7 and len(calls) == 3"},
        'async def retry(f, x):\n    while True:\n        try: return await f(x)\n        except ValueError: pass',
    ),
    'KodCode: an object that is called': (
        {"tests": 'from solution import apply\nclass Adder:\n    def __init__(self, n): self.n, self.seen = n, []\n    def __call__(self, x):\n        self.seen.append(x)\n        return x + self.n\ndef test_a():\n    a = Adder(2)\n    assert apply(a, [1, 2]) == [3, 4] and a.seen == [1, 2]'},
        'def apply(f, xs): return [f(x) for x in xs]',
    ),
    'KodCode: an object that is kept': (
        {"tests": "from solution import Subject\nclass Obs:\n    def __init__(self): self.got = []\n    def update(self, e): self.got.append(e)\ndef test_a():\n    o, s = Obs(), Subject()\n    s.attach(o)\n    s.notify('x')\n    assert o.got == ['x']"},
        'class Subject:\n    def __init__(self): self.os = []\n    def attach(self, o): self.os.append(o)\n    def notify(self, e):\n        for o in self.os: o.update(e)',
    ),
    "KodCode: an error of the tests' own": (
        {"tests": "import pytest\nfrom solution import guard\nclass Mine(Exception): pass\ndef test_a():\n    def bad(): raise Mine('x')\n    with pytest.raises(Mine): guard(bad)"},
        'def guard(f): return f()',
    ),
    'KodCode: a deep list': (
        {"tests": 'from solution import depth\ndef test_a():\n    x = []\n    for _ in range(400): x = [x]\n    assert depth(x) == 401'},
        'def depth(x): return 1 + max([depth(each) for each in x], default=0)',
    ),
    'KodCode: a long linked list': (
        {"tests": 'class ListNode:\n    def __init__(self, val, next=None): self.val, self.next = val, next\ndef test_a():\n    head = None\n    for n in range(5000): head = ListNode(n, head)\n    assert count(head) == 5000'},
        'def count(h):\n    n = 0\n    while h: n, h = n+1, h.next\n    return n',
    ),
    'KodCode: files in memory': (
        {"tests": "import io\nfrom solution import dump, load\ndef test_a():\n    out = io.StringIO()\n    dump([1,2], out)\n    assert out.getvalue() == '[1, 2]'\n    assert load(io.StringIO('[3]')) == [3]"},
        'import json\ndef dump(x, f): json.dump(x, f)\ndef load(f): return json.load(f)',
    ),
    'KodCode: a file with a name': (
        {"tests": "import csv, tempfile, os\nfrom solution import rows\ndef test_a():\n    with tempfile.NamedTemporaryFile('w', suffix='.csv', delete=False) as f:\n        f.write('a,b\\n1,2\\n')\n    assert rows(f.name) == [{'a': '1', 'b': '2'}]\n    os.unlink(f.name)"},
        'import csv\ndef rows(p):\n    with open(p) as f: return list(csv.DictReader(f))',
    ),
    'KodCode: properties': (
        {"tests": 'import pytest\nfrom solution import T\ndef test_a():\n    t = T(5)\n    t.c = 10\n    assert t.f == 50\n    with pytest.raises(AttributeError): t.f = 3\n    with pytest.raises(ValueError): t.c = -300'},
        'class T:\n    def __init__(self, c): self.c = c\n    @property\n    def c(self): return self._c\n    @c.setter\n    def c(self, v):\n        if v < -273: raise ValueError\n        self._c = v\n    @property\n    def f(self): return self._c * 5',
    ),
    'KodCode: methods of a class': (
        {"tests": "from solution import D\ndef test_a():\n    assert D.parse('3').n == 3 and D.zero == 0 and D.twice(4) == 8 and isinstance(D.parse('1'), D)\n    d = D.parse('4')\n    assert d.n == 4 and d.pop() == 4"},
        'class D:\n    zero = 0\n    def __init__(self, n): self.n = n\n    @classmethod\n    def parse(cls, t): return cls(int(t))\n    @staticmethod\n    def twice(n): return 2*n\n    def pop(self): return self.n',
    ),
    'KodCode: one object': (
        {"tests": 'from solution import S\ndef test_a():\n    a, b = S(), S()\n    assert a is b and id(a) == id(b)'},
        'class S:\n    it = None\n    def __new__(cls):\n        cls.it = cls.it or super().__new__(cls)\n        return cls.it',
    ),
    "KodCode: classes of the program's that derive": (
        {"tests": "from solution import Dog, Cat, Animal\nimport pytest\ndef test_a():\n    for a, s in [(Dog('x'), 'Woof'), (Cat('y'), 'Meow')]:\n        assert a.speak() == s and isinstance(a, Animal)\n    assert [type(x) for x in (Dog('a'), Cat('b'))] == [Dog, Cat]\n    assert str(Dog('Rex')) == 'Rex'"},
        "class Animal:\n    def __init__(self, n): self.n = n\n    def __str__(self): return self.n\nclass Dog(Animal):\n    def speak(self): return 'Woof'\nclass Cat(Animal):\n    def speak(self): return 'Meow'",
    ),
    'KodCode: members of an enum': (
        {"tests": 'from solution import Light\ndef test_a():\n    assert Light.RED.next() == Light.GREEN and len(Light) == 2 and list(Light) == [Light.RED, Light.GREEN] and Light.RED in Light'},
        'from enum import Enum\nclass Light(Enum):\n    RED = 0\n    GREEN = 1\n    def next(self): return Light((self.value + 1) % 2)',
    ),
    'KodCode: a matrix': (
        {"tests": 'from solution import Matrix\ndef test_a():\n    m = Matrix([[1, 2], [3, 4]])\n    assert (m @ m).rows == [[7, 10], [15, 22]] and m[0][1] == 2 and (m + m)[1] == [6, 8] and m * 2 == Matrix([[2, 4], [6, 8]]) and m == m and -m != m and m.T == Matrix([[1, 3], [2, 4]])'},
        'class Matrix:\n    def __init__(self, rows): self.rows = rows\n    def __matmul__(self, o): return Matrix([[sum(a*b for a, b in zip(r, c)) for c in zip(*o.rows)] for r in self.rows])\n    def __add__(self, o): return Matrix([[a+b for a, b in zip(r, s)] for r, s in zip(self.rows, o.rows)])\n    def __mul__(self, n): return Matrix([[a*n for a in r] for r in self.rows])\n    def __neg__(self): return self * -1\n    def __eq__(self, o): return self.rows == o.rows\n    def __getitem__(self, k): return self.rows[k]\n    @property\n    def T(self): return Matrix([list(c) for c in zip(*self.rows)])',
    ),
    'KodCode: a fraction': (
        {"tests": "from solution import Frac\ndef test_a():\n    assert Frac(1, 2) + Frac(1, 3) == Frac(5, 6) and str(Frac(2, 4)) == '1/2' and float(Frac(1, 4)) == 0.25 and Frac(1,2) < Frac(2,3) and Frac(1, 2) == 0.5"},
        "class Frac:\n    def __init__(self, a, b):\n        g = math.gcd(a, b)\n        self.a, self.b = a // g, b // g\n    def __add__(self, o): return Frac(self.a*o.b + o.a*self.b, self.b*o.b)\n    def __eq__(self, o): return float(self) == float(o)\n    def __lt__(self, o): return float(self) < float(o)\n    def __float__(self): return self.a / self.b\n    def __str__(self): return f'{self.a}/{self.b}'",
    ),
    'KodCode: functions in a dict': (
        {"tests": "from solution import ops\ndef test_a():\n    assert ops()['add'](1, 2) == 3 and sorted(ops()) == ['add', 'sub']"},
        "def ops(): return {'add': lambda a, b: a+b, 'sub': lambda a, b: a-b}",
    ),
    'KodCode: functions that return functions': (
        {"tests": 'from solution import curry\ndef test_a():\n    assert curry(lambda a, b: a + b)(1)(2) == 3'},
        'def curry(f): return lambda a: lambda b: f(a, b)',
    ),
    'KodCode: a tree that the program makes': (
        {"tests": 'from solution import insert\ndef test_a():\n    r = insert(insert(None, 3), 1)\n    assert r.val == 3 and r.left.val == 1 and r.right is None\n    def walk(n): return walk(n.left) + [n.val] + walk(n.right) if n else []\n    assert walk(r) == [1, 3]'},
        'class N:\n    def __init__(self, v): self.val, self.left, self.right = v, None, None\ndef insert(n, v):\n    if n is None: return N(v)\n    if v < n.val: n.left = insert(n.left, v)\n    else: n.right = insert(n.right, v)\n    return n',
    ),
    'KodCode: a list that is sorted in place and returned': (
        {"tests": 'from solution import f\ndef test_a():\n    x = [2, 1]\n    y = f(x)\n    assert y is x and x == [1, 2]'},
        'def f(x):\n    x.sort()\n    return x',
    ),
    'KodCode: a dict that is filled and returned': (
        {"tests": 'from solution import fill\ndef test_a():\n    d = {}\n    assert fill(n=3, d=d) is d and d == {0: 0, 1: 1, 2: 4}'},
        'def fill(d, n):\n    d.update({i: i * i for i in range(n)})\n    return d',
    ),
    'KodCode: a copy is another list': (
        {"tests": 'from solution import f\ndef test_a():\n    x = [2, 1]\n    assert f(x) is not x and f(x) == x'},
        'def f(x): return list(x)',
    ),
    'KodCode: a pickled object': (
        {"tests": 'import pickle\nfrom solution import Pair\ndef test_a():\n    p = Pair(1)\n    q = pickle.loads(pickle.dumps(p))\n    assert q == p and q is not p and q.x == 1 and q != Pair(2) and str(q) == "P1"'},
        'class Pair:\n    def __init__(self, x): self.x = x\n    def __eq__(self, o): return self.x == o.x\n    def __str__(self): return f"P{self.x}"',
    ),
    'KodCode: pickles of both sides': (
        {"tests": 'import json, pickle\nfrom pickle import loads\nfrom solution import save\nclass Mine:\n    x = 1\ndef test_a():\n    assert loads(save([1, 2])) == [1, 2] and loads(pickle.dumps({1: 2})) == {1: 2} and json.loads(json.dumps(save.__name__)) == "save"'},
        'import pickle\ndef save(x): return pickle.dumps(x)',
    ),
    'KodCode: what a method makes beside a class': (
        {"tests": 'from solution import Shape, Point\ndef test_a():\n    s = Shape(3)\n    assert s.center() == Point(0, 0) and s.center() != Point(0, 1)\n    assert s.area() == 9'},
        'class Point:\n    def __init__(self, x, y): self.x, self.y = x, y\n    def __eq__(self, o): return (self.x, self.y) == (o.x, o.y)\nclass Shape:\n    def __init__(self, n): self.n = n\n    def area(self): return self.n ** 2\n    def center(self): return Point(0, 0)',
    ),
}  # fmt: skip
