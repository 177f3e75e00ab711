"""The command as a user runs it: on the light parts, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_multiturn import read_trajectories
from sglang_multiturn.journal import JournalWriter, merge_journals

CALCULATOR = "tool_configs/calculator.yaml"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_multiturn", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def rows(tmp_path: Path, count: int = 3) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_dry_run_writes_trajectories_and_a_summary(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(
        "rollout", "--engine", "scripted", "--script", "calls:2", "--tools", CALCULATOR,
        "--data", rows(tmp_path), "--samples", 2, "--out", out,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    trajectories = list(read_trajectories(out / "trajectories.jsonl"))
    assert sorted(t.request_id for t in trajectories) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    for trajectory in trajectories:
        trajectory.check()
        assert trajectory.metrics.tool_calls == 2
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["rollouts"], summary["failed"], summary["tool_call_rate"]) == (6, 0, 1.0)
    assert summary["stop_reasons"] == {"answered": 6}
    assert "6 in " in done.stderr


def test_the_gsm8k_script_answers_with_what_the_calculator_replied(tmp_path: Path) -> None:
    solved = {
        "question": [{"role": "user", "content": "How much?"}],
        "answers": [
            ("He has 48/2 = <<48/2=24>>24, in all 48+24 = <<48+24=72>>72.\n#### 72", "72"),
            ("Half is 7/2 = <<7/2=3.5>>3.5, rounded up 4.\n#### 4", "4"),
            ("No steps.\n#### 1,000", "1000"),
        ],
    }
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(
            json.dumps(
                {
                    "prompt": solved["question"],
                    "reward_model": {"ground_truth": truth},
                    "extra_info": {"answer": answer},
                }
            )
            + "\n"
            for answer, truth in solved["answers"]
        )
    )
    done = run(
        "rollout", "--engine", "scripted", "--script", "gsm8k", "--reward", "gsm8k", "--tools", CALCULATOR,
        "--data", data, "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    finished = {t.request_id: t for t in read_trajectories(tmp_path / "out/trajectories.jsonl")}
    assert [finished[i].reward for i in "012"] == [1.0, 1.0, 1.0]
    assert [r.answer for r in finished["0"].tool_calls] == ["24", "72"]
    assert [finished[i].messages[-1].content for i in "012"] == ["#### 72", "#### 4", "#### 1,000"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--data": "none.jsonl"}, "data file 'none.jsonl' does not exist"),
        ({"--tools": "none.yaml"}, "none.yaml: cannot be read"),
        ({"--script": "cals:2"}, "script 'cals:2' is unknown; did you mean 'calls:4'?"),
        ({"--script": "mine.py:plan"}, "script file 'mine.py' does not exist"),
        ({"--reward": "gsm8"}, "reward 'gsm8' is no builtin and no .py file; did you mean 'gsm8k'?"),
        ({"--reward": "none.py"}, "reward file 'none.py' does not exist"),
        ({"--engine": "sglang"}, "--engine sglang needs --model"),
        ({"--model": "./no/such/model"}, "model folder './no/such/model' does not exist"),
        ({"--max-response-tokens": 0}, "command line: 'max_response_tokens'"),
    ],
)
def test_a_wrong_option_is_one_message_and_exit_code_1(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    options: dict[str, Any] = {
        "--engine": "scripted", "--data": rows(tmp_path), "--tools": CALCULATOR, "--out": tmp_path / "out",
    }  # fmt: skip
    done = run("rollout", *(part for option in (options | changes).items() for part in option))
    assert done.returncode == 1
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out/summary.json").exists()


def test_a_row_without_a_prompt_is_told_before_anything_runs(tmp_path: Path) -> None:
    data = rows(tmp_path)
    with data.open("a") as file:
        file.write('{"question": "what?"}\n')
    done = run("rollout", "--engine", "scripted", "--data", data, "--out", tmp_path / "out")
    assert done.returncode == 1
    assert "rows.jsonl:4: no prompt; a row needs 'prompt' or 'messages'" in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_a_weight_for_a_tool_nobody_configured_is_told_before_anything_runs(tmp_path: Path) -> None:
    tools = tmp_path / "tools.yaml"
    weights = "\nrollout: {step_rewards: sum, step_reward_weight: {calculater: 0.5}}\n"
    tools.write_text(Path(CALCULATOR).read_text() + weights)
    done = run("rollout", "--engine", "scripted", "--data", rows(tmp_path), "--tools", tools, "--out", tmp_path / "out")
    assert done.returncode == 1
    said = "step_reward_weight: tool 'calculater' is not configured; did you mean 'calculator'?"
    assert said in " ".join(done.stderr.split())
    assert not (tmp_path / "out").exists()


def test_what_an_earlier_run_left_is_not_overwritten(tmp_path: Path) -> None:
    options = ["--engine", "scripted", "--data", rows(tmp_path), "--out", tmp_path / "out"]
    assert run("rollout", *options).returncode == 0
    before = (tmp_path / "out/trajectories.jsonl").read_text()
    again = run("rollout", *options)
    assert again.returncode == 1
    assert "exists already" in again.stderr
    assert (tmp_path / "out/trajectories.jsonl").read_text() == before
    assert run("rollout", *options, "--overwrite").returncode == 0


def test_a_users_own_script_and_reward(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def plan(spec):\n    return [f'I am {spec.request_id}.']\n\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str)\n"
    )
    done = run(
        "rollout", "--engine", "scripted", "--script", f"{tmp_path}/mine.py:plan",
        "--reward", f"{tmp_path}/mine.py:score", "--data", rows(tmp_path, 1), "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (trajectory,) = read_trajectories(tmp_path / "out/trajectories.jsonl")
    assert trajectory.reward == len("I am 0.")


def test_a_shipped_tool_config_is_found_by_its_name(tmp_path: Path) -> None:
    options = ["--engine", "scripted", "--data", rows(tmp_path, 1), "--out", tmp_path / "out"]
    assert run("rollout", *options, "--tools", "calculator").returncode == 0
    (trajectory,) = read_trajectories(tmp_path / "out/trajectories.jsonl")
    assert trajectory.tool_calls[0].name == "calculator"


def test_help_teaches() -> None:
    shown = run("rollout", "--help").stdout
    assert "Try it without a model" in shown
    assert "--max-response-tokens" in shown


def test_journals_of_several_workers_become_one(tmp_path: Path) -> None:
    done = run("rollout", "--engine", "scripted", "--data", rows(tmp_path, 2), "--out", tmp_path / "out")
    assert done.returncode == 0
    trajectories = list(read_trajectories(tmp_path / "out/trajectories.jsonl"))
    for worker, trajectory in zip("ab", trajectories, strict=True):
        with JournalWriter(tmp_path / "journal" / f"worker-{worker}.jsonl") as journal:
            journal.write(trajectory)
    assert merge_journals(tmp_path / "journal", tmp_path / "merged.jsonl") == 2
    assert list(read_trajectories(tmp_path / "merged.jsonl")) == trajectories
