"""TRL's side of `trl_latency.py`: `GRPOTrainer(tools=[calculator])` on the demo's task, a step for each condition.

    PYTHONPATH=.../trl_reference python benchmarks/trl_child.py --tool sync --out steps.json clean latency hang

It runs in a process of its own, the only one with trl on its import path: verl does not start beside it. The model, the
prompts, the reward, the group and batch size and the calculator are the demo's, what TRL's template is given is what
this package's is given, and the learning rate is 0, so that every step asks the same model the same questions.

`GRPOTrainer` takes plain and `async` functions as tools. It goes through the conversations one after another, runs the
plain ones where it meets them, and gathers the async ones of one turn of one conversation (trl 1.16.0,
trainer/grpo_trainer.py:1965-2006): they overlap only where a model makes several calls in one turn.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gsm8k_tool"
sys.path.insert(0, str(EXAMPLE))

from launch import MAX_RESPONSE_TOKENS, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT  # noqa: E402
from reward import compute_score  # noqa: E402
from word_problems import demo_datasets  # noqa: E402

from sglang_multiturn.tools.builtin.calculator import evaluate, format_number  # noqa: E402

MODEL = EXAMPLE / "tiny_model"
TOOL_DOCUMENTATION = """Evaluates an arithmetic expression exactly.

Args:
    expression: For example 12*(3+4).
"""
"""What TRL makes the tool's schema of: the one of `tool_configs/calculator.yaml`."""
MICRO_BATCH_ROWS = 32
"""The demo's; four of them make a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """How the tool behaves during a step."""

    latency_s: float = 0.0
    """Of every call."""
    hang_every: int = 0
    """Of so many calls one hangs; 0 is none."""
    hang_s: float = 60.0


CONDITIONS = {"clean": Condition(), "latency": Condition(latency_s=0.1), "hang": Condition(hang_every=50)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlStep:
    """One training step of TRL."""

    condition: str
    rollout_s: float
    """Generation and tools together."""
    step_s: float
    """The whole step: those, the reward and the update."""
    calls: int
    hung: int
    tools_s: float
    """The sum of what the calls waited."""


STEPS = TypeAdapter(list[TrlStep])


class SlowTool:
    """How long each call waits, by the condition of the step, and what came of it."""

    def __init__(self) -> None:
        self.begin("clean")

    def begin(self, condition: str) -> None:
        """The next step's condition."""
        self.condition = condition
        self.calls = self.hung = 0
        self.waited_s = 0.0

    def wait_s(self) -> float:
        """Of the call that begins now."""
        condition = CONDITIONS[self.condition]
        self.calls += 1
        hangs = condition.hang_every > 0 and self.calls % condition.hang_every == 0
        self.hung += hangs
        wait_s = condition.hang_s if hangs else condition.latency_s
        self.waited_s += wait_s
        return wait_s


def make_tool(slow: SlowTool, kind: str) -> Callable[[str], Any]:
    """The demo's calculator as TRL takes tools. No return type: TRL would show it to the model, which is not used to it."""
    if kind == "async":

        async def calculator(expression: str):
            await asyncio.sleep(slow.wait_s())
            return format_number(evaluate(expression))
    else:

        def calculator(expression: str):
            time.sleep(slow.wait_s())
            return format_number(evaluate(expression))

    calculator.__doc__ = TOOL_DOCUMENTATION
    return calculator


def train(kind: str, plan: Sequence[str]) -> list[TrlStep]:
    """One step for each condition of the plan, in its order."""
    import torch

    from sglang_multiturn.cpu.sglang_kernels import declare_torchvision_operators

    torch.set_num_threads(1)  # a model this small loses more to waking threads than it wins
    declare_torchvision_operators()  # transformers' models import torchvision, which must not fail beside a CPU torch
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOTrainer

    slow = SlowTool()
    steps: list[TrlStep] = []

    class TimedTrainer(GRPOTrainer):
        rollout_s = 0.0

        def _generate(self, prompts: list[Any]) -> Any:
            """Sampling and the tool loop, and nothing else."""
            started = time.monotonic()
            generated = super()._generate(prompts)
            self.rollout_s = time.monotonic() - started
            return generated

    class StepClock(TrainerCallback):
        started = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            slow.begin(plan[len(steps)])
            self.started = time.monotonic()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step = TrlStep(
                condition=slow.condition,
                rollout_s=trainer.rollout_s,
                step_s=time.monotonic() - self.started,
                calls=slow.calls,
                hung=slow.hung,
                tools_s=slow.waited_s,
            )
            steps.append(step)
            print(f"TRL, {kind} tool: {step}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            **trainer_arguments(folder, len(plan)), tools=[make_tool(slow, kind)], callbacks=[StepClock()]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return steps


def trainer_arguments(folder: str, steps: int) -> dict[str, Any]:
    """The demo's settings in TRL's words."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar
    from trl import GRPOConfig
    from trl.chat_template_utils import qwen3_schema

    disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    tokenizer.response_schema = qwen3_schema  # TRL knows templates by heart; this one writes calls as Qwen3's does
    rows = demo_datasets()[0][:PROMPTS_PER_STEP]
    return {
        "model": AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32),
        "processing_class": tokenizer,
        "reward_funcs": score,
        "train_dataset": Dataset.from_list(
            [{"prompt": row["prompt"], "ground_truth": row["reward_model"]["ground_truth"]} for row in rows]
        ),
        "args": GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=MICRO_BATCH_ROWS,
            gradient_accumulation_steps=PROMPTS_PER_STEP * SAMPLES_PER_PROMPT // MICRO_BATCH_ROWS,
            num_generations=SAMPLES_PER_PROMPT,
            max_completion_length=MAX_RESPONSE_TOKENS,
            max_steps=steps,
            learning_rate=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to=[],
            logging_strategy="no",
            disable_tqdm=True,
        ),
    }


def score(completions: list[list[dict[str, Any]]], ground_truth: list[str], **_: Any) -> list[float]:
    """The demo's reward, of the model's own words."""
    said = ("\n".join(m["content"] or "" for m in one if m["role"] == "assistant") for one in completions)
    return [compute_score("", words, truth) for words, truth in zip(said, ground_truth, strict=True)]


def main() -> None:
    """Train, and write the steps' figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=["sync", "async"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("plan", nargs="+", choices=list(CONDITIONS))
    arguments = parser.parse_args()
    arguments.out.write_bytes(STEPS.dump_json(train(arguments.tool, arguments.plan)))


if __name__ == "__main__":
    main()
