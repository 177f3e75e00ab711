"""Random lives of tools: created once, released exactly once, nothing left over, one trajectory each."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from tools.process_support import open_files
from tools.scheduled_tool import ANYWHERE, IN_A_PROCESS, Event, ScheduledTool
from tools.schedules import TOOLS, World, check_world, draw, draw_config, draw_settings
from tools.virtual_time import run_virtual

from sglang_multiturn import ToolRegistry
from sglang_multiturn.config import ToolConfig, ToolsConfig
from sglang_multiturn.schemas import FunctionSchema, ToolSchema

WORLDS = 500
PROCESS_WORLDS = 10
SCHEDULES_A_WORLD = 20


@pytest.mark.parametrize("part", range(10))
def test_ten_thousand_random_schedules_of_async_tools(part: int) -> None:
    threads = {thread.name for thread in threading.enumerate()}
    seen: set[str] = set()
    for number in range(part, WORLDS, 10):
        sys.stdout.write(f"world {number}\n")  # shown when a test fails
        seen |= run_virtual(play_world(number))
    assert seen >= {"ok", "tool_error", "timeout", "raised", "skipped", "answered", "aborted", "cancelled", "error"}
    assert {thread.name for thread in threading.enumerate()} - threads <= {"tool-loop-watch"}


async def play_world(number: int) -> set[str]:
    """Outcomes of calls and ends of conversations that came up."""
    tools = [ScheduledTool({"name": name, "slow_s": 0.3}) for name in TOOLS]
    settings = {name: draw_settings(2 * number + at) for at, name in enumerate(TOOLS)}
    schedules = [draw(number * SCHEDULES_A_WORLD + at, ANYWHERE, longest_s=3.0) for at in range(SCHEDULES_A_WORLD)]
    world = World(schedules, ToolRegistry(tools, settings=settings), draw_config(number))
    await world.play()
    await asyncio.sleep(60)  # in virtual time: those that ignored their cancellation come to their end
    check_world(world, [event for tool in tools for event in tool.events])
    assert asyncio.all_tasks() == {asyncio.current_task()}, f"world {number} left tasks behind"
    return world.seen


@dataclass(frozen=True, slots=True)
class Held:
    """What this process holds of the system."""

    threads: frozenset[str]
    processes: frozenset[int]
    files: frozenset[str]

    def beyond(self, before: Held) -> Held:
        """What is held that was not before."""
        return Held(
            threads=self.threads - before.threads,
            processes=self.processes - before.processes,
            files=self.files - before.files,
        )

    @classmethod
    def now(cls) -> Held:
        return cls(
            threads=frozenset(thread.name for thread in threading.enumerate()) - {"tool-loop-watch"},
            processes=frozenset(child.pid for child in psutil.Process().children(recursive=True)),
            files=frozenset(open_files()),
        )


@pytest.mark.slow
def test_two_hundred_random_schedules_of_process_tools(tmp_path: Path) -> None:
    before = Held.now()
    seen: set[str] = set()
    for number in range(PROCESS_WORLDS):
        sys.stdout.write(f"world {number}\n")  # shown when a test fails
        with asyncio.Runner() as runner:
            seen |= runner.run(play_processes(number, tmp_path / f"events-{number}.jsonl"))
        assert_nothing_left(before)
    assert seen >= {"ok", "tool_error", "timeout", "died", "raised", "answered", "aborted", "cancelled", "error"}


def assert_nothing_left(before: Held) -> None:
    """What other tests' libraries open for a moment is given time to close."""
    for _ in range(100):
        if (left := Held.now().beyond(before)) == Held(threads=frozenset(), processes=frozenset(), files=frozenset()):
            return
        time.sleep(0.05)
    raise AssertionError(f"left over: {left}")


async def play_processes(number: int, log: Path) -> set[str]:
    config = ToolsConfig(
        tools=[
            ToolConfig(
                class_name="tools.scheduled_tool.ScheduledTool",
                config={"name": name, "slow_s": 0.02, "log_path": str(log)},
                tool_schema=ToolSchema(function=FunctionSchema(name=name)),
                **{
                    **draw_settings(2 * number + at).model_dump(exclude_unset=True),
                    "execution": "process",
                    "timeout_s": 0.7,
                    "max_memory_mb": 256,
                    "max_processes": 8,
                },
            )
            for at, name in enumerate(TOOLS)
        ],
        rollout=draw_config(number, rollout_timeout_s=60.0),
    )
    schedules = [draw(100_000 + number * 20 + at, IN_A_PROCESS, longest_s=3.0) for at in range(SCHEDULES_A_WORLD)]
    world = World(schedules, ToolRegistry.from_config(config), config.rollout)
    await world.play()
    check_world(world, events_of(log), may_be_lost=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return world.seen


def events_of(log: Path) -> list[Event]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [Event(*json.loads(line)) for line in lines]
