"""Trees of processes, read from /proc: who belongs to one, how much memory it holds, and its end.

Every signal goes to a process that was identified by its id and start time, through a handle that no other process can
take over. Signals are sent to nothing but descendants of the caller, or processes that carry a mark of its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

MARK = "SGLANG_MULTITURN_NURSERY"
"""Environment variable that every process below a nursery carries; its value is the nursery's own."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ZOMBIE = "Z"
_MOST_ROUNDS = 100


class Process(NamedTuple):
    """One process at one moment."""

    pid: int
    state: str
    start_ticks: int
    """Tells it from a later one of the same pid."""
    rss_bytes: int
    start_stack: int
    """Address that a forked process has from its parent, and that another program has anew."""

    @property
    def is_zombie(self) -> bool:
        """Whether it has ended and its parent has not asked for its status yet."""
        return self.state == _ZOMBIE


def read_process(pid: int) -> Process | None:
    """None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field is the program's name in brackets, which may hold spaces and brackets itself.
    fields = stat.rpartition(b")")[2].split()
    return Process(
        pid=pid,
        state=fields[0].decode(),
        start_ticks=int(fields[19]),
        rss_bytes=int(fields[21]) * _PAGE_BYTES,
        start_stack=int(fields[25]),
    )


def children_of(pid: int) -> list[int]:
    """Direct children, of whichever of its threads; complete when the process is stopped."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_bytes().split())
    return found


def tree_of(root: int) -> list[Process]:
    """A process and all its descendants, parents first; empty when it is gone."""
    found: dict[int, Process] = {}
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        if pid not in found and (process := read_process(pid)) is not None:
            found[pid] = process
            waiting += children_of(pid)
    return list(found.values())


def grown_bytes(processes: Iterable[Process], origin: Process) -> int:
    """What the processes hold beyond what they inherited. Cheap, and not exact.

    Inherited pages that were copied since are not seen; pages that the processes share are counted for each.

    Args:
        processes: A tree.
        origin: The process that forked the tree's root.
    """
    return sum(
        max(0, process.rss_bytes - (origin.rss_bytes if process.start_stack == origin.start_stack else 0))
        for process in processes
    )


def held_bytes(processes: Iterable[Process], origin: Process) -> int:
    """What the processes hold together, each page counted once, but for what they share with `origin`.

    Exact, and slow: about 10 ms for each GB. Arguments as for `grown_bytes`.
    """
    _, shared = _private_and_proportional_bytes(origin.pid)
    held = 0
    for process in processes:
        private, proportional = _private_and_proportional_bytes(process.pid)
        held += max(private, proportional - shared)
    return held


def _private_and_proportional_bytes(pid: int) -> tuple[int, int]:
    """Pages of its own, and all pages, each divided by the number of processes that share it."""
    private = proportional = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            key, kib, *_ = line.split()
            if key in ("Private_Clean:", "Private_Dirty:"):
                private += int(kib) * 1024
            elif key == "Pss:":
                proportional = int(kib) * 1024
    return private, proportional


def kill_tree(root: int) -> None:
    """Stop a tree until nothing in it can start another process, then kill all of it. Returns without waiting.

    What is started in between nevertheless loses its parent and is adopted by the caller, who kills it as a tree of its
    own.

    Args:
        root: A child of the caller that has not been waited for.
    """
    if root <= 1:
        raise ValueError(f"process {root} is nobody's child")
    group = root if _leads_group(root) else None
    _send_group(group, signal.SIGSTOP)
    stopped: dict[tuple[int, int], Process] = {}
    for _ in range(_MOST_ROUNDS):
        found = [process for process in tree_of(root) if (process.pid, process.start_ticks) not in stopped]
        if not found:
            break
        for process in found:
            send(process, signal.SIGSTOP)
            stopped[process.pid, process.start_ticks] = process
    _send_group(group, signal.SIGKILL)
    for process in stopped.values():
        send(process, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        os.kill(root, signal.SIGKILL)  # also when /proc cannot be read


def kill_marked(mark: str) -> bool:
    """Kill every process that carries `mark` in its environment; whether there was one. Returns without waiting."""
    found = list(_marked(mark))
    for process in found:
        send(process, signal.SIGKILL)
    return bool(found)


def send(process: Process, signum: signal.Signals) -> None:
    """Signal exactly this process; nothing if it is gone or this one may not."""
    if process.pid <= 1 or process.pid == os.getpid():
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        handle = os.pidfd_open(process.pid)
        try:
            now = read_process(process.pid)
            if now is not None and now.start_ticks == process.start_ticks:
                signal.pidfd_send_signal(handle, signum)
        finally:
            os.close(handle)


def _leads_group(pid: int) -> bool:
    """Whether its group is its own. A child that was not waited for keeps its id, and with it the group's."""
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


def _send_group(group: int | None, signum: signal.Signals) -> None:
    if group is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signum)


def _marked(mark: str) -> Iterator[Process]:
    entry = f"{MARK}={mark}".encode()
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        # Before its environment is read, so that both are of one process.
        process = read_process(int(name))
        with contextlib.suppress(OSError):
            if process is not None and entry in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                yield process
