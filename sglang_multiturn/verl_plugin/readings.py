"""What a worker reads from verl's configuration before its first conversation."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sglang_multiturn.chat.hf_template import HFChatTemplate
from sglang_multiturn.config import RolloutConfig
from sglang_multiturn.engine.base import SamplingParams
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.rewards import RewardFn, counts_tools
from sglang_multiturn.verl_plugin.requests import plain
from sglang_multiturn.verl_plugin.settings import CONTEXT_RESERVE_TOKENS

logger = logging.getLogger(__name__)

ONE_ROW = "this trainer takes one row a conversation; set trainer.use_v1=true (verl's V1 trainer takes several), or history: keep"
_COUNTS_SESSIONS_ONCE = frozenset({"grpo", "gae", "reinforce_plus_plus"})
"""Advantages that several rows of a session do not skew: V1 groups by session for the first (v1/utils.py:170), the
others compare no rows of a group with each other."""
_PLAIN_MANAGER = ("register", "naive")
"""verl's reward manager that does no more than to call the reward function."""


def chat_template(config: Any, tokenizer: Any) -> HFChatTemplate:
    """The template of verl's own tokenizer, with the ends that the model's generation config names."""
    from transformers import GenerationConfig
    from verl.utils.fs import copy_to_local

    try:
        ends = GenerationConfig.from_pretrained(copy_to_local(config.actor_rollout_ref.model.path)).eos_token_id
    except OSError:
        ends = None  # a model need not have one
    return HFChatTemplate(
        tokenizer,
        stop_token_ids=[ends] if isinstance(ends, int) else ends or (),
        chat_template_kwargs=plain(config.data.get("apply_chat_template_kwargs") or {}),
    )


def max_model_len(config: Any) -> int:
    """Prompt and response together, as verl's servers take it (async_sglang_server.py:167), less the reserve."""
    from transformers import AutoConfig
    from verl.utils.fs import copy_to_local

    rollout = config.actor_rollout_ref.rollout
    longest = rollout.max_model_len
    if longest is None:
        model = config.actor_rollout_ref.model
        hf_config = AutoConfig.from_pretrained(
            copy_to_local(model.path), trust_remote_code=bool(model.get("trust_remote_code", False))
        )
        longest = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if longest is None:
        return int(rollout.prompt_length + rollout.response_length)
    return int(longest) - CONTEXT_RESERVE_TOKENS


def refuse_split(config: Any) -> None:
    """Raises ConfigError where `history: split` would fail or skew the advantages of a group."""
    if not (config.get("trainer") or {}).get("use_v1", False):
        raise ConfigError(f"history: split: {ONE_ROW}")
    estimator = str(getattr(config.algorithm.adv_estimator, "value", config.algorithm.adv_estimator))
    if estimator not in _COUNTS_SESSIONS_ONCE:
        raise ConfigError(
            f"history: split: algorithm.adv_estimator={estimator} compares all rows of a prompt, so that a conversation "
            f"of several rows would count several times; use {', '.join(sorted(_COUNTS_SESSIONS_ONCE))}, or history: keep"
        )


# Rewards


def reward_function(config: Any) -> RewardFn | None:
    """The user's `reward.custom_reward_function`, loaded by verl, where calling it here is all that scoring is.

    A reward model, or a reward manager that does more than to call the function (`dapo` adds a length penalty), stays
    verl's: rows then have no reward and verl scores them, from the text of the whole row.
    """
    from verl.trainer.ppo.reward import get_custom_reward_fn

    reward = config.reward
    if not (reward.get("custom_reward_function") or {}).get("path"):
        return None
    manager = reward.reward_manager
    if reward.reward_model.enable or (manager.source, manager.name) != _PLAIN_MANAGER:
        logger.warning(
            "verl scores this run (reward model or reward manager %r): its scorer reads tool answers as the model's words",
            manager.name,
        )
        return None
    reward_fn: RewardFn | None = get_custom_reward_fn(config)
    return reward_fn


def scores_here(config: Any, settings: RolloutConfig, reward_fn: RewardFn | None) -> bool:
    """Whether rows leave this package with a reward. verl scores only rows that have none.

    Raises:
        ConfigError: what tools say is to count, and so is a scorer of verl's that would not be asked.
    """
    if reward_fn is not None:
        return True
    if not counts_tools(settings):
        return False
    reward = config.reward
    if reward.reward_model.enable or (reward.reward_manager.source, reward.reward_manager.name) != _PLAIN_MANAGER:
        raise ConfigError(
            "step_rewards and calc_rewards cannot be added to what verl's reward model or its reward manager "
            f"{reward.reward_manager.name!r} say; set both to off, or use reward.custom_reward_function with the manager naive"
        )
    logger.warning("the reward is step_rewards and calc_rewards alone; reward.custom_reward_function would add a score")
    return True


# Groups


def filtered_group_size(config: Any) -> int | None:
    """Rollouts of a group where V1's DAPO filter runs, which raises on a group without any row (replay_buffer.py:299)."""
    return int(config.actor_rollout_ref.rollout.n) if _filters_groups(config) else None


def filter_metric(config: Any) -> tuple[str, ...]:
    """The key of `reward_extra_info` the DAPO filter reads on every row; `reward` is no such key."""
    metric = (config.algorithm.get("filter_groups") or {}).get("metric") if _filters_groups(config) else None
    return (str(metric),) if metric and metric != "reward" else ()


def _filters_groups(config: Any) -> bool:
    filter_groups = config.algorithm.get("filter_groups") or {}
    return bool(filter_groups.get("enable", False))


# Sampling


def sampling_of(given: Mapping[str, Any]) -> SamplingParams:
    """verl's sampling parameters of one conversation, as ours."""
    stop = given.get("stop") or ()
    return SamplingParams(
        temperature=float(given.get("temperature", 1.0)),
        top_p=float(given.get("top_p", 1.0)),
        top_k=int(given.get("top_k", -1)),
        min_p=float(given.get("min_p", 0.0)),
        repetition_penalty=float(given.get("repetition_penalty", 1.0)),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(given.get("stop_token_ids") or ()),
    )
