"""A tool's process may do what it likes: it comes to its end with all that it started, and nothing else does."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import psutil
import pytest
import pytest_asyncio
from tools.process_support import NOTHING_HELD, PATIENCE_S, make_host, marked, opened

from sglang_multiturn.errors import ToolDiedError
from sglang_multiturn.tools.host import HostLeaks
from sglang_multiturn.tools.process import nursery_process, trees
from sglang_multiturn.tools.process.host import ProcessHost

LIMITS = {"max_memory_mb": 256, "max_processes": 16}
SOON_S = 0.5
"""How long a call gets that would never end."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def host() -> AsyncIterator[ProcessHost]:
    host = make_host(**LIMITS)
    yield host
    assert host.leaks() == NOTHING_HELD
    await host.aclose()


class Bystander:
    """An instance in the middle of its life, which must not notice."""

    def __init__(self, host: ProcessHost) -> None:
        self._host = host

    async def __aenter__(self) -> None:
        await self._host.create("bystander", {"start": 100})
        assert (await self._host.execute("bystander", {}, {})).text == "101"
        self._tree = children(self._host)

    async def __aexit__(self, *exc_info: object) -> None:
        assert (await self._host.execute("bystander", {}, {})).text == "102"
        assert children(self._host) == self._tree
        assert self._host.leaks() == HostLeaks(live_instances=1, live_processes=1)
        await self._host.create("next", {})
        assert (await self._host.execute("next", {}, {})).text == "1"
        await self._host.release("next", {})
        assert await self._host.calc_reward("bystander", {}) == 102.0
        await self._host.release("bystander", {})


def children(host: ProcessHost) -> list[psutil.Process]:
    assert host.nursery_pid is not None
    return psutil.Process(host.nursery_pid).children(recursive=True)


# What does not end


@pytest.mark.parametrize(
    "act",
    """hang block spin ignore_cancellation ignore_signals stop_itself print_endlessly leave_daemons_and_spin""".split(),
)
async def test_a_call_that_never_ends_is_killed_with_its_process_when_it_is_cancelled(
    host: ProcessHost, act: str
) -> None:
    async with Bystander(host):
        await host.create("a", {})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SOON_S):
                await host.execute("a", {"act": act}, {})
        assert not host.is_alive("a")
        with pytest.raises(ToolDiedError, match=r"there is no living instance 'a'"):
            await host.execute("a", {}, {})


@pytest.mark.parametrize("verb", ["create", "calc_reward", "release"])
async def test_the_other_methods_are_cancelled_likewise(host: ProcessHost, verb: str) -> None:
    async with Bystander(host):
        if verb != "create":
            await host.create("a", {})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SOON_S):
                await getattr(host, verb)("a", {"act": "spin"})
        assert not host.is_alive("a")


async def test_other_calls_of_a_killed_instance_say_so(host: ProcessHost) -> None:
    async with Bystander(host):
        await host.create("a", {})
        waiting = asyncio.create_task(host.execute("a", {"act": "hang"}, {}))
        cancelled = asyncio.create_task(host.execute("a", {"act": "hang"}, {}))
        await asyncio.wait({waiting}, timeout=SOON_S)
        cancelled.cancel()
        await asyncio.wait({waiting, cancelled})
        assert cancelled.cancelled()
        assert str(waiting.exception()) == "tool 'hostile': its process was stopped with a call that was cancelled"
        assert isinstance(waiting.exception(), ToolDiedError)


async def test_a_second_cancellation_does_not_save_the_process(host: ProcessHost) -> None:
    async with Bystander(host):
        await host.create("a", {})
        call = asyncio.create_task(host.execute("a", {"act": "spin"}, {}))
        await asyncio.wait({call}, timeout=SOON_S)
        call.cancel()
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        assert call.cancelled()
        assert not host.is_alive("a")
        while host.leaks().live_processes > 1:  # noqa: ASYNC110 - nobody waits for it any more: there is no event
            await asyncio.sleep(0.01)


# What takes too much, or ends


@pytest.mark.parametrize(
    ("act", "how"),
    [
        ("fork_endlessly", r"was stopped: it ran \d+ processes at a time; max_processes allows 16"),
        ("spawn_endlessly", r"was stopped: it ran \d+ processes at a time; max_processes allows 16"),
        ("allocate_endlessly", r"(ran out of memory|was stopped: it held \d+ MB of memory); max_memory_mb allows 256"),
        ("allocate_in_children", r"was stopped: it held \d+ MB of memory; max_memory_mb allows 256"),
        ("answer_hugely", r"ran out of memory; max_memory_mb allows 256"),
        ("exit_at_once", r"ended with exit code 3"),
        ("leave_daemons_and_die", r"ended with exit code 5"),
        ("segfault", r"was killed by SIGSEGV"),
        ("abort", r"was killed by SIGABRT"),
        ("kill_itself", r"was killed by SIGKILL, by its own doing or by a system short of memory"),
        ("stop_loop", r"ended with exit code 1"),
        ("close_everything", r"(was stopped: it closed its connection to the worker|ended with exit code 1)"),
        ("write_rubbish", r"was stopped: it sent what is no reply"),
        ("write_endless_length", r"was stopped: it sent what is no reply"),
    ],
)
async def test_a_process_that_takes_too_much_or_dies_is_gone_with_all_it_started(
    host: ProcessHost, act: str, how: str
) -> None:
    async with Bystander(host):
        await host.create("a", {})
        with pytest.raises(ToolDiedError) as died:
            async with asyncio.timeout(PATIENCE_S):
                await host.execute("a", {"act": act}, {})
        assert re.fullmatch(rf"tool 'hostile': its process {how}", str(died.value))
        assert not host.is_alive("a")


async def test_what_a_dying_process_said_is_in_the_notes(host: ProcessHost) -> None:
    await host.create("a", {})
    with pytest.raises(ToolDiedError) as died:
        await host.execute("a", {"act": "segfault"}, {})
    (note,) = died.value.__notes__
    assert note.startswith("The last that it printed:\nFatal Python error: Segmentation fault\n")
    assert "hostile.py" in note
    await host.create("a", {})
    with pytest.raises(ToolDiedError) as died:
        await host.execute("a", {"act": "abort"}, {})
    assert "terminate called after throwing an instance of 'Index'" in died.value.__notes__[0]


async def test_daemons_live_until_the_release_and_no_longer(host: ProcessHost) -> None:
    async with Bystander(host):
        await host.create("a", {})
        pids = (await host.execute("a", {"act": "leave_daemons"}, {})).metrics["pids"]
        assert len({os.getsid(pid) for pid in pids}) == 3
        assert (await host.execute("a", {}, {})).text == "1"
        assert all(psutil.pid_exists(pid) for pid in pids)
        await host.release("a", {})
        assert not any(psutil.pid_exists(pid) for pid in pids)


# Nursery and worker


async def test_a_killed_nursery_takes_its_instances_along_and_another_one_takes_over() -> None:
    async with opened() as host:
        for name in "ab":
            await host.create(name, {})
        pids = (await host.execute("b", {"act": "leave_daemons"}, {})).metrics["pids"]
        waiting = asyncio.create_task(host.execute("b", {"act": "hang"}, {}))
        first = host.nursery_pid
        with pytest.raises(
            ToolDiedError, match="its process was lost with the tool's nursery, which was killed by SIGKILL"
        ):
            await host.execute("a", {"act": "kill_nursery"}, {})
        await asyncio.wait({waiting})
        assert isinstance(waiting.exception(), ToolDiedError)
        async with asyncio.timeout(PATIENCE_S):  # they were killed; the system may take a moment to end them
            while [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert not host.is_alive("a")
        assert host.nursery_pid is None
        await host.create("a", {})
        assert (await host.execute("a", {}, {})).text == "1"
        assert host.nursery_pid not in (None, first)
        await host.release("a", {})


async def test_a_nursery_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nursery_process, "KILL_PATIENCE_S", 0.5)
    async with opened() as host:
        await host.create("a", {})
        assert host.nursery_pid is not None
        os.kill(host.nursery_pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SOON_S):
                await host.execute("a", {"act": "spin"}, {})
        assert host.nursery_pid is None
        await host.create("a", {})
        await host.release("a", {})


WORKER = """
import asyncio, sys
sys.path.insert(0, {here!r})
from tools.process_support import make_host

async def main():
    host = make_host({tool!r}, {{"act": "say_so_and_spin"}})
    async with asyncio.TaskGroup() as group:
        for act in ("spin", "leave_daemons_and_spin", "ignore_signals", "fork_endlessly", "hang"):
            await host.create(act, {{}})
            group.create_task(host.execute(act, {{"act": act}}, {{}}))
        await host.create("last", {{}})
        await host.execute("last", {{"act": "leave_daemons"}}, {{}})
        print("running", flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("tool", "said", "processes"),
    [("HostileTool", "running", 1 + 1 + 6 + 6), ("UnmakeableTool", "spinning", 1 + 1)],
    ids=["while calls run", "while the class is made"],
)
async def test_when_the_worker_is_killed_no_process_stays(tool: str, said: str, processes: int) -> None:
    mark = uuid4().hex
    worker = subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", WORKER.format(here=str(Path(__file__).parent.parent), tool=tool)],
        stdout=subprocess.PIPE,
        env=os.environ | {"WORKER_MARK": mark},
        text=True,
    )
    with worker:
        assert worker.stdout is not None
        assert await asyncio.to_thread(worker.stdout.readline) == f"{said}\n"
        assert len(marked("WORKER_MARK", mark)) >= processes - 1  # a daemon may not have changed its program yet
        worker.kill()
    async with asyncio.timeout(PATIENCE_S):
        while alive := marked("WORKER_MARK", mark):
            await asyncio.to_thread(psutil.wait_procs, alive, timeout=PATIENCE_S)


# Signals go nowhere else


def test_a_signal_reaches_no_later_process_of_the_same_id() -> None:
    with subprocess.Popen(["sleep", "3600"]) as sleeper:
        process = trees.read_process(sleeper.pid)
        assert process is not None
        trees.send(process._replace(start_ticks=process.start_ticks - 1), signal.SIGKILL)
        trees.send(process, signal.SIGTERM)
    assert sleeper.returncode == -signal.SIGTERM


@pytest.mark.parametrize("pid", [0, 1, -1])
def test_no_group_and_no_init_can_be_meant(pid: int) -> None:
    with pytest.raises(ValueError, match="nobody's child"):
        trees.kill_tree(pid)
    trees.send(trees.Process(pid=pid, state="S", start_ticks=0, rss_bytes=0, start_stack=0), signal.SIGKILL)


def test_only_what_carries_the_mark_is_found_by_it() -> None:
    mark = uuid4().hex
    with (
        subprocess.Popen(["sleep", "3600"], env={trees.MARK: mark}) as ours,
        subprocess.Popen(["sleep", "3600"], env={trees.MARK: mark + "0"}) as theirs,
    ):
        assert trees.kill_marked(mark)
        assert ours.wait() == -signal.SIGKILL
        assert not trees.kill_marked(mark)
        assert theirs.poll() is None
        theirs.terminate()
