"""Trajectories on disk: a line of JSON each, written and flushed before anyone is told that one is finished."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from sglang_multiturn.trajectory import Trajectory


class JournalWriter:
    """Appends to one JSONL file; one writer a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, trajectory: Trajectory) -> None:
        """Append one line; it has left this process when this returns."""
        self._file.write(trajectory.to_json() + "\n")
        self._file.flush()

    def close(self) -> None:
        """Safe to call twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def merge_journals(folder: Path, into: Path) -> int:
    """Append all lines of a folder's JSONL files, in the order of their names; returns how many."""
    count = 0
    with into.open("w", encoding="utf-8") as merged:
        for path in sorted(folder.glob("*.jsonl")):
            with path.open(encoding="utf-8") as lines:
                for line in lines:
                    merged.write(line)
                    count += 1
    return count
