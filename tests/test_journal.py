"""Trajectories on disk: what a crash leaves of a file, who may write to it, and what readers make of several."""

from __future__ import annotations

import dataclasses
import json
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_multiturn import (
    ByteChatML,
    Message,
    RolloutEngine,
    ScriptedEngine,
    ScriptedTurn,
    ToolRegistry,
    Trajectory,
)
from sglang_multiturn.errors import ConfigError, DataError, EngineDiedError
from sglang_multiturn.journal import JournalWriter, RepeatedLines, journals_of, merge_journals, read_run
from sglang_multiturn.request import Disposition, RequestState, StopReason
from sglang_multiturn.run_folder.durable import LineFile, TornLine, replace_file, whole_lines
from sglang_multiturn.run_folder.marks import HeldInstance, Marks, read_marks

from support import RecordingTool, call, spec


def one(request_id: str = "a", **changes: Any) -> Trajectory:
    made = Trajectory(
        request_id=request_id, uid="u", sample_index=0, input_index=0, state=RequestState.COMPLETED,
        stop_reason=StopReason.ANSWERED, disposition=Disposition.TRAIN, segments=(), turns=(),
        messages=(Message(role="user", content="why?"),),
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def written(path: Path, *trajectories: Trajectory) -> Path:
    with JournalWriter(path) as journal:
        for trajectory in trajectories:
            journal.write(trajectory)
    return path


def ids(path: Path) -> list[str]:
    return [trajectory.request_id for trajectory in read_run(path)]


# Torn lines


def test_a_line_torn_at_any_byte_is_left_out_with_a_word_and_cut_off_before_the_next(tmp_path: Path) -> None:
    path = written(tmp_path / "trajectories.jsonl", one("a"), one("b"), one("é"))
    whole = path.read_bytes()
    last = whole[whole.rindex(b"\n", 0, -1) + 1 :]
    for left in range(len(last)):
        path.write_bytes(whole[: len(whole) - len(last) + left])
        remarks: list[Any] = []
        assert [trajectory.request_id for trajectory in read_run(path, say=remarks.append)] == ["a", "b"]
        assert remarks == ([TornLine(path=path, line=3, num_bytes=left)] if left else [])
        with JournalWriter(path) as journal:
            assert journal.torn == (remarks[0] if left else None)
            journal.write(one("é"))
        assert path.read_bytes() == whole


@pytest.mark.parametrize("tail", [b"\0" * 100, b'{"request_id": "x\0\0\0"}\n', b"\xff\xfe\n", b"{\n"])
def test_what_a_power_cut_leaves_is_a_torn_line(tmp_path: Path, tail: bytes) -> None:
    path = written(tmp_path / "trajectories.jsonl", one("a"))
    path.write_bytes(path.read_bytes() + tail)
    assert ids(path) == ["a"]
    assert ids(written(path, one("b"))) == ["a", "b"]


def test_a_file_that_is_one_torn_line_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    path.write_bytes(b'{"request_id": ')
    assert ids(path) == []
    with JournalWriter(path) as journal:
        assert journal.is_empty


def test_a_torn_line_that_is_longer_than_a_block_is_found(tmp_path: Path) -> None:
    path = written(tmp_path / "trajectories.jsonl", one("a"), one("b"))
    path.write_bytes(path.read_bytes() + b"x" * 200_000)
    with JournalWriter(path) as journal:
        assert journal.torn == TornLine(path=path, line=3, num_bytes=200_000)
    assert ids(path) == ["a", "b"]


def test_the_log_says_which_line_was_torn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "trajectories.jsonl", one("a"))
    path.write_bytes(path.read_bytes() + b"torn")
    assert ids(path) == ["a"]
    assert caplog.messages == [f"{path}:2: the last line is torn (4 bytes, no whole JSON)"]


@pytest.mark.parametrize("middle", [b'{"request_id": "b', b"", b"{}"])
def test_a_broken_line_in_the_middle_is_an_error_with_its_place(tmp_path: Path, middle: bytes) -> None:
    path = written(tmp_path / "trajectories.jsonl", one("a"), one("b"), one("c"))
    first, _, last = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([first, middle, last, b""]))
    with pytest.raises(DataError, match=r"trajectories\.jsonl:2: not a trajectory"):
        ids(path)


def test_json_that_is_no_trajectory_is_not_torn_but_an_error(tmp_path: Path) -> None:
    path = written(tmp_path / "trajectories.jsonl", one("a"))
    path.write_bytes(path.read_bytes() + b'{"question": "what?"}\n')
    with pytest.raises(DataError, match=r"trajectories\.jsonl:2"):
        ids(path)


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A disk that is full, for this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_line_that_a_full_disk_refuses_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    with JournalWriter(path) as journal:
        journal.write(one("a"))
        before = path.read_bytes()
        with files_of_at_most(len(before) + 10), pytest.raises(OSError, match="File too large"):
            journal.write(one("b"))
        assert path.read_bytes() == before
        assert journal.written == 1
        journal.write(one("c"))
    assert ids(path) == ["a", "c"]


def test_marks_that_a_full_disk_refuses_do_not_stop_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with JournalWriter(tmp_path / "trajectories.jsonl") as journal:
        with files_of_at_most(0):
            journal.begin("a")
            journal.begin("b")
        journal.write(one("a"))
    assert [message for message in caplog.messages if "what runs at a crash will not be known" in message] == [
        caplog.messages[0]
    ]


def test_a_closed_journal_takes_nothing(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "trajectories.jsonl", fsync=True)
    journal.close()
    journal.close()
    with pytest.raises(ValueError, match="is closed"):
        journal.write(one("a"))


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    replace_file(tmp_path / "new" / "run.json", "old\n")
    with files_of_at_most(2), pytest.raises(OSError, match="File too large"):
        replace_file(tmp_path / "new" / "run.json", "new\n")
    assert [(path.name, path.read_text()) for path in (tmp_path / "new").iterdir()] == [("run.json", "old\n")]


LINES = st.one_of(st.binary(max_size=12).filter(lambda line: b"\n" not in line), st.sampled_from([b"{}", b"[1, 2]"]))


@given(st.lists(LINES, max_size=6), LINES)
def test_whatever_stands_in_a_file_an_appended_line_stands_alone(lines: list[bytes], tail: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        path.write_bytes(b"".join(line + b"\n" for line in lines) + tail)
        file = LineFile(path)
        file.append('{"new": 1}')
        file.close()
        kept = lines if tail or not lines or is_json(lines[-1]) else lines[:-1]
        assert path.read_bytes() == b"".join(line + b"\n" for line in kept) + b'{"new": 1}\n'
        assert list(whole_lines(path))[-1] == (len(kept) + 1, b'{"new": 1}')


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


# Several files


def test_files_of_several_workers_are_one_run(tmp_path: Path) -> None:
    written(tmp_path / "worker-2-b.jsonl", one("c"), one("d"))
    written(tmp_path / "worker-1-a.jsonl", one("a"), one("b"))
    written(tmp_path / "validation-1-a.jsonl", one("v", validate=True))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert [path.name for path in journals_of(tmp_path)] == [
        "validation-1-a.jsonl", "worker-1-a.jsonl", "worker-2-b.jsonl",
    ]  # fmt: skip
    assert ids(tmp_path) == ["v", "a", "b", "c", "d"]
    assert merge_journals(tmp_path, tmp_path / "trajectories.jsonl") == 5
    assert ids(tmp_path / "trajectories.jsonl") == ["v", "a", "b", "c", "d"]
    assert merge_journals(tmp_path, tmp_path / "trajectories.jsonl") == 5


def test_trajectories_of_one_uid_are_told_apart(tmp_path: Path) -> None:
    written(
        tmp_path / "worker-1.jsonl",
        one("u-s0-g1", step=1), one("u-s1-g1", step=1, sample_index=1), one("u-s0-g2", step=2), one("u", step=1),
        one("u", step=2), one("u", step=2, validate=True),
    )  # fmt: skip
    assert len(ids(tmp_path)) == 6


def test_a_line_that_stands_twice_counts_once_and_is_reported(tmp_path: Path) -> None:
    written(tmp_path / "worker-1.jsonl", one("a", sample_index=1), one("b"))
    second = written(tmp_path / "worker-2.jsonl", one("c"), one("a", sample_index=2), one("b"))
    remarks: list[Any] = []
    read = list(read_run(tmp_path, say=remarks.append))
    assert [(t.request_id, t.sample_index) for t in read] == [("a", 1), ("b", 0), ("c", 0)]
    assert remarks == [RepeatedLines(path=second, count=2, line=2, request_id="a")]
    assert str(remarks[0]) == (
        f"{second}: 2 trajectories stand in this run twice and are left out here, the first of them a in line 2"
    )


@pytest.mark.parametrize("name", ["nothing", "."])
def test_a_folder_without_trajectories_is_said_to_be_one(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"does not exist|holds no trajectories"):
        ids(tmp_path / name)


def test_what_is_set_aside_can_be_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    with JournalWriter(path) as journal:
        for trajectory in (one("a"), one("b", state=RequestState.FAILED), one("c")):
            journal.write(trajectory)
        assert journal.set_aside(lambda t: t.state is RequestState.FAILED) == ["b"]
        assert ids(path) == ["a", "c"]
        journal.write(one("b"))
        assert journal.set_aside(lambda t: t.state is RequestState.FAILED) == []
    assert ids(path) == ["a", "c", "b"]
    assert ids(tmp_path / "trajectories.retried") == ["b"]


# One writer


def test_a_second_writer_of_this_process_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    with JournalWriter(path) as journal:
        journal.begin("a")
        assert len(read_marks(path.with_suffix(".marks"))) == 1  # which must not end the lock
        for _ in range(2):
            with pytest.raises(ConfigError, match=r"trajectories\.jsonl is being written by process \d+ on"):
                JournalWriter(path)
        journal.write(one("a"))
    assert ids(written(path, one("b"))) == ["a", "b"]


WRITER = """
import sys
from pathlib import Path
from sglang_multiturn.journal import JournalWriter
journal = JournalWriter(Path(sys.argv[1]))
journal.begin("a")
journal.marks.making("a", "search", "a")
print("open", flush=True)
sys.stdin.read()
"""


def test_another_process_is_refused_while_one_writes_and_has_it_when_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "open\n"
    with pytest.raises(ConfigError, match=f"is being written by process {writer.pid} on"):
        JournalWriter(path)
    writer.kill()
    writer.communicate()
    with JournalWriter(path) as journal:
        (earlier,) = journal.marks.earlier
        assert (earlier.pid, list(earlier.begun)) == (writer.pid, ["a"])
        assert list(earlier.held.values()) == [HeldInstance(request_id="a", tool="search", instance_id="a")]
        journal.begin("a")
        journal.write(one("a"))
    assert read_marks(path.with_suffix(".marks"))[0].pid == writer.pid  # nobody has released what it held


# Marks

REQUESTS = st.sampled_from(["r", "s"])
EVENTS = st.one_of(
    st.tuples(st.just("begun"), REQUESTS),
    st.tuples(st.just("ended"), REQUESTS),
    st.tuples(st.sampled_from(["making", "gone"]), REQUESTS, st.sampled_from("tu"), st.sampled_from("xy")),
    st.tuples(st.just("made"), REQUESTS, st.sampled_from("tu"), st.sampled_from("xy"), st.just("own id")),
)


@given(st.lists(EVENTS, max_size=20), st.floats(0, 1))
@example([("making", "r", "t", "x"), ("begun", "r"), ("begun", "r"), ("made", "r", "t", "x", "own id")], 0.2890625)
def test_after_a_crash_at_any_byte_the_marks_say_what_was_begun_and_held(events: list[Any], part: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trajectories.marks"
        marks = Marks(path)
        states = [(path.stat().st_size, (), {})]
        for kind, *what in events:
            getattr(marks, kind)(*what)
            begun, held = states[-1][1], dict(states[-1][2])
            if kind == "begun":
                begun = tuple(dict.fromkeys([*begun, *what]))
            elif kind == "gone":
                held.pop(tuple(what), None)
            elif kind in ("making", "made"):
                held[tuple(what[:3])] = what[-1]
            states.append((path.stat().st_size, begun, held))
        content = path.read_bytes()
        marks.close()
        killed_at = states[0][0] + int(part * (len(content) - states[0][0]))
        path.write_bytes(content[:killed_at])
        _, begun, held = [state for state in states if state[0] <= killed_at][-1]
        (read,) = read_marks(path)
        assert tuple(read.begun) == begun
        assert {key: instance.instance_id for key, instance in read.held.items()} == held


def test_marks_are_gone_when_nothing_is_open_and_stay_when_something_is(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.marks"
    marks = Marks(path)
    marks.begun("a")
    marks.making("a", "t", "a")
    marks.gone("a", "t", "a")
    marks.ended("a")
    marks.close()
    assert not path.exists()
    marks = Marks(path)
    marks.begun("a")
    marks.close()
    assert [list(attempt.begun) for attempt in read_marks(path)] == [["a"]]


def test_marks_of_a_long_run_are_cut_back_when_nothing_is_open(tmp_path: Path) -> None:
    marks = Marks(tmp_path / "trajectories.marks")
    most = 0
    for index in range(3000):
        for name in (f"{index}" + "x" * 1000, f"{index}"):
            marks.begun(name)
            marks.ended(name)
        most = max(most, (tmp_path / "trajectories.marks").stat().st_size)
    marks.begun("last")
    assert (1 << 19) < most <= (1 << 20)  # of three times as much
    assert list(read_marks(tmp_path / "trajectories.marks")[0].begun)[-1] == "last"
    marks.close()


# A run


class UnmadeTool(RecordingTool):
    async def create(self, instance_id: str | None = None, **kwargs: Any) -> str:
        raise RuntimeError("no")


async def test_a_run_marks_what_its_tools_hold(tmp_path: Path) -> None:
    template = ByteChatML()
    turns = {"a": [call("echo"), "done"], "b": [call("unmade"), "done"]}
    tools = ToolRegistry([RecordingTool(), UnmadeTool("unmade")])
    path = tmp_path / "trajectories.jsonl"
    with JournalWriter(path) as journal:
        async with RolloutEngine(
            ScriptedEngine.playing(template, turns), template=template, tools=tools, journal=journal
        ) as rollouts:
            await rollouts.run_all([spec("a"), spec("b")])
        marks = [json.loads(line) for line in path.with_suffix(".marks").read_text().splitlines()]
    told = [(mark["mark"], mark["request_id"], mark.get("tool")) for mark in marks[1:]]
    assert [mark for mark in told if mark[1] == "a"] == [
        ("begun", "a", None), ("making", "a", "echo"), ("gone", "a", "echo"),
    ]  # fmt: skip
    assert [mark for mark in told if mark[1] == "b"] == [
        ("begun", "b", None), ("making", "b", "unmade"), ("gone", "b", "unmade"),
    ]  # fmt: skip
    assert not path.with_suffix(".marks").exists()


async def test_what_ended_with_its_engine_has_not_ended(tmp_path: Path) -> None:
    template = ByteChatML()
    turns = {"a": ["done"], "b": [ScriptedTurn(error=EngineDiedError("gone"))]}
    path = tmp_path / "trajectories.jsonl"
    with JournalWriter(path) as journal:
        async with RolloutEngine(
            ScriptedEngine.playing(template, turns), template=template, journal=journal
        ) as rollouts:
            with pytest.raises(EngineDiedError, match="gone"):
                await rollouts.run_all([spec("a"), spec("b")])
    assert ids(path) == ["a"]
    assert [list(attempt.begun) for attempt in read_marks(path.with_suffix(".marks"))] == [["a", "b"]]
