"""verl's LLM servers as a `Generator`.

verl's client has no way to end one request. A conversation that is cut short therefore waits in `settle` until its
generation is over: nothing may be left running when verl takes the engine's memory back.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import ray
from verl.workers.rollout.replica import TokenOutput

from sglang_multiturn.engine.base import FinishReason, Generation, GenerationId, SamplingParams
from sglang_multiturn.errors import ConfigError, EngineDiedError, EngineError
from sglang_multiturn.verl_plugin.rows import VersionSpan

STOP_ID_SERVERS = frozenset({"sglang", "sglang_cpu", "vllm"})
"""Rollouts whose server hands `stop_token_ids` on to its engine (async_sglang_server.py:620, vllm_async_server.py:580)."""


class VerlGenerator:
    """One for all conversations of a worker."""

    def __init__(
        self, server_manager: Any, *, rollout_name: str, with_logprobs: bool = True, skip_tokenizer_init: bool = True
    ) -> None:
        self._servers = server_manager
        self._sends_stop_ids = rollout_name in STOP_ID_SERVERS
        self._with_logprobs = with_logprobs
        self._skip_tokenizer_init = skip_tokenizer_init
        self._running: defaultdict[str, set[asyncio.Task[TokenOutput]]] = defaultdict(set)
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
        call = asyncio.create_task(
            self._servers.generate(
                request_id=generation_id.request_id,
                prompt_ids=list(input_ids),
                sampling_params=self.sampling_params(params),
            )
        )
        self._running[generation_id.request_id].add(call)
        try:
            # Shielded: verl's client counts this request as over the moment its own call ends (llm_server.py:163).
            output = await asyncio.shield(call)
        except ray.exceptions.RayActorError as error:
            raise EngineDiedError(f"generation {generation_id.rid}: verl's rollout server died: {error}") from error
        except (ray.exceptions.RayError, RuntimeError, ValueError) as error:
            raise EngineError(f"generation {generation_id.rid}: verl's rollout server refused: {error}") from error
        return self._generation(generation_id.request_id, output, params)

    async def abort(self, request_id: str) -> None:
        """verl cannot end a single request; `settle` waits for its end."""

    async def settle(self, request_id: str) -> None:
        """Return when nothing of this conversation is left in the engine."""
        for call in self._running.pop(request_id, set()):
            await asyncio.wait({call})
            if not call.cancelled():
                call.exception()  # looked at: `generate` has raised it, or nobody waits for it any more

    def take_span(self, request_id: str) -> VersionSpan | None:
        """Oldest and newest weights that sampled for this conversation; forgotten here afterwards."""
        return self._spans.pop(request_id, None)

    def sampling_params(self, params: SamplingParams) -> dict[str, Any]:
        """What verl's servers take. `max_tokens` is always there: their own default would start the budget anew.

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
        return given

    def _generation(self, request_id: str, output: TokenOutput, params: SamplingParams) -> Generation:
        version = output.extra_fields.get("global_steps")
        self._widen(request_id, output.extra_fields.get("min_global_steps", version))
        self._widen(request_id, output.extra_fields.get("max_global_steps", version))
        return Generation(
            token_ids=output.token_ids,
            logprobs=output.log_probs,
            finish_reason=self._finish_reason(output, params),
            weight_version=version,
            cached_tokens=output.extra_fields.get("num_cached_tokens") or 0,
        )

    def _widen(self, request_id: str, version: int | None) -> None:
        if version is None:
            return
        span = self._spans.get(request_id, VersionSpan(version, version))
        self._spans[request_id] = VersionSpan(min(span.oldest, version), max(span.newest, version))

    def _finish_reason(self, output: TokenOutput, params: SamplingParams) -> FinishReason:
        """SGLang's server says stop, length or abort; vLLM's says completed for the first two."""
        if output.stop_reason in ("abort", "aborted"):
            return FinishReason.ABORT
        if output.stop_reason == "length":
            return FinishReason.LENGTH
        if output.stop_reason == "stop":
            return FinishReason.STOP
        full = params.max_new_tokens is not None and len(output.token_ids) >= params.max_new_tokens
        return FinishReason.LENGTH if full and output.token_ids[-1] not in params.stop_token_ids else FinishReason.STOP
