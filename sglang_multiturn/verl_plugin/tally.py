"""What rollouts came to, as plain numbers that ride on training rows, and the figures a trainer logs of them.

A tally is a flat mapping, so that it passes through verl's columns and TransferQueue like any other field. Numbers under
`max/` are combined by their maximum, all others are added up; what is 0 is left out.

verl's V1 trainer combines the steps of one `parameter_sync_step` by a figure's *name* (`MetricsAggregator`): `total` is
added up, `max` is a maximum, all else an average. So no figure here has one of those words in its name by accident.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Self

from sglang_multiturn.request import StopReason
from sglang_multiturn.trajectory import Trajectory

PREFIX = "rollout"

_MEANS: Mapping[str, tuple[str, ...]] = {
    "turns": ("assistant_turns",),
    "tool_calls": ("tool_calls",),
    "tool_retries": ("tool_retries",),
    "cut_tool_results": ("cut_tool_results",),
    "engine_retries": ("engine_retries",),
    "suspensions": ("suspensions",),
    "drift_tokens": ("drift_special_tokens", "drift_boundary_tokens"),
    "lost_instances": ("lost_instances",),
    "restored_instances": ("restored_instances",),
    "snapshot_errors": ("snapshot_errors",),
    "release_errors": ("release_errors",),
    "calc_reward_errors": ("calc_reward_errors",),
    "injected_faults": ("injected_faults",),
    "sampled_tokens": ("sampled_tokens",),
    "response_tokens": ("response_tokens",),
    "versions": ("versions",),
}
_CALL_ERRORS: Mapping[str, str] = {
    "malformed": "malformed_calls",
    "unknown_tool": "unknown_tools",
    "invalid_arguments": "invalid_arguments",
    "skipped": "skipped_calls",
    "tool_error": "tool_errors",
    "timeout": "tool_timeouts",
    "died": "tool_deaths",
    "raised": "tool_crashes",
}
_SECONDS: Mapping[str, str] = {
    "generate": "generate_s",
    "queue": "queue_s",
    "tools": "tool_s",
    "tool_queue": "tool_queue_s",
    "reward": "reward_s",
    "conversation": "total_s",
}
_FAILED = frozenset({StopReason.ERROR, StopReason.ABORTED, StopReason.PROMPT_TOO_LONG})
_LONGEST = ("generate", "tools", "conversation")
"""Seconds whose largest is told beside the mean: a step waits for its longest rollout."""


@dataclasses.dataclass(slots=True)
class Tally:
    """Of any number of rollouts."""

    numbers: dict[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, trajectory: Trajectory, *, has_row: bool, trains: bool, versions: int) -> Self:
        """One rollout's.

        Args:
            trajectory: the rollout.
            has_row: whether it left verl a row.
            trains: whether anything of that row is trained.
            versions: how many weight versions its tokens span, at least 1.
        """
        reason, metrics = trajectory.stop_reason.value, trajectory.metrics
        numbers = {field.name: float(getattr(metrics, field.name)) for field in dataclasses.fields(metrics)}
        numbers |= {
            "rollouts": 1,
            f"stop_reason/{reason}": 1,
            f"dropped/{reason}": not has_row,
            f"masked/{reason}": has_row and not trains,
            "with_tool_calls": metrics.tool_calls > 0,
            "sampled_tokens": sum(row.num_sampled_tokens for row in trajectory.rows),
            "response_tokens": sum(row.num_response_tokens for row in trajectory.rows),
            "versions": versions,
            "max/versions": versions,
            "scores": trajectory.rewards.score or 0.0,
            "scored": trajectory.rewards.score is not None,
        }
        numbers |= {f"max/{name}": numbers[_SECONDS[name]] for name in _LONGEST}
        return cls({name: float(value) for name, value in numbers.items() if value})

    @classmethod
    def total(cls, tallies: Iterable[Mapping[str, float]]) -> Self:
        """Of many, as they rode on rows."""
        summed = cls()
        for numbers in tallies:
            summed.add(numbers)
        return summed

    def add(self, numbers: Mapping[str, float]) -> None:
        """Add another tally's numbers to these."""
        for name, value in numbers.items():
            before = self.numbers.get(name, 0.0)
            self.numbers[name] = max(before, value) if name.startswith("max/") else before + value

    def take(self) -> dict[str, float]:
        """All numbers so far, which are forgotten here."""
        taken, self.numbers = self.numbers, {}
        return taken

    def figures(self) -> dict[str, float]:
        """What a trainer logs: always the same names, but for the reasons of what was dropped or masked."""
        if not self._get("rollouts"):
            return {}
        figures = {"rollouts_total": self._get("rollouts"), "with_tool_calls": self._part("with_tool_calls")}
        for what in ("dropped", "masked"):
            counts = {name: count for name, count in self.numbers.items() if name.startswith(f"{what}/")}
            figures[f"{what}_total"] = sum(counts.values())
            figures |= {f"{what}_total/{_named(name.partition('/')[2])}": count for name, count in counts.items()}
        figures |= {f"stop_reason/{_named(reason)}": self._part(f"stop_reason/{reason}") for reason in StopReason}
        figures |= {f"{name}/mean": sum(map(self._part, of)) for name, of in _MEANS.items()}
        figures |= {f"seconds/{name}/mean": self._part(of) for name, of in _SECONDS.items()}
        figures |= {f"seconds/{name}/max": self._get(f"max/{name}") for name in _LONGEST}
        figures |= {f"call_errors/{name}": self._part(of, "tool_calls") for name, of in _CALL_ERRORS.items()}
        figures["versions/max"] = self._get("max/versions")
        if self._get("scored"):
            figures["score/mean"] = self._part("scores", "scored")
        return {f"{PREFIX}/{name}": value for name, value in figures.items()}

    def _get(self, name: str) -> float:
        return self.numbers.get(name, 0.0)

    def _part(self, name: str, of: str = "rollouts") -> float:
        return self._get(name) / self._get(of) if self._get(of) else 0.0


def _named(reason: str) -> str:
    """A stop reason in a figure's name: `limit_...` for `max_...`, which verl would take a maximum of."""
    return reason.replace("max_", "limit_", 1) if reason.startswith("max_") else reason


def validation_figures(trajectory: Trajectory) -> dict[str, float]:
    """Of one validation rollout, for `reward_extra_info`: verl averages each over its data source (`val-aux/...`)."""
    metrics, reason = trajectory.metrics, trajectory.stop_reason
    return {
        "failed": float(reason in _FAILED),
        "timed_out": float(reason is StopReason.TIMEOUT),
        "tool_calls": float(metrics.tool_calls),
        "failed_calls": float(sum(getattr(metrics, name) for name in _CALL_ERRORS.values())),
        "malformed_calls": float(metrics.malformed_calls),
        "response_tokens": float(sum(row.num_response_tokens for row in trajectory.rows)),
    }
