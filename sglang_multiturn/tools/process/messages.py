"""What worker, nursery and instance say to each other, as JSON: nothing that an instance sends can be more than data.

Worker and nursery exchange packets. Worker and instance exchange frames, a length and a message of that many bytes; the
id of a call comes back in its reply, so that any number of calls may be in flight.
"""

from __future__ import annotations

import asyncio
import struct
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Literal

import pydantic_core
from pydantic import Field, TypeAdapter

from sglang_multiturn.schemas import json_fallback
from sglang_multiturn.tools.host import MAX_SNAPSHOT_CHARS
from sglang_multiturn.tools.signatures import Verb

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
MAX_PACKET_BYTES = 65_536

_LENGTH = struct.Struct("!I")


class MessageTooLongError(ValueError):
    """A message is longer than `MAX_MESSAGE_BYTES`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a nursery reads from its standard input: which tool to make, and what its instances may use."""

    name: str
    class_path: str
    config: dict[str, Any]
    tool_schema: dict[str, Any] | None
    sys_path: list[str]
    """Where the worker finds its modules."""
    max_memory_mb: int
    max_processes: int


# Worker to nursery


@dataclass(frozen=True, slots=True, kw_only=True)
class Spawn:
    """Start an instance's process; its end of the socket to the worker comes with the packet."""

    number: int
    kind: Literal["spawn"] = "spawn"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End an instance's process and whatever it started; nothing if it has ended before."""

    number: int
    why: str
    """Follows "its process" in the report."""
    kind: Literal["kill"] = "kill"


Order = Annotated[Spawn | Kill, Field(discriminator="kind")]


# Nursery to worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The tool was made; instances may be spawned."""

    threads: list[str]
    """Names of the threads that run in the nursery, which no instance will have."""
    takes_agent_data: bool
    """Whether `execute` wants to be shown the conversation."""
    kind: Literal["loaded"] = "loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotLoaded:
    """The tool could not be made, and why; the nursery ends."""

    reason: str
    kind: Literal["not_loaded"] = "not_loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """Of an instance's process and whatever it started nothing is left."""

    number: int
    how: str
    """Follows "its process"."""
    output: str = ""
    """The end of what it printed."""
    kind: Literal["ended"] = "ended"


Report = Annotated[Loaded | NotLoaded | Ended, Field(discriminator="kind")]


# Worker to instance


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Call a method of the tool; answered by the reply of that verb, or by `Failed`."""

    call_id: int
    verb: Verb
    instance_id: str
    parameters: dict[str, Any] | None
    """Of `execute` alone: the arguments the model gave."""
    kwargs: dict[str, Any]
    """The dataset row's own."""
    agent_data: dict[str, Any] | None = None
    """Of `execute` alone, where the tool takes it: `AgentData.to_json`."""
    state: str | None = None
    """Of `restore` alone: what `snapshot` returned, as JSON."""


# Instance to worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Created:
    """`create` returned."""

    call_id: int
    instance_id: str
    kind: Literal["created"] = "created"


@dataclass(frozen=True, slots=True, kw_only=True)
class Executed:
    """`execute` returned."""

    call_id: int
    text: str
    reward: Annotated[float, Field(allow_inf_nan=False)]
    metrics: dict[str, Any] = field(default_factory=dict)
    stop: bool = False
    kind: Literal["executed"] = "executed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """`calc_reward` returned."""

    call_id: int
    reward: Annotated[float, Field(allow_inf_nan=False)]
    kind: Literal["judged"] = "judged"


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """`snapshot` returned."""

    call_id: int
    state: Annotated[str, Field(max_length=MAX_SNAPSHOT_CHARS)]
    """As JSON."""
    kind: Literal["written"] = "written"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """`restore` returned."""

    call_id: int
    kind: Literal["restored"] = "restored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """`release` returned."""

    call_id: int
    kind: Literal["released"] = "released"


class FailureKind(StrEnum):
    """Which error a failure becomes in the worker."""

    TOOL_ERROR = "tool_error"
    """ToolError."""
    CONTRACT = "contract"
    """ToolContractError."""
    RAISED = "raised"
    """ToolRaisedError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The method raised, or returned what it must not."""

    call_id: int
    failure: FailureKind
    message: str
    kind: Literal["failed"] = "failed"


Reply = Created | Executed | Judged | Written | Restored | Released | Failed

LOAD: TypeAdapter[Load] = TypeAdapter(Load)
ORDER: TypeAdapter[Spawn | Kill] = TypeAdapter(Order)
REPORT: TypeAdapter[Loaded | NotLoaded | Ended] = TypeAdapter(Report)
CALL: TypeAdapter[Call] = TypeAdapter(Call)
REPLY: TypeAdapter[Reply] = TypeAdapter(Annotated[Reply, Field(discriminator="kind")])


def encode(message: Load | Spawn | Kill | Loaded | NotLoaded | Ended | Call | Reply) -> bytes:
    """JSON; arrays become lists, and what JSON does not know becomes text. Raises ValueError for what cannot be written."""
    return pydantic_core.to_json(message, fallback=json_fallback, inf_nan_mode="constants")


def encode_frame(message: Call | Reply) -> bytes:
    """One frame. Raises MessageTooLongError; ValueError for what cannot be written as JSON."""
    payload = encode(message)
    if len(payload) > MAX_MESSAGE_BYTES:
        raise MessageTooLongError(f"{len(payload)} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return _LENGTH.pack(len(payload)) + payload


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame's message.

    Raises:
        EOFError (IncompleteReadError), ConnectionError: the other side is gone.
        MessageTooLongError: the other side breaks the rules.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise MessageTooLongError(f"{length} bytes; at most {MAX_MESSAGE_BYTES} are allowed")
    return await reader.readexactly(length)
