"""Which of the four places that may set a setting wins."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl")

from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

from sglang_multiturn.config import FaultConfig, RolloutConfig, ToolSettings
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.tools.registry import ToolRegistry
from sglang_multiturn.verl_plugin.settings import merge_settings, refuse_leaking_faults, validation_settings

from support import RecordingTool

MULTI_TURN_DEFAULTS = {
    "max_assistant_turns": None,
    "max_user_turns": None,
    "max_parallel_calls": 1,
    "max_tool_response_length": 256,
    "tool_response_truncate_side": "middle",
    "format": "hermes",
}


def rollout(**multi_turn: Any) -> DictConfig:
    return OmegaConf.create(
        {"prompt_length": 100, "response_length": 200, "multi_turn": {**MULTI_TURN_DEFAULTS, **multi_turn}}
    )


def test_verls_defaults_are_nobodys_wish() -> None:
    merged = merge_settings(rollout(), None, {})
    assert merged == RolloutConfig(max_prompt_tokens=100, max_response_tokens=200)


def test_a_verl_key_that_was_set_beats_our_default() -> None:
    merged = merge_settings(
        rollout(
            max_assistant_turns=3,
            max_user_turns=2,
            max_parallel_calls=4,
            max_tool_response_length=2048,
            tool_response_truncate_side="left",
            format="qwen3_coder",
        ),
        None,
        {},
    )
    assert (merged.max_assistant_turns, merged.max_parallel_calls, merged.tool_parser) == (3, 4, "qwen3_coder")
    assert (merged.max_user_turns, merged.max_tool_turns) == (2, 2)
    assert (merged.max_tool_result_tokens, merged.tool_result_cut) == (512, "left")


def test_the_tool_yaml_beats_verls_key_and_the_entry_beats_the_tool_yaml() -> None:
    yaml = RolloutConfig(max_assistant_turns=5, max_parallel_calls=6)
    merged = merge_settings(
        rollout(max_assistant_turns=3, max_parallel_calls=4, max_user_turns=2),
        yaml,
        {"name": "sglang_multiturn", "max_turns": 7},
    )
    assert (merged.max_assistant_turns, merged.max_parallel_calls, merged.max_user_turns) == (7, 6, 2)


def test_a_default_of_the_tool_yaml_does_not_beat_verls_key() -> None:
    assert merge_settings(rollout(max_assistant_turns=3), RolloutConfig(), {}).max_assistant_turns == 3


def test_budgets_never_exceed_verls_and_may_be_smaller() -> None:
    merged = merge_settings(rollout(), RolloutConfig(max_response_tokens=5000, max_prompt_tokens=50), {})
    assert (merged.max_response_tokens, merged.max_prompt_tokens) == (200, 50)


def test_an_unknown_key_of_the_entry_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"max_asistant_turns.*did you mean 'max_assistant_turns'"):
        merge_settings(rollout(), None, {"max_asistant_turns": 3})


@pytest.mark.parametrize("given", [{"max_staleness": 2}, {"stale": "mask"}, {"max_staleness": 0, "stale": "drop"}])
@pytest.mark.parametrize("place", ["yaml", "entry"])
def test_staleness_is_verls_to_decide_and_the_message_says_where(given: dict[str, Any], place: str) -> None:
    yaml, entry = (RolloutConfig(**given), {}) if place == "yaml" else (None, given)
    with pytest.raises(ConfigError, match=r"trainer\.v1\.sampler\.max_off_policy_threshold .*max_off_policy_strategy"):
        merge_settings(rollout(), yaml, entry)


def test_the_flags_of_staleness_are_still_verls() -> None:
    with initialize_config_module("verl.trainer.config", version_base=None):
        sampler = compose("ppo_trainer").trainer.v1.sampler
    assert {"max_off_policy_threshold", "max_off_policy_strategy"} <= set(sampler)


def test_a_yaml_that_says_the_defaults_of_staleness_is_fine() -> None:
    merge_settings(rollout(), RolloutConfig(max_staleness=None, stale="train"), {})


def test_validation_has_the_reward_of_the_function_alone_and_no_policy_of_length() -> None:
    train = RolloutConfig(
        score_weight=2.0,
        step_rewards="sum",
        calc_rewards="last",
        overlong="drop",
        timeout="mask",
        max_assistant_turns=3,
    )
    plain = {"score_weight": 1.0, "step_rewards": "off", "calc_rewards": "off", "overlong": "train"}
    assert validation_settings(train, has_reward_fn=True) == train.model_copy(update=plain)
    assert validation_settings(train, has_reward_fn=False) == train.model_copy(update={"overlong": "train"})


def test_routing_replay_is_refused() -> None:
    config = rollout()
    config.enable_rollout_routing_replay = True
    with pytest.raises(ConfigError, match="enable_rollout_routing_replay"):
        merge_settings(config, None, {})


def faulty_tools() -> ToolRegistry:
    return ToolRegistry([RecordingTool()], settings={"echo": ToolSettings(faults=FaultConfig(error_rate=0.1))})


def launch(*, temperature: float, **trainer: Any) -> DictConfig:
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    rollout = {**sampling, "val_kwargs": {**sampling, "temperature": temperature}}
    return OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}, "trainer": trainer})


@pytest.mark.parametrize("trainer", [{"val_before_train": True}, {"val_before_train": False, "test_freq": 5}, {}])
def test_injected_faults_are_refused_where_they_would_leak_into_validation(trainer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="faults of tool 'echo' would leak into validation, which samples exactly as"):
        refuse_leaking_faults(launch(temperature=1.0, **trainer), faulty_tools())


def test_injected_faults_are_let_be_where_validation_can_be_told_or_there_is_none() -> None:
    refuse_leaking_faults(launch(temperature=0.0), faulty_tools())
    refuse_leaking_faults(launch(temperature=1.0, val_before_train=False, test_freq=-1), faulty_tools())
    refuse_leaking_faults(launch(temperature=1.0), ToolRegistry([RecordingTool()]))
