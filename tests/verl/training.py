"""`python -m verl.trainer.main_ppo` as published, on the CPU, and what it leaves behind: for the tests that run it."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from launch import main_ppo_env, training_metrics  # type: ignore[import-not-found]  # examples/gsm8k_tool

from sglang_multiturn.request import Disposition
from sglang_multiturn.trajectory import Trajectory, read_trajectories

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "gsm8k_tool"
TINY_MODEL = EXAMPLE / "tiny_model"
RECORDER = "trainer_recorder"
SCRIPTED = "scripted_sglang"
"""Modules for `train(modules=...)`."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one training run left behind."""

    v1: bool
    metrics: list[dict[str, float]]
    """What verl logged, one dict a step."""
    rows: list[dict[str, Any]]
    """As the trainer computed advantages of them, verl's own padding left out."""
    journal: dict[str, Trajectory]
    """By request_id, validation included."""
    log: str
    folder: Path

    def step(self, step: int) -> dict[str, float]:
        """What verl logged for a step; for 0 what validation before training said."""
        return next(logged for logged in self.metrics if logged["step"] == step)

    def training(self) -> dict[str, Trajectory]:
        """The journal without validation."""
        return {name: line for name, line in self.journal.items() if not line.validate}

    def by_uid(self, rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
        """Rows by their prompt's uid."""
        groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        for row in rows:
            groups[self.journal[row["request_id"]].uid].append(row)
        return dict(groups)


def train(
    folder: Path,
    overrides: Iterable[str],
    *,
    v1: bool,
    modules: Iterable[str] = (RECORDER,),
    entry_point: str = "verl.trainer.main_ppo",
    timeout_s: float = 1500,
) -> Run:
    """Run it with these Hydra overrides to its end, in a session of its own, and read what it wrote into `folder`.

    `modules` are imported in all processes of verl, from this folder.
    """
    environment = main_ppo_env(folder) | {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(EXAMPLE), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VERL_USE_EXTERNAL_MODULES": ",".join(modules),
        "TRAINER_RECORD": str(folder / "record.jsonl"),
        "RAY_prestart_worker_first_driver": "0",  # else sixteen Python processes start that nobody uses
    }
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", entry_point, *overrides],
            env=environment,
            cwd=folder,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=timeout_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, (folder / "log.txt").read_text(errors="replace")[-6000:]
    return read_run(folder, v1=v1)


def read_run(folder: Path, *, v1: bool) -> Run:
    """Metrics, recorded rows, journal and log of a run."""
    recorded = folder / "record.jsonl"
    rows = [json.loads(line) for line in recorded.read_text().splitlines()] if recorded.exists() else []
    journals = sorted((folder / "journal").glob("*.jsonl"))
    lines = [line for path in journals for line in read_trajectories(path)]
    assert len({line.request_id for line in lines}) == len(lines)
    return Run(
        v1=v1,
        metrics=training_metrics(folder),
        rows=[row for row in rows if not row["key"].startswith("pad")],
        journal={line.request_id: line for line in lines},
        log=(folder / "log.txt").read_text(errors="replace"),
        folder=folder,
    )


def assert_rows_are_the_journals(run: Run, *, with_logprobs: bool = True) -> int:
    """Every row that stands for a conversation holds its tokens and no others; how many there are."""
    checked = 0
    for row in run.rows:
        line = run.journal[row["request_id"]]
        if line.disposition is Disposition.DROP:
            continue
        own = [
            ledger
            for ledger in line.rows
            if ledger.prompt_ids == row["prompt"]
            and ledger.response_ids[: ledger.num_tokens_to_last_sampled] == row["response"]
        ]
        assert len(own) == 1, line.request_id
        end = own[0].num_tokens_to_last_sampled
        assert row["response_mask"] == line.mask_of(own[0])[:end]
        assert ("rollout_log_probs" in row) is with_logprobs
        if with_logprobs:
            assert own[0].response_logprobs is not None
            assert row["rollout_log_probs"] == pytest.approx(own[0].response_logprobs[:end], abs=1e-6)
        assert sum(row["token_level_scores"]) == pytest.approx(line.reward or 0.0)
        checked += 1
    return checked


def assert_stepped(run: Run, *, steps: int) -> list[dict[str, Any]]:
    """Each step's losses are numbers; what was logged of them."""
    trained = [logged for logged in run.metrics if "actor/pg_loss" in logged]
    assert [logged["step"] for logged in trained] == list(range(1, steps + 1))
    assert all(math.isfinite(logged["actor/pg_loss"]) for logged in trained)
    return trained


def assert_learned(run: Run, *, steps: int) -> None:
    """That, and some step moved the weights."""
    trained = assert_stepped(run, steps=steps)
    assert any(logged["actor/grad_norm"] > 0 for logged in trained)


COMPARED = ("critic/score/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/lr", "num_turns/mean")


def resumed_from(folder: Path, *, step: int) -> list[str]:
    """Overrides of a run that goes on from another one's checkpoint."""
    checkpoint = folder / "checkpoints" / f"global_step_{step}"
    assert (checkpoint / "actor").is_dir()
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]


def assert_same_step(uninterrupted: Run, resumed: Run, *, step: int) -> None:
    """The resumed run took this one step, as the uninterrupted one did: figures and rows."""
    assert [logged["step"] for logged in resumed.metrics if "actor/pg_loss" in logged] == [step]
    assert uninterrupted.step(step)["actor/grad_norm"] > 0
    for name in COMPARED:
        assert resumed.step(step)[name] == pytest.approx(uninterrupted.step(step)[name], rel=1e-4, abs=1e-6), name
    before, after = (_rows_of(run, step) for run in (uninterrupted, resumed))
    assert len(before) == len(after) == len(resumed.rows) > 0
    for one, other in zip(before, after, strict=True):
        for name in ("prompt", "response", "response_mask", "token_level_scores", "versions", "fields"):
            assert one[name] == other[name]
        for name in ("rollout_log_probs", "old_log_probs", "advantages"):
            assert one[name] == pytest.approx(other[name], abs=1e-4)


def _rows_of(run: Run, step: int) -> list[dict[str, Any]]:
    """In an order that does not depend on who came first."""
    rows = [row for row in run.rows if row["versions"] == [step - 1, step - 1]]
    return sorted(rows, key=lambda row: (row["prompt"], row["response"], row["response_mask"], row["advantages"]))
