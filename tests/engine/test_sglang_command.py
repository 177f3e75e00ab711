"""`sglang-multiturn rollout` on the real SGLang: a whole run, and two that are killed in the middle and resumed."""

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


QUESTIONS = 128
"""So many that a run is in the middle when three have ended, and begun again it is soon over."""


def test_a_run_that_lost_its_engine_says_so_and_goes_on_where_it_was(tmp_path: Path) -> None:
    running, engine = begun(tmp_path)
    engine.kill()
    _, said = running.communicate(timeout=120)
    said = " ".join(said.split())
    assert running.returncode == 1
    assert "finished rollouts: SGLang's process" in said
    assert "was killed by SIGKILL" in said
    assert "Traceback" not in said
    assert_resumed_loses_and_repeats_nothing(tmp_path / "out")


def test_a_run_that_is_killed_takes_its_engine_along_and_goes_on_where_it_was(tmp_path: Path) -> None:
    running, engine = begun(tmp_path)
    tree = [engine, *engine.children(recursive=True)]
    running.kill()
    running.communicate(timeout=120)
    _, alive = psutil.wait_procs(tree, timeout=60)
    assert alive == []
    assert_resumed_loses_and_repeats_nothing(tmp_path / "out")


def begun(tmp_path: Path) -> tuple[subprocess.Popen[str], psutil.Process]:
    """A run of which three conversations have ended, and its SGLang."""
    out = tmp_path / "out"
    out.mkdir()
    running = subprocess.Popen(command(tmp_path, QUESTIONS, "--max-concurrent", 4), stderr=subprocess.PIPE, text=True)
    for _ in watch(out, step=50):
        if len(complete_lines(out / "trajectories.jsonl")) >= 3:
            break
    (engine,) = [p for p in psutil.Process(running.pid).children() if "sglang_child" in " ".join(p.cmdline())]
    return running, engine


def assert_resumed_loses_and_repeats_nothing(out: Path) -> None:
    kept = complete_lines(out / "trajectories.jsonl")
    assert 3 <= len(kept) < QUESTIONS
    resume = [sys.executable, "-m", "sglang_multiturn", "rollout", "--resume", str(out)]
    done = subprocess.run(resume, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = complete_lines(out / "trajectories.jsonl")
    assert set(kept) <= set(lines)
    ended = [Trajectory.from_json(line) for line in lines]
    assert sorted(t.request_id for t in ended) == sorted(map(str, range(QUESTIONS)))
    for trajectory in ended:
        trajectory.check()
        assert trajectory.state is RequestState.COMPLETED


def complete_lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return text.split("\n")[:-1]
