"""How many calls of a tool run at once, and how fast new ones begin: one queue, first come, first served.

    async with limiter.slot(longest_s):    # waits here; the tool's own deadline has not begun yet
        await host.execute(...)

The limits are those of a whole run: `tools.ray.limits` shares one queue among the worker processes of a Ray job.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from sglang_multiturn.config import ToolSettings

__all__ = ["Limiter", "LocalLimiter", "NoLimit", "Turnstile", "is_limited", "make_local"]

_SLACK_S = 0.01


class Limiter(Protocol):
    """Lets calls of one tool begin."""

    def slot(self, longest_s: float | None) -> AbstractAsyncContextManager[None]:
        """Wait until a call may begin, and hold its place until the block is left.

        Whoever is cancelled while waiting leaves the queue, and nothing of it stays. `longest_s` is the longest that the
        block can last, None if nothing bounds it: the place of a holder that was never heard of again is free by then.

        Raises:
            ToolDiedError: the queue is shared between processes, and nobody could be reached who keeps it.
        """
        ...


class NoLimit:
    """Every call begins at once."""

    @asynccontextmanager
    async def slot(self, longest_s: float | None) -> AsyncIterator[None]:
        """See `Limiter`."""
        yield


class LocalLimiter:
    """The limits of a run that is one process."""

    def __init__(self, *, max_concurrent: int | None, max_per_s: float | None) -> None:
        self._turnstile = Turnstile(max_concurrent=max_concurrent, max_per_s=max_per_s)

    @asynccontextmanager
    async def slot(self, longest_s: float | None) -> AsyncIterator[None]:
        """See `Limiter`."""
        place = self._turnstile.queue()
        try:
            await place
            yield
        finally:
            self._turnstile.leave(place)


class Turnstile:
    """The queue itself, in one event loop. A place in it is a future: done once its call may begin.

    Beginnings are evenly spaced, also the first ones. A bucket of tokens, which is what libraries offer, lets up to twice
    `max_per_s` begin in the first second; and theirs do not keep the order in which calls came.
    """

    def __init__(self, *, max_concurrent: int | None, max_per_s: float | None) -> None:
        self._max_concurrent = float("inf") if max_concurrent is None else max_concurrent
        # Timers are late by a millisecond or more. What is lost so is made up for, within the slack; the longer interval
        # sees to it that no second ever holds more than `max_per_s` for all that.
        self._interval_s = 0.0 if max_per_s is None else (1.0 + _SLACK_S) / max_per_s
        self._next_s = float("-inf")
        self._waiting: OrderedDict[asyncio.Future[None], None] = OrderedDict()
        self._inside: set[asyncio.Future[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def queue(self) -> asyncio.Future[None]:
        """A new place, the last of the queue; every one must be left, whatever became of it."""
        place = asyncio.get_running_loop().create_future()
        self._waiting[place] = None
        self._advance()
        return place

    def occupy(self) -> asyncio.Future[None]:
        """A place for a call that runs already, whatever the limits say."""
        place = asyncio.get_running_loop().create_future()
        place.set_result(None)
        self._inside.add(place)
        return place

    def leave(self, place: asyncio.Future[None]) -> None:
        """Give a place up, whether its call has ended or never began; a second time it does nothing."""
        place.cancel()
        self._waiting.pop(place, None)
        self._inside.discard(place)
        self._advance()

    def _advance(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._inside) < self._max_concurrent:
            now_s = loop.time()
            if now_s < self._next_s:
                self._timer = loop.call_at(self._next_s, self._advance)
                return
            place, _ = self._waiting.popitem(last=False)
            if place.cancelled():  # its holder is about to leave
                continue
            place.set_result(None)
            self._inside.add(place)
            self._next_s = max(self._next_s, now_s - _SLACK_S) + self._interval_s


def is_limited(settings: ToolSettings) -> bool:
    """Whether calls of this tool ever have to wait."""
    return settings.max_concurrent is not None or settings.max_per_s is not None


def make_local(settings: ToolSettings) -> Limiter:
    """The limiter of a tool in a run that is one process."""
    if not is_limited(settings):
        return NoLimit()
    return LocalLimiter(max_concurrent=settings.max_concurrent, max_per_s=settings.max_per_s)
