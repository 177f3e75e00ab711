"""The proved chat template of each model family, made once a run."""

from __future__ import annotations

import functools

from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.errors import TemplateError

from families import FAMILIES, tokenizer


@functools.cache
def chat_template(name: str) -> HFChatTemplate:
    """The template of a family with the ends of its generation config."""
    tokens = tokenizer(name)
    ends = FAMILIES[name].ends if name in FAMILIES else ()
    return HFChatTemplate(tokens, stop_token_ids=[tokens.convert_tokens_to_ids(end) for end in ends])


def missing(name: str) -> str | None:
    """Why a family cannot be had here; None when it can."""
    return FAMILIES[name].missing() if name in FAMILIES else None


@functools.cache
def is_refused(name: str) -> bool:
    """Whether nothing can be appended to what the family's template renders."""
    try:
        chat_template(name)
    except TemplateError:
        return True
    return False
