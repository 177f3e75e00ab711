"""What a finished rollout is worth. The scorer sees the model's own words, never a tool's.

A reward function is called as verl calls one: `(data_source, solution_str, ground_truth, extra_info)`, returning a
number or a dict with `score`. `solution_str` holds what the model sampled and nothing else; everything else it might
want (messages, tool rewards, `calc_reward` results, the full text) stands in `extra_info`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from sglang_multiturn.config import RolloutConfig, closest
from sglang_multiturn.errors import ConfigError, RewardError
from sglang_multiturn.loading import load_function
from sglang_multiturn.schemas import plain_json
from sglang_multiturn.tools.builtin.gsm8k import gsm8k_answer, same_number
from sglang_multiturn.trajectory import Rewards

RewardFn = Callable[..., Any]
"""`(data_source, solution_str, ground_truth, extra_info) -> float | dict`, plain or async."""


def gsm8k_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any) -> float:
    """1.0 when the last `#### number` of the model's own words is the ground truth."""
    answer = gsm8k_answer(solution_str)
    return float(answer is not None and same_number(answer, str(ground_truth)))


BUILTIN_REWARDS: Mapping[str, RewardFn] = {"gsm8k": gsm8k_score}


def load_reward_fn(path: str, name: str | None = None, kwargs: Mapping[str, Any] | None = None) -> RewardFn:
    """A reward function: a builtin's name, or `file.py` with a function `name` (default `compute_score`).

    `file.py:function` names both at once; `kwargs` are bound as verl's `reward_kwargs` are.

    Raises:
        ConfigError: no such builtin, file or function.
    """
    if path in BUILTIN_REWARDS:
        return functools.partial(BUILTIN_REWARDS[path], **(kwargs or {}))
    file, _, inline = path.partition(".py:")
    if inline:
        path, name = f"{file}.py", inline
    name = name or "compute_score"
    if not path.endswith(".py"):
        raise ConfigError(f"reward {path!r} is no builtin and no .py file{closest(path, BUILTIN_REWARDS)}")
    function = load_function(path, name, what="reward")
    return functools.partial(function, **(kwargs or {}))


async def call_reward_fn(
    reward_fn: RewardFn,
    *,
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any],
    timeout_s: float | None,
) -> tuple[float, dict[str, Any]]:
    """Score one rollout: the number, and what a dict held beside `score`.

    A plain function runs in a thread, so that a slow one does not stop the others. A thread cannot be killed: after
    `timeout_s` it is left to end by itself and its result is not used.

    Raises:
        RewardError: it raised, timed out, or returned something that is not a finite number.
    """
    arguments = {
        "data_source": data_source,
        "solution_str": solution_str,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
    }
    inner = reward_fn.func if isinstance(reward_fn, functools.partial) else reward_fn
    try:
        async with asyncio.timeout(timeout_s):
            if inspect.iscoroutinefunction(inner):
                result = await reward_fn(**arguments)
            else:
                result = await asyncio.to_thread(reward_fn, **arguments)
    except (Exception, SystemExit) as error:  # a user's function may raise anything
        raise RewardError(f"the reward function failed: {type(error).__name__}: {error}") from error
    return _score_of(result)


def _score_of(result: Any) -> tuple[float, dict[str, Any]]:
    extra: dict[str, Any] = {}
    if isinstance(result, Mapping):
        if "score" not in result:
            raise RewardError(f"the reward function returned a dict without 'score': {sorted(map(str, result))}")
        kept = plain_json({key: value for key, value in result.items() if key != "score"})
        extra = kept if isinstance(kept, dict) else {"unreadable": kept}
        result = result["score"]
    try:
        score = float(result)
    except (TypeError, ValueError) as error:
        raise RewardError(f"the reward function returned {result!r}; a number is needed") from error
    if not math.isfinite(score):
        raise RewardError(f"the reward function returned {score}; a finite number is needed")
    return score, extra


def combine(
    config: RolloutConfig,
    *,
    score: float | None,
    tool_rewards: tuple[float, ...],
    calc_rewards: dict[str, float],
    extra: dict[str, Any],
) -> Rewards:
    """All rewards of a rollout as one record. Pure.

    reward = score + tool_reward_weight * sum(tool_rewards) + calc_reward_weight * sum(calc_rewards); without a
    score and without weights there is no reward.
    """
    weighted = config.tool_reward_weight * sum(tool_rewards) + config.calc_reward_weight * sum(calc_rewards.values())
    uses_tools = config.tool_reward_weight != 0.0 or config.calc_reward_weight != 0.0
    reward = None if score is None and not uses_tools else (score or 0.0) + weighted
    return Rewards(reward=reward, score=score, tool_rewards=tool_rewards, calc_rewards=calc_rewards, extra=extra)
