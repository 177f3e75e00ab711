"""Assistant text → content, reasoning and tool calls, or a classified reason why a call cannot be made.

A broken call is never silently no call: it comes back as a `BrokenCall` with a sentence the model can act on, and a
good call beside it is kept. Calls inside reasoning are not calls.

`HermesParser` reads `<tool_call>{json}</tool_call>`, the format of Hermes, Qwen2.5 and Qwen3, and needs nothing.
`SGLangParser` hands every other format to SGLang's own `FunctionCallParser`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from sglang_multiturn.chat.template import ChatTemplate
from sglang_multiturn.config import closest
from sglang_multiturn.errors import ConfigError, MissingDependencyError
from sglang_multiturn.schemas import ToolSchema

logger = logging.getLogger(__name__)

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


def make_parser(name: str, template: ChatTemplate) -> ToolCallParser:
    """The parser of a name: `hermes`, one of SGLang's, or `auto` (what fits the template).

    Raises:
        ConfigError: no such parser, or `auto` cannot tell.
        MissingDependencyError: it is SGLang's and SGLang is not installed.
    """
    if name == "auto":
        if template.tool_call_format is None:
            raise ConfigError("tool_parser: auto cannot tell this template's format; name one of SGLang's parsers")
        name = template.tool_call_format
    return HermesParser() if name == "hermes" else SGLangParser(name)


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
            value, length = _DECODER.raw_decode(text[begin : begin + MAX_CALL_CHARS])
        except (ValueError, RecursionError) as error:
            detail = error.msg if isinstance(error, json.JSONDecodeError) else "it is nested too deeply or not JSON"
            return BrokenCall(reason=f"The tool call is not valid JSON ({detail})."), after
        tail = text[begin + length :].lstrip()
        if not tail.startswith(self.CLOSE):
            return BrokenCall(reason=f"The tool call's JSON must be followed by {self.CLOSE}."), after
        return check_call(value), len(text) - len(tail) + len(self.CLOSE)


class SGLangParser:
    """Any format SGLang knows, through its `FunctionCallParser`."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError for an unknown name and MissingDependencyError without SGLang."""
        try:
            from sglang.srt.function_call.function_call_parser import FunctionCallParser
        except ImportError as error:
            raise MissingDependencyError.for_extra(f"the tool parser {name!r}", "sglang", "sglang") from error
        known = FunctionCallParser.ToolCallParserEnum
        if name not in known:
            raise ConfigError(f"tool_parser: no parser named {name!r}{closest(name, ['hermes', *known])}")
        self._name = name
        self._parser_class = FunctionCallParser

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedTurn:
        """SGLang drops broken and unknown calls without a word; `has_tool_call` tells them from no call."""
        from sglang.srt.entrypoints.openai.protocol import Tool

        reasoning, rest = split_reasoning(text)
        parser = self._parser_class([Tool.model_validate(tool.for_template()) for tool in tools], self._name)
        if not parser.has_tool_call(rest):
            return ParsedTurn(content=rest.strip(), reasoning=reasoning)
        try:
            content, items = parser.parse_non_stream(rest)
        except Exception as error:  # noqa: BLE001 - third-party detectors raise anything on hostile text
            logger.debug("SGLang's %s parser raised %r", self._name, error)
            content, items = rest, []
        calls: list[ParsedCall | BrokenCall] = []
        for item in items:
            try:
                arguments = _DECODER.decode(item.parameters or "{}")
            except (ValueError, RecursionError):
                calls.append(BrokenCall(reason="The arguments are not valid JSON.", name=item.name or ""))
                continue
            calls.append(check_call({"name": item.name, "arguments": arguments}))
        if not calls:
            names = ", ".join(tool.name for tool in tools) or "none"
            calls.append(BrokenCall(reason=f"The tool call could not be read, or names no known tool ({names})."))
        return ParsedTurn(content=content.strip(), reasoning=reasoning, calls=tuple(calls))


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
            arguments = _DECODER.decode(arguments)
        except (ValueError, RecursionError):
            return BrokenCall(reason='"arguments" must be a JSON object, not a string.', name=name)
    if not isinstance(arguments, dict):
        return BrokenCall(reason=f'"arguments" must be a JSON object, not {type(arguments).__name__}.', name=name)
    return ParsedCall(name=name, arguments=arguments)


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
