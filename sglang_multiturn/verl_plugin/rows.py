"""Trajectories as verl's training rows. One function builds every row, of whatever stop reason.

    journal:  prompt | sampled | boundary tool boundary | sampled | boundary tool boundary
    row:      prompt | 1 1 1 1   0 0 0 0 0 0 0 0 0 0 0 0   1 1 1 1     (trimmed)

A row ends with the last *sampled* token: verl puts the score on a row's last token (agent_loop.py:151) and GAE ignores
masked positions. Every row sets the same fields, since verl makes columns of them: TransferQueue reads a column from every
row (agent_loop_tq.py:200), V0 takes the first row's `reward_extra_info` keys for all (agent_loop.py:1106), and the weight
versions must be integers (trainer_base.py:1711).

A conversation that `history: split` cut into several rows gives verl's V1 trainer as many; one in which nothing was
sampled is left out. Each carries the whole conversation's reward: V1 takes the group's mean and deviation over the last
row of each session only, and gives that row's advantage to its others (v1/utils.py:158), so that a session counts once
however many rows it has. What a row cannot hold of the reward in its own step rewards stands on its last token.

Where step rewards count, all rewards of a row are multiples of 2**-20: verl adds them up as float32 numbers, in whatever
order, and such sums are exact. Else two rollouts of equal reward would differ by rounding, which GRPO divides by a
deviation of nearly 0, and which the DAPO filter takes for a difference (v1/replay_buffer.py:308).

A dropped trajectory is no row at all (`[]`) where verl pads what is missing, which is the V1 worker (agent_loop_tq.py:156).
Elsewhere it is one masked row of one token: it trains nothing itself, but its reward of 0 is part of its group's mean.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import PrivateAttr
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from sglang_multiturn.config import RolloutConfig
from sglang_multiturn.request import Disposition
from sglang_multiturn.rewards import RewardParts, reward_parts
from sglang_multiturn.tokens import NOT_SAMPLED_LOGPROB, TokenLedger
from sglang_multiturn.trajectory import Trajectory
from sglang_multiturn.verl_plugin.tally import validation_figures


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """What rows look like in one run of verl."""

    scored_here: bool
    """Whether this package scores; else no row has a reward and verl's own reward loop gives one to all."""
    with_logprobs: bool
    """`rollout.calculate_log_probs`."""
    max_prompt_tokens: int
    filler_id: int
    """Stands where a row needs a token and the trajectory has none."""
    settings: RolloutConfig = field(default_factory=RolloutConfig)
    """Which step rewards count, and how much."""
    validation_settings: RolloutConfig | None = None
    """The same of validation conversations; None takes `settings`."""
    unscored_extra: tuple[str, ...] = ()
    """Further keys of `reward_extra_info` that an unscored row must have (the DAPO filter reads one)."""

    def wants_logprobs(self, trajectory: Trajectory) -> bool:
        """Whether a trajectory's rows have log-probabilities; those of validation train nothing and have none."""
        return self.with_logprobs and not trajectory.validate

    def places_step_rewards(self, trajectory: Trajectory) -> bool:
        """Whether step rewards stand where they were earned."""
        settings = (self.validation_settings if trajectory.validate else None) or self.settings
        return settings.step_rewards != "off"


TALLY = "rollout_tally"
"""Field of a row: numbers of conversations for the trainer's logger (`tally`), on one row of each."""
_REWARD_UNIT = 2.0**-20
"""Sums of its multiples are exact in float32 while they stay below 16."""


class VersionSpan(NamedTuple):
    """The oldest and the newest weights that sampled a trajectory."""

    oldest: int
    newest: int


class RowOutput(AgentLoopOutput):
    """A row whose step rewards stand where they were earned (V1; V0 never calls `as_dict` and keeps the sum)."""

    _step_rewards: tuple[tuple[int, float], ...] | None = PrivateAttr(default=None)
    """Response positions and what stands there; None where step rewards are off."""

    def as_dict(self) -> dict[str, Any]:
        """verl's fields; the last token keeps what is left of the reward, so that the sum stays the reward."""
        fields: dict[str, Any] = super().as_dict()
        if "rm_scores" in fields and self._step_rewards is not None:
            placed: dict[int, float] = collections.defaultdict(float)
            for position, reward in self._step_rewards:
                placed[position] += _in_units(reward)
            placed[len(fields["rm_scores"]) - 1] += _in_units(self.reward_score or 0.0) - sum(placed.values())
            for position, reward in placed.items():
                fields["rm_scores"][position] = reward
        return fields


def training_rows(
    trajectory: Trajectory, rules: RowRules, *, versions: VersionSpan, user_extra: bool
) -> list[RowOutput]:
    """The rows of a trajectory that was kept (disposition `train` or `mask`): at least one, in order.

    Raises:
        ValueError: log-probabilities are wanted and the trajectory has none.
    """
    sampled = [row for row in trajectory.rows if row.num_tokens_to_last_sampled]
    if not sampled:
        return [masked_row(trajectory, rules, versions=versions, user_extra=user_extra)]
    return [_training_row(trajectory, row, rules, versions, user_extra=user_extra) for row in sampled]


def _training_row(
    trajectory: Trajectory, ledger: TokenLedger, rules: RowRules, versions: VersionSpan, *, user_extra: bool
) -> RowOutput:
    end = ledger.num_tokens_to_last_sampled
    logprobs = ledger.response_logprobs
    if rules.wants_logprobs(trajectory) and logprobs is None:
        raise ValueError(f"request {trajectory.request_id}: log-probabilities were asked for and the server sent none")
    return _row(
        trajectory,
        rules,
        prompt_ids=ledger.prompt_ids,
        response_ids=ledger.response_ids[:end],
        response_mask=trajectory.mask_of(ledger)[:end],
        response_logprobs=logprobs[:end] if logprobs is not None else [],
        reward=trajectory.reward or 0.0,
        versions=versions,
        extra=_reward_extra(trajectory, rules, user_extra=user_extra),
        step_rewards=_step_rewards(trajectory, ledger, rules),
    )


def masked_row(trajectory: Trajectory, rules: RowRules, *, versions: VersionSpan, user_extra: bool) -> RowOutput:
    """One token that trains nothing: what stands for a trajectory that verl must have a row of.

    Its prompt may be one that was too long, which V0 cannot pad (agent_loop.py:729): here, and only here, it is cut.
    """
    kept = trajectory.disposition is not Disposition.DROP
    return _row(
        trajectory,
        rules,
        prompt_ids=trajectory.rows[0].prompt_ids[-rules.max_prompt_tokens :] or [rules.filler_id],
        response_ids=[rules.filler_id],
        response_mask=[0],
        response_logprobs=[NOT_SAMPLED_LOGPROB],
        reward=(trajectory.reward or 0.0) if kept else 0.0,
        versions=versions,
        extra=_reward_extra(trajectory, rules, user_extra=user_extra),
    )


def _row(
    trajectory: Trajectory,
    rules: RowRules,
    *,
    prompt_ids: list[int],
    response_ids: list[int],
    response_mask: list[int],
    response_logprobs: Sequence[float],
    reward: float,
    versions: VersionSpan,
    extra: dict[str, Any],
    step_rewards: tuple[tuple[int, float], ...] = (),
) -> RowOutput:
    metrics = trajectory.metrics
    row = RowOutput(
        prompt_ids=prompt_ids,
        response_ids=response_ids,
        response_mask=response_mask,
        response_logprobs=list(response_logprobs) if rules.wants_logprobs(trajectory) else None,
        reward_score=reward if rules.scored_here else None,
        num_turns=trajectory.num_turns,
        # All four, although three have defaults: `as_dict` leaves out what was not set.
        metrics=AgentLoopMetrics(
            generate_sequences=metrics.generate_s,
            tool_calls=metrics.tool_s,
            compute_score=metrics.reward_s,
            num_preempted=-1,
        ),
        extra_fields={
            "min_global_steps": versions.oldest,
            "max_global_steps": versions.newest,
            "turn_scores": [],
            "tool_rewards": list(trajectory.rewards.tool_rewards),
            "calc_rewards": dict(trajectory.rewards.calc_rewards),
            "reward_extra_info": extra,
            "request_id": trajectory.request_id,
            "stop_reason": trajectory.stop_reason.value,
            TALLY: {},
        },
    )
    if rules.places_step_rewards(trajectory):
        row._step_rewards = step_rewards
    return row


def _reward_extra(trajectory: Trajectory, rules: RowRules, *, user_extra: bool) -> dict[str, Any]:
    """`acc` and `score` as verl's own reward managers name them (reward_manager/naive.py:110), on every row.

    `step_reward` and `calc_reward` join them where those count in training: their parts of the reward; a validation's reward
    is the score alone, and they say what would have been added. What a reward function returned beside its score joins them
    under V1, which allows rows to differ; V0 does not. A validation row has figures of its conversation too.
    """
    score = trajectory.rewards.score if trajectory.rewards.score is not None else trajectory.reward or 0.0
    extra: dict[str, Any] = dict.fromkeys(rules.unscored_extra, 0.0) if user_extra else {}
    if trajectory.validate and rules.settings.validation_figures:
        extra |= validation_figures(trajectory)
    extra |= {"score": score, "acc": score}
    parts = _parts(trajectory, rules)
    if rules.settings.step_rewards != "off":
        extra["step_reward"] = math.fsum(parts.steps)
    if rules.settings.calc_rewards != "off":
        extra["calc_reward"] = math.fsum(parts.calc.values())
    return extra | trajectory.rewards.extra if user_extra else extra


def _step_rewards(trajectory: Trajectory, row: TokenLedger, rules: RowRules) -> tuple[tuple[int, float], ...]:
    """The step rewards of the row's own turns, with where they stand."""
    steps = zip(trajectory.tool_calls, _parts(trajectory, rules).steps, strict=False)  # none where it has no reward
    placed = ((row.turn_end(call.turn), reward) for call, reward in steps if reward)
    return tuple((end, reward) for end, reward in placed if end is not None)


def _parts(trajectory: Trajectory, rules: RowRules) -> RewardParts:
    """The parts of the trajectory's reward; no calls and no `calc_reward` where it has none."""
    rewards, scored = trajectory.rewards, trajectory.reward is not None
    return reward_parts(
        rules.settings,
        score=rewards.score,
        calls=trajectory.tool_calls if scored else (),
        calc_rewards=rewards.calc_rewards if scored else {},
    )


def _in_units(reward: float) -> float:
    return round(reward / _REWARD_UNIT) * _REWARD_UNIT


def version_span(versions: Sequence[int | None], unknown: int) -> VersionSpan:
    """Oldest and newest of the known versions; `unknown` where the server told none or nothing was sampled."""
    known = [version for version in versions if version is not None]
    return VersionSpan(min(known), max(known)) if known else VersionSpan(unknown, unknown)
