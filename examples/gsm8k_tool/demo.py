"""The demo: a tiny model learns to use a calculator, on two CPU cores, through verl's own trainer.

    python examples/gsm8k_tool/demo.py --run-dir runs/demo --seed 0

It makes word problems, trains on them with `python -m verl.trainer.main_ppo` (verl as published, SGLang rolling out
through this package), asks the trained model 512 questions it has never seen, and checks every trajectory. What it
leaves in the run folder: reward.png, metrics.jsonl, trajectories.jsonl, summary.json, and verl's log in train.log.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from demo_evaluate import Evaluation, evaluate
from demo_report import StepMetrics, Summary, draw, read_steps, summarize, write_steps
from launch import main_ppo_env, main_ppo_overrides, training_metrics
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from word_problems import demo_datasets, write

from sglang_multiturn import read_trajectories
from sglang_multiturn.journal import merge_journals

HERE = Path(__file__).resolve().parent
MODEL = HERE / "tiny_model"
TOOLS = HERE.parent.parent / "tool_configs" / "calculator.yaml"
console = Console()


def main() -> None:
    """Parse the command line and run every part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/demo"), help="folder for everything it leaves")
    parser.add_argument("--seed", type=int, default=0, help="of the data's order and of sampling")
    parser.add_argument("--steps", type=int, default=30, help="training steps of 16 questions, 8 rollouts each")
    parser.add_argument(
        "--tools", type=Path, default=TOOLS, help="tool YAML to train with; evaluated with the plain one"
    )
    arguments = parser.parse_args()
    started = time.monotonic()
    run_dir: Path = arguments.run_dir.resolve()
    if run_dir.exists():
        shutil.rmtree(run_dir)
    run_dir.mkdir(parents=True)
    for name, dataset in zip(("train", "heldout"), demo_datasets(), strict=True):
        write(dataset, run_dir / "data" / f"{name}.parquet")
    train(run_dir, arguments.tools.resolve(), arguments.steps, arguments.seed)
    evaluation = evaluate_trained(run_dir, arguments.steps, arguments.seed)
    steps, summary = report(run_dir, evaluation, time.monotonic() - started)
    say(run_dir, steps, summary)


def train(run_dir: Path, tools: Path, steps: int, seed: int) -> None:
    """Run verl's trainer with its flood of lines in a file, and a progress bar here. Exits when it fails."""
    overrides = main_ppo_overrides(
        model=MODEL,
        train=run_dir / "data" / "train.parquet",
        heldout=run_dir / "data" / "heldout.parquet",
        tools=tools,
        reward=HERE / "reward.py",
        run_dir=run_dir,
        steps=steps,
        seed=seed,
    )
    log = run_dir / "train.log"
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=main_ppo_env(run_dir))
        try:
            watch(process, run_dir, steps)
        finally:
            process.terminate()
            process.wait()
    if len(training_metrics(run_dir)) < steps:
        tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:])
        sys.exit(f"{tail}\n\nTraining ended early; the whole log is {log}")


def watch(process: subprocess.Popen[bytes], run_dir: Path, steps: int) -> None:
    """A progress bar until the process ends."""
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[said]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=steps, said="starting verl and SGLang (about a minute)")
        while process.poll() is None:
            time.sleep(0.5)
            if metrics := training_metrics(run_dir):
                reward = metrics[-1]["critic/score/mean"]
                progress.update(task, completed=len(metrics), said=f"reward {reward:.2f}")


def evaluate_trained(run_dir: Path, steps: int, seed: int) -> Evaluation:
    """The trained model on the held-out questions, with its tool and without."""
    with console.status("asking the trained model 512 questions it has never seen"):
        return evaluate(
            base_model=MODEL,
            trained_model=run_dir / "checkpoints" / f"global_step_{steps}" / "actor" / "huggingface",
            heldout=run_dir / "data" / "heldout.parquet",
            tools=TOOLS,
            reward=HERE / "reward.py",
            seed=seed,
        )


def report(run_dir: Path, evaluation: Evaluation, wall_s: float) -> tuple[list[StepMetrics], Summary]:
    """Merge the journal, check every trajectory, and write what the run leaves behind."""
    trajectories = run_dir / "trajectories.jsonl"
    merge_journals(run_dir / "journal", trajectories)
    steps = read_steps(training_metrics(run_dir), read_trajectories(trajectories))
    write_steps(steps, run_dir / "metrics.jsonl")
    summary = summarize(steps, read_trajectories(trajectories), evaluation, MODEL, wall_s)
    (run_dir / "summary.json").write_text(json.dumps(summary.to_dict(), indent=2) + "\n", encoding="utf-8")
    draw(steps, evaluation, run_dir / "reward.png")
    return steps, summary


def say(run_dir: Path, steps: list[StepMetrics], summary: Summary) -> None:
    """Five lines for a newcomer, and where to look next."""
    evaluation = summary.evaluation
    shown = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
    console.print(
        f"\nThe model solved {summary.reward_first:.0%} of its training problems in the first step and "
        f"{summary.reward_last5:.0%} in the last five of {len(steps)}.\n"
        f"On {evaluation.questions} problems it has never seen: {evaluation.before:.0%} before training, "
        f"{evaluation.after:.0%} after; without the calculator {evaluation.without_tool:.0%}.\n"
        f"It calls the tool in {summary.tool_call_rate:.0%} of its rollouts; {summary.malformed_call_rate:.1%} of the "
        "calls are malformed.\n"
        f"What was trained is what was sampled: {summary.checked} trajectories checked, largest difference between "
        f"sampling and training probability {summary.rollout_probs_diff_max:.0e}.\n"
        f"{summary.failed} rollouts failed, every tool instance was released, and it all took "
        f"{summary.wall_s / 60:.1f} minutes.\n"
        f"\nLook next at {shown}/reward.png, then at one conversation in {shown}/trajectories.jsonl; "
        "README.md says how to train on your own tools.",
        highlight=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
