"""Run by test_update_step.py in a process of its own: one real actor update with a row of every stop reason, no Ray.

Its last line of output is JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.update(
    SGLANG_MULTITURN_CPU="1",
    MASTER_ADDR="127.0.0.1",
    RANK="0",
    WORLD_SIZE="1",
    LOCAL_RANK="0",
    LOCAL_WORLD_SIZE="1",
)

import numpy as np
import torch
from hydra import compose, initialize_config_module
from launch import main_ppo_overrides
from omegaconf import DictConfig
from tensordict import TensorDict
from test_rows import build, trajectory
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput, AgentLoopWorker
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage
from verl.utils import tensordict_utils as tu
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from sglang_multiturn.request import StopReason

EXAMPLE = Path(__file__).parents[2] / "examples" / "gsm8k_tool"


def configuration(folder: Path, rows: int) -> DictConfig:
    overrides = main_ppo_overrides(
        model=EXAMPLE / "tiny_model",
        train=folder / "train.parquet",
        heldout=folder / "heldout.parquet",
        tools=EXAMPLE.parents[1] / "tool_configs" / "calculator.yaml",
        reward=EXAMPLE / "reward.py",
        run_dir=folder,
        steps=1,
        seed=1,
    )
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    config.actor_rollout_ref.actor.ppo_mini_batch_size = rows
    config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu = rows // 2
    config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu = rows // 2
    config.actor_rollout_ref.rollout.n = 1
    config.actor_rollout_ref.actor.optim.weight_decay = 0.0  # the only thing that moves weights without a gradient
    return config


async def as_v0_batch(worker: AgentLoopWorker, rows: list[AgentLoopOutput]) -> DataProto:
    """verl's own padding and batching of the rows."""
    prompt = [{"role": "user", "content": "?"}]
    padded = [await worker._agent_loop_postprocess(row, False, raw_prompt=prompt) for row in rows]
    return worker._postprocess(padded)


def as_v1_columns(rows: list[AgentLoopOutput]) -> list[str]:
    """What the V1 worker puts into TransferQueue: columns that every row has."""
    return sorted(map(str, list_of_dict_to_tensordict([row.as_dict() for row in rows]).keys()))


class Actor:
    """verl's FSDP2 actor of the demo."""

    def __init__(self, config: DictConfig, rows: int) -> None:
        self.rows = rows
        self.worker = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor")
        self.worker.init_model()

    def update(self, batch: DataProto, seed: int) -> dict[str, float]:
        """One optimizer step on GRPO advantages; its metrics."""
        mask = batch.batch["response_mask"]
        uid = np.array(["group"] * len(batch), dtype=object)
        advantages, _ = compute_grpo_outcome_advantage(batch.batch["rm_scores"], mask, uid)
        data = self._tensors(batch)
        tu.assign_non_tensor(data, calculate_entropy=True, compute_loss=False, temperature=1.0, pad_token_id=0)
        old = no_padding_2_padding(self.worker.compute_log_prob(data)["log_probs"], data)
        data = self._tensors(batch)
        data["old_log_probs"], data["advantages"] = old, advantages
        tu.assign_non_tensor(
            data,
            calculate_entropy=True,
            global_batch_size=self.rows,
            mini_batch_size=self.rows,
            epochs=1,
            seed=seed,
            dataloader_kwargs={"shuffle": False},
            temperature=1.0,
            pad_token_id=0,
        )
        metrics = tu.get(self.worker.update_actor(data), "metrics")
        return {key: float(np.mean(metrics[key])) for key in ("loss", "grad_norm")}

    def _tensors(self, batch: DataProto) -> TensorDict:
        keys = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask")
        return left_right_2_no_padding(TensorDict({key: batch.batch[key].clone() for key in keys}, len(batch)))

    def parameters(self) -> list[torch.Tensor]:
        return [value.full_tensor().clone() for value in self.worker.actor.engine.module.state_dict().values()]


async def main(folder: Path) -> dict[str, Any]:
    ended = [trajectory(reason) for reason in StopReason]
    rows = [build(one) for one in ended]
    config = configuration(folder, len(rows))
    worker = AgentLoopWorker(config, llm_client=None)
    batch = await as_v0_batch(worker, [build(one, user_extra=False) for one in ended])
    for index in range(len(rows)):  # rewards that differ, or every advantage would be 0
        batch.batch["rm_scores"][index] *= 1.0 + index / len(rows)
    dropped = [build(trajectory(StopReason.ERROR), user_extra=False) for _ in rows]
    masked_batch = await as_v0_batch(worker, dropped)
    actor = Actor(config, len(rows))
    before = actor.parameters()
    nothing = actor.update(masked_batch, seed=1)
    untouched = all(torch.equal(a, b) for a, b in zip(before, actor.parameters(), strict=True))
    update = actor.update(batch, seed=2)
    after = actor.parameters()
    return {
        "rows": len(batch),
        "v1_columns": as_v1_columns(rows),
        "trained_tokens": int(batch.batch["response_mask"].sum()),
        "update": update,
        "moved": sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)),
        "only_masked": nothing,
        "only_masked_moved_nothing": untouched,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(Path(sys.argv[1])))) + "\n")
