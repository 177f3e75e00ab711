"""The demo's task: the same problems everywhere, solved rightly, and scored by the model's last statement."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import reward
import word_problems
from word_problems import PATTERNS, carry_out, draw, problems, rows

TRAIN_SHA256 = "8d873705964061f3e3a53c393f6367542e82c140e5ee9a7b9e37c5b557360a6f"
HELDOUT_SHA256 = "8ae08c3a799785d53ef0f84cc9a8af41816f994cd282ed429ab7cd11758fcd4c"


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def test_a_plan_is_carried_out_by_hand() -> None:
    # 12 pens at 3 dollars and 20 books at 7 dollars: 36 + 140 = 176.
    plan = ("a * b", "c * d", "r1 + r2")
    steps = carry_out(plan, {"a": 12, "b": 3, "c": 20, "d": 7})
    assert [(step.expression, step.result) for step in steps] == [("12*3", 36), ("20*7", 140), ("36+140", 176)]


def test_a_result_may_be_negative_and_go_on_as_an_operand() -> None:
    steps = carry_out(("a - b", "r1 * c"), {"a": 11, "b": 40, "c": 2})
    assert [(step.expression, step.result) for step in steps] == [("11-40", -29), ("-29*2", -58)]


def test_a_row_is_what_verl_and_the_calculator_expect() -> None:
    row = rows(word_problems.TRAIN_SEED, 1, "train")[0]
    question = "Ben fills 26 boxes with 74 books each, then loses 68 books. How many books are left?"
    assert row == {
        "data_source": "word_problems",
        "prompt": [
            {"role": "system", "content": word_problems.SYSTEM_PROMPT},
            {"role": "user", "content": question},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1856"},
        "extra_info": {
            "split": "train",
            "index": 0,
            "question": question,
            "answer": "26*74=1924\n1924-68=1856\nThe answer is 1856.",
            "need_tools_kwargs": True,
            "tools_kwargs": {"calculator": {"create_kwargs": {"ground_truth": "1856"}}},
        },
    }


def test_the_same_seed_makes_the_same_rows_and_another_seed_others() -> None:
    assert rows(5, 20, "train") == rows(5, 20, "train")
    assert rows(5, 20, "train")[:10] == rows(5, 10, "train")
    assert rows(5, 20, "train") != rows(6, 20, "train")


def test_the_datasets_are_the_published_ones() -> None:
    train, heldout = word_problems.demo_datasets()
    assert (len(train), len(heldout)) == (1024, 512)
    assert sha256(word_problems.to_jsonl(train)) == TRAIN_SHA256
    assert sha256(word_problems.to_jsonl(heldout)) == HELDOUT_SHA256


def test_no_held_out_question_is_trained_on() -> None:
    train, heldout = word_problems.demo_datasets()
    assert word_problems.questions(train).isdisjoint(word_problems.questions(heldout))


def test_a_held_out_question_that_is_trained_on_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_problems, "HELDOUT_SEED", word_problems.TRAIN_SEED)
    with pytest.raises(ValueError, match="512 held-out questions are training questions too, for example: "):
        word_problems.demo_datasets()


def test_every_pattern_is_drawn_and_nobody_loses_more_than_they_have() -> None:
    rng = random.Random(0)
    drawn = [draw(rng) for _ in range(600)]
    assert {problem.plan for problem in drawn} == {pattern.plan for pattern in PATTERNS}
    assert {len(problem.plan) for problem in drawn} == {2, 3}
    assert all(problem.answer >= 0 for problem in drawn)


def test_every_number_of_the_plan_stands_in_the_question() -> None:
    for _, problem in zip(range(300), problems(4), strict=False):
        named = {name for line in problem.plan for name in line.split() if name in problem.numbers}
        assert all(str(problem.numbers[name]) in problem.question for name in named)


def test_the_command_writes_three_files_that_read_back(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    script = word_problems.__file__
    assert script is not None
    subprocess.run([sys.executable, script, "--out", str(tmp_path / "new")], check=True, capture_output=True)
    train, heldout = word_problems.demo_datasets()
    assert parquet.read_table(tmp_path / "new" / "train.parquet").to_pylist() == train
    assert parquet.read_table(tmp_path / "new" / "heldout.parquet").to_pylist() == heldout
    sample = (tmp_path / "new" / "sample.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in sample] == heldout[:16]


def test_an_unknown_file_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\.csv: the suffix must be \.parquet or \.jsonl"):
        word_problems.write([], tmp_path / "rows.csv")


@pytest.mark.parametrize(
    ("said", "truth", "score"),
    [
        ("The answer is 42.", "42", 1.0),
        ("The answer is -7.", "-7", 1.0),
        ("The answer is 042.", "42", 1.0),
        ("The answer is 41. The answer is 42.", "42", 1.0),
        ("The answer is 42. The answer is 41.", "42", 0.0),
        ("The answer is 42", "42", 0.0),
        ("The answer is 42.5.", "42", 0.0),
        ("42.", "42", 0.0),
        ("The answer is N.", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_the_last_statement_decides(said: str, truth: str, score: float) -> None:
    assert reward.compute_score("word_problems", said, truth, extra_info={"index": 0}, other=None) == score
