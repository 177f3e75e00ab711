"""GSM8K through the rollout: the scripted engine makes every annotated step of a solution with the calculator.

With `GSM8K_DIR` naming a folder with GSM8K's own `test.jsonl`, every problem of it; else problems written here.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_multiturn import read_trajectories
from sglang_multiturn.dataset import read_rows
from sglang_multiturn.tools.builtin.calculator import evaluate

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "gsm8k_tool"
ANNOTATION = re.compile(r"<<([^<>=]+)=([^<>]*)>>")
WRITTEN = [
    ("A farm has 4 coops of 12 hens. How many hens?", "4*12=<<4*12=48>>48 hens.\n#### 48"),
    (
        "Half of $7 and 20% of $10?",
        "Half is 7/2=<<7/2=3.5>>3.5. Then 10*.2=<<10*.2=2>>2, so <<3.5+2=5.5>>5.5.\n#### 5.5",
    ),
    ("How many boxes of 8 for 54 pens?", "54/8=<<54/8=6.75>>6.75, so 7 boxes.\n#### 7"),
    ("What is one thousand?", "It is 1,000.\n#### 1,000"),
    ("Three friends pay $1,200 each.", "3*1200=$<<3*1200=3600>>3600.\n#### 3600"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if folder := os.environ.get("GSM8K_DIR"):
        return Path(folder)
    written = tmp_path_factory.mktemp("gsm8k")
    lines = "".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in WRITTEN)
    for split in ("train", "test"):
        (written / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return written


def test_every_problem_ends_with_the_right_answer(source: Path, tmp_path: Path) -> None:
    prepare = [EXAMPLE / "prepare_gsm8k.py", "--tool", "calculator", "--local", source, "--out", tmp_path]
    subprocess.run([sys.executable, *map(str, prepare)], check=True, capture_output=True)
    data = tmp_path / "test.parquet"
    options = ["--engine", "scripted", "--script", "gsm8k", "--reward", "gsm8k", "--tools", "calculator"]
    options += ["--max-response-tokens", "20000", "--data", str(data), "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "sglang_multiturn", "rollout", *options], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = [row for _, row in read_rows(data)]
    seen = 0
    for trajectory in read_trajectories(tmp_path / "out" / "trajectories.jsonl"):
        seen += 1
        trajectory.check()
        solution = rows[int(trajectory.request_id)]["extra_info"]["answer"]
        replies = [evaluate(call.answer.partition(" (exactly ")[0]) for call in trajectory.tool_calls]
        annotated = [evaluate(value) for _, value in ANNOTATION.findall(solution)]
        assert [float(reply) for reply in replies] == pytest.approx([float(value) for value in annotated])
        assert trajectory.reward == 1.0, (trajectory.request_id, trajectory.messages[-1])
    assert seen == len(rows)
