"""Batches of groups for a trainer: more are started than needed, dull ones are replaced, and nobody waits for the slowest.

    async with GroupSampler(rollouts, prompts, config) as sampler:
        for step in range(steps):
            batch = await sampler.next_batch()
            ...  # train on batch.trajectories
            async with rollouts.suspended():
                await engine.update_weights(...)

A batch is given as soon as `groups_per_batch` groups are complete and pass the filter. What still runs then is ended or
set aside, so between two batches nothing of this sampler is in the engine. Ending does not wait for tools and rewards:
they finish in the background, and their trajectories are journaled like all others.

Invariants: every group that was started ends in exactly one way (trained, filtered, aborted) or is carried over; of those
that are complete at the same moment, the ones started first are taken; nothing depends on anything but the prompts, the
settings and the order in which rollouts end.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from sglang_multiturn.config import GroupConfig
from sglang_multiturn.dataset import in_groups
from sglang_multiturn.errors import BatchFailedError
from sglang_multiturn.groups.group import (
    Batch,
    FilteredGroup,
    Group,
    GroupCounts,
    KeepGroup,
    aged,
    num_sampled_tokens,
    why_filtered,
)
from sglang_multiturn.groups.prompts import PromptQueue
from sglang_multiturn.request import RequestSpec
from sglang_multiturn.runner import RolloutEngine, Verdict
from sglang_multiturn.trajectory import Trajectory

logger = logging.getLogger(__name__)

_SHOWN_GROUPS = 5
"""How many filtered groups an error shows."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    """One rollout of a group."""

    spec: RequestSpec
    group: _Started
    task: asyncio.Task[Trajectory] | None = None
    """Once it has begun."""
    trajectory: Trajectory | None = None
    """Once it has ended and that was taken note of."""

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def sampled_tokens(self) -> int:
        """Of one that has ended."""
        if self.trajectory is not None:
            return num_sampled_tokens(self.trajectory)
        ended = self.task is not None and self.task.done() and not self.task.cancelled() and not self.task.exception()
        return num_sampled_tokens(self.task.result()) if ended and self.task is not None else 0


@dataclass(slots=True, kw_only=True, eq=False)
class _Started:
    """A group from its start until it is in a batch, filtered or aborted."""

    prompt: RequestSpec
    uid: str
    step: int
    members: list[_Member] = field(default_factory=list)
    passed: Group | None = None
    """Once it is complete and the filter lets it through."""
    over: bool = False
    """Filtered or aborted: whatever of it still ends is only taken note of."""

    @property
    def trajectories(self) -> tuple[Trajectory, ...]:
        return tuple(m.trajectory for m in self.members if m.trajectory is not None)

    @property
    def is_complete(self) -> bool:
        return all(member.trajectory is not None for member in self.members)


@dataclass(slots=True, kw_only=True)
class _OpenBatch:
    """The batch that is being made."""

    step: int
    since_s: float
    verdict: Verdict
    counts: GroupCounts = field(default_factory=GroupCounts)
    filtered: list[FilteredGroup] = field(default_factory=list)
    full: bool = False
    """Whether as many groups as may run at once have been started; further ones are refills."""


class GroupSampler:
    """Makes batches out of prompts, on a RolloutEngine that is up. One `next_batch` at a time."""

    def __init__(
        self,
        rollouts: RolloutEngine,
        prompts: Iterable[RequestSpec],
        config: GroupConfig | None = None,
        *,
        keep: KeepGroup | None = None,
        first_step: int = 1,
    ) -> None:
        """Nothing is started yet.

        Args:
            rollouts: where conversations run; its `max_concurrent`, `max_staleness` and `stale` hold here too.
            prompts: one request a prompt, read as needed, so it may be endless. Each becomes `samples_per_group`
                requests with ids of their own (`id-0`, `id-1`, ...); one that comes again is told apart by `.1`, `.2`, ...
            config: how many, and which.
            keep: a filter of the user's own, asked after the configured one; whether to train on a complete group.
            first_step: number of the first batch, and `step` of its requests.
        """
        self._rollouts = rollouts
        self._config = config or GroupConfig()
        ahead = self._config.look_ahead_groups or self._config.groups_at_once
        self._prompts = PromptQueue(prompts, look_ahead=ahead if self._config.order == "longest_first" else 1)
        self._keep = keep
        self._next_step = first_step
        self._names: set[str] = set()
        self._groups: list[_Started] = []
        """Those that are in no batch yet, in the order of their start."""
        self._queue: collections.deque[_Member] = collections.deque()
        """Rollouts that have not begun, because `max_concurrent` others run."""
        self._tasks: dict[asyncio.Task[Trajectory], _Member] = {}
        self._ended: collections.deque[asyncio.Task[Trajectory]] = collections.deque()
        self._woken = asyncio.Event()
        self._sampling = False
        self._batch: _OpenBatch | None = None
        self._totals = GroupCounts()

    @property
    def totals(self) -> GroupCounts:
        """Of all batches so far; `carried` is what waits for the next one."""
        return dataclasses.replace(self._totals)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def __aiter__(self) -> AsyncIterator[Batch]:
        """Batches until the prompts are used up."""
        while (batch := await self.next_batch()).groups:
            yield batch

    async def next_batch(self) -> Batch:
        """The next batch, once enough groups are complete; with none in it when the prompts are used up.

        Cancelled and called again it goes on with the same batch.

        Raises:
            BatchFailedError: `max_refills` groups were replaced and still too few are worth training on, or too many
                rollouts FAILED (`max_failed_fraction`).
            EngineDiedError: the engine went away.
            EngineError: it did not end a generation that was to be ended.
        """
        batch = self._batch = self._batch or self._begin()
        self._take_in(batch)
        while not self._is_decided():
            self._go_on(batch)
            await self._woken.wait()
            self._take_in(batch)
        self._sampling = False
        chosen = self._passed()[: self._config.groups_per_batch]
        rest = [group for group in self._groups if group not in chosen]
        if self._config.rest == "abort":
            await self._abort(rest, batch.counts)
        else:
            await self._rollouts.suspend([member.request_id for member in _running(rest)])
        return self._finish(batch, chosen, rest)

    async def close(self) -> None:
        """End everything that runs or was carried over, and wait for its trajectories. Safe to call twice."""
        self._sampling = False
        self._queue.clear()
        tasks = list(self._tasks)
        for member in self._tasks.values():
            self._end(member)
        try:
            if tasks:
                await asyncio.wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.warning("rollout %s ended with %r", task.get_name(), error)
        self._totals.aborted += len(self._groups)
        self._totals.aborted_tokens += sum(member.sampled_tokens for group in self._groups for member in group.members)
        self._totals.carried = 0
        self._groups.clear()

    # -- a batch begins ----------------------------------------------------------------------------------------------------

    def _begin(self) -> _OpenBatch:
        """What was carried over is looked at again: the weights have changed since."""
        batch = _OpenBatch(
            step=self._next_step,
            since_s=asyncio.get_running_loop().time(),
            verdict=Verdict(self._rollouts.config.max_failed_fraction),
        )
        self._next_step += 1
        self._collect(batch)
        version = self._rollouts.engine.weight_version
        for group in list(self._groups):
            for member in group.members:
                if member.trajectory is not None:
                    member.trajectory = aged(member.trajectory, self._rollouts.config, version)
            self._settle(group, batch)
        return batch

    def _is_decided(self) -> bool:
        """Whether enough groups are there to choose from, or there will be no more."""
        passed = len(self._passed())
        return passed >= self._config.groups_per_batch or passed == len(self._groups)

    def _go_on(self, batch: _OpenBatch) -> None:
        """Let everything run that may."""
        if not self._sampling:
            self._sampling = True
            self._rollouts.resume([member.request_id for member in _running(self._groups)])
        self._begin_queued()

    # -- groups are started ------------------------------------------------------------------------------------------------

    def _fill(self, batch: _OpenBatch) -> None:
        """Start groups until as many as may run at once do, or are complete."""
        while len(self._groups) < self._config.groups_at_once:
            if batch.full and batch.counts.refilled >= self._config.most_refills:
                if len(self._groups) < self._config.groups_per_batch:
                    raise BatchFailedError(self._explain(batch))
                return
            prompt = self._prompts.take()
            if prompt is None:
                return
            self._start(prompt, batch)
        batch.full = True

    def _start(self, prompt: RequestSpec, batch: _OpenBatch) -> None:
        batch.counts.started += 1
        batch.counts.refilled += batch.full
        uid = self._own_name("uid", prompt.uid)
        named = dataclasses.replace(
            prompt, uid=uid, request_id=self._own_name("request", prompt.request_id), step=batch.step
        )
        group = _Started(prompt=prompt, uid=uid, step=batch.step)
        group.members += [
            _Member(spec=spec, group=group) for spec in in_groups([named], self._config.samples_per_group)
        ]
        self._groups.append(group)
        self._queue.extend(group.members)

    def _own_name(self, kind: str, name: str) -> str:
        """`name`, or with the first number that makes it one of its own."""
        own, times = name, 0
        while f"{kind} {own}" in self._names:
            times += 1
            own = f"{name}.{times}"
        self._names.add(f"{kind} {own}")
        return own

    def _begin_queued(self) -> None:
        while self._sampling and self._queue and len(self._tasks) < self._rollouts.config.max_concurrent:
            member = self._queue.popleft()
            # Tasks and not a TaskGroup: they outlive the call that begins them, and `close` waits for all of them.
            task = member.task = asyncio.create_task(self._rollouts.run_one(member.spec), name=member.request_id)
            self._tasks[task] = member
            task.add_done_callback(self._note_end)

    # -- rollouts end ------------------------------------------------------------------------------------------------------

    def _note_end(self, task: asyncio.Task[Trajectory]) -> None:
        self._ended.append(task)
        self._woken.set()

    def _take_in(self, batch: _OpenBatch) -> None:
        """What has ended since the last time, and what follows from it."""
        self._collect(batch)
        for group in list(self._groups):
            if group.passed is None:
                self._settle(group, batch)
        if len(self._passed()) < self._config.groups_per_batch:
            self._fill(batch)

    def _collect(self, batch: _OpenBatch) -> None:
        self._woken.clear()
        while self._ended:
            task = self._ended[0]
            trajectory = None if task.cancelled() else task.result()  # what it raised it raises in every call
            self._ended.popleft()
            member = self._tasks.pop(task)
            if trajectory is not None and not member.group.over:
                self._prompts.note_length(member.group.prompt.uid, num_sampled_tokens(trajectory))
                member.trajectory = trajectory
                batch.verdict.refuse_dead_engine(trajectory)
                batch.verdict.add(trajectory)

    def _settle(self, running: _Started, batch: _OpenBatch) -> None:
        """Let a complete group pass, or filter it."""
        if not running.is_complete:
            return
        batch.counts.completed += running.passed is None
        group = Group(uid=running.uid, prompt=running.prompt, trajectories=running.trajectories, step=running.step)
        reason = why_filtered(group, self._config, self._keep)
        running.passed = group if reason is None else None
        if reason is not None:
            running.over = True
            self._groups.remove(running)
            batch.filtered.append(FilteredGroup(group=group, reason=reason))
            batch.counts.filtered_tokens += group.num_sampled_tokens

    def _passed(self) -> list[_Started]:
        return [group for group in self._groups if group.passed is not None]

    # -- a batch is given --------------------------------------------------------------------------------------------------

    async def _abort(self, groups: Sequence[_Started], counts: GroupCounts) -> None:
        """End groups. Nothing of them is in the engine when this returns; tools and rewards may go on for a while."""
        await self._rollouts.suspend([member.request_id for member in _running(groups)])
        sampled = {
            request.request_id: sum(row.num_sampled_tokens for row in request.rows)
            for request in self._rollouts.in_flight()
        }
        for group in groups:
            group.over = True
            counts.aborted_tokens += sum(sampled.get(m.request_id, m.sampled_tokens) for m in group.members)
        for member in _running(groups):
            self._prompts.note_length(member.group.prompt.uid, sampled.get(member.request_id, 0))
            self._end(member)
        self._queue.clear()

    def _end(self, member: _Member) -> None:
        if not self._rollouts.abort(member.request_id) and member.task is not None:
            member.task.cancel()  # its first step has not come yet, or its last one has gone
            self._rollouts.resume([member.request_id])  # nobody of this name will come

    def _finish(self, batch: _OpenBatch, chosen: Sequence[_Started], rest: Sequence[_Started]) -> Batch:
        groups = tuple(group.passed for group in chosen if group.passed is not None)
        carry = self._config.rest == "carry"
        counts = batch.counts
        counts.trained, counts.filtered = len(groups), len(batch.filtered)
        counts.aborted, counts.carried = (0, len(rest)) if carry else (len(rest), 0)
        counts.dropped_rollouts = sum(len(group.trajectories) - len(group.kept) for group in groups)
        counts.trained_tokens = sum(group.num_sampled_tokens for group in groups)
        counts.wait_s = asyncio.get_running_loop().time() - batch.since_s
        self._totals.add(counts)
        self._groups = list(rest) if carry else []
        self._batch = None
        return Batch(
            step=batch.step,
            groups=groups,
            filtered=tuple(batch.filtered),
            aborted=() if carry else tuple(group.prompt for group in rest),
            carried=tuple(group.uid for group in rest) if carry else (),
            counts=counts,
        )

    def _explain(self, batch: _OpenBatch) -> str:
        reasons = collections.Counter(filtered.reason.value for filtered in batch.filtered)
        lines = [
            f"batch {batch.step}: {len(batch.filtered)} groups were filtered "
            f"({', '.join(f'{count} {reason}' for reason, count in reasons.most_common())}) and {batch.counts.refilled} "
            f"replaced, as many as max_refills allows; of {self._config.groups_per_batch} groups {len(self._groups)} are "
            "complete or run. Look at the reward function, the temperature and how hard the prompts are. The last ones:"
        ]
        lines += [f"  {f.reason.value}: {f.group.describe()}" for f in batch.filtered[-_SHOWN_GROUPS:]]
        return "\n".join(lines)


def _running(groups: Iterable[_Started]) -> list[_Member]:
    """Those that have begun and not ended."""
    return [m for group in groups for m in group.members if m.task is not None and not m.task.done()]
