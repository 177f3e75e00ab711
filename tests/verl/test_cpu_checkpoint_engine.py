"""Weights through the CPU's checkpoint engine, as `CheckpointEngineManager.update_weights` drives it."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("verl")

import torch

from sglang_multiturn.cpu.checkpoint_engine import StoreCheckpointEngine

Weights = dict[str, torch.Tensor]


async def update(
    actors: list[StoreCheckpointEngine], servers: list[StoreCheckpointEngine], sent: Weights
) -> list[Weights]:
    """What each server's worker receives; verl starts both sides at once, and forgets after both are done."""
    metadata = [engine.prepare() for engine in [*actors, *servers]]
    to_actors, to_servers = StoreCheckpointEngine.build_topology(len(actors), len(servers), metadata)
    for engine, address in zip([*actors, *servers], [*to_actors["address"], *to_servers["address"]], strict=True):
        engine.init_process_group(address)

    async def receive(engine: StoreCheckpointEngine) -> Weights:
        return {name: tensor async for name, tensor in engine.receive_weights(global_steps=1)}

    async with asyncio.TaskGroup() as group:
        received = [group.create_task(receive(engine)) for engine in servers]
        for engine in actors:
            group.create_task(engine.send_weights(iter(sent.items()), global_steps=1))
    for engine in [*actors, *servers]:
        engine.finalize()
    return [task.result() for task in received]


async def test_every_server_gets_the_weights_of_this_update() -> None:
    actors = [StoreCheckpointEngine(bucket_size=1, is_master=rank == 0) for rank in range(2)]
    servers = [StoreCheckpointEngine(bucket_size=1) for _ in range(2)]
    tied = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    for step in range(3):
        sent = {"embed.weight": tied + step, "lm_head.weight": tied + step, "norm.weight": torch.full((4,), step / 2)}
        for received in await update(actors, servers, sent):
            assert received.keys() == sent.keys()
            for name, tensor in received.items():
                assert tensor.dtype == sent[name].dtype
                assert torch.equal(tensor, sent[name])
