"""An exact calculator. Numbers are fractions, so that 0.1+0.2 is 0.3 and 1/3*3 is 1.

Parsing and walking the expression is `simpleeval`'s, cut down to numbers, + - * / // % ** and signs: no names, no
calls, no attributes. Sizes are bounded before anything is computed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from simpleeval import InvalidExpression, SimpleEval

from sglang_multiturn.errors import ToolError
from sglang_multiturn.schemas import FunctionSchema, ToolSchema
from sglang_multiturn.tools.base import BaseTool, ToolResponse

_REPLACED = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "$": "", "€": "", "£": "", "=": " "})
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_PERCENT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*%(?!\s*[\d.(])")
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")
_SHOWN_DIGITS = 12


class CalculatorTool(BaseTool):
    """Evaluates an arithmetic expression exactly. Stateless."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._limits = {
            "max_expression_chars": int(config.get("max_expression_chars", 256)),
            "max_result_bits": int(config.get("max_result_bits", 4096)),
            "max_exponent": int(config.get("max_exponent", 1000)),
        }

    @classmethod
    def default_schema(cls) -> ToolSchema:
        """One required string, `expression`."""
        expression = {"type": "string", "description": "For example 12*(3+4)."}
        return ToolSchema(
            function=FunctionSchema(
                name="calculator",
                description="Evaluates an arithmetic expression exactly.",
                parameters={"type": "object", "properties": {"expression": expression}, "required": ["expression"]},
            )
        )

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str | ToolResponse, float, dict[str, Any]]:
        """The value as text. Raises ToolError with what is wrong with the expression."""
        return format_number(evaluate(str(parameters["expression"]), **self._limits)), 0.0, {}


def evaluate(
    expression: str, *, max_expression_chars: int = 256, max_result_bits: int = 4096, max_exponent: int = 1000
) -> Fraction:
    """The exact value of an arithmetic expression.

    Thousands separators, currency signs, `×` and `÷`, and `20%` (not followed by a number) are understood.

    Raises:
        ToolError: it is no arithmetic, divides by zero, or a number in it grows beyond the limits.
    """
    if len(expression) > max_expression_chars:
        raise ToolError(f"the expression has {len(expression)} characters; at most {max_expression_chars} are allowed")
    text = _THOUSANDS.sub("", expression.translate(_REPLACED)).strip()
    text = _LEADING_ZEROS.sub("", _PERCENT.sub(r"(\1/100)", text))
    evaluator = _ExactEval(text, max_result_bits, max_exponent)
    try:
        # Parsed here: simpleeval would take the first of several statements and leave the rest.
        value = evaluator.eval(text, previously_parsed=ast.parse(text, mode="eval").body)
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (InvalidExpression, SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ToolError(f"{expression[:100]!r} is not an arithmetic expression; use numbers and + - * / ( )") from error
    if not isinstance(value, Fraction):
        raise ToolError(f"{expression[:100]!r} is not an arithmetic expression; use numbers and + - * / ( )")
    return value


def format_number(value: Fraction) -> str:
    """An integer as it is, a short decimal exactly, anything else as a fraction with its decimal value."""
    if value.denominator == 1:
        return str(value.numerator)
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest == 1 and len(exact := _decimal(value)) <= _SHOWN_DIGITS + 3:
        return exact
    return f"{float(value):.{_SHOWN_DIGITS}g} (exactly {value})" if len(str(value)) <= 64 else f"{float(value):.12g}"


def _decimal(value: Fraction) -> str:
    """All digits of a fraction whose denominator has no prime but 2 and 5."""
    places = 0
    scaled = abs(value)
    while scaled.denominator != 1:
        scaled *= 10
        places += 1
    digits = str(scaled.numerator).rjust(places + 1, "0")
    return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"


class _ExactEval(SimpleEval):  # type: ignore[misc]
    """`SimpleEval` over fractions, with nothing in it but arithmetic."""

    def __init__(self, source: str, max_bits: int, max_exponent: int) -> None:
        super().__init__(names={}, functions={})
        self._source = source
        self._max_bits = max_bits
        self._max_exponent = max_exponent
        self.nodes = {
            ast.Expr: self._eval_expr,
            ast.UnaryOp: self._eval_unaryop,
            ast.BinOp: self._eval_binop,
            ast.Constant: self._eval_literal,
        }
        binary: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
            ast.Add: operator.add,
            ast.Sub: operator.sub,
            ast.Mult: operator.mul,
            ast.Div: operator.truediv,
            ast.FloorDiv: lambda a, b: Fraction(a // b),
            ast.Mod: operator.mod,
            ast.Pow: self._power,
        }
        self.operators = {
            **{kind: self._bounded(function) for kind, function in binary.items()},
            ast.USub: operator.neg,
            ast.UAdd: operator.pos,
        }

    def _eval_literal(self, node: ast.Constant) -> Fraction:
        # The source's own digits: 0.1 as a float would already be another number.
        digits = ast.get_source_segment(self._source, node) or ""
        value = Fraction(digits.replace("_", ""))
        if "e" in digits.lower():
            raise ValueError("numbers with exponents could be of any size")
        return value

    def _bounded(self, function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Fraction]:
        def apply(left: Fraction, right: Fraction) -> Fraction:
            value: Fraction = function(left, right)
            if max(value.numerator.bit_length(), value.denominator.bit_length()) > self._max_bits:
                raise ToolError(f"the result is too large (more than {self._max_bits} bits)")
            return value

        return apply

    def _power(self, base: Fraction, exponent: Fraction) -> Fraction:
        if exponent.denominator != 1:
            raise ToolError("only whole exponents are supported")
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if abs(exponent) > self._max_exponent or size * abs(exponent.numerator) > 2 * self._max_bits:
            raise ToolError(f"the power is too large (exponent at most {self._max_exponent})")
        return Fraction(base**exponent.numerator)
