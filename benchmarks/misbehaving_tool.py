"""A tool that naps, and on request does the four things that no tool should: for `hostile_tools.py`."""

from __future__ import annotations

import asyncio
import collections
import os
import time
from typing import Any

from sglang_multiturn import BaseTool
from sglang_multiturn.schemas import FunctionSchema, ToolSchema

FORKS, MEGABYTES = 500, 4096
"""Where it would stop by itself, so that a host without limits does not take the machine along."""


class MisbehavingTool(BaseTool):
    """Its answer counts the calls of its conversation."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self._calls: collections.Counter[str] = collections.Counter()

    @classmethod
    def default_schema(cls) -> ToolSchema:
        what = {"type": "string", "enum": ["nap", "hang", "spin", "fork", "allocate"]}
        parameters = {"type": "object", "properties": {"what": what}, "required": ["what"]}
        return ToolSchema(function=FunctionSchema(name="do", description="Does something.", parameters=parameters))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self._calls[instance_id] += 1
        match parameters["what"]:
            case "nap":
                await asyncio.sleep(self.config["nap_s"])
            case "hang":
                sleep_for_ever()
            case "spin":
                while True:
                    pass
            case "fork":
                fork_children()
            case "allocate":
                allocate()
        return f"call {self._calls[instance_id]} is done", 0.0, {}


def sleep_for_ever() -> None:
    while True:
        time.sleep(3600)


def fork_children() -> None:
    """One after the other, each of which stays."""
    for _ in range(FORKS):
        if os.fork() == 0:
            sleep_for_ever()
    sleep_for_ever()


def allocate() -> None:
    """A megabyte after the other, written to."""
    _kept = [b"\1" * (1 << 20) for _ in range(MEGABYTES)]
    sleep_for_ever()
