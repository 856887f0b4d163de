# ruff: noqa: RUF001  (it is about signs that look like others)
"""Families of mathematical answers: each test has members of one kind, right ones and wrong ones."""

from __future__ import annotations

import pytest

from environments import math_reward_fn


def reward(truth: str, answer: str) -> float:
    return math_reward_fn({"ground_truth": truth}, rf"\boxed{{{answer}}}").reward


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("10^{-300}", "10^{-301}"),
        (r"\frac{1}{100!}", r"\frac{2}{100!}"),
        (r"2^{-1000}x^2", r"2^{-1001}x^2"),
        (r"10^{-20}+10^{-21}", r"10^{-20}"),
        (r"\frac{1}{30!}+\frac{1}{31!}", r"\frac{1}{30!}"),
        ("e^{-1000}", "0"),
        ("0", "e^{-1000}"),
        ("1", "1+10^{-20}"),
        (r"\pi", r"\pi+10^{-20}"),
        (r"\ln(1+10^{-30})", r"10^{-30}"),
        (r"\sin(10^{-20})", r"\sin(2\cdot 10^{-20})"),
        ("0.00000000000000000001x", "0.00000000000000000002x"),
        ("1.5e-20x", "2.5e-20x"),
        ("10^{-20}i", r"2\cdot 10^{-20}i"),
        (r"x>10^{-20}", r"x>2\cdot 10^{-20}"),
        (r"y=10^{-20}x", r"y=2\cdot 10^{-20}x"),
        (r"[0,10^{-20}]\cup[1,2]", r"[0,2\cdot 10^{-20}]\cup[1,2]"),
        (r"\begin{pmatrix}10^{-20}&0\\0&1\end{pmatrix}", r"\begin{pmatrix}0&0\\0&1\end{pmatrix}"),
        (r"\frac{\pi}{10^{10}}", "3.15e-10"),
        (r"10^{10}\pi", "31415926536"),
        ("262537412640768744", r"e^{\pi\sqrt{163}}"),
        (r"e^{200}\sqrt{2}", r"e^{200}\sqrt{2}+1"),
        (r"10^{60}\sqrt{2}", r"\sqrt{2\cdot 10^{120}+1}"),
        ("x^2+1=0", "x^2+9=0"),
    ],
)
def test_tiny_and_near_values_differ(truth, answer):
    assert reward(truth, answer) == 0.0


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        (r"\frac{1}{100!}", r"\frac{1}{100!}"),
        (r"3^{-40}", r"\frac{1}{12157665459056928801}"),
        (r"10^{-20}x", "0.00000000000000000001x"),
        (r"y=10^{-20}x", r"y=\frac{x}{10^{20}}"),
        (r"\frac{\pi}{10^{10}}", "3.14159265e-10"),
        (r"\sqrt{2}", "1.414214"),
        (r"100\pi", "314.159265"),
        (r"\frac{1-i}{2}", r"\frac{1}{1+i}"),
        ("3+4i", "3+4*i"),
        (r"\sum_{k=1}^{n} k^3", r"\sum_{i=1}^{n} i^3"),
        ("x-3", "x + -3"),
        ("x-3", "x+-3"),
        ("2.25", "1.5^2"),
        (r"\sqrt{2}+\sqrt{3}", r"\sqrt{5+2\sqrt{6}}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\frac{1}{2}\begin{pmatrix}2\\4\end{pmatrix}"),
    ],
)
def test_tiny_and_near_values_are_found_equal(truth, answer):
    assert reward(truth, answer) == 1.0


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("1,2,2,3", "1,2,3,3"),
        ("1", "1,1"),
        ("1,1", "1"),
        ("a,a,b", "a,b,b"),
        (r"\frac12,\frac12,1", r"\frac12,1,1"),
        ("[1,1,2]", "[1,2,2]"),
        ("[a,b,c]", "[c,b,a]"),
        ("((1,2),3)", "((2,1),3)"),
        ("(1,2),(2,1)", "(1,2),(1,2)"),
        ("1; 2; 2", "1; 1; 2"),
        ("(x,y)=(1,2)", "(2,1)"),
        ("x_1=1,x_2=2", "x_1=2,x_2=1"),
        ("x=1, y=2", "2, 1"),
        (r"\pm 2", "2"),
        (r"\pm 2", "-2,-2"),
        (r"\{1,2\}", "(1,2)"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1&2\end{pmatrix}"),
        (r"2, 4, 8, \dots", r"2, 4, 6, \dots"),
        (r"2, 4, 8, \ldots, 1024", "2, 4, 8, …, 512"),
        (r"\dots, -1, 0, 1, \dots", r"\dots, -2, 0, 2, \dots"),
        (r"\{2,4,6,\dots\}", r"\{2,4,8,\dots\}"),
        (r"(1,2,\dots,n)", r"(1,3,\dots,n)"),
        (r"1,2,\dots,10", "10"),
        (r"1+2+\dots+n", r"1+3+\dots+n"),
    ],
)
def test_lists_differ_by_order_multiplicity_and_each_item(truth, answer):
    assert reward(truth, answer) == 0.0


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("1, 1, 2, 3", "1,1,2,3"),
        ("2,-1", r"x=2 \text{ or } x=-1"),
        (r"\pm 2", "2, -2"),
        (r"1\pm\sqrt{2}", r"1+\sqrt2, 1-\sqrt2"),
        ("(1,2)", "1,2"),
        (r"\{1,2\}", "2,1"),
        (r"x\in\{1,2\}", r"\{2,1\}"),
        ("(x,y)=(1,2)", "(1,2)"),
        (r"\langle 1,2,3\rangle", "(1,2,3)"),
        ("1,000, 2,000", "1000, 2000"),
        (r"30^\circ, 60^\circ", r"30^\circ \text{ and } 60^\circ"),
        (r"1,\frac12,\frac13,\dots", "1, 0.5, 1/3, ..."),
        (r"2, 4, 8, \ldots, 1024", "2, 4, 8, …, 1024"),
        (r"1+2+\dots+n", r"1+2+\cdots+n"),
        (r"\{\{1\},\{2\}\}", r"\{\{2\},\{1\}\}"),
    ],
)
def test_lists_are_equal_in_any_notation(truth, answer):
    assert reward(truth, answer) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        (r"\frac{1}{11}", r"0.\overline{09}"),
        (r"\frac{7}{12}", r"0.58\bar3"),
        (r"\frac{7}{12}", r"0.58\dot{3}"),
        (r"\frac{1}{3}", "0.(3)"),
        (r"\frac{1}{3}", "0.333..."),
        (r"\frac{1}{3}", "0.3\N{COMBINING OVERLINE}"),
        (r"-\frac43\pi", r"-1.\overline{3}\pi"),
        (r"\frac{100}{3}\%", r"33.\overline{3}\%"),
        (r"\frac13, \frac23", r"0.\overline{3}, 0.\overline{6}"),
        (r"45^\circ", r"45\text{ degrees}"),
        (r"\angle A=45^\circ", r"45\degree"),
        ("12 cm²", r"12\text{ cm}^2"),
        ("5", "€5"),
        (r"\frac{3\pi}{4}", "(3*pi)/4"),
        (r"\sqrt{x}", "x**(1/2)"),
        (r"\frac{-b+\sqrt{b^2-4ac}}{2a}", "(-b+sqrt(b^2-4*a*c))/(2*a)"),
        (r"\arctan x", "atan(x)"),
        (r"e^{2x}", "exp(2*x)"),
        (r"|x|", "abs(x)"),
        (r"(-\infty,1)\cup(2,\infty)", "(-oo, 1) U (2, oo)"),
        (r"-\frac12", "(-1)/2"),
        (r"\frac{1+\sqrt{5}}{2}", "(1+√5)/2"),
        (r"x\sqrt{2}", "x√2"),
        (r"\frac{\sqrt{2}}{2}", "½√2"),
        ("a_{12}", "a₁₂"),
        (r"6.02\times 10^{23}", "6.02 × 10²³"),
        (r"\theta=\frac{\pi}{4}", "θ = π/4"),
        (r"\{-1,1\}", "{−1, 1}"),
        ("3", "𝟑"),
        ("-3", "－3"),
        ("42", "**42** cm"),
        ("1,2", "**1**, **2**"),
        ("5", "**x = 5**"),
        (r"\frac12", "**`1/2`**"),
        ("5", r"\color{red}{5}"),
    ],
)
def test_notations_of_one_value_are_read_alike(truth, answer):
    assert reward(truth, answer) == 1.0


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        (r"\frac{1}{11}", r"0.\overline{9}"),
        ("3.14", "3.14..."),
        (r"0.1\overline{6}", "0.16"),
        (r"45^\circ", r"\frac{\pi}{4}"),
        (r"20^\circ C", r"20^\circ F"),
        (r"\frac{1+\sqrt{5}}{2}", "1+sqrt(5)/2"),
        ("4x^3-2x", "4*x**3 + 2*x"),
        ("x_1", "x₂"),
        (r"6.02\times 10^{23}", "6.02 × 10²⁴"),
        ("12 cm²", "12 cm³"),
        (r"\overline{AB}", r"\overline{CD}"),
    ],
)
def test_notations_of_other_values_differ(truth, answer):
    assert reward(truth, answer) == 0.0


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("391", "17/(1/23)"),
        ("391", r"\frac{17}{23^{-1}}"),
        ("391", r"17\div\frac{1}{23}"),
        ("391", "17(23)"),
        ("391", "{17}{23}"),
        ("391", r"17\,23"),
        ("391", r"391\cdot 1^{100}"),
        ("391", r"\left(\sqrt{391}\right)^2"),
        ("391", r"\sqrt{17^2 23^2}"),
        ("391", r"\left|-391\right|"),
        ("391", r"\lceil 390.5\rceil"),
        ("391", r"e^{\ln 391}"),
        ("391", r"17\cdot 23\approx 400"),
        ("391", r"17\cdot 23=400"),
        ("x=391", "x=17*23"),
        ("6", r"\Gamma(4)"),
        ("6", "gcd(12, 18)"),
        (r"391\text{ cm}", r"17\cdot 23\text{ cm}"),
        ("(391,2)", r"(17\cdot 23,2)"),
        (r"\{391\}", r"\{17\cdot 23\}"),
        ("[0,391]", r"[0,17\cdot 23]"),
        (r"\begin{pmatrix}391\\1\end{pmatrix}", r"\begin{pmatrix}17\cdot 23\\1\end{pmatrix}"),
    ],
)
def test_calculations_earn_nothing_in_any_form(truth, answer):
    assert reward(truth, answer) == 0.0


@pytest.mark.parametrize(
    ("truth", "answer"),
    [
        ("391", r"\frac{782}{2}"),
        ("391", r"\sqrt{152881}"),
        ("391", "391=17*23"),
        ("1024", "2**10"),
        ("-8", "(-2)^3"),
    ],
)
def test_forms_that_cannot_be_told_from_an_answer_stay(truth, answer):
    assert reward(truth, answer) == 1.0
