"""The state machine: every pair of states, every stop reason."""

from __future__ import annotations

import dataclasses

import pytest

from sglang_multiturn.config import RolloutConfig
from sglang_multiturn.errors import InvalidTransitionError
from sglang_multiturn.request import (
    FINAL_STATES,
    TRANSITIONS,
    AsyncRolloutRequest,
    Disposition,
    RequestSpec,
    RequestState,
    StopReason,
    final_state,
)
from sglang_multiturn.schemas import Message

ALLOWED = {
    "PENDING": "RUNNING INTERACTING SUSPENDED COMPLETED FAILED ABORTED",
    "RUNNING": "RUNNING TOOL_CALLING INTERACTING SUSPENDED COMPLETED FAILED ABORTED",
    "TOOL_CALLING": "RUNNING INTERACTING SUSPENDED COMPLETED FAILED ABORTED",
    "INTERACTING": "RUNNING SUSPENDED COMPLETED FAILED ABORTED",
    "SUSPENDED": "PENDING RUNNING TOOL_CALLING INTERACTING COMPLETED FAILED ABORTED",
    "COMPLETED": "",
    "FAILED": "",
    "ABORTED": "",
}


def request_in(state: RequestState) -> AsyncRolloutRequest:
    request = AsyncRolloutRequest(
        RequestSpec(request_id="r-7", uid="u", messages=(Message(role="user", content="hi"),))
    )
    request.state = state
    return request


@pytest.mark.parametrize("to", RequestState)
@pytest.mark.parametrize("start", RequestState)
def test_every_transition_is_allowed_exactly_where_the_table_says(start: RequestState, to: RequestState) -> None:
    request = request_in(start)
    if to.value in ALLOWED[start].split():
        request.transition(to)
        assert request.state is to
    else:
        with pytest.raises(InvalidTransitionError, match=f"r-7: {start} -> {to} is not allowed"):
            request.transition(to)
        assert request.state is start


def test_the_table_knows_every_state_and_final_ones_lead_nowhere() -> None:
    assert set(TRANSITIONS) == set(RequestState)
    assert {state for state, allowed in TRANSITIONS.items() if not allowed} == FINAL_STATES


@pytest.mark.parametrize("reason", StopReason)
def test_every_stop_reason_has_a_final_state_and_a_disposition(reason: StopReason) -> None:
    request = request_in(RequestState.RUNNING)
    assert request.finish(reason) in FINAL_STATES
    assert request.state is final_state(reason)
    expected = {
        StopReason.TIMEOUT: Disposition.DROP,
        StopReason.PROMPT_TOO_LONG: Disposition.DROP,
        StopReason.ABORTED: Disposition.DROP,
        StopReason.ERROR: Disposition.DROP,
    }.get(reason, Disposition.TRAIN)
    assert RolloutConfig().disposition(reason) is expected


def test_policies_change_what_becomes_of_a_rollout() -> None:
    config = RolloutConfig(overlong="mask", timeout="train", failed="mask")
    assert config.disposition(StopReason.MAX_ASSISTANT_TURNS) is Disposition.MASK
    assert config.disposition(StopReason.TIMEOUT) is Disposition.TRAIN
    assert config.disposition(StopReason.ERROR) is Disposition.MASK
    assert config.disposition(StopReason.ANSWERED) is Disposition.TRAIN


def test_a_failure_keeps_type_message_and_cause() -> None:
    request = request_in(RequestState.TOOL_CALLING)
    try:
        try:
            raise KeyError("city")
        except KeyError as cause:
            raise ValueError("bad tool") from cause
    except ValueError as error:
        request.finish(StopReason.ERROR, error)
    assert request.state is RequestState.FAILED
    assert request.error is not None
    assert (request.error.type, request.error.message, request.error.cause) == (
        "ValueError",
        "bad tool",
        "KeyError: 'city'",
    )


def test_the_digest_recognises_the_same_request_and_no_other() -> None:
    spec = RequestSpec(request_id="a", uid="u", messages=(Message(role="user", content="hi"),), ground_truth="4")
    assert spec.digest == dataclasses.replace(spec).digest
    assert spec.digest != dataclasses.replace(spec, ground_truth="5").digest
    assert spec.digest != dataclasses.replace(spec, sample_index=1).digest
