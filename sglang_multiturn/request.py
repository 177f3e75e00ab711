"""One request: what was asked, where it is, why it ended, and what becomes of it.

`RequestSpec` is what was asked: immutable, and hashed by whatever must recognise it again. `AsyncRolloutRequest` is
that conversation while it runs: the spec, the state and the tokens it owns. `state` says *where* it is,
`stop_reason` *why* it ended, `disposition` *what becomes of it*. One method changes the state, and it refuses what
`TRANSITIONS` does not list.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from sglang_multiturn.engine.base import SamplingParams
from sglang_multiturn.errors import InvalidTransitionError
from sglang_multiturn.metrics import RolloutMetrics
from sglang_multiturn.schemas import Message, plain_text
from sglang_multiturn.tokens import TokenLedger


class RequestState(StrEnum):
    """Where a request is."""

    PENDING = "PENDING"
    """Accepted; nothing was generated yet."""
    RUNNING = "RUNNING"
    """The engine is sampling a turn."""
    TOOL_CALLING = "TOOL_CALLING"
    """Tools are answering the last turn."""
    INTERACTING = "INTERACTING"
    """A user or an environment is answering the last turn."""
    SUSPENDED = "SUSPENDED"
    """Set aside with everything it has, to be resumed."""
    COMPLETED = "COMPLETED"
    """Ended as conversations end."""
    FAILED = "FAILED"
    """Ended by a fault that is not the model's."""
    ABORTED = "ABORTED"
    """Ended because someone asked for it."""


FINAL_STATES = frozenset({RequestState.COMPLETED, RequestState.FAILED, RequestState.ABORTED})

_S = RequestState
TRANSITIONS: Mapping[RequestState, frozenset[RequestState]] = MappingProxyType(
    {
        _S.PENDING: frozenset({_S.RUNNING, _S.INTERACTING, _S.SUSPENDED}) | FINAL_STATES,
        _S.RUNNING: frozenset({_S.RUNNING, _S.TOOL_CALLING, _S.INTERACTING, _S.SUSPENDED}) | FINAL_STATES,
        _S.TOOL_CALLING: frozenset({_S.RUNNING, _S.INTERACTING, _S.SUSPENDED}) | FINAL_STATES,
        _S.INTERACTING: frozenset({_S.RUNNING, _S.SUSPENDED}) | FINAL_STATES,
        _S.SUSPENDED: frozenset({_S.PENDING, _S.RUNNING, _S.TOOL_CALLING, _S.INTERACTING}) | FINAL_STATES,
        _S.COMPLETED: frozenset(),
        _S.FAILED: frozenset(),
        _S.ABORTED: frozenset(),
    }
)


class StopReason(StrEnum):
    """Why a whole rollout ended. (Why one generation ended is its `finish_reason`.)"""

    ANSWERED = "answered"
    """The model ended a turn without calling a tool."""
    TOOL_STOP = "tool_stop"
    """A tool said that the conversation is over."""
    USER_STOP = "user_stop"
    """The user said that the conversation is over."""
    ENVIRONMENT_DONE = "environment_done"
    """The environment reached its end."""
    TOO_MANY_ERRORS = "too_many_errors"
    """The model's calls went wrong too often in a row."""
    MAX_ASSISTANT_TURNS = "max_assistant_turns"
    MAX_USER_TURNS = "max_user_turns"
    MAX_TOOL_TURNS = "max_tool_turns"
    MAX_RESPONSE_TOKENS = "max_response_tokens"
    """The token budget of the whole conversation is used up."""
    MAX_MODEL_LEN = "max_model_len"
    """The model's context is full."""
    TIMEOUT = "timeout"
    """The whole rollout took too long; what it has is kept."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The prompt exceeds its limit. A prompt is never cut."""
    ABORTED = "aborted"
    """Someone asked for it to end."""
    ERROR = "error"
    """A fault that is not the model's."""


OVERLONG = frozenset(
    {
        StopReason.MAX_ASSISTANT_TURNS,
        StopReason.MAX_USER_TURNS,
        StopReason.MAX_TOOL_TURNS,
        StopReason.MAX_RESPONSE_TOKENS,
        StopReason.MAX_MODEL_LEN,
    }
)
"""Stop reasons that the `overlong` policy decides about."""


class Disposition(StrEnum):
    """What becomes of a finished rollout."""

    TRAIN = "train"
    """Scored and trained on."""
    MASK = "mask"
    """Kept as a row whose mask is all 0."""
    DROP = "drop"
    """No row; it takes no part in its group's mean and deviation."""


def final_state(stop_reason: StopReason) -> RequestState:
    """The final state each stop reason belongs to."""
    return {StopReason.ABORTED: RequestState.ABORTED, StopReason.ERROR: RequestState.FAILED}.get(
        stop_reason, RequestState.COMPLETED
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolKwargs:
    """A dataset row's own arguments for one tool, as verl's datasets carry them."""

    create_kwargs: Mapping[str, Any] = field(default_factory=dict)
    execute_kwargs: Mapping[str, Any] = field(default_factory=dict)
    calc_reward_kwargs: Mapping[str, Any] = field(default_factory=dict)
    release_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def as_verl(self) -> dict[str, dict[str, Any]]:
        """As it stands in a row of verl's: `{"create_kwargs": {...}, ...}`."""
        return {
            "create_kwargs": dict(self.create_kwargs),
            "execute_kwargs": dict(self.execute_kwargs),
            "calc_reward_kwargs": dict(self.calc_reward_kwargs),
            "release_kwargs": dict(self.release_kwargs),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """What was asked. `uid` names the prompt (the group), `request_id` this one conversation."""

    request_id: str
    uid: str
    sample_index: int = 0
    """Which of its group's samples this is."""
    input_index: int = 0
    """Position in the batch it came from."""
    messages: tuple[Message, ...]
    tool_names: tuple[str, ...] | None = None
    """Tools this conversation may call; None is all that are configured."""
    tools_kwargs: Mapping[str, ToolKwargs] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    data_source: str = ""
    ground_truth: Any = None
    extra_info: Mapping[str, Any] = field(default_factory=dict)
    validate: bool = False
    """Whether this is an evaluation rollout rather than a training one."""
    step: int = 0
    """The training step it was asked for; 0 where there is none."""

    @property
    def digest(self) -> str:
        """Recognises the same request again: a hash of everything that was asked."""
        asked = {
            "request_id": self.request_id,
            "uid": self.uid,
            "sample_index": self.sample_index,
            "messages": [message.for_template() for message in self.messages],
            "tool_names": self.tool_names,
            "tools_kwargs": {name: list(k.as_verl().values()) for name, k in self.tools_kwargs.items()},
            "sampling": repr(self.sampling),
            "data_source": self.data_source,
            "ground_truth": self.ground_truth,
        }
        text = json.dumps(asked, sort_keys=True, ensure_ascii=False, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRecord:
    """What failed, kept as data."""

    type: str
    message: str
    cause: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorRecord:
        """Type, message and the chain's first cause."""
        cause = error.__cause__ or error.__context__
        return cls(
            type=type(error).__name__,
            message=plain_text(str(error)[:2000]),
            cause=None if cause is None else plain_text(f"{type(cause).__name__}: {cause}"[:2000]),
        )


class AsyncRolloutRequest:
    """One conversation while it runs."""

    def __init__(self, spec: RequestSpec, *, restarts: int = 0, first_attempt: int = 0) -> None:
        self.spec = spec
        self.state = RequestState.PENDING
        self.suspended_in: RequestState | None = None
        """Where it goes on; None while it is not suspended."""
        self.waiting_for = ""
        """What it waits for at this moment, for people to read."""
        self.waiting_since_s = time.time()
        self.restarts = restarts
        """How often it was begun anew because its tokens had become too old."""
        self.first_attempt = self.attempts = first_attempt
        """Number of the first generation of each turn, and one above the highest so far: no `rid` comes twice."""
        self.stop_reason: StopReason | None = None
        self.error: ErrorRecord | None = None
        self.rows = [TokenLedger()]
        """What is trained, in order: one row, or several where `history: split` ended one and began another."""
        self.rendered_tokens = 0
        """Observation tokens that stand in a later row's prompt, where a new rendering put them."""
        self.messages: list[Message] = list(spec.messages)
        self.metrics = RolloutMetrics()
        self.errors_in_a_row = 0

    @property
    def request_id(self) -> str:
        """The one name of this conversation in engine, tools, logs and results."""
        return self.spec.request_id

    @property
    def ledger(self) -> TokenLedger:
        """The row that grows: what the engine is given."""
        return self.rows[-1]

    @property
    def num_response_tokens(self) -> int:
        """Everything said after the first prompt, each token once, in whatever row it stands."""
        return sum(row.num_response_tokens for row in self.rows) + self.rendered_tokens

    @property
    def is_final(self) -> bool:
        """Whether it has ended."""
        return self.state in FINAL_STATES

    def transition(self, to: RequestState) -> None:
        """Enter a state. Raises InvalidTransitionError when the table does not allow it."""
        allowed = TRANSITIONS[self.state]
        if to not in allowed:
            listed = ", ".join(sorted(allowed)) or "none, it has ended"
            raise InvalidTransitionError(
                f"request {self.request_id}: {self.state} -> {to} is not allowed; allowed: {listed}"
            )
        self.state = to

    def suspend(self) -> None:
        """Enter SUSPENDED and remember where it was. Raises InvalidTransitionError."""
        before = self.state
        self.transition(RequestState.SUSPENDED)
        self.suspended_in = before

    def resume(self) -> None:
        """Go back to where it was suspended. Raises InvalidTransitionError."""
        self.transition(self.suspended_in or RequestState.PENDING)
        self.suspended_in = None

    def wait_for(self, what: str) -> None:
        """Note what it waits for, and since when."""
        self.waiting_for, self.waiting_since_s = what, time.time()

    def finish(self, stop_reason: StopReason, error: BaseException | None = None) -> RequestState:
        """Enter the final state of `stop_reason` and return it."""
        self.transition(final_state(stop_reason))
        self.stop_reason = stop_reason
        self.error = None if error is None else ErrorRecord.of(error)
        return self.state


def begun_anew(request: AsyncRolloutRequest) -> AsyncRolloutRequest:
    """The same request from its start: its tokens are gone, what they cost is still counted."""
    again = AsyncRolloutRequest(request.spec, restarts=request.restarts + 1, first_attempt=request.attempts)
    again.metrics.add(dataclasses.replace(request.metrics, assistant_turns=0, user_turns=0, tool_turns=0))
    return again
