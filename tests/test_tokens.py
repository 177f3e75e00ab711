"""The ledger: exact lists by hand, and its invariants over random conversations."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_multiturn.engine.base import FinishReason, Generation
from sglang_multiturn.errors import LedgerError
from sglang_multiturn.tokens import Origin, TokenLedger, digest_ids

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def sampled(ids: list[int], logprobs: list[float] | None, reason: FinishReason = STOP, version: int = 0) -> Generation:
    return Generation(token_ids=ids, logprobs=logprobs, finish_reason=reason, weight_version=version)


def two_turns() -> TokenLedger:
    """Prompt 1 2 3; the model says 10 11 END(99); tool answers 20 21 in boundaries; the model says 12 END."""
    ledger = TokenLedger()
    ledger.append_prompt([1, 2, 3])
    ledger.append_sampled(sampled([10, 11, 99], [-0.5, -1.5, -0.25], version=4), turn=0, given=[1, 2, 3])
    ledger.append_observation([7, 8], origin=Origin.BOUNDARY, turn=0)
    ledger.append_observation([20, 21], origin=Origin.TOOL, turn=0, call_id="call_0_0")
    ledger.append_observation([9], origin=Origin.BOUNDARY, turn=0)
    ledger.append_sampled(sampled([12, 99], [-2.0, -0.125], version=5), turn=1, given=ledger.input_ids)
    return ledger


def test_two_turns_with_a_tool_between_them_by_hand() -> None:
    ledger = two_turns()
    assert ledger.prompt_ids == [1, 2, 3]
    assert ledger.response_ids == [10, 11, 99, 7, 8, 20, 21, 9, 12, 99]
    assert ledger.response_mask() == [1, 1, 1, 0, 0, 0, 0, 0, 1, 1]
    assert ledger.response_logprobs == [-0.5, -1.5, -0.25, 0.0, 0.0, 0.0, 0.0, 0.0, -2.0, -0.125]
    assert ledger.response_weight_versions == [4, 4, 4, None, None, None, None, None, 5, 5]
    assert "".join(o.value[0] for o in ledger.response_origins) == "sssbbttbss"
    assert ledger.response_mask(cleared=True) == [0] * 10
    assert (ledger.num_prompt_tokens, ledger.num_response_tokens, ledger.num_sampled_tokens) == (3, 10, 5)
    assert (ledger.turn_end(0), ledger.turn_end(1), ledger.turn_end(2)) == (2, 9, None)
    assert [record.input_tokens for record in ledger.turns] == [3, 11]
    ledger.check()


def test_a_row_ends_with_the_last_sampled_token() -> None:
    ledger = two_turns()
    assert ledger.num_tokens_to_last_sampled == 10
    ledger.append_observation([30, 31], origin=Origin.TOOL, turn=1, call_id="call_1_0")
    assert ledger.num_tokens_to_last_sampled == 10
    assert ledger.last_sampled_id is None


def test_an_empty_generation_counts_as_a_turn_and_has_no_tokens() -> None:
    ledger = TokenLedger()
    ledger.append_prompt([1])
    ledger.append_sampled(sampled([], []), turn=0, given=[1])
    assert ledger.response_ids == ledger.response_mask() == ledger.response_logprobs == []
    assert (len(ledger.turns), ledger.last_sampled_id, ledger.num_tokens_to_last_sampled) == (1, None, 0)
    ledger.check()


def test_without_log_probabilities_there_are_none_for_the_whole_row() -> None:
    ledger = TokenLedger()
    ledger.append_prompt([1])
    ledger.append_sampled(sampled([5], None), turn=0, given=[1])
    assert ledger.response_logprobs is None
    ledger.check()


def test_a_log_probability_too_many_is_refused() -> None:
    ledger = TokenLedger()
    ledger.append_prompt([1])
    with pytest.raises(LedgerError, match="turn 0: 2 token ids but 3 log-probabilities"):
        ledger.append_sampled(sampled([5, 6], [-1.0, -1.0, -1.0]), turn=0, given=[1])


def test_the_prompt_comes_first_and_once() -> None:
    ledger = two_turns()
    with pytest.raises(LedgerError, match="the prompt comes first and once"):
        ledger.append_prompt([1])
    with pytest.raises(LedgerError, match="cannot have origin 'sampled'"):
        ledger.append_observation([1], origin=Origin.SAMPLED, turn=0)


def test_check_finds_a_turn_that_was_given_other_tokens() -> None:
    ledger = TokenLedger()
    ledger.append_prompt([1, 2])
    ledger.append_sampled(sampled([5], [-1.0]), turn=0, given=[1, 3])
    with pytest.raises(LedgerError, match="turn 0: the engine was not given the tokens that stand before it"):
        ledger.check()


def test_check_finds_an_end_token_that_stands_twice_or_nowhere() -> None:
    ledger = two_turns()
    ledger.check(end_id=99)
    with pytest.raises(LedgerError, match="turn 0: the end-of-turn id 6 stands nowhere"):
        ledger.check(end_id=6)
    doubled = TokenLedger()
    doubled.append_prompt([1])
    doubled.append_sampled(sampled([5, 99], [-1.0, -1.0]), turn=0, given=[1])
    doubled.append_observation([99, 7], origin=Origin.BOUNDARY, turn=0)
    with pytest.raises(LedgerError, match="turn 0: the end-of-turn id 99 stands twice"):
        doubled.check(end_id=99)


def test_a_failed_append_leaves_no_record_behind() -> None:
    ledger = TokenLedger()
    ledger.append_prompt([1])
    with pytest.raises(LedgerError):
        ledger.append_sampled(sampled([5], [-1.0, -1.0]), turn=0, given=[1])
    ledger.append_sampled(sampled([5], [-1.0]), turn=0, given=[1])
    ledger.check()


token_ids = st.lists(st.integers(0, 2**31 - 1), max_size=12)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("sampled"), token_ids, st.sampled_from(list(FinishReason))),
        st.tuples(st.sampled_from([Origin.TOOL, Origin.USER, Origin.BOUNDARY]), token_ids, st.none()),
    ),
    max_size=12,
)


@given(prompt=token_ids, plan=steps)
def test_invariants_over_random_conversations(prompt: list[int], plan: list[tuple[object, list[int], object]]) -> None:
    ledger = TokenLedger()
    ledger.append_prompt(prompt)
    said: list[int] = []
    seen: list[list[int]] = []
    for kind, ids, reason in plan:
        if kind == "sampled":
            assert isinstance(reason, FinishReason)
            seen.append(ledger.input_ids)
            generation = sampled(ids, [-float(i) for i in range(len(ids))], reason)
            ledger.append_sampled(generation, turn=len(seen) - 1, given=seen[-1])
            said += ids
        else:
            assert isinstance(kind, Origin)
            ledger.append_observation(ids, origin=kind, turn=max(0, len(seen) - 1))
        mask, logprobs = ledger.response_mask(), ledger.response_logprobs
        assert logprobs is not None
        assert len(ledger.response_ids) == len(mask) == len(logprobs) == len(ledger.response_weight_versions)
        assert [i for i, m in zip(ledger.response_ids, mask, strict=True) if m] == said
        assert all(p == 0.0 for p, m in zip(logprobs, mask, strict=True) if not m)
        assert ledger.prompt_ids + ledger.response_ids == ledger.input_ids
        ledger.check()
    for earlier, later in itertools.pairwise(seen):
        assert later[: len(earlier)] == earlier
    copy = TokenLedger(ledger.segments, ledger.turns)
    assert copy.input_ids == ledger.input_ids
    assert copy.response_mask() == ledger.response_mask()
    assert digest_ids(copy.input_ids) == digest_ids(ledger.input_ids)
