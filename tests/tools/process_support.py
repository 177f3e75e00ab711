"""What the tests of tool processes share: hosts of hostile tools, and proof that nothing is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from tools.hostile import RUN_MARK

from sglang_multiturn.config import ToolSettings
from sglang_multiturn.tools.host import HostLeaks
from sglang_multiturn.tools.process.host import ProcessHost

PATIENCE_S = 30.0
"""Whatever does not hang comes within this time, on a busy machine too."""
NOTHING_HELD = HostLeaks()
os.environ[RUN_MARK] = f"3600.{secrets.randbelow(10**9):09d}"
"""Every process that these tests start inherits it; one that starts without environment has it as an argument."""


def make_host(
    tool: str = "HostileTool", config: dict[str, Any] | None = None, *, start_timeout_s: float = 60.0, **settings: Any
) -> ProcessHost:
    return ProcessHost(
        name="hostile",
        class_path=f"tools.hostile.{tool}",
        config=config or {},
        tool_schema=None,
        settings=ToolSettings(execution="process", **settings),
        start_timeout_s=start_timeout_s,
    )


@asynccontextmanager
async def opened(*args: Any, **settings: Any) -> AsyncIterator[ProcessHost]:
    """A host that holds nothing at the end, and leaves this process as it was."""
    before = resources()
    host = make_host(*args, **settings)
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield host
        assert host.leaks() == NOTHING_HELD
    finally:
        await host.aclose()
    assert_left_as(before)


def assert_left_as(before: dict[str, Any]) -> None:
    now = resources()
    changed = {what: (before[what], now[what]) for what in before if now[what] != before[what]}
    assert changed == {}, changed


def resources() -> dict[str, Any]:
    """What this process holds of what could be forgotten."""
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "tasks": asyncio.all_tasks() - {asyncio.current_task()},
        "threads": set(threading.enumerate()),
        "children": psutil.Process().children(recursive=True),
        "marked": marked(RUN_MARK, os.environ[RUN_MARK]),
    }


def marked(variable: str, value: str) -> list[psutil.Process]:
    """Living processes but this one that have this environment variable, or its value as an argument."""
    entry = f"{variable}={value}".encode()
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            arguments = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
            if process.pid != os.getpid() and (entry in environment or value.encode() in arguments):
                found.append(process)
    return found
