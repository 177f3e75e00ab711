"""What a finished rollout is worth. The scorer sees the model's own words, never a tool's.

A reward function is called as verl calls one: `(data_source, solution_str, ground_truth, extra_info)`, returning a
number or a dict with `score`. `solution_str` holds what the model sampled and nothing else; everything else it might
want (messages, tool rewards, `calc_reward` results, the full text) stands in `extra_info`.

Three kinds of numbers make the reward: the score, the step rewards that `execute` returned, and what `calc_reward` said at
the end. Settings say which of them count and how much; a trajectory keeps them all as they were.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from sglang_multiturn.config import Counted, RolloutConfig, closest
from sglang_multiturn.errors import ConfigError, RewardError
from sglang_multiturn.loading import load_function
from sglang_multiturn.request import ErrorRecord
from sglang_multiturn.schemas import plain_json
from sglang_multiturn.tools.builtin.gsm8k import gsm8k_answer, same_number
from sglang_multiturn.trajectory import CallOutcome, Rewards, ToolCallRecord

Item = TypeVar("Item")

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


# The parts of a reward


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParts:
    """What counts of each raw number, weighted. The reward is the sum of all."""

    score: float
    steps: tuple[float, ...]
    """One a call, in the order of the calls; 0.0 where it does not count."""
    calc: dict[str, float]
    """One a tool, in the order in which the tools were created; 0.0 where it does not count."""


def reward_parts(
    config: RolloutConfig,
    *,
    score: float | None,
    calls: Sequence[ToolCallRecord],
    calc_rewards: Mapping[str, float],
) -> RewardParts:
    """Weigh what was said of a rollout.

    `step_rewards: last` counts the last call that returned: of all calls with outcome `ok`, the one the model wrote last.
    `calc_rewards: last` counts the tool that was created last.
    """
    returned = [at for at, call in enumerate(calls) if call.outcome is CallOutcome.OK]
    steps = _counting(config.step_rewards, returned)
    judges = _counting(config.calc_rewards, list(calc_rewards))
    return RewardParts(
        score=config.score_weight * (score or 0.0),
        steps=tuple(
            _weight(config.step_reward_weight, call.name) * call.reward if at in steps else 0.0
            for at, call in enumerate(calls)
        ),
        calc={
            name: _weight(config.calc_reward_weight, name) * value if name in judges else 0.0
            for name, value in calc_rewards.items()
        },
    )


def combine(
    config: RolloutConfig,
    *,
    score: float | None,
    calls: Sequence[ToolCallRecord],
    calc_rewards: dict[str, float],
    calc_errors: dict[str, ErrorRecord],
    extra: dict[str, Any],
    scored: bool,
) -> Rewards:
    """All rewards of a rollout as one record, raw and weighed. Pure.

    reward = score_weight * score + the weighted step rewards that count + the weighted `calc_reward`s that count, rounded
    once. A rollout that is not to be scored has none, and neither has any when nothing is configured to give one.

    Raises:
        RewardError: the sum is not finite.
    """
    reward = None
    if scored and (score is not None or counts_tools(config)):
        parts = reward_parts(config, score=score, calls=calls, calc_rewards=calc_rewards)
        reward = _exact_sum([parts.score, *parts.steps, *parts.calc.values()])
    return Rewards(
        reward=reward,
        score=score,
        tool_rewards=tuple(call.reward for call in calls),
        calc_rewards=calc_rewards,
        calc_errors=calc_errors,
        extra=extra,
    )


def counts_tools(config: RolloutConfig) -> bool:
    """Whether anything that tools say is part of the reward."""
    return config.step_rewards != "off" or config.calc_rewards != "off"


def check_weights(config: RolloutConfig, tool_names: Collection[str]) -> None:
    """Prove before a run that its reward can be what was asked for.

    Raises:
        ConfigError: a weight names a tool that is not configured, is not finite, or would never be used.
    """
    for name, counted in (("step_reward_weight", "step_rewards"), ("calc_reward_weight", "calc_rewards")):
        weights = getattr(config, name)
        if name in config.model_fields_set and counted not in config.model_fields_set:
            raise ConfigError(
                f"{name} is set and {counted} is not, so nothing would count; add {counted}: sum, last or off"
            )
        for tool in weights if isinstance(weights, Mapping) else ():
            if tool not in tool_names:
                raise ConfigError(f"{name}: tool {tool!r} is not configured{closest(tool, tool_names)}")
        _check_finite(name, weights.values() if isinstance(weights, Mapping) else [weights])
    _check_finite("score_weight", [config.score_weight])


def _check_finite(name: str, weights: Iterable[float]) -> None:
    for weight in weights:
        if not math.isfinite(weight):
            raise ConfigError(f"{name}: {weight} is no weight; a finite number is needed")


def _counting(how: Counted, said: list[Item]) -> list[Item]:
    return {"off": [], "sum": said, "last": said[-1:]}[how]


def _weight(weights: float | Mapping[str, float], tool: str) -> float:
    return weights.get(tool, 0.0) if isinstance(weights, Mapping) else weights


def _exact_sum(parts: Iterable[float]) -> float:
    try:
        total = math.fsum(parts)
    except (OverflowError, ValueError):  # too large; or infinities of both signs, after the weights
        total = math.nan
    if not math.isfinite(total):
        raise RewardError("the weighted rewards are too large to be added up; lower the weights or what is returned")
    return total
