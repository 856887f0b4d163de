"""Answers that forge a reward: all are worth to reasoning-gym's verifiers what an honest wrong answer is."""

from __future__ import annotations

import base64
import builtins
import contextlib
import functools
import json
import pickle
import statistics

import pytest

from environments.adapters.reasoning_gym import ReasoningGymEnvironment, _verdict
from environments.adapters.reasoning_gym_answers import EVALUATED, checked_reward, is_data

pytestmark = pytest.mark.slow

IN_NO_FORM = "I give up."
"""An honest wrong answer to every question."""

# Run as code by a verifier, these write the verdict themselves, or bring the verifier to it.
WRITE_TO_ALL_FILES = """\
import json, os
for number in range(3, 40):
    for value in (1.0, {"reward": 1.0, "was_data": True}):
        body = json.dumps({"value": value}).encode()
        for line in (len(body).to_bytes(4, "big") + body, json.dumps(value).encode()):
            try:
                os.write(number, line)
            except OSError:
                pass
os._exit(0)
"""
PATCH_THE_DATASETS = """\
import gc
for kind in [kind for kind in gc.get_objects() if isinstance(kind, type) and hasattr(kind, "score_answer")]:
    kind.score_answer = lambda self, answer, entry: 1.0
"""
PATCH_THE_COMPARISON = """\
import builtins, numpy, sympy
numpy.isclose = lambda *a, **k: True
sympy.simplify = lambda *a, **k: 0
builtins.sorted = lambda *a, **k: []
"""
FIND_THE_ENTRY = """\
import sys
frame = sys._getframe()
while "entry" not in frame.f_locals:
    frame = frame.f_back
entry = frame.f_locals["entry"]
"""
PATCH_THE_ENTRY = (
    FIND_THE_ENTRY
    + """\
entry["metadata"].update(numbers=[], target=0, integrand="0", valid_answers=[""])
entry["answer"] = ""
"""
)
EVAL_OF = "exec({!r}) or 0"
IMPORT_AND_RUN = "__import__('builtins').exec({!r})"
FULLWIDTH = "\uff45\uff58\uff45\uff43({!r})"  # an identifier that Python reads as exec
SYMPY_RUNS = "sympify({!r})"
EXACT = (
    "type('A', (), {'__eq__': lambda s, o: True, '__sub__': lambda s, o: s, '__float__': lambda s: 24.0})()"
)


def _without_digits(entry):
    """The target as a sum of threes and ones that no digit stands for, and the given numbers times zero."""
    threes, ones = divmod(entry["metadata"]["target"], 3)
    numbers = "+".join(map(str, entry["metadata"]["numbers"]))
    made = "+".join(["ceiling(E)"] * threes + ["sign(E)"] * ones)
    return f"{made} + sin(pi)*({numbers})"


def _in_scientific_numbers(entry):
    numbers = "+".join(map(str, entry["metadata"]["numbers"]))
    return f"{entry['metadata']['target']}e0 + 0e0*({numbers})"


EVERYWHERE = {
    "writes to all files": EVAL_OF.format(WRITE_TO_ALL_FILES),
    "writes to all files by import": IMPORT_AND_RUN.format(WRITE_TO_ALL_FILES),
    "writes to all files in fullwidth letters": FULLWIDTH.format(WRITE_TO_ALL_FILES),
    "writes to all files in sympy's text": SYMPY_RUNS.format(EVAL_OF.format(WRITE_TO_ALL_FILES)),
    "patches the datasets": EVAL_OF.format(PATCH_THE_DATASETS),
    "patches the comparison": EVAL_OF.format(PATCH_THE_COMPARISON),
    "patches the entry": EVAL_OF.format(PATCH_THE_ENTRY),
    "is equal to everything": EXACT,
    "exits at once": "__import__('os')._exit(0)",
    "kills its parent": "__import__('os').kill(__import__('os').getppid(), 9)",
    "reads the answer of its frame": "[oracle_answer]",
    "names the answer": "oracle_answer",
    "formats the answer": "f'{oracle_answer}'",
    "assigns the answer": "(answer := entry['answer'])",
    "lists the answer": "[letter for letter in entry['answer']]",
    "calls a lambda": "(lambda: entry['answer'])()",
    "continues its line": "[\\\noracle_answer]",
    "hides behind a comment": "[oracle_answer] # [7]",
    "hides in a branch": "[7] if not entry else entry['answer']",
    "names the valid answers": "valid_solutions[0]",
    "splits a valid answer": "[row.split() for row in valid_solutions[0].splitlines()]",
    "splits the answer": "[row.split() for row in oracle_answer.splitlines()]",
}
IN_ONE_DATASET = {
    ("countdown", "hides the numbers in scientific ones"): _in_scientific_numbers,
    ("countdown", "makes numbers of constants"): _without_digits,
    ("puzzle24", "solves another puzzle"): lambda entry: "1*2*3*4",
    ("puzzle24", "hides the numbers"): lambda entry: "24 + 0*(1+1+1)",
    ("simple_integration", "does not integrate"): lambda e: f"Integral({e['metadata']['integrand']}, C)",
    ("simple_integration", "lets sympy integrate"): lambda e: "integrate({integrand}, {variable})".format(
        **e["metadata"]
    ),
    ("intermediate_integration", "does not integrate"): lambda e: "Integral({integrand}, {variable})".format(
        **e["metadata"]
    ),
    ("intermediate_integration", "lets sympy integrate"): lambda e: (
        "integrate({integrand}, {variable})".format(**e["metadata"])
    ),
    ("polynomial_multiplication", "lets sympy multiply"): lambda e: (
        f"expand({e['metadata']['polynomial_expr']})"
    ),
    ("polynomial_multiplication", "reads sympy's text"): lambda e: (
        f"S('expand({e['metadata']['polynomial_expr']})')"
    ),
}


def judged(dataset, answer, index=0):
    env = ReasoningGymEnvironment(dataset, index=index, size=2)
    env.reset()
    _, reward, _, info = env.step(f"<answer>{answer}</answer>")
    return reward, info


@functools.cache
def library():
    """reasoning-gym, which takes seconds to import: not while tests are collected."""
    return pytest.importorskip("reasoning_gym.factory")


def entry_of(dataset):
    return library().create_dataset(dataset, seed=0, size=2)[0]


@pytest.mark.parametrize("dataset", EVALUATED)
def test_no_program_is_worth_more_than_an_honest_wrong_answer(dataset):
    honest = judged(dataset, IN_NO_FORM)[0]
    rewards = {title: judged(dataset, program)[0] for title, program in EVERYWHERE.items()}
    assert rewards == dict.fromkeys(EVERYWHERE, honest)
    assert judged(dataset, IN_NO_FORM, 1)[0] == honest  # and no program stays for the next verdict
    assert judged(dataset, entry_of(dataset)["answer"])[0] == 1.0


@pytest.mark.parametrize(("dataset", "title"), IN_ONE_DATASET)
def test_answer_that_leaves_work_to_its_verifier_is_wrong(dataset, title):
    forged = IN_ONE_DATASET[dataset, title](entry_of(dataset))
    assert judged(dataset, forged)[0] == judged(dataset, IN_NO_FORM)[0]


@pytest.mark.parametrize("dataset", EVALUATED)
def test_librarys_own_answers_are_data(dataset):
    entries = library().create_dataset(dataset, seed=3, size=20)
    wrong = [e["answer"] for e in entries if not is_data(dataset, e["answer"], e)]
    assert wrong == []


@pytest.mark.parametrize(
    ("dataset", "answer", "reward"),
    [
        ("binary_matrix", "{}", 0.1),
        ("n_queens", "{}", 0.5),
        ("spiral_matrix", "[{}]", 0.1),
        ("string_insertion", "{}", 0.1),
    ],
)
def test_answer_as_list_keeps_the_librarys_small_reward(dataset, answer, reward):
    expected = entry_of(dataset)["answer"]
    as_list = {
        "binary_matrix": lambda: str(
            [[int(number) for number in row.split()] for row in expected.split("\n")]
        ),
        "n_queens": lambda: str([row.split() for row in expected.split("\n")]),
        "spiral_matrix": lambda: ", ".join(expected.split()),
        "string_insertion": lambda: str(list(expected)),
    }[dataset]()
    assert judged(dataset, answer.format(as_list))[0] == reward


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("simple_integration", "{} + 7 - 7"),
        ("intermediate_integration", "({})*2/2"),
        ("countdown", " ( {} ) "),
        ("puzzle24", "({})"),
    ],
)
def test_another_form_of_the_right_answer_is_right(dataset, answer):
    assert judged(dataset, answer.format(entry_of(dataset)["answer"]))[0] == 1.0


def test_info_says_that_a_program_was_not_given_to_the_verifier():
    assert "empty answer" in judged("countdown", EVERYWHERE["exits at once"])[1]["error"]
    assert "error" not in judged("countdown", "1 + 1")[1]


def test_list_of_verifiers_that_evaluate_answers_is_complete():
    ran: set[str] = set()
    builtins.note_that_it_ran = ran.add
    program = """[note_that_it_ran({0!r}), exec("note_that_it_ran({0!r})")]"""
    try:
        for name in sorted(library().DATASETS.keys() - {"composite"}):
            dataset = library().create_dataset(name, seed=0, size=1)
            with contextlib.suppress(Exception):  # of a verifier that cannot read it
                dataset.score_answer(answer=program.format(name), entry=dataset[0])
    finally:
        del builtins.note_that_it_ran
    assert ran == EVALUATED.keys()


NO_NUMBERS = [
    "nan",
    "NaN",
    "n a n",
    "nan+nanj",
    "nan + nan i",
    "-nan",
    "sNaN",
    "nan1",
    "inf",
    "-inf",
    "1e999",
    "(1e99 9)",
]


def verdict(name, dataset, entry, answer):
    """The reward of an answer, judged in this process: for answers that are no program."""
    pickled = base64.b64encode(pickle.dumps(entry)).decode()
    return _verdict(dataset, name, pickled, answer).get("reward", 0.0)


@pytest.mark.parametrize("answer", NO_NUMBERS)
def test_answer_that_is_no_finite_number_earns_nothing(answer):
    for dataset in ("complex_arithmetic", "power_function", "countdown", "decimal_arithmetic"):
        assert judged(dataset, answer)[0] == 0.0


@pytest.mark.parametrize("item", ["NaN", '"nan"', "Infinity", "-1e999", '"sNaN"'])
def test_list_of_no_finite_numbers_earns_nothing(item):
    dataset = library().create_dataset("number_sorting", seed=0, size=4)
    for entry in dataset:
        numbers = json.loads(entry["answer"].replace("'", '"'))
        right, wrong = (f"[{', '.join(items)}]" for items in (numbers, [item] * len(numbers)))
        assert verdict("number_sorting", dataset, entry, right) == 1.0
        assert verdict("number_sorting", dataset, entry, wrong) == 0.0
        assert verdict("number_sorting", dataset, entry, f"[{', '.join([*numbers[:-1], item])}]") == 0.0


def test_matrix_with_nan_earns_nothing():
    entry = entry_of("pool_matrix")
    assert judged("pool_matrix", entry["answer"])[0] == 1.0
    assert judged("pool_matrix", entry["answer"].replace(entry["answer"].split()[0], "nan", 1))[0] == 0.0


@pytest.mark.parametrize("answer", ["nan", "Nan", '{"x": NaN}', "1e999"])
def test_word_that_the_library_itself_answers_is_no_number(answer):
    assert checked_reward("letter_jumble", answer, {"answer": answer}, 1.0) == 1.0


@pytest.mark.parametrize(
    "answer", ["banana", "infer 1e5", "info", "7i", "9" * 400, "1 " * 400, "I think", "1e-999"]
)
def test_finite_answer_keeps_its_reward(answer):
    assert checked_reward("chain_sum", answer, {"answer": "7"}, 0.5) == 0.5


FEW_ANSWERS = {
    "acre": ("off", 0.65, "on, off or undetermined"),
    "aiw": ("3", 0.5, "how many brothers"),
    "binary_alternation": ("-1", 0.45, "how many swaps, -1 for impossible"),
    "circuit_logic": ("0", 0.85, "0 or 1"),
    "course_schedule": ("False", 0.8, "true or false"),
    "game_of_life_halting": ("False", 0.8, "true or false"),
    "family_relationships": ("father", 0.35, "one of some twenty relations"),
    "game_of_life": (json.dumps([[0] * 10] * 10), 0.45, "a board that has often died out"),
    "gcd": ("1", 0.5, "mostly small numbers"),
    "isomorphic_strings": ("True", 0.8, "true or false"),
    "letter_counting": ("1", 0.5, "how many letters of a kind in a few words"),
    "mahjong_puzzle": ("Chi", 0.6, "one of three words"),
    "maze": ("5", 0.5, "the length of a short way"),
    "polynomial_equations": ("0", 0.6, "the roots, of which 0 is often the only one"),
    "ransom_note": ("False", 0.8, "true or false"),
    "rotten_oranges": ("-1", 0.5, "how many minutes, -1 for never"),
    "self_reference": ("2", 0.65, "how many of seven statements can be true"),
    "shortest_path": ("infeasible", 0.6, "a way, or that there is none"),
    "syllogism": ("Yes", 0.9, "yes or no"),
    "zebra_puzzles": ("alice", 0.6, "one of a few names"),
}
"""The datasets whose questions have few answers or one that is frequent: that answer, a bound, the reason."""
ELSEWHERE = 0.2
SLOW = {  # to generate or to judge: by the number of tasks that are tried of them, 40 of all others
    "knight_swap": 3,
    "intermediate_integration": 4,
    "simple_integration": 4,
    "sokoban": 8,
    **dict.fromkeys(["futoshiki", "zebra_puzzles", "puzzle24", "sudoku", "quantum_lock", "countdown"], 12),
    **dict.fromkeys(["polynomial_multiplication", "rubiks_cube", "polynomial_equations"], 20),
}
CONSTANTS = [
    *("", "0", "1", "-1", "2", "4", "5", "10", "100", "0.5", "0.25", "nan", "inf", "-inf", "1e999"),
    *(
        "I do not know",
        "True",
        "False",
        "yes",
        "No",
        "[]",
        "{}",
        "()",
        "A",
        "B",
        "None",
        "null",
        "x",
        "?",
        "_",
    ),
    *("[nan]", "[[0]]", "0 0 0", "12:00", "50 days, 10:00:00", "(P → P)", "0.0", "red", "father", "Monday"),
    *("2 4 3 1\n3 1 2 4\n1 2 4 3\n4 3 1 2", json.dumps([[0] * 10] * 10)),
]


@functools.cache
def rewards_of_constants():
    """The mean reward of every constant answer over some tasks of every dataset."""
    means = {}
    for name in sorted(library().DATASETS.keys() - {"composite"}):
        own = [FEW_ANSWERS[name][0]] if name in FEW_ANSWERS else []
        dataset = library().create_dataset(name, seed=5, size=SLOW.get(name, 40))
        entries = list(dataset)
        means[name] = {
            answer: statistics.mean(verdict(name, dataset, entry, answer) for entry in entries)
            for answer in CONSTANTS + own
        }
    return means


@pytest.mark.parametrize("answer", CONSTANTS)
def test_constant_answer_is_worth_little_over_all_datasets(answer):
    means = [rewards[answer] for rewards in rewards_of_constants().values()]
    assert len(means) >= 104
    assert statistics.mean(means) < ELSEWHERE / 2


def test_constant_answer_is_worth_little_in_each_dataset():
    dear = {}
    for name, rewards in rewards_of_constants().items():
        most = FEW_ANSWERS[name][1] if name in FEW_ANSWERS else ELSEWHERE
        dear |= {(name, answer): mean for answer, mean in rewards.items() if mean >= most}
    assert dear == {}


@pytest.mark.parametrize("name", ["coin_flip", "game_of_life_halting"])
def test_right_answer_is_paid_where_the_adapter_judges(name):
    dataset = library().create_dataset(name, seed=2, size=12)
    for entry in dataset:
        right = entry["answer"]
        wrong = {"True": "False", "False": "True"}.get(right, "0")
        assert verdict(name, dataset, entry, right) == 1.0
        assert verdict(name, dataset, entry, wrong) == 0.0


def test_probability_may_be_written_as_fraction():
    assert checked_reward("coin_flip", "3/8", {"answer": "0.375"}, 0.0) == 1.0
    assert checked_reward("coin_flip", "1/0", {"answer": "0.375"}, 0.0) == 0.0
