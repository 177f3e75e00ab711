"""verl's rollout tracing (`rollout.trace.backend`: weave, mlflow, trackio) of what tools are asked.

verl traces a conversation where its loop has `@rollout_trace_op` (`agent_loop.run` has), and each generation by itself
(`LLMServerClient.generate`). A tool's own `execute` may run in another process, so its calls are traced here. Without a
backend nothing of this is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from verl.utils.rollout_trace import RolloutTraceConfig, rollout_trace_op

from sglang_multiturn.tools.agent_data import AgentData
from sglang_multiturn.tools.host import HostLeaks, ToolHost, ToolReply
from sglang_multiturn.tools.runtime import RunningTool, ToolRuntime


def is_traced() -> bool:
    """Whether verl traces rollouts in this process; known once its worker has been made."""
    return RolloutTraceConfig.get_backend() is not None


class TracedRuntime(ToolRuntime):
    """A runtime whose tools' calls verl traces."""

    def tool(self, name: str) -> RunningTool:
        """The tool of that name, which the registry must have."""
        if name not in self._tools:
            tool = super().tool(name)
            self._tools[name] = dataclasses.replace(tool, host=TracedHost(name, tool.host))
        return self._tools[name]


class TracedHost:
    """A tool's host; verl is told of each `execute`."""

    def __init__(self, name: str, host: ToolHost) -> None:
        self._name = name
        self._host = host

    async def start(self) -> None:
        """As the host does."""
        await self._host.start()

    async def create(self, instance_id: str, kwargs: Mapping[str, Any]) -> str:
        """As the host does."""
        return await self._host.create(instance_id, kwargs)

    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        kwargs: Mapping[str, Any],
        agent_data: AgentData | None = None,
    ) -> ToolReply:
        """As the host does, under verl's tracing."""
        call = _ToolCall(lambda: self._host.execute(instance_id, parameters, kwargs, agent_data))
        await call.execute(tool=self._name, parameters=parameters)
        assert call.reply is not None  # else `execute` has raised
        return call.reply

    async def calc_reward(self, instance_id: str, kwargs: Mapping[str, Any]) -> float:
        """As the host does."""
        return await self._host.calc_reward(instance_id, kwargs)

    async def snapshot(self, instance_id: str) -> str:
        """As the host does."""
        return await self._host.snapshot(instance_id)

    async def restore(self, instance_id: str, state: str) -> None:
        """As the host does."""
        await self._host.restore(instance_id, state)

    async def look(self, instance_id: str) -> None:
        """As the host does."""
        await self._host.look(instance_id)

    async def release(self, instance_id: str, kwargs: Mapping[str, Any]) -> None:
        """As the host does."""
        await self._host.release(instance_id, kwargs)

    def is_alive(self, instance_id: str) -> bool:
        """As the host does."""
        return self._host.is_alive(instance_id)

    def leaks(self) -> HostLeaks:
        """As the host does."""
        return self._host.leaks()

    async def aclose(self) -> None:
        """As the host does."""
        await self._host.aclose()


class _ToolCall:
    """One call: what is traced of it is plain JSON, and its name, of all arguments, holds no conversation."""

    def __init__(self, asked: Callable[[], Awaitable[ToolReply]]) -> None:
        self._asked = asked
        self.reply: ToolReply | None = None

    @rollout_trace_op  # type: ignore[untyped-decorator]
    async def execute(self, tool: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self.reply = await self._asked()
        return dataclasses.asdict(self.reply)
