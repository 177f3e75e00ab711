"""verl's LLM servers as a `Generator`.

verl's client has no way to end one request; SGLang servers of ours have one (`server`), and an abort goes straight to the
one that has it. A conversation that is cut short on any other server waits in `settle` until its generation is over:
nothing may be left running when verl takes the engine's memory back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput

from sglang_multiturn.engine.base import FinishReason, Generation, GenerationId, SamplingParams
from sglang_multiturn.errors import ConfigError, EngineDiedError, EngineError
from sglang_multiturn.verl_plugin.flights import Ending
from sglang_multiturn.verl_plugin.routes import AbortedBeforeServerError, Route, RoutedClient
from sglang_multiturn.verl_plugin.rows import VersionSpan
from sglang_multiturn.verl_plugin.seeds import seed_of

logger = logging.getLogger(__name__)

STOP_ID_SERVERS = frozenset({"sglang", "sglang_cpu", "vllm"})
"""Rollouts whose server hands `stop_token_ids` on to its engine (async_sglang_server.py:620, vllm_async_server.py:580)."""
SEED_SERVERS = frozenset({"sglang", "sglang_cpu"})
"""Rollouts whose engine takes a seed of each request, as `sampling_seed`."""


class VerlGenerator:
    """One for all conversations of a worker."""

    def __init__(
        self, server_manager: Any, *, rollout_name: str, with_logprobs: bool = True, skip_tokenizer_init: bool = True
    ) -> None:
        self._servers = RoutedClient(server_manager)
        self._sends_stop_ids = rollout_name in STOP_ID_SERVERS
        self._sends_seeds = rollout_name in SEED_SERVERS
        self._with_logprobs = with_logprobs
        self._skip_tokenizer_init = skip_tokenizer_init
        self._running: defaultdict[str, dict[asyncio.Task[TokenOutput], Route]] = defaultdict(dict)
        self._turned_away: dict[str, Any] = {}
        """Servers whose pause a conversation met, by request_id."""
        self._spans: dict[str, VersionSpan] = {}

    async def generate(
        self, generation_id: GenerationId, input_ids: Sequence[int], params: SamplingParams
    ) -> Generation:
        """One turn. The server is chosen by request_id, so that a conversation finds its prefix cached.

        Raises:
            ConfigError: stop strings, which an engine without a tokenizer cannot find.
            EngineDiedError: the server's process is gone.
            EngineError: anything else it refused.
        """
        route = Route(generation_id.rid)
        call = asyncio.create_task(
            self._servers.generate(
                route,
                request_id=generation_id.request_id,
                prompt_ids=list(input_ids),
                sampling_params=self.sampling_params(params, turn=generation_id.turn),
            )
        )
        self._running[generation_id.request_id][call] = route
        try:
            # Shielded: verl's client counts this request as over the moment its own call ends (llm_server.py:163).
            output = await asyncio.shield(call)
        except AbortedBeforeServerError:
            return Generation(token_ids=(), logprobs=(), finish_reason=FinishReason.ABORT)
        except ray.exceptions.RayActorError as error:
            raise EngineDiedError(f"generation {generation_id.rid}: verl's rollout server died: {error}") from error
        except (ray.exceptions.RayError, RuntimeError, ValueError) as error:
            raise EngineError(f"generation {generation_id.rid}: verl's rollout server refused: {error}") from error
        finally:
            if call.done():
                self._forget(generation_id.request_id, call)
        if output.stop_reason == Ending.TURNED_AWAY:
            self._turned_away[generation_id.request_id] = route.handle
        return self._generation(generation_id.request_id, output, params)

    async def serving(self, request_id: str) -> None:
        """Return at once, or when the server's pause is over that turned this conversation away.

        Not after a generation that a pause cut: verl may have taken that server away, and have another one at hand.
        """
        if (server := self._turned_away.pop(request_id, None)) is None:
            return
        pause_over = server.serving.remote()
        try:
            await pause_over
        except asyncio.CancelledError:
            ray.cancel(pause_over)
            raise
        except ray.exceptions.RayError as error:  # whoever asks next will hear it
            logger.debug("request %s: the server that it waited for is gone: %s", request_id, error)

    async def abort(self, request_id: str) -> None:
        """End what is in flight for one request, on whatever server it is, and return once it has ended there.

        On a server that cannot end one request it runs on; `settle` waits for its end.

        Raises:
            EngineError: the server did not answer.
        """
        routes = list(self._running.get(request_id, {}).values())
        for route in routes:
            route.aborted.set()
        try:
            for route in routes:
                await route.abort()
        except ray.exceptions.RayError as error:
            raise EngineError(f"request {request_id}: verl's rollout server did not abort it: {error}") from error

    async def settle(self, request_id: str) -> None:
        """Return when nothing of this conversation is left in the engine, or here; what can be aborted is."""
        calls = [call for call in self._running.get(request_id, {}) if not call.done()]
        if calls:
            with contextlib.suppress(EngineError):  # a server that is gone has nothing left
                await self.abort(request_id)
            await asyncio.wait(calls)
        for call in list(self._running.get(request_id, {})):
            self._forget(request_id, call)
        self._turned_away.pop(request_id, None)

    def _forget(self, request_id: str, call: asyncio.Task[TokenOutput]) -> None:
        calls = self._running[request_id]
        calls.pop(call, None)
        if not calls:
            del self._running[request_id]
        if not call.cancelled():
            call.exception()  # looked at: `generate` has raised it, or nobody waits for it any more

    def take_span(self, request_id: str) -> VersionSpan | None:
        """Oldest and newest weights that sampled for this conversation; forgotten here afterwards."""
        return self._spans.pop(request_id, None)

    def sampling_params(self, params: SamplingParams, *, turn: int = 0) -> dict[str, Any]:
        """What verl's servers take. `max_tokens` is always there: their own default would start the budget anew.

        A seed becomes one of the turn. It knows nothing of attempts: SGLang draws by seed and position, so that a turn
        that was interrupted goes on as it would have.

        Raises:
            ConfigError: stop strings, which an engine without a tokenizer cannot find.
        """
        if params.stop and self._skip_tokenizer_init:
            raise ConfigError(
                f"stop strings {list(params.stop)} need a tokenizer in the engine, which verl leaves out: set "
                "actor_rollout_ref.rollout.skip_tokenizer_init=False, or use stop token ids"
            )
        given: dict[str, Any] = {
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "repetition_penalty": params.repetition_penalty,
            "logprobs": self._with_logprobs,
            "max_tokens": params.max_new_tokens,
        }
        if params.min_p:
            given["min_p"] = params.min_p
        if params.stop:
            given["stop"] = list(params.stop)
        if self._sends_stop_ids:
            given["stop_token_ids"] = sorted(params.stop_token_ids)
        if params.seed is not None and self._sends_seeds:
            given["sampling_seed"] = seed_of(params.seed, turn)
        return given

    def _generation(self, request_id: str, output: TokenOutput, params: SamplingParams) -> Generation:
        version = output.extra_fields.get("global_steps")
        oldest = _version(output.extra_fields.get("min_global_steps", version))
        newest = _version(output.extra_fields.get("max_global_steps", version))
        if output.token_ids or newest is None:
            self._widen(request_id, oldest)
            self._widen(request_id, newest)
        return Generation(
            token_ids=output.token_ids,
            logprobs=output.log_probs,
            finish_reason=self._finish_reason(output, params),
            weight_version=newest,
            min_weight_version=oldest if oldest != newest else None,
            paused=output.stop_reason in (Ending.PAUSED, Ending.TURNED_AWAY),
            cached_tokens=output.extra_fields.get("num_cached_tokens") or 0,
        )

    def _widen(self, request_id: str, version: int | None) -> None:
        if version is None:
            return
        span = self._spans.get(request_id, VersionSpan(version, version))
        self._spans[request_id] = VersionSpan(min(span.oldest, version), max(span.newest, version))

    def _finish_reason(self, output: TokenOutput, params: SamplingParams) -> FinishReason:
        """SGLang's server says stop, length or abort; vLLM's says completed for the first two."""
        if output.stop_reason in ("abort", "aborted", *Ending):
            return FinishReason.ABORT
        if output.stop_reason == "length":
            return FinishReason.LENGTH
        if output.stop_reason == "stop":
            return FinishReason.STOP
        full = params.max_new_tokens is not None and len(output.token_ids) >= params.max_new_tokens
        return FinishReason.LENGTH if full and output.token_ids[-1] not in params.stop_token_ids else FinishReason.STOP


def _version(given: Any) -> int | None:
    return None if given is None else int(given)
