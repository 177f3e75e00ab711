"""The nursery: `python -m sglang_multiturn.tools.process.nursery FD PARENT_PID`, one for each tool of a worker process.

It makes the tool once, and forks a process for each instance, which shares the tool's memory until it writes to it. It
stays single-threaded, runs no code of the tool's after the tool is made, and never waits for an instance. Invariants:
its only children are instances, and processes that the tool's constructor started; it ends with its worker, and nothing
that it started lives longer than it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

from sglang_multiturn.errors import ConfigError
from sglang_multiturn.schemas import ToolSchema, plain_text
from sglang_multiturn.tools.base import Tool
from sglang_multiturn.tools.process import linux
from sglang_multiturn.tools.process.brood import Brood
from sglang_multiturn.tools.process.messages import (
    LOAD,
    MAX_PACKET_BYTES,
    ORDER,
    Load,
    Loaded,
    NotLoaded,
    Spawn,
    encode,
)
from sglang_multiturn.tools.process.outbox import Outbox
from sglang_multiturn.tools.signatures import takes_agent_data
from sglang_multiturn.tools.tool_classes import make_tool

_IDLE_S = 1.0
_REASON_CHARS = 8_000


def main() -> int:
    """Make the tool that standard input describes, then serve until the worker is done or gone."""
    control, worker_pid = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    control.set_inheritable(False)
    linux.die_with_parent(worker_pid)
    linux.adopt_orphans()
    outbox = Outbox(control)
    try:
        load = LOAD.validate_json(sys.stdin.buffer.read())
        _close_stdin()
        tool = _make_tool(load)
    except BaseException as error:  # noqa: BLE001 - a constructor may raise anything, SystemExit too
        outbox.send(encode(NotLoaded(reason=_reason(error))))
        return 1
    loaded = Loaded(threads=_other_threads(), takes_agent_data=takes_agent_data(tool.execute))
    Nursery(control, outbox, worker_pid, Brood(tool, load, outbox)).run(loaded)
    return 0


class Nursery:
    """Takes orders, and sees to it that the instances are watched and ended in time."""

    def __init__(self, control: socket.socket, outbox: Outbox, worker_pid: int, brood: Brood) -> None:
        self._control = control
        self._outbox = outbox
        self._worker_pid = worker_pid
        self._brood = brood
        self._ending = False
        self._woken, waking = socket.socketpair()
        for end in (control, self._woken, waking):
            end.setblocking(False)
        brood.keep_from_children(control, self._woken, waking)
        # The handlers do little but wake the loop: SIGCHLD when something has ended, SIGTERM to end everything. A thread
        # of the worker's may have blocked them.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_ending", True))

    def run(self, loaded: Loaded) -> None:
        """Until the worker closes its end of the control socket, or is not the parent any more."""
        linux.outlive_parent()  # from here on this process sees it by itself, and has something to clean up
        self._outbox.send(encode(loaded))
        while not self._ending and os.getppid() == self._worker_pid:
            self._wait()
            self._take_orders()
            self._brood.look_after()
        self._brood.end_all()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN if self._outbox.flush() else select.POLLIN | select.POLLOUT)
        poll.register(self._woken, select.POLLIN)
        poll.poll(1000 * min(self._brood.patience_s, _IDLE_S))
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(MAX_PACKET_BYTES)

    def _take_orders(self) -> None:
        while not self._ending:
            try:
                packet, descriptors, *_ = socket.recv_fds(self._control, MAX_PACKET_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                packet, descriptors = b"", []
            if not packet:
                self._ending = True
                return
            order = ORDER.validate_json(packet)
            if isinstance(order, Spawn):
                self._brood.spawn(order.number, descriptors[0] if descriptors else None)
            else:
                self._brood.kill(order.number, order.why)


def _make_tool(load: Load) -> Tool:
    sys.path[:] = load.sys_path
    schema = None if load.tool_schema is None else ToolSchema.model_validate(load.tool_schema)
    tool = make_tool(load.class_path, load.config, schema, f"tool {load.name!r}")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the constructor may have done anything to them
            stream.flush()  # or every instance would print it again
    gc.collect()
    gc.freeze()  # so that collecting garbage in an instance does not copy what it shares
    return tool


def _close_stdin() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _reason(error: BaseException) -> str:
    said = f"{error}\n" if isinstance(error, ConfigError) else ""
    raised = error.__cause__ if isinstance(error, ConfigError) else error
    where = "" if raised is None else "".join(traceback.format_exception(raised))
    return plain_text(said + where[-_REASON_CHARS:]).rstrip()


def _other_threads() -> list[str]:
    """Names of all threads but this one: Python's own names where it knows them, else the system's."""
    known = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    names = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # it has just ended
            name = known.get(thread) or Path(f"/proc/self/task/{thread}/comm").read_text().strip()
            names += [name] if thread != str(os.getpid()) else []
    return sorted(names)


if __name__ == "__main__":
    code = main()
    # Without exit functions and without waiting for threads: what is left is the tool's, and nobody needs it.
    os._exit(code)
