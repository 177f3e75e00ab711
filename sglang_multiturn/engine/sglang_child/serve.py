"""Inside the child: answers the parent's requests with a running `sglang.Engine`.

Every request is one task, and its reply carries its id. Invariants: an abort is never lost, whether its generation waits
here, is on its way or runs; nothing samples while weights are replaced, so a generation has exactly one version.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import traceback
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from sglang_multiturn.engine.base import FinishReason, Generation
from sglang_multiturn.engine.sglang_child.messages import (
    AbortAll,
    AbortGeneration,
    AbortRequest,
    Continue,
    Done,
    Failure,
    FailureKind,
    Flush,
    Generate,
    Generated,
    Pause,
    Reply,
    ReplyBody,
    Request,
    Shutdown,
    UpdateWeights,
    UpdateWeightsFromDisk,
    WeightTensor,
    encode,
    read_message,
)
from sglang_multiturn.engine.sglang_child.weights import (
    check_checkpoint,
    check_tensors,
    checkpoint_shapes,
    replace_from_disk,
    replace_tensors,
    without_tied_head,
)
from sglang_multiturn.errors import EngineError, InvalidRequestError, WeightUpdateError

if TYPE_CHECKING:
    import numpy as np

    from sglang_multiturn.engine.sglang_child.launch import Launched

_ABORT_REPEAT_S = 0.5
_IDLE_TIMEOUT_S = 30.0
_NAN_MARK = "NaN happened"


class _StopServingError(Exception):
    """Ends the task group of the server: the parent said so, or is gone."""


@dataclasses.dataclass(slots=True)
class _Flight:
    """One generation between its request and its reply."""

    rid: str
    request_id: str
    aborted: bool = False
    paused: bool = False
    """Aborted by a pause of the whole engine alone."""
    dispatched: bool = False
    done: bool = False


class Server:
    """Answers the parent's requests with a running `sglang.Engine`.

    Generations wait at a gate of our own rather than in SGLang: what waits in its tokenizer manager cannot be aborted.
    """

    def __init__(self, launched: Launched, model_path: str, writer: asyncio.StreamWriter) -> None:
        self._honours_seed = launched.honours_seed
        # Engine itself has no abort and no pause, and its synchronous methods run the event loop we are in.
        self._manager = launched.engine.tokenizer_manager
        self._writer = writer
        self._shapes = checkpoint_shapes(model_path)
        self._flights: dict[int, _Flight] = {}
        self._changed = asyncio.Condition()
        self._exclusive = asyncio.Lock()
        self._paused = False
        self._frozen = False
        self._updating = False
        self._weight_version = 0  # as SGLang was launched with
        self._tensors: dict[int, list[tuple[str, np.ndarray]]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the parent says so or is gone."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    request = await self._next(reader)
                    self._register(request)
                    if not isinstance(request.body, WeightTensor):
                        tasks.create_task(self._answer(request))
        except* (_StopServingError, ConnectionError):
            pass

    async def _next(self, reader: asyncio.StreamReader) -> Request:
        try:
            message = await read_message(reader)
        except (EOFError, ConnectionError) as error:
            raise _StopServingError from error
        if not isinstance(message, Request) or isinstance(message.body, Shutdown):
            raise _StopServingError
        return message

    def _register(self, request: Request) -> None:
        """What must be in order of arrival, so that an abort finds the generation sent before it."""
        body = request.body
        if isinstance(body, Generate):
            self._flights[request.message_id] = _Flight(body.rid, body.request_id)
        elif isinstance(body, WeightTensor):
            if request.message_id not in self._tensors:
                self._tensors.clear()  # those of an update its sender gave up
            self._tensors.setdefault(request.message_id, []).append((body.name, body.array))

    async def _answer(self, request: Request) -> None:
        try:
            body = await self._handle(request)
        except InvalidRequestError as error:
            body = Failure(kind=FailureKind.INVALID_REQUEST, message=str(error))
        except WeightUpdateError as error:
            body = Failure(kind=FailureKind.WEIGHT_UPDATE, message=str(error))
        except EngineError as error:
            body = Failure(kind=FailureKind.ENGINE, message=str(error))
        # Whatever SGLang raised belongs to this one request: its sender is told, the others go on.
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            body = Failure(kind=FailureKind.ENGINE, message=f"{type(error).__name__}: {error}")
        self._writer.write(encode(Reply(message_id=request.message_id, body=body)))
        await self._writer.drain()

    async def _handle(self, request: Request) -> ReplyBody:
        match request.body:
            case Generate() as body:
                return await self._generate(self._flights[request.message_id], request.message_id, body)
            case AbortRequest(request_id=request_id):
                await self._end([f for f in self._flights.values() if f.request_id == request_id])
            case AbortGeneration(generate_id=generate_id):
                await self._end([f for i, f in self._flights.items() if i == generate_id])
            case AbortAll():
                await self._end(list(self._flights.values()))
            case Pause() as body:
                await self._pause(body)
            case Continue():
                await self._continue()
            case Flush():
                await self._flush()
            case UpdateWeights() as body:
                await self._update_weights(self._tensors.pop(request.message_id, []), body.weight_version)
            case UpdateWeightsFromDisk() as body:
                await self._update_from_disk(body)
            case unexpected:
                raise EngineError(f"the child got a {type(unexpected).__name__} it does not expect")
        return Done()

    # -- generating ---------------------------------------------------------------------------------------------------

    async def _generate(self, flight: _Flight, message_id: int, body: Generate) -> Generated:
        try:
            await self._until(lambda: flight.aborted or not (self._paused or self._updating))
            if flight.aborted:
                generation = Generation(
                    token_ids=(),
                    logprobs=() if body.return_logprobs else None,
                    finish_reason=FinishReason.ABORT,
                    weight_version=self._weight_version,
                )
                return Generated(generation=generation)
            flight.dispatched = True
            generation = await self._sample(body)
            paused = flight.paused and generation.finish_reason is FinishReason.ABORT
            return Generated(generation=dataclasses.replace(generation, paused=paused))
        finally:
            flight.done = True
            del self._flights[message_id]
            await self._notify()

    async def _sample(self, body: Generate) -> Generation:
        from fastapi import HTTPException
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = GenerateReqInput(
            input_ids=body.input_ids,
            sampling_params=self._sampling_params(body),
            return_logprob=body.return_logprobs,
            logprob_start_len=-1,
            rid=body.rid,
        )
        try:
            # To the end: a generator left at its only yield would hold SGLang's reader lock until it is collected.
            outputs = [output async for output in self._manager.generate_request(request, None)]
        except ValueError as error:
            raise InvalidRequestError(f"generation {body.rid}: SGLang refused it: {error}") from error
        except HTTPException as error:
            raise EngineError(f"generation {body.rid}: SGLang gave it up: {error.detail}") from error
        return self._generation(body, outputs[-1])

    def _sampling_params(self, body: Generate) -> dict[str, object]:
        params = body.params
        wanted: dict[str, object] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "repetition_penalty": params.repetition_penalty,
            "max_new_tokens": params.max_new_tokens,
            "stop": list(params.stop) or None,
            "stop_token_ids": list(params.stop_token_ids) or None,
        }
        if params.seed is not None and self._honours_seed:
            wanted["sampling_seed"] = params.seed
        return wanted

    def _generation(self, body: Generate, output: dict[str, Any]) -> Generation:
        meta = output["meta_info"]
        token_ids = tuple(output["output_ids"])
        reason = self._finish_reason(body, token_ids, meta["finish_reason"])
        logprobs: tuple[float, ...] | None = None
        if body.return_logprobs:
            sampled = meta.get("output_token_logprobs") or []
            if reason is FinishReason.ABORT:
                # An abort between two of SGLang's reports may leave one list ahead of the other.
                count = min(len(token_ids), len(sampled))
                token_ids, sampled = token_ids[:count], sampled[:count]
            if [token_id for _, token_id, *_ in sampled] != list(token_ids):
                raise EngineError(f"generation {body.rid}: SGLang's ids and log-probabilities do not belong together")
            logprobs = tuple(logprob for logprob, *_ in sampled)
        return Generation(
            token_ids=token_ids,
            logprobs=logprobs,
            finish_reason=reason,
            weight_version=int(meta["weight_version"]),
            cached_tokens=meta.get("cached_tokens") or 0,
        )

    def _finish_reason(self, body: Generate, token_ids: tuple[int, ...], finish: dict[str, Any]) -> FinishReason:
        if finish.get("matched") == _NAN_MARK:
            raise EngineError(f"generation {body.rid}: the model's logits are NaN; SGLang invented an end token")
        reason = FinishReason(finish["type"])
        # SGLang looks at the length first: an end token sampled as the very last one is reported as `length`.
        if reason is FinishReason.LENGTH and token_ids and token_ids[-1] in self._end_ids(body):
            return FinishReason.STOP
        return reason

    def _end_ids(self, body: Generate) -> set[int | None]:
        tokenizer = self._manager.tokenizer
        return {
            *body.params.stop_token_ids,
            *(self._manager.model_config.hf_eos_token_id or ()),
            *(getattr(tokenizer, "additional_stop_token_ids", None) or ()),
            getattr(tokenizer, "eos_token_id", None),
        }

    # -- aborting and pausing -----------------------------------------------------------------------------------------

    async def _end(self, flights: list[_Flight], *, paused: bool = False) -> None:
        """Abort, and wait until every one of them has its reply; while frozen they end only after `continue`."""
        for flight in flights:
            flight.paused = paused and not flight.aborted
            flight.aborted = True
        await self._notify()
        while left := [flight for flight in flights if not flight.done]:
            for flight in left:
                if flight.dispatched:
                    self._abort(flight.rid)
            # SGLang forgets an abort that overtakes its request on the way to the scheduler, hence again and again.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ABORT_REPEAT_S):
                    await self._until(lambda: self._frozen or all(flight.done for flight in left))
            if self._frozen:
                return

    def _abort(self, rid: str) -> None:
        state = self._manager.rid_to_state.get(rid)
        if getattr(state, "abort_sent", False):
            state.abort_sent = False  # else newer versions send no second abort after one that overtook its request
        self._manager.abort_request(rid=rid)

    async def _pause(self, body: Pause) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._paused = True
        if body.mode == "abort":
            if self._frozen:
                # SGLang would wait for generations that cannot move, and refuse to continue meanwhile.
                for flight in self._dispatched():
                    self._abort(flight.rid)
                await self._thaw()
            await self._end(self._dispatched(), paused=True)
        await self._manager.pause_generation(PauseGenerationReqInput(mode=body.mode))
        self._frozen = body.mode != "abort"
        await self._notify()

    async def _continue(self) -> None:
        await self._thaw()
        self._paused = False
        await self._notify()

    async def _thaw(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        await self._manager.continue_generation(ContinueGenerationReqInput())
        self._frozen = False

    # -- weights and cache --------------------------------------------------------------------------------------------

    async def _update_weights(self, tensors: list[tuple[str, np.ndarray]], weight_version: int) -> None:
        tensors = without_tied_head(self._shapes, tensors)
        check_tensors(self._shapes, ((name, array.shape) for name, array in tensors))
        async with self._alone():
            await replace_tensors(self._manager, tensors, weight_version)
        self._weight_version = weight_version

    async def _update_from_disk(self, body: UpdateWeightsFromDisk) -> None:
        check_checkpoint(self._shapes, body.model_path)
        async with self._alone():
            await replace_from_disk(self._manager, body.model_path, body.weight_version)
        self._weight_version = body.weight_version

    @contextlib.asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Hold new generations back, let running ones end, and empty the cache, which belongs to the old weights.

        SGLang's own flush after an update asserts that the scheduler is idle, which ends the engine when it is not.
        """
        async with self._exclusive:
            self._updating = True
            try:
                await self._until(lambda: self._frozen or not self._dispatched())
                if running := self._dispatched():
                    raise WeightUpdateError(
                        f"{len(running)} generations are frozen by pause_generation (first: {running[0].rid}); "
                        "weights can only be replaced between generations: pause with mode 'abort'"
                    )
                await self._flush_idle(WeightUpdateError)
                yield
            finally:
                self._updating = False
                await self._notify()

    async def _flush(self) -> None:
        if running := self._dispatched():
            raise EngineError(
                f"flush_cache: {len(running)} generations are in flight (first: {running[0].rid}); "
                "wait for them, or abort them"
            )
        async with self._exclusive:
            await self._flush_idle(EngineError)

    async def _flush_idle(self, error: type[EngineError]) -> None:
        """Flush once the scheduler, a step behind what it has already answered, is idle."""
        flush = self._manager.flush_cache
        patient = {"timeout_s": _IDLE_TIMEOUT_S} if "timeout_s" in inspect.signature(flush).parameters else {}
        result = await flush(**patient)
        if not result.success:
            raise error(f"SGLang did not flush its cache: {result.message or 'the scheduler is not idle'}")

    # -- waiting ------------------------------------------------------------------------------------------------------

    def _dispatched(self) -> list[_Flight]:
        return [flight for flight in self._flights.values() if flight.dispatched]

    async def _until(self, predicate: Callable[[], bool]) -> None:
        async with self._changed:
            await self._changed.wait_for(predicate)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
