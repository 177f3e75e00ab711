"""Conversations set aside at any moment, and gone on with after the weights have changed: nothing is lost, nothing twice."""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import random
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from tools.virtual_time import run_virtual

from sglang_multiturn import (
    Disposition,
    FinishReason,
    GenerationId,
    RequestSpec,
    RolloutConfig,
    RolloutEngine,
    ScriptedEngine,
    ScriptedTurn,
    StopReason,
    ToolRegistry,
    Trajectory,
)
from sglang_multiturn.errors import EngineError
from sglang_multiturn.request import RequestState
from sglang_multiturn.rollout import Rollout
from sglang_multiturn.tokens import Origin

from support import TEMPLATE, RecordingTool, call, context, spec
from support import tokens as text

WORLDS, MOMENTS, CONVERSATIONS = 100, 10, 8
SUSPENDED = RequestState.SUSPENDED
BUDGET_TOKENS = 700


class SlowTool(RecordingTool):
    """Takes as long as it is told, and counts."""

    def __init__(self) -> None:
        super().__init__("slow")
        self.running = 0

    async def answer(self, parameters: dict[str, Any]) -> Any:
        self.running += 1
        await asyncio.sleep(parameters["for_s"])
        self.running -= 1
        return json.dumps(parameters), 1.0, {}


async def slow_score(**_given: Any) -> float:
    await asyncio.sleep(0.5)
    return 1.0


class World:
    """Eight conversations on an engine with four places, and someone who suspends, updates and resumes."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        plans = {str(i): list(_plan(rng)) for i in range(CONVERSATIONS)}
        self.seed = seed
        self.tool = SlowTool()
        self.engine = ScriptedEngine(
            TEMPLATE, lambda given, _: plans[given.request_id][given.turn], latency_s=1.0, max_running=4
        )
        self.rollouts = RolloutEngine(
            self.engine,
            template=TEMPLATE,
            tools=ToolRegistry([self.tool]),
            config=RolloutConfig(max_response_tokens=BUDGET_TOKENS, max_concurrent=6, rollout_timeout_s=None),
            reward_fn=slow_score,
        )
        self.found: collections.Counter[str] = collections.Counter()
        """Where conversations were when they were suspended."""

    async def play(self, *, disturbed: bool) -> list[Trajectory]:
        specs = [spec(str(i), input_index=i) for i in range(CONVERSATIONS)]
        async with self.rollouts, asyncio.TaskGroup() as group:
            disturbing = group.create_task(self._disturb()) if disturbed else None
            finished = await self.rollouts.run_all(specs)
            if disturbing is not None:
                await disturbing
        return finished

    async def _disturb(self) -> None:
        rng = random.Random(-self.seed - 1)
        for version in range(1, MOMENTS + 1):
            await asyncio.sleep(rng.uniform(0, 2.5))
            everyone = rng.random() < 0.5
            chosen = None if everyone else [str(i) for i in range(CONVERSATIONS) if rng.random() < 0.5]
            self._note_where(chosen)
            async with self.rollouts.suspended(chosen):
                self._must_be_aside(chosen)
                if everyone or rng.random() < 0.5:
                    await self.engine.update_weights([], weight_version=version)
                await asyncio.sleep(rng.choice((0, 0.3, 5.0)))
                self._must_be_aside(chosen)

    def _chosen(self, names: list[str] | None) -> Iterator[Any]:
        return (r for r in self.rollouts.in_flight() if names is None or r.request_id in names)

    def _note_where(self, names: list[str] | None) -> None:
        sampling = {rid.split(":")[0] for rid in self.engine._in_flight}
        for request in self._chosen(names):
            queued = request.request_id in sampling and request.waiting_for == "the engine"
            self.found[f"{request.state} {'in the engine' if queued else request.waiting_for}"] += 1

    def _must_be_aside(self, names: list[str] | None) -> None:
        for request in self._chosen(names):
            assert request.state is SUSPENDED or request.waiting_for == "its rewards"
            assert not [rid for rid in self.engine._in_flight if rid.startswith(f"{request.request_id}:")]


def _plan(rng: random.Random) -> Iterator[str]:
    for _ in range(rng.randint(0, 3)):
        yield rng.choice("abc") * rng.randint(1, 40) + call("slow", for_s=rng.choice((0.1, 1.0, 4.0)))
    yield "so " * rng.randint(1, 20)


def words(trajectory: Trajectory) -> dict[str, Any]:
    """What must not depend on when somebody interferes."""
    calls = [(record.arguments, record.outcome, record.answer) for record in trajectory.tool_calls]
    return {
        "prompt": trajectory.prompt_ids,
        "response": trajectory.response_ids,
        "mask": trajectory.response_mask,
        "logprobs": trajectory.response_logprobs,
        "messages": trajectory.messages,
        "calls": calls,
        "reward": trajectory.reward,
        "stop_reason": trajectory.stop_reason,
        "turns": (trajectory.metrics.assistant_turns, trajectory.metrics.tool_turns),
    }


@pytest.mark.parametrize("part", range(5))
def test_a_thousand_moments_change_no_word_and_no_token(part: int) -> None:
    found: collections.Counter[str] = collections.Counter()
    mixed = 0
    for seed in range(part, WORLDS, 5):
        calm, world = World(seed), World(seed)
        expected = run_virtual(calm.play(disturbed=False))
        finished = run_virtual(world.play(disturbed=True))
        for before, after in zip(expected, finished, strict=True):
            check(after)
            assert words(after) == words(before), f"world {seed}, request {after.request_id}"
            mixed += len({segment.weight_version for segment in after.segments if segment.logprobs is not None}) > 1
        assert world.tool.verbs.count("execute") == calm.tool.verbs.count("execute")
        assert (world.tool.running, world.tool.verbs.count("create")) == (0, world.tool.verbs.count("release"))
        found += world.found
    assert {"RUNNING in the engine", "TOOL_CALLING tool slow"} < set(found)
    assert mixed > 20  # trajectories of several versions


def check(trajectory: Trajectory) -> None:
    trajectory.check(end_ids=TEMPLATE.end_ids)
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    assert trajectory.stop_reason in (StopReason.ANSWERED, StopReason.MAX_RESPONSE_TOKENS)
    assert len(trajectory.response_ids) <= BUDGET_TOKENS
    versions = [version for version in trajectory.response_weight_versions if version is not None]
    assert versions == sorted(versions)
    for segment, record in zip(
        (s for s in trajectory.segments if s.origin is Origin.SAMPLED), trajectory.turns, strict=True
    ):
        assert (segment.weight_version, segment.min_weight_version) == (record.weight_version, None)


# One moment each


async def hung(
    *turns: ScriptedTurn | str, config: RolloutConfig | None = None, **changes: Any
) -> tuple[ScriptedEngine, Rollout]:
    engine = ScriptedEngine.playing(TEMPLATE, {"r": turns})
    shared = context(engine, [RecordingTool()], config)
    return engine, Rollout(spec(**changes), shared)


async def test_a_turn_that_was_suspended_goes_on_where_it_was_with_the_new_weights() -> None:
    engine, rollout = await hung(ScriptedTurn(text="abcdef", hang_after=2))
    async with engine, asyncio.TaskGroup() as group:
        task = group.create_task(rollout.run())
        await engine.wait_until_started("r")
        await rollout.suspend()
        assert rollout.request.state is SUSPENDED
        assert rollout.request.ledger.response_ids == text("ab")
        await engine.update_weights([], weight_version=7)
        rollout.resume()
        trajectory = await task
    trajectory.check(end_ids=TEMPLATE.end_ids)
    assert trajectory.response_ids == [*text("abcdef"), TEMPLATE.stop_token_ids[0]]
    assert trajectory.response_weight_versions == [0, 0, 7, 7, 7, 7, 7]
    assert [(t.turn, t.attempt, t.finish_reason, t.sampled_tokens) for t in trajectory.turns] == [
        (0, 0, FinishReason.ABORT, 2),
        (0, 1, FinishReason.STOP, 5),
    ]
    assert trajectory.messages[-1].content == "abcdef"
    assert (trajectory.metrics.assistant_turns, trajectory.metrics.suspensions, trajectory.metrics.engine_retries) == (
        1,
        1,
        0,
    )


async def test_a_pause_of_the_whole_engine_costs_no_retry_and_no_token() -> None:
    engine, rollout = await hung(ScriptedTurn(text="abcdef", hang_after=3), config=RolloutConfig(engine_retries=0))
    async with engine, asyncio.TaskGroup() as group:
        task = group.create_task(rollout.run())
        await engine.wait_until_started("r")
        await engine.pause_generation("abort")
        await engine.update_weights([], weight_version=1)
        await engine.continue_generation()
        trajectory = await task
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.response_ids == [*text("abcdef"), TEMPLATE.stop_token_ids[0]]
    assert trajectory.response_weight_versions == [0, 0, 0, 1, 1, 1, 1]


LIMIT_S, PAUSE_S = 5.0, 1000.0


async def paused_in(
    moment_s: float, *, then: Callable[[ScriptedEngine, Rollout], Awaitable[None]], tool_s: float = 1.0
) -> Trajectory:
    """A call of one second, a tool of `tool_s`, an answer of one second; the engine is paused, and `then` happens."""
    turns = [call("slow", for_s=tool_s), "done" * 20]
    engine = ScriptedEngine(TEMPLATE, lambda given, _: turns[given.turn], latency_s=1.0)
    async with engine, asyncio.TaskGroup() as group:
        rollout = Rollout(spec(), context(engine, [SlowTool()], RolloutConfig(rollout_timeout_s=LIMIT_S)))
        task = group.create_task(rollout.run())
        await asyncio.sleep(moment_s)
        await engine.pause_generation("abort")
        await then(engine, rollout)
        return await task


@pytest.mark.parametrize("moment_s", [0.5, 1.5, 2.5])
def test_a_pause_of_the_engine_takes_no_time_of_a_conversation(moment_s: float) -> None:
    """Whether it is being sampled or comes from a tool. What the tool takes in the pause counts."""

    async def go_on(engine: ScriptedEngine, _: Rollout) -> None:
        await asyncio.sleep(PAUSE_S)
        await engine.continue_generation()

    trajectory = run_virtual(paused_in(moment_s, then=go_on))
    assert (trajectory.stop_reason, trajectory.metrics.engine_retries) == (StopReason.ANSWERED, 0)
    assert run_virtual(paused_in(1.5, then=go_on, tool_s=6.0)).stop_reason is StopReason.TIMEOUT


def test_after_a_pause_a_conversation_has_the_time_that_was_left() -> None:
    async def pause_again(engine: ScriptedEngine, _: Rollout) -> None:
        for _ in range(2):
            await asyncio.sleep(PAUSE_S)
            await engine.continue_generation()
            await asyncio.sleep(0.1)
            await engine.pause_generation("abort")
        await asyncio.sleep(PAUSE_S)
        await engine.continue_generation()

    assert run_virtual(paused_in(4.5, then=pause_again, tool_s=2.8)).stop_reason is StopReason.ANSWERED
    assert run_virtual(paused_in(4.5, then=pause_again, tool_s=3.2)).stop_reason is StopReason.TIMEOUT


def test_suspended_in_a_pause_its_clock_stands_still_until_both_are_over() -> None:
    async def suspend(engine: ScriptedEngine, rollout: Rollout) -> None:
        await rollout.suspend()
        await asyncio.sleep(PAUSE_S)
        await engine.continue_generation()
        await asyncio.sleep(PAUSE_S)
        rollout.resume()

    assert run_virtual(paused_in(0.5, then=suspend)).stop_reason is StopReason.ANSWERED


def test_aborted_in_a_pause_it_ends_at_once_with_what_it_has() -> None:
    async def abort(_: ScriptedEngine, rollout: Rollout) -> None:
        await asyncio.sleep(1.0)
        rollout.abort()

    trajectory = run_virtual(paused_in(0.5, then=abort))
    assert trajectory.stop_reason is StopReason.ABORTED
    assert 0 < len(trajectory.response_ids) < len(text(call("slow", for_s=1.0)))


async def test_a_tool_goes_on_while_its_conversation_is_suspended_and_is_not_called_again() -> None:
    class Gated(RecordingTool):
        def __init__(self) -> None:
            super().__init__()
            self.called, self.go_on, self.done = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def answer(self, parameters: dict[str, Any]) -> Any:
            self.called.set()
            await self.go_on.wait()
            self.done.set()
            return "late", 1.0, {}

    tool = Gated()
    engine = ScriptedEngine.playing(TEMPLATE, {"r": [call("echo"), "done"]})
    async with engine, asyncio.TaskGroup() as group:
        rollout = Rollout(spec(), context(engine, [tool]))
        task = group.create_task(rollout.run())
        await tool.called.wait()
        await rollout.suspend()
        tool.go_on.set()
        await tool.done.wait()
        await asyncio.sleep(0)
        assert (rollout.request.state, rollout.request.suspended_in) == (SUSPENDED, RequestState.TOOL_CALLING)
        rollout.resume()
        trajectory = await task
    assert tool.verbs == ["create", "execute", "calc_reward", "release"]
    assert [record.answer for record in trajectory.tool_calls] == ["late"]
    assert trajectory.stop_reason is StopReason.ANSWERED


def test_the_clock_of_a_suspended_conversation_stands_still() -> None:
    async def play() -> list[Trajectory]:
        engine = ScriptedEngine(TEMPLATE, lambda *_: "word", latency_s=3.0)
        rollouts = RolloutEngine(engine, template=TEMPLATE, config=RolloutConfig(rollout_timeout_s=4.0))
        async with rollouts, asyncio.TaskGroup() as group:
            task = group.create_task(rollouts.run_all([spec("a"), spec("b")]))
            await asyncio.sleep(1.0)
            await rollouts.suspend(["a"])
            await asyncio.sleep(100.0)
            rollouts.resume()
            return await task

    first, second = run_virtual(play())
    assert [first.stop_reason, second.stop_reason] == [StopReason.ANSWERED, StopReason.ANSWERED]


def test_a_conversation_that_was_suspended_runs_out_of_the_time_it_had_left() -> None:
    async def play() -> list[Trajectory]:
        engine = ScriptedEngine(TEMPLATE, lambda *_: "word" * 10, latency_s=8.0)
        rollouts = RolloutEngine(engine, template=TEMPLATE, config=RolloutConfig(rollout_timeout_s=4.0))
        async with rollouts, asyncio.TaskGroup() as group:
            task = group.create_task(rollouts.run_all([spec("a")]))
            await asyncio.sleep(2.0)
            async with rollouts.suspended():
                await asyncio.sleep(100.0)
            return await task

    (only,) = run_virtual(play())
    only.check(end_ids=TEMPLATE.end_ids)
    assert only.stop_reason is StopReason.TIMEOUT
    # A quarter of the turn's 41 tokens before, and then a third of the 31 that were left, in the two seconds that were.
    assert [record.sampled_tokens for record in only.turns] == [10, 10]


async def test_an_abort_reaches_a_suspended_conversation() -> None:
    engine, rollout = await hung(ScriptedTurn(text="abcdef", hang_after=2))
    async with engine, asyncio.TaskGroup() as group:
        task = group.create_task(rollout.run())
        await engine.wait_until_started("r")
        await rollout.suspend()
        rollout.abort()
        trajectory = await task
        rollout.resume()
    assert (trajectory.state, trajectory.stop_reason) == (RequestState.ABORTED, StopReason.ABORTED)
    assert trajectory.response_ids == text("ab")


async def test_a_suspension_does_not_hold_up_an_abort_of_the_same_moment() -> None:
    engine, rollout = await hung(ScriptedTurn(text="abcdef", hang_after=2))
    async with engine, asyncio.TaskGroup() as group:
        task = group.create_task(rollout.run())
        await engine.wait_until_started("r")
        rollout.abort()
        await rollout.suspend()
        trajectory = await task
    assert (trajectory.state, trajectory.response_ids) == (RequestState.ABORTED, text("ab"))


async def test_one_that_begins_while_everybody_is_suspended_waits() -> None:
    engine = ScriptedEngine(TEMPLATE, lambda *_: "word")
    rollouts = RolloutEngine(engine, template=TEMPLATE)
    async with rollouts, asyncio.TaskGroup() as group:
        await rollouts.suspend()
        task = group.create_task(rollouts.run_all([spec("a")]))
        for _ in range(20):
            await asyncio.sleep(0)
        begun = rollouts.in_flight()
        assert (begun[0].state, begun[0].num_response_tokens) == (SUSPENDED, 0)
        rollouts.resume()
        (trajectory,) = await task
    assert (trajectory.stop_reason, trajectory.metrics.suspensions) == (StopReason.ANSWERED, 1)


async def test_an_engine_that_does_not_end_a_generation_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_multiturn.rollout.ABORT_GRACE_S", 0.01)

    class Deaf(ScriptedEngine):
        async def abort(self, request_id: str) -> None:
            """Does nothing."""

    engine = Deaf.playing(TEMPLATE, {"r": [ScriptedTurn(text="abc", hang_after=1)]})
    async with engine, asyncio.TaskGroup() as group:
        rollout = Rollout(spec(), context(engine))
        task = group.create_task(rollout.run())
        await engine.wait_until_started("r")
        with pytest.raises(EngineError, match=r"request r: its generation did not end within 0.01 s of its suspension"):
            await rollout.suspend()
        rollout.resume()
        await engine.abort_all()
        await task


# Staleness


def stale(policy: str, *, limit: int, versions: int) -> tuple[Trajectory, RecordingTool]:
    """A turn of two calls' text, suspended in its first and third generation, the weights updated in between."""

    async def play() -> Trajectory:
        config = RolloutConfig.model_validate({"max_staleness": limit, "stale": policy})
        turns = [call("echo"), "x" * 9]
        engine = ScriptedEngine(TEMPLATE, lambda given, _: turns[given.turn], latency_s=10.0)
        rollouts = RolloutEngine(engine, template=TEMPLATE, tools=ToolRegistry([tool]), config=config)
        async with rollouts, asyncio.TaskGroup() as group:
            task = group.create_task(rollouts.run_all([spec("a")]))
            await asyncio.sleep(15.0)  # in the middle of the second turn
            for version in range(1, versions + 1):
                async with rollouts.suspended():
                    await engine.update_weights([], weight_version=version)
            return (await task)[0]

    tool = RecordingTool()
    trajectory = run_virtual(play())
    trajectory.check(end_ids=TEMPLATE.end_ids)
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    return trajectory, tool


@pytest.mark.parametrize("policy", ["train", "mask", "drop", "restart"])
def test_what_is_not_too_old_is_trained_whatever_the_policy(policy: str) -> None:
    trajectory, tool = stale(policy, limit=2, versions=2)
    assert (trajectory.disposition, trajectory.stale_before, trajectory.restarts) == (Disposition.TRAIN, None, 0)
    assert sum(trajectory.response_mask) == trajectory.ledger.num_sampled_tokens
    assert tool.verbs == ["create", "execute", "calc_reward", "release"]


def test_tokens_that_are_too_old_are_masked_and_no_others() -> None:
    trajectory, _ = stale("mask", limit=1, versions=2)
    old = [version == 0 for version in trajectory.response_weight_versions]
    assert (trajectory.disposition, trajectory.stale_before) == (Disposition.TRAIN, 1)
    assert trajectory.response_mask == [int(v == 2) for v in trajectory.response_weight_versions]
    assert any(old)
    assert sum(trajectory.response_mask) == 5  # half of nine and the end


def test_a_rollout_that_is_too_old_is_dropped() -> None:
    assert stale("drop", limit=0, versions=1)[0].disposition is Disposition.DROP
    assert stale("train", limit=0, versions=1)[0].disposition is Disposition.TRAIN


def test_a_rollout_that_is_too_old_is_begun_anew_with_tools_of_its_own() -> None:
    trajectory, tool = stale("restart", limit=0, versions=1)
    assert (trajectory.disposition, trajectory.restarts) == (Disposition.TRAIN, 1)
    assert {v for v in trajectory.response_weight_versions if v is not None} == {1}
    assert tool.verbs == ["create", "execute", "release", "create", "execute", "calc_reward", "release"]
    assert (trajectory.metrics.tool_instances_created, trajectory.metrics.tool_instances_released) == (2, 2)
    assert (trajectory.metrics.assistant_turns, trajectory.metrics.tool_turns) == (2, 1)
    assert len({(t.turn, t.attempt) for t in trajectory.turns}) == len(trajectory.turns)
    assert min(t.attempt for t in trajectory.turns) == 1  # no rid of the first life comes again


def test_validation_is_never_stale() -> None:
    async def play() -> list[Trajectory]:
        config = RolloutConfig(max_staleness=0, stale="drop")
        engine = ScriptedEngine(TEMPLATE, lambda *_: "word", latency_s=2.0)
        rollouts = RolloutEngine(engine, template=TEMPLATE, config=config)
        async with rollouts, asyncio.TaskGroup() as group:
            task = group.create_task(rollouts.run_all([spec("a", validate=True)]))
            await asyncio.sleep(1.0)
            async with rollouts.suspended():
                await engine.update_weights([], weight_version=3)
            return await task

    assert run_virtual(play())[0].disposition is Disposition.TRAIN


def test_every_attempt_has_a_name_of_its_own() -> None:
    asked: list[str] = []

    class Noting(ScriptedEngine):
        async def generate(self, generation_id: GenerationId, *given: Any) -> Any:
            asked.append(generation_id.rid)
            return await super().generate(generation_id, *given)

    async def play() -> None:
        engine = Noting(TEMPLATE, lambda given, _: "a" * 20, latency_s=1.0)
        rollouts = RolloutEngine(engine, template=TEMPLATE, config=RolloutConfig(max_staleness=0, stale="restart"))
        async with rollouts, asyncio.TaskGroup() as group:
            group.create_task(rollouts.run_all([RequestSpec(request_id="a", uid="u", messages=spec().messages)]))
            for version in (0, 0, 1, 1, 2):
                await asyncio.sleep(0.1)
                async with rollouts.suspended():
                    await engine.update_weights([], weight_version=version)

    run_virtual(play())
    assert asked == [f"a:t0:a{i}" for i in range(6)]
    assert [a <= b for a, b in itertools.pairwise(asked)] == [True] * 5
