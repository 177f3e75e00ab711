"""Where a tool's methods run: the one seam between a conversation's use of a tool and the event loop, thread, process
or Ray node that its code runs in.

A host has no clock of its own. The caller puts its deadline around a call; when that cancels the call, the host sees to
it that nothing of it goes on, as far as the place allows: a process is killed with its children, a coroutine that
ignores its cancellation and a thread that blocks are left behind and counted (`num_left_behind`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_multiturn.tools.agent_data import AgentData

__all__ = ["MAX_SNAPSHOT_CHARS", "HostLeaks", "ToolHost", "ToolReply"]

MAX_SNAPSHOT_CHARS = 1024 * 1024
"""Of the JSON of one snapshot, which is ASCII: as many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReply:
    """What `execute` answered, whatever shape the tool's version gives it, as text and plain JSON."""

    text: str
    reward: float = 0.0
    metrics: dict[str, Any] = field(default_factory=dict)
    stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLeaks:
    """What a host still holds, or could not end. All 0 after every conversation has ended well."""

    live_instances: int = 0
    """Created and neither released nor lost with their process."""
    left_behind: int = 0
    """Calls that ignored their cancellation and still run: coroutines or threads."""
    live_processes: int = 0
    """Processes of instances that are still alive."""

    @classmethod
    def total(cls, leaks: Iterable[HostLeaks]) -> HostLeaks:
        """Of several hosts."""
        held = list(leaks)
        return cls(
            live_instances=sum(one.live_instances for one in held),
            left_behind=sum(one.left_behind for one in held),
            live_processes=sum(one.live_processes for one in held),
        )


class ToolHost(Protocol):
    """Runs one tool's methods.

    Every method may raise what the tool raised: ToolError; ToolContractError for what breaks the contract (a wrong
    return value, `SystemExit` and its like); ToolDiedError when the process died under the call. In this process any other
    Exception is passed on as it is; from another process it arrives as ToolRaisedError.
    `kwargs` are the row's own arguments for that method; how they are passed is the tool's signature's business.
    """

    async def start(self) -> None:
        """Make ready what all instances share, bounded by the host itself; nothing when that has been done.

        Raises:
            ConfigError: the tool's class cannot be made where it runs.
        """
        ...

    async def create(self, instance_id: str, kwargs: Mapping[str, Any]) -> str:
        """Make an instance; returns the id the tool chose, which the other methods take."""
        ...

    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        kwargs: Mapping[str, Any],
        agent_data: AgentData | None = None,
    ) -> ToolReply:
        """Answer one call. Another process gets a copy of `agent_data`, without its `extra_fields`."""
        ...

    async def calc_reward(self, instance_id: str, kwargs: Mapping[str, Any]) -> float:
        """Judge the conversation; always finite."""
        ...

    async def snapshot(self, instance_id: str) -> str:
        """What the instance remembers, as JSON of at most `MAX_SNAPSHOT_CHARS`; only of tools that keep snapshots.

        A cancelled call ends as others do, but the instance lives on.
        """
        ...

    async def restore(self, instance_id: str, state: str) -> None:
        """Give an instance that was just made what another one remembered: its `snapshot`, as it came."""
        ...

    async def release(self, instance_id: str, kwargs: Mapping[str, Any]) -> None:
        """Free the instance, whose process, if it has one, ends too. It is gone from here even when this raises."""
        ...

    def is_alive(self, instance_id: str) -> bool:
        """Whether the instance still exists: False once its process died, or was killed with a cancelled call."""
        ...

    async def look(self, instance_id: str) -> None:
        """Bring `is_alive` up to date, where it may be as old as the last answer. Raises nothing of the tool's."""
        ...

    def leaks(self) -> HostLeaks:
        """What is still held at this moment."""
        ...

    async def aclose(self) -> None:
        """End everything, whatever it is doing. No call may be in flight."""
        ...
