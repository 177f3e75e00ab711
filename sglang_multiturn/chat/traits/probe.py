"""Small conversations, and what a template makes of them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_multiturn.chat.traits.kinds import TraitKind
from sglang_multiturn.errors import TemplateError
from sglang_multiturn.schemas import Message

if TYPE_CHECKING:
    from sglang_multiturn.chat.hf_template import HFChatTemplate

Found = Iterator[tuple[TraitKind, str]]
"""A kind and the one sentence that shows it."""
Chat = Mapping[str, Any]
"""One message as a template gets it."""

QUESTION, ANSWER, MORE, SYSTEM = "Which one?", "Number seven.", "And then?", "Be brief, probe."
RESULT, SECOND_RESULT = "result-one", "result-two"
THOUGHT = "a-private-thought"
TOOL, OTHER_TOOL = "probe_tool_a", "probe_tool_b"
ARGUMENT, SECOND_ARGUMENT = "argument-of-probe", "another-of-probe"
IDS = ("probe0001", "probe0002", "probe0003")
"""Nine letters and digits, as Mistral's templates demand."""

user: Chat = {"role": "user", "content": QUESTION}
more: Chat = {"role": "user", "content": MORE}
answer: Chat = {"role": "assistant", "content": ANSWER}
system: Chat = {"role": "system", "content": SYSTEM}


def call(name: str = TOOL, arguments: Any = None, number: int = 0) -> dict[str, Any]:
    """A call as it stands in an assistant message."""
    arguments = {"z": ARGUMENT, "a": SECOND_ARGUMENT} if arguments is None else arguments
    return {"id": IDS[number], "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: Chat, content: str | None = "", **more_keys: Any) -> Chat:
    """An assistant message with calls."""
    return {"role": "assistant", "content": content, "tool_calls": list(calls or (call(),)), **more_keys}


def result(text: str = RESULT, number: int = 0, name: str | None = TOOL) -> Chat:
    """A tool message."""
    message = {"role": "tool", "content": text, "tool_call_id": IDS[number]}
    return message if name is None else {**message, "name": name}


def schema(name: str = TOOL) -> dict[str, Any]:
    """A tool as templates show it."""
    properties = {"z": {"type": "string", "description": "first"}, "a": {"type": "string", "description": "second"}}
    parameters = {"type": "object", "properties": properties, "required": ["z"]}
    return {"type": "function", "function": {"name": name, "description": "A probe.", "parameters": parameters}}


@dataclass(frozen=True, slots=True)
class Rendering:
    """What came of a conversation: a text, or a refusal."""

    text: str
    refusal: str | None = None

    def __contains__(self, words: str) -> bool:
        return words in self.text

    @property
    def refused(self) -> bool:
        """Whether the template raised."""
        return self.refusal is not None

    def before(self, words: str) -> str:
        """The text up to the last occurrence of `words`; all of it where they do not stand."""
        return self.text.rpartition(words)[0] if words in self.text else self.text

    def after(self, words: str) -> str:
        """The text behind the last occurrence of `words`."""
        return self.text.rpartition(words)[2]

    def between(self, first: str, second: str) -> str:
        """The text from the last `first` to the `second` behind it."""
        return self.after(first).partition(second)[0]

    def around(self, words: str, *, before: int = 30, after: int = 30) -> str:
        """The place where `words` stand, cut to be quoted."""
        start = max(0, self.text.rfind(words))
        return quote(self.text[max(0, start - before) : start + len(words) + after], limit=before + after + len(words))


class Probe:
    """Renders with one template and keeps what came out."""

    def __init__(self, template: HFChatTemplate) -> None:
        self.template = template
        self._kept: dict[str, Rendering] = {}

    def raw(self, *messages: Chat, tools: Sequence[Chat] = (), prompt: bool = True) -> Rendering:
        """Messages exactly as they are."""
        key = json.dumps([messages, tools, prompt])
        if key not in self._kept:
            self._kept[key] = self._render(messages, tools, prompt)
        return self._kept[key]

    def show(self, *messages: Chat, tools: Sequence[Chat] = (), prompt: bool = True) -> Rendering:
        """Messages as this package spells them for this template."""
        spelt = [self.template.dialect.spell(Message.model_validate(message)) for message in messages]
        return self.raw(*spelt, tools=tools, prompt=prompt)

    def at(self, day: datetime.date) -> Rendering:
        """A question, rendered as if it were that day: templates ask `strftime_now`, and a keyword goes before it."""
        settings = {"strftime_now": day.strftime, **self.template.chat_template_kwargs}
        text = self.template.tokenizer.apply_chat_template(
            [dict(user)], add_generation_prompt=True, tokenize=False, **settings
        )
        return Rendering(str(text))

    def _render(self, messages: Sequence[Chat], tools: Sequence[Chat], prompt: bool) -> Rendering:
        asked = [dict(message) for message in messages], [dict(tool) for tool in tools]
        try:
            return Rendering(self.template.render(*asked, generation_prompt=prompt))
        except TemplateError as error:
            return Rendering("", str(error).rpartition("refused the conversation: ")[2])


def quote(text: str, *, limit: int = 90) -> str:
    """Text as a short literal; its middle is left out where it is long."""
    shown = text if len(text) <= limit else f"{text[: limit // 2]} … {text[-limit // 2 :]}"
    return repr(shown)


def common_end(probe: Probe, texts: Sequence[str]) -> str:
    """The longest text all of them end with; control tokens are compared whole."""
    split = probe.template.encoder.split
    units = [
        [unit for piece in split(text) for unit in (piece if isinstance(piece, str) else [piece.text])]
        for text in texts
    ]
    length = 0
    while all(length < len(one) for one in units) and len({one[-1 - length] for one in units}) == 1:
        length += 1
    return "".join(units[0][len(units[0]) - length :])


def user_opening(probe: Probe) -> str:
    """The text that opens a user's turn."""
    other = {"role": "assistant", "content": "Eight!"}
    said = [(probe.show(user), QUESTION), (probe.show(user, answer, more), MORE), (probe.show(user, other, more), MORE)]
    return common_end(probe, [rendering.before(words) for rendering, words in said])
