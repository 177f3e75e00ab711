"""Calls written one by one between an opening and a closing mark, alone or in a section of them.

    <tool_call>{"name": ..., "arguments": {...}}</tool_call>
    <｜tool▁calls▁begin｜> <｜tool▁call▁begin｜> ... <｜tool▁call▁end｜> ... <｜tool▁calls▁end｜>

Each call is read alone, so that a broken one takes no other along: one that is not closed ends where the next begins.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sglang_multiturn.chat.calls import (
    MAX_CALLS,
    MAX_READ_CHARS,
    Block,
    BrokenCall,
    BrokenKind,
    Call,
    Context,
    DecodeError,
    ParsedCall,
    check_arguments,
    check_call,
    decode_json,
    not_json,
    skip_space,
)
from sglang_multiturn.schemas import ToolSchema

Marks = tuple[str, str]
"""An opening and a closing mark; an empty closing mark where the body alone ends a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One call, and where its closing mark is expected."""

    call: Call
    end: int
    closed: bool = False
    """It has closed itself."""
    early: bool = False
    """The text ended before it did."""


class Body(Protocol):
    """What stands between the marks of one call."""

    def read(self, text: str, start: int, stop: int, tools: Sequence[ToolSchema]) -> Reading:
        """The call whose opening mark ends at `start`; the next mark of any kind begins at `stop`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonBody:
    """JSON, alone or after a head with the tool's name. JSON decides where it ends, whatever its strings hold."""

    head: re.Pattern[str] = re.compile(r"\s*")
    """What stands before the JSON; the group `name` where the JSON is the arguments alone."""
    tail: re.Pattern[str] = re.compile(r"\s*")
    """What stands between the JSON and the closing mark."""
    example: str = '{"name": ..., "arguments": {...}}'
    """A call, for the model that wrote something else."""

    def read(self, text: str, start: int, stop: int, tools: Sequence[ToolSchema]) -> Reading:
        """See `Body.read`."""
        head = self.head.match(text, start)
        if head is None:
            reason = f"The tool call must be written as {self.example}."
            return Reading(call=BrokenCall(reason=reason, kind=BrokenKind.ENVELOPE), end=stop)
        name = head.groupdict().get("name")
        if skip_space(text, head.end()) >= stop:
            reason = f"The tool call is empty. Write {self.example}."
            kind = BrokenKind.ENVELOPE if name is None else BrokenKind.JSON
            return Reading(call=BrokenCall(reason=reason, name=name or "", kind=kind), end=stop, early=True)
        try:
            value, end = decode_json(text, head.end())
        except DecodeError as error:
            return Reading(call=self._broken(error, text, head.end(), name), end=stop, early=error.early)
        tail = self.tail.match(text, end)
        call = check_call(value) if name is None else check_arguments(name.strip(), value)
        return Reading(call=call, end=end if tail is None else tail.end())

    def _broken(self, error: DecodeError, text: str, start: int, name: str | None) -> BrokenCall:
        if name is None:
            return not_json(error, text, start)
        reason = f"The tool call's arguments are not valid JSON ({error})."
        return BrokenCall(reason=reason, name=name.strip(), kind=BrokenKind.JSON)


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedCalls:
    """Calls between `call` marks, which stand between `section` marks where the format has sections."""

    call: Marks
    body: Body
    section: Marks | None = None
    noise: tuple[str, ...] = ()

    @property
    def opening(self) -> re.Pattern[str]:
        """A section's or a call's opening mark."""
        return _any_of(self.call[0], *(self.section or ())[:1])

    @property
    def closers(self) -> tuple[str, ...]:
        """The closing marks."""
        return tuple(mark for mark in (self.call[1], *(self.section or ())[1:]) if mark)

    @property
    def _boundary(self) -> re.Pattern[str]:
        return _any_of(*self.call, *(self.section or ()))

    def read(self, text: str, start: int, tools: Sequence[ToolSchema], context: Context) -> Block:
        """See `CallReader.read`."""
        if self.section is not None and text.startswith(self.section[0], start):
            return self._read_section(text, start + len(self.section[0]), self.section, tools, context)
        call, end = self._read_call(text, start + len(self.call[0]), tools, context)
        if self.section is None:
            return Block(calls=[call], end=end)
        reason = f"Tool calls must stand between {self.section[0]} and {self.section[1]}."
        return Block(calls=[BrokenCall(reason=reason, name=call.name, kind=BrokenKind.ENVELOPE)], end=end)

    def _read_section(
        self, text: str, start: int, section: Marks, tools: Sequence[ToolSchema], context: Context
    ) -> Block:
        calls: list[Call] = []
        position = start
        while boundary := self._boundary.search(text, position):
            if (stop := context.end_of_broken(text, position, boundary.start())) < boundary.start():
                return Block(calls=calls or [self._empty()], end=stop)
            if boundary.group() == self.call[0]:
                call, position = self._read_call(text, boundary.end(), tools, context)
                calls.append(call)
                if len(calls) > MAX_CALLS or position - start > MAX_READ_CHARS:
                    return Block(calls=calls, end=position)
            elif boundary.group() == self.call[1]:
                position = boundary.end()
            else:
                ends_here = boundary.group() == section[1]
                return Block(calls=calls or [self._empty()], end=boundary.end() if ends_here else boundary.start())
        return Block(calls=calls or [self._unfinished("")], end=context.end_of_broken(text, position, len(text)))

    def _read_call(self, text: str, start: int, tools: Sequence[ToolSchema], context: Context) -> tuple[Call, int]:
        """One call whose opening mark ends at `start`, and where reading goes on."""
        call, end = self._read_any(text, start, tools)
        return call, end if isinstance(call, ParsedCall) else context.end_of_broken(text, start, end)

    def _read_any(self, text: str, start: int, tools: Sequence[ToolSchema]) -> tuple[Call, int]:
        boundary = self._boundary.search(text, start)
        reading = self.body.read(text, start, boundary.start() if boundary else len(text), tools)
        if reading.closed:
            return reading.call, reading.end
        if not self.call[1]:
            early = reading.early and boundary is None
            return (self._unfinished(reading.call.name), len(text)) if early else (reading.call, reading.end)
        after = skip_space(text, reading.end)
        if text.startswith(self.call[1], after):
            return reading.call, after + len(self.call[1])
        return self._unclosed(reading.call, self._boundary.search(text, reading.end), len(text))

    def _unclosed(self, call: Call, boundary: re.Match[str] | None, length: int) -> tuple[Call, int]:
        """A call after which its closing mark does not stand at once; `boundary` is the next mark of any kind."""
        if boundary is None:
            return self._unfinished(call.name), length
        if isinstance(call, ParsedCall):
            reason = f"The tool call must be followed by {self.call[1]} at once."
            call = BrokenCall(reason=reason, name=call.name, kind=BrokenKind.ENVELOPE)
        return call, boundary.end() if boundary.group() == self.call[1] else boundary.start()

    def _unfinished(self, name: str) -> BrokenCall:
        closing = self.call[1] or (self.section or ("", ""))[1]
        must = f"must be followed by {closing}" if closing else "must be finished"
        return BrokenCall(
            reason=f"The text ends inside the tool call, which {must}.", name=name, kind=BrokenKind.TRUNCATED
        )

    def _empty(self) -> BrokenCall:
        reason = f"No tool call stands between these marks; each begins with {self.call[0]}."
        return BrokenCall(reason=reason, kind=BrokenKind.ENVELOPE)


@functools.cache
def _any_of(*marks: str) -> re.Pattern[str]:
    longest_first = sorted(filter(None, marks), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))
