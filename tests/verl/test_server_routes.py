"""From `VerlGenerator` through verl's real clients and balancer to servers in Ray, and an abort after it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("verl")

import ray
from scripted_server import (  # type: ignore[import-not-found]
    HANG_AFTER,
    TURN,
    CountingBalancer,
    PlainServer,
    ScriptedServer,
)
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient

from sglang_multiturn.engine.base import FinishReason, Generation, GenerationId, SamplingParams
from sglang_multiturn.verl_plugin.generator import VerlGenerator

pytestmark = pytest.mark.slow

START_S, TIMEOUT_S = 300.0, 120.0
PARAMS = SamplingParams(max_new_tokens=10, stop_token_ids=(0,))
CLIENTS = [LLMServerClient, FullyAsyncLLMServerClient]
_numbers = itertools.count()


@dataclass(frozen=True)
class Actors:
    """Two replicas, verl's balancer, and a server as verl knows it; processes of their own."""

    servers: dict[str, Any]
    balancer: Any
    plain: Any


@pytest.fixture(scope="module")
def actors() -> Iterator[Actors]:
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100_000_000,
        runtime_env={"env_vars": environment},
    )
    servers = {name: ray.remote(ScriptedServer).options(num_cpus=0).remote(name) for name in ("one", "two")}
    plain: Any = ray.remote(PlainServer).options(num_cpus=0).remote()
    balancer: Any = ray.remote(CountingBalancer).options(num_cpus=0).remote(servers={})
    ray.get([server.start.remote() for server in (*servers.values(), plain)], timeout=START_S)
    yield Actors(servers, balancer, plain)
    ray.shutdown()


@dataclass
class Pool:
    """Servers behind verl's balancer, and a generator that asks them."""

    servers: dict[str, Any]
    balancer: Any
    generator: VerlGenerator

    async def server_of(self, request_id: str) -> Any:
        """The one that has its generation, once it is being sampled there."""
        waits = {
            asyncio.create_task(_answer(s.wait_until_started.remote(request_id))): s for s in self.servers.values()
        }
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        return waits[done.pop()]

    async def in_flight(self) -> list[str]:
        return [rid for server in self.servers.values() for rid in await server.get_in_flight.remote()]

    async def is_released(self) -> bool:
        """Nothing on a server; verl's balancer hears of it a moment later."""
        return await self.in_flight() == [] and await self.balancer.get_total_inflight.remote() == 0

    def ask(self, request_id: str, attempt: int = 0, ids: list[int] | None = None) -> asyncio.Task[Generation]:
        asking = self.generator.generate(GenerationId(request_id, 0, attempt), ids or [1, 2], PARAMS)
        return asyncio.create_task(asking)


def endless() -> str:
    """A request whose generation hangs after three tokens."""
    return f"endless{next(_numbers)}"


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """What another process does is seen only by asking it."""
    while not await condition():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def _answer(reference: Any) -> Any:
    return await reference


def client_of(client_class: type[Any], balancer: Any, **more: Any) -> Any:
    rollout = SimpleNamespace(name="sglang_cpu", full_determinism=False, response_length=64)
    return client_class(SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)), balancer, **more)


@pytest_asyncio.fixture(params=CLIENTS, ids=["sync", "async"])
async def pool(request: pytest.FixtureRequest, actors: Actors) -> AsyncIterator[Pool]:
    await actors.balancer.add_servers.remote(actors.servers)  # anew, with nothing in flight
    for server in actors.servers.values():
        await server.forget.remote()
    generator = VerlGenerator(client_of(request.param, actors.balancer), rollout_name="sglang_cpu")
    yield Pool(actors.servers, actors.balancer, generator)


async def test_the_server_knows_the_generation_by_our_rid(pool: Pool) -> None:
    generation = await pool.ask("r1")
    asked = [rid for server in pool.servers.values() for rid in await server.get_asked.remote()]
    assert asked == ["r1:t0:a0"]
    assert (tuple(generation.token_ids), generation.finish_reason) == (TURN, FinishReason.LENGTH)
    assert (generation.weight_version, generation.min_weight_version) == (0, None)


async def test_an_abort_reaches_the_server_that_has_it(pool: Pool) -> None:
    one, other = endless(), endless()
    first, second = pool.ask(one), pool.ask(other)  # one on each, the least busy
    assert await pool.server_of(one) is not await pool.server_of(other)
    await pool.generator.abort(one)
    generation = await first
    assert (generation.finish_reason, generation.paused) == (FinishReason.ABORT, False)
    assert tuple(generation.token_ids) == TURN[:HANG_AFTER]
    assert not second.done()
    await pool.generator.abort(other)
    await second
    await until(pool.is_released)


async def test_an_abort_finds_a_server_that_verl_has_forgotten(pool: Pool) -> None:
    """Removed from the balancer, with its sticky sessions, while it generates."""
    running = pool.ask(name := endless())
    await pool.server_of(name)
    await pool.balancer.remove_servers.remote(list(pool.servers))
    await pool.balancer.clear_sticky_cache.remote()
    await pool.generator.abort(name)
    assert (await running).finish_reason is FinishReason.ABORT
    assert await pool.in_flight() == []


async def test_an_abort_before_the_request_has_left_asks_no_server(pool: Pool) -> None:
    running = pool.ask(name := endless())
    await asyncio.sleep(0)
    await pool.generator.abort(name)
    generation = await running
    assert (list(generation.token_ids), generation.finish_reason) == ([], FinishReason.ABORT)
    await pool.generator.settle(name)
    await until(pool.is_released)
    assert [await server.get_asked.remote() for server in pool.servers.values()] == [[], []]


async def test_a_paused_generation_comes_back_and_goes_on_elsewhere(pool: Pool) -> None:
    """What verl does when it takes a replica away: remove, abort all, sleep. The other one has newer weights."""
    running = pool.ask(name := endless())
    paused = await pool.server_of(name)
    (other,) = [server for server in pool.servers.values() if server is not paused]
    await other.set_global_steps.remote(1)
    await pool.balancer.remove_servers.remote([key for key, server in pool.servers.items() if server is paused])
    await paused.abort_all_requests.remote()
    await paused.sleep.remote()
    part = await running
    assert (part.finish_reason, part.paused) == (FinishReason.ABORT, True)
    assert (tuple(part.token_ids), part.weight_version) == (TURN[:HANG_AFTER], 0)
    await pool.generator.serving(name)  # at once: not the server that verl took away is to be waited for
    again = pool.ask(name, attempt=1, ids=[1, 2, *part.token_ids])
    await other.wait_until_started.remote(name)
    await pool.generator.abort(name)
    assert (await again).weight_version == 1
    assert await other.get_asked.remote() == [f"{name}:t0:a1"]
    assert await paused.get_asked.remote() == [f"{name}:t0:a0"]


async def test_what_comes_in_a_pause_waits_for_the_server_that_turned_it_away(pool: Pool) -> None:
    for server in pool.servers.values():
        await server.abort_all_requests.remote()
    generation = await pool.ask("r1")
    assert (list(generation.token_ids), generation.finish_reason, generation.paused) == ([], FinishReason.ABORT, True)
    assert pool.generator.take_span("r1") is None
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as group:
        serving = group.create_task(pool.generator.serving("r1"))
        for server in pool.servers.values():
            await server.sleep.remote()
        assert not serving.done()
        for server in pool.servers.values():
            await server.resume_generation.remote()
    await pool.generator.serving("r1")
    assert (await pool.ask("r1", attempt=1)).finish_reason is FinishReason.LENGTH
    await until(pool.is_released)


async def test_who_waits_for_the_end_of_a_pause_can_be_cancelled(pool: Pool) -> None:
    for server in pool.servers.values():
        await server.abort_all_requests.remote()
    await pool.ask("r1")
    serving = asyncio.create_task(pool.generator.serving("r1"))
    await asyncio.sleep(0)
    serving.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.wait([serving])
        assert serving.cancelled()
        await pool.generator.settle("r1")
        for server in pool.servers.values():
            await server.resume_generation.remote()


async def test_a_conversation_that_ended_has_nothing_to_wait_for(pool: Pool) -> None:
    for server in pool.servers.values():
        await server.abort_all_requests.remote()
    await pool.ask("r1")
    await pool.generator.settle("r1")
    async with asyncio.timeout(TIMEOUT_S):
        await pool.generator.serving("r1")  # its name may come again: the pause that it met is forgotten
    for server in pool.servers.values():
        await server.resume_generation.remote()


async def test_settling_ends_what_was_left_behind(pool: Pool) -> None:
    running = pool.ask(name := endless())
    await pool.server_of(name)
    running.cancel()
    await asyncio.wait([running])
    await pool.generator.settle(name)
    await until(pool.is_released)


async def test_an_abort_while_verl_has_no_server_at_all(actors: Actors) -> None:
    """Its async client then asks the balancer again every second, for as long as a training step takes."""
    await actors.balancer.remove_servers.remote(list(actors.servers))
    taken, given_back = await actors.balancer.counts.remote()
    client = client_of(FullyAsyncLLMServerClient, actors.balancer, only_hybrid=True)
    generator = VerlGenerator(client, rollout_name="sglang_cpu")
    server = actors.servers["one"]
    await server.forget.remote()
    async with asyncio.timeout(TIMEOUT_S):
        waiting = asyncio.create_task(generator.generate(GenerationId("r1", 0), [1, 2], PARAMS))
        await asyncio.sleep(0)
        await generator.abort("r1")
        assert (await waiting).finish_reason is FinishReason.ABORT
        await actors.balancer.add_servers.remote({"late": server})

        async def is_given_back() -> bool:
            return bool(await actors.balancer.counts.remote() == (taken + 1, given_back + 1))

        await until(is_given_back)
        assert await server.get_asked.remote() == []
    await actors.balancer.remove_servers.remote(["late"])


@pytest.mark.parametrize("client_class", CLIENTS)
async def test_a_server_of_verls_own_is_asked_as_before_and_waited_for(client_class: type[Any], actors: Actors) -> None:
    generator = await plain_generator(client_class, actors, versions=(4,))
    async with asyncio.timeout(TIMEOUT_S):
        asking = asyncio.create_task(generator.generate(GenerationId(name := f"r{next(_numbers)}", 0), [1], PARAMS))
        await until(lambda: actors.plain.is_asked.remote())
        abort = asyncio.create_task(generator.abort(name))
        settled = asyncio.create_task(generator.settle(name))
        await abort
        assert not settled.done()
        await actors.plain.let_go.remote()
        await settled
        generation = await asking
    assert (tuple(generation.token_ids), generation.finish_reason) == (TURN, FinishReason.LENGTH)


async def test_versions_that_verl_mixed_are_told_as_a_range(actors: Actors) -> None:
    """Its async client asks a server of its own again after an update, and joins the tokens."""
    generator = await plain_generator(FullyAsyncLLMServerClient, actors, versions=(4, 5, 6))
    await actors.plain.let_go.remote()
    async with asyncio.timeout(TIMEOUT_S):
        generation = await generator.generate(GenerationId(f"r{next(_numbers)}", 0), [1, 2], PARAMS)
    assert (generation.min_weight_version, generation.weight_version) == (4, 6)
    assert len(generation.token_ids) == 2 + 2 + 6


async def plain_generator(client_class: type[Any], actors: Actors, versions: tuple[int, ...]) -> VerlGenerator:
    await actors.plain.behave.remote(versions)
    await actors.balancer.remove_servers.remote([*actors.servers, "late"])
    await actors.balancer.add_servers.remote({"plain": actors.plain})
    return VerlGenerator(client_of(client_class, actors.balancer), rollout_name="vllm")


async def test_verls_own_client_stays_as_it_is() -> None:
    client = client_of(LLMServerClient, balancer=None)
    VerlGenerator(client, rollout_name="sglang")
    assert "_acquire_server" not in vars(client)
