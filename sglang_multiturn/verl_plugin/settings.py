"""Our settings out of verl's: which of the four places that may set one wins.

    extra keys of our entry in `agent.agent_loop_config_path`
    > `rollout:` of the tool YAML
    > a key of `rollout.multi_turn` that differs from verl's default
    > our default

verl's defaults are no wishes of anybody (one parallel call, 256 characters of tool result). Whatever wins, the budgets
never exceed `rollout.prompt_length` and `rollout.response_length`: verl's tensors have those sizes.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from verl.workers.config.rollout import MultiTurnConfig

from sglang_multiturn.config import RENAMED, RolloutConfig, validate_config
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.tools.registry import ToolRegistry

logger = logging.getLogger(__name__)

_CHARS_PER_TOKEN = 4
_LOOP_KEYS = frozenset({"name"})
"""Keys of an `agent_loop_config_path` entry that are verl's own (agent_loop.py:540)."""

CONTEXT_RESERVE_TOKENS = 8
"""Kept free at the end of the model's context: verl's SGLang server keeps one token (async_sglang_server.py:588) and SGLang
itself a few more, and both would shorten a generation without saying so."""


def merge_settings(rollout: Any, yaml_settings: RolloutConfig | None, entry: Mapping[str, Any]) -> RolloutConfig:
    """The settings of one agent loop.

    Args:
        rollout: verl's `actor_rollout_ref.rollout`.
        yaml_settings: the tool YAML's `rollout:` part, None where there is none.
        entry: extra keys of our entry in `agent_loop_config_path`.

    Raises:
        ConfigError: an unknown or wrong setting, or something this loop cannot do.
    """
    refuse_unsupported(rollout)
    values = from_multi_turn(rollout.multi_turn)
    if yaml_settings is not None:
        values |= yaml_settings.model_dump(exclude_unset=True)
    given = {RENAMED.get(key, key): value for key, value in entry.items() if key not in _LOOP_KEYS}
    values |= validate_config(given, RolloutConfig, "agent_loop_config_path").model_dump(exclude_unset=True)
    for ours, theirs in (("max_prompt_tokens", "prompt_length"), ("max_response_tokens", "response_length")):
        values[ours] = min(values.get(ours) or rollout[theirs], rollout[theirs])
    merged = validate_config(values, RolloutConfig, "the merged settings")
    refuse_standalone(merged)
    return merged


def refuse_standalone(settings: RolloutConfig) -> None:
    """Raises ConfigError for a policy that the standalone runner has and verl has in a place of its own."""
    if settings.max_staleness is None and settings.stale == "train":
        return
    raise ConfigError(
        "max_staleness and stale are for runs without verl, whose trainer decides which rollouts are too old: leave them out "
        "and set trainer.v1.sampler.max_off_policy_threshold (weight versions) and "
        "trainer.v1.sampler.max_off_policy_strategy (drop or wait), which V1's asynchronous trainer modes obey"
    )


def validation_settings(settings: RolloutConfig, *, has_reward_fn: bool) -> RolloutConfig:
    """The settings of validation conversations: the reward is the score alone, and length takes none of it away.

    Where no reward function gives a score, step rewards and `calc_reward` are all there is, and stay. A rollout that
    `timeout: drop` or `failed` would drop counts as 0 (`row_keeping`).
    """
    changes: dict[str, Any] = {"overlong": "train"}
    if has_reward_fn:
        changes |= {"score_weight": 1.0, "step_rewards": "off", "calc_rewards": "off"}
    return settings.model_copy(update=changes)


def refuse_unsupported(rollout: Any) -> None:
    """Raises ConfigError for what would come out wrong, rather than training on it."""
    if rollout.get("enable_rollout_routing_replay", False):
        raise ConfigError(
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=true: the experts a rollout used are not recorded "
            "by this loop; set it to false"
        )


def refuse_leaking_faults(config: Any, tools: ToolRegistry) -> None:
    """Raises ConfigError where a tool's injected faults would reach validation too, for a verl that was not adapted.

    There only how a conversation is sampled tells what it is for, unless validation samples as training does.
    """
    faulty = [entry for entry in tools.entries if entry.settings.faults is not None]
    rollout, trainer = config.actor_rollout_ref.rollout, config.get("trainer") or {}
    validates = trainer.get("test_freq", -1) > 0 or trainer.get("val_before_train", True)
    if not faulty or not validates or sampling_keys(rollout.val_kwargs) != sampling_keys(rollout):
        return
    entry = faulty[0]
    raise ConfigError(
        f"{entry.place or 'tools'}: faults of tool {entry.name!r} would leak into validation, which samples exactly as "
        "training does (temperature, top_p, top_k) and cannot be told from it: give actor_rollout_ref.rollout.val_kwargs "
        "values of its own, or turn validation off (trainer.val_before_train=false trainer.test_freq=-1), or leave faults out"
    )


def sampling_keys(given: Any) -> tuple[float, float, int]:
    """What training and validation may sample differently by: temperature, top_p, top_k."""
    return float(given["temperature"]), float(given["top_p"]), int(given["top_k"])


def from_multi_turn(multi_turn: Any) -> dict[str, Any]:
    """What `rollout.multi_turn` says other than verl's defaults, under our names."""
    defaults = {field.name: field.default for field in dataclasses.fields(MultiTurnConfig)}
    said = {key: multi_turn[key] for key in defaults if key in multi_turn and multi_turn[key] != defaults[key]}
    values: dict[str, Any] = {}
    for theirs, ours in (
        ("max_assistant_turns", "max_assistant_turns"),
        ("max_parallel_calls", "max_parallel_calls"),
        ("tool_response_truncate_side", "tool_result_cut"),
        ("format", "tool_parser"),
    ):
        if theirs in said:
            values[ours] = said[theirs]
    if "max_user_turns" in said:
        # verl counts every turn that is not the model's, and tools' are the only ones it has (tool_agent_loop.py:410).
        values["max_user_turns"] = values["max_tool_turns"] = said["max_user_turns"]
    if "max_tool_response_length" in said:
        characters = said["max_tool_response_length"]
        values["max_tool_result_tokens"] = max(8, characters // _CHARS_PER_TOKEN)
        logger.warning(
            "multi_turn.max_tool_response_length=%d counts characters; taken as max_tool_result_tokens=%d. "
            "Set max_tool_result_tokens under `rollout:` of the tool YAML to be exact",
            characters,
            values["max_tool_result_tokens"],
        )
    return values
