"""The tool, the user and the parser of a planned conversation: each says what the plan says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sglang_multiturn import BaseTool, Message, StopReason, ToolError, ToolResponse
from sglang_multiturn.chat.parsing import BrokenCall, ParsedCall, ParsedTurn
from sglang_multiturn.interactions.base import Done, Observation
from sglang_multiturn.schemas import FunctionSchema, ToolSchema


class Manner(StrEnum):
    """How a tool answers."""

    SAYS = "says"
    REFUSES = "refuses"
    """Raises ToolError with the text."""
    STOPS = "stops"
    """Says that the conversation is over."""
    ABORTS = "aborts"
    """Someone aborts the conversation while the tool works."""
    SUSPENDS = "suspends"
    """Someone suspends the conversation while the tool works, and resumes it later."""
    CRASHES = "crashes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a tool answers to one call."""

    text: str
    manner: Manner = Manner.SAYS


class PlannedTool(BaseTool):
    """`echo(i)` gives the i-th answer of the plan."""

    def __init__(self) -> None:
        properties = {"i": {"type": "integer", "description": "which one"}}
        parameters = {"type": "object", "properties": properties}
        function = FunctionSchema(name="echo", description="Answers.", parameters=parameters)
        super().__init__({}, ToolSchema(function=function))
        self.answers: Sequence[Answer] = ()
        self.abort: Callable[[], None] = lambda: None
        self.suspend: Callable[[], None] = lambda: None

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[str | ToolResponse, float, dict[str, Any]]:
        answer = self.answers[parameters.get("i", 0) % len(self.answers)]
        if answer.manner is Manner.CRASHES:
            raise RuntimeError("planned crash")
        if answer.manner is Manner.REFUSES:
            raise ToolError(answer.text)
        if answer.manner is Manner.ABORTS:
            self.abort()
        if answer.manner is Manner.SUSPENDS:
            self.suspend()
            for _ in range(parameters.get("i", 0) * 4):
                await asyncio.sleep(0)
        return ToolResponse(text=answer.text, stop=answer.manner is Manner.STOPS), 0.0, {}


class PlannedUser:
    """Says one text after the other, then that it is over."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = iter(texts)

    async def respond(self, request_id: str, messages: Sequence[Message]) -> Observation | Done:
        text = next(self._texts, None)
        return Done(reason=StopReason.USER_STOP) if text is None else Observation(text=text)


CALL = re.compile(r"\[\[call (\S*) (.*?)(?:\]\]|\Z)", re.DOTALL)


class PlannedParser:
    """Reads `[[call name {...}]]`, and turns it was told about."""

    def __init__(self) -> None:
        self.known: dict[str, ParsedTurn] = {}

    def parse(self, text: str, tools: Sequence[ToolSchema], *, prompt: str | None = None) -> ParsedTurn:
        if text in self.known:
            return self.known[text]
        calls = tuple(_read(match) for match in CALL.finditer(text))
        return ParsedTurn(content=CALL.sub("", text), calls=calls)


def call_text(name: str, arguments: str) -> str:
    """A call as `PlannedParser` reads it."""
    return f"[[call {name} {arguments}]]"


def _read(match: re.Match[str]) -> ParsedCall | BrokenCall:
    try:
        arguments = json.loads(match[2])
    except ValueError:
        arguments = None
    if not match[0].endswith("]]") or not isinstance(arguments, dict):
        return BrokenCall(reason="This call is broken.", name=match[1])
    return ParsedCall(name=match[1], arguments=arguments)
