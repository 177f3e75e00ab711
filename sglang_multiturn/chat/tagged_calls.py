"""Calls whose arguments are text between tags: Qwen3-Coder's, GLM's, DeepSeek-V3.2's, MiniMax's and others.

    <function=search><parameter=q>x</parameter></function>
    <tool_call>search<arg_key>q</arg_key><arg_value>x</arg_value></tool_call>

What the tags enclose is cut out here, tag by tag, so that one which is missing is noticed and time is bounded. Whether
`3` is a number or a text then depends on the tool's schema, and on the model family: `ReadValues` decides.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_multiturn.chat.calls import (
    MAX_CALL_CHARS,
    BrokenCall,
    BrokenKind,
    Call,
    DecodeError,
    check_arguments,
    decode_json,
    not_json,
    skip_space,
)
from sglang_multiturn.chat.literals import read_gemma
from sglang_multiturn.chat.marked_calls import Reading
from sglang_multiturn.schemas import ToolSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCall:
    """A call of which the values are still text."""

    name: str
    body: str
    """Everything between the tags of the call."""
    values: tuple[tuple[str, int, int], ...]
    """Name of each value, and where in the body it begins and ends."""


ReadValues = Callable[[TaggedCall, Sequence[ToolSchema]], Call]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedBody:
    """A name, then values between tags."""

    head: re.Pattern[str]
    """What the call begins with, the group `name` in it; a group `whole` where that is the whole call."""
    value: re.Pattern[str]
    """The tags before a value, the group `key` in them."""
    close: str
    """The tag after a value."""
    read_values: ReadValues
    tail: str = ""
    """What stands behind the last value."""
    may_omit_close: bool = False
    """A value may also end where the next one begins, or with the call."""
    may_be_json: bool = False
    """The body may be one JSON object instead."""
    example: str
    """A call, for the model that wrote something else."""

    def read(self, text: str, start: int, stop: int, tools: Sequence[ToolSchema]) -> Reading:
        """See `marked_calls.Body.read`."""
        head = self.head.match(text, start)
        if head is None or not head.group("name").strip():
            reason = f"The tool call names no tool. Write it as {self.example}."
            kind = BrokenKind.ENVELOPE if head is None else BrokenKind.NAME
            return Reading(call=BrokenCall(reason=reason, kind=kind), end=stop)
        name = head.group("name").strip()
        if head.groupdict().get("whole"):
            call = TaggedCall(name=name, body="", values=())
            return Reading(call=self.read_values(call, tools), end=head.end(), closed=True)
        return Reading(call=self._read_body(name, text[head.end() : stop], tools), end=stop)

    def _read_body(self, name: str, body: str, tools: Sequence[ToolSchema]) -> Call:
        if len(body) > MAX_CALL_CHARS:
            reason = f"The tool call is longer than {MAX_CALL_CHARS:,} characters."
            return BrokenCall(reason=reason, name=name, kind=BrokenKind.ENVELOPE)
        if not body.rstrip().endswith(self.tail):
            reason = f"{self.tail} is missing. Write the tool call as {self.example}."
            return BrokenCall(reason=reason, name=name, kind=BrokenKind.ENVELOPE)
        body = body.rstrip().removesuffix(self.tail) if self.tail else body
        if self.may_be_json and body.lstrip().startswith("{"):
            return _json_arguments(name, body)
        values = self._cut(body)
        if isinstance(values, str):
            reason = f"{values} Write the tool call as {self.example}."
            return BrokenCall(reason=reason, name=name, kind=BrokenKind.ARGUMENTS)
        return self.read_values(TaggedCall(name=name, body=body, values=tuple(values)), tools)

    def _cut(self, body: str) -> list[tuple[str, int, int]] | str:
        """The values of a body, or what is wrong with its tags."""
        values: list[tuple[str, int, int]] = []
        ending = re.compile(f"{re.escape(self.close)}|{self.value.pattern}")
        position = skip_space(body, 0)
        while position < len(body):
            tags = self.value.match(body, position)
            if tags is None or not tags.group("key").strip():
                return f"A tag is missing or broken at {body[position : position + 40]!r}."
            end = ending.search(body, tags.end())
            closed = end is not None and end.group() == self.close
            if not closed and not self.may_omit_close:
                return f"The value of {tags.group('key')[:100]!r} is not followed by {self.close}."
            stop = end.start() if end else len(body)
            values.append((tags.group("key").strip(), tags.end(), stop))
            position = skip_space(body, end.end() if end and closed else stop)
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmaBody:
    """Gemma 4's `call:search{q:<|"|>x<|"|>,n:3}`. Its literals have types of their own; no schema is asked."""

    head: re.Pattern[str] = re.compile(r"\s*call:\s*(?P<name>[^{}<]{0,500}?)\s*(?=\{)")

    def read(self, text: str, start: int, stop: int, tools: Sequence[ToolSchema]) -> Reading:
        """See `marked_calls.Body.read`."""
        head = self.head.match(text, start)
        if head is None or not head.group("name"):
            reason = 'The tool call must be written as call:tool{name:value, text:<|"|>...<|"|>}.'
            return Reading(call=BrokenCall(reason=reason, kind=BrokenKind.NAME), end=stop)
        name = head.group("name")
        try:
            arguments, end = read_gemma(text, head.end(), min(len(text), head.end() + MAX_CALL_CHARS))
        except DecodeError as error:
            reason = f"The tool call's arguments cannot be read ({error})."
            return Reading(call=BrokenCall(reason=reason, name=name, kind=BrokenKind.JSON), end=stop)
        return Reading(call=check_arguments(name, arguments), end=end)


def _json_arguments(name: str, body: str) -> Call:
    begin = skip_space(body, 0)
    try:
        value, end = decode_json(body, begin)
    except DecodeError as error:
        return BrokenCall(reason=not_json(error, body, begin).reason, name=name, kind=BrokenKind.JSON)
    if skip_space(body, end) < len(body):
        reason = "Something follows the JSON object of the tool call's arguments."
        return BrokenCall(reason=reason, name=name, kind=BrokenKind.ENVELOPE)
    return check_arguments(name, value)
