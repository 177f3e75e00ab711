"""What a set of trajectories amounts to: counts, rates and rewards, computed as they come."""

from __future__ import annotations

import collections
import dataclasses
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from sglang_multiturn.failures import FailureLog
from sglang_multiturn.metrics import RolloutMetrics
from sglang_multiturn.request import RequestState
from sglang_multiturn.tools.host import HostLeaks
from sglang_multiturn.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaks:
    """What tools left over. All 0 when every instance was released and every call came to its end."""

    not_released: int
    """Instances that were created, and neither released nor lost."""
    lost_instances: int
    """Instances that went with their process."""
    release_errors: int
    left_behind_calls: int
    """Calls that could not be ended and still run: a thread that blocks, a coroutine that ignores its cancellation."""
    live_processes: int
    """Processes of tools that are still there."""

    @classmethod
    def of(cls, metrics: RolloutMetrics, held: HostLeaks) -> Leaks:
        """The leaks that a sum of metrics shows, and what the tools' hosts hold when no conversation runs any more."""
        ended = metrics.tool_instances_released + metrics.lost_instances
        return cls(
            not_released=metrics.tool_instances_created - ended,
            lost_instances=metrics.lost_instances,
            release_errors=metrics.release_errors,
            left_behind_calls=held.left_behind,
            live_processes=held.live_processes,
        )

    @property
    def clean(self) -> bool:
        """Whether nothing was left over."""
        return not any(dataclasses.astuple(self))


class RunSummary:
    """Add trajectories, read figures, the same in whatever order they came. Holds no trajectory."""

    def __init__(self) -> None:
        self.rollouts = 0
        self.failed = 0
        self.prompt_tokens = 0
        self.response_tokens = 0
        self.sampled_tokens = 0
        self.stop_reasons: collections.Counter[str] = collections.Counter()
        self.failures = FailureLog()
        self._drift: dict[str, tuple[int, str]] = {}
        """By kind, the example of the earliest request, and its place."""
        self.rows = 0
        self.metrics = RolloutMetrics()
        self.held = HostLeaks()
        """What the tools' hosts hold after the batch, from whoever has them."""
        self._reward_sum = Fraction()
        """Exact: a sum of floats depends on their order."""
        self._rewarded = 0
        self._with_calls = 0

    def add(self, trajectory: Trajectory) -> None:
        """Count one trajectory in."""
        self.rollouts += 1
        self.failed += trajectory.state is RequestState.FAILED
        self.stop_reasons[trajectory.stop_reason.value] += 1
        self.metrics.add(trajectory.metrics)
        self._with_calls += trajectory.metrics.tool_calls > 0
        for row in trajectory.rows:
            self.rows += 1
            self.prompt_tokens += row.num_prompt_tokens
            self.response_tokens += row.num_response_tokens
            self.sampled_tokens += row.num_sampled_tokens
        for drift in trajectory.drift:
            example = (trajectory.input_index, f"{trajectory.request_id}: {drift}")
            self._drift[drift.kind.value] = min(example, self._drift.get(drift.kind.value, example))
        if trajectory.reward is not None and math.isfinite(trajectory.reward):
            self._reward_sum += Fraction(trajectory.reward)
            self._rewarded += 1
        self.failures.add(trajectory)

    @property
    def reward_mean(self) -> float:
        """Mean over the rollouts that have a reward; NaN when none has."""
        return float(self._reward_sum / self._rewarded) if self._rewarded else math.nan

    @property
    def drift_examples(self) -> dict[str, str]:
        """By kind, the earliest request's."""
        return {kind: example for kind, (_, example) in sorted(self._drift.items())}

    @property
    def ends(self) -> list[tuple[str, int]]:
        """Stop reasons and how many ended so, the most frequent first."""
        return sorted(self.stop_reasons.items(), key=lambda item: (-item[1], item[0]))

    @property
    def tool_call_rate(self) -> float:
        """Part of the rollouts that tried at least one tool call."""
        return self._with_calls / self.rollouts if self.rollouts else 0.0

    @property
    def malformed_call_rate(self) -> float:
        """Part of the tool calls that did not parse."""
        return self.metrics.malformed_calls / self.metrics.tool_calls if self.metrics.tool_calls else 0.0

    @property
    def turns_mean(self) -> float:
        """Assistant turns a rollout."""
        return self.metrics.assistant_turns / self.rollouts if self.rollouts else 0.0

    @property
    def leaks(self) -> Leaks:
        """What tools left over so far."""
        return Leaks.of(self.metrics, self.held)

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {
            "rollouts": self.rollouts,
            "rows": self.rows,
            "failed": self.failed,
            "reward_mean": None if math.isnan(self.reward_mean) else self.reward_mean,
            "tool_call_rate": self.tool_call_rate,
            "malformed_call_rate": self.malformed_call_rate,
            "turns_mean": self.turns_mean,
            "stop_reasons": dict(self.ends),
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
            "sampled_tokens": self.sampled_tokens,
            "failure_examples": self.failures.to_dict(),
            "leaks": dataclasses.asdict(self.leaks),
            "drift_examples": self.drift_examples,
            "metrics": dataclasses.asdict(self.metrics),
        }
