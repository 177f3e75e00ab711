"""`python -m verl.trainer.main_ppo` as published, two steps on the CPU, under V1 and under V0.

In every group of eight, one conversation fails in its tool. What the trainer used is compared with what was journalled.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import torch
import word_problems  # type: ignore[import-not-found]  # examples/gsm8k_tool
import yaml
from launch import main_ppo_overrides  # type: ignore[import-not-found]
from training import EXAMPLE, HERE, TINY_MODEL, Run, assert_rows_are_the_journals, train

from sglang_multiturn.request import RequestState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]

PROMPTS, SAMPLES, STEPS = 4, 8, 2


@pytest.fixture(scope="module", params=["v1", "v0"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp(request.param)
    v1 = request.param == "v1"
    overrides = main_ppo_overrides(
        model=TINY_MODEL,
        train=dataset(folder),
        heldout=dataset(folder),
        tools=tools(folder, v1=v1),
        reward=EXAMPLE / "reward.py",
        run_dir=folder,
        steps=STEPS,
        seed=1,
        v1=v1,
    )
    sizes = [f"data.train_batch_size={PROMPTS}", f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}"]
    return train(folder, [*overrides, *sizes], v1=v1)


def dataset(folder: Path) -> Path:
    rows = word_problems.rows(seed=1, count=PROMPTS * STEPS, split="train")
    for number, row in enumerate(rows):
        row["extra_info"]["tools_kwargs"]["calculator"]["create_kwargs"]["question"] = number
    path = folder / "train.parquet"
    word_problems.write(rows, path)
    return path


def tools(folder: Path, *, v1: bool) -> Path:
    """Under V1 each conversation's calculator runs in a process of its own, four calls at a time in the whole run."""
    document = yaml.safe_load((HERE.parents[1] / "tool_configs" / "calculator.yaml").read_text())
    document["tools"][0]["class_name"] = "failing_calculator.FailingCalculator"
    document["tools"][0] |= {"execution": "process", "max_concurrent": 4} if v1 else {}
    path = folder / "tools.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))  # the order is part of the prompt
    return path


def test_every_step_was_trained_on_what_the_engine_sampled(run: Run) -> None:
    assert [entry["step"] for entry in run.metrics] == list(range(1, STEPS + 1))
    for step in run.metrics:
        assert step["training/rollout_probs_diff_valid"] == 1
        assert 0 < step["training/rollout_probs_diff_max"] <= 5e-5
        assert 0 <= step["critic/score/mean"] <= 1
    assert any(step["actor/grad_norm"] > 0 for step in run.metrics)


def test_every_conversation_is_in_the_journal_and_sound(run: Run) -> None:
    assert len(run.journal) == PROMPTS * SAMPLES * STEPS
    for line in run.journal.values():
        line.check()
    failed = [line for line in run.journal.values() if line.state is RequestState.FAILED]
    assert len(failed) == PROMPTS * STEPS
    assert all(line.error is not None and "the calculator is broken" in line.error.message for line in failed)
    assert any(len(line.turns) > 1 for line in run.journal.values())


def test_the_trainers_rows_are_the_journals_tokens(run: Run) -> None:
    completed = [line for line in run.journal.values() if line.state is RequestState.COMPLETED]
    assert assert_rows_are_the_journals(run) == len(completed)
    for row in run.rows:
        assert sum(row["token_level_scores"]) == row["token_level_scores"][-1]


def test_weights_of_every_step_reached_the_engine(run: Run) -> None:
    versions = {
        version for line in run.journal.values() for version in line.response_weight_versions if version is not None
    }
    assert versions == set(range(STEPS))


def test_a_failed_conversation_leaves_the_advantages_of_a_group_of_seven_under_v1(run: Run) -> None:
    """And under V0 it is a row of reward 0 in a group of eight, as the log says."""
    by_uid = run.by_uid(run.rows)
    assert [len(rows) for rows in by_uid.values()] == [SAMPLES - run.v1] * PROMPTS * STEPS
    informative = 0
    for rows in by_uid.values():
        rewards = torch.tensor([sum(row["token_level_scores"]) for row in rows])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        informative += int(rewards.std() > 0)
        for row, advantage in zip(rows, expected.tolist(), strict=True):
            assert row["advantages"] == pytest.approx(
                [advantage * trained for trained in row["response_mask"]], abs=1e-5
            )
    assert informative > 0
    assert ("shifts its group's mean" in run.log) is (not run.v1)


def test_tools_left_nothing_over(run: Run) -> None:
    for line in run.journal.values():
        metrics = line.metrics
        assert metrics.tool_instances_created == metrics.tool_instances_released
        assert (metrics.lost_instances, metrics.release_errors, metrics.tool_timeouts) == (0, 0, 0)
    assert "tools hold more than they should" not in run.log
    assert sum(line.metrics.tool_calls for line in run.journal.values()) > 0


def test_the_trained_model_can_be_loaded_afterwards(run: Run) -> None:
    saved = run.folder / "checkpoints" / f"global_step_{STEPS}" / "actor" / "huggingface"
    assert (saved / "model.safetensors").is_file()
    assert (saved / "tokenizer.json").is_file()
