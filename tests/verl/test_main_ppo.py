"""`python -m verl.trainer.main_ppo` as published, two steps on the CPU, under V1 and under V0.

In every group of eight, one conversation fails in its tool. What the trainer used is compared with what was journalled.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import torch
import word_problems  # type: ignore[import-not-found]  # examples/gsm8k_tool
import yaml
from launch import main_ppo_env, main_ppo_overrides, training_metrics  # type: ignore[import-not-found]

from sglang_multiturn.request import RequestState
from sglang_multiturn.trajectory import Trajectory, read_trajectories

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "gsm8k_tool"
PROMPTS, SAMPLES, STEPS = 4, 8, 2


@dataclass(frozen=True)
class Run:
    """What one training run left behind."""

    v1: bool
    metrics: list[dict[str, float]]
    rows: list[dict[str, Any]]
    """As the trainer computed advantages of them, verl's own padding left out."""
    journal: dict[str, Trajectory]
    log: str
    folder: Path


@pytest.fixture(scope="module", params=["v1", "v0"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp(request.param)
    v1 = request.param == "v1"
    log = train(folder, v1=v1)
    rows = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    lines = [line for path in (folder / "journal").glob("*.jsonl") for line in read_trajectories(path)]
    return Run(
        v1=v1,
        metrics=training_metrics(folder),
        rows=[row for row in rows if not row["key"].startswith("pad")],
        journal={line.request_id: line for line in lines},
        log=log,
        folder=folder,
    )


def train(folder: Path, *, v1: bool) -> str:
    overrides = main_ppo_overrides(
        model=EXAMPLE / "tiny_model",
        train=dataset(folder),
        heldout=dataset(folder),
        tools=tools(folder, v1=v1),
        reward=EXAMPLE / "reward.py",
        run_dir=folder,
        steps=STEPS,
        seed=1,
        v1=v1,
    )
    sizes = [
        f"data.train_batch_size={PROMPTS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
    ]
    environment = main_ppo_env(folder) | {
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VERL_USE_EXTERNAL_MODULES": "trainer_recorder",
        "TRAINER_RECORD": str(folder / "record.jsonl"),
    }
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, *sizes],
            env=environment,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=560)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    text = (folder / "log.txt").read_text(errors="replace")
    assert code == 0, text[-6000:]
    return text


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


def groups(rows: list[dict[str, Any]], journal: dict[str, Trajectory]) -> dict[str, list[dict[str, Any]]]:
    by_uid: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_uid[journal[row["request_id"]].uid].append(row)
    return dict(by_uid)


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
    kept = 0
    for row in run.rows:
        line = run.journal[row["request_id"]]
        if line.state is RequestState.FAILED:
            continue
        kept += 1
        end = line.ledger.num_tokens_to_last_sampled
        assert row["prompt"] == line.prompt_ids
        assert row["response"] == line.response_ids[:end]
        assert row["response_mask"] == line.response_mask[:end]
        assert line.response_logprobs is not None
        assert row["rollout_log_probs"] == pytest.approx(line.response_logprobs[:end], abs=1e-6)
        assert sum(row["token_level_scores"]) == row["token_level_scores"][-1] == line.reward
    assert kept == sum(line.state is RequestState.COMPLETED for line in run.journal.values())


def test_weights_of_every_step_reached_the_engine(run: Run) -> None:
    versions = {
        version for line in run.journal.values() for version in line.response_weight_versions if version is not None
    }
    assert versions == set(range(STEPS))


def test_a_failed_conversation_leaves_the_advantages_of_a_group_of_seven_under_v1(run: Run) -> None:
    """And under V0 it is a row of reward 0 in a group of eight, as the log says."""
    by_uid = groups(run.rows, run.journal)
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
