"""Writes down what is in flight, about once a second, while conversations run.

In a thread of its own, so that it goes on when a tool holds up the event loop, which it then says, and where. Each file
is written whole or not at all, and replaces the one before. A process that is killed leaves its last one.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Self

from sglang_multiturn.request import AsyncRolloutRequest, RequestState
from sglang_multiturn.run_folder.in_flight import (
    ProcessMark,
    RunningRequest,
    Snapshot,
    bounded,
    file_name,
    picture_request,
)

logger = logging.getLogger(__name__)

MOST_REQUESTS = 2000
"""Conversations in one file, the oldest; all are counted."""
_SHARE_OF_TIME = 0.05
"""Of this thread's time that looking may compute and writing may take; what is slow is done less often."""
_BREATH_REQUESTS = 50
"""Conversations looked at before the event loop may have the interpreter again."""
_FRAMES = 4
_CLOSE_S = 5.0
_TRIES = 10

_writers = itertools.count()


class InFlightWriter:
    """Keeps `in_flight-<host>-<pid>.json` in a run's folder.

    with InFlightWriter(folder, "rollout", rollouts.in_flight):   # inside the event loop
        ...
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        in_flight: Callable[[], Iterable[AsyncRolloutRequest]],
        *,
        every_s: float = 1.0,
        most_requests: int = MOST_REQUESTS,
    ) -> None:
        """Nothing is written before `start`.

        Args:
            folder: of the run; made when it is missing.
            name: what this process is in its run, such as "rollout" or "worker".
            in_flight: the conversations that run at this moment; called from another thread.
            every_s: shortest time between two files.
            most_requests: conversations in one file.
        """
        self._name = bounded(name)
        self._in_flight = in_flight
        self._every_s = every_s
        self._most_requests = most_requests
        self._mark = ProcessMark.of_this()
        self.path = folder / file_name(self._mark, next(_writers))
        self._temporary = self.path.with_name(f".{self.path.name}.tmp")
        self._started_s = 0.0
        self._running_since_s: dict[str, float] = {}
        self._suspended_since_s: dict[str, float] = {}
        self._write_s = 0.0
        self._written: int | None = None
        """How many conversations the last file tells of."""
        self._has_complained = False
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, from the event loop of the conversations; called again it does nothing."""
        if self._thread is not None:
            return
        pulse = _Pulse(asyncio.get_running_loop())
        self._started_s = time.time()
        self._thread = threading.Thread(target=self._look_on, args=(pulse,), name="in-flight", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take the file away: nothing is in flight any more. Safe to call twice, and before `start`."""
        self._end.set()
        if self._thread is None:
            return
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("%s is left behind: its file system does not answer", self.path)
            return
        with contextlib.suppress(OSError):
            self.path.unlink()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _look_on(self, pulse: _Pulse) -> None:
        pause_s = self._every_s
        while True:
            began_s, self._write_s = time.thread_time(), 0.0
            try:
                self._look(pulse, pause_s)
            except Exception as error:  # noqa: BLE001 - a full disk, or whatever else, must not end a run
                self._complain(error)
            cost_s = time.thread_time() - began_s + self._write_s
            pause_s = max(self._every_s, cost_s / _SHARE_OF_TIME)
            if self._end.wait(pause_s):
                return

    def _look(self, pulse: _Pulse, pause_s: float) -> None:
        running = [request for request in self._ask() if not request.is_final]
        if not running and self._written == 0:
            return
        self._write(self._snapshot(running, pulse, pause_s).to_json())
        self._written = len(running)

    def _ask(self) -> list[AsyncRolloutRequest]:
        for _ in range(_TRIES):
            with contextlib.suppress(RuntimeError):  # what it goes through changed under its hands
                return list(self._in_flight())
        return list(self._in_flight())

    def _snapshot(self, running: list[AsyncRolloutRequest], pulse: _Pulse, pause_s: float) -> Snapshot:
        stuck_since_s = pulse.stuck_since_s() if running else None
        self._remember(running, time.time())
        return Snapshot(
            name=self._name,
            process=self._mark,
            started_s=self._started_s,
            written_s=time.time(),
            every_s=pause_s,
            loop_stuck_since_s=stuck_since_s,
            loop_stuck_at="" if stuck_since_s is None else bounded(pulse.where()),
            in_flight=len(running),
            states=dict(Counter(request.state for request in running)),
            requests=self._pictures(running),
        )

    def _remember(self, running: list[AsyncRolloutRequest], now_s: float) -> None:
        """Since when each has been there, and has been suspended; of those that are gone nothing is kept."""
        known, suspended = self._running_since_s, self._suspended_since_s
        self._running_since_s = {
            request.request_id: known.get(request.request_id, min(now_s, request.waiting_since_s))
            for request in running
        }
        self._suspended_since_s = {
            request.request_id: suspended.get(request.request_id, now_s)
            for request in running
            if request.state is RequestState.SUSPENDED
        }

    def _pictures(self, running: list[AsyncRolloutRequest]) -> tuple[RunningRequest, ...]:
        since_s = self._running_since_s
        oldest = heapq.nsmallest(self._most_requests, running, key=lambda request: since_s[request.request_id])
        pictures = []
        for number, request in enumerate(oldest, 1):
            name = request.request_id
            pictures.append(
                picture_request(
                    request, running_since_s=since_s[name], suspended_since_s=self._suspended_since_s.get(name)
                )
            )
            if number % _BREATH_REQUESTS == 0:
                time.sleep(0)
        return tuple(pictures)

    def _write(self, text: bytes) -> None:
        if self._written is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        try:  # no fsync: after a power cut nobody asks what was in flight
            self._temporary.write_bytes(text)
            os.replace(self._temporary, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                self._temporary.unlink()
            raise
        finally:
            self._write_s = time.perf_counter() - began

    def _complain(self, error: Exception) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.warning("what is in flight cannot be written to %s: %r; the run goes on", self.path, error)


class _Pulse:
    """Whether an event loop still moves, and where its thread stands; asked from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """From the loop's own thread."""
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._asked_s: float | None = None

    def stuck_since_s(self) -> float | None:
        """When the question was put that has no answer yet; None if the last one was answered, and the next is put."""
        if (asked_s := self._asked_s) is not None:
            return asked_s
        self._asked_s = time.time()
        try:
            self._loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # it is closed
            self._answer()
        return None

    def _answer(self) -> None:
        self._asked_s = None

    def where(self) -> str:
        """The innermost functions of the loop's thread, `file:line function`."""
        frame = sys._current_frames().get(self._thread_id)
        found: list[str] = []
        while frame is not None and len(found) < _FRAMES:
            found.append(_said(frame))
            frame = frame.f_back
        return " < ".join(found)


def _said(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"
