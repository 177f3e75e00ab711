"""A launch command of verl's, looked at before it runs, mostly on a machine without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import warnings
from collections.abc import Mapping
from typing import Any

from sglang_multiturn.config import RolloutConfig
from sglang_multiturn.cpu.sglang_kernels import prepare_on_cpu
from sglang_multiturn.errors import ConfigError


def prepare_to_import() -> None:
    """What verl imports breaks beside a torch without CUDA, unless its operators are declared; safe to call again."""
    if importlib.util.find_spec("sglang") is not None:
        prepare_on_cpu()


def launch_settings(rollout: Any, yaml_settings: RolloutConfig | None, entry: Mapping[str, Any]) -> RolloutConfig:
    """Our settings as a worker would merge them; see `settings.merge_settings`. Raises ConfigError."""
    prepare_to_import()
    from sglang_multiturn.verl_plugin.settings import merge_settings

    return merge_settings(rollout, yaml_settings, entry)


def context_reserve() -> int:
    """Tokens at the end of the context that a conversation does not use."""
    prepare_to_import()
    from sglang_multiturn.verl_plugin.settings import CONTEXT_RESERVE_TOKENS

    return CONTEXT_RESERVE_TOKENS


def registered_loops() -> dict[str, str]:
    """Agent loops verl knows in this process, with the class of each. Imports verl's agent loop: seconds."""
    prepare_to_import()
    from verl.experimental.agent_loop import agent_loop

    return {name: str(entry.get("_target_", "")) for name, entry in agent_loop._agent_loop_registry.items()}


def multi_turn_defaults() -> dict[str, Any]:
    """verl's defaults of `rollout.multi_turn`."""
    prepare_to_import()
    from verl.workers.config.rollout import MultiTurnConfig

    return {field.name: field.default for field in dataclasses.fields(MultiTurnConfig)}


def refuse_as_verl(config: Any) -> None:
    """What `main_ppo` checks before it starts Ray, with what it prints thrown away.

    Raises:
        ConfigError: verl's own words, where it refuses the configuration.
    """
    prepare_to_import()
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
            validate_config(
                config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
            )
    except Exception as error:  # verl asserts, hydra wraps
        raise ConfigError(f"verl refuses this configuration: {type(error).__name__}: {error}") from error
