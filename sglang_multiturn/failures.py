"""What went wrong in many conversations: how often, by kind, and one example of each.

Kinds are the outcomes of calls other than `ok` (malformed ones by what is wrong with them: `malformed_json`, ...),
`calc_reward`, `release`, and `error:<type>` for what ended a conversation as FAILED.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang_multiturn.request import ErrorRecord
from sglang_multiturn.trajectory import CallOutcome, ToolCallRecord, Trajectory

_MAX_CHARS = 500
"""Of each text of an example: what models and tools say has no bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureExample:
    """One thing that went wrong. Its texts are bounded, and raw: `str` is one line for a terminal or a log."""

    kind: str
    request_id: str
    turn: int | None = None
    tool: str | None = None
    arguments: str | None = None
    """As JSON; None when they did not parse."""
    answer: str = ""
    """What the model was shown, or what was raised."""

    def __str__(self) -> str:
        place = f"request {self.request_id}" + (f", turn {self.turn}" if self.turn is not None else "")
        call = " ".join(part for part in (self.tool, self.arguments) if part)
        return printable(": ".join(part for part in (place, call, self.answer) if part))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; the kind is left out."""
        names = ("request_id", "turn", "tool", "arguments", "answer")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class FailureLog:
    """Counts what went wrong and keeps one example of each kind: that of the earliest request, whichever ended first."""

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.examples: dict[str, FailureExample] = {}
        self._places: dict[str, tuple[int, int]] = {}
        """By kind, where its example stands: the request's input index, and which of its failures it is."""

    def add(self, trajectory: Trajectory) -> list[tuple[FailureExample, int]]:
        """Count a conversation in; what went wrong in it, each with how often its kind has been seen so far."""
        seen = []
        for at, failure in enumerate(failures_of(trajectory)):
            self.counts[failure.kind] += 1
            place = (trajectory.input_index, at)
            if failure.kind not in self.examples or place < self._places[failure.kind]:
                self.examples[failure.kind], self._places[failure.kind] = failure, place
            seen.append((failure, self.counts[failure.kind]))
        return seen

    def to_dict(self) -> dict[str, Any]:
        """Count and example of each kind, the most frequent first; ready for JSON."""
        return {kind: {"count": n, **self.examples[kind].to_dict()} for kind, n in self._by_frequency()}

    def lines(self, most: int = 20) -> list[str]:
        """The same, a line each, for a terminal; of more than `most` kinds the rest are counted only."""
        common = self._by_frequency()
        lines = [f"{printable(kind)}: {n}, for example {self.examples[kind]}" for kind, n in common[:most]]
        return lines + ([f"... and {len(common) - most} more kinds of failures"] if len(common) > most else [])

    def _by_frequency(self) -> list[tuple[str, int]]:
        return sorted(self.counts.items(), key=lambda item: (-item[1], self._places[item[0]]))


def failures_of(trajectory: Trajectory) -> Iterator[FailureExample]:
    """Everything that went wrong in a conversation."""
    request_id = _bounded(trajectory.request_id)
    for call in trajectory.tool_calls:
        if call.outcome is not CallOutcome.OK:
            yield _failed_call(request_id, call)
    for name, error in trajectory.rewards.calc_errors.items():
        yield FailureExample(kind="calc_reward", request_id=request_id, tool=_bounded(name), answer=_said(error))
    kept = [(_bounded(name), _said(error)) for name, error in trajectory.release_errors.items()]
    for at in range(trajectory.metrics.release_errors):  # of which the first of each tool is kept
        tool, said = kept[at] if at < len(kept) else (None, "")
        yield FailureExample(kind="release", request_id=request_id, tool=tool, answer=said)
    if (failed := trajectory.error) is not None:
        yield FailureExample(kind=f"error:{failed.type[:100]}", request_id=request_id, answer=_bounded(failed.message))


def printable(text: str) -> str:
    """Text that cannot move a cursor, colour a terminal or begin a line of a log: other characters are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _failed_call(request_id: str, call: ToolCallRecord) -> FailureExample:
    return FailureExample(
        kind=f"malformed_{call.broken}" if call.broken else call.outcome.value,
        request_id=request_id,
        turn=call.turn,
        tool=_bounded(call.name) or None,
        arguments=None if call.arguments is None else _bounded(json.dumps(call.arguments, default=str)),
        answer=_bounded(call.answer),
    )


def _said(error: ErrorRecord) -> str:
    return _bounded(f"{error.type}: {error.message}")


def _bounded(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "..."
