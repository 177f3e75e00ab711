"""One conversation: every way it can go and every way it can end, with exact tokens where they matter."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_multiturn import RolloutConfig, SamplingParams, ScriptedEngine, ScriptedTurn, ToolResponse, run_one
from sglang_multiturn.chat.byte_chatml import END_OF_TEXT, IM_END, IM_START
from sglang_multiturn.chat.calls import BrokenKind
from sglang_multiturn.engine.base import FinishReason, GenerationId
from sglang_multiturn.errors import EngineError
from sglang_multiturn.interactions.base import Done, Observation
from sglang_multiturn.request import Disposition, RequestState, StopReason, ToolKwargs
from sglang_multiturn.rollout import Rollout
from sglang_multiturn.schemas import FunctionSchema, Message, ToolSchema
from sglang_multiturn.tokens import Origin
from sglang_multiturn.tools.builtin.calculator import CalculatorTool
from sglang_multiturn.trajectory import CallOutcome, Trajectory

from support import (
    TEMPLATE,
    AnsweringTool,
    FailingTool,
    HangingTool,
    RecordingTool,
    ToolError,
    call,
    context,
    roll,
    spec,
)

COMPLETED, FAILED, ABORTED = RequestState.COMPLETED, RequestState.FAILED, RequestState.ABORTED


def text(string: str) -> list[int]:
    return list(string.encode())


# Tokens


async def test_two_turns_token_by_token() -> None:
    trajectory = await roll([call("calculator", expression="2*3"), "It is 6."], [CalculatorTool({})])
    first = text('<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*3"}}\n</tool_call>')
    between = [*text("\n"), IM_START, *text("user\n<tool_response>\n")]
    after = [*text("\n</tool_response>"), IM_END, *text("\n"), IM_START, *text("assistant\n")]
    assert trajectory.response_ids == [*first, IM_END, *between, *text("6"), *after, *text("It is 6."), IM_END]
    sampled, observed = len(first) + 1, len(between) + 1 + len(after)
    assert trajectory.response_mask == [1] * sampled + [0] * observed + [1] * 9
    assert trajectory.response_logprobs == [-0.5] * sampled + [0.0] * observed + [-0.5] * 9
    assert trajectory.response_weight_versions == [0] * sampled + [None] * observed + [0] * 9
    assert [(s.origin, s.call_id) for s in trajectory.segments] == [
        (Origin.PROMPT, None),
        (Origin.SAMPLED, None),
        (Origin.BOUNDARY, None),
        (Origin.TOOL, "call00000"),
        (Origin.BOUNDARY, None),
        (Origin.SAMPLED, None),
    ]
    assert (trajectory.state, trajectory.stop_reason) == (COMPLETED, StopReason.ANSWERED)
    assert [m.role for m in trajectory.messages] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.num_turns == 4


async def test_ids_the_tokenizer_would_never_choose_are_kept_and_given_back() -> None:
    odd = (*text("<tool_call>"), *text('{"name":"echo","arguments":{}}'), *text("</tool_call>"), 0xC3, 0x28)
    trajectory = await roll([ScriptedTurn(token_ids=odd), "ok"], [RecordingTool()])
    assert tuple(trajectory.segments[1].ids) == (*odd, IM_END)
    assert trajectory.turns[1].input_tokens == sum(len(s.ids) for s in trajectory.segments[:-1])


async def test_the_budget_counts_the_whole_conversation_and_never_asks_for_zero() -> None:
    asked: list[int | None] = []

    class Watching(ScriptedEngine):
        async def generate(self, generation_id: GenerationId, input_ids: Any, params: SamplingParams) -> Any:
            asked.append(params.max_new_tokens)
            return await super().generate(generation_id, input_ids, params)

    async with Watching.playing(TEMPLATE, {"r": [call("echo"), "x" * 500]}) as engine:
        config = RolloutConfig(max_response_tokens=200)
        trajectory = await run_one(spec(), context(engine, [RecordingTool()], config))
    first, observed = len(trajectory.segments[1].ids), sum(len(s.ids) for s in trajectory.segments[2:5])
    assert asked == [200, 200 - first - observed]
    assert trajectory.stop_reason is StopReason.MAX_RESPONSE_TOKENS
    assert len(trajectory.response_ids) == 200
    assert trajectory.turns[1].finish_reason is FinishReason.LENGTH


async def test_an_observation_that_leaves_no_room_ends_the_rollout_before_it_is_appended() -> None:
    trajectory = await roll([call("echo"), "never"], [RecordingTool()], RolloutConfig(max_response_tokens=100))
    assert trajectory.stop_reason is StopReason.MAX_RESPONSE_TOKENS
    assert [s.origin for s in trajectory.segments] == [Origin.PROMPT, Origin.SAMPLED]
    assert trajectory.messages[-1].role == "tool"


# Ends


async def test_answered_at_once() -> None:
    trajectory = await roll(["Hello."])
    assert (trajectory.stop_reason, trajectory.disposition) == (StopReason.ANSWERED, Disposition.TRAIN)


async def test_an_empty_generation_with_stop_is_an_answer() -> None:
    trajectory = await roll([ScriptedTurn(text="", end=False, finish_reason=FinishReason.STOP)])
    assert (trajectory.stop_reason, trajectory.response_ids) == (StopReason.ANSWERED, [])
    assert trajectory.metrics.assistant_turns == 1


async def test_limits_of_turns() -> None:
    endless = [call("echo")] * 9
    by_turns = await roll(endless, [RecordingTool()], RolloutConfig(max_assistant_turns=3))
    assert (by_turns.stop_reason, by_turns.metrics.assistant_turns) == (StopReason.MAX_ASSISTANT_TURNS, 3)
    assert by_turns.metrics.tool_turns == 2
    by_tools = await roll(endless, [RecordingTool()], RolloutConfig(max_tool_turns=2))
    assert (by_tools.stop_reason, by_tools.metrics.tool_turns) == (StopReason.MAX_TOOL_TURNS, 2)


async def test_the_models_context_is_a_limit_of_its_own() -> None:
    trajectory = await roll(["x" * 500], max_model_len=100)
    assert trajectory.stop_reason is StopReason.MAX_MODEL_LEN
    assert len(trajectory.prompt_ids) + len(trajectory.response_ids) == 100


async def test_a_prompt_over_the_limit_is_never_cut() -> None:
    tool = RecordingTool()
    trajectory = await roll(["never"], [tool], RolloutConfig(max_prompt_tokens=10), tools_kwargs={"echo": ToolKwargs()})
    assert (trajectory.stop_reason, trajectory.disposition) == (StopReason.PROMPT_TOO_LONG, Disposition.DROP)
    assert trajectory.response_ids == []
    assert len(trajectory.prompt_ids) > 10
    assert tool.log == []


async def test_a_tool_can_end_the_conversation() -> None:
    tool = AnsweringTool((ToolResponse(text="bye", stop=True), 1.0, {}))
    trajectory = await roll([call("echo"), "never"], [tool])
    assert trajectory.stop_reason is StopReason.TOOL_STOP
    assert trajectory.messages[-1].content == "bye"


async def test_users_and_environments_answer_and_end() -> None:
    class Twice:
        def __init__(self, reason: Any) -> None:
            self.reason = reason

        async def respond(self, request_id: str, messages: Any) -> Observation | Done:
            assert messages[-1].role == "assistant"
            return Observation(text="And then?") if len(messages) < 4 else Done(reason=self.reason)

    for reason in (StopReason.USER_STOP, StopReason.ENVIRONMENT_DONE):
        trajectory = await roll(["One.", "Two."], interaction=Twice(reason))
        assert trajectory.stop_reason is reason
        assert [s.origin for s in trajectory.segments if s.origin is not Origin.BOUNDARY] == [
            Origin.PROMPT, Origin.SAMPLED, Origin.USER, Origin.SAMPLED,
        ]  # fmt: skip
        assert (trajectory.metrics.user_turns, trajectory.num_turns) == (1, 4)
    limited = await roll(["One.", "Two."], config=RolloutConfig(max_user_turns=1), interaction=Twice(None))
    assert limited.stop_reason is StopReason.MAX_USER_TURNS


async def test_too_many_errors_in_a_row() -> None:
    good, bad = call("echo"), "<tool_call>\n{broken\n</tool_call>"
    turns = [bad, bad, good, bad, bad, bad, "never"]
    trajectory = await roll(turns, [RecordingTool()], RolloutConfig(max_errors_in_a_row=3))
    assert trajectory.stop_reason is StopReason.TOO_MANY_ERRORS
    assert (trajectory.metrics.assistant_turns, trajectory.metrics.malformed_calls) == (6, 5)


async def test_a_timeout_keeps_what_there_is_and_releases_the_tools() -> None:
    tool = HangingTool()
    config = RolloutConfig(rollout_timeout_s=0.5, tool_timeout_s=None)
    trajectory = await roll([call("echo"), "never"], [tool], config)
    assert (trajectory.state, trajectory.stop_reason) == (COMPLETED, StopReason.TIMEOUT)
    assert trajectory.disposition is Disposition.DROP
    assert trajectory.metrics.assistant_turns == 1
    assert tool.verbs == ["create", "execute", "calc_reward", "release"]


async def test_a_timeout_while_generating_aborts_in_the_engine_and_keeps_the_partial_turn() -> None:
    trajectory = await roll([ScriptedTurn(text="abcdef", hang_after=3)], config=RolloutConfig(rollout_timeout_s=0.5))
    assert trajectory.stop_reason is StopReason.TIMEOUT
    assert trajectory.response_ids == text("abc")
    assert trajectory.turns[0].finish_reason is FinishReason.ABORT


# What the model or a tool does wrong


async def test_each_mistake_is_answered_and_counted() -> None:
    strict = RecordingTool("strict", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    turns = [
        "<tool_call>\n{broken\n</tool_call>",
        call("ecko"),
        call("strict", n="three"),
        call("strict", n=3),
        "done",
    ]
    trajectory = await roll(turns, [strict, RecordingTool()])
    assert [(r.outcome, r.answer) for r in trajectory.tool_calls] == [
        (
            CallOutcome.MALFORMED,
            "Error: The tool call is not valid JSON (Expecting property name enclosed in double quotes).",
        ),
        (CallOutcome.UNKNOWN_TOOL, "Error: there is no tool 'ecko'; did you mean 'echo'?"),
        (CallOutcome.INVALID_ARGUMENTS, "Error: invalid arguments: n must be an integer, not 'three'"),
        (CallOutcome.OK, '{"n": 3}'),
    ]
    metrics = trajectory.metrics
    assert (metrics.tool_calls, metrics.malformed_calls, metrics.unknown_tools, metrics.invalid_arguments) == (
        4,
        1,
        1,
        1,
    )
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert strict.verbs == ["create", "execute", "calc_reward", "release"]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ('{"name": "echo", "arguments": {x}}', BrokenKind.JSON),
        ('{"arguments": {}}', BrokenKind.NAME),
        ('{"name": "echo", "arguments": [1]}', BrokenKind.ARGUMENTS),
        ("[1]", BrokenKind.ENVELOPE),
    ],
)
async def test_what_is_wrong_with_a_broken_call_is_recorded_and_counted(said: str, kind: BrokenKind) -> None:
    turn = f"<tool_call>\n{said}\n</tool_call>"
    trajectory = await roll([turn, call("nope"), "done"], [RecordingTool()])
    assert [record.broken for record in trajectory.tool_calls] == [kind, None]
    assert trajectory.metrics.malformed_calls == 1
    assert getattr(trajectory.metrics, f"malformed_{kind}") == 1
    assert sum(getattr(trajectory.metrics, f"malformed_{one}") for one in BrokenKind) == 1


async def test_one_broken_call_never_drops_a_good_one_and_answers_keep_the_order() -> None:
    turn = call("echo", n=1) + "<tool_call>\n{broken\n</tool_call>" + call("echo", n=2)
    trajectory = await roll([turn, "done"], [RecordingTool()], RolloutConfig(max_parallel_calls=8))
    assert [(r.call_id, r.outcome) for r in trajectory.tool_calls] == [
        ("call00000", CallOutcome.OK),
        ("call00001", CallOutcome.MALFORMED),
        ("call00002", CallOutcome.OK),
    ]
    assert [m.tool_call_id for m in trajectory.messages if m.role == "tool"] == ["call00000", "call00001", "call00002"]


async def test_calls_beyond_the_limit_are_answered_never_dropped() -> None:
    trajectory = await roll([call("echo") * 4, "done"], [RecordingTool()], RolloutConfig(max_parallel_calls=2))
    assert [r.outcome for r in trajectory.tool_calls] == [CallOutcome.OK] * 2 + [CallOutcome.SKIPPED] * 2
    assert "at most 2 tool calls are made a turn" in trajectory.tool_calls[2].answer


async def test_a_tools_own_error_and_its_timeout_go_to_the_model() -> None:
    said = await roll([call("echo"), "sorry"], [FailingTool(ToolError("the index is down"))])
    assert (said.tool_calls[0].outcome, said.tool_calls[0].answer) == (
        CallOutcome.TOOL_ERROR,
        "Error: the index is down",
    )
    slow = await roll([call("echo"), "sorry"], [HangingTool()], RolloutConfig(tool_timeout_s=0.02))
    assert (slow.tool_calls[0].outcome, slow.metrics.tool_timeouts) == (CallOutcome.TIMEOUT, 1)
    assert slow.tool_calls[0].answer == "Error: the tool did not answer within 0.02 seconds"
    assert (said.stop_reason, slow.stop_reason) == (StopReason.ANSWERED, StopReason.ANSWERED)


@pytest.mark.parametrize(
    ("tool", "type_", "said"),
    [
        (FailingTool(RuntimeError("boom")), "RuntimeError", "boom"),
        (FailingTool(SystemExit(3)), "ToolContractError", "echo.execute raised SystemExit: 3"),
        (FailingTool(RecursionError("deep")), "RecursionError", "deep"),
        (FailingTool(GeneratorExit("odd")), "ToolContractError", "echo.execute raised GeneratorExit: odd"),
        (FailingTool(RuntimeError("\ud800")), "RuntimeError", "?"),
        (FailingTool(asyncio.CancelledError()), "ToolContractError", "raised CancelledError though nobody cancelled"),
        (FailingTool(TimeoutError("its own")), "TimeoutError", "its own"),
        (AnsweringTool((object(), 0.0, {})), "ToolContractError", "must return text or a ToolResponse, got object"),
        (AnsweringTool(("x", "much", {})), "ToolContractError", "a number is needed"),
        (AnsweringTool(("x", float("nan"), {})), "ToolContractError", "a finite number is needed"),
        (AnsweringTool(("x", 0.0, [1])), "ToolContractError", "must return its metrics as a dict"),
        (AnsweringTool((1, 2, 3, 4)), "ToolContractError", "got 4 values"),
        (AnsweringTool((ToolResponse(image=["i"]), 0.0, {})), "ToolContractError", "only text is supported"),
    ],
    ids=lambda value: None if not isinstance(value, str) else value[:24],
)
async def test_anything_else_fails_this_rollout_with_its_cause(tool: RecordingTool, type_: str, said: str) -> None:
    tool.log.clear()
    trajectory = await roll([call("echo"), "never"], [tool])
    assert (trajectory.state, trajectory.stop_reason) == (FAILED, StopReason.ERROR)
    assert trajectory.error is not None
    assert trajectory.error.type == type_
    assert said in trajectory.error.message
    assert trajectory.disposition is Disposition.DROP
    assert tool.verbs == ["create", "execute", "release"]


async def test_metrics_that_are_no_json_are_kept_as_text() -> None:
    trajectory = await roll([call("echo"), "done"], [AnsweringTool(("x", 0.0, {"when": complex(1, 2)}))])
    assert trajectory.tool_calls[0].metrics == {"when": "1+2j"}
    circular: dict[str, Any] = {}
    circular["self"] = circular
    trajectory = await roll([call("echo"), "done"], [AnsweringTool(("x", 0.0, circular))])
    assert trajectory.tool_calls[0].metrics == {"unreadable": "{'self': {'self': {...}}}"}


async def test_text_that_cannot_be_encoded_harms_nothing() -> None:
    odd = '<tool_call>\n{"name": "echo", "arguments": {"x": "\\ud800"}}\n</tool_call>'
    deep = '<tool_call>\n{"name": "echo", "arguments": {"x": ' + "[" * 400 + "]" * 400 + "}}\n</tool_call>"
    trajectory = await roll([odd, deep, call("echo"), "done"], [AnsweringTool("a\ud800b")])
    assert [r.outcome for r in trajectory.tool_calls] == [CallOutcome.MALFORMED, CallOutcome.MALFORMED, CallOutcome.OK]
    assert trajectory.tool_calls[2].answer == "a?b"


async def test_a_long_answer_is_cut_marked_and_counted() -> None:
    tool = AnsweringTool("y" * 5000)
    trajectory = await roll([call("echo"), "done"], [tool], RolloutConfig(max_tool_result_tokens=100))
    assert "characters cut]" in trajectory.tool_calls[0].answer
    assert trajectory.metrics.cut_tool_results == 1
    assert len(next(s for s in trajectory.segments if s.origin is Origin.TOOL).ids) <= 100


# The lifecycle


async def test_the_rows_own_arguments_reach_every_step_of_the_lifecycle() -> None:
    tool = RecordingTool()
    kwargs = ToolKwargs(
        create_kwargs={"a": 1}, execute_kwargs={"b": 2}, calc_reward_kwargs={"c": 3}, release_kwargs={"d": 4}
    )
    trajectory = await roll([call("echo", x=1), call("echo", x=2), "ok"], [tool], tools_kwargs={"echo": kwargs})
    assert tool.log == [
        ("create", "r", {"a": 1}),
        ("execute", "r", {"parameters": {"x": 1}, "b": 2}),
        ("execute", "r", {"parameters": {"x": 2}, "b": 2}),
        ("calc_reward", "r", {"c": 3}),
        ("release", "r", {"d": 4}),
    ]
    assert trajectory.rewards.tool_rewards == (0.5, 0.5)
    assert trajectory.rewards.calc_rewards == {"echo": 0.25}
    assert trajectory.reward is None


async def test_a_tool_named_by_the_row_is_made_at_once_and_another_only_when_called() -> None:
    named, other = RecordingTool("named"), RecordingTool("other")
    await roll(["no calls"], [named, other], tools_kwargs={"named": ToolKwargs()})
    assert named.verbs == ["create", "calc_reward", "release"]
    assert other.verbs == []


async def test_two_calls_of_one_turn_share_one_instance() -> None:
    tool = RecordingTool()
    await roll([call("echo") + call("echo"), "done"], [tool])
    assert tool.verbs == ["create", "execute", "execute", "calc_reward", "release"]


async def test_a_failing_release_is_counted_and_stops_nothing() -> None:
    class Stuck(RecordingTool):
        async def release(self, instance_id: str, **kwargs: Any) -> None:
            await super().release(instance_id, **kwargs)
            raise RuntimeError("cannot")

    first, second = Stuck("first"), RecordingTool("second")
    trajectory = await roll([call("first") + call("second"), "done"], [first, second])
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.metrics.release_errors == 1
    assert first.verbs[-1] == second.verbs[-1] == "release"
    assert trajectory.metrics.tool_instances_created == trajectory.metrics.tool_instances_released == 2


async def test_only_the_tools_of_the_row_are_offered() -> None:
    trajectory = await roll([call("two"), "ok"], [RecordingTool("one"), RecordingTool("two")], tool_names=("one",))
    assert trajectory.tool_calls[0].outcome is CallOutcome.UNKNOWN_TOOL
    assert b'"two"' not in bytes(i for i in trajectory.prompt_ids if i < 256)


# The engine


async def test_an_engine_error_is_retried_and_then_fails_the_rollout() -> None:
    for retries, state in ((0, FAILED), (1, COMPLETED)):
        calls = 0

        def script(generation_id: GenerationId, input_ids: Any) -> ScriptedTurn | str:
            nonlocal calls
            calls += 1
            return ScriptedTurn(error=EngineError("hiccup")) if generation_id.attempt == 0 else "fine"

        async with ScriptedEngine(TEMPLATE, script) as engine:
            trajectory = await run_one(spec(), context(engine, config=RolloutConfig(engine_retries=retries)))
        assert (trajectory.state, calls, trajectory.metrics.engine_retries) == (state, retries + 1, retries)


async def test_a_generation_the_engine_aborted_by_itself_is_asked_again_and_ends_as_aborted() -> None:
    turn = ScriptedTurn(text="half", end=False, finish_reason=FinishReason.ABORT)
    trajectory = await roll([turn], config=RolloutConfig(engine_retries=2))
    assert (trajectory.state, trajectory.stop_reason) == (ABORTED, StopReason.ABORTED)
    assert trajectory.metrics.engine_retries == 2
    assert [t.attempt for t in trajectory.turns] == [0, 1, 2]
    assert trajectory.response_ids == text("halfhalfhalf")
    assert trajectory.metrics.assistant_turns == 1


async def test_ids_outside_the_vocabulary_fail_the_rollout_before_the_engine_sees_them() -> None:
    class Wrong(type(TEMPLATE)):  # type: ignore[misc]
        def encode_prompt(self, messages: Any, tools: Any) -> list[int]:
            return [1, 2, 999]

    async with ScriptedEngine(TEMPLATE, lambda *_: "never") as engine:
        wrong = dataclasses.replace(context(engine), template=Wrong())
        trajectory = await run_one(spec(), wrong)
    assert trajectory.error is not None
    assert trajectory.error.type == "InvalidRequestError"
    assert "token id 999 is outside the vocabulary (0 to 258)" in trajectory.error.message


async def test_abort_from_outside_while_generating_and_while_a_tool_works() -> None:
    hanging = HangingTool()
    turns = {"r": [ScriptedTurn(text="abc", hang_after=2)], "t": [call("echo")]}
    async with ScriptedEngine.playing(TEMPLATE, turns) as engine, asyncio.TaskGroup() as group:
        shared = context(engine, [hanging], RolloutConfig(tool_timeout_s=None))
        generating, calling = Rollout(spec("r"), shared), Rollout(spec("t"), shared)
        tasks = [group.create_task(generating.run()), group.create_task(calling.run())]
        await engine.wait_until_started("r")
        await hanging.started.wait()
        generating.abort()
        calling.abort()
        first, second = [await task for task in tasks]
    for trajectory in (first, second):
        trajectory.check()
        assert (trajectory.state, trajectory.stop_reason) == (ABORTED, StopReason.ABORTED)
    assert first.response_ids == text("ab")
    assert hanging.verbs == ["create", "execute", "release"]


async def test_an_abort_of_what_is_being_aborted_changes_nothing() -> None:
    class Closing(HangingTool):
        async def answer(self, parameters: dict[str, Any]) -> Any:
            try:
                await super().answer(parameters)
            finally:
                rollout.abort()

    tool = Closing()
    async with ScriptedEngine.playing(TEMPLATE, {"r": [call("echo")]}) as engine, asyncio.TaskGroup() as group:
        rollout = Rollout(spec(), context(engine, [tool]))
        task = group.create_task(rollout.run())
        await tool.started.wait()
        rollout.abort()
        trajectory = await task
    assert (trajectory.state, trajectory.error) == (ABORTED, None)


async def test_an_abort_that_comes_while_a_rollout_is_scored_changes_nothing() -> None:
    scoring, go_on = asyncio.Event(), asyncio.Event()

    async def score(**_: Any) -> float:
        scoring.set()
        await go_on.wait()
        return 1.0

    async with ScriptedEngine.playing(TEMPLATE, {"r": ["x"]}) as engine, asyncio.TaskGroup() as group:
        rollout = Rollout(spec(), context(engine, reward_fn=score))
        task = group.create_task(rollout.run())
        await scoring.wait()
        rollout.abort()
        go_on.set()
        trajectory = await task
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ANSWERED, 1.0)


async def test_a_user_that_raises_cancellation_by_itself_fails_its_own_rollout() -> None:
    class Odd:
        async def respond(self, request_id: str, messages: Any) -> Observation | Done:
            raise asyncio.CancelledError

    trajectory = await roll(["x"], interaction=Odd())
    assert trajectory.error is not None
    assert (trajectory.state, trajectory.error.type) == (FAILED, "CancelledError")


async def test_cancellation_passes_through_and_still_releases() -> None:
    hanging = HangingTool()
    async with ScriptedEngine.playing(TEMPLATE, {"r": [call("echo")]}) as engine:
        shared = context(engine, [hanging], RolloutConfig(tool_timeout_s=None))
        task = asyncio.create_task(run_one(spec(), shared))
        await hanging.started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert hanging.verbs == ["create", "execute", "release"]


# Scoring


async def test_the_scorer_gets_the_models_own_words_and_everything_else_beside_them() -> None:
    seen: dict[str, Any] = {}

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> dict[str, Any]:
        seen.update(solution=solution_str, truth=ground_truth, source=data_source, **extra_info)
        return {"score": 0.75, "why": "close"}

    trajectory = await roll(
        [call("echo", x=42), "I do not know."],
        [RecordingTool()],
        reward_fn=score,
        ground_truth="42",
        data_source="d",
        extra_info={"index": 7},
    )
    assert seen["solution"] == call("echo", x=42) + "\nI do not know."
    assert '{"x": 42}' not in seen["solution"].replace(call("echo", x=42), "")
    assert '<tool_response>\n{"x": 42}' in seen["full_text"]
    assert (seen["truth"], seen["source"], seen["index"]) == ("42", "d", 7)
    assert seen["tool_rewards"] == [0.5]
    assert seen["calc_rewards"] == {"echo": 0.25}
    assert (trajectory.rewards.score, trajectory.reward, trajectory.rewards.extra) == (0.75, 0.75, {"why": "close"})


async def test_the_tool_prints_the_right_answer_and_the_model_does_not_say_it() -> None:
    from sglang_multiturn.rewards import load_reward_fn

    tool = AnsweringTool("#### 42")
    scored = [
        (await roll([call("echo"), said], [tool], reward_fn=load_reward_fn("gsm8k"), ground_truth="42")).reward
        for said in ("I do not know.", "#### 41", "#### 42", "#### 41, no, #### 42")
    ]
    assert scored == [0.0, 0.0, 1.0, 1.0]


async def test_tool_rewards_join_the_reward_by_weight() -> None:
    weights = {"step_reward_weight": 0.1, "calc_reward_weight": 2.0}
    config = RolloutConfig(step_rewards="sum", calc_rewards="sum", **weights)
    trajectory = await roll([call("echo"), call("echo"), "x"], [RecordingTool()], config, reward_fn=lambda **_: 1)
    assert trajectory.reward == pytest.approx(1 + 0.1 * 1.0 + 2.0 * 0.25)


@pytest.mark.parametrize("bad", [None, "much", float("inf"), {"no": 1}])
async def test_a_reward_function_that_gives_no_number_fails_the_rollout(bad: Any) -> None:
    trajectory = await roll(["x"], reward_fn=lambda **_: bad)
    assert trajectory.error is not None
    assert (trajectory.state, trajectory.error.type) == (FAILED, "RewardError")


async def test_a_reward_function_that_raises_or_hangs_fails_the_rollout() -> None:
    async def hang(**_: Any) -> float:
        await asyncio.Event().wait()
        return 0.0

    def crash(**_: Any) -> float:
        raise SystemExit(1)

    for reward_fn in (hang, crash):
        trajectory = await roll(["x"], config=RolloutConfig(reward_timeout_s=0.05), reward_fn=reward_fn)
        assert trajectory.error is not None
        assert trajectory.error.type == "RewardError"


async def test_truncated_sampling_is_flagged() -> None:
    assert not (await roll(["x"], sampling=SamplingParams(temperature=0.7))).truncated_sampling
    assert (await roll(["x"], sampling=SamplingParams(top_p=0.9))).truncated_sampling


# Invariants over random conversations

random_turns = st.lists(
    st.one_of(
        st.text(max_size=30),
        st.just(call("echo", x=1)),
        st.just(call("echo") + call("echo")),
        st.just("<tool_call>\n{broken"),
        st.just(call("nope")),
        st.builds(
            ScriptedTurn,
            text=st.sampled_from(["", "abc", call("echo"), "<tool_call>"]),
            end=st.booleans(),
            end_id=st.sampled_from([None, END_OF_TEXT]),
            finish_reason=st.sampled_from([None, *FinishReason]),
        ),
        st.builds(ScriptedTurn, token_ids=st.lists(st.integers(0, 258), max_size=9).map(tuple)),
        st.builds(ScriptedTurn, error=st.just(EngineError("hiccup"))),
    ),
    max_size=6,
)


@settings(max_examples=300, deadline=None)
@given(
    turns=random_turns,
    max_response_tokens=st.integers(1, 600),
    max_turn_tokens=st.none() | st.integers(1, 80),
    max_assistant_turns=st.integers(1, 5),
    max_model_len=st.integers(200, 1000),
)
def test_invariants_hold_whatever_the_engine_does(turns: Any, max_model_len: int, **limits: Any) -> None:
    tool = RecordingTool()
    row = {"tools_kwargs": {"echo": ToolKwargs()}}
    trajectory: Trajectory = asyncio.run(
        roll(turns, [tool], RolloutConfig(**limits), max_model_len=max_model_len, **row)
    )
    assert trajectory.state in (COMPLETED, FAILED, ABORTED)
    assert len(trajectory.response_ids) <= limits["max_response_tokens"]
    assert len(trajectory.prompt_ids) + len(trajectory.response_ids) <= max_model_len
    sampled = [i for s in trajectory.segments if s.origin is Origin.SAMPLED for i in s.ids]
    assert [i for i, m in zip(trajectory.response_ids, trajectory.response_mask, strict=True) if m] == sampled
    assert tool.verbs.count("create") == tool.verbs.count("release") <= 1
    assert tool.verbs.count("calc_reward") <= tool.verbs.count("create")


def test_schemas_and_messages_are_shown_to_the_template_as_written() -> None:
    schema = ToolSchema(function=FunctionSchema(name="f"))
    assert schema.for_template() == {"function": {"name": "f"}}
    assert Message(role="assistant").for_template() == {"role": "assistant", "content": ""}
