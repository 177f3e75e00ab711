"""Assistant text → content, reasoning and tool calls, or a classified reason why a call cannot be made.

A broken call is never silently no call: it comes back as a `BrokenCall` with a sentence the model can act on, in its
place among the others, and no good call beside it is lost. Calls inside reasoning are not calls (`reasoning`).

`TurnParser` walks through a turn once; a `CallReader` reads the calls it comes upon. `HermesParser` is the one for
`<tool_call>{json}</tool_call>`, the format of Hermes, Qwen2.5 and Qwen3; `parsers` has every other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from sglang_multiturn.chat.calls import (
    MAX_CALLS,
    MAX_READ_CHARS,
    BrokenCall,
    BrokenKind,
    Call,
    CallReader,
    Context,
    ParsedCall,
    ParsedTurn,
    ToolCallParser,
    skip_space,
)
from sglang_multiturn.chat.marked_calls import JsonBody, MarkedCalls
from sglang_multiturn.chat.reasoning import Reasoning
from sglang_multiturn.schemas import ToolSchema

__all__ = ["BrokenCall", "BrokenKind", "HermesParser", "ParsedCall", "ParsedTurn", "ToolCallParser", "TurnParser"]


class TurnParser:
    """Divides a turn into words, reasoning and calls of one format."""

    def __init__(self, reader: CallReader, reasoning: Reasoning | None = None) -> None:
        self._reader = reader
        self._reasoning = reasoning or Reasoning()
        self._thinking = re.compile(f"{re.escape(self._reasoning.start)}|{re.escape(self._reasoning.end)}")
        self._next = re.compile(f"{reader.opening.pattern}|{self._thinking.pattern}")

    def parse(self, text: str, tools: Sequence[ToolSchema], *, prompt: str | None = None) -> ParsedTurn:
        """See `ToolCallParser.parse`."""
        reasoning = self._reasoning if prompt is None else self._reasoning.after(prompt)
        walk = _Walk(text, tools, self._reader, reasoning, self._thinking)
        walk.lead()
        while not walk.over and (mark := self._next.search(text, walk.position)):
            walk.meet(mark)
        return walk.turn()


class HermesParser(TurnParser):
    """`<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`, any number of them, words around them."""

    def __init__(self, reasoning: Reasoning | None = None) -> None:
        super().__init__(MarkedCalls(call=("<tool_call>", "</tool_call>"), body=JsonBody()), reasoning)


class _Walk:
    """One way through one turn."""

    def __init__(
        self,
        text: str,
        tools: Sequence[ToolSchema],
        reader: CallReader,
        reasoning: Reasoning,
        thinking: re.Pattern[str],
    ) -> None:
        self._text, self._tools, self._reader = text, tools, reader
        self._reasoning, self._thinking = reasoning, thinking
        self.position = 0
        self.over = False
        self._words: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[Call] = []
        self._read_chars = 0
        self._last_end = text.rfind(reasoning.end)
        self._first_word = 0

    def lead(self) -> None:
        """Pass the reasoning the turn begins with."""
        begin = skip_space(self._text, 0)
        if self._text.startswith(self._reasoning.start, begin):
            self._think(begin + len(self._reasoning.start))
        elif self._reasoning.opened:
            self._think(0)
        self._first_word = skip_space(self._text, self.position)

    def meet(self, mark: re.Match[str]) -> None:
        """Go past a mark that may begin or end something."""
        if mark.group() == self._reasoning.start:
            self._meet_start(mark)
        elif mark.group() == self._reasoning.end:
            self._meet_end(mark)
        else:
            self._meet_call(mark.start())

    def turn(self) -> ParsedTurn:
        """What the turn said and asked for."""
        content = "".join([*self._words, "" if self.over else self._text[self.position :]])
        closer = next((mark for mark in self._reader.closers if mark in content), None)
        if closer is not None and not self._calls:
            reason = f"{closer} stands where no tool call was begun."
            self._calls.append(BrokenCall(reason=reason, kind=BrokenKind.ENVELOPE))
        for mark in self._reader.noise:
            content = content.replace(mark, "")
        thoughts = "\n\n".join(filter(None, map(str.strip, self._thoughts)))
        return ParsedTurn(content=content.strip(), reasoning=thoughts, calls=tuple(self._calls))

    def _meet_start(self, mark: re.Match[str]) -> None:
        if self._reasoning.known or mark.end() <= self._last_end:
            self._say(mark.start())
            self._think(mark.end())
        else:
            self._say(mark.end())

    def _meet_end(self, mark: re.Match[str]) -> None:
        if self._reasoning.known and not self._reasoning.closed and not self._thoughts:
            self._thoughts.append(self._text[: mark.start()])
            self._words.clear()
            self._calls.clear()
            self.position = mark.end()
            self._first_word = skip_space(self._text, self.position)
        else:
            self._say(mark.end())

    def _meet_call(self, start: int) -> None:
        if len(self._calls) >= MAX_CALLS or self._read_chars > MAX_READ_CHARS:
            self._stop(start)
            return
        context = Context(first=start == self._first_word, thinking=self._thinking)
        block = self._reader.read(self._text, start, self._tools, context)
        if block is None:
            self._say(start + 1)
            return
        self._say(start)
        self._calls += block.calls
        self._read_chars += block.end - start
        self.position = block.end
        if len(self._calls) > MAX_CALLS:
            self._stop(self.position)

    def _think(self, begin: int) -> None:
        """Everything from `begin` to the end mark is reasoning, or to the end of the text."""
        end = self._text.find(self._reasoning.end, begin)
        self._thoughts.append(self._text[begin : end if end >= 0 else len(self._text)])
        self.position = end + len(self._reasoning.end) if end >= 0 else len(self._text)

    def _say(self, end: int) -> None:
        self._words.append(self._text[self.position : end])
        self.position = end

    def _stop(self, end: int) -> None:
        """Read no further than to `end`: a turn like this is no use, and costs time."""
        self._say(end)
        del self._calls[MAX_CALLS:]
        reason = f"This turn holds too many or too long tool calls; only the first {len(self._calls)} were read."
        self._calls.append(BrokenCall(reason=reason, kind=BrokenKind.ENVELOPE))
        self.over = True
