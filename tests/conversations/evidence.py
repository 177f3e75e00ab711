"""What a conversation left behind, put so that checks can read it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from conversations.play import Asked, Played

from sglang_multiturn import FinishReason, Generation, Message, TokenLedger
from sglang_multiturn.schemas import Role
from sglang_multiturn.tokens import Origin, Segment


class InvariantError(AssertionError):
    """An invariant of docs/architecture.md does not hold; the message begins with its number."""


def must(holds: bool, invariant: str, what: str) -> None:
    """Raises InvariantError."""
    if not holds:
        raise InvariantError(f"{invariant}: {what}")


def kept(played: Played) -> list[Asked]:
    """The generations whose tokens stand: all, but for those that failed, or were aborted before their first token."""
    return [asked for asked in played.asked if asked.got is not None and not _came_to_nothing(asked.got)]


def _came_to_nothing(generation: Generation) -> bool:
    return generation.finish_reason is FinishReason.ABORT and not generation.token_ids


def got_ids(asked: Asked) -> list[int]:
    """What the engine sampled."""
    assert asked.got is not None
    return list(asked.got.token_ids)


def answered(row: TokenLedger) -> list[tuple[int, list[Segment]]]:
    """The turns that something follows in their row, each with the segments that follow."""
    found: list[tuple[int, list[Segment]]] = []
    for segment in row.segments:
        if segment.origin is Origin.SAMPLED:
            found.append((segment.turn, []))
        elif found:
            found[-1][1].append(segment)
    return [(turn, after) for turn, after in found if after]


def said_after(played: Played, turn: int) -> list[Message]:
    """The messages that followed a turn."""
    messages = played.trajectory.messages[_position(played, turn) + 1 :]
    return list(itertools.takewhile(lambda message: message.role != "assistant", messages))


def roles_after(played: Played, turn: int) -> tuple[Role, ...]:
    """Their roles."""
    return tuple(message.role for message in said_after(played, turn))


def has_answered(played: Played, turn: int) -> bool:
    """Whether a tool has answered before this turn."""
    return any(message.role == "tool" for message in played.trajectory.messages[: _position(played, turn)])


def prompts(played: Played) -> Iterator[tuple[TokenLedger, list[Message]]]:
    """The first row, every other one in which something was sampled, and the messages their prompts render."""
    first, *others = played.trajectory.rows
    if first.prompt_ids:
        yield first, list(played.plan.prompt)
    for row in (row for row in others if row.turns):
        yield row, list(played.trajectory.messages[: _next_position(played, row.turns[0].turn - 1)])


def _position(played: Played, turn: int) -> int:
    start = len(played.plan.prompt)
    positions = [i for i, m in enumerate(played.trajectory.messages) if i >= start and m.role == "assistant"]
    return positions[turn]


def _next_position(played: Played, turn: int) -> int:
    return _position(played, turn) + 1 + len(said_after(played, turn))
