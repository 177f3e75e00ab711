"""Calls written as Python: LFM2's between marks, Llama 4's bare.

    <|tool_call_start|>[search(q='x', n=3), calculator(expression='1+1')]<|tool_call_end|>

SGLang's detector for the bare ones costs exponential time on hostile text (the regular expression of `function_call/
pythonic_detector.py`), and neither reads all that the templates write: `null`, or a string with a line break. Each call
is cut out and read alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_multiturn.chat.calls import (
    Block,
    BrokenCall,
    BrokenKind,
    Call,
    Context,
    DecodeError,
    check_arguments,
    skip_space,
)
from sglang_multiturn.chat.literals import MAX_LITERAL_CHARS, PYTHON_TOKENS, matching_bracket, read_keywords
from sglang_multiturn.schemas import ToolSchema

_HEAD = re.compile(r"([A-Za-z_][\w.-]{0,200})\s*\(")
_FIRST = re.compile(r"[A-Za-z_][\w.-]{0,200}\((?:\)|\s*\w+\s*=)")
"""What begins a bare list of calls, even of a tool nobody knows: `[see (1)]` is prose."""
_BETWEEN = re.compile(r"[\s,]*")
_MAX_BROKEN = 8
"""After so many in one list the rest of it is not searched for good ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonCalls:
    """A list of Python calls, or one call, between marks or bare."""

    marks: tuple[str, str] | None = None
    noise: tuple[str, ...] = ()

    @property
    def opening(self) -> re.Pattern[str]:
        """The opening mark, or a bracket with a call in it."""
        return re.compile(re.escape(self.marks[0]) if self.marks else rf"\[(?=\s*{_HEAD.pattern})")

    @property
    def closers(self) -> tuple[str, ...]:
        """The closing mark."""
        return self.marks[1:] if self.marks else ()

    def read(self, text: str, start: int, tools: Sequence[ToolSchema], context: Context) -> Block | None:
        """See `CallReader.read`. A bare list counts when it comes first or names a known tool."""
        known = {tool.name for tool in tools}
        if self.marks is not None:
            return self._read_marked(text, start, self.marks, known, context)
        begin = skip_space(text, start + 1)
        head = _HEAD.match(text, begin)
        if head is None or not (head.group(1) in known or (context.first and _FIRST.match(text, begin))):
            return None
        calls, end, _ = _read_list(text, start, len(text), known, context)
        return Block(calls=calls, end=end)

    def _read_marked(self, text: str, start: int, marks: tuple[str, str], known: set[str], context: Context) -> Block:
        begin = skip_space(text, start + len(marks[0]))
        closing = text.find(marks[1], begin)
        stop = closing if closing >= 0 else len(text)
        calls, end, closed = _read_list(text, begin, stop, known, context)
        if closing < 0:
            reason = f"The text ends inside the tool calls, which must end with ]{marks[1]}."
            if not (calls and isinstance(calls[-1], BrokenCall)):
                calls.append(BrokenCall(reason=reason, kind=BrokenKind.TRUNCATED))
            return Block(calls=calls, end=end)
        if not calls or (closed and skip_space(text, end) < stop):
            reason = f"[tool(name=value, ...)] and nothing else must stand between {marks[0]} and {marks[1]}."
            calls.append(BrokenCall(reason=reason, kind=BrokenKind.ENVELOPE))
        return Block(calls=calls, end=context.end_of_broken(text, end, closing + len(marks[1])))


def _read_list(text: str, begin: int, stop: int, known: set[str], context: Context) -> tuple[list[Call], int, bool]:
    """Calls from `begin` on, where they end, and whether they end as they should."""
    closer = "]" if text.startswith("[", begin) else ""
    position, limit = begin + len(closer), min(stop, begin + MAX_LITERAL_CHARS)
    calls: list[Call] = []
    broken = 0
    while True:
        position = _skip_between(text, position, limit)
        if closer and position < limit and text[position] == closer:
            return calls, position + 1, True
        if position >= limit:
            if closer and not (calls and isinstance(calls[-1], BrokenCall)):
                calls.append(_unclosed("", text, limit))
            return calls, position, not closer
        call, following = _read_call(text, position, limit, known)
        calls.append(call)
        broken += isinstance(call, BrokenCall)
        if following is None or broken > _MAX_BROKEN:
            return calls, context.end_of_broken(text, position, limit), False
        position = following


def _read_call(text: str, start: int, limit: int, known: set[str]) -> tuple[Call, int | None]:
    """The call at `start`, and where the next one may begin, if anywhere."""
    head = _HEAD.match(text, start, limit)
    if head is None:
        reason = "Each tool call must be written as tool(name=value, ...)."
        following = re.compile(r"[,\]]").search(text, start + 1, limit)
        return BrokenCall(reason=reason, kind=BrokenKind.ENVELOPE), following.start() if following else None
    name, opening = head.group(1), head.end() - 1
    end = matching_bracket(PYTHON_TOKENS, text, opening, limit)
    if end is None:
        return _unclosed(name, text, limit), _next_known(text, head.end(), limit, known)
    try:
        return check_arguments(name, read_keywords(text[opening:end])), end
    except DecodeError as error:
        reason = f"The tool call's arguments are no Python literals ({error})."
        return BrokenCall(reason=reason, name=name, kind=BrokenKind.JSON), end
    except TypeError:
        reason = "Every argument of a tool call must be given by its name: tool(name=value, ...)."
        return BrokenCall(reason=reason, name=name, kind=BrokenKind.ARGUMENTS), end


def _unclosed(name: str, text: str, limit: int) -> BrokenCall:
    if limit >= len(text):
        reason = "The text ends inside the tool call, whose brackets and quotation marks must be closed."
        return BrokenCall(reason=reason, name=name, kind=BrokenKind.TRUNCATED)
    reason = "The tool call's brackets and quotation marks must be closed."
    return BrokenCall(reason=reason, name=name, kind=BrokenKind.JSON)


def _next_known(text: str, start: int, limit: int, known: set[str]) -> int | None:
    """Where a known tool's call follows another call. Not just any: this may be inside a string without its end."""
    names = "|".join(map(re.escape, sorted(known, key=len, reverse=True)))
    found = re.compile(rf"\)\s*,\s*((?:{names})\s*\()").search(text, start, limit) if names else None
    return found.start(1) if found else None


def _skip_between(text: str, position: int, limit: int) -> int:
    found = _BETWEEN.match(text, position, limit)
    return found.end() if found else position
