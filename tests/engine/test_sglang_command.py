"""`sglang-multiturn rollout` on the real SGLang: a whole run, and one whose engine is killed in the middle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from engine.subjects import TINY_MODEL
from watchfiles import watch
from word_problems import HELDOUT_SEED, rows, to_jsonl

from sglang_multiturn import HFChatTemplate, Trajectory, read_trajectories
from sglang_multiturn.request import RequestState

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gsm8k_tool"


def command(tmp_path: Path, questions: int, *options: object) -> list[str]:
    data = tmp_path / "rows.jsonl"
    data.write_text(to_jsonl(rows(HELDOUT_SEED, questions, "heldout")), encoding="utf-8")
    arguments = [
        "rollout", "--model", TINY_MODEL, "--tools", "calculator", "--data", data, "--out", tmp_path / "out",
        "--reward", EXAMPLE / "reward.py", "--max-response-tokens", 256, *options,
    ]  # fmt: skip
    return [sys.executable, "-m", "sglang_multiturn", *map(str, arguments)]


def test_a_whole_run(tmp_path: Path) -> None:
    done = subprocess.run(command(tmp_path, 16, "--samples", 2), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "plain-torch ones stand in" in " ".join(done.stderr.split())
    trajectories = list(read_trajectories(tmp_path / "out" / "trajectories.jsonl"))
    assert {t.request_id for t in trajectories} == {f"{i}-{j}" for i in range(16) for j in range(2)}
    end_ids = HFChatTemplate.from_pretrained(TINY_MODEL).end_ids
    for trajectory in trajectories:
        trajectory.check(end_ids=end_ids)
        assert trajectory.state is RequestState.COMPLETED
        assert trajectory.reward in (0.0, 1.0)
    assert any(t.metrics.tool_calls for t in trajectories)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["rollouts"], summary["failed"]) == (32, 0)


def test_an_engine_killed_in_the_middle_is_told_and_loses_nothing_that_had_finished(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    running = subprocess.Popen(command(tmp_path, 512, "--max-concurrent", 4), stderr=subprocess.PIPE, text=True)
    for _ in watch(out, step=50):
        if len(complete_lines(out / "trajectories.jsonl")) >= 3:
            break
    (engine,) = [p for p in psutil.Process(running.pid).children() if "sglang_child" in " ".join(p.cmdline())]
    engine.kill()
    _, said = running.communicate(timeout=120)
    said = " ".join(said.split())
    assert running.returncode == 1
    assert "finished rollouts: SGLang's process" in said
    assert "was killed by SIGKILL" in said
    assert "Traceback" not in said
    kept = [Trajectory.from_json(line) for line in complete_lines(out / "trajectories.jsonl")]
    assert 3 <= len(kept) < 512
    assert len({t.request_id for t in kept}) == len(kept)
    for trajectory in kept:
        trajectory.check()
        assert trajectory.state is RequestState.COMPLETED


def complete_lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
