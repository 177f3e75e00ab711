"""What becomes of a conversation in which a call went wrong: each way, under each policy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_multiturn import RolloutConfig, RolloutEngine, ScriptedEngine, ToolRegistry, ToolResponse
from sglang_multiturn.config import FailurePolicy, ToolConfig, ToolsConfig
from sglang_multiturn.conversation.answers import FAILURES, ends_conversation, errors_in_a_row
from sglang_multiturn.engine.base import GenerationId
from sglang_multiturn.errors import BatchFailedError, CallFailedError, ToolDiedError
from sglang_multiturn.request import Disposition, RequestState, StopReason
from sglang_multiturn.tools.session import ToolAnswer
from sglang_multiturn.trajectory import CallOutcome, ToolCallRecord, Trajectory

from support import TEMPLATE, AnsweringTool, FailingTool, HangingTool, RecordingTool, ToolError, call, roll, spec

STRICT = {"type": "object", "properties": {"n": {"type": "integer"}}}
BROKEN = "<tool_call>\n{broken\n</tool_call>"

# What the model writes, and the tool that answers, for each way in which a call can go wrong.
WAYS: dict[CallOutcome, tuple[str, Any]] = {
    CallOutcome.MALFORMED: (BROKEN, RecordingTool),
    CallOutcome.UNKNOWN_TOOL: (call("ecko"), RecordingTool),
    CallOutcome.INVALID_ARGUMENTS: (call("echo", n="three"), lambda: RecordingTool("echo", STRICT)),
    CallOutcome.TOOL_ERROR: (call("echo"), lambda: FailingTool(ToolError("no such page"))),
    CallOutcome.TIMEOUT: (call("echo"), HangingTool),
    CallOutcome.DIED: (call("echo"), lambda: FailingTool(ToolDiedError("killed by signal 9"))),
    CallOutcome.RAISED: (call("echo"), lambda: FailingTool(ZeroDivisionError("by zero"))),
}
COUNTERS = {
    CallOutcome.MALFORMED: "malformed_calls",
    CallOutcome.UNKNOWN_TOOL: "unknown_tools",
    CallOutcome.INVALID_ARGUMENTS: "invalid_arguments",
    CallOutcome.TOOL_ERROR: "tool_errors",
    CallOutcome.TIMEOUT: "tool_timeouts",
    CallOutcome.DIED: "tool_deaths",
    CallOutcome.RAISED: "tool_crashes",
}


async def play(outcome: CallOutcome, **policy: str) -> Trajectory:
    said, make_tool = WAYS[outcome]
    config = RolloutConfig(on_failure=policy, tool_timeout_s=0.02)
    trajectory = await roll([said, "I give up."], [make_tool()], config, reward_fn=lambda **_: 1.0)
    assert [one.outcome for one in trajectory.tool_calls] == [outcome]
    assert {name: getattr(trajectory.metrics, name) for name in COUNTERS.values()} == {
        name: int(name == COUNTERS[outcome]) for name in COUNTERS.values()
    }
    return trajectory


def test_every_way_has_a_policy_and_a_counter() -> None:
    assert set(WAYS) == set(COUNTERS) == FAILURES
    assert {outcome.value for outcome in FAILURES} == set(FailurePolicy.model_fields)


@pytest.mark.parametrize("outcome", WAYS)
async def test_tell_lets_the_model_read_it_and_go_on(outcome: CallOutcome) -> None:
    trajectory = await play(outcome, **{outcome.value: "tell"})
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ANSWERED, 1.0)
    assert [message.role for message in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.messages[2].text.startswith("Error: ")


@pytest.mark.parametrize("outcome", WAYS)
async def test_end_ends_it_as_too_many_errors_and_it_is_judged(outcome: CallOutcome) -> None:
    trajectory = await play(outcome, **{outcome.value: "end"})
    assert (trajectory.state, trajectory.stop_reason) == (RequestState.COMPLETED, StopReason.TOO_MANY_ERRORS)
    assert (trajectory.disposition, trajectory.reward) == (Disposition.TRAIN, 1.0)
    assert trajectory.metrics.assistant_turns == 1
    assert trajectory.messages[-1].text.startswith("Error: ")


@pytest.mark.parametrize("outcome", WAYS)
async def test_fail_fails_it_and_says_why(outcome: CallOutcome) -> None:
    trajectory = await play(outcome, **{outcome.value: "fail"})
    assert (trajectory.state, trajectory.stop_reason) == (RequestState.FAILED, StopReason.ERROR)
    assert (trajectory.disposition, trajectory.reward) == (Disposition.DROP, None)
    assert trajectory.error is not None
    if outcome is CallOutcome.RAISED:
        assert (trajectory.error.type, trajectory.error.message) == ("ZeroDivisionError", "by zero")
        return
    name = trajectory.tool_calls[0].name
    assert trajectory.error.type == "CallFailedError"
    assert trajectory.error.message == (
        f"call call00000 of tool {name!r} in turn 0 went wrong and on_failure.{outcome} is fail: "
        f"{trajectory.tool_calls[0].answer}"
    )


async def test_the_defaults_tell_all_but_what_is_a_tools_bug() -> None:
    for outcome in WAYS:
        expected = StopReason.ERROR if outcome is CallOutcome.RAISED else StopReason.ANSWERED
        assert (await play(outcome)).stop_reason is expected


async def test_what_a_tool_raised_is_the_cause_of_the_failure() -> None:
    died = await play(CallOutcome.DIED, died="fail")
    assert died.error is not None
    assert died.error.cause == "ToolDiedError: killed by signal 9"


# Several calls in a turn

ORDER = ("tell", "end", "fail")


def answered(outcome: CallOutcome, index: int) -> ToolAnswer:
    record = ToolCallRecord(
        call_id=f"call00{index:03d}", turn=0, name="t", arguments=None, outcome=outcome, answer=outcome.value
    )
    return ToolAnswer(record=record, error=KeyError("x") if outcome is CallOutcome.RAISED else None)


@given(
    outcomes=st.lists(st.sampled_from(CallOutcome), min_size=1, max_size=6),
    policy=st.fixed_dictionaries({name: st.sampled_from(ORDER) for name in FailurePolicy.model_fields}),
)
def test_the_strictest_decides_and_a_skipped_call_is_no_failure(
    outcomes: list[CallOutcome], policy: dict[str, str]
) -> None:
    strictest = max((ORDER.index(policy[o]) for o in outcomes if o.value in policy), default=0)
    answers = [answered(outcome, index) for index, outcome in enumerate(outcomes)]
    if ORDER[strictest] == "fail":
        with pytest.raises((CallFailedError, KeyError)):
            ends_conversation(answers, FailurePolicy(**policy))
    else:
        assert ends_conversation(answers, FailurePolicy(**policy)) is (ORDER[strictest] == "end")


async def test_all_answers_of_the_turn_are_kept_when_one_fails_the_conversation() -> None:
    said = call("ecko") + call("echo") + call("fine") + BROKEN
    trajectory = await roll([said, "never"], [FailingTool(RuntimeError("boom")), RecordingTool("fine")])
    assert [(one.outcome, one.name) for one in trajectory.tool_calls] == [
        (CallOutcome.UNKNOWN_TOOL, "ecko"),
        (CallOutcome.RAISED, "echo"),
        (CallOutcome.OK, "fine"),
        (CallOutcome.MALFORMED, ""),
    ]
    assert [message.role for message in trajectory.messages] == ["user", "assistant"] + ["tool"] * 4
    assert trajectory.error is not None
    assert (trajectory.error.type, trajectory.error.message) == ("RuntimeError", "boom")


async def test_fail_beats_end_and_end_beats_a_tool_that_stops() -> None:
    stop = AnsweringTool((ToolResponse(text="bye", stop=True), 0.0, {}))
    both = call("echo") + call("ecko")
    told = await roll([both, "never"], [stop])
    assert told.stop_reason is StopReason.TOOL_STOP
    ended = await roll([both, "never"], [stop], RolloutConfig(on_failure={"unknown_tool": "end"}))
    assert ended.stop_reason is StopReason.TOO_MANY_ERRORS
    policy = {"unknown_tool": "end", "malformed": "fail"}
    failed = await roll([both + BROKEN, "never"], [stop], RolloutConfig(on_failure=policy))
    assert failed.stop_reason is StopReason.ERROR


# Errors in a row


@pytest.mark.parametrize(
    ("outcomes", "after"),
    [
        ([CallOutcome.OK, CallOutcome.TIMEOUT], 0),
        ([CallOutcome.TIMEOUT, CallOutcome.MALFORMED], 3),
        ([CallOutcome.TIMEOUT, CallOutcome.SKIPPED], 3),
        ([CallOutcome.RAISED], 3),
        ([CallOutcome.SKIPPED, CallOutcome.SKIPPED], 2),
        ([CallOutcome.SKIPPED, CallOutcome.OK], 0),
    ],
)
def test_a_turn_of_skipped_calls_alone_is_neither_good_nor_bad(outcomes: list[CallOutcome], after: int) -> None:
    assert errors_in_a_row(2, [answered(outcome, i) for i, outcome in enumerate(outcomes)]) == after


# The tool's own length of a result


class Long(AnsweringTool):
    """Answers with a thousand letters."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__("abcdefghij" * 100)


@pytest.mark.parametrize(
    ("settings", "start", "end", "tokens"),
    [
        ({}, "abc", "hij", 64),
        ({"max_result_tokens": 40}, "abc", "hij", 40),
        ({"result_cut": "left"}, "[", "hij", 64),
        ({"max_result_tokens": 40, "result_cut": "right"}, "abc", "cut]", 40),
    ],
)
async def test_a_tools_own_length_and_side_beat_those_of_the_rollout(
    settings: dict[str, Any], start: str, end: str, tokens: int
) -> None:
    entry = ToolConfig(class_name=f"{__name__}.Long", **settings)
    tools = ToolRegistry.from_config(ToolsConfig(tools=[entry]))
    config = RolloutConfig(max_tool_result_tokens=64, tool_result_cut="middle")
    engine = ScriptedEngine.playing(TEMPLATE, {"r": [call("echo") + call("none"), "done"]})
    async with RolloutEngine(engine, template=TEMPLATE, tools=tools, config=config) as running:
        (trajectory,) = await running.run_all([spec()])
    answer = trajectory.tool_calls[0].answer
    assert (answer[: len(start)], answer[-len(end) :]) == (start, end)
    assert tokens - 3 <= len(answer.encode()) <= tokens  # a byte is a token here
    assert trajectory.metrics.cut_tool_results == 1


# calc_reward


class Judging(RecordingTool):
    """Raises what it is given when it is asked for its judgement."""

    def __init__(self, name: str, error: BaseException | None) -> None:
        super().__init__(name)
        self.error = error

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        await super().calc_reward(instance_id, **kwargs)
        if self.error is not None:
            raise self.error
        return 0.5


async def judge(error: BaseException, **policy: str) -> Trajectory:
    tools = [Judging("first", error), Judging("second", None)]
    config = RolloutConfig(calc_rewards="sum", on_failure=policy)
    trajectory = await roll([call("first") + call("second"), "done"], tools, config, reward_fn=lambda **_: 1.0)
    assert all(tool.verbs == ["create", "execute", "calc_reward", "release"] for tool in tools)
    assert trajectory.metrics.calc_reward_errors == 1
    return trajectory


async def test_a_calc_reward_that_raises_fails_the_conversation_as_a_call_would() -> None:
    trajectory = await judge(ZeroDivisionError("by zero"))
    assert trajectory.error is not None
    assert (trajectory.state, trajectory.error.type) == (RequestState.FAILED, "ZeroDivisionError")
    assert trajectory.reward is None


@pytest.mark.parametrize("chosen", ["tell", "end"])
async def test_a_calc_reward_that_raises_counts_as_nothing_where_raised_is_told(chosen: str) -> None:
    trajectory = await judge(ZeroDivisionError("by zero"), raised=chosen)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ANSWERED, 1.0 + 0.0 + 0.5)
    assert trajectory.rewards.calc_rewards == {"first": 0.0, "second": 0.5}
    assert {name: error.message for name, error in trajectory.rewards.calc_errors.items()} == {"first": "by zero"}


async def test_a_calc_reward_with_a_tool_error_is_told_by_default_and_fails_where_that_was_chosen() -> None:
    told = await judge(ToolError("no verdict"))
    assert told.rewards.calc_rewards == {"first": 0.0, "second": 0.5}
    failed = await judge(ToolError("no verdict"), tool_error="fail")
    assert failed.error is not None
    assert failed.error.type == "CallFailedError"
    assert failed.error.message == (
        "first.calc_reward went wrong and on_failure.tool_error is fail: ToolError: no verdict"
    )


async def test_a_calc_reward_that_never_answers_follows_timeout() -> None:
    class Slow(RecordingTool):
        async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
            return await HangingTool().answer({}) or 0.0

    for chosen, stop_reason in (("tell", StopReason.ANSWERED), ("fail", StopReason.ERROR)):
        config = RolloutConfig(tool_timeout_s=0.02, on_failure={"timeout": chosen})
        trajectory = await roll([call("echo"), "done"], [Slow()], config)
        assert (trajectory.stop_reason, trajectory.metrics.calc_reward_errors) == (stop_reason, 1)


# A batch that fails


async def test_a_batch_of_crashing_tools_stops_with_its_three_commonest_causes() -> None:
    kinds = [ValueError] * 6 + [KeyError] * 5 + [IndexError] * 3 + [OSError] * 2

    class Crashing(RecordingTool):
        async def answer(self, parameters: dict[str, Any]) -> Any:
            raise kinds[parameters["n"]](f"number {parameters['n']}")

    def script(generation_id: GenerationId, _: Any) -> str:
        return call("echo", n=int(generation_id.request_id))

    config = RolloutConfig(max_concurrent=1)
    running = RolloutEngine(
        ScriptedEngine(TEMPLATE, script), template=TEMPLATE, tools=ToolRegistry([Crashing()]), config=config
    )
    async with running:
        with pytest.raises(BatchFailedError) as caught:
            await running.run_all([spec(str(n)) for n in range(16)])
    assert str(caught.value).splitlines() == [
        "16 of the first 16 rollouts failed; stopping. The most frequent causes:",
        "  6x ValueError, for example 0: number 0",
        "  5x KeyError, for example 6: 'number 6'",
        "  3x IndexError, for example 11: number 11",
    ]
