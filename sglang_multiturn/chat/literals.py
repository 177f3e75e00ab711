"""Literals of Python and of Gemma 4, decoded as JSON is: nothing is evaluated, time is bounded.

search(q='x', n=3)
{q:<|"|>x<|"|>,n:3}
"""

from __future__ import annotations

import ast
import re
import warnings
from typing import Any

from sglang_multiturn.chat.calls import DecodeError, decode_json, skip_space, through_json

MAX_LITERAL_CHARS = 50_000
"""A longer Python literal is not read: Python's own parser takes microseconds a character."""
MAX_DEPTH = 64
"""Gemma 4 values nested deeper are not read."""

JSON_TOKENS = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}]', re.DOTALL)
PYTHON_TOKENS = re.compile(
    r"""'[^'\\]*+(?:\\.[^'\\]*+)*+(?:'|\\?\Z)|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\](){}]""", re.DOTALL
)
"""Strings, also one without its end, and brackets."""

_CLOSING = {"(": ")", "[": "]", "{": "}"}
_JSON_NAMES = {"true": True, "false": False, "null": None}
_GEMMA_QUOTE = '<|"|>'
_GEMMA_BARE = re.compile(r"[^,{}\[\]<]*+")
_GEMMA_KEY = re.compile(r"\s*([^:,{}\[\]<]{1,500}):")


def matching_bracket(tokens: re.Pattern[str], text: str, start: int, stop: int) -> int | None:
    """Where the bracket at `start` closes; None where it does not before `stop`, or brackets cross."""
    expected: list[str] = []
    for token in tokens.finditer(text, start, stop):
        mark = token.group()
        if mark in _CLOSING:
            expected.append(_CLOSING[mark])
        elif len(mark) == 1 and mark in ")]}":
            if expected.pop() != mark:
                return None
            if not expected:
                return token.end()
    return None


def read_literal(text: str) -> Any:
    """A Python literal, and JSON's `true`, `false` and `null` inside it. Raises DecodeError."""
    return through_json(_value(_parse(text)))


def read_keywords(text: str) -> dict[str, Any]:
    """The keyword arguments in `(a=1, b='x')`.

    Raises:
        DecodeError: no Python, or a value that is no literal.
        TypeError: an argument without a name.
    """
    call = _parse(f"f{text}")
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise DecodeError("it is no call")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise TypeError("an argument without a name")
    arguments = {str(keyword.arg): _value(keyword.value) for keyword in call.keywords}
    return dict(through_json(arguments))


def _parse(text: str) -> ast.expr:
    if len(text) > MAX_LITERAL_CHARS:
        raise DecodeError(f"it is longer than {MAX_LITERAL_CHARS:,} characters")
    plain = PYTHON_TOKENS.sub(_plain_string, text.strip())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "invalid escape sequence": the model's, not ours
            return ast.parse(plain, mode="eval").body
    except SyntaxError as error:
        raise DecodeError(error.msg) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise DecodeError("it is nested too deeply or holds invalid characters") from error


def _plain_string(token: re.Match[str]) -> str:
    """A token with its line breaks escaped: LFM2.5's template writes them as they are."""
    text = token.group()
    if text[0] in "'\"" and token.string[: token.start()][-1:].isalpha():
        raise DecodeError("only plain strings are allowed")  # an f-string of 100,000 characters takes two seconds
    return text.replace("\n", "\\n").replace("\r", "\\r")


def _value(node: ast.expr) -> Any:
    try:
        return _plain_value(node)
    except RecursionError as error:
        raise DecodeError("it is nested too deeply") from error


def _plain_value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id="true" | "false" | "null" as name):
            return _JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_plain_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_key(key): _plain_value(value) for key, value in zip(keys, values, strict=True) if key}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
    raise DecodeError("a value is no literal")


def _key(node: ast.expr) -> Any:
    key = _plain_value(node)
    if not isinstance(key, str | int | float | None):
        raise DecodeError("a key is no text")
    return key


def read_gemma(text: str, start: int, stop: int) -> tuple[dict[str, Any], int]:
    """The Gemma 4 object whose brace is at `start`, and where it ends. Raises DecodeError."""
    value, end = _gemma_value(text[:stop], start, 0)
    return dict(value), end


def _gemma_value(text: str, position: int, depth: int) -> tuple[Any, int]:
    if depth > MAX_DEPTH:
        raise DecodeError("it is nested too deeply")
    position = skip_space(text, position)
    if text.startswith(_GEMMA_QUOTE, position):
        begin = position + len(_GEMMA_QUOTE)
        end = text.find(_GEMMA_QUOTE, begin)
        if end < 0:
            raise DecodeError(f"a string has no closing {_GEMMA_QUOTE}", early=True)
        return text[begin:end], end + len(_GEMMA_QUOTE)
    if text.startswith("{", position):
        return _gemma_items(text, position + 1, depth, {})
    if text.startswith("[", position):
        return _gemma_items(text, position + 1, depth, [])
    bare = _GEMMA_BARE.match(text, position)
    assert bare is not None  # it matches nothing, too
    return _gemma_scalar(bare.group().strip()), bare.end()


def _gemma_items(text: str, position: int, depth: int, into: dict[str, Any] | list[Any]) -> tuple[Any, int]:
    """The items of an object or list whose bracket ends at `position`."""
    closing = "}" if isinstance(into, dict) else "]"
    position = skip_space(text, position)
    while not text.startswith(closing, position):
        if isinstance(into, dict):
            key = _GEMMA_KEY.match(text, position)
            if key is None:
                raise DecodeError("a value has no name", early=position >= len(text))
            into[key.group(1).strip()], position = _gemma_value(text, key.end(), depth + 1)
        else:
            item, position = _gemma_value(text, position, depth + 1)
            into.append(item)
        position = skip_space(text, position)
        if text.startswith(",", position):
            position = skip_space(text, position + 1)
        elif not text.startswith(closing, position):
            raise DecodeError(f"a comma or {closing} is missing", early=position >= len(text))
    return into, position + 1


def _gemma_scalar(bare: str) -> Any:
    """A number, a truth value, nothing, or else the text itself."""
    if bare in ("None", "null"):
        return None
    try:
        value, end = decode_json(bare, 0)
    except DecodeError:
        return bare
    return value if end == len(bare) else bare
