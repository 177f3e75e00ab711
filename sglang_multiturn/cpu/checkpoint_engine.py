"""Weights from verl's trainer to rollout servers that stand apart from it, on the CPU.

verl's asynchronous trainers hand weights over with a checkpoint engine, and all of its own need a device. This one needs
none: the first actor keeps a `TCPStore`, puts all weights there as one safetensors blob, and every server's worker reads it.

    actor_rollout_ref.rollout.checkpoint_engine.backend=cpu_store
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=sglang_multiturn.cpu.checkpoint_engine

For tests and demos: the whole model is held in memory once more, and nothing is streamed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import ray
import torch
from safetensors.torch import load, save
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its own stubs leave it out
from verl.checkpoint_engine import base as verls_base

verls: Any = verls_base  # verl's types say less than its code does

_TIMEOUT = timedelta(minutes=10)
_WEIGHTS = "weights"


class Address(NamedTuple):
    """Where the first actor's store is."""

    host: str
    port: int


@verls.CheckpointEngineRegistry.register("cpu_store")
class StoreCheckpointEngine(verls.CheckpointEngine):  # type: ignore[misc]
    """One in every actor and one in every worker beside a rollout server."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._is_master = is_master
        self._store: TCPStore | None = None

    def prepare(self) -> Address | None:
        """Open the store; its address, from the process that keeps it."""
        if not self._is_master:
            return None
        if self._store is None:
            host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        return Address(self._store.host, self._store.port)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Address | None]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Everybody reads from the first actor."""
        address = metadata[0]
        return {"address": [address] * actor_wg_world_size}, {"address": [address] * rollout_world_size}

    def init_process_group(self, address: Address) -> None:
        """Reach the store, which is the same in every update."""
        if self._store is None:
            self._store = TCPStore(address.host, address.port, is_master=False, timeout=_TIMEOUT)

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """Every actor walks through the weights, since gathering them is collective; the first puts them down."""
        named = {name: tensor.detach().cpu().clone() for name, tensor in weights}
        if self._is_master:
            await asyncio.to_thread(self._opened.set, _WEIGHTS, save(named))  # type: ignore[arg-type]  # bytes do
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Wait until they are there, and hand them out one by one."""
        blob = await asyncio.to_thread(self._opened.get, _WEIGHTS)
        for name, tensor in load(blob).items():
            yield name, tensor

    def finalize(self) -> None:
        """All have read (checkpoint_engine/base.py:528 waits for both sides): forget them, or the next ones would be read late."""
        if self._is_master:
            self._opened.delete_key(_WEIGHTS)

    @property
    def _opened(self) -> TCPStore:
        assert self._store is not None  # `prepare` or `init_process_group` came first
        return self._store
