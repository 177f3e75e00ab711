"""Faults put into a tool's calls by configuration: what becomes of a run when search is slow, fails, or hangs?

What is drawn depends on the seed, the request and the call alone, so that a run can be repeated.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from sglang_multiturn.config import FaultConfig
from sglang_multiturn.errors import ToolError

__all__ = ["Fault", "FaultPlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What happens to one attempt of one call, before the tool is asked."""

    latency_s: float = 0.0
    error: bool = False
    hang: bool = False

    async def happen(self) -> None:
        """Wait, hang for ever, or raise ToolError; the caller's deadline ends a hang."""
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        if self.hang:
            await asyncio.Event().wait()
        if self.error:
            raise ToolError("the tool is not available (a fault injected by configuration)")


class FaultPlan:
    """The faults of one tool."""

    def __init__(self, config: FaultConfig, tool_name: str) -> None:
        self._config = config
        self._tool_name = tool_name

    def draw(self, request_id: str, call_id: str, attempt: int) -> Fault:
        """The fault of an attempt; the same one whenever it is asked for."""
        config = self._config
        chance = random.Random(f"{config.seed}/{self._tool_name}/{request_id}/{call_id}/{attempt}").random()
        return Fault(
            latency_s=config.latency_s,
            hang=chance < config.hang_rate,
            error=config.hang_rate <= chance < config.hang_rate + config.error_rate,
        )
