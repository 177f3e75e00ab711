"""Tools that do to their process, and to those around it, whatever can be done; and one that just counts.

`HostileTool` counts its calls until one says otherwise: `{"act": "spin"}`. So an instance can be in the middle of its
life, and others of the same class misbehave beside it. The other classes misbehave when they are made.
"""

# Its coroutines block on purpose.
# ruff: noqa: ASYNC220, ASYNC222, ASYNC230, ASYNC240, ASYNC251, T201

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_multiturn import BaseTool, ToolError
from sglang_multiturn.schemas import FunctionSchema, ToolSchema

FOREVER_S = 3600.0
RUN_MARK = "SGLANG_MULTITURN_TEST_RUN"
SLEEP = ("sleep", os.environ.get(RUN_MARK, "3600"))
"""A process for an hour, known by its argument: no other run of the tests has the same."""
HUGE_CHARS = 100_000_000
_MIB = 1024 * 1024


class CountingTool(BaseTool):
    """Remembers how often each instance was called. config: log_path, which takes a line for each release."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema or ToolSchema(function=FunctionSchema(name="counting")))
        self.made_by = os.getpid()
        self.counts: dict[str, int] = {}
        self.given: dict[str, Any] = {}

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None
        self.counts[instance_id] = kwargs.get("start", 0)
        self.given = kwargs
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.counts[instance_id] += 1
        return str(self.counts[instance_id]), 0.5, {"pid": os.getpid()}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.counts[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.counts[instance_id]
        if path := self.config.get("log_path"):
            with Path(path).open("a") as log:
                log.write(f"{instance_id} released\n")


class HostileTool(CountingTool):
    """Counts, unless the call says how to misbehave: the name of a function below. `create` and `release` do as well."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        await _act(kwargs.pop("act", None))
        return await super().create(instance_id, **kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        result = await _act(parameters.get("act"))
        return await super().execute(instance_id, parameters, **kwargs) if result is None else result

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        result = await _act(kwargs.get("act"))
        return await super().calc_reward(instance_id) if result is None else result

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        await _act(kwargs.get("act"))
        await super().release(instance_id)


class PlainTool(CountingTool):
    """Its methods are no coroutines."""

    def create(self, instance_id: str | None = None, **kwargs: Any) -> str:  # type: ignore[override]
        assert instance_id is not None
        self.counts[instance_id] = 0
        return instance_id

    def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:  # type: ignore[override]
        self.counts[instance_id] += 1
        return str(self.counts[instance_id])

    def calc_reward(self, instance_id: str, **kwargs: Any) -> float:  # type: ignore[override]
        return float(self.counts[instance_id])

    def release(self, instance_id: str, **kwargs: Any) -> None:  # type: ignore[override]
        del self.counts[instance_id]


class EchoingTool(CountingTool):
    """Answers with what it was given, as Python writes it."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return repr((instance_id, parameters, kwargs, self.given, self.config, self.tool_schema.for_template()))


class LoadedTool(HostileTool):
    """Holds an index of `config["index_mb"]` that all instances share, and a process that was started with it."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        self.index = _touched(config["index_mb"])
        self.server = subprocess.Popen(SLEEP)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if parameters.get("act") == "overwrite":
            shared = (ctypes.c_char * len(self.index)).from_buffer(self.index)
            ctypes.memset(shared, ord("2"), len(self.index))
            await hang()
        if parameters.get("act") == "serve":
            return str(Path(f"/proc/{self.server.pid}").exists())
        if parameters.get("act") is not None:
            return await super().execute(instance_id, parameters, **kwargs)
        return str(sum(self.index[:10]))


class ThreadedTool(CountingTool):
    """Starts a thread when it is made."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        threading.Thread(target=time.sleep, args=(FOREVER_S,), name="index-refresher", daemon=True).start()


class UnmakeableTool(CountingTool):
    """Fails to be made in the way that `config["act"]` names."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchema | None = None) -> None:
        super().__init__(config, tool_schema)
        asyncio.run(_act(config["act"]))


async def _act(name: str | None) -> Any:
    return None if name is None else await ACTS[name]()


# Two calls that need each other

_met = asyncio.Event()


async def wait_for_another() -> str:
    await _met.wait()
    return "met"


async def meet_another() -> str:
    _met.set()
    return "met"


# Never coming back


async def hang() -> None:
    await asyncio.Event().wait()


async def block() -> None:
    time.sleep(FOREVER_S)


async def spin() -> None:
    while True:
        pass


async def ignore_cancellation() -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(FOREVER_S)


async def ignore_signals() -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(signum, signal.SIG_IGN)
    while True:
        time.sleep(FOREVER_S)


async def stop_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


async def say_so_and_spin() -> None:
    os.write(1, b"spinning\n")
    await spin()


async def print_endlessly() -> None:
    while True:
        for descriptor in (1, 2):
            os.write(descriptor, os.urandom(4096))


# Taking too much


async def fork_endlessly() -> None:
    while True:  # one after the other
        _forked(lambda: time.sleep(FOREVER_S))
        time.sleep(0.002)


async def spawn_endlessly() -> None:
    while True:
        subprocess.Popen(SLEEP, start_new_session=True, env={})


async def allocate_endlessly() -> None:
    kept = []
    while True:
        kept.append(_touched(16))


async def allocate_in_children() -> None:
    for _ in range(8):
        _forked(lambda: (_touched(100), time.sleep(FOREVER_S)))
    await asyncio.Event().wait()


# Leaving something behind


async def leave_daemons() -> tuple[str, float, dict[str, Any]]:
    """Three processes that nobody waits for, in sessions of their own; one of them of another program."""
    reading, writing = os.pipe()
    for work in (_sleep_without_signals, _sleep_without_signals, _become_sleep):
        os.waitpid(_forked(lambda work=work: _daemonise(writing, work)), 0)
    pids = os.read(reading, 1000).decode().split()
    while len(pids) < 3:
        pids += os.read(reading, 1000).decode().split()
    return "left", 0.0, {"pids": [int(pid) for pid in pids]}


async def leave_daemons_and_spin() -> None:
    await leave_daemons()
    await spin()


async def leave_daemons_and_die() -> None:
    await leave_daemons()
    os._exit(5)


# Ending


async def exit_python() -> None:
    sys.exit(3)


async def exit_at_once() -> None:
    os._exit(3)


async def interrupt() -> None:
    raise KeyboardInterrupt


class Outrage(BaseException):
    """Neither an Exception nor an exit."""


async def raise_base_exception() -> None:
    raise Outrage("no exception")


async def cancel_itself() -> None:
    raise asyncio.CancelledError


async def recurse() -> None:
    await recurse()


async def segfault() -> None:
    ctypes.string_at(0)


async def abort() -> None:
    os.write(2, b"terminate called after throwing an instance of 'Index'\n")
    os.abort()


async def kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def kill_nursery() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    await asyncio.Event().wait()


async def stop_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.Event().wait()


# Answering


async def raise_bug() -> None:
    raise ValueError("a bug")


class _Unspeakable(Exception):  # noqa: N818 - a name is the least of its faults
    def __str__(self) -> str:
        raise RuntimeError("no words")


async def raise_unspeakable() -> None:
    raise _Unspeakable


async def raise_tool_error() -> None:
    raise ToolError("not today")


async def answer_object() -> Any:
    return object()


async def answer_circle() -> Any:
    circle: list[Any] = []
    circle.append(circle)
    return circle


async def answer_circular_metrics() -> Any:
    circle: dict[str, Any] = {}
    circle["self"] = circle
    return "fine", 0.0, circle


async def answer_nan() -> Any:
    return "fine", float("nan"), {}


async def answer_hugely() -> Any:
    return "x" * HUGE_CHARS


async def answer_surrogates() -> Any:
    return "\ud800 and \udfff", 0.0, {"\ud800": "\udfff"}


async def close_everything() -> None:
    os.closerange(0, 4096)


async def write_rubbish() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), b"\x00\x00\x00\x02{}")
    await asyncio.Event().wait()


async def write_endless_length() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.write(int(name), b"\xff" * 1000)
    await asyncio.Event().wait()


async def print_much() -> Any:
    for _ in range(1000):
        print("x" * 999)
    return "printed"


async def draw_numbers() -> Any:
    return str(random.random())


async def list_descriptors() -> Any:
    """What kinds there are."""
    kinds = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that read the folder
            kinds.append(os.readlink(f"/proc/self/fd/{name}").split(":")[0])
    return " ".join(sorted(kinds))


ACTS: dict[str, Callable[[], Any]] = {
    act.__name__: act
    for act in (
        *(wait_for_another, meet_another, say_so_and_spin),
        *(hang, block, spin, ignore_cancellation, ignore_signals, stop_itself, print_endlessly),
        *(fork_endlessly, spawn_endlessly, allocate_endlessly, allocate_in_children),
        *(leave_daemons, leave_daemons_and_spin, leave_daemons_and_die),
        *(exit_python, exit_at_once, interrupt, raise_base_exception, cancel_itself, recurse, segfault, abort),
        *(kill_itself, kill_nursery, stop_loop),
        *(raise_bug, raise_unspeakable, raise_tool_error),
        *(answer_object, answer_circle, answer_circular_metrics, answer_nan, answer_hugely, answer_surrogates),
        *(close_everything, write_rubbish, write_endless_length, print_much, draw_numbers, list_descriptors),
    )
}


def _touched(megabytes: int) -> bytearray:
    """Memory in which every page was written to."""
    return bytearray(b"1") * (megabytes * _MIB)


def _forked(work: Callable[[], Any]) -> int:
    """The pid of a child that does this and ends."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def _daemonise(report_to: int, work: Callable[[], Any]) -> None:
    def daemon() -> None:
        os.setsid()
        os.write(report_to, f"{os.getpid()} ".encode())
        work()

    _forked(daemon)


def _sleep_without_signals() -> None:
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    time.sleep(FOREVER_S)


def _become_sleep() -> None:
    os.execvp("sleep", SLEEP)
