"""What a rollout leaves behind: one `Trajectory` per request, whatever happened, in memory and as a line of JSON.

The tokens are the ledgers' segments, so ids, mask, log-probabilities and versions of a trajectory read from a file
are derived again, by the same code, from the same record. A prompt segment starts a row; with `history: keep`, the
default, there is one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from sglang_multiturn.chat.calls import BrokenKind
from sglang_multiturn.chat.drift import DriftExample
from sglang_multiturn.errors import DataError, LedgerError
from sglang_multiturn.metrics import RolloutMetrics
from sglang_multiturn.request import Disposition, ErrorRecord, RequestState, StopReason, final_state
from sglang_multiturn.schemas import Message
from sglang_multiturn.tokens import Segment, TokenLedger, TurnRecord, rows_of


class CallOutcome(StrEnum):
    """What became of one tool call."""

    OK = "ok"
    MALFORMED = "malformed"
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    SKIPPED = "skipped"
    TOOL_ERROR = "tool_error"
    TIMEOUT = "timeout"
    DIED = "died"
    """The tool's process died, or was killed for what it did."""
    RAISED = "raised"
    """The tool raised something that is no ToolError, or broke its contract."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallRecord:
    """One call and its answer."""

    call_id: str
    turn: int
    name: str
    arguments: dict[str, Any] | None
    """None when they did not parse."""
    outcome: CallOutcome
    broken: BrokenKind | None = None
    """What was wrong with a malformed one."""
    answer: str
    """What the model was shown."""
    reward: float = 0.0
    """The step reward `execute` returned."""
    metrics: dict[str, Any] = field(default_factory=dict)
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewards:
    """Every reward of a rollout and what was made of them."""

    reward: float | None = None
    """The one number the rollout is judged by; None when it was not scored."""
    score: float | None = None
    """What the reward function said of the model's own words."""
    tool_rewards: tuple[float, ...] = ()
    """Step rewards, in the order of the calls."""
    calc_rewards: dict[str, float] = field(default_factory=dict)
    """`calc_reward` of each tool, in the order in which they were created; 0.0 where it went wrong."""
    calc_errors: dict[str, ErrorRecord] = field(default_factory=dict)
    """What was raised by each `calc_reward` that went wrong and did not fail the rollout."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What a reward function returned beside its score."""


@dataclass(frozen=True, kw_only=True)
class Trajectory:
    """The result of one request."""

    request_id: str
    uid: str
    sample_index: int
    input_index: int
    state: RequestState
    stop_reason: StopReason
    disposition: Disposition
    segments: tuple[Segment, ...]
    turns: tuple[TurnRecord, ...]
    messages: tuple[Message, ...]
    rewards: Rewards = field(default_factory=Rewards)
    tool_calls: tuple[ToolCallRecord, ...] = ()
    error: ErrorRecord | None = None
    metrics: RolloutMetrics = field(default_factory=RolloutMetrics)
    release_errors: dict[str, ErrorRecord] = field(default_factory=dict)
    """The first thing raised by each tool's `release`; metrics have the count."""
    drift: tuple[DriftExample, ...] = ()
    """One example of each way in which the tokens differ from what the template renders; metrics have the counts."""
    truncated_sampling: bool = False
    """Sampling left the distribution whose log-probabilities are reported (top_p, top_k, min_p or penalties)."""
    data_source: str = ""
    ground_truth: Any = None
    validate: bool = False
    step: int = 0
    """The training step it was asked for; 0 where there is none."""
    restarts: int = 0
    """How often it was begun anew because its tokens had become too old."""
    stale_before: int | None = None
    """Tokens that weights older than this version sampled are masked."""
    spec_digest: str = ""

    @cached_property
    def rows(self) -> tuple[TokenLedger, ...]:
        """What is trained, at least one row. Together they hold every sampled token once."""
        return rows_of(self.segments, self.turns)

    @property
    def ledger(self) -> TokenLedger:
        """The last row, which is the only one unless `history: split` began another; all below is derived by it."""
        return self.rows[-1]

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's ids."""
        return self.ledger.prompt_ids

    @property
    def response_ids(self) -> list[int]:
        """All ids after the prompt; the next three lists have its length."""
        return self.ledger.response_ids

    @property
    def response_mask(self) -> list[int]:
        """1 on sampled tokens; all 0 when the disposition is `mask`."""
        return self.mask_of(self.ledger)

    def mask_of(self, row: TokenLedger) -> list[int]:
        """`response_mask` of one of the rows."""
        return row.response_mask(cleared=self.disposition is Disposition.MASK, stale_before=self.stale_before)

    @property
    def response_logprobs(self) -> list[float] | None:
        """0.0 where not sampled; None when the engine kept none."""
        return self.ledger.response_logprobs

    @property
    def response_weight_versions(self) -> list[int | None]:
        """None where not sampled or not known."""
        return self.ledger.response_weight_versions

    @property
    def num_turns(self) -> int:
        """Turns of everyone, the first user turn included, as verl's `__num_turns__` counts them."""
        return self.metrics.assistant_turns + self.metrics.tool_turns + self.metrics.user_turns + 1

    @property
    def reward(self) -> float | None:
        """Short for `rewards.reward`."""
        return self.rewards.reward

    def check(self, *, end_ids: Collection[int] | None = None) -> None:
        """Prove the invariants that one trajectory can show, in every row.

        Args:
            end_ids: the template's own ends of a turn (`ChatTemplate.end_ids`); None leaves the ends out.

        Raises:
            LedgerError: the tokens are not what the engine saw and said.
            DataError: state and stop_reason do not belong together.
        """
        for row in self.rows:
            try:
                row.check(end_ids=end_ids)
            except LedgerError as error:
                raise LedgerError(f"request {self.request_id}: {error}") from error
        if final_state(self.stop_reason) is not self.state:
            raise DataError(f"request {self.request_id}: state {self.state} does not belong to {self.stop_reason}")

    def to_json(self) -> str:
        """One line of JSON."""
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, line: str | bytes) -> Trajectory:
        """The trajectory a line holds. Raises DataError."""
        try:
            return _ADAPTER.validate_json(line)
        except ValidationError as error:
            raise DataError(f"not a trajectory: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error


_ADAPTER = TypeAdapter(Trajectory)


def read_trajectories(path: str | Path) -> Iterator[Trajectory]:
    """Every trajectory of a JSONL file. Raises DataError with file and line."""
    with Path(path).open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield Trajectory.from_json(line)
            except DataError as error:
                raise DataError(f"{path}:{number}: {error}") from error
