"""What the mask ablation measured: its figures, their file, the table and the plot."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_loop import Update
from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from sglang_multiturn import HFChatTemplate, StopReason, Trajectory
from sglang_multiturn.summary import RunSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """What a set of rollouts did."""

    reward: float
    tool_call_rate: float
    """Part of the rollouts that tried a call."""
    malformed_call_rate: float
    """Part of the calls that did not parse."""
    turns: float
    """Assistant turns a rollout."""
    sampled_tokens: float
    """A rollout."""
    stop_reasons: dict[str, int]

    @property
    def cut_rate(self) -> float:
        """Part of the rollouts that used up their token budget before they had an answer."""
        return self.stop_reasons.get(StopReason.MAX_RESPONSE_TOKENS, 0) / sum(self.stop_reasons.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step: rollouts, then an update."""

    step: int
    rollouts: Behaviour
    update: Update
    rollout_s: float
    update_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One arm with one seed."""

    arm: str
    seed: int
    steps: list[Step]
    heldout: Behaviour
    """After the last step."""
    examples: list[list[tuple[str, str]]]
    """Some held-out conversations after the prompt: (origin, text) of each segment."""
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """The whole benchmark, as its file holds it."""

    machine: str
    python: str
    versions: dict[str, str]
    heldout_questions: int
    rollouts_a_step: int
    learning_rate: float
    before: Behaviour
    """The untrained model on the held-out questions."""
    runs: list[Run]
    wall_s: float

    def of(self, arm: str) -> list[Run]:
        """One arm's runs, by seed."""
        return sorted((run for run in self.runs if run.arm == arm), key=lambda run: run.seed)

    @property
    def arms(self) -> list[str]:
        """In the order in which they were run."""
        return list(dict.fromkeys(run.arm for run in self.runs))

    def heldout_mean(self, arm: str) -> float:
        """Mean over the seeds of the held-out reward after training."""
        return statistics.mean(run.heldout.reward for run in self.of(arm))


_ADAPTER = TypeAdapter(Ablation)


def write(ablation: Ablation, path: Path) -> None:
    """As JSON, a line a run."""
    figures = _rounded(asdict(ablation))
    runs = ",\n".join(json.dumps(run, ensure_ascii=False) for run in figures.pop("runs"))
    head = json.dumps(figures, indent=1).removesuffix("\n}")
    path.write_text(f'{head},\n "runs": [\n{runs}\n]}}\n', encoding="utf-8")


def read(path: Path) -> Ablation:
    """What `write` wrote."""
    return _ADAPTER.validate_json(path.read_text(encoding="utf-8"))


def _rounded(value: Any) -> Any:
    """Six figures are more than any of these deserve."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case dict():
            return {key: _rounded(one) for key, one in value.items()}
        case list() | tuple():
            return [_rounded(one) for one in value]
    return value


def versions() -> dict[str, str]:
    """Of everything that has a say in the figures."""
    return {name: version(name) for name in ("sglang_multiturn", "sglang", "torch", "transformers")}


def machine() -> str:
    """The processor, as far as Python knows."""
    return f"{platform.machine()}, {platform.processor() or 'unknown processor'}"


def behaviour(trajectories: Sequence[Trajectory]) -> Behaviour:
    """The rollouts' figures."""
    summary = RunSummary()
    for trajectory in trajectories:
        summary.add(trajectory)
    return Behaviour(
        reward=summary.reward_mean,
        tool_call_rate=summary.tool_call_rate,
        malformed_call_rate=summary.malformed_call_rate,
        turns=summary.turns_mean,
        sampled_tokens=summary.sampled_tokens / summary.rollouts,
        stop_reasons=dict(summary.stop_reasons.most_common()),
    )


def spell_out(trajectory: Trajectory, template: HFChatTemplate) -> list[tuple[str, str]]:
    """A conversation after its prompt, segment by segment."""
    return [(segment.origin.value, template.decode(segment.ids)) for segment in trajectory.segments[1:]]


def show(ablation: Ablation, console: Console) -> None:
    """A line a run, a line an arm."""
    table = Table(
        "arm", "seed", "steps", "first 5", "last 5", "held-out", "calls", "malformed", "cut", "log p template"
    )
    for arm in ablation.arms:
        for run in ablation.of(arm):
            rewards = [step.rollouts.reward for step in run.steps]
            table.add_row(
                arm,
                str(run.seed),
                str(len(run.steps)),
                f"{statistics.mean(rewards[:5]):.3f}",
                f"{statistics.mean(rewards[-5:]):.3f}",
                f"{run.heldout.reward:.3f}",
                f"{run.heldout.tool_call_rate:.2f}",
                f"{run.heldout.malformed_call_rate:.2f}",
                f"{run.heldout.cut_rate:.2f}",
                f"{_last(step.update.logprob_template for step in run.steps):.1f}",
            )
        table.add_row(arm, "mean", "", "", "", f"[bold]{ablation.heldout_mean(arm):.3f}", end_section=True)
    console.print(table)
    console.print(f"held-out reward before training: {ablation.before.reward:.3f}", highlight=False)


def _last(values: Iterable[float | None]) -> float:
    """The last one there is."""
    return [math.nan, *(value for value in values if value is not None)][-1]


def draw(ablation: Ablation, path: Path) -> None:
    """Reward, and what the model learns from tokens it did not sample: mean and range of the seeds over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels: tuple[tuple[str, Callable[[Step], float | None]], ...] = (
        ("reward of the training rollouts", lambda step: step.rollouts.reward),
        ("log p of a template token, while there is a gradient", lambda step: step.update.logprob_template),
        (
            "tool calls that do not parse",
            lambda step: step.rollouts.malformed_call_rate if step.rollouts.tool_call_rate else None,
        ),
    )
    figure, axes = plt.subplots(1, len(panels), figsize=(13, 4.6), layout="constrained")
    for axis, (title, figure_of) in zip(axes, panels, strict=True):
        for arm in ablation.arms:
            _draw_arm(axis, [[figure_of(step) for step in run.steps] for run in ablation.of(arm)], arm)
        axis.set(title=title, xlabel="training step")
        axis.grid(alpha=0.3)
    for axis in axes[::2]:
        axis.set_ylim(0.0, 1.03)
    axes[0].legend(loc="upper left", fontsize=9)
    figure.suptitle(headline(ablation))
    figure.supxlabel(caption(ablation), fontsize=9)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _draw_arm(axis: Any, curves: list[list[float | None]], label: str) -> None:
    by_step = [[value for value in values if value is not None] for values in zip(*curves, strict=True)]
    points = [(step, values) for step, values in enumerate(by_step, start=1) if values]
    steps = [step for step, _ in points]
    (line,) = axis.plot(steps, [statistics.mean(values) for _, values in points], label=label)
    low, high = ([edge(values) for _, values in points] for edge in (min, max))
    axis.fill_between(steps, low, high, alpha=0.2, color=line.get_color())


def headline(ablation: Ablation) -> str:
    """The finding in a line."""
    seeds = len({run.seed for run in ablation.runs})
    after = ", ".join(f"{ablation.heldout_mean(arm):.2f} with {arm}" for arm in ablation.arms)
    return (
        f"Held-out reward {ablation.before.reward:.2f} before training; after {len(ablation.runs[0].steps)} steps "
        f"{after} (mean of {seeds} seeds, bands: their range)"
    )


def caption(ablation: Ablation) -> str:
    """How the loss changes when it is over everything, and what became of the runs where it was."""
    unmasked = [run for run in ablation.runs if run.steps[0].update.not_sampled_fraction > 0]
    updates = [step.update for run in unmasked for step in run.steps[:3] if step.update.grad_norm_sampled > 0]
    if not updates:
        return ""
    fraction = statistics.mean(update.not_sampled_fraction for update in updates)
    times = statistics.mean(update.grad_norm_not_sampled / update.grad_norm_sampled for update in updates)
    said = (
        f"Without the mask {fraction:.0%} of the trained tokens are the tool's or the template's. In the first 3 steps "
        f"their gradient is {times:.0f} times as large as that of the model's own tokens, of which clipping leaves little."
    )
    if all(run.steps[-1].rollouts.reward == 0.0 for run in unmasked):
        said += (
            "\nThe model learns to predict what stands between turns and forgets the form of its own calls. "
            "Soon no rollout is rewarded: no group differs, and nothing is learned any more."
        )
    return said
