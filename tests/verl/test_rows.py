"""Rows, token by token, for every way a conversation can end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl")

from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from sglang_multiturn.config import RolloutConfig
from sglang_multiturn.engine.base import FinishReason, Generation
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.metrics import RolloutMetrics
from sglang_multiturn.request import Disposition, StopReason, final_state
from sglang_multiturn.rewards import combine
from sglang_multiturn.tokens import Origin, Segment, TokenLedger
from sglang_multiturn.trajectory import CallOutcome, Rewards, ToolCallRecord, Trajectory
from sglang_multiturn.verl_plugin.readings import refuse_split, scores_here
from sglang_multiturn.verl_plugin.rows import RowOutput, RowRules, VersionSpan, masked_row, training_rows, version_span


def rules_with(**settings: Any) -> RowRules:
    return RowRules(
        scored_here=True,
        with_logprobs=True,
        max_prompt_tokens=3,
        filler_id=99,
        settings=RolloutConfig(**settings),
    )


RULES = rules_with()
HALF_STEPS = rules_with(step_rewards="sum", step_reward_weight=0.5)
PROMPT = [1, 2, 3]
#                sampled, turn 0    tool         boundary  sampled, turn 1   tool after the last sampled token
RESPONSE_IDS = [10, 11, 12, 20, 21, 22, 13, 14]
RESPONSE_MASK = [1, 1, 1, 0, 0, 0, 1, 1]
RESPONSE_LOGPROBS = [-0.125, -0.25, -0.5, 0.0, 0.0, 0.0, -0.75, -1.5]
VERSIONS = VersionSpan(4, 5)


def two_turn_ledger(*, logprobs: bool = True) -> TokenLedger:
    ledger = TokenLedger()
    ledger.append_prompt(PROMPT)
    for turn, (ids, values, version) in enumerate(
        [([10, 11, 12], [-0.125, -0.25, -0.5], 4), ([13, 14], [-0.75, -1.5], 5)]
    ):
        generation = Generation(
            token_ids=ids,
            logprobs=values if logprobs else None,
            finish_reason=FinishReason.STOP,
            weight_version=version,
        )
        ledger.append_sampled(generation, turn=turn, given=ledger.input_ids)
        ledger.append_observation([20, 21], origin=Origin.TOOL, turn=turn, call_id=f"call{turn:02d}000")
        ledger.append_observation([22], origin=Origin.BOUNDARY, turn=turn)
    return ledger


def call(turn: int, reward: float, name: str = "calculator", outcome: CallOutcome = CallOutcome.OK) -> ToolCallRecord:
    return ToolCallRecord(
        call_id=f"call{turn:02d}000",
        turn=turn,
        name=name,
        arguments={},
        outcome=outcome,
        answer="4",
        reward=reward,
    )


def split_ledgers() -> list[TokenLedger]:
    """A conversation in three rows: turns 0 and 1, then turn 2 under a new prompt, then a prompt nobody answered."""
    first, second, third = two_turn_ledger(), TokenLedger(), TokenLedger()
    second.append_prompt([1, 2, 3, 13, 14, 30])
    last = Generation(token_ids=[15, 16], logprobs=[-2.0, -3.0], finish_reason=FinishReason.STOP, weight_version=5)
    second.append_sampled(last, turn=2, given=second.input_ids)
    third.append_prompt([1, 2, 3, 13, 14, 30, 15, 16, 31])
    return [first, second, third]


def trajectory(
    stop_reason: StopReason = StopReason.ANSWERED,
    *,
    disposition: Disposition | None = None,
    ledger: TokenLedger | None = None,
    ledgers: list[TokenLedger] | None = None,
    rewards: Rewards | None = None,
    calls: Sequence[ToolCallRecord] = (call(0, 0.5), call(1, 0.0)),
) -> Trajectory:
    disposition = disposition or RolloutConfig().disposition(stop_reason)
    ledgers = ledgers or [ledger if ledger is not None else two_turn_ledger()]
    scored = Rewards(reward=0.75, score=0.75, tool_rewards=(0.5, 0.0))
    return Trajectory(
        request_id="u1-s0-g6",
        uid="u1",
        sample_index=0,
        input_index=0,
        state=final_state(stop_reason),
        stop_reason=stop_reason,
        disposition=disposition,
        segments=tuple(segment for one in ledgers for segment in one.segments),
        turns=tuple(turn for one in ledgers for turn in one.turns),
        messages=(),
        rewards=rewards or (Rewards() if disposition is Disposition.DROP else scored),
        tool_calls=tuple(calls),
        metrics=RolloutMetrics(assistant_turns=2, tool_turns=2, generate_s=1.5, tool_s=0.25, reward_s=0.125),
    )


def build(one: Trajectory, rules: RowRules = RULES, *, user_extra: bool = True) -> RowOutput:
    if one.disposition is Disposition.DROP:
        return masked_row(one, rules, versions=VERSIONS, user_extra=user_extra)
    (row,) = training_rows(one, rules, versions=VERSIONS, user_extra=user_extra)
    return row


KEPT = [reason for reason in StopReason if RolloutConfig().disposition(reason) is not Disposition.DROP]
DROPPED = [reason for reason in StopReason if reason not in KEPT]


@pytest.mark.parametrize("reason", KEPT)
def test_a_kept_trajectory_is_its_tokens_up_to_the_last_sampled_one(reason: StopReason) -> None:
    row = build(trajectory(reason))
    assert row.prompt_ids == PROMPT
    assert row.response_ids == RESPONSE_IDS
    assert row.response_mask == RESPONSE_MASK
    assert row.response_logprobs == RESPONSE_LOGPROBS
    assert row.reward_score == 0.75


@pytest.mark.parametrize("reason", DROPPED)
def test_a_dropped_trajectory_that_needs_a_row_is_one_masked_token(reason: StopReason) -> None:
    row = build(trajectory(reason))
    assert row.prompt_ids == PROMPT
    assert (row.response_ids, row.response_mask, row.response_logprobs) == ([99], [0], [0.0])
    assert row.reward_score == 0.0


@pytest.mark.parametrize("user_extra", [True, False], ids=["v1", "v0"])
def test_rows_of_all_stop_reasons_set_the_same_fields(user_extra: bool) -> None:
    rows = [build(trajectory(reason), user_extra=user_extra) for reason in StopReason]
    assert len({frozenset(row.model_fields_set) for row in rows}) == 1
    assert len({frozenset(row.extra_fields) for row in rows}) == 1
    assert len({frozenset(row.extra_fields["reward_extra_info"]) for row in rows}) == 1
    assert len({frozenset(row.as_dict()) for row in rows}) == 1


@pytest.mark.parametrize("reason", StopReason)
def test_what_stands_beside_the_tokens(reason: StopReason) -> None:
    row = build(trajectory(reason))
    assert row.num_turns == 5
    assert row.metrics.model_dump() == {
        "generate_sequences": 1.5,
        "tool_calls": 0.25,
        "compute_score": 0.125,
        "num_preempted": -1,
    }
    fields = dict(row.extra_fields)
    score = 0.0 if reason in DROPPED else 0.75
    assert fields.pop("reward_extra_info") == {"score": score, "acc": score}
    assert fields == {
        "min_global_steps": 4,
        "max_global_steps": 5,
        "turn_scores": [],
        "tool_rewards": [] if reason in DROPPED else [0.5, 0.0],
        "calc_rewards": {},
        "request_id": "u1-s0-g6",
        "stop_reason": reason.value,
        "rollout_tally": {},
    }


def test_a_trajectory_with_disposition_mask_keeps_tokens_and_reward_and_trains_nothing() -> None:
    row = build(trajectory(StopReason.MAX_RESPONSE_TOKENS, disposition=Disposition.MASK))
    assert row.response_ids == RESPONSE_IDS
    assert row.response_mask == [0] * 8
    assert row.response_logprobs == RESPONSE_LOGPROBS
    assert row.reward_score == 0.75


def test_a_kept_trajectory_without_a_sampled_token_still_has_a_row() -> None:
    ledger = TokenLedger()
    ledger.append_prompt(PROMPT)
    empty = Generation(token_ids=[], logprobs=[], finish_reason=FinishReason.STOP, weight_version=4)
    ledger.append_sampled(empty, turn=0, given=ledger.input_ids)
    row = build(trajectory(ledger=ledger))
    assert (row.response_ids, row.response_mask, row.response_logprobs) == ([99], [0], [0.0])
    assert row.reward_score == 0.75


def test_only_a_masked_row_cuts_a_prompt_that_verl_could_not_pad() -> None:
    ledger = TokenLedger([Segment(origin=Origin.PROMPT, turn=0, ids=array("i", [1, 2, 3, 4, 5]))])
    assert build(trajectory(StopReason.PROMPT_TOO_LONG, ledger=ledger)).prompt_ids == [3, 4, 5]


def test_a_masked_row_has_a_prompt_even_when_none_was_rendered() -> None:
    assert build(trajectory(StopReason.ERROR, ledger=TokenLedger())).prompt_ids == [99]


def test_no_row_has_log_probabilities_when_verl_asked_for_none() -> None:
    rules = RowRules(scored_here=True, with_logprobs=False, max_prompt_tokens=3, filler_id=99)
    assert [build(trajectory(reason), rules).response_logprobs for reason in StopReason] == [None] * len(StopReason)


def test_no_row_has_a_reward_when_verl_scores() -> None:
    rules = RowRules(scored_here=False, with_logprobs=True, max_prompt_tokens=3, filler_id=99)
    rows = [build(trajectory(reason, rewards=Rewards()), rules) for reason in StopReason]
    assert [row.reward_score for row in rows] == [None] * len(StopReason)
    assert all("rm_scores" not in row.as_dict() for row in rows)


def test_the_reward_stands_on_the_last_token() -> None:
    assert build(trajectory()).as_dict()["rm_scores"].tolist() == [0.0] * 7 + [0.75]


def test_step_rewards_stand_on_the_last_sampled_token_of_their_turn() -> None:
    scored = Rewards(reward=1.25, score=1.0, tool_rewards=(0.5, 0.0))
    row = build(trajectory(rewards=scored), HALF_STEPS)
    assert row.reward_score == 1.25  # what V0 reads: the sum
    assert row.as_dict()["rm_scores"].tolist() == [0.0, 0.0, 0.25, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_a_split_conversation_is_a_row_for_each_prompt_that_was_answered() -> None:
    whole = trajectory(ledgers=split_ledgers())
    whole.check()
    first, second = training_rows(whole, RULES, versions=VERSIONS, user_extra=True)
    assert (first.prompt_ids, first.response_ids, first.response_mask) == (PROMPT, RESPONSE_IDS, RESPONSE_MASK)
    assert (second.prompt_ids, second.response_ids, second.response_mask) == ([1, 2, 3, 13, 14, 30], [15, 16], [1, 1])
    assert (first.response_logprobs, second.response_logprobs) == (RESPONSE_LOGPROBS, [-2.0, -3.0])
    assert first.model_fields_set == second.model_fields_set
    assert first.as_dict().keys() == second.as_dict().keys()
    assert first.extra_fields == second.extra_fields
    columns = list_of_dict_to_tensordict([first.as_dict(), second.as_dict()])  # what verl makes of them
    assert [len(row) for row in columns["response_mask"].unbind()] == [8, 2]
    assert (first.num_turns, second.num_turns) == (5, 5)


def test_every_row_of_a_split_conversation_has_the_whole_reward_and_its_own_steps() -> None:
    whole = trajectory(ledgers=split_ledgers(), rewards=Rewards(reward=1.25, score=1.0, tool_rewards=(0.5, 0.0)))
    rows = training_rows(whole, HALF_STEPS, versions=VERSIONS, user_extra=True)
    assert [row.reward_score for row in rows] == [1.25, 1.25]
    assert [row.as_dict()["rm_scores"].tolist() for row in rows] == [
        [0.0, 0.0, 0.25, 0.0, 0.0, 0.0, 0.0, 1.0],
        [0.0, 1.25],
    ]


@pytest.mark.parametrize(
    ("settings", "calls", "expected"),
    [
        # The second call of turn 0 is the last that returned; turn 1's timed out.
        (
            {"step_rewards": "last"},
            [call(0, 0.5), call(0, 0.25), call(1, 0.0, outcome=CallOutcome.TIMEOUT)],
            [0.0, 0.0, 0.25, 0.0, 0.0, 0.0, 0.0, 1.0],
        ),
        ({"step_rewards": "last"}, [call(0, 0.5), call(1, 0.25)], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.25]),
        (
            {"step_rewards": "sum", "step_reward_weight": {"calculator": 2.0}},
            [call(0, 0.5), call(0, 4.0, "search"), call(0, 0.125), call(1, -1.0)],
            [0.0, 0.0, 1.25, 0.0, 0.0, 0.0, 0.0, -1.0],
        ),
        (
            {"step_rewards": "sum", "calc_rewards": "sum", "calc_reward_weight": 0.5, "score_weight": 4.0},
            [call(0, 0.5), call(1, 0.0)],
            [0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 5.0],
        ),
        ({"calc_rewards": "last"}, [call(0, 0.5)], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0]),
    ],
)
def test_which_step_rewards_stand_where(
    settings: dict[str, Any], calls: list[ToolCallRecord], expected: list[float]
) -> None:
    """The score is 1.0 and `calc_reward` is 2.0; what is no step reward stands on the last token."""
    rules = rules_with(**settings)
    rewards = combined(rules, score=1.0, calls=calls, calc_rewards={"calculator": 2.0})
    row = build(trajectory(rewards=rewards, calls=calls), rules)
    assert row.as_dict()["rm_scores"].tolist() == expected
    assert row.reward_score == sum(expected)


def combined(rules: RowRules, *, score: float, calls: Sequence[ToolCallRecord], calc_rewards: Any = None) -> Rewards:
    given = {"calc_rewards": calc_rewards or {}, "calc_errors": {}, "extra": {}}
    return combine(rules.settings, score=score, calls=calls, scored=True, **given)


some_rewards = st.integers(-1000, 1000).map(lambda thousandths: thousandths / 1000)
some_calls = st.lists(
    st.builds(
        call,
        st.integers(0, 2),
        some_rewards,
        st.sampled_from(["calculator", "search"]),
        st.sampled_from([CallOutcome.OK, CallOutcome.OK, CallOutcome.TIMEOUT, CallOutcome.SKIPPED]),
    ),
    max_size=6,
).map(lambda calls: sorted(calls, key=lambda one: one.turn))


@settings(max_examples=300, deadline=None)
@given(
    calls=some_calls,
    score=some_rewards,
    step_rewards=st.sampled_from(["off", "sum", "last"]),
    weight=some_rewards | st.fixed_dictionaries({}, optional={"calculator": some_rewards, "search": some_rewards}),
    split=st.booleans(),
)
def test_the_rewards_of_every_row_add_up_to_the_reward_whatever_counts(
    calls: list[ToolCallRecord], score: float, step_rewards: str, weight: Any, split: bool
) -> None:
    rules = rules_with(step_rewards=step_rewards, step_reward_weight=weight)
    rewards = combined(rules, score=score, calls=calls)
    whole = trajectory(ledgers=split_ledgers() if split else None, rewards=rewards, calls=calls)
    assert rewards.reward is not None
    for row in training_rows(whole, rules, versions=VERSIONS, user_extra=True):
        scores = row.as_dict()["rm_scores"]
        assert row.reward_score == rewards.reward
        assert abs(float(scores.double().sum()) - rewards.reward) <= 2.0**-21
        # Forwards, backwards and as verl adds them up: the very same number, so that equal rewards stay equal.
        sums = {float(scores.sum()), float(scores.flip(0).cumsum(0)[-1]), float(scores.double().sum())}
        assert len(sums) == 1
        ends = {row.response_ids.index(token) for token in (12, 14, 16) if token in row.response_ids}
        assert {at for at, value in enumerate(scores.tolist()) if value} <= ends


@settings(max_examples=200, deadline=None)
@given(rewards=st.lists(some_rewards, min_size=1, max_size=5), order=st.randoms(use_true_random=False))
def test_rollouts_of_equal_reward_have_equal_sums_wherever_it_was_earned(rewards: list[float], order: Any) -> None:
    """Else the group filter would keep such a group, and GRPO would divide by the rounding."""
    rules = rules_with(step_rewards="sum")
    shuffled = list(rewards)
    order.shuffle(shuffled)
    sums = set()
    for turn, values in ((0, rewards), (1, rewards), (0, shuffled)):
        calls = [call(turn, value) for value in values]
        one = trajectory(rewards=combined(rules, score=0.1, calls=calls), calls=calls)
        sums.add(float(build(one, rules).as_dict()["rm_scores"].sum()))
    assert len(sums) == 1


def test_what_counts_is_told_part_by_part_on_every_row_and_under_v0_too() -> None:
    rules = rules_with(step_rewards="sum", step_reward_weight=0.5, calc_rewards="sum", score_weight=2.0)
    calls = [call(0, 0.5), call(1, 0.25)]
    rewards = combined(rules, score=1.0, calls=calls, calc_rewards={"calculator": 2.0, "search": 1.0})
    for user_extra in (True, False):
        kept = build(trajectory(rewards=rewards, calls=calls), rules, user_extra=user_extra).extra_fields
        assert kept["reward_extra_info"] == {"score": 1.0, "acc": 1.0, "step_reward": 0.375, "calc_reward": 3.0}
        assert kept["tool_rewards"] == [0.5, 0.25]
        assert kept["calc_rewards"] == {"calculator": 2.0, "search": 1.0}
        dropped = build(trajectory(StopReason.ERROR, calls=calls), rules, user_extra=user_extra).extra_fields
        assert dropped["reward_extra_info"] == {"score": 0.0, "acc": 0.0, "step_reward": 0.0, "calc_reward": 0.0}
    columns = list_of_dict_to_tensordict([build(trajectory(rewards=rewards, calls=calls), rules).as_dict()])
    assert columns["extra_fields"][0]["calc_rewards"] == {"calculator": 2.0, "search": 1.0}


def test_verl_counts_a_session_once_however_many_rows_it_has() -> None:
    """Through verl's own advantage: one session of two rows beside one of one row, rewards 1.25 and 0.25."""
    import torch
    from verl.protocol import DataProto
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    rows = training_rows(
        trajectory(ledgers=split_ledgers(), rewards=Rewards(reward=1.25, score=1.25)),
        RULES,
        versions=VERSIONS,
        user_extra=True,
    )
    rows += training_rows(trajectory(rewards=Rewards(reward=0.25)), RULES, versions=VERSIONS, user_extra=True)
    masks = [torch.tensor(row.response_mask) for row in rows]
    rewards = [row.as_dict()["rm_scores"] for row in rows]
    padded = {
        "response_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True),
        "token_level_rewards": torch.nn.utils.rnn.pad_sequence(rewards, batch_first=True),
    }
    data = DataProto.from_dict(padded, non_tensors={"uid": np.array(["u1"] * 3, dtype=object)})
    done = compute_advantage_for_multi_trajectories(
        data, ["u1_0_0", "u1_0_1", "u1_1_0"], adv_estimator="grpo", norm_adv_by_std_in_grpo=False
    )
    assert done.batch["advantages"][:, 0].tolist() == [0.5, 0.5, -0.5]  # of the mean 0.75, not of 0.9166


@pytest.mark.parametrize("estimator", ["rloo", "grpo_passk", "reinforce_plus_plus_baseline", "opo", "mine"])
def test_a_split_is_refused_where_a_session_would_count_several_times(estimator: str) -> None:
    config = OmegaConf.create({"trainer": {"use_v1": True}, "algorithm": {"adv_estimator": estimator}})
    with pytest.raises(
        ConfigError, match=f"adv_estimator={estimator} compares all rows .*use gae, grpo, reinforce_plus"
    ):
        refuse_split(config)


@pytest.mark.parametrize("estimator", ["grpo", "gae", "reinforce_plus_plus"])
def test_a_split_is_refused_without_the_v1_trainer_and_fine_with_it(estimator: str) -> None:
    algorithm = {"adv_estimator": estimator}
    refuse_split(OmegaConf.create({"trainer": {"use_v1": True}, "algorithm": algorithm}))
    for config in ({"trainer": {"use_v1": False}, "algorithm": algorithm}, {"algorithm": algorithm}):
        with pytest.raises(ConfigError, match=r"set trainer\.use_v1=true"):
            refuse_split(OmegaConf.create(config))


def rewarded_by(manager: str = "naive", *, reward_model: bool = False) -> Any:
    return OmegaConf.create(
        {
            "reward": {
                "reward_model": {"enable": reward_model},
                "reward_manager": {"source": "register", "name": manager},
            }
        }
    )


def test_rows_have_a_reward_when_a_function_or_tools_give_one() -> None:
    off, steps, calc = RolloutConfig(), RolloutConfig(step_rewards="sum"), RolloutConfig(calc_rewards="last")
    assert scores_here(rewarded_by(), off, lambda **_: 1.0)
    assert [scores_here(rewarded_by(), settings, None) for settings in (off, steps, calc)] == [False, True, True]
    assert not scores_here(rewarded_by("dapo", reward_model=True), off, None)


@pytest.mark.parametrize("config", [rewarded_by("dapo"), rewarded_by(reward_model=True)], ids=["manager", "model"])
def test_tools_rewards_are_refused_where_verl_would_leave_its_own_scorer_out(config: Any) -> None:
    with pytest.raises(ConfigError, match="step_rewards and calc_rewards cannot be added to what verl's reward model"):
        scores_here(config, RolloutConfig(calc_rewards="sum"), None)


def test_what_a_reward_function_adds_is_there_under_v1_and_not_under_v0() -> None:
    scored = trajectory(rewards=Rewards(reward=1.0, score=1.0, extra={"format": 0.5, "acc": 0.25}))
    assert build(scored).extra_fields["reward_extra_info"] == {"score": 1.0, "acc": 0.25, "format": 0.5}
    assert build(scored, user_extra=False).extra_fields["reward_extra_info"] == {"score": 1.0, "acc": 1.0}


def test_a_masked_row_has_the_key_that_the_group_filter_reads() -> None:
    rules = RowRules(scored_here=True, with_logprobs=True, max_prompt_tokens=3, filler_id=99, unscored_extra=("f1",))
    assert build(trajectory(StopReason.ERROR), rules).extra_fields["reward_extra_info"]["f1"] == 0.0
    scored = trajectory(rewards=Rewards(reward=1.0, score=1.0, extra={"f1": 0.5}))
    assert build(scored, rules).extra_fields["reward_extra_info"]["f1"] == 0.5


@pytest.mark.parametrize(
    ("versions", "expected"),
    [([4, None, 5], VersionSpan(4, 5)), ([None, None], VersionSpan(7, 7)), ([], VersionSpan(7, 7))],
)
def test_version_span(versions: list[Any], expected: VersionSpan) -> None:
    assert version_span(versions, unknown=7) == expected
