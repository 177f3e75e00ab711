"""A training run that is resumed from a checkpoint goes on as the one that was not interrupted.

In the middle of an epoch: test_stop_reasons resumes at an epoch's end. The engine is scripted: what it says depends on
nothing but the prompt. That real sampling can be repeated too, with `rollout.full_determinism`, is shown with real SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import word_problems  # type: ignore[import-not-found]  # examples/gsm8k_tool
from launch import main_ppo_overrides  # type: ignore[import-not-found]
from scripted_runs import run_plans
from stop_reasons import SAMPLES
from training import (
    EXAMPLE,
    HERE,
    TINY_MODEL,
    Run,
    assert_rows_are_the_journals,
    assert_same_step,
    resumed_from,
    train,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.matrix,
]

PLANS = ["answered", "tool_stop", "max_assistant_turns", "error", "too_many_errors", "max_tool_turns"]
PROMPTS, STEPS, SAVED = 2, 3, 2
"""Three steps take each prompt once; the checkpoint is that of the second."""
OVERRIDES = [
    "actor_rollout_ref.actor.optim.lr=1e-3",  # so that a step not taken would show
    f"trainer.save_freq={SAVED}",
]


def said(run: Run, step: int) -> dict[tuple[int, int], list[int]]:
    """What was sampled in a step, by prompt and sample."""
    lines = [line for line in run.training().values() if line.step == step]
    return {(line.input_index, line.sample_index): line.response_ids for line in lines}


@pytest.mark.parametrize("v1", [True, False], ids=["v1", "v0"])
def test_a_resumed_run_takes_the_step_that_the_uninterrupted_one_took(tmp_path: Path, v1: bool) -> None:
    def run(name: str, more: Sequence[str]) -> Run:
        return run_plans(
            tmp_path / name, PLANS, v1=v1, workers=1, steps=STEPS, overrides=[*OVERRIDES, *more], prompts=PROMPTS
        )

    uninterrupted = run("uninterrupted", [])
    assert len(uninterrupted.training()) == STEPS * PROMPTS * SAMPLES
    assert assert_rows_are_the_journals(uninterrupted) == STEPS * PROMPTS * SAMPLES - 1
    resumed = run("resumed", resumed_from(uninterrupted.folder, step=SAVED))
    assert len(resumed.training()) == PROMPTS * SAMPLES
    assert_same_step(uninterrupted, resumed, step=STEPS)


def test_with_full_determinism_a_resumed_run_samples_the_same_tokens(tmp_path: Path) -> None:
    """Real SGLang, which draws each request by a seed of its own."""
    prompts, samples = 4, 4

    def run(name: str, more: Sequence[str]) -> Run:
        folder = tmp_path / name
        folder.mkdir()
        train_file = folder / "train.parquet"
        word_problems.write(word_problems.rows(seed=1, count=STEPS * prompts, split="train"), train_file)
        overrides = main_ppo_overrides(
            model=TINY_MODEL,
            train=train_file,
            heldout=train_file,
            tools=HERE.parents[1] / "tool_configs" / "calculator.yaml",
            reward=EXAMPLE / "reward.py",
            run_dir=folder,
            steps=STEPS,
            seed=1,
        )
        sizes = [
            f"data.train_batch_size={prompts}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts}",
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={prompts * samples}",
            f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={prompts * samples}",
            f"actor_rollout_ref.rollout.n={samples}",
            "actor_rollout_ref.rollout.full_determinism=True",
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra]",
            f"trainer.save_freq={SAVED}",
        ]
        return train(folder, [*overrides, *sizes, *more], v1=True)

    uninterrupted = run("uninterrupted", [])
    resumed = run("resumed", resumed_from(uninterrupted.folder, step=SAVED))
    before, after = said(uninterrupted, STEPS), said(resumed, STEPS)
    assert len(before) == prompts * samples
    assert len({tuple(ids) for ids in before.values()}) > prompts  # samples of one prompt differ
    assert before == after
    assert_same_step(uninterrupted, resumed, step=STEPS)
