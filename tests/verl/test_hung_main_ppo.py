"""Conversations that hang, in a real `python -m verl.trainer.main_ppo` run: each ends by its deadline, the step goes on.

Two prompts, four conversations each. Two of the four hang in a tool in a process of its own, one in its generation.
The first prompt's tool has no deadline, so that the rollout's ends it; the second's has one of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("transfer_queue")

import pyarrow.parquet  # type: ignore[import-untyped]
import word_problems  # type: ignore[import-not-found]  # examples/gsm8k_tool
import yaml
from launch import LOOP_CLASS, main_ppo_env, main_ppo_overrides, training_metrics  # type: ignore[import-not-found]
from verl_hanging import HANG_IN_GENERATION, HANG_IN_TOOL  # type: ignore[import-not-found]

from sglang_multiturn.request import StopReason
from sglang_multiturn.trajectory import Trajectory, read_trajectories

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "gsm8k_tool"
PROMPTS, SAMPLES = 2, 4
ROLLOUT_TIMEOUT_S, TOOL_TIMEOUT_S = 25.0, 2.0
WITH_TOOL_DEADLINE = "with_tool_deadline"
"""A second entry of our loop, for the prompts that name it in their `agent_name`."""
CONTEXT_TOKENS = 16_384


@dataclass(frozen=True)
class Run:
    """What the training run left behind."""

    metrics: list[dict[str, float]]
    journal: dict[tuple[int, int], Trajectory]
    """By prompt and session."""
    record: list[dict[str, Any]]
    """What the engine did, in order."""
    log: str

    def of(self, *sessions: int, prompt: int) -> list[Trajectory]:
        return [self.journal[prompt, session] for session in sessions]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("hung")
    log = train(folder)
    lines = [line for path in (folder / "journal").glob("*.jsonl") for line in read_trajectories(path)]
    return Run(
        metrics=training_metrics(folder),
        journal={(line.input_index, line.sample_index): line for line in lines},
        record=[json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()],
        log=log,
    )


def train(folder: Path) -> str:
    data = dataset(folder)
    overrides = main_ppo_overrides(
        model=EXAMPLE / "tiny_model",
        train=data,
        heldout=data,
        tools=tools(folder),
        reward=EXAMPLE / "reward.py",
        run_dir=folder,
        steps=1,
        seed=1,
    )
    entries(folder)
    more = [
        f"data.train_batch_size={PROMPTS}",
        "data.shuffle=False",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.rollout.max_model_len={CONTEXT_TOKENS}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2",
        "trainer.save_freq=-1",
    ]
    environment = main_ppo_env(folder) | {
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VERL_USE_EXTERNAL_MODULES": "verl_hanging",
        "HANG_RECORD": str(folder / "record.jsonl"),
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *overrides, *more],
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
    rows = word_problems.rows(seed=1, count=PROMPTS, split="train")
    path = folder / "train.parquet"
    word_problems.write(rows, path)
    table = pyarrow.parquet.read_table(path)
    names = pyarrow.array(["sglang_multiturn", WITH_TOOL_DEADLINE])
    pyarrow.parquet.write_table(table.append_column("agent_name", names), path)
    return path


def tools(folder: Path) -> Path:
    document = yaml.safe_load((HERE.parents[1] / "tool_configs" / "calculator.yaml").read_text())
    document["tools"][0] |= {"class_name": "verl_hanging.SleepingCalculator", "execution": "process"}
    path = folder / "tools.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))  # the order is part of the prompt
    return path


def entries(folder: Path) -> None:
    """Two of our loop, in the file that the overrides name: with a deadline of the tool's own, and without one."""
    common = {"_target_": LOOP_CLASS, "journal_dir": str(folder / "journal"), "rollout_timeout_s": ROLLOUT_TIMEOUT_S}
    without = {"name": "sglang_multiturn", "tool_timeout_s": None}
    within = {"name": WITH_TOOL_DEADLINE, "tool_timeout_s": TOOL_TIMEOUT_S}
    (folder / "agent_loop.yaml").write_text(json.dumps([common | without, common | within]))


def test_the_step_goes_on(run: Run) -> None:
    assert [entry["step"] for entry in run.metrics] == [1]
    assert len(run.journal) == PROMPTS * SAMPLES
    for line in run.journal.values():
        line.check()


def test_a_hung_generation_is_ended_by_the_rollouts_deadline(run: Run) -> None:
    for prompt in range(PROMPTS):
        (line,) = run.of(HANG_IN_GENERATION, prompt=prompt)
        assert line.stop_reason is StopReason.TIMEOUT
        assert line.metrics.tool_calls == 0
        assert line.response_ids  # what it had sampled by then is kept
    ended = [line for line in run.record if line["event"] == "ended"]
    assert len(ended) == PROMPTS
    assert {line["why"] for line in ended} == {"abort"}


def test_a_tool_without_a_deadline_hangs_until_the_rollouts(run: Run) -> None:
    for line in run.of(*HANG_IN_TOOL, prompt=0):
        assert line.stop_reason is StopReason.TIMEOUT
        assert (line.metrics.tool_timeouts, line.metrics.lost_instances) == (0, 1)  # killed with its process


def test_a_tool_with_a_deadline_costs_its_conversation_no_more_than_that(run: Run) -> None:
    for line in run.of(*HANG_IN_TOOL, prompt=1):
        assert line.metrics.tool_timeouts > 0
        assert line.stop_reason is not StopReason.TIMEOUT


def test_conversations_that_do_not_hang_are_not_touched(run: Run) -> None:
    for prompt in range(PROMPTS):
        (line,) = run.of(0, prompt=prompt)
        assert line.stop_reason is not StopReason.TIMEOUT
        assert line.metrics.tool_timeouts == 0


def test_the_engine_was_idle_before_memory_was_released(run: Run) -> None:
    """`CpuServer.sleep` is idle or fails, as SGLang is; nothing of a conversation that had ended was in flight."""
    events = [line["event"] for line in run.record]
    after = run.record[max(i for i, event in enumerate(events) if event == "ended") + 1 :]
    assert [line for line in after if line["event"] == "idle"]
    assert all(line["in_flight"] == [] for line in after)
    assert "did not acknowledge its abort" not in run.log


def test_tools_left_nothing_over(run: Run) -> None:
    for line in run.journal.values():
        metrics = line.metrics
        assert metrics.tool_instances_created == metrics.tool_instances_released + metrics.lost_instances
    assert "tools hold more than they should" not in run.log
