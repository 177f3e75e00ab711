"""What the tests of snapshots share."""

from __future__ import annotations

from typing import Any

from sglang_multiturn import Trajectory
from sglang_multiturn.config import ToolsConfig

from support import call

MODULE = "tools.remembering_tool"


def say(**parameters: Any) -> str:
    return call("memory", **parameters)


def in_yaml(tool: str, config: dict[str, Any] | None = None, **settings: Any) -> ToolsConfig:
    entry = {"class_name": f"{MODULE}.{tool}", "config": config or {}, **settings}
    return ToolsConfig.model_validate({"tools": [entry]})


def counts(trajectory: Trajectory) -> dict[str, int]:
    names = ("snapshots", "snapshot_errors", "lost_instances", "restored_instances")
    return {name: count for name in names if (count := getattr(trajectory.metrics, name))}


def answers(trajectory: Trajectory) -> list[str]:
    return [record.answer for record in trajectory.tool_calls]


def words(trajectory: Trajectory) -> dict[str, Any]:
    """All that a conversation is, but times, processes and weight versions."""
    return {
        "response": trajectory.response_ids,
        "mask": trajectory.response_mask,
        "messages": trajectory.messages,
        "calls": [(record.outcome, record.answer, record.reward) for record in trajectory.tool_calls],
        "rewards": trajectory.rewards,
        "stop_reason": trajectory.stop_reason,
    }
