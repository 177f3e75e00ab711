"""The rollout `sglang_cpu` for verl: a real SGLang engine on the CPU behind verl's server interface.

    CpuReplica (trainer) ── starts ──► CpuServer (Ray actor) ── owns ──► SGLangEngine ── child process ──► sglang
    CpuServerAdapter (each FSDP worker) ── weights after every step ──┘

What `actor_rollout_ref.rollout.name=sglang` does with GPU memory between rollout and training has no meaning here, so
sleeping and waking move none; all the same a server that is put to sleep must be idle, as SGLang demands. Everything else
does what this package's SGLang server does with the same arguments (`verl_plugin.server`). `rollout.seed` seeds the
sampler, and with `rollout.full_determinism` every request brings its own seed.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Any

import numpy as np
import ray
import torch
from verl.utils.fs import copy_to_local
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, TokenOutput
from verl.workers.rollout.utils import ensure_async_iterator

from sglang_multiturn.engine.base import FinishReason, Generation, GenerationId, SamplingParams
from sglang_multiturn.verl_plugin.flights import Ending, Flights

_NAMED = frozenset({"logprobs", "max_tokens", "max_new_tokens", "sampling_seed"})
"""Keys of verl's sampling parameters that are no field of ours, or one of another name."""


def server_name(replica_rank: int, suffix: str = "") -> str:
    """The actor's name, by which the weight senders find it."""
    return f"sglang_cpu_server_{replica_rank}{suffix}"


def sampling_params_of(
    given: Mapping[str, Any], *, input_tokens: int, response_length: int, max_model_len: int
) -> SamplingParams:
    """verl's dict of sampling parameters as ours, the budget clamped as verl's SGLang server clamps it (:535-556)."""
    wanted = given.get("max_new_tokens") or given.get("max_tokens") or response_length
    fields = {key: value for key, value in given.items() if key not in _NAMED}
    for key in ("stop_token_ids", "stop"):
        fields[key] = tuple(fields.get(key) or ())
    fields["seed"] = given.get("sampling_seed")
    return SamplingParams(**fields, max_new_tokens=max(1, min(wanted, max_model_len - input_tokens - 1)))


def server_arguments(config: Any) -> dict[str, Any]:
    """What verl's `engine_kwargs` say to SGLang, with a seed a request where `full_determinism` asks for it."""
    determinism = {"enable_deterministic_inference": True} if config.full_determinism else {}
    return determinism | dict(config.engine_kwargs.get("sglang") or {})


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
        self._flights = Flights()

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
        rid: str | None = None,
    ) -> TokenOutput:
        """One generation, answered as this package's SGLang server answers it."""
        params = sampling_params_of(
            sampling_params,
            input_tokens=len(prompt_ids),
            response_length=self._response_length,
            max_model_len=self._engine.info.max_model_len,
        )
        generation_id = GenerationId(request_id, 0) if rid is None else GenerationId.of_rid(rid)
        with self._flights.flight(generation_id.rid) as flight:
            generation = (
                Generation(token_ids=(), logprobs=(), finish_reason=FinishReason.ABORT)
                if flight.aborted or (flight.turned_away and rid is not None)
                else await self._engine.generate(generation_id, prompt_ids, params)
            )
            reason = generation.finish_reason.value
            if generation.finish_reason is FinishReason.ABORT and rid is not None:
                reason = Ending.of(flight, paused=generation.paused).value
        wanted = sampling_params.get("logprobs", False) and generation.logprobs is not None
        return TokenOutput(
            token_ids=list(generation.token_ids),
            log_probs=list(generation.logprobs or ()) if wanted else None,
            stop_reason=reason,
            extra_fields={"global_steps": self._global_steps, "num_cached_tokens": generation.cached_tokens},
        )

    async def abort_rids(self, rids: list[str]) -> None:
        """End these generations, and return once the engine has; see `verl_plugin.server.SglangServer.abort_rids`."""
        for rid in rids:
            if self._flights.abort(rid) is not None:
                await self._engine.abort(GenerationId.of_rid(rid).request_id)

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
        """End what is in flight and turn away what comes, until `resume_generation`."""
        self._flights.pause()
        await self._engine.pause_generation("abort")

    async def resume_generation(self) -> None:
        """Sample again."""
        await self._engine.continue_generation()
        self._flights.go_on()

    async def serving(self) -> None:
        """Return when verl's pause is over; at once where there is none."""
        await self._flights.serving()

    async def close(self) -> None:
        """Shut the engine down."""
        await self._engine.close()

    async def sleep(self) -> None:
        """Be idle, or fail as SGLang does: it refuses to release memory while anything is in flight."""
        await self._engine.flush_cache()

    release_kv_cache = sleep

    async def _nothing(self, **_kwargs: Any) -> None:
        """No memory moves and no profiler runs on a CPU."""

    wake_up = resume_kv_cache = start_profile = stop_profile = _nothing


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
                server_args=server_arguments(self.config),
            )
        )
        await server.start.remote()
        self.servers.append(server)
        self._server_handle = server
        self._server_address = name


class CpuServerAdapter(BaseRollout):
    """In every FSDP worker, or in a worker beside a server that stands apart: sends weights to its replica's server."""

    def __init__(
        self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_kwargs: Any
    ) -> None:
        """`replica_rank` is given where the server stands apart; else FSDP workers and replicas are numbered alike."""
        super().__init__(config, model_config, device_mesh)
        replica, self._rank_in_replica = divmod(int(os.environ["RANK"]), self.config.tensor_model_parallel_size)
        self.replica_rank = replica if replica_rank == -1 else replica_rank
        self.is_leader_rank = self._rank_in_replica == 0

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """Nothing to release."""

    async def update_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]] | AsyncIterable[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **_kwargs: Any,
    ) -> None:
        """Every rank walks through the weights, since gathering them is collective; one of a replica sends them."""
        if wire_format != "named_tensors":
            raise NotImplementedError(f"sglang_cpu takes whole tensors only, not {wire_format!r}")
        if peft_config is not None:
            raise NotImplementedError(
                "sglang_cpu loads no LoRA adapters: set actor_rollout_ref.model.lora.merge=True, which sends whole weights"
            )
        pairs = ensure_async_iterator(weights)  # type: ignore[no-untyped-call]
        named = [(name, tensor.detach().cpu().float().numpy()) async for name, tensor in pairs]
        if self.is_leader_rank:
            await ray.get_actor(server_name(self.replica_rank)).load_weights.remote(named, global_steps)
