"""GSM8K's rows, its reward, its tool config and the launch script that ties them together."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import prepare_gsm8k
import pytest
import yaml
from reward_gsm8k import compute_score

from sglang_multiturn.errors import DataError
from sglang_multiturn.tools.builtin.gsm8k import Gsm8kTool

REPOSITORY = Path(__file__).parents[2]
LAUNCH_SCRIPT = REPOSITORY / "examples" / "gsm8k_tool" / "train_qwen2_5_gsm8k.sh"
TOOL_CONFIG = REPOSITORY / "tool_configs" / "gsm8k.yaml"

TRAIN = [
    {"question": "Ana has 3 pens and buys 4. How many?", "answer": "She has 3+4=<<3+4=7>>7 pens.\n#### 7"},
    {
        "question": "A car costs $1,200 and a van twice that. The van?",
        "answer": "2*1200=<<2*1200=2400>>2400\n#### 2,400",
    },
    {"question": "It is 4 degrees and gets 9 colder. How warm is it?", "answer": "4-9=<<4-9=-5>>-5\n#### -5"},
]
TEST = [
    {"question": "Half of 5 is what?", "answer": "5/2=<<5/2=2.5>>2.5\n#### 2.5"},
    {"question": "One million and one?", "answer": "1,000,000+1=<<1000000+1=1000001>>1,000,001\n#### 1,000,001"},
]


def write_jsonl(path: Path, entries: list[Any]) -> None:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    """A folder in GSM8K's format: the real one where `GSM8K_DIR` names it, else five rows of our own."""
    if "GSM8K_DIR" in os.environ:
        return Path(os.environ["GSM8K_DIR"])
    write_jsonl(tmp_path / "train.jsonl", TRAIN)
    write_jsonl(tmp_path / "test.jsonl", TEST)
    return tmp_path


@pytest.mark.parametrize("tool", ["calc_gsm8k_reward", "calculator"])
def test_every_row_of_both_splits_has_a_number_as_its_truth(gsm8k: Path, tool: str) -> None:
    for split in ("train", "test"):
        made = prepare_gsm8k.rows(split, tool, gsm8k)
        lines = [line for line in (gsm8k / f"{split}.jsonl").read_text(encoding="utf-8").splitlines() if line.strip()]
        assert len(made) == len(lines)
        assert all(re.fullmatch(r"-?\d*\.?\d+", row["reward_model"]["ground_truth"]) for row in made)


def test_the_published_answer_of_every_row_earns_the_reward(gsm8k: Path) -> None:
    for row in prepare_gsm8k.rows("train", "calculator", gsm8k):
        answer, truth = row["extra_info"]["answer"], row["reward_model"]["ground_truth"]
        assert compute_score(row["data_source"], answer, truth) == 1.0


def test_a_row_is_what_verl_and_the_tool_expect(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", TRAIN)
    assert prepare_gsm8k.rows("train", "calc_gsm8k_reward", tmp_path)[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {"role": "system", "content": prepare_gsm8k.SYSTEM_PROMPTS["calc_gsm8k_reward"]},
            {"role": "user", "content": "A car costs $1,200 and a van twice that. The van?"},
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2400"},
        "extra_info": {
            "split": "train",
            "index": 1,
            "question": "A car costs $1,200 and a van twice that. The van?",
            "answer": "2*1200=<<2*1200=2400>>2400\n#### 2,400",
            "need_tools_kwargs": True,
            "tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "2400"}}},
        },
    }


@pytest.mark.parametrize("tool", sorted(prepare_gsm8k.SYSTEM_PROMPTS))
def test_the_system_prompt_names_the_tool_and_the_form_of_the_answer(tool: str) -> None:
    assert f"{tool} tool" in prepare_gsm8k.SYSTEM_PROMPTS[tool]
    assert "#### <answer>" in prepare_gsm8k.SYSTEM_PROMPTS[tool]


def test_a_limit_takes_the_first_rows(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", TRAIN)
    made = prepare_gsm8k.rows("train", "calculator", tmp_path, limit=2)
    assert [row["extra_info"]["question"] for row in made] == [entry["question"] for entry in TRAIN[:2]]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.jsonl: no such file; --local wants a folder with train\.jsonl and"):
        prepare_gsm8k.rows("train", "calculator", tmp_path)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"test\.jsonl: no rows"):
        prepare_gsm8k.rows("test", "calculator", tmp_path)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            {"question": "How many?"},
            r"train\.jsonl:2: answer is missing or not text; the row has the keys \['question'\]",
        ),
        ({"question": "How many?", "answer": 7}, r"train\.jsonl:2: answer is missing or not text"),
        ({"question": " ", "answer": "#### 7"}, r"train\.jsonl:2: question is missing or not text"),
        ({"question": "How many?", "answer": "Seven."}, r"train\.jsonl:2: the answer does not end in '#### <number>'"),
        ({"question": "How many?", "answer": "#### seven"}, r"train\.jsonl:2: the answer does not end in"),
        (["How many?", "#### 7"], r"train\.jsonl:2: expected an object with question and answer, got list"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, entry: Any, message: str) -> None:
    write_jsonl(tmp_path / "train.jsonl", [TRAIN[0], entry])
    with pytest.raises(DataError, match=message):
        prepare_gsm8k.rows("train", "calculator", tmp_path)


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("question,answer\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"train\.jsonl:1: not JSON"):
        prepare_gsm8k.rows("train", "calculator", tmp_path)


@pytest.mark.parametrize(
    ("said", "truth", "score"),
    [
        ("So it is #### 72", "72", 1.0),
        ("#### 72.", "72", 1.0),
        ("#### $1,234", "1234", 1.0),
        ("#### 2.50", "2.5", 1.0),
        ("#### -5", "-5", 1.0),
        ("#### 5", "-5", 0.0),
        ("First #### 71, no: #### 72", "72", 1.0),
        ("First #### 72, no: #### 71", "72", 0.0),
        ("The answer is 72", "72", 0.0),
        ("#### seventy-two", "72", 0.0),
        ("", "72", 0.0),
    ],
)
def test_the_number_after_the_last_mark_decides(said: str, truth: str, score: float) -> None:
    assert compute_score("openai/gsm8k", said, truth, extra_info={"index": 0}, reward_router_address=None) == score


def test_the_tool_config_shows_the_model_the_tools_own_schema() -> None:
    (tool,) = yaml.safe_load(TOOL_CONFIG.read_text(encoding="utf-8"))["tools"]
    assert tool["class_name"] == f"{Gsm8kTool.__module__}.{Gsm8kTool.__name__}"
    assert tool["config"] == {}
    assert tool["tool_schema"] == Gsm8kTool.default_schema().model_dump(exclude_unset=True) | {"type": "function"}


def test_every_key_of_the_tool_config_is_explained() -> None:
    lines = TOOL_CONFIG.read_text(encoding="utf-8").splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r"\s*(- )?\w+:", line)]
    explained_by_the_one_above = {"tools:", "properties:", "type:", "description:", "function:"}
    for number in keys:
        key = lines[number].strip().removeprefix("- ").split(" ")[0]
        assert key in explained_by_the_one_above or lines[number - 1].strip().startswith("#"), lines[number]


def launch_overrides(tmp_path: Path, *more: str) -> list[str]:
    """What the launch script hands to verl, read by putting a `python` that prints its arguments in its way."""
    for split in ("train", "test"):
        (tmp_path / f"{split}.parquet").touch()
    stand_in = tmp_path / "python"
    stand_in.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n', encoding="utf-8")
    stand_in.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": str(tmp_path)}
    command = ["bash", str(LAUNCH_SCRIPT), *more]
    printed = subprocess.run(command, cwd=REPOSITORY, env=environment, check=True, capture_output=True, text=True)
    module, *overrides = printed.stdout.splitlines()[1:]
    assert module == "verl.trainer.main_ppo"
    return overrides


def test_every_override_of_the_launch_script_is_a_key_verl_has(tmp_path: Path) -> None:
    pytest.importorskip("hydra")
    verl = importlib.util.find_spec("verl")
    if verl is None or not verl.submodule_search_locations:
        pytest.skip("verl is not installed")
    from hydra import compose, initialize_config_dir

    overrides = launch_overrides(tmp_path, "trainer.total_training_steps=7")
    config_dir = Path(verl.submodule_search_locations[0]) / "trainer" / "config"
    with initialize_config_dir(config_dir=str(config_dir), version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    rollout = config.actor_rollout_ref.rollout
    assert rollout.name == "sglang"
    assert rollout.agent.default_agent_loop == "sglang_multiturn"
    assert rollout.multi_turn.tool_config_path == str(TOOL_CONFIG)
    assert config.actor_rollout_ref.actor.strategy == "fsdp2"
    assert config.data.train_files == str(tmp_path / "train.parquet")
    assert Path(config.reward.custom_reward_function.path).is_file()
    assert config.trainer.total_training_steps == 7


def test_the_launch_script_says_which_file_is_missing(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "DATA": str(tmp_path)}
    command = ["bash", str(LAUNCH_SCRIPT)]
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, check=False, capture_output=True, text=True)
    assert run.returncode == 1
    assert f"{tmp_path}/train.parquet is missing" in run.stderr
