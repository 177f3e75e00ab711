"""What follows from a turn's answers: what the model is shown of them, what is counted, and whether it goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from sglang_multiturn.chat.calls import BrokenCall
from sglang_multiturn.chat.template import ChatTemplate
from sglang_multiturn.chat.truncation import cut_text
from sglang_multiturn.config import FailurePolicy, OnFailure, RolloutConfig
from sglang_multiturn.errors import CallFailedError
from sglang_multiturn.metrics import RolloutMetrics
from sglang_multiturn.request import ErrorRecord
from sglang_multiturn.tools.registry import ToolRegistry
from sglang_multiturn.tools.session import CalcReward, FailedCreate, NumberedCall, ToolAnswer
from sglang_multiturn.trajectory import CallOutcome, ToolCallRecord

FAILURES = frozenset(CallOutcome) - {CallOutcome.OK, CallOutcome.SKIPPED}
"""What `on_failure` decides about. A call that was not made because a limit was reached is no failure."""

_COUNTERS: Mapping[CallOutcome, str] = {
    CallOutcome.MALFORMED: "malformed_calls",
    CallOutcome.UNKNOWN_TOOL: "unknown_tools",
    CallOutcome.INVALID_ARGUMENTS: "invalid_arguments",
    CallOutcome.SKIPPED: "skipped_calls",
    CallOutcome.TOOL_ERROR: "tool_errors",
    CallOutcome.TIMEOUT: "tool_timeouts",
    CallOutcome.DIED: "tool_deaths",
    CallOutcome.RAISED: "tool_crashes",
}
_QUOTED_CHARS = 1000


def as_shown(
    answer: ToolAnswer,
    call: NumberedCall,
    *,
    template: ChatTemplate,
    config: RolloutConfig,
    tools: ToolRegistry,
    metrics: RolloutMetrics,
) -> ToolAnswer:
    """An answer as the model is shown it: cut to its length, with what was wrong with a call that is broken."""
    record = answer.record
    settings = tools.entry(record.name).settings if record.name in tools.names else None
    if isinstance(call.call, BrokenCall):
        record = dataclasses.replace(record, broken=call.call.kind)
    max_tokens = settings.max_result_tokens if settings else None
    side = settings.result_cut if settings else None
    text = cut_text(
        record.answer,
        template,
        max_tokens=max_tokens or config.max_tool_result_tokens,
        side=side or config.tool_result_cut,
    )
    if text is not None:
        metrics.cut_tool_results += 1
        record = dataclasses.replace(record, answer=text)
    return dataclasses.replace(answer, record=record)


def count(records: Iterable[ToolCallRecord], metrics: RolloutMetrics) -> None:
    """Count a turn's calls in, each by what became of it."""
    for record in records:
        metrics.tool_calls += 1
        counted = _COUNTERS.get(record.outcome), record.broken and f"malformed_{record.broken}"
        for name in filter(None, counted):
            setattr(metrics, name, getattr(metrics, name) + 1)


def errors_in_a_row(before: int, answers: Sequence[ToolAnswer]) -> int:
    """Turns in a row in which every call that was made went wrong, with this one.

    A turn whose calls were all skipped is neither good nor bad: it changes nothing.
    """
    outcomes = {answer.record.outcome for answer in answers}
    if CallOutcome.OK in outcomes:
        return 0
    return before + 1 if outcomes & FAILURES else before


def ends_conversation(answers: Sequence[ToolAnswer], policy: FailurePolicy) -> bool:
    """Whether `on_failure` ends the conversation after these answers; of several that went wrong the strictest decides.

    Raises:
        Exception: `on_failure` says `fail`: what the tool raised where the outcome is RAISED, else a CallFailedError.
    """
    said = [_what_follows(policy, answer.record.outcome) for answer in answers]
    if "fail" in said:
        failed = answers[said.index("fail")]
        record = failed.record
        what = f"call {record.call_id} of tool {record.name[:100]!r} in turn {record.turn}"
        raise _failure(what, record.outcome, record.answer, failed.error)
    return "end" in said


def refuse_failed_create(failed: FailedCreate | None, policy: FailurePolicy) -> None:
    """Raises as `ends_conversation` does, where `on_failure` says `fail`; the first call of the tool tries again else."""
    if failed is not None and _what_follows(policy, failed.outcome) == "fail":
        raise _failure(f"{failed.name}.create", failed.outcome, failed.text, failed.error)


def judgements(
    said: Sequence[CalcReward], policy: FailurePolicy, metrics: RolloutMetrics
) -> tuple[dict[str, float], dict[str, ErrorRecord]]:
    """What each tool's `calc_reward` said, and the errors of those that said nothing and count as 0.0.

    The conversation is over, so `end` is no other than `tell` here, and there is nobody to be told.

    Raises:
        Exception: `on_failure` says `fail`: what the tool raised where the outcome is RAISED, else a CallFailedError.
    """
    errors: dict[str, ErrorRecord] = {}
    for one in said:
        if one.error is None:
            continue
        metrics.calc_reward_errors += 1
        if _what_follows(policy, one.outcome) == "fail":
            raise _failure(
                f"{one.name}.calc_reward", one.outcome, f"{type(one.error).__name__}: {one.error}", one.error
            )
        errors[one.name] = ErrorRecord.of(one.error)
    return {one.name: one.value for one in said}, errors


def _what_follows(policy: FailurePolicy, outcome: CallOutcome) -> OnFailure:
    chosen: OnFailure = getattr(policy, outcome) if outcome in FAILURES else "tell"
    return chosen


def _failure(what: str, outcome: CallOutcome, text: str, error: Exception | None) -> Exception:
    if outcome is CallOutcome.RAISED and error is not None:
        return error
    failed = CallFailedError(f"{what} went wrong and on_failure.{outcome} is fail: {text[:_QUOTED_CHARS]}")
    failed.__cause__ = error
    return failed
