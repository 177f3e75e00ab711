"""Limits of a run of many processes: eight of them, real ones, some of which are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError

from sglang_multiturn.config import ToolSettings
from sglang_multiturn.tools.limits import NoLimit
from sglang_multiturn.tools.ray.limits import RayLimiter, SharedTurnstile, make_limiter

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test module

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

RUN = "test"


@ray.remote(num_cpus=0)
class Worker:
    """Stands for one worker process of a run."""

    def __init__(self, tool: str, **limits: Any) -> None:
        self.limiter = make_limiter(tool, ToolSettings(**limits), run_id=RUN)
        self.begun = 0
        self.enough = asyncio.Event()

    async def pid(self) -> int:
        return os.getpid()

    async def call(self, count: int, witness: Any) -> list[float]:
        """So many calls at once, each as long as the witness says; returns when each began."""
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(self._call(witness)) for _ in range(count)]
        return [call.result() for call in calls]

    async def _call(self, witness: Any) -> float:
        async with self.limiter.slot(None):
            begun = time.monotonic()
            if witness is not None:
                await witness.see.remote()
            return begun

    async def hold(self, count: int, longest_s: float | None = None) -> None:
        """Begin so many calls and never end them."""
        self.held = [self.limiter.slot(longest_s) for _ in range(count)]
        for slot in self.held:
            await slot.__aenter__()

    async def end_one(self) -> None:
        await self.held.pop().__aexit__(None, None, None)


@ray.remote(num_cpus=0, max_concurrency=1000)
class Witness:
    """Sees every call from outside the workers, and keeps it until it is told not to."""

    def __init__(self) -> None:
        self.inside = self.most = self.total = 0
        self.changed = asyncio.Condition()
        self.go = asyncio.Event()

    async def see(self) -> None:
        async with self.changed:
            self.inside += 1
            self.total += 1
            self.most = max(self.most, self.inside)
            self.changed.notify_all()
        await self.go.wait()
        self.inside -= 1

    async def let_go(self) -> None:
        self.go.set()

    async def seen(self) -> tuple[int, int, int]:
        return self.inside, self.most, self.total

    async def until_inside(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.inside >= count)


async def counts(limiter: RayLimiter) -> tuple[int, int] | None:
    """Calls that run and calls that wait; None while no actor is there."""
    await asyncio.sleep(0)
    if limiter._tie is None:
        return None
    try:
        held, waiting = await limiter._tie.actor.counts.remote()
    except RayActorError:
        return None
    return held, waiting


async def until_counts(limiter: RayLimiter, held: int, waiting: int) -> None:
    async with asyncio.timeout(60):
        while await counts(limiter) != (held, waiting):
            pass


async def until_dead(actor: Any) -> None:
    with suppress(RayActorError):
        while True:
            await actor.counts.remote()


async def connected(tool: str, **limits: Any) -> RayLimiter:
    """This process's limiter, whose actor it has made and so owns."""
    limiter = make_limiter(tool, ToolSettings(**limits), run_id=RUN)
    assert isinstance(limiter, RayLimiter)
    async with limiter.slot(None):
        pass
    return limiter


# Many processes


async def test_eight_processes_of_eight_calls_each_keep_a_limit_of_sixteen(ray_job: None) -> None:
    limits = {"max_concurrent": 16}
    limiter, witness = await connected("sixteen", **limits), Witness.remote()
    running = [Worker.remote("sixteen", **limits).call.remote(8, witness) for _ in range(8)]
    await until_counts(limiter, 16, 48)
    await witness.until_inside.remote(16)
    assert await witness.seen.remote() == (16, 16, 16)
    await witness.let_go.remote()
    assert [len(await one) for one in running] == [8] * 8
    assert await witness.seen.remote() == (0, 16, 64)
    await until_counts(limiter, 0, 0)


async def test_eight_processes_keep_one_rate(ray_job: None) -> None:
    limits = {"max_per_s": 20.0}
    workers = [Worker.remote("rate", **limits) for _ in range(8)]
    for worker in workers:
        await worker.pid.remote()
    started = time.monotonic()
    begun = [t for one in [worker.call.remote(5, None) for worker in workers] for t in await one]
    assert len(begun) == 40
    assert max(begun) - started >= 39 / 20


async def test_tools_and_runs_do_not_share_their_limits(ray_job: None) -> None:
    limit = ToolSettings(max_concurrent=1)
    alike = [RayLimiter(tool, limit, run_id=run) for tool, run in [("a", RUN), ("b", RUN), ("a", "other")]]
    async with asyncio.timeout(60), AsyncExitStack() as slots:
        for limiter in alike:
            await slots.enter_async_context(limiter.slot(None))


# Deaths


async def test_a_killed_process_gives_back_what_it_held_and_what_it_waited_for(ray_job: None) -> None:
    limits = {"max_concurrent": 4}
    limiter = await connected("killed", **limits)
    victim, survivor = Worker.remote("killed", **limits), Worker.remote("killed", **limits)
    await victim.hold.remote(4)
    victim.call.remote(2, None)
    await until_counts(limiter, 4, 2)
    witness = Witness.remote()
    calls = survivor.call.remote(4, witness)
    await until_counts(limiter, 4, 6)
    os.kill(await victim.pid.remote(), signal.SIGKILL)
    await witness.until_inside.remote(4)
    await witness.let_go.remote()
    assert len(await calls) == 4
    await until_counts(limiter, 0, 0)


async def test_the_queue_outlives_the_process_that_made_it(ray_job: None) -> None:
    limits = {"max_concurrent": 2}
    maker, other = Worker.remote("orphans", **limits), Worker.remote("orphans", **limits)
    await maker.hold.remote(2)
    calls = other.call.remote(5, None)
    os.kill(await maker.pid.remote(), signal.SIGKILL)
    assert len(await calls) == 5


async def test_a_new_queue_is_told_of_the_calls_that_still_run(ray_job: None) -> None:
    limits = {"max_concurrent": 2}
    limiter = await connected("told", **limits)
    begun = asyncio.Event()

    async def call() -> None:
        async with limiter.slot(None):
            begun.set()

    async with asyncio.TaskGroup() as calls, limiter.slot(None), limiter.slot(None):
        calls.create_task(call())
        await until_counts(limiter, 2, 1)
        assert limiter._tie is not None
        actor = limiter._tie.actor
        ray.kill(actor)
        await until_dead(actor)
        await until_counts(limiter, 2, 1)
        assert not begun.is_set()
    await until_counts(limiter, 0, 0)


async def test_a_holder_that_is_never_heard_of_again_loses_its_slot(ray_job: None) -> None:
    limits = {"max_concurrent": 1}
    limiter, silent = await connected("silent", **limits), Worker.remote("silent", **limits)
    await silent.hold.remote(1, 0.2)
    async with asyncio.timeout(60), limiter.slot(None):
        await until_counts(limiter, 1, 0)
    await silent.end_one.remote()  # after all: too late to matter
    async with limiter.slot(None):
        await until_counts(limiter, 1, 0)


# Cancellation


async def test_cancelled_waiters_leave_the_queue_to_the_others(ray_job: None) -> None:
    limiter = await connected("cancelled", max_concurrent=1)

    async def call() -> str:
        async with limiter.slot(None):
            return "had its turn"

    async with asyncio.TaskGroup() as calls, limiter.slot(None):
        tasks = [calls.create_task(call()) for _ in range(4)]
        await until_counts(limiter, 1, 4)
        for task in tasks[:3]:
            task.cancel()
        await until_counts(limiter, 1, 1)
    assert [task.cancelled() for task in tasks] == [True, True, True, False]
    await until_counts(limiter, 0, 0)


async def test_calls_cancelled_at_any_moment_leave_nothing(ray_job: None) -> None:
    limiter = await connected("moments", max_concurrent=3)

    async def call() -> None:
        async with limiter.slot(30.0):
            await asyncio.sleep(0)

    async with asyncio.TaskGroup() as calls:
        tasks = [calls.create_task(call()) for _ in range(300)]
        for number, task in enumerate(tasks):
            if number % 3 == 0:
                await counts(limiter)
                task.cancel()
    assert sum(task.cancelled() for task in tasks) <= 100
    await until_counts(limiter, 0, 0)


# The actor by itself, where messages come in any order


@asynccontextmanager
async def turnstile(**limits: Any) -> AsyncIterator[SharedTurnstile]:
    actor = SharedTurnstile(limits.get("max_concurrent"), limits.get("max_per_s"))
    async with asyncio.timeout(10):
        yield actor
    assert await actor.counts() == (0, 0)


async def test_a_lease_given_back_before_it_was_asked_for_is_not_granted() -> None:
    async with turnstile(max_concurrent=1) as actor:
        await actor.give_back("client", "lease")
        assert await actor.acquire("client", "lease", None) is False
        await actor.give_back("client", "running")
        await actor.adopt("client", {"running": None})


async def test_nothing_is_granted_to_a_process_that_has_left() -> None:
    async with turnstile(max_concurrent=1) as actor:
        await actor.leave("client")
        assert await actor.acquire("client", "lease", None) is False
        await actor.adopt("client", {"running": None})
        await actor.give_back("client", "lease")


async def test_those_that_wait_for_a_process_that_leaves_are_told() -> None:
    async with turnstile(max_concurrent=1) as actor:
        assert await actor.acquire("one", "a", None) is True
        waiting = asyncio.get_running_loop().create_task(actor.acquire("two", "b", None))  # ends with this test
        await asyncio.sleep(0)
        await actor.leave("two")
        assert await waiting is False
        assert await actor.counts() == (1, 0)
        await actor.leave("one")


# Which limiter


async def test_nothing_is_asked_of_ray_for_a_tool_without_limits(ray_job: None) -> None:
    assert isinstance(make_limiter("tool", ToolSettings(), run_id=RUN), NoLimit)
