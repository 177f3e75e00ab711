"""`execution: process` as a conversation sees it: instances, their calls, and what a tool may return or raise."""

from __future__ import annotations

import ast
import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import pytest_asyncio
from tools.process_support import NOTHING_HELD, PATIENCE_S, assert_left_as, make_host, opened, resources

from sglang_multiturn.config import ToolSettings
from sglang_multiturn.errors import ConfigError, ToolContractError, ToolDiedError, ToolError, ToolRaisedError
from sglang_multiturn.schemas import FunctionSchema, ToolSchema
from sglang_multiturn.tools.host import HostLeaks, ToolHost, ToolReply
from sglang_multiturn.tools.process import messages
from sglang_multiturn.tools.process.host import ProcessHost


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shared_host() -> AsyncIterator[ProcessHost]:
    host = make_host()
    yield host
    await host.aclose()


@pytest_asyncio.fixture(loop_scope="session")
async def host(shared_host: ProcessHost) -> AsyncIterator[ProcessHost]:
    """A host of the hostile tool, of which nothing but the nursery is left after each test."""
    await shared_host.start()
    before = resources()
    yield shared_host
    assert shared_host.leaks() == NOTHING_HELD
    assert_left_as(before)


async def counted(host: ToolHost, instance_id: str) -> str:
    return (await host.execute(instance_id, {}, {})).text


# Instances


async def test_each_instance_has_a_process_and_a_state_of_its_own(host: ProcessHost) -> None:
    first, second = await host.create("a", {}), await host.create("b", {"start": 10})
    assert (first, second) == ("a", "b")
    assert host.leaks() == HostLeaks(live_instances=2, live_processes=2)
    replies = [await host.execute(made, {}, {}) for made in (first, second, first)]
    assert [reply.text for reply in replies] == ["1", "11", "2"]
    assert replies[0] == ToolReply(text="1", reward=0.5, metrics={"pid": replies[2].metrics["pid"]})
    pids = {reply.metrics["pid"] for reply in replies}
    assert {psutil.Process(pid).ppid() for pid in pids} == {host.nursery_pid}
    assert len(pids) == 2
    assert await host.calc_reward(first, {}) == 2.0
    await host.release(first, {})
    assert not host.is_alive(first)
    assert host.is_alive(second)
    await host.release(second, {})


async def test_a_released_instance_is_gone_and_its_release_was_run(tmp_path: Any) -> None:
    log = tmp_path / "log"
    async with opened("CountingTool", {"log_path": str(log)}) as host:
        made = await host.create("a", {})
        pid = (await host.execute(made, {}, {})).metrics["pid"]
        await host.release(made, {})
        assert log.read_text() == "a released\n"
        assert not psutil.pid_exists(pid)
        with pytest.raises(ToolDiedError, match=r"^tool 'hostile': there is no living instance 'a'"):
            await host.execute(made, {}, {})
        with pytest.raises(ToolDiedError, match="no living instance"):
            await host.release(made, {})
        assert await host.create("a", {}) == "a"
        assert await counted(host, "a") == "1"
        await host.release("a", {})


async def test_the_class_is_made_once_and_its_memory_is_shared() -> None:
    async with opened("LoadedTool", {"index_mb": 200}, max_memory_mb=100, max_processes=4) as host:
        for name in ("a", "b"):
            await host.create(name, {})
        assert [await counted(host, name) for name in ("a", "b")] == ["490", "490"]
        # 200 MB that are shared do not count against the 100 that an instance may have; copying them does.
        assert (await host.execute("a", {"act": "serve"}, {})).text == "True"
        with pytest.raises(
            ToolDiedError, match=r"its process was stopped: it held \d+ MB of memory; max_memory_mb allows 100"
        ):
            await host.execute("a", {"act": "overwrite"}, {})
        assert await counted(host, "b") == "490"
        await host.release("b", {})


async def test_two_living_instances_cannot_have_one_id(host: ProcessHost) -> None:
    await host.create("a", {})
    with pytest.raises(ToolContractError, match=r"hostile\.create returned 'a', which is the id of another living"):
        await host.create("a", {})
    assert await counted(host, "a") == "1"
    await host.release("a", {})


async def test_instances_inherit_no_descriptors_of_others_and_draw_other_numbers(host: ProcessHost) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(host.create(name, {})) for name in "abcd"]
    names = [task.result() for task in tasks]
    # Three sockets: one to the worker, two of the event loop's.
    own = "/dev/null anon_inode pipe pipe socket socket socket"
    assert [(await host.execute(name, {"act": "list_descriptors"}, {})).text for name in names] == [own] * 4
    drawn = [(await host.execute(name, {"act": "draw_numbers"}, {})).text for name in names]
    assert len(set(drawn)) == 4
    for name in names:
        await host.release(name, {})


# Calls


async def test_calls_of_one_instance_overlap(host: ProcessHost) -> None:
    await host.create("a", {})
    async with asyncio.TaskGroup() as calls:
        first = calls.create_task(host.execute("a", {"act": "wait_for_another"}, {}))
        second = calls.create_task(host.execute("a", {"act": "meet_another"}, {}))
    assert [first.result().text, second.result().text] == ["met", "met"]
    await host.release("a", {})


async def test_methods_need_not_be_coroutines() -> None:
    async with opened("PlainTool") as host:
        await host.create("a", {})
        assert await host.execute("a", {}, {}) == ToolReply(text="1")
        assert await host.calc_reward("a", {}) == 1.0
        await host.release("a", {})


async def test_arguments_arrive_as_they_were_given() -> None:
    numpy = pytest.importorskip("numpy")
    schema = ToolSchema(function=FunctionSchema(name="echo", parameters={"type": "object", "x-note": [1]}))
    config = {"deep": {"list": [1, 2.5, None, True]}}
    given = {"text": "naïve ☃ \u0000", "number": 2**70, "huge": float("inf"), "nested": {"a": [{"b": []}]}}
    host = ProcessHost(
        name="echo",
        class_path="tools.hostile.EchoingTool",
        config=config,
        tool_schema=schema,
        settings=ToolSettings(execution="process"),
    )
    try:
        await host.create("a", {"array": numpy.array([[1, 2], [3, 4]]), "scalar": numpy.float32(0.5)})
        said = (await host.execute("a", given, {"row": 1})).text.replace("inf", "1e999")
        assert ast.literal_eval(said) == (
            "a",
            given,
            {"row": 1},
            {"array": [[1, 2], [3, 4]], "scalar": 0.5},
            config,
            schema.for_template(),
        )
    finally:
        await host.aclose()


async def test_arguments_that_are_no_json_are_refused_and_hurt_nobody(host: ProcessHost) -> None:
    circle: dict[str, Any] = {}
    circle["self"] = circle
    await host.create("a", {})
    with pytest.raises(ToolContractError, match=r"^hostile\.execute: its arguments cannot be sent"):
        await host.execute("a", circle, {})
    with pytest.raises(ToolContractError, match=r"bytes; at most 16777216 are allowed"):
        await host.execute("a", {"text": "x" * messages.MAX_MESSAGE_BYTES}, {})
    assert await counted(host, "a") == "1"
    await host.release("a", {})


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        ("raise_tool_error", ToolError, r"^not today$"),
        ("raise_bug", ToolRaisedError, r"(?s)^hostile\.execute raised ValueError: a bug\n.*hostile\.py.*in raise_bug"),
        ("raise_unspeakable", ToolRaisedError, r"raised _Unspeakable: \(its text cannot be made: RuntimeError\)"),
        ("recurse", ToolRaisedError, r"raised RecursionError: maximum recursion depth exceeded"),
        ("exit_python", ToolContractError, r"^hostile\.execute raised SystemExit: 3$"),
        ("interrupt", ToolContractError, r"^hostile\.execute raised KeyboardInterrupt: $"),
        ("raise_base_exception", ToolContractError, r"^hostile\.execute raised Outrage: no exception$"),
        ("cancel_itself", ToolContractError, r"^hostile\.execute raised CancelledError: $"),
        ("answer_object", ToolContractError, r"^hostile\.execute must return text or a ToolResponse, got object$"),
        ("answer_circle", ToolContractError, r"^hostile\.execute must return text or a ToolResponse, got list$"),
        ("answer_nan", ToolContractError, r"^hostile\.execute returned nan as a reward; a finite number is needed$"),
        (
            "answer_hugely",
            ToolContractError,
            r"^hostile\.execute returned 1000000\d\d bytes; at most 16777216 are allow",
        ),
    ],
)
async def test_what_a_method_raises_or_returns_wrongly_is_that_call_s_alone(
    host: ProcessHost, act: str, error: type[Exception], words: str
) -> None:
    made = await host.create(act, {})
    with pytest.raises(error, match=words):
        await host.execute(made, {"act": act}, {})
    assert await counted(host, made) == "1"
    await host.release(made, {})


@pytest.mark.parametrize(
    ("act", "reply"),
    [
        ("answer_surrogates", ToolReply(text="? and ?", metrics={})),
        ("print_much", ToolReply(text="printed")),
        ("answer_circular_metrics", ToolReply(text="fine")),
    ],
)
async def test_what_can_be_read_is_read(host: ProcessHost, act: str, reply: ToolReply) -> None:
    made = await host.create(act, {})
    answered = await host.execute(made, {"act": act}, {})
    assert (answered.text, answered.reward, answered.stop) == (reply.text, 0.0, False)
    await host.release(made, {})


async def test_every_method_may_fail_and_a_failed_create_or_release_ends_the_process(host: ProcessHost) -> None:
    with pytest.raises(ToolError, match="not today"):
        await host.create("a", {"act": "raise_tool_error"})
    assert host.leaks() == NOTHING_HELD
    await host.create("a", {})
    with pytest.raises(ToolError, match="not today"):
        await host.calc_reward("a", {"act": "raise_tool_error"})
    with pytest.raises(ToolContractError, match=r"hostile\.calc_reward returned <object"):
        await host.calc_reward("a", {"act": "answer_object"})
    assert await host.calc_reward("a", {}) == 0.0
    with pytest.raises(ToolRaisedError, match=r"hostile\.release raised ValueError: a bug"):
        await host.release("a", {"act": "raise_bug"})
    assert not host.is_alive("a")


# Making the class


@pytest.mark.parametrize(
    ("tool", "act", "words"),
    [
        ("NoTool", "hang", r"module 'tools.hostile' has no class 'NoTool'; did you mean"),
        ("UnmakeableTool", "raise_bug", r"(?s)could not be made: ValueError: a bug\nTraceback.*in raise_bug"),
        ("UnmakeableTool", "exit_python", r"(?s)could not be made: SystemExit: 3\nTraceback"),
        (
            "UnmakeableTool",
            "exit_at_once",
            r"process that makes its class ended with exit code 3 before it had made it",
        ),
        ("UnmakeableTool", "segfault", r"process that makes its class was killed by SIGSEGV before it had made it"),
    ],
)
async def test_a_class_that_cannot_be_made_says_why(tool: str, act: str, words: str) -> None:
    async with opened(tool, {"act": act}) as host:
        with pytest.raises(ConfigError, match=r"^tool 'hostile': .*" + words if "(?s)" not in words else words):
            await host.create("a", {})
        assert host.nursery_pid is None


async def test_a_class_that_takes_too_long_is_given_up_with_all_it_started() -> None:
    async with opened("UnmakeableTool", {"act": "spawn_endlessly"}, start_timeout_s=3.0) as host:
        with pytest.raises(
            ConfigError, match=r"^tool 'hostile': its class was not made within 3 s; make its constructor"
        ):
            await host.create("a", {})


async def test_a_module_that_is_not_there_is_named() -> None:
    host = ProcessHost(
        name="gone",
        class_path="nowhere.at.All",
        config={},
        tool_schema=None,
        settings=ToolSettings(execution="process"),
    )
    with pytest.raises(ConfigError, match=r"class_name 'nowhere\.at\.All': module 'nowhere\.at' cannot be imported"):
        await host.start()
    await host.aclose()


async def test_threads_of_the_constructor_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="sglang_multiturn"):
        async with opened("ThreadedTool") as host:
            await host.create("a", {})
            assert await counted(host, "a") == "1"
            await host.release("a", {})
    assert [record.getMessage().split(";")[0] for record in caplog.records] == [
        "tool 'hostile': its class started threads (index-refresher), which its instances will not have"
    ]


async def test_a_caller_that_gives_up_does_not_stop_the_start() -> None:
    async with opened() as host:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await host.create("a", {})
        assert host.leaks() == NOTHING_HELD
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(host.start())
        pid = host.nursery_pid
        await host.start()
        assert host.nursery_pid == pid


# Its end


async def test_a_host_that_is_closed_while_it_starts_leaves_nothing() -> None:
    before = resources()
    host = make_host("UnmakeableTool", {"act": "hang"})
    starting = asyncio.create_task(host.create("a", {}))
    await asyncio.wait({starting}, timeout=0.5)
    await host.aclose()
    await asyncio.wait({starting})
    assert starting.cancelled()
    assert_left_as(before)
    with pytest.raises(ToolDiedError, match="its host was closed"):
        await host.create("a", {})


async def test_closing_ends_instances_that_nobody_released() -> None:
    before = resources()
    host = make_host()
    for name in "ab":
        await host.create(name, {})
    pids = [(await host.execute("a", {"act": "leave_daemons"}, {})).metrics["pids"]]
    assert host.leaks() == HostLeaks(live_instances=2, live_processes=2)
    await host.aclose()
    assert host.leaks() == NOTHING_HELD
    assert [pid for pid in pids[0] if psutil.pid_exists(pid)] == []
    assert_left_as(before)
    await host.aclose()


async def test_a_host_without_use_holds_nothing() -> None:
    before = resources()
    host = make_host()
    await host.aclose()
    assert_left_as(before)


def test_a_host_works_on_an_event_loop_of_another_thread() -> None:
    said: list[str] = []

    async def use() -> None:
        async with opened() as host:
            await host.create("a", {})
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5):
                    await host.execute("a", {"act": "spin"}, {})
            assert not host.is_alive("a")
            await host.create("b", {})
            said.append(await counted(host, "b"))
            await host.release("b", {})

    thread = threading.Thread(target=lambda: asyncio.run(use()))
    thread.start()
    thread.join(PATIENCE_S)
    assert said == ["1"]
    assert not thread.is_alive()


async def test_many_instances_at_once(host: ProcessHost) -> None:

    async def conversation(name: str) -> tuple[str, str, float]:
        await host.create(name, {})
        said = await counted(host, name), await counted(host, name), await host.calc_reward(name, {})
        await host.release(name, {})
        return said

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(conversation(f"r{number}")) for number in range(48)]
    assert [task.result() for task in tasks] == [("1", "2", 2.0)] * 48
    assert os.getpid() != host.nursery_pid
