"""What one worker writes into `journal_dir`: training and validation apart, each file begun with its first conversation."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from uuid import uuid4

from sglang_multiturn.errors import ConfigError
from sglang_multiturn.journal import JournalWriter
from sglang_multiturn.request import RequestSpec
from sglang_multiturn.trajectory import Trajectory

logger = logging.getLogger(__name__)

_FAILURES = (OSError, ValueError, ConfigError)
"""A full disk; something a tool returned that JSON has no word for; a folder that cannot be written to."""


class WorkerJournals:
    """`worker-<pid>-<random>.jsonl` and `validation-<pid>-<random>.jsonl`, with their marks; `read_run` reads them all.

    Raises nothing: a conversation is worth more than its record. As `InstanceMarks`, it is told what tools hold.
    """

    def __init__(self, folder: Path | None, *, fsync: bool = False) -> None:
        """None keeps no journal; `fsync` as for a `JournalWriter`."""
        self._folder = folder
        self._fsync = fsync
        self._suffix = f"{os.getpid()}-{uuid4().hex[:8]}"
        self._writers: dict[str, JournalWriter] = {}
        self._running: dict[str, JournalWriter] = {}
        """By request_id, the journal of each conversation that has begun."""

    def begin(self, spec: RequestSpec) -> None:
        """Note that a conversation begins."""
        try:
            if (writer := self._writer(validate=spec.validate)) is not None:
                self._running[spec.request_id] = writer
                writer.begin(spec.request_id)
        except _FAILURES as error:
            logger.error("request %s: there is no journal of it: %s", spec.request_id, error)

    def write(self, trajectory: Trajectory) -> None:
        """Append one line."""
        try:
            if (writer := self._writer(validate=trajectory.validate)) is not None:
                writer.write(trajectory)
        except _FAILURES as error:
            logger.error("request %s: the journal cannot be written: %s", trajectory.request_id, error)
        self._running.pop(trajectory.request_id, None)

    def making(self, request_id: str, tool: str, asked_id: str) -> None:
        """`create` is about to be called."""
        if (writer := self._running.get(request_id)) is not None:
            writer.marks.making(request_id, tool, asked_id)

    def made(self, request_id: str, tool: str, asked_id: str, instance_id: str) -> None:
        """`create` chose another id than the one it was asked for."""
        if (writer := self._running.get(request_id)) is not None:
            writer.marks.made(request_id, tool, asked_id, instance_id)

    def gone(self, request_id: str, tool: str, asked_id: str) -> None:
        """There is no such instance any more; a release may come to its end after its conversation."""
        running = self._running.get(request_id)
        for writer in self._writers.values() if running is None else [running]:
            writer.marks.gone(request_id, tool, asked_id)

    def _writer(self, *, validate: bool) -> JournalWriter | None:
        if self._folder is None:
            return None
        kind = "validation" if validate else "worker"
        if kind not in self._writers:
            self._writers[kind] = JournalWriter(self._folder / f"{kind}-{self._suffix}.jsonl", fsync=self._fsync)
        return self._writers[kind]
