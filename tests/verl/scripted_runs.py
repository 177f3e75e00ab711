"""Runs of `main_ppo` in which a script plays SGLang, so that what must come out is known to the token."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import word_problems  # type: ignore[import-not-found]  # examples/gsm8k_tool
import yaml
from launch import LOOP_CLASS, main_ppo_overrides
from stop_reasons import (
    LOOP,
    LOOPS,
    MAX_PROMPT_TOKENS,
    MAX_RESPONSE_TOKENS,
    PLANS,
    SAMPLES,
    SCHEMA,
    SETTINGS,
    SHORT_CONTEXT_TOKENS,
    dataset_row,
    prompt_text,
)
from training import HERE, RECORDER, SCRIPTED, TINY_MODEL, Run, train
from transformers import AutoTokenizer

VALIDATION_SAMPLES = 2
VALIDATION = {plan: f"val_{plan}" for plan in ("answered", "error", "tool_stop", "max_response_tokens")}
"""Plans of the validation set, each with a data_source of its own: eight conversations, of which V0 makes no padding."""

tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)


def prompt_ids(plan: str, samples: int = SAMPLES, schema: Mapping[str, Any] = SCHEMA) -> list[int]:
    """What the model is shown of a prompt, as the template renders it."""
    messages = [{"role": "user", "content": prompt_text(plan, samples)}]
    text = tokenizer.apply_chat_template(messages, tools=[dict(schema)], add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def run_plans(
    folder: Path,
    plans: Sequence[str],
    *,
    v1: bool,
    workers: int,
    steps: int = 1,
    prompts: int | None = None,
    samples: int = SAMPLES,
    schema: Mapping[str, Any] = SCHEMA,
    model: Path = TINY_MODEL,
    overrides: Iterable[str] = (),
    settings: Mapping[str, Any] | None = None,
    modules: Sequence[str] = (RECORDER, SCRIPTED),
    entry_point: str = "verl.trainer.main_ppo",
) -> Run:
    """Train `steps` steps, each on `prompts` of `plans` (all, unless given). `settings` are further ones of every loop, `overrides` Hydra's."""
    folder.mkdir(parents=True, exist_ok=True)
    train_file, heldout, tools = folder / "train.parquet", folder / "heldout.parquet", folder / "tools.yaml"
    word_problems.write([dataset_row(plan, index, samples=samples) for index, plan in enumerate(plans)], train_file)
    word_problems.write(
        [
            dataset_row(plan, index, samples=VALIDATION_SAMPLES, source=source)
            for index, (plan, source) in enumerate(VALIDATION.items())
        ],
        heldout,
    )
    tools.write_text(
        yaml.safe_dump({"tools": [{"class_name": "stop_reasons.Do", "tool_schema": dict(schema)}]}, sort_keys=False)
    )
    usual = main_ppo_overrides(
        model=model,
        train=train_file,
        heldout=heldout,
        tools=tools,
        reward=HERE / "said_score.py",
        run_dir=folder,
        steps=steps,
        seed=1,
        v1=v1,
    )
    loops = _loops(folder, settings or {})
    return train(
        folder,
        [*usual, *_sizes(prompts or len(plans), samples, workers, loops), *overrides],
        v1=v1,
        modules=modules,
        entry_point=entry_point,
    )


def _sizes(prompts: int, samples: int, workers: int, loops: Path) -> list[str]:
    rollout = "actor_rollout_ref.rollout"
    return [
        f"data.train_batch_size={prompts}",
        f"data.max_prompt_length={MAX_PROMPT_TOKENS}",
        f"data.max_response_length={MAX_RESPONSE_TOKENS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={prompts * samples}",
        f"{rollout}.log_prob_micro_batch_size_per_gpu={prompts * samples}",
        f"{rollout}.n={samples}",
        f"{rollout}.agent.num_workers={workers}",
        f"{rollout}.agent.agent_loop_config_path={loops}",
        f"{rollout}.val_kwargs.n={VALIDATION_SAMPLES}",
        "actor_rollout_ref.actor.optim.lr=1e-5",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]",
    ]


def _loops(folder: Path, settings: Mapping[str, Any]) -> Path:
    common = {"_target_": LOOP_CLASS, "journal_dir": str(folder / "journal"), **SETTINGS, **settings}
    short = {"max_model_len": len(prompt_ids("max_model_len")) + SHORT_CONTEXT_TOKENS}
    entries = [
        {"name": name, **common, **own, **(short if name == PLANS["max_model_len"].loop else {})}
        for name, own in LOOPS.items()
    ]
    assert entries[0]["name"] == LOOP
    path = folder / "loops.yaml"
    path.write_text(json.dumps(entries, indent=2), encoding="utf-8")  # JSON is YAML
    return path
