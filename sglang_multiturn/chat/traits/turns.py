"""How turns begin and end, and which conversations are refused."""

from __future__ import annotations

import re

from sglang_multiturn.chat.traits.kinds import TraitKind
from sglang_multiturn.chat.traits.probe import (
    ANSWER,
    MORE,
    QUESTION,
    RESULT,
    Found,
    Probe,
    answer,
    calling,
    more,
    quote,
    result,
    user,
)

_PADDED = "\n  padded words \n"


def ends(probe: Probe) -> Found:
    """What closes an answer, last or earlier."""
    shown = probe.show(user, answer, prompt=False)
    last, earlier = shown.after(ANSWER), probe.show(user, answer, more).between(ANSWER, MORE)
    if ANSWER not in shown:
        return
    told = f"behind a last answer stands {quote(last)}, behind an earlier one {quote(earlier)}"
    if not any(token in last for token in probe.template.encoder.controls):
        yield TraitKind.NO_END_AFTER_ANSWER, told
    elif not earlier.startswith(last):
        unasked = probe.show(user, prompt=False).after(QUESTION)
        always = last.endswith(unasked) and probe.show(user).after(QUESTION).startswith(unasked)
        yield TraitKind.GENERATION_PROMPT_ALWAYS if always else TraitKind.END_DIFFERS, told


def after_tools(probe: Probe) -> Found:
    """The generation prompt that follows a tool's result."""
    asked = (user, calling(), result())
    told = probe.show(*asked)
    if told.refused or RESULT not in told:
        return
    bare, usual = probe.show(*asked, prompt=False), probe.template.generation_prompt
    prompt = told.text.removeprefix(bare.text)
    if prompt != usual:
        shown = f"{quote(prompt)} instead of {quote(usual)}" if prompt else f"nothing: {quote(told.text[-50:])}"
        yield TraitKind.TURN_GOES_ON_AFTER_TOOL, f"the generation prompt behind a result is {shown}"


def trimming(probe: Probe) -> Found:
    """White space around what users and the model say."""
    users = {"role": "user", "content": _PADDED}
    told = {"role": "assistant", "content": _PADDED}
    trimmed = [
        whose
        for whose, rendering in (
            ("a user says", probe.show(users)),
            ("the model says", probe.show(user, told, more)),
        )
        if not rendering.refused and "padded words" in rendering and _PADDED not in rendering
    ]
    if trimmed:
        yield TraitKind.CONTENT_TRIMMED, f"white space around what {' and what '.join(trimmed)} is taken off"


def swallowed(probe: Probe) -> Found:
    """White space beside control tokens that take it to themselves."""
    text = probe.show(user, answer, more).text
    for token in probe.template.encoder.controls.values():
        spelt = re.escape(token.text)
        for strips, pattern in ((token.strips_right, rf"{spelt}\s+"), (token.strips_left, rf"\s+{spelt}")):
            if strips and (found := re.search(pattern, text)):
                yield TraitKind.WHITE_SPACE_SWALLOWED, f"{quote(found.group())} becomes the one token {token.text!r}"
                return


def alternation(probe: Probe) -> Found:
    """Two user messages in a row, and none at all."""
    twice = probe.show(user, more)
    if twice.refused:
        yield TraitKind.ROLES_MUST_ALTERNATE, f"two user messages in a row raise {twice.refusal!r}"
    none = probe.show(answer, prompt=False), probe.show({"role": "system", "content": "Words."})
    if all(rendering.refused for rendering in none):
        yield TraitKind.NEEDS_USER, f"a conversation without a user message raises {none[0].refusal!r}"


def parts(probe: Probe) -> Found:
    """Content as a list of parts."""
    rendering = probe.raw({"role": "user", "content": [{"type": "text", "text": QUESTION}]})
    if rendering.refused:
        yield TraitKind.PARTS_REFUSED, f"content as a list of parts raises {rendering.refusal!r}"
    elif rendering.text != probe.raw(user).text:
        yield TraitKind.PARTS_CHANGED, f"content as a list of parts becomes {quote(rendering.text[-90:])}"


def bos(probe: Probe) -> Found:
    """The begin-of-text token."""
    tokenizer = probe.template.tokenizer
    token, text = tokenizer.bos_token, probe.show(user).text
    if token is None:
        return
    if text.startswith(token * 2):
        yield TraitKind.BOS_DOUBLED, f"the prompt begins with {quote(text[: 2 * len(token) + 10])}"
    elif not text.startswith(token) and tokenizer("x").input_ids[:1] == [tokenizer.bos_token_id]:
        yield TraitKind.BOS_MISSING, f"plain text gets {token!r} before it, the prompt begins with {quote(text[:30])}"
