"""What the demo says of a run: a line a step, a summary, and a picture."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_evaluate import Evaluation, logprob_diff_max

from sglang_multiturn import HFChatTemplate, RequestState, Trajectory
from sglang_multiturn.summary import RunSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One training step: verl's figures and the journal's."""

    step: int
    reward_mean: float
    tool_call_rate: float
    malformed_call_rate: float
    turns_mean: float
    """Assistant turns a rollout."""
    response_tokens_mean: float
    rollout_probs_diff_max: float
    """Largest difference between the probability a token was sampled with and the one the trainer computes."""
    rollout_probs_diff_valid: int
    step_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The whole run."""

    reward_mean: list[float]
    reward_first: float
    reward_last5: float
    tool_call_rate: float
    malformed_call_rate: float
    rollout_probs_diff_max: float
    rollout_probs_diff_valid: int
    """1 when it was 1 at every step."""
    logprob_diff_max: float
    """Largest difference to transformers on the first step's own tokens and on the held-out ones."""
    checked: int
    """Trajectories whose tokens, masks and lifecycle were proved."""
    failed: int
    stop_reasons: dict[str, int]
    tool_instances_created: int
    tool_instances_released: int
    calc_rewards: int
    evaluation: Evaluation
    wall_s: float

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON; the evaluation's figures stand beside the rest as `heldout_*`."""
        figures = dataclasses.asdict(self)
        evaluation = figures.pop("evaluation")
        return {"steps": len(self.reward_mean), **figures} | {f"heldout_{k}": v for k, v in evaluation.items()}


def read_steps(logged: Sequence[Mapping[str, float]], trajectories: Iterable[Trajectory]) -> list[StepMetrics]:
    """One entry a step. A trajectory belongs to the step after the one whose weights sampled it."""
    by_step: dict[int, RunSummary] = collections.defaultdict(RunSummary)
    for trajectory in trajectories:
        if not trajectory.validate and trajectory.turns:
            by_step[(trajectory.turns[0].weight_version or 0) + 1].add(trajectory)
    steps = []
    for metrics in logged:
        ours = by_step[int(metrics["step"])]
        steps.append(
            StepMetrics(
                step=int(metrics["step"]),
                reward_mean=metrics["critic/score/mean"],
                tool_call_rate=ours.tool_call_rate,
                malformed_call_rate=ours.malformed_call_rate,
                turns_mean=ours.turns_mean,
                response_tokens_mean=metrics["response_length/mean"],
                rollout_probs_diff_max=metrics["training/rollout_probs_diff_max"],
                rollout_probs_diff_valid=int(metrics["training/rollout_probs_diff_valid"]),
                step_s=metrics["timing_s/step"],
            )
        )
    return steps


def write_steps(steps: Iterable[StepMetrics], path: Path) -> None:
    """A line of JSON a step."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(dataclasses.asdict(step)) + "\n" for step in steps)


def summarize(
    steps: Sequence[StepMetrics],
    trajectories: Iterable[Trajectory],
    evaluation: Evaluation,
    base_model: Path,
    wall_s: float,
) -> Summary:
    """Check every trajectory and sum up. Raises LedgerError or AssertionError on one that breaks an invariant."""
    total = RunSummary()
    end_ids = HFChatTemplate.from_pretrained(base_model).end_ids
    seen: set[str] = set()
    calc_rewards = 0
    first_step: list[Trajectory] = []
    for trajectory in trajectories:
        check_trajectory(trajectory, end_ids)
        assert trajectory.request_id not in seen, f"{trajectory.request_id} has two trajectories"
        seen.add(trajectory.request_id)
        total.add(trajectory)
        calc_rewards += len(trajectory.rewards.calc_rewards)
        if trajectory.turns and trajectory.turns[0].weight_version == 0:
            first_step.append(trajectory)
    rewards = [step.reward_mean for step in steps]
    return Summary(
        reward_mean=rewards,
        reward_first=rewards[0],
        reward_last5=sum(rewards[-5:]) / len(rewards[-5:]),
        tool_call_rate=total.tool_call_rate,
        malformed_call_rate=total.malformed_call_rate,
        rollout_probs_diff_max=max(step.rollout_probs_diff_max for step in steps),
        rollout_probs_diff_valid=min(step.rollout_probs_diff_valid for step in steps),
        logprob_diff_max=max(evaluation.logprob_diff_max, logprob_diff_max(first_step, base_model)),
        checked=total.rollouts,
        failed=total.failed,
        stop_reasons=dict(total.stop_reasons),
        tool_instances_created=total.metrics.tool_instances_created,
        tool_instances_released=total.metrics.tool_instances_released,
        calc_rewards=calc_rewards,
        evaluation=evaluation,
        wall_s=wall_s,
    )


def check_trajectory(trajectory: Trajectory, end_ids: frozenset[int]) -> None:
    """Tokens, masks and ends are the engine's own; each tool instance was judged and released once."""
    trajectory.check(end_ids=end_ids)
    created = trajectory.metrics.tool_instances_created
    assert trajectory.metrics.tool_instances_released == created, trajectory.request_id
    if trajectory.state is RequestState.COMPLETED:
        assert len(trajectory.rewards.calc_rewards) == created, trajectory.request_id


def draw(steps: Sequence[StepMetrics], evaluation: Evaluation, path: Path) -> None:
    """Reward, tool-call rate and turns over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    panels = (
        ("reward", [step.reward_mean for step in steps], (0.0, 1.0)),
        ("rollouts with a tool call", [step.tool_call_rate for step in steps], (0.0, 1.05)),
        ("turns a rollout", [step.turns_mean for step in steps], None),
    )
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for axis, (title, values, limits) in zip(axes, panels, strict=True):
        axis.plot([step.step for step in steps], values, marker="o", markersize=3)
        axis.set(title=title, xlabel="training step", ylim=limits)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.3)
    for style, label, value in ((":", "before", evaluation.before), ("--", "after", evaluation.after)):
        axes[0].axhline(value, linestyle=style, linewidth=1, color="gray", label=f"held-out, {label}: {value:.2f}")
    axes[0].legend(loc="lower right", fontsize=8)
    figure.suptitle("A tiny model learns to use a calculator (verl GRPO, SGLang rollouts)")
    figure.savefig(path, dpi=120)
    plt.close(figure)
