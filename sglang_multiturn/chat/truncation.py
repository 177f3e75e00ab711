"""Cutting a tool's answer to a number of tokens, with a mark that says so."""

from __future__ import annotations

from typing import Literal

from sglang_multiturn.chat.template import ChatTemplate

Side = Literal["left", "middle", "right"]

_MAX_CHARS_A_TOKEN = 32
"""Text beyond this many characters for each allowed token is cut before it is tokenised at all."""


def cut_text(text: str, template: ChatTemplate, *, max_tokens: int, side: Side) -> str | None:
    """The text cut to at most `max_tokens` tokens, mark included; None when it fits as it is.

    `side` is where text is lost: at the start (`left`), in the `middle`, or at the end (`right`).
    """
    if len(text) <= max_tokens and len(text.encode()) <= max_tokens:
        return None  # no tokenizer makes more tokens than there are bytes
    if len(text) <= max_tokens * _MAX_CHARS_A_TOKEN and len(template.encode_text(text)) <= max_tokens:
        return None
    low, high = 0, min(len(text), max_tokens * _MAX_CHARS_A_TOKEN)
    while low < high:
        kept = (low + high + 1) // 2
        fits = len(template.encode_text(_cut(text, kept, side))) <= max_tokens
        low, high = (kept, high) if fits else (low, kept - 1)
    return _cut(text, low, side)


def _cut(text: str, kept_chars: int, side: Side) -> str:
    mark = f"[{len(text) - kept_chars} characters cut]"
    if side == "left":
        return f"{mark}\n{text[len(text) - kept_chars :]}"
    if side == "right":
        return f"{text[:kept_chars]}\n{mark}"
    head = (kept_chars + 1) // 2
    return f"{text[:head]}\n{mark}\n{text[len(text) - (kept_chars - head) :]}"
