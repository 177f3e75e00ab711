"""Files that a crash leaves whole: lines that are there or not there, and files replaced in one step.

A line counts once its newline is written. What a killed process or a full disk left of one without is a torn line: only
the last line of a file can be one, and whoever opens the file for appending cuts it off, so that nothing sticks to it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 16
_LOCKED: dict[str, int] = {}
"""Files that this process has locked, by real path, and the descriptors. A lock of POSIX belongs to the process: it ends
when any descriptor of the file is closed, and does not keep a second one in the same process out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TornLine:
    """The last line of a file, which was not written to its end."""

    path: Path
    line: int
    """From 1."""
    num_bytes: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: the last line is torn ({self.num_bytes} bytes, no whole JSON)"


class LineFile:
    """Appends lines to a file. A line is in it whole when `append` returns, and not at all when it raises."""

    def __init__(self, path: Path, *, fsync: bool = False, locked: bool = False) -> None:
        """Open a file, made where there is none, and cut a torn line off its end.

        Args:
            path: its folder is made too.
            fsync: every line is on the disk when `append` returns, so that it outlives a power cut as well.
            locked: nobody else may have it open so.

        Raises:
            BlockingIOError: someone else has it open, locked.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._fsync = fsync
        self._locked_as = os.path.realpath(path) if locked else None
        self._fd: int | None = _open_locked(path) if locked else _open(path)
        self.torn = _torn_line(self._fd, path)
        """What was cut off when it was opened."""
        self.size_bytes = os.fstat(self._fd).st_size - (self.torn.num_bytes if self.torn else 0)
        if self.torn is not None:
            os.ftruncate(self._fd, self.size_bytes)
        self._in_doubt = False
        if fsync:
            _sync_folder(path.parent)

    def append(self, line: str) -> None:
        """Write one line, which must hold no newline. Raises OSError; ValueError: the file is closed."""
        fd, rest = self._open_fd(), memoryview(line.encode() + b"\n")
        if self._in_doubt:
            os.ftruncate(fd, self.size_bytes)
        self._in_doubt = True
        num_bytes = len(rest)
        try:
            while rest:
                rest = rest[os.write(fd, rest) :]
            if self._fsync:
                os.fsync(fd)
        except BaseException:
            with contextlib.suppress(OSError):  # else the next `append` does it, or raises
                self.cut_to(self.size_bytes)
            raise
        self.size_bytes += num_bytes
        self._in_doubt = False

    def cut_to(self, size_bytes: int) -> None:
        """Forget what stands beyond. Raises OSError; ValueError: the file is closed."""
        os.ftruncate(self._open_fd(), size_bytes)
        self.size_bytes = size_bytes
        self._in_doubt = False

    def _open_fd(self) -> int:
        if self._fd is None:
            raise ValueError(f"{self.path} is closed")
        return self._fd

    def close(self, *, remove: bool = False) -> None:
        """Give it back, and `remove` it from its folder before anyone else can have it; safe to call twice."""
        if self._fd is None:
            return
        if remove:
            self.path.unlink(missing_ok=True)
        if self._locked_as is not None:
            _LOCKED.pop(self._locked_as, None)
        os.close(self._fd)
        self._fd = None


def whole_lines(path: Path) -> Iterator[tuple[int, bytes | TornLine]]:
    """The lines of a file with their numbers, from 1, without the newlines; a torn one at the end as that.

    Raises OSError. That a line which is not the last one is no JSON is for the caller to find.
    """
    with path.open("rb") as file:
        lines = enumerate(file, start=1)
        current = next(lines, None)
        while current is not None:
            (number, line), current = current, next(lines, None)
            if current is None and not _is_whole(line):
                yield number, TornLine(path=path, line=number, num_bytes=len(line))
            else:
                yield number, line.rstrip(b"\n")


def content_of(path: Path) -> bytes:
    """The whole of a file, also of one that this process has locked; empty where there is none."""
    fd = _LOCKED.get(os.path.realpath(path))
    if fd is not None:
        return os.pread(fd, os.fstat(fd).st_size, 0)
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""


def replace_file(path: Path, text: str) -> None:
    """Give a file this content in one step: a reader, or a crash, finds the old one or the new one. One writer a file.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f".{path.name}.tmp")  # what a crash leaves of it, the next writer takes
    try:
        with written.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
    except BaseException:
        written.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)


def _open_locked(path: Path) -> int:
    real = os.path.realpath(path)
    if real in _LOCKED:
        raise BlockingIOError(errno.EAGAIN, "this process has it open already", str(path))
    while True:
        fd = _open(path)
        try:
            _lock(fd, path)
            if _is_at(path, fd):
                _LOCKED[real] = fd
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its owner removed it in this moment: there is another one now, or none


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise BlockingIOError(errno.EAGAIN, "another process has it open", str(path)) from error
        logger.warning("%s cannot be locked here (%s): see to it that no other process writes to it", path, error)


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def _torn_line(fd: int, path: Path) -> TornLine | None:
    size_bytes = os.fstat(fd).st_size
    begin = _last_line_begins(fd, size_bytes)
    line = os.pread(fd, size_bytes - begin, begin)
    if not line or _is_whole(line):
        return None
    return TornLine(path=path, line=_newlines(fd, begin) + 1, num_bytes=len(line))


def _is_whole(line: bytes) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        json.loads(line)
    except ValueError:  # after a power cut a file may have its length and not its content
        return False
    return True


def _last_line_begins(fd: int, size_bytes: int) -> int:
    end = size_bytes - 1  # its own newline ends the last line and begins none
    while end > 0:
        begin = max(0, end - _BLOCK_BYTES)
        found = os.pread(fd, end - begin, begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        end = begin
    return 0


def _newlines(fd: int, end: int) -> int:
    return sum(os.pread(fd, min(_BLOCK_BYTES, end - at), at).count(b"\n") for at in range(0, end, _BLOCK_BYTES))


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError:  # not every file system can
        logger.debug("folder %s cannot be synced", folder)
    finally:
        os.close(fd)
