"""GRPO in plain torch, for one small model in one process: what a trainer does with trajectories, and no more.

Every choice is verl's (0.9.1) for the demo's command, so that the arithmetic is that of a real run: advantages by group,
divided by the deviation (`core_algos.compute_grpo_outcome_advantage`); PPO's clipped loss with the dual clip
(`compute_policy_loss_vanilla`); the mean over all trained tokens of the batch (`token-mean`); AdamW with weight decay
0.01, gradients clipped to 1, a cosine from the learning rate down to a tenth of it; one update a step; no KL term.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any

import torch

from sglang_multiturn import Disposition, Trajectory
from sglang_multiturn.tokens import Origin

if TYPE_CHECKING:
    import numpy as np

MICRO_BATCH_ROWS = 32
CLIP, DUAL_CLIP = 0.2, 3.0
LOWEST_RATE = 0.1
"""Part of the learning rate that is left in the last step."""


class LossOn(StrEnum):
    """Which tokens of a row are trained."""

    SAMPLED = "sampled"
    """The response mask: what the model said."""
    EVERYTHING = "everything"
    """No mask: every token after the prompt, as if the model had said the tools' answers and the template too."""


class OldLogprobs(StrEnum):
    """What the ratio of the loss is taken against."""

    RECOMPUTED = "recomputed"
    """The trainer's own, of the same weights, at every position (verl's default)."""
    ROLLOUT = "rollout"
    """The engine's, with 0.0 where nothing was sampled (verl's `rollout_correction.bypass_mode`)."""


class Kind(IntEnum):
    """What stands at a position of a row."""

    NONE = 0
    """The prompt, or padding."""
    SAMPLED = 1
    TOOL = 2
    """What a tool (or a user) answered."""
    TEMPLATE = 3
    """What the chat template puts between turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Training rows, padded on the right, short ones first. Shapes: (rows, width), `advantages` (rows,)."""

    ids: torch.Tensor
    kinds: torch.Tensor
    """A `Kind` for each position."""
    trained: torch.Tensor
    """Which positions the loss is over."""
    rollout_logprobs: torch.Tensor
    """0.0 where nothing was sampled."""
    advantages: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: torch.Tensor) -> Batch:
        """Some of the rows, as wide as the longest of them."""
        width = int((self.kinds[rows] != Kind.NONE).nonzero()[:, 1].max()) + 1
        return Batch(
            ids=self.ids[rows, :width],
            kinds=self.kinds[rows, :width],
            trained=self.trained[rows, :width],
            rollout_logprobs=self.rollout_logprobs[rows, :width],
            advantages=self.advantages[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one update saw, before it changed the weights."""

    trained_tokens: int
    not_sampled_fraction: float
    """Part of the trained tokens that the model did not sample."""
    logprob_sampled: float | None
    """Mean log-probability of what the model sampled; this and the next two over rows whose advantage is not 0."""
    logprob_tool: float | None
    """Of the tools' answers, trained or not; None when there was none."""
    logprob_template: float | None
    """Of the template's tokens between turns."""
    grad_norm: float
    """Before clipping."""
    grad_norm_sampled: float
    """Of the part of the loss that stands on sampled tokens."""
    grad_norm_not_sampled: float
    logprob_diff_max: float
    """Largest difference to the engine's log-probability of a sampled token."""


def group_advantages(rewards: Sequence[float], groups: Sequence[str], *, epsilon: float = 1e-6) -> list[float]:
    """Each reward's distance from its group's mean, in standard deviations (n - 1); a group of one has mean 0, deviation 1."""
    by_group: dict[str, list[float]] = collections.defaultdict(list)
    for reward, group in zip(rewards, groups, strict=True):
        by_group[group].append(reward)

    def advantage(reward: float, peers: list[float]) -> float:
        if len(peers) == 1:
            return reward
        mean = sum(peers) / len(peers)
        deviation = math.sqrt(sum((peer - mean) ** 2 for peer in peers) / (len(peers) - 1))
        return (reward - mean) / (deviation + epsilon)

    return [advantage(reward, by_group[group]) for reward, group in zip(rewards, groups, strict=True)]


def make_batch(trajectories: Sequence[Trajectory], loss_on: LossOn, *, pad_id: int) -> Batch:
    """Rows for training; a row ends with its last sampled token, and dropped trajectories have none.

    Raises:
        ValueError: nothing is left to train on, or a trajectory has no reward or no log-probabilities.
    """
    kept = [t for t in trajectories if t.disposition is Disposition.TRAIN and t.ledger.num_tokens_to_last_sampled]
    if not kept:
        raise ValueError(f"none of {len(trajectories)} trajectories can be trained on")
    kept.sort(key=lambda t: t.ledger.num_prompt_tokens + t.ledger.num_tokens_to_last_sampled)
    rows = [_row(trajectory, loss_on) for trajectory in kept]
    width = len(rows[-1].ids)

    def padded(lists: Iterable[Sequence[float]], fill: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*values, *[fill] * (width - len(values))] for values in lists], dtype=dtype)

    advantages = group_advantages([_reward(t) for t in kept], [t.uid for t in kept])
    return Batch(
        ids=padded((row.ids for row in rows), pad_id, torch.long),
        kinds=padded((row.kinds for row in rows), Kind.NONE, torch.long),
        trained=padded((row.trained for row in rows), 0, torch.bool),
        rollout_logprobs=padded((row.logprobs for row in rows), 0.0, torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One trajectory; every list has the length of `ids`, prompt included."""

    ids: list[int]
    kinds: list[Kind]
    trained: list[int]
    logprobs: list[float]


_KINDS = {
    Origin.SAMPLED: Kind.SAMPLED,
    Origin.TOOL: Kind.TOOL,
    Origin.USER: Kind.TOOL,
    Origin.BOUNDARY: Kind.TEMPLATE,
}


def _row(trajectory: Trajectory, loss_on: LossOn) -> _Row:
    ledger, logprobs = trajectory.ledger, trajectory.response_logprobs
    if logprobs is None:
        raise ValueError(f"request {trajectory.request_id}: the engine kept no log-probabilities")
    end, before = ledger.num_tokens_to_last_sampled, ledger.num_prompt_tokens
    trained = trajectory.response_mask[:end] if loss_on is LossOn.SAMPLED else [1] * end
    return _Row(
        ids=ledger.input_ids[: before + end],
        kinds=[Kind.NONE] * before + [_KINDS[origin] for origin in ledger.response_origins[:end]],
        trained=[0] * before + trained,
        logprobs=[0.0] * before + logprobs[:end],
    )


def _reward(trajectory: Trajectory) -> float:
    if trajectory.reward is None:
        raise ValueError(f"request {trajectory.request_id}: it has no reward")
    return trajectory.reward


def policy_loss(logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """PPO's clipped loss of each token, with the dual clip.

    Args:
        logprobs: (rows, width), of the model that is trained.
        old_logprobs: (rows, width), without gradient.
        advantages: (rows,); every token of a row gets its row's.
    """
    of_token = advantages[:, None].expand_as(logprobs)
    ratio = (logprobs - old_logprobs).clamp(-20.0, 20.0).exp()
    clipped = torch.maximum(-of_token * ratio, -of_token * ratio.clamp(1 - CLIP, 1 + CLIP))
    return torch.where(of_token < 0, torch.minimum(clipped, -of_token * DUAL_CLIP), clipped)


class Learner:
    """A model, its optimizer and its schedule."""

    def __init__(self, model: Any, *, steps: int, rate: float, old_logprobs: OldLogprobs) -> None:
        """Args: model: a causal model of transformers in float32; steps: how many updates the schedule is for."""
        self.model = model
        self._weights = list(model.parameters())
        self._old_logprobs = old_logprobs
        self._optimizer = torch.optim.AdamW(self._weights, lr=rate, betas=(0.9, 0.999), weight_decay=0.01)
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, lambda step: cosine(step, steps))

    def named_weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """The weights under their Hugging Face names; tied ones once."""
        return ((name, weight.detach().numpy()) for name, weight in self.model.named_parameters())

    def update(self, batch: Batch) -> Update:
        """One optimizer step over the whole batch.

        Rows whose advantage is 0 count in the mean over tokens and have no gradient, so they are not computed.
        """
        live = batch.advantages.nonzero()[:, 0]
        tally = _Tally(self._weights, trained_tokens=int(batch.trained.sum()))
        for rows in live.split(MICRO_BATCH_ROWS) if len(live) else ():
            self._backward(batch.take(rows), tally)
        for weight, from_sampled, from_rest in zip(self._weights, tally.from_sampled, tally.from_rest, strict=True):
            weight.grad = from_sampled + from_rest
        grad_norm = torch.nn.utils.clip_grad_norm_(self._weights, 1.0).item()
        self._optimizer.step()
        self._schedule.step()
        not_sampled = batch.trained & (batch.kinds != Kind.SAMPLED)
        return tally.update(grad_norm, not_sampled_tokens=int(not_sampled.sum()))

    def _backward(self, part: Batch, tally: _Tally) -> None:
        logprobs = token_logprobs(self.model, part.ids)
        seen = logprobs.detach()
        # One update a step: what verl recomputes beforehand is what is computed here.
        old = seen if self._old_logprobs is OldLogprobs.RECOMPUTED else part.rollout_logprobs[:, 1:]
        losses = policy_loss(logprobs, old, part.advantages) / tally.trained_tokens
        trained, sampled = part.trained[:, 1:], part.kinds[:, 1:] == Kind.SAMPLED
        tally.add_logprobs(seen, part)
        rest = trained & ~sampled
        tally.add_gradients(
            torch.autograd.grad(losses[trained & sampled].sum(), self._weights, retain_graph=bool(rest.any())),
            torch.autograd.grad(losses[rest].sum(), self._weights) if rest.any() else None,
        )


class _Tally:
    """Gradients and figures of an update, summed over its micro-batches."""

    def __init__(self, weights: Sequence[torch.Tensor], *, trained_tokens: int) -> None:
        self.trained_tokens = trained_tokens
        self.from_sampled = [torch.zeros_like(weight) for weight in weights]
        self.from_rest = [torch.zeros_like(weight) for weight in weights]
        self._logprobs: dict[Kind, float] = dict.fromkeys(Kind, 0.0)
        self._tokens: dict[Kind, int] = dict.fromkeys(Kind, 0)
        self._diff_max = 0.0

    def add_logprobs(self, logprobs: torch.Tensor, part: Batch) -> None:
        """The model's log-probabilities, (rows, width - 1)."""
        kinds = part.kinds[:, 1:]
        for kind in Kind:
            self._logprobs[kind] += float(logprobs[kinds == kind].sum())
            self._tokens[kind] += int((kinds == kind).sum())
        difference = (logprobs - part.rollout_logprobs[:, 1:])[kinds == Kind.SAMPLED].abs().max()
        self._diff_max = max(self._diff_max, float(difference))

    def add_gradients(self, from_sampled: Sequence[torch.Tensor], from_rest: Sequence[torch.Tensor] | None) -> None:
        """One tensor a weight; None where every trained token was sampled."""
        _add(self.from_sampled, from_sampled)
        if from_rest is not None:
            _add(self.from_rest, from_rest)

    def update(self, grad_norm: float, *, not_sampled_tokens: int) -> Update:
        return Update(
            trained_tokens=self.trained_tokens,
            not_sampled_fraction=not_sampled_tokens / self.trained_tokens,
            logprob_sampled=self._mean(Kind.SAMPLED),
            logprob_tool=self._mean(Kind.TOOL),
            logprob_template=self._mean(Kind.TEMPLATE),
            grad_norm=grad_norm,
            grad_norm_sampled=_norm(self.from_sampled),
            grad_norm_not_sampled=_norm(self.from_rest),
            logprob_diff_max=self._diff_max,
        )

    def _mean(self, kind: Kind) -> float | None:
        return self._logprobs[kind] / self._tokens[kind] if self._tokens[kind] else None


def _add(totals: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    for total, gradient in zip(totals, gradients, strict=True):
        total.add_(gradient)


def _norm(gradients: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))


def token_logprobs(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token given those before it: ids (rows, width) → (rows, width - 1).

    Padding stands on the right, where causal attention keeps it from mattering.
    """
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return -torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(
        len(ids), -1
    )


def cosine(step: int, steps: int) -> float:
    """The schedule: 1 at step 0, `LOWEST_RATE` at the end."""
    return LOWEST_RATE + (1 - LOWEST_RATE) * (1 + math.cos(math.pi * min(step, steps) / steps)) / 2
