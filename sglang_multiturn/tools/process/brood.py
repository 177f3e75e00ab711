"""The instances of a nursery: forked, watched, killed with all they started, and reaped."""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import NoReturn

from sglang_multiturn.schemas import plain_text
from sglang_multiturn.tools.base import Tool
from sglang_multiturn.tools.process import instance as instance_process
from sglang_multiturn.tools.process import trees
from sglang_multiturn.tools.process.messages import Ended, Load, encode
from sglang_multiturn.tools.process.outbox import Outbox
from sglang_multiturn.tools.process.output import OutputTail

_WATCH_EVERY_S = 0.05
_WATCH_SHARE = 0.1
"""Most of the nursery's time that it may spend on measuring."""
_KILL_EVERY_S = 0.005
_KILL_SHARE = 0.2
_END_PATIENCE_S = 5.0
"""A process may hang in the kernel, or hold much memory: nobody waits longer than this after its SIGKILL."""
_MOST_ZOMBIES = 1024
_IDLE_S = 3600.0
_MIB = 1024 * 1024


@dataclass(slots=True)
class _Instance:
    number: int
    pid: int
    output: OutputTail
    stopped: str | None = None
    """Why the nursery ended it; None while it has not."""
    status: int | None = None
    """Exit status, once it was waited for."""
    ending_since: float | None = None


class Brood:
    """All processes below the nursery."""

    def __init__(self, tool: Tool, load: Load, outbox: Outbox) -> None:
        self._tool = tool
        self._load = load
        self._outbox = outbox
        self._wanted: dict[int, int] = {}
        """Sockets of the instances that are still to be forked, by number."""
        self._instances: dict[int, _Instance] = {}
        self._private: list[socket.socket] = []
        self._max_bytes = load.max_memory_mb * _MIB
        # What the constructor started belongs to the tool, and ends with the nursery.
        self._left_alone = set(trees.children_of(os.getpid()))
        self._next_watch = 0.0
        self._next_kill = 0.0
        self._next_look = 0.0
        self._looks = 0

    def keep_from_children(self, *sockets: socket.socket) -> None:
        """What no instance may have."""
        self._private += sockets

    @property
    def patience_s(self) -> float:
        """How long nothing needs to be looked after, if nothing happens."""
        if self._wanted:
            return 0.0
        if not self._instances:
            return _IDLE_S
        due = min(self._next_watch, self._next_kill) if self._ending() else self._next_watch
        return max(0.0, due - time.monotonic())

    def spawn(self, number: int, sock: int | None) -> None:
        """Fork, before long, an instance that serves the socket `sock`; None says that none arrived."""
        if sock is None:
            self._report(number, "was not started: the nursery has too many files open; raise `ulimit -n`")
        else:
            os.set_inheritable(sock, False)
            self._wanted[number] = sock

    def kill(self, number: int, why: str) -> None:
        """End an instance; nothing if it has ended already."""
        if (sock := self._wanted.pop(number, None)) is not None:
            os.close(sock)
            self._report(number, why)
            return
        self._reap()  # one that has just ended by itself is reported as such
        instance = self._instances.get(number)
        if instance is not None and instance.ending_since is None:
            _doom(instance, why)

    def look_after(self) -> None:
        """Whatever is due now: measure the living, end the doomed, report the dead, fork one that is wanted.

        One at a time: with much memory to share a fork takes long, and orders to kill are not to wait for many.
        """
        self._reap()
        if self._instances and time.monotonic() >= self._next_watch:
            self._watch()
        if ending := self._ending():
            if time.monotonic() >= self._next_kill:
                self._kill_all(ending)
            self._finish_ended(ending)
        if self._wanted:
            number = next(iter(self._wanted))
            self._fork(number, self._wanted.pop(number))

    def end_all(self) -> None:
        """Kill everything below the nursery, and wait for its end."""
        self._left_alone.clear()
        deadline = time.monotonic() + _END_PATIENCE_S
        while (children := trees.children_of(os.getpid())) and time.monotonic() < deadline:
            for pid in children:
                trees.kill_tree(pid)
            time.sleep(_KILL_EVERY_S)
            self._reap()

    def _fork(self, number: int, sock: int) -> None:
        output: OutputTail | None = None
        nursery_pid = os.getpid()
        try:
            output = OutputTail()
            pid = os.fork()
        except OSError as error:
            self._report(number, f"was not started: {error.strerror}")
            if output is not None:
                output.close_writing()
                output.close()
        else:
            if pid == 0:
                self._become_instance(sock, output, nursery_pid)
            output.close_writing()
            self._instances[number] = _Instance(number, pid, output)
        finally:
            os.close(sock)

    def _become_instance(self, sock: int, output: OutputTail, nursery_pid: int) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            for signum in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(signum, signal.SIG_DFL)
            for private in self._private:
                private.close()
            for other in self._instances.values():
                other.output.leave()
            for wanted in self._wanted.values():
                os.close(wanted)
            output.leave()
            max_memory_mb = self._load.max_memory_mb
            worker = socket.socket(fileno=sock)
            instance_process.run(self._tool, self._load.name, worker, output.writing, nursery_pid, max_memory_mb)
        finally:
            os._exit(1)

    def _watch(self) -> None:
        started = time.monotonic()
        origin = trees.read_process(os.getpid())
        assert origin is not None
        suspects = []
        for instance in self._instances.values():
            instance.output.drain()
            if instance.ending_since is not None:
                continue
            tree = trees.tree_of(instance.pid)
            if excess := self._excess(tree, origin):
                _doom(instance, excess)
            elif sum(process.rss_bytes for process in tree) > self._max_bytes:
                suspects.append((instance, tree))
        self._kill_strays()
        ended = time.monotonic()
        self._next_watch = ended + max(_WATCH_EVERY_S, (ended - started) / _WATCH_SHARE)
        if suspects and ended >= self._next_look:
            self._look_closely(suspects, origin)

    def _look_closely(self, suspects: list[tuple[_Instance, list[trees.Process]]], origin: trees.Process) -> None:
        """Instances may have overwritten what they inherited, which takes time to tell: one is looked at in turn."""
        started = time.monotonic()
        instance, tree = suspects[self._looks % len(suspects)]
        if excess := self._memory_excess(tree, origin):
            _doom(instance, excess)
        self._looks += 1
        ended = time.monotonic()
        self._next_look = ended + (ended - started) / _WATCH_SHARE

    def _excess(self, tree: list[trees.Process], origin: trees.Process) -> str | None:
        """Which limit a tree breaks, in words."""
        most = self._load.max_processes
        living = sum(not process.is_zombie for process in tree)
        if living > most:
            return f"was stopped: it ran {living} processes at a time; max_processes allows {most}"
        if len(tree) - living > _MOST_ZOMBIES:
            return f"was stopped: it started more than {_MOST_ZOMBIES} processes and did not wait for their end"
        return self._memory_excess(tree, origin) if trees.grown_bytes(tree, origin) > self._max_bytes else None

    def _memory_excess(self, tree: list[trees.Process], origin: trees.Process) -> str | None:
        held = trees.held_bytes(tree, origin)
        if held <= self._max_bytes:
            return None
        return f"was stopped: it held {held // _MIB} MB of memory; max_memory_mb allows {self._load.max_memory_mb}"

    def _ending(self) -> list[_Instance]:
        return [instance for instance in self._instances.values() if instance.ending_since is not None]

    def _kill_all(self, ending: list[_Instance]) -> None:
        """Kill what is ending: again and again, since what is started meanwhile is seen only when its parent is gone."""
        started = time.monotonic()
        for instance in ending:
            if instance.status is None:
                trees.kill_tree(instance.pid)
        self._kill_strays()
        ended = time.monotonic()
        self._next_kill = ended + max(_KILL_EVERY_S, (ended - started) / _KILL_SHARE)

    def _finish_ended(self, ending: list[_Instance]) -> None:
        """Report those of which nothing is left, and those that take too long."""
        self._reap()
        strays = self._strays()
        for instance in ending:
            assert instance.ending_since is not None
            if instance.status is not None and not strays:
                self._finish(instance)
            elif time.monotonic() - instance.ending_since > _END_PATIENCE_S:
                self._left_alone |= strays if instance.status is not None else {instance.pid, *strays}
                self._finish(instance)

    def _finish(self, instance: _Instance) -> None:
        del self._instances[instance.number]
        self._report(instance.number, self._how(instance), instance.output.close())

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._left_alone.discard(pid)
            for instance in self._instances.values():
                if instance.pid == pid and instance.status is None:
                    instance.status = status
                    instance.ending_since = instance.ending_since or time.monotonic()

    def _kill_strays(self) -> None:
        for pid in self._strays():
            trees.kill_tree(pid)

    def _strays(self) -> set[int]:
        """Children that are no instances: what an instance started and did not outlive."""
        own = {instance.pid for instance in self._instances.values() if instance.status is None}
        return set(trees.children_of(os.getpid())) - own - self._left_alone

    def _how(self, instance: _Instance) -> str:
        if instance.status is None:
            return f"{instance.stopped}; it has not ended {_END_PATIENCE_S:g} s after it was killed"
        code = os.waitstatus_to_exitcode(instance.status)
        if code == -signal.SIGKILL:
            return instance.stopped or "was killed by SIGKILL, by its own doing or by a system short of memory"
        if code == instance_process.OUT_OF_MEMORY:
            return f"ran out of memory; max_memory_mb allows {self._load.max_memory_mb}"
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
            return f"was killed by {name}"
        return f"ended with exit code {code}"

    def _report(self, number: int, how: str, output: str = "") -> None:
        self._outbox.send(encode(Ended(number=number, how=how, output=plain_text(output))))


def _doom(instance: _Instance, why: str) -> None:
    instance.stopped = why
    instance.ending_since = time.monotonic()
