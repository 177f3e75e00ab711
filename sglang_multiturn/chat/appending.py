"""What is appended to a conversation, as ids: frames filled with what tools and users say.

Most templates show a message's text as it is. Where one changes it (Llama quotes it as JSON, Qwen3.5 trims it), that
one message is rendered alone to see what it becomes; no turn renders the conversation again.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sglang_multiturn.chat.dialect import Dialect, Render
from sglang_multiturn.chat.encoding import TextEncoder
from sglang_multiturn.chat.frames import QUESTION, Alone, Frame, Run, Shown, Slot, earlier_round, make_frame
from sglang_multiturn.chat.template import DeltaPiece
from sglang_multiturn.errors import TemplateError
from sglang_multiturn.schemas import Message, Role
from sglang_multiturn.tokens import Origin

APPENDABLE: tuple[Role, ...] = ("tool", "user")
"""Who can speak after an assistant."""


@dataclass(slots=True)
class Appender:
    """Everything a template needs to be asked only once, and how deltas are made of it."""

    render: Render
    encoder: TextEncoder
    dialect: Dialect
    own_stops: Sequence[int]
    """The model's own stop ids: those of its tokenizer and generation config."""
    refusals: dict[Role, str] = field(default_factory=dict)
    verbatim: set[Role] = field(default_factory=set)
    """Roles whose text is shown as it is."""
    differs_later: bool = False
    """Tools' answers stand in another frame once a tool has answered before (DeepSeek opens its list but once)."""
    _frames: dict[tuple[tuple[Role, ...], bool], Frame] = field(default_factory=dict)
    _alone: dict[Role, Alone] = field(default_factory=dict)

    @property
    def end_ids(self) -> frozenset[int]:
        """What a delta can begin with."""
        return frozenset(frame.end_id for frame in self._frames.values())

    def encode(self, messages: Sequence[Message], *, last_id: int | None, answered_before: bool) -> list[DeltaPiece]:
        """The delta; see `ChatTemplate.encode_delta`."""
        for role in {message.role for message in messages}:
            if role in self.refusals or role not in APPENDABLE:
                reason = self.refusals.get(role, f"only tools and users speak after an assistant, not {role!r}")
                raise TemplateError(reason)
        frame = self.frame(tuple(message.role for message in messages), answered_before=answered_before)
        shown = self.fill(frame, messages)
        owned: list[tuple[int, int | None]] = []
        for step in frame.steps:
            owned += self._encode_run(step, shown) if isinstance(step, Run) else [(step, None)]
        if last_id == frame.end_id:
            del owned[0]
        pieces = itertools.groupby(owned, key=lambda token: token[1])
        return [_piece([token for token, _ in tokens], index, messages) for index, tokens in pieces]

    def frame(self, roles: tuple[Role, ...], *, answered_before: bool = False) -> Frame:
        """The frame for a pattern of roles, made once. Raises TemplateError."""
        later = answered_before and self.differs_later and roles[0] == "tool"
        if (roles, later) not in self._frames:
            before = [QUESTION, *(earlier_round(self.dialect, "tool", 0) if later else ())]
            self._frames[roles, later] = self.make_frame(roles, before)
        return self._frames[roles, later]

    def make_frame(self, roles: Sequence[Role], before: Sequence[Mapping[str, object]]) -> Frame:
        """The frame in a conversation that began so. Raises TemplateError."""
        return make_frame(roles, self.render, self.encoder, self.dialect, self.own_stops, [dict(one) for one in before])

    def fill(self, frame: Frame, messages: Sequence[Message]) -> dict[Slot, str]:
        """What stands in each slot of a frame."""
        shown: dict[Slot, str] = {}
        for slot in (part for part in frame.parts if isinstance(part, Slot)):
            message = messages[slot.index]
            if slot.shown is Shown.CONTENT:
                shown[slot] = message.text if message.role in self.verbatim else self.alone(message.role, message.text)
            else:
                shown[slot] = (message.name if slot.shown is Shown.NAME else message.tool_call_id) or "unknown"
        return shown

    def alone(self, role: Role, text: str) -> str:
        """What the template makes of a message's text: that message rendered alone. Raises TemplateError.

        Control tokens are taken apart meanwhile: Qwen3.5's template refuses a user who says `<tool_response>`.
        """
        if role not in self._alone:
            self._alone[role] = Alone.of(role, self.render, self.dialect)
        if not self.encoder.holds_control(text):
            return self._alone[role].shown(text)
        mark = self.encoder.unused_mark([text])
        return self._alone[role].shown(self.encoder.take_apart(text, mark)).replace(mark, "")

    def _encode_run(self, run: Run, shown: Mapping[Slot, str]) -> list[tuple[int, int | None]]:
        """Ids of a run with whose content they are; a token that holds any character of a content belongs to it."""
        text = ""
        contents: list[tuple[int, int, int]] = []
        for part in run.parts:
            said = part if isinstance(part, str) else shown[part]
            if isinstance(part, Slot) and part.shown is Shown.CONTENT:
                contents.append((len(text), len(text) + len(said), part.index))
            text += said
        low = len(text) - len(text.lstrip()) if run.strips_left else 0
        high = len(text.rstrip()) if run.strips_right else len(text)
        return [
            (token, next((i for a, b, i in contents if start + low < b and max(end, start + 1) + low > a), None))
            for token, start, end in (self.encoder.encode_plain(text[low:high]) if low < high else ())
        ]


def _piece(ids: list[int], index: int | None, messages: Sequence[Message]) -> DeltaPiece:
    if index is None:
        return DeltaPiece(ids=ids, origin=Origin.BOUNDARY)
    origin = Origin.TOOL if messages[index].role == "tool" else Origin.USER
    return DeltaPiece(ids=ids, origin=origin, message_index=index)
