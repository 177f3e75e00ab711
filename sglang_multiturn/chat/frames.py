"""What a template puts after an assistant's last word, as a frame into which contents go.

The template is rendered once for each pattern of appended roles, with place-holders for what is said. The text after
the assistant's last word, cut at the place-holders and at the control tokens, is the frame:

    <|im_end|>  "\\n"  <|im_start|>  "user\\n<tool_response>\\n" [content 0] "\\n</tool_response>"  <|im_end|>  ...

It begins with the end of the assistant's turn. Plain text and contents between two control tokens are a *run* and are
encoded as one, so that tokens merge across a content's edge as they would in a whole rendering.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from sglang_multiturn.chat.dialect import Dialect, Render
from sglang_multiturn.chat.encoding import ControlToken, TextEncoder
from sglang_multiturn.errors import TemplateError
from sglang_multiturn.schemas import Message, Role

QUESTION = {"role": "user", "content": "question"}
SYSTEM = {"role": "system", "content": "system"}
_ANSWER = "Answer7Probe"
_ARGUMENT = "Argument7Probe"
_EARLIER = "Earlier7"


class Shown(StrEnum):
    """What of an appended message a template shows."""

    CONTENT = "content"
    NAME = "name"
    CALL_ID = "call_id"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where something of an appended message goes."""

    index: int
    shown: Shown


@dataclass(frozen=True, slots=True)
class Run:
    """Plain text and slots between two control tokens."""

    parts: tuple[str | Slot, ...]
    strips_left: bool = False
    """White space at its start belongs to the control token before it."""
    strips_right: bool = False


@dataclass(frozen=True, slots=True)
class Frame:
    """What follows an assistant's last word, for one pattern of roles."""

    parts: tuple[str | Slot, ...]
    """Text and slots; the first one is text and begins with the end-of-turn token."""
    steps: tuple[int | Run, ...]
    """The same as control ids and runs; the first is `end_id`."""

    @property
    def end_id(self) -> int:
        """The template's own end of the assistant's turn here."""
        first = self.steps[0]
        assert isinstance(first, int)
        return first

    def text(self, shown: dict[Slot, str]) -> str:
        """The frame as text, its slots filled."""
        return "".join(part if isinstance(part, str) else shown[part] for part in self.parts)


@dataclass(frozen=True, slots=True)
class Opening:
    """A short conversation whose last turn is the assistant's."""

    messages: list[dict[str, Any]]
    text: str
    """How it is rendered when nothing follows."""
    word: str
    """The last word of the turn that is known beforehand; closing brackets and the like stand behind it."""

    def up_to(self, text: str) -> str:
        """A rendering in which more follows, up to and with the turn's last word.

        Raises:
            TemplateError: the template does not show the turn once something follows.
        """
        pieces = text.split(self.word)
        count = self.text.count(self.word)
        if not count or len(pieces) <= count:
            raise TemplateError("the template does not show the assistant's turn once something follows it")
        return self.word.join(pieces[:count]) + self.word

    def after(self, text: str) -> str:
        """What such a rendering shows behind the turn's last word. Raises as `up_to` does."""
        return text[len(self.up_to(text)) :]


def opening(
    render: Render,
    dialect: Dialect,
    *,
    calls: int,
    before: Sequence[dict[str, Any]] = (QUESTION,),
    content: str = "",
    thoughts: str = "",
    tools: Sequence[Any] = (),
) -> Opening:
    """A conversation whose last turn makes `calls` calls, saying `content` beside them, or answers.

    Raises:
        TemplateError: the template refuses it.
    """
    words = [_ANSWER]
    turn: dict[str, Any] = {"role": "assistant", "content": content + _ANSWER}
    if calls:
        names = [_words(i) for i in range(calls)]
        turn["tool_calls"] = [
            {"id": name[Shown.CALL_ID], "function": {"name": name[Shown.NAME], "arguments": {"x": _ARGUMENT}}}
            for name in names
        ]
        if dialect.shows_calls:
            turn["content"] = content
            words = [_ARGUMENT, names[-1][Shown.CALL_ID]]
    if thoughts:
        turn["reasoning_content"] = thoughts
    messages = [*before, dialect.spell(Message.model_validate(turn))]
    text = render(messages, tools, generation_prompt=False)
    return Opening(messages, text, max(words, key=text.rfind))


def earlier_round(dialect: Dialect, role: Role, index: int) -> list[dict[str, Any]]:
    """A turn of the assistant's and what a tool or a user said to it, to stand between a question and a later turn."""
    said: dict[str, Any] = {"role": role, "content": f"{_EARLIER}said"}
    turn: dict[str, Any] = {"role": "assistant", "content": f"{_EARLIER}answer"}
    if role == "tool":
        call_id = f"Earlier{index:02d}"
        turn["tool_calls"] = [{"id": call_id, "function": {"name": _EARLIER, "arguments": {"x": _EARLIER}}}]
        turn["content"] = "" if dialect.shows_calls else turn["content"]
        said |= {"name": _EARLIER, "tool_call_id": call_id}
    return [dialect.spell(Message.model_validate(turn)), said]


@dataclass(frozen=True, slots=True)
class Alone:
    """One message after an assistant turn, to see what the template makes of its text."""

    messages: list[dict[str, Any]]
    """The last one is the message."""
    before: str
    after: str
    render: Render

    @classmethod
    def of(cls, role: Role, render: Render, dialect: Dialect) -> Alone:
        """Render the place-holder once to know what stands around it."""
        messages = [*opening(render, dialect, calls=1 if role == "tool" else 0).messages, placeholder(role, 0)]
        before, _, after = render(messages).partition(_words(0)[Shown.CONTENT])
        return cls(messages, before, after, render)

    def shown(self, text: str) -> str:
        """What the template shows for a text. Raises TemplateError when it shows it as no message of its own."""
        rendering = self.render([*self.messages[:-1], {**self.messages[-1], "content": text}])
        middle = rendering[len(self.before) : len(rendering) - len(self.after)]
        if rendering != self.before + middle + self.after:
            raise TemplateError(f"the template does not show what a {self.messages[-1]['role']} says: {text[:80]!r}")
        return middle


def make_frame(
    roles: Sequence[Role],
    render: Render,
    encoder: TextEncoder,
    dialect: Dialect,
    stop_ids: Sequence[int],
    before: Sequence[dict[str, Any]] = (QUESTION,),
) -> Frame:
    """The frame for messages of these roles, in a conversation that began with `before`.

    Raises:
        TemplateError: the template refuses, drops, repeats or reorders such messages, or ends turns with no control token.
    """
    appended = [placeholder(role, index) for index, role in enumerate(roles)]
    start, text = render_after(roles, appended, render, dialect, before)
    parts = _cut_at_slots(start.after(text), len(roles))
    contents = [part.index for part in parts if isinstance(part, Slot) and part.shown is Shown.CONTENT]
    if contents != list(range(len(roles))):
        raise TemplateError(f"the template drops, repeats or reorders messages of roles {list(roles)}")
    assert isinstance(parts[0], str)  # re.split begins with text
    end = find_end(start, parts[0], encoder, stop_ids)
    cut = (parts[0][parts[0].index(end.text) :], *parts[1:])
    return Frame(cut, tuple(_steps(cut, encoder)))


def find_end(start: Opening, rest: str, encoder: TextEncoder, stop_ids: Sequence[int]) -> ControlToken:
    """The token with which the assistant's turn ends, in the text after its last known word.

    One of the model's own stop ids where there is one; else the last special token of what the turn alone renders to
    and what follows agree on; else the first special token (GLM, whose turns end with the next one's opening).

    Raises:
        TemplateError: no control token ends the turn.
    """
    tokens = [piece for piece in encoder.split(rest) if isinstance(piece, ControlToken)]
    tokens = [token for token in tokens if token.special] or tokens
    if not tokens:
        raise TemplateError(
            f"the template puts {rest[:40]!r} after an assistant turn, which holds no special token: "
            "where a turn ends could not be told from its text"
        )
    if own := next((token for token in tokens if token.id in stop_ids), None):
        return own
    both = zip(encoder.split(start.after(start.text)), encoder.split(rest), strict=False)
    agreed = [piece for piece, other in itertools.takewhile(lambda pair: pair[0] == pair[1], both) if piece in tokens]
    return agreed[-1] if agreed else tokens[0]


def placeholder(role: Role, index: int) -> dict[str, Any]:
    """A message that says nothing but its place-holders."""
    words = _words(index)
    message: dict[str, Any] = {"role": role, "content": words[Shown.CONTENT]}
    if role == "tool":
        message |= {"name": words[Shown.NAME], "tool_call_id": words[Shown.CALL_ID]}
    return message


def _words(index: int) -> dict[Shown, str]:
    """Letters and digits only, which no template changes; ids have the nine characters Mistral's insists on."""
    return {
        Shown.CONTENT: f"Content{index}Slot",
        Shown.NAME: f"Name{index}Slot",
        Shown.CALL_ID: f"CallId{index:03d}",
    }


def render_after(
    roles: Sequence[Role],
    appended: list[dict[str, Any]],
    render: Render,
    dialect: Dialect,
    before: Sequence[dict[str, Any]] = (QUESTION,),
) -> tuple[Opening, str]:
    """Messages rendered after a turn that makes as many calls as tools answer, or one where the template allows one."""
    answers = next((i for i, role in enumerate(roles) if role != "tool"), len(roles))
    try:
        start = opening(render, dialect, calls=answers, before=before)
        return start, render([*start.messages, *appended])
    except TemplateError:
        if answers < 2:
            raise
    start = opening(render, dialect, calls=1, before=before)
    return start, render([*start.messages, *appended])


def _cut_at_slots(text: str, count: int) -> tuple[str | Slot, ...]:
    slots = {word: Slot(i, shown) for i in range(count) for shown, word in _words(i).items()}
    pieces = re.split(f"({'|'.join(map(re.escape, slots))})", text)
    return tuple(slots.get(piece, piece) for piece in pieces)


def _steps(parts: Sequence[str | Slot], encoder: TextEncoder) -> list[int | Run]:
    """Control ids and runs. A run without any text is left out."""
    steps: list[int | Run] = []
    run: list[str | Slot] = []
    before: ControlToken | None = None
    for part in parts:
        for piece in [part] if isinstance(part, Slot) else encoder.split(part):
            if not isinstance(piece, ControlToken):
                run += [piece] if piece else []
                continue
            steps += _settled(run, before, piece)
            steps.append(piece.id)
            run, before = [], piece
    return steps + _settled(run, before, None)


def _settled(run: list[str | Slot], before: ControlToken | None, after: ControlToken | None) -> list[Run]:
    strips_left = before is not None and before.strips_right
    strips_right = after is not None and after.strips_left
    return [Run(tuple(run), strips_left, strips_right)] if run else []
