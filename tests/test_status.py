"""`sglang-multiturn status`: what people and scripts see of runs in other processes, alive, stuck, or gone."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sglang_multiturn.errors import ConfigError
from sglang_multiturn.request import RequestState
from sglang_multiturn.run_folder.in_flight import ProcessMark, RunningRequest, Snapshot
from sglang_multiturn.status.reading import Condition, Status, StatusReader
from sglang_multiturn.status.view import duration, rendered, to_json

RUN = """
import asyncio, sys, time
from pathlib import Path
from sglang_multiturn import RolloutConfig, RolloutEngine, ScriptedEngine, ToolRegistry
from sglang_multiturn.run_folder.in_flight_writer import InFlightWriter
from support import TEMPLATE, HangingTool, RecordingTool, call, spec

folder, name, how, *ids = sys.argv[1:]

class Blocking(RecordingTool):
    async def answer(self, parameters):
        time.sleep(3600)

async def main():
    tool = Blocking() if how == "blocked" else HangingTool()
    engine = ScriptedEngine(TEMPLATE, lambda *_: call("echo") + call("echo") + call("nobody"))
    config = RolloutConfig(tool_timeout_s=None, rollout_timeout_s=None)
    async with RolloutEngine(engine, template=TEMPLATE, tools=ToolRegistry([tool]), config=config) as rollouts:
        with InFlightWriter(Path(folder), name, rollouts.in_flight, every_s=0.1):
            async with asyncio.TaskGroup() as group:
                group.create_task(rollouts.run_all([spec(i) for i in ids]))
                if how == "suspended":
                    await tool.started.wait()
                    await rollouts.suspend(ids[:1])

asyncio.run(main())
"""
HANGING_TOOL = """
import asyncio
from sglang_multiturn import BaseTool
from sglang_multiturn.schemas import FunctionSchema, ToolSchema

class Hanging(BaseTool):
    def __init__(self, config, tool_schema=None):
        super().__init__(config, ToolSchema(function=FunctionSchema(name="hang")))

    async def execute(self, instance_id, parameters, **kwargs):
        await asyncio.Event().wait()
"""
THIS = ProcessMark.of_this()
GONE = dataclasses.replace(THIS, host="node1", pid=7, start_ticks=1)
ELSEWHERE = dataclasses.replace(THIS, host="node2", pid=8, machine="another")


@contextmanager
def running(folder: Path, name: str, how: str, *ids: str) -> Iterator[subprocess.Popen[bytes]]:
    """A run in a process of its own, with a tool that hangs."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", RUN, str(folder), name, how, *ids], env=environment) as child:
        try:
            yield child
        finally:
            child.kill()


def until(run: Path, condition: Callable[[Status], bool]) -> Status:
    """What can be read once it is so."""
    for _ in range(1200):
        if run.is_dir() and any(run.rglob("in_flight-*.json")) and condition(status := StatusReader(run).read()):
            return status
        time.sleep(0.05)
    raise AssertionError("it did not come about")


def waiting(status: Status) -> list[str]:
    return [request.waiting_for for _, request in status.rows(Condition.RUNNING)]


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "sglang_multiturn", "status", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=120, env=os.environ | {"COLUMNS": "160"})


def columns(printed: str, request_id: str) -> list[str]:
    """The cells of a conversation's line."""
    (line,) = [line for line in printed.splitlines() if line.startswith(f"{request_id} ")]
    return [cell for cell in line.split("  ") if cell.strip()]


def picture(request_id: str = "r", **changes: Any) -> RunningRequest:
    given: dict[str, Any] = {
        "request_id": request_id, "uid": "u", "step": 0, "validate": False, "state": RequestState.TOOL_CALLING,
        "suspended_in": None, "suspended_since_s": None, "turns": 1, "prompt_tokens": 10, "response_tokens": 5,
        "sampled_tokens": 4, "restarts": 0, "waiting_for": "tool search", "waiting_since_s": 990.0,
        "running_since_s": 900.0, "tools_held": ("search",),
    }  # fmt: skip
    return RunningRequest(**given | changes)


def write(folder: Path, *pictures: RunningRequest, **changes: Any) -> None:
    """A file as a writer leaves it; by default at second 1000, by this process."""
    states = {state: sum(one.state is state for one in pictures) for state in RequestState}
    given: dict[str, Any] = {
        "name": "worker", "process": THIS, "started_s": 800.0, "written_s": 1000.0, "every_s": 1e12,
        "in_flight": len(pictures), "states": {s: n for s, n in states.items() if n}, "requests": pictures,
    }  # fmt: skip
    snapshot = Snapshot(**given | changes)
    folder.mkdir(parents=True, exist_ok=True)
    number = len(list(folder.glob("in_flight-*.json")))
    (folder / f"in_flight-x-{number}.json").write_bytes(snapshot.to_json())


def shown(status: Status, *, limit: int = 40, width: int = 160, terminal: bool = False) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False)
    console.print(rendered(status, limit=limit))
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


# Real processes


def test_a_hung_tool_is_named_from_another_process(tmp_path: Path) -> None:
    with running(tmp_path, "rollout", "hangs", "a-0", "a-1") as child:
        until(tmp_path, lambda status: waiting(status) == ["tool echo (2 of 3 calls)"] * 2)
        table = command(tmp_path)
        assert table.returncode == 0, table.stderr
        assert "2 in flight: 2 TOOL_CALLING; 0 finished" in table.stdout
        assert [cell.strip() for cell in columns(table.stdout, "a-0")[1:6]] == [
            "TOOL_CALLING", "1", "308", "177", "tool echo (2 of 3 calls)",
        ]  # fmt: skip
        assert "has not moved" not in table.stdout
        said = json.loads(command(tmp_path, "--json", "--limit", 1).stdout)
        assert (said["in_flight"], said["states"], said["finished"]) == (2, {"TOOL_CALLING": 2}, 0)
        assert [(w["condition"], w["pid"], w["in_flight"]) for w in said["workers"]] == [("running", child.pid, 2)]
        (row,) = said["requests"]
        assert (row["request"]["request_id"], row["request"]["tools_held"]) == ("a-0", ["echo"])
        assert 0 <= row["waiting_s"] <= row["age_s"]


def test_a_rollout_of_the_command_line_is_seen_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HANGING_TOOL)
    (tmp_path / "tools.yaml").write_text("tools: [{class_name: mine.Hanging, config: {}}]\n")
    (tmp_path / "rows.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n' * 2)
    line = [
        sys.executable, "-m", "sglang_multiturn", "rollout", "--engine", "scripted", "--tools", tmp_path / "tools.yaml",
        "--data", tmp_path / "rows.jsonl", "--out", tmp_path / "out",
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(line, env=environment, stderr=subprocess.PIPE) as child:
        try:
            status = until(tmp_path / "out", lambda status: waiting(status) == ["tool hang"] * 2)
            assert [worker.snapshot.name for worker in status.workers] == ["rollout"]
            child.send_signal(signal.SIGTERM)
            child.communicate(timeout=60)
        finally:
            child.kill()
    assert list((tmp_path / "out").glob("*in_flight*")) == []


def test_a_tool_that_holds_up_the_event_loop_is_seen_all_the_same(tmp_path: Path) -> None:
    with running(tmp_path, "rollout", "blocked", "a-0"):
        status = until(tmp_path, lambda status: any(worker.stuck_s is not None for worker in status.workers))
        assert waiting(status) == ["tool echo (2 of 3 calls)"]
        printed = " ".join(shown(status, width=400))
        assert "the event loop has not moved for " in printed
        assert "it stands at <string>:12 answer < " in printed


def test_a_suspended_conversation_is_shown_as_such(tmp_path: Path) -> None:
    with running(tmp_path, "rollout", "suspended", "a-0", "a-1"):
        status = until(tmp_path, lambda status: status.in_flight(Condition.RUNNING)[RequestState.SUSPENDED] == 1)
        lines = shown(until(tmp_path, lambda status: waiting(status) == ["tool echo (2 of 3 calls)"] * 2))
        assert any(line.startswith("a-0      SUSPENDED in TOOL_CALLING  ") for line in lines), lines
        assert status.in_flight(Condition.RUNNING).total() == 2


def test_after_kill_9_it_shows_what_was_in_flight(tmp_path: Path) -> None:
    with running(tmp_path, "rollout", "hangs", "a-0", "a-1") as child:
        until(tmp_path, lambda status: waiting(status) == ["tool echo (2 of 3 calls)"] * 2)
        child.send_signal(signal.SIGKILL)
        child.wait()
        done = command(tmp_path)
        assert done.returncode == 0
        assert done.stdout.startswith("nothing is in flight; 0 finished\n")
        assert f":{child.pid}: its process is gone. These 2 were in flight at " in done.stdout
        assert [cell.strip() for cell in columns(done.stdout, "a-1")[1:2]] == ["TOOL_CALLING"]


def test_workers_of_one_run_and_runs_of_one_folder_are_one_table(tmp_path: Path) -> None:
    with (
        running(tmp_path / "x", "worker", "hangs", "a") as one,
        running(tmp_path / "x", "worker", "hangs", "b"),
        running(tmp_path / "y", "worker", "hangs", "c") as other,
    ):
        status = until(tmp_path, lambda status: status.in_flight(Condition.RUNNING).total() == 3)
        assert {request.request_id for _, request in status.rows(Condition.RUNNING)} == {"a", "b", "c"}
        assert [folder.name for folder in status.folders] == ["x", "y"]
        one.kill()
        one.wait()
        status = until(tmp_path, lambda status: status.in_flight(Condition.GONE).total() == 1)
        lines = shown(status)
        assert lines[0] == "2 in flight in 2 folders: 2 TOOL_CALLING; 0 finished"
        (row,) = [line for line in lines if line.startswith("c ")]
        assert row.endswith(f"worker@{THIS.host}:{other.pid}")


def test_watching_goes_on_until_ctrl_c(tmp_path: Path) -> None:
    with running(tmp_path, "rollout", "hangs", "a-0"):
        until(tmp_path, lambda status: waiting(status) == ["tool echo (2 of 3 calls)"])
        ours, theirs = pty.openpty()
        line = [sys.executable, "-m", "sglang_multiturn", "status", str(tmp_path), "--watch"]
        with subprocess.Popen(line, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True) as watching:
            os.close(theirs)
            try:
                drawn = b""
                while drawn.count(b"1 in flight: 1 TOOL_CALLING") < 2:
                    drawn += os.read(ours, 1 << 16)
                watching.send_signal(signal.SIGINT)
                drawn += _rest(ours)
                assert watching.wait(60) == 0
            finally:
                watching.kill()
    assert b"Traceback" not in drawn


def _rest(terminal: int) -> bytes:
    read = b""
    try:
        while chunk := os.read(terminal, 1 << 16):
            read += chunk
    except OSError:  # the other end is closed
        pass
    finally:
        os.close(terminal)
    return read


def test_watching_as_json_writes_a_line_each_time(tmp_path: Path) -> None:
    write(tmp_path, picture())
    line = [sys.executable, "-m", "sglang_multiturn", "status", str(tmp_path), "--watch", "--json"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        try:
            assert [json.loads(watching.stdout.readline())["in_flight"] for _ in range(2)] == [1, 1]
            watching.send_signal(signal.SIGINT)
            watching.communicate(timeout=60)
            assert watching.returncode == 0
        finally:
            watching.kill()


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["none"], "none: there is no such folder", 1),
        (["."], "no run has written here, nor in folders below it. Give the --out folder", 1),
        (["."], "in verl set journal_dir", 1),
        (["full", "--watch"], "--watch draws on a terminal", 1),
        (["full", "--limit", "0"], "Invalid value for '--limit'", 2),
        ([], "Missing argument 'RUN'", 2),
    ],
)
def test_what_cannot_be_shown_is_one_message(tmp_path: Path, arguments: list[str], said: str, code: int) -> None:
    write(tmp_path / "full", picture())
    (tmp_path / "empty").mkdir()
    placed = [
        str(tmp_path / {".": "empty"}.get(one, one)) if one in ("none", ".", "full") else one for one in arguments
    ]
    done = command(*placed)
    assert done.returncode == code
    assert said in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_help_teaches() -> None:
    printed = " ".join(command("--help").stdout.split())
    assert "sglang-multiturn status runs/a --watch" in printed
    assert "journal_dir: runs/journal under rollout: in the tool YAML" in printed


# What is read


def test_a_file_of_a_machine_that_is_not_seen_from_here_is_judged_by_its_age(tmp_path: Path) -> None:
    now_s = time.time()
    write(tmp_path, picture("fresh"), process=ELSEWHERE, written_s=now_s, every_s=1.0)
    write(tmp_path, picture("stale"), process=ELSEWHERE, written_s=now_s - 100, every_s=1.0)
    write(tmp_path, process=ELSEWHERE, written_s=now_s - 100, every_s=1.0)  # idle, so it need not write
    assert [worker.condition for worker in StatusReader(tmp_path).read().workers] == [
        Condition.RUNNING,
        Condition.SILENT,
        Condition.RUNNING,
    ]
    assert any(
        line.startswith("worker@node2:8 has written nothing for 1 min 4")
        for line in shown(StatusReader(tmp_path).read())
    )


def test_what_earlier_processes_left_is_counted_once_another_run_goes_on_there(tmp_path: Path) -> None:
    write(tmp_path, picture("old"), process=GONE, written_s=500.0)
    write(tmp_path, process=GONE)  # it ended well enough: nothing was in flight
    (gone,) = StatusReader(tmp_path).read().workers
    assert [one.request_id for one in gone.snapshot.requests] == ["old"]
    write(tmp_path, picture("died"), process=GONE, started_s=900.0)
    write(tmp_path, picture("new"), started_s=800.0)
    status = StatusReader(tmp_path).read()
    assert [one.request_id for _, one in status.rows(Condition.GONE)] == ["died"]
    assert [one.request_id for _, one in status.rows(Condition.RUNNING)] == ["new"]
    assert status.earlier_files == 1
    assert "not shown: 1 left by processes of earlier runs" in shown(status)


def test_a_file_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    write(tmp_path, picture())
    (tmp_path / "in_flight-broken-1.json").write_text("{")
    os.mkfifo(tmp_path / "in_flight-pipe-1.json")
    (tmp_path / "in_flight-folder-1.json").mkdir()
    status = StatusReader(tmp_path).read()
    assert len(status.workers) == len(status.unreadable) == 1
    assert "in_flight-broken-1.json: is no file that this version reads" in status.unreadable[0]


def test_finished_ones_are_counted_from_the_journals_as_they_grow(tmp_path: Path) -> None:
    reader = StatusReader(tmp_path)
    (tmp_path / "trajectories.jsonl").write_text("{}\n{}\n{tor")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "worker-1.jsonl").write_text("{}\n")
    (tmp_path / "x" / "rows.jsonl").write_text("{}\n" * 100)
    assert reader.read().finished == 3
    with (tmp_path / "trajectories.jsonl").open("a") as journal:
        journal.write("n}\n{}\n")
    assert reader.read().finished == 5
    (tmp_path / "trajectories.jsonl").write_text("{}\n")
    assert reader.read().finished == 2
    assert shown(reader.read()) == ["nothing is in flight in 2 folders; 2 finished"]


def test_no_folder_is_searched_deeper_than_runs_lie(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b" / "c", picture())
    with pytest.raises(ConfigError, match="no run has written here"):
        StatusReader(tmp_path).read()
    assert len(StatusReader(tmp_path / "a").read().workers) == 1


# What is shown


def test_the_table(tmp_path: Path) -> None:
    write(
        tmp_path,
        picture("q2-s0-g5", step=5, waiting_for="the engine", state=RequestState.RUNNING, tools_held=()),
        picture("q1-s1-g5", step=5, running_since_s=300.0, waiting_since_s=874.8, tools_held=("search", "py", "py")),
        picture("q3-s0-g5", step=5, validate=True, running_since_s=999.0, waiting_since_s=999.5),
        picture(
            "q0-s0-g4", step=4, running_since_s=100.0, waiting_for="the engine", state=RequestState.SUSPENDED,
            suspended_in=RequestState.RUNNING, suspended_since_s=880.0,
        ),
    )  # fmt: skip
    (tmp_path / "worker-1.jsonl").write_text("{}\n" * 12)
    assert shown(StatusReader(tmp_path).read()) == [
        "4 in flight: 2 TOOL_CALLING, 1 RUNNING, 1 SUSPENDED; 12 finished",
        "waiting for: tool search (2), to be resumed (1), the engine (1)",
        "request    step  state                 turns  tokens  sampled  waiting for           for          age  holds",
        "q0-s0-g4      4  SUSPENDED in RUNNING      1      15        4  to be resumed  2 min 00 s  15 min 00 s  search",
        "q1-s1-g5      5  TOOL_CALLING              1      15        4  tool search    2 min 05 s  11 min 40 s  search, py ×2",
        "q2-s0-g5      5  RUNNING                   1      15        4  the engine         10.0 s   1 min 40 s",
        "q3-s0-g5  5 val  TOOL_CALLING              1      15        4  tool search         0.5 s        1.0 s  search",
    ]


def test_a_long_list_ends_with_how_many_there_are_more(tmp_path: Path) -> None:
    write(tmp_path, *(picture(f"r{i}", running_since_s=100.0 + i) for i in range(5)), in_flight=5000)
    lines = shown(StatusReader(tmp_path).read(), limit=2)
    assert [line.split()[0] for line in lines[-3:-1]] == ["r0", "r1"]
    assert lines[-1] == "and 4998 more, which began later"


def test_nothing_that_ids_or_tools_are_called_moves_a_cursor_or_is_markup(tmp_path: Path) -> None:
    hostile = "[red]a[/red]\x1b[2J\x1b]0;title\x07\r\n\u202egnp\x9b31m"
    write(
        tmp_path,
        picture(hostile, uid=hostile, waiting_for=hostile, tools_held=(hostile,)),
        picture("other", waiting_for="x"),
        name=hostile,
        loop_stuck_since_s=900.0,
        loop_stuck_at=hostile,
        process=dataclasses.replace(ELSEWHERE, host=hostile),
        every_s=1.0,  # long silent
    )
    status = StatusReader(tmp_path).read()
    lines = shown(status, width=1000)
    printed = "\n".join(lines)
    assert printed.isprintable() or set(printed) - {"\n"} == {c for c in printed if c.isprintable()}
    assert sum("[red]a[/red]\\x1b[2J\\x1b]0;title\\x07\\r\\n\\u202egnp\\x9b31m" in line for line in lines) == 4
    coloured = "\n".join(shown(status, width=1000, terminal=True))
    assert "\x1b[2J" not in coloured
    assert "\x07" not in coloured
    assert json.loads(to_json(status, limit=None))["requests"][0]["request"]["request_id"] == hostile


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (-3.0, "0.0 s"),
        (0.04, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (119.6, "2 min 00 s"),
        (3599.6, "1 h 00 min"),
        (90_061.0, "25 h 01 min"),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert duration(seconds) == said
