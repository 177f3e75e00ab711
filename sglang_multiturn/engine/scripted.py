"""An engine that says what a script tells it: for dry runs, and for testing tools and rollouts without a model.

It keeps the contract of every engine, and can have bad manners on purpose: token ids that the tokenizer would never
choose, a missing end token, a generation that never ends, errors, a sudden abort.

    engine = ScriptedEngine(template, lambda generation_id, input_ids: f"turn {generation_id.turn}")
    engine = ScriptedEngine.playing(template, {"request-1": ["<tool_call>...</tool_call>", "The answer is 4."]})
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from sglang_multiturn.chat.template import ChatTemplate
from sglang_multiturn.engine.base import (
    EngineInfo,
    FinishReason,
    Generation,
    GenerationId,
    PauseMode,
    SamplingParams,
    check_generation,
)
from sglang_multiturn.errors import EngineDiedError, EngineError, WeightUpdateError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedTurn:
    """One generation as a script wants it."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    """Exactly these ids instead of the text's own, canonical or not."""
    logprob: float = -0.5
    """Of every token."""
    end: bool = True
    """Whether the end-of-turn token is sampled after the text."""
    end_id: int | None = None
    """Another end-of-turn token than the template's."""
    finish_reason: FinishReason | None = None
    """Forced; None is `stop` after an end token and `length` otherwise."""
    hang_after: int | None = None
    """Sample this many tokens, then nothing more until someone aborts."""
    error: EngineError | None = None
    """Raised instead of sampling anything."""


Script = Callable[[GenerationId, Sequence[int]], ScriptedTurn | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """A turn in the course of being sampled."""

    scripted: ScriptedTurn
    sampled: tuple[int, ...] = ()
    left: tuple[int, ...]
    hang_after: int | None

    def goes_on_after(self, input_ids: Sequence[int]) -> bool:
        """Whether what was sampled stands at the end of what the engine is given now."""
        return tuple(input_ids[len(input_ids) - len(self.sampled) :]) == self.sampled

    def after(self, ids: Sequence[int]) -> _Turn:
        """The same turn once these ids have been sampled; it hangs once only."""
        sampled, left = (*self.sampled, *ids), self.left[len(ids) :]
        return _Turn(scripted=self.scripted, sampled=sampled, left=left, hang_after=None)


class _InFlight:
    def __init__(self) -> None:
        self.aborted = asyncio.Event()
        self.paused = False
        """Whether it was aborted by a pause of the whole engine."""


class ScriptedEngine:
    """An `Engine` whose tokens come from a script."""

    def __init__(
        self,
        template: ChatTemplate,
        script: Script,
        *,
        max_model_len: int = 32_768,
        latency_s: float = 0.0,
        token_s: float = 0.0,
        max_running: int | None = None,
    ) -> None:
        """Play `script`.

        Args:
            template: gives the script's text its ids and the vocabulary its size.
            script: called once a generation with its id and its input ids.
            max_model_len: in tokens.
            latency_s: how long a generation takes, ...
            token_s: ... and how much longer for each of its tokens.
            max_running: generations at a time; the rest queues. None is no limit.
        """
        self._template = template
        self._script = script
        self._latency_s = latency_s
        self._token_s = token_s
        self._info = EngineInfo(name="scripted", vocab_size=template.vocab_size, max_model_len=max_model_len)
        self._running = asyncio.Event()
        self._slots = asyncio.Semaphore(max_running) if max_running else None
        self._in_flight: dict[str, _InFlight] = {}
        self._unfinished: dict[tuple[str, int], _Turn] = {}
        """By request and turn, those that were aborted: asked again, they go on."""
        self._started: dict[str, asyncio.Event] = {}
        self._open = False
        self._weight_version = 0

    @classmethod
    def playing(
        cls, template: ChatTemplate, turns: Mapping[str, Sequence[ScriptedTurn | str]], *, max_model_len: int = 32_768
    ) -> Self:
        """Play fixed turns by request_id; beyond the last one an EngineError is raised."""

        def script(generation_id: GenerationId, input_ids: Sequence[int]) -> ScriptedTurn | str:
            planned = turns.get(generation_id.request_id, ())
            if generation_id.turn >= len(planned):
                raise EngineError(f"generation {generation_id.rid}: the script has only {len(planned)} turns")
            return planned[generation_id.turn]

        return cls(template, script, max_model_len=max_model_len)

    @property
    def info(self) -> EngineInfo:
        """What the engine is."""
        return self._info

    @property
    def weight_version(self) -> int:
        """Of the last `update_weights`; it changes nothing but this number."""
        return self._weight_version

    async def start(self) -> None:
        """Accept generations."""
        self._open = True
        self._running.set()

    async def close(self) -> None:
        """End everything in flight with EngineDiedError; safe to call twice."""
        self._open = False
        self._running.set()
        await self.abort_all()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def generate(
        self, generation_id: GenerationId, input_ids: Sequence[int], params: SamplingParams
    ) -> Generation:
        """Sample the script's next turn."""
        self._check_open(generation_id)
        check_generation(
            generation_id,
            input_ids,
            params,
            vocab_size=self._info.vocab_size,
            max_model_len=self._info.max_model_len,
        )
        flight = self._in_flight[generation_id.rid] = _InFlight()
        try:
            return await self._play(generation_id, input_ids, params, flight)
        finally:
            del self._in_flight[generation_id.rid]

    async def _play(
        self, generation_id: GenerationId, input_ids: Sequence[int], params: SamplingParams, flight: _InFlight
    ) -> Generation:
        await self._unless_aborted(flight, self._running.wait())
        if (slots := self._slots) is None:
            return await self._sample(generation_id, input_ids, params, flight)
        taken = asyncio.Event()

        async def take() -> None:
            await slots.acquire()
            taken.set()

        await self._unless_aborted(flight, take())
        try:
            return await self._sample(generation_id, input_ids, params, flight)
        finally:
            if taken.is_set():  # an abort may have come first, or at the same moment
                slots.release()

    async def _sample(
        self, generation_id: GenerationId, input_ids: Sequence[int], params: SamplingParams, flight: _InFlight
    ) -> Generation:
        if flight.aborted.is_set():
            self._check_open(generation_id)
            return _ended((), FinishReason.ABORT, 0.0, self._weight_version, paused=flight.paused)
        if (started := self._started.get(generation_id.request_id)) is not None:
            started.set()
        assert params.max_new_tokens is not None  # check_generation saw to it
        turn = self._unfinished.pop((generation_id.request_id, generation_id.turn), None)
        if turn is None or not turn.goes_on_after(input_ids):
            turn = self._begin(generation_id, input_ids)
        ids = turn.left[: params.max_new_tokens]
        natural = FinishReason.STOP if len(ids) == len(turn.left) and turn.scripted.end else FinishReason.LENGTH
        version, logprob = self._weight_version, turn.scripted.logprob
        share = len(turn.left) / max(1, len(turn.sampled) + len(turn.left))
        latency_s = self._latency_s * share + self._token_s * len(ids)
        began_s = asyncio.get_running_loop().time()
        if turn.hang_after is not None:
            await flight.aborted.wait()
        elif latency_s:
            await self._unless_aborted(flight, asyncio.sleep(latency_s))
        self._check_open(generation_id)
        if not flight.aborted.is_set():
            return _ended(ids, turn.scripted.finish_reason or natural, logprob, version)
        passed_s = asyncio.get_running_loop().time() - began_s
        part = min(1.0, passed_s / latency_s) if latency_s else 0.5
        kept = ids[: int(len(ids) * part) if turn.hang_after is None else turn.hang_after]
        self._unfinished[generation_id.request_id, generation_id.turn] = turn.after(kept)
        return _ended(kept, FinishReason.ABORT, logprob, version, paused=flight.paused)

    def _begin(self, generation_id: GenerationId, input_ids: Sequence[int]) -> _Turn:
        scripted = self._script(generation_id, input_ids)
        turn = ScriptedTurn(text=scripted) if isinstance(scripted, str) else scripted
        if turn.error is not None:
            raise turn.error
        return _Turn(scripted=turn, left=self._ids_of(turn), hang_after=turn.hang_after)

    def _ids_of(self, turn: ScriptedTurn) -> tuple[int, ...]:
        ids = turn.token_ids if turn.token_ids is not None else tuple(self._template.encode_text(turn.text))
        end_id = turn.end_id if turn.end_id is not None else self._template.stop_token_ids[0]
        return (*ids, end_id) if turn.end else ids

    @staticmethod
    async def _unless_aborted(flight: _InFlight, waiting: Coroutine[Any, Any, object]) -> None:
        """Wait for something, or for the generation to be aborted, whichever is first."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(waiting), group.create_task(flight.aborted.wait())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()

    async def wait_until_started(self, request_id: str) -> None:
        """Return once a generation of this request is being sampled: what tests wait for instead of sleeping."""
        await self._started.setdefault(request_id, asyncio.Event()).wait()

    async def abort(self, request_id: str) -> None:
        """End what is in flight for one request; its `generate` returns with `abort` and what it has."""
        for rid, flight in self._in_flight.items():
            if rid.startswith(f"{request_id}:t"):
                flight.aborted.set()

    async def abort_all(self) -> None:
        """End everything in flight."""
        for flight in self._in_flight.values():
            flight.aborted.set()

    async def pause_generation(self, mode: PauseMode = "abort") -> None:
        """New generations wait; running ones end under `abort` and go on otherwise."""
        self._running.clear()
        if mode == "abort":
            for flight in self._in_flight.values():
                flight.paused = not flight.aborted.is_set()
            await self.abort_all()

    async def serving(self, request_id: str) -> None:
        """Return once it is not paused."""
        await self._running.wait()

    async def continue_generation(self) -> None:
        """Sample again."""
        self._running.set()

    async def flush_cache(self) -> None:
        """There is none."""

    async def update_weights(self, named_tensors: Iterable[tuple[str, np.ndarray]], *, weight_version: int) -> None:
        """Count up the version. Raises WeightUpdateError when it would go back."""
        for _ in named_tensors:
            pass
        self._set_version(weight_version)

    async def update_weights_from_disk(self, model_path: str, *, weight_version: int) -> None:
        """Count up the version. Raises WeightUpdateError when it would go back."""
        self._set_version(weight_version)

    def _set_version(self, weight_version: int) -> None:
        if weight_version < self._weight_version:
            raise WeightUpdateError(f"weight_version {weight_version} is older than {self._weight_version}")
        self._weight_version = weight_version

    def _check_open(self, generation_id: GenerationId) -> None:
        if not self._open:
            raise EngineDiedError(f"generation {generation_id.rid}: the scripted engine is closed")


def _ended(
    ids: Sequence[int], finish_reason: FinishReason, logprob: float, weight_version: int, *, paused: bool = False
) -> Generation:
    return Generation(
        token_ids=list(ids),
        logprobs=[logprob] * len(ids),
        finish_reason=finish_reason,
        weight_version=weight_version,
        paused=paused,
    )
