"""Tools in this process: on the event loop of all conversations, or each call in a thread of its own.

Neither can be killed here. A coroutine that ignores its cancellation and a thread that blocks are left behind: nobody
waits for them any more, they are counted, and what they return is thrown away.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from sglang_multiturn.errors import ToolContractError, ToolDiedError
from sglang_multiturn.tools.agent_data import AgentData
from sglang_multiturn.tools.base import Tool
from sglang_multiturn.tools.blocking import StepOverdue, ToolOverdueError, stepped
from sglang_multiturn.tools.host import HostLeaks, ToolReply
from sglang_multiturn.tools.results import snapshot_as_json, unpack_instance_id, unpack_number, unpack_reply
from sglang_multiturn.tools.signatures import Verb, call_kwargs, create_args

__all__ = ["AsyncHost", "ThreadHost"]

logger = logging.getLogger(__name__)

CANCEL_GRACE_S = 1.0
"""How long a cancelled call may take to clean up before it is left behind."""
MAX_LEFT_BEHIND = 64
"""Threads of one tool that may hang before no further call is made."""


class _LocalHost:
    """What both have in common: the tool object, its instances, and what was left behind."""

    def __init__(self, tool: Tool, *, timeout_s: float | None = None) -> None:
        """`timeout_s` is the longest time that one step of a coroutine may block an event loop."""
        self._tool = tool
        self._timeout_s = timeout_s
        self._instances: set[str] = set()
        self._left_behind: set[object] = set()

    async def start(self) -> None:
        """The tool was made with the registry."""

    async def create(self, instance_id: str, kwargs: Mapping[str, Any]) -> str:
        named = create_args(self._tool.create, instance_id)
        created = await self._call("create", kwargs, *named, late=self._release_late)
        made = unpack_instance_id(created, f"{self._tool.name}.create")
        self._instances.add(made)
        return made

    async def execute(
        self,
        instance_id: str,
        parameters: dict[str, Any],
        kwargs: Mapping[str, Any],
        agent_data: AgentData | None = None,
    ) -> ToolReply:
        result = await self._call("execute", kwargs, instance_id, parameters, agent_data=agent_data)
        return unpack_reply(result, f"{self._tool.name}.execute")

    async def calc_reward(self, instance_id: str, kwargs: Mapping[str, Any]) -> float:
        return unpack_number(await self._call("calc_reward", kwargs, instance_id), f"{self._tool.name}.calc_reward")

    async def snapshot(self, instance_id: str) -> str:
        return snapshot_as_json(await self._call("snapshot", {}, instance_id), f"{self._tool.name}.snapshot")

    async def restore(self, instance_id: str, state: str) -> None:
        await self._call("restore", {}, instance_id, json.loads(state))

    async def release(self, instance_id: str, kwargs: Mapping[str, Any]) -> None:
        self._instances.discard(instance_id)
        await self._call("release", kwargs, instance_id)

    def is_alive(self, instance_id: str) -> bool:
        return instance_id in self._instances

    async def look(self, instance_id: str) -> None:
        """Nothing is ever lost here."""

    def leaks(self) -> HostLeaks:
        return HostLeaks(live_instances=len(self._instances), left_behind=len(self._left_behind))

    async def aclose(self) -> None:
        """What was left behind cannot be ended; `leaks` tells of it."""

    async def _call(
        self,
        verb: Verb,
        kwargs: Mapping[str, Any],
        *args: Any,
        agent_data: AgentData | None = None,
        late: Callable[[Any], None] = lambda _: None,
    ) -> Any:
        """`late` gets what a cancelled call returns nevertheless."""
        method = getattr(self._tool, verb)
        given = call_kwargs(method, verb, kwargs, agent_data)
        return await self._run(functools.partial(method, *args, **given), f"{self._tool.name}.{verb}", late)

    async def _run(self, call: Callable[[], Any], what: str, late: Callable[[Any], None]) -> Any:
        raise NotImplementedError

    def _release_late(self, created: Any) -> None:
        """An instance that was made after its caller had gone: nobody else will release it."""
        with contextlib.suppress(ToolContractError):
            instance_id = unpack_instance_id(created, f"{self._tool.name}.create")
            task = asyncio.get_running_loop().create_task(self._call("release", {}, instance_id))
            self._left_behind.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._left_behind.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.debug("%s raised after its cancellation: %r", task.get_name(), error)


class AsyncHost(_LocalHost):
    """Coroutines on the running event loop; a method that is no coroutine function runs in a thread."""

    async def _run(self, call: Callable[[], Any], what: str, late: Callable[[Any], None]) -> Any:
        if not inspect.iscoroutinefunction(getattr(call, "func", call)):
            return await _in_thread(call, what, self._left_behind, late=late)
        # A task of its own: a tool may ignore its cancellation, and its caller must not wait for that.
        task = asyncio.create_task(_contained(stepped(call(), what, self._timeout_s), what), name=what)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            self._left_behind.add(task)
            task.add_done_callback(self._forget)
            task.add_done_callback(lambda done: _pass_on(done, late))
            await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
            raise
        return task.result()


class ThreadHost(_LocalHost):
    """Each call in a thread of its own; a coroutine runs there on an event loop of its own.

    Objects that belong to an event loop (an HTTP session, a lock) must therefore be made and used within one call.
    """

    async def _run(self, call: Callable[[], Any], what: str, late: Callable[[Any], None]) -> Any:
        own = _OwnLoop()
        work = functools.partial(own.run, call, what)
        return await _in_thread(work, what, self._left_behind, cancel=own.cancel, late=late)


class _OwnLoop:
    """One call in its thread, with an event loop of its own if it is a coroutine."""

    def __init__(self) -> None:
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def run(self, call: Callable[[], Any], what: str) -> Any:
        result = call()
        return asyncio.run(self._await(result, what)) if inspect.isawaitable(result) else result

    def cancel(self) -> None:
        """Ask the coroutine to end, from another thread; one that blocks does not hear it."""
        if self._running is not None:
            loop, task = self._running
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended
                loop.call_soon_threadsafe(task.cancel)

    async def _await(self, result: Awaitable[Any], what: str) -> Any:
        task = asyncio.current_task()
        assert task is not None
        self._running = asyncio.get_running_loop(), task
        return await _contained(result, what)


def _pass_on(done: asyncio.Task[Any], late: Callable[[Any], None]) -> None:
    if not done.cancelled() and done.exception() is None:
        late(done.result())


async def _in_thread(
    call: Callable[[], Any],
    what: str,
    left_behind: set[object],
    *,
    cancel: Callable[[], None] = lambda: None,
    late: Callable[[Any], None] = lambda _: None,
) -> Any:
    """Run a blocking call in a daemon thread, which unlike an executor's neither limits others nor holds up the exit.

    Raises:
        ToolDiedError: too many of the tool's threads hang already.
    """
    if len(left_behind) >= MAX_LEFT_BEHIND:
        raise ToolDiedError(
            f"{what} is not called: {len(left_behind)} earlier calls hang in threads, which cannot be ended; set "
            "`execution: process` for this tool"
        )
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def deliver(result: Any, error: Exception | None) -> None:
        left_behind.discard(future)
        if not future.cancelled():
            future.set_exception(error) if error is not None else future.set_result(result)
        elif error is None:
            late(result)

    def work() -> None:
        result: Any = None
        error: Exception | None = None
        try:
            result = call()
        except BaseException as raised:  # noqa: BLE001 - sys.exit in a tool must not end this thread without a word
            error = _broken_contract(raised, what)
            if isinstance(raised, Exception) and not isinstance(raised, StopIteration):  # a future takes no other
                error = raised
        with contextlib.suppress(RuntimeError):  # the event loop was closed meanwhile
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=work, name=what, daemon=True).start()
    try:
        result = await future
    except asyncio.CancelledError:
        if future.cancelled():
            left_behind.add(future)
            cancel()
        elif future.exception() is None:  # it came in the very moment of the cancellation
            late(future.result())
        raise
    return await _contained(result, what) if inspect.isawaitable(result) else result


async def _contained(call: Awaitable[Any], what: str) -> Any:
    """Await a tool's coroutine; whatever it raises leaves as an error that the event loop survives.

    Raises:
        ToolOverdueError: it blocked the event loop beyond its deadline and was ended.
        ToolContractError: it raised SystemExit or the like, which would take the whole event loop along.
    """
    try:
        return await call
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling() == 0:
            raise ToolContractError(f"{what} raised CancelledError though nobody cancelled it") from error
        raise
    except (Exception, GeneratorExit):
        raise
    except StepOverdue:
        raise ToolOverdueError(f"{what} blocked the event loop beyond its deadline and was ended") from None
    except BaseException as error:
        raise _broken_contract(error, what) from error


def _broken_contract(error: BaseException, what: str) -> ToolContractError:
    broken = ToolContractError(f"{what} raised {type(error).__name__}: {error}")
    broken.__cause__ = error
    return broken
