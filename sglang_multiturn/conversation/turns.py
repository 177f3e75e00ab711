"""What is made of an assistant turn's text before anybody answers it."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_multiturn.chat.calls import ParsedCall
from sglang_multiturn.tools.session import NumberedCall


def call_id(turn: int, index: int) -> str:
    """The id of a turn's call: nine letters and digits (Mistral's template takes no others), unique, readable."""
    return f"call{turn:02d}{index:03d}" if turn < 100 and index < 1000 else f"{turn:04x}i{index:04x}"


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string: what is parsed. The ledger keeps every id that was sampled."""
    return text[: min((at for stop in stops if stop and (at := text.find(stop)) >= 0), default=len(text))]


def waiting_words(calls: Sequence[NumberedCall]) -> str:
    """What a conversation in its tools waits for."""
    names = [call.call.name for call in calls if isinstance(call.call, ParsedCall)]
    return (
        f"tools: {', '.join(names)}" if len(names) > 1 else f"tool {names[0]}" if names else "answers to broken calls"
    )
