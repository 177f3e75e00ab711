"""The worker's hold on a nursery: starts it, gives it orders, hears of every end, and leaves nothing of it behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from sglang_multiturn.errors import ConfigError
from sglang_multiturn.tools.process import trees
from sglang_multiturn.tools.process.messages import (
    MAX_PACKET_BYTES,
    REPORT,
    Ended,
    Kill,
    Load,
    Loaded,
    NotLoaded,
    Spawn,
    encode,
)
from sglang_multiturn.tools.process.outbox import Outbox

logger = logging.getLogger(__name__)

CLOSE_PATIENCE_S = 10.0
KILL_PATIENCE_S = 10.0
_EXIT_PATIENCE_S = 1.0
_POLL_S = 0.002
_MOST_ROUNDS = 1000
_PACKAGE_ROOT = Path(__file__).parents[3]


class Spawned(NamedTuple):
    """An instance that was ordered."""

    number: int
    ended: asyncio.Future[Ended]
    """Done when nothing of it is left."""


class NurseryProcess:
    """One started nursery. All methods belong to the event loop that started it."""

    def __init__(self, load: Load) -> None:
        """Start the process, whose loading `loaded` waits for."""
        self._name = load.name
        self._mark = uuid4().hex
        self._numbers = 0
        self._ends: dict[int, asyncio.Future[Ended]] = {}
        self._overdue: dict[int, asyncio.TimerHandle] = {}
        self._loaded: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock.setblocking(False)
        self._outbox = Outbox(self._sock)
        self.is_gone = False
        # -P: a file in the user's working directory must not stand in for a module of ours.
        command = [sys.executable, "-P", "-m", "sglang_multiturn.tools.process.nursery"]
        try:
            with theirs, os.fdopen(os.memfd_create("load"), "w+b") as stdin:
                stdin.write(encode(load))
                stdin.seek(0)
                self._popen = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(os.getpid())],
                    stdin=stdin,
                    env=_environment() | {trees.MARK: self._mark},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except BaseException:
            self._sock.close()
            raise
        # The one task that outlives a call: it reads reports until the nursery's end, and `close` awaits it.
        self._reading = asyncio.create_task(self._read(), name=f"nursery-{load.name}")

    @property
    def pid(self) -> int:
        """The nursery's process id."""
        return self._popen.pid

    async def loaded(self, timeout_s: float) -> Loaded:
        """Wait until the tool was made.

        Raises:
            ConfigError: it could not be made, or not in time; nothing of the nursery is left.
        """
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(self._loaded)
        except TimeoutError:
            await self.close(patience_s=0.0)
            raise ConfigError(
                f"tool {self._name!r}: its class was not made within {timeout_s:g} s; make its constructor faster, or "
                "leave what takes long to `create`"
            ) from None
        except BaseException:
            await self.close(patience_s=0.0)
            raise

    def spawn(self, sock: socket.socket) -> Spawned:
        """Order an instance that serves `sock`, which is closed here."""
        self._numbers += 1
        number, ended = self._numbers, asyncio.get_running_loop().create_future()
        if self.is_gone:
            sock.close()
            ended.set_result(Ended(number=number, how="was not started: the tool's nursery is gone"))
        else:
            self._ends[number] = ended
            self._send(Spawn(number=number), sock)
        return Spawned(number, ended)

    def kill(self, number: int, why: str) -> None:
        """Order the end of an instance; nothing if it has ended. A nursery that does not see to it in time is killed.

        Args:
            number: The instance's.
            why: Follows "its process" in the report, unless it ended otherwise first.
        """
        if number in self._ends and number not in self._overdue:
            self._send(Kill(number=number, why=why))
            self._overdue[number] = asyncio.get_running_loop().call_later(KILL_PATIENCE_S, self._give_up)

    async def close(self, *, patience_s: float = CLOSE_PATIENCE_S) -> None:
        """End the nursery and every instance. Safe to call twice."""
        with contextlib.suppress(OSError):  # closed when the nursery went
            self._sock.shutdown(socket.SHUT_WR)
        done, _ = await asyncio.wait({self._reading}, timeout=patience_s)
        if not done:
            self._kill()
            await asyncio.wait({self._reading})

    def _send(self, order: Spawn | Kill, attached: socket.socket | None = None) -> None:
        if not self._outbox.send(encode(order), attached):
            asyncio.get_running_loop().add_writer(self._sock, self._flush)

    def _flush(self) -> None:
        if self._outbox.flush():
            asyncio.get_running_loop().remove_writer(self._sock)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            with contextlib.suppress(OSError, ValueError):
                while packet := await loop.sock_recv(self._sock, MAX_PACKET_BYTES):
                    self._take(REPORT.validate_json(packet))
        except asyncio.CancelledError:
            self._sock.close()  # the event loop ends though nobody closed this: so does the nursery, by itself
            raise
        await self._bury()

    def _take(self, report: Loaded | NotLoaded | Ended) -> None:
        match report:
            case Loaded():
                self._loaded.set_result(report)
            case NotLoaded(reason=reason):
                self._fail(f"its class cannot be made: {reason}")
            case Ended():
                self._settle(report)

    def _settle(self, report: Ended) -> None:
        self._ends.pop(report.number).set_result(report)
        if overdue := self._overdue.pop(report.number, None):
            overdue.cancel()

    def _give_up(self) -> None:
        logger.error("tool %r: its nursery %d does not answer and is killed", self._name, self.pid)
        self._kill()

    def _kill(self) -> None:
        """Kill the nursery with everything below it, which is still its own as long as it lives."""
        if self._popen.poll() is None:
            trees.kill_tree(self._popen.pid)

    def _fail(self, why: str) -> None:
        self._loaded.set_exception(ConfigError(f"tool {self._name!r}: {why}"))
        self._loaded.exception()  # whoever waits for it gets it; nobody may any more

    async def _bury(self) -> None:
        """The nursery is gone, or will be: wait for it, end what it left, and tell everybody."""
        self.is_gone = True
        asyncio.get_running_loop().remove_writer(self._sock)
        self._outbox.drop()
        self._sock.close()
        how = await self._exit()
        await self._sweep()
        if not self._loaded.done():
            self._fail(f"the process that makes its class {how} before it had made it")
        for number in list(self._ends):
            self._settle(Ended(number=number, how=f"was lost with the tool's nursery, which {how}"))

    async def _exit(self) -> str:
        """Wait for the process to exit, kill it if it does not; how it ended."""
        deadline = time.monotonic() + _EXIT_PATIENCE_S
        while (code := self._popen.poll()) is None:
            if time.monotonic() > deadline + KILL_PATIENCE_S:
                return "hangs in the kernel"
            if time.monotonic() > deadline:
                self._kill()
            await asyncio.sleep(_POLL_S)
        return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"

    async def _sweep(self) -> None:
        """Kill what outlived the nursery: nothing, unless it was killed itself."""
        for _ in range(_MOST_ROUNDS):
            if not trees.kill_marked(self._mark):
                return
            await asyncio.sleep(_POLL_S)
        logger.error("tool %r: processes with %s=%s in their environment live on", self._name, trees.MARK, self._mark)


def _environment() -> dict[str, str]:
    """Ours, with this package importable however the worker came to import it."""
    path = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{path}{os.pathsep}{_PACKAGE_ROOT}" if path else str(_PACKAGE_ROOT)}
