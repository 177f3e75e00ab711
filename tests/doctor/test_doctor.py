"""The doctor as a whole: the shipped examples are well, hostile input stays text, and nothing of the user's is executed."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from sglang_multiturn.cli import app
from sglang_multiturn.doctor.catalogue import CHECKS, GROUPS
from sglang_multiturn.doctor.examination import Examination, Prompt, examine
from sglang_multiturn.doctor.findings import Finding, isolated, problem, shorten
from sglang_multiturn.doctor.report import print_report, to_json, tokens_text
from sglang_multiturn.doctor.rows import read_sample
from sglang_multiturn.doctor.subject import Inputs
from sglang_multiturn.doctor.tokens_view import TokenView, printable

REPOSITORY = Path(__file__).parents[2]
GSM8K = [
    {"question": "Natalia sold clips to 48 friends, then half as many. How many?", "answer": "48/2 = <<48/2=24>>24, 72 in all.\n#### 72"},
    {"question": "Weng earns $12 an hour and worked 50 minutes. How much?", "answer": "12*50/60 = <<12*50/60=10>>10.\n#### 10"},
]  # fmt: skip
Doctor = Callable[..., Any]


# The shipped examples


def test_the_demos_launch_is_well(doctor: Doctor, tmp_path: Path) -> None:
    from launch import main_ppo_overrides
    from word_problems import demo_datasets, write

    for name, dataset in zip(("train", "heldout"), demo_datasets(), strict=True):
        write(dataset, tmp_path / f"{name}.parquet")
    overrides = main_ppo_overrides(
        model=REPOSITORY / "examples/gsm8k_tool/tiny_model",
        train=tmp_path / "train.parquet",
        heldout=tmp_path / "heldout.parquet",
        tools=REPOSITORY / "tool_configs/calculator.yaml",
        reward=REPOSITORY / "examples/gsm8k_tool/reward.py",
        run_dir=tmp_path,
        steps=30,
        seed=1,
    )
    report = doctor(*(part for override in overrides for part in ("--verl", f"'{override}'")))
    assert report.checks("problem") == []
    assert report.checks("note") == ["budget-tool-result"]  # true: 1,024 tokens of a result, 256 of a response
    assert report.exit_code == 0


@pytest.mark.parametrize("tool", ["calculator", "calc_gsm8k_reward"])
def test_the_gsm8k_launch_is_well(doctor: Doctor, tmp_path: Path, tool: str) -> None:
    from prepare_gsm8k import rows
    from word_problems import write

    from families import tokenizer

    (tmp_path / "source").mkdir()
    for split in ("train", "test"):
        lines = [{**row, "question": f"{row['question']} ({split})"} for row in GSM8K]
        (tmp_path / "source" / f"{split}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        write(rows(split, tool, tmp_path / "source"), tmp_path / f"{split}.parquet")
    model = tmp_path / "qwen2_5"
    tokenizer("qwen2_5").save_pretrained(model)
    (model / "generation_config.json").write_text('{"eos_token_id": [151645, 151643]}')
    (model / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "vocab_size": 151936, "max_position_embeddings": 32768})
    )
    tools = "calculator" if tool == "calculator" else "gsm8k"
    overrides = train_script_overrides(
        tmp_path, MODEL=str(model), DATA=str(tmp_path), TOOLS=str(REPOSITORY / "tool_configs" / f"{tools}.yaml")
    )
    report = doctor(*(part for override in overrides for part in ("--verl", f"'{override}'")))
    assert report.checks("problem") == []
    assert report.checks("note") == ["budget-tool-result"]  # true: a result and a response may both take 1,024 tokens
    assert "template-default-system" in report.checks("ok")  # every row has a system message, so no row meets it


def train_script_overrides(tmp_path: Path, **environment: str) -> list[str]:
    """What the script hands to verl: it is run with a `python` that only prints its arguments."""
    shim = tmp_path / "bin" / "python"
    shim.parent.mkdir()
    shim.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    shim.chmod(0o755)
    done = subprocess.run(
        ["bash", "examples/gsm8k_tool/train_qwen2_5_gsm8k.sh"],
        env={**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}", **environment},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    arguments = done.stdout.splitlines()
    assert arguments[:2] == ["-m", "verl.trainer.main_ppo"]
    return arguments[2:]


def test_shipped_tool_configs_are_found_by_name_and_are_well(
    doctor: Doctor, make_model: Callable[..., Path], healthy: Path
) -> None:
    model = make_model()
    for name in ("calculator", "gsm8k"):
        report = doctor("--model", model, "--tools", name)
        assert report.checks("problem") == []
        assert "tools-yaml" in report.checks("ok")


# What is shown


def test_the_prompt_and_the_conversation_are_shown_exactly(
    doctor: Doctor, make_model: Callable[..., Path], healthy: Path
) -> None:
    report = doctor("--model", make_model(), "--tools", healthy / "tools.yaml", "--data", healthy / "rows.jsonl")
    prompt = report.json["prompt"]
    assert prompt["place"] == f"{healthy / 'rows.jsonl'}:1"
    text = "".join(token["text"] for token in prompt["tokens"])
    assert text.endswith("<|im_start|>user\nWhat is 12*34?<|im_end|>\n<|im_start|>assistant\n")
    assert len(prompt["tokens"]) == prompt["num_tokens"]
    assert [t["text"] for t in prompt["tokens"] if t["control"]][-3:] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    played = report.json["conversation"]
    assert (played["stop_reason"], played["calls"]) == ("answered", ["calculator: ok", "calculator: ok"])
    origins = [(segment["origin"], segment["trained"]) for segment in played["segments"]]
    turn = [("sampled", True), ("boundary", False), ("tool", False), ("boundary", False)]
    assert origins == [("prompt", False), *turn, *turn, ("sampled", True)]
    assert played["segments"][1]["text"] == (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "text"}}\n</tool_call><|im_end|>'
    )
    assert sum(s["num_tokens"] for s in played["segments"] if s["trained"]) == played["trained_tokens"]


def test_another_row_is_shown_on_request(doctor: Doctor, make_model: Callable[..., Path], healthy: Path) -> None:
    report = doctor("--model", make_model(), "--data", healthy / "rows.jsonl", "--row", 1)
    assert "What is 7-9?" in "".join(token["text"] for token in report.json["prompt"]["tokens"])


def test_json_is_all_that_stands_on_stdout_though_a_users_module_prints(
    doctor: Doctor, make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, healthy: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "loud_tool.py").write_text('print("I am loud")\n' + ECHO)
    report = doctor("--model", make_model(), "--tools", echo_yaml(tmp_path, "loud_tool.Echo"))
    assert report.exit_code == 0


def test_a_terminal_without_colours_gets_marks_instead(make_model: Callable[..., Path], healthy: Path) -> None:
    options = ["--model", make_model(), "--tools", healthy / "tools.yaml", "--data", healthy / "rows.jsonl", "-v"]
    done = CliRunner().invoke(app, ["doctor", *map(str, options)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "\x1b" not in done.stdout
    assert "⟦<|im_start|>⟧·user·↵" in done.stdout
    assert "sampled, turn 0, trained, " in done.stdout
    assert "ok      tool 'calculator': everything its schema says stands in the prompt  [tools-shown]" in done.stdout
    assert re.search(r"0 problems, 0 notes, \d+ ok in [\d.]+ s", done.stdout)


def test_help_teaches() -> None:
    shown = CliRunner().invoke(app, ["doctor", "--help"]).stdout
    for word in (
        "--model",
        "--tools",
        "--data",
        "--verl",
        "--ray",
        "--run-tools",
        "--json",
        "exit code 1",
        "@overrides.txt",
    ):
        assert word in shown


def test_nothing_to_look_at_is_one_message() -> None:
    done = subprocess.run([sys.executable, "-m", "sglang_multiturn", "doctor"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "nothing to look at: give --model, --tools, --data or --verl" in done.stderr
    assert "Traceback" not in done.stderr


# The user's own code

ECHO = """
from pathlib import Path
from sglang_multiturn import BaseTool


class Echo(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        Path(__file__).with_name("executed").write_text(parameters["text"])
        return parameters["text"], 0.0, {}
"""


def echo_yaml(folder: Path, class_name: str) -> Path:
    text = {"type": "string", "description": "What to say."}
    function = {
        "name": "echo",
        "description": "Says it back.",
        "parameters": {"type": "object", "properties": {"text": text}, "required": ["text"]},
    }
    entry = {"class_name": class_name, "tool_schema": {"type": "function", "function": function}}
    path = folder / "echo.yaml"
    path.write_text(
        yaml.safe_dump({"tools": [entry], "rollout": {"max_response_tokens": 400, "max_tool_result_tokens": 100}})
    )
    return path


def test_tools_are_executed_only_on_request(
    doctor: Doctor, make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "quiet_tool.py").write_text(ECHO)
    model, tools = make_model(), echo_yaml(tmp_path, "quiet_tool.Echo")
    assert doctor("--model", model, "--tools", tools).exit_code == 0
    assert not (tmp_path / "executed").exists()
    report = doctor("--model", model, "--tools", tools, "--run-tools")
    assert report.exit_code == 0
    assert (tmp_path / "executed").read_text() == "text"
    heard = [segment["text"] for segment in report.json["conversation"]["segments"] if segment["origin"] == "tool"]
    assert heard == ["text", "text"]


def test_a_tool_that_raises_is_found_when_it_is_run(
    doctor: Doctor, make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_tool.py").write_text(ECHO.replace('Path(__file__).with_name("executed")', "self.path"))
    report = doctor("--model", make_model(), "--tools", echo_yaml(tmp_path, "broken_tool.Echo"), "--run-tools")
    assert report.checks("problem") == ["conversation-run"]
    assert "AttributeError" in report.of("problem")[0]["what"]


# Hostile input


def test_rows_are_neither_markup_nor_escape_sequences(make_model: Callable[..., Path], tmp_path: Path) -> None:
    said = "[bold red]x[/bold red] [/nothing] \x1b[31mred\x1b]0;title\x07 \u202egnihton \x00 end"
    (tmp_path / "rows.jsonl").write_text(
        json.dumps({"prompt": [{"role": "user", "content": said}], "agent_name": said}) + "\n"
    )
    result = examine(Inputs(model=str(make_model()), data=(tmp_path / "rows.jsonl",)))
    console = Console(record=True, width=4000, force_terminal=True, color_system="truecolor", file=io.StringIO())
    print_report(result, console, verbose=True)
    plain = console.export_text(styles=False)
    assert "[bold red]x[/bold red] [/nothing]" in plain
    assert not set(plain) & {"\x1b", "\x07", "\x00", "\u202e"}
    assert json.loads(to_json(result))["prompt"]["num_tokens"] == len(result.prompt.tokens)  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["\x1b[2J", "a\rb", "\u200b", "\ud800", "\u2066", "\x9b31m"])
def test_what_moves_a_cursor_is_written_as_an_escape(text: str) -> None:
    shown = printable(text)
    assert shown.isascii()
    assert "\\" in shown
    shown.encode()


def test_long_things_are_cut() -> None:
    finding = problem("data-row", "x" * 10_000, "Cut it.")
    assert len(finding.what) < 700
    assert "9,400 characters" in finding.what
    assert shorten("short") == "short"
    tokens = tuple(TokenView(id=1, text="word ", control=False) for _ in range(5000))
    console = Console(record=True, width=200, file=io.StringIO())
    print_report(Examination(prompt=Prompt(place="rows.jsonl:1", tokens=tokens)), console, verbose=False)
    shown = console.export_text()
    assert "4,400 tokens are not shown" in shown
    assert shown.count("word") == 600


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tools=st.one_of(st.binary(max_size=60), st.text(max_size=60).map(str.encode)),
    line=st.one_of(
        st.binary(max_size=60),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["prompt", "role", "content", "extra_info", "tools_kwargs", "x"]), inner, max_size=3),
            max_leaves=8,
        ).map(lambda value: json.dumps(value).encode()),
    ),
)  # fmt: skip
def test_whatever_the_files_hold_there_is_a_report(tools: bytes, line: bytes, tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_bytes(tools)
    (tmp_path / "rows.jsonl").write_bytes(line)
    result = examine(Inputs(tools=tmp_path / "tools.yaml", data=(tmp_path / "rows.jsonl",)))
    assert result.findings
    json.loads(to_json(result))


def test_a_check_that_raises_is_a_finding_and_the_others_go_on() -> None:
    def check() -> list[Finding]:
        raise RecursionError("too deep")

    (finding,) = isolated("data-row", check)
    assert (finding.check, finding.severity.value) == ("data-row", "problem")
    assert "RecursionError: too deep" in finding.what


# Sampling of rows


def test_many_rows_are_sampled_and_the_longest_is_among_them(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    contents = ["short"] * 5000
    contents[3217] = "long " * 50
    path.write_text("".join(json.dumps({"prompt": [{"role": "user", "content": text}]}) + "\n" for text in contents))
    sample, findings = read_sample([path], prompt_key=None, most=100)
    assert sample.total == 5000
    assert 50 <= len(sample.rows) <= 116
    assert 3217 in [row.index for row in sample.rows]
    assert [row.index for row in sample.rows] == sorted({row.index for row in sample.rows})
    assert [(f.check, f.severity.value) for f in findings] == [("data-sampled", "note")]


def test_a_few_rows_are_all_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "Hi"}\n' * 7)
    sample, _ = read_sample([path, path], prompt_key=None, most=14)
    assert [row.index for row in sample.rows] == list(range(14))
    assert sample.rows[7].place == f"{path}:1"


# The table of checks


def test_every_check_is_documented_and_belongs_to_a_group() -> None:
    page = (REPOSITORY / "docs/doctor.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", page, re.MULTILINE))
    assert table == dict(CHECKS)
    assert {check.partition("-")[0] for check in CHECKS} == set(GROUPS)


def test_every_check_that_is_made_stands_in_the_table() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in (REPOSITORY / "sglang_multiturn/doctor").glob("*.py"))
    named = set(re.findall(rf'"((?:{"|".join(GROUPS)})(?:-[a-z]+)+)"', source))
    assert named - {"template-traits"} == set(CHECKS)


# The progress line of `rollout`


def test_a_run_without_a_reward_function_shows_no_reward(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    command = [sys.executable, "-m", "sglang_multiturn", "rollout", "--engine", "scripted", "--data", data]
    done = subprocess.run([*command, "--out", tmp_path / "out"], capture_output=True, text=True, check=True)
    assert "turns 1.0 · failed 0" in done.stderr
    assert "nan" not in done.stderr


def test_edges_of_tokens_are_seen_by_their_background() -> None:
    tokens = [TokenView(id=i, text=text, control=text.startswith("<|")) for i, text in enumerate(["<|a|>", "b\n", "c"])]
    text = tokens_text(tokens, 10, colour=True, style="green")
    assert text.plain == "<|a|>b↵\nc"
    assert [str(span.style) for span in text.spans] == ["bold magenta on grey19", "green on grey27", "green on grey19"]
    assert tokens_text(tokens, 10, colour=False).plain == "⟦<|a|>⟧·b↵\nc·"
