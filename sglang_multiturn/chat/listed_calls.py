"""Calls written as a list of JSON objects: between marks (Cohere, Apertus, Mistral), or bare (Llama 3).

    <|START_ACTION|>[{"tool_name": ..., "parameters": {...}}, ...]<|END_ACTION|>
    <|python_tag|>{"name": ..., "parameters": {...}}; {...}

Items are read one by one: a broken one is passed over, and reading goes on behind it, or, where its brackets do not
close, at the next place where an object with a name begins.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_multiturn.chat.calls import (
    MAX_CALL_CHARS,
    MAX_CALLS,
    Block,
    BrokenCall,
    BrokenKind,
    Call,
    Context,
    DecodeError,
    check_call,
    decode_json,
    not_json,
    skip_space,
)
from sglang_multiturn.chat.literals import JSON_TOKENS, matching_bracket, read_literal
from sglang_multiturn.schemas import ToolSchema

ToCall = Callable[[Any], Call]

_MAX_BROKEN_ITEMS = 8
"""After so many in one list the rest of it is not searched for good ones: each costs a way through the rest."""
_BETWEEN = re.compile(r"[\s,;]*")
_SEPARATOR = re.compile(r"[,;\[\]{]")
_NEXT_ITEM = re.compile(r'[}\]]\s*[,;]\s*(\{\s*"(?:name|tool_name|tool_call_id|type)"\s*:)')
"""Not inside a JSON string that is closed: a quotation mark there has a backslash before it."""
_BARE_CALL = re.compile(r"""\{\s*["'](?:name|type|function|parameters|arguments)["']\s*:""")


def named_by_tool_name(value: Any) -> Call:
    """Cohere's `{"tool_call_id": ..., "tool_name": ..., "parameters": {...}}`."""
    if isinstance(value, dict) and "name" not in value and "tool_name" in value:
        value = {**value, "name": value["tool_name"]}
    return check_call(value)


def named_by_key(value: Any) -> Call:
    """Apertus's `{name: {...}}`."""
    if not isinstance(value, dict) or len(value) != 1:
        reason = 'Each tool call must be an object with one key: {"the tool": {arguments}}.'
        return BrokenCall(reason=reason, kind=BrokenKind.ENVELOPE)
    [(name, arguments)] = value.items()
    return check_call({"name": name, "arguments": arguments})


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedCalls:
    """A JSON list of calls after an opening mark; a single object is taken for a list of one."""

    mark: str
    close: str = ""
    """Empty where the list alone ends the calls."""
    to_call: ToCall = check_call
    noise: tuple[str, ...] = ()

    @property
    def opening(self) -> re.Pattern[str]:
        """The opening mark."""
        return re.compile(re.escape(self.mark))

    @property
    def closers(self) -> tuple[str, ...]:
        """The closing mark."""
        return (self.close,) if self.close else ()

    def read(self, text: str, start: int, tools: Sequence[ToolSchema], context: Context) -> Block:
        """See `CallReader.read`."""
        begin = skip_space(text, start + len(self.mark))
        closer = "]" if text.startswith("[", begin) else ""
        items = _Items(text=text, to_call=self.to_call, context=context, closer=closer, close=self.close)
        calls, end, closed = items.read(begin + len(closer))
        after = skip_space(text, end)
        if closed and calls and text.startswith(self.close, after):
            return Block(calls=calls, end=after + len(self.close) if self.close else end)
        closing = text.find(self.close, end) if self.close else -1
        if not (calls and isinstance(calls[-1], BrokenCall)):
            cut = skip_space(text, end) >= len(text) if closed else closing < 0
            calls.append(self._broken(cut=cut, empty=not calls))
        stop = closing + len(self.close) if closing >= 0 else end
        return Block(calls=calls, end=context.end_of_broken(text, end, stop))

    def _broken(self, *, cut: bool, empty: bool) -> BrokenCall:
        closing = f"] {self.close}".strip()
        if cut:
            reason = f"The text ends inside the list of tool calls, which must end with {closing}."
            return BrokenCall(reason=reason, kind=BrokenKind.TRUNCATED)
        if empty:
            return BrokenCall(reason=f"A list of tool calls must follow {self.mark}.", kind=BrokenKind.ENVELOPE)
        reason = f"The list of tool calls must end with {closing} right after the last call."
        return BrokenCall(reason=reason, kind=BrokenKind.ENVELOPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class BareCalls:
    """Llama 3's objects one after the other: after `<|python_tag|>`, or as the first thing a turn says."""

    mark: str = "<|python_tag|>"
    noise: tuple[str, ...] = ("<|eom_id|>", "<|eot_id|>")
    closers: tuple[str, ...] = ()

    @property
    def opening(self) -> re.Pattern[str]:
        """The mark, or an object that may be a call."""
        return re.compile(f"{re.escape(self.mark)}|{_BARE_CALL.pattern}")

    def read(self, text: str, start: int, tools: Sequence[ToolSchema], context: Context) -> Block | None:
        """See `CallReader.read`."""
        marked = text.startswith(self.mark, start)
        if not marked and not (context.first and self._is_call(text, start, tools)):
            return None
        begin = skip_space(text, start + len(self.mark)) if marked else start
        if begin >= len(text):
            reason = f"The text ends where a tool call should follow {self.mark}."
            return Block(calls=[BrokenCall(reason=reason, kind=BrokenKind.TRUNCATED)], end=begin)
        calls, end, _ = _Items(text=text, to_call=check_call, context=context, python=True).read(begin)
        if not calls:
            reason = f'A tool call as {{"name": ..., "parameters": {{...}}}} must follow {self.mark}.'
            return Block(calls=[BrokenCall(reason=reason, kind=BrokenKind.JSON)], end=begin)
        return Block(calls=calls, end=end)

    def _is_call(self, text: str, start: int, tools: Sequence[ToolSchema]) -> bool:
        """An object that answers the user in JSON has neither arguments nor a known tool's name."""
        try:
            value, _ = decode_json(text, start)
        except DecodeError:
            return True
        known = {tool.name for tool in tools}
        return isinstance(value, dict) and ("parameters" in value or "arguments" in value or value.get("name") in known)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Items:
    """Objects one after the other."""

    text: str
    to_call: ToCall
    context: Context
    closer: str = ""
    """Ends a list; without one the items end where no further object follows."""
    close: str = ""
    """The mark behind them, if any."""
    python: bool = False
    """An object may also be a Python literal."""

    def read(self, position: int) -> tuple[list[Call], int, bool]:
        """The calls from `position` on, where they end, and whether they end as they should."""
        calls: list[Call] = []
        limit, broken = min(len(self.text), position + MAX_CALL_CHARS), 0
        while True:
            position = _skip_between(self.text, position)
            if self.closer and self.text.startswith(self.closer, position):
                return calls, position + 1, True
            if position >= limit or len(calls) > MAX_CALLS or self._over(position):
                return calls, position, not self.closer
            call, following = self._read_item(position, limit)
            calls.append(call)
            broken += isinstance(call, BrokenCall)
            if following is None or broken > _MAX_BROKEN_ITEMS:
                return calls, self._stop(position, limit), False
            position = following

    def _over(self, position: int) -> bool:
        """Whether no item can begin here."""
        if self.closer:
            return bool(self.close) and self.text.startswith(self.close, position)
        return self.text[position] != "{"

    def _read_item(self, start: int, limit: int) -> tuple[Call, int | None]:
        """The item at `start`, and where the next begins, if anywhere."""
        try:
            value, end = decode_json(self.text, start)
        except DecodeError as error:
            return self._pass_over(error, start, self._stop(start, limit))
        return self.to_call(value), end

    def _stop(self, start: int, limit: int) -> int:
        """Where an item that cannot be read ends at the latest."""
        closing = self.text.find(self.close, start, limit) if self.close else -1
        return self.context.end_of_broken(self.text, start, closing if closing >= 0 else limit)

    def _pass_over(self, error: DecodeError, start: int, stop: int) -> tuple[Call, int | None]:
        text, broken = self.text, not_json(error, self.text, start)
        if text[start] not in "[{":
            separator = _SEPARATOR.search(text, start + 1, stop)
            return broken, separator.start() if separator else None
        end = matching_bracket(JSON_TOKENS, text, start, stop)
        if end is None:
            found = _NEXT_ITEM.search(text, start + 1, stop)
            if found is None and error.early:
                reason = "The text ends inside the tool call, which must be finished."
                broken = BrokenCall(reason=reason, name=broken.name, kind=BrokenKind.TRUNCATED)
            return broken, found.start(1) if found else None
        if self.python:
            with contextlib.suppress(DecodeError):
                return self.to_call(read_literal(text[start:end])), end
        return broken, end


def _skip_between(text: str, position: int) -> int:
    found = _BETWEEN.match(text, position)
    assert found is not None  # it matches nothing, too
    return found.end()
