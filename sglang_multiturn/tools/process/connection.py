"""The worker's end of one instance: calls that may overlap, and one end for all of them.

Invariant: once the process died, or was killed, or sent what is no reply, every call in flight and every later one
raises ToolDiedError, and by then nothing of the process is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

from sglang_multiturn.errors import ToolContractError, ToolDiedError, ToolError, ToolRaisedError
from sglang_multiturn.tools.process.messages import (
    REPLY,
    Call,
    Created,
    Ended,
    Executed,
    Failed,
    FailureKind,
    Judged,
    Released,
    Reply,
    Restored,
    Written,
    encode_frame,
    read_frame,
)
from sglang_multiturn.tools.process.nursery_process import NurseryProcess, Spawned
from sglang_multiturn.tools.signatures import Verb

logger = logging.getLogger(__name__)

_FINISH_PATIENCE_S = 2.0
_NATURAL_END_S = 0.5
_REPLIES: Mapping[Verb, type[Reply]] = MappingProxyType(
    {
        "create": Created,
        "execute": Executed,
        "calc_reward": Judged,
        "snapshot": Written,
        "restore": Restored,
        "release": Released,
    }
)
_ERRORS: Mapping[FailureKind, type[Exception]] = MappingProxyType(
    {
        FailureKind.TOOL_ERROR: ToolError,
        FailureKind.CONTRACT: ToolContractError,
        FailureKind.RAISED: ToolRaisedError,
    }
)


class Connection:
    """One instance's process, from its order until nothing of it is left."""

    def __init__(
        self,
        name: str,
        nursery: NurseryProcess,
        spawned: Spawned,
        sock: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._name = name
        self._nursery = nursery
        self._sock = sock
        self._spawned = spawned
        self._writer = writer
        self._pending: dict[int, tuple[Verb, asyncio.Future[Reply]]] = {}
        self._calls = 0
        self.is_alive = True
        """Whether it may be called: False from the moment at which its end is known or ordered."""
        spawned.ended.add_done_callback(self._hang_up)
        # The one task that outlives a call: it reads replies until the end, and whoever ends the process awaits it.
        self.reading = asyncio.create_task(self._read(reader), name=f"{name}-{spawned.number}")

    @classmethod
    async def open(cls, name: str, nursery: NurseryProcess) -> Self:
        """Order a process, and be connected with it as soon as it is there."""
        ours, theirs = socket.socketpair()
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            theirs.close()
            raise
        return cls(name, nursery, nursery.spawn(theirs), ours, reader, writer)

    async def call(
        self,
        verb: Verb,
        instance_id: str,
        kwargs: Mapping[str, Any],
        parameters: dict[str, Any] | None = None,
        agent_data: dict[str, Any] | None = None,
        state: str | None = None,
    ) -> Reply:
        """Call a method; the reply is that of the verb. A cancellation kills the process before it goes on, except that
        of a `snapshot`, which is forgotten: what it was to save must not be lost by it.

        Raises:
            ToolError, ToolContractError, ToolRaisedError: what the method raised or returned.
            ToolDiedError: the process ended first.
        """
        if not self.is_alive:
            raise ToolDiedError(f"tool {self._name!r}: its process has ended")
        self._calls += 1
        frame = self._frame(
            Call(
                call_id=self._calls,
                verb=verb,
                instance_id=instance_id,
                parameters=parameters,
                kwargs=dict(kwargs),
                agent_data=agent_data,
                state=state,
            )
        )
        replied: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._pending[self._calls] = verb, replied
        self._writer.write(frame)
        try:
            reply = await replied
        except asyncio.CancelledError:
            if verb != "snapshot":
                await self.end("was stopped with a call that was cancelled")
            raise
        if isinstance(reply, Failed):
            raise _ERRORS[reply.failure](reply.message)
        return reply

    def look(self) -> None:
        """Notice now that the other end is closed."""
        try:
            hung_up = self._sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return
        except OSError:
            hung_up = True
        self.is_alive = self.is_alive and not hung_up

    async def finish(self) -> None:
        """Let the process end, and give it a moment to do so."""
        self.is_alive = False
        with contextlib.suppress(OSError):  # it has ended already
            self._writer.write_eof()
        await asyncio.wait({self.reading}, timeout=_FINISH_PATIENCE_S)

    async def end(self, why: str) -> None:
        """Kill the process with all that it started, unless it has ended, and wait until nothing is left.

        Args:
            why: Follows "its process".
        """
        self.is_alive = False
        self._nursery.kill(self._spawned.number, why)
        await asyncio.wait({self.reading})

    def _frame(self, call: Call) -> bytes:
        try:
            return encode_frame(call)
        except ValueError as error:
            raise ToolContractError(
                f"{self._name}.{call.verb}: its arguments cannot be sent to its process as JSON: {error}"
            ) from error

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                self._take(REPLY.validate_json(await read_frame(reader)))
        except (EOFError, ConnectionError):
            why, patience_s = "closed its connection to the worker", _NATURAL_END_S
        except (ValueError, LookupError):
            why, patience_s = "sent what is no reply", 0.0
        self.is_alive = False
        await asyncio.wait({self._spawned.ended}, timeout=patience_s)
        self._nursery.kill(self._spawned.number, f"was stopped: it {why}")
        await asyncio.wait({self._spawned.ended})
        self._fail_pending(self._spawned.ended.result())
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    def _fail_pending(self, ended: Ended) -> None:
        for _, replied in self._pending.values():
            if not replied.done():
                replied.set_exception(self._died(ended))
        self._pending.clear()

    def _take(self, reply: Reply) -> None:
        """Raises LookupError for a reply to what was not asked."""
        verb, replied = self._pending.pop(reply.call_id)
        if not isinstance(reply, Failed | _REPLIES[verb]):
            raise LookupError(f"a {type(reply).__name__} is no reply to {verb}")
        if not replied.done():
            replied.set_result(reply)

    def _died(self, ended: Ended) -> ToolDiedError:
        error = ToolDiedError(f"tool {self._name!r}: its process {ended.how}")
        if ended.output:
            error.add_note(f"The last that it printed:\n{ended.output}")
        logger.info("%s%s", error, f"; the last that it printed:\n{ended.output}" if ended.output else "")
        return error

    def _hang_up(self, ended: asyncio.Future[Ended]) -> None:
        """What the process sent before its end can still be read; then comes the end of the file, whoever holds the
        other end."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)
