"""Which parser reads a model's tool calls: ours for the Hermes format, SGLang's for every other.

SGLang's `FunctionCallParser` answers nothing for a broken call and for an unknown tool alike (`function_call/
base_format_detector.py`, `parse_base_json`), so what it leaves out is told apart here and comes back as a `BrokenCall`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from sglang_multiturn.chat.parsing import (
    JSON_DECODER,
    BrokenCall,
    HermesParser,
    ParsedCall,
    ParsedTurn,
    ToolCallParser,
    check_call,
    split_reasoning,
)
from sglang_multiturn.chat.template import ChatTemplate
from sglang_multiturn.config import closest
from sglang_multiturn.cpu.sglang_kernels import prepare_on_cpu
from sglang_multiturn.errors import ConfigError, MissingDependencyError
from sglang_multiturn.schemas import ToolSchema

logger = logging.getLogger(__name__)


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


class SGLangParser:
    """Any format SGLang knows, through its `FunctionCallParser`."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError for an unknown name and MissingDependencyError without SGLang."""
        try:
            prepare_on_cpu()
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
                arguments = JSON_DECODER.decode(item.parameters or "{}")
            except (ValueError, RecursionError):
                calls.append(BrokenCall(reason="The arguments are not valid JSON.", name=item.name or ""))
                continue
            calls.append(check_call({"name": item.name, "arguments": arguments}))
        if not calls:
            names = ", ".join(tool.name for tool in tools) or "none"
            calls.append(BrokenCall(reason=f"The tool call could not be read, or names no known tool ({names})."))
        return ParsedTurn(content=content.strip(), reasoning=reasoning, calls=tuple(calls))
