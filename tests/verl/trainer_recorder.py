"""Imported by verl in its processes (VERL_USE_EXTERNAL_MODULES): writes down what the real trainer computed advantages of.

One JSON line a row, into the file TRAINER_RECORD. Nothing is changed: the trainer's own function is called and its result
handed on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from sglang_multiturn.verl_plugin.after_import import after_import


def record_v1(trainer: ModuleType) -> None:
    original: Callable[..., Any] = trainer.compute_advantage_for_multi_trajectories

    def compute(data: Any, batch_keys: list[str], **kwargs: Any) -> Any:
        result = original(data, batch_keys=batch_keys, **kwargs)
        stored = trainer.tq.kv_batch_get(
            keys=batch_keys, partition_id="train", select_fields=["prompts", "responses", "extra_fields"]
        )
        names = [getattr(fields, "data", fields)["request_id"] for fields in stored["extra_fields"]]
        for i, key in enumerate(batch_keys):
            ids = stored["responses"][i].tolist()
            write(result, i, request_id=names[i], prompt=stored["prompts"][i].tolist(), response=ids, key=key)
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
                request_id=data.non_tensor_batch["request_id"][i],
                prompt=data.batch["prompts"][i][seen[:width]].tolist(),
                response=data.batch["responses"][i][seen[width:]].tolist(),
                key=data.non_tensor_batch["uid"][i],
            )
        return result

    trainer.compute_advantage = compute  # type: ignore[attr-defined]


def write(data: Any, i: int, *, request_id: str, prompt: list[int], response: list[int], key: str) -> None:
    columns = ("response_mask", "rollout_log_probs", "advantages", "token_level_scores")
    row = {name: data.batch[name][i, : len(response)].tolist() for name in columns}
    line = json.dumps({"key": key, "request_id": request_id, "prompt": prompt, "response": response} | row)
    with Path(os.environ["TRAINER_RECORD"]).open("a") as record:
        record.write(line + "\n")


after_import("verl.trainer.ppo.v1.trainer_base", record_v1)
after_import("verl.trainer.ppo.ray_trainer", record_v0)
