"""Trajectories on disk: a line of JSON each, written before anyone is told that one is finished.

A run's folder has a file for each process that wrote to it: `trajectories.jsonl` of a standalone run, `worker-*.jsonl`
of verl's workers, and `validation-*.jsonl` of their validation. `read_run` reads them all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sglang_multiturn.errors import DataError
from sglang_multiturn.run_folder.durable import LineFile, TornLine, whole_lines
from sglang_multiturn.run_folder.marks import Marks
from sglang_multiturn.trajectory import Trajectory

logger = logging.getLogger(__name__)

JOURNALS = ("trajectories*.jsonl", "worker-*.jsonl", "validation-*.jsonl")
"""Names of the files that hold trajectories, in a run's folder."""


class JournalWriter:
    """Appends to one JSONL file; one writer a file."""

    def __init__(self, path: Path, *, fsync: bool = False) -> None:
        """Open a journal, made where there is none. A torn last line is cut off, and the log says so.

        Args:
            path: the file; `.marks` beside it says what runs (`marks`).
            fsync: a trajectory that was written outlives a power cut too, at the cost of a wait for the disk each.

        Raises:
            ConfigError: someone else writes to it.
        """
        self.path = path
        self._fsync = fsync
        self.marks = Marks(path.with_suffix(".marks"))
        try:
            self._file = LineFile(path, fsync=fsync)
        except BaseException:
            self.marks.close()
            raise
        self.written = 0
        """Trajectories that this writer wrote."""
        self.torn = self._file.torn
        """What was cut off."""
        if self.torn is not None:
            logger.warning("%s: cut off", self.torn)

    @property
    def is_empty(self) -> bool:
        """Whether it holds no trajectory."""
        return self._file.size_bytes == 0

    def begin(self, request_id: str) -> None:
        """Note that a conversation begins, so that it is known should it never end."""
        self.marks.begun(request_id)

    def write(self, trajectory: Trajectory) -> None:
        """Append one line; it has left this process when this returns. Raises OSError, after which it is not there."""
        self._file.append(trajectory.to_json())
        self.written += 1
        self.marks.ended(trajectory.request_id)

    def clear(self) -> None:
        """Forget every trajectory, and what ran when an earlier process ended."""
        self._file.cut_to(0)
        self.marks.forget_earlier()

    def set_aside(self, which: Callable[[Trajectory], bool]) -> list[str]:
        """Move trajectories into `.retried` beside the journal, so that they can be asked again; returns their ids.

        A crash meanwhile leaves the journal as it was.
        """
        ids = []
        kept_path, moved_path = self.path.with_name(f".{self.path.name}.tmp"), self.path.with_suffix(".retried")
        with kept_path.open("wb") as kept, moved_path.open("ab") as moved:
            for trajectory, line in _unique_lines([self.path], _log):
                if which(trajectory):
                    ids.append(trajectory.request_id)
                (moved if which(trajectory) else kept).write(line + b"\n")
            for file in (kept, moved):
                file.flush()
                os.fsync(file.fileno())
        if not moved_path.stat().st_size:
            moved_path.unlink()
        kept_path.replace(self.path)
        self._file.close()
        self._file = LineFile(self.path, fsync=self._fsync)
        return ids

    def close(self) -> None:
        """Safe to call twice."""
        self._file.close()
        self.marks.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedLines:
    """Lines of a file whose conversations had been read before, of the same step: the first of each counts."""

    path: Path
    count: int
    line: int
    """The first of them, from 1."""
    request_id: str

    def __str__(self) -> str:
        return (
            f"{self.path}: {self.count} trajectories stand in this run twice and are left out here, "
            f"the first of them {self.request_id} in line {self.line}"
        )


Remark = TornLine | RepeatedLines
"""What a reader leaves out."""


def _log(remark: Remark) -> None:
    logger.warning("%s", remark)


def journals_of(path: str | Path) -> list[Path]:
    """The files of a run's folder that hold trajectories, by name; a file is its own. Raises DataError: there is none."""
    path = Path(path)
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{str(path)!r} does not exist; a run's folder or a .jsonl file of trajectories is needed")
    found = sorted({file for pattern in JOURNALS for file in path.glob(pattern)})
    if not found:
        raise DataError(f"folder {str(path)!r} holds no trajectories; looked for {', '.join(JOURNALS)}")
    return found


def read_run(path: str | Path, *, say: Callable[[Remark], None] = _log) -> Iterator[Trajectory]:
    """Every trajectory of a run, once: of all files of its folder, or of one file.

    One is known again by its request_id, its step and whether it was validation; `uid` names its group, `sample_index`
    its place there. A torn last line, of a process that was killed while it wrote, is left out.

    Args:
        path: the folder or the file.
        say: is told what was left out. The default logs a warning.

    Raises:
        DataError: there are no trajectories, or a line is none; with file and line.
    """
    yield from (trajectory for trajectory, _ in _unique_lines(journals_of(path), say))


def merge_journals(folder: Path, into: Path) -> int:
    """Write every trajectory of a folder, once, to one file; returns how many. Raises DataError as `read_run` does."""
    count = 0
    written = into.with_name(f".{into.name}.tmp")
    sources = [file for file in journals_of(folder) if not into.exists() or not file.samefile(into)]
    with written.open("wb") as merged:
        for _, line in _unique_lines(sources, _log):
            merged.write(line + b"\n")
            count += 1
    written.replace(into)
    return count


def _unique_lines(files: Iterable[Path], say: Callable[[Remark], None]) -> Iterator[tuple[Trajectory, bytes]]:
    seen: set[tuple[str, int, bool]] = set()
    for file in files:
        first: tuple[int, str] | None = None
        repeated = 0
        for number, line in whole_lines(file):
            if isinstance(line, TornLine):
                say(line)
                continue
            trajectory = _parsed(file, number, line)
            key = (trajectory.request_id, trajectory.step, trajectory.validate)
            if key in seen:
                first = first or (number, trajectory.request_id)
                repeated += 1
                continue
            seen.add(key)
            yield trajectory, line
        if first is not None:
            say(RepeatedLines(path=file, count=repeated, line=first[0], request_id=first[1]))


def _parsed(file: Path, number: int, line: bytes) -> Trajectory:
    try:
        return Trajectory.from_json(line)
    except DataError as error:
        raise DataError(f"{file}:{number}: {error}") from error
