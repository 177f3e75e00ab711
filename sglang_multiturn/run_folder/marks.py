"""What is begun and held at this moment, written down beside a journal, so that it is known after `kill -9`.

A journal holds what has ended. Its `.marks` file holds a line for every conversation that begins, and one before each
tool instance is made and after it is gone, so whatever moment a process is killed at, what it had in its hands can be read.
The file is also the journal's lock: who writes to one has the other.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_multiturn.errors import ConfigError
from sglang_multiturn.run_folder.durable import LineFile, content_of

logger = logging.getLogger(__name__)

_TIDY_BYTES = 1 << 20
"""A file longer than this is cut back as soon as nothing in it matters any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldInstance:
    """A tool instance that was made, or was just being made, and not released."""

    request_id: str
    tool: str
    instance_id: str


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One process's time with a journal."""

    host: str
    pid: int
    since_s: float
    """Seconds since 1970."""
    begun: dict[str, None] = field(default_factory=dict)
    """Conversations that began, in order. Those that ended have their line in the journal."""
    held: dict[tuple[str, str, str], HeldInstance] = field(default_factory=dict)
    """By conversation, tool and the id that was asked for."""


class Marks:
    """Writes one journal's marks. A disk that is full ends the marks, not the run."""

    def __init__(self, path: Path) -> None:
        """Take the file, and with it the journal.

        Raises:
            ConfigError: another process, or another writer of this one, has it.
        """
        try:
            self._file = LineFile(path, locked=True)
        except BlockingIOError as error:
            raise ConfigError(_taken(path)) from error
        self.earlier = read_marks(path)
        """What those who had it before left, oldest first."""
        self._is_writable = True
        self._now = Attempt(host=socket.gethostname(), pid=os.getpid(), since_s=time.time())
        self._open()

    def _open(self) -> None:
        self._write("opened", host=self._now.host, pid=self._now.pid, at_s=round(self._now.since_s, 3))
        self._opened_bytes = self._file.size_bytes

    def forget_earlier(self) -> None:
        """Those who had it before are of no interest any more. Call it before anything begins."""
        self.earlier = []
        self._file.cut_to(0)
        self._open()

    def begun(self, request_id: str) -> None:
        """A conversation begins."""
        self._now.begun[request_id] = None
        self._write("begun", request_id=request_id)

    def ended(self, request_id: str) -> None:
        """It has its line in the journal."""
        self._now.begun.pop(request_id, None)
        if self._is_writable and self._file.size_bytes > _TIDY_BYTES and not self._is_open:
            self._file.cut_to(self._opened_bytes)

    def making(self, request_id: str, tool: str, asked_id: str) -> None:
        """`create` is about to be called."""
        self._hold(asked_id, HeldInstance(request_id=request_id, tool=tool, instance_id=asked_id))
        self._write("making", request_id=request_id, tool=tool, asked_id=asked_id)

    def made(self, request_id: str, tool: str, asked_id: str, instance_id: str) -> None:
        """`create` chose another id than the one it was asked for."""
        self._hold(asked_id, HeldInstance(request_id=request_id, tool=tool, instance_id=instance_id))
        self._write("made", request_id=request_id, tool=tool, asked_id=asked_id, instance_id=instance_id)

    def gone(self, request_id: str, tool: str, asked_id: str) -> None:
        """It was released or lost with its process, or `create` failed."""
        self._now.held.pop((request_id, tool, asked_id), None)
        self._write("gone", request_id=request_id, tool=tool, asked_id=asked_id)

    def close(self) -> None:
        """Give the journal back. The file stays where it says of something that it was not released or has not ended."""
        is_needed = any(attempt.held for attempt in self.earlier)
        self._file.close(remove=not is_needed and not self._is_open)

    @property
    def _is_open(self) -> bool:
        return bool(self._now.begun or self._now.held)

    def _hold(self, asked_id: str, instance: HeldInstance) -> None:
        self._now.held[instance.request_id, instance.tool, asked_id] = instance

    def _write(self, mark: str, **what: Any) -> None:
        if not self._is_writable:
            return
        try:
            self._file.append(json.dumps({"mark": mark, **what}))
        except (OSError, ValueError) as error:  # a full disk; a tool that is released after the journal was closed
            self._is_writable = False
            logger.error("%s: %s; what runs at a crash will not be known", self._file.path, error)


def read_marks(path: Path) -> list[Attempt]:
    """Everyone who had the journal since its marks were last removed, oldest first, and what they had in their hands.

    A line without its newline is left out: what it announces did not happen any more.
    """
    attempts: list[Attempt] = []
    *lines, _torn = content_of(path).split(b"\n")
    for line in lines:
        try:
            mark = json.loads(line)
            kind = mark["mark"]
            if kind == "opened":
                attempts.append(Attempt(host=mark["host"], pid=mark["pid"], since_s=mark["at_s"]))
            elif attempts:
                _take(attempts[-1], kind, mark)
        except (ValueError, KeyError, TypeError):
            logger.debug("%s: not a mark: %r", path, line[:200])
    return attempts


def _take(attempt: Attempt, kind: str, mark: dict[str, Any]) -> None:
    request_id = mark["request_id"]
    if kind == "begun":
        attempt.begun[request_id] = None
        return
    key = (request_id, mark["tool"], mark["asked_id"])
    if kind == "gone":
        attempt.held.pop(key, None)
    else:
        attempt.held[key] = HeldInstance(
            request_id=request_id, tool=mark["tool"], instance_id=mark.get("instance_id", mark["asked_id"])
        )


def _taken(path: Path) -> str:
    """Why the marks at `path` cannot be had."""
    journal = path.with_suffix(".jsonl")
    try:
        owner = read_marks(path)[-1]
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since_s))
        who = f"process {owner.pid} on {owner.host}, since {since}"
    except (IndexError, OSError):
        who = "a process that has just begun"
    return f"{journal} is being written by {who}; wait until it has ended, or give this run another folder"
