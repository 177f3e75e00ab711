"""What an instance's processes print: read at a bounded pace, and forgotten but for its end."""

from __future__ import annotations

import contextlib
import fcntl
import os

_PIPE_BYTES = 262_144
_KEPT_BYTES = 4_096
_SHOWN_LINES = 40


class OutputTail:
    """A pipe that never fills for a process that prints as people do, and slows one down that prints without end."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        os.set_blocking(self._reading, False)
        with contextlib.suppress(OSError):  # the user has many pipes already
            fcntl.fcntl(self._reading, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._kept = b""

    def drain(self) -> None:
        """Take what is there, up to a limit."""
        with contextlib.suppress(BlockingIOError):
            self._kept = (self._kept + os.read(self._reading, _PIPE_BYTES))[-_KEPT_BYTES:]

    def close_writing(self) -> None:
        """Leave the writing end to the instance."""
        os.close(self.writing)

    def close(self) -> str:
        """Give up the pipe; the last lines that were printed."""
        self.drain()
        os.close(self._reading)
        lines = [_printable(line) for line in self._kept.decode(errors="replace").splitlines()]
        return "\n".join([line for line in lines if line.strip()][-_SHOWN_LINES:])

    def leave(self) -> None:
        """In a forked process: give up the reading end."""
        os.close(self._reading)


def _printable(line: str) -> str:
    """Without what could command a terminal."""
    return "".join(char if char.isprintable() else "?" for char in line.expandtabs())
