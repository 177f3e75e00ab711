"""One turn's tokens: asked for, asked again when the engine failed, and never left behind.

A conversation can end at any moment, by its deadline or because someone aborts it. Its generation is then aborted in
the engine and awaited, so that what was sampled by then is kept and nothing goes on sampling for nobody.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from sglang_multiturn.engine.base import FinishReason, Generation, GenerationId, Generator, SamplingParams
from sglang_multiturn.errors import EngineDiedError, EngineError, InvalidRequestError
from sglang_multiturn.request import AsyncRolloutRequest

logger = logging.getLogger(__name__)

ABORT_GRACE_S = 10.0
"""How long a conversation that must end waits for its generation to be acknowledged as aborted."""


async def generate_turn(
    generator: Generator, request: AsyncRolloutRequest, params: SamplingParams, *, turn: int, retries: int
) -> Generation:
    """Sample a turn and append it to the request's ledger.

    A generation the engine failed or aborted by itself is asked again up to `retries` times; what an aborted attempt
    had sampled is thrown away, unless it was the last. The attempt's number is part of its `rid`.

    Raises:
        EngineError: every attempt failed, or the engine can never serve this one.
        asyncio.CancelledError: the conversation has to end; what was sampled by then stands in the ledger.
    """
    given = request.ledger.input_ids
    for attempt in range(retries + 1):
        generation_id = GenerationId(request.request_id, turn, attempt)
        started = time.monotonic()
        try:
            generation = await _generate_or_abort(generator, request, generation_id, given, params)
        except (InvalidRequestError, EngineDiedError):
            raise
        except EngineError:
            if attempt == retries:
                raise
            request.metrics.engine_retries += 1
            continue
        finally:
            request.metrics.generate_s += time.monotonic() - started
        if generation.finish_reason is not FinishReason.ABORT or attempt == retries:
            break
        request.metrics.engine_retries += 1
    _append(request, generation, generation_id, given)
    return generation


async def _generate_or_abort(
    generator: Generator,
    request: AsyncRolloutRequest,
    generation_id: GenerationId,
    given: Sequence[int],
    params: SamplingParams,
) -> Generation:
    # A task of its own, so that a deadline reaches us and not it: it ends by being aborted and acknowledged.
    running = asyncio.create_task(generator.generate(generation_id, given, params), name=generation_id.rid)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        try:
            async with asyncio.timeout(ABORT_GRACE_S):
                await generator.abort(generation_id.request_id)
                partial = await running
        except (TimeoutError, EngineError) as error:
            logger.warning("generation %s did not acknowledge its abort: %r", generation_id.rid, error)
        else:
            _append(request, partial, generation_id, given)
        raise
    finally:
        running.cancel()


def _append(
    request: AsyncRolloutRequest, generation: Generation, generation_id: GenerationId, given: Sequence[int]
) -> None:
    request.ledger.append_sampled(generation, turn=generation_id.turn, given=given, attempt=generation_id.attempt)
    request.metrics.assistant_turns += 1
