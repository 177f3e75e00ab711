"""Many conversations at once: limits, order, groups, and one failure that touches no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import pytest

from sglang_multiturn import (
    RequestSpec,
    RolloutConfig,
    RolloutEngine,
    ScriptedEngine,
    ScriptedTurn,
    ToolRegistry,
    Trajectory,
)
from sglang_multiturn.dataset import in_groups
from sglang_multiturn.engine.base import EngineInfo, GenerationId
from sglang_multiturn.errors import BatchFailedError, DataError, EngineDiedError
from sglang_multiturn.request import RequestState, StopReason

from support import TEMPLATE, FailingTool, HangingTool, RecordingTool, call, spec


def specs(count: int) -> list[RequestSpec]:
    return [spec(f"r{i}", uid=f"u{i}", input_index=i) for i in range(count)]


def rollouts(script: Any, tools: Any = (), **config: Any) -> RolloutEngine:
    engine = script if isinstance(script, ScriptedEngine) else ScriptedEngine(TEMPLATE, script)
    return RolloutEngine(engine, template=TEMPLATE, tools=ToolRegistry(tools), config=RolloutConfig(**config))


async def collect(running: RolloutEngine, asked: Iterable[RequestSpec], into: list[Trajectory]) -> None:
    async for trajectory in running.run(asked):
        into.append(trajectory)  # noqa: PERF401 - what came before an error has to be seen


async def test_one_trajectory_for_each_request_in_input_order() -> None:
    async with rollouts(lambda g, _: f"I am {g.request_id}.", max_concurrent=7) as running:
        finished = await running.run_all(specs(100))
    assert [t.request_id for t in finished] == [f"r{i}" for i in range(100)]
    assert all(TEMPLATE.decode(t.response_ids) == f"I am {t.request_id}." for t in finished)


async def test_never_more_than_the_limit_at_once_and_as_many_as_that() -> None:
    now, most = 0, 0

    class Counting(ScriptedEngine):
        async def generate(self, *args: Any) -> Any:
            nonlocal now, most
            now += 1
            most = max(most, now)
            try:
                return await super().generate(*args)
            finally:
                now -= 1

    engine = Counting(TEMPLATE, lambda *_: "x", latency_s=0.001)
    async with rollouts(engine, max_concurrent=5) as running:
        await running.run_all(specs(40))
    assert most == 5


async def test_requests_are_taken_only_as_there_is_room() -> None:
    taken = 0

    def endless() -> Iterator[RequestSpec]:
        nonlocal taken
        while True:
            taken += 1
            yield spec(f"r{taken}")

    async with rollouts(lambda *_: "x", max_concurrent=3) as running:
        stream = running.run(endless())
        for _ in range(10):
            await anext(stream)
        await stream.aclose()
    assert taken <= 10 + 3 + 3  # handed out, running, and waiting to be handed out


async def test_leaving_early_cancels_and_releases_what_is_running() -> None:
    hanging = HangingTool()

    def script(generation_id: GenerationId, _: Any) -> str:
        return "quick" if generation_id.request_id == "r0" else call("echo")

    async with rollouts(script, [hanging], tool_timeout_s=None) as running:
        stream = running.run(specs(4))
        await anext(stream)
        await hanging.started.wait()
        await stream.aclose()
    assert hanging.verbs.count("create") == hanging.verbs.count("release") > 0


async def test_one_failure_touches_no_other() -> None:
    def script(generation_id: GenerationId, _: Any) -> str:
        bad = generation_id.request_id == "r3" and generation_id.turn == 0
        return call("echo") if bad else "fine"

    async with rollouts(script, [FailingTool(SystemExit(1))]) as running:
        finished = await running.run_all(specs(20))
    assert [t.request_id for t in finished if t.state is RequestState.FAILED] == ["r3"]
    assert sum(t.stop_reason is StopReason.ANSWERED for t in finished) == 19


async def test_a_batch_that_mostly_fails_stops_with_its_causes() -> None:
    async with rollouts(lambda *_: call("echo"), [FailingTool(RuntimeError("no index"))]) as running:
        seen: list[Trajectory] = []
        with pytest.raises(BatchFailedError) as caught:
            await collect(running, specs(100), seen)
    assert len(seen) == 16
    assert "16 of the first 16 rollouts failed" in str(caught.value)
    assert "16x RuntimeError, for example r" in str(caught.value)
    assert "no index" in str(caught.value)


async def test_a_dead_engine_stops_the_batch_at_once_and_loses_nothing_that_had_finished() -> None:
    def script(generation_id: GenerationId, _: Any) -> ScriptedTurn | str:
        dead = int(generation_id.request_id[1:]) >= 30
        return ScriptedTurn(error=EngineDiedError("killed by signal 9")) if dead else "fine"

    async with rollouts(script, max_concurrent=1) as running:
        seen: list[Trajectory] = []
        with pytest.raises(EngineDiedError, match=r"after 30 finished rollouts: killed by signal 9"):
            await collect(running, specs(100), seen)
    assert [t.stop_reason for t in seen] == [StopReason.ANSWERED] * 30


async def test_a_bad_row_met_on_the_way_ends_the_run_with_its_own_error() -> None:
    def broken() -> Iterator[RequestSpec]:
        yield spec("r0")
        raise DataError("rows.jsonl:2: no prompt")

    async with rollouts(lambda *_: "x") as running:
        with pytest.raises(DataError, match=r"rows\.jsonl:2: no prompt"):
            await collect(running, broken(), [])


async def test_abort_all_ends_every_conversation_with_a_trajectory() -> None:
    engine = ScriptedEngine(TEMPLATE, lambda *_: ScriptedTurn(text="abc", hang_after=1))
    async with rollouts(engine) as running, asyncio.TaskGroup() as group:
        all_done = group.create_task(running.run_all(specs(8)))
        await engine.wait_until_started("r7")
        assert running.abort("r2")
        assert not running.abort("nobody")
        running.abort_all()
        finished = await all_done
    assert [t.stop_reason for t in finished] == [StopReason.ABORTED] * 8
    assert all(t.response_ids == [ord("a")] for t in finished)


async def test_groups_share_a_uid_and_nothing_else() -> None:
    grouped = list(in_groups(specs(2), 3))
    assert [(s.request_id, s.uid, s.sample_index, s.input_index) for s in grouped] == [
        ("r0-0", "u0", 0, 0),
        ("r0-1", "u0", 1, 1),
        ("r0-2", "u0", 2, 2),
        ("r1-0", "u1", 0, 3),
        ("r1-1", "u1", 1, 4),
        ("r1-2", "u1", 2, 5),
    ]


async def test_a_thousand_conversations_of_four_tool_turns_leave_every_tool_released() -> None:
    tool = RecordingTool()

    def script(generation_id: GenerationId, _: Any) -> str:
        return call("echo", turn=generation_id.turn) if generation_id.turn < 4 else "done"

    async with rollouts(script, [tool]) as running:
        finished = [t async for t in running.run(specs(1000))]
    assert len({t.request_id for t in finished}) == 1000
    assert all(t.metrics.tool_calls == 4 for t in finished)
    for verb, times in (("create", 1), ("execute", 4), ("calc_reward", 1), ("release", 1)):
        assert tool.verbs.count(verb) == 1000 * times
    for trajectory in finished:
        trajectory.check()


async def test_the_engine_is_started_and_closed_by_the_context() -> None:
    engine = ScriptedEngine(TEMPLATE, lambda *_: "x")
    async with rollouts(engine) as running:
        assert isinstance(running.engine.info, EngineInfo)
        await running.run_all(specs(1))
    with pytest.raises(EngineDiedError, match="closed"):
        await rollouts(engine).run_all(specs(1))
