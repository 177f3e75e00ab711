"""What slow and hanging tools cost: TRL's `GRPOTrainer(tools=...)` beside this package's rollout, in one run.

    python benchmarks/trl_latency.py                 # the table, after about seven minutes
    python benchmarks/trl_latency.py --json out.json # and every figure, with versions and machine

Both roll out one step of the demo: its tiny model, 16 questions, 8 samples each, the same prompts to the token, the same
calculator. It answers at once, or 100 ms late, or one call in 50 hangs for 60 s.

TRL's side is `trl_child.py`, which says how TRL calls tools. Its hanging calls are each fiftieth, and answer after their
60 s. This package's side is `RolloutEngine` on SGLang, with the faults of a tool YAML: `latency_s`, and a `hang_rate`
of 0.02 with calls that never return and a timeout that ends them, of 60 s and of 2 s.

Read the ratios. The times without latency are those of two engines on a model so small that it costs next to nothing:
transformers' `generate` takes the whole batch as one, SGLang takes each request through three processes.

trl is installed beside the environment at the first run, into `trl_reference` in it and off the import path, because
verl does not start where trl can be imported.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from trl_child import CONDITIONS, MODEL, STEPS, TrlStep

from sglang_multiturn import (
    HFChatTemplate,
    RequestSpec,
    RequestState,
    RolloutConfig,
    RolloutEngine,
    SamplingParams,
    SGLangEngine,
    ToolRegistry,
    Trajectory,
)
from sglang_multiturn.config import FaultConfig, ToolsConfig
from sglang_multiturn.dataset import in_groups, spec_from_row
from sglang_multiturn.rewards import load_reward_fn
from sglang_multiturn.trajectory import CallOutcome

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLE = REPOSITORY / "examples" / "gsm8k_tool"
CALCULATOR = REPOSITORY / "tool_configs" / "calculator.yaml"
sys.path.insert(0, str(EXAMPLE))

from launch import MAX_RESPONSE_TOKENS, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT  # noqa: E402
from word_problems import demo_datasets  # noqa: E402

TRL = ("trl==1.16.0", "jmespath==1.1.0")
"""What the environment lacks for `GRPOTrainer(tools=...)`; everything else of it is there for verl."""
TRL_FOLDER = Path(sys.prefix) / "trl_reference"
TRL_TIMEOUT_S = 900

SYNC_PLAN = ("clean", "clean", "hang", *("latency", "clean") * 3)
ASYNC_PLAN = ("clean", *("clean", "latency") * 2)
"""The first step of each warms up and is left out. That async tools hang one after another too is not shown again."""
ROLLOUTS = 128
ROUNDS = 5
"""Of ours: clean, with latency and with the short timeout, in turn."""
LATENCY_S = CONDITIONS["latency"].latency_s
HANG_RATE = 1 / CONDITIONS["hang"].hang_every
HANG_S = {"hang": CONDITIONS["hang"].hang_s, "hang, short timeout": 2.0}
"""What one hanging call costs, by condition: of ours it is the timeout."""
console = Console(stderr=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class OurRun:
    """One batch of this package's rollouts."""

    condition: str
    rollout_s: float
    calls: int
    hung: int
    most_hung: int
    """In one conversation."""
    most_calls: int
    """In one conversation."""


# -- TRL --------------------------------------------------------------------------------------------------------------


def install_trl() -> None:
    """Once, and said."""
    if not (TRL_FOLDER / "trl").is_dir():
        console.print(f"installing {' and '.join(TRL)} into {TRL_FOLDER}, this once", highlight=False)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(TRL_FOLDER), *TRL]
        subprocess.run(pip, check=True)


def measure_trl(kind: str, plan: Sequence[str]) -> list[TrlStep]:
    """Every step of the plan but the first."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "steps.json"
        child = Path(__file__).with_name("trl_child.py")
        path = os.pathsep.join(filter(None, (str(TRL_FOLDER), os.environ.get("PYTHONPATH"))))
        subprocess.run(
            [sys.executable, str(child), "--tool", kind, "--out", str(out), *plan],
            env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"},
            check=True,
            timeout=TRL_TIMEOUT_S,
        )
        return STEPS.validate_json(out.read_bytes())[1:]


# -- ours -------------------------------------------------------------------------------------------------------------


def registry(condition: str) -> ToolRegistry:
    """The demo's calculator with the condition's faults, as a YAML would say it."""
    (entry,) = ToolsConfig.from_yaml(CALCULATOR).tools
    faults = FaultConfig(
        latency_s=LATENCY_S if condition == "latency" else 0.0, hang_rate=HANG_RATE if condition in HANG_S else 0.0
    )
    settings = {"timeout_s": HANG_S.get(condition, 60.0), "faults": faults}
    return ToolRegistry.from_config(ToolsConfig(tools=[entry.model_copy(update=settings)]))


def step_specs() -> list[RequestSpec]:
    """The prompts of the first step, each asked for a group of rollouts."""
    rows = demo_datasets()[0][:PROMPTS_PER_STEP]
    sampling = SamplingParams(temperature=1.0)
    specs = (
        spec_from_row(row, place="train", request_id=str(number), uid=str(number), sampling=sampling)
        for number, row in enumerate(rows)
    )
    return list(in_groups(specs, SAMPLES_PER_PROMPT))


async def measure_ours(rounds: int) -> list[OurRun]:
    """The three quick conditions in turn, as many times as there are rounds, then the hanging calls with the long timeout."""
    quick = ["clean", "latency", "hang, short timeout"]
    template = HFChatTemplate.from_pretrained(MODEL)
    config = RolloutConfig(max_response_tokens=MAX_RESPONSE_TOKENS, max_concurrent=ROLLOUTS)
    score = load_reward_fn(str(EXAMPLE / "reward.py"))
    engine = SGLangEngine(str(MODEL), dtype="float32", server_args={"max_running_requests": ROLLOUTS})
    rollouts = {
        name: RolloutEngine(engine, template=template, tools=registry(name), config=config, reward_fn=score)
        for name in [*quick, "hang"]
    }
    async with engine:
        await one_batch("clean", rollouts["clean"])  # warms up
        return [await one_batch(name, rollouts[name]) for name in [*quick * rounds, "hang"]]


async def one_batch(condition: str, rollouts: RolloutEngine) -> OurRun:
    """Wall time of the step's rollouts, on a running engine with an empty prefix cache."""
    await rollouts.engine.flush_cache()
    started = time.monotonic()
    finished = await rollouts.run_all(step_specs())
    run = our_run(condition, time.monotonic() - started, finished)
    console.print(f"ours: {run}", highlight=False, soft_wrap=True)
    return run


def our_run(condition: str, rollout_s: float, finished: Sequence[Trajectory]) -> OurRun:
    """The figures of one batch, every conversation of which must have come to its end."""
    assert all(trajectory.state is RequestState.COMPLETED for trajectory in finished)
    hung = [sum(call.outcome is CallOutcome.TIMEOUT for call in one.tool_calls) for one in finished]
    return OurRun(
        condition=condition,
        rollout_s=rollout_s,
        calls=sum(len(trajectory.tool_calls) for trajectory in finished),
        hung=sum(hung),
        most_hung=max(hung),
        most_calls=max(len(trajectory.tool_calls) for trajectory in finished),
    )


# -- what comes out ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Medians:
    """Of one side under one condition."""

    side: str
    condition: str
    rollout_s: float
    rollout_ratio: float
    """To the same side without latency; so is `step_ratio`."""
    step_s: float | None
    """None where only rollouts were made."""
    step_ratio: float | None
    calls: float
    hung: float
    hangs_paid: float | None
    """How many times the cost of one hanging call the rollouts took longer than without; None where no call hung."""


def medians(side: str, runs: Sequence[TrlStep] | Sequence[OurRun]) -> list[Medians]:
    """A row for each condition, in the order of their first run."""
    by_condition: dict[str, list[Any]] = {}
    for run in runs:
        by_condition.setdefault(run.condition, []).append(run)
    rows: list[Medians] = []
    for condition, some in by_condition.items():
        rollout_s = statistics.median(run.rollout_s for run in some)
        step_s = statistics.median(run.step_s for run in some) if isinstance(some[0], TrlStep) else None
        clean_s, clean_step_s = (rows[0].rollout_s, rows[0].step_s) if rows else (rollout_s, step_s)
        rows.append(
            Medians(
                side=side,
                condition=condition,
                rollout_s=rollout_s,
                rollout_ratio=rollout_s / clean_s,
                step_s=step_s,
                step_ratio=step_s / clean_step_s if step_s and clean_step_s else None,
                calls=statistics.median(run.calls for run in some),
                hung=statistics.median(run.hung for run in some),
                hangs_paid=(rollout_s - clean_s) / HANG_S[condition] if condition in HANG_S else None,
            )
        )
    return rows


def show(rows: Sequence[Medians]) -> None:
    """The table."""
    table = Table("", "its calls", "rollouts, s", "ratio", "whole step, s", "ratio", "calls", "hung", "hangs paid for")
    for row in rows:
        table.add_row(
            row.side,
            row.condition,
            f"{row.rollout_s:.2f}",
            f"{row.rollout_ratio:.2f}",
            "" if row.step_s is None else f"{row.step_s:.2f}",
            "" if row.step_ratio is None else f"{row.step_ratio:.2f}",
            f"{row.calls:.0f}",
            f"{row.hung:.0f}",
            "" if row.hangs_paid is None else f"{row.hangs_paid:.2f}",
        )
    Console(width=120).print(table)


def main() -> None:
    """Measure both, print, and write JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of this package's quick conditions")
    parser.add_argument("--json", type=Path, help="write every figure, with versions and machine, here")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # SGLang and TRL are both slower with more, on a model this small
    load_before = os.getloadavg()[0]
    install_trl()
    runs: dict[str, Sequence[Any]] = {
        "TRL, sync tool": measure_trl("sync", SYNC_PLAN),
        "TRL, async tool": measure_trl("async", ASYNC_PLAN),
        "ours": asyncio.run(measure_ours(arguments.rounds)),
    }
    rows = [row for side, measured in runs.items() for row in medians(side, measured)]
    show(rows)
    if arguments.json:
        write(arguments.json, rows, runs, load_before)


def write(path: Path, rows: Sequence[Medians], runs: dict[str, Sequence[Any]], load_before: float) -> None:
    """The table's rows, and what they are medians of."""
    trl = {found.metadata["Name"]: found.version for found in distributions(path=[str(TRL_FOLDER)])}
    own = {name: version(name) for name in ("sglang_multiturn", "sglang", "torch", "transformers")}
    about = {
        "machine": f"{platform.machine()}, {platform.processor() or 'unknown processor'}, {os.cpu_count()} cores",
        "load_before": load_before,
        "python": platform.python_version(),
        "versions": {**own, "trl": trl["trl"]},
        "questions": PROMPTS_PER_STEP,
        "samples": SAMPLES_PER_PROMPT,
        "latency_s": LATENCY_S,
        "hang_rate": HANG_RATE,
        "hang_s": HANG_S,
        "medians": [asdict(row) for row in rows],
        "runs": {side: [asdict(run) for run in measured] for side, measured in runs.items()},
    }
    path.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
