"""Counters and timings of one conversation, and their sum over many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(slots=True, kw_only=True)
class RolloutMetrics:
    """What happened in one conversation. Every count is a whole number of events, every `_s` seconds."""

    assistant_turns: int = 0
    user_turns: int = 0
    tool_turns: int = 0
    """Assistant turns that were followed by tool answers."""
    tool_calls: int = 0
    """Calls the model tried to make, well-formed or not."""
    malformed_calls: int = 0
    """Calls that did not parse; the five below say why."""
    malformed_json: int = 0
    malformed_name: int = 0
    malformed_arguments: int = 0
    malformed_envelope: int = 0
    malformed_truncated: int = 0
    """The turn ended inside the call."""
    unknown_tools: int = 0
    """Calls of tools that this conversation does not have."""
    invalid_arguments: int = 0
    """Calls whose arguments break the tool's schema."""
    skipped_calls: int = 0
    """Calls beyond `max_parallel_calls`; the model was told."""
    tool_errors: int = 0
    """Calls a tool answered with a ToolError."""
    tool_timeouts: int = 0
    cut_tool_results: int = 0
    """Tool answers cut to `max_tool_result_tokens`."""
    engine_retries: int = 0
    new_rows: int = 0
    """Rows beyond the first, begun by `history: split`."""
    refused_rows: int = 0
    """Rows that should have begun, but the template refused the conversation or a broken call was answered in it."""
    drift_sampled_text_tokens: int = 0
    """Tokens the template would spell otherwise: the model's own text. This and the next three are allowed."""
    drift_other_end_tokens: int = 0
    """Turns that ended with another stop id than the template's."""
    drift_history_tokens: int = 0
    """Earlier turns that the template renders otherwise once something follows."""
    drift_not_comparable_tokens: int = 0
    """Tokens of broken calls, or of conversations the template refuses to render."""
    drift_special_tokens: int = 0
    """Control tokens other than the template's: drift."""
    drift_boundary_tokens: int = 0
    """Boundaries and answers other than the template's: drift."""
    tool_instances_created: int = 0
    tool_instances_released: int = 0
    release_errors: int = 0
    queue_s: float = 0.0
    generate_s: float = 0.0
    tool_s: float = 0.0
    drift_s: float = 0.0
    """Spent on the drift check."""
    reward_s: float = 0.0
    total_s: float = 0.0

    def add(self, other: RolloutMetrics) -> None:
        """Add another conversation's counts and seconds to these."""
        for name in (f.name for f in fields(self)):
            setattr(self, name, getattr(self, name) + getattr(other, name))


def total(metrics: Iterable[RolloutMetrics]) -> RolloutMetrics:
    """The sum over many conversations."""
    summed = RolloutMetrics()
    for one in metrics:
        summed.add(one)
    return summed
