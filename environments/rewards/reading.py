"""Reads an answer of mathematics, as LaTeX has it: its box, its number or its text, and its unit."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

from environments.rewards.notation import MAX_LENGTH, in_latex

_DECIMAL = r"[+-]?(?:\d+\.?\d*|\.\d+)"
_NUMBER = rf"{_DECIMAL}(?:[eE][+-]?\d{{1,3}})?"
POWER_OF_TEN = (
    rf"(?:({_DECIMAL})(?:\\times|\\cdot|\*)|([+-]?))10\^(?:\{{([+-]?\d{{1,3}})\}}|([+-]?\d{{1,3}}))"
)
_UNIT = re.compile(
    r"(?:\\(?P<command>text|mathrm) ?\{(?P<text>[^{}]*)\}|(?<=[\d} ])(?P<words>[a-zA-Z]+(?: [a-zA-Z]+)*))"
    r" ?(?:\^ ?\{?(?P<power>\d)\}?)?$"
)
# A word that stands apart from its number is its unit if it has three letters or is one of the first list.
# Letters that touch the number are factors, except for those of the second list and words of four letters.
_SHORT_UNITS = "m|s|g|h|L|l|in|yd|mi|hr|ms|am|pm|AM|PM|sq"
_TOUCHING_UNITS = "mm|cm|dm|km|mg|kg|ml|mL|ft|lbs?|oz|mph"
_NO_UNITS = (
    "alpha|beta|gamma|delta|epsilon|zeta|eta|theta|kappa|lambda|sigma|tau|phi|chi|psi|omega|rho|and|not"
    "|(?:hundred|thousand|million|billion|trillion|third|quarter|fourth|fifth|tenth)s?|dozen|half|halves"
    "|squared|cubed|factorial|choose|over|mod|plus|minus|times|sin|cos|tan|cot|log|exp|sqrt|root|inf|infinity"
)
_LONG_WORD = rf"(?!(?:{_NO_UNITS})\b)[a-zA-Z]{{3,}}"
_UNIT_WORD = rf"(?:{_LONG_WORD}|{_SHORT_UNITS}|{_TOUCHING_UNITS})\b"
_BARE_UNIT = re.compile(
    rf"(?:(?:(?<=[\d)}}$])|(?<=\\pi)) |(?<=[\d}}])(?=(?:{_TOUCHING_UNITS}|{_LONG_WORD}[a-zA-Z])\b))"
    rf"(?P<words>{_UNIT_WORD}(?:[ /]{_UNIT_WORD})*) ?(?:\^ ?\{{?(?P<power>\d)\}}?)?$"
)
_DEGREES = re.compile(r"\^ ?(?:\{ ?\\circ ?\}|\\circ) ?(?:\\(?:text|mathrm) ?\{ ?)?(?P<scale>[CF]?) ?\}?$")
_SCALES = {"": "degree", "C": "degree celsius", "F": "degree fahrenheit"}
_SYMBOLS = ("i", "e", "d")
"""Contents of a ``\\mathrm{...}`` that is no unit."""
_BASE = re.compile(r"[\dA-F]+_\{?(\d+)\}?")


class Reading(NamedTuple):
    """A parsed answer: its value, exact if it is a number, and the unit or text at its end, if any."""

    value: Fraction | str
    ending: str


def read(text: str) -> Reading:
    """Parse ``text`` without LaTeX's trimmings; the unit of a number is not part of its value."""
    plain = plain_text(text)
    compact = compact_text(plain)
    unit = _unit(plain)
    if unit is not None and unit.is_sure and unit.number is not None and may_be_unit(unit.name):
        return Reading(unit.number, unit.name)
    number = _number(compact)
    value = compact.replace(", ", ",") if number is None else number
    if unit is not None and (unit.is_sure or unit.number is not None):
        return Reading(value, unit.name)
    base = _BASE.fullmatch(compact)
    return Reading(value, f"_{base[1]}" if base else "")


def without_unit(text: str) -> str:
    """``text`` without the unit at its end; ``text`` itself where it has none for sure."""
    unit = _unit(text)
    return unit.rest if unit is not None and unit.is_sure and may_be_unit(unit.name) else text


class _Unit(NamedTuple):
    r"""Possible unit at the end of an answer: in 2x+3\mathrm{i} it is none."""

    name: str
    is_sure: bool
    r"""True where it is in a ``\text{...}``, or is a word that stands for no symbols."""
    rest: str
    """Text before it."""

    @property
    def number(self) -> Fraction | None:
        """Return the number before it, if it is one."""
        return _number(compact_text(self.rest))


def _unit(plain: str) -> _Unit | None:
    if len(plain) <= MAX_LENGTH and (degrees := _DEGREES.search(plain)):
        return _Unit(_SCALES[degrees["scale"]], True, plain[: degrees.start()].strip())
    found = (_BARE_UNIT.search(plain) or _UNIT.search(plain)) if len(plain) <= MAX_LENGTH else None
    rest = plain[: found.start()].strip() if found else ""
    if found is None or not rest:
        return None
    command, text, bare, power = map(found.groupdict().get, ("command", "text", "words", "power"))
    words = (text or bare or "").strip(" .")
    is_sure = found.re is _BARE_UNIT or command == "text" or (command == "mathrm" and words not in _SYMBOLS)
    name = words.casefold() + (f"^{power}" if power else "")
    name = re.sub("^square (.+)", r"\1^2", re.sub("^cubic (.+)", r"\1^3", name))
    return _Unit(name, is_sure, rest)


def may_be_unit(ending: str) -> bool:
    words = re.sub(r"[\^_]\d+$", "", ending)
    return not re.search(r"\d|\bor\b", words)  # "7\text{ or 8}" is not 7


def plain_text(text: str) -> str:
    text = in_latex(text).replace("{,}", ",")
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-z])|(?<!\\)\\[!()\[\]]|\\?\$", "", text)
    text = re.sub(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|~", " ", text)
    text = re.sub(r"\\(?:text)?color ?\{[a-zA-Z]+\}|\\displaystyle(?![a-z])", "", text)
    text = re.sub(r"\\(?:boldsymbol|bm|underline) ?\{([^{}]*)\}", r"\1", text)
    return " ".join(re.sub(r"^\{([^{}]*)\}$", r"\1", without_end(text)).split())


def compact_text(plain: str) -> str:
    """The text without meaningless spaces: 1 1/2 is not 11/2, and 100, 200 are two numbers."""
    plain = re.sub(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf)\s*\{([^{}]*)\}", r"\1", plain)
    plain = re.sub(r"\\frac ?(\d) ?(?=\d)", r"\\frac\1", plain)
    return re.sub(r"\s+", " ", re.sub(r"(?<![\d,])\s+|\s+(?!\d)", "", plain))


def _number(compact: str) -> Fraction | None:
    if len(compact) > MAX_LENGTH:
        return None
    if re.fullmatch(r"[+-]?\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)(?:\.\d*)?", compact):
        compact = re.sub("[, ]", "", compact)
    if power := re.fullmatch(POWER_OF_TEN, compact):
        mantissa, sign, braced, bare = power.groups()
        if mantissa is None and int(braced or bare) in (0, 1):
            return None  # nobody's result
        compact = f"{mantissa or sign + '1'}e{braced or bare}"
    compact = re.sub(rf"^([+-]?)\(({_NUMBER})\)(?=/)|(?<=/)\(({_NUMBER})\)$", r"\1\2\3", compact)
    compact = re.sub(r"^([+-]?)\((\d+/\d+)\)$", r"\1\2", compact)
    if re.fullmatch(_NUMBER, compact):
        return Fraction(compact)
    compact = re.sub(
        rf"\\frac(?:\{{({_NUMBER})\}}|(\d))(?:\{{({_NUMBER})\}}|(\d))", _as_ratio, compact
    ).strip()
    ratio = re.fullmatch(rf"([+-]?)(\d+) (\d+)/(\d+)|([+-] )?({_NUMBER})/({_NUMBER})", compact)
    if ratio is None:
        return None
    *parts, numerator, denominator = (part for part in ratio.groups() if part is not None)
    if not Fraction(denominator):
        return None
    sign = -1 if parts and parts[0].strip() == "-" else 1
    whole = Fraction(parts[1]) if len(parts) == 2 else 0
    return sign * (whole + Fraction(numerator) / Fraction(denominator))


def _as_ratio(frac: re.Match[str]) -> str:
    return " " + "/".join(part for part in frac.groups() if part is not None)


def without_end(text: str) -> str:
    """The text without a full stop, a comma or a percent sign at its end: math-verify does not know them."""
    text = re.sub(r"(?<!\\)[.,]$", "", text.strip()).rstrip()
    return text.removesuffix("%").removesuffix("\\").rstrip() if text.endswith("%") else text


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` whose braces balance, or None."""
    last: tuple[int, int] | None = None
    open_braces: list[tuple[int, bool]] = []  # the position of a brace, and whether a box begins there
    for token in re.finditer(r"\\(?:boxed|fbox)\s*\{|\\[{}]|[{}]", text):  # "\{" is a sign, not a brace
        if token[0] == "}" and open_braces:
            start, is_box = open_braces.pop()
            if is_box and (last is None or start > last[0]):
                last = start, token.start()
        elif token[0].endswith("{") and token[0] != r"\{":
            open_braces.append((token.end(), token[0] != "{"))
    return text[last[0] : last[1]] if last else None
