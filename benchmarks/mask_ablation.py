"""What the response mask is worth: the demo's task, trained once with the mask and once without, everything else equal.

    python benchmarks/mask_ablation.py                          # both arms, 3 seeds
    python benchmarks/mask_ablation.py --json out.json --plot out.png
    python benchmarks/mask_ablation.py --draw out.json --plot out.png     # only the picture, of figures there are

It took 46 minutes on two cores that had much else to do: a step takes seconds while the model works, and several times
as long once it no longer ends its turns.

The tiny model rolls out on SGLang through `RolloutEngine` and learns by GRPO (`grpo_loop.py`): the demo's prompts, tool,
reward, group and batch size, learning rate, schedule and number of steps. With the mask the loss is over the tokens the
model sampled. Without it the loss is over every token after the prompt, tool answers and template boundaries included,
as in a trainer that takes the whole response for the model's own; log-probabilities are recomputed at every position,
as verl does. Held-out reward is that of problems never trained on, sampled at temperature 1.

What is seen without the mask (`baselines/mask_ablation-2xcpu.*`): about half of the trained tokens were never sampled.
The model gives most of them a probability near 1e-5, so their gradient is some thirteen times as large as that of the
sampled ones, and after clipping little is left of these. Rewarded conversations have more turns, so what pays is to
expect the template between them: its log-probability climbs from -11.5 to -5 in five steps. The same weights, embeddings
shared with the output, have to spell the model's own calls: these lose their form (line breaks in the middle, ends
missing), no answer is right any more, no group differs, and from then on there is no gradient to recover by.

A seed is the order of the training problems, the same for both arms. Sampling is not repeatable: SGLang batches
whatever has arrived, so two runs of one seed differ as well, which is why there are several.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_multiturn import (
    HFChatTemplate,
    RequestSpec,
    RolloutConfig,
    RolloutEngine,
    SamplingParams,
    SGLangEngine,
    ToolRegistry,
)
from sglang_multiturn.cpu.sglang_kernels import declare_torchvision_operators
from sglang_multiturn.dataset import in_groups, spec_from_row
from sglang_multiturn.rewards import load_reward_fn

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLE = REPOSITORY / "examples" / "gsm8k_tool"
sys.path.insert(0, str(EXAMPLE))

from grpo_loop import Learner, LossOn, OldLogprobs, make_batch  # noqa: E402
from launch import LEARNING_RATE, MAX_RESPONSE_TOKENS, PROMPTS_PER_STEP, SAMPLES_PER_PROMPT  # noqa: E402
from mask_ablation_report import (  # noqa: E402
    Ablation,
    Behaviour,
    Run,
    Step,
    behaviour,
    draw,
    machine,
    read,
    show,
    spell_out,
    versions,
    write,
)
from word_problems import demo_datasets  # noqa: E402

MODEL = EXAMPLE / "tiny_model"
console = Console(stderr=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """One way of training."""

    loss_on: LossOn
    old_logprobs: OldLogprobs

    @property
    def name(self) -> str:
        """What tables and plots call it."""
        mask = "mask on" if self.loss_on is LossOn.SAMPLED else "mask off"
        return mask if self.old_logprobs is OldLogprobs.RECOMPUTED else f"{mask}, {self.old_logprobs} log-probabilities"


ARMS = {
    "on": Arm(loss_on=LossOn.SAMPLED, old_logprobs=OldLogprobs.RECOMPUTED),
    "off": Arm(loss_on=LossOn.EVERYTHING, old_logprobs=OldLogprobs.RECOMPUTED),
    "on-rollout": Arm(loss_on=LossOn.SAMPLED, old_logprobs=OldLogprobs.ROLLOUT),
    "off-rollout": Arm(loss_on=LossOn.EVERYTHING, old_logprobs=OldLogprobs.ROLLOUT),
}


class Bench:
    """One SGLang for all runs; the first weights are put back before each."""

    def __init__(self, *, steps: int, heldout: int, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self._steps = steps
        self._train, unseen = demo_datasets()
        self._heldout = [spec(row, f"heldout-{index}") for index, row in enumerate(unseen[:heldout])]
        self._template = HFChatTemplate.from_pretrained(MODEL)
        self._engine = SGLangEngine(str(MODEL), dtype="float32", server_args={"max_running_requests": 128})
        self._rollouts = RolloutEngine(
            self._engine,
            template=self._template,
            tools=ToolRegistry.from_yaml(REPOSITORY / "tool_configs" / "calculator.yaml"),
            config=RolloutConfig(max_response_tokens=MAX_RESPONSE_TOKENS, max_concurrent=128),
            reward_fn=load_reward_fn(str(EXAMPLE / "reward.py")),
        )

    @property
    def heldout_questions(self) -> int:
        """How many unseen problems are asked."""
        return len(self._heldout)

    async def run_all(self, runs: Sequence[tuple[Arm, int]]) -> tuple[Behaviour, list[Run]]:
        """The untrained model on the held-out problems, and every run."""
        async with self._rollouts:
            before = behaviour(await self._rollouts.run_all(self._heldout))
            console.print(f"held-out reward before training {before.reward:.3f}", highlight=False)
            return before, [await self._run(arm, seed) for arm, seed in runs]

    async def _run(self, arm: Arm, seed: int) -> Run:
        started = time.monotonic()
        learner = Learner(load_model(), steps=self._steps, rate=self.learning_rate, old_logprobs=arm.old_logprobs)
        await self._push(learner)
        steps = []
        for number, specs in enumerate(self._batches(arm, seed), start=1):
            steps.append(await self._step(learner, arm, number, specs))
            show_step(arm, seed, steps[-1])
        heldout = await self._rollouts.run_all(self._heldout)
        return Run(
            arm=arm.name,
            seed=seed,
            steps=steps,
            heldout=behaviour(heldout),
            examples=[spell_out(trajectory, self._template) for trajectory in heldout[:4]],
            wall_s=time.monotonic() - started,
        )

    async def _step(self, learner: Learner, arm: Arm, number: int, specs: list[RequestSpec]) -> Step:
        started = time.monotonic()
        trajectories = await self._rollouts.run_all(specs)
        for trajectory in trajectories:
            trajectory.check(end_ids=self._template.end_ids)
        rolled_out = time.monotonic()
        update = learner.update(make_batch(trajectories, arm.loss_on, pad_id=0))
        await self._push(learner)
        return Step(
            step=number,
            rollouts=behaviour(trajectories),
            update=update,
            rollout_s=rolled_out - started,
            update_s=time.monotonic() - rolled_out,
        )

    async def _push(self, learner: Learner) -> None:
        await self._engine.update_weights(learner.named_weights(), weight_version=self._engine.weight_version + 1)

    def _batches(self, arm: Arm, seed: int) -> Iterator[list[RequestSpec]]:
        """The prompts of every step, each asked for a group of rollouts. No problem comes twice."""
        rows = random.Random(seed).sample(self._train, self._steps * PROMPTS_PER_STEP)
        specs = [spec(row, f"{arm.name}-{seed}-{number}") for number, row in enumerate(rows)]
        for start in range(0, len(specs), PROMPTS_PER_STEP):
            yield list(in_groups(specs[start : start + PROMPTS_PER_STEP], SAMPLES_PER_PROMPT))


def spec(row: dict[str, Any], name: str) -> RequestSpec:
    """A row as a request; `name` is its id and its group's."""
    return spec_from_row(row, place=name, request_id=name, uid=name, sampling=SamplingParams(temperature=1.0))


def load_model() -> Any:
    """The demo's model as it is before training, in float32."""
    import torch

    declare_torchvision_operators()  # transformers' models import torchvision, which must not fail beside a CPU torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(str(MODEL), dtype=torch.float32)


def show_step(arm: Arm, seed: int, step: Step) -> None:
    """A line a step."""
    rollouts, update = step.rollouts, step.update
    template = "" if update.logprob_template is None else f"log p of the template {update.logprob_template:.1f}, "
    console.print(
        f"{arm.name} seed {seed} step {step.step:2}: reward {rollouts.reward:.3f}, calls {rollouts.tool_call_rate:.2f}, "
        f"cut {rollouts.cut_rate:.2f}, {template}gradient {update.grad_norm_sampled:.2f} from sampled tokens and "
        f"{update.grad_norm_not_sampled:.2f} from others; {step.rollout_s:.1f} + {step.update_s:.1f} s",
        highlight=False,
        soft_wrap=True,
    )


def measure(bench: Bench, arms: Sequence[Arm], seeds: int) -> Ablation:
    """Every arm with every seed; seed by seed, so that what runs beside this slows all arms alike."""
    started = time.monotonic()
    before, runs = asyncio.run(bench.run_all([(arm, seed) for seed in range(seeds) for arm in arms]))
    return Ablation(
        machine=machine(),
        python=sys.version.split()[0],
        versions=versions(),
        heldout_questions=bench.heldout_questions,
        rollouts_a_step=PROMPTS_PER_STEP * SAMPLES_PER_PROMPT,
        learning_rate=bench.learning_rate,
        before=before,
        runs=runs,
        wall_s=time.monotonic() - started,
    )


def main() -> None:
    """Measure or read, print, and write and draw when asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["on", "off"], help="ways of training")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    parser.add_argument("--steps", type=int, default=30, help="of 16 questions, 8 rollouts each; at most 64")
    parser.add_argument("--heldout", type=int, default=256, help="unseen questions, at most 512")
    parser.add_argument("--learning-rate", type=float, default=float(LEARNING_RATE), help="of the first step")
    parser.add_argument("--json", type=Path, help="write the figures, with versions and machine, here")
    parser.add_argument("--plot", type=Path, help="draw the curves here")
    parser.add_argument("--draw", type=Path, help="measure nothing: take the figures of this file")
    arguments = parser.parse_args()
    if arguments.draw:
        ablation = read(arguments.draw)
    else:
        import torch

        torch.set_num_threads(1)  # a model this small loses more to waking threads than it wins
        arms = [ARMS[name] for name in arguments.arms]
        bench = Bench(steps=arguments.steps, heldout=arguments.heldout, learning_rate=arguments.learning_rate)
        ablation = measure(bench, arms, arguments.seeds)
    show(ablation, Console(width=120))
    if arguments.json:
        write(ablation, arguments.json)
    if arguments.plot:
        draw(ablation, arguments.plot)


if __name__ == "__main__":
    main()
