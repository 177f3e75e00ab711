"""The files that say what is in flight: exact, whole, cheap to lose, and no danger to the run they tell of."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_multiturn import RolloutConfig, RolloutEngine, ScriptedEngine, ScriptedTurn, ToolRegistry
from sglang_multiturn.errors import DataError
from sglang_multiturn.request import AsyncRolloutRequest, RequestState, StopReason
from sglang_multiturn.run_folder.in_flight import (
    MAX_FILE_BYTES,
    ProcessMark,
    RunningRequest,
    Snapshot,
    bounded,
    picture_request,
)
from sglang_multiturn.run_folder.in_flight_writer import InFlightWriter

from support import TEMPLATE, HangingTool, RecordingTool, call, spec

THIS = ProcessMark.of_this()
TEXT = st.text(st.characters(exclude_categories=())) | st.sampled_from(
    ["\x1b[2J", "[red]", "\ud800", "x" * 5000, "\u202e"]
)
STATES = st.sampled_from(sorted(RequestState))
TIMES = st.floats(0, 4e9)
COUNTS = st.integers(0, 2**40)

PICTURES = st.builds(
    RunningRequest,
    request_id=TEXT.map(bounded),
    uid=TEXT.map(bounded),
    step=COUNTS,
    validate=st.booleans(),
    state=STATES,
    suspended_in=st.none() | STATES,
    suspended_since_s=st.none() | TIMES,
    turns=COUNTS,
    prompt_tokens=COUNTS,
    response_tokens=COUNTS,
    sampled_tokens=COUNTS,
    restarts=COUNTS,
    waiting_for=TEXT.map(bounded),
    waiting_since_s=TIMES,
    running_since_s=TIMES,
    tools_held=st.lists(TEXT.map(bounded), max_size=3).map(tuple),
)


def request(request_id: str = "r", waiting_for: str = "the engine", since_s: float = 1.0) -> AsyncRolloutRequest:
    made = AsyncRolloutRequest(spec(request_id))
    made.transition(RequestState.RUNNING)
    made.waiting_for, made.waiting_since_s = waiting_for, since_s
    return made


async def told(writer: InFlightWriter, condition: Callable[[Snapshot], bool]) -> Snapshot:
    """The first file that is so."""
    async with asyncio.timeout(60):
        while True:
            if writer.path.exists() and condition(snapshot := Snapshot.from_file(writer.path)):
                return snapshot
            await asyncio.sleep(0.01)


@given(st.lists(PICTURES, max_size=3), TEXT.map(bounded), TIMES)
@settings(max_examples=200, deadline=None)
def test_what_is_written_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, pictures: list[RunningRequest], name: str, at_s: float
) -> None:
    written = Snapshot(
        name=name,
        process=THIS,
        started_s=at_s,
        written_s=at_s,
        every_s=1.0,
        loop_stuck_since_s=at_s,
        loop_stuck_at=name,
        in_flight=len(pictures),
        states={picture.state: 1 for picture in pictures},
        requests=tuple(pictures),
    )
    path = tmp_path_factory.getbasetemp() / "in_flight-x-1.json"
    path.write_bytes(written.to_json())
    assert Snapshot.from_file(path) == written


@given(TEXT, TEXT, TEXT)
@settings(max_examples=200, deadline=None)
def test_whatever_a_request_is_called_it_is_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, request_id: str, uid: str, waiting_for: str
) -> None:
    running = AsyncRolloutRequest(spec(request_id, uid=uid))
    running.wait_for(waiting_for)
    picture = picture_request(running, running_since_s=1.0, suspended_since_s=None)
    assert max(map(len, (picture.request_id, picture.uid, picture.waiting_for))) <= 300
    written = Snapshot(
        name="x", process=THIS, started_s=1.0, written_s=2.0, every_s=1.0, in_flight=1, states={}, requests=(picture,)
    )
    path = tmp_path_factory.getbasetemp() / "in_flight-x-2.json"
    path.write_bytes(written.to_json())
    assert Snapshot.from_file(path).requests == (picture,)


async def test_a_conversation_in_its_tool_is_pictured_exactly(tmp_path: Path) -> None:
    tool = HangingTool()
    engine = ScriptedEngine.playing(TEMPLATE, {"r": [call("echo"), "done"]})
    async with _rollouts(engine, tool) as rollouts:
        before_s = time.time()
        with InFlightWriter(tmp_path, "rollout", rollouts.in_flight, every_s=0.01) as writer:
            running = asyncio.create_task(rollouts.run_all([spec("r", uid="u", step=7, validate=True)]))
            await tool.started.wait()
            snapshot = await told(writer, lambda seen: seen.states == {RequestState.TOOL_CALLING: 1})
            (live,) = rollouts.in_flight()
            (picture,) = snapshot.requests
            assert picture == RunningRequest(
                request_id="r",
                uid="u",
                step=7,
                validate=True,
                state=RequestState.TOOL_CALLING,
                suspended_in=None,
                suspended_since_s=None,
                turns=1,
                prompt_tokens=live.ledger.num_prompt_tokens,
                response_tokens=len(TEMPLATE.encode_text(call("echo"))) + 1,
                sampled_tokens=len(TEMPLATE.encode_text(call("echo"))) + 1,
                restarts=0,
                waiting_for="tool echo",
                waiting_since_s=live.waiting_since_s,
                running_since_s=picture.running_since_s,
                tools_held=("echo",),
            )
            assert before_s <= picture.running_since_s <= picture.waiting_since_s + 0.01 <= time.time() + 0.01
            assert snapshot.process == THIS
            assert (snapshot.name, snapshot.in_flight, snapshot.loop_stuck_since_s) == ("rollout", 1, None)
            rollouts.abort_all()
            (trajectory,) = await running
            assert trajectory.stop_reason is StopReason.ABORTED
            assert (await told(writer, lambda seen: not seen.in_flight)).requests == ()
        assert os.listdir(tmp_path) == []


async def test_a_suspended_conversation_says_where_it_was_and_since_when(tmp_path: Path) -> None:
    engine = ScriptedEngine(TEMPLATE, lambda *_: ScriptedTurn(text="abc", hang_after=2))
    async with _rollouts(engine, RecordingTool()) as rollouts:
        with InFlightWriter(tmp_path, "rollout", rollouts.in_flight, every_s=0.01) as writer:
            running = asyncio.create_task(rollouts.run_all([spec("r")]))
            await engine.wait_until_started("r")
            before_s = time.time()
            await rollouts.suspend()
            (picture,) = (await told(writer, lambda seen: seen.states == {RequestState.SUSPENDED: 1})).requests
            assert (picture.state, picture.suspended_in) == (RequestState.SUSPENDED, RequestState.RUNNING)
            assert (picture.turns, picture.sampled_tokens) == (1, 2)
            assert picture.suspended_since_s is not None
            assert before_s <= picture.suspended_since_s <= time.time()
            rollouts.resume()
            await running


async def test_a_loop_that_a_tool_holds_up_is_told_of_and_where_it_stands(tmp_path: Path) -> None:
    seen: list[Snapshot] = []

    class Blocking(RecordingTool):
        async def answer(self, parameters: dict[str, Any]) -> Any:
            until_s = time.monotonic() + 60
            while time.monotonic() < until_s:  # nothing else moves on this event loop meanwhile
                snapshot = Snapshot.from_file(writer.path)
                if snapshot.loop_stuck_since_s is not None and snapshot.states == {RequestState.TOOL_CALLING: 1}:
                    seen.append(snapshot)
                    break
            return "served", 0.0, {}

    engine = ScriptedEngine.playing(TEMPLATE, {"r": [call("echo"), "done"]})
    async with _rollouts(engine, Blocking()) as rollouts:
        with InFlightWriter(tmp_path, "rollout", rollouts.in_flight, every_s=0.01) as writer:
            await told(writer, lambda seen: True)
            began_s = time.time()
            await rollouts.run_all([spec("r")])
    (snapshot,) = seen
    assert snapshot.loop_stuck_since_s is not None
    assert began_s <= snapshot.loop_stuck_since_s <= snapshot.written_s
    assert "tests/test_status_files.py:" in snapshot.loop_stuck_at
    assert "answer" in snapshot.loop_stuck_at
    assert snapshot.requests[0].waiting_for == "tool echo"


async def test_of_very_many_the_oldest_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    running = [request(f"r{i}", since_s=100.0 - i) for i in range(50)]
    with InFlightWriter(tmp_path, "worker", lambda: running, every_s=0.01, most_requests=3) as writer:
        snapshot = await told(writer, lambda seen: True)
    assert [one.request_id for one in snapshot.requests] == ["r49", "r48", "r47"]
    assert (snapshot.in_flight, snapshot.states) == (50, {RequestState.RUNNING: 50})


async def test_one_that_has_ended_is_not_in_flight(tmp_path: Path) -> None:
    ended, running = request("ended"), request("running")
    ended.finish(StopReason.ANSWERED)
    with InFlightWriter(tmp_path, "worker", lambda: [ended, running], every_s=0.01) as writer:
        snapshot = await told(writer, lambda seen: True)
    assert [one.request_id for one in snapshot.requests] == ["running"]


async def test_nothing_is_written_while_nothing_runs(tmp_path: Path) -> None:
    looks = threading.Semaphore(0)

    def nobody() -> Iterable[AsyncRolloutRequest]:
        looks.release()
        return []

    with InFlightWriter(tmp_path, "worker", nobody, every_s=0.001) as writer:
        first = await told(writer, lambda seen: True)
        for _ in range(20):
            await asyncio.to_thread(looks.acquire)
        assert Snapshot.from_file(writer.path) == first
    assert first.in_flight == 0


async def test_a_folder_that_cannot_be_written_to_is_told_of_once_and_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    looks = threading.Semaphore(0)

    def one() -> Iterable[AsyncRolloutRequest]:
        looks.release()
        return [request()]

    with caplog.at_level(logging.WARNING), InFlightWriter(tmp_path / "file" / "run", "worker", one, every_s=0.001):
        for _ in range(20):
            await asyncio.to_thread(looks.acquire)
    (record,) = caplog.records
    assert "what is in flight cannot be written to" in record.getMessage()
    assert "NotADirectoryError" in record.getMessage()


async def test_a_disk_that_is_full_for_a_while_costs_the_files_of_that_while(tmp_path: Path) -> None:
    running = [request("r0")]
    with InFlightWriter(tmp_path, "worker", lambda: running, every_s=0.01) as writer:
        await told(writer, lambda seen: seen.in_flight == 1)
        temporary = writer.path.with_name(f".{writer.path.name}.tmp")
        while True:  # as a write that fails: a folder of that name; the thread may be using it at this moment
            try:
                temporary.mkdir()
                break
            except FileExistsError:
                await asyncio.sleep(0)
        running.append(request("r1"))
        kept = Snapshot.from_file(writer.path)
        assert kept.in_flight == 1
        temporary.rmdir()
        assert (await told(writer, lambda seen: seen.in_flight == 2)).in_flight == 2


async def test_what_changes_while_it_is_looked_at_is_looked_at_again(tmp_path: Path) -> None:
    looks = 0

    def changing() -> Iterable[AsyncRolloutRequest]:
        nonlocal looks
        looks += 1
        if looks < 5:
            raise RuntimeError("Set changed size during iteration")
        return [request()]

    with InFlightWriter(tmp_path, "worker", changing, every_s=60.0) as writer:
        assert (await told(writer, lambda seen: True)).in_flight == 1
    assert looks == 5


async def test_two_writers_of_a_process_have_files_of_their_own(tmp_path: Path) -> None:
    with (
        InFlightWriter(tmp_path, "a", lambda: [request("a")], every_s=0.01) as one,
        InFlightWriter(tmp_path, "b", lambda: [request("b")], every_s=0.01) as other,
    ):
        assert one.path != other.path
        assert (await told(one, lambda seen: True)).name == "a"
        assert (await told(other, lambda seen: True)).name == "b"
    one.close()  # a second time


def test_one_that_was_never_started_can_be_closed(tmp_path: Path) -> None:
    InFlightWriter(tmp_path, "worker", list).close()
    assert list(tmp_path.iterdir()) == []


def test_a_process_is_known_by_its_start_and_not_by_its_pid_alone() -> None:
    assert THIS.is_alive()
    assert THIS.start_ticks is not None
    assert dataclasses.replace(THIS, start_ticks=THIS.start_ticks + 1).is_alive() is False
    assert dataclasses.replace(THIS, machine="another").is_alive() is None
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        other = dataclasses.replace(THIS, pid=child.pid, start_ticks=_start_ticks(child.pid))
        assert other.is_alive() is True
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # a zombie now
        assert other.is_alive() is False
    assert other.is_alive() is False


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"", "is no file that this version reads"),
        (b'{"version": 2}', "version: Input should be 1"),
        (b"[1]", "is no file that this version reads"),
        (b'{"version": 1, "name": "\\ud800"}', "is no file that this version reads"),
        (b" " * (MAX_FILE_BYTES + 1), "more than 64 MiB"),
    ],
)
def test_a_file_of_someone_else_is_refused(tmp_path: Path, text: bytes, said: str) -> None:
    path = tmp_path / "in_flight-x-1.json"
    path.write_bytes(text)
    with pytest.raises(DataError, match=said):
        Snapshot.from_file(path)


def _start_ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def _rollouts(engine: ScriptedEngine, tool: RecordingTool) -> RolloutEngine:
    config = RolloutConfig(tool_timeout_s=None)
    return RolloutEngine(engine, template=TEMPLATE, tools=ToolRegistry([tool]), config=config)
