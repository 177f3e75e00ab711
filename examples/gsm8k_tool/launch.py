"""The demo's training command: verl's own `main_ppo`, as published, on the CPU, with this package's loop.

One place for the tests and for the demo script. What belongs to the machine (CPU platform, small buffers, two Ray slots)
stands apart from what a user on GPUs would write too.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

PROMPTS_PER_STEP = 16
SAMPLES_PER_PROMPT = 8
LEARNING_RATE = "4e-4"
MAX_PROMPT_TOKENS = 128
MAX_RESPONSE_TOKENS = 256

VERL_METRICS = "verl_metrics.jsonl"
LOOP_CLASS = "sglang_multiturn.verl_plugin.agent_loop.SglangMultiturnAgentLoop"


def main_ppo_overrides(
    *,
    model: Path,
    train: Path,
    heldout: Path,
    tools: Path,
    reward: Path,
    run_dir: Path,
    steps: int,
    seed: int,
    v1: bool = True,
) -> list[str]:
    """Hydra overrides for `python -m verl.trainer.main_ppo`.

    Afterwards `run_dir` holds `verl_metrics.jsonl`, `journal/*.jsonl` and `checkpoints/global_step_N/actor/huggingface`.
    """
    return [
        *_task(model=model, train=train, heldout=heldout, reward=reward, seed=seed),
        *_rollout(tools=tools, run_dir=run_dir, seed=seed),
        *_actor(seed=seed),
        *_trainer(run_dir=run_dir, steps=steps, v1=v1),
        *_cpu(),
    ]


def main_ppo_env(run_dir: Path) -> dict[str, str]:
    """The environment of that command: the present one, the CPU parts asked for, and where the metrics go."""
    return {
        **os.environ,
        "SGLANG_MULTITURN_CPU": "1",
        "OMP_NUM_THREADS": "1",
        "VERL_FILE_LOGGER_PATH": str(run_dir / VERL_METRICS),
        "HYDRA_FULL_ERROR": "1",
        "PYTHONWARNINGS": "ignore",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray gives its workers the lowest priority but four; beside anything else on two cores they would starve.
        "RAY_worker_niceness": "0",
        # Ray kills workers when the machine's memory is short, whoever uses it.
        "RAY_memory_monitor_refresh_ms": "0",
    }


def training_metrics(run_dir: Path) -> list[dict[str, float]]:
    """What verl has logged so far, one dict a step, `step` among its keys."""
    path = run_dir / VERL_METRICS
    complete = path.read_text(encoding="utf-8").rpartition("\n")[0] if path.exists() else ""
    return [{"step": entry["step"], **entry["data"]} for entry in map(json.loads, complete.splitlines())]


def _task(*, model: Path, train: Path, heldout: Path, reward: Path, seed: int) -> list[str]:
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={train}",
        f"data.val_files={heldout}",
        f"data.train_batch_size={PROMPTS_PER_STEP}",
        f"data.max_prompt_length={MAX_PROMPT_TOKENS}",
        f"data.max_response_length={MAX_RESPONSE_TOKENS}",
        "data.shuffle=True",
        f"data.seed={seed}",
        "data.dataloader_num_workers=0",
        "data.return_raw_chat=True",
        f"actor_rollout_ref.model.path={model}",
        f"reward.custom_reward_function.path={reward}",
        "reward.num_workers=1",
    ]


def _rollout(*, tools: Path, run_dir: Path, seed: int) -> list[str]:
    return [
        # What switches this package on.
        "actor_rollout_ref.rollout.agent.default_agent_loop=sglang_multiturn",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tools}",
        # Only for the journal's folder: everything else has a default or stands in the tool YAML.
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={_agent_loop_file(run_dir)}",
        f"actor_rollout_ref.rollout.n={SAMPLES_PER_PROMPT}",
        "actor_rollout_ref.rollout.calculate_log_probs=True",
        f"actor_rollout_ref.rollout.seed={seed}",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
    ]


def _agent_loop_file(run_dir: Path) -> Path:
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "agent_loop.yaml"
    entry = {"name": "sglang_multiturn", "_target_": LOOP_CLASS, "journal_dir": str(run_dir / "journal")}
    path.write_text(json.dumps([entry], indent=2), encoding="utf-8")  # JSON is YAML
    return path


def _actor(*, seed: int) -> list[str]:
    return [
        "actor_rollout_ref.actor.strategy=fsdp2",
        f"actor_rollout_ref.actor.optim.lr={LEARNING_RATE}",
        # High enough to learn in thirty steps, and low in the end, where it would only add noise.
        "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
        "actor_rollout_ref.actor.optim.min_lr_ratio=0.1",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS_PER_STEP}",
        # V1 fills a step up to whole mini-batches (trainer_base.py:1589), however many conversations were dropped.
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
        f"actor_rollout_ref.actor.data_loader_seed={seed}",
        "actor_rollout_ref.actor.checkpoint.save_contents=[hf_model]",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
    ]


def _trainer(*, run_dir: Path, steps: int, v1: bool) -> list[str]:
    return [
        f"trainer.use_v1={v1}",
        f"trainer.total_training_steps={steps}",
        f"trainer.save_freq={steps}",
        f"trainer.default_local_dir={run_dir / 'checkpoints'}",
        "trainer.logger=[console,file]",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.resume_mode=disable",
        "trainer.nnodes=1",
        "trainer.n_gpus_per_node=1",
    ]


def _cpu() -> list[str]:
    """What only a machine without an accelerator needs."""
    fp32 = "{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}"
    return [
        "trainer.device=cpu",
        "actor_rollout_ref.rollout.name=sglang_cpu",
        "actor_rollout_ref.rollout.dtype=float32",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        f"+actor_rollout_ref.actor.fsdp_config.mixed_precision={fp32}",
        # Ray counts slots, not hardware: one for the actor, and processes that wait for each other most of the time.
        "+ray_kwargs.ray_init.num_gpus=1",
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.object_store_memory=500000000",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "transfer_queue.backend.SimpleStorage.total_storage_size=1000",
    ]
