"""What a long tail costs a trainer that waits for whole groups, and what over-sampling makes of it.

    python benchmarks/long_tail.py                 # the table, after about a minute
    python benchmarks/long_tail.py --json out.json

The scripted engine plays the same prompts to each way of sampling: 16 groups of 8 a batch, a token every 20 ms, at most 96
sequences at a time, a tool that takes two seconds. A prompt has a length of its own (log-normal, σ = 0.8), its rollouts
differ around it (σ = 0.6), and all 96 prompts come again every six batches. Training takes no time here: what is shown is
how long it waits, what is sampled for nothing, and what aborting the slowest does to what is learned from: `tokens a
rollout` is the mean length of what was trained, and `never trained` counts the prompts that were in no batch.

Time is virtual, so the figures are exact and the same on every machine. They show the shape of it, not a GPU's speed: a
real engine samples faster when less of it is used.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from sglang_multiturn import (
    BaseTool,
    ByteChatML,
    GenerationId,
    Message,
    RequestSpec,
    RolloutConfig,
    RolloutEngine,
    ScriptedEngine,
    ToolRegistry,
)
from sglang_multiturn.config import GroupConfig
from sglang_multiturn.engine.scripts import call_text
from sglang_multiturn.groups.group import Batch, GroupCounts, num_sampled_tokens
from sglang_multiturn.groups.sampler import GroupSampler
from sglang_multiturn.schemas import FunctionSchema, ToolSchema

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from tools.virtual_time import run_virtual

PROMPTS, GROUPS, SAMPLES, MARGIN = 96, 16, 8, 4
TOKEN_S, MAX_RUNNING, TOOL_S = 0.02, 96, 2.0
MEDIAN_TOKENS, PROMPT_SIGMA, ROLLOUT_SIGMA, MAX_TOKENS = 250, 0.8, 0.6, 8000
console = Console(stderr=True)

WAYS: dict[str, dict[str, Any]] = {
    "no over-sampling": {},
    "no over-sampling, longest first": {"order": "longest_first"},
    f"{MARGIN} groups more, abort": {"over_sampling_groups": MARGIN, "rest": "abort"},
    f"{MARGIN} groups more, carry": {"over_sampling_groups": MARGIN, "rest": "carry"},
    f"{MARGIN} groups more, carry, longest first": {
        "over_sampling_groups": MARGIN,
        "rest": "carry",
        "order": "longest_first",
    },
}


class SlowTool(BaseTool):
    """Answers after `TOOL_S`."""

    def __init__(self) -> None:
        """Takes no arguments."""
        super().__init__({}, ToolSchema(function=FunctionSchema(name="look", parameters={"type": "object"})))

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_: Any
    ) -> tuple[str, float, dict[str, Any]]:
        """Nothing of interest."""
        await asyncio.sleep(TOOL_S)
        return "seen", 0.0, {}


@dataclass(slots=True, kw_only=True)
class Figures:
    """Of one way of sampling, over all its batches."""

    name: str
    waits_s: list[float] = field(default_factory=list)
    trained_lengths: list[int] = field(default_factory=list)
    """Sampled tokens of each trained rollout."""
    trained_prompts: set[str] = field(default_factory=set)
    older_tokens: int = 0
    """Trained tokens that other weights sampled than those of their batch."""
    counts: GroupCounts = field(default_factory=GroupCounts)

    def add(self, batch: Batch, weight_version: int) -> None:
        """One more batch, whose weights have this version."""
        self.waits_s.append(batch.counts.wait_s)
        self.trained_prompts.update(group.prompt.uid for group in batch.groups)
        for trajectory in batch.trajectories:
            self.trained_lengths.append(num_sampled_tokens(trajectory))
            versions = trajectory.response_weight_versions
            self.older_tokens += sum(version is not None and version < weight_version for version in versions)


def prompts(seed: int) -> Iterator[RequestSpec]:
    """The same prompts in every epoch, each time in another order."""
    rng = random.Random(seed)
    numbers = list(range(PROMPTS))
    for _ in itertools.count():
        rng.shuffle(numbers)
        for i in numbers:
            yield RequestSpec(request_id=f"p{i}", uid=f"p{i}", messages=(Message(role="user", content="look"),))


def script(generation_id: GenerationId, _: Sequence[int]) -> str:
    """Some thoughts and a call; then the rest of the thoughts. The length follows from the name alone."""
    prompt = generation_id.request_id.split("-")[0].split(".")[0]
    median = MEDIAN_TOKENS * math.exp(random.Random(prompt).gauss(0, PROMPT_SIGMA))
    total = median * math.exp(random.Random(generation_id.request_id).gauss(0, ROLLOUT_SIGMA))
    half = "x" * int(min(total, MAX_TOKENS) / 2)
    return half + call_text("look", {}) if generation_id.turn == 0 else half


async def play(name: str, seed: int, steps: int) -> Figures:
    """One way of sampling through so many batches."""
    template = ByteChatML()
    engine = ScriptedEngine(template, script, token_s=TOKEN_S, max_running=MAX_RUNNING)
    rollouts = RolloutEngine(
        engine,
        template=template,
        tools=ToolRegistry([SlowTool()]),
        config=RolloutConfig(max_response_tokens=20_000, drift_check="off", rollout_timeout_s=None),
    )
    config = GroupConfig(samples_per_group=SAMPLES, groups_per_batch=GROUPS, **WAYS[name])
    figures = Figures(name=name)
    async with rollouts, GroupSampler(rollouts, prompts(seed), config) as sampler:
        for step in range(steps):
            figures.add(await sampler.next_batch(), weight_version=step)
            async with rollouts.suspended():
                await engine.update_weights([], weight_version=step + 1)
        figures.counts = sampler.totals
    return figures


def table(all_figures: Sequence[Figures]) -> Table:
    """What the command prints."""
    shown = Table(box=None)
    for heading in (
        "",
        "wait a batch",
        "longest wait",
        "thrown away",
        "of older weights",
        "tokens a rollout",
        "never trained",
    ):
        shown.add_column(heading, justify="left" if not heading else "right")
    for figures in all_figures:
        counts = figures.counts
        sampled = counts.trained_tokens + counts.aborted_tokens + counts.filtered_tokens
        shown.add_row(
            figures.name,
            f"{statistics.mean(figures.waits_s):.1f} s",
            f"{max(figures.waits_s):.1f} s",
            f"{counts.aborted_tokens / sampled:.1%}",
            f"{figures.older_tokens / counts.trained_tokens:.1%}",
            f"{statistics.mean(figures.trained_lengths):.0f}",
            f"{PROMPTS - len(figures.trained_prompts)} of {PROMPTS}",
        )
    return shown


def main() -> None:
    """Play every way and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="Write the figures here.")
    asked = parser.parse_args()
    ways = track(WAYS, "playing", console=console, transient=True)
    all_figures = [run_virtual(play(name, asked.seed, asked.steps)) for name in ways]
    Console(width=130).print(table(all_figures))
    if asked.json:
        rows = [
            {
                "name": figures.name,
                "waits_s": figures.waits_s,
                "mean_tokens": statistics.mean(figures.trained_lengths),
                "older_tokens": figures.older_tokens,
                "prompts": len(figures.trained_prompts),
                "counts": asdict(figures.counts),
            }
            for figures in all_figures
        ]
        asked.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
