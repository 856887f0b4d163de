# ruff: noqa: RUF001  (it is about signs that look like others)
r"""Writes an answer in LaTeX: models also write Unicode's signs, plain text as ``2*pi``, and Markdown."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from itertools import groupby

MAX_LENGTH = 1000
"""Longer texts are read as they are: no answer is that long, and rewriting them takes time."""

_GREEK = "αβγδεζηθικλμνξπρστυφχψωΓΔΘΛΞΠΣΦΨΩ"
_NAMES = {
    sign: unicodedata.name(sign).rpartition(" ")[2].lower().replace("lamda", "lambda") for sign in _GREEK
}
_COMMANDS = (
    r"× \times · \cdot ⋅ \cdot ∙ \cdot ° ^\circ º ^\circ ˚ ^\circ ∞ \infty ≤ \le ≥ \ge ≠ \ne ≈ \approx"
    r" ± \pm ∓ \mp ∪ \cup ∩ \cap ∈ \in ∅ \emptyset ∖ \setminus … \dots ⋯ \dots ∑ \sum ∏ \prod ∫ \int"
    r" ⟨ \langle ⟩ \rangle ⌊ \lfloor ⌋ \rfloor ⌈ \lceil ⌉ \rceil"
    r" ℕ \mathbb{N} ℤ \mathbb{Z} ℚ \mathbb{Q} ℝ \mathbb{R} ℂ \mathbb{C}"
)
_SIGNS = str.maketrans(
    {
        **dict.fromkeys("−–‐‑", "-"),
        **dict.fromkeys("⁄∕÷", "/"),
        **dict.fromkeys("\N{ZERO WIDTH SPACE}\N{WORD JOINER}\N{ZERO WIDTH NO-BREAK SPACE}"),
        **dict.fromkeys("€£¥₹"),
        "∗": "*",
        "′": "'",
        **{sign: f"{command} " for sign, command in re.findall(r"(\S) (\S+)", _COMMANDS)},
        **{sign: f"\\{name if sign.islower() else name.capitalize()} " for sign, name in _NAMES.items()},
    }
)
_FORMS = {"<super": "^{%s}", "<sub": "_{%s}", **dict.fromkeys(("<wide", "<small", "<font", "<noBreak"), "%s")}
"""LaTeX for a run of characters that Unicode calls another form of plain ones: x², x₁, １ and 𝑥."""
_MARKDOWN = re.compile(
    r"(^|[,;:(]\s?)(\*{1,3}|_{1,2}|`{1,3})(?![\s*])([^*`]+?|.+?)(?<![\s*])\2(?=[\s.,;:%)]|$)"
    r"|^[*`]+|(?<!\^)[*`]+$",
    re.DOTALL,
)
_QUOTED = r"\\(?:text[a-z]*|math[a-z]+|operatorname\*?|mbox|begin|end) ?\{[^{}]*\}"
_WORD = re.compile(
    rf"(?P<quoted>{_QUOTED})|(?<![\\a-zA-Z])(?:(?P<infinity>infinity|inf|oo)(?![a-zA-Z])"
    r"|a(?:rc)?(?P<inverse>sin|cos|tan)(?![a-zA-Z])"
    r"|(?P<same>pi|alpha|beta|gamma|delta|epsilon|theta|lambda|mu|sigma|phi|omega"
    r"|(?:sin|cos|tan|cot|csc|log|ln)h?|exp|(?:sec|max|min|gcd|lcm)(?=\())(?![a-zA-Z]))"
)
_ROOT = re.compile(
    r"(?:(?P<square>√|(?<![\\a-zA-Z])sqrt)|(?P<cube>∛|(?<![\\a-zA-Z])cbrt)|∜) ?"
    r"(?P<operand>\d+(?:\.\d+)?|\\(?!s)[a-z]+|[a-zA-Z](?![a-zA-Z]))?"
)
_IN_PARENTHESES = re.compile(r"(?:\\sqrt(?:\[\d+\])?|\^|(?P<abs>(?<![\\a-zA-Z])abs))\(")
_DOTS = re.compile(r"\\[lc]?dots[cbmio]?(?![a-zA-Z])|(?<!\.)\.\.\.(?!\.)")
_DOT = r"\\dot ?(?:\{(\d)\}|(\d))"
_REPEATING = re.compile(
    r"(?<![\d.])(?P<whole>\d{1,3}(?:,\d{3})+|\d*)\.(?:(?P<start>\d*)"
    r"(?:\\(?:overline|bar) ?(?:\{(?P<bar>\d+)\}|(?P<digit>\d))|\((?P<plain>\d+)\)"
    rf"|(?P<dotted>{_DOT}(?:\d*{_DOT})?))"
    r"|(?P<before>\d{0,20}?)(?:(?P<single>\d)(?P=single){2,}|(?P<period>\d{2,20}?)(?P=period)+) ?\\dots)"
)


def in_latex(text: str) -> str:
    r"""The text as LaTeX has it: x² is x^{2}, 2*pi is 2*\pi, and 0.\overline{42} is \frac{42}{99}."""
    if len(text) > MAX_LENGTH:
        return text
    text = _MARKDOWN.sub(_unmarked, _MARKDOWN.sub(_unmarked, text.strip()))  # twice, for **`42`**
    if not text.isascii():
        text = _without_unicode(text)
    text = text.replace(r"\degree", r"^\circ").replace(r"\varnothing", r"\emptyset")
    text = _ROOT.sub(_root, _WORD.sub(_command, text))
    text = re.sub(r"\+/-|(?:(?<=^)|(?<=[=(]))\+-", r"\\pm ", text)
    text = text.replace("<=", r"\le ").replace(">=", r"\ge ")
    text = _in_braces(re.sub(r"(?<=\S) ?\*\* ?(?=\S)", "^", text))
    text = re.sub(r"\^ ?([+-]?\d+(?:\.\d+)?|-[a-zA-Z])", r"^{\1}", text)
    text = re.sub(r"(?<=[)\]}]) ?U ?(?=[(\[{\\])", r"\\cup ", text)
    text = re.sub(r"(^|(?:\\c[ua]p|\\in|[=,(;]) ?)\{([^{}]*,[^{}]*)\}", r"\1\\{\2\\}", text)
    text = re.sub(r"(\\c[ua]p ?)\{([^{}]*)\}", r"\1\\{\2\\}", text)
    text = re.sub(r"(\d\.\d+)[eE]([+-]?\d{1,3})(?![\d.])", r"\1\\times 10^{\2}", text)
    return _REPEATING.sub(_as_fraction, _DOTS.sub(r"\\dots ", text))


def _without_unicode(text: str) -> str:
    text = re.sub(
        "((?:\\d[\u0304\u0305])+)", lambda run: rf"\overline{{{re.sub('[^0-9]', '', run[0])}}}", text
    )
    text = re.sub("(\\d)\u0307", r"\\dot{\1}", text).translate(_SIGNS)
    parts = []
    for form, run in groupby(text, key=lambda sign: unicodedata.decomposition(sign).partition(">")[0]):
        if form == "<fraction":
            halves = (unicodedata.normalize("NFKC", sign).partition("\N{FRACTION SLASH}") for sign in run)
            parts += [rf"\frac{{{above}}}{{{below}}}" for above, _, below in halves]
        else:
            part = "".join(run)
            parts.append(_FORMS[form] % unicodedata.normalize("NFKC", part) if form in _FORMS else part)
    return "".join(parts).translate(_SIGNS)


def _unmarked(marked: re.Match[str]) -> str:
    return marked[1] + marked[3] if marked[2] else ""


def _command(word: re.Match[str]) -> str:
    if word["quoted"]:
        return word[0]
    if word["infinity"]:
        return r"\infty "
    command = rf"\arc{word['inverse']}" if word["inverse"] else "\\" + word[0]
    return command + " " * word.string[word.end() :][:1].isalnum()


def _root(root: re.Match[str]) -> str:
    command = r"\sqrt" if root["square"] else r"\sqrt[3]" if root["cube"] else r"\sqrt[4]"
    return command + (f"{{{root['operand']}}}" if root["operand"] else "")


def _in_braces(text: str) -> str:
    """The text with what a power or a root has in parentheses in braces, as LaTeX wants it; abs(x) is |x|."""
    start = 0
    while (found := _IN_PARENTHESES.search(text, start)) is not None:
        start, depth = found.end(), 0
        for position in range(start - 1, len(text)):
            depth += (text[position] == "(") - (text[position] == ")")
            if depth == 0:
                head, inside, tail = text[: start - 1], text[start:position], text[position + 1 :]
                enclosed = f"|{inside}|" if found["abs"] else f"{{{inside}}}"
                text = head.removesuffix(found["abs"] or "") + enclosed + tail
                break
        else:
            break  # nothing closes it
    return text


def _as_fraction(decimal: re.Match[str]) -> str:
    whole, start = decimal["whole"].replace(",", ""), decimal["start"] or decimal["before"] or ""
    period = decimal["bar"] or decimal["digit"] or decimal["plain"] or decimal["single"] or decimal["period"]
    period = period or re.sub(r"\D", "", decimal["dotted"])
    value = Fraction(int(whole + start or "0")) + Fraction(int(period), 10 ** len(period) - 1)
    value /= 10 ** len(start)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
