"""Where a turn's reasoning is, so that a call inside it is never made.

Reasoning is marked by a pair of control tokens, and families differ in the pair (`MARKS`), and in who writes the
first of the two: the model, or the generation prompt (Qwen3.5, Nemotron, DeepSeek-R1), or the prompt writes both
because thinking is off. What counts, in the order of the text and outside calls:

1. The prompt left a block open: the turn begins inside it. Without an end, all of the turn is reasoning.
2. The turn begins with the start mark: reasoning up to the end mark; without one, all of it.
3. A pair of marks further on encloses reasoning too. A start mark there that is never closed is reasoning to the end
   where the template itself uses the mark, and plain words where it does not.
4. An end mark alone means that the model thought without a start mark, and everything before it is reasoning, calls
   included: but only where the template uses the mark, its prompt has not closed the block already, and nothing was
   reasoning before. Elsewhere it is plain text.

A mark inside a call that can be read (`{"q": "what does </think> do?"}`) is a piece of an argument.

SGLang's `ReasoningParser` reads the same pairs. It is not used because it knows nothing of calls: it cuts at a mark
inside an argument, takes a call inside unclosed reasoning for the end of it (`parser/reasoning_parser.py`,
`tool_start_token`), and drops words outside Cohere's own marks. A test holds the two together where they must agree.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

MARKS = (
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ("<|inner_prefix|>", "<|inner_suffix|>"),  # Apertus
    ("◁think▷", "◁/think▷"),  # Kimi
    ("[THINK]", "[/THINK]"),  # Mistral
    ("<think>", "</think>"),
)
"""Start and end of reasoning. gpt-oss has messages on a channel of their own instead: see `harmony`."""

_OF_FORMAT = {
    "gemma4": MARKS[0],
    "cohere_command4": MARKS[1],
    "apertus2509": MARKS[2],
    "mistral": MARKS[4],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """How one template's turns are divided into reasoning and the rest."""

    start: str = "<think>"
    end: str = "</think>"
    known: bool = False
    """The template itself uses these marks."""
    opened: bool = False
    """The text before the turn leaves a block open."""
    closed: bool = False
    """The text before the turn holds a block that is closed: thinking is off."""

    def after(self, prompt: str) -> Reasoning:
        """The same marks after another prompt."""
        start, end = prompt.rfind(self.start), prompt.rfind(self.end)
        return dataclasses.replace(self, opened=start > end, closed=end > start)


def reasoning_of(source: str, prompt: str, call_format: str) -> Reasoning:
    """The marks a template uses, from its text and generation prompt; its call format's where it has no text.

    `<think>` is read everywhere: a model may have been asked for it by its system prompt.
    """
    found = next((marks for marks in MARKS if marks[0] in source or marks[0] in prompt), None)
    if found is None and not source:
        found = _OF_FORMAT.get(call_format)
    start, end = found or MARKS[-1]
    return Reasoning(start=start, end=end, known=found is not None).after(prompt)
