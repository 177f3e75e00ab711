"""`execution: ray` with a real Ray: what crosses it, what is ended there, and who outlives whom."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")

import ray
from ray import cloudpickle
from ray.exceptions import RayActorError

from sglang_multiturn.config import ToolSettings
from sglang_multiturn.errors import ConfigError, ToolContractError, ToolDiedError, ToolError, ToolRaisedError
from sglang_multiturn.tools.agent_data import AgentData
from sglang_multiturn.tools.host import HostLeaks, ToolReply
from sglang_multiturn.tools.ray.host import RayHost
from sglang_multiturn.tools.ray.node import RemoteTool, ToolNode

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test module

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NOTHING_HELD = HostLeaks()


def make_host(run: str, tool: str = "HostileTool", config: dict[str, Any] | None = None, **settings: Any) -> RayHost:
    return RayHost(
        name="hostile",
        class_path=f"tools.hostile.{tool}",
        config=config or {},
        tool_schema=None,
        settings=ToolSettings(execution="ray", **settings),
        run_id=run,
    )


def make_tool() -> RemoteTool:
    return RemoteTool(
        name="hostile",
        class_path="tools.hostile.HostileTool",
        config={},
        tool_schema=None,
        settings=ToolSettings(execution="ray"),
    )


@asynccontextmanager
async def opened(run: str, *args: Any) -> AsyncIterator[RayHost]:
    """A host that holds nothing any more when the test is done with it."""
    host = make_host(run, *args)
    try:
        async with asyncio.timeout(120):
            yield host
            assert host.leaks() == NOTHING_HELD
    finally:
        await host.aclose()


async def pid_of(host: RayHost, instance_id: str) -> int:
    return int((await host.execute(instance_id, {}, {})).metrics["pid"])


async def until_gone(*pids: int) -> None:
    processes = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(pid))
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 60)
    assert alive == []


async def until_dead(actor: Any) -> None:
    with suppress(RayActorError):
        while True:
            await actor.settle.remote("nobody", "no call", "no instance")


@ray.remote(num_cpus=0)
class Worker:
    """Stands for one worker process of a run."""

    def __init__(self, run: str) -> None:
        self.host = make_host(run)

    async def pid(self) -> int:
        return os.getpid()

    async def make(self, instance_id: str) -> tuple[str, int]:
        made = await self.host.create(instance_id, {})
        return made, await pid_of(self.host, made)

    async def hang(self, instance_id: str) -> None:
        await self.host.execute(instance_id, {"act": "hang"}, {})

    async def count(self, instance_id: str) -> str:
        return (await self.host.execute(instance_id, {}, {})).text

    async def close(self) -> HostLeaks:
        await self.host.aclose()
        return self.host.leaks()


def test_outside_a_ray_job_it_is_refused() -> None:  # the first test, since the others need one
    with pytest.raises(ConfigError, match=r"^tool 'hostile': `execution: ray` needs a Ray job"):
        make_host("none")


# What crosses Ray


async def test_an_instance_is_made_used_judged_and_released_on_its_node(ray_job: None) -> None:
    async with opened("lives") as host:
        made = await host.create("a", {"start": 10})
        assert (made, host.is_alive("a")) == ("a", True)
        pid = await pid_of(host, "a")
        assert await host.execute("a", {}, {}) == ToolReply(text="12", reward=0.5, metrics={"pid": pid})
        assert await host.calc_reward("a", {}) == 12.0
        assert host.leaks() == HostLeaks(live_instances=1, live_processes=1)
        assert pid not in {child.pid for child in psutil.Process().children(recursive=False)}
        await host.release("a", {})
        assert not host.is_alive("a")
        with pytest.raises(ToolDiedError, match=r"^tool 'hostile': there is no living instance 'a'$"):
            await host.execute("a", {}, {})
        await until_gone(pid)


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        ("raise_tool_error", ToolError, "^not today$"),
        ("raise_bug", ToolRaisedError, "ValueError: a bug"),
        ("answer_object", ToolContractError, r"hostile\.execute"),
        ("exit_python", ToolContractError, "SystemExit"),
    ],
)
async def test_errors_arrive_as_they_were_raised_and_the_instance_goes_on(
    ray_job: None, act: str, error: type[Exception], words: str
) -> None:
    async with opened("errors") as host:
        await host.create("a", {})
        with pytest.raises(error, match=words) as caught:
            await host.execute("a", {"act": act}, {})
        assert type(caught.value) is error
        assert (await host.execute("a", {}, {})).text == "1"
        await host.release("a", {})


async def test_a_process_that_dies_is_that_conversations_problem_only(ray_job: None) -> None:
    async with opened("dies") as host:
        await host.create("a", {})
        await host.create("b", {})
        with pytest.raises(ToolDiedError):
            await host.execute("a", {"act": "kill_itself"}, {})
        assert (host.is_alive("a"), host.is_alive("b")) == (False, True)
        await host.release("b", {})


async def test_a_class_that_cannot_be_made_is_said_so(ray_job: None) -> None:
    async with opened("unmakeable", "UnmakeableTool", {"act": "raise_bug"}) as host:
        with pytest.raises(ConfigError, match="a bug"):
            await host.create("a", {})


async def test_what_a_tool_is_given_arrives(ray_job: None) -> None:
    async with opened("given", "EchoingTool", {"index": "wiki"}) as host:
        await host.create("a", {"top": 3})
        data = AgentData(request_id="r", extra_fields={"lock": asyncio.Lock()})  # which stays here
        said = (await host.execute("a", {"query": "é"}, {"k": [1]}, data)).text
        assert said.startswith("('a', {'query': 'é'}, {'k': [1]")
        assert "{'top': 3}, {'index': 'wiki'}" in said
        await host.release("a", {})


# Cancellation


@pytest.mark.parametrize("act", ["hang", "spin"])
async def test_a_cancelled_call_is_killed_on_its_node_and_others_go_on(ray_job: None, act: str) -> None:
    async with opened("cancelled") as host:
        for name in ("a", "b"):
            await host.create(name, {})
        pid = await pid_of(host, "a")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await host.execute("a", {"act": act}, {})
        assert not psutil.pid_exists(pid)
        assert (host.is_alive("a"), host.is_alive("b")) == (False, True)
        assert host.leaks() == HostLeaks(live_instances=1, live_processes=1)
        assert (await host.execute("b", {}, {})).text == "1"
        await host.release("b", {})


async def test_a_create_cancelled_at_any_moment_leaves_nothing(ray_job: None) -> None:
    async with opened("moments") as host:
        await host.create("first", {})
        for moment in range(40):
            task = asyncio.get_running_loop().create_task(host.create(f"a{moment}", {}))  # cancelled below
            for _ in range(moment // 2):
                await host.calc_reward("first", {})  # passes some time
            task.cancel()
            try:
                await host.release(await task, {})
            except asyncio.CancelledError:
                assert not host.is_alive(f"a{moment}")
        assert host.leaks() == HostLeaks(live_instances=1, live_processes=1)
        await host.release("first", {})


async def test_a_create_cancelled_before_its_actor_can_start_does_not_wait_for_it(ray_job: None) -> None:
    host = make_host("nowhere", ray_options={"resources": {"a node that is not there": 1}})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await host.create("a", {})
    assert host.leaks() == NOTHING_HELD


async def test_an_instance_made_when_its_caller_had_gone_is_released() -> None:
    node = ToolNode(make_tool())  # here and without Ray, where the moment can be chosen
    answer = await node.call("worker", "the call", "create", "a", {})
    assert (answer.value, answer.is_alive) == ("a", True)
    settled = await node.settle("worker", "the call", "a")
    assert (settled.is_alive, settled.leaks) == (False, NOTHING_HELD)
    await node.leave("worker")
    late = await node.call("worker", "another call", "create", "b", {})
    assert isinstance(late.error, ToolDiedError)
    assert late.leaks == NOTHING_HELD


# Workers and nodes


async def test_workers_share_an_actor_and_not_their_ids(ray_job: None) -> None:
    async with opened("shared") as host:
        await host.create("a", {})
        other = Worker.remote("shared")
        made, pid = await other.make.remote("a")
        assert made == "a"
        assert pid != await pid_of(host, "a")
        assert await other.count.remote("a") == "2"
        assert host.leaks() == HostLeaks(live_instances=1, live_processes=1)
        assert await other.close.remote() == NOTHING_HELD
        assert not psutil.pid_exists(pid)
        assert (await host.execute("a", {}, {})).text == "2"
        await host.release("a", {})


async def test_instances_of_a_killed_worker_end_and_those_of_others_go_on(ray_job: None) -> None:
    async with opened("killed") as host:
        await host.create("a", {})
        victim = Worker.remote("killed")
        pids = [(await victim.make.remote(name))[1] for name in ("b", "c")]
        victim.hang.remote("c")
        os.kill(await victim.pid.remote(), signal.SIGKILL)
        await until_gone(*pids)
        assert (await host.execute("a", {}, {})).text == "1"
        await host.release("a", {})


async def test_a_node_that_dies_takes_its_instances_along_and_the_next_create_finds_another(ray_job: None) -> None:
    async with opened("node") as host:
        await host.create("a", {})
        pid = await pid_of(host, "a")
        hanging = asyncio.get_running_loop().create_task(host.execute("a", {"act": "hang"}, {}))  # ended below
        await pid_of(host, "a")
        assert host._tie is not None
        ray.kill(host._tie.actor)
        with pytest.raises(
            ToolDiedError, match=r"^tool 'hostile': its Ray actor cannot be reached \(ActorDiedError\)$"
        ):
            await hanging
        assert not host.is_alive("a")
        assert host.leaks() == NOTHING_HELD
        await until_gone(pid)
        await host.create("b", {})
        assert (await host.execute("b", {}, {})).text == "1"
        await host.release("b", {})


async def test_a_look_notices_that_a_node_has_died(ray_job: None) -> None:
    async with opened("look") as host:
        await host.create("a", {})
        assert host._tie is not None
        actor = host._tie.actor
        await host.look("a")
        assert host.is_alive("a")
        ray.kill(actor)
        await until_dead(actor)
        assert host.is_alive("a")  # as of the last answer
        await host.look("a")
        assert not host.is_alive("a")
        await host.look("a")  # there is nobody to ask


async def test_a_create_notices_by_itself_that_its_node_has_died(ray_job: None) -> None:
    async with opened("idle") as host:
        await host.create("a", {})
        await host.release("a", {})
        assert host._tie is not None
        actor = host._tie.actor
        ray.kill(actor)
        await until_dead(actor)
        await host.create("b", {})
        await host.release("b", {})


async def test_closing_a_host_ends_what_it_still_holds(ray_job: None) -> None:
    host = make_host("closed")
    await host.create("a", {})
    pid = await pid_of(host, "a")
    await host.aclose()
    assert not psutil.pid_exists(pid)
    assert host.leaks() == NOTHING_HELD
    assert not host.is_alive("a")


# Configuration


def test_options_that_ray_does_not_have_are_refused(ray_job: None) -> None:
    with pytest.raises(ConfigError, match=r"^tool 'hostile': ray_options: .*nam_cpus"):
        make_host("options", ray_options={"nam_cpus": 1})
    with pytest.raises(ConfigError, match=r"^tool 'hostile': ray_options: .*num_cpus"):
        make_host("options", ray_options={"num_cpus": "many"})
    with pytest.raises(ConfigError, match=r"^tool 'hostile': ray_options: 'name' is set by this package"):
        make_host("options", ray_options={"name": "mine"})
