"""Conversations whose tools' processes die while they are suspended: they go on as if nothing had been."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tools.snapshot_support import answers, counts, in_yaml, say, words

from sglang_multiturn import (
    GenerationId,
    RolloutConfig,
    RolloutEngine,
    ScriptedEngine,
    ToolRegistry,
    Trajectory,
)
from sglang_multiturn.request import StopReason
from sglang_multiturn.tools.process.host import ProcessHost
from sglang_multiturn.trajectory import CallOutcome

from support import TEMPLATE, spec

OK = CallOutcome.OK


class Script:
    """What conversations say, and when each comes to the turns in which somebody is to disturb it."""

    def __init__(self, turns: Mapping[str, Sequence[str]], kills: Mapping[str, Sequence[int]]) -> None:
        self._turns = turns
        self.reached = {(name, turn): asyncio.Event() for name in kills for turn in kills[name]}
        self.engine = ScriptedEngine(TEMPLATE, self._say, latency_s=0.5)

    def _say(self, given: GenerationId, _: Any) -> str:
        if (reached := self.reached.get((given.request_id, given.turn))) is not None:
            reached.set()
        return self._turns[given.request_id][given.turn]


async def all_played(
    turns: Mapping[str, Sequence[str]],
    folder: Path,
    *,
    kills: Mapping[str, Sequence[int]],
    tool: str = "RememberingTool",
    execution: str = "process",
    config: dict[str, Any] | None = None,
) -> dict[str, Trajectory]:
    """Conversations whose tool has a process for each: suspended in the turns `kills`, where their process is killed."""
    script = Script(turns, kills)
    registry = ToolRegistry.from_config(in_yaml(tool, {"pid_folder": str(folder)}, execution=execution))
    rollouts = RolloutEngine(
        script.engine, template=TEMPLATE, tools=registry, config=RolloutConfig.model_validate(config or {})
    )

    async def kill(name: str) -> None:
        for turn in kills[name]:
            await script.reached[name, turn].wait()
            async with rollouts.suspended([name]):
                await snapshots_taken(name)
                await killed(rollouts, name, int((folder / name).read_text()))
                await script.engine.update_weights([], weight_version=script.engine.weight_version + 1)

    async with asyncio.timeout(120), rollouts, asyncio.TaskGroup() as group:
        task = group.create_task(rollouts.run_all([spec(name) for name in turns]))
        for name in kills:
            group.create_task(kill(name))
        finished = {one.request_id: one for one in await task}
    for metrics in (one.metrics for one in finished.values()):
        assert metrics.tool_instances_created == metrics.tool_instances_released + metrics.lost_instances
    return finished


async def played(turns: Sequence[str], folder: Path, *, kills: Sequence[int] = (), **how: Any) -> Trajectory:
    return (await all_played({"r": turns}, folder, kills={"r": kills}, **how))["r"]


async def snapshots_taken(name: str) -> None:
    if taking := {task for task in asyncio.all_tasks() if task.get_name() == f"{name}-memory-snapshot"}:
        await asyncio.wait(taking)


async def killed(rollouts: RolloutEngine, name: str, pid: int) -> None:
    """When the process is gone, and whoever can know it does."""
    process = psutil.Process(pid)
    host = rollouts._runtime.tool("memory").host
    connection = host._instances[name] if isinstance(host, ProcessHost) else None
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(process.wait, 60)
    if connection is not None:
        await asyncio.wait({connection.reading})


TURNS = [say(word="a") + say(word="b"), say(word="c"), "hm" + say(word="d"), "done"]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [(1,), (2,), (1, 2), (3,), (1, 2, 3)], ids=str)
async def test_a_process_killed_while_suspended_changes_no_word(kills: tuple[int, ...], tmp_path: Path) -> None:
    undisturbed = await played(TURNS, tmp_path)
    trajectory = await played(TURNS, tmp_path, kills=kills)
    assert words(trajectory) == words(undisturbed)
    assert answers(trajectory) == ["a", "a b", "a b c", "a b c d"]
    assert trajectory.rewards.calc_rewards == {"memory": 4.0}
    times = len(kills)
    assert counts(trajectory) == {"snapshots": times, "lost_instances": times, "restored_instances": times}


@pytest.mark.slow
async def test_without_snapshots_it_starts_blank_as_ever(tmp_path: Path) -> None:
    trajectory = await played(TURNS, tmp_path, kills=(2,), tool="ForgetfulTool")
    assert answers(trajectory) == ["a", "a b", "a b c", "d"]
    assert counts(trajectory) == {"lost_instances": 1}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "hangs", "returns_too_much"])
async def test_with_a_snapshot_that_failed_it_starts_blank(how: str, tmp_path: Path) -> None:
    turns = [say(word="a", fails={"snapshot": how}), say(word="b"), "done"]
    trajectory = await played(turns, tmp_path, kills=(1,), config={"tool_timeout_s": 3.0})
    assert answers(trajectory) == ["a", "b"]
    assert counts(trajectory) == {"snapshot_errors": 1, "lost_instances": 1}
    assert trajectory.stop_reason is StopReason.ANSWERED


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raises", "hangs"])
async def test_a_restore_that_fails_is_told_and_not_tried_again(how: str, tmp_path: Path) -> None:
    turns = [say(word="a", fails={"restore": how}), say(word="b"), say(word="c"), "done"]
    trajectory = await played(turns, tmp_path, kills=(1,), config={"tool_timeout_s": 3.0})
    first, failed, blank = trajectory.tool_calls
    assert (first.outcome, blank.outcome, blank.answer) == (OK, OK, "c")
    assert failed.outcome is (CallOutcome.DIED if how == "raises" else CallOutcome.TIMEOUT)
    assert failed.answer.endswith("; what it remembered of this conversation is gone")
    if how == "raises":
        assert failed.answer.startswith("Error: its process has ended, and its last snapshot cannot be restored (ToolR")
        assert "memory.restore raised ValueError: a bug of the tool's" in failed.answer
    assert counts(trajectory) == {"snapshots": 1, "snapshot_errors": 1, "lost_instances": 1 + (how == "hangs")}


@pytest.mark.slow
async def test_a_process_that_dies_in_a_call_goes_on_from_the_last_snapshot_and_the_model_is_told(
    tmp_path: Path,
) -> None:
    turns = [say(word="a"), say(word="b"), say(word="c", dies=True), say(word="d"), "done"]
    trajectory = await played(turns, tmp_path, kills=(1,))
    died = "its process ended with exit code 7; it goes on from an earlier state of this conversation, in which this"
    assert answers(trajectory)[2] == f"Error: tool 'memory': {died} call was not made"
    assert [*answers(trajectory)[:2], answers(trajectory)[3]] == ["a", "a b", "a d"]
    assert trajectory.rewards.calc_rewards == {"memory": 2.0}
    assert counts(trajectory) == {"snapshots": 1, "lost_instances": 2, "restored_instances": 2}


@pytest.mark.slow
async def test_what_dies_at_random_moments_of_many_conversations_is_never_noticed(tmp_path: Path) -> None:
    rng = random.Random(7)
    turns, kills = {}, {}
    for name in map(str, range(16)):
        turns[name] = [say(word=rng.choice("abc")) for _ in range(rng.randint(1, 4))] + ["done"]
        kills[name] = sorted(rng.sample(range(1, len(turns[name])), rng.randint(0, len(turns[name]) - 1)))
    undisturbed = await all_played(turns, tmp_path, kills={})
    disturbed = await all_played(turns, tmp_path, kills=kills)
    assert {name: words(one) for name, one in disturbed.items()} == {n: words(one) for n, one in undisturbed.items()}
    assert {name: one.metrics.restored_instances for name, one in disturbed.items()} == {
        n: len(kills[n]) for n in kills
    }


@pytest.mark.slow
@pytest.mark.usefixtures("ray_job")
async def test_a_process_killed_on_a_ray_node_while_suspended_changes_no_word(tmp_path: Path) -> None:
    # One call a turn: on Ray, those of one turn may pass each other.
    turns = [say(word=word) for word in "abcd"] + ["done"]
    trajectory = await played(turns, tmp_path, kills=(1, 3), execution="ray")
    assert words(trajectory) == words(await played(turns, tmp_path, execution="ray"))
    assert answers(trajectory) == ["a", "a b", "a b c", "a b c d"]
    assert trajectory.rewards.calc_rewards == {"memory": 4.0}
    assert counts(trajectory) == {"snapshots": 2, "lost_instances": 2, "restored_instances": 2}
