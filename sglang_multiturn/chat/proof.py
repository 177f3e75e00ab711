"""What is shown of a template when a model is loaded, by rendering small conversations.

That appended messages are what the template itself would render, for hard texts, in the first round and in later ones;
which ids end a turn; and whether the template goes on rendering earlier turns as they were. Nothing is assumed of a
family: what cannot be shown is refused with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_multiturn.chat.appending import APPENDABLE, Appender
from sglang_multiturn.chat.encoding import ControlToken
from sglang_multiturn.chat.frames import (
    QUESTION,
    SYSTEM,
    Opening,
    earlier_round,
    opening,
    placeholder,
    render_after,
)
from sglang_multiturn.errors import TemplateError
from sglang_multiturn.schemas import Message, Role

_TEXTS = (
    'a "quoted" word, <b>tag</b>, 12 + 7,\nnew line, é, 猫',
    "\n leading and trailing \n",
    '{"json": [1, "x", null]}',
    "back\\slash 'single' {{ braces }}",
    "17",
    "<think>x</think>y",
    "",
)
_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "Probes.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "string", "description": "x"}},
            "required": ["x"],
        },
    },
}
_THOUGHTS = ("<think>\nWritten7thoughts\n</think>\n\n", "<|channel>thought\nWritten7thoughts<channel|>")
"""As models write them into their turns."""
_BESIDE = "Beside7call"


def prove(appender: Appender) -> None:
    """Show for tools and users that their messages can be appended, and note why not where they cannot.

    Raises:
        TemplateError: neither can.
    """
    for role in APPENDABLE:
        try:
            appender.frame((role,))
            if all(appender.alone(role, text) == text for text in _TEXTS):
                appender.verbatim.add(role)
            _prove_rounds(appender, role)
            _prove_texts(appender, role)
        except TemplateError as error:
            appender.refusals[role] = str(error)
    if len(appender.refusals) == len(APPENDABLE):
        raise TemplateError("; ".join(appender.refusals.values()))


def find_stops(appender: Appender) -> tuple[int, ...]:
    """What ends a turn: the model's own stop ids, and the template's ends where a model samples them.

    A template's end is not sampled when a turn alone ends with another of the model's own (gpt-oss says `<|return|>`
    where its history shows `<|end|>`, which ends only one of its channels).
    """
    ends: dict[Role, list[int]] = {}
    for role in (role for role in APPENDABLE if role not in appender.refusals):
        start = opening(appender.render, appender.dialect, calls=_calls(role))
        alone = [t.id for t in appender.encoder.split(start.after(start.text)) if isinstance(t, ControlToken)]
        end = appender.frame((role,)).end_id
        ends[role] = [end] if end in alone or not set(alone) & set(appender.own_stops) else []
    return tuple(dict.fromkeys([*ends.get("user", []), *appender.own_stops, *ends.get("tool", [])]))


def keeps_history(appender: Appender, role: Role) -> bool:
    """Whether the template, once a message of `role` follows, still renders what came before as it was sampled.

    Looked at are thoughts (under their own key, and as models write them), words beside a call, and a system message.
    """
    if role in appender.refusals:
        return False
    tools = [] if _refused(appender, [QUESTION], [_TOOL]) else [_TOOL]
    return (
        all(_goes_on(appender, role, before, tools) for before in ([QUESTION], [SYSTEM, QUESTION]))
        and all(_shows(appender, role, written, tools) for written in _THOUGHTS)
        and (role != "tool" or _shows(appender, role, _BESIDE, tools))
    )


def _prove_rounds(appender: Appender, role: Role) -> None:
    """Show that what stands around a message is the same in every round, but for tools' first answer."""
    frames = [appender.make_frame((role,), [QUESTION, *before]) for before in _rounds(appender, role)]
    first, *later = frames
    differs = later[0].parts != first.parts
    appender.differs_later |= differs and role == "tool"
    if any(frame.parts != later[0].parts for frame in later[1:]) or (differs and role == "user"):
        raise TemplateError(f"what the template puts around what a {role} says depends on what was said before")


def _rounds(appender: Appender, role: Role) -> Iterator[list[dict[str, Any]]]:
    """What may stand between the question and the turn a message answers: nothing, a round, more rounds."""
    own = [earlier_round(appender.dialect, role, i) for i in range(2)]
    yield []
    yield own[0]
    yield [*own[0], *own[1]]
    if role == "user" and "tool" not in appender.refusals:
        answered = {"role": "assistant", "content": "Earlier7said"}
        yield [*earlier_round(appender.dialect, "tool", 0), answered, {"role": "user", "content": "Earlier7asked"}]


def _prove_texts(appender: Appender, role: Role) -> None:
    """Show for hard texts, one and two at a time, that a delta is what the template would append."""
    rounds = [False, True] if role == "tool" and appender.differs_later else [False]
    for later in rounds:
        for text in _TEXTS:
            _prove_delta(appender, (role,), [text], later=later)
        for pair in itertools.pairwise(_TEXTS) if role == "tool" else ():
            _prove_delta(appender, (role, role), pair, later=later)


def _prove_delta(appender: Appender, roles: tuple[Role, ...], texts: Sequence[str], *, later: bool) -> None:
    frame = appender.frame(roles, answered_before=later)
    said = [{**placeholder(role, i), "content": text} for i, (role, text) in enumerate(zip(roles, texts, strict=True))]
    messages = [Message.model_validate(message) for message in said]
    delta = frame.text(appender.fill(frame, messages))
    before = [QUESTION, *(earlier_round(appender.dialect, "tool", 0) if later else ())]
    _, whole = render_after(roles, said, appender.render, appender.dialect, before)
    if not whole.endswith(delta):
        raise TemplateError(f"the template does not append what {list(roles)} say: {list(texts)!r}")
    pieces = appender.encode(messages, last_id=None, answered_before=later)
    ids = [token for piece in pieces for token in piece.ids]
    if not any(map(appender.encoder.holds_control, texts)) and ids != appender.encoder.encode_rendering(delta):
        raise TemplateError(f"appended messages are tokenised otherwise than in the whole: {list(texts)!r}")


def _goes_on(appender: Appender, role: Role, before: list[dict[str, Any]], tools: list[dict[str, Any]]) -> bool:
    """Whether a thinking turn, or one without thoughts where the prompt closed them, is rendered alike later."""
    if _refused(appender, before, tools):
        return True  # such a conversation cannot be
    prompt = appender.render(before, tools)
    for thoughts in ("thoughts", ""):
        start = _opening(appender, role, before, tools, thoughts=thoughts)
        if start is not None and (alone := start.up_to(start.text)).startswith(prompt):
            return appender.render([*start.messages, placeholder(role, 0)], tools).startswith(alone)
    return False


def _shows(appender: Appender, role: Role, words: str, tools: list[dict[str, Any]]) -> bool:
    """Whether words of the assistant's turn are still there once a message of `role` follows."""
    start = _opening(appender, role, [QUESTION], tools, content=words)
    if start is None:
        return True
    later = appender.render([*start.messages, placeholder(role, 0)], tools)
    return words.strip() in later or "Written7thoughts" in later


def _opening(
    appender: Appender,
    role: Role,
    before: list[dict[str, Any]],
    tools: list[dict[str, Any]],
    *,
    content: str = "",
    thoughts: str = "",
) -> Opening | None:
    """None where the template refuses such a turn."""
    try:
        return opening(
            appender.render,
            appender.dialect,
            calls=_calls(role),
            before=before,
            content=content,
            thoughts=thoughts,
            tools=tools,
        )
    except TemplateError:
        return None


def _refused(appender: Appender, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> bool:
    try:
        appender.render(messages, tools)
    except TemplateError:
        return True
    return False


def _calls(role: Role) -> int:
    return 1 if role == "tool" else 0
