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
    """Calls that were not made, beyond `max_parallel_calls` of the turn or `max_calls` of the tool; the model was told."""
    refused_calls: int = 0
    """Those of them beyond `max_calls`."""
    tool_errors: int = 0
    """Calls a tool answered with a ToolError, after its retries."""
    tool_timeouts: int = 0
    """Calls that were not answered in time, after the retries."""
    tool_deaths: int = 0
    """Calls whose process died or was killed, after the retries."""
    tool_crashes: int = 0
    """Calls in which the tool raised anything else, or broke its contract."""
    tool_retries: int = 0
    """Further attempts at a call, whatever became of them."""
    injected_faults: int = 0
    """Attempts that `faults` made fail or hang; latency is none."""
    calc_reward_errors: int = 0
    """`calc_reward`s that raised, took too long or broke the contract."""
    cut_tool_results: int = 0
    """Tool answers cut to the most tokens a result may have."""
    engine_retries: int = 0
    suspensions: int = 0
    """How often it was suspended."""
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
    """Whether `release` went well or not."""
    lost_instances: int = 0
    """Instances that went with their process; there is nothing to release. Created is released and lost together."""
    release_errors: int = 0
    """`release`s that raised or took too long."""
    snapshots: int = 0
    """Taken of tool instances while the conversation was suspended."""
    snapshot_errors: int = 0
    """`snapshot`s and `restore`s that raised, took too long or broke the contract."""
    restored_instances: int = 0
    """Instances that were made anew from a snapshot, after one was lost. They are among the created ones."""
    queue_s: float = 0.0
    """Generations' wait for room in the engine, added up."""
    generate_s: float = 0.0
    """From asking for a generation to its end, that wait included."""
    tool_queue_s: float = 0.0
    """Calls' wait for the limits of their tool, added up."""
    tool_s: float = 0.0
    """From asking for a call to its answer, waits and retries included; parallel calls are added up."""
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
