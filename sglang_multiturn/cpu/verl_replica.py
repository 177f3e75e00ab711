"""The rollout `sglang_cpu` for verl: a real SGLang engine on the CPU behind verl's server interface.

    CpuReplica (trainer) ── starts ──► CpuServer (Ray actor) ── owns ──► SGLangEngine ── child process ──► sglang
    CpuServerAdapter (each FSDP worker) ── weights after every step ──┘

What `actor_rollout_ref.rollout.name=sglang` does with GPU memory between rollout and training has no meaning here, so
sleeping and waking do nothing; everything else does what verl's own SGLang server does with the same arguments
(verl/workers/rollout/sglang_rollout/async_sglang_server.py). `rollout.seed` seeds the sampler.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import ray
import torch
from verl.utils.fs import copy_to_local
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput

from sglang_multiturn.engine.base import GenerationId, SamplingParams

_IGNORED = frozenset({"logprobs", "max_tokens", "max_new_tokens"})
"""Keys of verl's sampling parameters that are no field of ours."""


def server_name(replica_rank: int, suffix: str = "") -> str:
    """The actor's name, by which the weight senders find it."""
    return f"sglang_cpu_server_{replica_rank}{suffix}"


def sampling_params_of(
    given: Mapping[str, Any], *, input_tokens: int, response_length: int, max_model_len: int
) -> SamplingParams:
    """verl's dict of sampling parameters as ours, the budget clamped as verl's SGLang server clamps it (:535-556)."""
    wanted = given.get("max_new_tokens") or given.get("max_tokens") or response_length
    fields = {key: value for key, value in given.items() if key not in _IGNORED}
    for key in ("stop_token_ids", "stop"):
        fields[key] = tuple(fields.get(key) or ())
    return SamplingParams(**fields, max_new_tokens=max(1, min(wanted, max_model_len - input_tokens - 1)))


class CpuServer:
    """The Ray actor: one engine, and the weights' version."""

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        context_length: int | None,
        response_length: int,
        seed: int,
        server_args: Mapping[str, Any],
    ) -> None:
        from sglang_multiturn.engine.sglang_engine import SGLangEngine

        self._engine = SGLangEngine(
            model_path,
            dtype=dtype,
            device="cpu",
            context_length=context_length,
            random_seed=seed,
            server_args=server_args,
        )
        self._response_length = response_length
        self._global_steps: int | None = None

    async def start(self) -> str:
        """Bring the engine up; what it says of itself."""
        await self._engine.start()
        return self._engine.info.notice or self._engine.info.name

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
    ) -> TokenOutput:
        """One generation, answered as verl's SGLang server answers it."""
        params = sampling_params_of(
            sampling_params,
            input_tokens=len(prompt_ids),
            response_length=self._response_length,
            max_model_len=self._engine.info.max_model_len,
        )
        generation = await self._engine.generate(GenerationId(request_id, 0), prompt_ids, params)
        wanted = sampling_params.get("logprobs", False) and generation.logprobs is not None
        return TokenOutput(
            token_ids=list(generation.token_ids),
            log_probs=list(generation.logprobs or ()) if wanted else None,
            stop_reason=generation.finish_reason.value,
            extra_fields={"global_steps": self._global_steps, "num_cached_tokens": generation.cached_tokens},
        )

    async def load_weights(self, named: list[tuple[str, np.ndarray]], global_steps: int | None) -> None:
        """Replace all weights; cached prefixes of the old ones are forgotten."""
        await self._engine.update_weights(named, weight_version=global_steps or 0)
        self._global_steps = global_steps

    async def set_global_steps(self, global_steps: int) -> None:
        """Only the number; weights came another way."""
        self._global_steps = global_steps

    async def clear_kv_cache(self) -> None:
        """Forget cached prefixes."""
        await self._engine.flush_cache()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End what is in flight and hold what comes, until `resume_generation`."""
        await self._engine.pause_generation("abort")

    async def resume_generation(self) -> None:
        """Sample again."""
        await self._engine.continue_generation()

    async def close(self) -> None:
        """Shut the engine down."""
        await self._engine.close()

    async def _nothing(self, **_kwargs: Any) -> None:
        """No memory moves and no profiler runs on a CPU."""

    wake_up = sleep = release_kv_cache = resume_kv_cache = start_profile = stop_profile = _nothing


class CpuReplica(RolloutReplica):
    """Starts one server; several replicas are several servers."""

    async def launch_servers(self) -> None:
        """Start the actor and wait until it serves."""
        name = server_name(self.replica_rank, self.name_suffix)
        server: Any = (
            ray.remote(CpuServer)
            .options(name=name, num_cpus=0, max_concurrency=self.max_concurrency)
            .remote(
                copy_to_local(self.model_config.path),
                dtype=self.config.dtype,
                context_length=self.config.max_model_len,
                response_length=self.config.response_length,
                seed=self.config.seed,
                server_args=dict(self.config.engine_kwargs.get("sglang") or {}),
            )
        )
        await server.start.remote()
        self.servers.append(server)
        self._server_handle = server
        self._server_address = name


class CpuServerAdapter(BaseRollout):
    """In every FSDP worker: sends the actor's weights to its replica's server."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, **_kwargs: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self._replica_rank, self._rank_in_replica = divmod(
            int(os.environ["RANK"]), self.config.tensor_model_parallel_size
        )

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing to release."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        **_kwargs: Any,
    ) -> None:
        """Every rank walks through the weights, since gathering them is collective; one of a replica sends them."""
        if wire_format != "named_tensors":
            raise NotImplementedError(f"sglang_cpu takes whole tensors only, not {wire_format!r}")
        named = [(name, tensor.detach().cpu().float().numpy()) for name, tensor in weights]
        if self._rank_in_replica == 0:
            await ray.get_actor(server_name(self._replica_rank)).load_weights.remote(named, global_steps)
