"""Assistant text → content, reasoning and tool calls, or a classified reason why a call cannot be made.

A broken call is never silently no call: it comes back as a `BrokenCall` with a sentence the model can act on, and a
good call beside it is kept. Calls inside reasoning are not calls.

`HermesParser` reads `<tool_call>{json}</tool_call>`, the format of Hermes, Qwen2.5 and Qwen3, and needs nothing.
Every other format is SGLang's business: see `parsers`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import pydantic_core

from sglang_multiturn.schemas import ToolSchema

MAX_CALL_CHARS = 100_000
"""A longer call is not valid JSON to us: model output is hostile, and it is parsed on the event loop."""


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

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
        """Never raises, whatever the text."""
        ...


def split_reasoning(text: str) -> tuple[str, str]:
    """Reasoning and the rest. A `<think>` that was never closed is reasoning to the end."""
    if "</think>" in text:
        reasoning, _, rest = text.partition("</think>")
        return reasoning.replace("<think>", "", 1).strip(), rest
    if text.lstrip().startswith("<think>"):
        return text.replace("<think>", "", 1).strip(), ""
    return "", text


class HermesParser:
    """`<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`, any number of them, words around them."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
        """Find every call in order; JSON decides where one ends, so `</tool_call>` inside a string is harmless."""
        reasoning, rest = split_reasoning(text)
        words: list[str] = []
        calls: list[ParsedCall | BrokenCall] = []
        position = 0
        while (start := rest.find(self.OPEN, position)) >= 0:
            words.append(rest[position:start])
            call, position = self._read(rest, start + len(self.OPEN))
            calls.append(call)
        words.append(rest[position:])
        return ParsedTurn(content="".join(words).strip(), reasoning=reasoning, calls=tuple(calls))

    def _read(self, text: str, start: int) -> tuple[ParsedCall | BrokenCall, int]:
        """One call whose opening tag ends at `start`, and where reading goes on."""
        begin = len(text) - len(text[start:].lstrip())
        closing = text.find(self.CLOSE, start)
        after = len(text) if closing < 0 else closing + len(self.CLOSE)
        if begin >= len(text) or begin == closing:
            return BrokenCall(reason="The tool call is empty. Put a JSON object between the tags."), after
        try:
            value, length = JSON_DECODER.raw_decode(text[begin : begin + MAX_CALL_CHARS])
        except (ValueError, RecursionError) as error:
            detail = error.msg if isinstance(error, json.JSONDecodeError) else "it is nested too deeply or not JSON"
            return BrokenCall(reason=f"The tool call is not valid JSON ({detail})."), after
        tail = text[begin + length :].lstrip()
        if not tail.startswith(self.CLOSE):
            return BrokenCall(reason=f"The tool call's JSON must be followed by {self.CLOSE}."), after
        return check_call(value), len(text) - len(tail) + len(self.CLOSE)


def check_call(value: Any) -> ParsedCall | BrokenCall:
    """The decoded JSON of one call as a call. `parameters` is accepted for `arguments`, as SGLang does."""
    if not isinstance(value, dict):
        return BrokenCall(reason='The tool call must be a JSON object with "name" and "arguments".')
    name = value.get("name")
    if not isinstance(name, str) or not name.strip():
        return BrokenCall(reason='The tool call has no "name".')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        try:
            arguments = JSON_DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return BrokenCall(reason='"arguments" must be a JSON object, not a string.', name=name)
    if not isinstance(arguments, dict):
        return BrokenCall(reason=f'"arguments" must be a JSON object, not {type(arguments).__name__}.', name=name)
    if not _is_writable(value):
        return BrokenCall(reason="The tool call is nested too deeply or holds invalid characters.")
    return ParsedCall(name=name, arguments=arguments)


def _is_writable(value: Any) -> bool:
    """Whether a decoded call can be written as JSON again: not too deep, and without lone surrogates."""
    try:
        pydantic_core.to_json(value)
    except ValueError:
        return False
    return True


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


JSON_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
