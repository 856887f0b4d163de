"""A calculator that a model can call, safe on any input."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable

from environments.syntax_tree import parse_expression
from environments.tools.base import Tool, ToolOutput

Number = int | float

_MAX_LENGTH = 200
_MAX_RESULT_BITS = 4096  # about 1,233 digits; Python does not print above 4,300

_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class CalculatorTool(Tool):
    """Evaluates ``+ - * / // % **`` and parentheses. Integers stay exact, a division without rest too."""

    name = "calculator"
    description = "Evaluates an arithmetic expression such as 41*31 or (2+3)/4."

    def forward(self, expression: str) -> ToolOutput:
        try:
            value = evaluate(expression)
        except ZeroDivisionError:
            return ToolOutput(self.name, error="division by zero.")
        except OverflowError:
            return ToolOutput(self.name, error="the result is too large.")
        except ValueError as error:
            return ToolOutput(self.name, error=str(error))
        # A float is exact to 15 digits: 0.1+0.2 shall be 0.3.
        return ToolOutput(self.name, output=float(f"{value:.15g}") if isinstance(value, float) else value)


def evaluate(expression: str) -> Number:
    """Return the value of ``expression``. Time and memory are bounded for any input.

    Raises:
        ValueError: it is not arithmetic, or too long.
        ZeroDivisionError, OverflowError: it has no value, or one above 4096 bits.
    """
    if not isinstance(expression, str):
        raise ValueError(f"the expression has to be text such as 41*31, not {expression!r}.")
    if len(expression) > _MAX_LENGTH:
        raise ValueError(
            f"the expression has {len(expression)} characters, at most {_MAX_LENGTH} are allowed."
        )
    # Models write 07, which is a syntax error in Python, because it was octal once.
    source = re.sub(r"(?<![\w.])0+(?=\d)", "", expression.strip())
    try:
        tree = parse_expression(source)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # the last two: nested too deeply
        raise ValueError(f"cannot read {expression!r}: write an expression such as 41*31.") from error
    return _value(tree)


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant):
        literal = node.value
        if isinstance(literal, int | float) and not isinstance(literal, bool):
            return _checked(literal)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp):
        return _checked(_applied(node.op, _value(node.left), _value(node.right)))
    raise ValueError("only numbers, + - * / // % ** and parentheses are allowed.")


def _applied(sign: ast.operator, left: Number, right: Number) -> Number:
    if isinstance(sign, ast.Pow):
        return _power(left, right)
    if isinstance(sign, ast.Div):
        exact = isinstance(left, int) and isinstance(right, int) and right != 0 and left % right == 0
        return left // right if exact else left / right
    if type(sign) not in _OPERATORS:
        hint = "for a power write **." if isinstance(sign, ast.BitXor) else "use + - * / // % **."
        raise ValueError(f"unknown operator: {hint}")
    return _OPERATORS[type(sign)](left, right)


def _power(base: Number, exponent: Number) -> Number:
    # Before computing: 9**9**9 would run for ever.
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and base.bit_length() * exponent > 2 * _MAX_RESULT_BITS
    ):
        raise OverflowError
    power = base**exponent
    if isinstance(power, complex):
        raise ValueError("a negative number has no real root.")
    return power


def _checked(value: Number) -> Number:
    too_large = value.bit_length() > _MAX_RESULT_BITS if isinstance(value, int) else not math.isfinite(value)
    if too_large:
        raise OverflowError
    return value
