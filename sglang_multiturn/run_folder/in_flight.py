"""What a process has in flight at one moment, as a small file that people and other programs read.

`picture_request` looks at one conversation, `Snapshot` is what one process has; `in_flight_writer` keeps the file up to
date and `sglang-multiturn status` reads it, also after the process was killed: its last file stays.

Every text is bounded and can be encoded, whatever ids and tool names contain. Times are seconds since the epoch by the
clock of the host that wrote them.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Self

from pydantic import TypeAdapter, ValidationError

from sglang_multiturn.errors import DataError
from sglang_multiturn.request import AsyncRolloutRequest, RequestState
from sglang_multiturn.schemas import plain_text
from sglang_multiturn.tools.activity import tools_held
from sglang_multiturn.tools.process.trees import read_process

FILES = "in_flight-*.json"
"""Pattern of their names in a run's folder."""
MAX_FILE_BYTES = 64 << 20
"""Twice what the largest file has if every character of it must be escaped."""
_MOST_CHARS = 300
_MOST_TOOL_CHARS = 100
_MOST_TOOLS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRequest:
    """One conversation at one moment."""

    request_id: str
    uid: str
    step: int
    validate: bool
    state: RequestState
    suspended_in: RequestState | None
    """Where it goes on; None while it is not suspended."""
    suspended_since_s: float | None
    """When the writer first saw it suspended."""
    turns: int
    """Assistant turns so far, the present one too once something of it is in the ledger."""
    prompt_tokens: int
    response_tokens: int
    """Everything after the prompt; what a generation that has not ended has sampled is not known yet."""
    sampled_tokens: int
    restarts: int
    waiting_for: str
    waiting_since_s: float
    running_since_s: float
    """When the writer first saw it; late by no more than the time between two looks."""
    tools_held: tuple[str, ...]
    """Tool instances that were created and not released, one name an instance, the first sixteen."""

    @property
    def tokens(self) -> int:
        """Prompt and response."""
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMark:
    """Names a process so that no other is ever taken for it."""

    host: str
    pid: int
    machine: str
    """Differs wherever the pid would mean another process: other machines, other boots, other containers."""
    start_ticks: int | None
    """None where the system does not tell."""

    @classmethod
    def of_this(cls) -> Self:
        """The calling process."""
        process = read_process(os.getpid())
        return cls(
            host=bounded(socket.gethostname()),
            pid=os.getpid(),
            machine=_machine(),
            start_ticks=None if process is None else process.start_ticks,
        )

    def is_alive(self) -> bool | None:
        """Whether it still runs; None when that cannot be seen from here."""
        if self.machine != _machine() or self.start_ticks is None:
            return None
        process = read_process(self.pid)
        return process is not None and process.start_ticks == self.start_ticks and not process.is_zombie


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What one process has in flight."""

    version: Literal[1] = 1
    """Of this shape of file; no other is read."""
    name: str
    """What the process is in its run."""
    process: ProcessMark
    started_s: float
    """When the writer began to look."""
    written_s: float
    every_s: float
    """Time to the next file, as long as anything is in flight."""
    loop_stuck_since_s: float | None = None
    """Since when the event loop has not moved; None while it does."""
    loop_stuck_at: str = ""
    """Where its thread stands then, innermost first."""
    in_flight: int
    states: Mapping[RequestState, int]
    """How many conversations are in each."""
    requests: tuple[RunningRequest, ...]
    """Oldest first. Of very many only the oldest."""

    def to_json(self) -> bytes:
        """One JSON object."""
        return _SNAPSHOT.dump_json(self)

    @classmethod
    def from_file(cls, path: Path) -> Snapshot:
        """Read one. Raises DataError: it is none, or too large; OSError: it cannot be read."""
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise DataError(f"{path}: more than {MAX_FILE_BYTES >> 20} MiB, which is no file of this package")
        try:
            return _SNAPSHOT.validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise DataError(f"{path}: is no file that this version reads: {where}: {first['msg']}") from error


_SNAPSHOT = TypeAdapter(Snapshot)


def picture_request(
    request: AsyncRolloutRequest, *, running_since_s: float, suspended_since_s: float | None
) -> RunningRequest:
    """One conversation as it stands. May be called from any thread: everything it reads is read once and small."""
    rows, metrics = list(request.rows), request.metrics
    return RunningRequest(
        request_id=bounded(request.request_id),
        uid=bounded(request.spec.uid),
        step=request.spec.step,
        validate=request.spec.validate,
        state=request.state,
        suspended_in=request.suspended_in,
        suspended_since_s=suspended_since_s,
        turns=metrics.assistant_turns,
        prompt_tokens=rows[0].num_prompt_tokens,
        response_tokens=request.num_response_tokens,
        sampled_tokens=sum(turn.sampled_tokens for row in rows for turn in row.turns),
        restarts=request.restarts,
        waiting_for=bounded(request.waiting_for),
        waiting_since_s=request.waiting_since_s,
        running_since_s=running_since_s,
        tools_held=tuple(bounded(name, _MOST_TOOL_CHARS) for name in tools_held(request)[:_MOST_TOOLS]),
    )


def file_name(mark: ProcessMark, writer: int) -> str:
    """Of the n-th writer of a process, from 0."""
    host = re.sub(r"[^A-Za-z0-9._-]", "_", mark.host)[:100] or "host"
    return f"in_flight-{host}-{mark.pid}{f'-{writer}' if writer else ''}.json"


def bounded(text: str, most_chars: int = _MOST_CHARS) -> str:
    """Text that can be encoded, and is not endless."""
    return plain_text(text if len(text) <= most_chars else text[: most_chars - 1] + "…")


@cache
def _machine() -> str:
    """The boot of this kernel and the namespace of process ids; the host's name where there are no such things."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
