"""What a parsed turn is made of, and how one decoded call is judged.

Model output is hostile: whatever stands in it, reading it costs bounded time and raises nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn, Protocol

import pydantic_core

from sglang_multiturn.schemas import ToolSchema

MAX_CALL_CHARS = 100_000
"""A longer call, or list of calls, is broken: model output is parsed on the event loop."""
MAX_CALLS = 128
"""More calls in one turn are not read; the last `BrokenCall` of such a turn says so."""
MAX_READ_CHARS = 200_000
"""As for MAX_CALLS: once so much text of a turn's calls was read, the rest is not."""
MAX_NAME_CHARS = 200
"""A longer tool name is broken."""
WHITESPACE = re.compile(r"\s*")

_NAME_IN_JSON = re.compile(r'"(?:tool_)?name"\s*:\s*"([^"\\]{1,200})"')


class BrokenKind(StrEnum):
    """What is wrong with a call that cannot be made."""

    JSON = "json"
    """It cannot be decoded: it is no JSON, or no Python or tagged values where the format has those."""
    NAME = "name"
    """It names no tool."""
    ARGUMENTS = "arguments"
    """Its arguments are no object of named values, or one of them cannot be read."""
    ENVELOPE = "envelope"
    """The marks around it are missing, misplaced or empty, or it is no object with a name and arguments."""
    TRUNCATED = "truncated"
    """The text ends inside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A call that can be made, as far as its form goes."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenCall:
    """A call that cannot be made, and why, in a sentence for the model."""

    reason: str
    name: str = ""
    """The tool it meant, when that can be told."""
    kind: BrokenKind = BrokenKind.ENVELOPE


Call = ParsedCall | BrokenCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """What one assistant turn said and asked for."""

    content: str
    """The words outside reasoning and calls."""
    reasoning: str = ""
    calls: tuple[ParsedCall | BrokenCall, ...] = ()
    """In the order in which the model wrote them."""


class ToolCallParser(Protocol):
    """Reads one format of tool calls."""

    def parse(self, text: str, tools: Sequence[ToolSchema], *, prompt: str | None = None) -> ParsedTurn:
        """What a turn says and asks for. Never raises, whatever the text.

        `text` is the turn's own text with its special tokens, a final end-of-turn token left out. `prompt` is what
        stands right before it, where that is not the template's usual generation prompt.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The calls of one stretch of text."""

    calls: Sequence[Call]
    end: int
    """Where reading goes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Where in a turn a reader stands."""

    first: bool
    """No word stands before these calls."""
    thinking: re.Pattern[str]
    """The marks of reasoning. A reader passes one only inside a call that can be read."""

    def end_of_broken(self, text: str, start: int, stop: int) -> int:
        """Where what cannot be read from `start` on ends: at `stop`, or where reasoning begins or ends before."""
        found = self.thinking.search(text, start, stop)
        return found.start() if found else stop


class CallReader(Protocol):
    """Finds and reads the calls of one format."""

    @property
    def opening(self) -> re.Pattern[str]:
        """Where calls may begin."""
        ...

    @property
    def closers(self) -> tuple[str, ...]:
        """Marks that only ever end calls."""
        ...

    @property
    def noise(self) -> tuple[str, ...]:
        """Marks that are no words of the model."""
        ...

    def read(self, text: str, start: int, tools: Sequence[ToolSchema], context: Context) -> Block | None:
        """The calls that begin at `start`, where `opening` matches; None where these are words after all."""
        ...


class DecodeError(ValueError):
    """Text that is not the JSON or literal it should be."""

    def __init__(self, detail: str, *, early: bool = False) -> None:
        super().__init__(detail)
        self.early = early
        """The text ends before the value does."""


def decode_json(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and where it ends. The last of duplicate keys counts.

    Raises:
        DecodeError: it is no JSON (NaN and Infinity are none), too long, or nested too deeply.
    """
    chunk = text[start : start + MAX_CALL_CHARS]
    try:
        value, length = _DECODER.raw_decode(chunk)
    except json.JSONDecodeError as error:
        if len(text) - start > MAX_CALL_CHARS and _ends_early(error, chunk):
            raise DecodeError(f"it is longer than {MAX_CALL_CHARS:,} characters") from error
        raise DecodeError(error.msg, early=_ends_early(error, chunk)) from error
    except (ValueError, RecursionError, MemoryError) as error:
        detail = (
            str(error) if isinstance(error, _NotJsonError) else "it is nested too deeply or holds too long a number"
        )
        raise DecodeError(detail) from error
    return value, start + length


def check_call(value: Any) -> Call:
    """One decoded call. `parameters` is accepted for `arguments`, and JSON text of an object for the object."""
    if not isinstance(value, dict):
        shape = 'The tool call must be a JSON object with "name" and "arguments".'
        return BrokenCall(reason=shape, kind=BrokenKind.ENVELOPE)
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return BrokenCall(reason='The tool call has no "name".', kind=BrokenKind.NAME)
    return check_arguments(name, value.get("arguments", value.get("parameters", {})))


def check_arguments(name: str, arguments: Any) -> Call:
    """A call of `name`, once its arguments were decoded."""
    if not name.strip() or len(name) > MAX_NAME_CHARS or not _is_writable(name):
        reason = f"The tool's name must be plain text of 1 to {MAX_NAME_CHARS} characters."
        return BrokenCall(reason=reason, kind=BrokenKind.NAME)
    if isinstance(arguments, str):
        try:
            arguments = _decode_whole(arguments)
        except DecodeError:
            reason = '"arguments" must be a JSON object, not a string.'
            return BrokenCall(reason=reason, name=name, kind=BrokenKind.ARGUMENTS)
    if not isinstance(arguments, dict):
        reason = f'"arguments" must be a JSON object, not {type(arguments).__name__}.'
        return BrokenCall(reason=reason, name=name, kind=BrokenKind.ARGUMENTS)
    if not _is_writable(arguments):
        reason = "The tool call is nested too deeply or holds invalid characters."
        return BrokenCall(reason=reason, name=name, kind=BrokenKind.JSON)
    return ParsedCall(name=name, arguments=arguments)


def not_json(error: DecodeError, text: str, start: int) -> BrokenCall:
    """The broken call whose JSON begins at `start`."""
    found = _NAME_IN_JSON.search(text, start, start + 1000)
    reason = f"The tool call is not valid JSON ({error})."
    return BrokenCall(reason=reason, name=found.group(1) if found else "", kind=BrokenKind.JSON)


def through_json(value: Any) -> Any:
    """A value as it is after a way through JSON: text keys, lists for tuples. Raises DecodeError."""
    try:
        return _decode_whole(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise DecodeError("a value cannot be written as JSON") from error


def _decode_whole(text: str) -> Any:
    value, end = decode_json(text, skip_space(text, 0))
    if skip_space(text, end) < len(text):
        raise DecodeError("something follows the value")
    return value


def skip_space(text: str, start: int) -> int:
    """Where the white space at `start` ends."""
    found = WHITESPACE.match(text, start)
    assert found is not None  # it matches nothing, too
    return found.end()


def _ends_early(error: json.JSONDecodeError, chunk: str) -> bool:
    return error.pos >= len(chunk.rstrip()) or error.msg.startswith("Unterminated string")


def _is_writable(value: Any) -> bool:
    """Whether a decoded value can be written as JSON again: not too deep, and without lone surrogates."""
    try:
        pydantic_core.to_json(value)
    except ValueError:
        return False
    return True


class _NotJsonError(ValueError):
    pass


def _refuse_constant(constant: str) -> NoReturn:
    raise _NotJsonError(f"{constant} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise _NotJsonError(f"{digits[:20]} is too large a number")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)
