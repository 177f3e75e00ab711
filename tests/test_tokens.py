"""The ledger: exact lists by hand, and its invariants over random conversations."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from sglang_multiturn.engine.base import FinishReason, Generation
from sglang_multiturn.errors import LedgerError
from sglang_multiturn.request import Disposition, RequestState, StopReason
from sglang_multiturn.tokens import Origin, Segment, TokenLedger, digest_ids, rows_of
from sglang_multiturn.trajectory import Trajectory

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def sampled(ids: list[int], logprobs: list[float] | None, reason: FinishReason = STOP, version: int = 0) -> Generation:
    return Generation(token_ids=ids, logprobs=logprobs, finish_reason=reason, weight_version=version)


def two_turns() -> TokenLedger:
    """Prompt 1 2 3; the model says 10 11 END(99); tool answers 20 21 in boundaries; the model says 12 END."""
    ledger = TokenLedger()
    ledger.append_prompt([1, 2, 3])
    ledger.append_sampled(sampled([10, 11, 99], [-0.5, -1.5, -0.25], version=4), turn=0, given=[1, 2, 3])
    ledger.append_observation([7, 8], origin=Origin.BOUNDARY, turn=0)
    ledger.append_observation([20, 21], origin=Origin.TOOL, turn=0, call_id="call00000")
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
    ledger.append_observation([30, 31], origin=Origin.TOOL, turn=1, call_id="call01000")
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
    ledger.check(end_ids={99})
    ledger.check(end_ids=frozenset({6, 99}))
    with pytest.raises(LedgerError, match=r"turn 0: an end-of-turn id \[6\] stands nowhere.* last id 99 nor .*, 7"):
        ledger.check(end_ids={6})
    doubled = TokenLedger()
    doubled.append_prompt([1])
    doubled.append_sampled(sampled([5, 99], [-1.0, -1.0]), turn=0, given=[1])
    doubled.append_observation([99, 7], origin=Origin.BOUNDARY, turn=0)
    with pytest.raises(LedgerError, match="turn 0: the end-of-turn id 99 stands twice"):
        doubled.check(end_ids={99})


def test_a_family_may_have_several_ends_and_another_one_than_was_sampled_may_follow() -> None:
    """GLM's turns end with the next one's opening: 50 for a user, 60 for a tool."""
    ledger = TokenLedger()
    ledger.append_prompt([1])
    ledger.append_sampled(sampled([5, 60], [-1.0, -1.0]), turn=0, given=[1])
    ledger.append_observation([7], origin=Origin.BOUNDARY, turn=0)
    ledger.append_sampled(sampled([6, 50], [-1.0, -1.0]), turn=1, given=ledger.input_ids)
    ledger.append_observation([60, 7], origin=Origin.BOUNDARY, turn=1)
    ledger.check(end_ids={50, 60})
    with pytest.raises(LedgerError, match=r"turn 0: an end-of-turn id \[50\] stands nowhere"):
        ledger.check(end_ids={50})


def test_a_prompt_starts_a_row_and_turns_go_with_what_they_sampled() -> None:
    first, second = two_turns(), TokenLedger()
    second.append_prompt([1, 2, 3, 12])
    second.append_sampled(sampled([13], [-0.5]), turn=2, given=[1, 2, 3, 12])
    rows = rows_of([*first.segments, *second.segments], [*first.turns, *second.turns])
    assert [row.input_ids for row in rows] == [first.input_ids, second.input_ids]
    assert [[record.turn for record in row.turns] for row in rows] == [[0, 1], [2]]
    for row in rows:
        row.check(end_ids={99})
    assert [row.input_ids for row in rows_of([], [])] == [[]]
    with pytest.raises(LedgerError, match="3 generations were recorded but 2 sampled segments stand"):
        rows_of(first.segments, [*first.turns, first.turns[0]])[0].check()


def long_trajectory() -> Trajectory:
    """32,756 tokens: 16 turns of 1,500 sampled ones with log-probabilities, each answered with 516."""
    chance = random.Random(0)
    ledger = TokenLedger()
    ledger.append_prompt(range(500))
    for turn in range(16):
        logprobs = array("f", [-chance.expovariate(1.0) for _ in range(1500)])
        ids = [chance.randrange(150_000) for _ in range(1500)]
        ledger.append_sampled(sampled(ids, logprobs.tolist()), turn=turn, given=ledger.input_ids)
        for origin, length in ((Origin.BOUNDARY, 8), (Origin.TOOL, 500), (Origin.BOUNDARY, 8)):
            ledger.append_observation(range(length), origin=origin, turn=turn)
    return Trajectory(
        request_id="r", uid="u", sample_index=0, input_index=0, state=RequestState.COMPLETED,
        stop_reason=StopReason.ANSWERED, disposition=Disposition.TRAIN, segments=ledger.segments, turns=ledger.turns,
        messages=(),
    )  # fmt: skip


def test_a_long_trajectory_costs_eight_bytes_a_token_and_what_is_derived_is_not_kept() -> None:
    long_trajectory()  # what is made once is made now
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    trajectory = long_trajectory()
    kept = tracemalloc.get_traced_memory()[0] - before
    trajectory.check()
    assert trajectory.response_logprobs is not None
    derived = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    tokens = trajectory.ledger.num_tokens
    assert tokens == 32_756
    assert kept < 8 * tokens
    assert derived - kept < 0.1 * tokens
    line = trajectory.to_json()
    assert len(line) < 17 * tokens
    assert Trajectory.from_json(line) == trajectory


@settings(max_examples=500, deadline=None)
@given(st.lists(st.floats(max_value=0.0, width=32), max_size=20))
def test_an_engines_log_probabilities_are_written_and_read_exactly(values: list[float]) -> None:
    ledger = TokenLedger()
    ledger.append_prompt([1])
    ledger.append_sampled(sampled(list(range(len(values))), values), turn=0, given=[1])
    assert ledger.response_logprobs == values
    adapter = TypeAdapter(Segment)
    if all(map(math.isfinite, values)):
        assert adapter.validate_json(adapter.dump_json(ledger.segments[1])) == ledger.segments[1]
    else:
        assert any(map(math.isnan, adapter.validate_json(adapter.dump_json(ledger.segments[1])).logprobs))


def test_tokens_that_are_no_numbers_are_refused() -> None:
    for bad in ({"ids": ["x"]}, {"ids": None}, {"ids": [2**40]}, {"ids": [1], "logprobs": ["x"]}):
        with pytest.raises(ValidationError, match="a list of numbers is needed"):
            TypeAdapter(Segment).validate_python({"origin": "sampled", "turn": 0, **bad})


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


@settings(deadline=None)
@given(prompt=token_ids, plan=steps)
def test_invariants_over_random_conversations(prompt: list[int], plan: list[tuple[object, list[int], object]]) -> None:
    ledger = TokenLedger()
    ledger.append_prompt(prompt)
    said: list[int] = []
    seen: list[list[int]] = []
    turn = -1
    for kind, ids, reason in plan:
        if kind == "sampled":
            assert isinstance(reason, FinishReason)
            seen.append(ledger.input_ids)
            generation = sampled(ids, [-float(i) for i in range(len(ids))], reason)
            turn += ledger.segments[-1].origin is not Origin.SAMPLED  # else a turn that was cut goes on
            ledger.append_sampled(generation, turn=turn, given=seen[-1])
            said += ids
        else:
            assert isinstance(kind, Origin)
            ledger.append_observation(ids, origin=kind, turn=max(0, turn))
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


def test_two_turns_with_nothing_between_them_are_found() -> None:
    ledger = TokenLedger()
    ledger.append_prompt([1])
    ledger.append_sampled(sampled([2], [-1.0], FinishReason.ABORT), turn=0, given=[1])
    ledger.append_sampled(sampled([3], [-1.0], FinishReason.STOP), turn=0, given=[1, 2])
    ledger.check()
    ledger.append_sampled(sampled([4], [-1.0], FinishReason.STOP), turn=1, given=[1, 2, 3])
    with pytest.raises(LedgerError, match="turn 1: nothing stands between it and turn 0"):
        ledger.check()
