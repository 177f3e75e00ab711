"""The tool instances of one conversation: each made at most once, and released exactly once if it was made.

An instance that died with its process is lost: it needs no release, and the next call makes another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang_multiturn.metrics import RolloutMetrics
from sglang_multiturn.request import ErrorRecord, RequestSpec, ToolKwargs
from sglang_multiturn.tools.runtime import RunningTool

__all__ = ["Instance", "Instances", "to_its_end"]

logger = logging.getLogger(__name__)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One that was made."""

    tool: RunningTool
    instance_id: str
    row: ToolKwargs
    """The dataset row's own arguments for this tool."""
    per_call: str | None = None
    """The call it was made for, with `instance_scope: call`."""


class Instances:
    """Makes, finds and releases them."""

    def __init__(self, spec: RequestSpec, metrics: RolloutMetrics, *, release_timeout_s: float) -> None:
        self._spec = spec
        self._metrics = metrics
        self._release_timeout_s = release_timeout_s
        self._made: dict[tuple[str, str | None], Instance] = {}
        self._locks: dict[tuple[str, str | None], asyncio.Lock] = {}
        self.release_errors: dict[str, ErrorRecord] = {}
        """The first of each tool."""

    async def get(self, tool: RunningTool, per_call: str | None = None) -> Instance:
        """The conversation's instance of a tool, or the one of a call; made when there is none.

        Raises what `create` raises.
        """
        key = (tool.name, per_call)
        # Two calls of one turn may need the same instance: the second waits for the first one's `create`.
        async with self._locks.setdefault(key, asyncio.Lock()):
            self.forget_lost(tool)
            if key not in self._made:
                row = self._spec.tools_kwargs.get(tool.name, ToolKwargs())
                name = self._spec.request_id if per_call is None else f"{self._spec.request_id}-{per_call}"
                instance_id = await tool.host.create(name, row.create_kwargs)
                self._made[key] = Instance(tool=tool, instance_id=instance_id, row=row, per_call=per_call)
                self._metrics.tool_instances_created += 1
            return self._made[key]

    def kept(self) -> list[Instance]:
        """Those that live as long as the conversation, in the order in which they were made."""
        self._forget_all_lost()
        return [instance for instance in self._made.values() if instance.per_call is None]

    def forget_lost(self, tool: RunningTool) -> None:
        """Drop the tool's instances that died with their process."""
        for key, instance in list(self._made.items()):
            if instance.tool is tool and not tool.host.is_alive(instance.instance_id):
                del self._made[key]
                self._metrics.lost_instances += 1

    async def release(self, tool: RunningTool, per_call: str | None) -> None:
        """Release one, if it was made. Raises nothing of the tool's: what goes wrong is counted and logged."""
        self.forget_lost(tool)
        instance = self._made.pop((tool.name, per_call), None)
        if instance is not None:
            await self._release(instance)

    async def release_all(self) -> None:
        """Release all, each bounded in time, however often the caller is cancelled meanwhile."""
        await to_its_end(self._release_all())

    async def _release_all(self) -> None:
        self._forget_all_lost()
        made = list(self._made.values())
        self._made.clear()
        async with asyncio.TaskGroup() as group:
            for instance in made:
                group.create_task(self._release(instance))

    async def _release(self, instance: Instance) -> None:
        host, name = instance.tool.host, instance.tool.name
        try:
            async with asyncio.timeout(self._release_timeout_s) as clock:
                await host.release(instance.instance_id, instance.row.release_kwargs)
        except Exception as error:  # noqa: BLE001 - cleaning up must not end a conversation
            self._metrics.release_errors += 1
            said: Exception = error
            if clock.expired():
                said = TimeoutError(f"not done within {self._release_timeout_s:g} seconds")
            self.release_errors.setdefault(name, ErrorRecord.of(said))
            logger.warning("request %s: %s.release failed: %r", self._spec.request_id, name, said)
        self._metrics.tool_instances_released += 1

    def _forget_all_lost(self) -> None:
        for tool in {instance.tool.name: instance.tool for instance in self._made.values()}.values():
            self.forget_lost(tool)


async def to_its_end(work: Coroutine[Any, Any, Result]) -> Result:
    """Await work that must not be cut short. A cancellation is passed on when it is done."""
    task = asyncio.create_task(work)  # of its own, so that a cancellation of the caller does not reach it
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()
