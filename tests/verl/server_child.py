"""verl's SGLang server, as this package extends it, around a real SGLang on the CPU; run by `test_server.py`.

`python server_child.py RESULTS` runs every scenario once, in order, and writes what came of each as one JSON object. The
server is made without verl's launch, which needs a GPU: it gets the tokenizer manager of an engine started as
`engine.sglang_child.launch` starts it. Everything else is verl's own code and ours.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from server_weights import Span, Weights  # type: ignore[import-not-found]

from sglang_multiturn.cpu import sglang_kernels

TINY_MODEL = Path(__file__).parents[2] / "examples" / "gsm8k_tool" / "tiny_model"
PROMPT = list(range(100, 140))
TIMEOUT_S = 240.0
LONGEST = 600
UPDATES = 6
Result = dict[str, Any]


class World:
    """One server and prompts whose outcome is known."""

    def __init__(self, server: Any, manager: Any) -> None:
        self.server = server
        self.manager = manager
        self.budget = 400
        self.endless: list[int] = []
        self._count = 0

    def rid(self) -> str:
        """A generation no scenario has asked for."""
        self._count += 1
        return f"r{self._count}:t0:a0"

    async def short(self, rid: str | None = None, tokens: int = 6) -> Any:
        """A few greedy tokens."""
        return await self.ask(PROMPT, rid, tokens)

    async def long(self, rid: str | None) -> Any:
        """Greedy, until its budget is used up, which takes seconds."""
        return await self.ask(self.endless, rid, self.budget)

    async def ask(self, ids: list[int], rid: str | None, tokens: int, temperature: float = 0.0) -> Any:
        params = {"temperature": temperature, "max_tokens": tokens, "logprobs": True}
        named = {} if rid is None else {"rid": rid}
        return await self.server.generate(ids, params, request_id=f"verls-{self.rid()}", **named)

    async def ask_on(self, ids: list[int], tokens: int, **params: Any) -> Any:
        """As often as a pause turns it away."""
        while (output := await self.ask(ids, self.rid(), tokens, **params)).stop_reason == "engine_turned_away":
            await self.server.serving()
        return output

    async def let_run(self) -> None:
        """Return when what was asked before is being sampled: later arrivals have been answered."""
        await asyncio.sleep(0)
        await self.short()

    async def is_idle(self) -> bool:
        """What releasing memory needs: the scheduler idle, and nothing remembered of a request."""
        await self.server._until_idle()
        flushed = await self.manager.flush_cache()
        return bool(flushed.success) and not self.manager.rid_to_state and not self.server._flights.rids

    async def find_endless(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tried = {n: tasks.create_task(self.ask([n] * 3, None, self.budget)) for n in range(40, 56)}
        self.endless = next([n] * 3 for n, task in tried.items() if task.result().stop_reason == "length")


def said(output: Any) -> Result:
    """An output in short."""
    return {
        "stop_reason": output.stop_reason,
        "tokens": len(output.token_ids),
        "logprobs": len(output.log_probs),
        "version": output.extra_fields["global_steps"],
    }


async def with_and_without_a_rid(world: World) -> Result:
    named, nameless = await world.short(world.rid()), await world.short()
    same = (named.token_ids, named.stop_reason) == (nameless.token_ids, nameless.stop_reason)
    return {"named": said(named), "same": same, "idle": await world.is_idle()}


async def aborted_while_it_runs(world: World) -> Result:
    rid = world.rid()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(world.long(rid))
        other = tasks.create_task(world.long(survivor := world.rid()))
        await world.let_run()
        began_s = time.monotonic()
        await world.server.abort_rids([rid])
        took_s = time.monotonic() - began_s
        ended = running.done() and not other.done()
        await world.server.abort_rids([survivor])
    return {
        "output": said(running.result()),
        "ended": ended,
        "took_s": took_s,
        "budget": world.budget,
        "idle": await world.is_idle(),
    }


async def aborted_before_it_arrives(world: World) -> Result:
    rid = world.rid()
    await world.server.abort_rids([rid])
    output, again = await world.long(rid), await world.short(rid)
    return {"output": said(output), "again": said(again), "idle": await world.is_idle()}


async def aborted_right_behind(world: World) -> Result:
    """Before the request's first step, after it, and while it is on its way to the scheduler."""
    ends = []
    for steps in [0, 1, 2, 3, 5, 8] * 3:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(world.long(rid := world.rid()))
            for _ in range(steps):
                await asyncio.sleep(0)
            await world.server.abort_rids([rid])
        ends.append(running.result().stop_reason)
    return {"ends": ends, "idle": await world.is_idle()}


async def aborted_in_a_pause(world: World) -> Result:
    """Two come a step before a pause, are no longer turned away, and find SGLang paused."""
    async with asyncio.TaskGroup() as tasks:
        aborted = tasks.create_task(world.long(rid := world.rid()))
        waiting = tasks.create_task(world.short(world.rid()))
        await tasks.create_task(world.server.abort_all_requests())
        waits_in_sglang = rid in world.manager.rid_to_state
        await world.server.abort_rids([rid])
        output = await aborted
        still_waiting = not waiting.done()
        forgotten = rid not in world.manager.rid_to_state
        flushed = (await world.manager.flush_cache()).success
        await world.server.resume_generation()
    return {
        "output": said(output),
        "waits_in_sglang": waits_in_sglang,
        "still_waiting": still_waiting,
        "forgotten": forgotten,
        "flushed": flushed,
        "other": said(waiting.result()),
        "idle": await world.is_idle(),
    }


async def turned_away_in_a_pause(world: World) -> Result:
    await world.server.serving()
    await world.server.abort_all_requests()
    turned_away = await world.long(world.rid())
    await world.server.abort_rids([rid := world.rid()])
    aborted = await world.long(rid)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(world.server.serving())
        await world.server.sleep()
        waits = not serving.done()
        await wake(world)
        await world.server.resume_generation()
    again = await world.short(world.rid())
    return {
        "turned_away": said(turned_away),
        "aborted": said(aborted),
        "waits": waits,
        "again": said(again),
        "idle": await world.is_idle(),
    }


async def aborted_while_a_pause_begins(world: World) -> Result:
    """The new one waits for the lock that SGLang's pause holds while it ends the old one."""
    async with asyncio.TaskGroup() as tasks:
        old = tasks.create_task(world.long(world.rid()))
        await world.let_run()
        new = tasks.create_task(world.long(rid := world.rid()))
        pausing = tasks.create_task(world.server.abort_all_requests())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await world.server.abort_rids([rid])
        await pausing
    await world.server.resume_generation()
    return {"old": said(old.result()), "new": said(new.result()), "idle": await world.is_idle()}


async def sixty_four_at_once(world: World) -> Result:
    """Half of them aborted, each at another moment; more than the engine runs at once."""
    rids = [world.rid() for _ in range(64)]
    async with asyncio.TaskGroup() as tasks:
        aborted = [tasks.create_task(world.long(rid)) for rid in rids[::2]]
        kept = [tasks.create_task(world.short(rid, tokens=20)) for rid in rids[1::2]]
        for rid in rids[::2]:
            await asyncio.sleep(0.01)  # spread over the time the others take
            tasks.create_task(world.server.abort_rids([rid]))
    return {
        "aborted": sorted({task.result().stop_reason for task in aborted}),
        "partial": sum(bool(task.result().token_ids) for task in aborted),
        "aligned": all(len(task.result().log_probs) == len(task.result().token_ids) for task in aborted),
        "kept": sorted({len(task.result().token_ids) for task in kept}),
        "idle": await world.is_idle(),
    }


async def paused_and_gone_on(world: World) -> Result:
    """verl pauses, puts the engine to sleep, updates, wakes and resumes: one turn, two spans."""
    tokens = 400
    whole = await world.ask(world.endless, None, tokens)
    await world.server.set_global_steps(6)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(world.ask(world.endless, world.rid(), tokens)) for _ in range(8)]
        await world.let_run()
        await world.server.abort_all_requests()
    parts = [task.result() for task in running]
    async with asyncio.TaskGroup() as tasks:
        rests = [
            tasks.create_task(world.ask_on([*world.endless, *part.token_ids], tokens - len(part.token_ids)))
            for part in parts
        ]
        await asyncio.sleep(0)
        await world.server.sleep()
        waited = not any(task.done() for task in rests)
        await world.server.set_global_steps(7)
        await wake(world)
        await world.server.resume_generation()
    joined = [[*part.token_ids, *rest.result().token_ids] for part, rest in zip(parts, rests, strict=True)]
    return {
        "parts": [said(part) for part in parts],
        "rests": [said(rest.result()) for rest in rests],
        "waited": waited,
        "as_uninterrupted": sum(ids == list(whole.token_ids) for ids in joined),
        "idle": await world.is_idle(),
    }


async def of_another_loop(world: World) -> Result:
    """No rid: verl's own words when verl pauses, and none of our aborts touches it."""
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(world.long(None))
        await world.let_run()
        await world.server.abort_rids(["verls"])
        untouched = not running.done()
        await world.server.abort_all_requests()
        waiting = tasks.create_task(world.short(None))
        await asyncio.sleep(0)
        waits = not waiting.done()
        await world.server.resume_generation()
    return {
        "paused": said(running.result()),
        "untouched": untouched,
        "waits": waits,
        "resumed": said(waiting.result()),
        "idle": await world.is_idle(),
    }


async def asked_twice_at_once(world: World) -> Result:
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(world.long(rid := world.rid()))
        await world.let_run()
        try:
            await world.short(rid)
            refused = ""
        except Exception as error:  # noqa: BLE001 - the parent looks at it
            refused = f"{type(error).__name__}: {error}"
        await world.server.abort_rids([rid])
    return {"refused": refused, "first": said(running.result()), "idle": await world.is_idle()}


async def slept_and_woken(world: World) -> Result:
    """SGLang ends itself when memory is released while it is not idle: one abort right before, again and again."""
    for _ in range(5):
        async with asyncio.TaskGroup() as tasks:
            rids = [world.rid() for _ in range(4)]
            for rid in rids:
                tasks.create_task(world.long(rid))
            await world.let_run()
            await world.server.abort_rids(rids)
        await world.server.sleep()
        await wake(world)
    return {"output": said(await world.short(world.rid())), "idle": await world.is_idle()}


async def versions_under_load(world: World) -> Result:
    """Conversations that go on through updates of the weights; each span's log-probabilities by its own weights."""
    weights = Weights(world.server, world.manager, TINY_MODEL)
    await weights.load(0)
    spans: list[Span] = []

    async def converse(n: int) -> None:
        ids = [n] * 3
        while len(ids) < LONGEST and not done.is_set():
            output = await world.ask_on(ids, 64, temperature=1.0)
            if output.token_ids:
                spans.append((output.extra_fields["global_steps"], ids, output.token_ids, output.log_probs))
            reasons.add(output.stop_reason)
            ids = [*ids, *output.token_ids]

    reasons: set[str] = set()
    done = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for n in range(60, 68):
            tasks.create_task(converse(n))
        for version in range(1, UPDATES + 1):
            await world.let_run()
            await world.server.abort_all_requests()
            await weights.load(version)
            await world.server.resume_generation()
        done.set()
    worst, other = await weights.compare(spans)
    return {
        "spans": len(spans),
        "versions": sorted({version for version, *_ in spans}),
        "reasons": sorted(reasons),
        "worst": worst,
        "worst_under_other_weights": other,
        "idle": await world.is_idle(),
    }


async def wake(world: World) -> None:
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

    await world.manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=["kv_cache", "weights"]), None)
    await world.manager.flush_cache()


SCENARIOS: tuple[Callable[[World], Awaitable[Result]], ...] = (
    with_and_without_a_rid,
    aborted_while_it_runs,
    aborted_before_it_arrives,
    aborted_right_behind,
    aborted_in_a_pause,
    turned_away_in_a_pause,
    aborted_while_a_pause_begins,
    sixty_four_at_once,
    paused_and_gone_on,
    of_another_loop,
    asked_twice_at_once,
    slept_and_woken,
    versions_under_load,
)


def make_server(manager: Any) -> Any:
    from verl.workers.rollout.replica import RolloutMode

    from sglang_multiturn.verl_plugin.server import SglangServer

    server = SglangServer.__new__(SglangServer)
    server.tokenizer_manager = manager
    server.config = SimpleNamespace(
        max_model_len=manager.max_req_input_len,
        response_length=512,
        prompt_length=512,
        enable_rollout_routing_replay=False,
        skip_tokenizer_init=True,
        mtp=None,
        free_cache_engine=True,
    )
    server.model_config = SimpleNamespace(lora_rank=0, lora={}, lora_adapter_path=None)
    server.rollout_mode = RolloutMode.HYBRID
    server.replica_rank = server.node_rank = 0
    server.global_steps = 0
    server._disaggregation_role = "null"
    return server


async def run_all(manager: Any, wanted: list[str]) -> dict[str, Result]:
    world = World(make_server(manager), manager)
    await world.find_endless()
    results: dict[str, Result] = {}
    for scenario in SCENARIOS:
        if wanted and scenario.__name__ not in wanted:
            continue
        try:
            async with asyncio.timeout(TIMEOUT_S):
                results[scenario.__name__] = await scenario(world)
        except Exception as error:  # noqa: BLE001 - what the parent then reports
            results[scenario.__name__] = {"failed": f"{type(error).__name__}: {error}"}
        print(scenario.__name__, results[scenario.__name__], flush=True)  # noqa: T201 - for the log
    return results


def main() -> None:
    from sglang_multiturn.engine.sglang_child.launch import launch
    from sglang_multiturn.engine.sglang_child.messages import Start

    start = Start(
        model_path=str(TINY_MODEL),
        dtype="auto",
        device="cpu",
        context_length=None,
        random_seed=1,
        server_args={"skip_tokenizer_init": True, "max_running_requests": 16},
    )
    engine = launch(start).engine
    results = engine.loop.run_until_complete(run_all(engine.tokenizer_manager, sys.argv[2:]))
    Path(sys.argv[1]).write_text(json.dumps(results))
    engine.shutdown()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__mp_main__":
    sglang_kernels.prepare_spawned()

if __name__ == "__main__":
    main()
