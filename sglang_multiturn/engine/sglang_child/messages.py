"""What the parent and SGLang's child process say to each other, and how it is put on the wire.

Every frame is a length and one pickled `Request` or `Reply`; the id of a request comes back in its reply, so that any
number of them may be in flight. Pickle is safe here: both ends of the socket pair are the same user's own processes.
Nothing in this module imports torch or sglang, so the parent stays light.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from sglang_multiturn.engine.base import EngineInfo, Generation, PauseMode, SamplingParams

if TYPE_CHECKING:
    import asyncio
    import socket

    import numpy as np

_LENGTH = struct.Struct("!Q")

START_ID = 0
"""The id of the reply to `Start`; requests count from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Bring SGLang up with these settings; the first frame, and the only one before `Started`."""

    model_path: str
    dtype: str
    device: str | None
    context_length: int | None
    random_seed: int
    server_args: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Sample one turn; answered by `Generated`."""

    rid: str
    request_id: str
    input_ids: list[int]
    params: SamplingParams
    return_logprobs: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """End every generation of one conversation."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortGeneration:
    """End one generation, named by the id of its `Generate`."""

    generate_id: int


@dataclass(frozen=True, slots=True)
class AbortAll:
    """End every generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Stop sampling."""

    mode: PauseMode


@dataclass(frozen=True, slots=True)
class Continue:
    """Sample again."""


@dataclass(frozen=True, slots=True)
class Flush:
    """Forget all cached prefixes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTensor:
    """One tensor of the `UpdateWeights` that follows under the same id; not answered by itself."""

    name: str
    array: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeights:
    """Load the tensors sent before under this id."""

    weight_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateWeightsFromDisk:
    """Load all weights of a Hugging Face folder."""

    model_path: str
    weight_version: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """End; the reply is the end of the stream."""


RequestBody = (
    Start
    | Generate
    | AbortRequest
    | AbortGeneration
    | AbortAll
    | Pause
    | Continue
    | Flush
    | WeightTensor
    | UpdateWeights
    | UpdateWeightsFromDisk
    | Shutdown
)


class FailureKind(StrEnum):
    """Which error of the seam a failure becomes in the parent."""

    START = "start"
    """EngineStartError."""
    INVALID_REQUEST = "invalid_request"
    """InvalidRequestError."""
    WEIGHT_UPDATE = "weight_update"
    """WeightUpdateError."""
    ENGINE = "engine"
    """EngineError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """SGLang serves."""

    info: EngineInfo
    honours_seed: bool
    """Whether `SamplingParams.seed` has an effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """What one generation sampled."""

    generation: Generation


@dataclass(frozen=True, slots=True)
class Done:
    """It was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """It could not be done."""

    kind: FailureKind
    message: str


ReplyBody = Started | Generated | Done | Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Parent to child."""

    message_id: int
    body: RequestBody


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Child to parent."""

    message_id: int
    body: ReplyBody


def encode(message: Request | Reply) -> bytes:
    """One frame."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(payload)) + payload


async def read_message(reader: asyncio.StreamReader) -> Request | Reply:
    """The next frame. Raises EOFError (IncompleteReadError) or ConnectionError when the other side is gone."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    message = pickle.loads(await reader.readexactly(length))
    assert isinstance(message, Request | Reply)
    return message


def read_message_blocking(sock: socket.socket) -> Request | Reply:
    """The next frame, for the child before it has an event loop; reads not one byte more."""
    (length,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size))
    message = pickle.loads(_receive_exactly(sock, length))
    assert isinstance(message, Request | Reply)
    return message


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    chunks: list[bytes] = []
    while size:
        chunk = sock.recv(size)
        if not chunk:
            raise EOFError("the other end of the socket was closed")
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
