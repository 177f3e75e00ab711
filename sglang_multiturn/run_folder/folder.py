"""The folder of a standalone run: what was asked, what has ended, and what that makes of the rest.

    run.json             what was asked, and by which processes it was worked on: written before anything starts
    tools.yaml           a copy of the tool YAML
    trajectories.jsonl   what has ended, a line each
    trajectories.marks   what runs and what tools hold; only while that is so, or after a crash
    in_flight-*.json     what runs at this moment, for `sglang-multiturn status`
    summary.json         written once every rollout has ended

Together they make a run that was killed at any moment go on: what has its line is done, everything else is asked again.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from sglang_multiturn.errors import ConfigError, DataError
from sglang_multiturn.journal import JournalWriter, read_run
from sglang_multiturn.request import RequestSpec, RequestState
from sglang_multiturn.run_folder.asked import KEPT_TOOLS, Asked, Attempt
from sglang_multiturn.run_folder.durable import replace_file
from sglang_multiturn.run_folder.in_flight import FILES as IN_FLIGHT_FILES
from sglang_multiturn.run_folder.marks import HeldInstance
from sglang_multiturn.summary import RunSummary

_SEED_STEP = 1_000_003
_MAX_SEED = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Stock:
    """Where a run stands when a process takes it up."""

    summary: RunSummary
    """Of what has ended."""
    left: Sequence[RequestSpec]
    """What is still to do, in the order in which it was asked."""
    in_flight: Sequence[str] = ()
    """Ids of those of it that had begun when an earlier process ended."""
    held: Sequence[HeldInstance] = ()
    """Tool instances that earlier processes made and, being killed, did not release."""
    retried: Sequence[str] = ()
    """Ids of those that had FAILED and are asked again."""


class RunFolder:
    """A run's folder while this process works on it; nobody else can meanwhile."""

    def __init__(self, path: Path, asked: Asked, *, fsync: bool = False) -> None:
        """Take the folder.

        Raises:
            ConfigError: another process works on it, or it cannot be written to.
        """
        self.path = path
        self.journal_path = path / "trajectories.jsonl"
        self.asked = asked
        self._last_sign_s = max((file.stat().st_mtime for file in path.glob("trajectories.*")), default=0.0)
        try:
            self.journal = JournalWriter(self.journal_path, fsync=fsync)
        except OSError as error:
            raise ConfigError(f"--out {path} cannot be written to: {error}") from error

    @classmethod
    def begin(cls, path: Path, asked: Asked, *, overwrite: bool, fsync: bool = False) -> Self:
        """Begin a run there.

        Raises:
            ConfigError: the folder holds trajectories of another run and `overwrite` does not say to forget them.
        """
        folder = cls(path, asked, fsync=fsync)
        try:
            if not folder.journal.is_empty and not overwrite:
                raise ConfigError(
                    f"{folder.journal_path} exists already; {_how_to_go_on(path)}give another --out, or --overwrite to "
                    "replace it"
                )
            for name in ("run.json", "summary.json"):  # in this order: what is left is never taken for the new run
                (path / name).unlink(missing_ok=True)
            folder.journal.clear()
            if (tools := asked.files.get("tools")) is not None:
                shutil.copyfile(tools.path, path / KEPT_TOOLS)
            folder._note_attempt(finished_before=0)
        except BaseException:
            folder.close()
            raise
        return folder

    @classmethod
    def reopen(cls, path: Path, asked: Asked, *, fsync: bool = False) -> Self:
        """Go on with the run there; `asked` is what it was asked, with the options of now. Raises ConfigError."""
        folder = cls(path, asked, fsync=fsync)
        try:
            earlier = Asked.read(path).attempts  # again: another process may have worked on it since `asked` was read
            folder.asked = asked.model_copy(update={"attempts": _ended(earlier, folder._last_sign_s)})
        except BaseException:
            folder.close()
            raise
        return folder

    def take_stock(self, specs: Sequence[RequestSpec], *, retry_failed: bool = False) -> Stock:
        """Read what has ended, and note that this process goes on with the rest.

        Args:
            specs: every request of the run.
            retry_failed: ask those that FAILED again; what they came to is moved to `trajectories.retried`.

        Raises:
            DataError: the journal holds a rollout that was not asked, or was asked otherwise.
        """
        retried = self.journal.set_aside(lambda one: one.state is RequestState.FAILED) if retry_failed else []
        asked = {spec.request_id: spec for spec in specs}
        summary, done = RunSummary(), set()
        for trajectory in read_run(self.journal_path):
            if (spec := asked.get(trajectory.request_id)) is None or spec.digest != trajectory.spec_digest:
                what = "is not asked by these rows" if spec is None else "was asked otherwise"
                raise DataError(
                    f"{self.journal_path}: rollout {trajectory.request_id} {what}; begin another run with another --out"
                )
            done.add(trajectory.request_id)
            summary.add(trajectory)
        self._note_attempt(finished_before=len(done))
        earlier = self.journal.marks.earlier
        begun = dict.fromkeys(name for attempt in earlier for name in attempt.begun)
        return Stock(
            summary=summary,
            left=[spec for spec in specs if spec.request_id not in done],
            in_flight=[name for name in begun if name in asked and name not in done],
            held=[instance for attempt in earlier for instance in attempt.held.values()],
            retried=retried,
        )

    @property
    def engine_seed(self) -> int:
        """Another one for each process: with the first one's, a group's further samples could repeat its earlier ones."""
        return (self.asked.options.seed + _SEED_STEP * (len(self.asked.attempts) - 1)) % _MAX_SEED

    def finish(self, summary: RunSummary, wall_s: float) -> float:
        """Write the summary of the whole run; returns the seconds that all processes together took.

        Args:
            summary: of every rollout, whichever process ended it.
            wall_s: what this process took.
        """
        self._end_attempt(wall_s)
        total_s = sum(attempt.wall_s or 0.0 for attempt in self.asked.attempts)
        text = json.dumps({**summary.to_dict(), "wall_s": total_s}, indent=2)
        replace_file(self.path / "summary.json", text + "\n")
        return total_s

    def stop(self, wall_s: float) -> None:
        """Note that this process ends before the run does."""
        self._end_attempt(wall_s)

    def close(self) -> None:
        """Give the folder back; safe to call twice."""
        self.journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _note_attempt(self, finished_before: int) -> None:
        now = Attempt(
            started_at=datetime.datetime.now().astimezone().isoformat(timespec="milliseconds"),
            host=socket.gethostname(),
            pid=os.getpid(),
            finished_before=finished_before,
        )
        self._write(attempts=(*self.asked.attempts, now))
        for pattern in (IN_FLIGHT_FILES, f".{IN_FLIGHT_FILES}.tmp"):
            for picture in self.path.glob(pattern):  # of a process that was killed: what it had is asked again
                picture.unlink(missing_ok=True)

    def _end_attempt(self, wall_s: float) -> None:
        *earlier, now = self.asked.attempts
        self._write(attempts=(*earlier, now.model_copy(update={"wall_s": round(wall_s, 3)})))

    def _write(self, **changes: Any) -> None:
        self.asked = self.asked.model_copy(update=changes)
        self.asked.write(self.path)


def _how_to_go_on(path: Path) -> str:
    return f"go on with that run with --resume {path}, " if (path / "run.json").is_file() else ""


def _ended(attempts: Sequence[Attempt], last_sign_s: float) -> tuple[Attempt, ...]:
    """A process that was killed took until its last sign of life, as far as anyone knows."""
    return tuple(
        attempt
        if attempt.wall_s is not None
        else attempt.model_copy(update={"wall_s": round(max(0.0, last_sign_s - _seconds(attempt.started_at)), 3)})
        for attempt in attempts
    )


def _seconds(iso: str) -> float:
    return datetime.datetime.fromisoformat(iso).timestamp()
