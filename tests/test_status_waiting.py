"""What a conversation says it waits for, and which tools it holds, while its tools are at work."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from sglang_multiturn import RolloutConfig, ScriptedEngine, ToolError, ToolRegistry
from sglang_multiturn.config import ToolSettings
from sglang_multiturn.conversation.context import RolloutContext
from sglang_multiturn.request import RequestState
from sglang_multiturn.rollout import Rollout
from sglang_multiturn.tools.activity import tools_held

from support import TEMPLATE, RecordingTool, call, context, spec


class Stopping(RecordingTool):
    """Each of its methods comes to a stop, says so, and goes on when it is told to."""

    def __init__(self, *verbs: str, errors: int = 0) -> None:
        super().__init__()
        self._verbs = verbs
        self._errors = errors
        self.stopped: asyncio.Queue[str] = asyncio.Queue()
        self.goes_on = asyncio.Semaphore(0)

    async def _stop(self, verb: str) -> None:
        if verb in self._verbs:
            self.stopped.put_nowait(verb)
            await self.goes_on.acquire()

    async def create(self, *args: Any, **kwargs: Any) -> Any:
        await self._stop("create")
        return await super().create(*args, **kwargs)

    async def answer(self, parameters: dict[str, Any]) -> Any:
        await self._stop("execute")
        self._errors -= 1
        if self._errors >= 0:
            raise ToolError("busy")
        return "served", 0.0, {}

    async def calc_reward(self, *args: Any, **kwargs: Any) -> float:
        await self._stop("calc_reward")
        return await super().calc_reward(*args, **kwargs)

    async def release(self, *args: Any, **kwargs: Any) -> None:
        await self._stop("release")
        await super().release(*args, **kwargs)


@asynccontextmanager
async def rolling(
    tool: RecordingTool, turns: Sequence[str], settings: dict[str, Any] | None = None, reward_fn: Any = None
) -> AsyncIterator[Rollout]:
    """A conversation that runs; it is ended at the end if it has not."""
    async with ScriptedEngine.playing(TEMPLATE, {"r": turns}) as engine:
        given = context(engine, [tool], RolloutConfig(tool_timeout_s=None), reward_fn)
        registry = ToolRegistry([tool], settings={tool.name: ToolSettings(**settings or {})})
        shared = RolloutContext(
            generator=engine,
            template=TEMPLATE,
            tools=registry,
            parser=given.parser,
            config=given.config,
            max_model_len=given.max_model_len,
            reward_fn=reward_fn,
        )
        rollout = Rollout(spec(), shared)
        running = asyncio.create_task(rollout.run())
        try:
            async with asyncio.timeout(60):
                yield rollout
                await running
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running


async def until(condition: Callable[[], bool]) -> None:
    """What has been set going comes about within these turns of the event loop."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come about")


async def test_only_calls_that_have_not_answered_are_waited_for() -> None:
    tool = Stopping("execute")
    async with rolling(tool, [call("echo") * 3 + call("nobody"), "done"]) as rollout:
        for _ in range(3):
            await tool.stopped.get()
        request = rollout.request
        assert request.waiting_for == "tool echo (3 of 4 calls)"  # the fourth was refused
        first_s, all_run_s = request.waiting_since_s, time.time()
        tool.goes_on.release()
        await until(lambda: request.waiting_for == "tool echo (2 of 4 calls)")
        assert first_s <= request.waiting_since_s <= all_run_s  # since when the second is waited for
        assert tools_held(request) == ("echo",)
        tool.goes_on.release()
        tool.goes_on.release()
    assert tools_held(request) == ()


async def test_one_call_is_named_without_numbers() -> None:
    tool = Stopping("execute")
    async with rolling(tool, [call("echo"), "done"]) as rollout:
        await tool.stopped.get()
        assert rollout.request.waiting_for == "tool echo"
        tool.goes_on.release()


async def test_a_call_that_its_limits_hold_back_waits_for_a_place() -> None:
    tool = Stopping("execute")
    async with rolling(tool, [call("echo") * 3, "done"], {"max_concurrent": 1}) as rollout:
        await tool.stopped.get()
        assert rollout.request.waiting_for == "tool echo, a place for tool echo ×2 (3 of 3 calls)"
        tool.goes_on.release()
        await tool.stopped.get()
        assert rollout.request.waiting_for == "tool echo, a place for tool echo (2 of 3 calls)"
        tool.goes_on.release()
        tool.goes_on.release()


async def test_a_retry_says_which_one_it_is() -> None:
    tool = Stopping("execute", errors=1)
    async with rolling(tool, [call("echo"), "done"], {"retries": 2, "retry_backoff_s": 0.0}) as rollout:
        await tool.stopped.get()
        tool.goes_on.release()
        await tool.stopped.get()
        assert rollout.request.waiting_for == "tool echo, attempt 2 of 3"
        tool.goes_on.release()


async def test_what_is_waited_for_before_between_and_after_the_calls() -> None:
    tool = Stopping("create", "calc_reward", "release")
    scored = asyncio.Event()

    async def score(**_: Any) -> float:
        scored.set()
        await tool.goes_on.acquire()
        return 1.0

    async with rolling(tool, [call("echo"), "done"], reward_fn=score) as rollout:
        request = rollout.request
        seen = []
        for _ in range(2):
            seen.append((await tool.stopped.get(), request.waiting_for, tools_held(request)))
            tool.goes_on.release()
        await scored.wait()
        seen.append(("score", request.waiting_for, tools_held(request)))
        tool.goes_on.release()
        seen.append((await tool.stopped.get(), request.waiting_for, tools_held(request)))
        tool.goes_on.release()
    assert seen == [
        ("create", "tool echo to be created", ()),
        ("calc_reward", "calc_reward of tool echo", ("echo",)),
        ("score", "its rewards", ("echo",)),
        ("release", "tool echo to be released", ("echo",)),
    ]
    assert tools_held(request) == ()


async def test_an_instance_of_a_call_is_held_as_long_as_the_call() -> None:
    tool = Stopping("execute", "release")
    async with rolling(tool, [call("echo") * 2, "done"], {"instance_scope": "call"}) as rollout:
        await tool.stopped.get()
        await tool.stopped.get()
        assert tools_held(rollout.request) == ("echo", "echo")
        tool.goes_on.release()
        assert await tool.stopped.get() == "release"
        assert rollout.request.waiting_for == "tool echo to be released, tool echo (2 of 2 calls)"
        tool.goes_on.release()  # the other call, which waits longer
        assert await tool.stopped.get() == "release"
        assert rollout.request.waiting_for == "tool echo to be released (2 of 2 calls)"
        tool.goes_on.release()
        await until(lambda: tools_held(rollout.request) == ("echo",))
        tool.goes_on.release()


async def test_a_suspended_conversation_says_whether_its_tool_still_works() -> None:
    tool = Stopping("execute")
    async with rolling(tool, [call("echo"), "done"]) as rollout:
        await tool.stopped.get()
        await rollout.suspend()
        request = rollout.request
        assert (request.state, request.suspended_in) == (RequestState.SUSPENDED, RequestState.TOOL_CALLING)
        assert request.waiting_for == "tool echo"
        tool.goes_on.release()
        await until(lambda: request.waiting_for == "")
        assert request.state is RequestState.SUSPENDED
        rollout.resume()


async def test_an_aborted_conversation_holds_nothing() -> None:
    tool = Stopping("execute")
    async with rolling(tool, [call("echo"), "done"]) as rollout:
        await tool.stopped.get()
        assert tools_held(rollout.request) == ("echo",)
        rollout.abort()
    assert tools_held(rollout.request) == ()
