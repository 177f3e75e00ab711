"""The calculator: exact, bounded, and deaf to anything that is not arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_multiturn.errors import ToolError
from sglang_multiturn.tools.builtin.calculator import CalculatorTool, evaluate, format_number


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("12*34", "408"),
        ("12 - 34", "-22"),
        ("0.1+0.2", "0.3"),
        ("1/3*3", "1"),
        ("1/8", "0.125"),
        ("1/3", "0.333333333333 (exactly 1/3)"),
        ("-1/3", "-0.333333333333 (exactly -1/3)"),
        ("2**10", "1024"),
        ("2**-2", "0.25"),
        ("7//2", "3"),
        ("-7%3", "2"),
        ("1,000*2", "2000"),
        ("$1,234,567.50 + $0.50", "1234568"),
        ("20%", "0.2"),
        ("50*20%", "10"),
        ("7 % 4", "3"),
        ("3 × 4 ÷ 2", "6"),
        ("05*2", "10"),
        (".5*4", "2"),
        ("(2+3)*-(4)", "-20"),
        ("9007199254740993*1", "9007199254740993"),
        ("0.1234567890123456789*10000000000000000000", "1234567890123456789"),
    ],
)
def test_values_are_exact(expression: str, shown: str) -> None:
    assert format_number(evaluate(expression)) == shown


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("1/0", "division by zero"),
        ("1//0", "division by zero"),
        ("9**9**9", "the power is too large"),
        ("2**100000", "the power is too large"),
        ("10**1000*10**1000", "too large"),
        ("2**0.5", "only whole exponents"),
        ("1e999999", "is not an arithmetic expression"),
        ("1+", "is not an arithmetic expression"),
        ("", "is not an arithmetic expression"),
        ("x+1", "is not an arithmetic expression"),
        ("'a'*3", "is not an arithmetic expression"),
        ("True+1", "is not an arithmetic expression"),
        ("1j", "is not an arithmetic expression"),
        ("[1]*3", "is not an arithmetic expression"),
        ("1 if 1 else 2", "is not an arithmetic expression"),
        ("1<2", "is not an arithmetic expression"),
        ("1<<10000", "is not an arithmetic expression"),
        ("max(1,2)", "is not an arithmetic expression"),
        ("__import__('os').system('true')", "is not an arithmetic expression"),
        ("().__class__", "is not an arithmetic expression"),
        ("(lambda: 1)()", "is not an arithmetic expression"),
        ("1;2", "is not an arithmetic expression"),
        ("a := 3", "is not an arithmetic expression"),
        ("f'{1}'", "is not an arithmetic expression"),
        ("(" * 250, "is not an arithmetic expression"),
        ("1+" * 200 + "1", "has 401 characters; at most 256"),
    ],
)
def test_anything_else_is_answered_with_a_sentence(expression: str, said: str) -> None:
    with pytest.raises(ToolError, match=r".*") as caught:
        evaluate(expression)
    assert said in str(caught.value)


@given(st.text(alphabet="0123456789+-*/().% ,eE_$xX=\n", max_size=40))
def test_no_text_raises_anything_but_a_tool_error(text: str) -> None:
    try:
        value = evaluate(text)
    except ToolError:
        return
    assert isinstance(value, Fraction)
    assert value.numerator.bit_length() <= 4096 + 64
    assert format_number(value)


@given(st.integers(-999, 999), st.sampled_from("+-*"), st.integers(-999, 999))
def test_integer_arithmetic_is_pythons(left: int, operation: str, right: int) -> None:
    expected = {"+": left + right, "-": left - right, "*": left * right}[operation]
    assert format_number(evaluate(f"({left}){operation}({right})")) == str(expected)


async def test_the_tool_answers_text_without_a_reward() -> None:
    tool = CalculatorTool({"max_exponent": 3})
    assert tool.name == "calculator"
    assert await tool.execute("i", {"expression": "2**3"}) == ("8", 0.0, {})
    with pytest.raises(ToolError, match="exponent at most 3"):
        await tool.execute("i", {"expression": "2**4"})
