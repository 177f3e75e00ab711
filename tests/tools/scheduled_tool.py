"""A tool that behaves as it is told, call by call, and writes down what was asked of it.

What it does stands in the row's kwargs (create, calc_reward, release) and in the call's arguments (execute), so that the
same tool runs in this process and in one of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sglang_multiturn import BaseTool, ToolError
from sglang_multiturn.schemas import FunctionSchema, ToolSchema


class Behaviour(StrEnum):
    """What a method does."""

    WELL = "well"
    SLOW = "slow"
    TOOL_ERROR = "tool_error"
    RAISES = "raises"
    HANGS = "hangs"
    IGNORES_CANCEL = "ignores_cancel"
    """Goes on for a while after its cancellation, then returns as if nothing had been."""
    RAISES_ON_CANCEL = "raises_on_cancel"
    CANCELS_ITSELF = "cancels_itself"
    EXITS = "exits"
    RETURNS_RUBBISH = "returns_rubbish"
    SPINS = "spins"
    """Only in a process of its own, as the next four."""
    DIES = "dies"
    KILLS_ITSELF = "kills_itself"
    FORKS = "forks"
    EATS_MEMORY = "eats_memory"


ANYWHERE = tuple(Behaviour)[:10]
IN_A_PROCESS = tuple(Behaviour)


@dataclass(frozen=True, slots=True)
class Event:
    """A method was entered, or came to its end."""

    verb: str
    instance_id: str
    ended: bool


class ScheduledTool(BaseTool):
    """config: name, slow_s, log_path (None keeps the events in memory)."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema or ToolSchema(function=FunctionSchema(name=config["name"])))
        self.events: list[Event] = []
        self._count = itertools.count()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        made = f"{instance_id}#{self.name}-{os.getpid()}-{next(self._count)}"
        return await self._do("create", made, kwargs.get("behave"), made)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        seen = kwargs.get("agent_data")
        answer = "done" if seen is None else f"done after {len(seen.messages)} messages"
        return await self._do("execute", instance_id, parameters.get("behave"), (answer, 1.0, {}))

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return await self._do("calc_reward", instance_id, kwargs.get("behave"), 0.5)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await self._do("release", instance_id, kwargs.get("behave"), None)

    async def _do(self, verb: str, instance_id: str, behave: str | None, result: Any) -> Any:
        self._note(Event(verb, instance_id, ended=False))
        answer = await _ACTS[Behaviour(behave or "well")](self.config["slow_s"])
        if answer is not None:
            return answer  # an instance that was given no name was not made
        self._note(Event(verb, instance_id, ended=True))
        return result

    def _note(self, event: Event) -> None:
        if path := self.config.get("log_path"):
            line = json.dumps([event.verb, event.instance_id, event.ended]) + "\n"
            with Path(path).open("ab", buffering=0) as file:
                file.write(line.encode())
        else:
            self.events.append(event)


async def _well(slow_s: float) -> None:
    await asyncio.sleep(0)


async def _slow(slow_s: float) -> None:
    await asyncio.sleep(slow_s)


async def _tool_error(slow_s: float) -> None:
    raise ToolError("not today")


async def _raises(slow_s: float) -> None:
    raise ValueError("a bug of the tool's")


async def _hangs(slow_s: float) -> None:
    await asyncio.Event().wait()


async def _ignores_cancel(slow_s: float) -> None:
    for _ in range(4):
        try:
            await asyncio.sleep(slow_s)
        except asyncio.CancelledError:
            continue


async def _raises_on_cancel(slow_s: float) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        raise RuntimeError("cleaning up failed") from None


async def _cancels_itself(slow_s: float) -> None:
    raise asyncio.CancelledError


async def _exits(slow_s: float) -> None:
    raise SystemExit(3)


async def _returns_rubbish(slow_s: float) -> Any:
    return object()


async def _spins(slow_s: float) -> None:
    while True:
        pass


async def _dies(slow_s: float) -> None:
    os._exit(7)


async def _kills_itself(slow_s: float) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def _forks(slow_s: float) -> None:
    _fork_for_ever()


def _fork_for_ever() -> None:
    while True:  # one after the other; the limit on processes ends it
        if os.fork() == 0:
            time.sleep(3600)
        time.sleep(0.002)


async def _eats_memory(slow_s: float) -> None:
    eaten = []
    while True:
        eaten.append(bytearray(8 << 20))


_ACTS = {
    Behaviour.WELL: _well,
    Behaviour.SLOW: _slow,
    Behaviour.TOOL_ERROR: _tool_error,
    Behaviour.RAISES: _raises,
    Behaviour.HANGS: _hangs,
    Behaviour.IGNORES_CANCEL: _ignores_cancel,
    Behaviour.RAISES_ON_CANCEL: _raises_on_cancel,
    Behaviour.CANCELS_ITSELF: _cancels_itself,
    Behaviour.EXITS: _exits,
    Behaviour.RETURNS_RUBBISH: _returns_rubbish,
    Behaviour.SPINS: _spins,
    Behaviour.DIES: _dies,
    Behaviour.KILLS_ITSELF: _kills_itself,
    Behaviour.FORKS: _forks,
    Behaviour.EATS_MEMORY: _eats_memory,
}
