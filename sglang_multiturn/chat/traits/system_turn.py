"""What becomes of system and developer messages, and what a template writes by itself."""

from __future__ import annotations

import datetime

from sglang_multiturn.chat.traits.kinds import TraitKind
from sglang_multiturn.chat.traits.probe import (
    ANSWER,
    QUESTION,
    SYSTEM,
    Found,
    Probe,
    answer,
    calling,
    more,
    quote,
    result,
    system,
    user,
    user_opening,
)

_LATER = "From here on."


def system_messages(probe: Probe) -> Found:
    """Refused, dropped, moved, or joined by text of the template's own."""
    alone, with_system = probe.show(user), probe.show(system, user)
    opening = user_opening(probe)
    own = alone.before(QUESTION).removesuffix(opening)
    if _words(probe, own):
        yield TraitKind.DEFAULT_SYSTEM, f"without a system message the prompt begins with {quote(own)}"
    if with_system.refused:
        yield TraitKind.SYSTEM_REFUSED, f"a system message raises {with_system.refusal!r}"
    elif SYSTEM not in with_system:
        yield TraitKind.SYSTEM_DROPPED, f"a system message is not shown: {quote(with_system.text)}"
    else:
        yield from _beside_yours(probe, opening)


def _beside_yours(probe: Probe, opening: str) -> Found:
    shown = probe.show(system, user)
    own = [
        _words(probe, text.removesuffix(opening)) for text in (shown.before(SYSTEM), shown.between(SYSTEM, QUESTION))
    ]
    added = [text for text in own if text.lower() not in ("", "system", "developer", "user")]
    if added:
        yield TraitKind.SYSTEM_ADDED, f"your own system message stands beside {quote(max(added, key=len))}"
    if opening and opening not in shown.between(SYSTEM, QUESTION):
        yield TraitKind.SYSTEM_IN_USER_TURN, f"it stands in the user's turn: {shown.around(SYSTEM)}"
    moved = []
    for follow in ([answer, more], [calling(), result()]):
        later = probe.show(system, user, *follow)
        if not later.refused and not later.text.startswith(shown.before(QUESTION)):
            where = f"it stands in {later.around(SYSTEM)}" if SYSTEM in later else "it is gone"
            moved.append(f"{where} once a {follow[-1]['role']} message follows")
    if moved:
        yield TraitKind.SYSTEM_MOVES, ", and ".join(moved)


def later_system(probe: Probe) -> Found:
    """A system message in the middle of a conversation."""
    first = [] if SYSTEM not in probe.show(system, user) else [system]
    later = probe.show(*first, user, answer, {"role": "system", "content": _LATER}, more)
    if later.refused:
        yield TraitKind.LATER_SYSTEM, f"a system message after the first turn raises {later.refusal!r}"
    elif _LATER not in later:
        yield TraitKind.LATER_SYSTEM, "a system message after the first turn is not shown"
    elif ANSWER not in later.before(_LATER):
        yield TraitKind.LATER_SYSTEM, f"a system message after the first turn moves to the top: {later.around(_LATER)}"


def developer_messages(probe: Probe) -> Found:
    """Refused or dropped."""
    shown = probe.show({"role": "developer", "content": SYSTEM}, user)
    if shown.refused:
        yield TraitKind.DEVELOPER_REFUSED, f"a developer message raises {shown.refusal!r}"
    elif SYSTEM not in shown:
        yield TraitKind.DEVELOPER_DROPPED, f"a developer message is not shown: {quote(shown.text)}"


def clock(probe: Probe) -> Found:
    """Today's date."""
    today, tomorrow = datetime.date(2031, 1, 15), datetime.date(2031, 1, 16)
    first, second = probe.at(today), probe.at(tomorrow)
    if first.text != second.text:
        place = next(i for i, (a, b) in enumerate(zip(first.text, second.text, strict=False)) if a != b)
        moved = [quote(text.text[max(0, place - 25) : place + 12]) for text in (first, second)]
        yield TraitKind.DATE_IN_PROMPT, f"the prompt changes from {moved[0]} to {moved[1]} at midnight"


def _words(probe: Probe, text: str) -> str:
    """Text without control tokens and white space around it."""
    for token in sorted(probe.template.encoder.controls, key=len, reverse=True):
        text = text.replace(token, " ")
    text = text.strip()
    return text if any(character.isalpha() for character in text) else ""
