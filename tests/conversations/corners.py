"""What can happen in a conversation, to see that random ones leave nothing out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from conversations.play import Played

from sglang_multiturn import FinishReason, Generation


def got(played: Played) -> Iterator[Generation]:
    """What the engine gave, attempts that were thrown away included."""
    return (asked.got for asked in played.asked if asked.got is not None)


def said(played: Played) -> Iterator[str]:
    """What tools and users said."""
    return (message.text for message in played.trajectory.messages if message.role in ("tool", "user"))


def last_ids(played: Played, *reasons: FinishReason) -> set[int]:
    """The ids with which generations ended for one of these reasons."""
    return {g.token_ids[-1] for g in got(played) if g.token_ids and g.finish_reason in reasons}


def goes_on(played: Played) -> bool:
    """Whether some turn is several generations."""
    return len({record.turn for record in played.trajectory.turns}) < len(played.trajectory.turns)


def _own(played: Played) -> set[int]:
    return set(played.world.ends.values())


def _stops(played: Played) -> set[int]:
    return set(played.world.template.stop_token_ids)


STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT
CORNERS: dict[str, Callable[[Played], bool]] = {
    "a turn ended with the template's own end": lambda p: bool(last_ids(p, STOP) & _own(p)),
    "a turn ended with another stop id": lambda p: bool(last_ids(p, STOP) & _stops(p) - _own(p)),
    "a turn ended without any": lambda p: bool(last_ids(p, STOP) - _stops(p) - _own(p)),
    "a turn was cut by length": lambda p: bool(last_ids(p, LENGTH)),
    "a turn was cut inside a call": lambda p: any("cut at its length limit" in text for text in said(p)),
    "a turn was aborted in the middle": lambda p: bool(last_ids(p, ABORT)),
    "a turn was suspended in the middle and went on": lambda p: p.trajectory.metrics.suspensions > 0 and goes_on(p),
    "a conversation was suspended between its turns": lambda p: p.trajectory.metrics.suspensions > 0 and not goes_on(p),
    "a turn was empty": lambda p: any(not generation.token_ids for generation in got(p)),
    "a control token was sampled inside": lambda p: any(p.world.controls_of(g.token_ids[:-1]) for g in got(p)),
    "a turn was asked for again": lambda p: p.trajectory.metrics.engine_retries > 0,
    "calls were answered side by side": lambda p: p.trajectory.metrics.tool_calls > p.trajectory.metrics.tool_turns,
    "a call was broken": lambda p: p.trajectory.metrics.malformed_calls > 0,
    "an unknown tool was called": lambda p: p.trajectory.metrics.unknown_tools > 0,
    "arguments broke the schema": lambda p: p.trajectory.metrics.invalid_arguments > 0,
    "a call was one too many": lambda p: p.trajectory.metrics.skipped_calls > 0,
    "a tool refused": lambda p: p.trajectory.metrics.tool_errors > 0,
    "an answer was cut": lambda p: p.trajectory.metrics.cut_tool_results > 0,
    "a control token was spelt out": lambda p: any(not p.world.is_benign(text) for text in said(p)),
    "nothing was said": lambda p: any(not text for text in said(p)),
    "a row was begun anew": lambda p: len(p.trajectory.rows) > 1,
    "no log-probabilities were kept": lambda p: p.trajectory.response_logprobs is None,
    "the model said what the template renders": lambda p: any(rendered.whole for rendered in p.renderings),
}


def corners(played: Played) -> set[str]:
    """What of it happened in this one, and why it ended."""
    return {name for name, happened in CORNERS.items() if happened(played)} | {played.trajectory.stop_reason.value}
