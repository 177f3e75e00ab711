"""Token ids as something to look at: where one ends, which ones are control tokens, and nothing that moves a cursor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_multiturn.chat.hf_template import HFChatTemplate

_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")
"""Control characters, what reverses or hides text, and lone surrogates: all that could make a terminal lie."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenView:
    """One token."""

    id: int
    text: str
    """Safe to print; U+FFFD where the token is a part of a character."""
    control: bool


def view_tokens(template: HFChatTemplate, ids: Sequence[int]) -> tuple[TokenView, ...]:
    """Every id with its text."""
    decode = template.tokenizer.decode
    texts = (decode([i], skip_special_tokens=False, clean_up_tokenization_spaces=False) for i in ids)
    return tuple(
        TokenView(id=i, text=printable(str(text)), control=i in template.control_ids)
        for i, text in zip(ids, texts, strict=True)
    )


def printable(text: str) -> str:
    """Text with everything that is not plainly visible written as an escape; tabs and new lines stay."""
    return _UNSAFE.sub(lambda match: match.group().encode("unicode_escape", "surrogatepass").decode(), text)
