"""The CPU server keeps the contract of the SGLang server: rids, aborts, pauses, versions; and it takes seeds.

The engine in it is a real SGLang on the CPU, in its deterministic mode.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

pytest.importorskip("verl")

from sglang_multiturn.errors import EngineError

pytestmark = pytest.mark.slow

TINY_MODEL = Path(__file__).parents[2] / "examples" / "gsm8k_tool" / "tiny_model"
PROMPT = list(range(100, 140))
LONG_TOKENS = 600
TIMEOUT_S = 120.0
_numbers = itertools.count()


class World:
    """One server and prompts whose outcome is known."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.endless: list[int] = []

    async def ask(self, ids: list[int], rid: str | None, tokens: int, seed: int | None = None) -> Any:
        params: dict[str, Any] = {"temperature": 0.0 if seed is None else 1.0, "max_tokens": tokens, "logprobs": True}
        if seed is not None:
            params["sampling_seed"] = seed
        named = {} if rid is None else {"rid": rid}
        return await self.server.generate(ids, params, request_id=f"verls{next(_numbers)}", **named)

    def long(self, rid: str) -> asyncio.Task[Any]:
        return asyncio.create_task(self.ask(self.endless, rid, LONG_TOKENS))

    async def let_run(self) -> None:
        """Return when what was asked before is being sampled: later arrivals have been answered."""
        await asyncio.sleep(0)
        await self.ask(PROMPT, None, 4)


@pytest_asyncio.fixture(scope="module")
async def world() -> AsyncIterator[World]:
    pytest.importorskip("sglang")
    from sglang_multiturn.cpu.verl_replica import CpuServer, server_arguments

    asked = SimpleNamespace(full_determinism=True, engine_kwargs={"sglang": {"max_running_requests": 16}})
    server = CpuServer(
        str(TINY_MODEL),
        dtype="float32",
        context_length=None,
        response_length=64,
        seed=1,
        server_args=server_arguments(asked),
    )
    await server.start()
    world = World(server)
    for token_id in range(40, 56):
        found = await world.ask([token_id] * 3, None, LONG_TOKENS)
        if found.stop_reason == "length":
            world.endless = [token_id] * 3
            break
    yield world
    await server.close()


def rid() -> str:
    return f"r{next(_numbers)}:t0:a0"


async def test_a_rid_changes_nothing_but_the_name(world: World) -> None:
    named, nameless = await world.ask(PROMPT, rid(), 6), await world.ask(PROMPT, None, 6)
    assert (named.token_ids, named.stop_reason) == (nameless.token_ids, "length")


async def test_an_abort_keeps_what_was_sampled(world: World) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        running, other = world.long(name := rid()), world.long(survivor := rid())
        await world.let_run()
        await world.server.abort_rids([name])
        output = await running
        assert not other.done()
        await world.server.abort_rids([survivor])
        await other
        await world.server.sleep()
    assert output.stop_reason == "request_aborted"
    assert 0 < len(output.token_ids) == len(output.log_probs) < LONG_TOKENS


async def test_an_abort_that_comes_first_wins(world: World) -> None:
    name = rid()
    await world.server.abort_rids([name])
    output = await world.ask(world.endless, name, LONG_TOKENS)
    assert (output.stop_reason, output.token_ids, output.log_probs) == ("request_aborted", [], [])


async def test_what_comes_in_a_pause_is_turned_away_and_memory_released(world: World) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        await world.server.serving()
        await world.server.abort_all_requests()
        assert (await world.long(rid())).stop_reason == "engine_turned_away"
        await world.server.abort_rids([name := rid()])
        assert (await world.long(name)).stop_reason == "request_aborted"
        serving, verls = (
            asyncio.create_task(world.server.serving()),
            asyncio.create_task(world.ask(PROMPT, None, 4)),
        )
        await world.server.sleep()
        assert not serving.done()
        assert not verls.done()
        await world.server.resume_generation()
        await serving
        assert (await verls).stop_reason == "length"  # of another loop, and without a rid: it waited
        assert (await world.ask(PROMPT, rid(), 4)).stop_reason == "length"


async def test_a_pause_hands_back_what_there_is_and_the_turn_goes_on_under_the_new_version(world: World) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        whole = await world.ask(world.endless, None, LONG_TOKENS)
        await world.server.set_global_steps(6)
        running = [world.long(rid()) for _ in range(8)]
        await world.let_run()
        await world.server.abort_all_requests()
        parts = [await task for task in running]
        await world.server.sleep()
        await world.server.set_global_steps(7)
        await world.server.resume_generation()
        rests = [
            asyncio.create_task(world.ask([*world.endless, *part.token_ids], rid(), LONG_TOKENS - len(part.token_ids)))
            for part in parts
        ]
        outputs = [await task for task in rests]
    assert {(part.stop_reason, part.extra_fields["global_steps"]) for part in parts} == {("engine_paused", 6)}
    assert {(rest.stop_reason, rest.extra_fields["global_steps"]) for rest in outputs} == {("length", 7)}
    assert all(part.token_ids for part in parts)
    assert [[*a.token_ids, *b.token_ids] for a, b in zip(parts, outputs, strict=True)] == [whole.token_ids] * 8


async def test_sixty_four_at_once_half_of_them_aborted(world: World) -> None:
    names = [rid() for _ in range(64)]
    async with asyncio.timeout(TIMEOUT_S):
        asked = [
            asyncio.create_task(world.ask(PROMPT, name, 20)) if number % 2 else world.long(name)
            for number, name in enumerate(names)
        ]
        aborted, kept = asked[::2], asked[1::2]
        await kept[0]  # some run, the others wait for a slot
        await world.server.abort_rids(names[::2])
        assert {(await task).stop_reason for task in aborted} == {"request_aborted"}
        assert {len((await task).token_ids) for task in kept} == {20}
        await world.server.sleep()


async def test_memory_is_not_released_while_anything_is_in_flight(world: World) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        running = world.long(name := rid())
        await world.let_run()
        with pytest.raises(EngineError, match="in flight"):
            await world.server.sleep()
        await world.server.abort_rids([name])
        await running


async def test_the_same_seed_draws_the_same_tokens_alone_and_among_others(world: World) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        alone = [(await world.ask(PROMPT, rid(), 40, seed=seed)).token_ids for seed in range(4)]
        together = [asyncio.create_task(world.ask(PROMPT, rid(), 40, seed=n % 4)) for n in range(24)]
        outputs = [(await task).token_ids for task in together]
    assert len({tuple(ids) for ids in alone}) == 4
    assert outputs == [alone[n % 4] for n in range(24)]


async def test_an_interrupted_turn_with_a_seed_goes_on_as_it_would_have(world: World) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        whole = (await world.ask(PROMPT, rid(), 40, seed=3)).token_ids
        part = (await world.ask(PROMPT, rid(), 15, seed=3)).token_ids
        rest = (await world.ask([*PROMPT, *part], rid(), 25, seed=3)).token_ids
    assert [*part, *rest] == whole
