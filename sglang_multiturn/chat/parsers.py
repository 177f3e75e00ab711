"""Which parser reads a model's tool calls, by SGLang's name for the format or by what the template shows.

SGLang is needed only where its detectors decide something: the types of values between tags (`call_formats.TAGGED`),
and formats a newer SGLang has and we do not know. It is imported when such a parser is made, which takes seconds.
"""

from __future__ import annotations

import html
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_multiturn.chat.call_formats import HERMES, READERS, TAGGED
from sglang_multiturn.chat.calls import (
    MAX_CALL_CHARS,
    MAX_CALLS,
    Block,
    BrokenCall,
    BrokenKind,
    Call,
    Context,
    DecodeError,
    ParsedTurn,
    ToolCallParser,
    check_arguments,
    decode_json,
)
from sglang_multiturn.chat.harmony import HarmonyParser
from sglang_multiturn.chat.parsing import HermesParser, TurnParser
from sglang_multiturn.chat.reasoning import Reasoning, reasoning_of
from sglang_multiturn.chat.tagged_calls import TaggedCall
from sglang_multiturn.chat.template import ChatTemplate
from sglang_multiturn.chat.value_schemas import plain_schemas
from sglang_multiturn.config import closest
from sglang_multiturn.cpu.sglang_kernels import prepare_on_cpu
from sglang_multiturn.errors import ConfigError, MissingDependencyError
from sglang_multiturn.schemas import ToolSchema

logger = logging.getLogger(__name__)

_MAX_TYPED_CHARS = 2_000
"""Longer values are not shown to SGLang, which tries them as Python literals, microseconds a character."""


def make_parser(name: str, template: ChatTemplate) -> ToolCallParser:
    """The parser of a name: `hermes`, one of SGLang's, or `auto` (what fits the template).

    Raises:
        ConfigError: no such parser, or `auto` cannot tell.
        MissingDependencyError: SGLang is needed for it and not installed.
    """
    if name == "auto":
        if template.tool_call_format is None:
            known = ", ".join(sorted({*HERMES, *READERS, *TAGGED, "gpt-oss"}))
            raise ConfigError(
                "tool_parser: auto cannot tell from the chat template how this model writes tool calls; "
                f"set tool_parser to one of {known}"
            )
        name = template.tool_call_format
    reasoning = reasoning_of(template.source, template.generation_prompt, name)
    if name in HERMES:
        return HermesParser(reasoning)
    if name == "gpt-oss":
        return HarmonyParser(template.generation_prompt)
    if name in READERS:
        return TurnParser(READERS[name], reasoning)
    if name in TAGGED:
        return TurnParser(TAGGED[name].reader(SGLangValues(name)), reasoning)
    return SGLangParser(name, reasoning)


class SGLangValues:
    """Arguments of a call of text between tags, typed by the tool's schema as SGLang's own server would."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError for an unknown name and MissingDependencyError without SGLang."""
        self._name = name
        self._format = TAGGED[name]
        self._parser_class = _function_call_parser(name)

    def __call__(self, call: TaggedCall, tools: Sequence[ToolSchema]) -> Call:
        """The call with its arguments. Never raises."""
        parameters = next((tool.function.parameters for tool in tools if tool.name == call.name), {})
        schemas = plain_schemas([key for key, _, _ in call.values], parameters)
        try:
            parser = self._parser_class([_sglang_tool(call.name, {"properties": schemas})], self._name)
            _, [item] = parser.parse_non_stream(self._shortened(call))
            typed, _ = decode_json(item.parameters, 0)
        except DecodeError as error:
            reason = f"A value of the tool call cannot be read ({error})."
            return BrokenCall(reason=reason, name=call.name, kind=BrokenKind.JSON)
        except Exception as error:  # noqa: BLE001 - third-party detectors raise anything on hostile text
            logger.debug("SGLang's %s parser: %r", self._name, error)
            reason = "The tool call's values could not be read."
            return BrokenCall(reason=reason, name=call.name, kind=BrokenKind.ARGUMENTS)
        arguments = {key.strip(): value for key, value in typed.items()}
        last = {key: (begin, end) for key, begin, end in call.values}
        for key, (begin, end) in last.items():
            # Step3's detector loses a value with `<` in it.
            if end - begin > _MAX_TYPED_CHARS or key not in arguments:
                arguments[key] = _own_value(call.body[begin:end], schemas[key], escaped=self._format.escaped)
        return check_arguments(call.name, arguments)

    def _shortened(self, call: TaggedCall) -> str:
        """The call for SGLang, with `0` in place of each long value."""
        before, between, behind = self._format.around
        pieces, position = [before, call.name, between], 0
        for _, begin, end in call.values:
            if end - begin > _MAX_TYPED_CHARS:
                pieces += [call.body[position:begin], "0"]
                position = end
        return "".join([*pieces, call.body[position:], behind])


class SGLangParser:
    """A format only the installed SGLang knows, through its `FunctionCallParser`, a whole turn at a time."""

    def __init__(self, name: str, reasoning: Reasoning) -> None:
        """Raises ConfigError for an unknown name and MissingDependencyError without SGLang."""
        self._name = name
        self._parser_class = _function_call_parser(name)
        self._words = TurnParser(_NoCalls(), reasoning)

    def parse(self, text: str, tools: Sequence[ToolSchema], *, prompt: str | None = None) -> ParsedTurn:
        """See `ToolCallParser.parse`. SGLang drops broken calls; `has_tool_call` tells them from no call."""
        turn = self._words.parse(text, tools, prompt=prompt)
        said, calls = turn.content, list[Call]()
        try:
            parser = self._parser_class(
                [_sglang_tool(tool.name, tool.function.parameters) for tool in tools], self._name
            )
            if not parser.has_tool_call(said[:MAX_CALL_CHARS]):
                return turn
            if len(said) <= MAX_CALL_CHARS:
                said, items = parser.parse_non_stream(said)
                calls = [_checked(item.name or "", item.parameters) for item in items[:MAX_CALLS]]
        except Exception as error:  # noqa: BLE001 - third-party detectors raise anything on hostile text
            logger.debug("SGLang's %s parser: %r", self._name, error)
        if not calls:
            names = ", ".join(tool.name for tool in tools) or "none"
            calls = [BrokenCall(reason=f"The tool call could not be read, or names no known tool ({names}).")]
        return ParsedTurn(content=said.strip(), reasoning=turn.reasoning, calls=tuple(calls))


@dataclass(frozen=True, slots=True)
class _NoCalls:
    """A reader that finds nothing: reasoning alone is split off."""

    opening: re.Pattern[str] = re.compile(r"(?!)")
    closers: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()

    def read(self, text: str, start: int, tools: Sequence[ToolSchema], context: Context) -> Block | None:
        return None


def _function_call_parser(name: str) -> Any:
    """SGLang's `FunctionCallParser`, which knows `name`. Raises ConfigError or MissingDependencyError."""
    try:
        prepare_on_cpu()
        from sglang.srt.function_call.function_call_parser import FunctionCallParser
    except ImportError as error:
        raise MissingDependencyError.for_extra(f"the tool parser {name!r}", "sglang", "sglang") from error
    known = FunctionCallParser.ToolCallParserEnum
    if name not in known:
        raise ConfigError(f"tool_parser: no parser named {name!r}{closest(name, [*HERMES, *READERS, *known])}")
    detectors = logging.getLogger("sglang.srt.function_call")
    if detectors.level == logging.NOTSET:
        detectors.setLevel(logging.CRITICAL)  # they log whole calls; what is wrong with one comes back as a BrokenCall
    return FunctionCallParser


def _sglang_tool(name: str, parameters: Mapping[str, Any]) -> Any:
    from sglang.srt.entrypoints.openai.protocol import Function, Tool

    return Tool(function=Function(name=name, parameters={"type": "object", **parameters}))


def _checked(name: str, parameters: str) -> Call:
    try:
        return check_arguments(name, decode_json(parameters or "{}", 0)[0])
    except DecodeError as error:
        return BrokenCall(reason=f"The arguments are not valid JSON ({error}).", name=name, kind=BrokenKind.JSON)


def _own_value(text: str, schema: Mapping[str, Any], *, escaped: bool) -> Any:
    """A value SGLang is not shown, or loses: its text, or JSON where the schema wants no text."""
    if text.startswith("<![CDATA[") and text.endswith("]]>") and escaped:
        text = text[len("<![CDATA[") : -len("]]>")]
    elif escaped:
        text = html.unescape(text)
    text = text.removeprefix("\n").removesuffix("\n")
    if schema.get("type", "string") == "string":
        return text
    try:
        value, end = decode_json(text.strip(), 0)
    except DecodeError:
        return text
    return value if end == len(text.strip()) else text
