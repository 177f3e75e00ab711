"""One server's generations by our own ids, and what verl is told of why one ended.

verl's async client asks again for whatever ends with `abort` or `aborted` (llm_server.py:342). It would bring back to life
what was aborted, and after an update of the weights it would glue tokens of two versions together. So a generation
that carries an id of ours never ends with those words: it ends with one of `Ending`, which that client hands straight back.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from sglang_multiturn.errors import EngineError

_MAX_TOMBSTONES = 4096
"""More than verl's servers take requests at once (replica.py:258)."""


class Ending(StrEnum):
    """`TokenOutput.stop_reason` of a generation of ours that did not come to its natural end."""

    ABORTED = "request_aborted"
    """Someone aborted this one."""
    PAUSED = "engine_paused"
    """verl paused the whole server: asked again, it goes on, under the weights that then serve."""
    TURNED_AWAY = "engine_turned_away"
    """It came in such a pause, and nothing was asked: it is to come again when `serving` has returned."""
    ENGINE = "engine_aborted"
    """The engine gave it up by itself."""

    @classmethod
    def of(cls, flight: Flight, *, paused: bool) -> Ending:
        """Of a generation that the engine reports as aborted, or was not asked for."""
        if flight.aborted:
            return cls.ABORTED
        if flight.turned_away:
            return cls.TURNED_AWAY
        return cls.PAUSED if paused else cls.ENGINE


@dataclass(slots=True)
class Flight:
    """One generation between its request and its answer."""

    rid: str
    aborted: bool = False
    turned_away: bool = False
    """It came in a pause."""
    call: asyncio.Task[Any] | None = None
    """What asks the engine, where it can be waited for."""


@dataclass(slots=True)
class Flights:
    """What is in flight, and the aborts that came before what they were to end."""

    _running: dict[str, Flight] = field(default_factory=dict)
    _tombstones: OrderedDict[str, None] = field(default_factory=OrderedDict)
    _pause_over: asyncio.Event | None = None
    """Of the pause that there is."""

    @contextmanager
    def flight(self, rid: str) -> Iterator[Flight]:
        """While a generation is here. It may be aborted from the start.

        Raises:
            EngineError: one of that name is here already.
        """
        if rid in self._running:
            raise EngineError(f"generation {rid} is in flight already; rids name one generation only")
        flight = self._running[rid] = Flight(
            rid, aborted=rid in self._tombstones, turned_away=self._pause_over is not None
        )
        self._tombstones.pop(rid, None)
        try:
            yield flight
        finally:
            del self._running[rid]

    def abort(self, rid: str) -> Flight | None:
        """Mark a generation as aborted, also one that has not arrived; None where there is nothing to wait for.

        Ray delivers two calls of one sender in any order, so an abort may well come first.
        """
        flight = self._running.get(rid)
        if flight is None:
            self._tombstones[rid] = None
            while len(self._tombstones) > _MAX_TOMBSTONES:
                self._tombstones.popitem(last=False)
            return None
        flight.aborted = True
        return flight

    def pause(self) -> None:
        """Turn away what comes, until `go_on`."""
        self._pause_over = self._pause_over or asyncio.Event()

    def go_on(self) -> None:
        """Take what comes."""
        if self._pause_over is not None:
            self._pause_over.set()
            self._pause_over = None

    async def serving(self) -> None:
        """Return when there is no pause, or the one that there is has ended."""
        if self._pause_over is not None:
            await self._pause_over.wait()

    @property
    def rids(self) -> list[str]:
        """What is in flight, oldest first."""
        return list(self._running)
