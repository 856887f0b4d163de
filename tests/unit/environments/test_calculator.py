from __future__ import annotations

import pytest
from machine import cpu_seconds

from environments.tools import CalculatorTool


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("41*31", "1271"),
        ("  2 + 3*4 ", "14"),
        ("(2+3)*-4", "-20"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("7//2", "3"),
        ("-7%3", "2"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("07+008", "15"),
        ("007.50", "7.5"),
        ("100+0.5", "100.5"),
        ("10*05", "50"),
        ("0.1+0.2", "0.3"),
        ("1e3*2", "2000.0"),
        ("0*1", "0"),
        ("+-+5", "-5"),
        ("10**400//10**398", "100"),
    ],
)
def test_arithmetic(expression, text):
    assert CalculatorTool()(expression=expression).to_string() == text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("1/0", "division by zero"),
        ("1%0", "division by zero"),
        ("0**-1", "division by zero"),
        ("41*", "cannot read"),
        ("", "cannot read"),
        ("1\x00", "cannot read"),
        ("(" * 150, "cannot read"),
        ("2^3", "write **"),
        ("1<<3", "unknown operator"),
        ("1,000*2", "only numbers"),
        ("__import__('os')", "only numbers"),
        ("x+1", "only numbers"),
        ("'a'*9", "only numbers"),
        ("True+1", "only numbers"),
        ("2j", "only numbers"),
        ("~5", "only numbers"),
        ("1<2", "only numbers"),
        ("9**9**9", "too large"),
        ("9**9**9**9", "too large"),
        ("(9**999)**999", "too large"),
        ("*".join(["9**1000"] * 20), "too large"),
        ("1e999", "too large"),
        ("1e308*10", "too large"),
        ("10.0**400", "too large"),
        ("10**400*1.5", "too large"),
        ("10**400/3", "too large"),
        ("(-8)**0.5", "no real root"),
        ("1+" * 100 + "1", "201 characters"),
        (5, "has to be text"),
        (None, "has to be text"),
    ],
)
def test_what_is_wrong_is_said(expression, message):
    output = CalculatorTool()(expression=expression)
    assert output.output is None
    assert message in output.error
    assert cpu_seconds(lambda: CalculatorTool()(expression=expression)) < 2
