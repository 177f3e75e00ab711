"""What becomes of thoughts."""

from __future__ import annotations

from sglang_multiturn.chat.reasoning import MARKS
from sglang_multiturn.chat.traits.kinds import TraitKind
from sglang_multiturn.chat.traits.probe import (
    ANSWER,
    QUESTION,
    THOUGHT,
    Chat,
    Found,
    Probe,
    Rendering,
    answer,
    calling,
    more,
    quote,
    result,
    user,
)


def stripped(probe: Probe) -> Found:
    """Thoughts that stand in the last turn and are left out once something follows."""
    for kind, thinking, follow in (
        (TraitKind.THINKING_STRIPPED_BY_USER, answer, more),
        (TraitKind.THINKING_STRIPPED_BY_TOOL, calling(), result()),
    ):
        spelt = _thinking(probe, thinking)
        last, later = probe.show(user, spelt, prompt=False), probe.show(user, spelt, follow)
        if not last.refused and not later.refused and THOUGHT not in later and _meant(probe, spelt, last):
            yield kind, f"thoughts are gone once a {follow['role']} message follows: {quote(later.after(QUESTION))}"


def generation_prompt(probe: Probe) -> Found:
    """A thinking block that the generation prompt opens, or closes at once."""
    prompt = probe.template.generation_prompt
    for opening, closing in MARKS:
        if opening in prompt:
            skipped = closing in prompt.rpartition(opening)[2]
            kind = TraitKind.GENERATION_SKIPS_THINKING if skipped else TraitKind.GENERATION_OPENS_THINKING
            yield kind, f"the generation prompt is {quote(prompt)}"
        elif closing in prompt:
            yield TraitKind.GENERATION_SKIPS_THINKING, f"the generation prompt is {quote(prompt)}"


def empty_blocks(probe: Probe) -> Found:
    """Empty thinking blocks before answers that had no thoughts."""
    places = {
        "an earlier answer": probe.show(user, answer, more),
        "a last answer": probe.show(user, answer, prompt=False),
        "a call": probe.show(user, calling(), result()),
    }
    found = {}
    for where, rendering in places.items():
        head = rendering.after(QUESTION)
        head = head.partition(ANSWER if ANSWER in head else "probe_tool")[0]
        if any(closing in head for _, closing in MARKS):
            found[where] = head
    if found:
        shown = quote(next(iter(found.values())))
        yield TraitKind.EMPTY_THINKING_ADDED, f"before {' and before '.join(found)} without thoughts stands {shown}"
    told = probe.raw(user, _inline(probe, answer), prompt=False).after(QUESTION)
    if any(told.count(closing) > 1 for _, closing in MARKS):
        yield TraitKind.INLINE_THINKING_DOUBLED, f"thoughts in the content become {quote(told, limit=120)}"


def _thinking(probe: Probe, message: Chat) -> Chat:
    """The message with thoughts, as the template reads them."""
    key = probe.template.dialect.reasoning_key
    return _inline(probe, message) if key is None else {**message, key: THOUGHT}


def _inline(probe: Probe, message: Chat) -> Chat:
    opening, closing = next((pair for pair in MARKS if pair[1] in probe.template.source), MARKS[0])
    return {**message, "content": f"{opening}\n{THOUGHT}\n{closing}\n\n{message['content']}"}


def _meant(probe: Probe, message: Chat, last: Rendering) -> bool:
    """Whether the template shows these thoughts at all, or knows their markers and takes them out at once."""
    knows_markers = any(closing in probe.template.source for _, closing in MARKS)
    return THOUGHT in last or (THOUGHT in message["content"] and knows_markers)
