"""The process of one instance: calls the tool's methods as the worker asks, several at a time if it asks so.

It is forked from the nursery with the tool already made. Invariants: whatever a method raises or returns becomes a reply;
the process ends when the worker closes its end of the socket, without the exit functions that the nursery's code
registered.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import inspect
import json
import os
import socket
import sys
import traceback
from typing import Any, NoReturn

from sglang_multiturn.errors import ToolContractError, ToolError
from sglang_multiturn.schemas import plain_text
from sglang_multiturn.tools.agent_data import AgentData
from sglang_multiturn.tools.base import Tool
from sglang_multiturn.tools.process import linux
from sglang_multiturn.tools.process.messages import (
    CALL,
    Call,
    Created,
    Executed,
    Failed,
    FailureKind,
    Judged,
    MessageTooLongError,
    Released,
    Reply,
    Restored,
    Written,
    encode_frame,
    read_frame,
)
from sglang_multiturn.tools.results import snapshot_as_json, unpack_instance_id, unpack_number, unpack_reply
from sglang_multiturn.tools.signatures import call_kwargs, create_args

OUT_OF_MEMORY = 113
"""Exit code of a process whose tool could not get the memory it wanted."""

_MESSAGE_CHARS = 4_000
_TRACEBACK_CHARS = 8_000
_TRACEBACK_FRAMES = 20


def run(tool: Tool, name: str, sock: socket.socket, output: int, nursery_pid: int, max_memory_mb: int) -> NoReturn:
    """Turn a process that was just forked into an instance, and serve until the worker is done.

    Args:
        tool: Made before the fork.
        name: The tool's.
        sock: To the worker.
        output: File descriptor that takes everything printed.
        nursery_pid: The parent's.
        max_memory_mb: What this process may allocate on top of what it has.
    """
    code = 1
    try:
        _settle(output, nursery_pid, max_memory_mb)
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        loop.run_until_complete(_Server(tool, name).serve(sock))
        code = 0
    except MemoryError:
        code = OUT_OF_MEMORY
    except BaseException:  # noqa: BLE001 - nothing may return into the nursery's code
        traceback.print_exc()
    finally:
        _end(code)


def _settle(output: int, nursery_pid: int, max_memory_mb: int) -> None:
    os.setsid()
    linux.die_with_parent(nursery_pid)
    linux.adopt_orphans()
    linux.limit_memory(max_memory_mb)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # the tool's code may have replaced them
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=2)
    if "numpy" in sys.modules:  # unlike Python's own generator it would draw the same numbers in all instances
        sys.modules["numpy"].random.seed()


def _end(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


class _Server:
    def __init__(self, tool: Tool, name: str) -> None:
        self._tool = tool
        self._name = name
        self._extra_fields: dict[str, Any] = {}
        """Of the agent data: what the tool keeps there, from call to call."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, sock: socket.socket) -> None:
        """Until the worker closes its end."""
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        while True:
            try:
                call = CALL.validate_json(await read_frame(reader))
            except (EOFError, ConnectionError):
                return
            # No task group: the end of the socket ends the process, whatever the calls are doing.
            task = asyncio.create_task(self._answer(call, writer), name=f"{self._name}.{call.verb}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: Call, writer: asyncio.StreamWriter) -> None:
        what = f"{self._name}.{call.verb}"
        try:
            frame = _frame(await self._reply(call, what), what)
        except MemoryError:
            _end(OUT_OF_MEMORY)
        except BaseException as error:  # noqa: BLE001 - SystemExit too is this call's affair, not the event loop's
            frame = encode_frame(_failure(call.call_id, error, what))
        writer.write(frame)
        await writer.drain()

    async def _reply(self, call: Call, what: str) -> Reply:
        result = await self._result(call)
        match call.verb:
            case "create":
                return Created(call_id=call.call_id, instance_id=unpack_instance_id(result, what))
            case "execute":
                reply = unpack_reply(result, what)
                return Executed(
                    call_id=call.call_id,
                    text=reply.text,
                    reward=reply.reward,
                    metrics=reply.metrics,
                    stop=reply.stop,
                )
            case "calc_reward":
                return Judged(call_id=call.call_id, reward=unpack_number(result, what))
            case "snapshot":
                return Written(call_id=call.call_id, state=snapshot_as_json(result, what))
            case "restore":
                return Restored(call_id=call.call_id)
            case "release":
                return Released(call_id=call.call_id)

    async def _result(self, call: Call) -> Any:
        method = getattr(self._tool, call.verb)
        args: tuple[Any, ...] = create_args(method, call.instance_id) if call.verb == "create" else (call.instance_id,)
        if call.parameters is not None:
            args = (*args, call.parameters)
        if call.state is not None:
            args = (*args, json.loads(call.state))
        seen = None if call.agent_data is None else AgentData.from_json(call.agent_data, self._extra_fields)
        result = method(*args, **call_kwargs(method, call.verb, call.kwargs, seen))
        return await result if inspect.isawaitable(result) else result


def _frame(reply: Reply, what: str) -> bytes:
    """Raises ToolContractError for a reply that is too long, or no text."""
    try:
        return encode_frame(reply)
    except MessageTooLongError as error:
        raise ToolContractError(f"{what} returned {error}") from None
    except ValueError as error:
        raise ToolContractError(f"{what} returned what cannot be written as JSON: {error}") from None


def _failure(call_id: int, error: BaseException, what: str) -> Failed:
    said = _text(error)
    if isinstance(error, ToolError):
        kind = FailureKind.TOOL_ERROR
    elif isinstance(error, ToolContractError):
        kind = FailureKind.CONTRACT
    elif isinstance(error, Exception):
        kind, said = FailureKind.RAISED, f"{what} raised {type(error).__name__}: {said}\n{_traceback(error)}"
    else:
        kind, said = FailureKind.CONTRACT, f"{what} raised {type(error).__name__}: {said}"
    return Failed(call_id=call_id, failure=kind, message=plain_text(said))


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_MESSAGE_CHARS]
    except Exception as broken:  # noqa: BLE001 - other people's errors may have any __str__
        return f"(its text cannot be made: {type(broken).__name__})"


def _traceback(error: Exception) -> str:
    try:
        lines = traceback.format_exception(error, limit=-_TRACEBACK_FRAMES)
    except Exception as broken:  # noqa: BLE001 - as above
        return f"(no traceback: {type(broken).__name__})"
    return "".join(lines)[-_TRACEBACK_CHARS:].rstrip()
