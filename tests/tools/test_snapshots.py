"""Conversations that are suspended while their tools remember something."""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from tools.remembering_tool import ForgetfulTool, HalfTool, RememberingTool
from tools.snapshot_support import answers, counts, in_yaml, say, words
from tools.virtual_time import run_virtual

from sglang_multiturn import (
    BaseTool,
    RolloutConfig,
    RolloutEngine,
    ScriptedEngine,
    ToolRegistry,
    Trajectory,
)
from sglang_multiturn.config import ToolSettings
from sglang_multiturn.errors import ConfigError, ToolContractError
from sglang_multiturn.request import StopReason
from sglang_multiturn.tools.results import snapshot_as_json

from support import TEMPLATE, RecordingTool, spec


def play(
    turns: Sequence[str],
    tool: BaseTool,
    disturb: Callable[[RolloutEngine], Awaitable[None]],
    *,
    settings: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
) -> Trajectory:
    """One conversation in virtual time: each turn is sampled in 10 seconds, and someone disturbs it."""

    async def converse() -> Trajectory:
        rollouts = RolloutEngine(
            ScriptedEngine(TEMPLATE, lambda given, _: turns[given.turn], latency_s=10.0),
            template=TEMPLATE,
            tools=ToolRegistry([tool], settings={tool.name: ToolSettings.model_validate(settings or {})}),
            config=RolloutConfig.model_validate(config or {}),
        )
        async with rollouts, asyncio.TaskGroup() as group:
            task = group.create_task(rollouts.run_all([spec("r")]))
            await disturb(rollouts)
            return (await task)[0]

    trajectory = run_virtual(converse())
    trajectory.check(end_ids=TEMPLATE.end_ids)
    assert Trajectory.from_json(trajectory.to_json()) == trajectory
    return trajectory


def suspended_once(after_s: float, for_s: float = 0.0) -> Callable[[RolloutEngine], Awaitable[None]]:
    async def disturb(rollouts: RolloutEngine) -> None:
        await asyncio.sleep(after_s)
        before_s = now_s()
        async with rollouts.suspended():
            assert now_s() == before_s, "nothing was waited for"
            await asyncio.sleep(for_s)

    return disturb


def now_s() -> float:
    return asyncio.get_running_loop().time()


# When they are taken


def test_an_instance_at_rest_is_asked_when_its_conversation_is_suspended() -> None:
    tool = RememberingTool({})
    trajectory = play([say(word="a"), say(word="b"), "done"], tool, suspended_once(15.0))
    assert answers(trajectory) == ["a", "a b"]
    assert counts(trajectory) == {"snapshots": 1}
    used = ["create", "execute", "snapshot", "snapshot given", "execute", "calc_reward", "release"]
    assert tool.log == used


def test_one_that_is_called_is_asked_when_the_call_has_ended() -> None:
    tool = RememberingTool({})
    trajectory = play([say(word="a", takes_s=5.0) * 2, "done"], tool, suspended_once(12.0, for_s=60.0))
    assert answers(trajectory) == ["a a", "a a"]
    assert tool.log == ["create", "execute", "execute", "snapshot", "snapshot given", "calc_reward", "release"]


def test_one_whose_call_ends_after_the_suspension_is_not_asked() -> None:
    tool = RememberingTool({})
    trajectory = play([say(word="a", takes_s=5.0), "done"], tool, suspended_once(12.0, for_s=1.0))
    assert counts(trajectory) == {}
    assert "snapshot" not in tool.log


def test_one_that_is_made_meanwhile_is_asked_too() -> None:
    class SlowlyMade(RememberingTool):
        async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
            await asyncio.sleep(3.0)
            return await super().create(instance_id, **kwargs)

    tool = SlowlyMade({})

    async def disturb(rollouts: RolloutEngine) -> None:
        await asyncio.sleep(11.0)
        async with rollouts.suspended():
            await asyncio.sleep(10.0)
            assert tool.log == ["create", "execute", "snapshot", "snapshot given"]

    play([say(word="a"), "done"], tool, disturb)


def test_what_has_not_been_used_since_is_not_asked_again() -> None:
    tool = RememberingTool({})

    async def disturb(rollouts: RolloutEngine) -> None:
        await asyncio.sleep(15.0)
        for _ in range(3):
            async with rollouts.suspended():
                await asyncio.sleep(1.0)
        await asyncio.sleep(15.0)  # in the third turn
        async with rollouts.suspended():
            pass

    assert counts(play([say(word="a"), say(word="b"), "done"], tool, disturb)) == {"snapshots": 2}


def test_the_next_call_waits_for_the_snapshot_and_nothing_else_does() -> None:
    tool = RememberingTool({"takes_s": 30.0})
    waited: list[tuple[str, float]] = []

    async def disturb(rollouts: RolloutEngine) -> None:
        await suspended_once(15.0)(rollouts)
        await asyncio.sleep(10.0)
        waited.extend((request.waiting_for, now_s()) for request in rollouts.in_flight())

    trajectory = play([say(word="a"), say(word="b"), "done"], tool, disturb)
    assert waited == [("a snapshot of tool memory", 25.0)]  # its turn was sampled long before
    assert answers(trajectory) == ["a", "a b"]
    assert tool.log.index("snapshot given") < tool.log.index("execute", 2)


def test_tools_without_them_and_instances_of_one_call_are_never_asked() -> None:
    tasks: list[int] = []

    async def disturb(rollouts: RolloutEngine) -> None:
        await asyncio.sleep(15.0)
        before = len(asyncio.all_tasks())
        await rollouts.suspend()
        tasks.append(len(asyncio.all_tasks()) - before)
        rollouts.resume()

    plain, single = RecordingTool("memory"), RememberingTool({})
    assert counts(play([say(), "done"], plain, disturb)) == {}
    assert counts(play([say(), "done"], single, disturb, settings={"instance_scope": "call"})) == {}
    assert "snapshot" not in single.log
    assert all(more <= 0 for more in tasks)  # the generation's is gone


def test_a_rollout_that_is_begun_anew_begins_blank() -> None:
    tool = RememberingTool({})

    async def disturb(rollouts: RolloutEngine) -> None:
        await asyncio.sleep(15.0)
        async with rollouts.suspended():
            assert isinstance(rollouts.engine, ScriptedEngine)
            await rollouts.engine.update_weights([], weight_version=1)

    config = {"max_staleness": 0, "stale": "restart"}
    trajectory = play([say(word="a"), say(word="b"), "done"], tool, disturb, config=config)
    assert trajectory.restarts == 1
    assert answers(trajectory) == ["a", "a b"]
    assert tool.log.count("create") == tool.log.count("release") == 2
    assert "restore" not in tool.log


@pytest.mark.parametrize("part", range(5))
def test_at_random_moments_no_call_overlaps_a_snapshot_and_no_word_changes(part: int) -> None:
    seen: collections.Counter[str] = collections.Counter()
    for seed in range(part, 200, 5):
        rng = random.Random(seed)
        turns = [
            "".join(say(word=rng.choice("abc"), takes_s=rng.choice((0.1, 7.0))) for _ in range(rng.randint(1, 2)))
            for _ in range(rng.randint(1, 3))
        ]
        moments = [(rng.uniform(0, 20), rng.uniform(0, 20)) for _ in range(4)]
        tool = RememberingTool({"takes_s": rng.choice((0.0, 3.0, 15.0))})

        async def disturb(rollouts: RolloutEngine, moments: list[tuple[float, float]] = moments) -> None:
            for after_s, for_s in moments:
                await suspended_once(after_s, for_s)(rollouts)

        undisturbed = play([*turns, "done"], RememberingTool({}), nobody)
        trajectory = play([*turns, "done"], tool, disturb)
        assert words(trajectory) == words(undisturbed), seed
        used = [event for event in tool.log if event != "snapshot given"]
        given = [tool.log[at + 1] for at, event in enumerate(tool.log) if event == "snapshot"]
        assert set(given) <= {"snapshot given"}, (seed, tool.log)
        assert trajectory.metrics.snapshots == len(given)
        assert (used[-1], used.count("create"), used.count("release")) == ("release", 1, 1)
        seen[f"{len(given)} snapshots"] += 1
    assert len(seen) >= 3


async def nobody(rollouts: RolloutEngine) -> None:
    """Disturbs."""


# What goes wrong


@pytest.mark.parametrize(
    "how", ["raises", "says_why", "hangs", "returns_rubbish", "returns_too_much", "returns_keys_that_are_no_text"]
)
def test_a_snapshot_that_fails_is_counted_and_changes_nothing_else(how: str, caplog: pytest.LogCaptureFixture) -> None:
    turns = [say(word="a", fails={"snapshot": how}), say(word="b"), "done"]
    undisturbed = play(turns, RememberingTool({}), suspended_once(60.0))
    trajectory = play(turns, RememberingTool({}), suspended_once(15.0), settings={"timeout_s": 7.0})
    assert counts(trajectory) == {"snapshot_errors": 1}
    assert words(trajectory) == words(undisturbed)
    assert trajectory.stop_reason is StopReason.ANSWERED
    said = [record.message for record in caplog.records if "snapshot" in record.message]
    assert len(said) == 1
    assert said[0].startswith("request r: memory.snapshot failed: ")
    if how == "hangs":
        assert said[0].endswith("TimeoutError('not done within 7 seconds')")


def test_a_conversation_that_is_aborted_meanwhile_waits_for_no_snapshot() -> None:
    tool = RememberingTool({"takes_s": 1e6})

    async def disturb(rollouts: RolloutEngine) -> None:
        await asyncio.sleep(15.0)
        await rollouts.suspend()
        await asyncio.sleep(1.0)
        rollouts.abort("r")
        await asyncio.sleep(0.1)
        assert tool.log == ["create", "execute", "snapshot", "release"]

    trajectory = play([say(word="a"), "done"], tool, disturb, settings={"timeout_s": None})
    assert trajectory.stop_reason is StopReason.ABORTED
    assert trajectory.metrics.tool_instances_released == 1


def test_a_snapshot_is_ascii_from_which_the_same_is_read_again() -> None:
    assert snapshot_as_json({"a": [1, 2.5, None, True, "\u00e4\ud800"]}, "t.snapshot") == (
        r'{"a":[1,2.5,null,true,"\u00e4\ud800"]}'
    )
    circular: list[Any] = []
    circular.append(circular)
    for broken in ((1, 2), {1: 2}, b"x", object(), float("inf"), circular, 10**5000):
        with pytest.raises(ToolContractError, match=r"^t\.snapshot returned what is no JSON"):
            snapshot_as_json(broken, "t.snapshot")
    assert len(snapshot_as_json("x" * (1024 * 1024 - 2), "t.snapshot")) == 1024 * 1024
    with pytest.raises(ToolContractError, match=r"^t\.snapshot returned 1048577 bytes of JSON; at most 1048576 are"):
        snapshot_as_json("x" * (1024 * 1024 - 1), "t.snapshot")


@pytest.mark.parametrize("execution", ["async", "process"])
def test_one_method_without_the_other_is_refused_when_it_is_loaded(execution: str) -> None:
    said = r"HalfTool has 'snapshot' and no 'restore', and neither is of use without the other; write 'restore' too"
    with pytest.raises(ConfigError, match=said):
        ToolRegistry.from_config(in_yaml("HalfTool", execution=execution))
    with pytest.raises(ConfigError, match=said):
        ToolRegistry([HalfTool({})])


def test_the_tools_of_these_tests_differ_in_their_snapshots_alone() -> None:
    assert set(vars(RememberingTool)) - set(vars(ForgetfulTool)) == {"snapshot", "restore"}
