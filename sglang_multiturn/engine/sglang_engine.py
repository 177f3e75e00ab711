"""SGLang as an `Engine`, in a process of its own.

Invariants: ids outside the vocabulary and generations that are too long never leave this process; every call made while
SGLang dies, and every later one, raises EngineDiedError; `close` leaves no process behind; a cancelled `generate` ends
its generation in SGLang too before the cancellation goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from sglang_multiturn.engine.base import (
    EngineInfo,
    Generation,
    GenerationId,
    PauseMode,
    SamplingParams,
    check_generation,
)
from sglang_multiturn.engine.sglang_child.messages import (
    START_ID,
    AbortAll,
    AbortGeneration,
    AbortRequest,
    Continue,
    Failure,
    FailureKind,
    Flush,
    Generate,
    Generated,
    Pause,
    Reply,
    ReplyBody,
    Request,
    RequestBody,
    Shutdown,
    Start,
    Started,
    UpdateWeights,
    UpdateWeightsFromDisk,
    WeightTensor,
    encode,
    read_message,
)
from sglang_multiturn.engine.sglang_process import SGLangProcess
from sglang_multiturn.errors import (
    EngineDiedError,
    EngineError,
    EngineStartError,
    InvalidRequestError,
    MissingDependencyError,
    WeightUpdateError,
)

if TYPE_CHECKING:
    import numpy as np

logger = logging.getLogger(__name__)

_CLOSE_PATIENCE_S = 20.0
_DEATH_PATIENCE_S = 5.0
_ABANDON_TIMEOUT_S = 10.0
_STREAM_LIMIT = 1 << 22

_ERRORS: Mapping[FailureKind, type[EngineError]] = MappingProxyType(
    {
        FailureKind.START: EngineStartError,
        FailureKind.INVALID_REQUEST: InvalidRequestError,
        FailureKind.WEIGHT_UPDATE: WeightUpdateError,
        FailureKind.ENGINE: EngineError,
    }
)


class SGLangEngine:
    """One `sglang.Engine` in a child process: cuda where torch sees one, else the CPU.

    Log-probabilities are SGLang's own, at temperature 0 those of temperature 1. Generations run on across `abort` of
    others, but never across an update of the weights, so each has one `weight_version`.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str = "auto",
        device: str | None = None,
        context_length: int | None = None,
        random_seed: int = 0,
        return_logprobs: bool = True,
        server_args: Mapping[str, object] = MappingProxyType({}),
        start_timeout_s: float = 300.0,
    ) -> None:
        """Nothing is started yet.

        Args:
            model_path: a local model folder, or the name of a model on the Hugging Face hub.
            dtype: `auto` is the checkpoint's on a GPU and float32 on a CPU.
            device: None chooses.
            context_length: None is the model's own.
            random_seed: of the sampler. `SamplingParams.seed` has an effect only with
                `server_args={"enable_deterministic_inference": True}`; on a CPU `cpu.determinism` stands in for it.
            return_logprobs: False leaves `Generation.logprobs` None and saves their computation.
            server_args: further arguments of SGLang's `ServerArgs`; an unknown one is refused at start.
            start_timeout_s: how long loading may take.
        """
        self._start = Start(
            model_path=model_path,
            dtype=dtype,
            device=device,
            context_length=context_length,
            random_seed=random_seed,
            server_args=dict(server_args),
        )
        self._return_logprobs = return_logprobs
        self._start_timeout_s = start_timeout_s
        self._ids = itertools.count(START_ID + 1)
        self._pending: dict[int, asyncio.Future[ReplyBody]] = {}
        self._process: SGLangProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._started: Started | None = None
        self._gone: EngineDiedError | None = None
        self._weight_version = 0
        self._seed_warned = False
        self._serving = asyncio.Event()
        self._serving.set()
        self._updating = asyncio.Lock()
        self._closing = asyncio.Lock()

    @property
    def info(self) -> EngineInfo:
        """What was started; `max_model_len` is what SGLang serves in full, a few tokens below the model's context."""
        if self._started is None:
            raise EngineError("the sglang engine is not started; await start() first")
        return self._started.info

    @property
    def weight_version(self) -> int:
        """Version of the weights now serving."""
        return self._weight_version

    @property
    def pid(self) -> int | None:
        """The child's process id, for monitoring; None while there is none."""
        return self._process.pid if self._process else None

    # -- lifetime -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the child and wait until SGLang serves.

        Raises:
            MissingDependencyError: sglang is not installed.
            EngineStartError: the model is not there, an argument is wrong, or SGLang did not come up in time.
        """
        if importlib.util.find_spec("sglang") is None:
            raise MissingDependencyError.for_extra("the sglang engine", "sglang", "sglang")
        if self._process is not None or self._gone is not None:
            raise EngineStartError("this sglang engine was started before; make a new one")
        _check_model(self._start.model_path)
        self._process = SGLangProcess()
        try:
            await self._connect(self._process)
        except BaseException:
            # Also when cancelled: a half-started SGLang must not outlive the attempt.
            await self._end(patience_s=0.0)
            raise
        if self.info.notice:
            logger.warning("%s", self.info.notice)

    async def _connect(self, process: SGLangProcess) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=process.sock, limit=_STREAM_LIMIT)
        # The one task that outlives a call: it reads replies until the child's end, and _end awaits it.
        self._reading = asyncio.create_task(self._read(reader), name="sglang-replies")
        try:
            async with asyncio.timeout(self._start_timeout_s):
                reply = await self._exchange(START_ID, self._start)
        except TimeoutError as error:
            raise EngineStartError(
                f"SGLang did not come up within {self._start_timeout_s:g} s; {process.describe_end()}"
            ) from error
        except EngineDiedError as error:
            raise EngineStartError(f"SGLang did not come up: {error}") from error
        except EngineStartError as error:
            raise EngineStartError(f"SGLang did not come up: {error}; its log: {process.log_path}") from error
        assert isinstance(reply, Started)
        self._started = reply

    async def close(self) -> None:
        """End SGLang and every process of it; what is in flight raises EngineDiedError. Safe to call twice."""
        async with self._closing:
            if self._process is None:
                return
            died = self._gone is not None
            self._gone = self._gone or EngineDiedError("the sglang engine was closed")
            if not died and self._writer is not None:
                with contextlib.suppress(ConnectionError):
                    self._writer.write(encode(Request(message_id=next(self._ids), body=Shutdown())))
            process = self._process
            await self._end(patience_s=0.0 if died else _CLOSE_PATIENCE_S)
            if not died:
                process.remove_log()

    async def _end(self, *, patience_s: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        try:
            await process.end(patience_s=patience_s)
        finally:
            process.kill()
            if self._writer is not None:
                self._writer.close()
            if self._reading is not None:
                await self._reading

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # -- generating ---------------------------------------------------------------------------------------------------

    async def generate(
        self, generation_id: GenerationId, input_ids: Sequence[int], params: SamplingParams
    ) -> Generation:
        """Sample one turn; cancelling the call ends it in SGLang as well."""
        info = self._require_started()
        check_generation(generation_id, input_ids, params, vocab_size=info.vocab_size, max_model_len=info.max_model_len)
        message_id = next(self._ids)
        body = Generate(
            rid=generation_id.rid,
            request_id=generation_id.request_id,
            input_ids=[int(token_id) for token_id in input_ids],
            params=params,
            return_logprobs=self._return_logprobs,
        )
        if params.seed is not None:
            self._warn_of_seed()
        try:
            reply = await self._exchange(message_id, body)
        except asyncio.CancelledError:
            await self._abandon(message_id)
            raise
        assert isinstance(reply, Generated)
        return reply.generation

    async def _abandon(self, message_id: int) -> None:
        """End a generation nobody waits for, and wait until SGLang has let go of it (not while frozen by a pause)."""
        with contextlib.suppress(EngineError, TimeoutError):
            async with asyncio.timeout(_ABANDON_TIMEOUT_S):
                await self._call(AbortGeneration(generate_id=message_id))

    async def abort(self, request_id: str) -> None:
        """End what is in flight for one request, and return once it has ended (at once while frozen by a pause)."""
        await self._call(AbortRequest(request_id=request_id))

    async def abort_all(self) -> None:
        """End everything in flight, like `abort`."""
        await self._call(AbortAll())

    async def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Stop sampling. New generations wait, and can be aborted while they do; also after a pause that failed."""
        self._require_started()
        self._serving.clear()  # before anything ends with `abort` and is asked again
        await self._call(Pause(mode=mode))

    async def continue_generation(self) -> None:
        """Sample again."""
        await self._call(Continue())
        self._serving.set()

    async def serving(self, request_id: str) -> None:
        """Return once it is not paused, or there is no engine any more."""
        await self._serving.wait()

    async def flush_cache(self) -> None:
        """Forget all cached prefixes. Raises EngineError while generations are in flight, which would need them."""
        await self._call(Flush())

    # -- weights ------------------------------------------------------------------------------------------------------

    async def update_weights(self, named_tensors: Iterable[tuple[str, np.ndarray]], *, weight_version: int) -> None:
        """Replace weights by their Hugging Face names, and empty the prefix cache.

        Nothing is aborted: generations in flight end first, new ones wait. To be quick, `pause_generation("abort")`
        before. Names and shapes are checked against the checkpoint before anything changes.

        Raises:
            WeightUpdateError: they were refused, or generations are frozen by a pause.
        """
        async with self._updating:
            self._check_version(weight_version)
            message_id = next(self._ids)
            for name, array in named_tensors:
                await self._send(message_id, WeightTensor(name=name, array=array))
            await self._exchange(message_id, UpdateWeights(weight_version=weight_version))
            self._weight_version = weight_version

    async def update_weights_from_disk(self, model_path: str, *, weight_version: int) -> None:
        """Replace all weights by those of a folder; generations in flight end first, as in `update_weights`."""
        async with self._updating:
            self._check_version(weight_version)
            await self._call(UpdateWeightsFromDisk(model_path=model_path, weight_version=weight_version))
            self._weight_version = weight_version

    def _check_version(self, weight_version: int) -> None:
        self._require_started()
        if weight_version < self._weight_version:
            raise WeightUpdateError(
                f"weight_version {weight_version} is older than {self._weight_version}, which now serves"
            )

    # -- talking to the child -----------------------------------------------------------------------------------------

    async def _call(self, body: RequestBody) -> ReplyBody:
        self._require_started()
        return await self._exchange(next(self._ids), body)

    async def _exchange(self, message_id: int, body: RequestBody) -> ReplyBody:
        reply: asyncio.Future[ReplyBody] = asyncio.get_running_loop().create_future()
        self._pending[message_id] = reply
        try:
            await self._send(message_id, body)
            answer = await reply
        finally:
            self._pending.pop(message_id, None)
        if isinstance(answer, Failure):
            raise _ERRORS[answer.kind](answer.message)
        return answer

    async def _send(self, message_id: int, body: RequestBody) -> None:
        if self._gone is not None or self._writer is None:
            raise self._gone or EngineError("the sglang engine is not started; await start() first")
        # A broken pipe is not the news: the end of the replies is, and it comes with the reason.
        with contextlib.suppress(ConnectionError):
            self._writer.write(encode(Request(message_id=message_id, body=body)))
            await self._writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                message = await read_message(reader)
                assert isinstance(message, Reply)
                future = self._pending.get(message.message_id)
                if future is not None and not future.done():
                    future.set_result(message.body)
        await self._bury()

    async def _bury(self) -> None:
        """The child is gone: learn how it ended, take its tree along, and tell everyone who waits."""
        if self._gone is None and self._process is not None:
            process = self._process
            await process.end(patience_s=_DEATH_PATIENCE_S)
            self._gone = self._gone or EngineDiedError(process.describe_end())
        self._serving.set()
        gone = self._gone or EngineDiedError("SGLang did not come up")
        for future in self._pending.values():
            if not future.done():
                future.set_exception(EngineDiedError(str(gone)))

    def _require_started(self) -> EngineInfo:
        if self._gone is not None:
            raise EngineDiedError(str(self._gone))
        return self.info

    def _warn_of_seed(self) -> None:
        if not self._seed_warned and self._started is not None and not self._started.honours_seed:
            self._seed_warned = True
            logger.warning("SamplingParams.seed has no effect: SGLang runs without enable_deterministic_inference")


def _check_model(model_path: str) -> None:
    """Refuse what cannot be a model before anything is started; a name on the hub is left to SGLang."""
    folder = Path(model_path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise EngineStartError(f"model folder {model_path} has no config.json; is it a Hugging Face model folder?")
    elif folder.is_absolute() or model_path.startswith((".", "~")) or model_path.count("/") != 1:
        raise EngineStartError(f"model folder {model_path} does not exist")
