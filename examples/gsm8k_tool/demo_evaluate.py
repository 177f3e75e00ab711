"""Held-out questions, asked without verl: the same engine, template and tools, through `RolloutEngine`.

One SGLang serves all three measurements; the trained weights are loaded into it in between. The log-probabilities it
reports are compared with those of transformers for the same weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sglang_multiturn import (
    HFChatTemplate,
    RequestSpec,
    RolloutConfig,
    RolloutEngine,
    SamplingParams,
    SGLangEngine,
    ToolRegistry,
    Trajectory,
)
from sglang_multiturn.cpu.sglang_kernels import declare_torchvision_operators
from sglang_multiturn.dataset import read_rows, spec_from_row
from sglang_multiturn.rewards import load_reward_fn

BATCH_ROWS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Mean rewards on the held-out questions, sampled at temperature 1."""

    questions: int
    before: float
    """The untrained model with its tool."""
    after: float
    """The trained model with its tool."""
    without_tool: float
    """The trained model when it is offered none."""
    logprob_diff_max: float
    """Largest difference of SGLang's and transformers' log-probabilities on the trained model's own tokens."""


def evaluate(
    *, base_model: Path, trained_model: Path, heldout: Path, tools: Path, reward: Path, seed: int
) -> Evaluation:
    """Ask every held-out question of the base and of the trained model."""
    return asyncio.run(_evaluate(base_model, trained_model, heldout, tools, reward, seed))


async def _evaluate(
    base_model: Path, trained_model: Path, heldout: Path, tools: Path, reward: Path, seed: int
) -> Evaluation:
    specs = [
        spec_from_row(row, place=place, request_id=f"heldout-{i}", uid=str(i), sampling=SamplingParams(temperature=1.0))
        for i, (place, row) in enumerate(read_rows(heldout))
    ]
    template = HFChatTemplate.from_pretrained(base_model)
    engine = SGLangEngine(str(base_model), random_seed=seed, dtype="float32")
    config = RolloutConfig(max_response_tokens=256, max_concurrent=64)
    score = load_reward_fn(str(reward))
    rollouts = RolloutEngine(
        engine, template=template, tools=ToolRegistry.from_yaml(tools), config=config, reward_fn=score
    )
    bare = RolloutEngine(engine, template=template, config=config, reward_fn=score)
    async with rollouts:
        before = await rollouts.run_all(specs)
        await engine.update_weights_from_disk(str(trained_model), weight_version=1)
        after = await rollouts.run_all(specs)
        without_tool = await bare.run_all([_without_tools(spec) for spec in specs])
    return Evaluation(
        questions=len(specs),
        before=_mean_reward(before),
        after=_mean_reward(after),
        without_tool=_mean_reward(without_tool),
        logprob_diff_max=logprob_diff_max(after, trained_model),
    )


def _without_tools(spec: RequestSpec) -> RequestSpec:
    return RequestSpec(
        request_id=f"bare-{spec.request_id}",
        uid=spec.uid,
        messages=spec.messages,
        sampling=spec.sampling,
        data_source=spec.data_source,
        ground_truth=spec.ground_truth,
    )


def _mean_reward(trajectories: Sequence[Trajectory]) -> float:
    return sum(trajectory.reward or 0.0 for trajectory in trajectories) / len(trajectories)


def logprob_diff_max(trajectories: Sequence[Trajectory], model: Path) -> float:
    """Largest difference between the log-probabilities in trajectories and transformers' in float32.

    Only tokens with mask 1 are compared; the trajectories must have been sampled at temperature 1 by `model`.
    """
    import torch

    # PyPI's torchvision cannot be imported beside a CPU build of torch, and transformers tries.
    declare_torchvision_operators()
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    reference = AutoModelForCausalLM.from_pretrained(str(model), dtype=torch.float32).eval()
    worst = 0.0
    for start in range(0, len(trajectories), BATCH_ROWS):
        batch = trajectories[start : start + BATCH_ROWS]
        rows = [trajectory.ledger.input_ids for trajectory in batch]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        with torch.no_grad():
            logprobs = reference(input_ids=ids).logits.log_softmax(-1)
        for index, trajectory in enumerate(batch):
            reported = trajectory.response_logprobs
            assert reported is not None  # this engine keeps them
            first = len(trajectory.prompt_ids)
            for offset, (token, mask) in enumerate(zip(trajectory.response_ids, trajectory.response_mask, strict=True)):
                if mask:
                    expected = logprobs[index, first + offset - 1, token].item()
                    worst = max(worst, abs(expected - reported[offset]))
    return worst
