"""What the tests of tool processes share: hosts of hostile tools, and proof that nothing is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
from tools.hostile import RUN_MARK

from sglang_multiturn.config import ToolSettings
from sglang_multiturn.tools.host import HostLeaks
from sglang_multiturn.tools.process.host import ProcessHost

_LOOKS, _LOOK_EVERY_S = 100, 0.05
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


def assert_left_as(before: dict[str, set[Any]]) -> None:
    """Nothing is held that was not before. What other tests' libraries open for a moment is given time to close."""
    for _ in range(_LOOKS):
        left = {what: found - before[what] for what, found in resources().items()}
        if not any(left.values()):
            return
        time.sleep(_LOOK_EVERY_S)
    raise AssertionError(f"left over: {left}")


def resources() -> dict[str, set[Any]]:
    """What this process holds of what could be forgotten."""
    return {
        "descriptors": open_files(),
        "tasks": asyncio.all_tasks() - {asyncio.current_task()},
        "threads": set(threading.enumerate()),
        "children": set(psutil.Process().children(recursive=True)),
        "marked": set(marked(RUN_MARK, os.environ[RUN_MARK])),
    }


def open_files() -> set[str]:
    """What this process has open, each by its number and what it leads to; sockets by how many there are.

    Ray, once it was in this process, closes a connection and opens another one whenever it likes.
    """
    found, sockets = set(), 0
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder itself, which was open for the listing
            leads_to = os.readlink(f"/proc/self/fd/{number}")
            if leads_to.startswith("socket:"):
                sockets += 1
            else:
                found.add(f"{number} {leads_to}")
    return found | {f"socket {n}" for n in range(sockets)}


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
