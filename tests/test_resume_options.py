"""`rollout --resume`: what it needs, what may differ from the run that was begun, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_multiturn import SglangMultiturnError
from sglang_multiturn.cli import app
from sglang_multiturn.errors import ConfigError
from sglang_multiturn.journal import read_run
from sglang_multiturn.run_folder.asked import Asked
from sglang_multiturn.run_folder.folder import RunFolder
from sglang_multiturn.standalone import prepare


def invoke(*arguments: object) -> str:
    """In this process; what it said. Raises what it raised."""
    result = CliRunner().invoke(app, ["rollout", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def ids(run: Path) -> list[str]:
    return sorted(trajectory.request_id for trajectory in read_run(run, say=pytest.fail))


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """A run that was asked, and had three of its six trajectories when it was killed."""
    rows = [{"messages": [{"role": "user", "content": f"question {i}"}]} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shutil.copyfile("tool_configs/calculator.yaml", tmp_path / "tools.yaml")
    (tmp_path / "mine.py").write_text(
        "def plan(spec):\n    return ['hello']\n\ndef score(*args, **kwargs):\n    return 1.0\n\nother = score\n"
    )
    invoke(
        "--engine", "scripted", "--script", tmp_path / "mine.py:plan", "--reward", tmp_path / "mine.py:score",
        "--tools", tmp_path / "tools.yaml", "--data", tmp_path / "rows.jsonl", "--samples", 2, "--temperature", 0.5,
        "--out", tmp_path / "run",
    )  # fmt: skip
    journal = tmp_path / "run" / "trajectories.jsonl"
    journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:3]))
    (tmp_path / "run" / "summary.json").unlink()
    return tmp_path / "run"


def test_nothing_but_the_folder_is_needed(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert f"{begun}: 3 of 6 are done, resuming" in invoke("--resume", begun)
    assert ids(begun) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    asked = json.loads((begun / "run.json").read_text())
    assert [attempt["finished_before"] for attempt in asked["attempts"]] == [0, 3]
    assert all(attempt["wall_s"] is not None for attempt in asked["attempts"])
    assert json.loads((begun / "summary.json").read_text())["rollouts"] == 6


def test_a_run_that_is_complete_is_only_summed_up_again(begun: Path) -> None:
    invoke("--resume", begun)
    before = (begun / "trajectories.jsonl").read_bytes()
    (begun / "summary.json").unlink()
    assert "6 of 6 are done; nothing is left to do" in invoke("--resume", begun)
    assert (begun / "trajectories.jsonl").read_bytes() == before
    assert json.loads((begun / "summary.json").read_text())["rollouts"] == 6


@pytest.mark.parametrize(
    "options",
    [
        ["--max-concurrent", 1, "--journal-fsync"],
        ["--samples", 2, "--temperature", 0.5],
        ["--data", "{run}/../rows.jsonl", "--out", "{run}", "--reward", "{run}/../mine.py:score"],
    ],
)
def test_what_does_not_change_the_results_may_be_said(begun: Path, options: list[object]) -> None:
    invoke("--resume", begun, *(str(option).format(run=begun) for option in options))
    assert len(ids(begun)) == 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--samples", 1], "--samples 1 contradicts the run in RUN, which was asked with --samples 2"),
        (
            ["--temperature", 1.0],
            "--temperature 1.0 contradicts the run in RUN, which was asked with --temperature 0.5",
        ),
        (["--limit", 2], "--limit 2 contradicts the run in RUN, which was asked with no --limit"),
        (["--seed", 1], "--seed 1 contradicts the run in RUN, which was asked with --seed 0"),
        (["--script", "calls:1"], "--script calls:1 contradicts the run in RUN, which was asked with --script "),
        (["--reward", "gsm8k"], "contradicts the run in RUN, which was asked with --reward "),
        (["--reward", "{run}/../mine.py:other"], "mine.py:other contradicts the run in RUN"),
        (["--model", "Qwen/Qwen3-0.6B"], "--model Qwen/Qwen3-0.6B contradicts the run in RUN"),
        (["--tools", "gsm8k"], "gsm8k.yaml is not what the run was begun with"),
        (["--out", "elsewhere"], "--out elsewhere contradicts --resume RUN"),
        (["--overwrite"], "--overwrite contradicts --resume"),
    ],
)
def test_what_contradicts_the_run_is_refused_with_both_values(begun: Path, options: list[object], said: str) -> None:
    before = (begun / "trajectories.jsonl").read_bytes()
    with pytest.raises(ConfigError) as raised:
        invoke("--resume", begun, *(str(option).format(run=begun) for option in options))
    assert said.replace("RUN", str(begun)) in " ".join(str(raised.value).split())
    assert (begun / "trajectories.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("rows.jsonl", '{"messages": [{"role": "user", "content": "another"}]}\n', ["--data", "it was 174 bytes, sha256"]),
        ("mine.py", "\nx = 1\n", ["--reward", "or begin another run with another --out"]),
        ("tools.yaml", "rollout: {max_errors_in_a_row: 2}\n", ["there is a copy: RUN/tools.yaml",
                                                               "+rollout: {max_errors_in_a_row: 2}"]),
    ],
)  # fmt: skip
def test_a_file_that_has_changed_is_refused_and_one_that_was_moved_is_not(
    begun: Path, name: str, change: str, said: list[str]
) -> None:
    path = begun.parent / name
    before = path.read_text()
    path.write_text(before + change)
    with pytest.raises(ConfigError) as raised:
        invoke("--resume", begun)
    for words in [str(path), "is not what the run was begun with", *said]:
        assert words.replace("RUN", str(begun)) in str(raised.value)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read \\(No such file or directory\\); put it back"):
        invoke("--resume", begun)
    moved = begun.parent / f"moved_{name}"
    moved.write_text(before)
    option = {"rows.jsonl": ["--data", moved], "tools.yaml": ["--tools", moved],
              "mine.py": ["--script", f"{moved}:plan", "--reward", f"{moved}:score"]}[name]  # fmt: skip
    invoke("--resume", begun, *option)
    assert len(ids(begun)) == 6


def test_a_journal_of_other_rows_is_refused(begun: Path) -> None:
    journal = begun / "trajectories.jsonl"
    journal.write_text(journal.read_text().replace('"request_id":"0-0"', '"request_id":"0-9"'))
    with pytest.raises(SglangMultiturnError, match="rollout 0-9 is not asked by these rows"):
        invoke("--resume", begun)
    journal.write_text(journal.read_text().replace('"request_id":"0-9"', '"request_id":"1-0"'))
    with pytest.raises(SglangMultiturnError, match="rollout 1-0 was asked otherwise"):
        invoke("--resume", begun)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no run was begun there"),
        ("{", "it was written by another version of this package, or edited"),
        ('{"format": 2}', "'format': Input should be 1"),
    ],
)
def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match=said):
        invoke("--resume", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} <= {"run.json"}


def test_a_run_that_was_begun_is_named_where_its_folder_is_asked_for(begun: Path) -> None:
    options = ["--engine", "scripted", "--data", begun.parent / "rows.jsonl", "--out", begun]
    with pytest.raises(ConfigError, match=f"go on with that run with --resume {begun}"):
        invoke(*options)
    invoke(*options, "--overwrite")
    assert ids(begun) == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("options", "said"), [([], "--data and --out are needed, or --resume"), (["--retry-failed"], "goes with --resume")]
)
def test_options_that_are_missing_are_named(tmp_path: Path, options: list[str], said: str) -> None:
    paths = ["--data", tmp_path / "rows.jsonl", "--out", tmp_path / "run"] if options else []
    with pytest.raises(ConfigError, match=said):
        invoke(*paths, *options)


def test_versions_that_differ_are_named(begun: Path) -> None:
    asked = json.loads((begun / "run.json").read_text())
    asked["versions"] = asked["versions"] | {"sglang": "0.5.13"}
    (begun / "run.json").write_text(json.dumps(asked))
    assert "other versions than when the run began: sglang" in invoke("--resume", begun)


def test_each_process_of_a_run_has_an_engine_seed_of_its_own(begun: Path) -> None:
    """With one and the same, samples of a group that are asked after a crash could repeat those before it."""
    asked = Asked.read(begun)
    seeds = []
    for _ in range(3):
        with RunFolder.reopen(begun, asked) as folder:
            folder.take_stock(prepare(asked.options).specs)
            seeds.append(folder.engine_seed)
    assert len({asked.options.seed, *seeds}) == 4
