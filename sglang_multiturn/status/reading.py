"""What the files in a run's folder say is in flight, whoever wrote them: this run, another node, a process that is gone."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from sglang_multiturn.errors import ConfigError, DataError
from sglang_multiturn.journal import JOURNALS
from sglang_multiturn.request import RequestState
from sglang_multiturn.run_folder.in_flight import FILES, RunningRequest, Snapshot

_DEPTHS = ("", "*/", "*/*/")
"""A run's folder, and folders of runs."""
_SILENT_AFTER_S = 10.0
"""Beyond the time at which the next file was due."""
_STUCK_AFTER_S = 2.0


class Condition(StrEnum):
    """How a process that wrote a file is."""

    RUNNING = "running"
    SILENT = "silent"
    """It should have written again long ago, and whether it lives is not seen from here, or it does and is stuck."""
    GONE = "gone"
    """It has ended; this is what was in flight then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One process of a run."""

    folder: Path
    condition: Condition
    snapshot: Snapshot
    at_s: float
    """When it was read."""

    @property
    def label(self) -> str:
        """What it is called beside others."""
        mark = self.snapshot.process
        return f"{self.snapshot.name}@{mark.host}:{mark.pid}"

    @property
    def stuck_s(self) -> float | None:
        """For how long its event loop had not moved when it wrote; None if it moved, or stood for a moment only."""
        since_s = self.snapshot.loop_stuck_since_s
        stuck_s = 0.0 if since_s is None else self.snapshot.written_s - since_s
        return stuck_s if stuck_s > _STUCK_AFTER_S else None

    @property
    def silent_s(self) -> float:
        """Time since it wrote, by this host's clock."""
        return max(0.0, self.at_s - self.snapshot.written_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What is in flight in a run, or in several."""

    at_s: float
    folders: tuple[Path, ...]
    workers: tuple[Worker, ...]
    finished: int
    """Lines of the journals."""
    earlier_files: int
    """Left by processes that ended before those began that run now; not among `workers`."""
    unreadable: tuple[str, ...]

    def rows(self, *conditions: Condition) -> list[tuple[Worker, RunningRequest]]:
        """Conversations of the workers in these conditions, oldest first."""
        chosen = [worker for worker in self.workers if worker.condition in conditions]
        rows = [(worker, request) for worker in chosen for request in worker.snapshot.requests]
        return sorted(rows, key=lambda row: row[1].running_since_s)

    def in_flight(self, *conditions: Condition) -> Counter[RequestState]:
        """How many are in each state, those included that are not listed."""
        counts: Counter[RequestState] = Counter()
        for worker in self.workers:
            if worker.condition in conditions:
                counts.update(worker.snapshot.states)
        return counts


class StatusReader:
    """Reads a run's folder again and again; of its journals only what is new."""

    def __init__(self, run: Path) -> None:
        """`run`: its folder, or one that holds several runs, at most two levels below it."""
        self._run = run
        self._counted: dict[Path, tuple[int, int]] = {}
        """By journal: bytes read, and lines in them."""

    def read(self) -> Status:
        """How things stand now.

        Raises:
            ConfigError: there is no such folder, or no run has written there.
        """
        if not self._run.is_dir():
            raise ConfigError(
                f"{self._run}: there is no such folder; give the --out folder of a rollout, or journal_dir"
            )
        now_s = time.time()
        files, journals = self._found(FILES), self._found(*JOURNALS)
        if not files and not journals:
            raise ConfigError(
                f"{self._run}: no run has written here, nor in folders below it. Give the --out folder of a rollout; "
                "in verl set journal_dir under rollout: of the tool YAML, and give that folder"
            )
        workers, unreadable = self._workers(files, now_s)
        shown = _without_earlier(workers)
        return Status(
            at_s=now_s,
            folders=tuple(sorted({path.parent for path in files + journals})),
            workers=tuple(worker for worker in shown if worker.condition is not Condition.GONE or _tells(worker)),
            finished=sum(map(self._lines, journals)),
            earlier_files=len(workers) - len(shown),
            unreadable=tuple(unreadable),
        )

    def _found(self, *patterns: str) -> list[Path]:
        found = {path for depth in _DEPTHS for pattern in patterns for path in self._run.glob(depth + pattern)}
        return sorted(path for path in found if path.is_file())

    @staticmethod
    def _workers(files: list[Path], now_s: float) -> tuple[list[Worker], list[str]]:
        workers, unreadable = [], []
        for path in files:
            try:
                snapshot = Snapshot.from_file(path)
            except FileNotFoundError:
                continue  # its process closed it just now
            except (OSError, DataError) as error:
                unreadable.append(str(error))
                continue
            condition = _condition(snapshot, now_s)
            workers.append(Worker(folder=path.parent, condition=condition, snapshot=snapshot, at_s=now_s))
        return workers, unreadable

    def _lines(self, journal: Path) -> int:
        """Whole lines of a journal that grows."""
        done, lines = self._counted.get(journal, (0, 0))
        try:
            with journal.open("rb") as file:
                if file.seek(0, 2) < done:  # begun anew
                    done = lines = 0
                file.seek(done)
                while chunk := file.read(1 << 20):
                    done += len(chunk)
                    lines += chunk.count(b"\n")
        except OSError:
            return lines
        self._counted[journal] = (done, lines)
        return lines


def _condition(snapshot: Snapshot, now_s: float) -> Condition:
    alive = snapshot.process.is_alive()
    if alive is False:
        return Condition.GONE
    due_s = snapshot.written_s + snapshot.every_s + _SILENT_AFTER_S
    return Condition.SILENT if snapshot.in_flight and now_s > due_s else Condition.RUNNING


def _without_earlier(workers: list[Worker]) -> list[Worker]:
    """Leave out processes of earlier runs in a folder in which another one goes on."""
    shown: list[Worker] = []
    for _, group in itertools.groupby(workers, key=lambda worker: worker.folder):
        together = list(group)
        began_s = min((w.snapshot.started_s for w in together if w.condition is not Condition.GONE), default=0.0)
        shown += [w for w in together if w.condition is not Condition.GONE or w.snapshot.written_s >= began_s]
    return shown


def _tells(worker: Worker) -> bool:
    return worker.snapshot.in_flight > 0
