#!/usr/bin/env bash
# GRPO on GSM8K with a tool: Qwen2.5, verl 0.9.1, FSDP2, SGLang, one node with GPUs.
#
#   pip install 'sglang_multiturn[verl,sglang]'
#   python examples/gsm8k_tool/prepare_gsm8k.py --out data/gsm8k
#   bash examples/gsm8k_tool/train_qwen2_5_gsm8k.sh
#
# Run it from the repository's root. MODEL, DATA, TOOLS and GPUS can be set in the environment, and whatever follows the
# script's name goes to verl as further overrides, for example: trainer.total_training_steps=50 trainer.logger=[console,wandb]
#
# For the calculator: prepare_gsm8k.py --tool calculator --out data/gsm8k_calculator, then
#   DATA=data/gsm8k_calculator TOOLS=tool_configs/calculator.yaml bash examples/gsm8k_tool/train_qwen2_5_gsm8k.sh
set -euo pipefail

MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
DATA=${DATA:-data/gsm8k}
TOOLS=${TOOLS:-tool_configs/gsm8k.yaml}
GPUS=${GPUS:-8}

for file in "$DATA/train.parquet" "$DATA/test.parquet" "$TOOLS"; do
  if [[ ! -f $file ]]; then
    echo "$file is missing; run this from the repository's root, after prepare_gsm8k.py --out $DATA" >&2
    exit 1
  fi
done

# Ray's workers have other working directories, so paths are made absolute.
DATA=$(realpath "$DATA")
TOOLS=$(realpath "$TOOLS")
if [[ -d $MODEL ]]; then MODEL=$(realpath "$MODEL"); fi

overrides=(
  # Task
  algorithm.adv_estimator=grpo
  algorithm.use_kl_in_reward=False
  data.train_files="$DATA/train.parquet"
  data.val_files="$DATA/test.parquet"
  data.train_batch_size=256
  data.max_prompt_length=1024
  data.max_response_length=1024
  data.filter_overlong_prompts=True
  data.truncation=error
  data.return_raw_chat=True
  reward.custom_reward_function.path="$PWD/examples/gsm8k_tool/reward_gsm8k.py"
  reward.custom_reward_function.name=compute_score

  # Rollout: the one flag that brings in this package, and the tools
  actor_rollout_ref.rollout.agent.default_agent_loop=sglang_multiturn
  actor_rollout_ref.rollout.multi_turn.enable=True
  actor_rollout_ref.rollout.multi_turn.tool_config_path="$TOOLS"
  actor_rollout_ref.rollout.multi_turn.max_assistant_turns=5
  actor_rollout_ref.rollout.multi_turn.format=hermes
  actor_rollout_ref.rollout.name=sglang
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5

  # Model and actor
  actor_rollout_ref.model.path="$MODEL"
  actor_rollout_ref.model.use_remove_padding=True
  actor_rollout_ref.model.enable_gradient_checkpointing=True
  actor_rollout_ref.actor.strategy=fsdp2
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=256
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384
  actor_rollout_ref.actor.entropy_coeff=0
  actor_rollout_ref.actor.use_kl_loss=True
  actor_rollout_ref.actor.kl_loss_coef=0.001
  actor_rollout_ref.actor.kl_loss_type=low_var_kl

  # Trainer
  trainer.n_gpus_per_node="$GPUS"
  trainer.nnodes=1
  trainer.total_epochs=15
  trainer.test_freq=20
  trainer.save_freq=100
  trainer.project_name=sglang_multiturn
  trainer.experiment_name=qwen2_5_gsm8k
  trainer.logger=[console]
)

exec python -m verl.trainer.main_ppo "${overrides[@]}" "$@"
