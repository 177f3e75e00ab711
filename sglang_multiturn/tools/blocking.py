"""Coroutines of tools that hold up the event loop: who it is, since when, and an end to it where Python has one.

While a coroutine does not yield, no timer fires and no other conversation moves. A thread looks on: it says which call
it is and where it stands, and once the call's deadline has passed it raises `StepOverdue` inside the coroutine. That
ends a loop written in Python; a blocking call into C (`time.sleep`, a socket) it cannot reach until that returns.
Code that blocks belongs into `execution: thread` or `process`.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import threading
import time
import traceback
import types
from collections.abc import Coroutine, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang_multiturn.errors import ToolContractError

__all__ = ["StepOverdue", "ToolOverdueError", "stepped"]

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

WARN_AFTER_S = 1.0
_LOOK_EVERY_S = 0.25
_STACK_LINES = 6


class StepOverdue(BaseException):
    """Raised inside a tool's coroutine that has blocked the event loop beyond its deadline.

    A BaseException, so that a tool's `except Exception` does not keep it.
    """


class ToolOverdueError(TimeoutError):
    """A tool blocked the event loop beyond its deadline and was ended."""


@dataclass(slots=True)
class _Step:
    """A coroutine running from one `await` to the next."""

    what: str
    limit_s: float | None
    thread_id: int
    started: float
    warned: bool = False
    ended_by_watch: bool = False


class _Watch:
    """One thread for all event loops of this process, from the first call of a tool on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: dict[int, _Step] = {}
        self._thread: threading.Thread | None = None

    def enter(self, what: str, limit_s: float | None) -> _Step:
        step = _Step(what, limit_s, threading.get_ident(), time.monotonic())
        self._steps[step.thread_id] = step
        if self._thread is None:
            self._start()
        return step

    def leave(self, step: _Step) -> None:
        """After this the step is not interrupted any more; one that just was may still feel it in this very call."""
        with self._lock:
            self._steps.pop(step.thread_id, None)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._look_on, name="tool-loop-watch", daemon=True)
                self._thread.start()

    def _look_on(self) -> None:
        while True:
            time.sleep(_LOOK_EVERY_S)
            for step in list(self._steps.values()):
                self._look_at(step, time.monotonic() - step.started)

    def _look_at(self, step: _Step, blocked_s: float) -> None:
        if blocked_s >= WARN_AFTER_S and not step.warned:
            step.warned = True
            logger.warning(
                "%s has blocked the event loop for %.1f s, and every conversation of this process with it; set "
                "`execution: thread` or `process` for this tool. It stands at:\n%s",
                *(step.what, blocked_s, _where(step.thread_id)),
            )
        if step.limit_s is None or blocked_s < step.limit_s or step.ended_by_watch:
            return
        with self._lock:  # `leave` waits for this lock: what is raised is raised in this step or not at all
            if self._steps.get(step.thread_id) is step:
                step.ended_by_watch = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(step.thread_id), ctypes.py_object(StepOverdue)
                )


_WATCH = _Watch()


@types.coroutine
def stepped(coroutine: Coroutine[Any, Any, Result], what: str, limit_s: float | None) -> Generator[Any, Any, Result]:
    """Await a coroutine, every step of it under the watch.

    Args:
        coroutine: The tool's.
        what: Its name in messages.
        limit_s: Longest time that one step may block the event loop; None is for ever.

    Raises:
        StepOverdue: a step took longer and was ended.
        ToolContractError: the coroutine raised GeneratorExit, which only whoever closes a coroutine may.
    """
    value: Any = None
    error: BaseException | None = None
    while True:
        try:
            yielded = _one_step(coroutine, value, error, what, limit_s)
        except StopIteration as stop:
            result: Result = stop.value
            return result
        except GeneratorExit as raised:
            raise ToolContractError(f"{what} raised GeneratorExit: {raised}") from raised
        value = error = None
        try:
            value = yield yielded
        except GeneratorExit:
            coroutine.close()
            raise
        except BaseException as thrown:  # noqa: BLE001 - a cancellation too is the coroutine's to see
            error = thrown


def _one_step(
    coroutine: Coroutine[Any, Any, Any], value: Any, error: BaseException | None, what: str, limit_s: float | None
) -> Any:
    step = _WATCH.enter(what, limit_s)
    try:
        return coroutine.send(value) if error is None else coroutine.throw(error)
    finally:
        _WATCH.leave(step)
        if step.ended_by_watch:
            _feel_it()


def _feel_it() -> None:
    """Run until an exception that was raised from another thread has arrived here, or has arrived before."""
    for _ in range(1000):
        pass


def _where(thread_id: int) -> str:
    frame = sys._current_frames().get(thread_id)
    return "(gone)" if frame is None else "".join(traceback.format_stack(frame)[-_STACK_LINES:]).rstrip()
