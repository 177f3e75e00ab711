"""A finished conversation's rewards: what its tools say of it and what the reward function says of the model's own words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sglang_multiturn.chat.template import ChatTemplate
from sglang_multiturn.config import RolloutConfig
from sglang_multiturn.conversation.answers import judgements
from sglang_multiturn.request import AsyncRolloutRequest, StopReason
from sglang_multiturn.rewards import RewardFn, call_reward_fn, combine
from sglang_multiturn.tokens import Origin
from sglang_multiturn.tools.session import ToolSession
from sglang_multiturn.trajectory import Rewards, ToolCallRecord


async def judge(
    request: AsyncRolloutRequest,
    session: ToolSession,
    records: Sequence[ToolCallRecord],
    *,
    template: ChatTemplate,
    config: RolloutConfig,
    reward_fn: RewardFn | None,
    stop_reason: StopReason,
    scored: bool,
) -> Rewards:
    """Ask every tool for its `calc_reward` and, where it is `scored`, the reward function for its score.

    Raises:
        SglangMultiturnError: a `calc_reward` or the reward function failed, and the settings do not forgive it.
    """
    spec, metrics, started = request.spec, request.metrics, time.monotonic()
    request.wait_for("its rewards")
    try:
        calc_rewards, calc_errors = judgements(await session.calc_rewards(), config.on_failure, metrics)
        score: float | None = None
        extra: dict[str, Any] = {}
        if reward_fn is not None and scored:
            score, extra = await call_reward_fn(
                reward_fn,
                data_source=spec.data_source,
                solution_str=own_words(request, template),
                ground_truth=spec.ground_truth,
                extra_info=_scorer_info(request, template, records, calc_rewards, stop_reason),
                timeout_s=config.reward_timeout_s,
            )
        return combine(
            config,
            score=score,
            calls=records,
            calc_rewards=calc_rewards,
            calc_errors=calc_errors,
            extra=extra,
            scored=scored,
        )
    finally:
        metrics.reward_s += time.monotonic() - started


def own_words(request: AsyncRolloutRequest, template: ChatTemplate) -> str:
    """What the model sampled, turn by turn, and nothing anyone else said."""
    turns: list[tuple[int, list[int]]] = []
    for segment in (s for row in request.rows for s in row.segments if s.origin is Origin.SAMPLED):
        if not turns or turns[-1][0] != segment.turn:
            turns.append((segment.turn, []))
        turns[-1][1].extend(segment.ids)  # a suspended turn stands in several segments and is one text
    return "\n".join(template.decode(ids) for _, ids in turns)


def _scorer_info(
    request: AsyncRolloutRequest,
    template: ChatTemplate,
    records: Sequence[ToolCallRecord],
    calc_rewards: dict[str, float],
    stop_reason: StopReason,
) -> dict[str, Any]:
    return {
        **request.spec.extra_info,
        "request_id": request.request_id,
        "stop_reason": stop_reason.value,
        "messages": [message.for_template() for message in request.messages],
        "full_text": "\n".join(template.decode(row.response_ids) for row in request.rows),
        "tool_rewards": [record.reward for record in records],
        "calc_rewards": calc_rewards,
        "num_turns": request.metrics.assistant_turns,
    }
