"""Programs that ``repairs`` puts bugs into: each function is a module of a task's, and ``CALLS`` tests it."""

from __future__ import annotations


def merge_spans(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Unite spans (start, end) that touch or overlap, and return them in order."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def roman(number: int) -> str:
    """Write a number from 1 to 3999 in Roman numerals."""
    text = ""
    values = (1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1)
    signs = ("M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I")
    for value, sign in zip(values, signs, strict=True):
        while number >= value:
            text += sign
            number -= value
    return text


def wrap(text: str, width: int) -> list[str]:
    """Break a text at its spaces into lines of at most ``width`` characters; a longer word has its own."""
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] = lines[-1] + " " + word
        else:
            lines.append(word)
    return lines


def first_at_least(numbers: list[int], least: int) -> int:
    """Return the first place in sorted numbers that has ``least`` or more; their count if there is none."""
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) // 2
        if numbers[middle] < least:
            low = middle + 1
        else:
            high = middle
    return low


def is_balanced(text: str) -> bool:
    """Return whether all brackets, (), [] and {}, are closed in the right order."""
    pairs = {")": "(", "]": "[", "}": "{"}
    opened: list[str] = []
    for sign in text:
        if sign in pairs.values():
            opened.append(sign)
        elif sign in pairs and (not opened or opened.pop() != pairs[sign]):
            return False
    return not opened


def run_lengths(text: str) -> list[tuple[str, int]]:
    """Count equal characters that stand next to each other."""
    runs: list[tuple[str, int]] = []
    for sign in text:
        if runs and runs[-1][0] == sign:
            runs[-1] = (sign, runs[-1][1] + 1)
        else:
            runs.append((sign, 1))
    return runs


def days_in(year: int, month: int) -> int:
    """Return the number of days of a month of the Gregorian calendar."""
    if month == 2:
        is_leap = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
        return 29 if is_leap else 28
    return 30 if month in (4, 6, 9, 11) else 31


def change_of(amount: int, coins: list[int]) -> int:
    """Return the smallest number of coins that make an amount, or -1 where none do."""
    best = [0] + [amount + 1] * amount
    for part in range(1, amount + 1):
        for coin in coins:
            if coin <= part:
                best[part] = min(best[part], best[part - coin] + 1)
    return best[amount] if best[amount] <= amount else -1


def ranking(scores: dict[str, int]) -> list[tuple[int, str]]:
    """Give places by score, the highest first; equal scores share a place, in the order of their names."""
    places: list[tuple[int, str]] = []
    for name in sorted(scores, key=lambda each: (-scores[each], each)):
        place = 1 + sum(1 for other in scores.values() if other > scores[name])
        places.append((place, name))
    return places


def transposed(rows: list[list[int]]) -> list[list[int]]:
    """Make rows of columns; short rows are filled up with 0."""
    width = max((len(row) for row in rows), default=0)
    return [[row[at] if at < len(row) else 0 for row in rows] for at in range(width)]


def steps_between(grid: list[str], start: tuple[int, int], goal: tuple[int, int]) -> int:
    """Return the least number of steps on free fields (.), or -1 where no way leads from start to goal."""
    steps, waiting = {start: 0}, [start]
    while waiting:
        row, column = waiting.pop(0)
        if (row, column) == goal:
            return steps[goal]
        for down, right in ((0, 1), (1, 0), (0, -1), (-1, 0)):
            place = (row + down, column + right)
            is_inside = 0 <= place[0] < len(grid) and 0 <= place[1] < len(grid[0])
            if is_inside and grid[place[0]][place[1]] == "." and place not in steps:
                steps[place] = steps[row, column] + 1
                waiting.append(place)
    return -1


def moving_mean(numbers: list[float], size: int) -> list[float]:
    """Return the mean of each number and those before it, at most ``size`` together."""
    means: list[float] = []
    for at in range(len(numbers)):
        part = numbers[max(0, at - size + 1) : at + 1]
        means.append(sum(part) / len(part))
    return means


CALLS = {
    "merge_spans": [
        *("[(1, 3), (2, 5), (7, 8)]", "[(5, 6), (1, 2), (2, 4)]", "[(1, 9), (2, 3), (9, 10)]", "[]"),
        *("[(0, 1), (2, 3)]", "[(4, 4), (4, 4), (3, 5), (6, 7)]"),
    ],
    "roman": ["4", "9", "14", "1987", "2024", "3999", "40", "400", "90", "555"],
    "wrap": [
        "'a bc def', 4",
        "'a bc def', 5",
        "'longword at the end', 3",
        "'', 5",
        "'one two  three four', 9",
    ],
    "first_at_least": [
        "[1, 3, 5, 7], 5",
        "[1, 3, 5, 7], 8",
        "[], 1",
        "[2, 2, 2], 2",
        "[1, 4], 3",
        "[1, 4], 0",
    ],
    "is_balanced": ["'a(b)[c]'", "'(]'", "'(('", "'}'", "''", "'{[()]}()'", "'([)]'", "'x)y('"],
    "run_lengths": ["'aab'", "''", "'abc'", "'zzzz'", "'abba'"],
    "days_in": ["2024, 2", "1900, 2", "2000, 2", "2023, 2", "2023, 4", "2023, 12", "2023, 1", "2023, 11"],
    "change_of": ["6, [1, 3, 4]", "0, [5]", "7, [2, 4]", "11, [5, 2, 1]", "3, [3]", "8, [5, 4]", "2, [3]"],
    "ranking": ["{'b': 3, 'a': 3, 'c': 5}", "{}", "{'x': 1}", "{'p': 1, 'q': 2, 'r': 2, 's': 0}"],
    "transposed": ["[[1, 2], [3, 4]]", "[]", "[[1], [2, 3, 4]]", "[[], [5]]"],
    "steps_between": [
        "['..', '..'], (0, 0), (1, 1)",
        "['.#', '#.'], (0, 0), (1, 1)",
        "['...', '##.', '...'], (0, 0), (2, 0)",
        "['.'], (0, 0), (0, 0)",
        "['..#.', '....'], (0, 0), (0, 3)",
    ],
    "moving_mean": ["[1, 2, 3, 4], 2", "[5, 1], 3", "[], 1", "[2, 4, 9], 1", "[1, 1, 4, 0, 5], 3"],
}
"""Arguments of the calls by which each program is tested."""
HELD_OUT = ("days_in", "run_lengths", "first_at_least", "ranking")
"""Programs of the tasks that are held out."""
