"""The tool instances of one conversation: each made at most once, and released exactly once if it was made.

An instance that died with its process is lost: it needs no release, and the next call makes another, which begins with
the last snapshot where there is one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang_multiturn.errors import ToolDiedError
from sglang_multiturn.metrics import RolloutMetrics
from sglang_multiturn.request import ErrorRecord, RequestSpec, ToolKwargs
from sglang_multiturn.schemas import plain_text
from sglang_multiturn.tools.runtime import RunningTool
from sglang_multiturn.tools.snapshots import Snapshots

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
        self._snapshots = Snapshots(spec.request_id, metrics, self._living)
        self.release_errors: dict[str, ErrorRecord] = {}
        """The first of each tool."""

    async def get(self, tool: RunningTool, per_call: str | None = None) -> Instance:
        """The conversation's instance of a tool, or the one of a call; made when there is none.

        Raises what `create` raises.
        """
        key = (tool.name, per_call)
        # Two calls of one turn may need the same instance: the second waits for the first one's `create`.
        async with self._locks.setdefault(key, asyncio.Lock()):
            await self._snapshots.look(tool)
            self.forget_lost(tool)
            if key not in self._made:
                row = self._spec.tools_kwargs.get(tool.name, ToolKwargs())
                instance_id = await self._create(tool, self._asked_id(per_call), row)
                self._made[key] = Instance(tool=tool, instance_id=instance_id, row=row, per_call=per_call)
                self._metrics.tool_instances_created += 1
                if per_call is None:
                    await self._restore(self._made[key])
            return self._made[key]

    def in_use(self, tool: RunningTool) -> AbstractAsyncContextManager[None]:
        """While the conversation's instance of a tool may be called; entered when no snapshot is being taken of it."""
        return self._snapshots.in_use(tool)

    def gives_snapshot(self, tool: RunningTool) -> bool:
        """Whether a snapshot is being taken of the conversation's instance."""
        return self._snapshots.is_busy(tool)

    def can_restore(self, tool: RunningTool) -> bool:
        """Whether the conversation's instance, if it is lost, can go on from a snapshot."""
        return self._snapshots.last(tool) is not None

    def restorable(self) -> tuple[str, ...]:
        """Names of the tools of which that is true."""
        return self._snapshots.names()

    def suspend(self) -> None:
        """Begin to take snapshots of those that are kept for the conversation."""
        self._snapshots.suspend([instance.tool for instance in self.kept()])

    def resume(self) -> None:
        """Take no more snapshots."""
        self._snapshots.resume()

    async def _create(self, tool: RunningTool, asked_id: str, row: ToolKwargs) -> str:
        if (marks := tool.marks) is None:
            return await tool.host.create(asked_id, row.create_kwargs)
        marks.making(self._spec.request_id, tool.name, asked_id)
        try:
            instance_id = await tool.host.create(asked_id, row.create_kwargs)
        except BaseException:
            marks.gone(self._spec.request_id, tool.name, asked_id)
            raise
        if instance_id != asked_id:
            marks.made(self._spec.request_id, tool.name, asked_id, instance_id)
        return instance_id

    async def _restore(self, made: Instance) -> None:
        """Let a new instance begin with the last snapshot, if there is one. Raises ToolDiedError when it cannot."""
        tool = made.tool
        if (state := self._snapshots.last(tool)) is None:
            return
        try:
            await tool.host.restore(made.instance_id, state)
        except BaseException as error:
            self._snapshots.drop(tool)
            self._metrics.snapshot_errors += 1
            logger.warning("request %s: %s.restore failed: %r", self._spec.request_id, tool.name, error)
            await to_its_end(self.release(tool, None))
            if not isinstance(error, Exception):
                raise
            said = plain_text(f"{type(error).__name__}: {error}")
            raise ToolDiedError(f"its process has ended, and its last snapshot cannot be restored ({said})") from error
        self._metrics.restored_instances += 1

    def _living(self, tool: RunningTool) -> str | None:
        """The id of the conversation's instance of a tool."""
        made = self._made.get((tool.name, None))
        return made.instance_id if made is not None and tool.host.is_alive(made.instance_id) else None

    def _asked_id(self, per_call: str | None) -> str:
        return self._spec.request_id if per_call is None else f"{self._spec.request_id}-{per_call}"

    def _mark_gone(self, instance: Instance) -> None:
        if instance.tool.marks is not None:
            instance.tool.marks.gone(self._spec.request_id, instance.tool.name, self._asked_id(instance.per_call))

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
                self._mark_gone(instance)

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
        await self._snapshots.close()
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
        self._mark_gone(instance)

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
