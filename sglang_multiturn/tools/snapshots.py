"""What a conversation's tools remember, written down while it is suspended.

A tool may have `snapshot` and `restore`. Its instance is asked for a snapshot when the conversation is suspended, or, where
a call runs then, as soon as that has ended. Nobody waits for it but the next use of that instance. The last one is what an
instance begins with whose process died. Snapshots are kept in memory, and gone with the conversation.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

from sglang_multiturn.metrics import RolloutMetrics
from sglang_multiturn.tools.runtime import RunningTool

__all__ = ["Snapshots"]

logger = logging.getLogger(__name__)


class Snapshots:
    """One conversation's, of those of its tools that keep any: the last of each."""

    def __init__(
        self, request_id: str, metrics: RolloutMetrics, instance_of: Callable[[RunningTool], str | None]
    ) -> None:
        """`instance_of` finds the living instance that a tool has for the whole conversation, if it has one."""
        self._request_id = request_id
        self._metrics = metrics
        self._instance_of = instance_of
        self._last: dict[str, str] = {}
        """By tool, as JSON."""
        self._taking: dict[str, asyncio.Task[None]] = {}
        self._uses: collections.Counter[str] = collections.Counter()
        self._unused: set[str] = set()
        """Tools that were not used since their last snapshot."""
        self._unseen: set[str] = set()
        """Tools that were not used since the last suspension."""
        self._suspended = False
        self._closed = False

    def suspend(self, tools: Iterable[RunningTool]) -> None:
        """Begin to ask each of these tools, or once its calls have ended."""
        self._suspended = True
        for tool in tools:
            self._unseen.add(tool.name)
            self._take(tool)

    def resume(self) -> None:
        """The conversation goes on; snapshots that are being taken are finished all the same."""
        self._suspended = False

    def is_busy(self, tool: RunningTool) -> bool:
        """Whether the tool's instance is being asked at this moment."""
        return tool.name in self._taking

    @asynccontextmanager
    async def in_use(self, tool: RunningTool) -> AsyncIterator[None]:
        """While the tool's instance may be called; waits until it has given the snapshot that it was asked for."""
        if not tool.keeps_snapshots:
            yield
            return
        self._uses[tool.name] += 1
        try:
            if (taking := self._taking.get(tool.name)) is not None:
                await asyncio.wait({taking})
            self._unused.discard(tool.name)
            yield
        finally:
            self._uses[tool.name] -= 1
            if self._suspended:
                self._take(tool)

    def last(self, tool: RunningTool) -> str | None:
        """What an instance of this tool would begin with."""
        return self._last.get(tool.name)

    def names(self) -> tuple[str, ...]:
        """Tools that have one."""
        return tuple(self._last)

    def drop(self, tool: RunningTool) -> None:
        """Forget the last one: it cannot be used."""
        self._last.pop(tool.name, None)

    async def look(self, tool: RunningTool) -> None:
        """Before the first use after a suspension: have the host see whether the instance still lives, if it could be
        restored."""
        instance_id = self._instance_of(tool)
        if tool.name in self._unseen and tool.name in self._last and instance_id is not None:
            self._unseen.discard(tool.name)
            await tool.host.look(instance_id)

    async def close(self) -> None:
        """Ask for no more, and cancel what is being asked."""
        self._closed = True
        if taking := set(self._taking.values()):
            for task in taking:
                task.cancel()
            await asyncio.wait(taking)

    def _take(self, tool: RunningTool) -> None:
        name, instance_id = tool.name, self._instance_of(tool)
        if not tool.keeps_snapshots or instance_id is None or self._closed:
            return
        if self._uses[name] or name in self._taking or name in self._unused:
            return
        # A task of its own: the suspension does not wait for it. The next use of the instance does, or its release.
        task = asyncio.create_task(self._ask(tool, instance_id), name=f"{self._request_id}-{name}-snapshot")
        self._taking[name] = task
        task.add_done_callback(lambda _: self._taking.pop(name))

    async def _ask(self, tool: RunningTool, instance_id: str) -> None:
        try:
            async with asyncio.timeout(tool.timeout_s) as clock:
                self._last[tool.name] = await tool.host.snapshot(instance_id)
        except Exception as error:  # noqa: BLE001 - a conversation goes on without it
            said = TimeoutError(f"not done within {tool.timeout_s:g} seconds") if clock.expired() else error
            self._metrics.snapshot_errors += 1
            logger.warning("request %s: %s.snapshot failed: %r", self._request_id, tool.name, said)
        else:
            self._unused.add(tool.name)
            self._metrics.snapshots += 1
