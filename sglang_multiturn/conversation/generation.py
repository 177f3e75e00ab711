"""One turn's tokens: asked for, asked again when the engine failed, and never left behind.

A conversation can end at any moment, by its deadline or because someone aborts it. Its generation is then aborted in
the engine and awaited, so that what was sampled by then is kept and nothing goes on sampling for nobody.

It can be suspended at any moment too. The generation ends in the same way, and the turn goes on later from exactly the
tokens it had: a turn is then several generations, each with its own log-probabilities and weight version. A stop string
that begins in one of them and ends in the next is not seen by the engine; it is cut off all the same when text is read.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from sglang_multiturn.conversation.suspension import Clock, Gate
from sglang_multiturn.engine.base import FinishReason, Generation, GenerationId, Generator, SamplingParams
from sglang_multiturn.errors import EngineDiedError, EngineError, InvalidRequestError
from sglang_multiturn.request import AsyncRolloutRequest

logger = logging.getLogger(__name__)

ABORT_GRACE_S = 10.0
"""How long a conversation that must end waits for its generation to be acknowledged as aborted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """A whole turn, of however many generations."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    """Of the last generation."""


class TurnSampler:
    """Samples the turns of one conversation and appends them to its ledger."""

    def __init__(
        self,
        generator: Generator,
        request: AsyncRolloutRequest,
        passed: Callable[[], Awaitable[None]],
        gate: Gate,
        clock: Clock,
        retries: int,
    ) -> None:
        """Sample for `request`.

        Args:
            generator: where tokens come from.
            request: whose turns these are.
            passed: waits while the conversation is suspended, and may raise where it cannot go on afterwards.
            gate: what the conversation passes.
            clock: its time, which stands still while the engine is paused.
            retries: how often a generation of a turn is asked again that the engine failed or aborted by itself.
        """
        self._generator = generator
        self._request = request
        self._passed = passed
        self._gate = gate
        self._clock = clock
        self._retries = retries

    async def sample(self, params: SamplingParams, *, turn: int) -> SampledTurn:
        """One turn. Whatever an aborted generation sampled is kept, and the turn goes on from there.

        Raises:
            EngineError: every attempt failed, or the engine can never serve this one.
            asyncio.CancelledError: the conversation has to end; what was sampled by then stands in the ledger.
        """
        sampled: list[int] = []
        assert params.max_new_tokens is not None  # the rollout saw to it
        wanted, failures = params.max_new_tokens, 0
        for attempt in itertools.count(self._request.first_attempt):
            await self._ready()
            self._request.attempts = max(self._request.attempts, attempt + 1)
            closings = self._gate.closings
            left = dataclasses.replace(params, max_new_tokens=wanted - len(sampled))
            try:
                generation = await self._attempt(GenerationId(self._request.request_id, turn, attempt), left)
            except (InvalidRequestError, EngineDiedError):
                raise
            except EngineError:
                if failures == self._retries:
                    raise
            else:
                sampled += generation.token_ids
                reason = generation.finish_reason
                interrupted = generation.paused or closings != self._gate.closings
                if reason is not FinishReason.ABORT or (failures == self._retries and not interrupted):
                    return SampledTurn(token_ids=tuple(sampled), finish_reason=reason)
                if interrupted:
                    continue
            failures += 1
            self._request.metrics.engine_retries += 1
        raise AssertionError("unreachable")

    async def _ready(self) -> None:
        """Wait while the conversation is suspended or the engine paused."""
        await self._passed()
        with self._clock.stopped():
            await self._generator.serving(self._request.request_id)
        await self._passed()  # it may have been suspended meanwhile

    async def _attempt(self, generation_id: GenerationId, params: SamplingParams) -> Generation:
        """One generation, appended to the ledger."""
        given = self._request.ledger.input_ids
        started = time.monotonic()
        try:
            async with self._gate.generating():
                generation = await self._generate_or_abort(generation_id, given, params)
                self._append(generation, generation_id, given)
                return generation
        finally:
            self._request.metrics.generate_s += time.monotonic() - started

    async def _generate_or_abort(
        self, generation_id: GenerationId, given: Sequence[int], params: SamplingParams
    ) -> Generation:
        # A task of its own, so that a deadline reaches us and not it: it ends by being aborted and acknowledged.
        running = asyncio.create_task(self._generate(generation_id, given, params), name=generation_id.rid)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            self._gate.end()
            try:
                async with asyncio.timeout(ABORT_GRACE_S):
                    await self._generator.abort(generation_id.request_id)
                    partial = await running
            except (TimeoutError, EngineError) as error:
                logger.warning("generation %s did not acknowledge its abort: %r", generation_id.rid, error)
            else:
                self._append(partial, generation_id, given)
            raise
        finally:
            running.cancel()

    async def _generate(self, generation_id: GenerationId, given: Sequence[int], params: SamplingParams) -> Generation:
        if not self._gate.may_generate:  # an abort came before this task's first step, and found nothing to end
            return Generation(token_ids=(), logprobs=(), finish_reason=FinishReason.ABORT)
        return _settled(await self._generator.generate(generation_id, given, params), params)

    def _append(self, generation: Generation, generation_id: GenerationId, given: Sequence[int]) -> None:
        """Nothing is written down of a generation that was aborted before its first token, unless it is all there is."""
        request, turn = self._request, generation_id.turn
        request.metrics.queue_s += generation.queue_s
        if generation.finish_reason is FinishReason.ABORT and not generation.token_ids:
            return
        if not request.ledger.has_turn(turn):
            request.metrics.assistant_turns += 1
        request.ledger.append_sampled(generation, turn=turn, given=given, attempt=generation_id.attempt)


def _settled(generation: Generation, params: SamplingParams) -> Generation:
    """An abort that came with the turn's last token changed nothing: the turn is over."""
    if generation.finish_reason is not FinishReason.ABORT:
        return generation
    if generation.token_ids and generation.token_ids[-1] in params.stop_token_ids:
        return dataclasses.replace(generation, finish_reason=FinishReason.STOP)
    full = params.max_new_tokens is not None and len(generation.token_ids) >= params.max_new_tokens
    return dataclasses.replace(generation, finish_reason=FinishReason.LENGTH) if full else generation
