"""What a model that follows its template to the letter would sample.

The template's own rendering of an assistant message is cut out of the conversation, so that template and parser are
held against each other: no format is known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_multiturn.chat.encoding import ControlToken
from sglang_multiturn.engine.scripted import ScriptedTurn
from sglang_multiturn.errors import TemplateError
from sglang_multiturn.schemas import FunctionCall, Message, ToolCall, ToolSchema

if TYPE_CHECKING:
    from sglang_multiturn.chat.hf_template import HFChatTemplate

QUESTION = Message(role="user", content="What is 12*34?")
_SENTINEL = "Sentinel7Answer"
_THOUGHT = "Let me see."
_THINKING = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTurn:
    """An assistant turn as the template writes it."""

    token_ids: tuple[int, ...]
    """Without the end of the turn; control tokens as such."""
    end_id: int | None
    """The end the template puts there; None where it puts none."""

    @property
    def scripted(self) -> ScriptedTurn:
        """For the scripted engine."""
        return ScriptedTurn(token_ids=self.token_ids, end_id=self.end_id)


def calling(calls: Sequence[tuple[str, dict[str, Any]]], turn: int = 0) -> Message:
    """An assistant message that makes these calls."""
    made = [
        ToolCall(id=f"call{turn:02d}{index:03d}", function=FunctionCall(name=name, arguments=arguments))
        for index, (name, arguments) in enumerate(calls)
    ]
    return Message(role="assistant", content="", tool_calls=made)


def answering(message: Message, text: str = "answer") -> list[Message]:
    """A tool message for each call of a message."""
    calls = message.tool_calls or []
    return [Message(role="tool", content=text, name=call.function.name, tool_call_id=call.id) for call in calls]


def write_turn(
    template: HFChatTemplate, message: Message, tools: Sequence[ToolSchema], before: Sequence[Message] = (QUESTION,)
) -> WrittenTurn:
    """The turn in which the assistant says `message`, after what was said `before`; with thoughts where it can think.

    Raises:
        TemplateError: the template refuses the message, or shows it at no place that can be cut out.
    """
    spellings = [message]
    if template.dialect.reasoning_key is not None:
        spellings.insert(0, message.model_copy(update={"reasoning_content": _THOUGHT}))
    whole, text = _cut(template, spellings, tools, before)
    prompt = _render(template, before, tools, generation_prompt=True)
    lead = template.encoder.encode_rendering(prompt)
    ids = template.encoder.encode_rendering(prompt + text)
    ids = ids[len(lead) :] if ids[: len(lead)] == lead else template.encoder.encode_rendering(text)
    ends = {*template.stop_token_ids, *template.end_ids}
    last = next((index for index in reversed(range(len(ids))) if ids[index] in ends), None)
    if last is None:
        end = _end_before_answer(template, message, whole, tools, before)
        return WrittenTurn(token_ids=tuple(ids), end_id=end)
    return WrittenTurn(token_ids=tuple(ids[:last]), end_id=ids[last])


def _cut(
    template: HFChatTemplate, spellings: Sequence[Message], tools: Sequence[ToolSchema], before: Sequence[Message]
) -> tuple[str, str]:
    """The conversation, and the turn's text as it would be sampled after the generation prompt."""
    prompt = _render(template, before, tools, generation_prompt=True)
    for message in spellings:
        whole = _render(template, [*before, message], tools)
        if whole.startswith(prompt):
            return whole, whole[len(prompt) :]
    # The history shows turns otherwise than they begin: mostly because the generation prompt opens a thinking block.
    whole = _render(template, [*before, spellings[-1]], tools)
    sentinel = Message(role="assistant", content=_SENTINEL)
    opened, found, _ = _render(template, [*before, sentinel], tools).partition(_SENTINEL)
    if not found or not whole.startswith(opened):
        raise TemplateError("the template shows an assistant turn at no place that could be cut out")
    text = whole[len(opened) :]
    closing = next((closing for opening, closing in _THINKING if prompt.rstrip().endswith(opening)), None)
    return whole, text if closing is None else f"{_THOUGHT}\n{closing}\n\n{text}"


def _end_before_answer(
    template: HFChatTemplate, message: Message, whole: str, tools: Sequence[ToolSchema], before: Sequence[Message]
) -> int | None:
    """The end that stands between a call and its answer, where the turn alone shows none (GLM)."""
    if not message.tool_calls:
        return None
    try:
        following = _render(template, [*before, message, *answering(message)], tools, generation_prompt=True)
    except TemplateError:
        return None
    rest = following[len(whole) :] if following.startswith(whole) else ""
    controls = (piece for piece in template.encoder.split(rest) if isinstance(piece, ControlToken))
    return next((piece.id for piece in controls if piece.id in template.end_ids), None)


def _render(
    template: HFChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[ToolSchema],
    *,
    generation_prompt: bool = False,
) -> str:
    shown = [tool.for_template() for tool in tools]
    return template.render([template.dialect.spell(m) for m in messages], shown, generation_prompt=generation_prompt)
