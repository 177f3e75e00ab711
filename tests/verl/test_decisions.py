"""What a worker decides from verl's configuration, and what the CPU server makes of verl's sampling parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

from omegaconf import DictConfig, OmegaConf

from sglang_multiturn.cpu.verl_replica import sampling_params_of
from sglang_multiturn.engine.base import SamplingParams
from sglang_multiturn.verl_plugin.readings import chat_template, max_model_len, reward_function
from sglang_multiturn.verl_plugin.settings import CONTEXT_RESERVE_TOKENS

SCORER = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):\n    return 1.0 + bonus\n"
)


def reward_config(path: Path | None, **more: Any) -> DictConfig:
    given = {
        "custom_reward_function": {
            "path": path and str(path),
            "name": "compute_score",
            "reward_kwargs": {"bonus": 0.5},
        },
        "reward_manager": {"source": "register", "name": "naive"},
        "reward_model": {"enable": False},
    }
    return OmegaConf.create({"reward": given | more})


@pytest.fixture
def scorer(tmp_path: Path) -> Path:
    path = tmp_path / "scorer.py"
    path.write_text(SCORER)
    return path


def test_the_users_function_is_loaded_by_verl_with_its_kwargs(scorer: Path) -> None:
    function = reward_function(reward_config(scorer))
    assert function is not None
    assert function(data_source="", solution_str="", ground_truth="", extra_info={}) == 1.5


@pytest.mark.parametrize(
    "more",
    [
        {"reward_model": {"enable": True}},
        {"reward_manager": {"source": "register", "name": "dapo"}},
        {"reward_manager": {"source": "importlib", "name": "naive"}},
    ],
)
def test_scoring_that_is_more_than_a_function_stays_verls(scorer: Path, more: dict[str, Any]) -> None:
    assert reward_function(reward_config(scorer, **more)) is None


def test_without_a_function_of_the_users_verl_scores() -> None:
    assert reward_function(reward_config(None)) is None


def model_config(model: Path, max_len: int | None) -> DictConfig:
    return OmegaConf.create(
        {
            "actor_rollout_ref": {
                "model": {"path": str(model)},
                "rollout": {"max_model_len": max_len, "prompt_length": 10, "response_length": 20},
            },
            "data": {"apply_chat_template_kwargs": {}},
        }
    )


def test_the_context_is_verls_or_the_models_own_less_the_reserve(tiny_model: Path) -> None:
    from transformers import AutoConfig

    own = AutoConfig.from_pretrained(tiny_model).max_position_embeddings
    assert max_model_len(model_config(tiny_model, 500)) == 500 - CONTEXT_RESERVE_TOKENS
    assert max_model_len(model_config(tiny_model, None)) == own - CONTEXT_RESERVE_TOKENS


def test_ends_are_the_templates_and_the_generation_configs(tiny_model: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    ends = GenerationConfig.from_pretrained(tiny_model).eos_token_id
    template = chat_template(model_config(tiny_model, None), tokenizer)
    assert template.stop_token_ids[0] == tokenizer.eos_token_id
    assert set([ends] if isinstance(ends, int) else ends) <= set(template.stop_token_ids)


def test_a_conversation_has_room_inside_what_the_engine_takes() -> None:
    """SGLang 0.5.14 keeps six tokens of a context to itself (scheduler.py), verl's server one more."""
    assert CONTEXT_RESERVE_TOKENS >= 7


@pytest.mark.parametrize(
    ("given", "budget"),
    [
        ({"max_tokens": 7}, 7),
        ({"max_new_tokens": 5, "max_tokens": 7}, 5),
        ({}, 20),
        ({"max_tokens": 1000}, 39),
    ],
)
def test_the_cpu_servers_budget(given: dict[str, Any], budget: int) -> None:
    params = sampling_params_of(
        {"temperature": 0.5, "top_k": -1, "logprobs": True, "stop_token_ids": [9]} | given,
        input_tokens=60,
        response_length=20,
        max_model_len=100,
    )
    assert params == SamplingParams(temperature=0.5, stop_token_ids=(9,), max_new_tokens=budget)
