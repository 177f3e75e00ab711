"""What becomes of a worker's finished conversations: rows, or none, and how many of which are told.

    training      kept ──► its rows          dropped ──► V1: no row · V0, `failed_rows: mask`, an empty group: a masked row
    validation    kept ──► its rows          dropped ──► always a row of reward 0, which counts

What training conversations came to rides on rows (`tally`), each one exactly once. A dropped one of V1 has no row, so its
numbers wait here for the worker's next training row.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field

from sglang_multiturn.failures import FailureLog
from sglang_multiturn.request import Disposition
from sglang_multiturn.trajectory import Trajectory
from sglang_multiturn.verl_plugin.rows import (
    TALLY,
    RowOutput,
    RowRules,
    VersionSpan,
    masked_row,
    training_rows,
    version_span,
)
from sglang_multiturn.verl_plugin.tally import Tally

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GroupCount:
    """How many sessions of a prompt have ended in this worker, and how many left a row.

    V1 runs all sessions of a prompt in one worker (agent_loop_tq.py:113), so the last one knows that the group is empty.
    """

    size: int
    ended: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)

    def is_empty_after(self, uid: str, *, kept: bool) -> bool:
        """Count one session; True when it was the group's last and none left a row."""
        self.ended[uid] += 1
        self.kept[uid] += kept
        if self.ended[uid] < self.size:
            return False
        del self.ended[uid]
        return self.kept.pop(uid) == 0


class RowKeeper:
    """One for all conversations of a worker."""

    def __init__(self, rules: RowRules, *, group_size: int | None) -> None:
        """`group_size` is that of the groups that V1's filter must find a row of; None where it does not run."""
        self._rules = rules
        self._groups = GroupCount(group_size) if group_size is not None else None
        self._waiting = Tally()
        self._failures = FailureLog()
        self._told: Counter[str] = Counter()

    def rows(self, trajectory: Trajectory, span: VersionSpan | None, *, takes_rows: bool) -> list[RowOutput]:
        """What verl gets of a conversation: where it `takes_rows` (V1) any number, else exactly one.

        Args:
            trajectory: the conversation.
            span: the weights that sampled it, from whoever knows better than the tokens do.
            takes_rows: whether verl can do without a row.
        """
        self._say_what_failed(trajectory)
        # Rollouts of step n are sampled by the weights of step n-1 (trainer_base.py:1758).
        known = [version for row in trajectory.rows for version in row.response_weight_versions]
        versions = span or version_span(known, unknown=max(0, trajectory.step - 1))
        kept = self._is_kept(trajectory)
        needs_row = self._needs_row(trajectory, kept=kept, takes_rows=takes_rows)
        rows: list[RowOutput] = []
        if kept:
            rows = training_rows(trajectory, self._rules, versions=versions, user_extra=takes_rows)
        elif needs_row:
            rows = [masked_row(trajectory, self._rules, versions=versions, user_extra=takes_rows)]
        if not kept:
            self._say_what_became(trajectory, has_row=bool(rows))
        if not trajectory.validate:
            self._tally(trajectory, rows, versions)
        return rows

    def _is_kept(self, trajectory: Trajectory) -> bool:
        if trajectory.disposition is Disposition.DROP:
            return False
        wanted = self._rules.wants_logprobs(trajectory)
        if wanted and any(row.response_logprobs is None for row in trajectory.rows):
            logger.error("request %s: verl's server sent no log-probabilities; dropped", trajectory.request_id)
            return False
        return True

    def _needs_row(self, trajectory: Trajectory, *, kept: bool, takes_rows: bool) -> bool:
        if trajectory.validate or not takes_rows:
            return True
        group_is_empty = self._groups is not None and self._groups.is_empty_after(trajectory.uid, kept=kept)
        return group_is_empty or self._rules.settings.failed_rows == "mask"

    def _tally(self, trajectory: Trajectory, rows: list[RowOutput], versions: VersionSpan) -> None:
        one = Tally.of(
            trajectory,
            has_row=bool(rows),
            trains=any(any(row.response_mask) for row in rows),
            versions=versions.newest - versions.oldest + 1,
        )
        self._waiting.add(one.numbers)
        if rows:
            rows[0].extra_fields[TALLY] = self._waiting.take()

    # What is logged

    def _say_what_became(self, trajectory: Trajectory, *, has_row: bool) -> None:
        became = "dropped: no row, its group is smaller by one"
        if trajectory.validate:
            became = "counted as reward 0 in validation"
        elif has_row:
            became = "kept as a masked row of reward 0, which shifts its group's mean and deviation"
        self._told[what := f"trajectories ended as {trajectory.stop_reason.value} in this worker; {became}"] += 1
        if _is_told(count := self._told[what]):
            logger.warning("%d %s", count, what)

    def _say_what_failed(self, trajectory: Trajectory) -> None:
        for failure, count in self._failures.add(trajectory):
            if count == 1:
                logger.warning("the first %s in this worker: %s", failure.kind, failure)
            elif _is_told(count):
                logger.warning("%d times %s in this worker by now", count, failure.kind)


def _is_told(count: int) -> bool:
    """Whether this is the 1st, 2nd, 4th, 8th, ... of its kind."""
    return count & (count - 1) == 0
