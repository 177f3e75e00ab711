"""How one template wants its messages.

OpenAI's message has several spellings, and templates differ in which they read: DeepSeek's shows a call only when the
content is null and its arguments are text, Qwen's escapes text arguments a second time, thoughts stand under three
names. What a template reads is found by trying, once, when it is loaded.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_multiturn.errors import TemplateError
from sglang_multiturn.schemas import Message

Render = Callable[..., str]
"""`HFChatTemplate.render`."""

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The spelling of messages a template reads."""

    arguments_as_text: bool = False
    """A call's arguments are JSON text, not an object."""
    null_content: bool = False
    """Empty content beside calls is null, not ""."""
    shows_calls: bool = True
    """False where no spelling makes the template show what was called."""
    reasoning_key: str | None = None
    """Where thoughts are read from; None where the template reads none."""

    def spell(self, message: Message) -> dict[str, Any]:
        """The dict a template renders; nothing a user wrote is dropped."""
        spelt = message.for_template()
        if message.tool_calls:
            spelt["tool_calls"] = [self._spell_call(call) for call in spelt["tool_calls"]]
            if self.null_content and not spelt["content"]:
                spelt["content"] = None
        if thoughts := next((spelt[key] for key in _REASONING_KEYS if spelt.get(key)), None):
            self._spell_thoughts(spelt, str(thoughts))
        return spelt

    def _spell_thoughts(self, spelt: dict[str, Any], thoughts: str) -> None:
        """Thoughts under the key the template reads; where it reads none, they are words of the content."""
        if self.reasoning_key is not None:
            spelt[self.reasoning_key] = thoughts
        elif isinstance(spelt["content"], str):
            spelt["content"] = f"<think>\n{thoughts}\n</think>\n\n{spelt['content']}"

    def _spell_call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"]["arguments"]
        if self.arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not self.arguments_as_text and isinstance(arguments, str):
            arguments = _as_object(arguments)
        return {"type": "function", **call, "function": {**call["function"], "arguments": arguments}}


def find_dialect(render: Render) -> Dialect:
    """The first spelling that a template shows whole: objects before text, "" before null."""
    for as_text, null in itertools.product((False, True), (False, True)):
        dialect = Dialect(arguments_as_text=as_text, null_content=null)
        if _shown(render, dialect, [_QUESTION, _CALL], "argument7", "function7"):
            break
    else:
        dialect = Dialect(shows_calls=False)
    thinking = Message.model_validate({"role": "assistant", "content": "answer7", "reasoning_content": "thought7"})
    for key in _REASONING_KEYS:
        reading = dataclasses.replace(dialect, reasoning_key=key)
        if _shown(render, reading, [_QUESTION, thinking], "thought7", "answer7"):
            return reading
    return dialect


def _shown(render: Render, dialect: Dialect, messages: Sequence[Message], *words: str) -> bool:
    try:
        text = render([dialect.spell(message) for message in messages], generation_prompt=False)
    except TemplateError:
        return False
    return all(word in text for word in words)


def _as_object(arguments: str) -> Any:
    """JSON text that holds an object as that object; anything else as it is."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


_QUESTION = Message(role="user", content="question7")
_CALL = Message.model_validate(
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00000", "function": {"name": "function7", "arguments": {"x": "argument7"}}}],
    }
)
