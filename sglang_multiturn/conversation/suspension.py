"""Whether a conversation may go on: the gate it passes before every step, and the clock that stands still meanwhile.

Suspending closes the gate and ends the generation in flight; what it sampled is kept, and the turn goes on from there
once the gate opens. Tools are not stopped: a call that runs goes on, and its answer waits at the gate. While a whole
engine is paused, the clock of who waits for it stands still as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager


class Gate:
    """One conversation's. Open at first."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._over = False
        self.closings = 0
        """How often it was closed: tells a generation that was in flight whether someone suspended it."""

    @property
    def is_closed(self) -> bool:
        """Whether the conversation is suspended."""
        return not self._open.is_set()

    @property
    def may_generate(self) -> bool:
        """Whether a generation that has not reached the engine yet should still go there."""
        return self._open.is_set() and not self._over

    def close(self) -> None:
        """Let nothing pass any more."""
        self._open.clear()
        self.closings += 1

    def open(self) -> None:
        """Let the conversation go on."""
        self._open.set()

    def end(self) -> None:
        """The conversation is ending: nothing more of it is to reach the engine."""
        self._over = True

    async def passed(self) -> None:
        """Wait until the gate is open."""
        while not self._open.is_set():  # it may have been closed again before this task came to run
            await self._open.wait()

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """While something of the conversation may be in the engine."""
        self._idle.clear()
        try:
            yield
        finally:
            self._idle.set()

    async def idle(self) -> None:
        """Wait until nothing of the conversation is in the engine."""
        await self._idle.wait()


class Clock:
    """The time one conversation has. It can be stopped and go on, and be made to run out."""

    def __init__(self, limit_s: float | None) -> None:
        self._left_s = limit_s
        self._stops = 0
        """Who has stopped it and not let it go on yet: it may be suspended while the engine is paused."""
        self._is_up = False
        self._timeout: asyncio.Timeout | None = None
        self.has_expired = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Give the body the time that is left. Raises TimeoutError when it runs out."""
        timeout = self._timeout = asyncio.timeout(None)
        try:
            async with timeout:
                self._schedule()
                yield
        finally:
            self.has_expired = timeout.expired()
            self._timeout = None

    def stop(self) -> None:
        """Stand still, until each `stop` was followed by a `go_on`."""
        self._stops += 1
        if self._stops > 1 or self._is_up:
            return
        if self._timeout is not None and (when := self._timeout.when()) is not None:
            self._left_s = max(0.0, when - asyncio.get_running_loop().time())
            self._timeout.reschedule(None)

    def go_on(self) -> None:
        """Run again, with the time that was left."""
        self._stops -= 1
        self._schedule()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stand still in the body."""
        self.stop()
        try:
            yield
        finally:
            self.go_on()

    def expire(self) -> None:
        """Run out now, even while it stands still."""
        self._left_s, self._is_up = 0.0, True
        if self._timeout is not None and not self._timeout.expired():  # which a second call would find it to be
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def _schedule(self) -> None:
        if self._timeout is None or self._stops or self._left_s is None or self._timeout.expired():
            return
        self._timeout.reschedule(asyncio.get_running_loop().time() + self._left_s)
