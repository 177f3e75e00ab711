"""How a turn ends: stop ids, stop strings, the length limit, and what follows each."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_multiturn import RolloutConfig, SamplingParams, ScriptedEngine, ScriptedTurn, run_one
from sglang_multiturn.chat.byte_chatml import END_OF_TEXT, IM_END
from sglang_multiturn.chat.calls import BrokenKind
from sglang_multiturn.conversation.turns import before_stop, call_id
from sglang_multiturn.engine.base import FinishReason, GenerationId
from sglang_multiturn.request import StopReason
from sglang_multiturn.tokens import Origin
from sglang_multiturn.trajectory import CallOutcome

from support import TEMPLATE, Asking, RecordingTool, call, context, roll, spec


def text(string: str) -> list[int]:
    return list(string.encode())


async def test_text_is_cut_at_a_stop_string_for_parsing_and_every_id_stays() -> None:
    asked: list[tuple[str, ...]] = []

    class Watching(ScriptedEngine):
        async def generate(self, generation_id: GenerationId, input_ids: Any, params: SamplingParams) -> Any:
            asked.append(params.stop)
            return await super().generate(generation_id, input_ids, params)

    said = f"{call('echo', x=1)}\nObservation: {call('echo', x=2)}"
    tool, sampling = RecordingTool(), SamplingParams(stop=("Observation:", "Final:"))
    turns = [ScriptedTurn(text=said, end=False, finish_reason=FinishReason.STOP), "Yes. Final: no"]
    async with Watching.playing(TEMPLATE, {"r": turns}) as engine:
        trajectory = await run_one(spec(sampling=sampling), context(engine, [tool]))
    trajectory.check(end_ids=TEMPLATE.end_ids)
    assert asked == [("Observation:", "Final:")] * 2
    assert list(trajectory.segments[1].ids) == text(said)
    assert [record.arguments for record in trajectory.tool_calls] == [{"x": 1}]
    assert trajectory.messages[-1].content == "Yes."
    assert trajectory.response_ids[-15:] == [*text("Yes. Final: no"), IM_END]
    assert {example.kind.value for example in trajectory.drift} == {"sampled_text"}


@pytest.mark.parametrize(
    ("said", "stops", "parsed"),
    [("abc", (), "abc"), ("abc", ("c", "b"), "a"), ("abc", ("x", ""), "abc"), ("a<b>", ("<b>",), "a")],
)
def test_the_first_stop_string_counts(said: str, stops: tuple[str, ...], parsed: str) -> None:
    assert before_stop(said, stops) == parsed


async def test_a_stop_string_that_used_up_the_turn_ended_it_all_the_same() -> None:
    said = f"{call('echo')}STOP"
    config = RolloutConfig(max_turn_tokens=len(said))
    turns = [ScriptedTurn(text=said, end=False, finish_reason=FinishReason.LENGTH), "done"]
    trajectory = await roll(turns, [RecordingTool()], config, sampling=SamplingParams(stop=("STOP",)))
    assert [record.outcome for record in trajectory.tool_calls] == [CallOutcome.OK]


async def test_ids_of_calls_have_nine_letters_and_digits_and_are_unique() -> None:
    ids = [call_id(turn, index) for turn in range(130) for index in range(0, 1300, 7)]
    assert all(len(one) == 9 and one.isascii() and one.isalnum() for one in ids)
    assert len(set(ids)) == len(ids)
    assert (call_id(0, 0), call_id(12, 7), call_id(100, 1)) == ("call00000", "call12007", "0064i0001")


async def test_a_turn_that_ended_with_another_end_token_gets_the_templates_as_a_boundary() -> None:
    turn = ScriptedTurn(text=call("echo"), end_id=END_OF_TEXT)
    trajectory = await roll([turn, "ok"], [RecordingTool()])
    assert trajectory.segments[1].ids[-1] == END_OF_TEXT
    assert trajectory.segments[2].origin is Origin.BOUNDARY
    assert trajectory.segments[2].ids[0] == IM_END
    end = len(trajectory.segments[1].ids)
    assert trajectory.response_mask[end - 1 : end + 1] == [1, 0]
    assert trajectory.response_logprobs is not None
    assert trajectory.response_logprobs[end - 1 : end + 1] == [-0.5, 0.0]


async def test_length_inside_a_call_makes_no_call() -> None:
    tool = RecordingTool()
    config = RolloutConfig(max_turn_tokens=40, max_response_tokens=1000)
    trajectory = await roll([call("echo", note="z" * 50), "done"], [tool], config)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert [r.outcome for r in trajectory.tool_calls] == [CallOutcome.MALFORMED]
    assert "cut at its length limit" in trajectory.tool_calls[0].answer
    assert tool.verbs == []
    assert trajectory.segments[2].ids[0] == IM_END
    assert (trajectory.tool_calls[0].broken, trajectory.metrics.malformed_truncated) == (BrokenKind.TRUNCATED, 1)


async def test_length_inside_a_call_ends_the_rollout_when_nothing_is_left_to_go_on_with() -> None:
    tool = RecordingTool()
    trajectory = await roll([call("echo", note="z" * 50)], [tool], RolloutConfig(max_response_tokens=40))
    assert trajectory.stop_reason is StopReason.MAX_RESPONSE_TOKENS
    assert (trajectory.tool_calls, tool.verbs, len(trajectory.response_ids)) == ((), [], 40)
    assert [message.role for message in trajectory.messages] == ["user", "assistant"]
    assert trajectory.messages[-1].tool_calls is None


async def test_length_inside_a_call_whose_answer_leaves_no_room_ends_before_it_is_appended() -> None:
    config = RolloutConfig(max_turn_tokens=40, max_response_tokens=100)
    trajectory = await roll([call("echo", note="z" * 50)], [RecordingTool()], config)
    assert trajectory.stop_reason is StopReason.MAX_RESPONSE_TOKENS
    assert [s.origin for s in trajectory.segments] == [Origin.PROMPT, Origin.SAMPLED]
    assert [record.broken for record in trajectory.tool_calls] == [BrokenKind.TRUNCATED]


async def test_words_cut_by_length_end_the_rollout_and_a_user_may_answer_them() -> None:
    config = RolloutConfig(max_turn_tokens=10, max_response_tokens=400)
    alone = await roll(["x" * 50], config=config)
    assert (alone.stop_reason, len(alone.response_ids)) == (StopReason.MAX_RESPONSE_TOKENS, 10)
    answered = await roll(["x" * 50, "done"], config=config, interaction=Asking("Go on."))
    assert answered.stop_reason is StopReason.USER_STOP
    assert [message.text for message in answered.messages] == ["hi", "x" * 10, "Go on.", "done"]
    assert (answered.segments[1].ids[-1], answered.segments[2].ids[0]) == (ord("x"), IM_END)
    assert answered.response_mask[9:11] == [1, 0]
