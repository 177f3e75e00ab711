"""`history: keep | split`: which tokens the next turn is given, how rows are cut, and what is counted."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from sglang_multiturn import RolloutConfig, RolloutEngine, ScriptedEngine, ScriptedTurn, ToolRegistry, Trajectory
from sglang_multiturn.chat.byte_chatml import ByteChatML
from sglang_multiturn.errors import ConfigError, TemplateError
from sglang_multiturn.request import StopReason
from sglang_multiturn.schemas import Message, Role, ToolSchema
from sglang_multiturn.summary import RunSummary
from sglang_multiturn.tokens import Origin, TokenLedger

from support import Asking, ForgetfulChatML, RecordingTool, call, context, roll, tokens

FORGETFUL = ForgetfulChatML()
THOUGHT = "<think>\nhm\n</think>\n\none"
SPLIT = RolloutConfig(history="split")


def shown(ledger: TokenLedger) -> tuple[list[int], list[int]]:
    return ledger.prompt_ids, ledger.response_ids


async def test_keep_goes_on_with_the_tokens_as_they_were() -> None:
    trajectory = await roll([THOUGHT, "two"], interaction=Asking("And?"), template=FORGETFUL)
    (row,) = trajectory.rows
    assert shown(row) == (
        tokens("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"),
        tokens(f"{THOUGHT}<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>"),
    )
    assert trajectory.metrics.drift_history_tokens == len("<think>\nhm\n</think>\n\n")
    assert (trajectory.metrics.new_rows, trajectory.metrics.drift_boundary_tokens) == (0, 0)


async def test_split_ends_the_row_and_begins_one_that_a_deployment_would_see() -> None:
    trajectory = await roll(
        [THOUGHT, "<think>\nso\n</think>\n\ntwo", "three"],
        config=SPLIT,
        interaction=Asking("a", "b"),
        template=FORGETFUL,
    )
    first, second, third = trajectory.rows
    opening = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    asked = f"{opening}one<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    again = f"{asked}two<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert shown(first) == (tokens(opening), tokens(f"{THOUGHT}<|im_end|>"))
    assert shown(second) == (tokens(asked), tokens("<think>\nso\n</think>\n\ntwo<|im_end|>"))
    assert shown(third) == (tokens(again), tokens("three<|im_end|>"))
    assert [[turn.turn for turn in row.turns] for row in trajectory.rows] == [[0], [1], [2]]
    assert (trajectory.prompt_ids, trajectory.response_ids) == shown(third)
    assert trajectory.ledger is third
    assert (trajectory.metrics.new_rows, trajectory.num_turns) == (2, 6)
    assert trajectory.drift == ()


async def test_a_row_that_is_what_a_deployment_would_see_goes_on() -> None:
    trajectory = await roll(["one", "two"], config=SPLIT, interaction=Asking("And?"), template=FORGETFUL)
    assert (len(trajectory.rows), trajectory.metrics.new_rows) == (1, 0)


async def test_a_row_in_which_a_broken_call_was_answered_goes_on() -> None:
    """The call stands in no message, and Gemma 4's template shows no answer without its call."""
    turns = ["<tool_call>\n{broken\n</tool_call>", THOUGHT, "done"]
    trajectory = await roll(turns, [RecordingTool()], SPLIT, interaction=Asking("And?"), template=FORGETFUL)
    assert (len(trajectory.rows), trajectory.metrics.refused_rows) == (1, 1)


async def test_a_role_whose_history_is_kept_does_not_split() -> None:
    trajectory = await roll(
        [f"<think>\nhm\n</think>\n\n{call('echo')}", THOUGHT, "done"],
        [RecordingTool()],
        SPLIT,
        interaction=Asking("And?"),
        template=FORGETFUL,
    )
    first, second = trajectory.rows
    assert [segment.origin for segment in first.segments if segment.origin is not Origin.BOUNDARY] == [
        Origin.PROMPT, Origin.SAMPLED, Origin.TOOL, Origin.SAMPLED,
    ]  # fmt: skip
    assert b"<think>" not in bytes(i for i in second.prompt_ids if i < 256)
    assert trajectory.tool_calls[0].turn == 0
    assert (first.turn_end(0), second.turn_end(0)) == (len(first.segments[1].ids) - 1, None)
    assert (first.turn_end(2), second.turn_end(2)) == (None, len("done"))


async def test_rows_are_read_back_from_a_file_and_proved_each_by_itself() -> None:
    trajectory = await roll([THOUGHT, "two"], config=SPLIT, interaction=Asking("And?"), template=FORGETFUL)
    copy = Trajectory.from_json(trajectory.to_json())
    assert [shown(row) for row in copy.rows] == [shown(row) for row in trajectory.rows]
    copy.check(end_ids=FORGETFUL.end_ids)
    turn = dataclasses.replace(copy.turns[1], input_digest="0" * 16)
    with pytest.raises(ValueError, match="request r: turn 1: the engine was not given the tokens"):
        dataclasses.replace(copy, turns=(copy.turns[0], turn)).check()
    with pytest.raises(ValueError, match="3 generations were recorded but 1 sampled segments"):
        dataclasses.replace(copy, turns=(*copy.turns, copy.turns[0], copy.turns[0])).check()


async def test_the_scorer_gets_the_words_of_every_row() -> None:
    seen: list[str] = []

    def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, str]) -> float:
        seen.extend([solution_str, extra_info["full_text"]])
        return 1.0

    await roll([THOUGHT, "two"], config=SPLIT, interaction=Asking("And?"), template=FORGETFUL, reward_fn=score)
    assert seen == [f"{THOUGHT}\ntwo", f"{THOUGHT}\ntwo"]


@pytest.mark.parametrize("budget", range(20, 130, 3))
async def test_a_conversation_has_the_same_budget_under_both_policies(budget: int) -> None:
    kept, split = [
        await roll(
            [THOUGHT, "two", "three"],
            config=RolloutConfig(history=history, max_response_tokens=budget),
            interaction=Asking("a" * 30, "b"),
            template=FORGETFUL,
        )
        for history in ("keep", "split")
    ]
    assert split.stop_reason is kept.stop_reason
    assert split.messages == kept.messages
    assert [turn.sampled_tokens for turn in split.turns] == [turn.sampled_tokens for turn in kept.turns]
    assert sum(row.num_response_tokens for row in split.rows) <= budget


async def test_a_new_row_that_the_models_context_cannot_hold_is_not_begun() -> None:
    opening = len(tokens("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
    asked = opening + len(tokens("one<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"))
    for limit, reason, rows in ((asked, StopReason.MAX_MODEL_LEN, 1), (asked + 4, StopReason.USER_STOP, 2)):
        trajectory = await roll(
            [THOUGHT, "two"],
            config=SPLIT,
            interaction=Asking("And?"),
            template=FORGETFUL,
            max_model_len=limit,
        )
        assert (trajectory.stop_reason, len(trajectory.rows)) == (reason, rows)


async def test_a_later_row_is_no_longer_than_a_kept_conversation_may_be() -> None:
    """The prompt limit is the dataset's: a later prompt may exceed it, but not prompt and response limit together."""

    class Longwinded(ForgetfulChatML):
        def encode_prompt(self, messages: Sequence[Message], tools: Sequence[ToolSchema]) -> list[int]:
            said = [m.model_copy(update={"content": f"{m.text}!!"}) if m.role == "assistant" else m for m in messages]
            return super().encode_prompt(said, tools)

    opening = len(tokens("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"))
    for extra in (0, 1):
        config = RolloutConfig(history="split", max_prompt_tokens=opening, max_response_tokens=90 + extra)
        trajectory = await roll(["one", "x" * 90], config=config, interaction=Asking("a" * 20), template=Longwinded())
        assert len(trajectory.rows) == 2
        assert trajectory.rows[1].num_prompt_tokens > opening
        assert trajectory.rows[1].num_tokens == opening + 90 + extra
        assert trajectory.stop_reason is StopReason.MAX_RESPONSE_TOKENS


async def test_a_row_goes_on_where_the_template_refuses_the_conversation() -> None:
    class Refusing(ForgetfulChatML):
        def encode_prompt(self, messages: list[Message], tools: list[ToolSchema]) -> list[int]:
            if len(messages) > 1:
                raise TemplateError("no")
            return super().encode_prompt(messages, tools)

    trajectory = await roll(["one", "two"], config=SPLIT, interaction=Asking("And?"), template=Refusing())
    assert len(trajectory.rows) == 1
    assert (trajectory.metrics.new_rows, trajectory.metrics.refused_rows) == (0, 1)
    assert trajectory.metrics.drift_not_comparable_tokens > 0
    assert trajectory.drift[0].rendering == "no"


async def test_a_summary_counts_rows_and_every_token_once() -> None:
    trajectory = await roll([THOUGHT, "two"], config=SPLIT, interaction=Asking("And?"), template=FORGETFUL)
    summary = RunSummary()
    summary.add(trajectory)
    assert (summary.rollouts, summary.rows) == (1, 2)
    assert summary.sampled_tokens == summary.response_tokens == len(THOUGHT) + 1 + 4


async def test_a_timeout_between_rows_leaves_a_row_without_a_sampled_token() -> None:
    trajectory = await roll(
        [THOUGHT, ScriptedTurn(text="two", hang_after=0)],
        config=RolloutConfig(history="split", rollout_timeout_s=0.05),
        interaction=Asking("And?"),
        template=FORGETFUL,
    )
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert [row.num_sampled_tokens for row in trajectory.rows] == [len(THOUGHT) + 1, 0]


# What a template can never show


class NoTools(ByteChatML):
    def refusal(self, role: Role) -> str | None:
        return "this template drops what tools say" if role == "tool" else None


class NoUsers(ByteChatML):
    def refusal(self, role: Role) -> str | None:
        return "this template wants tools only" if role == "user" else None


async def test_a_template_that_cannot_show_answers_is_refused_before_anything_runs() -> None:
    engine = ScriptedEngine(NoTools(), lambda *_: "x")
    with pytest.raises(TemplateError, match=r"tools are configured \(echo\).*drops what tools say; use a model"):
        RolloutEngine(engine, template=NoTools(), tools=ToolRegistry([RecordingTool()]))
    with pytest.raises(TemplateError, match=r"an interaction is configured.*wants tools only"):
        RolloutEngine(engine, template=NoUsers(), interaction=Asking("a"))
    with pytest.raises(TemplateError, match="drops what tools say"):
        context(engine, [RecordingTool()], template=NoTools())
    RolloutEngine(engine, template=NoTools(), interaction=Asking("a"))
    RolloutEngine(engine, template=NoUsers(), tools=ToolRegistry([RecordingTool()]))


def test_an_unknown_policy_is_refused() -> None:
    from sglang_multiturn.config import validate_config

    with pytest.raises(ConfigError, match=r"'history'.*'keep' or 'split'"):
        validate_config({"history": "cut"}, RolloutConfig, "here")


# The real thing


@pytest.mark.parametrize("history", ["keep", "split"])
async def test_qwen3_forgets_thoughts_once_a_user_follows_and_not_after_a_tool(history: str) -> None:
    from sglang_multiturn.chat.hf_template import HFChatTemplate

    from families import tokenizer

    template = HFChatTemplate(tokenizer("qwen3"))
    think, end = template.encoder.encode_rendering("<think>")[0], template.stop_token_ids[0]
    said = [f"<think>\nhm\n</think>\n\n{call('echo', x=1)}", "<think>\nso\n</think>\n\none", "two"]
    turns = [ScriptedTurn(token_ids=tuple(template.encoder.encode_rendering(text))) for text in said]
    trajectory = await roll(
        turns,
        [RecordingTool()],
        RolloutConfig(history=history),
        interaction=Asking("And?"),
        template=template,
    )
    last = trajectory.ledger
    assert last.response_ids[-1] == end
    metrics = trajectory.metrics
    if history == "keep":
        assert len(trajectory.rows) == 1
        assert last.input_ids.count(think) == 2
        assert metrics.drift_history_tokens > 0
    else:
        assert len(trajectory.rows) == 2
        assert trajectory.rows[0].input_ids.count(think) == 2
        assert think not in last.input_ids
        assert last.prompt_ids == template.encode_prompt(trajectory.messages[:-1], [RecordingTool().tool_schema])
        assert metrics.drift_history_tokens == 0
    assert (metrics.drift_special_tokens, metrics.drift_boundary_tokens, metrics.drift_sampled_text_tokens) == (0, 0, 0)
