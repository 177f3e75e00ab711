"""Sixty-four conversations, four of which meet the worst: the other sixty end as if nothing had been."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sglang_multiturn import RequestSpec, RolloutConfig, RolloutEngine, ScriptedEngine, ToolRegistry, Trajectory
from sglang_multiturn.config import ToolConfig, ToolsConfig
from sglang_multiturn.request import StopReason
from sglang_multiturn.schemas import FunctionSchema, Message, ToolSchema
from sglang_multiturn.trajectory import CallOutcome

from support import TEMPLATE, call

HOSTILE = {"r7": "hangs", "r21": "spins", "r40": "forks", "r63": "eats_memory"}
TURNS = 2


def tools() -> ToolRegistry:
    entry = ToolConfig(
        class_name="tools.scheduled_tool.ScheduledTool",
        config={"name": "scheduled", "slow_s": 0.05},
        tool_schema=ToolSchema(function=FunctionSchema(name="scheduled")),
        execution="process",
        timeout_s=6.0,
        max_memory_mb=256,
        max_processes=8,
    )
    return ToolRegistry.from_config(ToolsConfig(tools=[entry]))


def requests(*names: str) -> list[RequestSpec]:
    asked = (Message(role="user", content="hi"),)
    return [RequestSpec(request_id=name, uid=name, input_index=at, messages=asked) for at, name in enumerate(names)]


def script(hostile: dict[str, str]) -> Any:
    def say(generation_id: Any, _: Any) -> str:
        if generation_id.turn == TURNS:
            return "done"
        worst = hostile.get(generation_id.request_id) if generation_id.turn == 0 else None
        return call("scheduled", behave=worst or "slow")

    return say


def told(trajectory: Trajectory) -> tuple[Any, ...]:
    """All of a trajectory but ids of processes and times."""
    calls = [(record.call_id, record.outcome, record.answer, record.reward) for record in trajectory.tool_calls]
    return trajectory.stop_reason, trajectory.error, trajectory.segments, trajectory.messages, calls, trajectory.rewards


@pytest.mark.slow
async def test_four_hostile_calls_among_sixty_four_conversations_hurt_nobody_else() -> None:
    tasks = asyncio.all_tasks()
    names = [f"r{n}" for n in range(64)]
    async with engine({}) as rollouts:
        clean = {t.request_id: told(t) for t in await rollouts.run_all(requests(*names))}
    async with engine(HOSTILE) as rollouts:
        finished = {t.request_id: t for t in await rollouts.run_all(requests(*names))}
        again = await rollouts.run_all(requests("later0", "later1"))
    others = set(names) - set(HOSTILE)
    assert len(others) == 60
    assert {name: told(finished[name]) for name in others} == {name: clean[name] for name in others}
    marked = {name: [record.outcome for record in finished[name].tool_calls] for name in HOSTILE}
    assert marked == {
        "r7": [CallOutcome.TIMEOUT, CallOutcome.OK],
        "r21": [CallOutcome.TIMEOUT, CallOutcome.OK],
        "r40": [CallOutcome.DIED, CallOutcome.OK],
        "r63": [CallOutcome.DIED, CallOutcome.OK],
    }
    assert all(finished[name].stop_reason is StopReason.ANSWERED for name in HOSTILE)
    assert all(finished[name].metrics.lost_instances == 1 for name in HOSTILE)
    assert [[record.outcome for record in t.tool_calls] for t in again] == [[CallOutcome.OK] * TURNS] * 2
    assert asyncio.all_tasks() == tasks


def engine(hostile: dict[str, str]) -> RolloutEngine:
    return RolloutEngine(
        ScriptedEngine(TEMPLATE, script(hostile)), template=TEMPLATE, tools=tools(), config=RolloutConfig()
    )
