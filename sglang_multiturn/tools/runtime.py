"""The tools of a run as they are used: for each a host, its limits, its deadline and its faults.

One runtime serves all conversations of a worker process. Hosts are made at their first use, and closed with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from sglang_multiturn.config import RolloutConfig, ToolSettings
from sglang_multiturn.tools.faults import FaultPlan
from sglang_multiturn.tools.host import HostLeaks, ToolHost
from sglang_multiturn.tools.limits import Limiter
from sglang_multiturn.tools.local_hosts import AsyncHost, ThreadHost
from sglang_multiturn.tools.marks import InstanceMarks
from sglang_multiturn.tools.ray.limits import make_limiter
from sglang_multiturn.tools.registry import ToolEntry, ToolRegistry

__all__ = ["RunningTool", "ToolRuntime"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningTool:
    """One tool as conversations use it."""

    name: str
    host: ToolHost
    limiter: Limiter
    settings: ToolSettings
    timeout_s: float | None
    """One create, execute, calc_reward or snapshot."""
    faults: FaultPlan | None
    marks: InstanceMarks | None = None
    keeps_snapshots: bool = False


class ToolRuntime:
    """`async with ToolRuntime(registry, config) as runtime`: what is still alive at the end is ended then."""

    def __init__(
        self,
        registry: ToolRegistry,
        config: RolloutConfig | None = None,
        *,
        run_id: str = "run",
        marks: InstanceMarks | None = None,
    ) -> None:
        """Run the tools of `registry`.

        Args:
            registry: what there is.
            config: deadlines of tools that have none of their own.
            run_id: names the run in a Ray cluster, where its limits and Ray tools are shared by all its workers.
            marks: is told of every instance that is made and gone.
        """
        self.registry = registry
        self._config = config or RolloutConfig()
        self._run_id = run_id
        self._marks = marks
        self._tools: dict[str, RunningTool] = {}
        self._reported: Mapping[str, HostLeaks] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def tool(self, name: str) -> RunningTool:
        """The tool of that name, which the registry must have."""
        if name not in self._tools:
            entry = self.registry.entry(name)
            settings = entry.settings
            timeout_s = settings.timeout_s if settings.timeout_s is not None else self._config.tool_timeout_s
            self._tools[name] = RunningTool(
                name=name,
                host=make_host(entry, timeout_s, self._run_id),
                limiter=make_limiter(name, settings, run_id=self._run_id),
                settings=settings,
                timeout_s=timeout_s,
                faults=None if settings.faults is None else FaultPlan(settings.faults, name),
                marks=self._marks,
                keeps_snapshots=entry.keeps_snapshots,
            )
        return self._tools[name]

    def leaks(self) -> Mapping[str, HostLeaks]:
        """What each tool still holds, for those that hold anything."""
        held = {name: tool.host.leaks() for name, tool in self._tools.items()}
        return {name: leaks for name, leaks in held.items() if leaks != HostLeaks()}

    def report_leaks(self) -> None:
        """Say in the log what is still held, now that no conversation runs; once, until it changes."""
        leaks = self.leaks()
        if leaks and leaks != self._reported:
            logger.warning("tools hold more than they should after a batch: %s", "; ".join(map(_said, leaks.items())))
        self._reported = leaks

    async def aclose(self) -> None:
        """End every host. No conversation may be running."""
        async with asyncio.TaskGroup() as group:
            for tool in self._tools.values():
                group.create_task(tool.host.aclose())
        self._tools.clear()


def _said(leak: tuple[str, HostLeaks]) -> str:
    name, held = leak
    return (
        f"{name}: {held.live_instances} instances not released, {held.left_behind} calls left behind, "
        f"{held.live_processes} processes alive"
    )


def make_host(entry: ToolEntry, timeout_s: float | None, run_id: str) -> ToolHost:
    """The host that `execution` names."""
    if entry.tool is not None:
        local = ThreadHost if entry.settings.execution == "thread" else AsyncHost
        return local(entry.tool, timeout_s=timeout_s)
    assert entry.source is not None  # an entry without a tool says where its class is
    where: dict[str, Any] = {
        "name": entry.name,
        "class_path": entry.source.class_path,
        "config": entry.source.config,
        "tool_schema": entry.schema,
        "settings": entry.settings,
    }
    if entry.settings.execution == "ray":
        from sglang_multiturn.tools.ray.host import RayHost

        return RayHost(run_id=run_id, **where)
    from sglang_multiturn.tools.process.host import ProcessHost

    return ProcessHost(**where)
