"""What every host of a tool promises, wherever the tool runs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest
from tools.remembering_tool import RememberingTool
from tools.scheduled_tool import ScheduledTool

from sglang_multiturn.config import ToolSettings
from sglang_multiturn.errors import ToolContractError, ToolError, ToolRaisedError
from sglang_multiturn.tools.agent_data import AgentData
from sglang_multiturn.tools.host import HostLeaks, ToolHost, ToolReply
from sglang_multiturn.tools.local_hosts import AsyncHost, ThreadHost
from sglang_multiturn.tools.process.host import ProcessHost
from sglang_multiturn.tools.ray.host import RayHost

CONFIG = {"name": "scheduled", "slow_s": 0.01}
NOTHING_HELD = HostLeaks()
ELSEWHERE: dict[str, Any] = {
    "name": "scheduled",
    "class_path": "tools.scheduled_tool.ScheduledTool",
    "config": CONFIG,
    "tool_schema": ScheduledTool(CONFIG).tool_schema,
    "settings": ToolSettings(execution="process"),
}

REMEMBERING: dict[str, Any] = ELSEWHERE | {
    "name": "memory",
    "class_path": "tools.remembering_tool.RememberingTool",
    "config": {},
    "tool_schema": RememberingTool({}).tool_schema,
}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("ray_job")]


def async_host() -> ToolHost:
    return AsyncHost(ScheduledTool(CONFIG))


def thread_host() -> ToolHost:
    return ThreadHost(ScheduledTool(CONFIG))


def process_host() -> ToolHost:
    return ProcessHost(**ELSEWHERE)


def ray_host() -> ToolHost:
    return RayHost(run_id="contract", **ELSEWHERE)


every_host = pytest.mark.parametrize("make", [async_host, thread_host, process_host, ray_host])


@asynccontextmanager
async def opened(make: Callable[[], ToolHost]) -> AsyncIterator[ToolHost]:
    """A host that holds nothing any more when the test is done with it."""
    host = make()
    try:
        async with asyncio.timeout(120):
            await host.start()
            yield host
            assert host.leaks() == NOTHING_HELD
    finally:
        await host.aclose()


@every_host
async def test_an_instance_is_made_used_judged_and_released(make: Callable[[], ToolHost]) -> None:
    async with opened(make) as host:
        made = await host.create("r1", {})
        assert made.startswith("r1#")
        assert host.is_alive(made)
        assert host.leaks().live_instances == 1
        assert await host.execute(made, {}, {}) == ToolReply(text="done", reward=1.0, metrics={})
        assert await host.calc_reward(made, {}) == 0.5
        await host.release(made, {})
        assert not host.is_alive(made)


@every_host
async def test_a_tool_that_asks_for_it_is_shown_the_conversation(make: Callable[[], ToolHost]) -> None:
    async with opened(make) as host:
        made = await host.create("r1", {})
        seen = AgentData(request_id="r1", messages=[{"role": "user", "content": "hi"}] * 3)
        assert (await host.execute(made, {}, {}, seen)).text == "done after 3 messages"
        await host.release(made, {})


@every_host
async def test_a_tool_error_keeps_its_words_and_the_instance(make: Callable[[], ToolHost]) -> None:
    async with opened(make) as host:
        made = await host.create("r1", {})
        with pytest.raises(ToolError, match=r"^not today$"):
            await host.execute(made, {"behave": "tool_error"}, {})
        assert (await host.execute(made, {}, {})).text == "done"
        await host.release(made, {})


@every_host
async def test_what_a_tool_raises_otherwise_says_what_and_where(make: Callable[[], ToolHost]) -> None:
    async with opened(make) as host:
        made = await host.create("r1", {})
        with pytest.raises((ValueError, ToolRaisedError), match="a bug of the tool's"):
            await host.execute(made, {"behave": "raises"}, {})
        await host.release(made, {})


@every_host
@pytest.mark.parametrize("behave", ["exits", "cancels_itself", "returns_rubbish"])
async def test_a_broken_contract_is_said_so(make: Callable[[], ToolHost], behave: str) -> None:
    async with opened(make) as host:
        made = await host.create("r1", {})
        with pytest.raises(ToolContractError, match=r"scheduled\.execute"):
            await host.execute(made, {"behave": behave}, {})
        assert (await host.execute(made, {}, {})).text == "done"
        await host.release(made, {})


@every_host
async def test_a_create_that_fails_leaves_nothing(make: Callable[[], ToolHost]) -> None:
    async with opened(make) as host:
        with pytest.raises(ToolError, match="not today"):
            await host.create("r1", {"behave": "tool_error"})
        with pytest.raises(ToolContractError, match=r"scheduled\.create"):
            await host.create("r1", {"behave": "returns_rubbish"})


@every_host
async def test_a_release_that_fails_releases_all_the_same(make: Callable[[], ToolHost]) -> None:
    async with opened(make) as host:
        made = await host.create("r1", {})
        with pytest.raises((ValueError, ToolRaisedError), match="a bug of the tool's"):
            await host.release(made, {"behave": "raises"})
        assert not host.is_alive(made)


@every_host
async def test_a_cancelled_call_ends_and_other_instances_go_on(make: Callable[[], ToolHost]) -> None:
    async with opened(make) as host:
        hung, well = await host.create("r1", {}), await host.create("r2", {})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await host.execute(hung, {"behave": "hangs"}, {})
        assert (await host.execute(well, {}, {})).text == "done"
        if host.is_alive(hung):
            await host.release(hung, {})
        await host.release(well, {})


@every_host
async def test_calls_of_one_instance_may_overlap(make: Callable[[], ToolHost]) -> None:
    async with opened(make) as host:
        made = await host.create("r1", {})
        async with asyncio.TaskGroup() as group:
            calls = [group.create_task(host.execute(made, {"behave": "slow"}, {})) for _ in range(4)]
        assert [task.result().text for task in calls] == ["done"] * 4
        await host.release(made, {})


# Snapshots


def remembering_async() -> ToolHost:
    return AsyncHost(RememberingTool({}))


def remembering_thread() -> ToolHost:
    return ThreadHost(RememberingTool({}))


def remembering_process() -> ToolHost:
    return ProcessHost(**REMEMBERING)


def remembering_ray() -> ToolHost:
    return RayHost(run_id="snapshots", **REMEMBERING)


every_remembering = pytest.mark.parametrize(
    "make", [remembering_async, remembering_thread, remembering_process, remembering_ray]
)


@every_remembering
async def test_an_instance_goes_on_from_the_snapshot_of_another(make: Callable[[], ToolHost]) -> None:
    async with opened(make) as host:
        first = await host.create("r1", {})
        await host.execute(first, {"word": "\u00e4\U0001f600"}, {})
        state = await host.snapshot(first)
        assert json.loads(state) == {"words": ["\u00e4\U0001f600"], "fails": {}}
        assert (await host.execute(first, {"word": "b"}, {})).text == "\u00e4\U0001f600 b"
        second = await host.create("r2", {})
        await host.restore(second, state)
        assert (await host.execute(second, {"word": "c"}, {})).text == "\u00e4\U0001f600 c"
        third = await host.create("r3", {})
        await host.restore(third, state)
        assert (await host.execute(third, {"word": "d"}, {})).text == "\u00e4\U0001f600 d"
        assert (await host.execute(first, {"word": "e"}, {})).text == "\u00e4\U0001f600 b e"
        for made in (first, second, third):
            await host.release(made, {})


@every_remembering
@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ("raises", (ValueError, ToolRaisedError), "a bug of the tool's"),
        ("says_why", ToolError, "^not today$"),
        (
            "returns_rubbish",
            ToolContractError,
            r"^memory\.snapshot returned what is no JSON \(input was not a valid JSON",
        ),
        ("returns_keys_that_are_no_text", ToolContractError, r"is no JSON \(Input should be a valid string\)"),
        ("returns_nan", ToolContractError, r"is no JSON"),
        ("returns_too_much", ToolContractError, r"returned 2097154 bytes of JSON; at most 1048576 are allowed$"),
    ],
)
async def test_a_snapshot_that_fails_says_why_and_the_instance_goes_on(
    make: Callable[[], ToolHost], how: str, error: Any, words: str
) -> None:
    async with opened(make) as host:
        made = await host.create("r1", {})
        await host.execute(made, {"word": "a", "fails": {"snapshot": how}}, {})
        with pytest.raises(error, match=words):
            await host.snapshot(made)
        assert (await host.execute(made, {"word": "b"}, {})).text == "a b"
        await host.release(made, {})


@every_remembering
async def test_a_snapshot_that_is_cancelled_does_not_end_the_instance(make: Callable[[], ToolHost]) -> None:
    async with opened(make) as host:
        made = await host.create("r1", {})
        await host.execute(made, {"word": "a", "fails": {"snapshot": "hangs"}}, {})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await host.snapshot(made)
        assert host.is_alive(made)
        assert (await host.execute(made, {"word": "b"}, {})).text == "a b"
        await host.release(made, {})


@every_remembering
async def test_a_restore_that_fails_says_why(make: Callable[[], ToolHost]) -> None:
    async with opened(make) as host:
        made = await host.create("r1", {})
        with pytest.raises((ValueError, ToolRaisedError), match="a bug of the tool's"):
            await host.restore(made, json.dumps({"words": [], "fails": {"restore": "raises"}}))
        await host.release(made, {})


@pytest.mark.parametrize("make", [remembering_process, remembering_ray])
async def test_a_host_that_looks_knows_whether_an_instance_still_lives(make: Callable[[], ToolHost]) -> None:
    async with opened(make) as host:
        killed, well = await host.create("r1", {}), await host.create("r2", {})
        process = psutil.Process((await host.execute(killed, {}, {})).metrics["pid"])
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait, 60)
        await host.look(killed)
        await host.look(well)
        assert not host.is_alive(killed)
        assert host.is_alive(well)
        await host.release(well, {})
