"""The demo with a calculator that fails: 5 % of the calls end in an error and 2 % hang, `retries: 2`. Does it still learn?

    python benchmarks/demo_with_faults.py                      # three seeds, with and without faults: about an hour
    python benchmarks/demo_with_faults.py --seeds 0 --steps 5  # a look

Each run is the whole demo (`examples/gsm8k_tool/demo.py`) through verl's own trainer; only the tool YAML differs. Compared
is the held-out reward after training, with the plain calculator, and what training saw of the faults.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_multiturn import read_trajectories
from sglang_multiturn.metrics import total

REPOSITORY = Path(__file__).resolve().parent.parent
DEMO = REPOSITORY / "examples" / "gsm8k_tool"
FAULTY = DEMO / "calculator_with_faults.yaml"
console = Console()


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One demo."""

    seed: int
    faults: bool
    heldout_before: float
    heldout_after: float
    train_last5: float
    rollouts: int
    failed: int
    tool_calls: int
    injected_faults: int
    retries: int
    told_errors: int
    """Calls that still failed after their retries, of which the model was told."""
    wall_s: float


def main() -> None:
    """Run all and show them side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--runs-dir", type=Path, default=Path("runs/demo_with_faults"))
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    runs = []
    for seed in arguments.seeds:
        for faults in (False, True):
            runs.append(run_demo(arguments.runs_dir, seed, arguments.steps, faults=faults))
            show(runs)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(as_json(runs, arguments.steps), indent=1) + "\n", encoding="utf-8")


def run_demo(runs_dir: Path, seed: int, steps: int, *, faults: bool) -> Run:
    """The demo as a user runs it. Exits when it fails."""
    run_dir = runs_dir / f"seed{seed}-{'faults' if faults else 'clean'}"
    command = [
        sys.executable,
        str(DEMO / "demo.py"),
        "--seed",
        str(seed),
        "--steps",
        str(steps),
        "--run-dir",
        str(run_dir),
    ]
    subprocess.run([*command, *(["--tools", str(FAULTY)] if faults else [])], check=True)
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    metrics = total(trajectory.metrics for trajectory in read_trajectories(run_dir / "trajectories.jsonl"))
    return Run(
        seed=seed,
        faults=faults,
        heldout_before=summary["heldout_before"],
        heldout_after=summary["heldout_after"],
        train_last5=summary["reward_last5"],
        rollouts=summary["checked"],
        failed=summary["failed"],
        tool_calls=metrics.tool_calls,
        injected_faults=metrics.injected_faults,
        retries=metrics.tool_retries,
        told_errors=metrics.tool_errors + metrics.tool_timeouts,
        wall_s=summary["wall_s"],
    )


def show(runs: Sequence[Run]) -> None:
    """A table of what there is so far, and the largest difference of a seed."""
    table = Table(
        "seed", "faults", "held out", "last 5 steps", "failed", "calls", "injected", "retries", "told", "minutes"
    )
    for run in runs:
        table.add_row(
            str(run.seed),
            "5 % + 2 %" if run.faults else "none",
            f"{run.heldout_before:.3f} → {run.heldout_after:.3f}",
            f"{run.train_last5:.3f}",
            f"{run.failed} of {run.rollouts}",
            *map(str, (run.tool_calls, run.injected_faults, run.retries, run.told_errors)),
            f"{run.wall_s / 60:.1f}",
        )
    console.print(table)
    if gaps := differences(runs):
        console.print(f"Held-out reward differs by at most {max(gaps):.3f} between the runs of a seed.")


def differences(runs: Sequence[Run]) -> list[float]:
    """For each seed that has both runs, how far their held-out rewards are apart."""
    after = {(run.seed, run.faults): run.heldout_after for run in runs}
    return [abs(after[seed, True] - after[seed, False]) for seed, faults in after if faults and (seed, False) in after]


def as_json(runs: Sequence[Run], steps: int) -> dict[str, object]:
    """The figures with what they were taken on."""
    return {
        "machine": f"{platform.machine()}, {platform.processor() or 'unknown processor'}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("sglang_multiturn", "verl", "sglang", "torch")},
        "steps": steps,
        "largest_difference": max(differences(runs), default=None),
        "runs": [asdict(run) for run in runs],
    }


if __name__ == "__main__":
    main()
