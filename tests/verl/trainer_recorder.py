"""Imported by verl in its processes (VERL_USE_EXTERNAL_MODULES): writes down what the real trainer computed advantages of.

One JSON line a row, into the file TRAINER_RECORD. Nothing is changed: the trainer's own function is called and its result
handed on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_multiturn.verl_plugin.after_import import after_import

COLUMNS = (
    *("response_mask", "rollout_log_probs", "old_log_probs", "ref_log_prob", "values"),
    *("token_level_scores", "token_level_rewards", "advantages", "returns"),
)
"""What the trainer has of every response token; written down where it is there."""


def record_v1(trainer: ModuleType) -> None:
    original: Callable[..., Any] = trainer.compute_advantage_for_multi_trajectories

    def compute(data: Any, batch_keys: list[str], **kwargs: Any) -> Any:
        result = original(data, batch_keys=batch_keys, **kwargs)
        stored = trainer.tq.kv_batch_get(
            keys=batch_keys, partition_id="train", select_fields=["prompts", "responses", "extra_fields"]
        )
        for i, key in enumerate(batch_keys):
            prompt, response = (stored[name][i].tolist() for name in ("prompts", "responses"))
            fields = stored["extra_fields"][i]
            write(result, i, key=key, prompt=prompt, response=response, extra=getattr(fields, "data", fields))
        return result

    trainer.compute_advantage_for_multi_trajectories = compute  # type: ignore[attr-defined]


def record_v0(trainer: ModuleType) -> None:
    original: Callable[..., Any] = trainer.compute_advantage

    def compute(data: Any, **kwargs: Any) -> Any:
        result = original(data, **kwargs)
        if "responses" not in data.batch:  # V1 comes by here too
            return result
        width = data.batch["prompts"].shape[1]
        for i in range(len(data)):
            seen = data.batch["attention_mask"][i].bool()
            write(
                result,
                i,
                key=data.non_tensor_batch["uid"][i],
                prompt=data.batch["prompts"][i][seen[:width]].tolist(),
                response=data.batch["responses"][i][seen[width:]].tolist(),
                extra={name: column[i] for name, column in data.non_tensor_batch.items()},
            )
        return result

    trainer.compute_advantage = compute  # type: ignore[attr-defined]


def write(data: Any, i: int, *, key: str, prompt: list[int], response: list[int], extra: Mapping[str, Any]) -> None:
    """`fields` are the names of what the row brought beside its tokens, `versions` its oldest and newest weights."""
    row = {name: data.batch[name][i, : len(response)].tolist() for name in COLUMNS if name in data.batch}
    row |= {"key": key, "prompt": prompt, "response": response, "request_id": extra["request_id"]}
    row |= {"fields": sorted(name for name, value in extra.items() if value is not None)}
    row |= {"versions": [extra["min_global_steps"], extra["max_global_steps"]]}
    with Path(os.environ["TRAINER_RECORD"]).open("a") as record:
        record.write(json.dumps(row) + "\n")


after_import("verl.trainer.ppo.v1.trainer_base", record_v1)
after_import("verl.trainer.ppo.ray_trainer", record_v0)
