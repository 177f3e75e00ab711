"""Limits and settings of one tool, as a conversation meets them: retries, deadlines, scopes, counts, faults."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pydantic import ValidationError
from tools.virtual_time import run_virtual

from sglang_multiturn import RolloutConfig, ScriptedEngine, ToolError, ToolRegistry, Trajectory, run_one
from sglang_multiturn.config import FaultConfig, ToolSettings
from sglang_multiturn.conversation.context import RolloutContext
from sglang_multiturn.errors import ToolDiedError
from sglang_multiturn.request import StopReason, ToolKwargs
from sglang_multiturn.tools.faults import FaultPlan
from sglang_multiturn.trajectory import CallOutcome

from support import TEMPLATE, RecordingTool, call, context, spec


def play(
    turns: list[str],
    tool: RecordingTool,
    config: RolloutConfig | None = None,
    *,
    settings: dict[str, Any],
    **asked: Any,
) -> Trajectory:
    """One conversation in virtual time, with a tool that is set up so."""

    async def converse() -> Trajectory:
        async with ScriptedEngine.playing(TEMPLATE, {"r": turns}) as engine:
            given = context(engine, [tool], config)
            registry = ToolRegistry([tool], settings={tool.name: ToolSettings(**settings)})
            shared = RolloutContext(
                generator=engine,
                template=TEMPLATE,
                tools=registry,
                parser=given.parser,
                config=given.config,
                max_model_len=given.max_model_len,
            )
            return await run_one(spec(**asked), shared)

    trajectory = run_virtual(converse())
    trajectory.check(end_ids=TEMPLATE.end_ids)
    return trajectory


class Failing(RecordingTool):
    """Raises ToolError the first times it is asked."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._times = times

    async def answer(self, parameters: dict[str, Any]) -> Any:
        self._times -= 1
        if self._times >= 0:
            raise ToolError("busy")
        return "served", 0.5, {}


class Hanging(RecordingTool):
    """Never answers the first time it is asked, and counts how many calls run at once."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self._times = times

    async def answer(self, parameters: dict[str, Any]) -> Any:
        self._times -= 1
        if self._times >= 0:
            await asyncio.Event().wait()
        return "served", 0.5, {}


class Crowded(RecordingTool):
    """Remembers how many calls ran at the same time, and when each began."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.began: list[float] = []

    async def answer(self, parameters: dict[str, Any]) -> Any:
        self.now += 1
        self.most = max(self.most, self.now)
        self.began.append(asyncio.get_running_loop().time())
        await asyncio.sleep(1)
        self.now -= 1
        return "served", 0.0, {}


def outcomes(trajectory: Trajectory) -> list[CallOutcome]:
    return [record.outcome for record in trajectory.tool_calls]


def test_a_call_is_made_again_as_often_as_the_yaml_says() -> None:
    served = play([call("echo"), "done"], Failing(2), settings={"retries": 2})
    assert outcomes(served) == [CallOutcome.OK]
    assert served.tool_calls[0].answer == "served"
    assert served.metrics.tool_retries == 2

    told = play([call("echo"), "done"], Failing(3), settings={"retries": 2})
    assert outcomes(told) == [CallOutcome.TOOL_ERROR]
    assert told.tool_calls[0].answer == "Error: busy"
    assert told.metrics.tool_retries == 2
    assert told.stop_reason is StopReason.ANSWERED


def test_a_hung_call_is_made_again_after_its_deadline() -> None:
    tool = Hanging()
    trajectory = play([call("echo"), "done"], tool, settings={"retries": 1, "timeout_s": 2.0})
    assert outcomes(trajectory) == [CallOutcome.OK]
    assert tool.verbs == ["create", "execute", "execute", "calc_reward", "release"]


def test_a_tool_has_a_deadline_of_its_own() -> None:
    trajectory = play([call("echo"), "done"], Hanging(), settings={"timeout_s": 2.5})
    assert trajectory.tool_calls[0].answer == "Error: the tool did not answer within 2.5 seconds"
    assert outcomes(trajectory) == [CallOutcome.TIMEOUT]


def test_what_a_tool_raises_is_never_tried_again() -> None:
    class Broken(RecordingTool):
        async def answer(self, parameters: dict[str, Any]) -> Any:
            raise ValueError("a bug")

    tool = Broken()
    trajectory = play([call("echo"), "done"], tool, settings={"retries": 3})
    assert trajectory.error is not None
    assert (trajectory.error.type, trajectory.error.message) == ("ValueError", "a bug")
    assert tool.verbs.count("execute") == 1


def test_no_more_calls_run_at_once_than_the_limit_says() -> None:
    tool = Crowded()
    trajectory = play([call("echo") * 5, "done"], tool, settings={"max_concurrent": 2})
    assert outcomes(trajectory) == [CallOutcome.OK] * 5
    assert tool.most == 2


def test_waiting_for_a_slot_is_no_part_of_the_deadline() -> None:
    tool = Crowded()
    trajectory = play([call("echo") * 5, "done"], tool, settings={"max_concurrent": 1, "timeout_s": 1.5})
    assert outcomes(trajectory) == [CallOutcome.OK] * 5


def test_calls_begin_no_faster_than_the_rate_says() -> None:
    tool = Crowded()
    play([call("echo") * 4, "done"], tool, settings={"max_per_s": 2.0})
    first, second, third, fourth = tool.began
    assert third - first >= 1.0
    assert fourth - second >= 1.0


def test_calls_beyond_the_limit_of_a_conversation_are_refused_in_words() -> None:
    tool = RecordingTool()
    trajectory = play([call("echo"), call("echo") * 2, "done"], tool, settings={"max_calls": 2})
    assert outcomes(trajectory) == [CallOutcome.OK, CallOutcome.OK, CallOutcome.SKIPPED]
    refused = "Not executed: echo may be called 2 times in a conversation. Go on without it."
    assert trajectory.tool_calls[2].answer == refused
    assert trajectory.metrics.refused_calls == 1
    assert tool.verbs.count("execute") == 2


def test_a_tool_may_end_the_conversation_with_its_answer() -> None:
    trajectory = play([call("echo"), "never said"], RecordingTool(), settings={"stop_after_call": True})
    assert trajectory.stop_reason is StopReason.TOOL_STOP
    failed = play([call("echo"), "said"], Failing(1), settings={"stop_after_call": True})
    assert failed.stop_reason is StopReason.ANSWERED


def test_a_call_may_have_an_instance_of_its_own() -> None:
    tool = RecordingTool()
    kwargs = ToolKwargs(create_kwargs={"a": 1}, release_kwargs={"b": 2})
    trajectory = play(
        [call("echo", n=1) + call("echo", n=2), "done"],
        tool,
        settings={"instance_scope": "call", "max_concurrent": 1},
        tools_kwargs={"echo": kwargs},
    )
    assert tool.verbs == ["create", "execute", "release"] * 2
    first, second = (tool.log[at][1] for at in (0, 3))
    assert first != second
    assert [tool.log[at][1] for at in range(6)] == [first] * 3 + [second] * 3
    assert trajectory.metrics.tool_instances_created == trajectory.metrics.tool_instances_released == 2
    assert trajectory.rewards.calc_rewards == {}


def test_injected_errors_are_told_and_never_reach_the_tool() -> None:
    tool = RecordingTool()
    trajectory = play([call("echo"), "done"], tool, settings={"faults": {"error_rate": 1.0}})
    assert outcomes(trajectory) == [CallOutcome.TOOL_ERROR]
    assert trajectory.tool_calls[0].answer == "Error: the tool is not available (a fault injected by configuration)"
    assert trajectory.metrics.injected_faults == 1
    assert tool.verbs == []


def test_injected_hangs_end_by_the_deadline() -> None:
    trajectory = play(
        [call("echo"), "done"], RecordingTool(), settings={"timeout_s": 3.0, "faults": {"hang_rate": 1.0}}
    )
    assert outcomes(trajectory) == [CallOutcome.TIMEOUT]


def test_a_validation_rollout_has_no_injected_faults() -> None:
    faults = {"faults": {"error_rate": 1.0, "latency_s": 5.0}, "timeout_s": 1.0}
    trajectory = play([call("echo"), "done"], RecordingTool(), settings=faults, validate=True)
    assert outcomes(trajectory) == [CallOutcome.OK]
    assert trajectory.metrics.injected_faults == 0


def test_faults_come_as_often_as_asked_and_the_same_way_again() -> None:
    plan = FaultPlan(FaultConfig(error_rate=0.05, hang_rate=0.02, seed=1), "echo")
    drawn = [plan.draw(f"r{n}", "call00000", 0) for n in range(10_000)]
    assert drawn == [plan.draw(f"r{n}", "call00000", 0) for n in range(10_000)]
    assert 400 <= sum(fault.error for fault in drawn) <= 600
    assert 140 <= sum(fault.hang for fault in drawn) <= 260
    assert not any(fault.error and fault.hang for fault in drawn)


def test_a_create_that_fails_is_told_and_tried_again_at_the_next_call() -> None:
    class Reluctant(RecordingTool):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
            self.log.append(("create", str(instance_id), kwargs))
            if self.verbs.count("create") == 1:
                raise ToolError("not yet")
            return instance_id

    tool = Reluctant()
    trajectory = play([call("echo"), call("echo"), "done"], tool, settings={})
    assert outcomes(trajectory) == [CallOutcome.TOOL_ERROR, CallOutcome.OK]
    assert tool.verbs == ["create", "create", "execute", "calc_reward", "release"]
    assert json.loads(trajectory.tool_calls[1].answer) == {}


def test_faults_of_more_calls_than_there_are_make_no_sense() -> None:
    with pytest.raises(ValidationError, match="together at most 1"):
        FaultConfig(error_rate=0.6, hang_rate=0.5)
    assert FaultConfig(error_rate=0.5, hang_rate=0.5).seed == 0


@pytest.mark.parametrize("policy", ["tell", "fail"])
def test_a_tool_that_cannot_be_loaded_where_it_runs_follows_the_policy(policy: str) -> None:
    """Its host's `start` fails: at the start of a conversation that names it, and at each call."""

    async def converse() -> Trajectory:
        async with ScriptedEngine.playing(TEMPLATE, {"r": [call("echo"), "done"]}) as engine:
            config = RolloutConfig.model_validate({"on_failure": {"died": policy}})
            shared = context(engine, [RecordingTool()], config)
            assert shared.tool_runtime is not None
            running = shared.tool_runtime.tool("echo")
            running.host.start = unreachable  # type: ignore[method-assign]
            return await run_one(spec(tools_kwargs={"echo": ToolKwargs()}), shared)

    async def unreachable() -> None:
        raise ToolDiedError("its node is gone")

    trajectory = run_virtual(converse())
    if policy == "fail":
        assert trajectory.error is not None
        assert trajectory.error.message.startswith(
            "echo.create went wrong and on_failure.died is fail: Error: its node"
        )
    else:
        assert [(r.outcome, r.answer) for r in trajectory.tool_calls] == [(CallOutcome.DIED, "Error: its node is gone")]
        assert trajectory.stop_reason is StopReason.ANSWERED
