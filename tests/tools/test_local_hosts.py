"""Tools in this process that hold it up: what is ended, what is left behind, and what is said about it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from typing import Any

import pytest

from sglang_multiturn.errors import ToolDiedError
from sglang_multiturn.tools.blocking import ToolOverdueError
from sglang_multiturn.tools.host import HostLeaks, ToolHost
from sglang_multiturn.tools.local_hosts import MAX_LEFT_BEHIND, AsyncHost, ThreadHost

from support import RecordingTool


class Spinning(RecordingTool):
    """Blocks the event loop in Python for ever, and tries to keep whatever is raised in it."""

    async def answer(self, parameters: dict[str, Any]) -> Any:
        while True:
            try:
                for _ in range(1_000_000):
                    pass
            except Exception:  # noqa: BLE001 - what a careless tool does
                continue


class Sleeping(RecordingTool):
    """Blocks its thread until it is let go, as a call into C does."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    async def answer(self, parameters: dict[str, Any]) -> Any:
        self.let_go.wait()
        return "late", 0.0, {}


class Plain(RecordingTool):
    """A tool whose `execute` is no coroutine function."""

    def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
        return threading.current_thread().name, 0.0, {}


class LateCreate(RecordingTool):
    """Makes its instance although it was cancelled meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.started = asyncio.Event()
        self.released = asyncio.Event()

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        self.started.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "late"

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append(("release", instance_id, kwargs))
        self.released.set()


async def nothing_left_behind(host: ToolHost) -> None:
    """Wait until what was left behind has ended; a host tells nobody when that is."""
    async with asyncio.timeout(10):
        while host.leaks().left_behind:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_coroutine_that_spins_is_ended_at_its_deadline_and_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = AsyncHost(Spinning(), timeout_s=1.5)
    made = await host.create("r", {})
    with caplog.at_level(logging.WARNING), pytest.raises(ToolOverdueError, match=r"^echo\.execute blocked"):
        await host.execute(made, {}, {})
    (said,) = [record.getMessage() for record in caplog.records if record.name.endswith("tools.blocking")]
    assert said.startswith("echo.execute has blocked the event loop for 1.")
    assert "in answer" in said
    assert await host.calc_reward(made, {}) == 0.25
    await host.release(made, {})
    assert host.leaks() == HostLeaks()


async def test_a_method_that_is_no_coroutine_runs_in_a_thread() -> None:
    host = AsyncHost(Plain())
    assert (await host.execute("r", {}, {})).text == "echo.execute"


async def test_a_thread_that_blocks_is_left_behind_and_counted_until_it_ends() -> None:
    tool = Sleeping()
    host = ThreadHost(tool)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await host.execute("r", {}, {})
    assert host.leaks().left_behind == 1
    tool.let_go.set()
    await nothing_left_behind(host)
    assert host.leaks() == HostLeaks()


async def test_a_tool_whose_threads_hang_is_not_called_any_more() -> None:
    tool = Sleeping()
    host = ThreadHost(tool)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(host.execute("r", {}, {})) for _ in range(MAX_LEFT_BEHIND)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
    assert host.leaks().left_behind == MAX_LEFT_BEHIND
    with pytest.raises(ToolDiedError, match=r"^echo\.execute is not called: 64 earlier calls hang in threads"):
        await host.execute("r", {}, {})
    tool.let_go.set()
    await nothing_left_behind(host)


async def test_a_coroutine_in_a_thread_hears_its_cancellation() -> None:
    ended, began = threading.Event(), threading.Event()

    class Waiting(RecordingTool):
        async def answer(self, parameters: dict[str, Any]) -> Any:
            began.set()
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

    host = ThreadHost(Waiting())
    task = asyncio.create_task(host.execute("r", {}, {}))
    await asyncio.to_thread(began.wait)
    task.cancel()
    await asyncio.wait({task})
    assert await asyncio.to_thread(ended.wait, 10)


async def test_an_instance_that_is_made_after_its_caller_has_gone_is_released() -> None:
    tool = LateCreate()
    host = AsyncHost(tool)
    task = asyncio.create_task(host.create("r", {}))
    await tool.started.wait()
    task.cancel()
    await asyncio.wait({task})
    await tool.released.wait()
    assert tool.log == [("release", "late", {})]
    await nothing_left_behind(host)
    assert host.leaks() == HostLeaks()


async def test_an_instance_that_a_thread_makes_in_the_moment_of_the_cancellation_is_released() -> None:
    began, go_on = threading.Event(), threading.Event()

    class Threaded(RecordingTool):
        def create(self, instance_id: str | None = None, **kwargs: Any) -> str:  # type: ignore[override]
            began.set()
            go_on.wait()
            return "late"

    tool = Threaded()
    host = ThreadHost(tool)
    task = asyncio.create_task(host.create("r", {}))
    await asyncio.to_thread(began.wait)
    (thread,) = (one for one in threading.enumerate() if one.name == "echo.create")
    go_on.set()
    thread.join()  # which holds up the event loop: what the thread made is delivered next, and right after it ...
    asyncio.get_running_loop().call_soon(task.cancel)
    with pytest.raises(asyncio.CancelledError):
        await task
    await nothing_left_behind(host)
    assert tool.log == [("release", "late", {})]
    assert host.leaks() == HostLeaks()


async def test_a_step_within_its_limit_is_left_alone() -> None:
    class Busy(RecordingTool):
        async def answer(self, parameters: dict[str, Any]) -> Any:
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                pass
            return "done", 0.0, {}

    assert (await AsyncHost(Busy(), timeout_s=60).execute("r", {}, {})).text == "done"
