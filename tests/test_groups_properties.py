"""Random training runs in virtual time: whatever the settings and however long anything takes, no group is lost or doubled."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tools.virtual_time import run_virtual

from sglang_multiturn import (
    GenerationId,
    RequestSpec,
    RolloutConfig,
    RolloutEngine,
    ScriptedEngine,
    StopReason,
    ToolRegistry,
    Trajectory,
    read_trajectories,
)
from sglang_multiturn.config import GroupConfig
from sglang_multiturn.errors import BatchFailedError
from sglang_multiturn.groups.group import Batch, GroupCounts
from sglang_multiturn.groups.sampler import GroupSampler
from sglang_multiturn.journal import JournalWriter
from sglang_multiturn.tools.host import HostLeaks

from support import TEMPLATE, RecordingTool, call, spec


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """A trainer's whole run, all of it from a seed."""

    seed: int
    groups: GroupConfig
    rollout: RolloutConfig
    num_prompts: int | None
    """None is an endless source; prompts come again after the seventh."""
    steps: int
    max_running: int | None


@st.composite
def worlds(draw: st.DrawFn) -> World:
    samples = draw(st.integers(1, 4))
    order = draw(st.sampled_from(["input", "longest_first"]))
    return World(
        seed=draw(st.integers(0, 10_000)),
        groups=GroupConfig(
            samples_per_group=samples,
            groups_per_batch=draw(st.integers(1, 4)),
            over_sampling_groups=draw(st.integers(0, 4)),
            filter=draw(st.sampled_from(["none", "no_variance"])) if samples > 1 else "none",
            max_refills=draw(st.sampled_from([None, None, 0, 2])),
            rest=draw(st.sampled_from(["abort", "carry", "carry"])),
            order=order,
            look_ahead_groups=draw(st.sampled_from([None, 1, 5])) if order == "longest_first" else None,
        ),
        rollout=RolloutConfig(
            max_concurrent=draw(st.integers(1, 20)),
            max_tokens_in_flight=draw(st.sampled_from([None, 60, 400])),
            max_staleness=draw(st.sampled_from([None, 0, 1])),
            stale=draw(st.sampled_from(["train", "mask", "drop", "restart"])),
            max_response_tokens=draw(st.sampled_from([40, 400])),
            max_failed_fraction=1.0,
        ),
        num_prompts=draw(st.sampled_from([None, None, 3, 11])),
        steps=draw(st.integers(1, 5)),
        max_running=draw(st.sampled_from([None, 3])),
    )


class Trainer:
    """Takes batches, sleeps, and gives the engine new weights."""

    def __init__(self, world: World, journal: JournalWriter) -> None:
        self._world = world
        self._tool = SlowTool(world.seed)
        self.engine = ScriptedEngine(
            TEMPLATE, self._words, latency_s=0.01, token_s=0.003, max_running=world.max_running
        )
        self.rollouts = RolloutEngine(
            self.engine,
            template=TEMPLATE,
            tools=ToolRegistry([self._tool]),
            config=world.rollout,
            reward_fn=self._score,
            journal=journal,
        )
        self.batches: list[Batch] = []
        self.totals = GroupCounts()
        self.gave_up = False

    async def train(self) -> None:
        async with self.rollouts:
            async with GroupSampler(self.rollouts, self._prompts(), self._world.groups) as sampler:
                try:
                    await self._steps(sampler)
                except BatchFailedError:
                    self.gave_up = True
            self.totals = sampler.totals
            assert self.rollouts.in_flight() == ()
            assert self.rollouts.held_by_tools() == HostLeaks()
            assert self._tool.verbs.count("create") == self._tool.verbs.count("release")
            assert self._tool.verbs.count("calc_reward") <= self._tool.verbs.count("create")

    async def _steps(self, sampler: GroupSampler) -> None:
        for step in range(1, self._world.steps + 1):
            self.batches.append(await sampler.next_batch())
            async with self.rollouts.suspended():
                await asyncio.sleep(random.Random(f"{self._world.seed} update {step}").choice([0, 0.05, 1]))
                await self.engine.update_weights([], weight_version=step)
            await asyncio.sleep(random.Random(f"{self._world.seed} train {step}").choice([0, 0, 0.3]))

    def _prompts(self) -> Iterator[RequestSpec]:
        numbers = itertools.count() if self._world.num_prompts is None else range(self._world.num_prompts)
        return (spec(f"r{i % 7}", uid=f"u{i % 7}", input_index=i) for i in numbers)

    def _words(self, generation_id: GenerationId, _: Any) -> str:
        rng = random.Random(f"{self._world.seed} {generation_id.request_id} {generation_id.turn}")
        words = "w" * int(rng.lognormvariate(3, 1))
        return words if rng.random() < 0.5 else words + call("slow")

    async def _score(self, *_: Any, extra_info: dict[str, Any], **__: Any) -> float:
        rng = random.Random(f"{self._world.seed} score {extra_info['request_id']}")
        await asyncio.sleep(rng.choice([0, 0, 0.2, 5]))
        if rng.random() < 0.1:
            raise RuntimeError("no verdict")
        return float(rng.random() < 0.5)


class SlowTool(RecordingTool):
    """Takes its time, and sometimes breaks."""

    def __init__(self, seed: int) -> None:
        super().__init__("slow")
        self._rng = random.Random(seed)

    async def answer(self, parameters: dict[str, Any]) -> Any:
        await asyncio.sleep(self._rng.choice([0, 0.02, 0.5]))
        if self._rng.random() < 0.1:
            raise RuntimeError("broken")
        return "ok", 0.0, {}


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)


def play(world: World) -> tuple[Trainer, list[Trajectory]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trajectories.jsonl"
        with JournalWriter(path) as journal:
            trainer = Trainer(world, journal)
            run_virtual(trainer.train())
        return trainer, list(read_trajectories(path))


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_every_group_ends_once_and_every_batch_is_whole(world: World) -> None:
    trainer, journal = play(world)
    check_batches(world, trainer)
    check_nothing_lost(trainer, journal)
    for trajectory in journal:
        trajectory.check(end_ids=TEMPLATE.end_ids)
        versions = [
            version for row in trajectory.rows for version in row.response_weight_versions if version is not None
        ]
        assert versions == sorted(versions)


def check_batches(world: World, trainer: Trainer) -> None:
    carried: tuple[str, ...] = ()
    for number, batch in enumerate(trainer.batches, start=1):
        counts = batch.counts
        assert batch.step == number
        assert counts.started + len(carried) == counts.trained + counts.filtered + counts.aborted + counts.carried
        assert (counts.trained, counts.filtered) == (len(batch.groups), len(batch.filtered))
        assert (counts.aborted, counts.carried) == (len(batch.aborted), len(batch.carried))
        if world.num_prompts is None:
            assert len(batch.groups) == world.groups.groups_per_batch
        gone_on = {group.uid for group in [*batch.groups, *(f.group for f in batch.filtered)] if group.step < number}
        assert gone_on <= set(carried)
        carried = batch.carried
        for group in batch.groups:
            check_group(world, batch, group.uid)
    assert not (world.groups.rest == "abort" and any(batch.carried for batch in trainer.batches))


def check_group(world: World, batch: Batch, uid: str) -> None:
    (group,) = (group for group in batch.groups if group.uid == uid)
    assert [t.sample_index for t in group.trajectories] == list(range(world.groups.samples_per_group))
    assert {t.uid for t in group.trajectories} == {uid}
    assert {t.step for t in group.trajectories} == {group.step}
    assert all(t.stop_reason is not StopReason.ABORTED for t in group.trajectories)
    assert len(group.kept) >= min(2, world.groups.samples_per_group)
    if world.groups.filter == "no_variance":
        assert len(set(group.rewards)) > 1
    if world.rollout.max_staleness is not None and world.rollout.stale == "drop":
        oldest = min((v for t in group.kept for v in t.response_weight_versions if v is not None), default=batch.step)
        assert oldest >= batch.step - 1 - world.rollout.max_staleness  # batch n is sampled by weights n - 1


def check_nothing_lost(trainer: Trainer, journal: list[Trajectory]) -> None:
    totals = trainer.totals
    trained = [group.uid for batch in trainer.batches for group in batch.groups]
    filtered = [f.group.uid for batch in trainer.batches for f in batch.filtered]
    names = [t.request_id for t in journal]
    assert len(set(names)) == len(names)
    assert len({*trained, *filtered}) == len(trained) + len(filtered)
    given = {t.request_id for batch in trainer.batches for group in batch.groups for t in group.trajectories}
    assert given <= set(names)
    if trainer.gave_up:
        return
    assert totals.carried == 0
    assert totals.started == totals.trained + totals.filtered + totals.aborted
    ended_otherwise = {t.uid for t in journal} - {*trained, *filtered}
    assert len(ended_otherwise) <= totals.aborted  # some of them had not begun


@settings(max_examples=40, deadline=None)
@given(worlds())
def test_the_same_run_again_gives_the_same_batches(world: World) -> None:
    assert [summary(batch) for batch in play(world)[0].batches] == [summary(batch) for batch in play(world)[0].batches]


def summary(batch: Batch) -> Any:
    groups = [
        (g.uid, g.step, g.rewards, [(t.request_id, t.response_ids) for t in g.trajectories]) for g in batch.groups
    ]
    return batch.step, groups, [f.group.uid for f in batch.filtered], batch.carried, batch.aborted, batch.counts
