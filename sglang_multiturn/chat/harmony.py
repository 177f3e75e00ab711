"""gpt-oss's turns: messages on channels, a call being a message to a tool.

    <|channel|>analysis<|message|>thoughts<|end|><|start|>assistant<|channel|>commentary to=functions.search
    <|constrain|>json<|message|>{"q": "x"}<|call|>

The recipient may stand on either side of the channel (the template writes it before, the model mostly behind). SGLang's
detector (`function_call/gpt_oss_detector.py`) reads only one of the two, and no call whose `<|call|>` was cut off as the
end of the turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_multiturn.chat.calls import (
    MAX_CALLS,
    BrokenCall,
    BrokenKind,
    Call,
    DecodeError,
    ParsedCall,
    ParsedTurn,
    check_arguments,
    decode_json,
    skip_space,
)
from sglang_multiturn.schemas import ToolSchema

_MARK = re.compile(r"<\|(start|end|call|return|message|channel)\|>")
_END = re.compile(r"<\|(start|end|call|return|channel)\|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]{1,500})")


@dataclass(frozen=True, slots=True)
class _HarmonyMessage:
    header: str
    body: str | None
    """None: the text ended before the message began, or there is none."""
    ended_by: str
    """`end`, `call`, ...; empty at the end of the text."""


class HarmonyParser:
    """Reads a turn that follows `<|start|>assistant`."""

    def __init__(self, generation_prompt: str = "") -> None:
        self._prefix = _begun(generation_prompt)

    def parse(self, text: str, tools: Sequence[ToolSchema], *, prompt: str | None = None) -> ParsedTurn:
        """See `ToolCallParser.parse`."""
        prefix = self._prefix if prompt is None else _begun(prompt)
        words: list[str] = []
        thoughts: list[str] = []
        calls: list[Call] = []
        for message in _messages(prefix + text):
            channel = _CHANNEL.search(message.header)
            recipient = _RECIPIENT.search(message.header)
            if recipient and (channel or message.body is not None):
                calls.append(_call(recipient.group(1), message))
            elif message.body is None:
                words.append("" if channel else message.header)
            else:
                kept = thoughts if channel and channel.group(1) == "analysis" else words
                kept.append(message.body)
            if len(calls) > MAX_CALLS:
                reason = f"This turn holds more than {MAX_CALLS} tool calls; the rest was not read."
                calls[MAX_CALLS:] = [BrokenCall(reason=reason, kind=BrokenKind.ENVELOPE)]
                break
        return ParsedTurn(content=_joined(words), reasoning=_joined(thoughts), calls=tuple(calls))


def _begun(prompt: str) -> str:
    """What the prompt has already written of the turn's first message, from its channel on."""
    begun = prompt.rpartition("<|start|>")[2]
    return begun[begun.find("<|channel|>") :] if "<|channel|>" in begun else ""


def _messages(text: str) -> Iterator[_HarmonyMessage]:
    """The messages of a turn, the first one's `<|start|>assistant` being in the prompt."""
    begin = position = 0
    while mark := _MARK.search(text, position):
        kind, position = mark.group(1), mark.end()
        if kind == "message":
            header = text[begin : mark.start()]
            end = _END.search(text, _after_json(text, position) if _RECIPIENT.search(header) else position)
            stop = end.start() if end else len(text)
            yield _HarmonyMessage(header, text[position:stop], end.group(1) if end else "")
            begin = position = len(text) if end is None else end.start() if end.group(1) == "channel" else end.end()
        elif kind != "channel":
            if header := _without_role(text[begin : mark.start()], kind):
                yield _HarmonyMessage(header, None, kind)
            begin = position
    yield _HarmonyMessage(text[begin:], None, "")


def _after_json(text: str, start: int) -> int:
    """Where the JSON at `start` ends, whatever its strings hold; `start` where there is none."""
    try:
        return decode_json(text, skip_space(text, start))[1]
    except DecodeError:
        return start


def _without_role(header: str, kind: str) -> str:
    header = header.strip()
    return "" if kind == "start" and header == "assistant" else header


def _call(recipient: str, message: _HarmonyMessage) -> Call:
    name = recipient.removeprefix("functions.")
    cut = BrokenCall(
        reason="The text ends inside the tool call, which must be finished.", name=name, kind=BrokenKind.TRUNCATED
    )
    if message.body is None:
        return cut
    try:
        value, end = decode_json(message.body, skip_space(message.body, 0))
    except DecodeError as error:
        if error.early and not message.ended_by:
            return cut
        reason = f"The tool call's arguments are not valid JSON ({error})."
        return BrokenCall(reason=reason, name=name, kind=BrokenKind.JSON)
    call = check_arguments(name, value)
    if isinstance(call, ParsedCall) and (skip_space(message.body, end) < len(message.body) or _ended_badly(message)):
        reason = "The tool call's JSON must be followed by <|call|> at once."
        return BrokenCall(reason=reason, name=name, kind=BrokenKind.ENVELOPE)
    return call


def _ended_badly(message: _HarmonyMessage) -> bool:
    return message.ended_by not in ("call", "")


def _joined(parts: Sequence[str]) -> str:
    return "\n\n".join(filter(None, (part.strip() for part in parts)))
